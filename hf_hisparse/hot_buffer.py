"""The hot buffer: the records of one layer that are on the GPU, and where."""

from __future__ import annotations

import copy

import torch

from hisparse_kernels.append import append, claim
from hisparse_kernels.miss_plan import MissPlan
from hisparse_kernels.recency import Recency
from hisparse_kernels.resolve import resolve

from .host_pool import HostPool
from .records import RecordLayout, moved


class HotBuffer:
    """`slots` records per lane on the device, least recently used replaced first.

    Attributes
    ----------
    data : ``[lanes, slots, elements]``
    page_table : int32 ``[lanes, capacity]``
        Record -> slot, -1 for a record that is on the host only.
    slot_records : int32 ``[lanes, slots]``
        Slot -> record, -1 for an empty slot.
    recency : Recency
        In which order the slots were used; empty slots are the oldest.
    counters : int64 ``[lanes, 2]``
        Records read, and those of them that were missing, since the lanes were last rearranged; see `totals`.

    Parameters
    ----------
    selected : int
        Records per selection to expect, so that no step has to make room for its outputs.
    """

    def __init__(
        self, lanes: int, slots: int, layout: RecordLayout, device: torch.device, selected: int = 0
    ) -> None:
        self.layout = layout
        self.data = torch.empty((lanes, slots, layout.elements), dtype=layout.dtype, device=device)
        self.page_table = torch.empty((lanes, 0), dtype=torch.int32, device=device)
        self.slot_records = torch.full((lanes, slots), -1, dtype=torch.int32, device=device)
        self.recency = Recency.of(torch.arange(slots, dtype=torch.int32, device=device).repeat(lanes, 1))
        self.counters = torch.zeros((lanes, 2), dtype=torch.int64, device=device)
        self._counted = torch.zeros(2, dtype=torch.int64, device=device)
        self._allocate_outputs(selected)

    def _allocate_outputs(self, k: int) -> None:
        lanes, device = self.lanes, self.data.device
        self.slots = torch.empty((lanes, k), dtype=torch.int32, device=device)
        self.plan = MissPlan.empty(lanes, k, device)

    @property
    def lanes(self) -> int:
        """Lanes."""
        return self.slot_records.shape[0]

    @property
    def buffer_nbytes(self) -> int:
        """Device bytes of the records."""
        return self.data.nbytes

    @property
    def table_nbytes(self) -> int:
        """Device bytes of the bookkeeping."""
        tables = (self.page_table, self.slot_records, *self.recency, self.counters, self.slots, *self.plan)
        return sum(table.nbytes for table in tables)

    def grow(self, capacity: int) -> None:
        """Let the page table name records up to `capacity`."""
        missing = capacity - self.page_table.shape[1]
        if missing > 0:
            self.page_table = torch.nn.functional.pad(self.page_table, (0, missing), value=-1)

    def resize(self, slots: int) -> torch.Tensor:
        """Change to `slots` slots per lane; if those are fewer, the most recently used records stay.

        Returns
        -------
        int64 ``[lanes, n]``
            The slots that the first `n` slots were before.
        """
        lanes, held = self.slot_records.shape
        page_table = self.page_table
        order = self.recency.order()
        every = torch.arange(slots, dtype=torch.int32, device=order.device).repeat(lanes, 1)
        if slots >= held:
            kept = every[:, :held].long()
            slot_records = torch.nn.functional.pad(self.slot_records, (0, slots - held), value=-1)
            order = torch.cat([every[:, held:], order], dim=1)  # empty slots are the oldest
        else:
            kept = order[:, held - slots :].long()
            now_at = torch.full_like(order, -1).scatter_(1, kept, every)
            slot = now_at.gather(1, page_table.clamp(min=0).long())
            page_table = torch.where(page_table >= 0, slot, page_table)
            slot_records = self.slot_records.gather(1, kept)
            order = every
        recency, data = Recency.of(order), resized(self.data, kept, slots)
        # Not before all is there: without memory for it the buffer stays as it was.
        self.page_table, self.slot_records, self.recency, self.data = page_table, slot_records, recency, data
        return kept

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: torch.Tensor,
        pool: HostPool,
        claimed: bool = False,
    ) -> None:
        """Write one new token per lane to its record's slot and to the host (see `reference.append`)."""
        append(
            keys,
            values,
            position,
            pool.records,
            pool.host_rows,
            self.data,
            self.page_table,
            self.slot_records,
            self.recency,
            self.layout.tokens,
            claimed,
        )

    def claim(self, position: torch.Tensor, pool: HostPool) -> None:
        """Give the record of the token at `position` its slot, ahead of `append` (see `reference.claim`)."""
        claim(position, pool.host_rows, self.page_table, self.slot_records, self.recency, self.layout.tokens)

    def resolve(self, selection: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Give each selected record a slot; `plan` says which of them are yet to come from the host.

        Parameters
        ----------
        selection : int ``[lanes, k]``
        position : int64 ``[1]``

        Returns
        -------
        int32 ``[lanes, k]``
            The slot of each record; overwritten by the next call.
        """
        if self.slots.shape[1] != selection.shape[1]:
            self._allocate_outputs(selection.shape[1])
        resolve(
            selection,
            position,
            self.page_table,
            self.slot_records,
            self.recency,
            self.counters,
            self.slots,
            self.plan,
            self.layout.tokens,
        )
        return self.slots

    def slot_of(self, position: torch.Tensor) -> torch.Tensor:
        """The slot of record `position` (int64 ``[1]``) in each lane, int32 ``[lanes]``; -1 for none."""
        return self.page_table.index_select(1, position)[:, 0]

    def choose(self, selection: torch.Tensor, count: int) -> torch.Tensor:
        """Which of `count` records to keep after a prefill: those just selected, then the newest.

        Returns
        -------
        int64 ``[lanes, min(slots, count)]``
            From least to most worth keeping: oldest to newest, then the selected.
        """
        lanes, slots = self.slot_records.shape
        rank = torch.arange(count, device=selection.device).repeat(lanes, 1)
        if count <= slots:
            return rank
        selected = torch.zeros((lanes, count + 1), dtype=torch.bool, device=selection.device)
        selected.scatter_(1, torch.where(selection >= 0, selection, count).long(), True)
        rank += count * selected[:, :count]
        return rank.topk(slots, dim=1).values.sort(dim=1).values % count

    def fill(self, records: torch.Tensor, data: torch.Tensor) -> None:
        """Replace the content by `records`, the last one the most recently used.

        Parameters
        ----------
        records : int64 ``[lanes, n]``, ``n <= slots``, all different
        data : ``[lanes, n, elements]``
        """
        count = records.shape[1]
        self.data[:, :count] = data
        self.slot_records.fill_(-1)
        self.slot_records[:, :count] = records
        self.page_table.fill_(-1)
        slots = torch.arange(count, dtype=torch.int32, device=records.device)
        self.page_table.scatter_(1, records, slots.expand_as(records))
        every = torch.arange(self.slot_records.shape[1], dtype=torch.int32, device=records.device)
        self._sort_order(every.expand_as(self.slot_records))

    def _sort_order(self, order: torch.Tensor) -> None:
        """Take over `order`, with the empty slots moved to the oldest end."""
        filled = self.slot_records.gather(1, order.long()) >= 0
        self.recency.set_order(order.gather(1, filled.to(torch.int8).argsort(dim=1, stable=True)))

    def forget(self, first: int) -> None:
        """Free the slots of the records from `first` on: their numbers will be written again."""
        self.page_table[:, first:] = -1
        self.slot_records.masked_fill_(self.slot_records >= first, -1)
        self._sort_order(self.recency.order())

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let lane `i` hold what lane ``lanes[i]`` held (int64 ``[new lanes]``)."""
        # Counts are summed over lanes: a repeated lane must not count twice.
        self._counted += self.counters.sum(0)
        self.counters.zero_()
        for name in ("data", "page_table", "slot_records", "counters"):
            setattr(self, name, moved(getattr(self, name), lanes))
        self.recency = Recency(*(moved(part, lanes) for part in self.recency))
        if self.slots.shape[0] != lanes.numel():
            self._allocate_outputs(self.slots.shape[1])

    def clone(self) -> HotBuffer:
        """An independent copy."""
        return copy.deepcopy(self)

    def reset(self) -> None:
        """Forget all records and counts."""
        self.forget(0)
        self.counters.zero_()
        self._counted.zero_()

    def totals(self) -> tuple[int, int]:
        """Records read and records missed since the last reset, over all lanes (waits for the device)."""
        read, missed = (self._counted + self.counters.sum(0)).tolist()
        return read, missed


def resized(data: torch.Tensor, kept: torch.Tensor, slots: int) -> torch.Tensor:
    """``[lanes, slots, elements]``, whose first rows are the rows `kept`, int64 ``[lanes, n]``, of `data`."""
    out = data.new_empty((data.shape[0], slots, data.shape[2]))
    index = kept[:, :, None].expand(-1, -1, data.shape[2])
    torch.gather(data, 1, index, out=out[:, : kept.shape[1]])  # without a copy in between
    return out
