"""Microseconds of the kernels, beside what they are measured against."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eval.plots.page import Row, number, save, short, tidy

# What stands beside a time: column -> marker, colour, name.
_MARKS = {
    "link_floor_us": ("|", "black", "link floor"),
    "memory_floor_us": ("|", "#7f7f7f", "memory floor"),
    "copy_engine_us": ("x", "#0072B2", "copy engine, same bytes"),
    "fetch_after_us": ("2", "#CC79A7", "a fetch after resolve"),
    "goal_us": ("D", "#D55E00", "goal"),
    "resolve_fetch_us": ("^", "#0072B2", "resolve and fetch alone"),
    "resolve_attend_us": ("v", "#009E73", "resolve and attention alone"),
    "fetch_then_attend_us": ("<", "#CC79A7", "fetch first, attention then"),
    "attend_and_read_us": (">", "#E69F00", "attention that reads the host"),
    "gather_sdpa_us": ("o", "#7f7f7f", "gather and SDPA"),
    "torch_us": ("s", "#7f7f7f", "torch's operations"),
}
_PANELS = {
    "resolve and fetch": ("resolve+fetch", "resolve"),
    "selection to output of one layer": ("mla layer", "gqa layer"),
    "attention, scores and choices, with everything resident": (
        "mla_decode",
        "gqa_decode",
        "block_scores",
        "quest_select",
    ),
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
    heights = [1.6 + len(found) for found in kinds.values()]
    figure, panels = plt.subplots(
        len(kinds),
        1,
        figsize=(10, 0.26 * sum(heights) + 1),
        squeeze=False,
        height_ratios=heights,
        sharex=True,
    )
    for panel, (title, found) in zip(panels[:, 0], kinds.items(), strict=True):
        _panel(panel, found)
        panel.set_title(title, fontsize=10)
        panel.tick_params(axis="x", labelsize=7, labelbottom=True)
    panels[-1, 0].set_xlabel("us per call, log", fontsize=8)
    marks = {
        name: mark
        for panel in panels[:, 0]
        for mark, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(marks.values(), marks.keys(), loc="upper center", ncols=4, frameon=False, fontsize=8)
    save(
        figure,
        target,
        rows,
        "In CUDA graphs, a fresh selection each call. Floors: misses at the bandwidth of the link, what attention reads at that "
        "of the GPU's memory, both measured in the run. The copy engine moves one piece.",
        top=1 - 0.45 / figure.get_figheight(),
    )


def _panel(panel: Axes, rows: list[Row]) -> None:
    for at, row in enumerate(rows):
        time, spread = number(row, "us"), number(row, "us_spread") or 0.0
        assert time is not None
        whisker = min(spread / 2, 0.9 * time)
        panel.barh(at, time, color="#c9d6e8", xerr=whisker, ecolor="#333333", capsize=2)
        goal = number(row, "goal_us")
        text = f"{short(time)} us" + (f", {time / goal:.2f} x goal" if goal else "")
        panel.annotate(text, (1.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=7)
        for column, (marker, colour, name) in _MARKS.items():
            value = number(row, column)
            if value:
                panel.plot(
                    value,
                    at,
                    marker,
                    color=colour,
                    markersize=9 if marker == "|" else 5,
                    markeredgewidth=1.8,
                    label=name,
                    linestyle="none",
                )
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    panel.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    tidy(panel, along="x")


def _label(row: Row) -> str:
    misses, slots = number(row, "misses_per_lane"), number(row, "slots")
    parts = [row["what"], f"{row['lanes']} lane{'s' if int(row['lanes']) > 1 else ''}"]
    if row.get("heads"):
        parts.append(f"{row['heads']} heads")
    if misses is not None:
        parts.append(f"{short(misses)}/{int(row['k']):,} missing")
    if row["what"] == "resolve" and slots is not None:
        parts.append(f"{slots:,.0f} slots")
    if row["what"] == "quest_select" and slots is not None:
        parts.append(f"{int(row['k']):,} of {slots:,.0f} pages")
    if row.get("record_bytes"):
        parts.append(f"{int(row['record_bytes']):,} B")
    return ", ".join(parts)
