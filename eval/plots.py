"""Plots of measurements, from their CSV files alone.

    python -m eval.plots eval/results/msa.csv            # writes eval/results/msa.png

Needs matplotlib (`pip install -e ".[eval]"`).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

Row = dict[str, str]

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
        own: dict[
            tuple[str, str], Row
        ] = {}  # the first of each bar: overlap does not change what is resident
        for row in rows:
            if (int(row["history"]), int(row["batch"])) == (history, batch):
                own.setdefault((row["way"], _label(row)), row)
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
    one = rows[0]
    figure.text(
        0.5,
        0.005,
        f"MiniMax-M3's attention, {one['layers']} sparse layers, random weights, traces with the miss curve of the HiSparse "
        f"paper; overlap: share of a selection that all KV heads have in common.\n{one['gpu']}, driver {one['driver']}, torch "
        f"{one['torch']}, Triton {one['triton']}, transformers {one['transformers']}, link {one['link_GB_per_s']} GB/s",
        ha="center",
        fontsize=7,
        wrap=True,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 0.94))
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _label(row: Row) -> str:
    if row["way"] in ("resident", "dense"):
        return row["way"]
    return f"{int(row['buffer_tokens']):,} tokens, overlap {float(row['overlap']):g}"


def _bars(panel: plt.Axes, rows: list[Row], measure: str) -> None:
    """One bar per row; what was not measured is named so."""
    for at, row in enumerate(rows):
        value = float(row[measure]) if row.get(measure) else None
        if value is not None:
            panel.bar(at, value, color=_COLOURS[row["way"]])
        text = "no memory" if row.get("error") else "moves nothing" if value is None else f"{value:.3g}"
        panel.annotate(
            text,
            (at, value or 0),
            ha="center",
            va="bottom",
            fontsize=7,
            rotation=90 if value is None else 0,
            xytext=(0, 1),
            textcoords="offset points",
        )
    panel.margins(y=0.12)
    panel.set_ylim(bottom=0)
    panel.set_xlim(-0.6, len(rows) - 0.4)
    panel.spines[["top", "right"]].set_visible(False)


_PLOTS = {"msa": plot_msa}


def main() -> None:
    """Read a CSV, write a PNG beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, help=f"the result of eval.{', eval.'.join(_PLOTS)}")
    parser.add_argument("--output", type=Path, help="default: the CSV's name with .png")
    args = parser.parse_args()
    rows = list(csv.DictReader(args.csv.open()))
    kind = next((name for name in _PLOTS if args.csv.stem.startswith(name)), None)
    if kind is None:
        raise SystemExit(
            f"{args.csv}: no plot is known for it, only for {', '.join(f'{name}*.csv' for name in _PLOTS)}"
        )
    if not rows:
        raise SystemExit(f"{args.csv}: holds no rows")
    target = args.output or args.csv.with_suffix(".png")
    _PLOTS[kind](rows, target)
    print(f"written: {target}")


if __name__ == "__main__":
    main()
