"""What a cache may take of host and device memory: asked before anything grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch

from .host_memory import available_host_memory, format_bytes, parse_bytes
from .models.family import Family
from .needs import CONTEXT_BYTES, activation_bytes
from .sizes import Buffers, Sizes, whole_records, with_room
from .stats import Memory


class HostLimit:
    """The most host memory that a cache may take: `size` bytes, None for what is available."""

    def __init__(self, size: int | str | None) -> None:
        self.size = None if size is None else parse_bytes(size, "host_memory")

    @property
    def reachable(self) -> int:
        """Bytes that a cache can hold at most."""
        return max(self.size or 0, available_host_memory())

    def left(self, held: Memory) -> int:
        """Bytes that a cache which holds so much may still take."""
        return available_host_memory() if self.size is None else self.size - held.host_reserved_bytes

    def check(self, asked: int, held: Memory, purpose: str) -> None:
        """Refuse `asked` bytes that are not left (MemoryError)."""
        left = max(0, self.left(held)) if asked > 0 else 0
        if asked <= left:
            return
        limit = "available" if self.size is None else f"left of host_memory={format_bytes(self.size)}"
        raise MemoryError(
            f"HiSparseCache: {purpose} need {format_bytes(asked)} more host memory, {format_bytes(left)} is {limit} "
            f"({format_bytes(held.host_reserved_bytes)} held already): lower the batch or the context, or raise host_memory "
            "if the machine has more"
        )


class Call(NamedTuple):
    """A call that makes a cache grow: `rows` new tokens in each of `batch` rows, of this type and on this device."""

    batch: int
    rows: int
    dtype: torch.dtype
    device: torch.device


class Growth(NamedTuple):
    """How far a cache grows: tokens that there is to be room for, and what its layers keep on the device."""

    capacity: int
    buffers: Buffers


def free_device_memory(device: torch.device) -> int:
    """Bytes that tensors may still take on a GPU, within this process's share (`torch.cuda.set_per_process_memory_fraction`)."""
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    reserved = torch.cuda.memory_reserved(device)
    return min(free, int(share * total) - reserved) + reserved - torch.cuda.memory_allocated(device)


class DeviceLimit:
    """The device memory that a cache may take, all of it: hot buffers, selector state, tables, and layers that stay there.

    Hot buffers get what the rest leaves, as long as there are records to put there: everything stays resident until the limit
    is reached, and when the rest grows beyond it, the buffers shrink, and at last dense layers go to the host (see
    `Sizes.largest_buffers`).

    Parameters
    ----------
    size : int or str
        Bytes; "auto" is what is free beside the activations of a call.
    sizes : Sizes
    prefill_memory : int
        What a model that selects by itself may take for that.
    may_host : bool
        Whether dense layers may go to the host.

    Raises
    ------
    ValueError
        If `size` is less than the smallest cache takes.
    """

    def __init__(self, size: int | str, sizes: Sizes, prefill_memory: int, may_host: bool = True) -> None:
        self.may_host = may_host
        self.size = None if size == "auto" else parse_bytes(size, "device_memory")
        self.sizes = sizes
        family = sizes.family
        selects = any(family.kv_shape(index, hosted=True).index_width for index in family.hosted)
        self.prefill_memory = prefill_memory if selects else 0
        least = sizes.smallest(1, whole_records(family, 1), may_host).device_bytes
        if self.size is not None and self.size < least:
            raise ValueError(
                f"device_memory={size!r} is too little: one row of {whole_records(family, 1)} tokens takes "
                f"{format_bytes(least)} ({least} bytes) with the smallest hot buffer, {family.top_k} records per lane"
            )

    def bytes(self, held: Memory, call: Call, total: int) -> int:
        """The limit for a cache that holds so much, in a call that brings it to `total` tokens."""
        if self.size is not None:
            return self.size
        if call.device.type != "cuda":
            return held.device_bytes + available_host_memory() // 2
        free = free_device_memory(call.device)
        activations = activation_bytes(
            self.sizes.config, call.batch, call.rows, total, call.dtype, self.prefill_memory
        )
        return held.device_bytes + free - (activations - CONTEXT_BYTES)  # the context is there already

    def buffers(self, held: Memory, call: Call, capacity: int, hosted: bool | None) -> Buffers | None:
        """What a cache with room for `capacity` tokens keeps on the device (see `Sizes.largest_buffers`)."""
        sizes = replace(self.sizes, dtype=call.dtype)
        return sizes.largest_buffers(call.batch, capacity, self.bytes(held, call, capacity), hosted)

    def refuse(self, held: Memory, call: Call, capacity: int, purpose: str) -> NoReturn:
        """Say what is missing for `capacity` tokens (MemoryError)."""
        least = replace(self.sizes, dtype=call.dtype).smallest(call.batch, capacity, self.may_host)
        name = "is free for the cache" if self.size is None else "is device_memory"
        raise MemoryError(
            f"HiSparseCache: {purpose} need at least {format_bytes(least.device_bytes)} of device memory, "
            f"{format_bytes(self.bytes(held, call, capacity))} {name}: {format_bytes(least.buffer_bytes)} hot buffers of "
            f"{self.sizes.family.top_k} records per lane, {format_bytes(least.selector_bytes)} selector state, "
            f"{format_bytes(least.native_bytes)} layers that stay there, {format_bytes(least.table_bytes)} tables: raise "
            "device_memory, or lower the batch or the context"
        )


