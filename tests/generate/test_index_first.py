"""The model's own selection ahead of keys and values: the same answers, and not where its indexer is called otherwise."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import PreTrainedModel

from hf_hisparse import HiSparseCache
from hf_hisparse.graphs import as_captured
from hf_hisparse.hosted_layer import HostedLayer
from hf_hisparse.hot_buffer import HotBuffer
from hf_hisparse.index_first import EarlyIndexer, early_indexers
from tests import dsa_models, msa_models
from tests.generate.captured import decode_logits
from tests.generate.test_graphs import generated
from tests.models import prompt

LENGTH, NEW = 300, 20
DSA = [
    name
    for name in ("v32", "glm_FSSF", "glm_FFFSSS", "axk2", "mistral_large4")
    if name in dsa_models.DSA_MODELS
]
MSA = ["two_groups", "shared_selections", "local_blocks"]
LEAST = 32  # tokens that a query reads, of all of these models


def build(name: str) -> PreTrainedModel:
    return (dsa_models if name in dsa_models.DSA_MODELS else msa_models).build(name)


def leaders(cache: HiSparseCache) -> list[HostedLayer]:
    """The layers that select."""
    return [layer for layer in cache.hosted_layers if isinstance(layer.buffer, HotBuffer)]


def steps(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, captured: bool, **settings: object
) -> tuple[torch.Tensor, HiSparseCache]:
    """The logits of decode steps, eager, or after the first one such as are captured."""
    cache = HiSparseCache(model, **({"device_buffer_tokens": 40} | settings), graphs=False)
    return decode_logits(model, cache, ids, mask, LENGTH, early_indexers if captured else None), cache


def captured_as_eager(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None, **settings: object
) -> HiSparseCache:
    """Hold steps such as are captured to the answers and counts of eager ones; their cache."""
    want, before = steps(model, ids, mask, captured=False, **settings)
    got, cache = steps(model, ids, mask, captured=True, **settings)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert cache.stats() == before.stats()
    assert not any(layer.reads_ahead for layer in before.hosted_layers)
    return cache


@pytest.mark.parametrize("buffer", [LEAST, 40])
@pytest.mark.parametrize("name", DSA + MSA)
def test_read_ahead_answers_as_before(device, name, buffer):
    """Also where the buffer holds no more than is read: then the newest token may lose its slot before it is stored."""
    cache = captured_as_eager(
        build(name).to(device), prompt(2, LENGTH + NEW, device=device), device_buffer_tokens=buffer
    )
    assert leaders(cache) and all(layer.reads_ahead for layer in leaders(cache))
    assert sum(layer.reads_ahead for layer in cache.hosted_layers) == len(leaders(cache))


@pytest.mark.parametrize("name", DSA)
def test_with_padding(device, name):
    ids = prompt(2, LENGTH + NEW, device=device)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    cache = captured_as_eager(build(name).to(device), ids, mask)
    assert all(layer.reads_ahead for layer in leaders(cache))


@pytest.mark.parametrize(
    "settings", [{"layout": "union", "device_buffer_tokens": 64}, {"verify": True}], ids=repr
)
def test_settings_of_blocks(device, settings):
    cache = captured_as_eager(
        build("two_groups").to(device), prompt(2, LENGTH + NEW, device=device), **settings
    )
    assert all(layer.reads_ahead for layer in leaders(cache))


@pytest.mark.parametrize(
    "settings", [{"mla_mode": "expand"}, {"prefetch": False}, {"verify": True}], ids=repr
)
def test_settings_of_latents(device, settings):
    """Only of the eager step before a capture: what these settings want cannot all be captured."""
    model = build("glm_FSSF").to(device)
    ids = prompt(2, LENGTH + 1, device=device)
    logits = []
    with torch.no_grad():
        for looks in (False, True):
            cache = HiSparseCache(model, device_buffer_tokens=40, graphs=False, **settings)
            model(ids[:, :LENGTH], past_key_values=cache)
            if looks:
                with early_indexers(model, cache, read=False):
                    logits.append(model(ids[:, LENGTH:], past_key_values=cache).logits)
            else:
                logits.append(model(ids[:, LENGTH:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    assert all(layer.reads_ahead for layer in leaders(cache))


@pytest.mark.parametrize(
    "name, later", [("v32", "q_b_proj"), ("glm_FSSF", "kv_a_proj_with_mqa"), ("two_groups", "q_proj")]
)
def test_what_is_read_is_asked_for_before_queries_and_keys_are_computed(device, monkeypatch, name, later):
    model, order = build(name).to(device), []
    attentions = [layer.self_attn for layer in model.get_decoder().layers]
    for index, attention in enumerate(attentions):
        getattr(attention, later).register_forward_hook(
            lambda *_, index=index: order.append(("later", index))
        )
    read = HostedLayer.read

    def noting(self: HostedLayer, selection: torch.Tensor) -> torch.Tensor:
        order.append(("read", self.layer_idx))
        return read(self, selection)

    monkeypatch.setattr(HostedLayer, "read", noting)
    steps(model, prompt(1, LENGTH + NEW, device=device), None, captured=True)
    in_a_step = []
    for index, attention in enumerate(attentions):
        if getattr(attention, "indexer", None) is not None:
            in_a_step.append(("read", index))
        in_a_step.append(("later", index))
    assert order[-len(in_a_step) :] == in_a_step


@torch.no_grad()
def test_the_step_before_a_capture_launches_its_kernels(device, monkeypatch):
    """So that they are compiled; other eager steps do not."""
    claimed, claim = [], HotBuffer.claim
    monkeypatch.setattr(HotBuffer, "claim", lambda self, *args: claimed.append(self) or claim(self, *args))
    model = build("v32").to(device)
    cache = HiSparseCache(model, device_buffer_tokens=40, graphs=False)
    ids = prompt(1, LENGTH + 2, device=device)
    model(ids[:, :LENGTH], past_key_values=cache)
    with early_indexers(model, cache, read=False):
        model(ids[:, LENGTH:-1], past_key_values=cache)
    assert claimed == [layer.buffer for layer in leaders(cache)]
    model(ids[:, -1:], past_key_values=cache)
    assert len(claimed) == len(leaders(cache))


def copies(self, hidden_states, *args, **kwargs):
    """An attention's forward that gives its indexer a copy, as one does that is wrapped around it."""
    indexer, own = self.indexer, self.indexer.forward
    indexer.forward = lambda hidden, *rest, **more: own(hidden.clone(), *rest, **more)
    try:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    finally:
        indexer.forward = own


