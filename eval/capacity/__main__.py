"""Tokens per second in the memory of a card: each cache with the batch that serves most.

    python -m eval.capacity            # on a GPU; writes eval/results/capacity.csv
    python -m eval.capacity --quick    # toy sizes, on a CPU too
    python -m eval.capacity --caches static --memory 24GiB    # again, or later: other rows of the CSV stay
    python -m eval.plots eval/results/capacity.csv

The process may use no more GPU memory than `--memory` says, the CUDA context counted. Histories are random and put into each
cache directly, no prefill: what is compared is decoding. HiSparse reads what a synthetic trace with the miss curve of its paper
says (see eval.traces).

Which batch: tokens per second of all but offloading rise with the batch, as weights are read once a step for all rows, so the
largest that fits (`hf_hisparse.sizes` knows) is tried first, and smaller ones only if memory runs out. The hot buffers of
"hisparse" then take what is left. Offloading copies every row's history in every step, so more rows gain it nothing: it runs with
one. Batches that fit together with a prefill of all their rows at once, which is dense for all caches, stand beside
(`batch_with_prefill`, by `hf_hisparse.plan`).

Without a cap ("all"), one row is decoded at `--easy-contexts`, where it fits easily: what HiSparse costs where nobody needs it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.capacity.card import Card
from eval.decoding import CONTENDERS, Contenders, Run, decode
from eval.environment import conditions, limit_to, merge_rows, write_csv
from eval.flags import command_line
from eval.output import parse
from eval.selections import Synthetic
from eval.shapes import SHAPES, build
from hf_hisparse import Quest, plan
from hf_hisparse.host_memory import parse_bytes
from hf_hisparse.hosted_layer import LayerSettings
from hf_hisparse.needs import weight_bytes
from hf_hisparse.sizes import Sizes

TRIES = 3  # batch sizes, from the largest that should fit downwards
USABLE = 0.97  # of the memory: the allocator's blocks are never filled to the last byte
KEY = ("model", "memory", "context", "cache")
DENSE = ("dynamic", "static", "offloaded")


class Bench:
    """The measurements of one model.

    Parameters
    ----------
    model : PreTrainedModel
    args : argparse.Namespace
    """

    def __init__(self, model: PreTrainedModel, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.quest = Quest(args.token_budget)
        self.contenders = Contenders(model, self.quest, args.host_memory)
        self.workload = Synthetic(self.quest)
        settings = LayerSettings(self.quest.top_k, self.quest.top_k, 32, False, 0)
        self.sizes = Sizes(model.config, self.contenders.family, settings, model.dtype)
        self.found: dict[Run, dict[str, Any]] = {}  # a run that several memories allow is made once

    def best(self, memory: str, context: int, name: str) -> dict[str, Any]:
        """The row of one cache in a card of `memory`."""
        args = self.args
        run = Run(name, 0, context, args.new_tokens, args.device_buffer_tokens, args.seconds)
        row: dict[str, Any] = {"memory": memory, "context": context, "cache": name, "batch": 0}
        if memory == "all":
            return row | self.first_that_fits([dataclasses.replace(run, batch=1)])
        size, host = parse_bytes(memory, "--memory"), parse_bytes(args.host_memory, "--host-memory")
        limit_to(size)
        card = Card(self.sizes, int(USABLE * size) - weight_bytes(self.model), host, args.most)
        most = card.batch(run)
        runs = [dataclasses.replace(run, batch=batch) for batch in range(most, max(0, most - TRIES), -1)]
        if name == "hisparse":
            runs = [dataclasses.replace(each, device_buffer_tokens=card.buffer_tokens(each)) for each in runs]
        return row | self.with_prefill(memory, context, name) | self.first_that_fits(runs)

    def first_that_fits(self, runs: list[Run]) -> dict[str, Any]:
        """What the first of these runs gave that does not run out of memory."""
        result: dict[str, Any] = {"error": "not even one row fits"}
        for run in runs:
            if run not in self.found:
                try:
                    self.found[run] = decode(self.contenders, run, self.workload)
                except (torch.cuda.OutOfMemoryError, MemoryError) as error:
                    result = {"error": f"batch {run.batch}: {str(error).splitlines()[0]}"[:200]}
                self.contenders.rest()
            if run in self.found:
                return {"batch": run.batch, "error": ""} | self.found[run]
        return result

    def with_prefill(self, memory: str, context: int, name: str) -> dict[str, Any]:
        """How many rows fit together with a prefill of all of them at once."""
        names = {"dynamic": 0, "offloaded": 1, "hisparse": 2}
        if name not in names:
            return {}
        sizes = {"device_memory": memory, "host_memory": self.args.host_memory, "dtype": self.model.dtype}
        found = plan(
            self.model.config, self.quest, context=context, weights=weight_bytes(self.model), **sizes
        )
        return {"batch_with_prefill": found.caches[names[name]].largest_batch}


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Memory, context and cache of each row; offloading first, since the memory it pins must be free again before HiSparse's."""
    for name in sorted(args.caches, key=lambda name: name != "offloaded"):
        for context in sorted({*args.contexts, *args.easy_contexts}):
            for memory in args.memory if context in args.contexts else []:
                yield memory, context, name
            if context in args.easy_contexts and name != "offloaded":
                yield "all", context, name


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its tokens per second as a multiple of the best dense cache's in the same memory and context."""
    best: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row["cache"] in DENSE and row.get("tokens_per_s"):
            place = tuple(str(row[name]) for name in KEY[:3])
            best[place] = max(best.get(place, 0.0), float(row["tokens_per_s"]))
    for row in rows:
        place = tuple(str(row[name]) for name in KEY[:3])
        if row.get("tokens_per_s") and place in best:
            row["times_best_dense"] = round(float(row["tokens_per_s"]) / best[place], 3)
    return rows


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=["qwen3-8b"], choices=SHAPES)
    add("--memory", nargs="*", default=["24GiB", "48GiB"], help="of the card")
    add("--host-memory", default="96GiB")
    add("--contexts", type=int, nargs="*", default=[32768, 131072])
    add("--easy-contexts", type=int, nargs="*", default=[8192, 32768], help="of one row without a cap")
    add("--caches", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    add("--most", type=int, default=64, help="rows that any batch has at most")
    add("--new-tokens", type=int, default=32)
    add("--seconds", type=float, default=12, help="after which a run ends early")
    add("--token-budget", type=int, default=2048)
    add("--device-buffer-tokens", type=int, default=4096, help="at least")
    add("--quick", action="store_true")
    args = parse(parser, "capacity.csv")
    if args.quick:
        args.models, args.memory, args.host_memory, args.most = ["toy"], ["2GiB"], "1GiB", 2
        args.contexts, args.easy_contexts, args.new_tokens = [512], [512], 8
        args.token_budget, args.device_buffer_tokens = 64, 128
        args.caches = [name for name in args.caches if name != "offloaded"]
    return args


def main() -> None:
    """Measure, print, write the CSV."""
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    conditions()  # measures, while the memory is empty
    for name in args.models:
        limit_to(None)
        model = build(name, device)
        bench = Bench(model, args)
        for memory, context, cache in cases(args):
            limit_to(None)
            row = {"model": name, **bench.best(memory, context, cache)}
            print(row, flush=True)
            rows = merge_rows(args.output, [row], KEY)
            write_csv(args.output, with_ratios(rows))  # a long run that is stopped keeps what it found
        bench.contenders.close()
        del bench, model
        limit_to(None)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
