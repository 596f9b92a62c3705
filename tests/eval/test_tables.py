"""Tables say what ran, what could not, and which cache was the fastest."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from eval import tables
from eval.environment import write_csv


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
    row |= {"us_spread": 7.49, "GB_per_s": 47.5, "copy_engine_us": float("nan"), "goal_us": 380}
    *_, line = _table([row], tmp_path / "kernels.csv", capsys)
    assert line == "| resolve+fetch | 64 x 292 | 1,152 | 452 (7.49) | 47.5 |  |  |  | 380 |  |"


def test_a_file_without_a_table(tmp_path):
    with (
        mock.patch.object(sys, "argv", ["tables", str(tmp_path / "msa.csv")]),
        pytest.raises(SystemExit, match="no table"),
    ):
        tables.main()
