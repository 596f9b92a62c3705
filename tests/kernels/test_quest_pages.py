"""quest_update and quest_scores against loops over tokens and channels."""

from __future__ import annotations

import math

import pytest
import torch

from hisparse_kernels import reference
from hisparse_kernels.quest_pages import quest_scores, quest_update

from .layers import GPU, at

UPDATES = pytest.mark.parametrize(
    "implementation", [quest_update, reference.quest_update], ids=["kernel", "reference"]
)
SCORES = pytest.mark.parametrize(
    "implementation", [quest_scores, reference.quest_scores], ids=["kernel", "reference"]
)


def update_case(batch, heads, width, page_size, dtype, *marks):
    name = f"{batch}x{heads}-D{width}-page{page_size}-{dtype}".replace("torch.", "")
    return pytest.param(batch, heads, width, page_size, dtype, id=name, marks=marks)


@UPDATES
@pytest.mark.parametrize("padded", [False, True], ids=["all-valid", "padded"])
@pytest.mark.parametrize(
    "batch, heads, width, page_size, dtype",
    [
        update_case(1, 1, 8, 1, torch.float32),
        update_case(2, 2, 20, 4, torch.bfloat16),
        update_case(1, 3, 16, 3, torch.float16),
        update_case(8, 8, 128, 16, torch.bfloat16, GPU),
        update_case(2, 5, 80, 16, torch.float32, GPU),
    ],
)
def test_bounds_are_those_of_the_keys(device, implementation, padded, batch, heads, width, page_size, dtype):
    generator = torch.Generator().manual_seed(width)
    lanes, first, steps = batch * heads, 2 * page_size, 3 * page_size + 1
    bounds = torch.full((lanes, 8, 2, width), float("nan"), dtype=dtype, device=device)
    pages: dict[tuple[int, int], list[torch.Tensor]] = {}
    for position in range(first, first + steps):
        keys = torch.randn(lanes, width, generator=generator).to(dtype)
        valid = torch.rand(batch, generator=generator) < 0.5 if padded else None
        implementation(
            keys.to(device),
            valid if valid is None else valid.to(device),
            at(position, device),
            bounds,
            page_size,
        )
        for lane in range(lanes):
            if valid is None or valid[lane // heads]:
                pages.setdefault((lane, position // page_size), []).append(keys[lane])

    want = torch.full((lanes, 8, 2, width), float("nan"), dtype=dtype)
    for page in range(2, (first + steps - 1) // page_size + 1):
        for lane in range(lanes):
            keys = pages.get((lane, page))
            want[lane, page, 0] = torch.stack(keys).amin(0) if keys else math.inf
            want[lane, page, 1] = torch.stack(keys).amax(0) if keys else -math.inf
    torch.testing.assert_close(bounds.cpu(), want, rtol=0, atol=0, equal_nan=True)


@UPDATES
def test_a_nan_key_is_not_hidden(device, implementation):
    bounds = torch.zeros(1, 1, 2, 4, device=device)
    for position, key in enumerate([1.0, float("nan"), 2.0]):
        implementation(torch.full((1, 4), key, device=device), None, at(position, device), bounds, 4)
    assert bounds.isnan().all()


def score_case(lanes, group, width, page_size, capacity, position, dtype, *marks):
    name = f"lanes{lanes}-group{group}-D{width}-page{page_size}-of{capacity}-at{position}-{dtype}"
    return pytest.param(
        lanes, group, width, page_size, capacity, position, dtype, id=name.replace("torch.", ""), marks=marks
    )


def oracle(query: torch.Tensor, bounds: torch.Tensor, position: int, page_size: int) -> torch.Tensor:
    """The bound of eq. 2, in float64, page by page."""
    query, bounds = query.double(), bounds.double()
    scores = torch.full(bounds.shape[:2], -math.inf, dtype=torch.float64)
    for page in range(position // page_size):
        low, high = bounds[:, page, 0], bounds[:, page, 1]
        best = torch.maximum(query * low[:, None], query * high[:, None]).sum(2).amax(1)
        scores[:, page] = torch.where((low > high).all(1), -math.inf, best)
    return scores


@SCORES
@pytest.mark.parametrize(
    "lanes, group, width, page_size, capacity, position, dtype",
    [
        score_case(1, 1, 16, 4, 1, 0, torch.float32),
        score_case(2, 3, 20, 4, 9, 30, torch.float32),
        score_case(2, 2, 16, 16, 100, 16 * 70 + 3, torch.float32),
        score_case(1, 17, 8, 3, 130, 3 * 128, torch.float32),
        score_case(3, 4, 24, 2, 65, 129, torch.float16),
        score_case(64, 4, 128, 16, 2000, 31_999, torch.bfloat16, GPU),
        score_case(8, 5, 80, 16, 8192, 100_000, torch.bfloat16, GPU),
        score_case(4, 8, 128, 16, 1000, 15_000, torch.float32, GPU),
        score_case(2, 16, 256, 64, 300, 64 * 299, torch.float16, GPU),
    ],
)
def test_scores_bound_the_pages(
    device, implementation, lanes, group, width, page_size, capacity, position, dtype
):
    generator = torch.Generator().manual_seed(capacity)
    bounds = torch.randn(lanes, capacity, 2, width, generator=generator).to(dtype)
    query = torch.randn(lanes, group, width, generator=generator).to(dtype)
    query[:, :, ::5] = 0  # 0 * inf would be NaN
    query[0], bounds[0] = -query[0].abs(), bounds[0].abs()  # nothing but negative scores
    bounds = bounds.sort(dim=2).values
    empty = torch.rand(lanes, capacity, generator=generator) < 0.2
    bounds[empty] = torch.tensor([[math.inf], [-math.inf]], dtype=dtype)
    bounds[:, position // page_size :] = float("nan")  # not to be read
    scores = implementation(query.to(device), bounds.to(device), at(position, device), page_size).cpu()
    assert scores.dtype == torch.float32 and scores.shape == (lanes, capacity)
    want = oracle(query, bounds, position, page_size)
    torch.testing.assert_close(scores.double(), want, atol=1e-4, rtol=1e-5)


def test_bounds_that_are_a_part_of_a_larger_table(device):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, 12, 2, 16, generator=generator).sort(dim=2).values.to(device)
    query = torch.randn(2, 3, 4, 16, generator=generator).to(device)[:, :, 2]
    part = table[:, :7]
    got = quest_scores(query, part, at(27, device), 4)
    want = reference.quest_scores(query.contiguous(), part.contiguous(), at(27, device), 4)
    torch.testing.assert_close(got, want)
    want = table.clone()
    want[:, 6, 0] = torch.minimum(want[:, 6, 0], query[:, 0])
    want[:, 6, 1] = torch.maximum(want[:, 6, 1], query[:, 0])
    quest_update(query[:, 0], None, at(25, device), part, 4)
    assert torch.equal(table, want)


@pytest.mark.parametrize(
    "name, value",
    [
        ("keys", torch.zeros(2, 8, dtype=torch.float16)),
        ("bounds", torch.zeros(2, 5, 2, 9)),
        ("bounds", torch.zeros(3, 5, 2, 8)),
        ("bounds", torch.zeros(2, 2, 5, 8).transpose(1, 2)),
        ("valid", torch.zeros(2)),
        ("valid", torch.zeros(3, dtype=torch.bool)),
        ("position", torch.zeros(1)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{list(value.shape)}-{value.dtype}",
)
def test_wrong_arguments_are_named(name, value):
    arguments = {
        "keys": torch.zeros(2, 8),
        "valid": None,
        "position": at(3),
        "bounds": torch.zeros(2, 5, 2, 8),
        "page_size": 4,
    }
    with pytest.raises(ValueError, match=name):
        quest_update(**arguments | {name: value})
    if name in ("bounds", "position"):
        query = torch.zeros(2, 3, 8)
        with pytest.raises(ValueError, match=name):
            quest_scores(
                query, *(value if key == name else arguments[key] for key in ("bounds", "position")), 4
            )
