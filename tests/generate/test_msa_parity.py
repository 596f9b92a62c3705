"""`HiSparseCache` answers what a MiniMax-M3 model answers with its own `DynamicCache` and attention, in all of `generate`."""

from __future__ import annotations

import pytest
from transformers import DynamicCache

from hf_hisparse import hosted_layer
from hf_hisparse.models.msa import LAYOUTS
from tests.generate.parity import assert_parity_of_own_selection as assert_parity
from tests.generate.scenarios import SCENARIOS, Session
from tests.msa_models import BLOCK, MSA_MODELS, TOP_K, msa_twins

BUDGET = BLOCK * TOP_K
ALL = 1024  # tokens: no history of a scenario is longer

# Padding on the left is refused: transformers is wrong there (see `tests.hf_hisparse.test_msa`).
EXCLUDED = {
    "left_padded",
    "beams_left_padded",
    "chunked_prefill_left_padded",
    "turns_left_padded",
    "crop_batch",
    "crop_after_reorder",
    "copies_with_padding",
    "short_left_padded",
    "holes",  # keys of equal padding tokens in equal places tie (`test_padding_on_the_right` has others)
}
# Those that move, copy or forget what is held.
MOVING = (
    "beams",
    "prompt_lookup",
    "copy_while_decoding",
    "crop",
    "repeat_and_select",
    "reorder",
    "reset_and_reuse",
)
OTHERS = [scenario for scenario in SCENARIOS if scenario not in EXCLUDED]


@pytest.mark.parametrize("scenario", OTHERS)
def test_every_scenario(device, scenario):
    """Two groups, and a buffer as small as can be."""
    assert_parity(msa_twins("two_groups", device), scenario, device_buffer_tokens=BUDGET)


@pytest.mark.parametrize("scenario", ["greedy_batch", "beams", "crop"])
def test_attention_that_reads_the_host_itself(device, monkeypatch, scenario):
    """As with many lanes, more than the models of these tests have."""
    monkeypatch.setattr(hosted_layer, "FEW_LANES", 0)
    caches = assert_parity(msa_twins("two_groups", device), scenario, device_buffer_tokens=BUDGET)
    assert caches[0].stats().misses > 0


@pytest.mark.parametrize("scenario", ["greedy_batch", "beams", "crop"])
@pytest.mark.parametrize("buffer", [2 * BUDGET, 9 * BLOCK, ALL])
def test_every_buffer(device, scenario, buffer):
    layout = "union" if buffer == 2 * BUDGET else "per_group"
    caches = assert_parity(
        msa_twins("two_groups", device), scenario, device_buffer_tokens=buffer, layout=layout
    )
    assert caches[0].stats().selected > 0
    assert (caches[0].stats().misses == 0) == (buffer == ALL)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scenario", ["turns"])
@pytest.mark.parametrize(
    "name", [name for name in MSA_MODELS if name not in ("two_groups", "images", "all_sparse")]
)
def test_every_model(device, name, scenario, layout):
    assert_parity(msa_twins(name, device), scenario, layout=layout, verify=True)


@pytest.mark.parametrize("scenario", MOVING)
def test_as_union(device, scenario):
    """One hot buffer for four groups, as small as can be."""
    assert_parity(msa_twins("four_groups", device), scenario, layout="union", device_buffer_tokens=4 * BUDGET)


@pytest.mark.parametrize("scenario", ["greedy_batch", "turns"])
@pytest.mark.parametrize("memory", ["100KB", "3MB"])
def test_prefill_in_slices(device, scenario, memory):
    """A few rows at a time, or even one."""
    assert_parity(msa_twins("two_groups", device), scenario, prefill_memory=memory)


@pytest.mark.parametrize("scenario", ["greedy_batch", "chunked_prefill"])
def test_eager_attention(device, scenario):
    assert_parity(msa_twins("two_groups", device, 0, "eager"), scenario)


def test_the_selection_shows_in_the_text(device):
    """A model that selects one block less writes something else: so a parity test can fail."""
    twins = msa_twins("two_groups", device)
    texts = []
    indexers = [module for module in twins.native.modules() if hasattr(module, "build_block_mask")]
    for top_k in (TOP_K, TOP_K - 1, ALL // BLOCK):
        session = Session(twins.native, lambda: DynamicCache(config=twins.native.config))
        try:
            for indexer in indexers:
                indexer.topk_blocks = top_k
            SCENARIOS["greedy"](session)
        finally:
            for indexer in indexers:
                indexer.topk_blocks = TOP_K
        texts.append(tuple(session.texts[0][0].tolist()))
    assert len(set(texts)) == len(texts)
