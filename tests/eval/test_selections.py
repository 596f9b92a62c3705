"""What replaces Quest's choice misses what it says: the paper's share from the first step on, or what a recorded run missed."""

from __future__ import annotations

import pytest
import torch

from eval.decoding import Contenders, Run, decode
from eval.history import fill
from eval.policies.record import record, toy_prompt
from eval.selections import Recorded, Synthetic, play
from eval.traces import load_trace
from hf_hisparse import HiSparseCache, Quest
from tests.models import build

QUEST = Quest(64, 4)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of a random model: 30 tokens after 397."""
    path = tmp_path_factory.mktemp("traces") / "toy.npz"
    model, prompt = toy_prompt(397, "cpu")
    record(model, prompt, QUEST, 30, 0, path)
    return model, path


@pytest.mark.parametrize("context", [397, 400, 1000])
def test_a_recorded_run_misses_again_what_it_missed(recorded, context):
    model, path = recorded
    trace, workload = load_trace(path), Recorded(path)
    tokens = workload.history(context)
    assert context <= tokens < context + 4 and tokens % 4 == 1
    contenders = Contenders(model, workload.quest)
    decode(contenders, Run("hisparse", 1, tokens, 29, 2 * 64), workload)
    stats = contenders._kept.stats()
    assert [layer.misses for layer in stats.layers] == trace.misses
    assert [layer.selected for layer in stats.layers] == trace.selected


def test_rows_of_a_batch_read_what_different_layers_did(recorded):
    _, path = recorded
    workload = Recorded(path)
    selections = [
        workload.of_layer(index, 3, 3, 397, 29, 32, torch.device("cpu")).steps for index in range(2)
    ]
    trace = load_trace(path)
    first, second = (trace.steps(layer) for layer in trace.layers)
    assert torch.equal(selections[0][:, :3], first[:, [0, 1, 0]])  # three KV heads of a trace with two
    assert torch.equal(selections[0][:, 3:6], second[:, [0, 1, 0]])
    assert torch.equal(selections[1][:, 6:], second[:, [0, 1, 0]])


@pytest.mark.parametrize("tokens", [800, 803])
def test_the_paper_s_misses_from_the_first_step_on(tokens):
    model = build("qwen3")
    quest, workload = Quest(128, 4), Synthetic(Quest(128, 4))
    cache = HiSparseCache(model, quest, device_buffer_tokens=256, verify=True)
    layers = range(2, 4)
    chosen = {
        layer: workload.of_layer(layer - 2, 2, 2, tokens, 30, 64, torch.device("cpu")) for layer in layers
    }
    fill(cache, model, 2, tokens, {layer: each.recent for layer, each in chosen.items()})
    play(cache, chosen)
    misses = []
    for _ in range(30):
        before = cache.stats().misses
        with torch.no_grad():
            model(torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)
        misses.append((cache.stats().misses - before) / (2 * 2 * 2 * 32))
    assert sum(misses) / 30 == pytest.approx(0.134, abs=0.01)
    assert sum(misses[:5]) / 5 == pytest.approx(0.134, abs=0.02)


def test_a_history_shorter_than_the_curve_has_the_points_that_fit():
    chosen = Synthetic(Quest(128, 4)).of_layer(0, 1, 1, 4 * 128, 60, 64, torch.device("cpu"))
    order = [*chosen.recent[0].tolist()]
    missed = 0
    for selection in chosen.steps[:, 0].tolist():
        missed += len(set(selection[1:]) - set(order[-62:]))
        order = [record for record in order if record not in selection] + selection
    assert missed / (60 * 31) == pytest.approx(0.134, abs=0.02)


def test_what_does_not_fit_is_refused(recorded, tmp_path):
    model, path = recorded
    workload = Recorded(path)
    with pytest.raises(ValueError, match="recorded after 397 tokens: a context of 300"):
        workload.history(300)
    with pytest.raises(ValueError, match="has 29 decode steps, 30 are asked"):
        workload.of_layer(0, 1, 2, 397, 30, 32, torch.device("cpu"))
    two = tmp_path / "two.npz"
    cache = HiSparseCache(model, QUEST)
    with cache.record_trace(two), torch.no_grad():
        for count in (300, 1, 40, 1):
            model(torch.ones(1, count, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ValueError, match="several prompts"):
        Recorded(two)
    short = tmp_path / "short.npz"
    record(model, torch.ones(1, 40, dtype=torch.int64), QUEST, 3, 0, short)
    with pytest.raises(ValueError, match="shorter than the budget"):
        Recorded(short)
