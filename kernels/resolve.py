"""Resolve a selection of records into slots, and plan the fetch of the missing ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, check_position, check_state, on_device_of, use_triton
from .miss_plan import MissPlan

_ORDER_BLOCK = 4096  # slots partitioned at a time


@triton.jit(do_not_specialize=["selection_stride", "table_stride", "k", "slot_count"])
def _resolve_kernel(
    selection,
    position,
    page_table,
    slot_records,
    order,
    counters,
    slots,
    plan_records,
    plan_slots,
    plan_count,
    plan_missing,
    selection_stride,
    table_stride,
    k,
    slot_count,
    TOKENS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ORDER_BLOCK: tl.constexpr,
):
    """One program per lane.

    Needs no scratch memory: the tables carry the marks of the moment. The page table entry of a missing record
    names the first of the entries that ask for it, the slot_records entry of a hit is negative, and `slots`
    keeps the hits' slots in their old order until it receives the answer.
    """
    lane = tl.program_id(0).to(tl.int64)
    page_table += lane * table_stride
    slot_records += lane * slot_count
    order += lane * slot_count
    slots += lane * k
    plan_records += lane * k
    plan_slots += lane * k
    plan_missing += lane * k

    index = tl.arange(0, K_BLOCK)
    inside = index < k
    record = tl.load(selection + lane * selection_stride + index, mask=inside, other=-1).to(tl.int32)
    valid = record >= 0
    slot = tl.load(page_table + record, mask=valid, other=-1)
    missing = valid & (slot < 0)
    count = tl.sum(missing.to(tl.int32), axis=0)
    history = tl.load(position) // TOKENS + 1

    if (count > 0) | (history > slot_count):
        # Of the entries that ask for the same missing record, the first one fetches it: it wins the minimum.
        claim = index - (1 << 30)
        tl.atomic_min(page_table + record, claim, mask=missing, sem="relaxed")
        tl.store(slot_records + slot, -2 - record, mask=slot >= 0)
        tl.debug_barrier()
        winner = tl.load(page_table + record, mask=missing, other=0)
        fetched = missing & (winner == claim)
        rank = tl.cumsum(fetched.to(tl.int32), axis=0) - 1
        count = tl.sum(fetched.to(tl.int32), axis=0)
        tl.store(plan_records + rank, record, mask=fetched)

        # Partition the order. Slots that stay stale move to the front, in place, since they never move away from
        # it; victims and hits are set aside in plan_slots and slots.
        stale_before = 0
        for start in range(0, slot_count, ORDER_BLOCK):
            place = start + tl.arange(0, ORDER_BLOCK)
            exists = place < slot_count
            entry = tl.load(order + place, mask=exists, other=0)
            owner = tl.load(slot_records + entry, mask=exists, other=-2)
            stale = owner > -2
            stale_rank = stale_before + tl.cumsum(stale.to(tl.int32), axis=0) - 1
            stale_before += tl.sum(stale.to(tl.int32), axis=0)
            victim = stale & (stale_rank < count)
            held = exists & (owner <= -2)
            tl.debug_barrier()  # every thread has read this tile's order
            tl.store(order + stale_rank - count, entry, mask=stale & (stale_rank >= count))
            tl.store(plan_slots + stale_rank, entry, mask=victim)
            tl.store(page_table + owner, -1, mask=victim & (owner >= 0))
            tl.store(slots + place - stale_rank - 1, entry, mask=held)
            tl.store(slot_records + entry, -2 - owner, mask=held)
        tl.debug_barrier()

        victim_slot = tl.load(plan_slots + index, mask=index < count, other=0)
        hit_count = slot_count - stale_before
        hit_slot = tl.load(slots + index, mask=index < hit_count, other=0)
        tl.store(order + stale_before - count + index, victim_slot, mask=index < count)
        tl.store(order + stale_before + index, hit_slot, mask=index < hit_count)

        new_slot = tl.load(plan_slots + rank, mask=fetched, other=0)
        tl.store(page_table + record, new_slot, mask=fetched)
        tl.store(slot_records + new_slot, record, mask=fetched)
        tl.debug_barrier()  # duplicates read what the first installed; `slots` is free for the answer
        slot = tl.load(page_table + record, mask=valid, other=-1)

    tl.store(slots + index, slot, mask=inside)
    tl.store(plan_missing + index, missing, mask=inside)
    tl.store(plan_records + index, -1, mask=inside & (index >= count))
    tl.store(plan_slots + index, -1, mask=inside & (index >= count))
    tl.store(plan_count + lane, count)
    selected = counters + lane * 2
    tl.store(selected, tl.load(selected) + tl.sum(valid.to(tl.int32), axis=0))
    tl.store(selected + 1, tl.load(selected + 1) + count)


def resolve(
    selection: torch.Tensor,
    position: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    order: torch.Tensor,
    counters: torch.Tensor,
    slots: torch.Tensor,
    plan: MissPlan,
    tokens_per_record: int,
) -> None:
    """Turn selected records into slots, and plan the fetch of those that have none; see `reference.resolve`.

    Raises
    ------
    ValueError
        If the selection is wider than the hot buffer, or a shape, dtype or memory layout is not what the
        reference names.
    """
    lanes, k = selection.shape
    slot_count = order.shape[1]
    _check(selection, slot_count, counters, slots, plan)
    check_state(lanes, page_table, slot_records, order)
    check_position(position)
    if not use_triton(order):
        reference.resolve(
            selection, position, page_table, slot_records, order, counters, slots, plan, tokens_per_record
        )
        return
    k_block = block_of(k)
    order_block = min(block_of(slot_count), _ORDER_BLOCK)
    widest = max(k_block, order_block)
    with on_device_of(order):
        _resolve_kernel[(lanes,)](
            selection,
            position,
            page_table,
            slot_records,
            order,
            counters,
            slots,
            plan.records,
            plan.slots,
            plan.count,
            plan.missing,
            selection.stride(0),
            page_table.stride(0),
            k,
            slot_count,
            tokens_per_record,
            k_block,
            order_block,
            num_warps=4 if widest <= 1024 else 8 if widest <= 2048 else 16,
        )


def _check(
    selection: torch.Tensor, slot_count: int, counters: torch.Tensor, slots: torch.Tensor, plan: MissPlan
) -> None:
    lanes, k = selection.shape
    if not 1 <= k <= slot_count:
        raise ValueError(
            f"a selection of {k} records per lane does not fit a hot buffer of {slot_count} slots: "
            "k must be from 1 to B"
        )
    if selection.dtype not in (torch.int32, torch.int64) or (k > 1 and selection.stride(1) != 1):
        raise ValueError(
            "selection must be int32 or int64 and contiguous in its last dimension, "
            f"got {selection.dtype} with strides {selection.stride()}"
        )
    if counters.dtype is not torch.int64 or counters.shape != (lanes, 2) or not counters.is_contiguous():
        raise ValueError(
            f"counters must be a contiguous int64 [{lanes}, 2], got {counters.dtype} {list(counters.shape)}"
        )
    outputs = (slots, plan.records, plan.slots, plan.missing)
    if any(output.shape != (lanes, k) for output in outputs) or plan.count.shape != (lanes,):
        raise ValueError(
            f"slots and the plan's records, slots and missing must be {[lanes, k]} and its count [{lanes}], "
            f"got {list(slots.shape)} and {[list(part.shape) for part in plan]}"
        )
    if not slots.dtype is plan.records.dtype is plan.slots.dtype is plan.count.dtype is torch.int32:
        raise ValueError("slots and the plan must be int32")
    if plan.missing.dtype is not torch.bool:
        raise ValueError(f"plan.missing must be bool, got {plan.missing.dtype}")
    if not all(output.is_contiguous() for output in outputs):
        raise ValueError("slots and the plan must be contiguous")
