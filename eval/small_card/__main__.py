"""A long conversation in the memory of a small card: 128K tokens and four turns of a 4B model in 16 GiB.

    python -m eval.small_card            # on a GPU; writes eval/results/small_card.csv
    python -m eval.small_card --quick    # toy sizes, on a CPU too

The process may use no more GPU memory than `--memory` says, the CUDA context included (counted as 0.5 GiB, as it lies outside
what torch can limit; `outside_bytes` is what the GPU says that it and all else there take). Plain `generate` reads a prompt in
chunks and answers, then answers three further turns on the same cache. First with DynamicCache, which is to run out of memory:
`tokens` is what it held then. Then with HiSparseCache, its buffer and its chunks as `hf_hisparse.plan` recommends them. Peaks are
the allocator's, of each turn by itself.

Weights and tokens are random, and keys of random weights have no locality: their hit rate is far below that of real text. So,
unless `--no-trace` is given, the same turns run once more from the end of the prompt on, with a synthetic trace (the miss curve
of HiSparse's paper, see eval.traces) in place of Quest's choice: rows with selection=trace. Quest scores its pages there as well.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Histories that grow leave holes in blocks of fixed size; read when torch first takes GPU memory.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from eval.answers import Clock, generate_exactly
from eval.environment import free_memory, limit_to, write_csv
from eval.flags import command_line
from eval.output import parse
from eval.selections import Synthetic, play
from eval.shapes import SHAPES, build
from hf_hisparse import HiSparseCache, Quest, plan
from hf_hisparse.host_memory import parse_bytes
from hf_hisparse.needs import weight_bytes


class Turn(NamedTuple):
    """New tokens of a prompt, and tokens of its answer."""

    prompt: int
    answer: int


def answer(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, new_tokens: int, chunk: int, label: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One `generate`: all ids, and what it took."""
    # Onto a history transformers 5.17 would feed the whole prompt again, chunk by chunk.
    chunks = {} if cache.get_seq_length() else {"prefill_chunk_size": chunk}
    before = cache.stats() if isinstance(cache, HiSparseCache) else None
    with tqdm(total=new_tokens, desc=label, leave=False) as bar:
        clock = Clock(bar)
        began = time.perf_counter()
        ids = generate_exactly(model, cache, ids, new_tokens, clock, **chunks)
    steps = [1000 * (after - before) for before, after in itertools.pairwise(clock.times)]
    found: dict[str, Any] = {
        "prefill_s": round(clock.times[0] - began, 3),
        "ms_per_token": round(statistics.median(steps), 2),
        "ms_min": round(min(steps), 2),
        "ms_max": round(max(steps), 2),
    }
    if isinstance(cache, HiSparseCache) and before is not None:
        after = cache.stats()
        selected, misses = after.selected - before.selected, after.misses - before.misses
        found["hit_rate"] = round(1 - misses / selected, 4)
        fetched = after.bytes_fetched - before.bytes_fetched
        found["MB_fetched_per_step"] = round(fetched / (after.steps - before.steps) / 1e6, 3)
        found |= vars(cache.memory())
    return ids, found


def converse(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, turns: Sequence[Turn], chunk: int, label: str
) -> Iterator[dict[str, Any]]:
    """Answer one turn after another, each a row, until there is no memory left.

    Parameters
    ----------
    ids : int64 ``[1, T]``
        The prompt; the `prompt` tokens of each turn, random ones, come after it.
    """
    for number, turn in enumerate(turns, 1):
        more = torch.randint(10, model.config.vocab_size, (1, turn.prompt), device=ids.device)
        ids = torch.cat([ids, more], dim=1)
        history = cache.get_seq_length()
        row = {"turn": number, "history": history, "prompt_tokens": ids.shape[1] - history}
        row["new_tokens"] = turn.answer
        _reset_peaks()
        try:
            ids, found = answer(model, cache, ids, turn.answer, chunk, f"{label}, turn {number}")
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            found = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        held = min(layer.get_seq_length() for layer in cache.layers)  # the last call may not have got far
        yield row | {"tokens": held, **found, **_peaks()}
        if "error" in found:
            return


