"""Attention of one query token over selected records, read from their slots (grouped-query attention)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import (
    block_of,
    ceil_div,
    check_source,
    heads_per_row,
    lanes_each,
    on_device_of,
    shared_memory,
    use_triton,
)
from .early_launch import early_launch, wait_for_previous
from .merge_splits import MAX_SPLITS, merge_splits, split_results, store_split
from .miss_plan import HostSource

_TOKENS, _FP32_TOKENS = 128, 32  # read at a time, at most
_BLOCK_BYTES = 65536  # of the tokens read at a time, at most
_PROGRAMS = 264  # over all lanes: two per multiprocessor of an H100 or H200


@triton.jit
def _load_entries(selection, slots, index, k, TOKENS: tl.constexpr):
    """Records and slots that the tokens `index` of a selection are in; record -1 where nothing is selected."""
    entry = index // TOKENS
    record = tl.load(selection + entry, mask=entry < k, other=-1)
    slot = tl.load(slots + entry, mask=entry < k, other=-1)
    return record.to(tl.int64), slot.to(tl.int64)


@triton.jit(
    do_not_specialize=[
        "selection_stride",
        "allowed_stride",
        "host_rows_stride",
        "host_lanes",
        "heads",
        "sharing",
        "stretch",
        "k",
        "slot_count",
        "split_tokens",
    ]
)
def _gqa_split_kernel(
    query,
    buffer,
    selection,
    slots,
    position,
    allowed,
    pool,
    host_rows,
    missing,
    output,
    statistics,
    scale,
    query_lane_stride,
    query_row_stride,
    selection_stride,
    allowed_stride,
    host_rows_stride,
    host_lanes,
    heads,
    sharing,
    stretch,
    k,
    slot_count,
    split_tokens,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (lane, split): flash attention over one stretch of the lane's selected tokens.

    A single split leaves the result; several leave the sum of values, unnormalised, and the maximum and the sum of the weights.
    """
    wait_for_previous(EARLY, launch_next=False)
    RECORD_WIDTH: tl.constexpr = TOKENS * (KEY_WIDTH + VALUE_WIDTH)
    lane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    selection += lane * selection_stride
    slots += lane * k
    first = split * split_tokens + tl.arange(0, TOKEN_BLOCK)
    last = tl.load(position + lane // stretch)
    buffer += lane // sharing * slot_count * RECORD_WIDTH
    row = tl.arange(0, GROUP_BLOCK)
    key_column = tl.arange(0, KEY_BLOCK)
    value_column = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        query + lane * query_lane_stride + row.to(tl.int64)[:, None] * query_row_stride + key_column[None, :],
        mask=(row < GROUP)[:, None] & (key_column < KEY_WIDTH)[None, :],
        other=0.0,
    )

    # Slots are loaded a step before the tokens they point to, so that no step waits for memory twice; not where
    # there is a pool, which takes the registers for it.
    next_record, next_slot = _load_entries(selection, slots, first, k, TOKENS)
    maximum = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    values = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for start in range(0, split_tokens, TOKEN_BLOCK):
        index = first + start
        entry = index // TOKENS
        within = index % TOKENS
        if pool is None:
            record, slot = next_record, next_slot
            next_record, next_slot = _load_entries(selection, slots, index + TOKEN_BLOCK, k, TOKENS)
        else:
            record, slot = _load_entries(selection, slots, index, k, TOKENS)
        token = record * TOKENS + within
        readable = (record >= 0) & (token <= last)
        if allowed is not None:
            readable &= tl.load(allowed + lane // heads * allowed_stride + token, mask=readable, other=0) != 0

        # A slot may hold anything where its record has no token yet: what is not readable is not read either.
        base = buffer + slot * RECORD_WIDTH
        read = readable
        if pool is not None:
            # Loaded beside the slot whether missing or not: no load waits for another.
            host_row = tl.load(
                host_rows + lane // heads * host_rows_stride + record, mask=record >= 0, other=0
            )
            absent = tl.load(missing + lane * k + entry, mask=record >= 0, other=0) != 0
            host_lane = host_row * heads + lane % heads
            slot_at = base
            base = tl.where(absent, pool + (record * host_lanes + host_lane) * RECORD_WIDTH, base)
            kept = absent & (slot >= 0)
            read |= kept
        key_at = (within * KEY_WIDTH)[:, None] + key_column[None, :]
        value_at = (TOKENS * KEY_WIDTH + within * VALUE_WIDTH)[:, None] + value_column[None, :]
        key_mask = (key_column < KEY_WIDTH)[None, :]
        value_mask = (value_column < VALUE_WIDTH)[None, :]
        key = tl.load(base[:, None] + key_at, mask=read[:, None] & key_mask, other=0.0)
        value = tl.load(base[:, None] + value_at, mask=read[:, None] & value_mask, other=0.0)
        if pool is not None:  # the whole record, for queries that may read more of it
            tl.store(slot_at[:, None] + key_at, key, mask=kept[:, None] & key_mask)
            tl.store(slot_at[:, None] + value_at, value, mask=kept[:, None] & value_mask)
            value = tl.where(readable[:, None], value, 0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(readable[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - finite[:, None])
        keep = tl.exp2(maximum - finite)
        total = total * keep + tl.sum(weights, axis=1)
        values = values * keep[:, None]
        values += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum

    at = (lane * tl.num_programs(1) + split) * GROUP + row
    store_split(output, statistics, at, row < GROUP, value_column, maximum, total, values, VALUE_WIDTH)


def gqa_decode(
    query: torch.Tensor,
    buffer: torch.Tensor,
    selection: torch.Tensor,
    slots: torch.Tensor,
    position: torch.Tensor,
    allowed: torch.Tensor | None,
    tokens_per_record: int,
    key_width: int,
    scaling: float,
    source: HostSource | None = None,
) -> torch.Tensor:
    """Attention of one query token per lane over the selected records; see `reference.gqa_decode`.

    The result's bits depend on the selection and its order, never on the slots.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    lanes, group, _ = query.shape
    k = selection.shape[1]
    slot_count = buffer.shape[1]
    value_width = buffer.shape[2] // tokens_per_record - key_width
    _check(query, buffer, selection, slots, tokens_per_record, key_width)
    sharing = lanes_each(lanes, buffer.shape[0], "buffer", "buffers")
    if position.dtype is not torch.int64 or position.ndim != 1 or not position.is_contiguous():
        raise ValueError(f"position must be int64 [n], got {position.dtype} {list(position.shape)}")
    stretch = lanes_each(lanes, position.shape[0], "position", "elements")
    heads = 1
    if allowed is not None:
        if allowed.dtype is not torch.bool or allowed.stride(1) != 1:
            raise ValueError(
                f"allowed must be bool and contiguous in its last dimension, got {allowed.dtype} "
                f"with strides {allowed.stride()}"
            )
        heads = heads_per_row(lanes, allowed.shape[0], "allowed")
    if source is not None:
        heads = check_source(source, selection, buffer)
        if allowed is not None and allowed.shape[0] != source.host_rows.shape[0]:
            raise ValueError(
                f"allowed must have a row for each of the source's {source.host_rows.shape[0]} batch rows, "
                f"got {allowed.shape[0]}"
            )
    if not use_triton(buffer):
        return reference.gqa_decode(
            query, buffer, selection, slots, position, allowed, tokens_per_record, key_width, scaling, source
        )
    # How the tokens are split depends on shapes and the GPU alone, so the order of all sums does too.
    tokens = k * tokens_per_record
    key_block = block_of(key_width, 16)
    value_block = block_of(value_width, 16)
    token_bytes = (key_block + value_block) * query.element_size()
    token_block = min(block_of(tokens, 16), _TOKENS if query.element_size() == 2 else _FP32_TOKENS)
    # Keys and values are in shared memory, which two programs of a multiprocessor have between them.
    block_bytes = min(_BLOCK_BYTES, shared_memory(buffer) // 2)
    while token_block * token_bytes > block_bytes and token_block > 16:
        token_block //= 2
    blocks = ceil_div(tokens, token_block)
    split_blocks = ceil_div(blocks, min(max(1, _PROGRAMS // max(1, lanes)), MAX_SPLITS))
    splits = ceil_div(blocks, split_blocks)
    output = query.new_empty((lanes, group, value_width))
    partial, statistics = split_results(output, splits)
    with on_device_of(buffer):
        _gqa_split_kernel[(lanes, splits)](
            query,
            buffer,
            selection,
            slots,
            position,
            allowed,
            None if source is None else source.pool,
            None if source is None else source.host_rows,
            None if source is None else source.plan.missing,
            partial,
            statistics,
            scaling * math.log2(math.e),
            query.stride(0),
            query.stride(1),
            selection.stride(0),
            0 if allowed is None else allowed.stride(0),
            0 if source is None else source.host_rows.stride(0),
            0 if source is None else source.pool.shape[1],
            heads,
            sharing,
            stretch,
            k,
            slot_count,
            split_blocks * token_block,
            group,
            tokens_per_record,
            key_width,
            value_width,
            block_of(group, 16),
            key_block,
            value_block,
            token_block,
            **early_launch(buffer),
            num_warps=4 if token_bytes <= 512 else 8,
            num_stages=2,
        )
        if statistics is not None:
            merge_splits(partial, statistics, output)
    return output


def _check(
    query: torch.Tensor,
    buffer: torch.Tensor,
    selection: torch.Tensor,
    slots: torch.Tensor,
    tokens_per_record: int,
    key_width: int,
) -> None:
    lanes, _, width = query.shape
    if query.dtype is not buffer.dtype:
        raise ValueError(f"query and buffer must have one dtype, got {query.dtype} and {buffer.dtype}")
    if width != key_width or query.stride(2) != 1:
        raise ValueError(
            f"query must be [{lanes}, group, {key_width}] and contiguous in its last dimension, "
            f"got {list(query.shape)} with strides {query.stride()}"
        )
    record_width = buffer.shape[2]
    if record_width % tokens_per_record or not buffer.is_contiguous():
        raise ValueError(
            f"buffer must be a contiguous [buffers, B, {tokens_per_record} x (key width + value width)], "
            f"got {list(buffer.shape)}"
        )
    if record_width // tokens_per_record <= key_width:
        raise ValueError(
            f"buffer has {record_width // tokens_per_record} elements per token, "
            f"which must be more than the key width {key_width}"
        )
    if selection.shape[0] != lanes or slots.shape != selection.shape or selection.shape[1] < 1:
        raise ValueError(
            f"selection and slots must be [{lanes}, k >= 1], "
            f"got {list(selection.shape)} and {list(slots.shape)}"
        )
    if selection.dtype not in (torch.int32, torch.int64) or slots.dtype is not torch.int32:
        raise ValueError(
            f"selection must be int32 or int64 and slots int32, got {selection.dtype} and {slots.dtype}"
        )
    if (selection.shape[1] > 1 and selection.stride(1) != 1) or not slots.is_contiguous():
        raise ValueError("slots must be contiguous, selection in its last dimension")
