"""A history that was computed elsewhere goes on as if this cache had read it; hot buffers change their size between calls."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, LayerHistory, Quest
from tests.dsa_models import dsa_twins
from tests.models import prompt
from tests.msa_models import msa_twins
from tests.oracle import quest_oracle

TOKENS, NEW = 301, 12  # 301: the last record is filling
SELECTOR = Quest(32, 4)


def _twins(name, twins, device):
    if name == "qwen3":
        return twins(name, device), SELECTOR
    return (dsa_twins if name.startswith("glm") else msa_twins)(name, device), None


def _indexer_keys(layer):
    """Of transformers' own layer, ``[batch, T, width]``."""
    found = [
        value
        for key, value in vars(layer).items()
        if key.startswith(("ind", "idx"))
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    return found[0].reshape(-1, *found[0].shape[-2:]) if found else None


def _histories(native: DynamicCache, recent=None) -> list[LayerHistory]:
    return [LayerHistory(layer.keys, layer.values, _indexer_keys(layer), recent) for layer in native.layers]


@torch.no_grad()
def _decode(model, cache, tokens):
    return torch.cat([model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(NEW)], dim=1)


@pytest.mark.parametrize("name", ["qwen3", "two_groups", "glm_FSSF"])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_put_is_read(twins, device, name, ordered):
    pair, selector = _twins(name, twins, device)
    tokens, more = prompt(2, TOKENS, device=device), prompt(2, NEW, seed=1, device=device)
    own = DynamicCache(config=pair.native.config)
    with quest_oracle(pair.native, 32, 4) if selector else nullcontext():
        with torch.no_grad():
            pair.native(tokens, past_key_values=own)
        if (
            own.layers[1].keys.shape[-1]
            != HiSparseCache(pair.enabled, selector)._family.kv_shape(1, True).key_width
        ):
            pytest.skip("this version's own cache holds expanded keys, not what a HiSparseCache stores")
        cache = HiSparseCache(pair.enabled, selector, verify=True)
        recent = None
        if ordered:
            lanes = 2 if name.startswith("glm") else 2 * own.layers[1].keys.shape[1]
            size = cache._family.page_size
            last = (TOKENS - 1) // size
            recent = torch.tensor([7, 3, last], device=device).repeat(lanes, 1)
        cache.put_history(_histories(own, recent))
        expected = _decode(pair.native, own, more)
    got = _decode(pair.enabled, cache, more)
    assert cache.get_seq_length() == TOKENS + NEW
    assert cache.stats().misses > 0
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_what_is_put_moves_dense_layers(twins, device):
    """Too little device memory for them: they go to the host before anything is put."""
    pair, _ = _twins("qwen3", twins, device)
    tokens, more = prompt(2, TOKENS, device=device), prompt(2, NEW, seed=1, device=device)
    own = DynamicCache(config=pair.native.config)
    cache = HiSparseCache(pair.enabled, SELECTOR, device_memory=700_000, verify=True)
    with quest_oracle(pair.native, 32, 4):
        with torch.no_grad():
            pair.native(tokens, past_key_values=own)
        cache.put_history(_histories(own))
        expected = _decode(pair.native, own, more)
    assert len(cache.hosted_layers) == len(cache.layers), "they did not move"
    torch.testing.assert_close(_decode(pair.enabled, cache, more), expected, atol=1e-4, rtol=1e-4)


def test_the_most_recently_used_stay_longest(twins, device):
    pair, selector = _twins("qwen3", twins, device)
    rows = torch.randn(1, 2, TOKENS, 16, device=device)
    cache = HiSparseCache(pair.enabled, selector, device_buffer_tokens=64)
    recent = torch.tensor([5, 60, 2, 75], device=device).repeat(2, 1)
    cache.put_history(LayerHistory(rows, rows, recent=recent) for _ in range(4))
    buffer = cache.hosted_layers[0].buffer
    in_order = buffer.slot_records.gather(1, buffer.recency.order().long())
    assert in_order[:, -4:].tolist() == recent.tolist()
    assert in_order[0, :-4].tolist() == list(range(63, 75))  # the newest others


def test_what_cannot_be_put_is_refused(twins, device):
    pair, selector = _twins("qwen3", twins, device)
    rows = torch.randn(1, 2, TOKENS, 16, device=device)
    cache = HiSparseCache(pair.enabled, selector)
    with pytest.raises(ValueError, match="record 75, which is filling"):
        cache.put_history(
            LayerHistory(rows, rows, recent=torch.tensor([[1], [2]], device=device)) for _ in range(4)
        )
    cache.put_history(LayerHistory(rows, rows) for _ in range(4))
    with pytest.raises(ValueError, match=f"holds {TOKENS} tokens already"):
        cache.put_history([])


def _rows(
    heads: int = 2, tokens: int = TOKENS, width: int = 16, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.zeros(1, heads, tokens, width, dtype=dtype)


def _recent(*records: int) -> LayerHistory:
    return LayerHistory(_rows(), _rows(), recent=torch.tensor([records, records]))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (LayerHistory(_rows(3), _rows(3)), r"layer 1: keys are \[1, 3, 301, 16\], must be \[1, 2, 301, 16\]"),
        (LayerHistory(_rows(width=8), _rows()), "keys are"),
        (LayerHistory(_rows(tokens=47), _rows(tokens=47)), "keys are"),
        (LayerHistory(_rows(), _rows(tokens=300)), "values are"),
        (LayerHistory(_rows(dtype=torch.bfloat16), _rows()), "keys of torch.bfloat16, must be torch.float32"),
        (
            LayerHistory(_rows(), _rows(), indexer_keys=_rows()[0]),
            r"indexer_keys are \[2, 301, 16\], must be None",
        ),
    ],
)
def test_a_layer_that_differs_is_refused(twins, wrong, message):
    pair, selector = _twins("qwen3", twins, "cpu")
    right = LayerHistory(_rows(), _rows())
    cache = HiSparseCache(pair.enabled, selector)
    with pytest.raises(ValueError, match=message):
        cache.put_history([right, wrong, right, right])
    assert cache.get_seq_length() == 0
    cache.put_history([right] * 4)  # nothing is left of it


