"""Samples of LongBench: the official files, or a copy on the hub that today's `datasets` can read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from eval.json_files import read_json, read_json_lines

# The original, THUDM/LongBench, is a script that `datasets` no longer runs; this is the copy that lm-eval reads.
HUB_V1 = "Xnhyacinth/LongBench"
HUB_V2 = "THUDM/LongBench-v2"

Sample = dict[str, Any]


def load_v1(task: str, e: bool, data_dir: Path | None, limit: int | None) -> list[Sample]:
    """The samples of one task in their order, each with an "_id" of its own.

    Parameters
    ----------
    task
        A key of `TASKS`.
    e
        Those of LongBench-E.
    data_dir
        A folder with the official ``TASK.jsonl`` and ``TASK_e.jsonl`` (their archive's ``data``); None asks the hub.
    limit
        Only so many, from the start.

    Raises
    ------
    ValueError
        If there is no such file, or a sample lacks a field.
    """
    name = f"{task}_e" if e else task
    samples = _from_hub(HUB_V1, name, "test") if data_dir is None else _read(data_dir, f"{name}.jsonl")
    if data_dir is None:  # the copy calls the input "question"; what it leaves out of the ids is numbered
        samples = [
            {"_id": f"{name}-{number}", "input": sample.get("question"), **sample}
            for number, sample in enumerate(samples)
        ]
    return _checked(samples[:limit], ("_id", "input", "context", "answers", "length", "all_classes"), name)


def load_v2(data_dir: Path | None, limit: int | None) -> list[Sample]:
    """The samples of v2: ``data.json`` or ``data.jsonl`` in `data_dir`, or from the hub."""
    samples = (
        _from_hub(HUB_V2, None, "train") if data_dir is None else _read(data_dir, "data.json", "data.jsonl")
    )
    return _checked(samples[:limit], V2_FIELDS, "LongBench v2")


V2_FIELDS = (
    "_id",
    "domain",
    "sub_domain",
    "difficulty",
    "length",
    "question",
    "choice_A",
    "choice_B",
    "choice_C",
    "choice_D",
    "answer",
    "context",
)


def keys(samples: list[Sample]) -> list[str]:
    """A name for each sample that no other has: its "_id", numbered if it comes again."""
    seen: Counter[str] = Counter()
    names = []
    for sample in samples:
        seen[sample["_id"]] += 1
        times = seen[sample["_id"]]
        names.append(sample["_id"] if times == 1 else f"{sample['_id']}#{times}")
    return names


def _read(folder: Path, *names: str) -> list[Sample]:
    """The first of these files that is there: JSON, or JSON lines."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        there = ", ".join(sorted(path.name for path in folder.glob("*.json*"))) or "no such files"
        raise ValueError(
            f"--data_dir {folder} has no {' or '.join(names)} (there: {there}): name the tasks with --tasks"
        )
    if path.suffix != ".json":
        return [sample for _, sample in read_json_lines(path)]
    samples = read_json(path)
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError(f"{path} must be a list of JSON objects: this is not the official file")
    return samples


def _from_hub(dataset: str, name: str | None, split: str) -> list[Sample]:
    try:
        import datasets

        return [dict(sample) for sample in datasets.load_dataset(dataset, name, split=split)]
    except Exception as error:
        raise ValueError(
            f"{name or 'the samples'} could not be loaded from {dataset} on the hub ({type(error).__name__}: {error}): give the "
            "official files with --data_dir"
        ) from error


def _checked(samples: list[Sample], fields: tuple[str, ...], name: str) -> list[Sample]:
    for number, sample in enumerate(samples, start=1):
        missing = [field for field in fields if field not in sample]
        if missing:
            raise ValueError(
                f"sample {number} of {name} has no {', '.join(missing)}: these are not the official files"
            )
    if not samples:
        raise ValueError(f"{name} has no samples")
    return samples
