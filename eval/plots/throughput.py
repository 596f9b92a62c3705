"""Milliseconds per decode step, cache by cache."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eval.plots.page import CACHES, Row, number, save, short, tidy, write_above


def plot_throughput(rows: list[Row], target: Path) -> None:
    """Median, fastest and slowest step; a black line is the least time that reading and moving take (see `eval.floors`).

    Parameters
    ----------
    rows : list of dict
        As `eval.throughput` writes them.
    target : Path
        The PNG file.
    """
    cases = list(dict.fromkeys((row["model"], int(row["context"]), int(row["batch"])) for row in rows))
    figure, panels = plt.subplots(
        1, len(cases), figsize=(max(6.5, 4.4 * len(cases)), 4.8), squeeze=False, sharey=True
    )
    for panel, (model, context, batch) in zip(panels[0], cases, strict=True):
        chosen = [
            row
            for row in rows
            if (row["model"], row["context"], row["batch"]) == (model, str(context), str(batch))
        ]
        _panel(panel, sorted(chosen, key=lambda row: list(CACHES).index(row["cache"])))
        panel.set_title(f"{model}, {context:,} tokens, batch {batch}", fontsize=10)
    panels[0, 0].set_ylabel("ms per decode step, log")
    one = rows[0]
    save(
        figure,
        target,
        rows,
        f"generate, histories put in directly, random weights in {one['dtype']}; HiSparse with Quest({one['token_budget']}), "
        f"selections: {one['selections']}. Bars: median of the steps after the first; whiskers: fastest and slowest; black: "
        "weights and what attention reads at the GPU memory's bandwidth, or what is moved at the link's, whichever takes longer.",
    )


def _panel(panel: Axes, rows: list[Row]) -> None:
    for at, row in enumerate(rows):
        colour, _ = CACHES[row["cache"]]
        median = number(row, "ms_per_step")
        if median is None:
            write_above(panel, at, 1, "no memory", upright=True)
            continue
        low, high = number(row, "ms_min"), number(row, "ms_max")
        assert low is not None and high is not None
        panel.bar(
            at, median, color=colour, yerr=[[median - low], [high - median]], ecolor="#333333", capsize=3
        )
        floors = [
            floor for name in ("memory_floor_ms", "link_floor_ms") if (floor := number(row, name)) is not None
        ]
        if floors:
            panel.hlines(max(floors), at - 0.4, at + 0.4, color="black", linewidth=2)
        hits = number(row, "hit_rate")
        write_above(
            panel, at, high, f"{short(median)} ms" + (f"\n{hits:.1%} hits" if hits is not None else "")
        )
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.margins(y=0.15)
    panel.set_xticks(
        range(len(rows)), [CACHES[row["cache"]][1].replace(", ", "\n") for row in rows], fontsize=7
    )
    tidy(panel)
