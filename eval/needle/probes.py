"""What is asked: generated examples over lengths and depths, or samples of RULER's own files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.journal import digest
from eval.json_files import read_json_lines
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

    @cached_property
    def key(self) -> str:
        """A name that no other probe of a run has, and that this one loses when what is asked or expected changes."""
        return f"{self.task}/{self.length}/{self.depth}/{self.sample}/{digest(asdict(self))}"


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


def from_ruler(paths: Sequence[Path], limit: int | None) -> list[Probe]:
    """Samples of RULER's files, ``TASK/validation.jsonl`` or ``TASK.jsonl``, at most `limit` of each; asked as they are.

    Their lines have index, input, outputs and length. The question is the last line of "input". All samples of a file count
    as of the length of the longest.

    Raises
    ------
    ValueError
        If a file is not in this format, or a sample comes twice.
    """
    probes = [probe for path in paths for probe in _ruler_file(path, limit)]
    seen: set[str] = set()
    for probe in probes:
        if probe.key in seen:
            raise ValueError(
                f"--data: sample {probe.sample} of {probe.task} comes twice: give each file once"
            )
        seen.add(probe.key)
    return probes


_SPLITS = ("validation", "test", "train")  # RULER names its files so, and their folder after the task
_RULER_FIELDS = {"index": int, "input": str, "outputs": list, "length": int}
_RULER_ANSWERS = {
    "qa_1": 32,
    "qa_2": 32,
}  # tokens to generate in RULER's tasks that `TASKS` lacks; 128 in the others


def _ruler_file(path: Path, limit: int | None) -> list[Probe]:
    task = path.resolve().parent.name if path.stem in _SPLITS else path.stem
    lines = list(read_json_lines(path))[:limit]
    line_of: dict[int, int] = {}
    for number, sample in lines:
        _check_ruler(sample, f"{path}, line {number}")
        first = line_of.setdefault(sample["index"], number)
        if first != number:
            raise ValueError(f"{path}, line {number} has the index {sample['index']} of line {first}")
    if not lines:
        raise ValueError(f"{path} has no samples")
    length = max(sample["length"] for _, sample in lines)
    known = TASKS.get(task)
    return [
        Probe(
            task=f"RULER {task}",
            length=length,
            depth=None,
            sample=sample["index"],
            question=Question(sample["input"], sample["input"].rstrip().rpartition("\n")[2], chat=False),
            expected=tuple(sample["outputs"]),
            max_new_tokens=known.max_new_tokens if known else _RULER_ANSWERS.get(task, 128),
        )
        for _, sample in lines
    ]


def _check_ruler(sample: dict[str, Any], where: str) -> None:
    wrong = [name for name, kind in _RULER_FIELDS.items() if not isinstance(sample.get(name), kind)]
    if wrong:
        shown = ", ".join(
            f"{name}={sample[name]!r:.60}" if name in sample else f"no {name}" for name in wrong
        )
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in _RULER_FIELDS.items())
        raise ValueError(
            f"{where} is not of one of RULER's files: it has {shown}; its lines must have {wanted}"
        )
    outputs = sample["outputs"]
    if not outputs or not all(isinstance(output, str) for output in outputs):
        raise ValueError(f"{where} has outputs={outputs!r:.60}, must be a list of at least one string")
