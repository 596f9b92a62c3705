"""A call that is broken off anywhere: afterwards the cache answers as the oracle does, or refuses everything until reset()."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache, MiniMaxM3VLForCausalLM

import hf_hisparse
from hf_hisparse import HiSparseCache, Quest, graphs, sizes
from hf_hisparse.resident_layer import ResidentLayer
from tests import dsa_models, models, msa_models
from tests.models import prompt
from tests.oracle import quest_oracle

BATCH, HELD = 2, 100
QUEST = dict(budget=32, page_size=4)
POINTS = int(os.environ.get("INTERRUPTS", 7))  # places in each call
# Which layers each has: resident and sparse; dense on the host; leading, following; blocks beside resident ones; sliding.
CASES = {
    "resident": (lambda: models.build("qwen3"), dict(selector=Quest(32, 4))),
    "dense_on_host": (
        lambda: models.build("qwen3"),
        dict(selector=Quest(32, 4), host_dense_layers=True, device_buffer_tokens=32),
    ),
    "shared_selection": (lambda: dsa_models.build("glm_FSSF"), {}),
    "blocks": (lambda: msa_models.build("no_experts"), {}),
    "sliding": (lambda: models.build("gemma3"), dict(selector=Quest(32, 4, dense_layers=0))),
}
CALLS = {"decode": 1, "decode_rows": 3, "prefill": 40}
REFUSED = r"did not finish.*cache\.reset\(\)"


class Accident(Exception):
    """Something that happened to someone else."""


class Case:
    """A model, and what it answers to a prompt, a call of `rows` tokens, and what follows."""

    def __init__(self, name: str, rows: int) -> None:
        build, self.settings = CASES[name]
        self.model = build()
        counts = (HELD, rows, 1, 4)
        ids = prompt(BATCH, sum(counts))
        self.parts = ids.split(counts, dim=1)
        native, cache = copy.deepcopy(self.model), DynamicCache(config=self.model.config)
        selector = self.settings.get("selector")
        oracle = (
            quest_oracle(native, **QUEST, dense_layers=selector.dense_layers) if selector else nullcontext()
        )
        with oracle:
            self.expected = [native(part, past_key_values=cache).logits for part in self.parts]
        self.filled = HiSparseCache(self.model, **self.settings)
        self.check(self.filled, 0)

    def check(self, cache: HiSparseCache, at: int, stop: int | None = None) -> None:
        """The calls from number `at` on get the oracle's answers."""
        for part, expected in list(zip(self.parts, self.expected, strict=True))[at : stop or at + 1]:
            logits = self.model(input_ids=part, past_key_values=cache).logits
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@contextmanager
def broken_off(after: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise `error` at a line of the library, after so many others; what it yields counts them."""
    library, lines = str(Path(hf_hisparse.__file__).parent), [0]

    def in_function(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == after:
                raise error
        return in_function

    def in_any(frame: Any, event: str, argument: Any) -> Any:
        return in_function if frame.f_code.co_filename.startswith(library) else None

    before = sys.gettrace()
    sys.settrace(in_any)
    try:
        yield lines
    finally:
        sys.settrace(before)


def places(run: Callable[[], object]) -> list[int]:
    """Numbers of lines, evenly spread over what `run` runs of the library."""
    with broken_off(0, Accident) as lines:
        run()
    step = max(1, lines[0] // POINTS)
    return list(range(1 + step // 2, lines[0], step))


def refuses(case: Case, cache: HiSparseCache) -> None:
    """Whatever would go on with it, and again."""
    for _ in range(2):
        for use in (
            lambda: case.model(input_ids=case.parts[1], past_key_values=cache),
            lambda: case.model.generate(torch.cat(case.parts, 1), past_key_values=cache, max_new_tokens=2),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.arange(BATCH)),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            lambda: cache.make_room(1),
            lambda: cache.put_history([]),
            lambda: copy.deepcopy(cache),
            lambda: cache.save("/nowhere"),
        ):
            with pytest.raises(RuntimeError, match=REFUSED):
                use()


@pytest.mark.parametrize("error", [KeyboardInterrupt, Accident])
@pytest.mark.parametrize("rows", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_call_that_is_broken_off(name, rows, error, monkeypatch):
    monkeypatch.setattr(sizes, "_GROWTH_TOKENS", 1)  # 100 tokens have room for 112: the longest call grows
    case = Case(name, rows)
    twin = copy.deepcopy(case.filled)
    whole = refused = 0
    for place in places(lambda: case.check(twin, 1)):
        cache = copy.deepcopy(case.filled)
        with broken_off(place, error):
            try:
                case.model(input_ids=case.parts[1], past_key_values=cache)
            except error:
                pass
            else:  # torch silences errors of hooks that run after another error
                continue
        try:
            cache.check_whole()
        except RuntimeError:
            refused += 1
            refuses(case, cache)
            cache.reset()
            case.check(cache, 0, 4)
            continue
        whole += 1
        assert cache.get_seq_length() in (HELD, HELD + rows)
        case.check(cache, 1 if cache.get_seq_length() == HELD else 2, 4)
    assert refused and (whole or name == "sliding")


CHANGES = {
    "crop": lambda cache: cache.crop(-5),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(torch.arange(BATCH)),
    "select": lambda cache: cache.batch_select_indices(torch.arange(BATCH)),
    "resize": lambda cache: cache.resize_buffers(40),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["resident", "dense_on_host", "shared_selection", "blocks"])
@torch.no_grad()
def test_a_change_that_is_broken_off(name, change):
    case = Case(name, 1)
    twin = copy.deepcopy(case.filled)
    for place in places(lambda: CHANGES[change](twin)):
        cache = copy.deepcopy(case.filled)
        with broken_off(place, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            CHANGES[change](cache)
        try:
            cache.check_whole()
        except RuntimeError:
            refuses(case, cache)
            cache.reset()
        length = cache.get_seq_length()
        if length == HELD - 5:
            case.model(case.parts[0][:, -5:], past_key_values=cache)
        case.check(cache, 1 if length else 0, 4)


def _after_an_eager_step(case: Case) -> HiSparseCache:
    cache = copy.deepcopy(case.filled)
    case.check(cache, 1)
    return cache


@pytest.mark.parametrize("name", ["resident", "dense_on_host", "shared_selection", "blocks"])
@torch.no_grad()
def test_a_replayed_step_that_is_broken_off(name, imagined_graphs):
    """The layers have counted a token then, and nobody knows whether the GPU has seen it."""
    case = Case(name, 1)
    cache = _after_an_eager_step(case)
    case.check(cache, 2)
    assert cache.graphs.captures == cache.graphs.replays == 1 and cache.get_seq_length() == HELD + 2
    cache = _after_an_eager_step(case)
    with (
        mock.patch.object(graphs._Step, "replay", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        case.model(input_ids=case.parts[2], past_key_values=cache)
    refuses(case, cache)
    cache.reset()
    case.check(cache, 0, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Accident])
@torch.no_grad()
def test_a_capture_that_is_broken_off(error, imagined_graphs):
    """It runs nothing on a GPU, so the layers count what they counted before."""
    case = Case("resident", 1)
    cache = _after_an_eager_step(case)
    counts = [layer.counts for layer in cache.layers]
    attend = cache.layers[-1].attend

    def fails(*args, **kwargs):
        if cache.padding.capturing:
            raise error
        return attend(*args, **kwargs)

    with mock.patch.object(cache.layers[-1], "attend", fails):
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                case.model(input_ids=case.parts[2], past_key_values=cache)
            assert [layer.counts for layer in cache.layers] == counts
        else:
            case.model(input_ids=case.parts[2], past_key_values=cache)  # eagerly
            assert {layer.get_seq_length() for layer in cache.layers} == {HELD + 2}
    cache.check_whole()


GIVEN_UP = {
    "reset": lambda cache: cache.reset(),
    "close": lambda cache: cache.close(),
}


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("give_up", GIVEN_UP)
@torch.no_grad()
def test_what_is_still_being_fetched_has_arrived_when_its_memory_goes(monkeypatch, give_up, torn):
    """The next layer's fetch runs on a stream of its own; the layer that was interrupted before it never waited for it."""
    case = Case("shared_selection", 1)
    cache = copy.deepcopy(case.filled)
    follower = cache.layers[1]
    stream, event = mock.Mock(), object()
    follower.prefetched, cache.change.unfinished = event, torn
    stream.wait_event.side_effect = lambda event: follower.buffer.data  # still there
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    GIVEN_UP[give_up](cache)
    stream.wait_event.assert_called_once_with(event)
    assert follower.prefetched is None
    if give_up == "reset":
        case.check(cache, 0, 2)


@torch.no_grad()
def test_a_last_layer_that_stays_on_the_gpu(monkeypatch):
    """All others have finished by then, and its length is theirs: that does not make its rows those of the tokens."""
    kinds = [*msa_models.KINDS[:-1], "full_attention"]
    build = functools.partial(msa_models._text, 2, layer_types=kinds, mlp_layer_types=["dense"] * len(kinds))
    monkeypatch.setitem(msa_models.MSA_MODELS, "dense_last", lambda: MiniMaxM3VLForCausalLM(build()))
    monkeypatch.setitem(CASES, "dense_last", (lambda: msa_models.build("dense_last"), {}))
    case = Case("dense_last", 3)
    cache = copy.deepcopy(case.filled)
    last = cache.layers[-1]
    assert isinstance(last, ResidentLayer)
    with (
        mock.patch.object(last, "grow", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        case.model(case.parts[1], past_key_values=cache)
    refuses(case, cache)
    cache.reset()
    case.check(cache, 0, 4)
