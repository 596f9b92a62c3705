"""The picture: miss rate against buffer size under each policy, and how layers differ."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from eval.traces import PAPER_CURVE

from .replay import Misses

# From worst to best as a rule; colours that the colour-blind can tell apart (Okabe and Ito), and markers for print.
STYLES = {
    "FIFO": ("#999999", "s"),
    "random": ("#56B4E9", "v"),
    "CLOCK": ("#E69F00", "D"),
    "SIEVE": ("#CC79A7", "P"),
    "LFU": ("#009E73", "^"),
    "LRU": ("#D55E00", "o"),
    "Belady": ("#000000", "*"),
}
SHADES = ("#7FB3D5", "#D55E00", "#196F3D", "#5B2C6F")


def draw(
    path: Path, rows: list[Misses], top_k: int, curve: np.ndarray | None, per_layer: list[int], caption: str
) -> None:
    """Write the picture.

    Parameters
    ----------
    path : Path
        The PNG.
    rows : list of Misses
        What `replay` found.
    top_k : int
        Records of a selection: the unit of the horizontal axis.
    curve : float64 ``[sizes]`` or None
        What `lru_curve` found.
    per_layer : list of int
        Sizes of which to show each layer.
    caption : str
        Command and conditions, to stand under the picture.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.6), width_ratios=(3, 2))
    _by_policy(left, [row for row in rows if row.layer is None], top_k, curve)
    _by_layer(right, [row for row in rows if row.layer is not None and row.slots in per_layer], top_k)
    for axes in (left, right):
        _percent(axes)
    text = "\n".join(line for part in caption.split("\n") for line in textwrap.wrap(part, 165))
    figure.tight_layout(rect=(0, 0.045 + 0.028 * text.count("\n"), 1, 1))
    figure.text(0.01, 0.012, text, fontsize=8, color="#333333", va="bottom", linespacing=1.35)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _by_policy(axes: Axes, totals: list[Misses], top_k: int, curve: np.ndarray | None) -> None:
    sizes = [row.slots / top_k for row in totals]
    current = totals[0].rate("current selection only")
    axes.axhline(current, color="#666666", linestyle=":", linewidth=1.2)
    axes.annotate(
        f"current selection only, {current:.1%}",
        (sizes[-1], current),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color="#444444",
    )
    if curve is not None:
        at = np.arange(top_k, min(len(curve), int(sizes[-1] * top_k) + 1))
        curve = np.where(curve, curve, np.nan)
        axes.plot(
            at / top_k, curve[at], color="#D55E00", linewidth=5, alpha=0.22, label="LRU, by stack distance"
        )
    for name, (colour, marker) in STYLES.items():
        thick = 2.4 if name == "LRU" else 1.3
        rates = [row.rate(name) or np.nan for row in totals]  # the axis is logarithmic
        axes.plot(sizes, rates, color=colour, marker=marker, markersize=6, linewidth=thick, label=name)
    paper = [PAPER_CURVE[size] for size in PAPER_CURVE]
    axes.plot(
        list(PAPER_CURVE), paper, "--", color="#D55E00", marker="o", markerfacecolor="white", linewidth=1, alpha=0.8,
        label="LRU in the HiSparse paper\n(GLM-5.1, 2048 tokens)",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 4, 6, 8, 16]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}x"))
    axes.set_xlabel(f"hot buffer, in selections ({top_k} records per lane)")
    axes.set_title("Records missed of those read: all layers, lanes and steps", fontsize=11)
    axes.legend(fontsize=9, loc="lower left", framealpha=0.95)


def _by_layer(axes: Axes, rows: list[Misses], top_k: int) -> None:
    for colour, slots in zip(SHADES, sorted({row.slots for row in rows}), strict=False):
        chosen = [row for row in rows if row.slots == slots]
        axes.plot(
            [row.layer for row in chosen],
            [row.rate("LRU") or np.nan for row in chosen],
            marker="o",
            markersize=4,
            color=colour,
            label=f"LRU, {slots / top_k:g}x",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_title("LRU, layer by layer", fontsize=11, pad=22)
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 0.99), ncols=4, frameon=False)


def _percent(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(
        FixedLocator([0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
