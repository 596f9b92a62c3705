"""The kernel tests under NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.

    python -m tests.sanitizer                                # on a GPU; writes eval/results/sanitizer.csv
    python -m tests.sanitizer --tools racecheck --kernels mla_decode resolve --seconds 300

Of tests/kernels, what launches a kernel, and of the kernels, the project's own: torch's would take most of the time, and
racecheck finds hazards in its attention. Tests run many times as long as usual, so a few at a time are dealt to processes side
by side; what --seconds ends counts as not run. First each tool must find what is wrong in a kernel made for it
(tests/faulty_kernels.py).
Rows of the CSV of other tools and kernels stay.
Exit code 1 if anything is found or fails, or a process breaks off.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from triton.runtime.jit import KernelInterface

import hisparse_kernels
from eval.environment import merge_rows, write_csv
from eval.flags import command_line
from eval.output import RESULTS
from hisparse_kernels.dispatch import ceil_div

KERNELS = Path(__file__).parent / "kernels"
FAULTS = Path(__file__).parent / "faulty_kernels.py"
# Each with what it must find in FAULTS.
TOOLS = {"memcheck": "test_a_read_past_the_end", "racecheck": "test_warps_that_write_to_one_place"}
# What a tool prints while a test runs stands between the test's name and how it ended.
_FINDING = re.compile(r"=========\s+(?:Invalid|Error|Race|Misaligned)")
_OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|SKIPPED|ERROR)(?: \(.*\))? +\[ *\d+%\]", re.MULTILINE)
_FAULT = re.compile(r"^=+ .*_faulty_", re.MULTILINE)  # a tool names the kernel
_COLUMNS = ("tests", "passed", "failed", "skipped", "not_run", "found", "portions", "seen_to_the_end")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Portion:
    """Tests of one file that one process runs.

    `captures` says that they capture CUDA graphs, and may not allocate memory meanwhile.
    """

    tests: tuple[str, ...]
    captures: bool = False

    @property
    def file(self) -> str:
        """The kernel that they test."""
        return Path(self.tests[0].partition("::")[0]).stem.removeprefix("test_")


class Collector:
    """A pytest plugin that keeps the tests that launch kernels, those with the fixture `device`, and which of them capture."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.captures: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.tests = [item.nodeid for item in items if "device" in getattr(item, "fixturenames", ())]
        self.captures = {item.nodeid for item in items if item.get_closest_marker("cuda_graph")}


def kernel_tests(names: list[str]) -> Collector:
    """The tests of these kernels; of all where there are no names."""
    files = [str(KERNELS / f"test_{name}.py") for name in names] or [str(KERNELS)]
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()):
        failed = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files], plugins=[collector])
    if failed or not collector.tests:
        raise SystemExit(f"no tests of {', '.join(names) or 'the kernels'} could be collected from {KERNELS}")
    return collector


def portions(collected: Collector, together: int) -> Iterator[Portion]:
    """The tests of each file by turns, so that the long ones, which stand side by side, come into several portions."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for test in collected.tests:
        groups.setdefault((test.partition("::")[0], test in collected.captures), []).append(test)
    for (_, captures), tests in groups.items():
        count = ceil_div(len(tests), together)
        yield from (Portion(tuple(tests[first::count]), captures) for first in range(count))


def own_kernels() -> list[str]:
    """Names of the project's kernels."""
    modules = [name for _, name, _ in pkgutil.iter_modules(hisparse_kernels.__path__)]
    return sorted(
        name
        for module in modules
        for name, value in vars(importlib.import_module(f"hisparse_kernels.{module}")).items()
        if name.endswith("_kernel") and isinstance(value, KernelInterface)
    )


def check(tool: str, portion: Portion, kernels: list[str], until: float) -> Counter[str]:
    """Run some tests under a tool that looks at these kernels, and count how they end and what it finds."""
    counts, output = run(tool, portion, kernels, until)
    if counts["found"] or counts["failed"]:
        tqdm.write(output)
    return counts


def run(tool: str, portion: Portion, kernels: list[str], until: float) -> tuple[Counter[str], str]:
    """The same, and what was printed."""
    command = ["compute-sanitizer", "--tool", tool]
    for kernel in kernels:
        command += ["--kernel-name", f"kernel_substring={kernel}"]
    command += [sys.executable, "-m", "pytest", "-v", "-pno:cacheprovider", "-pno:xdist", *portion.tests]
    # Memory of its own for each tensor: past the end of one that torch cuts from a larger piece, memcheck sees nothing wrong.
    own_memory = {} if portion.captures else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command,
        env=os.environ | own_memory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=max(until - time.monotonic(), 0.0))
        broke_off = process.returncode != 0
    except subprocess.TimeoutExpired:
        end(process)
        output, _ = process.communicate()
        broke_off = False
    _running.discard(process)
    return counted(output, len(portion.tests), broke_off), output


def end(process: subprocess.Popen[str]) -> None:
    """Kill a tool and the tests that it runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads to run tools in; what still runs when they are left is ended: Ctrl-C reaches no process in a session of its own."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):
            end(process)


def check_tools(tools: list[str], until: float) -> None:
    """Hold each tool to finding what is wrong in a kernel made for it: a filter that matches no kernel finds nothing anywhere."""
    for tool in tools:
        counts, output = run(tool, Portion((f"{FAULTS}::{TOOLS[tool]}",)), ["_faulty_"], until)
        if counts["found"] and _FAULT.search(output):
            continue
        if time.monotonic() >= until:
            raise SystemExit(
                f"{output}\n--seconds are over before {tool} has found {TOOLS[tool]}: give it more"
            )
        raise SystemExit(
            f"{output}\n{tool} does not find {TOOLS[tool]}, so that it finds nothing else says nothing"
        )


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


def at_least_one(text: str) -> int:
    """A number from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> None:
    """Run all, print a line for each tool and file, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--kernels", nargs="*", default=[], help="all if none are named")
    parser.add_argument("--jobs", type=at_least_one, default=12, help="processes side by side")
    parser.add_argument("--together", type=at_least_one, default=8, help="tests of a process")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "sanitizer.csv")
    args = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("the sanitizer needs a GPU, and compute-sanitizer of the CUDA toolkit on the PATH")
    until = time.monotonic() + args.seconds
    kernels = own_kernels()
    tools = list(dict.fromkeys(args.tools))
    work = [(tool, part) for part in portions(kernel_tests(args.kernels), args.together) for tool in tools]
    sums: dict[tuple[str, str], Counter[str]] = {}
    with workers(args.jobs) as pool:
        check_tools(tools, until)
        results = pool.map(lambda item: check(*item, kernels, until), work)
        for (tool, part), counts in zip(work, tqdm(results, total=len(work), desc="portions"), strict=True):
            sums.setdefault((tool, part.file), Counter()).update(counts)
    rows: list[dict[str, Any]] = [
        {"tool": tool, "kernel": file} | {name: counts[name] for name in _COLUMNS}
        for (tool, file), counts in sorted(sums.items())
    ]
    for row in rows:
        print(row)
    write_csv(args.output, merge_rows(args.output, rows, ("tool", "kernel")))
    print(f"written: {args.output}")
    if any(row["found"] or row["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
