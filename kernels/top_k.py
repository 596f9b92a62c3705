"""The k best-scored records of each lane."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, on_device_of, use_triton

_BLOCK = 8192  # scores looked at at a time


@triton.jit
def _ordered(score):
    """Integers in the order of the scores: the two zeros are one number, NaN of any sign is above infinity."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = tl.where(score != score, float("nan"), score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["scores_stride", "count", "k"])
def _top_k_kernel(scores, chosen, scores_stride, count, k, BLOCK: tl.constexpr):
    """One program per lane: find the k-th largest score, two bits at a time, then take what is above it, and ties in order."""
    LOWEST: tl.constexpr = -(2**31)
    NOTHING: tl.constexpr = -2139095041  # what `_ordered` makes of -inf
    lane = tl.program_id(0).to(tl.int64)
    scores += lane * scores_stride
    chosen += lane * k
    index = tl.arange(0, BLOCK)

    # `threshold` is the largest number, of the bits decided so far, that at least k scores reach. All counts of a round
    # travel in one sum: 21 bits each.
    threshold = tl.full([], LOWEST, tl.int64)
    step = tl.full([], 1 << 30, tl.int64)
    for _ in range(16):
        reached = tl.zeros([], tl.int64)
        for start in range(0, count, BLOCK):
            at = start + index
            score = tl.load(scores + at, mask=at < count, other=float("-inf"))
            key = tl.where(at < count, _ordered(score).to(tl.int64), LOWEST - 1)
            counts = (key >= threshold + step).to(tl.int64)
            counts += (key >= threshold + 2 * step).to(tl.int64) << 21
            counts += (key >= threshold + 3 * step).to(tl.int64) << 42
            reached += tl.sum(counts, axis=0)
        steps = (reached & 0x1FFFFF) >= k
        more = ((reached >> 21) & 0x1FFFFF) >= k
        most = (reached >> 42) >= k
        threshold += (steps.to(tl.int64) + more.to(tl.int64) + most.to(tl.int64)) * step
        step = step >> 2
    threshold = tl.maximum(threshold, NOTHING)  # what has no score is not chosen

    above = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + index
        score = tl.load(scores + at, mask=at < count, other=float("-inf"))
        above += tl.sum((_ordered(score).to(tl.int64) > threshold).to(tl.int32), axis=0)
    ties = tl.where(threshold > NOTHING, k - above, 0)

    taken = tl.zeros([], tl.int32)
    tied = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + index
        score = tl.load(scores + at, mask=at < count, other=float("-inf"))
        key = _ordered(score).to(tl.int64)
        tie = (key == threshold) & (at < count)
        tie_rank = tied + tl.cumsum(tie.to(tl.int32), axis=0) - 1
        take = (key > threshold) | (tie & (tie_rank < ties))
        rank = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(chosen + rank, at, mask=take)
        taken += tl.sum(take.to(tl.int32), axis=0)
        tied += tl.sum(tie.to(tl.int32), axis=0)
    for start in range(0, k, BLOCK):
        at = start + index
        tl.store(chosen + at, -1, mask=(at >= taken) & (at < k))


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` best-scored records of each lane; see `reference.top_k`.

    Raises
    ------
    ValueError
        If the scores are not fp32 or not contiguous in their last dimension, or `k` is negative.
    """
    if (
        scores.dtype is not torch.float32
        or scores.ndim != 2
        or (scores.shape[1] > 1 and scores.stride(1) != 1)
    ):
        raise ValueError(
            f"scores must be fp32 [lanes, records], contiguous in their last dimension, got {scores.dtype} "
            f"{list(scores.shape)} with strides {scores.stride()}"
        )
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    if not use_triton(scores):
        return reference.top_k(scores, k)
    lanes, count = scores.shape
    chosen = torch.empty((lanes, k), dtype=torch.int32, device=scores.device)
    if not k or not lanes:
        return chosen
    block = min(block_of(count), _BLOCK)
    with on_device_of(scores):
        _top_k_kernel[(lanes,)](
            scores,
            chosen,
            scores.stride(0),
            count,
            k,
            block,
            num_warps=4 if block <= 1024 else 8 if block <= 2048 else 16,
        )
    return chosen
