"""What is asked: generated examples over lengths and depths, or samples of RULER's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.needle.tasks import TASKS, Example, example, fit
from eval.prompts import Question, encode


@dataclass(frozen=True)
class Probe:
    """One prompt to answer.

    Attributes
    ----------
    task : str
    length : int
        Tokens that prompt and answer may have.
    depth : float or None
        Where the needle stands, 0 to 1; None for tasks without.
    sample : int
    question : Question
    expected : tuple of str
    max_new_tokens : int
    """

    task: str
    length: int
    depth: float | None
    sample: int
    question: Question
    expected: tuple[str, ...]
    max_new_tokens: int

    @property
    def key(self) -> str:
        """A name that no other probe of a run has."""
        return f"{self.task}/{self.length}/{self.depth}/{self.sample}"


@dataclass(frozen=True)
class Plan:
    """What to generate.

    Attributes
    ----------
    tasks : sequence of str
        Keys of `TASKS`.
    lengths : sequence of int
    depths : sequence of float
    samples : int
        For each task, length and depth.
    seed : int
    """

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]
    samples: int
    seed: int

    def __post_init__(self) -> None:
        wrong = [name for name in self.tasks if name not in TASKS]
        if wrong:
            raise ValueError(f"unknown tasks {', '.join(wrong)}; there are {', '.join(TASKS)}")
        outside = [depth for depth in self.depths if not 0 <= depth <= 1]
        if outside:
            raise ValueError(f"depths {outside}, must be between 0 (the start) and 1 (the end)")
        if self.samples < 1:
            raise ValueError(f"samples={self.samples}, must be at least 1")

    def __len__(self) -> int:
        return sum(len(self.depths) if TASKS[name].has_depth else 1 for name in self.tasks) * (
            len(self.lengths) * self.samples
        )


def generate(plan: Plan, tokenizer: Any) -> Iterator[Probe]:
    """The probes of a plan; the same seed gives the same."""

    def count(made: Example) -> int:
        return len(encode(tokenizer, made.ask()).ids)

    for name in plan.tasks:
        task = TASKS[name]
        for length in plan.lengths:
            size = fit(name, tokenizer, length, f"{plan.seed}/{name}/{length}", count)
            for depth in plan.depths if task.has_depth else [None]:
                for sample in range(plan.samples):
                    seed = f"{plan.seed}/{name}/{length}/{depth}/{sample}"
                    made = example(task, tokenizer, length, size, depth or 0.0, seed, count)
                    yield Probe(name, length, depth, sample, made.ask(), made.expected, task.max_new_tokens)


def from_ruler(path: Path, limit: int | None) -> list[Probe]:
    """Samples of one of RULER's files, ``TASK.jsonl`` with index, input, outputs and length; asked as they are.

    Their question is the last line of "input". All count as of the length of the longest.

    Raises
    ------
    ValueError
        If the file is not in this format.
    """
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()][
        :limit
    ]
    fields = ("index", "input", "outputs", "length")
    if not samples or any(field not in sample for sample in samples for field in fields):
        raise ValueError(f"{path} is not one of RULER's files: its lines must have {', '.join(fields)}")
    length = max(sample["length"] for sample in samples)
    known = TASKS.get(path.stem)
    return [
        Probe(
            task=f"RULER {path.stem}",
            length=length,
            depth=None,
            sample=sample["index"],
            question=Question(sample["input"], sample["input"].rstrip().rpartition("\n")[2], chat=False),
            expected=tuple(sample["outputs"]),
            max_new_tokens=known.max_new_tokens if known else 128,
        )
        for sample in samples
    ]
