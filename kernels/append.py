"""Append one token per lane, to the host pool and to a slot of the hot buffer; `claim` gives the slot alone, before that."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import (
    block_of,
    check_host_rows,
    check_position,
    check_state,
    check_tokens,
    lanes_each,
    on_device_of,
    use_triton,
)
from .early_launch import early_launch, wait_for_previous
from .recency import Recency, check_recency, make_room

_CLEAR_BLOCK = 4096  # entries of a full log looked at at a time
_SCAN_BLOCK = 256  # entries looked at at a time in search of the least recently used slot


@triton.jit
def _slot_of(
    record,
    is_first,
    lane,
    host_rows,
    page_table,
    slot_records,
    uses,
    stamps,
    span,
    table_stride,
    host_rows_stride,
    heads,
    slot_count,
    log_length,
    CLEAR_BLOCK: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    TAKES: tl.constexpr = True,
):
    """The slot of a record, -1 for none; where its first token comes and it has none, it takes the least recently used one.

    Not without `TAKES`: that it has none is to stay so.
    """
    page_table += lane * table_stride
    slot_records += lane * slot_count
    uses += lane * log_length
    stamps += lane * slot_count
    span += lane * 2

    slot = tl.load(page_table + record)
    if TAKES & is_first & (slot < 0):
        head, tail = make_room(uses, stamps, tl.load(span), tl.load(span + 1), 1, log_length, CLEAR_BLOCK)
        first = tail
        start = head
        while first == tail:
            place = start + tl.arange(0, SCAN_BLOCK)
            used = tl.load(uses + place, mask=place < tail, other=0)
            current = (place < tail) & (tl.load(stamps + used, mask=place < tail, other=-1) == place)
            first = tl.min(tl.where(current, place, tail), axis=0)
            start += SCAN_BLOCK
        slot = tl.load(uses + first)
        evicted = tl.load(slot_records + slot)
        tl.debug_barrier()  # every thread has read the log and the table
        tl.store(span, first + 1)
        tl.store(span + 1, tail + 1)
        tl.store(uses + tail, slot)
        tl.store(stamps + slot, tail)
        tl.store(page_table + evicted, -1, mask=evicted >= 0)
        tl.store(page_table + record, slot)
        tl.store(slot_records + slot, record.to(tl.int32))
    # Also where `claim` gave the slot: it is a call of its own, and rows may have been rearranged since.
    row = lane // heads
    tl.store(
        host_rows + row * host_rows_stride + record, row.to(tl.int32), mask=is_first & (lane % heads == 0)
    )
    return slot


@triton.jit(do_not_specialize=["table_stride", "host_rows_stride", "heads", "slot_count", "log_length"])
def _claim_kernel(
    position,
    host_rows,
    page_table,
    slot_records,
    uses,
    stamps,
    span,
    table_stride,
    host_rows_stride,
    heads,
    slot_count,
    log_length,
    TOKENS: tl.constexpr,
    CLEAR_BLOCK: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per lane."""
    wait_for_previous(EARLY)
    at = tl.load(position)
    _slot_of(
        at // TOKENS,
        at % TOKENS == 0,
        tl.program_id(0).to(tl.int64),
        host_rows,
        page_table,
        slot_records,
        uses,
        stamps,
        span,
        table_stride,
        host_rows_stride,
        heads,
        slot_count,
        log_length,
        CLEAR_BLOCK,
        SCAN_BLOCK,
    )


