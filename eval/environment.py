"""What a figure depends on: the hardware, the versions, the measured link."""

from __future__ import annotations

import csv
import functools
import gc
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_hisparse.link import link_bandwidth
from hf_hisparse.needs import CONTEXT_BYTES


@functools.cache
def memory_bandwidth(size: int = 2**28, repeats: int = 8) -> float:
    """Bytes per second that a copy within the GPU's memory reads and writes; NaN without CUDA, or room for it. Measured once."""
    if not torch.cuda.is_available():
        return float("nan")
    try:
        source = torch.empty(size, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
    except torch.cuda.OutOfMemoryError:  # no reason to lose what a long run has found
        return float("nan")
    target.copy_(source)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        target.copy_(source)
    stop.record()
    stop.synchronize()
    return repeats * 2 * size / (start.elapsed_time(stop) / 1000)


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version, or "none"."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def conditions() -> dict[str, Any]:
    """GPU, driver, versions, and the bandwidths of link and GPU memory, as columns for a CSV; the first call measures."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)",
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "link_GB_per_s": round(link_bandwidth() / 1e9, 1),
        "memory_GB_per_s": round(memory_bandwidth() / 1e9, 1),
        "command": "python -m " + shlex.join([program(), *_arguments()]),
    }


def _arguments() -> list[str]:
    """The command line without the place of the output, which is no condition."""
    arguments = sys.argv[1:]
    for option in ("--output", "--output_dir"):
        if option in arguments:
            at = arguments.index(option)
            arguments = arguments[:at] + arguments[at + 2 :]
    return arguments


def program() -> str:
    """The module that runs, as `python -m` takes it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (spec.name if spec else sys.argv[0]).removesuffix(".__main__")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows, each with the conditions it was measured under; the file is replaced.

    A row that `read_csv` gave keeps the conditions it had.
    """
    shared = conditions()
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [*dict.fromkeys(name for row in rows for name in row if name not in shared), *shared]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({**shared, **row} for row in rows)


def merge_rows(path: Path, rows: list[dict[str, Any]], key: Sequence[str]) -> list[dict[str, Any]]:
    """`rows` in place of those of a CSV that have the same values under `key`, beside its other rows."""
    name = lambda row: tuple(str(row[part]) for part in key)  # noqa: E731
    new = {name(row): row for row in rows}
    kept = [new.pop(name(row), row) for row in read_csv(path)]
    return kept + list(new.values())


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write_csv` wrote, as text; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def limit_to(size: int | None) -> int:
    """Let this process have a GPU of `size` bytes, or all there is; those that torch may take of it, 0 for no limit."""
    if not torch.cuda.is_available():
        return 0
    limit = 0 if size is None else size - CONTEXT_BYTES
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total if limit else 1.0)
    return limit


def free_memory() -> None:
    """Give memory back that nothing refers to any more, the GPU's with it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
