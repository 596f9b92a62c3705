"""A cache in torch's modes: inference mode and normal mode by turns, and autocast."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_hisparse import HiSparseCache, LayerHistory, Quest
from tests import dsa_models, models, msa_models
from tests.models import prompt

EVERYTHING = Quest(4096, page_size=16, dense_layers=1)
MODES = {
    "inference first": (torch.inference_mode, torch.no_grad),
    "normal first": (torch.no_grad, torch.inference_mode),
}
MODELS = ["qwen3", "qwen3_sliding", "v32", "glm_FSSF", "two_groups"]


def _build(name: str) -> PreTrainedModel:
    if name in models.SUPPORTED:
        return models.build(name)
    if name in msa_models.MSA_MODELS:
        return msa_models.build(name)
    if name not in dsa_models.DSA_MODELS:
        pytest.skip("not in this transformers")
    return dsa_models.build(name)


def _cache(model: PreTrainedModel, name: str, **settings: Any) -> HiSparseCache:
    return HiSparseCache(model, EVERYTHING if name in models.SUPPORTED else None, **settings)


def _call(model: PreTrainedModel, cache: Any, rows: int, batch: int = 2) -> torch.Tensor:
    return model(prompt(batch, rows, rows), past_key_values=cache).logits


def _life(model: PreTrainedModel, cache: Any, one: Any, other: Any, fresh: Any) -> list[torch.Tensor]:
    """What a cache's life changes is done in mode `one`, the calls after it in mode `other`; their most likely tokens."""
    sliding = any(getattr(layer, "is_sliding", False) for layer in cache.layers)

    def prefilled() -> None:
        _call(model, cache, 150)

    def grown() -> None:
        _call(model, cache, 1100, cache_batch)

    changes = [
        prefilled,
        grown,
        lambda: None if sliding else cache.crop(-3),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([2, 0, 3])),
        lambda: None,
    ]
    batches = [2, 2, 2, 2, 4, 3, 3]
    tokens = []
    for change, batch in zip(changes, batches, strict=True):
        cache_batch = batch
        with one():
            change()
        with other():
            tokens += [_call(model, cache, rows, batch).argmax(-1) for rows in (1, 3, 1)]
    with one():
        cache = fresh(cache)
        prefilled()
    with other():
        return [*tokens, _call(model, cache, 1).argmax(-1)]


def _reset(cache: HiSparseCache) -> HiSparseCache:
    cache.reset()
    return cache


def _kept(part: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """All tensors that are reachable from a part of a cache and outlive a call."""
    if id(part) in seen:
        return
    seen[id(part)] = part  # alive, so that its id is no other's
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _kept(each, seen)
    elif type(part).__module__.startswith(("hf_hisparse", "hisparse_kernels")):
        for name, each in vars(part).items():
            if name != "replays":  # what layers that follow read in the same call
                yield from _kept(each, seen)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_modes_by_turns(name, modes):
    model = _build(name)
    expected = _life(
        copy.deepcopy(model),
        DynamicCache(config=model.config),
        torch.no_grad,
        torch.no_grad,
        lambda cache: DynamicCache(config=model.config),
    )
    found = _life(model, _cache(model, name), *MODES[modes], _reset)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in MODELS), ("qwen3", {"host_dense_layers": True})]
)
def test_nothing_kept_is_of_inference_mode(name, settings):
    model = _build(name)
    cache = _cache(model, name, **settings)
    with torch.inference_mode():
        for rows, held in ((150, 0), (1, 150)):
            mask = torch.ones(2, held + rows, dtype=torch.long)
            mask[0, : 7 if name in models.SUPPORTED else 0] = 0
            model(prompt(2, rows), attention_mask=mask, past_key_values=cache)
        kept = list(_kept(_own_parts(cache), {}))
    assert len(kept) > 10
    assert not [tensor.shape for tensor in kept if tensor.is_inference()]


