"""Quest's page bounds: keep them up to date, and score pages with them (Tang et al. 2024)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, ceil_div, check_position, heads_per_row, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous

_PAGES = 64  # per program of quest_scores


@triton.jit(do_not_specialize=["lane_pages", "heads"])
def _quest_update_kernel(
    keys,
    valid,
    position,
    bounds,
    keys_stride,
    lane_pages,
    heads,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per lane."""
    wait_for_previous(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    at = tl.load(position)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    key = tl.load(keys + lane * keys_stride + column, mask=inside).to(tl.float32)
    low = key
    high = key
    if valid is not None:
        counts = tl.load(valid + lane // heads) != 0
        low = tl.where(counts, key, float("inf"))
        high = tl.where(counts, key, float("-inf"))
    page_low = bounds + (lane * lane_pages + at // PAGE_SIZE) * (2 * WIDTH) + column
    page_high = page_low + WIDTH
    if at % PAGE_SIZE > 0:  # the first token of a page starts it afresh
        old_low = tl.load(page_low, mask=inside).to(tl.float32)
        old_high = tl.load(page_high, mask=inside).to(tl.float32)
        low = tl.minimum(old_low, low, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(old_high, high, propagate_nan=tl.PropagateNan.ALL)
    tl.store(page_low, low.to(bounds.dtype.element_ty), mask=inside)
    tl.store(page_high, high.to(bounds.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["lane_pages", "capacity"])
def _quest_scores_kernel(
    query,
    bounds,
    position,
    scores,
    query_lane_stride,
    query_row_stride,
    lane_pages,
    capacity,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (lane, block of pages)."""
    wait_for_previous(EARLY)
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PAGES
    page = first + tl.arange(0, PAGES)
    own_page = tl.load(position) // PAGE_SIZE
    best = tl.full([PAGES], float("-inf"), tl.float32)
    if first < own_page:
        column = tl.arange(0, BLOCK)
        row = tl.arange(0, GROUP_BLOCK)
        q = tl.load(
            query + lane * query_lane_stride + row[:, None] * query_row_stride + column[None, :],
            mask=(row < GROUP)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        at = bounds + ((lane * lane_pages + page) * (2 * WIDTH))[:, None] + column[None, :]
        inside = (page < own_page)[:, None] & (column < WIDTH)[None, :]
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + WIDTH, mask=inside, other=0.0)
        # A page without a key has bounds inf, -inf, which must not meet a zero of the query.
        has_key = tl.max((inside & (low <= high)).to(tl.int32), axis=1) > 0
        zero = tl.zeros([PAGES, BLOCK], low.dtype)
        low = tl.where(has_key[:, None], low, zero)
        high = tl.where(has_key[:, None], high, zero)
        q_zero = tl.zeros([GROUP_BLOCK, BLOCK], q.dtype)
        bound = tl.dot(tl.where(q < 0, q_zero, q), tl.trans(high), input_precision="ieee")
        bound += tl.dot(tl.where(q > 0, q_zero, q), tl.trans(low), input_precision="ieee")
        bound = tl.where((row < GROUP)[:, None], bound, float("-inf"))
        best = tl.where(has_key, tl.max(bound, axis=0), float("-inf"))
    tl.store(scores + lane * capacity + page, best, mask=page < capacity)


def quest_update(
    keys: torch.Tensor,
    valid: torch.Tensor | None,
    position: torch.Tensor,
    bounds: torch.Tensor,
    page_size: int,
) -> None:
    """Add one token's key to the bounds of its page; see `reference.quest_update`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    lanes, width = keys.shape
    _check_bounds(bounds, lanes, width, keys, "keys")
    check_position(position)
    heads = 1
    if valid is not None:
        if valid.dtype is not torch.bool or not valid.is_contiguous():
            raise ValueError(f"valid must be a contiguous bool [batch], got {valid.dtype}")
        heads = heads_per_row(lanes, valid.shape[0], "valid")
    if not use_triton(bounds):
        reference.quest_update(keys, valid, position, bounds, page_size)
        return
    with on_device_of(bounds):
        _quest_update_kernel[(lanes,)](
            keys,
            valid,
            position,
            bounds,
            keys.stride(0),
            bounds.stride(0) // (2 * width),
            heads,
            page_size,
            width,
            block_of(width),
            **early_launch(bounds),
            num_warps=1,
        )


def quest_scores(
    query: torch.Tensor,
    bounds: torch.Tensor,
    position: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Upper bound of q.k over each complete page before the query's own; see `reference.quest_scores`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    lanes, group, width = query.shape
    capacity = bounds.shape[1]
    _check_bounds(bounds, lanes, width, query, "query")
    check_position(position)
    if not use_triton(bounds):
        return reference.quest_scores(query, bounds, position, page_size)
    scores = query.new_empty((lanes, capacity), dtype=torch.float32)
    with on_device_of(bounds):
        _quest_scores_kernel[(lanes, ceil_div(capacity, _PAGES))](
            query,
            bounds,
            position,
            scores,
            query.stride(0),
            query.stride(1),
            bounds.stride(0) // (2 * width),
            capacity,
            page_size,
            group,
            width,
            block_of(group, 16),
            block_of(width, 16),
            _PAGES,
            **early_launch(bounds),
            num_warps=4,
        )
    return scores


def _check_bounds(bounds: torch.Tensor, lanes: int, width: int, vectors: torch.Tensor, name: str) -> None:
    if vectors.dtype is not bounds.dtype or vectors.stride(-1) != 1:
        raise ValueError(
            f"{name} must have the dtype of the bounds, {bounds.dtype}, and be contiguous in its last "
            f"dimension, got {vectors.dtype} with strides {vectors.stride()}"
        )
    if bounds.shape[0] != lanes or bounds.shape[2:] != (2, width):
        raise ValueError(f"bounds must be [{lanes}, capacity, 2, {width}], got {list(bounds.shape)}")
    if bounds.stride()[1:] != (2 * width, width, 1) or bounds.stride(0) % (2 * width):
        raise ValueError(
            f"bounds must be contiguous within a lane and whole pages apart, got strides {bounds.stride()}"
        )
