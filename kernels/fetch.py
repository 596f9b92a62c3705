"""Fetch planned records out of pinned host memory into their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import QUAD_BYTES, bytes_of_record, ceil_div, check_host_rows, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous
from .miss_plan import MissPlan

_QUADS_PER_WARP = 128  # per round: 4 reads of 16 bytes in flight per thread
_PROGRAMS = 512  # over all lanes: one program alone reads host memory at a tenth of the link's speed
_PROGRAMS_PER_LANE = 128
_FEW_WARPS, _FEW_QUADS_PER_WARP = 32, 256


@triton.jit(do_not_specialize=["host_rows_stride", "host_lanes", "heads", "slot_count", "k", "lanes"])
def _fetch_kernel(
    pool,
    host_rows,
    plan_records,
    plan_slots,
    plan_count,
    buffer,
    host_rows_stride,
    host_lanes,
    heads,
    slot_count,
    k,
    lanes,
    RECORD_QUADS: tl.constexpr,
    QUADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (lane, part): the parts share the lane's misses, cut into quads of 16 bytes, not into records.

    So a record of any size keeps every thread busy, several small ones or a piece of a large one at a time. Where there are fewer
    programs than lanes, each goes on to further lanes.
    """
    wait_for_previous(EARLY)
    pool = pool.to(tl.pointer_type(tl.int32))
    buffer = buffer.to(tl.pointer_type(tl.int32))
    word = tl.arange(0, 4)[None, :]

    lane = tl.program_id(0).to(tl.int64)
    while lane < lanes:
        rows = host_rows + lane // heads * host_rows_stride
        total = tl.load(plan_count + lane) * RECORD_QUADS
        start = tl.program_id(1) * QUADS
        while start < total:
            quad = start + tl.arange(0, QUADS)
            inside = quad < total
            miss = lane * k + quad // RECORD_QUADS
            within = quad % RECORD_QUADS
            record = tl.load(plan_records + miss, mask=inside, other=0).to(tl.int64)
            slot = tl.load(plan_slots + miss, mask=inside, other=0)
            host_row = tl.load(rows + record, mask=inside, other=0)
            source = (record * host_lanes + host_row * heads + lane % heads) * RECORD_QUADS + within
            target = (lane * slot_count + slot) * RECORD_QUADS + within
            data = tl.load(pool + source[:, None] * 4 + word, mask=inside[:, None])
            tl.store(buffer + target[:, None] * 4 + word, data, mask=inside[:, None])
            start += tl.num_programs(1) * QUADS
        lane += tl.num_programs(0)


def fetch(
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    plan: MissPlan,
    buffer: torch.Tensor,
    programs: int | None = None,
) -> None:
    """Copy the planned records from the host pool into their slots; see `reference.fetch`.

    Raises
    ------
    ValueError
        If a record is not a multiple of 16 bytes, or a shape, dtype or memory layout is not as the reference
        names it.
    """
    record_quads = bytes_of_record(buffer) // QUAD_BYTES
    _check(pool, plan, buffer)
    lanes, slot_count, _ = buffer.shape
    heads = check_host_rows(host_rows, lanes)
    if not use_triton(buffer):
        reference.fetch(pool, host_rows, plan, buffer)
        return
    k = plan.records.shape[1]
    if programs is None:
        warps, rows = 4, lanes
        parts = min(_PROGRAMS_PER_LANE, max(1, _PROGRAMS // lanes))
    else:  # few programs must each have more in flight to keep the link busy
        warps, rows, parts = _FEW_WARPS, 1, programs
    quads = warps * (_QUADS_PER_WARP if programs is None else _FEW_QUADS_PER_WARP)
    parts = min(parts, ceil_div(k * record_quads, quads))
    with on_device_of(buffer):
        _fetch_kernel[(rows, parts)](
            pool,
            host_rows,
            plan.records,
            plan.slots,
            plan.count,
            buffer,
            host_rows.stride(0),
            pool.shape[1],
            heads,
            slot_count,
            k,
            lanes,
            record_quads,
            quads,
            **early_launch(buffer),
            num_warps=warps,
        )


def _check(pool: torch.Tensor, plan: MissPlan, buffer: torch.Tensor) -> None:
    lanes, _, record_width = buffer.shape
    if pool.dtype is not buffer.dtype:
        raise ValueError(f"pool and buffer must have one dtype, got {pool.dtype} and {buffer.dtype}")
    if pool.shape[1] < lanes or pool.shape[2] != record_width:
        raise ValueError(
            f"pool must be [records, at least {lanes}, {record_width}] to suit the buffer, "
            f"got {list(pool.shape)}"
        )
    if not (pool.is_contiguous() and buffer.is_contiguous()):
        raise ValueError("pool and buffer must be contiguous")
    if (
        plan.records.shape[0] != lanes
        or plan.slots.shape != plan.records.shape
        or plan.count.shape != (lanes,)
    ):
        raise ValueError(
            f"the plan must be [{lanes}, k], [{lanes}, k] and [{lanes}], got {list(plan.records.shape)}, "
            f"{list(plan.slots.shape)} and {list(plan.count.shape)}"
        )
    if not plan.records.dtype is plan.slots.dtype is plan.count.dtype is torch.int32:
        raise ValueError("the plan must be int32")
    if not (plan.records.is_contiguous() and plan.slots.is_contiguous()):
        raise ValueError("plan.records and plan.slots must be contiguous")
