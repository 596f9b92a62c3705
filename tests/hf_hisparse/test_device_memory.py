"""`device_memory`: never more than that, everything resident while it lasts, and the same answers."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from hf_hisparse import HiSparseCache, Quest, plan
from hf_hisparse.hot_buffer import HotBuffer
from hf_hisparse.limits import free_device_memory
from hf_hisparse.records import RecordLayout
from hf_hisparse.sizes import Sizes, whole_records, with_room
from tests.dsa_models import dsa_twins
from tests.models import prompt
from tests.msa_models import MSA_MODELS, msa_twins
from tests.oracle import quest_oracle

SELECTOR = Quest(32, 4)


def _least(model, selector, batch: int = 1, tokens: int = 1, may_host: bool = True) -> int:
    """Bytes of the smallest cache for so many tokens."""
    cache = HiSparseCache(model, selector)
    sizes = Sizes(model.config, cache._family, cache._settings, model.dtype)
    return sizes.smallest(batch, whole_records(cache._family, tokens), may_host).device_bytes


def _models(twins, device):
    return {
        "qwen3": (*twins("qwen3", device), SELECTOR),
        "qwen3_sliding": (*twins("qwen3_sliding", device), SELECTOR),
        "glm_FSSF": (*dsa_twins("glm_FSSF", device), None),
        "m3": (*msa_twins(next(iter(MSA_MODELS)), device), None),
    }


@pytest.mark.parametrize("name", ["qwen3", "qwen3_sliding", "glm_FSSF", "m3"])
@pytest.mark.parametrize("share", [1.0, 1.1, 1.6, 4.0])
def test_never_more_than_that(twins, device, name, share):
    """Prompts, turns, decode steps, more rows and fewer, another request: whatever fits stays within the limit."""
    _, model, selector = _models(twins, device)[name]
    limit = int(share * _least(model, selector, batch=2, tokens=1000))
    cache = HiSparseCache(model, selector, device_memory=limit, host_memory="64MiB")
    sizes = []

    def held() -> None:
        sizes.append(cache.memory().device_bytes)
        assert sizes[-1] <= limit

    with torch.no_grad():
        for tokens in (300, 1, 250, 20, 400, 1, 18):
            model(prompt(2, tokens, tokens, device), past_key_values=cache)
            held()
        for change in (
            lambda: cache.batch_repeat_interleave(3),
            lambda: cache.batch_select_indices(torch.tensor([1, 0])),
            lambda: cache.crop(-100),
        ):
            try:
                change()
            except MemoryError:
                assert share < 2
            except RuntimeError:
                assert name == "qwen3_sliding", "transformers' windows cannot be cropped"
            held()
        model(prompt(cache._batch, 5, 5, device), past_key_values=cache)
        held()
        cache.reset()
        for batch, tokens in ((1, 500), (4, 60), (1, 3)):
            model(prompt(batch, tokens, tokens, device), past_key_values=cache)
            held()
            cache.reset()
    assert max(sizes) > 0.8 * min(limit, 4 * limit / share)


def test_everything_stays_resident_while_there_is_room(twins, device):
    model = twins("qwen3", device).enabled
    cache = HiSparseCache(model, SELECTOR, device_memory="64MiB")
    with torch.no_grad():
        for tokens in (100, 900, 1, 1200, 1, 1):
            model(prompt(1, tokens, tokens, device), past_key_values=cache)
    assert cache.stats().selected > 0 and cache.stats().misses == 0
    assert cache.memory().buffer_bytes < 2 * cache.memory().host_bytes, "no more than there is to hold"


@pytest.mark.parametrize("limit_for", [1300, 2500])
def test_answers_are_those_of_the_oracle_while_buffers_shrink(twins, device, limit_for):
    native, model = twins("qwen3", device)
    texts = [prompt(2, length, seed=length, device=device) for length in (40, 1000, 32, 32, 1, 900, 32, 1, 1)]
    limit = _least(model, SELECTOR, 2, sum(text.shape[1] for text in texts), False) + limit_for * 100
    cache = HiSparseCache(model, SELECTOR, device_memory=limit, host_dense_layers=False, verify=True)
    buffers = []
    with torch.no_grad():
        with quest_oracle(native, 32, 4):
            own = DynamicCache(config=native.config)
            expected = [native(text, past_key_values=own).logits for text in texts]
        for text, logits in zip(texts, expected, strict=True):
            torch.testing.assert_close(model(text, past_key_values=cache).logits, logits, atol=1e-4, rtol=0)
            buffers.append(cache.hosted_layers[0].buffer.slot_records.shape[1])
    assert max(buffers) > buffers[-1], "they did not shrink"
    assert cache.stats().misses > 0


@pytest.mark.parametrize("limit", [1_200_000, 4_000_000], ids=["fewer slots", "more slots"])
def test_layers_that_follow_have_their_leaders_slots_after_a_reset(device, limit):
    """The same batch size again and a longer prompt: buffers are resized while they are empty."""
    native, model = dsa_twins("glm_FSSF", device)
    cache, own = HiSparseCache(model, device_memory=limit), DynamicCache(config=native.config)
    text = prompt(1, 3000, device=device)
    with torch.no_grad():
        model(prompt(1, 300, device=device), past_key_values=cache)
        before = cache.hosted_layers[0].buffer.data.shape[1]
        cache.reset()
        for tokens in (text, text[:, :1], text[:, 1:2]):
            expected = native(tokens, past_key_values=own).logits
            got = model(tokens, past_key_values=cache).logits
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    (slots,) = {layer.buffer.data.shape[1] for layer in cache.hosted_layers}
    assert slots != before, "they were not resized"
    assert cache.memory().device_bytes <= limit


def _moves(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "on the host from now on" in record.message]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_answers_are_those_of_the_oracle_when_dense_layers_move(twins, device, padded, caplog):
    """All on the GPU, then hot buffers shrink, then dense layers go to the host, then their share on the GPU shrinks."""
    native, model = twins("qwen3", device)
    lengths = (40, 300, 1, 900, 32, 1, 1, 1200, 40, 1, 3, 900, 1, 1)
    texts = [prompt(2, length, seed=length, device=device) for length in lengths]
    mask = torch.ones((2, sum(lengths)), dtype=torch.long, device=device)
    mask[1, : 77 * padded] = 0
    limit = _least(model, SELECTOR, 2, with_room(40), may_host=False) + 150_000
    cache = HiSparseCache(model, SELECTOR, device_memory=limit, verify=True)
    kept, total = [], 0
    with torch.no_grad(), quest_oracle(native, 32, 4):
        own = DynamicCache(config=native.config)
        for text in texts:
            total += text.shape[1]
            known = {"attention_mask": mask[:, :total]}
            expected = native(text, past_key_values=own, **known).logits
            got = model(text, past_key_values=cache, **known).logits
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            assert cache.memory().device_bytes <= limit
            sparse = cache.sparse_layers[0].buffer_records
            dense = {layer.buffer_records for layer in cache.hosted_layers if layer.dense}
            kept.append((sparse, *dense))
    assert len(kept[0]) == 1 and kept[0][0] > SELECTOR.top_k
    moved = next(i for i, each in enumerate(kept) if len(each) == 2)
    assert len(_moves(caplog)) == 1 and "(0, 1)" in _moves(caplog)[0]
    assert {each[0] for each in kept[moved:]} == {SELECTOR.top_k}
    shares = [each[1] for each in kept[moved:]]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1] > 0
    assert all(layer.misses > 0 for layer in cache.stats().layers), "nothing was read from the host"


def test_dense_layers_move_for_more_rows(twins, device, caplog):
    """As beams ask for them; what they answer is what the model with its own cache answers."""
    native, model = twins("qwen3", device)
    limit = _least(model, SELECTOR, 6, 1400) + 100_000
    cache, own = HiSparseCache(model, SELECTOR, device_memory=limit), DynamicCache(config=native.config)
    rows = torch.tensor([3, 3, 0, 5, 1, 2], device=device)
    with torch.no_grad(), quest_oracle(native, 32, 4):
        for run, held in ((native, own), (model, cache)):
            run(prompt(1, 300, device=device), past_key_values=held)
            held.batch_repeat_interleave(6)
        assert len(_moves(caplog)) == 1 and cache.memory().device_bytes <= limit
        for length in (1, 5, 40, 1):
            text = prompt(6, length, length, device)
            logits = [run(text, past_key_values=held).logits for run, held in ((native, own), (model, cache))]
            torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
            own.reorder_cache(rows)
            cache.reorder_cache(rows)


def test_dense_layers_that_may_not_move(twins, device):
    model = twins("qwen3", device).enabled
    least = _least(model, SELECTOR, may_host=False)
    with pytest.raises(ValueError, match=rf"\({least} bytes\)"):
        HiSparseCache(model, SELECTOR, device_memory=least - 1, host_dense_layers=False)
    cache = HiSparseCache(model, SELECTOR, device_memory=2 * least, host_dense_layers=False)
    with torch.no_grad(), pytest.raises(MemoryError, match="3000 tokens of 1 row need at least"):
        model(prompt(1, 3000, device=device), past_key_values=cache)
    HiSparseCache(model, SELECTOR, device_memory=least - 1)


def test_too_little_host_memory_for_dense_layers_changes_nothing(twins, device):
    """What the hosted layers need is there, what the dense ones would need is not."""
    model = twins("qwen3", device).enabled
    limit = _least(model, SELECTOR, 1, with_room(100), may_host=False)
    cache = HiSparseCache(model, SELECTOR, device_memory=limit, host_memory="2MiB")
    with torch.no_grad():
        model(prompt(1, 100, device=device), past_key_values=cache)
        before = cache.memory(), [type(layer) for layer in cache.layers]
        with pytest.raises(MemoryError, match="more host memory"):
            model(prompt(1, 3000, device=device), past_key_values=cache)
        assert before == (cache.memory(), [type(layer) for layer in cache.layers])
        model(prompt(1, 5, device=device), past_key_values=cache)


def test_a_moved_layer_serves_other_requests(twins, device):
    """They stay on the host, with all of it on the GPU as well where that fits."""
    native, model = twins("qwen3", device)
    cache = HiSparseCache(model, SELECTOR, device_memory=_least(model, SELECTOR, 1, 3000) + 50_000)
    with torch.no_grad(), quest_oracle(native, 32, 4):
        for batch, length in ((1, 2500), (3, 60), (1, 800)):
            own = DynamicCache(config=native.config)
            for tokens in (length, 1, 3):
                text = prompt(batch, tokens, tokens, device)
                expected = native(text, past_key_values=own).logits
                torch.testing.assert_close(
                    model(text, past_key_values=cache).logits, expected, atol=1e-4, rtol=0
                )
            cache.reset()
    assert sum(layer.dense for layer in cache.hosted_layers) == 2


def test_dsa_answers_while_buffers_shrink_and_grow(device):
    """The first layer of a group resizes for all, here in decode calls, as there is never room for more than the tokens."""
    native, model = dsa_twins("glm_FSSF", device)
    cache = HiSparseCache(model, device_memory=_least(model, None, 1, 320), verify=True)
    own, buffers = DynamicCache(config=native.config), []
    with torch.no_grad():
        for length in (200, 20, 1, 1, 30, 1, 9, 40, 1):
            text = prompt(1, length, length, device)
            expected = native(text, past_key_values=own).logits
            torch.testing.assert_close(model(text, past_key_values=cache).logits, expected, atol=1e-4, rtol=0)
            buffers.append(cache.hosted_layers[0].buffer.slot_records.shape[1])
    assert len(set(buffers)) > 3 and cache.stats().misses > 0
    for layer in cache.hosted_layers:
        assert layer.buffer.data.shape[1] == buffers[-1]


@pytest.mark.parametrize("slots", [2, 5, 9, 14])
def test_resize_keeps_the_most_recently_used(slots):
    """Each record that stays has its data, the order among those that stay is what it was."""
    layout = RecordLayout(1, 4, 0, torch.float32)
    buffer = HotBuffer(3, 9, layout, torch.device("cpu"))
    buffer.grow(20)
    records = torch.stack([torch.randperm(20)[:9] for _ in range(3)])
    buffer.fill(records, records[:, :, None].float().expand(-1, -1, 4))
    buffer.forget(15)  # leaves empty slots, not as many in each lane
    buffer._sort_order(buffer.recency.order().flip(1))

    def by_age() -> list[list[int]]:
        return [
            [record for record in row.tolist() if record >= 0]
            for row in buffer.slot_records.gather(1, buffer.recency.order().long())
        ]

    before = by_age()
    buffer.resize(slots)
    assert by_age() == [ages[-slots:] if len(ages) > slots else ages for ages in before]
    assert buffer.recency.order().sort(1).values.tolist() == [list(range(slots))] * 3
    for lane, ages in enumerate(by_age()):
        for record in range(20):
            slot = int(buffer.page_table[lane, record])
            assert (slot >= 0) == (record in ages)
            if slot >= 0:
                assert buffer.slot_records[lane, slot] == record and bool(
                    (buffer.data[lane, slot] == record).all()
                )


def test_below_the_minimum(model):
    least = _least(model, SELECTOR)
    with pytest.raises(
        ValueError, match=rf"device_memory={least - 1} is too little.*\({least} bytes\).*8 records"
    ):
        HiSparseCache(model, SELECTOR, device_memory=least - 1)
    HiSparseCache(model, SELECTOR, device_memory=least)


@pytest.mark.parametrize("size", ["lots", 0, "-1GiB", True])
def test_not_a_size(model, size):
    with pytest.raises(ValueError, match="device_memory="):
        HiSparseCache(model, SELECTOR, device_memory=size)


def test_either_a_size_or_a_buffer(model):
    with pytest.raises(ValueError, match=r"device_memory='6GiB' and device_buffer_tokens=64.*give one"):
        HiSparseCache(model, SELECTOR, device_memory="6GiB", device_buffer_tokens=64)


def test_no_trace_of_buffers_that_change(model, tmp_path):
    cache = HiSparseCache(model, SELECTOR, device_memory="2MiB")
    with pytest.raises(ValueError, match="give device_buffer_tokens"):
        cache.record_trace(tmp_path / "trace.npz")
    assert cache.trace is None


def test_too_little_for_a_turn_changes_nothing(twins, device):
    model = twins("qwen3", device).enabled
    cache = HiSparseCache(model, SELECTOR, device_memory=_least(model, SELECTOR, 2, 700))
    with torch.no_grad():
        model(prompt(2, 300, 0, device), past_key_values=cache)
        before = cache.memory()
        with pytest.raises(
            MemoryError, match=r"1100 tokens of 2 rows need at least .* device memory.*selector state"
        ):
            model(prompt(2, 800, 1, device), past_key_values=cache)
        for change in (
            lambda: cache.batch_repeat_interleave(7),
            lambda: cache.reorder_cache(torch.arange(2).repeat(7)),
        ):
            with pytest.raises(MemoryError, match=r"tokens of 14 rows need at least"):
                change()
        assert cache.memory() == before and cache.get_seq_length() == 300
        ours = model(prompt(2, 9, 1, device), past_key_values=cache).logits
        other = HiSparseCache(model, SELECTOR)
        model(prompt(2, 300, 0, device), past_key_values=other)
        assert torch.equal(ours, model(prompt(2, 9, 1, device), past_key_values=other).logits)


def test_auto(model):
    cache = HiSparseCache(model, SELECTOR, device_memory="auto")
    ids = prompt(1, 300, device=str(model.device))
    model.generate(ids, past_key_values=cache, max_new_tokens=5)
    assert cache.stats().misses == 0
    assert "device_memory=auto" in repr(cache)


def test_auto_keeps_to_the_share_of_this_process(monkeypatch):
    gib = 2**30
    for name, value in (
        ("mem_get_info", (60 * gib, 80 * gib)),
        ("memory_reserved", 10 * gib),
        ("memory_allocated", 7 * gib),
        ("get_per_process_memory_fraction", 0.25),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value, raising=False)
    device = torch.device("cuda", 0)
    assert free_device_memory(device) == 20 * gib - 7 * gib  # a quarter of 80, less what tensors hold
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    assert free_device_memory(device) == 60 * gib + 3 * gib  # what is free, and what torch holds unused


def _wide_model() -> Qwen3ForCausalLM:
    """Wide and long enough that the allocator's rounding does not matter: 8 KiB of KV per token."""
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=512,
        max_position_embeddings=2**17,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def _allocated() -> int:
    """Bytes in use on the GPU, without what the allocator leaves over of a block that it does not split (up to 1 MB each)."""
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # lets the allocator take back what other streams used
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("limit", ["60MiB", "110MiB", "200MiB", "600MiB"])
def test_the_allocator_agrees(limit):
    """With the limit at all times between calls, and with what was foreseen within 3%."""
    model = _wide_model()
    text = prompt(1, 40_000, device="cuda")
    with torch.no_grad():
        model(text[:, :3000], past_key_values=DynamicCache(config=model.config))  # libraries' workspaces
        before = _allocated()
        cache = HiSparseCache(model, Quest(512, 16), device_memory=limit, graphs=False)
        for start, stop in (
            (0, 20_000),
            (20_000, 20_001),
            (20_001, 30_000),
            (30_000, 30_020),
            (30_020, 40_000),
        ):
            model(text[:, start:stop], past_key_values=cache, logits_to_keep=1)
            held = cache.memory().device_bytes
            assert held <= int(limit[:-3]) * 2**20
            assert abs(_allocated() - before - held) <= 0.03 * held
        assert (limit == "60MiB") <= cache.hosted_layers[0].dense, "on the host"
        buffer = cache.sparse_layers[0].buffer_records * 16
        del cache
        cache = HiSparseCache(model, Quest(512, 16), device_buffer_tokens=buffer, graphs=False)
        model(text[:, :20_000], past_key_values=cache, logits_to_keep=1)
        planned = plan(
            model.config, Quest(512, 16), context=20_000, device_memory="8GiB", device_buffer_tokens=buffer
        )
        assert abs(_allocated() - before - planned.memory.device_bytes) <= 0.03 * planned.memory.device_bytes


