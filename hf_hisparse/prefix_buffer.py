"""What a layer that reads everything keeps on the GPU: its first records."""

from __future__ import annotations

import copy

import torch

from hisparse_kernels.miss_plan import MissPlan
from hisparse_kernels.write_row import write_row

from .host_pool import HostPool
from .records import RecordLayout, chunks, moved


class PrefixBuffer:
    """The first `slots` records of each lane, in the slots of their numbers, for good.

    When every record is read in every step, the least recently used one is always the next to be needed. To keep some and
    never replace them is the best that can be done: of a cyclic scan nothing hits but what was never evicted (Belady, 1966).

    Attributes
    ----------
    data : ``[lanes, slots, elements]``
    page_table : int32 ``[lanes, capacity]``
        Record -> slot, -1 for those that are read from the host and kept nowhere.
    plan : MissPlan
        Of a selection of all records: nothing to fetch, everything without a slot missing.
    """

    def __init__(self, lanes: int, slots: int, layout: RecordLayout, device: torch.device) -> None:
        self.layout = layout
        self.data = torch.empty((lanes, slots, layout.elements), dtype=layout.dtype, device=device)
        self._hold(self.data, 0)

    def _hold(self, data: torch.Tensor, capacity: int) -> None:
        """Take `data`, and tables of `capacity` records for it."""
        lanes, slots, _ = data.shape
        record = torch.arange(capacity, dtype=torch.int32, device=data.device)
        page_table = record.masked_fill(record >= slots, -1).repeat(lanes, 1)
        nothing = torch.zeros(lanes, dtype=torch.int32, device=data.device)
        plan = MissPlan(page_table, page_table, nothing, page_table < 0)
        self.data, self.page_table, self.plan = data, page_table, plan  # all or nothing

    @property
    def lanes(self) -> int:
        """Lanes."""
        return self.data.shape[0]

    @property
    def buffer_nbytes(self) -> int:
        """Device bytes of the records."""
        return self.data.nbytes

    @property
    def table_nbytes(self) -> int:
        """Device bytes of the bookkeeping."""
        return self.page_table.nbytes + self.plan.count.nbytes + self.plan.missing.nbytes

    def grow(self, capacity: int) -> None:
        """Let the page table name records up to `capacity`."""
        if capacity > self.page_table.shape[1]:
            self._hold(self.data, capacity)

    def resize(self, slots: int) -> None:
        """Change to `slots` slots per lane; new ones hold nothing yet."""
        lanes, held, elements = self.data.shape
        data = self.data.new_empty((lanes, slots, elements))
        kept = min(slots, held)
        data[:, :kept] = self.data[:, :kept]
        self._hold(data, self.page_table.shape[1])

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: torch.Tensor,
        pool: HostPool,
        claimed: bool = False,
    ) -> None:
        """Write one new token per lane to the host, and to its record's slot if that has one (see `reference.write_row`).

        No slot is ever given or taken, so it is all the same whether one was claimed.
        """
        tokens = self.layout.tokens
        slots = self.page_table.index_select(1, position // tokens)[:, 0]
        write_row(keys, values, position, slots, pool.records, pool.host_rows, self.data, tokens)

    def resolve(self, selection: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The slots of all records, int32 ``[lanes, capacity]``."""
        return self.page_table

    def store(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the records from `first` on as far as they have slots, of a whole history ``[batch, heads, T, width]``."""
        lanes, slots, _ = self.data.shape
        stop = min(slots, self.layout.count(keys.shape[2]))
        for start, end in chunks(stop - first, lanes * self.layout.nbytes):
            tokens = slice((first + start) * self.layout.tokens, (first + end) * self.layout.tokens)
            self.data[:, first + start : first + end] = self.layout.pack(
                keys[:, :, tokens], values[:, :, tokens]
            )

    def choose(self, selection: torch.Tensor, count: int) -> torch.Tensor:
        """Which of `count` records to keep: int64 ``[lanes, min(slots, count)]``, the first."""
        lanes, slots, _ = self.data.shape
        return torch.arange(min(slots, count), device=self.data.device).repeat(lanes, 1)

    def fill(self, records: torch.Tensor, data: torch.Tensor) -> None:
        """Take the first records, ``[lanes, n, elements]``."""
        self.data[:, : records.shape[1]] = data

    def forget(self, first: int) -> None:
        """Nothing to forget: a slot's record is always the same, and what follows its last token is never read."""

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let lane `i` hold what lane ``lanes[i]`` held (int64 ``[new lanes]``)."""
        data = moved(self.data, lanes)
        if self.page_table.shape[0] == lanes.numel():
            self.data = data
        else:
            self._hold(data, self.page_table.shape[1])

    def clone(self) -> PrefixBuffer:
        """An independent copy."""
        return copy.deepcopy(self)

    def reset(self) -> None:
        """Nothing to forget (see `forget`)."""
