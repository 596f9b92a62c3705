"""`enable` and `disable`: idempotent, reversible, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hisparse import HiSparseCache, Quest, disable, enable
from tests.dsa_models import dsa_twins
from tests.models import build, prompt
from tests.msa_models import msa_twins

# Of each family, which changes different modules.
FAMILIES = {
    "qwen3": (lambda: build("qwen3"), Quest(32, 4)),
    "glm": (lambda: copy.deepcopy(dsa_twins("glm_FSSF", "cpu").native), None),
    "msa": (lambda: copy.deepcopy(msa_twins("one_group", "cpu").native), None),
}


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


def _answer(model, selector) -> torch.Tensor:
    return model.generate(
        prompt(1, 90), past_key_values=HiSparseCache(model, selector), do_sample=False, max_new_tokens=6
    )


def test_models_of_one_configuration_object():
    """Each is enabled for itself; disabled, one takes the attention of all, and those ask for it back."""
    first = build("qwen3")
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    ids = prompt(1, 40)
    generate = {"do_sample": False, "max_new_tokens": 4}
    expected = first.generate(ids, **generate)
    for model in (first, second):
        enable(model)
    for model in (first, second):
        cache = HiSparseCache(model, Quest(8, 4))
        every = HiSparseCache(model, Quest(64, 4))
        model.generate(ids, past_key_values=cache, **generate)
        assert torch.equal(model.generate(ids, past_key_values=every, **generate), expected)
    disable(first)
    with pytest.raises(RuntimeError, match="enable"):
        second.generate(ids, past_key_values=HiSparseCache(second.config, Quest(8, 4)), **generate)
    assert torch.equal(second.generate(ids, **generate), expected)
    second.generate(ids, past_key_values=HiSparseCache(second, Quest(8, 4)), **generate)
    disable(second)
    disable(first)
    for model in (first, second):
        assert torch.equal(model.generate(ids, **generate), expected)
        assert "forward" not in vars(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_enabled_model_goes_at_once(family):
    """It is in no reference cycle, so its memory is not left to the garbage collector."""
    make, selector = FAMILIES[family]
    model = make()
    _answer(model, selector)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("copies", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_runs_its_own_modules(family, copies):
    make, selector = FAMILIES[family]
    model = make()
    enable(model)
    expected = _answer(model, selector)
    if copies == "torch.save":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model) if copies == "deepcopy" else pickle.loads(pickle.dumps(model))
    del model
    gc.collect()
    assert torch.equal(_answer(twin, selector), expected)
    disable(twin)
    cold = twin.generate(prompt(1, 90), do_sample=False, max_new_tokens=6)
    assert torch.equal(cold, make().generate(prompt(1, 90), do_sample=False, max_new_tokens=6))


def test_a_saved_enabled_model_in_another_process(tmp_path):
    """Which has not imported the library before."""
    make, _ = FAMILIES["glm"]
    model = make()
    expected = _answer(model, None)
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "from tests.hf_hisparse.test_enable import _answer\n"
        "print(_answer(model, None)[0].tolist())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(expected[0].tolist())


def test_forward_keeps_its_signature(model):
    before = inspect.signature(model.forward)
    enable(model)
    assert inspect.signature(model.forward) == before


def test_a_method_of_a_model_that_is_gone():
    model = build("qwen3")
    enable(model)
    forward = model.forward
    del model
    with pytest.raises(ReferenceError, match="keep the model"):
        forward(prompt(1, 5))


@pytest.mark.parametrize("pickles", [pickle.dumps, copy.copy, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_cannot_be_pickled(model, pickles):
    cache = HiSparseCache(model, Quest(32, 4))
    with pytest.raises(TypeError, match=r"cache\.save\(path\).*HiSparseCache\.load"):
        pickles(cache)
    copy.deepcopy(cache)


@pytest.mark.parametrize("original", ["stays", "goes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shallow_copy(family, original):
    """It shares modules, configuration and the switch; it answers, and can be disabled, with the model or without."""
    make, selector = FAMILIES[family]
    model = make()
    enable(model)
    expected = _answer(model, selector)
    twin = copy.copy(model)
    if original == "goes":
        del model
        gc.collect()
    for _ in range(2):
        assert torch.equal(_answer(twin, selector), expected)
    if original == "stays":
        assert torch.equal(_answer(model, selector), expected)
        assert torch.equal(_answer(copy.deepcopy(twin), selector), expected)
    disable(twin)
    cold = twin.generate(prompt(1, 90), do_sample=False, max_new_tokens=6)
    assert torch.equal(cold, make().generate(prompt(1, 90), do_sample=False, max_new_tokens=6))


def test_a_deep_copy_of_a_shallow_copy_has_weights_of_its_own():
    model = build("qwen3")
    enable(model)
    expected = _answer(model, Quest(32, 4))
    deep = copy.deepcopy(copy.copy(model))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    del model
    gc.collect()
    assert torch.equal(_answer(deep, Quest(32, 4)), expected)


@pytest.mark.parametrize("use", [copy.deepcopy, pickle.dumps, lambda twin: twin.forward(prompt(1, 5))])
def test_what_a_shallow_copy_cannot_without_its_model(use):
    model = build("qwen3")
    enable(model)
    twin = copy.copy(model)
    del model
    with pytest.raises(ReferenceError, match=r"copy\.copy.*copy\.deepcopy"):
        use(twin)
