"""Store one token per lane in the host pool and in a slot that is already chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, check_host_rows, check_position, check_tokens, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous


@triton.jit(do_not_specialize=["host_rows_stride", "host_lanes", "heads", "slot_count"])
def _write_row_kernel(
    keys,
    values,
    position,
    slots,
    pool,
    host_rows,
    buffer,
    keys_stride,
    values_stride,
    host_rows_stride,
    host_lanes,
    heads,
    slot_count,
    TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per lane."""
    wait_for_previous(EARLY)
    RECORD_WIDTH: tl.constexpr = TOKENS * (KEY_WIDTH + VALUE_WIDTH)
    lane = tl.program_id(0).to(tl.int64)
    at = tl.load(position)
    record = at // TOKENS
    offset = at % TOKENS
    slot = tl.load(slots + lane)
    row = lane // heads
    tl.store(host_rows + row * host_rows_stride + record, row.to(tl.int32), mask=lane % heads == 0)

    host = pool + (record * host_lanes + lane) * RECORD_WIDTH
    here = buffer + (lane * slot_count + slot) * RECORD_WIDTH
    column = tl.arange(0, KEY_BLOCK)
    inside = column < KEY_WIDTH
    key = tl.load(keys + lane * keys_stride + column, mask=inside)
    key_at = offset * KEY_WIDTH + column
    tl.store(host + key_at, key, mask=inside)
    if slot >= 0:
        tl.store(here + key_at, key, mask=inside)
    if VALUE_WIDTH > 0:
        column = tl.arange(0, VALUE_BLOCK)
        inside = column < VALUE_WIDTH
        value = tl.load(values + lane * values_stride + column, mask=inside)
        value_at = TOKENS * KEY_WIDTH + offset * VALUE_WIDTH + column
        tl.store(host + value_at, value, mask=inside)
        if slot >= 0:
            tl.store(here + value_at, value, mask=inside)


def write_row(
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    buffer: torch.Tensor,
    tokens_per_record: int = 1,
) -> None:
    """Store one new token per lane, in the host pool and in a slot; see `reference.write_row`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    _check(keys, values, slots, pool, buffer, tokens_per_record)
    check_position(position)
    lanes, key_width = keys.shape
    value_width = values.shape[1]
    heads = check_host_rows(host_rows, lanes)
    if not use_triton(buffer):
        reference.write_row(keys, values, position, slots, pool, host_rows, buffer, tokens_per_record)
        return
    with on_device_of(buffer):
        _write_row_kernel[(lanes,)](
            keys,
            values,
            position,
            slots,
            pool,
            host_rows,
            buffer,
            keys.stride(0),
            values.stride(0),
            host_rows.stride(0),
            pool.shape[1],
            heads,
            buffer.shape[1],
            tokens_per_record,
            key_width,
            value_width,
            block_of(key_width),
            block_of(value_width),
            **early_launch(buffer),
            num_warps=4,
        )


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    buffer: torch.Tensor,
    tokens_per_record: int,
) -> None:
    check_tokens(keys, values, pool, buffer, tokens_per_record)
    lanes, width = keys.shape[0], pool.shape[2]
    if buffer.shape[0] != lanes or buffer.shape[2] != width:
        raise ValueError(f"buffer must be [{lanes}, B, {width}], got {list(buffer.shape)}")
    if slots.dtype is not torch.int32 or slots.shape != (lanes,) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 [{lanes}], got {slots.dtype} {list(slots.shape)}")
