"""`plan` says what will be, and says no where it should."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache, Qwen3Config

from hf_hisparse import HiSparseCache, Quest, plan
from hf_hisparse.__main__ import main
from hf_hisparse.limits import Call
from hf_hisparse.needs import empty_model
from hf_hisparse.planner import QUEST_MISSES, _miss_rate
from hf_hisparse.sizes import Buffers
from tests.dsa_models import dsa_twins
from tests.models import SUPPORTED, prompt

GIB = 2**30


def _config(layers: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        dtype=torch.bfloat16,
    )


CONFIG = _config(36)  # the shape of Qwen3-4B: 7.5 GiB of weights, 144 KiB of KV per token


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "v32", "glm_FSSF"])
@pytest.mark.parametrize("batch", [1, 3])
def test_figures_are_those_of_living_caches(twins, device, name, batch):
    native, model = twins(name, device) if name in SUPPORTED else dsa_twins(name, device)
    selector, buffer = (Quest(64, 8), 136) if name in SUPPORTED else (None, 70)
    ids = prompt(batch, 300, device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = HiSparseCache(model, selector, device_buffer_tokens=buffer)
    dynamic = DynamicCache(config=native.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        native(ids, past_key_values=dynamic)
    planned = plan(
        model.config,
        selector,
        context=300,
        batch=batch,
        device_memory="64GiB",
        device_buffer_tokens=buffer,
        dtype=model.dtype,
    )
    held = cache.memory()
    for figure, value in vars(planned.memory).items():
        # The mask of a model that selects by itself is kept for captured steps only: a byte per token.
        slack = batch * cache.capacity if figure == "table_bytes" and selector is None else 0
        assert 0 <= value - getattr(held, figure) <= slack, figure
    expected = sum(
        tensor.nbytes
        for layer in dynamic.layers
        for tensor in (layer.keys, layer.values, getattr(layer, "indexer_keys", None))
        if tensor is not None
    )
    assert 0 <= planned.caches[0].device.device_bytes - expected <= 8 * len(dynamic.layers), "a window's size"
    assert planned.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert planned.device_buffer_tokens == buffer


def _plan(context: int, batch: int = 1, device: str = "16GiB", host: str = "64GiB", **more):
    return plan(CONFIG, context=context, batch=batch, device_memory=device, host_memory=host, **more)


def test_use_it():
    planned = _plan(131072)
    dynamic, _, hisparse = planned.caches
    assert planned.use and planned.advice.startswith("Use HiSparse")
    assert f"device_buffer_tokens={planned.device_buffer_tokens}" in planned.advice
    assert f"prefill_chunk_size={hisparse.prefill_chunk}" in planned.advice
    assert not dynamic.fits and dynamic.needed > 24 * GIB
    assert hisparse.fits and hisparse.needed <= 16 * GIB
    assert planned.device_buffer_tokens % 16 == 0 and 2048 <= planned.device_buffer_tokens < 131072
    more = _plan(131072, device_buffer_tokens=planned.device_buffer_tokens + 16)
    assert more.memory.host_reserved_bytes < planned.memory.host_reserved_bytes, (
        "a larger one leaves no room to grow"
    )
    assert any("max_position_embeddings=40960" in note for note in planned.notes)


def test_the_advised_cache_takes_no_more_than_planned():
    """Where there is no room for growth a limit is advised: a cache would take it all the same."""
    roomy = _plan(131072)
    least = _plan(131072, device="14.4GiB")
    assert "device_buffer_tokens=" in roomy.advice and least.use
    assert f"device_memory={least.memory.device_bytes})" in least.advice


def test_dense_layers_go_to_the_host_where_the_memory_asks_for_it():
    """What is planned is what a cache with that limit decides for itself."""
    planned = _plan(131072, device="14.2GiB", bandwidth=50e9)
    assert planned.use and planned.device_buffer_tokens == 2048
    assert f"device_memory={planned.memory.device_bytes})" in planned.advice
    kept = planned.memory.native_bytes // (2 * 8 * 256 * 2)  # tokens of two layers' 8 heads, keys and values
    assert 0 < kept < 131072 and kept % 16 == 0
    assert planned.streamed == (131072 - kept) * 2 * 8 * 256 * 2
    assert planned.bytes_per_step == round(8 * 34 * 2048 * 512 * QUEST_MISSES[1.0]) + planned.streamed
    assert f"{planned.streamed / 1e6:.1f} MB per step are dense layers" in str(planned)
    cache = HiSparseCache(CONFIG, Quest(), device_memory=planned.memory.device_bytes)
    call = Call(1, 1, torch.bfloat16, torch.device("cpu"))
    capacity = planned.memory.host_reserved_bytes // (36 * 8 * 512)
    buffers = cache.room.limits.fitting(cache.memory(), call, capacity, "all", None)
    assert buffers == Buffers(128, kept // 16)
    assert _plan(131072).streamed == 0


@pytest.mark.parametrize(
    "wrong",
    [
        dict(prefill_chunk=-5),
        dict(prefill_chunk=0.5),
        dict(bandwidth=25),
        dict(bandwidth=float("nan")),
        dict(bandwidth=float("inf")),
        dict(misses={float("inf"): 0.1}),
        dict(device_buffer_tokens=0),
    ],
)
def test_settings_make_sense(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        _plan(131072, **wrong)


def test_do_not_use_it():
    planned = _plan(8192)
    assert not planned.use and planned.advice.startswith("Do not use HiSparse here: DynamicCache fits")
    assert planned.resident and planned.bytes_per_step == 0
    assert not planned.notes


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(context=131072, batch=8), "the GPU is short of .* with the smallest hot buffer, 128 records"),
        (dict(context=131072, host="8GiB"), "the host is short of 9.00 GiB"),
        (dict(context=1024, device="7GiB"), "the weights alone take 7.49 GiB"),
    ],
)
def test_it_cannot_fit(settings, reason):
    planned = _plan(**settings)
    assert not planned.use and planned.device_buffer_tokens == 0
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(planned.advice)
    assert planned.advice.startswith("It cannot fit")


def test_the_largest_fit_and_what_is_larger_does_not():
    config = _config(6)

    def small(context: int, batch: int):
        return plan(config, context=context, batch=batch, device_memory="8GiB", host_memory="16GiB")

    planned = small(30000, 2)
    for index in (0, 2):
        cache = planned.caches[index]
        assert small(30000, cache.largest_batch).caches[index].fits
        assert not small(30000, cache.largest_batch + 1).caches[index].fits
        assert small(cache.largest_context, 2).caches[index].fits
        assert not small(cache.largest_context + 1, 2).caches[index].fits
    assert planned.caches[-1].largest_context > 1.2 * planned.caches[0].largest_context


def test_the_default_curve_is_the_measured_one():
    rows = csv.DictReader(Path("eval/results/policies.csv").read_text().splitlines())
    measured = {float(row["buffer_selections"]): float(row["LRU"]) for row in rows if row["layer"] == "all"}
    assert {size: pytest.approx(measured[size], abs=5e-4) for size in QUEST_MISSES} == QUEST_MISSES


@pytest.mark.parametrize("model", ["minimax_m3_vl_text", "glm_moe_dsa", "qwen3"])
def test_in_a_process_that_has_loaded_no_model(model):
    """The kinds of cache layers that a model's file registers are there all the same."""
    sizes = {"num_hidden_layers": 4} | (
        {"layer_types": ["minimax_m3_sparse"] * 4} if "minimax" in model else {}
    )
    program = (
        "from transformers import AutoConfig; from hf_hisparse import plan\n"
        f"config = AutoConfig.for_model({model!r}, **{sizes!r})\n"
        "print(plan(config, context=4096, device_memory='24GiB', host_memory='1GiB', weights='1GiB').model)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(model)


@pytest.mark.parametrize(
    ("model", "reason"), [("gpt_oss", "sinks"), ("gemma2", "softcap"), ("deepseek_v4", "use DynamicCache")]
)
def test_models_that_the_cache_refuses_are_not_planned(model, reason):
    config = AutoConfig.for_model(model, num_hidden_layers=8)
    with pytest.raises(ValueError, match=reason):
        plan(config, context=4096, device_memory="24GiB", host_memory="1GiB")


def test_traffic():
    """Lanes x hosted layers x tokens read x bytes of a token, times the share that misses."""
    planned = _plan(100000, device_buffer_tokens=4096, bandwidth=1e9)
    read = 8 * 34 * 2048 * 2 * 128 * 2
    assert planned.bytes_per_step == round(read * QUEST_MISSES[2.0])
    assert f"{planned.bytes_per_step / 1e6:.2f} ms" in str(planned)
    assert _plan(100000, device_buffer_tokens=4096, misses=0.5).bytes_per_step == read // 2


def test_miss_rates_between_points():
    sizes = [0.5, 1, 1.7, 2, 3, 5, 8, 9]
    rates = [_miss_rate(QUEST_MISSES, size) for size in sizes]
    assert rates[0] == rates[1] == QUEST_MISSES[1.0] and rates[-2] == rates[-1] == QUEST_MISSES[8.0]
    assert rates[3] == QUEST_MISSES[2.0] and QUEST_MISSES[2.0] < rates[2] < QUEST_MISSES[1.5]
    assert all(fewer <= more for more, fewer in itertools.pairwise(rates))
    for wrong in (1.5, -0.1, {}, {0: 0.5}, float("nan"), "0.1", [0.1], {"a": 1}, {1: None}):
        with pytest.raises(ValueError, match="misses="):
            _miss_rate(wrong, 2)


def test_misses_that_a_cache_has_counted(twins):
    _, model = twins("qwen3", "cpu")
    cache = HiSparseCache(model, Quest(32, 4))
    sizes = dict(context=100_000, device_memory="700MiB")
    with torch.no_grad():
        model(prompt(1, 300), past_key_values=cache)
        with pytest.raises(ValueError, match=r"misses=cache\.stats\(\).*decoded nothing yet"):
            plan(model.config, Quest(32, 4), misses=cache.stats(), **sizes)
        model(prompt(1, 30), past_key_values=cache)
    planned = plan(model.config, Quest(32, 4), misses=cache.stats(), **sizes)
    assert not planned.resident and planned.miss_rate == 1 - cache.stats().hit_rate > 0


def test_a_configuration_that_names_no_model():
    """Its class says which one it is."""
    config = _config(2)
    for names in (None, [], ["Unheard"], ["torch"], ["AutoModel"]):
        config.architectures = names
        assert type(empty_model(config, torch.bfloat16)).__name__ == "Qwen3ForCausalLM"


def test_a_configuration_that_names_another_model():
    config = _config(3)
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(ValueError, match=r"architectures=\['LlamaForCausalLM'\].*LlamaConfig.*Qwen3Config"):
        plan(config, context=1000, device_memory="80GiB")
    assert plan(config, context=1000, device_memory="80GiB", weights="8GiB").weights == 8 * GIB


@pytest.mark.parametrize("wrong", [dict(context=0), dict(context=8, batch=-1), dict(context=8.0)])
def test_numbers_make_sense(wrong):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        _plan(**wrong)


def test_a_model_that_transformers_does_not_have():
    class Unknown(Qwen3Config):
        model_type = "unknown"

    config = Unknown(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"no model for the configuration of 'unknown'.*weights"):
        plan(config, context=9, device_memory="9GiB")
    assert plan(config, context=9, device_memory="9GiB", weights="2GiB").weights == 2 * GIB
    with pytest.raises(ValueError, match="'Qwen/Qwen3-8B' is no model's config"):
        plan("Qwen/Qwen3-8B", context=9, device_memory="9GiB")


def test_the_command_line(tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path)
    sizes = ["--context", "131072", "--batch", "2", "--device-memory", "24GiB", "--host-memory", "128GiB"]
    main(["plan", str(tmp_path), *sizes, "--misses", "1:0.5,2:0.25", "--bandwidth", "25"])
    printed = capsys.readouterr().out
    expected = plan(
        CONFIG,
        context=131072,
        batch=2,
        device_memory="24GiB",
        host_memory="128GiB",
        misses={1: 0.5, 2: 0.25},
        bandwidth=25e9,
    )
    assert printed == f"{expected}\n"
    for line in (
        "weights",
        "selector state",
        "GPU in all",
        "largest batch at 131072",
        "device_buffer_tokens=",
    ):
        assert line in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at-all"], "nowhere/at-all"),
        (["{config}", "--token-budget", "0"], "token_budget=0"),
        (["{config}", "--page-size", "7"], "page_size=7"),
        (["{config}", "--device-memory", "24GiB", "--misses", "inf:0.1"], r"misses=\{inf: 0\.1\}"),
        (["{config}", "--device-memory", "24GiB", "--bandwidth", "inf"], "bandwidth=inf"),
        (["{config}", "--device-memory", "lots"], "device_memory='lots' is not a size"),
        (
            ["{config}", "--device-memory", "9GiB", "--device-buffer-tokens", "100"],
            "device_buffer_tokens=100",
        ),
    ],
)
def test_the_command_line_says_what_is_wrong(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or it would try again and again
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(["plan", *(argument.format(config=tmp_path) for argument in arguments), "--context", "9000"])


def test_the_command_line_takes_a_point_of_a_curve_once(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "any", "--context", "9000", "--misses", "1:0.3,2:0.1,1.0:0.2"])
    assert "'1:0.3,2:0.1,1.0:0.2' gives a buffer size twice" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_its_size_must_be_given(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="give device_memory"):
        main(["plan", str(tmp_path), "--context", "9000"])
    with pytest.raises(SystemExit, match="--probe measures the link to a GPU"):
        main(["plan", str(tmp_path), "--context", "9000", "--device-memory", "24GiB", "--probe"])
