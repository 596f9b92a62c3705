"""Absorbed multi-head latent attention of one query token over selected rows, read from their slots."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, ceil_div, on_device_of, shared_memory, use_triton
from .early_launch import early_launch, wait_for_previous
from .merge_splits import MAX_SPLITS, merge_splits, split_results, store_split

_HEADS, _ROWS = 64, 64  # in a product, at most
_FP32_HEADS, _FP32_ROWS = 16, 32  # without tensor cores
_STAGES = 2  # blocks of rows in shared memory
_SPARE_MEMORY = 8192  # bytes of shared memory for what the blocks leave over
_MULTIPROCESSORS = 132  # of an H100 or H200; fixed, so that the split depends on shapes alone


@triton.jit
def _load_slots(selection, slots, index, k):
    """Slots of the entries `index` of a selection; -1 where nothing is selected."""
    record = tl.load(selection + index, mask=index < k, other=-1)
    slot = tl.load(slots + index, mask=index < k, other=-1)
    return tl.where(record >= 0, slot, -1).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "selection_stride",
        "slots_stride",
        "sharing",
        "slot_count",
        "k",
        "splits",
        "split_rows",
    ]
)
def _mla_split_kernel(
    query,
    buffer,
    selection,
    slots,
    output,
    statistics,
    scale,
    query_lane_stride,
    query_head_stride,
    selection_stride,
    slots_stride,
    sharing,
    slot_count,
    k,
    splits,
    split_rows,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (lane, split, block of heads), the last fastest, so that a row is read once from memory.

    Flash attention of a block of heads over one stretch of the lane's selection. A single split leaves the
    result; several leave the sum of values, unnormalised, and the maximum and the sum of the weights.
    """
    wait_for_previous(EARLY, launch_next=False)
    KEY_WIDTH: tl.constexpr = VALUE_WIDTH + ROPE_WIDTH
    HEAD_BLOCKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    lane_split = tl.program_id(0) // HEAD_BLOCKS
    lane = (lane_split // splits).to(tl.int64)
    head = tl.program_id(0) % HEAD_BLOCKS * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, VALUE_BLOCK)
    rope_column = tl.arange(0, ROPE_BLOCK)
    selection += lane * selection_stride
    slots += lane * slots_stride
    buffer += lane // sharing * slot_count * KEY_WIDTH

    head_at = query + lane * query_lane_stride + head.to(tl.int64)[:, None] * query_head_stride
    q_mask = (head < HEADS)[:, None] & (column < VALUE_WIDTH)[None, :]
    q = tl.load(head_at + column[None, :], mask=q_mask, other=0.0)
    if ROPE_WIDTH > 0:
        q_rope_mask = (head < HEADS)[:, None] & (rope_column < ROPE_WIDTH)[None, :]
        q_rope = tl.load(head_at + VALUE_WIDTH + rope_column[None, :], mask=q_rope_mask, other=0.0)

    maximum = tl.full([HEAD_BLOCK], -1.0e38, tl.float32)  # finite: -inf - -inf would be NaN
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    values = tl.zeros([HEAD_BLOCK, VALUE_BLOCK], tl.float32)
    first = lane_split % splits * split_rows
    index = first + tl.arange(0, ROW_BLOCK)
    next_slot = _load_slots(selection, slots, index, k)
    # Else `values` might come from before the loop, and ptxas would let each of Hopper's products wait for the one before.
    tl.assume(split_rows > 0)
    for start in range(0, split_rows, ROW_BLOCK):
        # Slots are loaded a step before the rows they point to, so that no step waits for memory twice.
        slot = next_slot
        next_slot = _load_slots(selection, slots, index + (start + ROW_BLOCK), k)
        selected = slot >= 0
        row_at = buffer + slot.to(tl.int64)[:, None] * KEY_WIDTH
        row_mask = selected[:, None] & (column < VALUE_WIDTH)[None, :]
        rows = tl.load(row_at + column[None, :], mask=row_mask, other=0.0)
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * scale
        if ROPE_WIDTH > 0:
            rope_mask = selected[:, None] & (rope_column < ROPE_WIDTH)[None, :]
            rope = tl.load(row_at + VALUE_WIDTH + rope_column[None, :], mask=rope_mask, other=0.0)
            scores += tl.dot(q_rope, tl.trans(rope), input_precision="ieee") * scale
        weights = scores
        new_maximum = maximum
        keep = total
        # Always true. Of a product that flows into another, Triton makes every warp group compute the whole; the
        # branch hides the flow, and the groups share it. For the same reason both parts are scaled on their own.
        if start < split_rows:
            scores = tl.where(selected[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_maximum[:, None])
            keep = tl.exp2(maximum - new_maximum)
            total = total * keep + tl.sum(weights, axis=1)
        maximum = new_maximum
        values = values * keep[:, None]
        values = tl.dot(weights.to(rows.dtype), rows, values, input_precision="ieee")

    at = lane_split.to(tl.int64) * HEADS + head
    store_split(output, statistics, at, head < HEADS, column, maximum, total, values, VALUE_WIDTH)


def mla_decode(
    query: torch.Tensor,
    buffer: torch.Tensor,
    selection: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    value_width: int,
) -> torch.Tensor:
    """Absorbed attention of one query token per lane over the selected rows; see `reference.mla_decode`.

    The result's bits depend on the selection and its order, never on the slots.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    _check(query, buffer, selection, slots, value_width)
    if not use_triton(buffer):
        return reference.mla_decode(query, buffer, selection, slots, scaling, value_width)
    lanes, heads, key_width = query.shape
    buffers, slot_count, _ = buffer.shape
    k = selection.shape[1]
    rope_width = key_width - value_width
    value_block, rope_block = block_of(value_width, 16), block_of(rope_width, 16)
    row_bytes = (value_block + (rope_block if rope_width else 0)) * buffer.element_size()
    head_block, row_block, num_warps = _blocks(
        lanes, heads, k, row_bytes, buffer.element_size(), shared_memory(buffer)
    )
    programs = lanes * ceil_div(heads, head_block)
    splits, split_blocks = _split(programs, ceil_div(k, row_block), _MULTIPROCESSORS * 8 // num_warps)

    output = query.new_empty((lanes, heads, value_width))
    partial, statistics = split_results(output, splits)
    with on_device_of(buffer):
        _mla_split_kernel[(programs * splits,)](
            query,
            buffer,
            selection,
            slots,
            partial,
            statistics,
            scaling * math.log2(math.e),
            query.stride(0),
            query.stride(1),
            selection.stride(0),
            slots.stride(0),
            lanes // buffers,
            slot_count,
            k,
            splits,
            split_blocks * row_block,
            heads,
            value_width,
            rope_width,
            head_block,
            value_block,
            rope_block,
            row_block,
            **early_launch(buffer),
            num_warps=num_warps,
            num_stages=_STAGES,
        )
        if statistics is not None:
            merge_splits(partial, statistics, output)
    return output


@functools.lru_cache(maxsize=1024)
def _blocks(
    lanes: int, heads: int, k: int, row_bytes: int, element_size: int, shared_memory: int
) -> tuple[int, int, int]:
    """How many heads and rows a product has, and the warps of a program.

    As many heads as can be, what fits of their queries and of `_STAGES` blocks of rows: each block of heads reads all rows. Fewer
    where the GPU has places for more programs than all splits make.
    """
    most_heads, row_block = (_HEADS, _ROWS) if element_size == 2 else (_FP32_HEADS, _FP32_ROWS)
    head_block = min(block_of(heads, 16), most_heads)
    room = shared_memory - _SPARE_MEMORY
    while (head_block + _STAGES * row_block) * row_bytes > room and max(head_block, row_block) > 16:
        if row_block >= head_block:
            row_block //= 2
        else:
            head_block //= 2

    def programs(head_block: int) -> int:
        return lanes * ceil_div(heads, head_block) * min(ceil_div(k, row_block), MAX_SPLITS)

    while head_block > 16 and programs(head_block // 2) <= _MULTIPROCESSORS:
        head_block //= 2
    # Two programs of few heads share a multiprocessor, if there are so many.
    shared = head_block == 16 and element_size == 2 and programs(head_block) > _MULTIPROCESSORS
    return head_block, row_block, 4 if shared else 8


@functools.lru_cache(maxsize=1024)
def _split(programs: int, blocks: int, room: int) -> tuple[int, int]:
    """Into how many parts a lane's `blocks` of rows are split, and the blocks of one part.

    `programs` is their number without a split, `room` how many the GPU runs at once. What a program takes beside
    its blocks is worth one block, and two more to write its part in fp32 and have it merged.
    """

    def time(splits: int) -> int:
        return ceil_div(programs * splits, room) * (ceil_div(blocks, splits) + (1 if splits == 1 else 3))

    split_blocks = ceil_div(blocks, min(range(1, min(blocks, MAX_SPLITS) + 1), key=time))
    return ceil_div(blocks, split_blocks), split_blocks


def _check(query, buffer, selection, slots, value_width) -> None:
    lanes, _, key_width = query.shape
    if query.dtype is not buffer.dtype:
        raise ValueError(f"query and buffer must have one dtype, got {query.dtype} and {buffer.dtype}")
    if query.stride(2) != 1:
        raise ValueError(f"query must be contiguous in its last dimension, got strides {query.stride()}")
    if buffer.shape[2] != key_width or not buffer.is_contiguous():
        raise ValueError(f"buffer must be a contiguous [buffers, B, {key_width}], got {list(buffer.shape)}")
    if buffer.shape[0] == 0 or lanes % buffer.shape[0]:
        raise ValueError(f"buffer has {buffer.shape[0]} rows of slots, which must divide the {lanes} lanes")
    if not 0 < value_width <= key_width:
        raise ValueError(f"value_width must be from 1 to the key width {key_width}, got {value_width}")
    for name, tensor in (("selection", selection), ("slots", slots)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if tensor.shape[0] != lanes or tensor.shape != selection.shape or tensor.shape[1] < 1:
            raise ValueError(f"{name} must be [{lanes}, k >= 1] like the selection, got {list(tensor.shape)}")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}"
            )
