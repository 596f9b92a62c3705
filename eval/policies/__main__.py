"""How much a hot buffer misses under other policies and at other sizes, by replaying what a real run selected.

    python -m eval.policies                    # records SmolLM2-135M with Quest over 7,000 tokens, then replays
    python -m eval.policies --trace run.npz    # replays a trace of your own: HiSparseCache.record_trace("run.npz")
    python -m eval.policies --quick            # a toy, in seconds

Writes eval/results/policies.csv (miss rates per layer and, first, over all layers) and the picture beside it, policies.png.
Before anything else, the replay under LRU must give the counters of the recorded cache, to the last miss. What the committed
figures say about the default buffer size: eval/results/policies.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from eval.environment import conditions, write_csv
from eval.flags import command_line
from eval.output import default_output
from eval.policies.plot import draw
from eval.policies.record import real_prompt, record, toy_prompt
from eval.policies.replay import Misses, check_against_live, lru_curve, replay
from eval.traces import CROP, PREFILL, STEP, Trace, load_trace
from hf_hisparse import Quest


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--trace", type=Path, help="replay this trace instead of recording one")
    add("--save-trace", type=Path, help="keep the recorded trace here")
    add("--tokens", type=int, default=7000, help="length of the prompt (%(default)s)")
    add("--new-tokens", type=int, default=400, help="tokens to sample (%(default)s)")
    add("--token-budget", type=int, default=512, help="of Quest (%(default)s)")
    add(
        "--multiples", type=float, nargs="+", default=[1, 1.25, 1.5, 2, 3, 4, 6, 8], help="buffer / selection"
    )
    add("--seed", type=int, default=0, help="of the sampled tokens")
    add(
        "--output",
        type=Path,
        help="the CSV, with a picture beside it; default: policies.csv where all results go, with --trace beside the trace",
    )
    add("--quick", action="store_true", help="a random model of toy size, to see that it works")
    args = parser.parse_args()
    if args.output is None:
        ours = default_output("policies.csv", args.quick)
        args.output = ours if args.trace is None else args.trace.with_suffix(".csv")
    if min(args.multiples) < 1:
        parser.error(f"--multiples {min(args.multiples):g}: a buffer holds a selection at least, 1")
    return args


def recorded(args: argparse.Namespace) -> Trace:
    """The trace that was given, or a new one."""
    if args.trace is not None:
        return load_trace(args.trace)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        args.tokens, args.new_tokens, args.token_budget = 400, 40, 64
    model, prompt = (toy_prompt if args.quick else real_prompt)(args.tokens, device)
    with tempfile.TemporaryDirectory() as folder:
        path = args.save_trace or Path(folder) / "trace.npz"
        record(model, prompt, Quest(args.token_budget), args.new_tokens, args.seed, path)
        return load_trace(path)


def describe(trace: Trace) -> str:
    """What was recorded."""
    lanes = next(iter(trace.selections.values())).shape[1]
    prompts = " and ".join(str(tokens) for tokens in trace.positions[trace.kinds == PREFILL])
    crops = int((trace.kinds == CROP).sum())
    return (
        f"{trace.model}, {trace.settings}, prompt of {prompts} tokens, {(trace.kinds == STEP).sum()} decode steps"
        f"{f', {crops} crops' if crops else ''}, {len(trace.layers)} hosted layers x {lanes} lanes"
    )


def table(totals: list[Misses], top_k: int) -> str:
    """Miss rates over all layers: a line per policy, a column per size."""
    lines = [f"{'buffer / selection':>24}" + "".join(f"{row.slots / top_k:>8g}x" for row in totals)]
    for policy in totals[0].policies:
        lines.append(f"{policy:>24}" + "".join(f"{row.rate(policy):>9.2%}" for row in totals))
    return "\n".join(lines)


def csv_row(row: Misses, trace: Trace) -> dict[str, Any]:
    """One line of the CSV: policies are columns."""
    return {
        "model": trace.model,
        "settings": trace.settings,
        "layer": "all" if row.layer is None else row.layer,
        "buffer_records": row.slots,
        "buffer_tokens": row.slots * trace.page_size,
        "buffer_selections": row.slots / trace.top_k,
        "selected": row.selected,
        **{policy: round(row.rate(policy), 5) for policy in row.policies},
    }


def main() -> None:
    """Record or load, check, replay, print, write."""
    args = parse_args()
    trace = recorded(args)
    what = describe(trace)
    print(what)
    check_against_live(trace)
    print(
        f"LRU at {trace.device_buffer_records} records: the replay gives the cache's own counters, layer by layer"
    )
    sizes = sorted({round(multiple * trace.top_k) for multiple in args.multiples})
    rows = replay(trace, sizes)
    totals = [row for row in rows if row.layer is None]
    print(table(totals, trace.top_k))
    curve = None
    if CROP not in trace.kinds:
        curve = lru_curve(trace, sizes[-1])
        gap = max(abs(curve[row.slots] - row.rate("LRU")) for row in totals)
        print(f"LRU by stack distance, all sizes in one pass, is within {100 * gap:.2f} points of it")
    write_csv(args.output, [csv_row(row, trace) for row in rows])
    picture = args.output.with_suffix(".png")
    shared = conditions()
    machine = shared["gpu"].removeprefix("none (").removesuffix(")")
    versions = f"torch {shared['torch']}, transformers {shared['transformers']}"
    caption = f"{what}.\n{shared['command']}   ({machine}, {versions})"
    shown = [size for size in (trace.top_k, 2 * trace.top_k, 4 * trace.top_k) if size in sizes]
    draw(picture, rows, trace.top_k, curve, shown, caption)
    print(f"written: {args.output}, {picture}")


if __name__ == "__main__":
    main()
