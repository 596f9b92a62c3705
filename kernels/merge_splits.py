"""Put together the attention of one query over the parts into which what it reads was split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import block_of, ceil_div
from .early_launch import early_launch, wait_for_previous

MAX_SPLITS = 32  # all splits of a query are one tile
_COLUMNS = 512
_WARP_COLUMNS = 128  # four of a thread, so that no sum over the splits crosses a warp


@triton.jit
def store_split(output, statistics, at, is_head, column, maximum, total, values, VALUE_WIDTH: tl.constexpr):
    """Store a split's attention of the heads `at`: with `statistics` as `merge_splits` takes it, else the result."""
    if statistics is None:
        values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        tl.store(statistics + at * 2, maximum, mask=is_head)
        tl.store(statistics + at * 2 + 1, total, mask=is_head)
    target = output + at[:, None] * VALUE_WIDTH + column[None, :]
    written = is_head[:, None] & (column < VALUE_WIDTH)[None, :]
    tl.store(target, values.to(output.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["splits"])
def _merge_splits_kernel(
    partial,
    statistics,
    output,
    splits,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (lane, head, block of columns)."""
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    split = tl.arange(0, SPLIT_BLOCK)
    at = (lane * splits + split) * HEADS + head
    wait_for_previous(EARLY)
    values = tl.load(
        partial + at[:, None] * VALUE_WIDTH + column[None, :],
        mask=(split < splits)[:, None] & (column < VALUE_WIDTH)[None, :],
        other=0.0,
    )
    maximum = tl.load(statistics + at * 2, mask=split < splits, other=float("-inf"))
    total = tl.load(statistics + at * 2 + 1, mask=split < splits, other=0.0)
    highest = tl.max(maximum, axis=0)
    share = tl.exp2(maximum - tl.where(highest == float("-inf"), 0.0, highest))  # -inf - -inf would be NaN
    weight = tl.sum(share * total, axis=0)
    merged = tl.sum(share[:, None] * values, axis=0) / tl.where(weight == 0.0, 1.0, weight)
    target = output + (lane * HEADS + head) * VALUE_WIDTH + column
    tl.store(target, merged.to(output.dtype.element_ty), mask=column < VALUE_WIDTH)


def split_results(output: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where so many splits leave their results: `partial` and `statistics` of `merge_splits`; one split `output` and None."""
    if splits == 1:
        return output, None
    lanes, heads, value_width = output.shape
    partial = output.new_empty((lanes, splits, heads, value_width), dtype=torch.float32)
    return partial, output.new_empty((lanes, splits, heads, 2), dtype=torch.float32)


def merge_splits(partial: torch.Tensor, statistics: torch.Tensor, output: torch.Tensor) -> None:
    """Merge partial results of flash attention by their maxima, always in the same order.

    Of the kernels that split alone, so what they pass is not checked, and the CPU has no part in it.

    Parameters
    ----------
    partial : fp32 ``[lanes, splits, heads, value_width]``, ``splits <= MAX_SPLITS``
        Sums of values, each weighted by ``2 ** (score - maximum)``.
    statistics : fp32 ``[lanes, splits, heads, 2]``
        Maximum of the scores (-inf where nothing was read), and sum of the weights.
    output : ``[lanes, heads, value_width]``
        Written: the weighted mean of the values, 0 where nothing was read.
    """
    lanes, splits, heads, value_width = partial.shape
    columns = min(block_of(value_width, _WARP_COLUMNS), _COLUMNS)
    _merge_splits_kernel[(lanes, heads, ceil_div(value_width, columns))](
        partial,
        statistics,
        output,
        splits,
        heads,
        value_width,
        block_of(splits),
        columns,
        **early_launch(output),
        num_warps=columns // _WARP_COLUMNS,
    )
