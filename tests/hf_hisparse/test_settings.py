"""Settings that do not fit: one error each, with the value, what is allowed, and what to do."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from transformers import AutoConfig, DeepseekV3Config, Qwen3Config

from hf_hisparse import HiSparseCache, Quest, plan

CONFIG = Qwen3Config(num_hidden_layers=4)


@pytest.mark.parametrize("value", [0, -16, 2.5, True, None, "64"])
@pytest.mark.parametrize("name", ["token_budget", "page_size", "dense_layers"])
def test_quest_settings_are_positive_whole_numbers(name, value):
    if name == "dense_layers" and value == 0:
        value = -1  # 0 is fine
    with pytest.raises(ValueError, match=f"{name}={value!r}".replace(".", r"\.")):
        Quest(**{name: value})


def test_the_budget_is_whole_pages():
    with pytest.raises(ValueError, match=r"token_budget=100 .*page_size=16.*96.*112"):
        Quest(token_budget=100, page_size=16)


def test_the_budget_is_at_least_a_page():
    with pytest.raises(ValueError, match=r"token_budget=8 .*page_size=16.*take 16\b"):
        Quest(token_budget=8, page_size=16)


@pytest.mark.parametrize(
    ("tokens", "advice"),
    [(56, 64), (0, 64), (-8, 64), (63, 64), (65, 72), (64.0, 128), ("64", 128), (True, 64)],
)
def test_the_buffer_holds_the_budget_in_whole_pages(tokens, advice):
    with pytest.raises(
        ValueError, match=rf"device_buffer_tokens={tokens!r}, .*page size 8.*64 tokens.*{advice}"
    ):
        HiSparseCache(CONFIG, Quest(64, 8), device_buffer_tokens=tokens)


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, None, "8"])
def test_decode_rows_is_a_positive_whole_number(rows):
    with pytest.raises(ValueError, match=rf"decode_rows={rows!r}".replace(".", r"\.")):
        HiSparseCache(CONFIG, Quest(64, 8), decode_rows=rows)


@pytest.mark.parametrize("size", ["lots", "5 XB", "", "-1GiB", 0, -5, "0GB", 1.5e9, True])
def test_host_memory_is_a_size(size):
    if size == 1.5e9:
        HiSparseCache(CONFIG, Quest(64, 8), host_memory=size)  # a number of bytes, if not a whole one
        return
    with pytest.raises(ValueError, match=re.escape(f"host_memory={size!r}") + ".*GiB"):
        HiSparseCache(CONFIG, Quest(64, 8), host_memory=size)


@pytest.mark.parametrize("size", [2**30, "1GiB", "1 GiB", "1.5GB", "500MB", "1TiB"])
def test_sizes_as_people_write_them(size):
    HiSparseCache(CONFIG, Quest(64, 8), host_memory=size)


@pytest.mark.parametrize("selector", [None, "quest", Quest, 2048])
def test_a_selector_is_one(selector):
    with pytest.raises(ValueError, match=r"selector=.*Quest\("):
        HiSparseCache(CONFIG, selector)


def test_some_layer_is_hosted():
    with pytest.raises(ValueError, match=r"dense_layers=4.*lower dense_layers"):
        HiSparseCache(CONFIG, Quest(64, 8, dense_layers=4))


def test_sliding_layers_alone_cannot_be_hosted():
    kinds = ["sliding_attention"] * 4
    config = Qwen3Config(num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=48)
    with pytest.raises(
        ValueError, match=r"none of which is full attention, the only kind.*use DynamicCache"
    ) as refused:
        HiSparseCache(config, Quest(64, 8))
    assert "lower dense_layers" not in str(refused.value)


ENCODERS = {
    "a vision model": ("vit", {}),
    "text and images side by side": ("clip", {}),
    "a text encoder": ("bert", {}),
    "one that has no other form": ("distilbert", {}),
    "half of an encoder-decoder": ("t5", dict(is_encoder_decoder=False)),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_refused(name):
    kind, settings = ENCODERS[name]
    config = AutoConfig.for_model(kind, **settings)
    for use in (
        HiSparseCache,
        lambda config, selector: plan(config, selector, context=900, device_memory="24GiB"),
    ):
        with pytest.raises(ValueError, match=f"'{kind}' is an encoder.*leave the cache out"):
            use(config, Quest(64, 8))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", dict(is_decoder=True)),
        ("gpt_neox", {}),
        ("llava", {}),
        ("qwen2_5_vl", {}),
        ("gemma3", {}),
        ("gpt2", {}),
        ("qwen2_audio", {}),
    ],
)
def test_decoders_are_not_taken_for_encoders(kind, settings):
    """Whether or not they call themselves decoders, with a vision tower or without."""
    HiSparseCache(AutoConfig.for_model(kind, **settings), Quest(64, 8, dense_layers=0))


def test_a_model_that_peft_has_wrapped():
    wrapped = mock.Mock(spec=["get_base_model"])
    with pytest.raises(ValueError, match=r"a Mock is neither.*pass what it wraps, model\.get_base_model\(\)"):
        HiSparseCache(wrapped, Quest())
    with pytest.raises(ValueError, match=r"needs the model.*model\.get_base_model\(\)"):
        HiSparseCache.load("nowhere", wrapped)


def test_latents_need_a_selection_of_the_models_own():
    with pytest.raises(ValueError, match=r"'deepseek_v3' caches latents .*use DynamicCache"):
        HiSparseCache(DeepseekV3Config(num_hidden_layers=4), Quest(64, 8))


def test_the_model_is_a_model():
    with pytest.raises((TypeError, ValueError), match=r"Qwen/Qwen3-8B.*(model|config)"):
        HiSparseCache("Qwen/Qwen3-8B", Quest())


def test_settings_can_be_read_off():
    cache = HiSparseCache(CONFIG, Quest(64, 8))
    for part in (
        "token_budget=64",
        "page_size=8",
        "dense_layers=2",
        "device_buffer_tokens=128",
        "decode_rows=32",
    ):
        assert part in repr(cache)
    assert "2 hosted and 2 native layers" in repr(cache)
    assert "0 tokens" in repr(cache)


def test_dense_layers_on_the_host_can_be_read_off():
    cache = HiSparseCache(CONFIG, Quest(64, 8), host_dense_layers=True)
    assert "4 hosted (2 of them dense, each with 16 records per lane on the GPU) and 0 native layers" in repr(
        cache
    )


@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_dense_layers_are_on_the_host_or_not(value):
    with pytest.raises(ValueError, match=f"host_dense_layers={value!r}, must be True, False or None"):
        HiSparseCache(CONFIG, Quest(), host_dense_layers=value)


def test_dense_layers_that_go_to_the_host_must_exist():
    with pytest.raises(ValueError, match="host_dense_layers=True, but there is no dense layer"):
        HiSparseCache(CONFIG, Quest(dense_layers=0), host_dense_layers=True)
    HiSparseCache(CONFIG, Quest(dense_layers=0), host_dense_layers=False)


@pytest.mark.parametrize("name", ["verify", "graphs", "prefetch"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}, must be True or False"):
        HiSparseCache(CONFIG, Quest(), **{name: value})
