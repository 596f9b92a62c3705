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
    marks = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in CACHES.values()]
    names = [name for _, name in CACHES.values()]
    figure.legend(marks, names, loc="upper center", ncols=3, frameon=False, fontsize=8)
    save(
        figure,
        target,
        rows,
        "The largest batch that fits (under each bar; x: not one row), median step of generate. Histories put in directly, "
        "random weights, Quest with a trace that has the miss curve of the HiSparse paper. A cap holds for all memory of the "
        "process, the CUDA context counted.",
        top=1 - 0.55 / figure.get_figheight(),
    )


def _panel(panel: Axes, rows: list[Row]) -> None:
    contexts = sorted({int(row["context"]) for row in rows})
    ticks, labels = [], []
    for group, context in enumerate(contexts):
        for place, name in enumerate(CACHES):
            at = group * (len(CACHES) + 1) + place
            row = next((row for row in rows if (row["cache"], row["context"]) == (name, str(context))), None)
            if row is None:
                continue
            speed = number(row, "tokens_per_s")
            ticks.append(at)
            labels.append(row["batch"] if speed is not None else "")
            if speed is None:
                write_above(panel, at, 0, "x")
                continue
            panel.bar(at, speed, color=CACHES[name][0])
            write_above(panel, at, speed, short(speed))
        middle = group * (len(CACHES) + 1) + (len(CACHES) - 1) / 2
        panel.annotate(
            f"{context // 1024}K tokens" if context >= 1024 else f"{context} tokens",
            (middle, 0), xycoords=("data", "axes fraction"), xytext=(0, -24), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    panel.set_xticks(ticks, labels, fontsize=7)
    panel.set_xlabel("batch", fontsize=7, loc="left", labelpad=-8)
    panel.margins(y=0.12)
    panel.set_ylim(bottom=0)
    tidy(panel)
