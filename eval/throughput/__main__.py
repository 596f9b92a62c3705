"""Milliseconds per token of `generate` with different caches, side by side in one process.

    python -m eval.throughput                      # Qwen3-8B's shape, 32,768 tokens; writes eval/results/throughput.csv
    python -m eval.throughput --trace eval/results/traces/smollm2-quest512.npz
    python -m eval.throughput --quick              # the whole path in a minute, on a CPU too
    python -m eval.plots eval/results/throughput.csv

Histories are random and put into each cache directly, no prefill (`python -m eval.prefill` times that); then `generate` decodes
`--new-tokens` greedy tokens. The first step, which allocates, captures or compiles, stands apart: times are medians of the
others, with the fastest and the slowest. One after another in the order of `--caches`, and again where a name stands again: how
far two runs of the same thing lie apart. Ratios are of the medians.

What HiSparse reads comes from a trace: a synthetic one with the miss curve of the HiSparse paper (eval.traces; about 87% hits in
a buffer of twice the budget), or a recorded one (`--trace`; how it is applied to another model: eval.selections.Recorded). With
`--random` Quest chooses among random keys, which have hardly any locality. Dense caches read all they hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eval.decoding import CONTENDERS, Contenders, Run, decode
from eval.environment import conditions, write_csv
from eval.flags import command_line
from eval.output import parse
from eval.selections import Recorded, Synthetic, Workload
from eval.shapes import SHAPES, build
from hf_hisparse import Quest


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--model", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}, or a model id or folder")
    add("--contexts", type=int, nargs="+", default=[32768], help="tokens held per row")
    add("--batches", type=int, nargs="+", default=[1, 8])
    add("--caches", nargs="+", default=[name for name in CONTENDERS if name != "static"], choices=CONTENDERS)
    add(
        "--offloaded-batches", type=int, nargs="*", default=[1], help="batches of offloaded, which takes long"
    )
    add("--new-tokens", type=int, default=64)
    add("--seconds", type=float, default=15, help="after which a run ends early")
    add("--token-budget", type=int, help="of Quest; default 2048, with --trace that of the trace")
    add("--device-buffer-tokens", type=int, help="default: twice the budget")
    add("--trace", type=Path, help="selections that record_trace wrote, instead of synthetic ones")
    add("--random", action="store_true", help="let Quest select among random keys")
    add("--seed", type=int, default=0, help="of the synthetic trace")
    add("--quick", action="store_true", help="toy sizes, to see that it works")
    args = parse(parser, "throughput.csv")
    if args.trace is not None and args.random:
        parser.error("--trace and --random: give one")
    if args.quick:
        args.model, args.contexts, args.batches, args.new_tokens = "toy", [700], [1, 2], 8
        if args.trace is None:
            args.token_budget = 64
        if not torch.cuda.is_available():
            args.caches = [name for name in args.caches if name != "offloaded"]
    return args


def workload_of(args: argparse.Namespace) -> tuple[Quest, Workload | None]:
    """Quest as it is to run, and where selections come from."""
    if args.trace is None:
        quest = Quest(2048 if args.token_budget is None else args.token_budget)
        return quest, None if args.random else Synthetic(quest, args.seed)
    recorded = Recorded(args.trace)
    if args.token_budget not in (None, recorded.quest.token_budget):
        raise ValueError(
            f"--token-budget {args.token_budget}, but {args.trace} was recorded with {recorded.quest}: leave it out"
        )
    return recorded.quest, recorded


def compare(contenders: Contenders, workload: Workload | None, runs: list[Run]) -> list[dict[str, Any]]:
    """A row for each run of one context and batch, with its contender's time as a multiple of the others'."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        row: dict[str, Any] = {"context": run.context, "batch": run.batch, "cache": run.cache}
        try:
            row |= decode(contenders, run, workload)
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            row["error"] = str(error).split("\n")[0]
        contenders.rest()
        rows.append(row)
        print(row, flush=True)
    times: dict[str, list[float]] = {}
    for row in rows:
        if "ms_per_step" in row:
            times.setdefault(row["cache"], []).append(row["ms_per_step"])
    for row in rows:
        for name, column in (("hisparse-resident", "times_resident"), ("hisparse", "times_hisparse")):
            if name in times and row["cache"] in times:
                row[column] = round(median(times[row["cache"]]) / median(times[name]), 3)
    return rows


def main() -> None:
    """Measure, print, write the CSV."""
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    conditions()  # measures, while the memory is empty
    try:
        quest, workload = workload_of(args)
        contexts = [workload.history(context) if workload else context for context in args.contexts]
    except ValueError as error:
        raise SystemExit(f"eval.throughput: {error}") from error
    model = build(args.model, device)
    contenders = Contenders(model, quest)
    buffer = args.device_buffer_tokens or 2 * quest.token_budget
    shared = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "selections": "random keys" if workload is None else workload.name,
        "token_budget": quest.token_budget,
    }
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for batch in args.batches:
            names = [name for name in args.caches if name != "offloaded" or batch in args.offloaded_batches]
            runs = [Run(name, batch, context, args.new_tokens, buffer, args.seconds) for name in names]
            rows += [shared | row for row in compare(contenders, workload, runs)]
            write_csv(args.output, rows)
    contenders.close()
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
