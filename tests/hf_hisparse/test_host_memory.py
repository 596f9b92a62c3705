"""Host memory: refused before anything is allocated, grown without losing what it holds."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest
from tests.models import prompt
from tests.oracle import quest_oracle

SELECTOR = Quest(32, 4)
MIB = 2**20


def test_too_little_for_the_prompt(model):
    cache = HiSparseCache(model, SELECTOR, host_memory="1MiB")
    ids = prompt(8, 2000, device=str(model.device))
    # 8 rows x 2 KV heads x 2000 tokens x 16 channels x K and V x 4 bytes x 2 layers
    asked_at_least = 8 * 2 * 2000 * 16 * 2 * 4 * 2
    with pytest.raises(MemoryError) as error:
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    message = str(error.value)
    assert "2000 tokens of 8 rows" in message
    assert "host_memory=1.00 MiB" in message
    assert "lower the batch or the context" in message
    asked = float(message.split(" need ")[1].split(" MiB")[0]) * MIB
    assert 0.99 * asked_at_least <= asked <= 2 * asked_at_least, "rounded in the message"
    assert cache.memory().host_reserved_bytes == 0
    assert cache.get_seq_length() == 0
    model.generate(ids[:1, :50], past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize("limit", ["6MiB", "9MiB"])
def test_no_more_is_held_than_allowed(model, limit):
    cache = HiSparseCache(model, SELECTOR, host_memory=limit)
    with pytest.raises(MemoryError), torch.no_grad():
        for seed in range(12):  # 20 MB in all
            model(prompt(8, 400, seed, device=str(model.device)), past_key_values=cache)
    memory = cache.memory()
    assert 0 < memory.host_bytes <= memory.host_reserved_bytes <= int(limit[:-3]) * MIB


def test_too_little_for_the_next_turn(model):
    """The cache keeps what it has, and goes on with less."""
    device = str(model.device)
    cache = HiSparseCache(model, SELECTOR, host_memory="8MiB")
    with torch.no_grad():
        model(prompt(8, 300, device=device), past_key_values=cache)
        with pytest.raises(MemoryError, match=r"lower the batch or the context"):
            model(prompt(8, 2500, device=device), past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {300}
        ours = model(prompt(8, 9, seed=1, device=device), past_key_values=cache).logits
        fresh = HiSparseCache(model, SELECTOR)
        model(prompt(8, 300, device=device), past_key_values=fresh)
        assert torch.equal(ours, model(prompt(8, 9, seed=1, device=device), past_key_values=fresh).logits)


MORE_ROWS = {
    "repeat": lambda cache, times: cache.batch_repeat_interleave(times),
    "reorder": lambda cache, times: cache.reorder_cache(torch.arange(2).repeat_interleave(times)),
    "select": lambda cache, times: cache.batch_select_indices(torch.arange(2).repeat_interleave(times)),
}


@pytest.mark.parametrize("change", MORE_ROWS)
def test_too_little_for_more_rows(model, change):
    """Nothing has changed then; and what is allowed is never exceeded."""
    device = str(model.device)
    free = HiSparseCache(model, SELECTOR)
    with torch.no_grad():
        model(prompt(2, 900, device=device), past_key_values=free)
        held = free.memory().host_reserved_bytes  # of 2 layers
        # Three times as many rows, and one layer's old memory beside the new.
        enough = HiSparseCache(model, SELECTOR, host_memory=held * 3 + held // 2)
        little = HiSparseCache(model, SELECTOR, host_memory=held * 3 + held // 2 - 5 * 4096)
        for cache in (enough, little):
            model(prompt(2, 900, device=device), past_key_values=cache)
        with pytest.raises(MemoryError, match=r"tokens of 6 rows need .* more host memory"):
            MORE_ROWS[change](little, 3)
        assert little.memory() == free.memory()
        assert {layer.get_seq_length() for layer in little.layers} == {900}
        MORE_ROWS[change](enough, 3)
        assert enough.memory().host_reserved_bytes == pytest.approx(3 * held, abs=5 * 4096)
        MORE_ROWS[change](free, 3)
        step = prompt(6, 1, device=device)
        assert torch.equal(
            model(step, past_key_values=enough).logits, model(step, past_key_values=free).logits
        )
        model(prompt(2, 1, device=device), past_key_values=copy.deepcopy(little))
        model(prompt(2, 1, device=device), past_key_values=little)
        # Fewer rows and then as many as there were take nothing new.
        little.batch_select_indices(torch.tensor([1]))
        little.reorder_cache(torch.tensor([0, 0]))


def test_growth_keeps_what_is_held(twins, device):
    """The history outgrows its first reservation in a prefill and in a decode call, a padded row among them."""
    native, model = twins("qwen3", device)
    texts = [prompt(2, length, seed=length, device=device) for length in (40, 1010, 32, 32, 900, 32, 400, 7)]
    mask = torch.ones(2, sum(text.shape[1] for text in texts), dtype=torch.long, device=device)
    mask[1, :25] = 0

    def run(model, cache):
        logits, seen, reserved = [], 0, []
        for text in texts:
            seen += text.shape[1]
            positions = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -text.shape[1] :]
            output = model(text, attention_mask=mask[:, :seen], position_ids=positions, past_key_values=cache)
            logits.append(output.logits)
            if isinstance(cache, HiSparseCache):
                reserved.append(cache.hosted_layers[0].buffer.page_table.shape[1])
        return logits, reserved

    with torch.no_grad():
        with quest_oracle(native, 32, 4):
            expected, _ = run(native, DynamicCache(config=native.config))
        ours, capacities = run(model, HiSparseCache(model, SELECTOR, device_buffer_tokens=40, verify=True))
    assert len(set(capacities)) >= 3, "it did not grow"
    for one, other in zip(ours, expected, strict=True):
        real = slice(25, None) if one is ours[0] else slice(None)  # what padding answers is nobody's concern
        torch.testing.assert_close(one[:, real], other[:, real], atol=1e-4, rtol=0)


def test_memory_is_used_again(model):
    """Neither `reset` nor a new request takes more."""
    cache = HiSparseCache(model, SELECTOR)
    held = []
    for batch in (2, 1, 2, 2):
        model.generate(prompt(batch, 400, device=str(model.device)), past_key_values=cache, max_new_tokens=4)
        held.append(cache.memory().host_reserved_bytes)
        cache.reset()
    assert len(set(held)) == 1
    assert cache.memory().host_bytes == 0