@pytest.mark.parametrize(
    "wrong, message",
    [
        (_recent(3, 3, 75), "names a record twice"),
        (_recent(3, 90, 75), "records from 3 to 90, must be different records of 0 to 75"),
        (_recent(-1, 75), "records from -1 to 75"),
        (_recent(*range(76)), "names 76 records per lane"),
        (_recent(1, 2), "lacks record 75, which is filling"),
        (LayerHistory(_rows(), _rows(), recent=torch.tensor([75])), r"recent is torch.int64 \[1\]"),
    ],
)
def test_recent_records_that_do_not_suit_are_refused(twins, wrong, message):
    pair, selector = _twins("qwen3", twins, "cpu")
    cache = HiSparseCache(pair.enabled, selector)
    with pytest.raises(ValueError, match=message):
        cache.put_history([LayerHistory(_rows(), _rows())] * 2 + [wrong] * 2)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "count, message", [(3, "3 layers are given, the model has 4"), (5, "more than the model's 4")]
)
def test_another_number_of_layers_is_refused(twins, count, message):
    pair, selector = _twins("qwen3", twins, "cpu")
    cache = HiSparseCache(pair.enabled, selector)
    with pytest.raises(ValueError, match=message):
        cache.put_history([LayerHistory(_rows(), _rows())] * count)
    assert cache.get_seq_length() == 0


def test_indexer_keys_must_not_be_missing(twins):
    pair, _ = _twins("glm_FSSF", twins, "cpu")
    cache = HiSparseCache(pair.enabled)
    shape = cache._family.kv_shape(0, hosted=True)
    history = LayerHistory(_rows(1, width=shape.key_width), _rows(1, width=shape.value_width))
    with pytest.raises(ValueError, match=r"indexer_keys are None, must be \[1, 301, "):
        cache.put_history([history] * len(cache.layers))


@pytest.mark.parametrize("name", ["qwen3", "two_groups", "glm_FSSF"])
def test_buffers_change_their_size_between_calls(twins, device, name):
    pair, selector = _twins(name, twins, device)
    tokens, more = prompt(1, TOKENS, device=device), prompt(1, NEW, seed=1, device=device)
    cache = HiSparseCache(pair.enabled, selector, verify=True)
    least = cache._family.top_k * cache._family.page_size
    own = DynamicCache(config=pair.native.config)

    def read(model, cache):
        if not cache.get_seq_length():
            with torch.no_grad():
                model(tokens, past_key_values=cache)
        return _decode(model, cache, more)

    for size in (3 * least, least):  # grown while empty, shrunk while full
        cache.resize_buffers(size)
        with quest_oracle(pair.native, 32, 4) if selector else nullcontext():
            expected = read(pair.native, own)
        torch.testing.assert_close(read(pair.enabled, cache), expected, atol=1e-4, rtol=1e-4)
        assert cache.hosted_layers[0].buffer.data.shape[1] == size // cache._family.page_size


def test_an_empty_cache_keeps_its_host_memory(twins, device):
    pair, selector = _twins("qwen3", twins, device)
    rows = torch.randn(2, 2, TOKENS, 16, device=device)
    cache = HiSparseCache(pair.enabled, selector)
    cache.put_history(LayerHistory(rows, rows) for _ in range(4))
    areas = [layer.pool.area for layer in cache.hosted_layers]
    cache.reset()
    cache.resize_buffers(128)
    assert cache.memory().buffer_bytes == 0
    cache.put_history(LayerHistory(rows[:1], rows[:1]) for _ in range(4))
    assert [layer.pool.area for layer in cache.hosted_layers] == areas
    assert cache.hosted_layers[0].buffer.data.shape[1] == 32


def test_a_size_that_does_not_fit_is_refused(twins, device):
    pair, selector = _twins("qwen3", twins, device)
    cache = HiSparseCache(pair.enabled, selector)
    with pytest.raises(ValueError, match="multiple of the page size 4"):
        cache.resize_buffers(33)
    with pytest.raises(ValueError, match="device_memory=1"):
        HiSparseCache(pair.enabled, selector, device_memory="1GiB").resize_buffers(64)
