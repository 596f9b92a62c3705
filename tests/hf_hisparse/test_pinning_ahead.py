"""Host memory pinned ahead of need: growth finds it, limits hold, and nothing is left behind.

Without a GPU as well: the layers' memory is touched and pinned as there, with a stand-in for the driver.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

from hf_hisparse import HiSparseCache, Quest, hosted_layer, pinning_ahead
from hf_hisparse.host_memory import PinnedArea, pinning
from hf_hisparse.pinning_ahead import PinningAhead, Wanted
from tests.models import build, prompt

MIB = 2**20
NAME = "hisparse-pinning"
# 1000 tokens make room for 2024: what comes next is wanted from 2024 - 1024 / 4 on.
FIRST, BEFORE, WANTED, FULL = 1000, 1767, 1768, 2024


@pytest.fixture
def model():
    return build("qwen3")


@pytest.fixture
def pinned(driver, monkeypatch):
    """Layers on the CPU pin their memory."""
    monkeypatch.setattr(hosted_layer, "host_area", lambda reserve, device: PinnedArea(reserve, pin=True))
    return driver


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(30)
            assert not thread.is_alive()


@torch.no_grad()
def read(model, cache, until):
    """The logits of the last of as many more tokens as bring the cache up to `until`."""
    start = cache.get_seq_length()
    ids = prompt(1, FULL + 500)[:, start:until]
    return model(ids, past_key_values=cache, logits_to_keep=1).logits


def cache_of(model, **settings) -> HiSparseCache:
    return HiSparseCache(model, Quest(32, 4), device_buffer_tokens=64, **settings)


def test_growth_finds_it_pinned(model, pinned):
    plain = cache_of(model)
    with mock.patch.object(PinningAhead, "start"):
        expected = [
            read(model, plain, until) for until in (FIRST, BEFORE, WANTED, FULL, FULL + 1, FULL + 400)
        ]
    by_growth = pinned.pinners.count("MainThread")
    assert by_growth == len(pinned.pinners) == 2 * len(plain.hosted_layers)
    del plain
    cache = cache_of(model)
    ours = [read(model, cache, until) for until in (FIRST, BEFORE)]
    cache.room.ahead.wait()
    before = len(pinned.pinners)
    held = cache.memory().host_reserved_bytes
    ours.append(read(model, cache, WANTED))
    cache.room.ahead.wait()
    assert pinned.pinners[before:] == [NAME] * len(cache.hosted_layers)
    assert cache.memory().host_reserved_bytes > held, "what is pinned ahead counts"
    assert cache.capacity == FULL
    before = len(pinned.pinners)
    ours += [read(model, cache, until) for until in (FULL, FULL + 1, FULL + 400)]
    assert cache.capacity > FULL
    assert len(pinned.pinners) == before, "growth had nothing left to pin"
    assert sum(pinned.pinned.values()) == cache.memory().host_reserved_bytes
    assert all(map(torch.equal, ours, expected))


def test_a_captured_step_asks_for_it_too(model, pinned):
    """Before each step that a CUDA graph replays there is to be room for a token."""
    cache = cache_of(model)
    read(model, cache, BEFORE)  # with room for an eighth more, at least 1024
    cache.room.ahead.wait()
    before = len(pinned.pinners)
    cache.make_room(cache.capacity - 257 - BEFORE)
    assert cache.room.ahead._thread is None
    cache.make_room(cache.capacity - 256 - BEFORE)
    cache.room.ahead.wait()
    assert pinned.pinners[before:] == [NAME] * len(cache.hosted_layers)


def test_a_prompt_finds_it_pinned(model, pinned):
    """While the first layers compute, the memory of those that follow is pinned."""
    start = PinningAhead.start

    def finished(ahead, wanted, device, threads):
        start(ahead, wanted, device, threads)
        ahead.wait()

    cache = cache_of(model)
    with mock.patch.object(PinningAhead, "start", finished):
        read(model, cache, FIRST)
    assert pinned.pinners == [NAME] * len(cache.hosted_layers)
    assert sum(pinned.pinned.values()) == cache.memory().host_reserved_bytes


def test_nothing_is_pinned_ahead_beyond_the_limit(model, pinned):
    free = cache_of(model)
    read(model, free, FIRST)
    limit = free.memory().host_reserved_bytes * 9 // 8
    free.close()
    cache = cache_of(model, host_memory=limit)
    read(model, cache, FIRST)
    cache.room.ahead.wait()
    before = len(pinned.pinners)
    read(model, cache, WANTED)
    cache.room.ahead.wait()
    assert len(pinned.pinners) == before
    read(model, cache, FULL + 100)  # without room for more it still fits
    assert len(pinned.pinners) > before
    assert sum(pinned.pinned.values()) == cache.memory().host_reserved_bytes <= limit
    with pytest.raises(MemoryError, match="host_memory="):
        read(model, cache, FULL + 500)


def test_an_error_surfaces_where_the_memory_is_needed(model, pinned, caplog):
    cache = cache_of(model)
    read(model, cache, FIRST)
    cache.room.ahead.wait()
    pinned.refuses = True
    with caplog.at_level(logging.WARNING, logger="hf_hisparse"):
        read(model, cache, WANTED)
        cache.room.ahead.wait()
    assert "could not be pinned ahead" in caplog.text and "refused to pin" in caplog.text
    read(model, cache, FULL)
    with pytest.raises(MemoryError, match=r"refused to pin .*ulimit -l"):
        read(model, cache, FULL + 1)


ENDS = {
    "close": lambda cache: cache.close(),
    "del": lambda cache: None,
}
GOES_ON = {
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "crop": lambda cache: cache.crop(-300),
    "grow": lambda cache: cache.make_room(400),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "copy": copy.deepcopy,
}


def _while_pinning(model, pinned, act):
    """Run `act` on a cache whose next growth is just being pinned."""
    cache = cache_of(model)
    read(model, cache, FIRST)
    cache.room.ahead.wait()
    pinned.asked.clear()
    pinned.may_pin.clear()
    read(model, cache, WANTED)
    assert pinned.asked.wait(30)
    later = threading.Timer(0.2, pinned.may_pin.set)
    later.start()
    act(cache)
    return cache


@pytest.mark.parametrize("end", ENDS)
def test_a_cache_may_end_meanwhile(model, pinned, end):
    cache = _while_pinning(model, pinned, ENDS[end])
    thread = cache.room.ahead._thread
    if end == "close":
        assert thread is None and not pinned.pinned, "at once"
    del cache
    gc.collect()
    if thread is not None:
        thread.join(30)
    del thread
    assert not pinned.pinned


@pytest.mark.parametrize("change", GOES_ON)
def test_a_cache_may_change_meanwhile(model, pinned, change):
    cache = _while_pinning(model, pinned, GOES_ON[change])
    if change == "repeat":
        cache.batch_select_indices(torch.tensor([1]))
    expected = cache_of(model)
    read(model, expected, FIRST)
    read(model, expected, WANTED)
    GOES_ON[change](expected)
    if change == "repeat":
        expected.batch_select_indices(torch.tensor([1]))
    assert torch.equal(read(model, cache, FULL + 9), read(model, expected, FULL + 9))
    cache.close()
    expected.close()
    assert not pinned.pinned


def test_garbage_is_collected_while_a_graph_is_captured(pinned):
    """The collector may run in the thread that captures, when another pins what it collects: neither waits."""
    area = PinnedArea(64 * MIB, pin=True)
    ahead = PinningAhead()
    with pinning:
        ahead.start([Wanted(area.backing, 32 * MIB)], torch.device("cpu"), 2)
        del area
        gc.collect()
        assert not pinned.pinners, "not during a capture"
    ahead.wait()
    assert not pinned.pinned


def test_two_threads_take_turns(pinned):
    area = PinnedArea(64 * MIB, pin=True)
    pinned.may_pin.clear()
    ahead = PinningAhead()
    ahead.start([Wanted(area.backing, 24 * MIB)], torch.device("cpu"), 2)
    assert pinned.asked.wait(30)
    threading.Timer(0.1, pinned.may_pin.set).start()
    area.grow(40 * MIB)
    assert area.backing.edges == [0, 24 * MIB, 40 * MIB]
    assert pinned.pinners == [NAME, "MainThread"]
    ahead.start([Wanted(area.backing, 32 * MIB)], torch.device("cpu"), 2)
    ahead.wait()
    assert area.size == 40 * MIB


def test_much_is_pinned_piece_by_piece(pinned, monkeypatch):
    """A layer that grows meanwhile waits for one of them, and takes over."""
    monkeypatch.setattr(pinning_ahead, "_PIECE", 16 * MIB)
    area, ahead = PinnedArea(80 * MIB, pin=True), PinningAhead()
    area.grow(MIB)
    ahead.start([Wanted(area.backing, 56 * MIB)], torch.device("cpu"), 2)
    ahead.wait()
    assert area.backing.edges == [0, MIB, 17 * MIB, 33 * MIB, 49 * MIB, 56 * MIB]
    assert area.pieces(16 * MIB, 34 * MIB) == [
        (16 * MIB, 17 * MIB),
        (17 * MIB, 33 * MIB),
        (33 * MIB, 34 * MIB),
    ]


def test_a_program_ends_while_memory_is_pinned(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import time, torch\n"
        "from tests.hf_hisparse.conftest import Driver\n"
        "from hf_hisparse.host_memory import PinnedArea\n"
        "from hf_hisparse.pinning_ahead import PinningAhead, Wanted\n"
        "driver, area = Driver(), PinnedArea(2**26, pin=True)\n"
        "pin = driver.cudaHostRegister\n"
        "driver.cudaHostRegister = lambda *args: (time.sleep(0.5), pin(*args))[1]\n"
        "torch.cuda.cudart = lambda: driver\n"
        "PinningAhead().start([Wanted(area.backing, 2**20)] * 2, torch.device('cpu'), 2)\n"
        "print('done')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_no_thread_without_a_gpu(model):
    cache = cache_of(model)
    with mock.patch.object(threading.Thread, "start", side_effect=AssertionError):
        read(model, cache, FIRST)
        read(model, cache, WANTED)
        read(model, cache, FULL + 1)
