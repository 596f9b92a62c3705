"""quest_select against sorting a list."""

from __future__ import annotations

import math

import pytest
import torch

from hisparse_kernels import quest_select as module
from hisparse_kernels import reference
from hisparse_kernels.quest_select import quest_select

from .layers import GPU, at

IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [quest_select, reference.quest_select], ids=["kernel", "reference"]
)


def literal(scores: torch.Tensor, own: int, top_k: int) -> list[list[int]]:
    """The best candidates, of equal ones the first."""
    rows = []
    for lane in scores.tolist():
        candidates = [page for page, score in enumerate(lane) if score != -math.inf]
        best = sorted(candidates, key=lambda page, lane=lane: (-lane[page], page))[: top_k - 1]
        rows.append([own, *best, *[-1] * (top_k - 1 - len(best))])
    return rows


def random_scores(lanes: int, capacity: int, own: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 100 * torch.randn(lanes, capacity, generator=generator)
    scores[:, own:] = -math.inf
    return scores


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "lanes, capacity, own, top_k",
    [
        (2, 40, 33, 8),
        (1, 1, 0, 1),
        (3, 20, 20, 1),
        (2, 16, 5, 12),  # fewer candidates than wanted
        (1, 300, 300, 300),
        (2, 700, 650, 128),
        pytest.param(64, 2304, 2048, 128, marks=GPU),
        pytest.param(8, 9216, 8192, 128, marks=GPU),
        pytest.param(3, 20000, 19999, 1000, marks=GPU),
        pytest.param(300, 129, 128, 64, marks=GPU),
    ],
)
def test_the_best_from_the_best_on(device, implementation, lanes, capacity, own, top_k):
    scores = random_scores(lanes, capacity, own)
    found = implementation(scores.to(device), at(16 * own + 3, device), 16, top_k)
    assert found.dtype is torch.int32
    assert found.tolist() == literal(scores, own, top_k)


@IMPLEMENTATIONS
def test_of_equal_scores_the_first(device, implementation):
    scores = torch.tensor(
        [
            [1.0, 3.0, 1.0, 3.0, 1.0, -math.inf, 1.0, -math.inf],
            [
                0.0,
                -0.0,
                0.0,
                -0.0,
                -1e-40,
                1e-40,
                -0.0,
                -math.inf,
            ],  # zeros are equal, what is nearly zero is not
            [-math.inf] * 8,
            [math.inf, 5.0, math.inf, -3.4e38, 3.4e38, -2.0, -5.0, -math.inf],
        ]
    )
    for top_k in range(1, 9):
        found = implementation(scores.to(device), at(7, device), 1, top_k)
        assert found.tolist() == literal(scores, 7, top_k)


@IMPLEMENTATIONS
def test_room_for_growth_changes_nothing(device, implementation):
    scores = random_scores(2, 50, 41)
    roomy = torch.nn.functional.pad(scores, (0, 500), value=-math.inf)
    found = [implementation(part.to(device), at(41, device), 1, 12) for part in (scores, roomy)]
    assert torch.equal(*found)


@IMPLEMENTATIONS
def test_rows_of_a_wider_tensor(device, implementation):
    scores = random_scores(3, 90, 60)
    part = scores.to(device)[:, :64]
    assert implementation(part, at(60, device), 1, 9).tolist() == literal(scores, 60, 9)


def test_more_pages_than_a_program_holds(device, monkeypatch):
    monkeypatch.setattr(module, "_MOST_PAGES", 32)
    scores = random_scores(2, 64, 50)
    assert quest_select(scores.to(device), at(50, device), 1, 9).tolist() == literal(scores, 50, 9)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"scores": torch.zeros(2, 8, dtype=torch.float64)}, "scores"),
        ({"scores": torch.zeros(8, 2).T}, "scores"),
        ({"position": torch.zeros(1, dtype=torch.int32)}, "position"),
        ({"page_size": 0}, "page_size"),
        ({"top_k": 0}, "top_k"),
    ],
    ids=["dtype", "strides", "position", "page_size", "top_k"],
)
def test_wrong_arguments_are_named(change, name):
    arguments = {"scores": torch.zeros(2, 8), "position": at(3, "cpu"), "page_size": 1, "top_k": 3}
    with pytest.raises(ValueError, match=name):
        quest_select(**arguments | change)
