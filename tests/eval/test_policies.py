"""Replays: LRU is the cache to the last miss, Belady is the optimum, the other policies do what their papers say."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch

from eval.policies.replacement import CLOCK, FIFO, LFU, LRU, POLICIES, SIEVE, Belady, Buffer, CurrentOnly
from eval.policies.replay import check_against_live, lru_curve, replay
from eval.policies.stack import misses_by_size
from eval.traces import Crop, Event, Prefill, Step, Trace, load_trace, synthetic_trace
from hf_hisparse import HiSparseCache, Quest
from tests import dsa_models
from tests.models import prompt

LENGTH = 141


def _cache(model, times: int) -> HiSparseCache:
    if hasattr(model.config, "index_topk"):
        return HiSparseCache(model, device_buffer_tokens=times * dsa_models.TOP_K)
    return HiSparseCache(model, Quest(32, 4), device_buffer_tokens=times * 32)


def _greedy(model, cache, ids, new_tokens=40, **more):
    return model.generate(
        ids, past_key_values=cache, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **more
    )


def _short(model, cache, device):
    """From the first token on, through the sizes at which everything fits."""
    _greedy(model, cache, prompt(1, 10, device=device), 100)


def _single(model, cache, device):
    """With the largest buffer the prompt fits, and then outgrows it."""
    _greedy(model, cache, prompt(1, 110, device=device))


def _padded_batch(model, cache, device):
    ids = prompt(3, LENGTH, device=device)
    mask = torch.ones_like(ids)
    mask[1, :90] = 0
    _greedy(model, cache, ids, attention_mask=mask)


def _turns(model, cache, device):
    """A second turn long enough to be prefill, and one that is decode."""
    ids = _greedy(model, cache, prompt(2, LENGTH, device=device), 20)
    ids = _greedy(model, cache, torch.cat([ids, prompt(2, 50, 1, device)], dim=1), 20)
    _greedy(model, cache, torch.cat([ids, prompt(2, 5, 2, device)], dim=1), 20)


def _lookup(model, cache, device):
    """Drafts that are cropped again, in the middle of a page and by whole pages."""
    _greedy(model, cache, prompt(1, LENGTH, device=device).repeat(1, 2), prompt_lookup_num_tokens=7)


RUNS = [
    *itertools.product(["qwen3", "v32"], [_short, _single, _padded_batch, _turns, _lookup]),
    ("glm_FSSF", _turns),
]


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize(("name", "run"), RUNS, ids=lambda part: getattr(part, "__name__", part))
def test_lru_is_the_cache_to_the_last_miss(twins, device, tmp_path, name, run, times):
    model = (twins if name == "qwen3" else dsa_models.dsa_twins)(name, device).enabled
    cache = _cache(model, times)
    with cache.record_trace(tmp_path / "trace.npz"):
        run(model, cache, device)
    trace, stats = load_trace(tmp_path / "trace.npz"), cache.stats()
    assert trace.misses == [layer.misses for layer in stats.layers]
    assert stats.misses > 0 or run is _short
    assert (trace.kinds == 2).any() == (run is _lookup)
    check_against_live(trace)
    off_by_one = dataclasses.replace(trace, misses=[*trace.misses[:-1], trace.misses[-1] + 1])
    with pytest.raises(RuntimeError, match=rf"layer {trace.layers[-1]}: the cache counted"):
        check_against_live(off_by_one)


@pytest.mark.parametrize("name", ["qwen3", "glm_FSSF"])
def test_a_replay_tells_what_another_buffer_would_have_missed(twins, device, tmp_path, name):
    model = (twins if name == "qwen3" else dsa_models.dsa_twins)(name, device).enabled
    ids = prompt(2, LENGTH, device=device)
    cache = _cache(model, 1)
    with cache.record_trace(tmp_path / "trace.npz"):
        _greedy(model, cache, ids)
    trace = load_trace(tmp_path / "trace.npz")
    for total, times in zip(replay(trace, [2 * trace.top_k, 3 * trace.top_k]), (2, 3), strict=False):
        other = _cache(model, times)
        _greedy(model, other, ids)
        assert other.stats().selected == total.selected
        assert other.stats().misses == total.policies["LRU"] > 0


# ---------------------------------------------------------------------- the optimum


def _random_events(seed: int, steps: int) -> tuple[list[Event], int]:
    """A lane of few records with all that can happen in it, and slots for it."""
    rng = random.Random(seed)
    slots, records = rng.choice([2, 3, 4]), 6
    events: list[Event] = [Prefill(rng.sample(range(records), 2), records)]
    for _ in range(steps):
        kind = rng.random()
        if kind < 0.08 and records > 4:
            records -= rng.choice([1, 2])
            events.append(Crop(records))
        elif kind < 0.12:
            events.append(Prefill(rng.sample(range(records), 2), records))
        else:
            begins = rng.random() < 0.3
            records += begins
            events.append(Step(rng.sample(range(records), rng.choice([1, 2])), records, begins))
    return events, slots


def _after_prefill(selection: list[int], records: int, slots: int) -> frozenset[int]:
    newest = sorted(range(records), key=lambda record: (record in selection, record))
    return frozenset(newest[-slots:])


def _fewest_misses(events: list[Event], slots: int) -> int:
    """The optimum over all choices of victims, by trying each."""

    def evictions(held: frozenset[int], arriving: set[int], kept: set[int]):
        surplus = max(0, len(held | arriving) - slots)
        for victims in itertools.combinations(sorted(held - kept), surplus):
            yield (held - set(victims)) | arriving

    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for event in events:
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            if isinstance(event, Prefill):
                states = [(_after_prefill(event.selection, event.records, slots), 0)]
            elif isinstance(event, Crop):
                states = [(frozenset(record for record in held if record < event.records), 0)]
            else:
                wanted = set(event.selection)
                begun = list(evictions(held, {event.records - 1}, set())) if event.begins else [held]
                states = [
                    (state, len(wanted - before))
                    for before in begun
                    for state in evictions(before, wanted - before, wanted)
                ]
            for state, misses in states:
                after[state] = min(after.get(state, cost + misses), cost + misses)
        costs = after
    return min(costs.values())


@pytest.mark.parametrize("seed", range(40))
def test_belady_is_the_optimum(seed):
    events, slots = _random_events(seed, steps=14)
    buffer = Belady(slots, events)
    buffer.play()
    assert buffer.misses == _fewest_misses(events, slots)


def test_some_case_tells_belady_from_lru():
    """The test above can fail: LRU would."""
    worse = 0
    for seed in range(40):
        events, slots = _random_events(seed, steps=14)
        buffer = LRU(slots, events)
        buffer.play()
        worse += buffer.misses > _fewest_misses(events, slots)
    assert worse > 10


def _synthetic(history: int = 300) -> list[Event]:
    selections = synthetic_trace(1, 16, history, 150)[:, 0].tolist()
    return [Prefill(selections[0], history), *(Step(selection, history) for selection in selections[1:])]


@pytest.mark.parametrize("slots", [16, 24, 40, 64])
def test_no_policy_beats_belady(slots):
    events = _synthetic()
    missed = {}
    for name, policy in POLICIES.items():
        buffer = policy(slots, events)
        buffer.play()
        missed[name] = buffer.misses
        assert len(buffer.held) == slots
    assert missed["Belady"] == min(missed.values()) > 0
    if slots >= 40:
        assert missed["LRU"] < missed["FIFO"]


# ---------------------------------------------------------------------- the others, by hand

A, B, C, D, E, F = range(6)


@pytest.mark.parametrize(
    ("policy", "evicted"),
    [
        (FIFO, [A, B, C]),  # in order of arrival
        (LRU, [B, C, A]),  # A was read after B and C
        (LFU, [B, C, D]),  # A was read twice, the others once
        (CLOCK, [B, C, A]),  # A is spared once; D and E lie behind the hand, which comes to A next
        (SIEVE, [B, C, D]),  # A is spared once; the hand goes on to D
    ],
)
def test_victims_by_hand(policy, evicted):
    """Three slots: A, B, C come, A is read again; then D, E and F come."""
    events = [Step([record], 100) for record in (A, B, C, A, D, E, F)]
    buffer = policy(3, events)
    gone = []
    for index in range(len(events)):
        before = set(buffer.held)
        buffer.do(index)
        gone += sorted(before - set(buffer.held))
    assert gone == evicted
    assert (buffer.selected, buffer.misses) == (7, 6)


def test_a_crop_leaves_the_hand_where_it_was():
    """D took the slot of A, and the hand points at B; D is cropped, written again, and the next record to go is B."""
    events = [*(Step([record], 4) for record in (A, B, C, D)), Crop(3), Step([D], 4), Step([E], 5)]
    buffer = CLOCK(3, events)
    buffer.play()
    assert set(buffer.held) == {C, D, E}
    assert buffer.misses == 6


@pytest.mark.parametrize("policy", POLICIES.values())
def test_a_step_evicts_nothing_that_it_reads(policy):
    events = _synthetic()
    buffer = policy(16, events)
    for index, event in enumerate(events):
        buffer.do(index)
        assert set(buffer.held) == set(event.selection)


@pytest.mark.parametrize("policy", [*POLICIES.values(), CurrentOnly])
def test_padding_and_duplicates(policy):
    events = [Step([3, -1, 3, 5], 9), Step([5, -1, -1, -1], 9)]
    buffer = policy(4, events)
    buffer.play()
    assert (buffer.selected, buffer.misses) == (4, 2)


def test_the_current_selection_only():
    events = [Prefill([1, 2], 9), Step([2, 3], 9), Step([3, 9], 10, begins=True), Step([2, 9], 10)]
    buffer = CurrentOnly(2, events)
    buffer.play()
    assert (buffer.selected, buffer.misses) == (6, 2)  # 3, then 2 again; 9 was written to its slot


# ---------------------------------------------------------------------- all sizes at once


def _growing(seed: int = 0) -> list[Event]:
    """Selections with locality over a history that grows."""
    rng = random.Random(seed)
    events: list[Event] = [Prefill(rng.sample(range(60), 8), 60)]
    recent = list(range(60))
    for step in range(120):
        records = 61 + step // 2
        if step % 2 == 0:
            recent.append(records - 1)
        selection = {recent[-1 - min(int(rng.expovariate(0.06)), len(recent) - 1)] for _ in range(8)}
        recent = [record for record in recent if record not in selection] + sorted(selection)
        events.append(Step(sorted(selection, key=lambda _: rng.random()), records, step % 2 == 0))
    return events


def _lru_in_selection_order(events: list[Event], slots: int) -> int:
    """A buffer of one size in which what a step reads ranks in selection order, fetched or not."""
    used = {record: (0, record) for record in range(1000)}
    held: set[int] = set()
    misses = 0
    for now, event in enumerate(events, start=1):
        if isinstance(event, Prefill):
            held = set(_after_prefill(event.selection, event.records, slots))
            for record in event.selection:
                used[record] = (now, record)
            continue
        if event.begins:
            used[event.records - 1] = (now, 0)
            held = set(sorted(held | {event.records - 1}, key=used.__getitem__)[-slots:])
        misses += len(set(event.selection) - held)
        held |= set(event.selection)
        for rank, record in enumerate(event.selection):
            used[record] = (now, 1 + rank)
        held = set(sorted(held, key=used.__getitem__)[-slots:])
    return misses


def test_stack_distances_give_all_sizes_at_once():
    events = _growing()
    curve = misses_by_size(events, 70)
    expected = [_lru_in_selection_order(events, slots) for slots in range(8, 71)]
    assert curve[8:].tolist() == expected
    assert expected[0] > expected[20] > expected[-1]


def test_stack_distances_are_near_the_exact_replay():
    events = _growing()
    curve = misses_by_size(events, 40)
    for slots in (8, 12, 16, 24, 40):
        buffer = LRU(slots, events)
        buffer.play()
        assert curve[slots] == pytest.approx(buffer.misses, rel=0.05)


def test_stack_distances_refuse_crops():
    with pytest.raises(ValueError, match="crops"):
        misses_by_size([Crop(3)], 4)


def test_layers_that_share_a_selection_count_each():
    """As in the cache's own counters."""
    selections = synthetic_trace(2, 16, 300, 20).numpy()
    trace = Trace(
        model="",
        settings="",
        page_size=1,
        top_k=16,
        device_buffer_records=32,
        layers=[0, 1, 2],
        leaders=[0, 0, 2],
        selected=[640, 640, 640],
        misses=[0, 0, 0],
        kinds=np.ones(20, np.int8),
        positions=np.arange(300, 320),
        selections={0: selections, 2: selections[::-1]},
    )
    total, first, last = replay(trace, [32])
    assert (total.layer, first.layer, last.layer) == (None, 0, 2)
    assert total.selected == 3 * 640
    for name in POLICIES:
        assert total.policies[name] == 2 * first.policies[name] + last.policies[name]
    assert lru_curve(trace, 32)[32] == pytest.approx(total.rate("LRU"), abs=0.02)


def test_buffers_are_replayed_alike():
    """Random, too."""
    events = _synthetic()

    def missed(policy: type[Buffer]) -> int:
        buffer = policy(24, events)
        buffer.play()
        return buffer.misses

    assert all(missed(policy) == missed(policy) for policy in POLICIES.values())
