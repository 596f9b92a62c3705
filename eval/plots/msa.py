"""Time and bytes of MiniMax-M3's ways to keep a history."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from eval.plots.page import Row, number, save, short, tidy, write_above

_COLOURS = {"per_group": "#1f77b4", "union": "#d62728", "resident": "#2ca02c", "dense": "#7f7f7f"}
_NAMES = {
    "per_group": "hot buffer per KV head",
    "union": "one for all KV heads",
    "resident": "all resident",
    "dense": "the model's own, dense under a mask",
}


def plot_msa(rows: list[Row], target: Path) -> None:
    """Time per decode step and bytes moved, by way and buffer; one column of panels per history and batch.

    Parameters
    ----------
    rows : list of dict
        As `eval.msa` writes them.
    target : Path
        The PNG file.
    """
    cases = list(dict.fromkeys((int(row["history"]), int(row["batch"])) for row in rows))
    figure, panels = plt.subplots(
        2, len(cases), figsize=(max(9, 4.2 * len(cases)), 7.4), squeeze=False, sharex="col"
    )
    for column, (history, batch) in enumerate(cases):
        # The last of each bar, the largest overlap: it does not change what is resident, nor what a dense step reads.
        own = {
            (row["way"], _label(row)): row
            for row in rows
            if (int(row["history"]), int(row["batch"])) == (history, batch)
        }
        bars = sorted(own.values(), key=lambda row: list(_COLOURS).index(row["way"]))
        for panel, measure in zip(panels[:, column], ("ms_per_step", "MB_moved_per_step"), strict=True):
            _bars(panel, bars, measure)
        panels[0, column].set_yscale("log")  # the model's own way takes tens of times as long
        panels[0, column].set_ylim(bottom=1)
        panels[0, column].yaxis.set_major_formatter("{x:g}")
        panels[0, column].yaxis.set_minor_formatter(NullFormatter())
        panels[0, column].set_title(f"history {history:,} tokens, batch {batch}", fontsize=10)
        labels = [_label(row) for row in bars]
        panels[1, column].set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
    panels[0, 0].set_ylabel("ms per decode step (median), log")
    panels[1, 0].set_ylabel("MB moved per decode step")
    ways = [way for way in _COLOURS if any(row["way"] == way for row in rows)]
    marks = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[way]) for way in ways]
    figure.legend(marks, [_NAMES[way] for way in ways], loc="upper center", ncols=len(ways), frameon=False)
    save(
        figure,
        target,
        rows,
        f"MiniMax-M3's attention, {rows[0]['layers']} sparse layers, random weights, traces with the miss curve of the HiSparse "
        "paper; overlap: share of a selection that all KV heads have in common.",
        top=0.94,
    )


def _label(row: Row) -> str:
    if row["way"] in ("resident", "dense"):
        return row["way"]
    return f"{int(row['buffer_tokens']):,} tokens, overlap {float(row['overlap']):g}"


def _bars(panel: Axes, rows: list[Row], measure: str) -> None:
    """One bar per row; what was not measured is named so."""
    for at, row in enumerate(rows):
        value = number(row, measure)
        if value is not None:
            panel.bar(at, value, color=_COLOURS[row["way"]])
        text = "no memory" if row.get("error") else short(value) if value else "moves nothing"
        write_above(panel, at, value or 0, text, upright=not value)
    panel.margins(y=0.12)
    panel.set_ylim(bottom=0)
    panel.set_xlim(-0.6, len(rows) - 0.4)
    tidy(panel)