def test_a_copy_has_a_limit_of_its_own(model):
    cache = HiSparseCache(model, SELECTOR, device_memory="2MiB")
    device = str(model.device)
    with torch.no_grad():
        model(prompt(1, 300, device=device), past_key_values=cache)
        other = copy.deepcopy(cache)
        logits = [model(prompt(1, 20, 1, device), past_key_values=each).logits for each in (cache, other)]
    assert torch.equal(*logits)


def test_other_sizes_than_the_configuration_says(model):
    model.config.num_key_value_heads = 1
    cache = HiSparseCache(model, SELECTOR, device_memory="2MiB")
    with pytest.raises(ValueError, match=r"device_memory counts on.*device_buffer_tokens"), torch.no_grad():
        model(prompt(1, 40, device=str(model.device)), past_key_values=cache)


def test_more_tokens_than_positions_are_warned_of_once(model, caplog):
    model.config.max_position_embeddings = 100
    cache = HiSparseCache(model, SELECTOR)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(4):
            model(prompt(1, 40, device=str(model.device)), past_key_values=cache)
    warnings = [record.getMessage() for record in caplog.records if record.name == "hf_hisparse.room"]
    assert (
        len(warnings) == 1
        and "120 tokens are more than the model's max_position_embeddings=100" in warnings[0]
    )


def test_the_limit_holds_after_a_call_that_failed(model):
    """Dense layers had grown for it before the hosted ones did."""
    limit, device = 3_000_000, str(model.device)
    cache = HiSparseCache(model, SELECTOR, device_memory=limit, host_dense_layers=False, graphs=False)
    with torch.no_grad():
        model(prompt(1, 200, device=device), past_key_values=cache)
        hook = model.model.layers[2].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt(1, 3500, device=device), past_key_values=cache)
        hook.remove()
        for tokens in (1, 1300, 700):
            model(prompt(1, tokens, device=device), past_key_values=cache)
            assert cache.memory().device_bytes <= limit
    assert cache.get_seq_length() == 2201
