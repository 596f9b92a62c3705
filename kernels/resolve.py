"""Resolve a selection of records into slots, and plan the fetch of the missing ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, check_position, check_selection, check_state, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous
from .miss_plan import MissPlan
from .recency import Recency, check_recency, make_room

_CLEAR_BLOCK = 4096  # entries of a full log looked at at a time
_SCAN_BLOCK = 1024  # entries looked at at a time in search of what to evict


# Divisible or not, sizes are not specialized on: gathers and scatters want a thread's elements far from each other, which the
# compiler chooses where it sees nothing to vectorize, and prefers to conversions of the layout before each of them.
@triton.jit(do_not_specialize=["selection_stride", "table_stride", "k", "slot_count", "log_length"])
def _resolve_kernel(
    selection,
    position,
    page_table,
    slot_records,
    uses,
    stamps,
    span,
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
    log_length,
    TOKENS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CLEAR_BLOCK: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per lane.

    Needs no scratch memory: the page table entry of a missing record names, for the moment, the first of the entries that ask
    for it.
    """
    wait_for_previous(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    page_table += lane * table_stride
    slot_records += lane * slot_count
    uses += lane * log_length
    stamps += lane * slot_count
    span += lane * 2
    slots += lane * k
    plan_records += lane * k
    plan_slots += lane * k
    plan_missing += lane * k

    index = tl.arange(0, K_BLOCK)
    inside = index < k
    record = tl.load(selection + lane * selection_stride + index, mask=inside, other=-1).to(tl.int32)
    history = tl.load(position) // TOKENS + 1
    head = tl.load(span)
    tail = tl.load(span + 1)
    selected = counters + lane * 2
    selected_before = tl.load(selected)
    missed_before = tl.load(selected + 1)
    valid = record >= 0
    slot = tl.load(page_table + record, mask=valid, other=-1)
    hit = slot >= 0
    missing = valid & (slot < 0)
    # One reduction for two counts: of valid entries, and of those that ask for a missing record (some may ask for the same one).
    BITS: tl.constexpr = 16 if K_BLOCK < 32768 else 32
    NUMBER: tl.constexpr = tl.int32 if K_BLOCK < 32768 else tl.int64
    both = tl.sum((valid.to(NUMBER) << BITS) + missing.to(NUMBER), axis=0)
    asking = (both & ((1 << BITS) - 1)).to(tl.int32)
    count = asking

    if (asking > 0) | (history > slot_count):
        head, tail = make_room(uses, stamps, head, tail, asking + k, log_length, CLEAR_BLOCK)
        # Of the entries that ask for the same missing record, the first one fetches it: it wins the minimum.
        claim = index - (1 << 30)
        tl.atomic_min(page_table + record, claim, mask=missing, sem="relaxed")
        # Room for what is fetched, then one entry for each of the selection, what is named first being the most recent. Those
        # that are no hits stay unwritten: to close the gaps would take a prefix sum.
        entry = tail + asking + k - 1 - index
        tl.store(uses + entry, slot, mask=hit)
        tl.atomic_max(stamps + slot, entry, mask=hit, sem="relaxed")  # of duplicates the first one counts

        if asking > 0:
            # The first entries to look at, on their way while the claims are.
            start = head
            scan = tl.arange(0, SCAN_BLOCK)
            oldest = tl.load(uses + start + scan, mask=start + scan < tail, other=0)
            tl.debug_barrier()
            winner = tl.load(page_table + record, mask=missing, other=0)
            fetched = missing & (winner == claim)
            place_among = tl.cumsum(fetched.to(tl.int32), axis=0)
            count = tl.max(place_among, axis=0)
            rank = place_among - 1
            tl.store(plan_records + rank, record, mask=fetched)

            # The victims are the first current entries: those of hits are outdated now.
            found = 0
            while found < count:
                place = start + scan
                current = (place < tail) & (tl.load(stamps + oldest, mask=place < tail, other=-1) == place)
                start += SCAN_BLOCK
                following = tl.load(uses + start + scan, mask=start + scan < tail, other=0)
                victim_rank = found + tl.cumsum(current.to(tl.int32), axis=0) - 1
                victim = current & (victim_rank < count)
                tl.store(plan_slots + victim_rank, oldest, mask=victim)
                head = tl.maximum(head, tl.max(tl.where(victim, place + 1, 0), axis=0))
                found = tl.max(victim_rank, axis=0) + 1
                oldest = following
            tl.debug_barrier()

            new_slot = tl.load(plan_slots + rank, mask=fetched, other=0)
            evicted = tl.load(slot_records + new_slot, mask=fetched, other=-1)
            tl.debug_barrier()  # of a short selection every warp has a copy: none writes before all have read
            tl.store(page_table + evicted, -1, mask=evicted >= 0)
            tl.store(page_table + record, new_slot, mask=fetched)
            tl.store(slot_records + new_slot, record, mask=fetched)
            entry = tail + asking - 1 - rank
            tl.store(uses + entry, new_slot, mask=fetched)
            tl.store(stamps + new_slot, entry, mask=fetched)
            slot = tl.where(fetched, new_slot, slot)
            if count < asking:
                tl.debug_barrier()  # duplicates read what the first installed
                slot = tl.where(missing, tl.load(page_table + record, mask=missing, other=-1), slot)
        tl.store(span, head)
        tl.store(span + 1, tail + asking + k)

    tl.store(slots + index, slot, mask=inside)
    tl.store(plan_missing + index, missing, mask=inside)
    tl.store(plan_records + index, -1, mask=inside & (index >= count))
    tl.store(plan_slots + index, -1, mask=inside & (index >= count))
    tl.store(plan_count + lane, count)
    tl.store(selected, selected_before + (both >> BITS))
    tl.store(selected + 1, missed_before + count)


def resolve(
    selection: torch.Tensor,
    position: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    recency: Recency,
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
    slot_count = slot_records.shape[1]
    _check(selection, slot_count, counters, slots, plan)
    check_state(lanes, page_table, slot_records)
    check_recency(recency, lanes, slot_count)
    check_position(position)
    if not use_triton(slot_records):
        reference.resolve(
            selection, position, page_table, slot_records, recency, counters, slots, plan, tokens_per_record
        )
        return
    k_block = block_of(k)
    with on_device_of(slot_records):
        _resolve_kernel[(lanes,)](
            selection,
            position,
            page_table,
            slot_records,
            *recency,
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
            recency.uses.shape[1],
            tokens_per_record,
            k_block,
            min(block_of(slot_count), _CLEAR_BLOCK),
            min(k_block, _SCAN_BLOCK),
            **early_launch(slot_records),
            num_warps=4 if k_block <= 512 else 8,
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
    check_selection(selection)
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
