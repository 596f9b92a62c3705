"""Whether two runs predicted the same, sample by sample and token by token."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any


def compare(one: Path, other: Path) -> tuple[int, list[str]]:
    """Compare two files of predictions, or all that lie in two folders.

    Returns
    -------
    How many samples both have and agree on, and a sentence for each difference.

    Raises
    ------
    ValueError
        If there is nothing to compare.
    """
    files, others = _files(one), _files(other)
    equal, differences = 0, []
    for name in sorted({*files, *others}):
        if name not in files or name not in others:
            differences.append(f"{name}: only in {one if name in files else other}")
            continue
        same, found = _compare_files(name, _lines(files[name]), _lines(others[name]))
        equal += same
        differences += found
    return equal, differences


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"predictions": path}
    files = {file.stem: file for file in path.glob("*.jsonl")}
    if not files:
        raise ValueError(f"{path} is neither a file of predictions nor a folder of such (*.jsonl)")
    return files


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def _compare_files(
    name: str, lines: list[dict[str, Any]], others: list[dict[str, Any]]
) -> tuple[int, list[str]]:
    equal, differences = 0, []
    for line, other in zip_longest(lines, others):
        if line is None or other is None or line["_id"] != other["_id"]:
            ids = " and ".join(str(found and found["_id"]) for found in (line, other))
            differences.append(f"{name}: not the same samples, {ids} stand side by side")
            break
        if line["tokens"] == other["tokens"]:
            equal += 1
            continue
        pairs = enumerate(zip_longest(line["tokens"], other["tokens"]))
        at = next(index for index, (a, b) in pairs if a != b)
        differences.append(f"{name}, sample {line['_id']}: differs from new token {at} on")
    return equal, differences
