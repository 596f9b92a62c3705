"""MiniMax-M3's attention with a hot buffer per KV head, one for all KV heads, everything resident, and its own way.

    python -m eval.msa            # on a GPU; writes eval/results/msa.csv
    python -m eval.msa --quick    # toy sizes, on a CPU too, to see that it works
    python -m eval.plots eval/results/msa.csv

The model is transformers' MiniMax-M3 with its true attention sizes (64 heads, 4 KV heads of 128, blocks of 128 tokens, 16 of
them read), all layers sparse, small dense MLPs and random weights. The history is random and put into the cache directly.
What is selected comes from a synthetic trace with the miss curve of the HiSparse paper (see eval.traces), a query's own block
besides; the model's own indexer runs too, and its answer is dropped. How much the KV heads of a batch row agree decides what
the union costs, so that is a setting: `--overlaps` 0 lets each select for itself, 1 all the same. "dense" is the model's own
attention over its own `DynamicCache`, every key under a mask.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache, DynamicCache, MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig, PreTrainedModel

from eval.decode_steps import gpu_step_time, step_times
from eval.environment import conditions, free_memory, write_csv
from eval.flags import command_line
from eval.floors import beside, bytes_read
from eval.history import fill
from eval.output import parse
from eval.shapes import TOY_MSA
from eval.traces import playing, synthetic_trace
from hf_hisparse import HiSparseCache, disable

WARM_UP = 6  # steps before the timed ones: compile, capture, reach the trace's steady state


def build(layers: int, toy: bool, device: str) -> PreTrainedModel:
    """A MiniMax-M3 of `layers` sparse layers with true attention sizes, or a toy."""
    config = MiniMaxM3VLTextConfig(
        **(TOY_MSA if toy else {}),
        num_hidden_layers=layers,
        layer_types=["minimax_m3_sparse"] * layers,
        mlp_layer_types=["dense"] * layers,
        dense_intermediate_size=64 if toy else 2048,
        vocab_size=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return MiniMaxM3VLForCausalLM._from_config(
            config, dtype=torch.float32 if device == "cpu" else torch.bfloat16
        ).eval()


def chosen(indexer: Any, step: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A query's own block, then a step of a trace, int64 ``[batch, KV heads, k - 1]``, as an indexer answers."""
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[-1]
    own = (positions // indexer.block_size)[:, None].expand(*step.shape[:2], 1)
    return torch.cat([own, step], dim=2)[:, :, None]


def traces(
    model: PreTrainedModel, batch: int, blocks: int, steps: int, overlap: float, seed: int
) -> torch.Tensor:
    """Selections of one layer out of the first `blocks` blocks, int64 ``[steps, batch, KV heads, k - 1]``.

    The share `overlap` of a selection is the same for all KV heads; it comes from the first half of the history, the rest
    from the second, so that no block is named twice.
    """
    heads, k = model.config.num_key_value_heads, model.config.index_topk_blocks - 1
    together = round(overlap * k)
    parts = []
    if together:
        half = blocks // 2 if together < k else blocks
        trace = synthetic_trace(batch, together, half, steps, seed=2 * seed, device=str(model.device))
        parts.append(trace[:, :, None].expand(-1, -1, heads, -1))
    if together < k:
        first = blocks // 2 if together else 0
        lanes = batch * heads
        trace = synthetic_trace(
            lanes, k - together, blocks - first, steps, seed=2 * seed + 1, device=str(model.device)
        )
        parts.append(first + trace.unflatten(1, (batch, heads)))
    return torch.cat(parts, dim=3).long()


def measure(
    model: PreTrainedModel, cache: Cache, batch: int, history: int, steps: int, label: str
) -> dict[str, Any]:
    """Fill the cache, run decode steps, and say what they took, moved and held."""
    cuda = model.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    fill(cache, model, batch, history)
    hosted = isinstance(cache, HiSparseCache)
    held = torch.cuda.memory_allocated() - before if cuda else None
    told = cache.memory().device_bytes if hosted else None  # now: the first step makes room for more
    step_times(model, cache, batch, WARM_UP, f"{label}, warm-up")
    begun = cache.stats() if hosted else None
    times = step_times(model, cache, batch, steps, label)
    result: dict[str, Any] = {
        "ms_per_step": round(statistics.median(times), 3),
        "ms_min": round(min(times), 3),
        "ms_max": round(max(times), 3),
        "cache_bytes_allocator": held,
    }
    if hosted:
        stats, memory = cache.stats(), cache.memory()
        read, missed = stats.selected - begun.selected, stats.misses - begun.misses
        result |= {
            "records_read_per_step": read // steps,
            "hit_rate": round(1 - missed / read, 4),
            "buffer_bytes": memory.buffer_bytes,
            "selector_bytes": memory.selector_bytes,
            "table_bytes": memory.table_bytes,
            "allocator_over_memory": round(held / told, 4) if cuda else None,
            "host_bytes": memory.host_bytes,
            "graphs": repr(cache.graphs),
        }
        selected = read / steps * cache.hosted_layers[0].layout.nbytes
        if cache.layout == "union":  # a head reads its own part of a record
            selected /= model.config.num_key_value_heads
        moved = (stats.bytes_fetched - begun.bytes_fetched) / steps
        result |= beside(bytes_read(model, cache, batch, history, selected), moved, result["ms_per_step"])
        tokens = torch.randint(0, 1000, (batch, 1), device=model.device)
        on_gpu = [gpu_step_time(model, cache, tokens) for _ in range(steps)]
        result["gpu_ms_per_step"] = round(statistics.median(on_gpu), 3)  # without the CPU that launches it
    else:
        result |= beside(bytes_read(model, cache, batch, history), 0, result["ms_per_step"])
    return result


def formula_bytes(model: PreTrainedModel, batch: int, buffer: int) -> int:
    """Hot buffers by the formula: batch x KV heads x hosted layers x tokens x (key + value width) x bytes per element.

    It is the same for both layouts: a record of the union is as many times larger as it has fewer lanes.
    """
    config = model.config
    token = 2 * config.head_dim * model.dtype.itemsize
    return batch * config.num_key_value_heads * config.num_hidden_layers * buffer * token


def ways(
    model: PreTrainedModel, buffers: list[int], batch: int, history: int, steps: int
) -> Iterator[tuple[str, int | None, Cache]]:
    """Each way of keeping the history with its buffer, in tokens per KV head, and an empty cache for it."""
    block, read = (
        model.config.index_block_size,
        model.config.index_block_size * model.config.index_topk_blocks,
    )
    whole = -(-(history + WARM_UP + 2 * steps) // block) * block
    for buffer in buffers:
        if buffer >= read:
            yield "per_group", buffer, HiSparseCache(model, device_buffer_tokens=buffer)
        if buffer >= read * model.config.num_key_value_heads:
            yield "union", buffer, HiSparseCache(model, device_buffer_tokens=buffer, layout="union")
    yield "resident", whole, HiSparseCache(model, device_buffer_tokens=max(whole, read))
    disable(model)
    yield "dense", None, DynamicCache(config=model.config)


def compare(model: PreTrainedModel, args: argparse.Namespace, **sizes: Any) -> Iterator[dict[str, Any]]:
    """One row for each way, for one history, batch and overlap."""
    batch, history = sizes["batch"], sizes["history"]
    blocks = history // model.config.index_block_size
    selections = [
        traces(model, batch, blocks, WARM_UP + 2 * args.steps, sizes["overlap"], seed)
        for seed in range(model.config.num_hidden_layers)
    ]
    for way, buffer, cache in ways(model, args.buffers, batch, history, args.steps):
        row = sizes | {"way": way, "buffer_tokens": buffer}
        if buffer is not None:
            row["formula_bytes"] = formula_bytes(model, batch, buffer)
        with playing(model, selections, chosen):
            try:
                row |= measure(model, cache, batch, history, args.steps, f"{way}, {history} x {batch}")
            except (torch.cuda.OutOfMemoryError, MemoryError) as error:
                row["error"] = str(error).split("\n")[0]
        del cache
        free_memory()
        yield row


def main() -> None:
    """Measure, print, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--histories", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--buffers", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens per KV head"
    )
    parser.add_argument(
        "--overlaps", type=float, nargs="+", default=[0.0, 0.5], help="between KV heads, 0 to 1"
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "msa.csv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        args.layers, args.histories, args.batches = 2, [600], [1, 2]
        args.buffers, args.overlaps, args.steps = [64, 128], [0.5], 4
    conditions()  # measures, while the memory is empty
    model = build(args.layers, args.quick, device)
    rows: list[dict[str, Any]] = []
    for history in args.histories:
        for batch in args.batches:
            for overlap in args.overlaps:
                sizes = {"layers": args.layers, "history": history, "batch": batch, "overlap": overlap}
                for row in compare(model, args, **sizes):
                    rows.append(row)
                    print(row, flush=True)
                    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
