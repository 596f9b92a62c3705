"""The synthetic trace has the miss curve that it says."""

from __future__ import annotations

import pytest
import torch

from eval.policies.replacement import LRU
from eval.traces import PAPER_CURVE, Step, synthetic_trace


def lru_miss_rate(trace: torch.Tensor, history: int, slots: int, skip: int) -> float:
    """Replay one lane, ``[steps, k]``, and count from step `skip` on."""
    buffer = LRU(slots, [Step(selection, history) for selection in trace.tolist()])
    for index in range(len(trace)):
        if index == skip:
            before = buffer.selected, buffer.misses
        buffer.do(index)
    return (buffer.misses - before[1]) / (buffer.selected - before[0])


@pytest.mark.parametrize("k", [16, 32, 64, 100])
@pytest.mark.parametrize(("multiple", "share"), PAPER_CURVE.items())
def test_an_lru_buffer_misses_what_the_curve_says(multiple, share, k):
    trace = synthetic_trace(lanes=1, k=k, history=10 * k, steps=160)
    assert lru_miss_rate(trace[:, 0], 10 * k, int(multiple * k), skip=60) == pytest.approx(share, abs=0.005)


def test_misses_that_are_a_whole_number_are_the_same_in_each_step():
    trace = synthetic_trace(lanes=1, k=64, history=600, steps=40, curve={2: 8 / 64})[:, 0].tolist()
    buffer = LRU(128, [Step(selection, 600) for selection in trace])
    missed = []
    for index in range(40):
        before = buffer.misses
        buffer.do(index)
        missed.append(buffer.misses - before)
    assert missed[20:] == pytest.approx([8] * 20, abs=2)  # ties among what was just fetched


def test_selections_are_of_different_records():
    trace = synthetic_trace(lanes=3, k=32, history=300, steps=5)
    assert trace.shape == (5, 3, 32)
    assert all(len(set(selection.tolist())) == 32 for selection in trace.flatten(0, 1))
    assert trace.min() >= 0 and trace.max() < 300


def test_the_same_seed_gives_the_same_trace():
    one, other = (synthetic_trace(2, 16, 200, 4, seed=seed) for seed in (5, 5))
    assert torch.equal(one, other)
    assert not torch.equal(one, synthetic_trace(2, 16, 200, 4, seed=6))


def test_a_history_too_short_for_the_curve_is_refused():
    with pytest.raises(ValueError, match="longer history"):
        synthetic_trace(1, 64, 256, 1)
