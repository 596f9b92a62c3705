"""The parts of DSA support: what `enable` does to a model, the sliced indexer, absorbed weights, groups of layers."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from hf_hisparse import HiSparseCache, Quest, disable, enable
from hf_hisparse.active import current_call
from hf_hisparse.graphs import as_captured
from hf_hisparse.models import indexer as indexer_module
from hf_hisparse.models.indexer import IndexerKeys
from hf_hisparse.models.mla_attention import UpProjection, absorbed_attention, fold
from hf_hisparse.models.watched_keys import scores_are_known
from hf_hisparse.plain import is_plain
from hf_hisparse.prefetch import FollowerBuffer, Group
from tests.dsa_models import TOP_K, build, dsa_twins
from tests.models import prompt
from tests.quantised import quantise


def _logits(model, ids, cache=None, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


@pytest.fixture
def model():
    return build("glm_FSSF")


# ---------------------------------------------------------------------- enable and disable


CACHES = {
    "none": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=160),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["v32", "glm_FSSF"])
def test_other_caches_answer_as_before(name, attention, cache):
    native = copy.deepcopy(dsa_twins(name, "cpu").native)
    native.set_attn_implementation(attention)
    ours = copy.deepcopy(native)
    ids = prompt(2, 120)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0

    def answers(model):
        made = CACHES[cache](model)
        generated = model.generate(
            ids, attention_mask=mask, past_key_values=made, use_cache=made is not None, do_sample=False, max_new_tokens=5,
            return_dict_in_generate=True, output_logits=True, disable_compile=True,
        )  # fmt: skip
        return (*generated.logits, _logits(model, ids, CACHES[cache](model), mask))

    expected = answers(native)
    enable(ours)
    assert all(map(torch.equal, answers(ours), expected))
    _logits(ours, ids, HiSparseCache(ours), mask)
    assert all(map(torch.equal, answers(ours), expected)), "a HiSparseCache in between leaves nothing behind"
    disable(ours)
    assert all(map(torch.equal, answers(ours), expected))


def _traces(model) -> list[str]:
    """What of ours is left in a model."""
    found = []
    for name, module in model.named_modules():
        overridden = [
            key for key in ("forward", "expand_kv", "_old_forward", "_hisparse_hooks") if key in vars(module)
        ]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found += [f"{name}.{key}" for key in overridden] + [f"{name} hooks"] * hooks
    return found


def test_disable_leaves_nothing(model):
    enable(model)
    traces = _traces(model)
    enable(model)
    assert traces and _traces(model) == traces, "once is enough"
    disable(model)
    disable(model)
    assert _traces(model) == []
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_with_a_history_refuses_a_disabled_model(model):
    """Whatever shape its keys have now: the reason is that it is disabled."""
    cache = HiSparseCache(model)
    ids = prompt(1, 90)
    _logits(model, ids, cache)
    disable(model)
    with pytest.raises(RuntimeError, match=r"hf_hisparse\.enable"):
        _logits(model, ids[:, :3], cache)
    enable(model)
    assert _logits(model, ids[:, :3], cache).shape[1] == 3


def test_a_copied_model_is_enabled_on_its_own(model):
    ids = prompt(1, 300)
    enable(model)
    expected = _logits(model, ids, HiSparseCache(model))
    twin = copy.deepcopy(model)
    disable(model)
    assert torch.equal(_logits(twin, ids, HiSparseCache(twin)), expected)
    disable(twin)
    assert _traces(twin) == []


def test_copies_use_their_own_weights(model):
    enable(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in twin.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1)
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.wk.weight.mul_(-1)
    ids = prompt(1, 200)
    ours = _logits(twin, ids, HiSparseCache(twin))
    disable(twin)
    torch.testing.assert_close(ours, _logits(twin, ids), atol=1e-4, rtol=0)


class _Counting(ModelHook):
    """Stands for accelerate's own hooks, which bring weights and inputs to a device."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("first", ["enable", "dispatch"])
