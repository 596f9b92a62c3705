"""What a cache will take is known before it takes it, to the byte."""

from __future__ import annotations

import pytest
import torch

from hf_hisparse import HiSparseCache, Quest
from hf_hisparse.sizes import Buffers, Sizes, largest, whole_records, with_room
from tests.dsa_models import DSA_MODELS, dsa_twins
from tests.models import SUPPORTED, prompt
from tests.msa_models import MSA_MODELS, msa_twins


def _foreseen(cache: HiSparseCache, model, batch: int, tokens: int):
    family, settings = cache._family, cache._settings
    sizes = Sizes(model.config, family, settings, model.dtype)
    capacity = whole_records(family, with_room(tokens))
    buffers = Buffers(settings.device_buffer_records, settings.dense_records)
    return sizes.memory(batch, tokens, capacity, buffers)


def _prefilled(
    model, selector, batch: int, tokens: int, model_pads: bool = True, **settings
) -> HiSparseCache:
    cache = HiSparseCache(model, selector, **settings)
    ids = prompt(batch, tokens, device=str(model.device))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # so that padding is noted
    if not model_pads:
        mask = None
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


@pytest.mark.parametrize(("batch", "tokens"), [(1, 50), (3, 600)])
@pytest.mark.parametrize("name", SUPPORTED)
def test_quest(twins, device, name, batch, tokens):
    model = twins(name, device).enabled
    cache = _prefilled(model, Quest(64, 8), batch, tokens, device_buffer_tokens=200)
    assert cache.memory() == _foreseen(cache, model, batch, tokens)


@pytest.mark.parametrize("buffer", [64, 2000])
def test_dense_layers_on_the_host(twins, device, buffer):
    model = twins("qwen3", device).enabled
    settings = {"host_dense_layers": True, "device_buffer_tokens": buffer}
    cache = _prefilled(model, Quest(64, 8), 2, 600, **settings)
    assert cache.memory() == _foreseen(cache, model, 2, 600)


def test_dense_layers_go_to_the_host_last(twins, device):
    """Records of hot buffers and of dense layers, as the memory gets less: each takes what the other has left."""
    model = twins("qwen3", device).enabled
    cache = HiSparseCache(model, Quest(64, 8))
    sizes, capacity = Sizes(model.config, cache._family, cache._settings, model.dtype), 2000
    every, found = capacity // 8, []
    for limit in range(350_000, 5_000_000, 150_000):
        buffers = sizes.largest_buffers(2, capacity, limit)
        if buffers is None:
            continue
        assert sizes.memory(2, capacity, capacity, buffers).device_bytes <= limit
        found.append(buffers)
        more = buffers._replace(records=buffers.records + 1)
        if buffers.dense is not None:
            more = buffers._replace(dense=buffers.dense + 1)
            assert buffers.records == 8 and buffers.dense <= every
        full = every in buffers  # all that there is, of one kind or the other
        assert full or sizes.memory(2, capacity, capacity, more).device_bytes > limit
    assert found[0].dense is not None and found[0].dense < 30 and found[-1] == Buffers(every)
    assert sizes.largest_buffers(2, capacity, 10**9, hosted=True) == Buffers(every, every)
    least = sizes.smallest(2, capacity, may_host=False).device_bytes
    assert sizes.largest_buffers(2, capacity, least - 1, hosted=False) is None
    assert sizes.largest_buffers(2, capacity, sizes.smallest(2, capacity).device_bytes) == Buffers(8, 0)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 50), (2, 400)])
@pytest.mark.parametrize("name", DSA_MODELS)
def test_dsa(device, name, batch, tokens):
    model = dsa_twins(name, device).enabled
    mode = "expand" if name == "hy_v4" else "absorb"  # has sinks
    cache = _prefilled(model, None, batch, tokens, mla_mode=mode)
    held, foreseen = cache.memory(), _foreseen(cache, model, batch, tokens)
    _assert_equal_but_for_masks(foreseen, held, cache, batch)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 50), (2, 400)])
@pytest.mark.parametrize("layout", ["per_group", "union"])
@pytest.mark.parametrize("name", MSA_MODELS)
def test_msa(device, name, layout, batch, tokens):
    model = msa_twins(name, device).enabled
    cache = _prefilled(model, None, batch, tokens, model_pads=False, layout=layout)
    _assert_equal_but_for_masks(_foreseen(cache, model, batch, tokens), cache.memory(), cache, batch)


def _assert_equal_but_for_masks(foreseen, held, cache: HiSparseCache, batch: int) -> None:
    """Where the model selects, a mask is kept only for captured steps: a byte per token and row."""
    masks = batch * cache.capacity if cache.padding.allowed is None else 0
    assert vars(foreseen) == vars(held) | {"table_bytes": held.table_bytes + masks}


@pytest.mark.parametrize(
    "need", [lambda n: n, lambda n: n * n, lambda n: 10 * (n // 4), lambda n: max(20, n)]
)
@pytest.mark.parametrize("limit", [0, 5, 20, 37, 80, 10**4])
def test_the_largest_number_within_a_limit(need, limit):
    within = [n for n in range(3, 51) if need(n) <= limit]
    assert largest(need, 3, 50, limit) == (within[-1] if within else 0)
