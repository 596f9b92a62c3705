"""`HiSparseCache` answers what the same model and selector answer with everything resident, in all of `generate`.

And with a budget that covers the history, what the model answers with its own `DynamicCache`.
"""

from __future__ import annotations

import pytest
import torch

from hf_hisparse import hosted_layer
from tests.generate.parity import TOLERANCE, Settings, assert_parity
from tests.generate.scenarios import CUT_TOKENS, CUTS, LONG, SCENARIOS, Session
from tests.models import SUPPORTED

ALL = 1024  # tokens: no history of a scenario is longer
ALTERNATING = {"qwen3_sliding", "gemma3"}  # half the layers are native anyway


def _dense_layers(name: str) -> int:
    return 0 if name in ALTERNATING else 2


@pytest.mark.parametrize("buffer", [32, 64, 128, ALL])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_at_every_buffer(twins, device, scenario, buffer):
    caches = assert_parity(twins("qwen3", device), scenario, Settings(buffer=buffer))
    stats = caches[0].stats()
    if buffer == ALL:
        assert stats.misses == 0, "everything is resident"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_budget_over_the_history_is_dense_attention(twins, device, scenario):
    assert_parity(twins("qwen3", device), scenario, Settings(budget=ALL, buffer=ALL), dense=True)


@pytest.mark.parametrize("scenario", ["greedy", "left_padded", "beams", "turns", "chunked_prefill"])
@pytest.mark.parametrize("name", [name for name in SUPPORTED if name != "qwen3"])
def test_every_family(twins, device, name, scenario):
    settings = Settings(dense_layers=_dense_layers(name), buffer=40)
    assert_parity(twins(name, device), scenario, settings)


@pytest.mark.parametrize(
    "scenario", ["prompt_lookup", "shared_prefix", "repeat_and_select", "reorder", "reset_and_reuse", "holes"]
)
@pytest.mark.parametrize("name", sorted(ALTERNATING))
def test_native_sliding_layers_go_along(twins, device, name, scenario):
    assert_parity(twins(name, device), scenario, Settings(dense_layers=0, buffer=40))


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_dense(twins, device, name):
    settings = Settings(budget=ALL, page_size=16, dense_layers=_dense_layers(name), buffer=ALL)
    assert_parity(twins(name, device), "left_padded", settings, dense=True)


@pytest.mark.parametrize("scenario", ["greedy", "left_padded", "beams", "crop", "cuts"])
@pytest.mark.parametrize(
    ("budget", "page_size", "buffer"),
    [(64, 8, 64), (64, 16, 80), (48, 16, 96), (16, 16, 16), (5, 1, 7), (21, 7, 28)],
    ids=lambda tokens: str(tokens),
)
def test_every_page_size(twins, device, budget, page_size, buffer, scenario):
    """One page alone, pages of one token, sizes that are no powers of two."""
    assert_parity(twins("qwen3", device), scenario, Settings(budget, page_size, buffer=buffer))


@pytest.mark.parametrize("dense_layers", [0, 1, 3])
def test_any_number_of_dense_layers(twins, device, dense_layers):
    assert_parity(twins("qwen3", device), "left_padded", Settings(dense_layers=dense_layers, buffer=32))


@pytest.mark.parametrize("buffer", [32, 256])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_dense_layers_on_the_host(twins, device, scenario, buffer):
    """A small part of them on the GPU, and half."""
    name = "llama" if scenario == "return_sequences" else "qwen3"  # Qwen3 nearly ties there
    settings = Settings(buffer=buffer, host_dense_layers=True, verify=buffer == 256)
    caches = assert_parity(twins(name, device), scenario, settings)
    for cache in caches:
        assert [layer.dense for layer in cache.hosted_layers] == [True, True, False, False]


@pytest.mark.parametrize(("dense_layers", "buffer"), [(1, 32), (3, 1024)])
def test_any_number_of_dense_layers_on_the_host(twins, device, dense_layers, buffer):
    settings = Settings(dense_layers=dense_layers, buffer=buffer, host_dense_layers=True)
    assert_parity(twins("qwen3", device), "left_padded", settings)


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3"])
def test_dense_layers_on_the_host_in_other_families(twins, device, name):
    settings = Settings(dense_layers=2, buffer=40, host_dense_layers=True)
    assert_parity(twins(name, device), "turns", settings)


@pytest.mark.parametrize("scenario", ["greedy", "assisted", "sparse_prefill", "cuts"])
@pytest.mark.parametrize("decode_rows", [1, 8, 128])
def test_any_bound_between_decode_and_prefill(twins, device, decode_rows, scenario):
    assert_parity(twins("qwen3", device), scenario, Settings(decode_rows=decode_rows, buffer=48))


@pytest.mark.parametrize(
    "scenario",
    ["left_padded", "beams", "assisted", "turns", "crop", "copy_while_decoding", "repeat_and_select"],
)
def test_slots_hold_what_the_host_holds(twins, device, scenario):
    """`verify=True` compares every step, and changes no answer."""
    assert_parity(twins("qwen3", device), scenario, Settings(buffer=40, verify=True))


@pytest.mark.parametrize("scenario", ["left_padded", "beams", "turns", "crop"])
def test_attention_that_reads_the_host_itself(twins, device, monkeypatch, scenario):
    """As with many lanes, more than the models of these tests have."""
    monkeypatch.setattr(hosted_layer, "FEW_LANES", 0)
    caches = assert_parity(twins("qwen3", device), scenario, Settings(buffer=40, verify=True))
    assert caches[0].stats().misses > 0


def test_the_default_buffer_is_twice_the_budget(twins, device):
    (cache,) = assert_parity(twins("qwen3", device), "greedy", Settings())
    records = 2 * 32 // 4  # pages
    record_bytes = 4 * 16 * 2 * 4  # tokens, channels, K and V, fp32
    lanes, layers = 2, 2
    assert cache.memory().buffer_bytes == lanes * layers * records * record_bytes


def test_small_buffers_miss_and_large_ones_hit(twins, device):
    """Every cache answered the same; only the traffic falls with the buffer."""
    rates = []
    for buffer in (32, 64, 128, 2 * LONG):
        (cache,) = assert_parity(twins("qwen3", device), "greedy_batch", Settings(buffer=buffer))
        rates.append(cache.stats().hit_rate)
    assert rates == sorted(rates)
    assert rates[0] < 0.9 and rates[-1] == 1.0


def test_the_buffer_changes_no_bit(twins, device):
    """The order of the attention sums follows the selection, not the slots."""
    model = twins("qwen3", device).enabled
    logits = []
    for buffer in (32, 36, 64, ALL):
        settings = Settings(buffer=buffer)
        session = Session(model, lambda settings=settings: settings.cache(model))
        SCENARIOS["left_padded"](session)
        logits.append(session.logits[0])
    for other in logits[1:]:
        assert torch.equal(logits[0], other)


def test_cuts_do_not_change_what_is_read(twins, device):
    """One row a call or 32: the same pages, so the same logits (each cut's parity with the oracle is above)."""
    model = twins("qwen3", device).enabled
    session = Session(model, lambda: Settings(buffer=40).cache(model))
    SCENARIOS["cuts"](session)
    calls = iter(session.logits[1:])  # after the prefill
    whole = [torch.cat([next(calls) for _ in range(0, CUT_TOKENS, rows)]) for rows in CUTS]
    for other in whole[1:]:
        torch.testing.assert_close(other, whole[0], atol=TOLERANCE, rtol=0)
