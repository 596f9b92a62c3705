"""What a layer reads before its turn, beside the rest of the model, and how attention gets hold of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from hisparse_kernels.miss_plan import HostSource

from .side_stream import beside

_T = TypeVar("_T")


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
    """What is being read on the side stream.

    Attributes
    ----------
    read : Any
        What is to be attention's.
    made_of : Any
        Holds the tensors that the side stream reads: until `ready` the stream that they are of must not get them back.
    ready : torch.cuda.Event or None
        None on a CPU.
    """

    read: Any
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
    _looked_at = False  # in the eager step before a capture, which finds that out
    _under_way: _UnderWay | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """How error messages call this layer."""

    def expect_selection(self) -> None:
        """This is the eager step before a capture, and what is selected was known ahead."""
        self._looked_at = True

    def begin_ahead(self, read: Callable[[], _T], made_of: Any) -> _T:
        """Call `read` beside what the model does now; its kernels read tensors in `made_of`.

        On a GPU only while a step is captured: nothing is said to the allocator of what the side stream uses.

        Raises
        ------
        RuntimeError
            If attention has not taken what was read before.
        """
        if self._under_way is not None:
            raise RuntimeError(f"{self.name}: its attention is called again before it has ended")
        device = self.position.device
        with beside(device) if device.type == "cuda" else nullcontext() as stream:
            begun = read()
            self._under_way = _UnderWay(begun, made_of, None if stream is None else stream.record_event())
        return begun

    @property
    def is_under_way(self) -> bool:
        """Whether something is being read ahead."""
        return self._under_way is not None

    def what_was_read(self, read: Callable[[], _T]) -> _T | None:
        """What was read ahead; None if nothing was.

        In the eager step before a capture it is read now, by `read`, with the kernels that the capture launches: so they are
        compiled.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return read() if self.reads_ahead and self._looked_at else None
        if under_way.ready is not None:
            torch.cuda.current_stream(self.position.device).wait_event(under_way.ready)
        return under_way.read

    def forget_ahead(self) -> None:
        """Expect and read nothing any more: the call is over, or broke off."""
        self._looked_at, self._under_way = False, None