def _reset_peaks() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peaks() -> dict[str, int]:
    """What torch held at most since then, what tensors took of it, and what else there is on the GPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
    }


def with_trace(cache: HiSparseCache, quest: Quest, prompt: int, steps: int) -> None:
    """Go back to the end of the prompt, and let a synthetic trace of `steps` steps select from now on."""
    cache.crop(prompt - 1 - cache.get_seq_length())  # its last token is what `generate` begins with
    cache.graphs.forget()  # they select for themselves
    layers, workload = cache.sparse_layers, Synthetic(quest)
    heads, slots, device = layers[0].pool.heads, layers[0].buffer_records, layers[0].position.device
    selections = workload.of_layer(0, 1, heads, prompt, steps, slots, device)  # the same in all layers
    play(cache, {layer.layer_idx: selections for layer in layers})


def main() -> None:
    """Read the command line, converse, print, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen3-4b", help=f"one of {', '.join(SHAPES)}, or an id or folder")
    parser.add_argument("--memory", default="16GiB", help="of the card")
    parser.add_argument("--tokens", type=int, default=131072, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="of the first answer")
    parser.add_argument("--turns", type=int, nargs="*", default=[1000, 300, 1000], help="new prompt tokens")
    parser.add_argument("--turn-new-tokens", type=int, default=64, help="of each further answer")
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--device-buffer-tokens", type=int, help="default: as planned")
    parser.add_argument("--prefill-chunk", type=int, help="default: as planned")
    parser.add_argument("--no-trace", action="store_true", help="leave the synthetic trace out")
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "small_card.csv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        raise SystemExit("eval.small_card fills a GPU, and there is none here: --quick shows it at toy size")
    if args.quick:
        args.model, args.tokens, args.new_tokens, args.turns, args.turn_new_tokens = (
            "toy",
            700,
            8,
            [50, 40],
            6,
        )
        args.token_budget, args.device_buffer_tokens, args.prefill_chunk = 64, 128, 200
    memory = parse_bytes(args.memory, "--memory")
    limit = limit_to(memory)
    model = build(args.model, device)
    quest = Quest(args.token_budget)
    turns = [Turn(0, args.new_tokens), *(Turn(more, args.turn_new_tokens) for more in args.turns)]
    total = args.tokens + sum(map(sum, turns))
    planned = plan(
        model.config,
        quest,
        context=total,
        device_memory=memory,
        dtype=model.dtype,
        weights=weight_bytes(model),
        prefill_chunk=args.prefill_chunk,
    )
    print(planned, flush=True)
    buffer = args.device_buffer_tokens or planned.device_buffer_tokens
    if not buffer:
        raise SystemExit("it cannot fit: see the plan above")
    chunk = planned.caches[-1].prefill_chunk
    torch.manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, args.tokens), device=device)
    rows: list[dict[str, Any]] = []

    def run(cache: Cache, selection: str) -> None:
        name = type(cache).__name__
        for row in converse(model, cache, ids, turns, chunk, f"{name} ({selection})"):
            rows.append(
                {"model": args.model, "memory": args.memory, "cache": name, "selection": selection, **row}
            )
            rows[-1] |= {"prefill_chunk": chunk, "limit_bytes": limit, "error": row.get("error", "")}
            if name == "HiSparseCache":
                rows[-1] |= {"token_budget": args.token_budget, "device_buffer_tokens": buffer}
            print(rows[-1], flush=True)
            write_csv(args.output, rows)  # a long run that is stopped keeps what it found

    run(DynamicCache(config=model.config), "all")
    free_memory()
    cache = HiSparseCache(model, quest, device_buffer_tokens=buffer)
    run(cache, "quest")
    print(cache, flush=True)
    if not (args.no_trace or rows[-1]["error"]):
        with_trace(cache, quest, args.tokens, sum(map(sum, turns)))
        run(cache, "trace")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
