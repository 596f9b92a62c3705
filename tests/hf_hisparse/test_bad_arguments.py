"""What a user may hand to a cache by mistake: one clear error, and the cache is as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_hisparse import HiSparseCache, Quest
from tests.models import prompt

SELECTOR = Quest(32, 4)


def _prefilled(model) -> HiSparseCache:
    cache = HiSparseCache(model, SELECTOR)
    with torch.no_grad():
        model(prompt(2, 300, device=str(model.device)), past_key_values=cache)
    return cache


MISTAKES = {
    "a beam that is not there": (
        lambda cache: cache.reorder_cache(torch.tensor([0, 2])),
        "names row 2, but 2",
    ),
    "a negative beam": (lambda cache: cache.reorder_cache(torch.tensor([-1, 0])), "names row -1"),
    "beams as floats": (lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0])), r"torch\.float32"),
    "beams as bools": (lambda cache: cache.reorder_cache(torch.tensor([True, False])), r"torch\.bool"),
    "beams as a list": (lambda cache: cache.reorder_cache([0, 1]), "is list, must be a tensor"),
    "beams of two dimensions": (lambda cache: cache.reorder_cache(torch.tensor([[0, 1]])), r"\[1, 2\]"),
    "no beams": (lambda cache: cache.reorder_cache(torch.tensor([], dtype=torch.long)), r"is \[0\]"),
    "a row that is not there": (
        lambda cache: cache.batch_select_indices(torch.tensor([2])),
        "no index of 2 rows",
    ),
    "rows as floats": (lambda cache: cache.batch_select_indices(torch.tensor([1.0])), "no index of 2 rows"),
    "rows as a word": (lambda cache: cache.batch_select_indices("all"), "'all' is no index"),
    "a row without a dimension": (lambda cache: cache.batch_select_indices(1), "must be of one dimension"),
    "a mask of other rows": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        "no index of 2 rows",
    ),
    "crop by a word": (lambda cache: cache.crop("-1"), r"crop\('-1'\): must be a whole number"),
    "crop by a fraction": (lambda cache: cache.crop(-1.7), r"crop\(-1\.7\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_nothing_is_changed(model, mistake):
    call, message = MISTAKES[mistake]
    cache = _prefilled(model)
    with pytest.raises(ValueError, match=message):
        call(cache)
    step = prompt(2, 1, device=str(model.device))
    with torch.no_grad():
        ours = model(step, past_key_values=cache).logits
        assert torch.equal(ours, model(step, past_key_values=_prefilled(model)).logits)


def test_buffers_that_no_memory_holds(model):
    cache = _prefilled(model)
    with pytest.raises(MemoryError, match=r"resize_buffers: 1000000000000 records.*is free: give fewer"):
        cache.resize_buffers(4 * 10**12)
    step = prompt(2, 1, device=str(model.device))
    with torch.no_grad():
        ours = model(step, past_key_values=cache).logits
        assert torch.equal(ours, model(step, past_key_values=_prefilled(model)).logits)
    cache.resize_buffers(64)


def test_a_history_of_something_else(model):
    cache = HiSparseCache(model, SELECTOR)
    with pytest.raises(ValueError, match=r"layer 0 is of type int, must be a hf_hisparse\.LayerHistory"):
        cache.put_history([1, 2, 3])
    assert cache.get_seq_length() == 0


def test_a_selector_of_something_else(model, tmp_path):
    _prefilled(model).save(tmp_path / "prefix")
    for selector in ("quest", Quest):
        with pytest.raises(ValueError, match=r"selector=.*does not implement hf_hisparse\.Selector"):
            HiSparseCache.load(tmp_path / "prefix", model, selector)


def test_a_layer_is_not_copied_alone(model):
    cache = _prefilled(model)
    with pytest.raises(TypeError, match=r"layer 2:.*copy\.deepcopy\(cache\)"):
        copy.deepcopy(cache.layers[2])


CLOSED = {
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-1),
    "deepcopy": copy.deepcopy,
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "save": lambda cache: cache.save("nowhere"),
    "resize_buffers": lambda cache: cache.resize_buffers(64),
    "put_history": lambda cache: cache.put_history([]),
}


def test_a_closed_cache_always_says_so(model):
    cache = _prefilled(model)
    cache.close()
    for _ in range(2):
        for name, use in CLOSED.items():
            with pytest.raises(RuntimeError, match="is closed: build a new one"):
                use(cache)
            assert repr(cache) == "HiSparseCache(closed)", name
