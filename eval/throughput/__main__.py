"""Decode speed and memory of `generate` with different caches, side by side in one process.

    python -m eval.throughput --model qwen3-8b --contexts 32768 --batches 1 8
    python -m eval.throughput --quick            # the whole path in a minute, on a CPU too

Each row is one `generate` call after a warm-up: prefill of random tokens, then `--new-tokens` greedy tokens. The shapes
named below have random weights: speed and bytes are those of the real model, the selections are not (keys of random weights have
little locality), so look at the misses beside each time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from eval.answers import Clock
from eval.environment import free_memory, write_csv
from eval.methods import Caches, Method, kv_bytes
from eval.shapes import SHAPES, build
from hf_hisparse import HiSparseCache, Quest


def measure(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, new_tokens: int, label: str
) -> dict[str, Any]:
    """Run one `generate`; return times, memory and counters."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    with tqdm(total=new_tokens, desc=label, leave=False) as bar:
        clock = Clock(bar)
        began = time.perf_counter()
        model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=[clock],
            pad_token_id=0,
        )
    first, *steps = [1000 * (after - before) for before, after in itertools.pairwise(clock.times)]
    result: dict[str, Any] = {
        "prefill_s": round(clock.times[0] - began, 2),
        "ms_first_step": round(first, 2),  # allocates, and captures or compiles
        "ms_per_step": round(statistics.median(steps), 2),
        "ms_min": round(min(steps), 2),
        "ms_max": round(max(steps), 2),
        "steps": len(steps),
    }
    if cuda:
        result["cache_bytes_allocator"] = torch.cuda.memory_allocated() - held
        result["peak_bytes_allocator"] = torch.cuda.max_memory_allocated()
    if isinstance(cache, HiSparseCache):
        stats, memory = cache.stats(), cache.memory()
        result |= {
            "hit_rate": round(stats.hit_rate, 4),
            "MB_fetched_per_step": round(stats.bytes_fetched / max(stats.steps, 1) / 1e6, 3),
            "buffer_bytes": memory.buffer_bytes,
            "selector_bytes": memory.selector_bytes,
            "table_bytes": memory.table_bytes,
            "native_bytes": memory.native_bytes,
            "host_bytes": memory.host_bytes,
        }
    else:
        result["native_bytes"] = kv_bytes(cache, ids.device)
    return result


def method(name: str, args: argparse.Namespace) -> Method:
    """The contender of this name; the dense ones have no settings."""
    if not name.startswith("hisparse"):
        return Method(name)
    return Method(name, args.token_budget, args.device_buffer_tokens)


def formula_bytes(model: PreTrainedModel, quest: Quest, buffer_tokens: int, batch: int) -> int:
    """Hot buffers by the formula: lanes x hosted layers x records of the device buffer x bytes of a record."""
    config = model.config
    record = quest.page_size * config.head_dim * 2 * model.dtype.itemsize
    lanes = batch * config.num_key_value_heads
    return (
        lanes * (config.num_hidden_layers - quest.dense_layers) * (buffer_tokens // quest.page_size) * record
    )


def main() -> None:
    """Read the command line, measure, print a table, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}, or a model id or folder"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768], help="prompt tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--offloaded-tokens", type=int, default=8, help="fewer, as it takes long")
    parser.add_argument(
        "--caches", nargs="+", default=["dynamic", "hisparse", "hisparse-resident", "offloaded"]
    )
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--device-buffer-tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=Path("eval/results/throughput.csv"))
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it works")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if args.quick:
        args.model, args.contexts, args.batches, args.new_tokens = "toy", [512], [1, 2], 8
        args.token_budget, args.device_buffer_tokens = 64, 128
        if device == "cpu":
            args.caches = [name for name in args.caches if name != "offloaded"]  # needs CUDA streams
    model = build(args.model, device, dtype)
    quest = Quest(args.token_budget)
    rows = []
    for context in args.contexts:
        for batch in args.batches:
            torch.manual_seed(context + batch)
            ids = torch.randint(10, model.config.vocab_size, (batch, context), device=device)
            for name in args.caches:
                tokens = (
                    min(args.new_tokens, args.offloaded_tokens) if name == "offloaded" else args.new_tokens
                )
                cache = Caches(model, method(name, args)).empty(context + args.new_tokens)
                row = {
                    "model": args.model,
                    "dtype": str(dtype),
                    "context": context,
                    "batch": batch,
                    "cache": name,
                }
                try:
                    row |= measure(model, cache, ids, tokens, f"{name} {context} x {batch}")
                except (torch.cuda.OutOfMemoryError, MemoryError) as error:
                    row["error"] = str(error).split("\n")[0]
                if name == "hisparse":
                    row["formula_bytes"] = formula_bytes(model, quest, args.device_buffer_tokens, batch)
                rows.append(row)
                print({key: value for key, value in row.items() if key not in ("model", "dtype")}, flush=True)
                del cache
                free_memory()
                if device == "cuda":
                    torch._C._host_emptyCache()  # torch keeps the pinned memory that offloading used
                write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
