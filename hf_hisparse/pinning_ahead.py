"""Host memory pinned before it is needed, in a thread beside what the GPU computes."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import NamedTuple

import torch

from .host_memory import Backing

logger = logging.getLogger(__name__)

FEW_THREADS = 4  # to touch memory with: the other cores are for whoever decodes
ALL_THREADS = 16
# Bytes pinned at once: the driver may keep the kernels of others waiting meanwhile, and a layer that grows waits for a piece.
_PIECE = 2**27


class Wanted(NamedTuple):
    """What of a layer's addresses is to be pinned: the first `size` bytes."""

    backing: Backing
    size: int


class PinningAhead:
    """Pins memory of several layers in their order, in a thread that ends with the last of them.

    Nothing depends on it: a layer that grows takes what is there already, waits for the piece that is being pinned, and pins the
    rest by itself. So what goes wrong here goes wrong there again, where it can be said.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, wanted: list[Wanted], device: torch.device, threads: int) -> None:
        """Begin to pin, after what was begun before.

        Parameters
        ----------
        wanted : list of Wanted
            In the order in which they will be needed.
        device : torch.device
            That they serve.
        threads : int
            To touch memory with, at most.
        """
        wanted = [want for want in wanted if want.backing.pins and want.size > want.backing.size]
        if not wanted:
            return
        self.wait()
        # Neither the cache nor its areas: they may go at any time, and release what they had.
        thread = threading.Thread(target=_pin_all, args=(wanted, device, threads), name="hisparse-pinning")
        try:
            thread.start()
        except RuntimeError as error:
            _warn(error)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Wait for the end of what was begun."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _pin_all(wanted: list[Wanted], device: torch.device, threads: int) -> None:
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for backing, size in wanted:
                for stop in (*range(backing.size + _PIECE, size, _PIECE), size):
                    if threading.main_thread().is_alive():  # else the program is about to end
                        backing.extend(stop, threads)
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    logger.warning("HiSparse: host memory could not be pinned ahead, growth will try again: %s", error)
