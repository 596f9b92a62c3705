"""Floors count what lies in memory; rows that are measured again take the place of the old ones."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from eval.environment import merge_rows, read_csv, write_csv
from eval.floors import beside, bytes_read, kv_bytes_held
from eval.history import fill
from eval.methods import kv_bytes
from hf_hisparse import HiSparseCache, Quest
from tests.models import build
from tests.msa_models import msa_twins


@pytest.mark.parametrize(
    "model", [build("qwen3"), msa_twins("two_groups", "cpu").native], ids=["qwen3", "m3"]
)
def test_a_dense_step_reads_all_there_is(model):
    weights = sum(weight.nbytes for weight in model.parameters()) + sum(
        each.nbytes for each in model.buffers()
    )
    weights -= model.get_input_embeddings().weight.nbytes
    cache = DynamicCache(config=model.config)
    fill(cache, model, 2, 100)
    assert bytes_read(model, cache, 2, 100) == weights + kv_bytes(cache, model.device)


def test_a_sparse_step_reads_what_it_selects():
    model = build("qwen3")
    model.lm_head.weight = model.model.embed_tokens.weight  # tied: read whole
    weights = sum(weight.nbytes for weight in model.parameters()) + sum(
        each.nbytes for each in model.buffers()
    )
    cache = HiSparseCache(model, Quest(32, 4), device_buffer_tokens=64)
    fill(cache, model, 2, 100)
    dense = 2 * 2 * 2 * 2 * 16 * 100 * 4  # layers, rows, heads, keys and values, width, tokens, bytes
    bounds = 2 * 2 * 2 * 25 * 2 * 16 * 4
    assert bytes_read(model, cache, 2, 100, selected=1000) == weights + dense + bounds + 1000
    assert kv_bytes_held(model, 2, 100) == 2 * dense


def test_rates_and_floors():
    row = beside(2e9, 5e6, 4.0)
    assert (row["GB_read_per_step"], row["read_GB_per_s"]) == (2.0, 500.0)
    assert (row["MB_moved_per_step"], row["moved_GB_per_s"]) == (5.0, 1.25)
    assert torch.cuda.is_available() or math.isnan(row["link_floor_ms"])


def test_rows_that_are_measured_again_replace_the_old_ones(tmp_path):
    path = tmp_path / "rows.csv"
    first = [{"cache": name, "context": 512, "ms": 1} for name in ("a", "b")]
    write_csv(path, merge_rows(path, first, ("cache", "context")))
    kept = [row | {"gpu": "another"} for row in read_csv(path)]
    write_csv(path, kept)
    again = [{"cache": "b", "context": 512, "ms": 2}, {"cache": "c", "context": 512, "ms": 3}]
    write_csv(path, merge_rows(path, again, ("cache", "context")))
    rows = read_csv(path)
    assert [(row["cache"], row["ms"]) for row in rows] == [("a", "1"), ("b", "2"), ("c", "3")]
    assert rows[0]["gpu"] == "another" and rows[1]["gpu"] != "another"