@pytest.mark.parametrize("name", ["v32", "two_groups"])
def test_an_indexer_that_is_called_otherwise_is_waited_for(device, name):
    model = build(name).to(device)
    for layer in model.get_decoder().layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.forward = types.MethodType(copies, layer.self_attn)
    cache = captured_as_eager(model, prompt(1, LENGTH + NEW, device=device))
    assert leaders(cache) and not any(layer.reads_ahead for layer in leaders(cache))


@torch.no_grad()
@pytest.mark.parametrize("name", ["v32_dense", "no_experts"])
def test_an_indexer_that_is_called_otherwise_later_is_captured_without(
    graph_device, monkeypatch, caplog, name
):
    model = build(name).to(graph_device)
    ids = prompt(1, LENGTH, device=graph_device)
    want = generated(model, HiSparseCache(model, device_buffer_tokens=40, graphs=False), ids)
    attention = [
        layer.self_attn for layer in model.get_decoder().layers if getattr(layer.self_attn, "indexer", None)
    ][-1]
    forward, calls = attention.forward, []

    @functools.wraps(forward)
    def changes(*args: object, **kwargs: object) -> object:
        calls.append(1)  # a prompt, the step before a capture, the capture
        return copies(attention, *args, **kwargs) if len(calls) > 2 else forward(*args, **kwargs)

    attention.forward = changes
    cache = HiSparseCache(model, device_buffer_tokens=40)
    with caplog.at_level("DEBUG", logger="hf_hisparse.graphs"):
        assert torch.equal(generated(model, cache, ids), want)
    assert cache.graphs.captures == 1 and cache.graphs.replays > 10
    assert not any(layer.reads_ahead for layer in cache.hosted_layers)
    assert "no indexer is called ahead" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("read", [False, True])
def test_nothing_is_left_of_it(device, read):
    """Also after a call that breaks off."""
    model = build("glm_FSSF").to(device)
    ids = prompt(1, LENGTH + NEW + 1, device=device)
    _, cache = steps(model, ids[:, :-1], None, captured=True)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    broken = model.get_decoder().layers[-1].self_attn.kv_a_proj_with_mqa
    handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    cache.make_room(1)
    with pytest.raises(ZeroDivisionError), as_captured(cache, False), early_indexers(model, cache, read=read):
        model(ids[:, -1:], attention_mask=None, past_key_values=cache)
    handle.remove()
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before
    for layer in model.get_decoder().layers:
        for module in layer.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(layer._looked_at or layer.is_under_way for layer in cache.hosted_layers)


