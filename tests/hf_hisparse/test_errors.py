"""What goes wrong between a model and a cache: one clear error, and a cache that is unchanged or says it is not."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, T5Config, T5ForConditionalGeneration

from hf_hisparse import HiSparseCache, Quest, disable, enable
from hf_hisparse.host_memory import PinnedArea
from hf_hisparse.hosted_layer import HostedLayer
from tests import dsa_models, msa_models
from tests.models import build, prompt
from tests.oracle import quest_oracle

SELECTOR = Quest(32, 4)


def _prefilled(model, batch: int = 2, **settings) -> HiSparseCache:
    cache = HiSparseCache(model, SELECTOR, **settings)
    with torch.no_grad():
        model(prompt(batch, 300, device=str(model.device)), past_key_values=cache)
    return cache


def _continuation(model, cache) -> torch.Tensor:
    """Logits of a few decode calls after a prefill."""
    device = str(model.device)
    with torch.no_grad():
        calls = [model(prompt(2, rows, rows, device), past_key_values=cache).logits for rows in (1, 3, 1)]
    return torch.cat(calls, dim=1)


def _assert_unchanged(model, cache: HiSparseCache, length: int = 300) -> None:
    """The cache goes on as one to which nothing happened."""
    assert cache.get_seq_length() == length
    assert {layer.get_seq_length() for layer in cache.layers} == {length}
    assert torch.equal(_continuation(model, cache), _continuation(model, _prefilled(model)))


def test_another_batch_size(model):
    cache = _prefilled(model)
    ids = prompt(3, 5, device=str(model.device))
    with pytest.raises(ValueError, match=r"batch size 3, but 2 is held.*reset\(\)"):
        model(ids, past_key_values=cache)
    _assert_unchanged(model, cache)
    cache.reset()
    model(ids, past_key_values=cache)


def test_another_batch_size_in_generate(model):
    cache = _prefilled(model)
    with pytest.raises(ValueError, match="batch size 1, but 2 is held"):
        model.generate(prompt(1, 320, device=str(model.device)), past_key_values=cache, max_new_tokens=2)
    _assert_unchanged(model, cache)


def test_another_dtype(model):
    cache = _prefilled(model)
    other = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype torch\.bfloat16, but torch\.float32 is held"):
        other(prompt(2, 5, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


def test_another_model(model):
    cache = _prefilled(model)
    other = build("llama").to(model.device)
    enable(other)
    with pytest.raises(ValueError, match=r"KV heads 1, but 2 is held.*key width 32, but 16 is held"):
        other(prompt(2, 5, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


@pytest.mark.parametrize("layer", [1, 2])  # the first asks for its caller before
def test_another_device(model, layer):
    cache = _prefilled(model)
    keys = torch.zeros(2, 2, 1, 16, device="meta")
    with pytest.raises(ValueError, match=rf"device meta, but {model.device.type}.* is held"):
        cache.update(keys, keys, layer)
    _assert_unchanged(model, cache)


def test_a_model_that_is_not_enabled(model):
    cache = HiSparseCache(model.config, SELECTOR)
    ids = prompt(2, 300, device=str(model.device))
    with pytest.raises(RuntimeError, match=r"'sdpa'.*hf_hisparse\.enable\(model\)"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == 0
    enable(model)
    model(ids, past_key_values=cache)
    _assert_unchanged(model, cache)


def test_a_model_disabled_in_between(model):
    cache = _prefilled(model)
    disable(model)
    with pytest.raises(RuntimeError, match=r"hf_hisparse\.enable\(model\)"):
        model(prompt(2, 1, device=str(model.device)), past_key_values=cache)
    enable(model)
    _assert_unchanged(model, cache)


def test_a_cache_of_an_enabled_model_with_another_that_is_not(model):
    """Never a wrong answer, though the cache only knows the model it was built from."""
    other = copy.deepcopy(model)
    cache = HiSparseCache(model, SELECTOR)
    ids = prompt(1, 300, device=str(model.device))
    with pytest.raises(RuntimeError, match=r"hf_hisparse\.enable\(model\)"):
        other.generate(ids, past_key_values=cache, max_new_tokens=3)
    cache.reset()
    enable(other)
    other.generate(ids, past_key_values=cache, max_new_tokens=3)


def test_cache_implementation_beside_the_cache(model):
    cache = _prefilled(model)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            prompt(2, 301, device=str(model.device)),
            past_key_values=cache,
            cache_implementation="static",
            max_new_tokens=2,
        )
    _assert_unchanged(model, cache)


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_attention_that_decode_does_not_compute(device, name):
    model = build(name).to(device)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"(softcap=|s_aux=).*DynamicCache"):
        HiSparseCache(model, Quest(32, 4, dense_layers=0))
    if name == "softcap":  # which a configuration tells as well
        with pytest.raises(ValueError, match=r"softcap=.*DynamicCache"):
            HiSparseCache(model.config, Quest(32, 4, dense_layers=0))
        return
    cache = HiSparseCache(model.config, Quest(32, 4, dense_layers=0))
    enable(model)
    argument = {"softcap": "softcap=", "sinks": "s_aux="}[name]
    for _ in range(2):  # the first call stops within; a second must not take its remains for a history
        with pytest.raises(ValueError, match=rf"{argument}.*DynamicCache"):
            model.generate(prompt(1, 100, device=device), past_key_values=cache, max_new_tokens=3)
        assert cache.get_seq_length() == 0
    model.generate(prompt(1, 100, device=device), max_new_tokens=3)


def test_a_model_that_selects_by_itself():
    model = build("dsa")
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"selector=Quest.*'deepseek_v32'.*leave the selector out"):
        HiSparseCache(model, SELECTOR)
    assert model.config._attn_implementation == attention


def test_an_encoder_decoder():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    with pytest.raises(ValueError, match=r"decoder-only.*'t5'"):
        HiSparseCache(T5ForConditionalGeneration(config), SELECTOR)


def test_attention_without_the_interface():
    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=4, n_head=2))
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*AttentionInterface.*DynamicCache"):
        HiSparseCache(model, SELECTOR)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("base", ["flash_attention_2", "flex_attention"])
def test_other_attention_below(model, base):
    model.config._attn_implementation_internal = base  # flash needs a package and a GPU to be set by name
    for refused in (lambda: enable(model), lambda: HiSparseCache(model, SELECTOR)):
        with pytest.raises(ValueError, match=rf'{base}.*model\.set_attn_implementation\("sdpa"\)'):
            refused()
    assert model.config._attn_implementation == base


def test_attention_weights_cannot_be_had(model):
    model.set_attn_implementation("eager")
    cache = _prefilled(model)
    with pytest.raises(ValueError, match="output_attentions"):
        model(prompt(2, 1, device=str(model.device)), past_key_values=cache, output_attentions=True)


class Accident(Exception):
    """Something that happened to someone else."""


def _raise(*args):
    raise Accident


@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("place", ["layers.1", "layers.2", "layers.3.self_attn.o_proj", "layers.2.mlp"])
def test_an_error_in_the_middle_of_a_forward(model, place, rows):
    cache = _prefilled(model)
    module = model.model.get_submodule(place)
    ids = prompt(2, rows, device=str(model.device))
    with module.register_forward_pre_hook(_raise), pytest.raises(Accident):
        model(ids, past_key_values=cache)
    if place == "layers.3.self_attn.o_proj":  # all layers have taken the tokens: nothing is amiss
        assert {layer.get_seq_length() for layer in cache.layers} == {300 + rows}
    elif place in ("layers.1", "layers.2"):  # no hosted layer has: they are taken back
        _assert_unchanged(model, cache)
    else:
        for use in (
            lambda: model(ids, past_key_values=cache),
            lambda: model.generate(prompt(2, 310, device=str(model.device)), past_key_values=cache),
            lambda: copy.deepcopy(cache),
            lambda: cache.crop(-1),
        ):
            with pytest.raises(RuntimeError, match=r"did not finish.*cache\.reset\(\)"):
                use()
    print(cache, cache.stats(), cache.memory())
    cache.reset()
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


def _asks_for_softcap(module, args, kwargs):
    return args, {**kwargs, "softcap": 30.0}


def _refused_calls(model, rows: int, held: int):
    """Calls that the first hosted layer refuses: error, and what makes the call."""
    device = str(model.device)
    ids = prompt(2, rows, device=device)

    def mask(shape, cache):
        return model(
            ids, attention_mask=torch.ones(shape, dtype=torch.bool, device=device), past_key_values=cache
        )

    def softcap(cache):
        attention = model.model.layers[2].self_attn
        with attention.register_forward_pre_hook(_asks_for_softcap, with_kwargs=True):
            model(ids, past_key_values=cache)

    def no_memory(cache):
        with mock.patch.object(
            cache.hosted_layers[0], "history", side_effect=torch.OutOfMemoryError("none left")
        ):
            model(ids, past_key_values=cache)

    def no_host_memory(cache):
        with mock.patch.object(cache.hosted_layers[0], "grow", side_effect=MemoryError("none left")):
            model(ids, past_key_values=cache)

    calls = {
        "a mask for each head": (ValueError, lambda cache: mask((2, 4, rows, held + rows), cache)),
        "softcap": (ValueError, softcap),
        "the driver refuses to pin": (MemoryError, no_host_memory),
    }
    if rows > 32:
        calls["no memory for attention"] = (torch.OutOfMemoryError, no_memory)
    return calls


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_what_the_first_hosted_layer_refuses_is_taken_back(model, rows):
    """By then the dense layers before it have taken the tokens."""
    for error, call in _refused_calls(model, rows, 300).values():
        cache = _prefilled(model)
        before = cache.memory()
        with pytest.raises(error), torch.no_grad():
            call(cache)
        assert cache.memory() == before
        _assert_unchanged(model, cache)


def test_an_empty_cache_stays_empty(model):
    """The next prompt may have another shape."""
    device = str(model.device)
    for name, (error, call) in _refused_calls(model, 40, 0).items():
        cache = HiSparseCache(model, SELECTOR)
        with pytest.raises(error), torch.no_grad():
            call(cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {0}, name
        with torch.no_grad():
            ours = model(prompt(3, 70, device=device), past_key_values=cache).logits
            fresh = HiSparseCache(model, SELECTOR)
            assert torch.equal(ours, model(prompt(3, 70, device=device), past_key_values=fresh).logits)
            step = prompt(3, 1, device=device)
            ours = model(step, past_key_values=cache).logits
            assert torch.equal(ours, model(step, past_key_values=fresh).logits)


def test_a_sliding_window_cannot_be_taken_back(twins, device):
    """What it held before is gone, so the cache asks for a reset; an empty one has lost nothing."""
    _, model = twins("gemma3", device)
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=0))
    assert not isinstance(cache.layers[0], HostedLayer)
    ids = prompt(2, 60, device=device)
    fails = mock.patch.object(
        cache.hosted_layers[0], "history", side_effect=torch.OutOfMemoryError("none left")
    )
    with torch.no_grad():
        for _ in range(2):
            with fails, pytest.raises(torch.OutOfMemoryError):
                model(ids, past_key_values=cache)
            assert {layer.get_seq_length() for layer in cache.layers} == {0}
        model(ids, past_key_values=cache)
        with fails, pytest.raises(torch.OutOfMemoryError):
            model(ids, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"did not finish.*cache\.reset\(\)"):
            model(ids, past_key_values=cache)


def test_an_error_within_attention(model, monkeypatch):
    cache = _prefilled(model)
    monkeypatch.setattr(cache.hosted_layers[-1].state, "select", _raise)
    with pytest.raises(Accident):
        _continuation(model, cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"cache\.reset\(\)"):
        _continuation(model, cache)
    cache.reset()
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


@pytest.mark.parametrize("side", ["host", "slot"])
def test_verify_names_what_differs(model, side):
    """One channel of one record, on either side; without `verify` nobody would know."""
    cache = _prefilled(model, device_buffer_tokens=400, verify=True)
    _continuation(model, cache)
    layer, record = cache.hosted_layers[-1], 76  # the page that the next query writes to and reads
    if side == "host":
        layer.pool.records[record, 3, 5] += 1
    else:
        layer.buffer.data[3, layer.buffer.page_table[3, record].long(), 5] += 1
    with pytest.raises(RuntimeError, match=r"verify: layer 3, lane 3, record 76: slot \d+ does not hold"):
        _continuation(model, cache)


def test_dropout(model):
    model.train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout=0\.1.*model\.eval\(\)"):
        model(prompt(1, 50, device=str(model.device)), past_key_values=HiSparseCache(model, SELECTOR))


def test_gradients_do_not_vanish_silently(model):
    cache = _prefilled(model)
    loss = model(prompt(2, 3, device=str(model.device)), past_key_values=cache).logits.sum()
    with pytest.raises(RuntimeError, match=r"no gradients flow.*HiSparseCache"):
        loss.backward()


def test_a_mask_per_head(model):
    cache = HiSparseCache(model, SELECTOR)
    mask = torch.zeros(1, 4, 40, 40, device=model.device)
    with pytest.raises(ValueError, match=r"\[1, 4, 40, 40\].*\[batch, 1, 40, 40\]"):
        model(prompt(1, 40, device=str(model.device)), attention_mask=mask, past_key_values=cache)


def test_the_helpers_above_can_fail(model):
    """`_assert_unchanged` sees one token too many, and that pages were dropped."""
    cache = _prefilled(model)
    _continuation(model, cache)
    with pytest.raises(AssertionError):
        _assert_unchanged(model, cache)
    native = copy.deepcopy(model)
    disable(native)
    with quest_oracle(native, budget=28, page_size=4), torch.no_grad():
        short = DynamicCache(config=native.config)
        native(prompt(2, 300, device=str(model.device)), past_key_values=short)
        answer = _continuation(native, short)
    assert not torch.allclose(answer, _continuation(model, _prefilled(model)), atol=1e-2)


def _causal(start: int, stop: int, device: str) -> torch.Tensor:
    return (torch.arange(stop) <= torch.arange(start, stop)[:, None])[None, None].to(device)


def test_a_mask_that_is_a_bias(model):
    device = str(model.device)
    mask = torch.zeros(1, 1, 40, 40, device=device).masked_fill(~_causal(0, 40, device), float("-inf"))
    mask[..., 3] -= 0.5
    with pytest.raises(ValueError, match=r"bias, -0\.5"):
        model(
            prompt(1, 40, device=device), attention_mask=mask, past_key_values=HiSparseCache(model, SELECTOR)
        )


def test_a_decode_call_that_reads_ahead(model):
    device = str(model.device)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=r"later keys.*decode_rows=19"):
        model(
            prompt(1, 20, device=device), attention_mask=mask, past_key_values=HiSparseCache(model, SELECTOR)
        )
    cache = HiSparseCache(model, SELECTOR, decode_rows=19)
    model(prompt(1, 20, device=device), attention_mask=mask, past_key_values=cache)


def test_what_a_mask_was_checked_for_holds_for_that_call_alone(model):
    """The same tensor, handed to a cache of other settings, at another length, or edited."""
    device = str(model.device)
    ids = prompt(1, 20, device=device)
    every = torch.ones(1, 1, 20, 20, dtype=torch.bool, device=device)
    model(ids, attention_mask=every, past_key_values=HiSparseCache(model, SELECTOR, decode_rows=4))
    with pytest.raises(ValueError, match="later keys"):
        model(ids, attention_mask=every, past_key_values=HiSparseCache(model, SELECTOR, decode_rows=32))

    cache = HiSparseCache(model, Quest(32, 4, dense_layers=0))
    model(ids, past_key_values=cache)
    step = torch.zeros(1, 1, 1, 21, device=device)
    model(ids[:, :1], attention_mask=step, past_key_values=cache)
    with pytest.raises(ValueError, match=r"1, 21\].*\[batch, 1, 1, 22\]"):
        model(ids[:, :1], attention_mask=step, past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)
    step[..., :10] = -5.0
    with pytest.raises(ValueError, match="bias, -5"):
        model(ids[:, :1], attention_mask=step, past_key_values=cache)


def test_gradients_of_keys_and_values_alone(model):
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.3.self_attn.v_proj" in name)
    logits = model(
        prompt(1, 20, device=str(model.device)), past_key_values=HiSparseCache(model, SELECTOR)
    ).logits
    with pytest.raises(RuntimeError, match="no gradients flow"):
        logits.sum().backward()


def test_memory_refused_while_rows_are_repeated(model, monkeypatch):
    """Layers may be left with different rows: the cache says so, and a reset heals it."""
    cache = _prefilled(model)
    grow, calls = PinnedArea.grow, []

    def refuse_the_second(area: PinnedArea, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise MemoryError("refused")
        grow(area, size)

    monkeypatch.setattr(PinnedArea, "grow", refuse_the_second)
    with pytest.raises(MemoryError, match="refused"):
        cache.batch_repeat_interleave(2)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"did not finish.*reset\(\)"):
        model(prompt(2, 1, device=str(model.device)), past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


@pytest.mark.parametrize("reset", [False, True])
def test_no_memory_for_the_first_dense_layer(model, reset):
    """It holds nothing then, and what it holds can be asked for and used."""
    cache = HiSparseCache(model, SELECTOR)
    fails = mock.patch.object(cache.layers[0], "grow", side_effect=torch.OutOfMemoryError("none left"))
    with fails, pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        model(prompt(3, 300, device=str(model.device)), past_key_values=cache)
    assert "0 tokens" in repr(cache) and cache.memory().native_bytes == 0
    if reset:
        cache.reset()
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


def test_layers_that_were_initialized_early(model):
    cache = HiSparseCache(model, SELECTOR)
    cache.early_initialization(2, 2, 16, torch.float32, model.device)
    assert "0 tokens" in repr(cache) and cache.memory().native_bytes == 0
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=cache)
    _assert_unchanged(model, cache)


CHECKPOINTED = {
    "qwen3": (lambda: build("qwen3"), dict(selector=SELECTOR)),
    "v32": (lambda: dsa_models.build("v32"), {}),
    "glm_FSSF": (lambda: dsa_models.build("glm_FSSF"), {}),
    "two_groups": (lambda: msa_models.build("two_groups"), {}),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing(name, device):
    """Transformers then calls the layers without the cache: it would stay empty, or selections would be of nothing."""
    build_model, settings = CHECKPOINTED[name]
    model = build_model().to(device)
    cache, ids = HiSparseCache(model, **settings), prompt(2, 50, device=device)
    model.train()
    model.gradient_checkpointing_enable()
    for call in (model, model.model):
        with pytest.raises(ValueError, match=r"gradient checkpointing.*model\.eval\(\).*_disable\(\)"):
            call(ids, past_key_values=cache)
    model(ids, labels=ids, use_cache=False).loss.backward()
    try:  # without gradients: newer versions of transformers use the cache
        with torch.no_grad():
            model(ids, past_key_values=cache)
    except ValueError as error:
        assert "gradient checkpointing" in str(error)
    else:
        assert cache.get_seq_length() == 50
        cache.reset()
    for ends in (model.gradient_checkpointing_disable, model.eval):
        model.train()
        model.gradient_checkpointing_enable()
        ends()
        with torch.no_grad():
            model(ids, past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {50}
        cache.reset()
