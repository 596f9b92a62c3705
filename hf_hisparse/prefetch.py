"""Exact prefetch: layers that share a selection keep the same records in the same slots, and resolve it once.

In GLM-5 most layers read what the full layer before them has selected. The first layer of such a group on a device, its
leader, resolves a selection; the others own data and host pool alone. They replay what the leader notes of each new token
(`Replay`): the same misses into the same slots. On a GPU each layer starts the fetch of the next one on a side stream, before its
own attention.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from hisparse_kernels.fetch import fetch
from hisparse_kernels.miss_plan import MissPlan
from hisparse_kernels.write_row import write_row

from .host_pool import HostPool
from .hot_buffer import HotBuffer, resized
from .records import RecordLayout, moved
from .side_stream import beside

if TYPE_CHECKING:
    from .models.mla import LatentLayer

# A fetch on every multiprocessor holds up the products that it is meant to run beside: they want a multiprocessor's
# shared memory, which it gives back only when its programs have ended. So few programs, each with much in flight.
_BACKGROUND_PROGRAMS = 8


class Replay(NamedTuple):
    """What a leader did for one new token.

    Attributes
    ----------
    selection : int ``[lanes, k]``
    slots : int32 ``[lanes, k]``
        Where the selected records are.
    plan : MissPlan
        What was missing.
    written : int32 ``[lanes]`` or None
        The slot of the new token's record, -1 if it was evicted at once; None where no layer follows.
    """

    selection: torch.Tensor
    slots: torch.Tensor
    plan: MissPlan
    written: torch.Tensor | None

    def kept(self) -> Replay:
        """A copy that the next token does not overwrite."""
        plan = MissPlan(*(tensor.clone() for tensor in self.plan))
        return Replay(self.selection, self.slots.clone(), plan, self.written)


class FollowerBuffer:
    """The data of a layer that has the same records in the same slots as its leader, whose tables are its own.

    Attributes
    ----------
    leader : HotBuffer
    data : ``[lanes, slots, elements]``
    """

    def __init__(self, leader: HotBuffer, layout: RecordLayout) -> None:
        self.leader = leader
        lanes, slots, _ = leader.data.shape
        self.data = torch.empty(
            (lanes, slots, layout.elements), dtype=layout.dtype, device=leader.data.device
        )

    @property
    def page_table(self) -> torch.Tensor:
        """The leader's."""
        return self.leader.page_table

    @property
    def buffer_nbytes(self) -> int:
        """Device bytes of the records."""
        return self.data.nbytes

    @property
    def table_nbytes(self) -> int:
        """Device bytes of the bookkeeping, which is the leader's."""
        return 0

    def grow(self, capacity: int) -> None:
        """The leader has grown already."""

    def resize(self, slots: int, kept: torch.Tensor) -> None:
        """Change to as many slots as the leader now has: its first ones were the slots `kept`, int64 ``[lanes, n]``."""
        self.data = resized(self.data, kept, slots)

    def forget(self, first: int) -> None:
        """The leader has forgotten already."""

    def reset(self) -> None:
        """The leader is reset already."""

    def choose(self, selection: torch.Tensor, count: int) -> torch.Tensor:
        """What the leader has chosen and filled its slots with, from the first slot on."""
        return self.leader.slot_records[:, : min(count, self.data.shape[1])].long()

    def fill(self, records: torch.Tensor, data: torch.Tensor) -> None:
        """Take the data of the leader's records (see `HotBuffer.fill`)."""
        self.data[:, : records.shape[1]] = data

    def fetch(self, plan: MissPlan, pool: HostPool, programs: int | None = None) -> None:
        """Bring what the leader was missing, with so many GPU programs."""
        fetch(pool.records, pool.host_rows, plan, self.data, programs)

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: torch.Tensor,
        slots: torch.Tensor,
        pool: HostPool,
    ) -> None:
        """Store one new token per lane to the host and to the slot that the leader has given it."""
        write_row(keys, values, position, slots, pool.records, pool.host_rows, self.data)

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let lane `i` hold what lane ``lanes[i]`` held; the leader has moved the tables already."""
        self.data = moved(self.data, lanes)

    def clone(self) -> FollowerBuffer:
        """A copy of the data, of a leader yet to be named."""
        other = FollowerBuffer.__new__(FollowerBuffer)
        other.leader, other.data = self.leader, self.data.clone()
        return other

    def totals(self) -> tuple[int, int]:
        """Records read and records missed: what the leader counted, it read and fetched as well."""
        return self.leader.totals()


class Group:
    """Layers that share a selection, in the model's order; the first makes it."""

    def __init__(self, members: list[LatentLayer]) -> None:
        self._members = [
            weakref.ref(member) for member in members
        ]  # no cycle: host memory is to go with the cache
        for member in members:
            member.group = self
            if member.is_initialized and isinstance(member.buffer, FollowerBuffer):  # of a copied cache
                leading = self.leading_buffer(member, member.position.device)
                assert leading is not None
                member.buffer.leader = leading

    @property
    def members(self) -> list[LatentLayer]:
        """The layers."""
        members = [member() for member in self._members]
        return [member for member in members if member is not None]

    def leader_of(self, member: LatentLayer, device: torch.device) -> LatentLayer | None:
        """The first layer before `member` on the same device, None if it leads itself."""
        before = self.members[: self.members.index(member)]
        return next(
            (other for other in before if other.is_initialized and other.position.device == device), None
        )

    def leading_buffer(self, member: LatentLayer, device: torch.device) -> HotBuffer | None:
        """The hot buffer whose slots `member` uses, None for its own."""
        leader = self.leader_of(member, device)
        if leader is None:
            return None
        assert isinstance(leader.buffer, HotBuffer)
        return leader.buffer

    def next_on_device(self, member: LatentLayer) -> LatentLayer | None:
        """The layer that replays next on the device of `member`, None after the last."""
        members = self.members
        leader = getattr(member.buffer, "leader", member.buffer)
        return next(
            (
                other
                for other in members[members.index(member) + 1 :]
                if other.is_initialized
                and isinstance(other.buffer, FollowerBuffer)
                and other.buffer.leader is leader
            ),
            None,
        )


def prefetch(follower: LatentLayer, replay: Replay) -> None:
    """Start the fetch of the layer that comes next, beside what the current stream does now.

    It waits for its event (`LatentLayer._await_prefetch`) within the same call: so this can be captured.
    """
    assert isinstance(follower.buffer, FollowerBuffer)
    if not follower.buffer.data.is_cuda:
        return
    device = follower.buffer.data.device
    with beside(device) as stream:
        follower.pool.wait()
        follower.buffer.fetch(replay.plan, follower.pool, _BACKGROUND_PROGRAMS)
        follower.prefetched = stream.record_event()
    if not torch.cuda.is_current_stream_capturing():
        # Their memory may be given back before the event was waited for: after an error.
        for tensor in (*replay.plan, follower.buffer.data, follower.pool.host_rows):
            tensor.record_stream(stream)