@torch.no_grad()
def test_calls_with_another_cache_and_of_another_thread_disturb_nothing(device):
    model = build("v32").to(device)
    ids = prompt(1, LENGTH + NEW + 1, device=device)
    _, eager = steps(model, ids[:, :-1], None, captured=False)
    want = model(ids[:, -1:], past_key_values=eager).logits
    other = HiSparseCache(model, graphs=False)
    called = []

    def calls(*args: object) -> None:
        if not called:
            called.append(True)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(model, ids[:, :50], past_key_values=other).result()

    _, cache = steps(model, ids[:, :-1], None, captured=True)
    handle = model.get_decoder().layers[-1].self_attn.q_b_proj.register_forward_pre_hook(calls)
    cache.make_room(1)
    with as_captured(cache, False), early_indexers(model, cache, read=True):
        got = model(ids[:, -1:], attention_mask=None, past_key_values=cache).logits
    handle.remove()
    assert called and other.get_seq_length() == 50
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert cache.stats() == eager.stats()


def in_place(model: PreTrainedModel) -> None:
    """What comes between the early call and the model's own changes what the indexer is called with."""
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        part = attention.q_b_proj if hasattr(attention, "q_b_proj") else attention.v_proj
        part.forward = functools.partial(scaling, part.forward)


def scaling(own: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    output = own(inputs)
    inputs.mul_(torch.linspace(0.5, 2, inputs.shape[-1], device=inputs.device))
    return output


def checkpointed(model: PreTrainedModel) -> None:
    """Attention in a wrapper that passes on its attributes."""
    kinds = {type(layer.self_attn) for layer in model.get_decoder().layers}
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in kinds)


def named_elsewhere(model: PreTrainedModel) -> None:
    """A module that has an indexer and is no attention."""
    for layer in model.get_decoder().layers:
        layer.indexer = getattr(layer.self_attn, "indexer", None)


@torch.no_grad()
@pytest.mark.parametrize("change, ahead", [(in_place, False), (checkpointed, True), (named_elsewhere, True)])
@pytest.mark.parametrize("name", ["v32_dense", "glm_FSSF_dense", "no_experts"])
def test_models_that_were_changed(graph_device, name, change, ahead):
    model = build(name).to(graph_device)
    change(model)
    ids = prompt(2, LENGTH, device=graph_device)
    caches = [HiSparseCache(model, device_buffer_tokens=LEAST, graphs=graphs) for graphs in (True, False)]
    texts = [generated(model, cache, ids) for cache in caches]
    assert torch.equal(*texts)
    assert caches[0].stats() == caches[1].stats()
    assert caches[0].graphs.replays > 10
    assert all(layer.reads_ahead == ahead for layer in leaders(caches[0]))


@torch.no_grad()
def test_two_threads_leave_nothing_on_the_model(device):
    """They enter one after the other, and leave in that order."""
    model = build("v32").to(device)
    caches, entered = [HiSparseCache(model, graphs=False) for _ in range(2)], threading.Barrier(2)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    left = threading.Event()
    ids = prompt(1, LENGTH + 1, device=device)

    def decodes(index: int) -> None:
        with torch.no_grad():
            model(ids[:, :LENGTH], past_key_values=caches[index])
            with early_indexers(model, caches[index], read=False):
                entered.wait()
                model(ids[:, LENGTH:], past_key_values=caches[index])
                if index:
                    left.wait()
        left.set()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(decodes, index) for index in range(2)]:
            done.result()
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before
    assert all(layer.reads_ahead for cache in caches for layer in leaders(cache))


@torch.no_grad()
def test_an_attention_that_is_called_twice_does_not_read_twice(device):
    model = build("v32").to(device)
    _, cache = steps(model, prompt(1, LENGTH + NEW, device=device), None, captured=True)
    layer = leaders(cache)[0]
    layer.begin_ahead(lambda: None, None)
    with pytest.raises(RuntimeError, match="layer 0: its attention is called again"):
        layer.begin_ahead(lambda: None, None)
    layer.forget_ahead()
    layer.begin_ahead(lambda: None, None)


@torch.no_grad()
def test_a_copy_has_yet_to_find_out(device):
    model = build("v32").to(device)
    _, cache = steps(model, prompt(1, LENGTH + NEW, device=device), None, captured=True)
    assert all(layer.reads_ahead for layer in leaders(cache))
    assert not any(layer.reads_ahead for layer in copy.deepcopy(cache).hosted_layers)


def test_a_hook_that_is_being_removed_disturbs_no_other_call(device):
    """torch then calls it without the names of arguments."""
    model = build("v32").to(device)
    cache = HiSparseCache(model, graphs=False)
    attention = model.model.layers[0].self_attn
    EarlyIndexer(attention, attention.indexer, cache, read=True)._is_called(attention, ())
