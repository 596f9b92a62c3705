"""What all plots share: numbers out of a CSV, what was not measured, and the conditions under the picture."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, str]

CACHES = {  # colours that the colour-blind can tell apart (Okabe, Ito)
    "hisparse": ("#D55E00", "HiSparseCache"),
    "hisparse-resident": ("#009E73", "HiSparseCache, all resident"),
    "dynamic": ("#0072B2", "DynamicCache, sdpa"),
    "static": ("#56B4E9", "StaticCache, compiled"),
    "offloaded": ("#7f7f7f", "DynamicCache, offloading"),
}


def number(row: Row, name: str) -> float | None:
    """The number under `name`, None where there is none."""
    text = row.get(name) or "nan"
    return None if math.isnan(float(text)) else float(text)


def short(value: float) -> str:
    """Three digits, none of a whole number lost."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def conditions(rows: list[Row]) -> str:
    """The machine, the versions and the measured bandwidths, each value that there is."""

    def values(name: str) -> str:
        return " and ".join(dict.fromkeys(row[name] for row in rows if row.get(name)))

    memory = values("memory_GB_per_s")
    return (
        f"{values('gpu')}, driver {values('driver')}, torch {values('torch')}, Triton {values('triton')}, transformers "
        f"{values('transformers')}, link {values('link_GB_per_s')} GB/s{f', GPU memory {memory} GB/s' if memory else ''}"
    )


def save(figure: Figure, target: Path, rows: list[Row], text: str, top: float = 1.0) -> None:
    """Write the picture with `text` and the conditions under it; `top` leaves room for a legend above."""
    width = int(19 * figure.get_figwidth())
    lines = [line for part in (text, conditions(rows)) for line in textwrap.wrap(part, width)]
    bottom = (0.08 + 0.13 * len(lines)) / figure.get_figheight()
    figure.tight_layout(rect=(0, bottom, 1, top))
    figure.text(0.5, 0.03 / figure.get_figheight(), "\n".join(lines), ha="center", va="bottom", fontsize=7)
    figure.savefig(target, dpi=150, bbox_inches="tight")
    plt.close(figure)


def tidy(axes: Axes, along: Literal["x", "y"] = "y") -> None:
    """No frame, and lines to read the values of an axis by."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=along, alpha=0.25)
    axes.set_axisbelow(True)


def write_above(axes: Axes, at: float, height: float, text: str, upright: bool = False) -> None:
    """A text on top of a bar."""
    axes.annotate(
        text,
        (at, height),
        ha="center",
        va="bottom",
        fontsize=7,
        rotation=90 if upright else 0,
        xytext=(0, 2),
        textcoords="offset points",
    )
