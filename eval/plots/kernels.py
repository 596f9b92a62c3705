"""Microseconds of the kernels, beside what they are measured against."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eval.plots.page import Row, number, save, short, tidy, write_above

# What stands beside a time: column -> marker, colour, name.
_MARKS = {
    "link_floor_us": ("_", "black", "link floor"),
    "memory_floor_us": ("_", "#7f7f7f", "memory floor"),
    "copy_engine_us": ("x", "#0072B2", "copy engine, same bytes"),
    "goal_us": ("v", "#D55E00", "goal"),
    "resolve_fetch_us": ("<", "#0072B2", "resolve and fetch alone"),
    "resolve_attend_us": (">", "#009E73", "resolve and attention alone"),
    "gather_sdpa_us": ("o", "#7f7f7f", "gather and SDPA"),
}
_PANELS = {
    "resolve + fetch": ("resolve+fetch",),
    "selection to output of one layer": ("mla layer", "gqa layer"),
    "attention, and scores, with everything resident": ("mla_decode", "gqa_decode", "block_scores"),
}


def plot_kernels(rows: list[Row], target: Path) -> None:
    """A panel per kind of measurement; bars are medians, whiskers half the spread to both sides.

    Parameters
    ----------
    rows : list of dict
        As `eval.kernels` writes them.
    target : Path
        The PNG file.
    """
    kinds = {
        title: found
        for title, names in _PANELS.items()
        if (found := [row for row in rows if row["what"] in names])
    }
    figure, panels = plt.subplots(len(kinds), 1, figsize=(12, 4.2 * len(kinds)), squeeze=False)
    for panel, (title, found) in zip(panels[:, 0], kinds.items(), strict=True):
        _panel(panel, found)
        panel.set_title(title, fontsize=10)
        panel.set_ylabel("us per call, log")
    save(
        figure,
        target,
        rows,
        "In CUDA graphs, a fresh selection each call. Under each bar: lanes x misses per lane, bytes of a record. Floors: misses "
        "at the bandwidth of the link, what attention reads at that of the GPU's memory, both measured in the run.",
    )


def _panel(panel: Axes, rows: list[Row]) -> None:
    shown: dict[str, None] = {}
    for at, row in enumerate(rows):
        time, spread = number(row, "us"), number(row, "us_spread") or 0.0
        assert time is not None
        whisker = min(spread / 2, 0.9 * time)
        panel.bar(at, time, color="#c9d6e8", yerr=whisker, ecolor="#333333", capsize=2)
        write_above(panel, at, time + whisker, short(time))
        for column, (marker, colour, name) in _MARKS.items():
            value = number(row, column)
            if value:
                label = None if name in shown else name
                shown[name] = None
                panel.plot(
                    at,
                    value,
                    marker,
                    color=colour,
                    markersize=9,
                    markeredgewidth=2,
                    label=label,
                    linestyle="none",
                )
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.margins(y=0.12)
    panel.set_xticks(range(len(rows)), [_label(row) for row in rows], rotation=30, ha="right", fontsize=7)
    if shown:
        panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    tidy(panel)


def _label(row: Row) -> str:
    misses = number(row, "misses_per_lane")
    kind = "" if row["what"] == "resolve+fetch" else f"{row['what'].removesuffix(' layer')}, "
    heads = f", {row['heads']} heads" if row.get("heads") else ""
    return f"{kind}{row['lanes']}{'' if misses is None else f' x {misses:.0f}'}, {int(row['record_bytes']):,} B{heads}"
