"""A program's command line: its parser, and flags with `_`, as official scripts write them, or `-` between their words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from eval.environment import program


def command_line(description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose usage names the command as it is typed, and whose help keeps the lines of a module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {program()}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def both_spellings(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """`parser.add_argument` for one long flag, which may then be written with ``-`` or ``_`` between its words."""

    def add(flag: str, **settings: Any) -> argparse.Action:
        words = flag.removeprefix("--")
        spellings = (flag, f"--{words.replace('_', '-')}", f"--{words.replace('-', '_')}")
        return parser.add_argument(*dict.fromkeys(spellings), **settings)

    return add
