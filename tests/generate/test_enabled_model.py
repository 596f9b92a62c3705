"""An enabled model with any other cache, or none, answers as before, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hisparse import HiSparseCache, Quest, disable, enable
from tests.models import SUPPORTED, prompt

CACHES = {
    "none": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=160),
}


def _answers(model, ids, mask, cache):
    """Everything a call gives, of `generate` and of a plain forward."""
    output = model.generate(
        ids, attention_mask=mask, past_key_values=CACHES[cache](model), use_cache=cache != "none", do_sample=False,
        max_new_tokens=6, return_dict_in_generate=True, output_logits=True, disable_compile=True,
    )  # fmt: skip
    with torch.no_grad():
        forward = model(ids, attention_mask=mask, past_key_values=CACHES[cache](model))
    return output.sequences, *output.logits, forward.logits


def _assert_same_bits(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_other_caches_answer_as_before(twins, device, name, attention, cache, padded):
    native, model = (copy.deepcopy(twin) for twin in twins(name, device))
    disable(model)
    native.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    ids = prompt(2, 120, device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :50] = 0
    expected = _answers(native, ids, mask, cache)
    enable(model)
    _assert_same_bits(_answers(model, ids, mask, cache), expected)
    # A HiSparseCache in between leaves nothing behind.
    model.generate(
        ids, past_key_values=HiSparseCache(model, Quest(32, 4)), attention_mask=mask, max_new_tokens=3
    )
    _assert_same_bits(_answers(model, ids, mask, cache), expected)
    disable(model)
    assert model.config._attn_implementation == attention
    _assert_same_bits(_answers(model, ids, mask, cache), expected)


def test_training_as_before(model):
    ids = prompt(2, 60, device=str(model.device))
    gradients = []
    for prepare in (disable, enable):
        prepare(model)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    _assert_same_bits(*gradients)


def test_attention_weights_as_before(model):
    model.set_attn_implementation("eager")
    ids = prompt(1, 60, device=str(model.device))
    expected = model(ids, output_attentions=True).attentions
    enable(model)
    _assert_same_bits(model(ids, output_attentions=True).attentions, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_either_attention_below_gives_the_same_text(twins, device, attention):
    """`HiSparseCache` takes the model's own attention where it is dense."""
    from tests.generate.parity import Settings, assert_parity

    pair = twins("qwen3", device)
    model = copy.deepcopy(pair.native)
    model.set_attn_implementation(attention)
    for scenario in ("left_padded", "turns"):
        assert_parity(pair._replace(enabled=model), scenario, Settings(buffer=40))
