"""Rotary position embedding of queries, with the bits that transformers' models give."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import block_of, on_device_of, use_triton
from .early_launch import early_launch, wait_for_previous

_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


@triton.jit
def _wide(value):
    """What products are computed in: fp32 for what is narrower."""
    return value.to(tl.float32) if value.dtype.primitive_bitwidth < 32 else value


@triton.jit(do_not_specialize=["tokens", "heads", "cos_stride", "sin_stride"])
def _rotate_kernel(
    query,
    cos,
    sin,
    rotated,
    tokens,
    heads,
    cos_stride,
    sin_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (token of a batch row, head)."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    batch, token, head = row // tokens, row % tokens, tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    is_low = column < WIDTH // 2
    pair = tl.where(is_low, column + WIDTH // 2, column - WIDTH // 2)

    query += (row * heads + head) * WIDTH
    own = _wide(tl.load(query + column, mask=inside))
    other = _wide(tl.load(query + pair, mask=inside))
    other = tl.where(is_low, -other, other)
    own *= _wide(tl.load(cos + batch * cos_stride + token * WIDTH + column, mask=inside))
    other *= _wide(tl.load(sin + batch * sin_stride + token * WIDTH + column, mask=inside))
    # The model rounds each product before the sum.
    dtype = rotated.dtype.element_ty
    total = _wide(own.to(dtype)) + _wide(other.to(dtype))
    rotated += ((batch * heads + head) * tokens + token) * WIDTH
    tl.store(rotated + column, total.to(dtype), mask=inside)


def rotate(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each token's query by its position; see `reference.rotate`.

    Raises
    ------
    ValueError
        If a shape, dtype or memory layout is not what the reference names.
    """
    _check(query, cos, sin)
    if not use_triton(query):
        return reference.rotate(query, cos, sin)
    batch, tokens, heads, width = query.shape
    rotated = query.new_empty(batch, heads, tokens, width)
    if rotated.numel() == 0:
        return rotated
    with on_device_of(query):
        _rotate_kernel[(batch * tokens, heads)](
            query,
            cos,
            sin,
            rotated,
            tokens,
            heads,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            sin.stride(0) if sin.shape[0] > 1 else 0,
            width,
            block_of(width),
            **early_launch(query),
            num_warps=1,
            enable_fp_fusion=False,  # a fused product would not be rounded
        )
    return rotated


def _check(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if query.dtype not in _DTYPES:
        raise ValueError(f"query must be {', '.join(map(str, _DTYPES))}, got {query.dtype}")
    if query.ndim != 4 or query.shape[3] % 2 or not query.is_contiguous():
        raise ValueError(
            "query must be a contiguous [batch, S, heads, width] of even width, "
            f"got {list(query.shape)} with strides {query.stride()}"
        )
    batch, tokens, _, width = query.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype is not query.dtype or table.device != query.device:
            raise ValueError(
                f"{name} must be of the query's dtype and on its device, {query.dtype} on {query.device}, "
                f"got {table.dtype} on {table.device}"
            )
        if table.shape not in ((batch, tokens, width), (1, tokens, width)):
            raise ValueError(
                f"{name} must be {[batch, tokens, width]}, or that of one row, to suit the query, got {list(table.shape)}"
            )
        if table.numel() and not table[0].is_contiguous():
            raise ValueError(f"{name} must be contiguous in a batch row, got strides {table.stride()}")
