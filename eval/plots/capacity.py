"""Tokens per second in the memory of a card."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eval.plots.page import CACHES, Row, number, save, short, tidy, write_above


def plot_capacity(rows: list[Row], target: Path) -> None:
    """A row of panels per model, one per memory; in each a group of bars per context. A cache that holds no row is said so.

    Parameters
    ----------
    rows : list of dict
        As `eval.capacity` writes them.
    target : Path
        The PNG file.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    memories = sorted({row["memory"] for row in rows}, key=lambda memory: (memory == "all", memory))
    figure, panels = plt.subplots(
        len(models),
        len(memories),
        figsize=(max(7, 4.8 * len(memories)), 1.2 + 3.4 * len(models)),
        squeeze=False,
    )
    for line, model in zip(panels, models, strict=True):
        for panel, memory in zip(line, memories, strict=True):
            _panel(panel, [row for row in rows if (row["model"], row["memory"]) == (model, memory)])
            card = "no cap, one row" if memory == "all" else f"{memory} card"
            panel.set_title(f"{model}, {card}", fontsize=10)
        line[0].set_ylabel("tokens per second")
    shown = [CACHES[name] for name in CACHES if any(row["cache"] == name for row in rows)]
    marks = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in shown]
    figure.legend(
        marks, [name for _, name in shown], loc="upper center", ncols=len(shown), frameon=False, fontsize=8
    )
    save(
        figure,
        target,
        rows,
        "The largest batch that fits (under each bar; x: not one row), median step of generate. Histories put in directly, "
        "random weights, Quest with a trace that has the miss curve of the HiSparse paper. A cap holds for all memory of the "
        "process, the CUDA context counted.",
        top=1 - 0.35 / figure.get_figheight(),
    )


def _panel(panel: Axes, rows: list[Row]) -> None:
    """A group of bars per context, side by side whatever caches it has; under each bar its batch, under the group its context."""
    ticks: list[int] = []
    batches: list[str] = []
    start = 0
    for context in sorted({int(row["context"]) for row in rows}):
        of = {row["cache"]: row for row in rows if row["context"] == str(context)}
        group = [of[name] for name in CACHES if name in of]
        for at, row in enumerate(group, start):
            speed = number(row, "tokens_per_s")
            if speed is not None:
                panel.bar(at, speed, color=CACHES[row["cache"]][0])
            write_above(panel, at, speed or 0, "x" if speed is None else short(speed))
            ticks.append(at)
            batches.append("" if speed is None else row["batch"])
        middle = start + (len(group) - 1) / 2
        panel.annotate(
            f"{context // 1024}K tokens" if context >= 1024 else f"{context} tokens",
            (middle, 0), xycoords=("data", "axes fraction"), xytext=(0, -24), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
        start += len(group) + 1
    panel.set_xticks(ticks, batches, fontsize=7)
    panel.set_xlim(-0.8, start - 1.2)
    panel.annotate(
        "batch", (0, 0), xycoords="axes fraction", xytext=(-4, -12), textcoords="offset points", ha="right", fontsize=7
    )  # fmt: skip
    panel.margins(y=0.12)
    panel.set_ylim(bottom=0)
    tidy(panel)
