"""Whether two runs predicted the same, sample by sample and token by token."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

from eval.journal import differing, read_settings
from eval.json_files import read_json_lines
from eval.longbench.jobs import V2


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


def compare_settings(one: Path, other: Path) -> list[str]:
    """A sentence for each setting in which two runs differ, given as for `compare`; or for a run whose settings are unknown.

    Nothing if the settings of neither are known.
    """
    settings, others = _settings(one), _settings(other)
    if settings is None and others is None:
        return []
    if settings is None or others is None:
        return [f"settings: there is no settings.json of {one if settings is None else other}"]
    return [f"settings: {name} is {a!r} and {b!r}" for name, a, b in differing(settings, others)]


def _settings(path: Path) -> dict[str, Any] | None:
    """Beside the predictions; those of v2 have them where their journal is, and predictions at the official place."""
    if path.is_dir():
        return read_settings(path)
    return read_settings(path.parent) or read_settings(path.parent.parent / V2 / path.stem)


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"predictions": path}
    files = {file.stem: file for file in path.glob("*.jsonl")}
    if not files:
        raise ValueError(f"{path} is neither a file of predictions nor a folder of such (*.jsonl)")
    return files


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, line in read_json_lines(path):
        missing = [field for field in ("_id", "tokens") if field not in line]
        if missing:
            raise ValueError(
                f"{path}, line {number} has no {' and no '.join(missing)}: these are not predictions of eval.longbench"
            )
        lines.append(line)
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
