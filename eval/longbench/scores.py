"""Scores of whole files of predictions, as the official `eval.py` (v1 and -E) and `result.py` (v2) make them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval.longbench.metrics import METRICS
from eval.longbench.tasks import TASKS

Line = Mapping[str, Any]
Scores = dict[str, float | None]


def score(task: str, lines: Sequence[Line]) -> float:
    """0 to 100: the mean over all samples of the best match with one of the answers."""
    return round(100 * sum(score_line(task, line) for line in lines) / len(lines), 2)


def score_e(task: str, lines: Sequence[Line]) -> Scores:
    """The same by the length of the context, in words or characters; None where there are no samples."""
    groups: dict[str, list[float]] = {"0-4k": [], "4-8k": [], "8k+": []}
    for line in lines:
        name = "0-4k" if line["length"] < 4000 else "4-8k" if line["length"] < 8000 else "8k+"
        groups[name].append(score_line(task, line))
    return {name: _percent(scores, 2) for name, scores in groups.items()}


def score_line(task: str, line: Line) -> float:
    """0 to 1, for a line with "pred", "answers" and "all_classes"."""
    metric, prediction = METRICS[TASKS[task].metric], line["pred"]
    if TASKS[task].first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((metric(prediction, answer, line["all_classes"]) for answer in line["answers"]), default=0.0)


def extract_choice(response: str) -> str | None:
    """The letter in "The correct answer is (X)", the brackets may be missing; None if it is not there."""
    response = response.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        match = re.search(pattern, response)
        if match:
            return match.group(1)
    return None


def score_v2(lines: Sequence[Line]) -> Scores:
    """Share of right answers in percent: overall, by difficulty and by length; None where there are no samples.

    An answer that names no choice is wrong.
    """
    groups = {
        "Overall": lines,
        "Easy": [line for line in lines if line["difficulty"] == "easy"],
        "Hard": [line for line in lines if line["difficulty"] != "easy"],
        "Short": [line for line in lines if line["length"] == "short"],
        "Medium": [line for line in lines if line["length"] == "medium"],
        "Long": [line for line in lines if line["length"] not in ("short", "medium")],
    }
    return {name: _percent([float(line["judge"]) for line in group], 1) for name, group in groups.items()}


def _percent(scores: Sequence[float], digits: int) -> float | None:
    return round(100 * sum(scores) / len(scores), digits) if scores else None
