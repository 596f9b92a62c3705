"""Tokens per second in the memory of a card: each cache with the largest batch that fits.

    python -m eval.capacity            # on a GPU; writes eval/results/capacity.csv
    python -m eval.capacity --quick    # toy sizes, on a CPU too

The process may use no more GPU memory than `--memory` says. Histories are random rows put into each cache directly, no prefill;
then `generate` decodes. With HiSparse, Quest scores its pages, and a synthetic trace with the miss curve of HiSparse's paper (see
eval.traces) answers in its place: keys of random weights have no locality. A cache that cannot hold one row has no figure.
`static` is compiled by `generate` itself, and timed after that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.environment import free_memory, write_csv
from eval.shapes import SHAPES, build
from eval.throughput.__main__ import measure
from eval.traces import PAPER_CURVE, Playback, synthetic_trace
from hf_hisparse import HiSparseCache, Quest, disable
from hf_hisparse.host_memory import parse_bytes
from hf_hisparse.models.gqa import GqaLayer
from hf_hisparse.needs import weight_bytes

RESERVE = 3 * 2**29  # bytes for activations and what the allocator cannot use
TRIES = 4  # batch sizes, from the largest that should fit downwards


class TracePlayer:
    """Stands in for a layer's `QuestState.select`: lets it work, and answers with its own page and the next step of a trace."""

    def __init__(self, layer: GqaLayer, trace: torch.Tensor) -> None:
        self.select = layer.state.select
        self.page_size = layer.layout.tokens
        self.steps = Playback(trace)  # int32 [steps, lanes, top_k - 1]

    def __call__(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.select(query, position)
        others = self.steps.next()
        own = (position // self.page_size).int().expand(len(others), 1)
        return torch.cat([own, others], dim=1)


def random_rows(model: PreTrainedModel, batch: int, tokens: int) -> torch.Tensor:
    """Keys or values ``[batch, heads, tokens, width]``, the same for every row, in the memory of one."""
    config = model.config
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    return torch.randn(shape, device=model.device, dtype=model.dtype).expand(batch, -1, -1, -1)


@torch.no_grad()
def fill(cache: Cache, model: PreTrainedModel, batch: int, tokens: int, room: int) -> None:
    """Put a history of `tokens` random tokens into every layer, with room for `room` in all."""
    keys, values = (random_rows(model, batch, tokens) for _ in range(2))
    for index, layer in enumerate(tqdm(cache.layers, desc="history", leave=False)):
        if not isinstance(cache, HiSparseCache):
            cache.update(keys, values, index)
            continue
        if not isinstance(layer, GqaLayer):
            layer.update(keys, values)
            continue
        layer.growth_target = room
        layer.update(keys, values)
        layer.store(keys, values)
        layer.state.extend(keys, 0, None)
        pages = tokens // layer.layout.tokens
        newest = torch.arange(pages - layer.settings.top_k, pages, device=model.device)
        layer.warm(newest.expand(batch * keys.shape[1], -1), keys, values)
        layer.finish()
    if isinstance(cache, HiSparseCache):
        held = (batch, keys.shape[1], keys.shape[3], values.shape[3], model.dtype, model.device)
        cache._states = dict.fromkeys(range(len(cache.layers)), held)


def play_traces(cache: HiSparseCache, tokens: int, steps: int) -> None:
    """Let a synthetic trace select, the same in each layer."""
    layers = [layer for layer in cache.hosted_layers if isinstance(layer, GqaLayer)]
    lanes, k = layers[0].buffer.lanes, layers[0].settings.top_k - 1
    pages = tokens // layers[0].layout.tokens - 1
    device = str(layers[0].position.device)
    trace = synthetic_trace(lanes, k, pages, steps + 8, PAPER_CURVE, device=device)
    for layer in layers:
        layer.state.select = TracePlayer(layer, trace)  # type: ignore[method-assign]


def contenders(
    model: PreTrainedModel, quest: Quest, buffer: int, room: int
) -> dict[str, tuple[Callable[[], Cache], int, int]]:
    """How each cache is made, and the bytes that one row of `room` tokens takes of it: on the device, and on the host."""
    config = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize  # of one layer
    layers, hosted = config.num_hidden_layers, config.num_hidden_layers - quest.dense_layers
    grown = room + room // 8
    state = hosted * grown * token // quest.page_size + quest.dense_layers * grown * token
    resident = -(-room // quest.page_size) * quest.page_size
    return {
        "dynamic": (lambda: DynamicCache(config=config), layers * room * token, 0),
        "static": (lambda: StaticCache(config=config, max_cache_len=room), layers * room * token, 0),
        "offloaded": (
            lambda: DynamicCache(config=config, offloading=True),
            3 * room * token,
            layers * room * token,
        ),
        "hisparse-resident": (
            lambda: HiSparseCache(model, quest, device_buffer_tokens=resident),
            state + hosted * resident * token,
            hosted * grown * token,
        ),
        "hisparse": (
            lambda: HiSparseCache(model, quest, device_buffer_tokens=buffer),
            state + hosted * buffer * token,
            hosted * grown * token,
        ),
    }


def run(
    model: PreTrainedModel, cache: Cache, batch: int, context: int, new_tokens: int, label: str
) -> dict[str, Any]:
    """Fill the cache and decode `new_tokens`."""
    if not isinstance(cache, HiSparseCache):  # which enables the model
        disable(model)
    fill(cache, model, batch, context, context + 2 * new_tokens)
    if isinstance(cache, HiSparseCache):
        play_traces(cache, context, 2 * new_tokens)
    ids = torch.randint(10, model.config.vocab_size, (batch, context + 1), device=model.device)
    if isinstance(cache, StaticCache):  # compile first
        model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
        ids = torch.nn.functional.pad(ids, (0, 8), value=11)
    return measure(model, cache, ids, new_tokens, label)


def largest(model: PreTrainedModel, memory: int, host_memory: int, row: tuple[int, int], most: int) -> int:
    """The largest batch that should fit."""
    fits = (memory - weight_bytes(model) - RESERVE) // row[0]
    return max(0, min(fits, host_memory // row[1] if row[1] else fits, most))


def best(
    model: PreTrainedModel, name: str, memory: int, args: argparse.Namespace, context: int, quest: Quest
) -> dict[str, Any]:
    """Measure one cache with the largest batch that fits."""
    tokens = min(args.new_tokens, 3) if name == "offloaded" else args.new_tokens
    make, on_device, on_host = contenders(model, quest, args.device_buffer_tokens, context + 2 * tokens + 16)[
        name
    ]
    first = largest(
        model, memory, parse_bytes(args.host_memory, "--host-memory"), (on_device, on_host), args.most
    )
    row: dict[str, Any] = {"context": context, "cache": name, "batch": 0}
    for batch in range(first, max(0, first - TRIES), -1):
        try:
            found = run(model, make(), batch, context, tokens, f"{name} {context} x {batch}")
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            row["error"] = str(error).split("\n")[0][:200]
            free()
            continue
        row |= {"batch": batch, "error": ""} | found
        row["tokens_per_s"] = round(1000 * batch / row["ms_per_step"], 1)
        break
    free()
    return row


def free() -> None:
    """Give back what compiling has kept as well."""
    torch._dynamo.reset()
    free_memory()


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--memory", nargs="+", default=["24GiB", "48GiB"], help="of the card")
    parser.add_argument("--host-memory", default="100GiB")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument(
        "--caches", nargs="+", default=["hisparse", "hisparse-resident", "dynamic", "offloaded", "static"]
    )
    parser.add_argument("--most", type=int, default=32, help="rows that any batch has at most")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--device-buffer-tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=Path("eval/results/capacity.csv"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        args.model, args.memory, args.contexts, args.most, args.new_tokens = "toy", ["2GiB"], [512], 2, 8
        args.token_budget, args.device_buffer_tokens = 64, 128
        args.caches = ["hisparse", "hisparse-resident", "dynamic", "static"]
    model = build(args.model, device, torch.bfloat16 if device == "cuda" else torch.float32)
    rows = []
    for text in args.memory:
        memory = parse_bytes(text, "--memory")
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(
                memory / torch.cuda.get_device_properties(0).total_memory
            )
        for context in args.contexts:
            for name in args.caches:
                row = best(model, name, memory, args, context, Quest(args.token_budget))
                rows.append({"model": args.model, "memory": text, **row})
                print(rows[-1], flush=True)
                write_csv(args.output, rows)  # a long run that is stopped keeps what it found
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
