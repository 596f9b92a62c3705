"""The parts of transformers' cache interface that `generate` reads, and a selector of one's own."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Cache, DynamicCache

from hf_hisparse import HiSparseCache, LayerShape, Quest, Selector
from tests.models import build, prompt

SELECTOR = Quest(32, 4)
ALL = Quest(2048, 16)


def _prefilled(model, batch: int = 2, selector=SELECTOR, **settings) -> HiSparseCache:
    cache = HiSparseCache(model, selector, **settings)
    with torch.no_grad():
        model(prompt(batch, 300, device=str(model.device)), past_key_values=cache)
    return cache


def test_what_generate_asks(model):
    cache = HiSparseCache(model, SELECTOR)
    assert isinstance(cache, Cache)
    assert len(cache) == 4
    assert cache.get_seq_length() == 0
    assert not cache.is_compileable
    cache = _prefilled(model)
    assert cache.get_seq_length() == 300
    assert [cache.get_seq_length(layer) for layer in range(4)] == [300] * 4
    assert cache.get_mask_sizes(7, 2) == (307, 0)
    assert cache.is_croppable
    assert cache.is_sliding == [False] * 4


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_it_is_initialized_once_every_layer_is(model, dense_layers):
    """Where all layers are hosted too."""
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=dense_layers))
    assert not cache.is_initialized
    with torch.no_grad():
        model(prompt(2, 100, device=str(model.device)), past_key_values=cache)
    assert cache.is_initialized
    cache.reset()
    assert not cache.is_initialized


@pytest.mark.parametrize("number", [int, torch.tensor])
def test_crop_as_transformers_calls_it(model, number):
    cache = _prefilled(model)
    cache.crop(number(0))
    assert cache.get_seq_length() == 300
    cache.crop(number(-7))
    assert {layer.get_seq_length() for layer in cache.layers} == {293}
    if Version(transformers.__version__) < Version("5.20"):
        cache.crop(number(250))
        assert {layer.get_seq_length() for layer in cache.layers} == {250}
    else:
        with pytest.raises(ValueError, match=r"crop\(250\).*crop\(-250\)"):
            cache.crop(number(250))
        assert {layer.get_seq_length() for layer in cache.layers} == {293}


def test_crop_to_nothing_is_a_new_start(model):
    cache = _prefilled(model)
    cache.crop(-300)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    ids = prompt(2, 200, seed=3, device=str(model.device))
    texts = [
        model.generate(ids, past_key_values=each, do_sample=False, max_new_tokens=12)
        for each in (cache, HiSparseCache(model, SELECTOR))
    ]
    assert torch.equal(*texts)


def test_crop_to_nothing_and_another_batch_size(model):
    """Refused or right."""
    cache = _prefilled(model, batch=2)
    cache.crop(-300)
    ids = prompt(3, 200, seed=3, device=str(model.device))
    try:
        text = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=12)
    except ValueError as error:
        assert "batch size 3, but 2 is held" in str(error)
    else:
        fresh = HiSparseCache(model, SELECTOR)
        assert torch.equal(
            text, model.generate(ids, past_key_values=fresh, do_sample=False, max_new_tokens=12)
        )


def test_reset_is_a_new_start(model):
    """Padding, reordered rows, another dtype: nothing of the last request is left."""
    device = str(model.device)
    cache = HiSparseCache(model, SELECTOR)
    ids = prompt(3, 300, device=device)
    mask = torch.ones_like(ids)
    mask[1:, :100] = 0
    model.generate(ids, attention_mask=mask, past_key_values=cache, num_beams=2, max_new_tokens=8)
    cache.reset()
    assert cache.get_seq_length() == 0
    for one in (model, copy.deepcopy(model).to(torch.bfloat16)):
        texts = [
            one.generate(ids[:2], past_key_values=each, do_sample=False, max_new_tokens=12)
            for each in (cache, HiSparseCache(one, SELECTOR))
        ]
        assert torch.equal(*texts)
        cache.reset()


def test_copies_of_an_empty_cache(model):
    ids = prompt(1, 300, device=str(model.device))
    empty = HiSparseCache(model, SELECTOR)
    texts = [
        model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=12)
        for cache in (copy.deepcopy(empty), copy.deepcopy(empty), empty)
    ]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_a_copy_shares_no_memory(model):
    cache = _prefilled(model)
    twin = copy.deepcopy(cache)

    def addresses(cache: HiSparseCache) -> set[int]:
        layers = cache.hosted_layers
        tensors = [
            t for layer in layers for t in (layer.pool.records, layer.buffer.data, layer.buffer.page_table)
        ]
        return {tensor.data_ptr() for tensor in tensors}

    assert not addresses(cache) & addresses(twin)


@pytest.mark.parametrize("rows", [torch.tensor([1]), torch.tensor([1, 1, 0, 1]), torch.tensor([True, False])])
def test_rows_can_be_selected_in_every_way(model, rows):
    """Indices, repeated ones and more of them than there were rows, and a bool mask."""
    rows = rows.to(model.device)
    cache = _prefilled(model, verify=True)
    native = DynamicCache(config=model.config)
    whole = _prefilled(model, selector=ALL, verify=True)
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=native)
        for each in (cache, native, whole):
            each.batch_select_indices(rows)
        ids = prompt(len(prompt(2, 1)[rows.cpu()]), 1, seed=1, device=str(model.device))
        expected = model(ids, past_key_values=native).logits
        torch.testing.assert_close(model(ids, past_key_values=whole).logits, expected, atol=1e-4, rtol=0)
        assert model(ids, past_key_values=cache).logits.shape == expected.shape


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_a_mask_of_ones_own(model, additive):
    """A 4-D mask that hides keys from some queries only is honoured, in prefill and in decode."""
    device = str(model.device)
    generator = torch.Generator().manual_seed(0)
    total = 120
    allowed = torch.rand(2, 1, total, total, generator=generator) < 0.7
    allowed = (allowed | torch.eye(total, dtype=torch.bool)).tril().to(device)
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min) if additive else allowed
    ids = prompt(2, total, device=device)
    logits = []
    with torch.no_grad():
        for cache in (HiSparseCache(model, ALL), DynamicCache(config=model.config)):
            calls = [(0, 100), (100, 101), (101, 120)]
            parts = [
                model(ids[:, a:b], attention_mask=mask[:, :, a:b, :b], past_key_values=cache).logits
                for a, b in calls
            ]
            logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model, dtype):
    """Dense by budget: within rounding of the model's own cache, in every step."""
    model = model.to(dtype)
    ids = prompt(2, 300, device=str(model.device))
    logits = []
    with torch.no_grad():
        for cache in (HiSparseCache(model, ALL, verify=True), DynamicCache(config=model.config)):
            calls = [
                model(ids[:, a:b], past_key_values=cache).logits
                for a, b in ((0, 280), (280, 281), (281, 300))
            ]
            logits.append(torch.cat(calls, dim=1).float())
    error = (logits[0] - logits[1]).abs()
    assert error.max() < (0.3 if dtype == torch.bfloat16 else 0.05)
    assert error.mean() < (0.02 if dtype == torch.bfloat16 else 0.003)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sparse(model, dtype):
    """What slots hold is what the host holds, and the text does not depend on the buffer."""
    model = model.to(dtype)
    ids = prompt(2, 300, device=str(model.device))
    texts = [
        model.generate(
            ids,
            past_key_values=HiSparseCache(model, SELECTOR, device_buffer_tokens=buffer, verify=True),
            do_sample=False,
            max_new_tokens=12,
        )
        for buffer in (32, 1024)
    ]
    assert torch.equal(*texts)


