"""Needle in a haystack, and RULER-like tasks: what a method still finds, by length and depth.

    python -m eval.needle                                                # SmolLM2 on whatever machine this is
    python -m eval.needle --model Qwen/Qwen3-8B --lengths 8192 32768 131072 --tasks needle niah_multikey_3 vt
    python -m eval.needle --data niah_multikey_3/validation.jsonl        # RULER's own files

Prompts are generated from the seed, to any length. Writes into --output_dir `needle.csv`, with the sparse decode steps, hit
rate, peak KV bytes on the GPU and tokens per second beside each score, and the heat map `needle.png`. If hisparse and
hisparse-resident both run, their answers are compared token by token; a difference makes the exit code 1. A run that was
killed goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval import models
from eval.answers import answer
from eval.environment import conditions, write_csv
from eval.flags import both_spellings, command_line
from eval.journal import Journal, claim, read_journals
from eval.methods import METHODS, Caches, Method
from eval.needle.heatmap import draw
from eval.needle.probes import Plan, Probe, from_ruler, generate
from eval.needle.tasks import TASKS, score
from eval.prompts import encode
from eval.report import report_row, table

Entries = Mapping[str, Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__, epilog="methods:\n" + "\n".join(f"  {name:18} {what}" for name, what in METHODS.items())
    )
    add = both_spellings(parser)
    add("--model", help="hub id or folder of a causal language model (SmolLM2-135M-Instruct)")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="(float32 on a CPU, else as the model was saved)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=["dynamic", "hisparse", "hisparse-resident"],
        metavar="METHOD",
        help="see below",
    )
    add("--tasks", nargs="+", default=["needle"], metavar="TASK", help=f"of {', '.join(TASKS)}")
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[512, 1024, 2048],
        help="tokens, answer included (%(default)s)",
    )
    add("--depths", nargs="+", type=float, default=[0, 0.25, 0.5, 0.75, 1], help="0 to 1 (%(default)s)")
    add("--samples", type=int, default=1, help="for each task, length and depth (%(default)s)")
    add("--data", nargs="+", type=Path, metavar="FILE", help="samples of RULER's own files instead")
    add("--limit", type=int, help="only so many samples of each file")
    add(
        "--token_budget",
        type=int,
        default=256,
        help="tokens that a sparse step reads per KV head (%(default)s)",
    )
    add("--device_buffer_tokens", type=int, help="tokens in hisparse's hot buffer (twice the budget)")
    add(
        "--question-as-decode",
        action="store_true",
        help="prefill the context only; feed the question through decode steps",
    )
    add("--seed", type=int, default=0)
    add("--output_dir", type=Path, default=Path("eval_output/needle"), help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit {args.limit}: must be at least 1")
    return args


def run(args: argparse.Namespace) -> int:
    """Ask, score, draw."""
    plan = Plan(args.tasks, args.lengths, args.depths, args.samples, args.seed)
    methods = [_method(name, args) for name in args.methods]
    conditions()  # measures the link, which needs memory that the model may leave none of
    model, tokenizer = models.load(args.model, args.device, args.dtype)
    settings = {
        name: getattr(args, name) for name in ("model", "token_budget", "device_buffer_tokens", "seed")
    }
    claim(
        args.output_dir / "journal",
        {**settings, "question_as_decode": args.question_as_decode, "dtype": str(model.dtype)},
    )
    if args.data:
        probes = from_ruler(args.data, args.limit)
    else:
        probes = list(tqdm(generate(plan, tokenizer), total=len(plan), desc="generating", unit="prompt"))

    found: dict[str, Entries] = {}
    rows: list[dict[str, Any]] = []
    for method in methods:
        journal = args.output_dir / "journal" / f"{method.name}.jsonl"
        found[method.name] = ask(Caches(model, method), tokenizer, probes, journal, args.question_as_decode)
        rows += score_rows(method.name, probes, found[method.name])
        write_csv(args.output_dir / "needle.csv", rows)
    draw(rows, args.output_dir / "needle.png", _caption(args, str(model.dtype)))
    print(f"{table(rows)}\nwritten: {args.output_dir}")
    return compare(probes, found)


def _method(name: str, args: argparse.Namespace) -> Method:
    method = Method(name)
    if not method.sparse:
        return method
    return Method(name, args.token_budget, None if method.resident else args.device_buffer_tokens)


def ask(caches: Caches, tokenizer: Any, probes: Sequence[Probe], path: Path, split: bool) -> Entries:
    """The answers of one method, from the journal where it has them."""
    done = read_journals([path] if path.exists() else [])
    missing = [probe for probe in probes if probe.key not in done]
    with Journal(path) as journal:
        for probe in tqdm(missing, desc=caches.method.name, unit="prompt"):
            prompt = encode(tokenizer, probe.question, split)
            result = answer(caches, prompt, probe.max_new_tokens)
            text = tokenizer.decode(result.tokens, skip_special_tokens=True)
            entry = {"key": probe.key, "answer": text, "tokens": result.tokens, **asdict(result.measures)}
            journal.append({**entry, "score": score(text, probe.expected), "expected": probe.expected})
    return read_journals([path])


def score_rows(method: str, probes: Sequence[Probe], entries: Entries) -> list[dict[str, Any]]:
    """A row for each task, length and depth."""

    places: dict[tuple[str, int, float | None], list[Mapping[str, Any]]] = {}
    for probe in probes:
        places.setdefault((probe.task, probe.length, probe.depth), []).append(entries[probe.key])
    rows = []
    for (task, length, depth), answers in places.items():
        mean = round(100 * sum(found["score"] for found in answers) / len(answers), 2)
        rows.append({"method": method, "length": length, "depth": depth, **report_row(task, mean, answers)})
    return rows


def compare(probes: Sequence[Probe], found: Mapping[str, Entries]) -> int:
    """Print whether hisparse and hisparse-resident answered the same, token by token; 1 if not."""
    if not {"hisparse", "hisparse-resident"} <= set(found):
        return 0
    small, resident = found["hisparse"], found["hisparse-resident"]
    differ = [probe.key for probe in probes if small[probe.key]["tokens"] != resident[probe.key]["tokens"]]
    print("\n".join(f"{key}: hisparse and hisparse-resident answer differently" for key in differ), end="")
    print(
        f"hisparse and hisparse-resident: {len(probes) - len(differ)} of {len(probes)} answers are identical"
    )
    return 1 if differ else 0


def _caption(args: argparse.Namespace, dtype: str) -> str:
    under = conditions()
    where = under["gpu"] if torch.cuda.is_available() else "on a CPU"
    sparse = f"sparse methods read {args.token_budget} tokens per step and KV head"
    if args.question_as_decode:
        sparse += ", the question fed through decode steps"
    return (
        f"{models.short_name(args.model)}, {dtype.removeprefix('torch.')}, {where}, torch {under['torch']}, "
        f"transformers {under['transformers']}; {sparse}\n{under['command']}"
    )


if __name__ == "__main__":
    sys.exit(main())
