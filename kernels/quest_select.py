"""Quest's choice of pages: the query's own and the best before it (Tang et al. 2024)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, check_position, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous

_MOST_PAGES = 2**15  # that one program holds in registers; torch selects among more


@triton.jit(do_not_specialize=["scores_stride", "capacity", "k"])
def _quest_select_kernel(
    scores,
    position,
    selection,
    scores_stride,
    capacity,
    k,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per lane: find the k-th best score by bisection, gather the pages from there on, sort those few."""
    wait_for_previous(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    scores += lane * scores_stride
    selection += lane * (k + 1)
    page = tl.arange(0, BLOCK)
    score = tl.load(scores + page, mask=page < capacity, other=float("-inf"))
    key = _ordered(score)
    candidate = score != float("-inf")
    wanted = tl.minimum(k, tl.sum(candidate.to(tl.int32), axis=0))

    low = tl.min(tl.where(candidate, key, 2147483647), axis=0).to(tl.int64)
    high = tl.max(tl.where(candidate, key, -2147483648), axis=0).to(tl.int64)
    while low < high:  # at least `wanted` keys are `low` or more, fewer are more than `high`
        middle = low + (high - low + 1) // 2
        count = tl.sum((candidate & (key >= middle.to(tl.int32))).to(tl.int32), axis=0)
        high = tl.where(count < wanted, middle - 1, tl.where(count == wanted, middle, high))
        low = tl.where(count < wanted, low, middle)
    last = low.to(tl.int32)
    better = candidate & (key > last)
    equal = candidate & (key == last)
    left = wanted - tl.sum(better.to(tl.int32), axis=0)
    chosen = better | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(selection + 1 + rank, page, mask=chosen)
    tl.debug_barrier()

    index = tl.arange(0, K_BLOCK)
    best = tl.load(selection + 1 + index, mask=index < wanted, other=0)
    rated = _ordered(tl.load(scores + best, mask=index < wanted, other=0.0))
    packed = (rated.to(tl.int64) << 32) | (4294967295 - best.to(tl.int64))
    packed = tl.sort(tl.where(index < wanted, packed, -9223372036854775808), descending=True)
    best = (4294967295 - (packed & 4294967295)).to(tl.int32)
    tl.debug_barrier()
    tl.store(selection + 1 + index, tl.where(index < wanted, best, -1), mask=index < k)
    tl.store(selection, (tl.load(position) // PAGE_SIZE).to(tl.int32))


@triton.jit
def _ordered(score):
    """int32 in the order of the fp32 scores, of which both zeros are one."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 2147483647, bits)


def quest_select(scores: torch.Tensor, position: torch.Tensor, page_size: int, top_k: int) -> torch.Tensor:
    """The query's own page, then the `top_k` - 1 best; see `reference.quest_select`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    lanes, capacity = scores.shape
    if scores.dtype is not torch.float32 or scores.stride(1) != 1:
        raise ValueError(
            f"scores must be fp32 and contiguous in the last dimension, got {scores.dtype} with strides {scores.stride()}"
        )
    check_position(position)
    if page_size < 1 or top_k < 1:
        raise ValueError(f"page_size and top_k must be at least 1, got {page_size} and {top_k}")
    if not use_triton(scores) or capacity > _MOST_PAGES:
        return reference.quest_select(scores, position, page_size, top_k)
    selection = torch.empty((lanes, top_k), dtype=torch.int32, device=scores.device)
    block = block_of(capacity, 128)
    with on_device_of(scores):
        _quest_select_kernel[(lanes,)](
            scores,
            position,
            selection,
            scores.stride(0),
            capacity,
            top_k - 1,
            page_size,
            block,
            block_of(top_k - 1, 16),
            **early_launch(scores),
            num_warps=max(4, min(32, block // 512)),
        )
    return selection