@dataclass(frozen=True)
class Limits:
    """What decides how far a cache may grow.

    Attributes
    ----------
    host : HostLimit
    device : DeviceLimit or None
        None to let layers keep `buffers`, whatever else there is.
    family : Family
    buffers : Buffers
    """

    host: HostLimit
    device: DeviceLimit | None
    family: Family
    buffers: Buffers

    def growth(
        self,
        tokens: int,
        asked: Callable[[int, bool], int],
        held: Memory,
        call: Call,
        purpose: str,
        hosted: bool | None,
    ) -> Growth:
        """How far to grow for `tokens` tokens: with room for more while that can be had.

        Parameters
        ----------
        tokens : int
        asked : callable
            Host bytes that so many tokens take beyond what is held, dense layers on the host or not.
        held : Memory
        call : Call
        purpose : str
            What an error says they are for.
        hosted : bool or None
            Whether dense layers are on the host: True, False, or None to decide.

        Raises
        ------
        MemoryError
            If host or device have too little for the tokens themselves.
        """
        room, least = (whole_records(self.family, count) for count in (with_room(tokens), tokens))
        buffers = self._buffers(held, call, room, hosted)
        if buffers is not None and asked(room, buffers.dense is not None) <= self.host.left(held):
            return Growth(room, buffers)
        buffers = self.fitting(held, call, least, purpose, hosted)
        self.host.check(asked(least, buffers.dense is not None), held, purpose)
        return Growth(least, buffers)

    def fitting(self, held: Memory, call: Call, capacity: int, purpose: str, hosted: bool | None) -> Buffers:
        """What layers keep on the device with room for `capacity` tokens (MemoryError if it has too little)."""
        buffers = self._buffers(held, call, capacity, hosted)
        if buffers is None:
            assert self.device is not None
            self.device.refuse(held, call, capacity, purpose)
        return buffers

    def _buffers(self, held: Memory, call: Call, capacity: int, hosted: bool | None) -> Buffers | None:
        return self.buffers if self.device is None else self.device.buffers(held, call, capacity, hosted)

    def check_foreseen(
        self, layer_idx: int, widths: tuple[int, int, int], devices: set[torch.device]
    ) -> None:
        """A limit of device memory counts on what can be known beforehand.

        Parameters
        ----------
        layer_idx : int
        widths : tuple
            KV heads, key width and value width of the layer's first tokens.
        devices : set
            Of the layers so far.

        Raises
        ------
        ValueError
            If these are not the widths that the model's configuration gives, or free memory is asked of several devices.
        """
        if self.device is None:
            return
        foreseen = self.family.kv_shape(layer_idx, hosted=True)[:3]
        if widths != foreseen:
            raise ValueError(
                f"HiSparseCache, layer {layer_idx}: keys and values have (heads, key width, value width) {widths}, where the "
                f"model's configuration says {foreseen}, which device_memory counts on: give device_buffer_tokens instead"
            )
        if self.device.size is None and len(devices) > 1:
            raise ValueError(
                f"HiSparseCache: device_memory='auto' is for a model on one GPU, this one is on "
                f"{', '.join(sorted(map(str, devices)))}: give a size, for all of them together"
            )
