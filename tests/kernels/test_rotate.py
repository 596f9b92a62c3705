"""rotate gives the bits of transformers' rotary embedding."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from hisparse_kernels import reference
from hisparse_kernels.rotate import rotate

from .layers import GPU, assert_same_bits

IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [rotate, reference.rotate], ids=["kernel", "reference"]
)


def case(batch: int, tokens: int, heads: int, width: int, rows: int, dtype: torch.dtype, device: str):
    """A query, and the cosine and sine of `rows` batch rows of positions."""
    generator = torch.Generator().manual_seed(width)
    query = torch.randn(batch, tokens, heads, width, generator=generator)
    angle = 100 * torch.rand(rows, tokens, width // 2, generator=generator).repeat(1, 1, 2)
    return tuple(tensor.to(device, dtype) for tensor in (query, angle.cos(), angle.sin()))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "batch, tokens, heads, width, rows",
    [(1, 1, 4, 8, 1), (3, 1, 2, 64, 3), (2, 3, 5, 24, 1), pytest.param(8, 2, 32, 128, 8, marks=GPU)],
)
def test_the_bits_of_the_model(device, implementation, batch, tokens, heads, width, rows, dtype):
    if device == "cpu" and implementation is rotate and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bfloat16 off where a GPU rounds")
    query, cos, sin = case(batch, tokens, heads, width, rows, dtype, device)
    kept = query.clone()
    want, _ = apply_rotary_pos_emb(query.transpose(1, 2), query.transpose(1, 2), cos, sin)
    got = implementation(query, cos, sin)
    assert got.is_contiguous()
    assert_same_bits("rotated", got, want)
    assert_same_bits("query", query, kept)


def test_rows_that_lie_apart(device):
    query, cos, sin = case(3, 1, 2, 16, 9, torch.float32, device)
    rows = cos[::2][:3], sin[::3]
    assert_same_bits("rotated", rotate(query, *rows), reference.rotate(query, *rows))


@pytest.mark.parametrize("batch, tokens", [(2, 0), (0, 1)])
def test_no_token_gives_no_query(device, batch, tokens):
    query, cos, sin = case(batch, tokens, 4, 8, batch, torch.float32, device)
    assert rotate(query, cos, sin).shape == (batch, 4, tokens, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": torch.zeros(2, 1, 4, 8, dtype=torch.int32)}, "torch.bfloat16, .* got torch.int32"),
        ({"query": torch.zeros(2, 4, 8)}, r"\[batch, S, heads, width\]"),
        ({"query": torch.zeros(2, 1, 4, 7)}, "even width"),
        ({"query": torch.zeros(2, 4, 1, 8).transpose(1, 2)[:, :, ::2]}, "must be a contiguous"),
        ({"cos": torch.zeros(2, 1, 8, dtype=torch.float16)}, "cos must be of the query's dtype"),
        ({"cos": torch.zeros(2, 1, 8, device="meta")}, "on its device, torch.float32 on cpu"),
        ({"cos": torch.zeros(3, 1, 8)}, r"cos must be \[2, 1, 8\], or that of one row"),
        ({"cos": torch.zeros(0, 1, 8)}, r"got \[0, 1, 8\]"),
        ({"sin": torch.zeros(2, 1, 4)}, "sin must be"),
        ({"sin": torch.zeros(2, 1, 16)[:, :, ::2]}, "contiguous in a batch row"),
    ],
)
def test_what_is_refused(change, message):
    arguments = {"query": torch.zeros(2, 1, 4, 8), "cos": torch.zeros(2, 1, 8), "sin": torch.zeros(2, 1, 8)}
    with pytest.raises(ValueError, match=message):
        rotate(**{**arguments, **change})
