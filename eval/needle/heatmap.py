"""The heat map: how much was found, by depth and length, a panel for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], path: Path, conditions: str) -> None:
    """Write a PNG.

    Parameters
    ----------
    rows
        Each with "method", "task", "length", "depth" (None for tasks without) and "score" (0 to 100).
    path
    conditions
        Printed under the panels.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the heat map needs matplotlib: pip install matplotlib (or -e '.[eval]')"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(row["method"] for row in rows))
    groups = _groups(rows)
    heights = [max(1.6, 0.42 * len(ys) + 1.0) for _, _, ys in groups]
    width = max(3.4, 0.8 * len(_values(rows, "length")) + 1.2)
    text = conditions.count("\n") + 1
    height = sum(heights) + 0.22 * text + 0.8
    figure, axes = plt.subplots(
        len(groups),
        len(methods),
        figsize=(width * len(methods) + 1.4, height),
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for line, (title, group, ys) in enumerate(groups):
        for column, method in enumerate(methods):
            cells = [row for row in group if row["method"] == method]
            image = _panel(axes[line][column], cells, ys, f"{title}: {method}" if title else method)
    figure.colorbar(image, ax=axes, label="found, %", shrink=0.8)
    figure.supxlabel(conditions, fontsize=8, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row], list[Any]]]:
    """Title, rows and what stands on the vertical axis: a group for each task with depth, one for the others together."""
    groups: list[tuple[str, list[Row], list[Any]]] = []
    for task in dict.fromkeys(row["task"] for row in rows if row["depth"] is not None):
        group = [row for row in rows if row["task"] == task]
        groups.append((task, group, _values(group, "depth")))
    rest = [row for row in rows if row["depth"] is None]
    if rest:
        groups.append(("", rest, _values(rest, "task")))
    return groups


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    return sorted({row[name] for row in rows})


def _panel(axes: Any, rows: Sequence[Row], ys: list[Any], title: str) -> Any:
    by_depth = not isinstance(ys[0], str)
    name = "depth" if by_depth else "task"
    lengths = _values(rows, "length")
    scores = {(row[name], row["length"]): row["score"] for row in rows}
    grid = [[scores.get((y, length), float("nan")) for length in lengths] for y in ys]
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (y, length), score in scores.items():
        readable = "black" if score > 60 else "white"
        axes.text(
            lengths.index(length),
            ys.index(y),
            f"{score:.0f}",
            ha="center",
            va="center",
            fontsize=9,
            color=readable,
        )
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(len(ys)), [f"{y:.0%}" if by_depth else y for y in ys], fontsize=8)
    axes.set_xlabel("tokens", fontsize=8)
    if by_depth:
        axes.set_ylabel("depth of the needle", fontsize=8)
    return image