def test_under_hooks_of_accelerate(model, first):
    ids = prompt(1, 300)
    expected = _logits(model, ids)
    hooked = [module for module in model.modules() if not isinstance(module, torch.nn.ModuleList)]
    hooks = {module: _Counting() for module in hooked}

    def dispatch():
        for module, hook in hooks.items():
            add_hook_to_module(module, hook)

    for step in (enable, lambda _: dispatch()) if first == "enable" else (lambda _: dispatch(), enable):
        step(model)
    cache = HiSparseCache(model, prefill_memory="1MB")
    torch.testing.assert_close(_logits(model, ids, cache), expected, atol=1e-4, rtol=0)
    indexer = model.model.layers[0].self_attn.indexer
    assert hooks[indexer].calls == 1, "the hook sees one call, the slices are inside"
    assert hooks[indexer.wk].calls > 1
    disable(model)
    assert torch.equal(_logits(model, ids), expected)
    for module in hooks:
        remove_hook_from_module(module)
    assert torch.equal(_logits(model, ids), expected)
    enable(model)
    torch.testing.assert_close(_logits(model, ids, HiSparseCache(model)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", ["keyword", "place", "decoder"])
def test_the_cache_is_known_however_it_is_passed(model, how):
    ids = prompt(1, 300)
    expected = _logits(model, ids)
    cache = HiSparseCache(model)
    with torch.no_grad():
        if how == "keyword":
            logits = model(ids, past_key_values=cache).logits
        elif how == "place":
            logits = model.lm_head(model.model(ids, None, None, cache).last_hidden_state)
        else:
            logits = model.lm_head(model.model(ids, past_key_values=cache).last_hidden_state)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert current_call() is None


def test_an_error_or_interrupt_ends_a_call(model):
    enable(model)
    for error in (ValueError, KeyboardInterrupt):
        cache = HiSparseCache(model)

        def fail(*args, error=error):
            raise error("stop")

        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(error):
            _logits(model, prompt(1, 60), cache)
        handle.remove()
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            _logits(model, prompt(1, 60), cache)
        cache.reset()
        ids = prompt(1, 60, seed=1)
        expected = _logits(model, ids)
        assert torch.equal(_logits(model, ids, cache), _logits(model, ids, HiSparseCache(model)))
        torch.testing.assert_close(_logits(model, ids, HiSparseCache(model)), expected, atol=1e-4, rtol=0)
        assert current_call() is None


def test_a_cache_is_not_kept_alive(model):
    cache = HiSparseCache(model)
    _logits(model, prompt(1, 60), cache)
    reference = weakref.ref(cache)
    del cache
    gc.collect()
    assert reference() is None


# ---------------------------------------------------------------------- settings and refusals


def test_refusals(model):
    with pytest.raises(ValueError, match="brings its own selection"):
        HiSparseCache(model, Quest())
    with pytest.raises(ValueError, match=f"index_topk={TOP_K}"):
        HiSparseCache(model, device_buffer_tokens=TOP_K - 1)
    with pytest.raises(ValueError, match=r"mla_mode='absorbed'.*'absorb', 'expand'"):
        HiSparseCache(model, mla_mode="absorbed")
    with pytest.raises(ValueError, match="prefill_memory"):
        HiSparseCache(model, prefill_memory="much")
    qwen = transformers.Qwen3Config(num_hidden_layers=2, layer_types=None)
    with pytest.raises(ValueError, match="latent attention"):
        HiSparseCache(qwen, Quest(), mla_mode="expand")
    with pytest.raises(ValueError, match=r"glm5_next.*DynamicCache"):
        HiSparseCache(transformers.Glm5NextTextConfig(num_hidden_layers=4))


def test_a_model_enabled_by_name_alone_is_refused(model):
    model.set_attn_implementation("hisparse")
    with pytest.raises(RuntimeError, match="enable"):
        _logits(model, prompt(1, 60), HiSparseCache(model.config))


def test_what_absorbed_attention_cannot_is_refused():
    model = build("hy_v4")
    with pytest.raises(ValueError, match=r's_aux=.*mla_mode="expand"'):
        _logits(model, prompt(1, 60), HiSparseCache(model))


def test_the_cache_tells_what_it_is(model):
    cache = HiSparseCache(model)
    _logits(model, prompt(2, 300), cache)
    text = repr(cache)
    assert (
        "glm_moe_dsa" in text
        and f"index_topk={TOP_K}" in text
        and f"device_buffer_tokens={2 * TOP_K}" in text
    )
    record = (32 + 8) * 4
    memory = cache.memory()
    assert memory.buffer_bytes == 4 * 2 * (2 * TOP_K) * record
    assert memory.host_bytes == 4 * 2 * 300 * record
    keys = [layer.state.keys for layer in cache.hosted_layers if layer.state.keys is not None]
    assert len(keys) == 2, "shared layers have no indexer"
    assert memory.selector_bytes == sum(key.nbytes for key in keys)
    leaders = [layer for layer in cache.hosted_layers if not isinstance(layer.buffer, FollowerBuffer)]
    assert len(leaders) == 2, "shared layers have no tables"


# ---------------------------------------------------------------------- indexer


def test_indexer_keys_grow_without_moving_at_each_token():
    keys, state = torch.randn(2, 50, 4), IndexerKeys()
    state.grow(40)
    assert torch.equal(state.write(keys[:, :30], 0), keys[:, :30])
    place = state.keys.data_ptr()
    for i in range(30, 35):
        held = state.write(keys[:, i : i + 1], i)
        assert held.data_ptr() == place
        assert torch.equal(held, keys[:, : i + 1])
    for i in range(35, 40):  # in a captured step
        held = state.write_at(keys[:, i : i + 1], torch.tensor([i]))
        assert held.data_ptr() == place
        assert held.shape == (2, 40, 4)
    state.grow(60)
    assert torch.equal(state.write(keys[:, 40:], 40), keys)
    assert state.keys.isfinite().all()
    twin = state.clone()
    state.write(-keys[:, :5], 20)
    assert torch.equal(twin.keys[:, :50], keys)
    state.rearrange(torch.tensor([1, 1, 0]))
    assert torch.equal(state.keys[:, :20], keys[[1, 1, 0], :20])
    assert state.nbytes == 3 * 60 * 4 * 4


def test_indexer_keys_of_tokens_that_are_not_there_are_refused(model):
    cache = HiSparseCache(model)
    _logits(model, prompt(1, 60), cache)
    with pytest.raises(RuntimeError):
        cache.update_indexer(torch.zeros(1, 1, 16), 0)
    cache.update(torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2, 8), 1)
    with pytest.raises(RuntimeError, match=r"keys of 3 tokens, but 2 are new.*reset\(\)"):
        cache.update_indexer(torch.zeros(1, 3, 16), 1)


def _indexers(model):
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    return [indexer for indexer in indexers if indexer is not None]


def _selections(model, ids, cache, mask=None):
    """What each indexer selects in one call."""
    seen = []
    indexers = _indexers(model)
    handles = [indexer.register_forward_hook(lambda *args: seen.append(args[2])) for indexer in indexers]
    _logits(model, ids, cache, mask)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("memory", ["50KB", "1MB", "2GiB"])
@pytest.mark.parametrize("name", ["v32", "glm_full", "axk2", "hy_v4"])
def test_slices_select_what_the_model_selects(name, memory, monkeypatch):
    """Key by key, in the model's order; only what no query may read is anything."""
    twins = dsa_twins(name, "cpu")
    ids, length = prompt(2, 150), 150
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    fused = []
    kernel = indexer_module.lightning_indexer
    monkeypatch.setattr(
        indexer_module,
        "lightning_indexer",
        lambda *args: (fused.append((args[0].shape, args[5])), kernel(*args))[1],
    )
    cache = HiSparseCache(twins.enabled, mla_mode="expand", prefill_memory=memory)
    expected = _selections(twins.native, ids, DynamicCache(config=twins.native.config), mask)
    ours = _selections(twins.enabled, ids, cache, mask)
    assert sum(shape[1] for shape, _ in fused) == length * len(ours), (
        "each query was scored once, by the kernel"
    )
    assert {scale for _, scale in fused} == {1.0 if name == "hy_v4" else 16**-0.5}
    assert (len(fused) > len(ours)) == (memory != "2GiB")
    own = torch.arange(length)[:, None]
    allowed = (torch.arange(length) <= own) & mask[:, None].bool()
    # Hidden states after the first layer differ by rounding: there a selection may flip.
    readable = allowed.gather(2, expected[0].long())
    assert torch.equal(ours[0].masked_fill(~readable, -1), expected[0].masked_fill(~readable, -1))
    if memory == "2GiB":
        for one, other in zip(ours, expected, strict=True):
            assert torch.equal(one.masked_fill(~readable, -1), other.masked_fill(~readable, -1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["v32", "glm_full", "axk2", "hy_v4"])
def test_decode_selects_what_the_model_selects(name, padded, monkeypatch):
    """Key by key, in the model's order, with the kernel's scores; calls of one token and of several."""
    twins = dsa_twins(name, "cpu")
    ids = prompt(2, 160)
    mask = torch.ones_like(ids) if padded else None
    if mask is not None:
        mask[1, :20] = 0
    scored, kernel = [], indexer_module.lightning_indexer
    monkeypatch.setattr(
        indexer_module,
        "lightning_indexer",
        lambda *args: (scored.append(args[0].shape[1]), kernel(*args))[1],
    )
    theirs = DynamicCache(config=twins.native.config)
    ours = HiSparseCache(twins.enabled, mla_mode="expand", graphs=False)
    first = 0
    for stop in (150, 151, 152, 155, 156, 160):
        part, shown = ids[:, first:stop], None if mask is None else mask[:, :stop]
        expected = _selections(twins.native, part, theirs, shown)
        scored.clear()
        got = _selections(twins.enabled, part, ours, shown)
        assert scored == [stop - first] * len(got)
        own = torch.arange(first, stop)[:, None]
        readable = (expected[0] <= own) & (
            mask is None or mask.bool()[torch.arange(2)[:, None, None], expected[0].long()]
        )
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.masked_fill(~readable, -1), other.masked_fill(~readable, -1))
        first = stop
    assert all(map(scores_are_known, _indexers(twins.enabled)))


# How an indexer may come from ``[B, S, H, D]`` and ``[B, T, D]`` to products ``[B, S, H, T]``.
OTHERWISE = {
    "clamped": lambda query, keys: torch.matmul(
        query.float(), keys.transpose(-1, -2).float().unsqueeze(1)
    ).clamp(0, 9),
    "divided": lambda query, keys: (
        torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) / 4.0
    ),
    "keys divided": lambda query, keys: torch.matmul(
        query.float(), (keys / 4.0).transpose(-1, -2).float().unsqueeze(1)
    ),
    "indexed": lambda query, keys: torch.matmul(query.float(), keys[:, None].transpose(-1, -2).float()),
    "shifted": lambda query, keys: (
        torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) - 0.05
    ),
    "negated": lambda query, keys: -torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)),
    "compared": lambda query, keys: torch.where(
        (scores := torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1))) > 0, scores, 0
    ),
    "summed": lambda query, keys: torch.einsum("bshd,btd->bsht", query.float(), keys.float()),
    "strided": lambda query, keys: torch.matmul(
        query.transpose(1, 2).contiguous().transpose(1, 2).float(),
        keys.transpose(-1, -2).float().unsqueeze(1),
    ),
}


