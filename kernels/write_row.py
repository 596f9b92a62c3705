"""Store one token per lane in the host pool and in a slot that another layer's `append` has chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, check_host_rows, check_position, check_tokens, on_device_of, use_triton


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
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """One program per lane."""
    ROW_WIDTH: tl.constexpr = KEY_WIDTH + VALUE_WIDTH
    lane = tl.program_id(0).to(tl.int64)
    record = tl.load(position)
    slot = tl.load(slots + lane)
    row = lane // heads
    tl.store(host_rows + row * host_rows_stride + record, row.to(tl.int32), mask=lane % heads == 0)

    host = pool + (record * host_lanes + lane) * ROW_WIDTH
    here = buffer + (lane * slot_count + slot) * ROW_WIDTH
    column = tl.arange(0, KEY_BLOCK)
    inside = column < KEY_WIDTH
    key = tl.load(keys + lane * keys_stride + column, mask=inside)
    tl.store(host + column, key, mask=inside)
    if slot >= 0:
        tl.store(here + column, key, mask=inside)
    if VALUE_WIDTH > 0:
        column = tl.arange(0, VALUE_BLOCK)
        inside = column < VALUE_WIDTH
        value = tl.load(values + lane * values_stride + column, mask=inside)
        tl.store(host + KEY_WIDTH + column, value, mask=inside)
        if slot >= 0:
            tl.store(here + KEY_WIDTH + column, value, mask=inside)


def write_row(
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    buffer: torch.Tensor,
) -> None:
    """Store one new record of one token per lane, in the host pool and in a slot; see `reference.write_row`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    _check(keys, values, slots, pool, buffer)
    check_position(position)
    lanes, key_width = keys.shape
    value_width = values.shape[1]
    heads = check_host_rows(host_rows, lanes)
    if not use_triton(buffer):
        reference.write_row(keys, values, position, slots, pool, host_rows, buffer)
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
            key_width,
            value_width,
            block_of(key_width),
            block_of(value_width),
            num_warps=4,
        )


def _check(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, buffer: torch.Tensor
) -> None:
    check_tokens(keys, values, pool, buffer, 1)
    lanes, width = keys.shape[0], pool.shape[2]
    if buffer.shape[0] != lanes or buffer.shape[2] != width:
        raise ValueError(f"buffer must be [{lanes}, B, {width}], got {list(buffer.shape)}")
    if slots.dtype is not torch.int32 or slots.shape != (lanes,) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 [{lanes}], got {slots.dtype} {list(slots.shape)}")
