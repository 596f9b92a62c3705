"""Long flags in both spellings: `--token_budget`, as the official scripts write theirs, and `--token-budget`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def both_spellings(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """`parser.add_argument` for one long flag, which may then be written with ``-`` or ``_`` between its words."""

    def add(flag: str, **settings: Any) -> argparse.Action:
        words = flag.removeprefix("--")
        spellings = (flag, f"--{words.replace('_', '-')}", f"--{words.replace('-', '_')}")
        return parser.add_argument(*dict.fromkeys(spellings), **settings)

    return add
