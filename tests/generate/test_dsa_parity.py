"""`HiSparseCache` answers what a DSA model answers with its own `DynamicCache` and attention, in all of `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.dsa_models import DSA_MODELS, LAYERS, TOP_K, dsa_twins
from tests.generate.parity import assert_parity_of_own_selection as assert_parity
from tests.generate.scenarios import LONG, SCENARIOS, Session

ALL = 1024  # tokens: no history of a scenario is longer
# Scores that all but tie are ordered by the last bit of fp32, and a selection of 32 tokens shows it: other weights then.
SEEDS = {("glm_FSSF", "reorder"): 1}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario(device, scenario):
    """Full and shared layers, and a buffer as small as can be."""
    twins = dsa_twins("glm_FSSF", device, SEEDS.get(("glm_FSSF", scenario), 0))
    assert_parity(twins, scenario, device_buffer_tokens=TOP_K)


@pytest.mark.parametrize(
    "scenario", ["greedy_batch", "beams_left_padded", "prompt_lookup", "turns", "crop_batch"]
)
@pytest.mark.parametrize("buffer", [TOP_K, 45, ALL])
def test_every_buffer(device, scenario, buffer):
    caches = assert_parity(dsa_twins("v32", device), scenario, device_buffer_tokens=buffer)
    assert caches[0].stats().selected > 0
    assert (caches[0].stats().misses == 0) == (buffer == ALL)


NEEDS_EXPAND = {"hy_v4"}  # attention sinks


@pytest.mark.parametrize("scenario", ["left_padded", "turns"])
@pytest.mark.parametrize("name", [name for name in DSA_MODELS if name not in ("v32", "glm_FSSF")])
def test_every_model(device, name, scenario):
    assert_parity(
        dsa_twins(name, device),
        scenario,
        mla_mode="expand" if name in NEEDS_EXPAND else "absorb",
        verify=True,
    )


@pytest.mark.parametrize("scenario", ["left_padded", "return_sequences", "turns", "cuts"])
@pytest.mark.parametrize("memory", ["100KB", "3MB"])
def test_prefill_in_slices(device, scenario, memory):
    """A few rows at a time, or even one."""
    assert_parity(dsa_twins("glm_FSSF", device), scenario, prefill_memory=memory)


@pytest.mark.parametrize("scenario", ["greedy", "chunked_prefill", "copy_while_decoding", "assisted"])
def test_with_and_without_prefetch(device, scenario):
    assert_parity(dsa_twins("glm_FFFSSS", device), scenario, prefetch=False)
    assert_parity(dsa_twins("glm_FFFSSS", device), scenario, prefetch=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["v32", "glm_FSSF"])
def test_expanded_gives_the_same_bits(name, attention):
    """In bf16, one row at a time, that is what the model's own cache is asked as well."""
    twins = dsa_twins(name, "cpu", 0, torch.bfloat16, attention)
    for scenario in ("greedy", "beams_left_padded"):
        assert_parity(twins, scenario, same_bits=True, device_buffer_tokens=TOP_K, mla_mode="expand")


def test_small_buffers_miss_and_large_ones_hit(device):
    rates = []
    for buffer in (TOP_K, 64, 128, 2 * LONG):
        (cache,) = assert_parity(dsa_twins("glm_FSSF", device), "greedy_batch", device_buffer_tokens=buffer)
        rates.append(cache.stats().hit_rate)
    assert rates == sorted(rates)
    assert rates[0] < 0.5 and rates[-1] == 1.0
    assert len(cache.hosted_layers) == LAYERS


def test_the_selection_shows_in_the_text(device):
    """A model that selects one token less writes something else: so a parity test can fail."""
    twins = dsa_twins("v32", device)
    texts = []
    for top_k in (TOP_K, TOP_K - 1, ALL):
        session = Session(twins.native, lambda: DynamicCache(config=twins.native.config))
        indexers = [layer.self_attn.indexer for layer in twins.native.model.layers]
        try:
            for indexer in indexers:
                indexer.index_topk = top_k
            SCENARIOS["greedy"](session)
        finally:
            for indexer in indexers:
                indexer.index_topk = TOP_K
        texts.append(tuple(session.texts[0][0].tolist()))
    assert len(set(texts)) == len(texts)