@dataclass(frozen=True)
class Recent:
    """A selector of one's own: the newest pages, whatever the query."""

    page_size: int = 4
    top_k: int = 5
    dense_layers: int = 0

    def new_state(self, shape: LayerShape) -> RecentState:
        return RecentState(self, shape)


class RecentState:
    nbytes = 0

    def __init__(self, settings: Recent, shape: LayerShape) -> None:
        self.settings, self.lanes = settings, shape.lanes

    def grow(self, records):
        pass

    def extend(self, keys, start, valid):
        pass

    def append(self, keys, position, valid):
        pass

    def crop(self, tokens):
        pass

    def select(self, query, position):
        own = position // self.settings.page_size
        pages = own - torch.arange(self.settings.top_k, device=query.device)
        return pages.clamp(min=-1).expand(self.lanes, -1).contiguous()

    def rearrange(self, lanes):
        self.lanes = lanes.numel()

    def clone(self):
        return copy.copy(self)


@pytest.mark.parametrize("buffer", [20, 40])
def test_a_selector_of_ones_own(model, buffer):
    """It is `DynamicCache` under a mask that shows the newest five pages."""
    assert isinstance(Recent(), Selector)
    device = str(model.device)
    ids = prompt(2, 140, device=device)
    place = torch.arange(140, device=device)
    allowed = (place[:, None] // 4 - place // 4 < 5).tril()
    allowed[:120] = torch.ones_like(allowed[:120]).tril()  # prefill is dense
    native, ours = (
        DynamicCache(config=model.config),
        HiSparseCache(model, Recent(), device_buffer_tokens=buffer, verify=True),
    )
    with torch.no_grad():
        for a, b in ((0, 120), (120, 121), (121, 135), (135, 140)):
            mask = allowed[None, None, a:b, :b].expand(2, 1, -1, -1)
            expected = model(ids[:, a:b], attention_mask=mask, past_key_values=native).logits
            torch.testing.assert_close(
                model(ids[:, a:b], past_key_values=ours).logits, expected, atol=1e-4, rtol=0
            )
    assert ours.stats().misses == 0, "the newest pages are never fetched"


def test_a_crop_that_a_sliding_layer_refuses_changes_nothing(device):
    """Full attention comes first, and a window that has slid cannot go back."""
    sliding = build("qwen3_sliding").to(device)
    layers = [
        kind
        for kind in ("full_attention", "sliding_attention")
        for _ in range(sliding.config.num_hidden_layers // 2)
    ]
    config = copy.deepcopy(sliding.config)
    config.layer_types = layers
    model = type(sliding)(config).eval().to(device)
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=1))
    model.generate(prompt(1, 300, device=device), past_key_values=cache, max_new_tokens=3)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(RuntimeError):
        cache.crop(-5)
    assert [layer.get_seq_length() for layer in cache.layers] == lengths


