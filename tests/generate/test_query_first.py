"""Selection and fetch ahead of keys and values: the same answers, and not where the query is made otherwise."""

from __future__ import annotations

import functools
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from hf_hisparse import HiSparseCache, Quest, query_first
from hf_hisparse.models.gqa import GqaLayer
from hf_hisparse.models.quest import QuestState
from hf_hisparse.query_first import early_queries
from tests import models
from tests.generate.captured import decode_logits
from tests.models import prompt

LENGTH, NEW = 300, 20
OWN_FORWARD, OWN_ROTARY = modeling_llama.LlamaAttention.forward, modeling_llama.apply_rotary_pos_emb


class Added(torch.nn.Module):
    """A projection with something added to what it gives, as an adapter does."""

    def __init__(self, projection: torch.nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(hidden) * 1.5


def hosted(cache: HiSparseCache) -> list[GqaLayer]:
    return [layer for layer in cache.hosted_layers if isinstance(layer, GqaLayer)]


def early(model: PreTrainedModel, cache: HiSparseCache, read: bool) -> AbstractContextManager[None]:
    return early_queries(model, cache, GqaLayer.read_ahead if read else GqaLayer.expect_query)


def steps(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, captured: bool
) -> tuple[torch.Tensor, HiSparseCache]:
    """The logits of decode steps, eager, or after the first one such as are captured."""
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=1), device_buffer_tokens=40, graphs=False)
    return decode_logits(model, cache, ids, mask, LENGTH, early if captured else None), cache


