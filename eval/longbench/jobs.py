"""What there is to predict: one job for each official file of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.longbench import prompts, scores
from eval.longbench.data import V2_FIELDS, Sample, load_v1, load_v2
from eval.longbench.metrics import check_installed
from eval.longbench.prompts import Config
from eval.longbench.tasks import TASKS
from eval.prompts import Question

V2 = "longbench_v2"


@dataclass(frozen=True)
class Job:
    """One file of predictions.

    Attributes
    ----------
    name : str
    samples : list of dict
    path : Path
        The file, at its official place.
    max_new_tokens : int
    ask : callable
        Sample -> its prompt.
    line : callable
        Sample and answer -> its line in the file, with the official fields.
    score : callable
        All lines -> a number, or numbers by group.
    truncate : callable
        How a prompt that is too long is cut.
    stop_at_newline : bool
    """

    name: str
    samples: list[Sample]
    path: Path
    max_new_tokens: int
    ask: Callable[[Sample], Question]
    line: Callable[[Sample, str], dict[str, Any]]
    score: Callable[[list[dict[str, Any]]], float | scores.Scores]
    truncate: Callable[[Any, str, int], str] = prompts.truncate_middle
    stop_at_newline: bool = False


def v1_job(
    task: str, e: bool, config: Config, folder: Path, data_dir: Path | None = None, limit: int | None = None
) -> Job:
    """A task of v1 or LongBench-E; its predictions go to ``folder/TASK.jsonl``."""
    settings = TASKS[task]
    check_installed(settings.metric)
    if task not in config.prompts:
        raise ValueError(f"there is no prompt for {task} in the {config.source}")
    template = config.prompts[task]
    return Job(
        name=task,
        samples=load_v1(task, e, data_dir, limit),
        path=folder / f"{task}.jsonl",
        max_new_tokens=config.max_new_tokens.get(task, settings.max_new_tokens),
        ask=lambda sample: prompts.ask(template, sample, settings.chat),
        line=lambda sample, pred: {
            "pred": pred,
            **{name: sample[name] for name in ("answers", "all_classes", "length", "_id")},
        },
        score=lambda lines: (scores.score_e if e else scores.score)(task, lines),
        stop_at_newline=settings.stop_at_newline,
    )


def v2_job(template: str, path: Path, data_dir: Path | None = None, limit: int | None = None) -> Job:
    """LongBench v2, all of it in one file. Greedy, where the official script samples at temperature 0.1."""

    def line(sample: Sample, response: str) -> dict[str, Any]:
        response = response.strip()
        choice = scores.extract_choice(response)
        return {
            **{name: sample[name] for name in V2_FIELDS},
            "response": response,
            "pred": choice,
            "judge": choice == sample["answer"],
            "context": sample["context"].strip()[:1000],
        }

    return Job(
        name=V2,
        samples=load_v2(data_dir, limit),
        path=path,
        max_new_tokens=128,
        ask=lambda sample: prompts.ask_v2(template, sample),
        line=line,
        score=scores.score_v2,
        truncate=prompts.truncate_middle_v2,
    )


def chosen_tasks(names: Sequence[str] | None, e: bool) -> list[str]:
    """The tasks asked for, or all; in the official order.

    Raises
    ------
    ValueError
        If one is unknown, or LongBench-E does not have it.
    """
    known = [name for name, task in TASKS.items() if task.in_e or not e]
    wrong = sorted(set(names or ()) - set(known))
    if wrong:
        raise ValueError(
            f"unknown tasks {', '.join(wrong)}; LongBench{'-E' if e else ''} has {', '.join(known)}"
        )
    return [name for name in known if not names or name in names]