def indexers_with(model, product):
    """Let the indexers of `model` make their scores of a `product` of another kind; the indexers."""
    indexers = _indexers(model)
    plain = type(indexers[0])

    class Other(plain):
        def forward(
            self,
            hidden_states,
            q_resid,
            position_embeddings,
            attention_mask,
            position_ids,
            cache=None,
            **kwargs,
        ):
            cos, sin = position_embeddings
            query = self.wq_b(q_resid).view(*hidden_states.shape[:2], self.n_heads, self.head_dim)
            # The same token gives the same keys, and its scores would tie.
            keys = self.k_norm(self.wk(hidden_states)) + torch.cat([cos, sin], dim=-1)
            cache = kwargs.get("past_key_values", cache)
            if cache is not None:
                keys = cache.update_indexer(keys, self.layer_idx)
            weights = self.weights_proj(hidden_states).float() * (1 + cos[..., :1].square()) + sin[..., :1]
            scores = torch.matmul(weights.unsqueeze(-2), torch.relu(product(query, keys))).squeeze(-2)
            scores = scores.masked_fill(~attention_mask, float("-inf"))
            return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.to(torch.int32)

    for indexer in indexers:
        indexer.__class__ = Other
    return indexers


def test_an_unknown_indexer_runs_its_own_code_on_slices(model, monkeypatch):
    """Scores that the kernel does not compute: nothing is replaced, and memory stays bounded all the same."""
    indexers = indexers_with(model, OTHERWISE["clamped"])
    called = []
    monkeypatch.setattr(indexer_module, "lightning_indexer", lambda *args: called.append(1))
    ids = prompt(2, 200)
    expected = _logits(model, ids)
    for memory in ("1MB", "2GiB"):
        cache = HiSparseCache(model, prefill_memory=memory)
        ours = [_logits(model, part, cache) for part in ids.split([198, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(ours, dim=1), expected, atol=1e-4, rtol=0)
        assert [scores_are_known(indexer) for indexer in indexers] == [False] * len(indexers)
    assert not called


@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_indexers_of_other_kinds_run_as_they_are(otherwise):
    """Also in decode, where the first call may be one of few tokens."""
    model = build("v32")
    indexers = indexers_with(model, OTHERWISE[otherwise])
    ids = prompt(2, 104)
    expected = _logits(model, ids)
    for prompts in ([20, 80], [100]):
        cache = HiSparseCache(model, graphs=False)
        ours = [_logits(model, part, cache) for part in ids.split([*prompts, 1, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(ours, dim=1), expected, atol=2e-4, rtol=0)
    assert [scores_are_known(indexer) for indexer in indexers] == [otherwise == "strided"] * len(indexers)


def test_a_query_of_more_digits_than_the_keys_is_not_rounded(monkeypatch):
    """The kernel takes it in their dtype; the model's product is in fp32."""
    model = build("v32", dtype=torch.bfloat16)
    called, kernel, real = [], indexer_module.lightning_indexer, torch.matmul
    monkeypatch.setattr(
        indexer_module, "lightning_indexer", lambda *args: (called.append(1), kernel(*args))[1]
    )

    def finer(one, other):
        return real(one * 0.7 if one.ndim == 4 and one.shape[2] > 1 else one, other)

    monkeypatch.setattr("transformers.models.deepseek_v32.modeling_deepseek_v32.torch.matmul", finer)
    cache = HiSparseCache(model, graphs=False)
    for part in prompt(1, 102).split([100, 1, 1], dim=1):
        _logits(model, part, cache)
    assert not called
    assert scores_are_known(model.model.layers[0].self_attn.indexer) is False


class _Largest(TorchDispatchMode):
    """Notes the largest memory that any operation takes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.what = 0, ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        held = {
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)
        }
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in held:
                nbytes = tensor.untyped_storage().nbytes()
                if nbytes > self.nbytes:
                    self.nbytes, self.what = nbytes, f"{function} {list(tensor.shape)}"
        return output


@pytest.mark.parametrize("chunked", [False, True])
def test_prefill_memory_does_not_grow_with_the_square(model, chunked):
    """No mask over queries and keys, no scores of all heads, no keys and values of the whole history."""
    enable(model)
    rows, budget = 1500, 4_000_000
    ids = prompt(1, rows)
    cache = HiSparseCache(model, prefill_memory=budget)
    _logits(model, ids[:, :40], cache)
    if chunked:
        _logits(model, ids[:, :700], cache)
    with _Largest() as largest:
        cache = HiSparseCache(model, prefill_memory=budget) if not chunked else cache
        _logits(model, ids, cache)
    assert largest.nbytes < rows * rows, largest.what  # bytes of a bool mask
    assert largest.nbytes <= budget, largest.what


def test_masks_of_users_are_honoured(model):
    """A 4-D mask made by hand may say anything, even that a row reads what comes after it."""
    ids = prompt(1, 90)
    mask = torch.ones(90, 90, dtype=torch.bool).tril()
    mask[:30, :30] = True
    mask[40:, 5:12] = False
    mask = mask[None, None]
    expected = _logits(model, ids, mask=mask)
    for mode in ("absorb", "expand"):
        ours = _logits(model, ids, HiSparseCache(model, mla_mode=mode, prefill_memory="1MB"), mask)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- attention


class _Adapted(torch.nn.Module):
    """A linear layer as an adapter library wraps it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Linear(linear.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, linear.out_features, bias=False)
        self.disable_adapters = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        plain = self.linear(rows)
        return plain if self.disable_adapters else plain + self.up(self.down(rows))


def test_the_matrix_follows_the_module():
    torch.manual_seed(0)
    rows = torch.randn(5, 8)
    linear, projection = torch.nn.Linear(8, 12, bias=False), UpProjection()
    assert projection.matrix(linear, 8, rows) is linear.weight, "no copy of a plain weight"
    adapted = _Adapted(linear)

    def same():
        return torch.allclose(rows @ projection.matrix(adapted, 8, rows).T, adapted(rows), atol=1e-5)

    with torch.no_grad():
        assert same()
        matrix = projection.matrix(adapted, 8, rows)
        assert projection.matrix(adapted, 8, rows) is matrix, "computed once"
        adapted.up.weight.add_(1)
        assert same()
        adapted.up.weight = torch.nn.Parameter(torch.randn(12, 4))
        assert same()
        adapted.disable_adapters = True
        assert same()
        linear.register_forward_hook(lambda module, args, output: 2 * output)
        assert torch.equal(projection.matrix(linear, 8, rows), 2 * linear.weight)
        projection = UpProjection()
        assert same()


def test_quantised_weights(model):
    """Its linear layers stay what they are, and their weights are no matrices that a kernel could read."""
    quantise(model)
    ids = prompt(1, 200)
    expected = _logits(model, ids)
    assert not is_plain(model.model.layers[0].self_attn.kv_b_proj.weight)
    cache = HiSparseCache(model)
    torch.testing.assert_close(_logits(model, ids, cache), expected, atol=1e-4, rtol=0)
    layer, projection = model.model.layers[0], UpProjection()
    before = projection.matrix(layer.self_attn.kv_b_proj, 32, expected)
    assert projection.matrix(layer.self_attn.kv_b_proj, 32, expected) is before, "computed once"
    layer.self_attn.kv_b_proj.weight.scale.mul_(2)
    assert torch.equal(projection.matrix(layer.self_attn.kv_b_proj, 32, expected), 2 * before)


def test_adapters_on_the_up_projection(model):
    enable(model)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = _Adapted(layer.self_attn.kv_b_proj)
    ids, cache = prompt(1, 200), HiSparseCache(model)
    for _ in range(2):
        torch.testing.assert_close(_logits(model, ids, cache), _logits(model, ids), atol=1e-4, rtol=0)
        cache.reset()
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.disable_adapters = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_absorbed_is_as_exact_as_the_models_attention(dtype):
    """Against fp64, with the same selection: beside expanded keys and values under PyTorch's attention."""
    generator = torch.Generator().manual_seed(0)
    heads, nope, rope, value, latent, k, lanes = 16, 128, 64, 128, 512, 256, 3

    def randn(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    query, rows = randn(lanes, heads, 1, nope + rope), randn(lanes, k, latent + rope)
    matrix = randn(heads * (nope + value), latent, scale=latent**-0.5)
    selection = torch.stack([torch.randperm(k, generator=generator) for _ in range(lanes)]).int()
    scaling = (nope + rope) ** -0.5

    def expanded(query, rows, matrix):
        kv = (rows[..., :latent] @ matrix.T).unflatten(-1, (heads, nope + value)).transpose(1, 2)
        rotated = rows[:, None, :, latent:].expand(-1, heads, -1, -1)
        keys = torch.cat([kv[..., :nope], rotated], dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, kv[..., nope:], scale=scaling)

    exact = expanded(query.double(), rows.double(), matrix.double())[:, :, 0]
    models = expanded(query, rows, matrix)[:, :, 0]
    ours = absorbed_attention(fold(query, matrix, rope), rows, selection, selection, scaling)[:, 0]

    def error(output):
        return float((output.double() - exact).norm() / exact.norm())

    assert error(ours) <= 1.25 * error(models)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["v32", "glm_FSSF"])
def test_steps_as_they_are_captured(name, attention, padded):
    """A captured step scores all keys that there is room for, and its mask hides those that are not there yet."""
    twins = dsa_twins(name, "cpu", 2, torch.float32, attention)
    ids = prompt(2, 120)
    mask = torch.ones(2, 140, dtype=torch.long)
    mask[1, :50] = 0 if padded else 1
    ours, theirs = (
        HiSparseCache(twins.enabled, device_buffer_tokens=45),
        DynamicCache(config=twins.native.config),
    )
    _logits(twins.enabled, ids, ours, mask[:, :120])
    _logits(twins.native, ids, theirs, mask[:, :120])
    for layer in ours.hosted_layers:
        if layer.state.keys is not None:
            layer.state.keys[:, 120:] = 9.0  # what must not be read
    for length in range(121, 135):
        token, seen = prompt(2, 1, seed=length), mask[:, :length]
        expected = _logits(twins.native, token, theirs, seen)
        ours.make_room(1)
        if padded:
            ours.padding.take(seen, ours.capacity)
        with as_captured(ours, padded):
            logits = _logits(twins.enabled, token, ours)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- groups of layers


def test_a_group_resolves_once(monkeypatch):
    from hf_hisparse import hot_buffer

    resolved, resolve = [], hot_buffer.resolve
    monkeypatch.setattr(hot_buffer, "resolve", lambda *args: (resolved.append(1), resolve(*args)))
    model = dsa_twins("glm_FFFSSS", "cpu").enabled
    cache = HiSparseCache(model, device_buffer_tokens=TOP_K)
    _logits(model, prompt(2, 300), cache)
    for seed in range(5):
        _logits(model, prompt(2, 1, seed), cache)
    assert len(resolved) == 5 * 3
    layers = cache.stats().layers
    assert [layer.misses for layer in layers[2:]] == [layers[2].misses] * 4
    assert layers[2].misses > 0
    assert cache.stats().steps == 5
    assert all(layer.steps == 5 for layer in layers)


def _assert_slots_hold_their_records(cache):
    """Every slot of every layer, not only those just read."""
    for layer in cache.hosted_layers:
        tables = layer.buffer.leader if isinstance(layer.buffer, FollowerBuffer) else layer.buffer
        lane, slot = (tables.slot_records >= 0).nonzero(as_tuple=True)
        record = tables.slot_records[lane, slot].long()
        host = layer.pool.records[record, layer.pool.host_rows[lane, record].long()]
        assert torch.equal(layer.buffer.data[lane, slot], host), f"layer {layer.layer_idx}"
        assert len(lane) == tables.slot_records.numel()


@pytest.mark.parametrize("buffer", [TOP_K, 40, 70])
def test_followers_hold_what_their_leader_holds(buffer):
    model = dsa_twins("glm_FFFSSS", "cpu").enabled
    cache = HiSparseCache(model, device_buffer_tokens=buffer)
    _logits(model, prompt(3, 200), cache)
    _assert_slots_hold_their_records(cache)
    for rows in (1, 1, 7, 1, 32, 40, 1):
        _logits(model, prompt(3, rows, seed=rows), cache)
        _assert_slots_hold_their_records(cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        _assert_slots_hold_their_records(cache)
    twin = copy.deepcopy(cache)
    for cache_ in (cache, twin):
        _logits(model, prompt(3, 5, seed=9), cache_)
        _assert_slots_hold_their_records(cache_)
    cache.batch_repeat_interleave(2)
    _logits(model, prompt(6, 3, seed=4), cache)
    _assert_slots_hold_their_records(cache)
    _logits(model, prompt(3, 3, seed=5), twin)
    _assert_slots_hold_their_records(twin)


def test_a_group_over_several_devices_leads_on_each(monkeypatch):
    """Devices are pretended: the last two layers lie elsewhere."""
    twins = dsa_twins("glm_FFFSSS", "cpu")
    elsewhere = torch.device("cpu", 1)
    leader_of = Group.leader_of

    def pretended(self, member, device):
        near = [other for other in self.members if (other.layer_idx >= 4) == (member.layer_idx >= 4)]
        part = object.__new__(Group)
        part._members = [weakref.ref(other) for other in near]
        return leader_of(part, member, device)

    monkeypatch.setattr(Group, "leader_of", pretended)
    assert elsewhere != torch.device("cpu")
    ids, cache = prompt(2, 300), HiSparseCache(twins.enabled, device_buffer_tokens=TOP_K, verify=True)
    native = DynamicCache(config=twins.native.config)
    for part in (ids[:, :290], ids[:, 290:291], ids[:, 291:299], ids[:, 299:]):
        ours, expected = _logits(twins.enabled, part, cache), _logits(twins.native, part, native)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    leaders = [
        layer.layer_idx for layer in cache.hosted_layers if not isinstance(layer.buffer, FollowerBuffer)
    ]
    assert leaders == [0, 1, 2, 4]
    _assert_slots_hold_their_records(cache)

    monkeypatch.undo()  # all on one device again
    cache.reset()
    expected = _logits(twins.native, ids)
    torch.testing.assert_close(
        _logits(twins.enabled, ids[:, :290], cache), expected[:, :290], atol=1e-4, rtol=0
    )
    leaders = [
        layer.layer_idx for layer in cache.hosted_layers if not isinstance(layer.buffer, FollowerBuffer)
    ]
    assert leaders == [0, 1, 2]
    _logits(twins.enabled, ids[:, 290:], cache)
    _assert_slots_hold_their_records(cache)


def test_verify_finds_a_follower_that_is_off(model):
    cache = HiSparseCache(model, device_buffer_tokens=400, verify=True)
    _logits(model, prompt(1, 300), cache)
    cache.hosted_layers[1].buffer.data.add_(1)
    with pytest.raises(RuntimeError, match="layer 1, lane 0"):
        _logits(model, prompt(1, 1), cache)
