"""The lightning indexer of DeepSeek sparse attention: how relevant each key is to each query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, ceil_div, on_device_of, use_triton

_QUERIES = 32  # of a program, one group after the other
_KEYS, _COLUMNS = 128, 128  # of a product; a column is one head of one query
_FP32_KEYS, _FP32_COLUMNS = 16, 64  # without tensor cores


@triton.jit(do_not_specialize=["scale", "start", "queries", "history"])
def _indexer_kernel(
    query,
    keys,
    weights,
    allowed,
    scores,
    scale,
    start,
    queries,
    history,
    query_batch_stride,
    query_stride,
    keys_batch_stride,
    weights_batch_stride,
    weights_stride,
    allowed_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """Programs (block of keys, block of queries, batch row): the keys stay, `TOGETHER` queries at a time pass by.

    A product has the keys as its rows and the heads of the queries as its columns, so that the sum over the heads
    stays within a few threads.
    """
    batch = tl.program_id(2).to(tl.int64)
    first_key = tl.program_id(0) * KEY_BLOCK
    first_query = tl.program_id(1) * QUERY_BLOCK
    last_query = tl.minimum(first_query + QUERY_BLOCK, queries)
    # The queries before this one see none of the keys.
    first_seeing = tl.maximum(first_query, (first_key - start) // TOGETHER * TOGETHER)
    first_seeing = tl.minimum(first_seeing, last_query)

    key = first_key + tl.arange(0, KEY_BLOCK)
    column = tl.arange(0, WIDTH_BLOCK)
    readable = key < tl.where(first_seeing < last_query, history, 0)
    keys += batch * keys_batch_stride
    k = tl.load(
        keys + key.to(tl.int64)[:, None] * WIDTH + column[None, :],
        mask=readable[:, None] & (column < WIDTH)[None, :],
        other=0.0,
    )
    if allowed is not None:
        readable &= tl.load(allowed + batch * allowed_stride + key, mask=readable, other=0) != 0

    together = tl.arange(0, TOGETHER)
    row = tl.arange(0, TOGETHER * HEAD_BLOCK)
    head = row % HEAD_BLOCK
    query += batch * query_batch_stride
    weights += batch * weights_batch_stride
    scores += batch * queries * history
    for at in range(first_query, first_seeing, TOGETHER):
        target = scores + (at + together).to(tl.int64)[None, :] * history + key[:, None]
        inside = (at + together < last_query)[None, :] & (key < history)[:, None]
        tl.store(target, tl.full([KEY_BLOCK, TOGETHER], float("-inf"), tl.float32), mask=inside)
    for at in range(first_seeing, last_query, TOGETHER):
        position = (at + row // HEAD_BLOCK).to(tl.int64)
        real = (position < last_query) & (head < HEADS)
        weight = tl.load(weights + position * weights_stride + head, mask=real, other=0.0) * scale
        q = tl.load(
            query + (position * query_stride + head * WIDTH)[:, None] + column[None, :],
            mask=real[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        score = tl.sum(tl.reshape(products, [KEY_BLOCK, TOGETHER, HEAD_BLOCK]), axis=2)
        visible = readable[:, None] & (key[:, None] <= start + at + together[None, :])
        target = scores + (at + together).to(tl.int64)[None, :] * history + key[:, None]
        inside = (at + together < last_query)[None, :] & (key < history)[:, None]
        tl.store(target, tl.where(visible, score, float("-inf")), mask=inside)


def lightning_indexer(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    start: int,
    allowed: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """How relevant each key is to each query; see `reference.lightning_indexer`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names, or the scale is not positive.
    """
    _check(query, keys, weights, allowed)
    if softmax_scale <= 0:  # it is taken out of the relu
        raise ValueError(f"softmax_scale must be positive, got {softmax_scale}")
    if not use_triton(keys):
        return reference.lightning_indexer(query, keys, weights, start, allowed, softmax_scale)
    batch, queries, heads, width = query.shape
    history = keys.shape[1]
    wide = query.element_size() > 2
    most_columns, key_block = (_FP32_COLUMNS, _FP32_KEYS) if wide else (_COLUMNS, _KEYS)
    head_block = block_of(heads, 16)
    together = max(1, min(block_of(queries), most_columns // head_block))
    scores = query.new_empty((batch, queries, history), dtype=torch.float32)
    grid = (ceil_div(history, key_block), ceil_div(queries, _QUERIES), batch)
    with on_device_of(keys):
        _indexer_kernel[grid](
            query,
            keys,
            weights,
            allowed,
            scores,
            softmax_scale,
            start,
            queries,
            history,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            weights.stride(0),
            weights.stride(1),
            0 if allowed is None else allowed.stride(0),
            heads,
            width,
            head_block,
            block_of(width, 16),
            together,
            _QUERIES,
            key_block,
            num_warps=8 if wide else 4,
            num_stages=2,
        )
    return scores


def _check(query, keys, weights, allowed) -> None:
    batch, queries, heads, width = query.shape
    if query.dtype is not keys.dtype:
        raise ValueError(f"query and keys must have one dtype, got {query.dtype} and {keys.dtype}")
    if query.stride()[2:] != (width, 1):
        raise ValueError(f"query must be contiguous in its last two dimensions, got strides {query.stride()}")
    if keys.shape[0] != batch or keys.shape[2] != width or keys.stride()[1:] != (width, 1):
        raise ValueError(
            f"keys must be [{batch}, T, {width}] and contiguous within a batch row, "
            f"got {list(keys.shape)} with strides {keys.stride()}"
        )
    if weights.dtype is not torch.float32 or weights.shape != (batch, queries, heads):
        raise ValueError(
            f"weights must be float32 [{batch}, {queries}, {heads}], got {weights.dtype} {list(weights.shape)}"
        )
    if weights.stride(2) != 1:
        raise ValueError(f"weights must be contiguous in its last dimension, got strides {weights.stride()}")
    if allowed is None:
        return
    if allowed.dtype is not torch.bool or allowed.shape != keys.shape[:2] or allowed.stride(1) != 1:
        raise ValueError(
            f"allowed must be bool {list(keys.shape[:2])} and contiguous in its last dimension, "
            f"got {allowed.dtype} {list(allowed.shape)} with strides {allowed.stride()}"
        )
