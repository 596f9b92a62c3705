"""What a layer reads before its turn, beside the rest of the model, and how attention gets hold of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from hisparse_kernels.miss_plan import HostSource

from .side_stream import beside


class Read(NamedTuple):
    """What a query reads.

    Attributes
    ----------
    selection : int ``[lanes, k]``
    slots : int32 ``[lanes, k]``
    source : HostSource or None
        Where attention is to read what is missing, None where nothing is.
    """

    selection: torch.Tensor
    slots: torch.Tensor
    source: HostSource | None = None


class _UnderWay(NamedTuple):
    """A `Read` on the side stream.

    Attributes
    ----------
    made_of : Any
        Its tensors must not be given back to the stream that they are of until `ready`.
    ready : torch.cuda.Event or None
        None on a CPU.
    """

    read: Read
    made_of: Any
    ready: torch.cuda.Event | None


class ReadsAhead:
    """A layer that may select and fetch for a captured step before its keys and values are there.

    Attributes
    ----------
    reads_ahead : bool
        Whether it is known that it would select the same in its turn.
    """

    reads_ahead = False
    position: torch.Tensor
    _expected: Any = None  # what tells whether it would, in the eager step before a capture
    _under_way: _UnderWay | None = None

    def expect_selection(self) -> None:
        """Let `what_was_read` know that this is the eager step before a capture."""
        self._expected = True

    def begin_ahead(self, read: Callable[[], Read], made_of: Any) -> None:
        """Call `read` beside what the model does now; its kernels read tensors in `made_of`.

        On a GPU only while a step is captured: nothing is said to the allocator of what the side stream uses.
        """
        device = self.position.device
        with beside(device) if device.type == "cuda" else nullcontext() as stream:
            begun = read()
            self._under_way = _UnderWay(begun, made_of, None if stream is None else stream.record_event())

    @property
    def under_way(self) -> Read | None:
        """What is being read ahead; to be used after `what_was_read`."""
        return None if self._under_way is None else self._under_way.read

    def what_was_read(self, read: Callable[[], Read]) -> Read | None:
        """What was read ahead; None if nothing was.

        In the eager step before a capture it is read now, by `read`, with the kernels that the capture launches: so they are
        compiled.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return read() if self.reads_ahead and self._expected is not None else None
        if under_way.ready is not None:
            torch.cuda.current_stream(self.position.device).wait_event(under_way.ready)
        return under_way.read

    def forget_ahead(self) -> None:
        """Expect and read nothing any more: the call is over, or broke off."""
        self._expected = self._under_way = None
