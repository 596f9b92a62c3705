"""A long conversation in the memory of a small card: what it holds, and what a token takes, turn by turn."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eval.plots.page import CACHES, Row, number, save, short, tidy, write_above
from hf_hisparse.host_memory import parse_bytes

GIB = 2**30
_RUNS = {  # cache and selection -> colour, name
    ("DynamicCache", "all"): (CACHES["dynamic"][0], "DynamicCache"),
    ("HiSparseCache", "quest"): ("#E69F00", "HiSparseCache, random keys"),
    ("HiSparseCache", "trace"): (CACHES["hisparse"][0], "HiSparseCache, trace with the paper's miss curve"),
}


def plot_small_card(rows: list[Row], target: Path) -> None:
    """Peak memory beside the cap, and milliseconds per token; a group of bars per turn.

    Parameters
    ----------
    rows : list of dict
        As `eval.small_card` writes them.
    target : Path
        The PNG file.
    """
    figure, (memory, time) = plt.subplots(2, 1, figsize=(10, 8.5))
    turns = sorted({int(row["turn"]) for row in rows})
    for row in rows:
        run = (row["cache"], row["selection"])
        at = (len(_RUNS) + 1) * turns.index(int(row["turn"])) + list(_RUNS).index(run)
        _memory(memory, at, row, _RUNS[run][0])
        _time(time, at, row, _RUNS[run][0])
    limit = max(number(row, "limit_bytes") or 0.0 for row in rows)
    memory.axhline(limit / GIB, color="black", linewidth=1, label="what torch may take")
    card = parse_bytes(rows[0]["memory"], "memory") / GIB
    memory.axhline(card, color="black", linewidth=1, linestyle="--", label="the card")
    memory.bar(0, 0, color="#333333", alpha=0.35, label="held by torch beyond tensors")
    memory.bar(
        0, 0, color="#dddddd", hatch="///", edgecolor="#777777", label="outside torch, on the whole GPU"
    )
    memory.legend(fontsize=7, loc="upper center", ncols=4, frameon=False)
    memory.margins(y=0.12)
    memory.set_ylabel("GiB")
    memory.set_title(f"peak of each turn in a card of {rows[0]['memory']}", fontsize=10)
    time.margins(y=0.25)
    time.set_ylabel("ms per token")
    time.set_title("decoding: median step, hits, slowest step", fontsize=10)
    for panel in (memory, time):
        panel.set_xlim(-1, (len(_RUNS) + 1) * len(turns) - 1)
        panel.set_xticks(
            [(len(_RUNS) + 1) * place + 1 for place in range(len(turns))],
            [_turn(rows, turn) for turn in turns],
            fontsize=8,
        )
        tidy(panel)
    marks = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in _RUNS.values()]
    figure.legend(
        marks, [name for _, name in _RUNS.values()], loc="upper center", ncols=3, frameon=False, fontsize=8
    )
    settings = next((row for row in rows if row.get("token_budget")), None)
    quest = (
        f"Quest({settings['token_budget']}), device_buffer_tokens={settings['device_buffer_tokens']}, "
        if settings
        else ""
    )
    save(
        figure,
        target,
        rows,
        f"{rows[0]['model']} with random weights, batch 1, one generate per turn on the same cache, chunks of "
        f"{rows[0]['prefill_chunk']}; {quest}"
        "the trace begins after the prompt.",
        top=0.97,
    )


def _memory(panel: Axes, at: int, row: Row, colour: str) -> None:
    """Tensors, what else torch holds, and what lies outside, one on the other."""
    tensors, held, outside = (
        (number(row, name) or 0.0) / GIB
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "outside_bytes")
    )
    panel.bar(at, tensors, color=colour)
    panel.bar(at, held - tensors, bottom=tensors, color=colour, alpha=0.35)
    panel.bar(at, outside, bottom=held, color="#dddddd", hatch="///", edgecolor="#777777")
    if row.get("error"):
        text = f"out of memory at {int(row['tokens']):,} tokens"
        panel.text(at, tensors / 2, text, rotation=90, ha="center", va="center", fontsize=8, color="white")


def _time(panel: Axes, at: int, row: Row, colour: str) -> None:
    median = number(row, "ms_per_token")
    if median is None:
        write_above(panel, at, 0, "out of memory", upright=True)
        return
    panel.bar(at, median, color=colour)
    slowest, hits = number(row, "ms_max"), number(row, "hit_rate")
    assert slowest is not None and hits is not None
    write_above(panel, at, median, f"{short(median)} ms\n{hits:.0%} hits\nto {short(slowest)}")


def _turn(rows: list[Row], turn: int) -> str:
    row = next(row for row in rows if int(row["turn"]) == turn)
    return f"turn {turn}\n{int(row['prompt_tokens']):,} new prompt tokens"
