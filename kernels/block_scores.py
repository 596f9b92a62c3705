"""How relevant each block of keys is to each query (the lightning indexer of MiniMax sparse attention)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, ceil_div, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous

_QUERIES = 128  # of a program, one group after the other
_COLUMNS = 128  # of a product; a column is one head of one query
_KEYS = 128  # of a product: a block of that size is one product
_FP32_KEYS, _FP32_COLUMNS = 16, 64  # without tensor cores


@triton.jit(do_not_specialize=["queries", "history", "blocks"])
def _block_scores_kernel(
    query,
    keys,
    hidden,
    scores,
    queries,
    history,
    blocks,
    query_batch_stride,
    query_head_stride,
    query_stride,
    keys_batch_stride,
    hidden_batch_stride,
    hidden_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (block of keys, stretch of queries, batch row): `TOGETHER` queries at a time pass by the keys of the block.

    A product has the keys as its rows and the heads of the queries as its columns; no score of a single key is stored.
    """
    wait_for_previous(EARLY)
    batch = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0)
    first_query = tl.program_id(1) * QUERY_BLOCK
    last_query = tl.minimum(first_query + QUERY_BLOCK, queries)
    column = tl.arange(0, WIDTH_BLOCK)
    together = tl.arange(0, TOGETHER)
    row = tl.arange(0, TOGETHER * HEAD_BLOCK)
    head = row % HEAD_BLOCK
    query += batch * query_batch_stride
    keys += batch * keys_batch_stride
    hidden += batch * hidden_batch_stride
    scores += batch * HEADS * queries * blocks

    for at in range(first_query, last_query, TOGETHER):
        position = (at + row // HEAD_BLOCK).to(tl.int64)
        real = (position < last_query) & (head < HEADS)
        best = tl.full([TOGETHER * HEAD_BLOCK], float("-inf"), tl.float32)
        for start in range(0, BLOCK, KEY_BLOCK):
            within = start + tl.arange(0, KEY_BLOCK)
            key = block * BLOCK + within
            inside = (within < BLOCK) & (key < history)
            seen = tl.load(
                hidden + (at + together).to(tl.int64)[None, :] * hidden_stride + key[:, None],
                mask=inside[:, None] & (at + together < last_query)[None, :],
                other=1,
            )
            seen = (seen == 0).to(tl.int32)
            if tl.max(tl.max(seen, axis=1), axis=0) > 0:  # a block of the future costs no product
                k = tl.load(
                    keys + key.to(tl.int64)[:, None] * WIDTH + column[None, :],
                    mask=inside[:, None] & (column < WIDTH)[None, :],
                    other=0.0,
                )
                q = tl.load(
                    query + (position * query_stride + head * query_head_stride)[:, None] + column[None, :],
                    mask=real[:, None] & (column < WIDTH)[None, :],
                    other=0.0,
                )
                products = tl.dot(k, tl.trans(q), input_precision="ieee")
                products = tl.reshape(products, [KEY_BLOCK, TOGETHER, HEAD_BLOCK])
                products = tl.where(seen[:, :, None] > 0, products, float("-inf"))
                highest = tl.max(tl.reshape(products, [KEY_BLOCK, TOGETHER * HEAD_BLOCK]), axis=0)
                best = tl.maximum(best, highest)
        target = scores + (head * queries.to(tl.int64) + position) * blocks + block
        tl.store(target, best, mask=real)


def block_scores(
    query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, block_size: int
) -> torch.Tensor:
    """How relevant each block of keys is to each query; see `reference.block_scores`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    _check(query, keys, hidden)
    if not use_triton(keys):
        return reference.block_scores(query, keys, hidden, block_size)
    batch, heads, queries, width = query.shape
    history = keys.shape[1]
    blocks = ceil_div(history, block_size)
    wide = query.element_size() > 2
    most_columns, most_keys = (_FP32_COLUMNS, _FP32_KEYS) if wide else (_COLUMNS, _KEYS)
    head_block = block_of(heads)
    together = max(ceil_div(16, head_block), min(block_of(queries), most_columns // head_block))
    scores = query.new_empty((batch, heads, queries, blocks), dtype=torch.float32)
    with on_device_of(keys):
        _block_scores_kernel[(blocks, ceil_div(queries, _QUERIES), batch)](
            query,
            keys,
            hidden,
            scores,
            queries,
            history,
            blocks,
            query.stride(0),
            query.stride(1),
            query.stride(2),
            keys.stride(0),
            hidden.stride(0),
            hidden.stride(1),
            heads,
            width,
            block_size,
            head_block,
            block_of(width, 16),
            min(block_of(block_size, 16), most_keys),
            together,
            _QUERIES,
            **early_launch(keys),
            num_warps=8,
            num_stages=2,
        )
    return scores


def _check(query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> None:
    batch, _, queries, width = query.shape
    if query.dtype is not keys.dtype:
        raise ValueError(f"query and keys must have one dtype, got {query.dtype} and {keys.dtype}")
    if query.stride(3) != 1:
        raise ValueError(f"query must be contiguous in its last dimension, got strides {query.stride()}")
    if keys.shape[0] != batch or keys.shape[2] != width or keys.stride()[1:] != (width, 1):
        raise ValueError(
            f"keys must be [{batch}, T, {width}] and contiguous within a batch row, "
            f"got {list(keys.shape)} with strides {keys.stride()}"
        )
    if hidden.dtype is not torch.bool or hidden.shape != (batch, queries, keys.shape[1]):
        raise ValueError(
            f"hidden must be bool {[batch, queries, keys.shape[1]]}, got {hidden.dtype} {list(hidden.shape)}"
        )
    if hidden.stride(2) != 1:
        raise ValueError(f"hidden must be contiguous in its last dimension, got strides {hidden.stride()}")
