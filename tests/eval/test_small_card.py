"""A conversation that runs out of memory says how far it came; one that does not has a row for each turn."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from eval.shapes import build
from eval.small_card.__main__ import Turn, converse, with_trace
from hf_hisparse import HiSparseCache, Quest

TURNS = [Turn(0, 5), Turn(40, 4)]


@pytest.fixture
def toy(device):
    return build("toy", device, torch.float32)


def prompt(device):
    return torch.randint(10, 500, (1, 320), generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize(("room", "turn", "tokens"), [(250, 1, 200), (330, 2, 324)])
def test_no_memory_left(toy, device, room, turn, tokens):
    """The last call that found room for all layers counts."""
    cache = DynamicCache(config=toy.config)
    take = cache.update

    def update(keys, values, layer_idx, *args, **kwargs):
        if cache.layers[layer_idx].get_seq_length() + keys.shape[2] > room and layer_idx == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate ...\nand more")
        return take(keys, values, layer_idx, *args, **kwargs)

    cache.update = update
    rows = list(converse(toy, cache, prompt(device), TURNS, 100, "test"))
    assert len(rows) == turn
    assert rows[-1]["tokens"] == tokens
    assert rows[-1]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate ..."
    assert all("error" not in row for row in rows[:-1])


def test_every_turn(toy, device):
    cache = HiSparseCache(toy, Quest(64), device_buffer_tokens=128)
    ids = prompt(device)
    rows = list(converse(toy, cache, ids, TURNS, 100, "test"))
    assert [row["history"] for row in rows] == [0, 324]
    assert [row["prompt_tokens"] for row in rows] == [320, 41]
    assert [row["tokens"] for row in rows] == [324, 368]
    # Each row counts its own steps: 2 hosted layers, 2 KV heads, 4 pages of 16 tokens x 16 channels x K and V x 4 bytes.
    for row, turn in zip(rows, TURNS, strict=True):
        read = 2 * 2 * 4 * (16 * 16 * 2 * 4) / 1e6
        assert row["MB_fetched_per_step"] == pytest.approx((1 - row["hit_rate"]) * read, abs=1e-3), turn
    with_trace(cache, Quest(64), 320, steps=400)
    assert cache.get_seq_length() == 319
    again = list(converse(toy, cache, ids, TURNS, 100, "test"))
    assert [row["tokens"] for row in again] == [324, 368]
    assert again[0]["prompt_tokens"] == 1
