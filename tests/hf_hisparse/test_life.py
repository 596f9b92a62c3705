"""Memory comes when it is needed and goes when it is not."""

from __future__ import annotations

import copy
import gc
import mmap
import weakref
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from hf_hisparse import HiSparseCache, Quest, host_memory
from hf_hisparse.host_memory import PinnedArea, touch
from tests.dsa_models import dsa_twins
from tests.models import build, prompt

SELECTOR = Quest(32, 4)
MIB = 2**20


def _resident_memory() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("populates", [True, False])
def test_touch_takes_memory(monkeypatch, populates):
    """With and without the system call that newer kernels have; several threads, odd sizes."""
    if not populates:
        monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 10**6)
    size = 3 * 2**26 + 4096
    area = mmap.mmap(-1, size)
    content = torch.frombuffer(area, dtype=torch.uint8)
    before = _resident_memory()
    touch(content.data_ptr(), size)
    assert _resident_memory() - before > 0.9 * size
    assert not content.any()


def test_touch_touches_nothing_else():
    content = torch.frombuffer(mmap.mmap(-1, 4 * 4096), dtype=torch.uint8).fill_(7)
    touch(content.data_ptr() + 4096, 4096)
    assert (content[:4096] == 7).all() and (content[8192:] == 7).all()


@pytest.mark.parametrize("how", ["close", "del"])
def test_pinned_memory_is_given_back(driver, how):
    area = PinnedArea(256 * MIB, pin=True)
    before = _resident_memory()
    for size in (3 * MIB, 40 * MIB, 100 * MIB):
        area.grow(size)
        area.bytes[size - 1] = 1
    assert sum(driver.pinned.values()) == area.size >= 100 * MIB
    assert _resident_memory() - before > 90 * MIB, "touched before it is pinned"
    if how == "close":
        area.close()
        area.close()
        assert area.size == 0
    else:
        del area
        gc.collect()
    assert not driver.pinned
    assert _resident_memory() - before < 10 * MIB


def test_pinning_refused(driver):
    area = PinnedArea(64 * MIB, pin=True)
    area.grow(MIB)
    driver.refuses = True
    with pytest.raises(MemoryError, match=r"refused to pin 7\.00 MiB .*\(error 2; .* available\).*ulimit -l"):
        area.grow(8 * MIB)
    assert area.size == MIB == sum(driver.pinned.values())


def test_pinning_refused_in_a_torch_that_does_not_forget_errors(driver, monkeypatch):
    """Its next kernel takes the error, so that no other call is blamed for it."""
    plain = SimpleNamespace(cudaHostRegister=driver.cudaHostRegister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: plain)
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    driver.refuses = True
    with pytest.raises(MemoryError, match="refused to pin"):
        PinnedArea(64 * MIB, pin=True).grow(MIB)
    assert torch.zeros.call_args == mock.call(1, device="cuda")


def _filled(model, selector=SELECTOR) -> HiSparseCache:
    cache = HiSparseCache(model, selector)
    with torch.no_grad():
        for rows in (50, 1):
            model(prompt(2, rows, device=str(model.device)), past_key_values=cache)
    return cache


USES = {
    "generate": lambda cache, model: model.generate(
        prompt(2, 60, device=str(model.device)), past_key_values=cache, max_new_tokens=2
    ),
    "call": lambda cache, model: model(prompt(2, 3, device=str(model.device)), past_key_values=cache),
    "get_seq_length": lambda cache, model: cache.get_seq_length(),
    "crop": lambda cache, model: cache.crop(-1),
    "reset": lambda cache, model: cache.reset(),
    "reorder": lambda cache, model: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache, model: cache.batch_repeat_interleave(2),
    "select": lambda cache, model: cache.batch_select_indices(torch.tensor([1])),
    "copy": lambda cache, model: copy.deepcopy(cache),
    "stats": lambda cache, model: cache.stats(),
    "memory": lambda cache, model: cache.memory(),
    "save": lambda cache, model: cache.save("/nowhere"),
    "make_room": lambda cache, model: cache.make_room(1),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_cache_says_so(model, use):
    cache = _filled(model)
    cache.close()
    cache.close()
    with pytest.raises(RuntimeError, match="this HiSparseCache is closed: build a new one"):
        USES[use](cache, model)
    assert repr(cache) == "HiSparseCache(closed)"


def test_close_gives_everything_back(device):
    model = dsa_twins("glm_FSSF", device).enabled
    with HiSparseCache(model) as cache:
        with torch.no_grad():
            model(prompt(1, 50, device=device), past_key_values=cache)
        areas = [layer.pool.area for layer in cache.hosted_layers]
        layers = [layer.position.data_ptr() for layer in cache.hosted_layers]
        assert all(area.size for area in areas) and layers
    assert not any(area.size for area in areas)
    assert repr(cache) == "HiSparseCache(closed)"


def test_a_context_manager_closes_after_an_error(model):
    with pytest.raises(ZeroDivisionError), HiSparseCache(model, SELECTOR) as cache:
        raise ZeroDivisionError
    assert repr(cache) == "HiSparseCache(closed)"


def test_a_copy_outlives_the_cache(model):
    cache = _filled(model)
    other, again = copy.deepcopy(cache), copy.deepcopy(cache)
    with torch.no_grad():
        expected = model(prompt(2, 3, 1, str(model.device)), past_key_values=again).logits
        cache.close()
        assert torch.equal(model(prompt(2, 3, 1, str(model.device)), past_key_values=other).logits, expected)


def test_a_copy_of_an_empty_cache_keeps_nothing_of_it(model):
    cache = HiSparseCache(model, SELECTOR)
    with torch.no_grad():
        model(prompt(1, 300, device=str(model.device)), past_key_values=cache)
    held = [weakref.ref(part) for layer in cache.hosted_layers for part in (layer.pool.area, layer.buffer)]
    cache.reset()
    other = copy.deepcopy(cache)
    del cache
    gc.collect()
    assert not any(part() for part in held)
    with torch.no_grad():
        model(prompt(1, 30, device=str(model.device)), past_key_values=other)


def test_closing_ends_a_recording(model, tmp_path, caplog):
    cache = HiSparseCache(model, SELECTOR)
    with pytest.raises(KeyError, match="mine"), cache.record_trace(tmp_path / "trace.npz"):
        cache.close()
        raise KeyError("mine")
    assert "no trace is written" in caplog.text
    assert not (tmp_path / "trace.npz").exists()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_sliding", "gemma3"])
def test_cropped_to_nothing_a_cache_takes_another_batch(name):
    model = build(name)
    cache, fresh = HiSparseCache(model, SELECTOR), HiSparseCache(model, SELECTOR)
    with torch.no_grad():
        model(prompt(3, 20), past_key_values=cache)
        cache.crop(-20)
        got = model(prompt(2, 39), past_key_values=cache).logits
        assert torch.equal(got, model(prompt(2, 39), past_key_values=fresh).logits)