def _own_parts(cache: HiSparseCache) -> list[Any]:
    """The layers that are no others than the cache's own, and what they share."""
    return [
        cache.padding,
        *(layer for layer in cache.layers if type(layer).__module__.startswith("hf_hisparse")),
    ]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(
            (name, how)
            for name in ("qwen3", "glm_FSSF", "two_groups")
            for how in ("load", "deepcopy", "resize")
        ),
        ("qwen3", "put_history"),
    ],
)
def test_made_in_inference_mode(name, how, tmp_path):
    model = _build(name)
    cache = _cache(model, name)
    with torch.inference_mode():
        _call(model, cache, 150)
    cache.save(tmp_path / "saved")  # outside
    expected = copy.deepcopy(cache)
    with torch.inference_mode():
        if how == "load":
            cache = HiSparseCache.load(tmp_path / "saved", model)
        elif how == "deepcopy":
            cache = copy.deepcopy(cache)
        elif how == "resize":
            cache.resize_buffers(2 * cache._settings.device_buffer_records * cache._family.page_size)
        else:
            dense = DynamicCache()
            _call(copy.deepcopy(model), dense, 150)
            cache.reset()
            cache.put_history(LayerHistory(layer.keys, layer.values) for layer in dense.layers)
    with torch.no_grad():
        for rows in (1, 3, 40, 1):
            assert torch.equal(_call(model, cache, rows), _call(model, expected, rows))
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reset()
        _call(model, cache, 40)


def test_a_step_captured_in_inference_mode(imagined_graphs):
    model = _build("qwen3")
    cache = _cache(model, "qwen3")
    with torch.inference_mode():
        _call(model, cache, 150)
        for _ in range(2):
            model(input_ids=prompt(2, 1), past_key_values=cache)
    assert cache.graphs.captures == 1
    (step,) = cache.graphs._steps.values()
    kept = [*_kept(_own_parts(cache), {}), *step.inputs.values()]
    assert not [tensor.shape for tensor in kept if tensor.is_inference()]
    with torch.no_grad():
        model(input_ids=prompt(2, 1), past_key_values=cache)
    assert cache.graphs.replays == 2


# ------------------------------------------------------------------ autocast


def autocast(enabled: bool = True) -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@torch.no_grad()
def _logits(model: PreTrainedModel, cache: Any, enabled: bool) -> torch.Tensor:
    with autocast(enabled):
        return torch.cat([_call(model, cache, rows).float() for rows in (150, 1, 3, 40, 1)], dim=1)


@pytest.mark.parametrize("selector", [EVERYTHING, Quest(64, 16, 1), Quest(64, 16, 0)])
def test_autocast_changes_nothing_in_bf16(selector):
    model = models.build("qwen3").to(torch.bfloat16)
    plain = copy.deepcopy(model)
    assert torch.equal(_logits(plain, DynamicCache(), True), _logits(plain, DynamicCache(), False))
    found = [_logits(model, HiSparseCache(model, selector), enabled) for enabled in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["v32", "glm_FSSF"])
def test_autocast_of_a_model_that_selects(name):
    """Its indexer computes something else under autocast, and so does ours then, bit for bit."""
    model = _build(name).to(torch.bfloat16)
    expected = _logits(copy.deepcopy(model), DynamicCache(config=model.config), True)
    assert torch.equal(_logits(model, HiSparseCache(model, mla_mode="expand"), True), expected)


@pytest.mark.parametrize("memory", ["2GiB", "256KiB"])
@pytest.mark.parametrize("name", ["v32", "two_groups"])
def test_autocast_runs_in_bf16(name, memory):
    """No further from the exact answer than the model's own cache is; on slices, too, where scores in bf16 tie otherwise."""
    model = _build(name).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    exact = _logits(copy.deepcopy(model).float(), DynamicCache(config=model.config), False)
    error = (_logits(plain, DynamicCache(config=model.config), True) - exact).abs().mean()
    cache = HiSparseCache(model, prefill_memory=memory)
    assert (_logits(model, cache, True) - exact).abs().mean() < 1.5 * error


@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_sliding", "two_groups"])
def test_fp32_under_autocast_is_refused(name, rows):
    model = _build(name)
    cache = _cache(model, name)
    with torch.no_grad():
        for held in (0, 150):
            if held:
                _call(model, cache, held)
            with (
                autocast(),
                pytest.raises(
                    ValueError, match=r"layer 0: keys of torch.float32 and values of torch.bfloat16.*to\("
                ),
            ):
                _call(model, cache, rows)
            assert cache.get_seq_length() == held
        expected = _cache(model, name)
        _call(model, expected, 150)
        for rows in (1, 40, 1):
            assert torch.equal(_call(model, cache, rows), _call(model, expected, rows))


def test_no_graphs_under_autocast(imagined_graphs, caplog):
    model = models.build("qwen3").to(torch.bfloat16)
    cache = _cache(model, "qwen3")
    with torch.no_grad(), autocast():
        _call(model, cache, 150)
        for _ in range(3):
            model(input_ids=prompt(2, 1), past_key_values=cache)
    assert cache.graphs.captures == 0
    assert caplog.text.count("torch.autocast is on") == 1
