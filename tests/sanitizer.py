"""The kernel tests under NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.

    python -m tests.sanitizer                                # on a GPU; writes eval/results/sanitizer.csv
    python -m tests.sanitizer --tools racecheck --kernels mla_decode resolve --seconds 300

Of tests/kernels, what launches a kernel. Tests run up to hundreds of times as long as usual, so a few at a time are dealt to
processes side by side; what --seconds ends counts as not run. Exit code 1 if anything is found or fails, or a process breaks off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from eval.environment import write_csv

KERNELS = Path(__file__).parent / "kernels"
TOOLS = ("memcheck", "racecheck")
# What a tool prints while a test runs stands between the test's name and how it ended.
_FINDING = re.compile(r"=========\s+(?:Invalid|Error|Race|Misaligned)")
_OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|SKIPPED|ERROR)(?: \(.*\))? +\[ *\d+%\]", re.MULTILINE)
_COLUMNS = ("tests", "passed", "failed", "skipped", "not_run", "found", "portions", "seen_to_the_end")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)


class Collector:
    """A pytest plugin that keeps the tests that launch kernels: those with the fixture `device`."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.tests = [item.nodeid for item in items if "device" in getattr(item, "fixturenames", ())]


def kernel_tests(names: list[str]) -> list[str]:
    """Ids of the tests of these kernels; of all where there are no names."""
    files = [str(KERNELS / f"test_{name}.py") for name in names] or [str(KERNELS)]
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()):
        failed = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files], plugins=[collector])
    if failed:
        raise SystemExit(f"no tests of {', '.join(names) or 'the kernels'} could be collected from {KERNELS}")
    return collector.tests


def portions(tests: list[str], together: int) -> Iterator[list[str]]:
    """The tests of each file by turns, so that the long ones, which stand side by side, come into several portions."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    for of_file in by_file.values():
        count = -(-len(of_file) // together)
        yield from (of_file[first::count] for first in range(count))


def check(tool: str, tests: list[str], until: float) -> Counter[str]:
    """Run some tests under a tool, and count how they end and what the tool finds; if anything, show what was printed."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "pytest", *tests]
    process = subprocess.Popen(
        [*command, "-v", "-p", "no:cacheprovider", "-p", "no:xdist"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(until - time.monotonic(), 0.0))
        broke_off = process.returncode != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool, and the tests that it runs
        output, _ = process.communicate()
        broke_off = False
    counts = counted(output, len(tests), broke_off)
    if counts["found"] or counts["failed"]:
        tqdm.write(output)
    return counts


def counted(output: str, tests: int, broke_off: bool = False) -> Counter[str]:
    """How many of so many tests ended how, and what was found, by what pytest and a tool printed.

    An error beside a test counts as a failure; so does, if no test failed, what a process broke off in of itself.
    """
    outcomes = Counter(_OUTCOME.findall(output))
    failed = outcomes["FAILED"] + outcomes["ERROR"] or int(broke_off)
    ended = {"passed": outcomes["PASSED"], "failed": failed, "skipped": outcomes["SKIPPED"]}
    summaries = _SUMMARY.findall(output)
    found = sum(map(int, summaries)) if summaries else len(_FINDING.findall(output))
    left = max(tests - sum(ended.values()), 0)  # a test that passed may end in an error
    return Counter(
        ended, tests=tests, not_run=left, found=found, portions=1, seen_to_the_end=int(bool(summaries))
    )


def main() -> None:
    """Run all, print a line for each tool and file, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--kernels", nargs="*", default=[], help="all if none are named")
    parser.add_argument("--jobs", type=int, default=12, help="processes side by side")
    parser.add_argument("--together", type=int, default=8, help="tests of a process")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, default=Path("eval/results/sanitizer.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("the sanitizer needs a GPU, and compute-sanitizer of the CUDA toolkit on the PATH")
    until = time.monotonic() + args.seconds
    work = [
        (tool, part) for part in portions(kernel_tests(args.kernels), args.together) for tool in args.tools
    ]
    sums: dict[tuple[str, str], Counter[str]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda item: check(*item, until), work)
        for (tool, part), counts in zip(work, tqdm(results, total=len(work), desc="portions"), strict=True):
            file = Path(part[0].partition("::")[0]).stem.removeprefix("test_")
            sums.setdefault((tool, file), Counter()).update(counts)
    rows: list[dict[str, Any]] = [
        {"tool": tool, "kernel": file} | {name: counts[name] for name in _COLUMNS}
        for (tool, file), counts in sorted(sums.items())
    ]
    for row in rows:
        print(row)
    write_csv(args.output, rows)
    print(f"written: {args.output}")
    if any(row["found"] or row["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
