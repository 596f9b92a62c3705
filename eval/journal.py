"""Results that survive a kill: one line per sample, appended by each process to a file of its own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.json_files import read_json


class Journal:
    """The lines of one process, on disk before `append` returns.

    Every sample is one line of JSON with a "key". A process killed while it writes leaves a torn last line, without a
    newline: readers leave it out, and the next process that opens the file cuts it off, so that sample is done again.

    Parameters
    ----------
    path : Path
        Made if it is not there; locked until `close`.

    Raises
    ------
    RuntimeError
        If another process has it open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise RuntimeError(
                f"{path} is being written by another process: wait for it, or take another output folder"
            ) from error
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line."""
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journals(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """All whole lines of these journals, by their key.

    Raises
    ------
    ValueError
        If a line that is not the last is not JSON: nothing here writes such a file.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(paths):
        *lines, _torn = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number} is not JSON: remove it to have it done again"
                ) from error
            entries.setdefault(entry["key"], entry)
    return entries


def digest(value: Any) -> str:
    """12 hexadecimal digits that say whether this JSON is that of another time."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it finds the old text or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note in `folder` what its results were made with, or refuse to mix them with others.

    Raises
    ------
    ValueError
        If the folder's results were made with other settings; names them.
    """
    settings = json.loads(json.dumps(settings))
    found = read_settings(folder)
    if found is not None:
        other = [
            f"{name}={there!r} there, {asked!r} asked" for name, there, asked in differing(found, settings)
        ]
        if other:
            raise ValueError(
                f"{folder} holds results of other settings ({'; '.join(other)}): take another output folder, or remove it"
            )
    write_whole(folder / _SETTINGS, json.dumps(settings, ensure_ascii=False, indent=4) + "\n")


_SETTINGS = "settings.json"


def read_settings(folder: Path) -> dict[str, Any] | None:
    """What the results in `folder` were made with, as `claim` noted it; None if it did not."""
    path = folder / _SETTINGS
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is {type(found).__name__}, must be a JSON object")
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name and both values of each setting that is not the same; None where there is none."""
    return [
        (name, one.get(name), other.get(name))
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]
