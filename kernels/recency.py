"""Which slot was used when: a log of uses, so that a step costs what it reads, whatever the buffer's size."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG_LENGTH = 8  # entries of the log per slot: a longer one is cleared of outdated entries less often


class Recency(NamedTuple):
    """The slots of each lane in the order of their last use.

    Every use appends a slot to `uses`; its earlier entries are outdated then. Entry ``i`` is current if ``stamps[uses[i]] == i``,
    and every slot has one current entry, between head and tail; one that was skipped is not current, since no slot has its stamp.
    What is least recently used is found from the head on.

    Attributes
    ----------
    uses : int32 ``[lanes, N]``
        Slots; `N` is `LOG_LENGTH` times their number. When it is full, the current entries move to its front.
    stamps : int32 ``[lanes, B]``
        The current entry of each slot.
    span : int32 ``[lanes, 2]``
        Head and tail: no current entry lies before the head, none from the tail on.
    """

    uses: torch.Tensor
    stamps: torch.Tensor
    span: torch.Tensor

    @classmethod
    def of(cls, order: torch.Tensor) -> Recency:
        """From int32 ``[lanes, B]`` slots, least recently used first."""
        lanes, slots = order.shape
        uses = torch.zeros((lanes, LOG_LENGTH * slots), dtype=torch.int32, device=order.device)
        recency = cls(
            uses, torch.empty_like(order), torch.empty((lanes, 2), dtype=torch.int32, device=order.device)
        )
        recency.set_order(order)
        return recency

    def set_order(self, order: torch.Tensor) -> None:
        """Start again with the slots ``[lanes, B]``, least recently used first."""
        slots = order.shape[1]
        self.uses[:, :slots] = order
        entry = torch.arange(slots, dtype=torch.int32, device=order.device)
        self.stamps.scatter_(1, order.long(), entry.expand_as(order))
        self.span[:, 0] = 0
        self.span[:, 1] = slots

    def order(self) -> torch.Tensor:
        """The slots, least recently used first: int32 ``[lanes, B]``."""
        return self.stamps.argsort(dim=1).int()


@triton.jit
def make_room(uses, stamps, head, tail, needed, length, BLOCK: tl.constexpr):
    """Head and tail of a lane's log; if `needed` more entries do not fit, after its current entries have moved to the front."""
    if tail + needed > length:
        moved = 0
        for start in range(head, tail, BLOCK):
            place = start + tl.arange(0, BLOCK)
            slot = tl.load(uses + place, mask=place < tail, other=0)
            current = (place < tail) & (tl.load(stamps + slot, mask=place < tail, other=-1) == place)
            entry = moved + tl.cumsum(current.to(tl.int32), axis=0) - 1
            moved += tl.sum(current.to(tl.int32), axis=0)
            tl.debug_barrier()  # in place: the tile is read by all threads before any of them overwrites it
            tl.store(uses + entry, slot, mask=current)
            tl.store(stamps + slot, entry, mask=current)
            tl.debug_barrier()  # the next tile sees these stamps
        head = 0
        tail = moved
    return head, tail


def check_recency(recency: Recency, lanes: int, slots: int) -> None:
    """Check a log of uses against the buffer's size.

    Raises
    ------
    ValueError
        For another dtype, shape, or memory layout, or a log that cannot hold three entries a slot: the current ones and
        those of one resolve.
    """
    uses, stamps, span = recency
    if not uses.dtype is stamps.dtype is span.dtype is torch.int32:
        raise ValueError(f"recency must be int32, got {uses.dtype}, {stamps.dtype} and {span.dtype}")
    if stamps.shape != (lanes, slots) or span.shape != (lanes, 2) or uses.shape[0] != lanes:
        raise ValueError(
            f"recency must be [{lanes}, N], [{lanes}, {slots}] and [{lanes}, 2], "
            f"got {list(uses.shape)}, {list(stamps.shape)} and {list(span.shape)}"
        )
    if uses.shape[1] < 3 * slots:
        raise ValueError(
            f"recency.uses must have at least three entries per slot, got {uses.shape[1]} for {slots}"
        )
    if not (uses.is_contiguous() and stamps.is_contiguous() and span.is_contiguous()):
        raise ValueError("recency must be contiguous")
