"""`memory()` and `stats()` say what is, to the byte."""

from __future__ import annotations

import copy
import math
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest
from hf_hisparse.native import trim
from tests.models import prompt

HEADS, WIDTH = 2, 16  # of the qwen3 in tests/models.py, which has 4 layers


def _generated(model, selector: Quest, batch: int = 2, length: int = 400, **settings) -> HiSparseCache:
    cache = HiSparseCache(model, selector, **settings)
    model.generate(prompt(batch, length, device=str(model.device)), past_key_values=cache, max_new_tokens=11)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("selector", "buffer", "batch"),
    [(Quest(32, 4), 32, 1), (Quest(32, 4, dense_layers=0), 64, 3), (Quest(64, 16, dense_layers=3), 80, 2)],
)
def test_memory_is_the_formula(model, selector, buffer, batch, dtype):
    model = model.to(dtype)
    cache = _generated(model, selector, batch, device_buffer_tokens=buffer)
    memory = cache.memory()
    hosted, lanes = 4 - selector.dense_layers, batch * HEADS
    token_bytes = 2 * WIDTH * dtype.itemsize  # K and V
    record_bytes = selector.page_size * token_bytes
    assert memory.buffer_bytes == lanes * hosted * (buffer // selector.page_size) * record_bytes
    tokens = 400 + 11 - 1  # the last one is never fed back
    assert cache.get_seq_length() == tokens
    records = math.ceil(tokens / selector.page_size)
    assert memory.host_bytes == lanes * hosted * records * record_bytes
    assert memory.host_reserved_bytes >= memory.host_bytes
    native = lanes * selector.dense_layers * token_bytes
    assert native * tokens <= memory.native_bytes <= native * (tokens + 1024), "in use, and room for growth"
    # Quest: a minimum and a maximum per page.
    assert memory.selector_bytes >= lanes * hosted * records * 2 * WIDTH * dtype.itemsize
    assert memory.table_bytes > 0


def test_an_empty_cache_takes_nothing(model):
    memory = HiSparseCache(model, Quest(32, 4)).memory()
    assert (memory.buffer_bytes, memory.selector_bytes, memory.table_bytes) == (0, 0, 0)
    assert (memory.native_bytes, memory.host_bytes, memory.host_reserved_bytes) == (0, 0, 0)


@pytest.mark.parametrize("buffer", [32, 1024])
def test_memory_and_counts_of_dense_layers_on_the_host(model, buffer):
    """On the GPU their first records, as native KV; each step reads all records, and misses those behind the first."""
    lanes, record_bytes, dense = 2 * HEADS, 4 * 2 * WIDTH * 4, 2
    cache = _generated(model, Quest(32, 4), 2, device_buffer_tokens=buffer, host_dense_layers=True)
    memory, stats = cache.memory(), cache.stats()
    assert memory.native_bytes == lanes * dense * (buffer // 4) * record_bytes
    assert memory.buffer_bytes == lanes * (4 - dense) * (buffer // 4) * record_bytes
    assert memory.host_bytes == lanes * 4 * math.ceil(410 / 4) * record_bytes
    read = sum(math.ceil(tokens / 4) for tokens in range(401, 411))
    missed = sum(max(0, math.ceil(tokens / 4) - buffer // 4) for tokens in range(401, 411))
    for layer in stats.layers[:dense]:
        assert layer.dense
        assert (layer.steps, layer.selected, layer.misses) == (10, lanes * read, lanes * missed)
    sparse = stats.layers[dense:]
    assert [stats.selected, stats.misses] == [
        sum(getattr(layer, name) for layer in sparse) for name in ("selected", "misses")
    ]
    assert stats.bytes_fetched == sum(layer.bytes_fetched for layer in stats.layers)
    assert "0*" in repr(stats) and "* dense" in repr(stats)
    cache.reset()
    assert cache.stats().bytes_fetched == 0


def test_the_buffer_does_not_grow_with_the_history(model):
    cache = HiSparseCache(model, Quest(32, 4))
    sizes = []
    with torch.no_grad():
        for seed in range(4):
            model(prompt(2, 500, seed, device=str(model.device)), past_key_values=cache)
            sizes.append(cache.memory())
    assert len({size.buffer_bytes for size in sizes}) == 1
    host = [size.host_bytes for size in sizes]
    assert host == sorted(set(host))


def test_stats_add_up(model):
    selector = Quest(32, 4)
    stats = _generated(model, selector, device_buffer_tokens=40).stats()
    assert stats.steps == 10
    assert [layer.layer_idx for layer in stats.layers] == [2, 3]
    record_bytes = 4 * 2 * WIDTH * 4
    for part in (*stats.layers, stats):
        assert part.hits + part.misses == part.selected
        assert part.bytes_fetched == part.misses * record_bytes
        assert part.hit_rate == part.hits / part.selected
        assert 0 < part.misses < part.selected
    for layer in stats.layers:
        assert layer.steps == 10
        assert layer.selected == 10 * 2 * HEADS * selector.top_k  # steps x rows x heads x pages
    for name in ("selected", "hits", "misses", "bytes_fetched"):
        assert getattr(stats, name) == sum(getattr(layer, name) for layer in stats.layers)


def test_selections_of_a_short_history_are_counted_as_read(model):
    """While there are fewer pages than the budget has, fewer are read: none of them twice."""
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=3))
    with torch.no_grad():
        model(prompt(1, 10, device=str(model.device)), past_key_values=cache)
    pages_seen = sum(position // 4 + 1 for position in range(10))
    assert cache.stats().selected == HEADS * pages_seen
    assert cache.stats().misses == 0


class Recorded:
    """A Quest whose selections can be looked at afterwards: `selections[layer]`, ``[lanes, k]`` each."""

    def __init__(self, quest: Quest) -> None:
        self.page_size, self.top_k, self.dense_layers = quest.page_size, quest.top_k, quest.dense_layers
        self.quest = quest
        self.selections: dict[int, list[torch.Tensor]] = {}

    def new_state(self, shape):
        state = self.quest.new_state(shape)
        log = self.selections.setdefault(shape.layer_idx, [])
        select = state.select

        def select_and_note(query, position):
            log.append(select(query, position))
            return log[-1]

        state.select = select_and_note
        return state


def _misses_by_the_book(selections: list[list[int]], prompt_length: int, page_size: int, slots: int) -> int:
    """Misses of one lane: the resolve contract on a list of records, least recently used first.

    After the prefill the buffer holds what its last query selected and the newest others; the first token of a page
    gets a slot without a fetch.
    """
    first, *steps = selections
    pages = math.ceil(prompt_length / page_size)
    others = [record for record in range(pages) if record not in first]
    order = others[len(others) - (slots - len(first)) :] + sorted(first)
    misses = 0
    for position, selection in enumerate(steps, start=prompt_length):
        if position % page_size == 0:
            order = [*order[1:], position // page_size]
        missing = [record for record in selection if record not in order]
        stale = [record for record in order if record not in selection]
        hits = [record for record in selection if record in order]
        order = stale[len(missing) :] + missing[::-1] + hits[::-1]
        misses += len(missing)
    return misses


@pytest.mark.parametrize("buffer", [32, 44, 64, 160])
def test_misses_are_those_of_the_contract(model, buffer):
    """Least recently used goes first, hits rank above what was just fetched."""
    selector, length = Recorded(Quest(32, 4)), 401
    cache = HiSparseCache(model, selector, device_buffer_tokens=buffer, graphs=False)
    model.generate(
        prompt(2, length, device=str(model.device)), past_key_values=cache, do_sample=False, max_new_tokens=60
    )
    for layer in cache.stats().layers:
        steps = torch.stack(selector.selections[layer.layer_idx])  # [1 + steps, lanes, k]
        expected = sum(
            _misses_by_the_book(steps[:, lane].tolist(), length, 4, buffer // 4)
            for lane in range(steps.shape[1])
        )
        assert layer.misses == expected > 0


@pytest.mark.parametrize("length", [5, 400])
def test_reset_leaves_no_trace_in_the_buffer(model, length):
    """A prompt that is decode, and one that is prefill, miss as much in a used cache as in a new one."""
    ids = prompt(2, length, seed=1, device=str(model.device))
    used = _generated(model, Quest(32, 4), device_buffer_tokens=36)
    used.reset()
    fresh = HiSparseCache(model, Quest(32, 4), device_buffer_tokens=36)
    for cache in (used, fresh):
        model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=60)
    assert used.stats() == fresh.stats()


def test_stats_start_again_after_reset(model):
    cache = _generated(model, Quest(32, 4))
    once = cache.stats()
    cache.reset()
    empty = cache.stats()
    assert (empty.steps, empty.selected, empty.misses, empty.bytes_fetched) == (0, 0, 0, 0)
    assert math.isnan(empty.hit_rate)
    repr(empty)
    model.generate(prompt(2, 400, device=str(model.device)), past_key_values=cache, max_new_tokens=11)
    assert cache.stats() == once


def test_beams_are_counted_once(model):
    """Reordering rows neither loses counts nor doubles them."""
    cache = HiSparseCache(model, Quest(32, 4))
    ids = prompt(1, 400, device=str(model.device))
    model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=11)
    stats = cache.stats()
    assert stats.steps == 10
    assert stats.selected == 2 * 10 * 3 * HEADS * 8  # layers x steps x beams x heads x pages


def test_a_copy_counts_on_its_own(model):
    cache = _generated(model, Quest(32, 4))
    before, twin = cache.stats(), copy.deepcopy(cache)
    assert twin.stats() == before
    with torch.no_grad():
        model(prompt(2, 1, device=str(model.device)), past_key_values=twin)
    assert cache.stats() == before
    assert twin.stats().steps == before.steps + 1


def test_tables_for_people(model):
    cache = _generated(model, Quest(32, 4))
    stats = repr(cache.stats())
    for word in ("layer", "selected", "hits", "misses", "hit rate", "all"):
        assert word in stats
    assert len(stats.splitlines()) == 1 + 2 + 1
    assert f"{cache.stats().hit_rate:.2%}" in stats
    assert "410 tokens" in repr(cache)


def _native_storage(cache: HiSparseCache) -> int:
    """Bytes of memory, not of views of it, that transformers' own layers keep."""
    layers = [layer for layer in cache.layers if type(layer).__module__.startswith("transformers")]
    assert layers
    return sum(rows.untyped_storage().nbytes() for layer in layers for rows in (layer.keys, layer.values))


@pytest.mark.parametrize("name", ["qwen3_sliding", "gemma3"])
def test_sliding_layers_keep_no_more_than_their_window(twins, device, name):
    """transformers' own keep a view of all keys and values of a call until the next one."""
    native, model = twins(name, device)
    cache = HiSparseCache(model, Quest(512, 4, dense_layers=0))
    own = DynamicCache(config=native.config)
    with torch.no_grad():
        for rows in (300, 1, 100, 1):
            ids = prompt(2, rows, rows, device)
            model(ids, past_key_values=cache)
            native(ids, past_key_values=own)
            memory = cache.memory()
            assert memory.native_bytes * 0.99 <= _native_storage(cache) <= memory.native_bytes * 9 / 8
    for layer, other in zip(cache.layers, own.layers, strict=True):
        if type(layer) is type(other):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=0)
            torch.testing.assert_close(layer.values, other.values, atol=1e-4, rtol=0)


def test_cropped_sliding_layers_keep_no_more_than_is_left(twins, device):
    _, model = twins("qwen3_sliding", device)
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=0))
    with torch.no_grad():
        model(prompt(2, 45, device=device), past_key_values=cache)  # less than a window
    cache.crop(-35)
    assert _native_storage(cache) <= cache.memory().native_bytes * 9 / 8


def test_a_decode_step_copies_no_window(twins, device):
    _, model = twins("qwen3_sliding", device)
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=0))
    with torch.no_grad():
        model(prompt(2, 100, device=device), past_key_values=cache)
        with mock.patch.object(torch.Tensor, "clone", side_effect=AssertionError):
            trim(cache.layers[0])
            model(prompt(2, 1, device=device), past_key_values=cache)
