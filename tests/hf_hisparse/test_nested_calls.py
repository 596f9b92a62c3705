"""A hook that calls the model which is calling it: activation patching, a logit lens, steering."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest
from hf_hisparse.active import current_call
from tests import dsa_models, models, msa_models
from tests.models import prompt

HELD = 60
CASES = {
    "resident": (lambda: models.build("qwen3"), dict(selector=Quest(4096, 16, dense_layers=1))),
    "all_hosted": (lambda: models.build("qwen3"), dict(selector=Quest(4096, 16, dense_layers=0))),
    "latents": (lambda: dsa_models.build("glm_FSSF"), {}),
    "blocks": (lambda: msa_models.build("two_groups"), {}),
}
PLACES = {
    "before_embedding": lambda model: model.model.embed_tokens,
    "before_layer_0": lambda model: model.model.layers[0],
    "within_layer_1": lambda model: model.model.layers[1].self_attn.o_proj,
    "before_layer_2": lambda model: model.model.layers[2],
}


def once(inner: Callable[[], object]) -> Callable[..., None]:
    """Call `inner`, but not within itself, whatever it is called with."""
    busy = []

    def guarded(*_: Any) -> None:
        if not busy:
            busy.append(True)
            try:
                inner()
            finally:
                busy.clear()

    return guarded


def hooked(model: Any, place: str, inner: Callable[[], object]) -> Any:
    """Let `model` call `inner` at each time that it comes to `place`, but not within `inner`."""
    return PLACES[place](model).register_forward_pre_hook(once(inner))


def answers(model: Any, cache: Any) -> torch.Tensor:
    """Logits of a prefill, of a decode call and of a longer one."""
    with torch.no_grad():
        parts = [prompt(2, rows, seed=rows) for rows in (HELD, 1, 40)]
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def twins(name: str) -> tuple[Any, Any, dict[str, Any], torch.Tensor]:
    """A model, its copy, the settings of a cache for that, and what the first one answers with its own cache."""
    build, settings = CASES[name]
    native = build()
    model = copy.deepcopy(native)
    return native, model, settings, answers(native, DynamicCache(config=native.config))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_a_call_without_a_cache(name, place):
    native, model, settings, expected = twins(name)
    alone = native(prompt(1, 7), use_cache=False).logits
    cache, inner = HiSparseCache(model, **settings), []
    hooked(model, place, lambda: inner.append(model(prompt(1, 7), use_cache=False).logits))
    torch.testing.assert_close(answers(model, cache), expected, atol=2e-4, rtol=0)
    assert len(inner) == 3
    for logits in inner:
        torch.testing.assert_close(logits, alone, atol=2e-4, rtol=0)
    assert current_call() is None


@pytest.mark.parametrize("place", PLACES)
def test_a_call_with_another_cache(place):
    _, model, settings, expected = twins("resident")
    hooked(model, place, lambda: answers(model, HiSparseCache(model, **settings)))
    torch.testing.assert_close(answers(model, HiSparseCache(model, **settings)), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("place", ["before_embedding", "before_layer_0"])
def test_a_call_with_the_same_cache_is_refused(place, decoder):
    """And the outer one goes on, if the hook takes no notice."""
    _, model, settings, expected = twins("resident")
    cache = HiSparseCache(model, **settings)

    def inner() -> None:
        with pytest.raises(RuntimeError, match=r"with the same HiSparseCache: pass no cache.*copy\.deepcopy"):
            (model.model if decoder else model)(prompt(2, 7), past_key_values=cache)

    hooked(model, place, inner)
    torch.testing.assert_close(answers(model, cache), expected, atol=2e-4, rtol=0)


class Accident(Exception):
    """Something that happened to someone else."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Accident])
@pytest.mark.parametrize("place", ["before_layer_0", "before_layer_2"])
def test_an_inner_call_that_is_broken_off(place, error):
    """The outer one goes with it, and both leave nothing behind."""
    _, model, settings, expected = twins("resident")
    cache = HiSparseCache(model, **settings)

    def fail(*args: Any) -> None:
        if current_call() is None:
            raise error

    handles = [
        hooked(model, place, lambda: model(prompt(1, 7), use_cache=False)),
        model.model.layers[1].mlp.register_forward_pre_hook(fail),
    ]
    with pytest.raises(error):
        answers(model, cache)
    for handle in handles:
        handle.remove()
    if place == "before_layer_2":  # layer 1 has stored its tokens by then
        cache.reset()
    torch.testing.assert_close(answers(model, cache), expected, atol=2e-4, rtol=0)
    assert current_call() is None


@pytest.mark.parametrize("name", ["latents", "blocks"])
@torch.no_grad()
def test_a_call_without_a_cache_while_a_step_is_captured(name, imagined_graphs):
    """Its mask is its own, not that of the captured step."""
    build, settings = CASES[name]
    model = build()
    cache, inner = HiSparseCache(model, **settings), []
    alone = model(prompt(1, 7), use_cache=False).logits
    layer = model.model.layers[2]
    forward = layer.forward
    call = once(lambda: inner.append(model(prompt(1, 7), use_cache=False).logits))

    def patched(*args: Any, **kwargs: Any) -> Any:  # with a hook no step would be captured
        call()
        return forward(*args, **kwargs)

    layer.forward = patched
    for rows in (HELD, 1, 1):
        model(input_ids=prompt(2, rows), past_key_values=cache)
    assert cache.graphs.captures == 1 and len(inner) == 3
    for logits in inner:
        torch.testing.assert_close(logits, alone, atol=2e-4, rtol=0)
