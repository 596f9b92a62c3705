"""`enable` and `disable`: idempotent, reversible, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hisparse import HiSparseCache, Quest, disable, enable
from tests.models import build, prompt


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_there_and_back(model, base):
    model.set_attn_implementation(base)
    before = model.config.to_dict()
    disable(model)  # of a model that is not enabled: nothing
    assert model.config._attn_implementation == base
    enable(model)
    enabled = model.config._attn_implementation
    assert enabled != base
    enable(model)
    assert model.config._attn_implementation == enabled
    disable(model)
    assert model.config._attn_implementation == base
    disable(model)
    assert model.config._attn_implementation == base
    assert model.config.to_dict() == before


def test_a_cache_built_from_the_model_enables_it(model):
    HiSparseCache(model.config, Quest(32, 4))
    assert model.config._attn_implementation == "sdpa"
    HiSparseCache(model, Quest(32, 4))
    assert model.config._attn_implementation != "sdpa"
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_that_cannot_be_built_leaves_the_model_alone(model):
    with pytest.raises(ValueError, match="device_buffer_tokens"):
        HiSparseCache(model, Quest(32, 4), device_buffer_tokens=8)
    assert model.config._attn_implementation == "sdpa"


def test_config_and_model_give_the_same_cache(model):
    ids = prompt(1, 300, device=str(model.device))
    enable(model)
    texts = [
        model.generate(
            ids, past_key_values=HiSparseCache(source, Quest(32, 4)), do_sample=False, max_new_tokens=12
        )
        for source in (model, model.config)
    ]
    assert torch.equal(*texts)


def test_a_copy_of_an_enabled_model_is_enabled(model):
    enable(model)
    twin = copy.deepcopy(model)
    ids = prompt(1, 300, device=str(model.device))
    texts = [
        one.generate(
            ids, past_key_values=HiSparseCache(one.config, Quest(32, 4)), do_sample=False, max_new_tokens=12
        )
        for one in (model, twin)
    ]
    assert torch.equal(*texts)
    disable(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation != "sdpa"


def test_a_saved_model_is_an_ordinary_one(model, tmp_path):
    """What `enable` sets must not reach a checkpoint that others load."""
    enable(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"


def test_transformers_caches_are_as_they_were(model):
    """Our layer class must not slip into the registry that `DynamicCache(config=...)` reads."""
    enable(model)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=8)):
        assert all(type(layer).__module__.startswith("transformers.") for layer in cache.layers)


def test_accelerate_cannot_move_the_cache(model):
    """accelerate calls `.to` on whatever has it."""
    assert not hasattr(HiSparseCache(model, Quest(32, 4)), "to")


def test_another_attention_below_later(model):
    """Who sets an attention implementation after `enable` has disabled the model, and is told so."""
    cache = HiSparseCache(model, Quest(32, 4))
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match=r"'eager'.*hf_hisparse\.enable\(model\)"):
        model(prompt(1, 50, device=str(model.device)), past_key_values=cache)
    enable(model)
    model(prompt(1, 50, device=str(model.device)), past_key_values=cache)


def test_two_models_do_not_share_the_switch():
    one, other = build("qwen3"), build("llama")
    enable(one)
    assert other.config._attn_implementation == "sdpa"
