"""What stands beside a score: how sparse the decoding was, what it held, how fast it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def report_row(
    task: str, score: float | Mapping[str, float | None], entries: Sequence[Mapping[str, Any]]
) -> Row:
    """One task's score, or scores by group, and the measures of its answers (see `eval.answers.Measures`).

    `sparse_steps` is a sum over samples, `prompt_tokens` and `new_tokens` are means, `peak_kv_bytes` is the largest,
    `hit_rate` is that of all records read, `tokens_per_s` counts new tokens after each answer's first.
    """

    def total(name: str) -> float:
        return sum(entry[name] for entry in entries)

    groups = score.items() if isinstance(score, Mapping) else [("", score)]
    scores = {f"score {name}".strip(): value for name, value in groups}
    later = total("new_tokens") - len(entries)
    return {
        "task": task,
        **scores,
        "samples": len(entries),
        "prompt_tokens": round(total("prompt_tokens") / len(entries)),
        "new_tokens": round(total("new_tokens") / len(entries), 1),
        "sparse_steps": total("sparse_steps"),
        "hit_rate": round(total("hits") / total("selected"), 4) if total("selected") else None,
        "peak_kv_bytes": max(entry["kv_bytes"] for entry in entries),
        "prompt_s": round(total("prompt_s") / len(entries), 3),
        "tokens_per_s": round(later / total("decode_s"), 2) if later and total("decode_s") else None,
    }


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal, aligned; a dash where there is no value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
