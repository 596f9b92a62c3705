"""The synthetic trace has the miss curve that it says."""

from __future__ import annotations

import pytest
import torch

from eval.traces import PAPER_CURVE, synthetic_trace


def lru_miss_rate(trace: torch.Tensor, slots: int, skip: int) -> float:
    """Replay one lane, ``[steps, k]``, through an LRU list of `slots` records that ranks hits above misses."""
    order: list[int] = []  # least recently used first
    missed = read = 0
    for step, selection in enumerate(trace.tolist()):
        misses = [record for record in selection if record not in set(order)]
        hits = [record for record in order if record in set(selection)]
        if step >= skip:
            missed, read = missed + len(misses), read + len(selection)
        stale = [record for record in order if record not in set(selection)]
        order = (stale + misses + hits)[-slots:]
    return missed / read


@pytest.mark.parametrize(("multiple", "share"), PAPER_CURVE.items())
def test_an_lru_buffer_misses_what_the_curve_says(multiple, share):
    trace = synthetic_trace(lanes=1, k=64, history=600, steps=120)
    assert lru_miss_rate(trace[:, 0], int(multiple * 64), skip=40) == pytest.approx(share, abs=0.03)


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
