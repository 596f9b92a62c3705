"""JSON from files that people bring or have edited: what is wrong is said with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What a file of JSON holds (ValueError with file and line if it is not JSON)."""
    text = path.read_bytes()
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {_line(text, error)} is not JSON: {error}") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a file of JSON lines with their line's number, from 1; lines of white space are left out.

    Raises
    ------
    ValueError
        If a line is not JSON, or JSON but no object; names file and line.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number} is {type(found).__name__}, must be a JSON object")
        yield number, found


def _line(text: bytes, error: ValueError) -> int:
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    return text.count(b"\n", 0, getattr(error, "start", 0)) + 1  # bytes that are not UTF-8
