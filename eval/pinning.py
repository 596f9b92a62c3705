"""How fast host memory is pinned: a layer's host pool beside ``torch.empty(pin_memory=True)``, in one process.

    python -m eval.pinning
    python -m eval.pinning --quick     # small, and without a GPU: memory is touched, not pinned

Each row is fresh memory: the median of some allocations, each given back before the next.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from eval.environment import write_csv
from eval.flags import command_line
from eval.output import parse
from hf_hisparse.host_memory import PinnedArea, touch

GIB = 2**30


def pool(size: int) -> PinnedArea:
    """Memory as a host pool takes it."""
    area = PinnedArea(size, pin=torch.cuda.is_available())
    area.grow(size)
    if not torch.cuda.is_available():
        touch(area.bytes.data_ptr(), size)
    return area


def grown(size: int) -> PinnedArea:
    """The same in eight steps, as a history grows."""
    area = PinnedArea(size, pin=torch.cuda.is_available())
    for step in range(1, 9):
        before = area.size
        area.grow(size * step // 8)
        if not torch.cuda.is_available():
            touch(area.bytes.data_ptr() + before, area.size - before)
    return area


def torch_pinned(size: int) -> torch.Tensor:
    """Memory as torch takes it."""
    if not torch.cuda.is_available():
        return torch.zeros(size, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def seconds(allocate: Callable[[int], Any], size: int, repeats: int) -> list[float]:
    """What each allocation took; the memory goes back in between."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        held = allocate(size)
        times.append(time.perf_counter() - began)
        del held
        gc.collect()
        if torch.cuda.is_available():
            torch._C._host_emptyCache()  # torch keeps what it has pinned
    return times


def main() -> None:
    """Read the command line, measure, print a table, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.5, 2, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    args = parse(parser, "pinning.csv")
    if args.quick:
        args.gib, args.repeats = [0.05], 2
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.empty(1, device="cuda")
    rows = []
    contenders = {"host pool": pool, "host pool, 8 steps": grown, "torch pin_memory": torch_pinned}
    for gib in tqdm(args.gib, desc="sizes"):
        size = int(gib * GIB) // 2**21 * 2**21
        for name, allocate in contenders.items():
            times = seconds(allocate, size, args.repeats)
            median = statistics.median(times)
            rows.append(
                {
                    "memory": name,
                    "GiB": round(size / GIB, 3),
                    "s_per_GiB": round(median / size * GIB, 4),
                    "s_per_GiB_min": round(min(times) / size * GIB, 4),
                    "s_per_GiB_max": round(max(times) / size * GIB, 4),
                    "GiB_per_s": round(size / GIB / median, 2),
                    "pinned": torch.cuda.is_available(),
                }
            )
            print(rows[-1], flush=True)
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