def test_a_copy_of_a_reset_cache_shares_nothing(model):
    device = str(model.device)
    cache = _prefilled(model)
    cache.reset()
    twin = copy.deepcopy(cache)
    one, other, last = (prompt(2, 60, seed, device=device) for seed in (1, 2, 3))
    with torch.no_grad():
        model(one, past_key_values=cache)
        model(other, past_key_values=twin)
        fresh = HiSparseCache(model, SELECTOR)
        model(one, past_key_values=fresh)
        logits = [model(last[:, :1], past_key_values=each).logits for each in (cache, fresh)]
    assert torch.equal(*logits)


def test_cropped_to_nothing_it_takes_another_padded_batch(model):
    device = str(model.device)
    cache = HiSparseCache(model, SELECTOR)
    for batch in (1, 3, 2):
        ids = prompt(batch, 60, device=device)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
        cache.crop(-3)
        cache.crop(-57)


def test_additive_masks_hide_by_any_large_number(model):
    device = str(model.device)
    ids = prompt(2, 60, device=device)
    allowed = torch.ones(60, 60, dtype=torch.bool, device=device).tril()
    allowed[:, 5:20] &= torch.eye(60, dtype=torch.bool, device=device)[:, 5:20]
    logits = []
    for lowest in (-1e9, torch.finfo(torch.float32).min, float("-inf")):
        mask = torch.zeros(1, 1, 60, 60, device=device).masked_fill(~allowed, lowest)
        cache = HiSparseCache(model, ALL)
        with torch.no_grad():
            model(ids[:, :50], attention_mask=mask[:, :, :50, :50], past_key_values=cache)
            logits.append(
                model(ids[:, 50:], attention_mask=mask[:, :, 50:].clone(), past_key_values=cache).logits
            )
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_rows_can_be_reordered_into_fewer(model):
    device = str(model.device)
    cache = _prefilled(model, batch=3)
    cache.reorder_cache(torch.tensor([2, 0], device=device))
    with torch.no_grad():
        model(prompt(2, 3, device=device), past_key_values=cache)
    with pytest.raises(ValueError, match="keeps none of 2 rows"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match=r"batch_repeat_interleave\(0\) leaves no row"):
        cache.batch_repeat_interleave(0)
    cache.batch_select_indices([1])
    with torch.no_grad():
        model(prompt(1, 3, device=device), past_key_values=cache)
