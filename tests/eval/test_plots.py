"""Plots come out of what the measurements write, what was not measured included."""

from __future__ import annotations

import csv
import sys
from unittest import mock

import pytest

pytest.importorskip("matplotlib")

from eval import plots

CONDITIONS = {
    "gpu": "none (CPU)", "driver": "none", "torch": "2", "triton": "3", "transformers": "5", "link_GB_per_s": "nan",
}  # fmt: skip


def test_msa(tmp_path):
    rows = []
    for overlap in (0.0, 0.5):
        shared = {"layers": 2, "history": 600, "batch": 1, "overlap": overlap, **CONDITIONS}
        for way, buffer, moved in (
            ("per_group", 64, 1.5),
            ("union", 128, 4.5),
            ("resident", 616, 0),
            ("dense", "", ""),
        ):
            rows.append(
                shared
                | {
                    "way": way,
                    "buffer_tokens": buffer,
                    "ms_per_step": 3.1,
                    "MB_moved_per_step": moved,
                    "error": "",
                }
            )
    rows[-1] |= {"ms_per_step": "", "error": "out of memory"}
    source = tmp_path / "msa.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with mock.patch.object(sys, "argv", ["plots", str(source)]):
        plots.main()
    assert (tmp_path / "msa.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_no_plot_is_known_for(tmp_path):
    source = tmp_path / "other.csv"
    source.write_text("a\n1\n")
    with mock.patch.object(sys, "argv", ["plots", str(source)]), pytest.raises(SystemExit, match="no plot"):
        plots.main()
