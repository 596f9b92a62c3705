"""A long call on top of a history: whose records are brought when, and whether they are the right ones."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest
from hf_hisparse.history_stream import HistoryStream
from tests.kernels.layers import GPU
from tests.models import prompt

CHUNK = 40  # more than decode_rows: dense, on top of the history


def _cache(model, **settings):
    return HiSparseCache(model, Quest(32, page_size=4, dense_layers=1), decode_rows=8, **settings)


def _chunks(model, cache, ids):
    with torch.no_grad():
        return torch.cat(
            [
                model(ids[:, at : at + CHUNK], past_key_values=cache).logits
                for at in range(0, ids.shape[1], CHUNK)
            ],
            1,
        )


@pytest.mark.parametrize("batch", [1, 3])
def test_every_chunk_sees_the_whole_history(model, batch):
    ids = prompt(batch, 5 * CHUNK, device=str(model.device))
    got = _chunks(model, _cache(model), ids)
    torch.testing.assert_close(
        got, _chunks(model, DynamicCache(config=model.config), ids), atol=1e-5, rtol=1e-4
    )


def test_after_rows_have_been_rearranged(model):
    """Then the order of rows on the host is no longer that of the batch."""
    ids = prompt(3, 2 * CHUNK, device=str(model.device))
    rows = torch.tensor([2, 0, 1])
    more = prompt(3, CHUNK, seed=1, device=str(model.device))
    answers = []
    for cache in (_cache(model), DynamicCache(config=model.config)):
        _chunks(model, cache, ids)
        cache.reorder_cache(rows.to(model.device))
        answers.append(_chunks(model, cache, more))
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


def test_fewer_rows_than_the_host_holds(model):
    ids = prompt(3, 2 * CHUNK, device=str(model.device))
    more = prompt(2, CHUNK, seed=1, device=str(model.device))
    answers = []
    for cache in (_cache(model), DynamicCache(config=model.config)):
        _chunks(model, cache, ids)
        cache.batch_select_indices(torch.tensor([0, 2], device=model.device))
        answers.append(_chunks(model, cache, more))
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


def test_layers_of_a_cache_and_of_its_copy_share_a_stream_of_their_own(model):
    cache = _cache(model)
    _chunks(model, cache, prompt(1, 2 * CHUNK, device=str(model.device)))
    other = copy.deepcopy(cache)
    for each in (cache, other):
        assert {layer.stream for layer in each.hosted_layers} == {each.hosted_layers[0].stream}
    assert cache.hosted_layers[0].stream is not other.hosted_layers[0].stream


@pytest.mark.parametrize(("rows", "streamed"), [(1, []), (3, [0]), (CHUNK, [0, 1, 2, 3])])
def test_a_short_call_brings_dense_layers_alone(model, monkeypatch, rows, streamed):
    """On the host they take part in the stream; of sparse layers a decode call reads what it selects."""
    cache = _cache(model, host_dense_layers=True)
    ids = prompt(1, 2 * CHUNK + rows, device=str(model.device))
    _chunks(model, cache, ids[:, : 2 * CHUNK])
    brought = []
    original = HistoryStream._bring

    def note(stream, layer, count):
        if layer.layer_idx not in brought:
            brought.append(layer.layer_idx)
        original(stream, layer, count)

    monkeypatch.setattr(HistoryStream, "_bring", note)
    _chunks(model, cache, ids[:, 2 * CHUNK :])
    assert brought == streamed


@pytest.mark.parametrize("rows", [1, 3])
def test_dense_layers_on_the_host_see_the_whole_history(model, rows):
    """With all layers but one dense and a budget over the history, the answer is dense attention's."""
    cache = HiSparseCache(
        model,
        Quest(1024, page_size=4, dense_layers=3),
        host_dense_layers=True,
        device_buffer_tokens=1024,
        decode_rows=8,
    )
    ids = prompt(2, 3 * CHUNK + 8 * rows, device=str(model.device))
    own, at = DynamicCache(config=model.config), 0
    with torch.no_grad():
        for count in (CHUNK, CHUNK, *[rows] * 4, CHUNK, *[rows] * 4):
            text = ids[:, at : at + count]
            expected = model(text, past_key_values=own).logits
            got = model(text, past_key_values=cache).logits
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
            at += count
            for layer in cache.hosted_layers[:3]:
                layer.resize_buffer(5)  # of more than 10 records
    assert rows > 1 or all(layer.misses > 0 for layer in cache.stats().layers[:3])


@GPU
def test_each_layer_is_brought_while_the_one_before_it_computes(model):
    model.cuda()
    cache = _cache(model)
    ids = prompt(1, 4 * CHUNK, device="cuda")
    _chunks(model, cache, ids[:, :CHUNK])
    brought = []
    original = HistoryStream._bring

    def note(stream, layer, count):
        brought.append((layer.layer_idx, layer.interrupted))
        original(stream, layer, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HistoryStream, "_bring", note)
        _chunks(model, cache, ids[:, CHUNK : 2 * CHUNK])
    hosted = [layer.layer_idx for layer in cache.hosted_layers]
    assert brought == [(index, False) for index in hosted], "before its own turn, and once"


@GPU
def test_what_an_interrupted_call_left_is_not_taken_for_the_next_prompt(model):
    model.cuda()
    cache, one, two = (
        _cache(model),
        prompt(1, 3 * CHUNK, device="cuda"),
        prompt(1, 3 * CHUNK, seed=5, device="cuda"),
    )
    _chunks(model, cache, one[:, : 2 * CHUNK])
    target = model.model.layers[cache.hosted_layers[1].layer_idx].mlp
    hook = target.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _chunks(model, cache, one[:, 2 * CHUNK :])
    hook.remove()
    cache.reset()
    got = _chunks(model, cache, two)
    torch.testing.assert_close(
        got, _chunks(model, DynamicCache(config=model.config), two), atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("what", ["a short call", "reset"])
def test_what_is_under_way_is_dropped(model, what):
    """Whatever comes after an interrupted call, its records are of no use to it."""
    cache = _cache(model)
    ids = prompt(1, CHUNK, device=str(model.device))
    _chunks(model, cache, ids)
    cache.hosted_layers[0].stream._coming = "left by a call that did not finish"
    if what == "reset":
        cache.reset()
    else:
        _chunks(model, cache, ids[:, :3])
    assert cache.hosted_layers[0].stream._coming is None
