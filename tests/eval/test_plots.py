"""Plots come out of what the measurements write, what was not measured included."""

from __future__ import annotations

import csv
import sys
from unittest import mock

import pytest

pytest.importorskip("matplotlib")

from eval.plots import __main__ as plots
from eval.plots.page import CACHES, conditions

CONDITIONS = {
    "gpu": "none (CPU)", "driver": "none", "torch": "2", "triton": "3", "transformers": "5", "link_GB_per_s": "nan",
    "memory_GB_per_s": "nan",
}  # fmt: skip


def msa():
    for overlap in (0.0, 0.5):
        shared = {"layers": 2, "history": 600, "batch": 1, "overlap": overlap}
        for way, buffer, moved in (("per_group", 64, 1.5), ("union", 128, 4.5), ("resident", 616, 0)):
            yield shared | {
                "way": way,
                "buffer_tokens": buffer,
                "ms_per_step": 3.1,
                "MB_moved_per_step": moved,
            }
        yield shared | {"way": "dense", "error": "out of memory"}


def throughput():
    for batch in (1, 8):
        for name in CACHES:
            row = {"model": "toy", "context": 700, "batch": batch, "cache": name, "dtype": "float32"}
            row |= {"selections": "paper's miss curve", "token_budget": 64}
            if (name, batch) == ("dynamic", 8):
                yield row | {"error": "out of memory"}
                continue
            yield row | {
                "ms_per_step": 3.1,
                "ms_min": 3,
                "ms_max": 9,
                "memory_floor_ms": 1,
                "link_floor_ms": 0.5,
            }


def capacity():
    for memory in ("24GiB", "48GiB", "all"):
        for name in CACHES:
            row = {"model": "toy", "memory": memory, "context": 512, "cache": name, "batch": 0}
            if name == "dynamic":
                yield row | {"error": "not even one row fits"}
            elif (name, memory) != ("offloaded", "all"):
                yield row | {"batch": 3, "tokens_per_s": 12.5}


def kernels():
    shared = {"lanes": 1, "k": 32, "record_bytes": 1152, "us": 12.5, "us_spread": 1}
    yield shared | {"what": "resolve+fetch", "misses_per_lane": 0, "copy_engine_us": "nan", "goal_us": 8}
    yield shared | {"what": "resolve+fetch", "misses_per_lane": 4, "copy_engine_us": 3, "link_floor_us": 2}
    yield shared | {"what": "resolve", "slots": 32768, "misses_per_lane": 60, "goal_us": 12}
    yield shared | {"what": "gqa layer", "heads": 4, "misses_per_lane": 4, "resolve_fetch_us": 9}


def small_card():
    shared = {"model": "toy", "memory": "16GiB", "limit_bytes": 15 * 2**30, "prefill_chunk": 200}
    shared |= {"peak_allocated_bytes": 2**33, "peak_reserved_bytes": 2**33 + 2**30, "outside_bytes": 2**29}
    first = shared | {"turn": 1, "prompt_tokens": 700}
    yield first | {"cache": "DynamicCache", "selection": "all", "tokens": 400, "error": "OutOfMemoryError"}
    for selection in ("quest", "trace"):
        row = {
            "cache": "HiSparseCache",
            "selection": selection,
            "token_budget": 64,
            "device_buffer_tokens": 128,
        }
        row |= {"ms_per_token": 3.5, "ms_min": 3, "ms_max": 40, "hit_rate": 0.92}
        yield first | row
        yield shared | row | {"turn": 2, "prompt_tokens": 51}


@pytest.mark.parametrize(
    "rows", [msa, throughput, capacity, kernels, small_card], ids=lambda rows: rows.__name__
)
def test_a_picture_of_each(rows, tmp_path):
    assert set(plots.PLOTS) == {"msa", "throughput", "capacity", "kernels", "small_card"}
    source = tmp_path / f"{rows.__name__}_of_today.csv"
    found = [row | CONDITIONS for row in rows()]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in found for name in row)))
        writer.writeheader()
        writer.writerows(found)
    with mock.patch.object(sys, "argv", ["plots", str(source)]):
        plots.main()
    picture = source.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_conditions_of_several_runs():
    text = conditions([CONDITIONS, CONDITIONS | {"link_GB_per_s": "53.2"}])
    assert "link nan and 53.2 GB/s" in text and text.count("torch 2") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("other", "a\n1\n", "no plot"), ("msa", "a\n", "holds no rows"), ("msa", None, "is not there")],
)
def test_a_file_without_a_plot(name, content, message, tmp_path):
    source = tmp_path / f"{name}.csv"
    if content is not None:
        source.write_text(content)
    with mock.patch.object(sys, "argv", ["plots", str(source)]), pytest.raises(SystemExit, match=message):
        plots.main()
