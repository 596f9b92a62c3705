"""LongBench v1, LongBench-E and v2 with any cache, as the official scripts run them.

    python -m eval.longbench --data_dir FOLDER --method hisparse --model Qwen/Qwen3-8B
    accelerate launch -m eval.longbench --data_dir FOLDER --method hisparse ...     # samples spread over the GPUs
    torchrun --nproc_per_node 4 -m eval.longbench --data_dir FOLDER ...             # over processes, without GPUs too
    python -m eval.longbench --compare RUN_A RUN_B                                  # the same predictions?

A run that was killed goes on where it stopped when the same command is given again. Predictions and `result.json` are
written at the official places (``pred/MODEL/TASK.jsonl``, ``pred_e``, ``results/MODEL.jsonl``), MODEL being the model's and
the method's name; `report.csv` has for each score the sparse decode steps, hit rate, peak KV bytes on the GPU and tokens per
second. Without --model, SmolLM2-135M-Instruct answers.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from eval import models
from eval.environment import conditions, read_csv, write_csv
from eval.flags import both_spellings, command_line
from eval.journal import claim, digest, write_whole
from eval.json_files import read_json
from eval.longbench.compare import compare, compare_settings
from eval.longbench.jobs import V2, Job, chosen_tasks, v1_job, v2_job
from eval.longbench.predict import Entry, predict, write_predictions
from eval.longbench.prompts import load_config, load_v2_template
from eval.methods import METHODS, Caches, Method
from eval.report import report_row, table

# Left of the model's positions for the longest answer of v1 and the chat template.
_RESERVED = 512 + 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_args(argv)
    try:
        return run_compare(*args.compare) if args.compare else run(args)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__, epilog="methods:\n" + "\n".join(f"  {name:18} {what}" for name, what in METHODS.items())
    )
    add = both_spellings(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--e", action="store_true", help="LongBench-E, scores by length")
    which.add_argument("--v2", action="store_true", help="LongBench v2")
    which.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="two runs' folders (v1) or files (v2)"
    )
    add("--method", choices=METHODS, default="hisparse", metavar="METHOD", help="see below (%(default)s)")
    add("--model", help="hub id or folder of a causal language model")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="(float32 on a CPU, else as the model was saved)",
    )
    add("--device", help="device, or 'auto' to spread the model over all GPUs (one GPU a process)")
    add("--data_dir", type=Path, help="folder of the official jsonl (v2: data.json); default: from the hub")
    add(
        "--config_dir",
        type=Path,
        help="folder of the official prompts; default: those of the installed lm-eval",
    )
    add("--tasks", nargs="+", help="of v1 (all)")
    add("--limit", type=int, help="only so many samples of each task")
    add(
        "--max_length",
        type=int,
        help=f"tokens; longer prompts are cut in the middle (the model's positions - {_RESERVED})",
    )
    add("--token_budget", type=int, help="tokens that a sparse step reads per KV head (2048)")
    add("--device_buffer_tokens", type=int, help="tokens in hisparse's hot buffer (twice the budget)")
    add(
        "--question-as-decode",
        action="store_true",
        help="prefill the context only; feed the question, all that follows the context in the prompt, through decode steps",
    )
    add("--output_dir", type=Path, default=Path("eval_output/longbench"), help="(%(default)s)")
    args = parser.parse_args(argv)
    for name in ("limit", "max_length"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.v2 and args.tasks:
        parser.error("--tasks is for v1; v2 is one file")
    return args


def run(args: argparse.Namespace) -> int:
    """Predict, score, report."""
    # All processes wait for the slowest, however long it takes.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))
    method = Method(args.method, args.token_budget, args.device_buffer_tokens)
    name = f"{models.short_name(args.model)}-{method.name}"
    folder = args.output_dir / ("longbench_v2" if args.v2 else "pred_e" if args.e else "pred") / name
    jobs, prompts = make_jobs(args, folder, name)
    if state.is_main_process:
        conditions()  # measures the link, which needs memory that the model may leave none of
    model, tokenizer = models.load(args.model, args.device or state.device, args.dtype)
    max_length = (
        args.max_length or model.config.get_text_config(decoder=True).max_position_embeddings - _RESERVED
    )
    caches = Caches(model, method)
    settings = {
        "model": args.model,
        "dtype": str(model.dtype),
        **asdict(method),
        "max_length": max_length,
        "question_as_decode": args.question_as_decode,
        "prompts": prompts,
    }
    if state.is_main_process:
        claim(folder, settings)
    state.wait_for_everyone()

    rows = []
    for job in jobs:
        entries = predict(
            job, folder / "journal", caches, tokenizer, max_length, args.question_as_decode, state
        )
        if state.is_main_process:
            rows.append(finish(job, entries, method, folder))
    if state.is_main_process:
        print(f"{table(rows)}\nwritten: {folder}")
    state.destroy_process_group()
    return 0


def finish(job: Job, entries: list[Entry], method: Method, folder: Path) -> dict[str, Any]:
    """Write a job's predictions and its scores beside those that `folder` has of other jobs; returns its row of the report.

    `result.json` is for v1 and -E as official, for v2 it has the columns of the official `result.txt`.
    """
    score = job.score(write_predictions(job, entries))
    path = folder / "result.json"
    results = read_json(path) if path.exists() else {}
    results |= score if job.name == V2 and isinstance(score, dict) else {job.name: score}
    write_whole(path, json.dumps(results, ensure_ascii=False, indent=4) + "\n")
    row = {"method": method.name, **report_row(job.name, score, entries)}
    path = folder / "report.csv"
    others = [other for other in read_csv(path) if other["task"] != job.name]
    write_csv(path, [*others, row])
    return row


def make_jobs(args: argparse.Namespace, folder: Path, name: str) -> tuple[list[Job], str]:
    """The jobs, and what identifies their prompts."""
    if args.v2:
        template, source = load_v2_template(args.config_dir)
        jobs = [v2_job(template, args.output_dir / "results" / f"{name}.jsonl", args.data_dir, args.limit)]
        return jobs, f"{source} {digest(template)}"
    config = load_config(args.config_dir)
    tasks = chosen_tasks(args.tasks, args.e)
    jobs = [v1_job(task, args.e, config, folder, args.data_dir, args.limit) for task in tasks]
    return jobs, f"{config.source} {digest(config.prompts)}"


def run_compare(one: Path, other: Path) -> int:
    """Print whether two runs predicted the same, and before it which settings differ; 1 if predictions do."""
    settings = compare_settings(one, other)
    equal, differences = compare(one, other)
    print(
        *settings,
        *differences,
        f"{equal} predictions are identical, {len(differences)} differences",
        sep="\n",
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
