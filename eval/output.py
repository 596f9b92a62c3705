"""Where a measurement's rows go."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path("eval/results")
TOYS = Path(
    "eval_output/quick"
)  # not under version control: rows of toy sizes replace none of the project's own


def default_output(name: str, quick: bool) -> Path:
    """The file `name` among the results, or among what is made to see that a program works."""
    return (TOYS if quick else RESULTS) / name


def parse(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Add ``--output``, by default the CSV `name`, and parse the command line; the parser has ``--quick``."""
    parser.add_argument(
        "--output", type=Path, help=f"the CSV; default: {RESULTS / name}, with --quick {TOYS / name}"
    )
    args = parser.parse_args()
    if args.output is None:
        args.output = default_output(name, args.quick)
    return args