def captured_as_eager(model: PreTrainedModel, ids: torch.Tensor) -> HiSparseCache:
    """Hold steps such as are captured to the answers of eager ones; their cache."""
    want, _ = steps(model, ids, None, captured=False)
    got, cache = steps(model, ids, None, captured=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    return cache


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_sliding"])
def test_read_ahead_answers_as_before(device, name, padded):
    model = models.build(name).to(device)
    ids = prompt(2, LENGTH + NEW, device=device)
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1, :70] = 0
    want, before = steps(model, ids, mask, captured=False)
    got, ahead = steps(model, ids, mask, captured=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert ahead.stats() == before.stats()
    assert hosted(ahead) and all(layer.reads_ahead for layer in hosted(ahead))
    assert not any(layer.reads_ahead for layer in hosted(before))


@pytest.mark.parametrize("name, later", [("qwen3", "k_norm"), ("llama", "k_proj")])
def test_what_is_read_is_asked_for_before_keys_are_computed(device, monkeypatch, name, later):
    model, order = models.build(name).to(device), []
    for index, layer in enumerate(model.model.layers):
        part = getattr(layer.self_attn, later)
        part.register_forward_hook(lambda *_, index=index: order.append(("keys", index)))
    read = GqaLayer._claim_and_read

    def noting(self: GqaLayer, row: torch.Tensor) -> object:
        order.append(("read", self.layer_idx))
        return read(self, row)

    monkeypatch.setattr(GqaLayer, "_claim_and_read", noting)
    _, cache = steps(model, prompt(1, LENGTH + NEW, device=device), None, captured=True)
    first = len(model.model.layers) - len(hosted(cache))
    in_a_step = [("keys", index) for index in range(first)]
    for index in range(first, len(model.model.layers)):
        in_a_step += [("read", index), ("keys", index)]
    assert order[-len(in_a_step) :] == in_a_step
    first_step = [index for what, index in order[: -len(in_a_step) * (NEW - 1)] if what == "read"]
    # By the same kernels, which that step compiles.
    assert first_step == [layer.layer_idx for layer in hosted(cache)]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_query_that_is_made_otherwise_is_waited_for(device, monkeypatch, name):
    """The hooks are then within what makes the query; on all of it they see what they expect."""
    model = models.build(name).to(device)
    ids = prompt(1, LENGTH + NEW, device=device)
    part, hooked = "q_norm" if name == "qwen3" else "q_proj", []
    for layer in model.model.layers:
        attention = layer.self_attn
        whole = Added(getattr(attention, part))
        setattr(attention, part, whole)
        hooked.append((attention, whole.projection))
    want, _ = steps(model, ids, None, captured=False)
    got, cache = steps(model, ids, None, captured=True)
    assert all(layer.reads_ahead for layer in hosted(cache))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    monkeypatch.setattr(query_first, "_query_parts", lambda model: iter(hooked))
    got, cache = steps(model, ids, None, captured=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert hosted(cache) and not any(layer.reads_ahead for layer in hosted(cache))


def rotate_in_place(q, k, cos, sin):
    """As Liger's kernel does it, which people put in the place of transformers' function, and which wants a key."""
    assert k.numel()
    for part in (q, k):
        half = modeling_llama.rotate_half(part)
        part.copy_(part * cos.unsqueeze(1) + half * sin.unsqueeze(1))
    return q, k


def test_a_rotary_embedding_in_place_works_once(device, monkeypatch):
    model = models.build("llama").to(device)
    ids = prompt(1, LENGTH + NEW, device=device)
    want, _ = steps(model, ids, None, captured=False)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate_in_place)
    got, _ = steps(model, ids, None, captured=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def rotated_otherwise_when_far(self, hidden_states, position_embeddings=None, position_ids=None, **kwargs):
    """A forward that makes queries as the model does at first."""
    cos, sin = position_embeddings
    far = (position_ids > LENGTH + 2)[:, :, None]
    rotary = torch.where(far, sin, cos), torch.where(far, cos, sin)
    return type(self).forward(self, hidden_states, position_embeddings=rotary, **kwargs)


def test_a_rotary_embedding_of_somebody_else_is_waited_for(device, monkeypatch):
    """Its bits are the model's own at first."""
    model = models.build("llama").to(device)
    ids = prompt(1, LENGTH + NEW, device=device)
    slowest = model.model.rotary_emb.inv_freq[-1]

    @functools.wraps(OWN_ROTARY)
    def rotary(q, k, cos, sin):
        far = sin[:, :, len(model.model.rotary_emb.inv_freq) - 1] > torch.sin((LENGTH + 2.5) * slowest)
        q, k = OWN_ROTARY(q, k, cos, sin)
        return torch.where(far[:, None, :, None], -q, q), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
    cache = captured_as_eager(model, ids)
    assert hosted(cache) and not any(layer.reads_ahead for layer in hosted(cache))


def without_projection(self, *args, **kwargs):
    """A forward that keeps its projection elsewhere."""
    self.q_proj = self.kept[0]
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        del self.q_proj


@pytest.mark.parametrize("forward", [rotated_otherwise_when_far, without_projection])
def test_a_forward_of_somebody_else_is_waited_for(device, forward):
    """That its query was as expected in one step does not say that it always is."""
    model = models.build("llama").to(device)
    ids = prompt(1, LENGTH + NEW, device=device)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.forward = types.MethodType(forward, attention)
        if forward is without_projection:
            attention.kept = (attention.q_proj,)
            del attention.q_proj
    cache = captured_as_eager(model, ids)
    assert hosted(cache) and not any(layer.reads_ahead for layer in hosted(cache))


def wrapped_forward(model, monkeypatch):
    """A forward that says it is transformers' own, as functools.wraps makes it."""

    @functools.wraps(OWN_FORWARD)
    def forward(self, *args, **kwargs):
        return rotated_otherwise_when_far(self, *args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)


def plain_projection(model, monkeypatch):
    """A projection that is no module."""
    for layer in model.model.layers:
        forward = layer.self_attn.q_proj.forward
        del layer.self_attn.q_proj
        layer.self_attn.q_proj = forward


def half_tables(model, monkeypatch):
    """Tables of half a head's width, and the function for them."""
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *args, **kwargs: tuple(
        table[..., : table.shape[-1] // 2] for table in own(*args, **kwargs)
    )
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin: OWN_ROTARY(q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)),
    )


@pytest.mark.parametrize("replace", [wrapped_forward, plain_projection, half_tables])
def test_parts_of_somebody_else(device, monkeypatch, replace):
    model = models.build("llama").to(device)
    replace(model, monkeypatch)
    ids = prompt(1, LENGTH + NEW, device=device)
    captured_as_eager(model, ids)


@torch.no_grad()
def test_hooks_go_with_the_step(device):
    model = models.build("qwen3").to(device)
    steps(model, prompt(1, LENGTH + NEW, device=device), None, captured=True)
    for module in model.model.layers.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


@torch.no_grad()
@pytest.mark.parametrize("tell", [GqaLayer.expect_query, GqaLayer.read_ahead])
def test_a_call_that_breaks_off_leaves_nothing_expected(device, tell):
    """Else a later one would compare with it, or read by it."""
    model = models.build("qwen3").to(device)
    ids = prompt(1, LENGTH + NEW + 1, device=device)
    _, cache = steps(model, ids[:, :-1], None, captured=True)
    broken = model.model.layers[-1].self_attn.v_proj
    told = []
    broken.register_forward_pre_hook(lambda *_: told.append(hosted(cache)[-1]) or 1 / 0)
    with pytest.raises(ZeroDivisionError), early_queries(model, cache, tell):
        model(ids[:, -1:], past_key_values=cache)
    assert told and all(layer._expected is None and not layer.is_under_way for layer in hosted(cache))


@torch.no_grad()
def test_a_call_with_another_cache_tells_nothing(device):
    model = models.build("qwen3").to(device)
    ids = prompt(1, LENGTH, device=device)
    cache, other = (HiSparseCache(model, Quest(32, 4, dense_layers=1), graphs=False) for _ in range(2))
    told = []
    for each in (cache, other):
        model(ids, past_key_values=each)
    with early_queries(model, cache, lambda layer, query: told.append(layer)):
        model(ids[:, :1], past_key_values=other)
        assert not told
        model(ids[:, :1], past_key_values=cache)
    assert told == hosted(cache)


@torch.no_grad()
def test_a_call_in_another_thread_disturbs_nothing(device):
    """It comes between a layer's call and its query, with other positions."""
    model = models.build("qwen3").to(device)
    ids = prompt(1, LENGTH, device=device)
    cache, other = (HiSparseCache(model, Quest(32, 4, dense_layers=1), graphs=False) for _ in range(2))
    model(ids, past_key_values=cache)
    told, called = [], []

    def calls(*args: object) -> None:
        if not called:
            called.append(True)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(model, ids, past_key_values=other).result()

    model.model.layers[-1].self_attn.q_norm.register_forward_pre_hook(calls)
    with early_queries(model, cache, lambda layer, query: told.append((layer, query()))):
        model(ids[:, :1], past_key_values=cache)
    assert called and [layer for layer, _ in told] == hosted(cache)
    assert {tuple(query.shape[2:]) for _, query in told} == {(1, model.config.head_dim)}


def test_with_another_model_it_is_found_out_anew(device):
    one, other = (models.build("qwen3").to(device) for _ in range(2))
    graphs = HiSparseCache(one, Quest(32, 4, dense_layers=1)).graphs
    graphs._hooked(one)
    graphs._warm.add(("a step",))
    graphs._hooked(one)
    assert graphs._warm
    graphs._hooked(other)
    assert not graphs._warm


def test_a_selector_that_looks_at_the_newest_token_is_waited_for(device, monkeypatch):
    monkeypatch.delattr(QuestState, "newest_counts")
    model = models.build("llama").to(device)
    ids = prompt(1, LENGTH + NEW, device=device)
    cache = captured_as_eager(model, ids)
    assert hosted(cache) and not any(layer.reads_ahead for layer in hosted(cache))


@torch.no_grad()
def test_tables_of_another_dtype_give_the_error_that_they_gave(device):
    """Keys and values of two dtypes, not what the rotation on the side wants."""
    model = models.build("llama").to(device)
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *args, **kwargs: tuple(
        table.double() for table in own(*args, **kwargs)
    )
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=0), graphs=False)
    told = []
    with (
        pytest.raises(ValueError, match="float64"),
        early_queries(model, cache, lambda *query: told.append(query)),
    ):
        model(prompt(1, LENGTH, device=device), past_key_values=cache)
    assert not told


@torch.no_grad()
def test_strided_projections_and_tables(device):
    model = models.build("llama").to(device)
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *args, **kwargs: tuple(map(strided, own(*args, **kwargs)))
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda part, args, output: strided(output))
    ids = prompt(1, LENGTH + NEW, device=device)
    cache = captured_as_eager(model, ids)
    assert hosted(cache) and all(layer.reads_ahead for layer in hosted(cache))


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def test_repr_says_which_layers_read_ahead(device):
    cache = HiSparseCache(models.build("qwen3").to(device), Quest(32, 4, dense_layers=1))
    assert "read ahead" not in repr(cache)
    hosted(cache)[0].reads_ahead = True
    assert "0 replayed, layers that read ahead: 1" in repr(cache)
