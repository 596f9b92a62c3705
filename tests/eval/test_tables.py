"""Tables say what ran, what could not, and which cache was the fastest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

import pytest

from eval import tables
from eval.environment import write_csv
from eval.output import RESULTS, TOYS, parse


def _table(rows, path, capsys):
    write_csv(path, rows)
    with mock.patch.object(sys, "argv", ["tables", str(path)]):
        tables.main()
    lines = capsys.readouterr().out.strip().split("\n")
    assert len({line.count("|") for line in lines}) == 1
    return lines


def test_capacity(tmp_path, capsys):
    place = {"model": "toy", "memory": "24GiB", "context": 131072}
    rows = [
        place | {"cache": "hisparse", "batch": 2, "tokens_per_s": 113.04, "times_best_dense": 9.42},
        place | {"cache": "dynamic", "batch": 0, "error": "not even one row fits"},
        place | {"cache": "offloaded", "batch": 1, "tokens_per_s": 12},
        {
            **place,
            "memory": "all",
            "cache": "hisparse",
            "batch": 1,
            "tokens_per_s": 50,
            "times_best_dense": 0.5,
        },
        {**place, "memory": "all", "cache": "dynamic", "batch": 1, "tokens_per_s": 100},
    ]
    *_, capped, whole = _table(rows, tmp_path / "capacity.csv", capsys)
    assert capped == "| toy | 24GiB | 131,072 | 113 (batch 2) | cannot run | 12 (batch 1) | 9.42 | hisparse |"
    assert whole == "| toy | all | 131,072 | 50 (batch 1) | 100 (batch 1) | - | 0.5 | dynamic |"


def test_throughput_and_kernels(tmp_path, capsys):
    times = {
        "ms_per_step": 11.93,
        "ms_min": 11.5,
        "ms_max": 1200.4,
        "memory_floor_ms": 4.1,
        "link_floor_ms": 0.7,
    }
    rates = {
        "read_GB_per_s": 1450.1,
        "MB_moved_per_step": 39.2,
        "moved_GB_per_s": 3.3,
        "times_resident": 1.04,
    }
    rows = [
        {
            "context": 32768,
            "batch": 1,
            "cache": "hisparse",
            **times,
            **rates,
            "hit_rate": 0.867,
            "times_hisparse": 1,
        },
        {"context": 32768, "batch": 1, "cache": "dynamic", "error": "out of memory"},
    ]
    *_, ran, not_run = _table(rows, tmp_path / "throughput_trace.csv", capsys)
    assert "| 11.9 (11.5 to 1,200) | 4.1 | 86.7% | 1,450 | 39.2 (3.3) | 1.04 | 1 |" in ran
    assert "cannot run: out of memory" in not_run
    row = {"what": "resolve+fetch", "lanes": 64, "misses_per_lane": 291.5, "record_bytes": 1152, "us": 452.39}
    row |= {"k": 2048, "slots": 4096}
    row |= {"us_spread": 7.49, "GB_per_s": 47.5, "copy_engine_us": float("nan"), "goal_us": 380}
    *_, line = _table([row], tmp_path / "kernels.csv", capsys)
    assert (
        line == "| resolve+fetch | 64 x 292 | 2,048 of 4,096 | 1,152 | 452 (7.49) | 47.5 |  |  |  | 380 |  |"
    )


def test_prefetch(tmp_path, capsys):
    times = {"resident": 6.461, "resident, in turn": 6.861, "ahead": 6.632, "in turn": 7.816}
    times |= {"prefetch": 7.242, "oracle": 6.45, "oracle, in turn": 6.87}
    place = {"share": 4, "history": 32768, "batch": 8}
    rows = [place | {"way": way, "ms_per_step": ms} for way, ms in times.items()]
    rows += [row | {"share": 1} for row in rows if row["way"] != "prefetch"]
    *_, four, one = _table(rows, tmp_path / "prefetch.csv", capsys)
    assert four == "| 4 | 32,768 x 8 | 6.46 | 6.86 | 7.82 | 7.24 | 6.63 | 0.95, 0.37, 0.18 |"
    assert one == "| 1 | 32,768 x 8 | 6.46 | 6.86 | 7.82 | - | 6.63 | 0.95, -, 0.18 |"


def test_small_card_and_prefill(tmp_path, capsys):
    peaks = {"peak_allocated_bytes": 2**33, "peak_reserved_bytes": 2**33 + 2**28, "outside_bytes": 2**29}
    ran = {
        "turn": 2,
        "tokens": 1500,
        "prefill_s": 0.869,
        "ms_per_token": 15.29,
        "ms_max": 1729.9,
        "hit_rate": 0.2317,
    }
    rows = [
        {
            "cache": "DynamicCache",
            "selection": "all",
            "turn": 1,
            "tokens": 48128,
            "error": "no memory",
            **peaks,
        },
        {
            "cache": "HiSparseCache",
            "selection": "quest",
            "error": "",
            **ran,
            "MB_fetched_per_step": 219.1,
            **peaks,
        },
    ]
    *_, not_run, line = _table(rows, tmp_path / "small_card.csv", capsys)
    assert not_run == "| DynamicCache, all | 1 | 48,128 | out of memory |  |  |  | 8.00 | 8.25 | 0.50 |"
    assert line.endswith("| 2 | 1,500 | 0.869 | 15.3 (1,730) | 23.2% | 219 | 8.00 | 8.25 | 0.50 |")
    row = {
        "tokens": 131072,
        "chunk": 8192,
        "cache": "HiSparseCache",
        "first_s": 2.7,
        "s": 2.617,
        "times_dynamic": 0.997,
    }
    *_, line = _table([row], tmp_path / "prefill.csv", capsys)
    assert line == "| 131,072 by 8,192 | HiSparseCache | 2.62 (2.7) |  | 0.997 |"


def test_a_file_without_a_table(tmp_path):
    with (
        mock.patch.object(sys, "argv", ["tables", str(tmp_path / "msa.csv")]),
        pytest.raises(SystemExit, match="no table"),
    ):
        tables.main()


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULTS.glob("*.csv")) if path.stem.startswith(tuple(tables.TABLES))],
    ids=lambda path: path.stem,
)
def test_every_committed_file(path, capsys):
    with mock.patch.object(sys, "argv", ["tables", str(path)]):
        tables.main()
    assert len(capsys.readouterr().out.strip().split("\n")) > 3


@pytest.mark.parametrize("given, folder", [([], RESULTS), (["--quick"], TOYS)])
def test_toy_rows_replace_no_others(monkeypatch, given, folder):
    for arguments, output in (
        (given, folder / "kernels.csv"),
        ([*given, "--output", "here.csv"], Path("here.csv")),
    ):
        monkeypatch.setattr(sys, "argv", ["kernels", *arguments])
        parser = argparse.ArgumentParser()
        parser.add_argument("--quick", action="store_true")
        assert parse(parser, "kernels.csv").output == output
