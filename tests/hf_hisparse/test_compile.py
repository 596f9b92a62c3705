"""`torch.compile` with a `HiSparseCache`: one clear error, whatever was compiled, and a cache that is as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest, disable, enable
from tests.models import build, prompt
from tests.oracle import quest_oracle

REFUSED = r"HiSparseCache: torch\.compile has compiled .*_orig_mod.*StaticCache"
BACKEND = "eager"  # traces as any other, and compiles nothing


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    return build("qwen3")


def _compile_forward(model):
    model.forward = torch.compile(model.forward, backend=BACKEND)


def _compile_before_enabling(model):
    disable(model)
    _compile_forward(model)
    enable(model)


def _compile_decoder(model):
    model.model = torch.compile(model.model, backend=BACKEND)


def _compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)


def _compile_attention(model):
    model.model.layers[2].self_attn.compile(backend=BACKEND)


WAYS = {
    "model.compile()": lambda model: model.compile(backend=BACKEND),
    "model.forward": _compile_forward,
    "before enable": _compile_before_enabling,
    "decoder": _compile_decoder,
    "layers": _compile_layers,
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_refused_in_generate(model, way):
    cache = HiSparseCache(model, Quest(32, 4))
    WAYS[way](model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_history_survives(model):
    ids = prompt(1, 104)
    with quest_oracle(model, budget=32, page_size=4):
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, :100]
    cache = HiSparseCache(model, Quest(32, 4))
    compiled = torch.compile(model, backend=BACKEND)
    logits = [model(ids[:, :60], past_key_values=cache).logits]
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(ids[:, 60:], past_key_values=cache)
    logits.append(model(ids[:, 60:100], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_part_that_uses_the_cache(model):
    """The layers before it have taken the prompt by then, which is taken back."""
    cache = HiSparseCache(model, Quest(32, 4))
    _compile_attention(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        model(prompt(1, 60), past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}


@torch.no_grad()
def test_a_part_that_does_not(model):
    cache = HiSparseCache(model, Quest(32, 4))
    plain = model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=4, do_sample=False)
    cache.reset()
    for layer in model.model.layers:
        layer.mlp.compile(backend=BACKEND)
    text = model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain)


@torch.no_grad()
def test_in_one_graph(model):
    """`fullgraph` has the compiler's own error, which quotes ours."""
    cache = HiSparseCache(model, Quest(32, 4))
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)torch\.compile has compiled"):
        compiled(prompt(1, 60), past_key_values=cache)


def test_a_compiled_model_is_none_to_build_from(model):
    compiled = torch.compile(model, backend=BACKEND)
    for use in (enable, lambda compiled: HiSparseCache(compiled, Quest(32, 4))):
        with pytest.raises(ValueError, match=REFUSED):
            use(compiled)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_another_cache_may_be_compiled_with(model):
    """An enabled model answers as before."""
    ids = prompt(1, 60)
    expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    enable(model)
    compiled = torch.compile(model, backend=BACKEND)
    got = compiled(ids, past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_generate_does_not_compile_by_itself(model):
    with pytest.raises(ValueError, match="cache_implementation"):  # of transformers
        model.generate(
            prompt(1, 60), past_key_values=HiSparseCache(model, Quest(32, 4)), cache_implementation="static"
        )
