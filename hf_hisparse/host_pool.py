"""The host pool: every record of one layer, in pinned host memory."""

from __future__ import annotations

import torch

from hisparse_kernels.fetch import fetch
from hisparse_kernels.miss_plan import MissPlan

from .host_memory import PinnedArea
from .records import RecordLayout, chunks, moved


class HostPool:
    """All records of one layer, `records` ``[capacity, host_lanes, elements]``, record-major so that it grows in place.

    Which batch row a record is stored under stands in `host_rows` (int32 ``[batch, table capacity]``, on the device):
    reordering beams permutes that table and moves no data.

    Parameters
    ----------
    batch, heads : int
        Lanes are ``batch * heads``.
    layout : RecordLayout
    device : torch.device
        Where attention runs; the pool is pinned when that is a GPU.
    area : PinnedArea
        The memory to use; it may have been used by another pool before.
    """

    def __init__(
        self, batch: int, heads: int, layout: RecordLayout, device: torch.device, area: PinnedArea
    ) -> None:
        self.layout = layout
        self.device = device
        self.area = area
        self.batch = batch
        self.heads = heads
        self.host_batch = batch
        self.host_rows = self._own_rows(0)
        self._permuted = False
        self._written: torch.cuda.Event | None = None
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.records = self._view()

    def _own_rows(self, capacity: int) -> torch.Tensor:
        rows = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        return rows[:, None].repeat(1, capacity)

    def _view(self) -> torch.Tensor:
        lanes = self.host_batch * self.heads
        capacity = self.area.size // (lanes * self.layout.nbytes)
        used = self.area.bytes[: capacity * lanes * self.layout.nbytes]
        return used.view(self.layout.dtype).view(capacity, lanes, self.layout.elements)

    @property
    def capacity(self) -> int:
        """Records that there is room for; the memory of another pool may hold more than this one's table names."""
        return min(self.records.shape[0], self.host_rows.shape[1])

    @property
    def record_nbytes(self) -> int:
        """Host bytes of one record of all lanes."""
        return self.host_batch * self.heads * self.layout.nbytes

    def nbytes_for(self, batch: int) -> int:
        """Host bytes of as many records as the table names, with `batch` rows."""
        return self.host_rows.shape[1] * (self.record_nbytes // self.host_batch) * batch

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` records without moving any.

        Raises
        ------
        MemoryError
            If the memory cannot be had; the pool stays as it was.
        """
        self.area.grow(capacity * self.record_nbytes)
        self.records = self._view()
        if capacity > self.host_rows.shape[1]:
            more = self._own_rows(capacity - self.host_rows.shape[1])
            self.host_rows = torch.cat([self.host_rows, more], dim=1)

    def wait(self) -> None:
        """Make the current stream wait for the copies to the host that are still under way."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
            self._written = None

    def synchronize(self) -> None:
        """Make the CPU wait until the pool holds all that was written."""
        if self._copy_stream is not None:
            torch.cuda.synchronize(self.device)
            self._written = None

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens as the records from `first` on; the copy runs beside what is computed next.

        Parameters
        ----------
        keys, values : ``[batch, heads, T, width]``
            The first token is the first of record `first`.
        """
        total = self.layout.count(keys.shape[2])
        self._overwrite(first, total)
        for start, stop in chunks(total, self.record_nbytes):
            tokens = slice(start * self.layout.tokens, stop * self.layout.tokens)
            data = self.layout.pack(keys[:, :, tokens], values[:, :, tokens])
            self._store(first + start, data)

    def write_records(self, first: int, data: torch.Tensor) -> None:
        """Store ``[lanes, n, elements]`` as the records from `first` on; the copy runs beside what is computed next."""
        self._overwrite(first, data.shape[1])
        for start, stop in chunks(data.shape[1], self.record_nbytes):
            self._store(first + start, data[:, start:stop])

    def _overwrite(self, first: int, count: int) -> None:
        """Prepare for new content of `count` records."""
        self.wait()
        if self._permuted:
            self.host_rows[:, first : first + count] = self._own_rows(count)

    def _store(self, first: int, data: torch.Tensor) -> None:
        """Copy ``[lanes, n, elements]`` to the records from `first` on."""
        lanes, count, _ = data.shape
        if self._copy_stream is None or lanes != self.records.shape[1]:
            self.records[first : first + count, :lanes] = data.transpose(0, 1).to(self.records.device)
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            staged = data.transpose(0, 1).contiguous().view(-1).view(torch.uint8)
            start = first * self.record_nbytes
            for low, high in self.area.pieces(start, start + staged.numel()):
                self.area.bytes[low:high].copy_(staged[low - start : high - start], non_blocking=True)
            self._written = self._copy_stream.record_event()
        data.record_stream(self._copy_stream)

    def read(self, records: torch.Tensor) -> torch.Tensor:
        """Bring records to the device.

        Parameters
        ----------
        records : int32 ``[lanes, n]``

        Returns
        -------
        ``[lanes, n, elements]`` on the device
        """
        self.wait()
        lanes, count = records.shape
        slots = torch.arange(count, dtype=torch.int32, device=self.device).expand(lanes, count).contiguous()
        counts = torch.full((lanes,), count, dtype=torch.int32, device=self.device)
        out = torch.empty((lanes, count, self.layout.elements), dtype=self.layout.dtype, device=self.device)
        all_missing = torch.ones_like(slots, dtype=torch.bool)
        plan = MissPlan(records.contiguous(), slots, counts, all_missing)
        fetch(self.records, self.host_rows, plan, out)
        return out

    def read_range(self, first: int, stop: int) -> torch.Tensor:
        """Records ``first .. stop - 1`` of every lane, ``[lanes, stop - first, elements]`` on the device."""
        records = torch.arange(first, stop, dtype=torch.int32, device=self.device)
        return self.read(records.expand(self.batch * self.heads, -1))

    def copy_to(self, records: torch.Tensor) -> None:
        """Start to copy the first records as they lie here to ``[n, host_lanes, elements]`` on the device."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
        target = records.view(-1).view(torch.uint8)
        for low, high in self.area.pieces(0, target.numel()):
            target[low:high].copy_(self.area.bytes[low:high], non_blocking=True)

    def in_lanes(self, records: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Records ``first .. stop - 1`` of `records`, which lie as in the pool, by lane: ``[lanes, stop - first, elements]``."""
        data = records[first:stop]
        if self._permuted or self.batch != self.host_batch:
            head = torch.arange(self.heads, device=data.device)
            rows = self.host_rows[:, first:stop].T[:, :, None].long().to(data.device)  # [n, batch, 1]
            lanes = (rows * self.heads + head).flatten(1)
            data = data.gather(1, lanes[:, :, None].expand(-1, -1, data.shape[2]))
        return data.transpose(0, 1)

    def unpack_tokens(self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill keys and values with the tokens of `records`, chunk by chunk.

        Parameters
        ----------
        records : ``[n, host_lanes, elements]``
            From the first on, as they lie in the pool.
        keys, values : ``[batch, heads, T, width]``
            Outputs on the device, possibly views.
        """
        length = keys.shape[2]
        for first, last in chunks(self.layout.count(length), self.record_nbytes):
            data = self.in_lanes(records, first, last)
            start = first * self.layout.tokens
            for out, rows in zip((keys, values), self.layout.unpack(data, self.batch), strict=True):
                stop = min(start + rows.shape[2], length)
                out[:, :, start:stop] = rows[:, :, : stop - start]

    def own(self, record: int) -> None:
        """Give every batch row its own copy of `record`, before it is written to again."""
        if not self._permuted:
            return
        data = self.read_range(record, record + 1)
        self.host_rows[:, record] = self._own_rows(1)[:, 0]
        self._store(record, data)
        self.wait()

    def rearrange(self, rows: torch.Tensor, used: int, area: PinnedArea | None = None) -> None:
        """Let batch row `i` hold what row ``rows[i]`` held.

        Moves no data unless the batch grows beyond the pool's rows; then everything is copied to `area`.

        Parameters
        ----------
        rows : int64 ``[new batch]`` on the device
        used : int
            Records in use.
        area : PinnedArea or None
            New memory, needed when ``len(rows) > host_batch``.
        """
        grows = rows.numel() > self.host_batch
        if grows:  # first, as it may fail
            assert area is not None
            area.grow(self.nbytes_for(rows.numel()))
        self.host_rows = moved(self.host_rows, rows)
        self.batch = rows.numel()
        self._permuted = True
        if not grows:
            return
        assert area is not None
        self.synchronize()
        old = self.records.flatten(0, 1)  # [records * old lanes, elements]
        host_rows = self.host_rows[:, :used].cpu().long()
        capacity, old_batch = self.host_rows.shape[1], self.host_batch
        self.area, self.host_batch = area, self.batch
        self.records = self._view()
        head = torch.arange(self.heads)
        for start, stop in chunks(used, self.record_nbytes):
            record = torch.arange(start, stop)[:, None, None]
            row = host_rows[:, start:stop].T[:, :, None]
            source = (record * old_batch + row) * self.heads + head  # [records, batch, heads]
            self.records[start:stop] = old[source.flatten()].view_as(self.records[start:stop])
        self.host_rows = self._own_rows(capacity)
        self._permuted = False

    def saved(self, used: int) -> torch.Tensor:
        """The first `used` records, ``[used, lanes, elements]`` on the CPU: a view, unless rows were rearranged."""
        self.synchronize()
        return self.in_lanes(self.records, 0, used).transpose(0, 1)

    def load(self, records: torch.Tensor) -> None:
        """Take what `saved` gave, as the first records of a pool with room for them."""
        self.records[: records.shape[0]] = records

    def clone(self, used: int, area: PinnedArea) -> HostPool:
        """A pool of its own in `area` that holds the same `used` records."""
        self.synchronize()
        other = HostPool(self.batch, self.heads, self.layout, self.device, area)
        other.host_batch = self.host_batch
        other.host_rows = self.host_rows.clone()
        other._permuted = self._permuted
        area.grow(max(used, self.host_rows.shape[1]) * self.record_nbytes)
        other.records = other._view()
        other.records[:used] = self.records[:used]
        return other

    def reset(self) -> None:
        """Forget all records; the memory stays pinned."""
        self.wait()
        if self._permuted:
            self.host_rows.copy_(self._own_rows(self.host_rows.shape[1]))
            self._permuted = False