@triton.jit(
    do_not_specialize=["table_stride", "host_rows_stride", "host_lanes", "heads", "slot_count", "log_length"]
)
def _append_kernel(
    keys,
    values,
    position,
    pool,
    host_rows,
    buffer,
    page_table,
    slot_records,
    uses,
    stamps,
    span,
    keys_stride,
    values_stride,
    table_stride,
    host_rows_stride,
    host_lanes,
    heads,
    slot_count,
    log_length,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    CLEAR_BLOCK: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    TAKES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per lane."""
    wait_for_previous(EARLY)
    PART_WIDTH: tl.constexpr = TOKENS * (KEY_WIDTH + VALUE_WIDTH)
    RECORD_WIDTH: tl.constexpr = PARTS * PART_WIDTH
    lane = tl.program_id(0).to(tl.int64)
    at = tl.load(position)
    record = at // TOKENS
    offset = at % TOKENS
    slot = _slot_of(
        record,
        offset == 0,
        lane,
        host_rows,
        page_table,
        slot_records,
        uses,
        stamps,
        span,
        table_stride,
        host_rows_stride,
        heads,
        slot_count,
        log_length,
        CLEAR_BLOCK,
        SCAN_BLOCK,
        TAKES,
    )

    host = pool + (record * host_lanes + lane) * RECORD_WIDTH
    here = buffer + (lane * slot_count + slot) * RECORD_WIDTH
    for part in tl.static_range(PARTS):
        column = tl.arange(0, KEY_BLOCK)
        inside = column < KEY_WIDTH
        key = tl.load(keys + (lane * PARTS + part) * keys_stride + column, mask=inside)
        key_at = part * PART_WIDTH + offset * KEY_WIDTH + column
        tl.store(host + key_at, key, mask=inside)
        if slot >= 0:
            tl.store(here + key_at, key, mask=inside)
        if VALUE_WIDTH > 0:
            column = tl.arange(0, VALUE_BLOCK)
            inside = column < VALUE_WIDTH
            value = tl.load(values + (lane * PARTS + part) * values_stride + column, mask=inside)
            value_at = part * PART_WIDTH + TOKENS * KEY_WIDTH + offset * VALUE_WIDTH + column
            tl.store(host + value_at, value, mask=inside)
            if slot >= 0:
                tl.store(here + value_at, value, mask=inside)


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    buffer: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    recency: Recency,
    tokens_per_record: int,
    claimed: bool = False,
) -> None:
    """Store one new token per lane, in the host pool and in a slot; see `reference.append`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    lanes, key_width = slot_records.shape[0], keys.shape[1]
    value_width = values.shape[1]
    _check(keys, values, pool, buffer, slot_records, tokens_per_record)
    check_state(lanes, page_table, slot_records)
    check_recency(recency, lanes, slot_records.shape[1])
    check_position(position)
    heads = check_host_rows(host_rows, lanes)
    if not use_triton(slot_records):
        reference.append(
            keys,
            values,
            position,
            pool,
            host_rows,
            buffer,
            page_table,
            slot_records,
            recency,
            tokens_per_record,
            claimed,
        )
        return
    slot_count = slot_records.shape[1]
    with on_device_of(slot_records):
        _append_kernel[(lanes,)](
            keys,
            values,
            position,
            pool,
            host_rows,
            buffer,
            page_table,
            slot_records,
            *recency,
            keys.stride(0),
            values.stride(0),
            page_table.stride(0),
            host_rows.stride(0),
            pool.shape[1],
            heads,
            slot_count,
            recency.uses.shape[1],
            keys.shape[0] // lanes,
            tokens_per_record,
            key_width,
            value_width,
            block_of(key_width),
            block_of(value_width),
            *_tiles(slot_count),
            not claimed,
            **early_launch(buffer),
            num_warps=4,
        )


def claim(
    position: torch.Tensor,
    host_rows: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    recency: Recency,
    tokens_per_record: int,
) -> None:
    """Give the record of a new token its slot, ahead of `append`; see `reference.claim`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    lanes, slot_count = slot_records.shape
    check_state(lanes, page_table, slot_records)
    check_recency(recency, lanes, slot_count)
    check_position(position)
    heads = check_host_rows(host_rows, lanes)
    if not use_triton(slot_records):
        reference.claim(position, host_rows, page_table, slot_records, recency, tokens_per_record)
        return
    with on_device_of(slot_records):
        _claim_kernel[(lanes,)](
            position,
            host_rows,
            page_table,
            slot_records,
            *recency,
            page_table.stride(0),
            host_rows.stride(0),
            heads,
            slot_count,
            recency.uses.shape[1],
            tokens_per_record,
            *_tiles(slot_count),
            **early_launch(slot_records),
            num_warps=4,
        )


def _tiles(slot_count: int) -> tuple[int, int]:
    """Entries of the log that are cleared, and looked at, at a time."""
    return min(block_of(slot_count), _CLEAR_BLOCK), min(block_of(slot_count), _SCAN_BLOCK)


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: torch.Tensor,
    buffer: torch.Tensor,
    slot_records: torch.Tensor,
    tokens_per_record: int,
) -> None:
    lanes, record_width = slot_records.shape[0], pool.shape[2]
    parts = lanes_each(keys.shape[0], lanes, "slot_records", "lanes")
    check_tokens(keys, values, pool, buffer, tokens_per_record, parts)
    if buffer.shape != (lanes, slot_records.shape[1], record_width):
        raise ValueError(
            f"buffer must be {[lanes, slot_records.shape[1], record_width]}, got {list(buffer.shape)}"
        )
