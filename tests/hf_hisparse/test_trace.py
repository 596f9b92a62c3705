"""A recorded trace says what was selected, and recording changes nothing else."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from eval.traces import Crop, Prefill, Step, load_trace
from hf_hisparse import HiSparseCache, Quest
from tests import dsa_models
from tests.hf_hisparse.test_accounting import Recorded
from tests.models import prompt


def _generate(model, cache, ids, **more):
    return model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=14, **more)


def test_selections_are_those_of_the_selector(model, tmp_path):
    selector = Recorded(Quest(32, 4))
    cache = HiSparseCache(model, selector, graphs=False)
    with cache.record_trace(tmp_path / "trace.npz"):
        _generate(model, cache, prompt(2, 101, device=str(model.device)))
    trace = load_trace(tmp_path / "trace.npz")
    assert trace.layers == trace.leaders == [2, 3]
    assert (trace.page_size, trace.top_k, trace.device_buffer_records) == (4, 8, 16)
    assert trace.kinds.tolist() == [0] + 13 * [1]
    assert trace.positions.tolist() == [101, *range(101, 114)]
    for layer in trace.layers:
        expected = torch.stack(selector.selections[layer]).int().cpu()  # the prefill's is the first
        assert np.array_equal(trace.selections[layer], expected.numpy())
        assert torch.equal(trace.steps(layer), expected[1:])
    stats = cache.stats()
    assert trace.misses == [layer.misses for layer in stats.layers]
    assert trace.selected == [layer.selected for layer in stats.layers]


def test_dense_layers_on_the_host_select_nothing(model, tmp_path):
    traces = []
    for name, on_host in (("host", True), ("device", None)):
        cache = HiSparseCache(model, Quest(32, 4), host_dense_layers=on_host, graphs=False)
        with cache.record_trace(tmp_path / f"{name}.npz"):
            _generate(model, cache, prompt(2, 101, device=str(model.device)))
        traces.append(load_trace(tmp_path / f"{name}.npz"))
    host, device = traces
    assert host.layers == device.layers == [2, 3] and host.misses == device.misses
    for layer in host.layers:
        assert np.array_equal(host.selections[layer], device.selections[layer])


def test_events_of_a_lane(model, tmp_path):
    """A page gets its slot with its first token; a crop says which pages are left."""
    cache = HiSparseCache(model, Quest(32, 4), decode_rows=4)
    with cache.record_trace(tmp_path / "trace.npz"), torch.no_grad():
        for seed, length in enumerate((18, 1, 1, 1)):
            model(prompt(1, length, seed, device=str(model.device)), past_key_values=cache)
        cache.crop(-8)
        cache.crop(0)
        model(prompt(1, 2, 9, device=str(model.device)), past_key_values=cache)
    lanes = load_trace(tmp_path / "trace.npz").lanes(3)
    assert len(lanes) == 2
    for events in lanes:
        kinds = [type(event) for event in events]
        assert kinds == [Prefill, Step, Step, Step, Crop, Step, Step]
        assert [event.records for event in events] == [5, 5, 5, 6, 4, 4, 4]
        assert [event.begins for event in events if isinstance(event, Step)] == [0, 0, 1, 0, 0]


def test_layers_that_share_a_selection_are_recorded_once(device, tmp_path):
    model = dsa_models.dsa_twins("glm_FSSF", device).enabled
    cache = HiSparseCache(model)
    with cache.record_trace(tmp_path / "trace.npz"):
        _generate(model, cache, prompt(2, 100, device=device))
    trace = load_trace(tmp_path / "trace.npz")
    assert trace.layers == [0, 1, 2, 3]
    assert trace.leaders == [0, 0, 0, 3]
    assert list(trace.selections) == [0, 3]
    assert trace.misses == [layer.misses for layer in cache.stats().layers]


@pytest.mark.parametrize("length", [3, 20])
def test_a_prompt_shorter_than_a_selection(device, tmp_path, length):
    """Read token by token, or in one call that has fewer records than a selection."""
    model = dsa_models.dsa_twins("v32", device).enabled
    cache = HiSparseCache(model, decode_rows=4)
    with cache.record_trace(tmp_path / "trace.npz"):
        _generate(model, cache, prompt(1, length, device=device))
    trace = load_trace(tmp_path / "trace.npz")
    assert trace.selections[0].shape == (13 + (3 if length == 3 else 1), 1, dsa_models.TOP_K)
    assert trace.selections[0].max() == length + 12


def test_a_selector_may_use_its_answer_again(model, tmp_path):
    """What is recorded is what it was then."""
    ids = prompt(2, 101, device=str(model.device))
    traces = []
    for reuse in (False, True):
        selector = Recorded(Quest(32, 4))
        cache = HiSparseCache(model, selector, graphs=False)
        if reuse:
            new_state = selector.new_state
            selector.new_state = lambda shape, new_state=new_state: _with_one_answer(new_state(shape))
        with cache.record_trace(tmp_path / "trace.npz"):
            _generate(model, cache, ids)
        traces.append(load_trace(tmp_path / "trace.npz").selections[3])
    assert np.array_equal(*traces)


def _with_one_answer(state):
    select, answer = state.select, []

    def select_into_it(query, position):
        selection = select(query, position).int()
        answer[:] = answer or [torch.empty_like(selection)]
        return answer[0].copy_(selection)

    state.select = select_into_it
    return state


def test_recording_changes_neither_tokens_nor_counts(model, tmp_path):
    ids = prompt(2, 100, device=str(model.device))
    plain, recorded = HiSparseCache(model, Quest(32, 4)), HiSparseCache(model, Quest(32, 4))
    expected = _generate(model, plain, ids)
    with recorded.record_trace(tmp_path / "trace.npz"):
        assert torch.equal(_generate(model, recorded, ids), expected)
    assert recorded.stats() == plain.stats()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for a GPU")
def test_recorded_steps_run_eagerly(model, tmp_path, caplog):
    model = model.cuda()
    cache = HiSparseCache(model, Quest(32, 4))
    ids = prompt(1, 100, device="cuda")
    with caplog.at_level(logging.WARNING), cache.record_trace(tmp_path / "trace.npz"):
        _generate(model, cache, ids)
    assert cache.graphs.replays == 0
    assert len([line for line in caplog.messages if "a trace is being recorded" in line]) == 1
    cache.reset()
    _generate(model, cache, ids)
    assert cache.graphs.replays > 0


def test_a_cache_that_holds_something_is_refused(model, tmp_path):
    cache = HiSparseCache(model, Quest(32, 4))
    ids = prompt(1, 50, device=str(model.device))
    _generate(model, cache, ids)
    with pytest.raises(ValueError, match=r"holds 63 tokens and has counted 13 decode steps.*after reset\(\)"):
        cache.record_trace(tmp_path / "trace.npz")
    cache.crop(-63)
    with pytest.raises(ValueError, match="holds 0 tokens and has counted 13 decode steps"):
        cache.record_trace(tmp_path / "trace.npz")
    cache.reset()
    with cache.record_trace(tmp_path / "trace.npz"):
        _generate(model, cache, ids)
    assert load_trace(tmp_path / "trace.npz").misses == [layer.misses for layer in cache.stats().layers]


@pytest.mark.parametrize("name", ["", "missing/trace.npz"])
def test_a_path_that_cannot_be_a_file_is_refused(model, tmp_path, name):
    cache = HiSparseCache(model, Quest(32, 4))
    with pytest.raises(ValueError, match="name a file in a folder that exists"):
        cache.record_trace(tmp_path / name)
    assert cache.trace is None
    assert all(layer.trace is None for layer in cache.hosted_layers)


def test_what_a_trace_cannot_follow_is_refused_and_changes_nothing(model, tmp_path):
    path = tmp_path / "trace.npz"
    cache = HiSparseCache(model, Quest(32, 4))
    ids = prompt(2, 100, device=str(model.device))
    with cache.record_trace(path):
        _generate(model, cache, ids)
        before = cache.stats()
        for change in (
            cache.reset,
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(
                RuntimeError, match=r"while a trace is being recorded to .*trace\.npz.*close the trace"
            ):
                change()
        with pytest.raises(RuntimeError, match=r"being recorded to .* already"):
            cache.record_trace(tmp_path / "other.npz")
        assert cache.stats() == before and cache.get_seq_length() == 113
    assert load_trace(path).misses == [layer.misses for layer in before.layers]
    cache.reset()


def test_after_an_error_nothing_is_written(model, tmp_path):
    path = tmp_path / "trace.npz"
    cache = HiSparseCache(model, Quest(32, 4))
    with pytest.raises(KeyError), cache.record_trace(path):
        _generate(model, cache, prompt(1, 50, device=str(model.device)))
        raise KeyError("the user's own")
    assert not path.exists()
    assert cache.trace is None
    cache.reset()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_that_did_not_finish_is_not_written(model, tmp_path, monkeypatch, failing):
    path = tmp_path / "trace.npz"
    cache = HiSparseCache(model, Quest(32, 4))
    recorder = cache.record_trace(path)
    ids = prompt(1, 50, device=str(model.device))
    _generate(model, cache, ids)
    monkeypatch.setattr(cache.hosted_layers[failing], "append", lambda *_, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(prompt(1, 1, device=str(model.device)), past_key_values=cache)
    with pytest.raises(RuntimeError, match="did not finish"):
        recorder.close()
    assert not path.exists()
    recorder.close()  # it is over already
    cache.reset()


def test_a_copy_is_not_recorded(model, tmp_path):
    cache = HiSparseCache(model, Quest(32, 4))
    with cache.record_trace(tmp_path / "trace.npz"):
        _generate(model, cache, prompt(1, 50, device=str(model.device)))
        twin = copy.deepcopy(cache)
        assert twin.trace is None
        with torch.no_grad():
            model(prompt(1, 1, device=str(model.device)), past_key_values=twin)
        twin.reset()
    assert load_trace(tmp_path / "trace.npz").kinds.tolist() == [0] + 13 * [1]


def test_a_run_of_nothing(model, tmp_path):
    recorder = HiSparseCache(model, Quest(32, 4)).record_trace(str(tmp_path / "trace.npz"))
    recorder.close()
    trace = load_trace(tmp_path / "trace.npz")
    assert trace.layers == [2, 3]
    assert trace.lanes(2) == []


def test_another_file_is_no_trace(tmp_path):
    np.savez(tmp_path / "other.npz", content=1)
    with pytest.raises(ValueError, match="no trace of version 1"):
        load_trace(tmp_path / "other.npz")
