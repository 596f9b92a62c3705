"""Host memory for the pools: how much there is, and an area that is pinned once and grows in place."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_PAGE, _HUGE_PAGE = 2**12, 2**21
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # missing from Python's mmap before 3.13
_REGISTER_PORTABLE_AND_MAPPED = 3
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TOUCHED_AT_ONCE = 2**26
_libc = ctypes.CDLL(None)
# Held while the driver pins, and while a CUDA graph is captured, which another thread's pinning would break.
pinning = threading.RLock()


def parse_bytes(size: int | str, name: str) -> int:
    """Read a size in bytes from a number or from text such as ``"6GiB"`` or ``"500 MB"``.

    Raises
    ------
    ValueError
        If `size` is not a positive size; the message names the setting `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit or float(match[1]) <= 0:
        raise ValueError(
            f"{name}={size!r} is not a size: give bytes as a positive number, or text such as '6GiB' or '500MB'"
        )
    return int(float(match[1]) * unit)


def format_bytes(size: float) -> str:
    """Write a size for people: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def whole_pages(size: int) -> int:
    """`size` rounded up to what a `PinnedArea` takes for it."""
    page = _HUGE_PAGE if size >= 8 * _HUGE_PAGE else _PAGE
    return -(-size // page) * page


def available_host_memory() -> int:
    """Bytes that this process may still take: what the system has free, or what its control group allows."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        reclaimable = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        used -= int(reclaimable[1]) if reclaimable else 0
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    return max(0, min(available, limit - used))


def touch(address: int, size: int, threads: int = 16) -> None:
    """Let the system back a range of addresses that was never written, on all cores, with at most so many threads.

    The driver does that itself when it pins, on one core, which is where most of the time goes.
    """
    starts = range(0, size, _TOUCHED_AT_ONCE)
    with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)), threads)) as pool:
        list(pool.map(lambda start: _touch(address + start, min(_TOUCHED_AT_ONCE, size - start)), starts))


def _touch(address: int, size: int) -> None:
    # Both let other threads run meanwhile.
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
        ctypes.memset(address, 0, size)


class Backing:
    """The part of an address range that is backed and pinned: it grows at its end, by one thread at a time.

    Parameters
    ----------
    memory : uint8 ``[bytes]``
        The range; it stays as long as a thread is at it.
    pin : bool

    Attributes
    ----------
    edges : list of int
        Borders of the pieces that were pinned, from 0 on.
    """

    def __init__(self, memory: torch.Tensor, pin: bool) -> None:
        self.pins = pin
        self.edges = [0]
        self._memory: torch.Tensor | None = memory
        self._address = memory.data_ptr()
        self._released = False
        self._turn = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes that can be used."""
        return self.edges[-1]

    def extend(self, size: int, threads: int = 16) -> None:
        """Make at least `size` bytes usable; nothing happens to what was released (MemoryError as `PinnedArea.grow`)."""
        try:
            with self._turn:
                held = self.size
                if size <= held or self._released:
                    return
                if self.pins:
                    touch(self._address + held, size - held, threads)
                    _pin(self._address + held, size - held)
                self.edges.append(size)
        finally:
            if self._released:
                self._unpin()

    def release(self) -> None:
        """Unpin everything, for good; a thread that is just extending it does that at its end.

        It does not wait for that thread: garbage collection may call it, in that very thread too.
        """
        self._released = True
        self._unpin()

    def _unpin(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        try:
            pieces, self.edges = self.edges[:-1], [0]
            if self.pins and pieces and torch.cuda.is_available():
                with pinning:
                    torch.cuda.synchronize()  # kernels in flight may still read the memory
                    for start in pieces:
                        torch.cuda.cudart().cudaHostUnregister(self._address + start)
            self._memory = None
        finally:
            self._turn.release()


def _pin(address: int, size: int) -> None:
    with pinning:
        status = torch.cuda.cudart().cudaHostRegister(address, size, _REGISTER_PORTABLE_AND_MAPPED)
    if int(status) != 0:
        _forget_error()
        raise MemoryError(
            f"the CUDA driver refused to pin {format_bytes(size)} of host memory (error {int(status)}; "
            f"{format_bytes(available_host_memory())} available): lower the batch or the context, or lift the "
            "limit on locked memory (ulimit -l, or the container's memlock)"
        )


def _forget_error() -> None:
    """The runtime keeps an error until somebody asks for it: torch would raise it from what it does next."""
    ask = getattr(torch.cuda.cudart(), "cudaGetLastError", None)  # not in every torch
    if ask is not None:
        ask()
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


class PinnedArea:
    """Host memory that grows in place: an address range reserved once, pinned piece by piece.

    Reserving takes addresses, not memory: a page costs memory when it is first written or pinned. Growth never
    moves what is already there, so addresses given to kernels and to CUDA graphs stay good.

    Parameters
    ----------
    reserve : int
        Bytes of address space, the most the area can ever hold.
    pin : bool
        Pin (page-lock and map) what is in use, so that GPU threads may read it. False on a machine without CUDA.
    """

    def __init__(self, reserve: int, pin: bool) -> None:
        self.reserved = whole_pages(reserve)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            area = mmap.mmap(-1, self.reserved, flags=flags)
        except OSError as error:
            raise MemoryError(
                f"could not reserve {format_bytes(self.reserved)} of addresses for one layer's host pool ({error}): "
                "lower host_memory, or lift the process's limit on address space (ulimit -v)"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to touch and to pin
        self.bytes = torch.frombuffer(area, dtype=torch.uint8)
        self.backing = Backing(self.bytes, pin)
        self._finalizer = weakref.finalize(self, self.backing.release)  # before the addresses are given back

    @property
    def size(self) -> int:
        """Bytes that can be used."""
        return self.backing.size

    def grow(self, size: int) -> None:
        """Make at least `size` bytes usable, zero where never written.

        Raises
        ------
        MemoryError
            If `size` exceeds the reservation or the driver refuses to pin; the area stays as it was.
        """
        size = whole_pages(size)
        if size <= self.size:
            return
        if size > self.reserved:
            raise MemoryError(
                f"a host pool of {format_bytes(size)} for one layer was asked, {format_bytes(self.reserved)} can be had: "
                "lower the batch or the context, or raise host_memory if the machine has more"
            )
        self.backing.extend(size)

    def close(self) -> None:
        """Unpin, and let go of the memory; nothing may use it any more."""
        self._finalizer()
        self.bytes = self.bytes[:0].clone()

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cut a byte range at the borders of pinned pieces: one copy may not span two."""
        cuts = [start, *(edge for edge in self.backing.edges if start < edge < stop), stop]
        return list(itertools.pairwise(cuts))


class ImaginedArea(PinnedArea):
    """An area of any size that takes nothing, for layers on the meta device."""

    def __init__(self) -> None:
        self.reserved = 2**60
        self.bytes = torch.empty(self.reserved, dtype=torch.uint8, device="meta")
        self.backing = Backing(self.bytes, pin=False)


def host_area(reserve: int, device: torch.device) -> PinnedArea:
    """The area for the host pool of a layer that attends on `device`, in `reserve` bytes of address space."""
    return ImaginedArea() if device.type == "meta" else PinnedArea(reserve, pin=device.type == "cuda")
