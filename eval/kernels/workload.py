"""What the kernels of one layer work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eval.kernels.timing import DEVICE, Time, microseconds
from eval.traces import first_stack, synthetic_trace
from hf_hisparse.host_memory import PinnedArea
from hf_hisparse.host_pool import HostPool
from hf_hisparse.hot_buffer import HotBuffer
from hf_hisparse.records import RecordLayout
from hisparse_kernels.fetch_ahead import fetch_ahead
from hisparse_kernels.miss_plan import HostSource


class Workload:
    """A layer's host pool and hot buffer in their steady state, and selections of which `misses` records per lane are missing.

    Parameters
    ----------
    lanes : int
    misses : int
        Per lane and call, on average.
    layout : RecordLayout
    k, slots : int
    calls : int
        Selections to measure with.
    """

    def __init__(
        self, lanes: int, misses: int, layout: RecordLayout, k: int, slots: int, calls: int = 24
    ) -> None:
        history = max(4 * slots, slots + calls * misses)
        device = torch.device(DEVICE)
        self.layout = layout
        self.pool = HostPool(
            lanes,
            1,
            layout,
            device,
            PinnedArea(2 * history * lanes * layout.nbytes, pin=device.type == "cuda"),
        )
        self.pool.grow(history)
        for part in self.pool.records:  # not in one piece: a temporary of all of it would not fit
            part.copy_(torch.randn(part.shape))
        self.buffer = HotBuffer(lanes, slots, layout, device)
        self.buffer.grow(history)
        trace = synthetic_trace(lanes, k, history, calls + 8, {slots / k: misses / k}, device=DEVICE)
        self.position = torch.full((1,), history * layout.tokens - 1, dtype=torch.int64, device=device)
        recent = first_stack(lanes, history, device=DEVICE)[:, :slots].flip(1)
        self.buffer.fill(recent.long(), self.pool.read(recent))
        for selection in trace[:8]:
            self.read(selection)
        self.selections = trace[8:]
        self._state = [tensor.clone() for tensor in self._tables]

    @property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.buffer.page_table, self.buffer.slot_records, *self.buffer.recency

    def restore(self) -> None:
        """As before the first selection: the data is not, but who looks at it."""
        for held, kept in zip(self._tables, self._state, strict=True):
            held.copy_(kept)
        self.buffer.counters.zero_()

    def read(self, selection: torch.Tensor) -> torch.Tensor:
        """resolve, then fetch; the slots."""
        slots = self.buffer.resolve(selection, self.position)
        fetch_ahead(selection, slots, self.source(), self.buffer.data)
        return slots

    def source(self) -> HostSource:
        """Where attention reads what the last resolve found missing."""
        return HostSource(self.pool.records, self.pool.host_rows, self.buffer.page_table, self.buffer.plan)

    def time(self, call: Callable[[torch.Tensor], Any]) -> Time:
        """Microseconds per selection."""
        return microseconds([lambda s=selection: call(s) for selection in self.selections], self.restore)

    def misses_per_call(self) -> float:
        """Records missing per call, over all lanes."""
        self.restore()
        for selection in self.selections:
            self.buffer.resolve(selection, self.position)
        return self.buffer.totals()[1] / len(self.selections)

    def copy_engine(self, nbytes: int) -> float:
        """Microseconds that the copy engine takes for `nbytes` in one piece; NaN for none."""
        if not nbytes:
            return float("nan")
        target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        source = self.pool.area.bytes[:nbytes]
        return microseconds([lambda: target.copy_(source, non_blocking=True)] * len(self.selections)).us
