"""top_k against a sort in Python, with ties, records without a score and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from hisparse_kernels import reference
from hisparse_kernels import top_k as module
from hisparse_kernels.top_k import top_k

from .layers import GPU, assert_same_bits


def expected(scores: torch.Tensor, k: int) -> torch.Tensor:
    rows = []
    for row in scores.tolist():
        ranked = sorted(
            (i for i, score in enumerate(row) if score != -math.inf),
            key=lambda i: (-math.inf if math.isnan(row[i]) else -row[i], not math.isnan(row[i]), i),
        )
        chosen = sorted(ranked[:k])
        rows.append(chosen + [-1] * (k - len(chosen)))
    return torch.tensor(rows, dtype=torch.int32).view(len(scores), k)


def make(lanes: int, count: int, ties: bool, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(lanes, count, generator=generator)
    if ties:
        scores = (scores * 2).round() / 2  # -0.0 and 0.0 among them
    scores[torch.rand(lanes, count, generator=generator) < 0.2] = -math.inf
    scores[0] = -math.inf
    return scores


IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [top_k, reference.top_k], ids=["kernel", "reference"]
)
SIZES = [(1, 1, 1), (2, 9, 3), (3, 63, 20), (2, 100, 100), (2, 40, 64), (4, 300, 1), (2, 130, 0)]
BIG = [(8, 2304, 127), (64, 2304, 127), (3, 9216, 127), (2, 65536, 2047), (5, 100_000, 63), (300, 1000, 31)]


@IMPLEMENTATIONS
@pytest.mark.parametrize("ties", [False, True], ids=["apart", "ties"])
@pytest.mark.parametrize("lanes, count, k", SIZES + [pytest.param(*size, marks=GPU) for size in BIG])
def test_the_best_in_the_order_of_their_numbers(device, implementation, lanes, count, k, ties):
    scores = make(lanes, count, ties)
    want = expected(scores, k)
    assert_same_bits("chosen", implementation(scores.to(device), k), want)


@IMPLEMENTATIONS
def test_extreme_scores(device, implementation):
    tiny = torch.finfo(torch.float32).tiny
    rows = torch.tensor(
        [
            [math.inf, -math.inf, 3.0e38, -3.0e38, tiny, -tiny, 1e-45, -1e-45, 0.0, math.nan],
            [math.inf, math.inf, math.inf, math.inf, 1.0, math.nan, -math.nan, 2.0, -math.inf, 0.0],
            [-0.0, 1.0, 0.0, -0.0, -1.0, 0.0, -0.0, -math.inf, 0.0, -0.0],
        ]
    )
    for k in range(1, 11):
        assert_same_bits(f"k={k}", implementation(rows.to(device), k), expected(rows, k))


def test_several_blocks(device, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 16)
    for ties in (False, True):
        scores = make(3, 75, ties)
        assert_same_bits("chosen", top_k(scores.to(device), 40), expected(scores, 40))


def test_a_view_with_a_row_stride(device):
    scores = make(3, 50, ties=True)
    wide = torch.full((3, 80), math.inf)
    wide[:, :50] = scores
    assert_same_bits("chosen", top_k(wide.to(device)[:, :50], 7), expected(scores, 7))


@pytest.mark.parametrize(
    "scores, k, name",
    [
        (torch.zeros(2, 3, dtype=torch.float16), 1, "fp32"),
        (torch.zeros(3, 2).T, 1, "contiguous"),
        (torch.zeros(3), 1, "lanes"),
        (torch.zeros(2, 3), -1, "at least 0"),
    ],
    ids=["dtype", "strides", "dimensions", "k"],
)
def test_wrong_arguments_are_named(scores, k, name):
    with pytest.raises(ValueError, match=name):
        top_k(scores, k)
