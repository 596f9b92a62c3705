"""What exact prefetch hides, in decode steps of a GLM-5-like stack.

Everything resident, fetched synchronously, prefetched, and an oracle without IO, side by side:

    python -m eval.prefetch            # on a GPU; writes eval/results/prefetch.csv
    python -m eval.prefetch --quick    # toy sizes, on a CPU too, to see that it works

The model is transformers' GLM-5 with its true attention sizes, few layers (one full to three shared), small dense
MLPs and random weights. The history is random rows put into the cache directly. Selections come from a synthetic trace
with the miss curve of the HiSparse paper (see eval.traces); the model's own indexer runs too, and its answer is dropped.
"oracle" skips every read of the host: its output is invalid and its time bounds what any prefetch can reach. Only this
program can switch it on.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, PreTrainedModel

from eval.decode_steps import step_times
from eval.environment import write_csv
from eval.shapes import TOY_DSA
from eval.traces import PAPER_CURVE, synthetic_trace
from hf_hisparse import HiSparseCache
from hf_hisparse.graphs import DecodeGraphs
from hf_hisparse.models.mla import LatentLayer

WARM_UP = 6  # steps before the timed ones: compile, capture, reach the trace's steady state


def build(layers: int, toy: bool, device: str) -> PreTrainedModel:
    """A GLM-5 of `layers` layers with true attention sizes, or a toy."""
    config = GlmMoeDsaConfig(
        **(TOY_DSA if toy else {}),
        num_hidden_layers=layers,
        intermediate_size=64 if toy else 2048,
        mlp_layer_types=["dense"] * layers,
        indexer_types=["shared" if i % 4 else "full" for i in range(layers)],
        vocab_size=1024,
        max_position_embeddings=2**18,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return GlmMoeDsaForCausalLM._from_config(
            config, dtype=torch.float32 if device == "cpu" else torch.bfloat16
        ).eval()


class TracePlayer:
    """Stands in for an indexer: lets it work, and answers with the next step of a trace."""

    def __init__(self, indexer: torch.nn.Module, trace: torch.Tensor) -> None:
        self.forward = indexer.forward
        self.trace = trace  # int32 [steps, batch, k]
        self.step = torch.zeros(
            1, dtype=torch.int64, device=trace.device
        )  # on the device: steps are replayed from a graph

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.forward(*args, **kwargs)
        selection = self.trace.index_select(0, self.step)[0]
        self.step.add_(1).remainder_(len(self.trace))
        return selection[:, None]


@torch.no_grad()
def fill(cache: HiSparseCache, model: PreTrainedModel, batch: int, history: int) -> None:
    """Put `history` random rows per batch row into the cache, as a prefill would leave them."""
    config, device, dtype = model.config, model.device, model.dtype
    for index, layer in enumerate(tqdm(cache.layers, desc="history", leave=False)):
        assert isinstance(layer, LatentLayer)
        latent = torch.randn((batch, 1, history, config.kv_lora_rank), device=device, dtype=dtype)
        rope = torch.randn((batch, 1, history, config.qk_rope_head_dim), device=device, dtype=dtype)
        layer.update(latent, rope)
        if config.indexer_types[index] == "full":
            keys = torch.randn((batch, history, config.index_head_dim), device=device, dtype=dtype)
            layer.update_indexer(keys)
        rows = layer.layout.pack(latent, rope)
        layer.pool.write_records(0, rows)
        newest = torch.arange(history - config.index_topk, history, device=device).expand(batch, -1)
        layer._warm(newest, rows)
        layer.finish()
    cache._states = dict.fromkeys(
        range(len(cache.layers)), (batch, 1, config.kv_lora_rank, config.qk_rope_head_dim, dtype, device)
    )


@contextmanager
def without_io() -> Iterator[None]:
    """No record is read from the host: what is computed is wrong, and takes the time it would take without misses."""
    skip = lambda *args: None  # noqa: E731
    with mock.patch("hf_hisparse.hot_buffer.fetch", skip), mock.patch("hf_hisparse.prefetch.fetch", skip):
        yield


def measure(model: PreTrainedModel, cache: HiSparseCache, steps: int, label: str) -> dict[str, Any]:
    """Time decode steps; the graph is captured anew."""
    cache.graphs = DecodeGraphs(cache, enabled=True)
    batch = cache._states[0][0]
    step_times(model, cache, batch, WARM_UP, f"{label}, warm-up")
    before = cache.stats()
    timed = step_times(model, cache, batch, steps, label)
    after = cache.stats()
    read, missed = after.selected - before.selected, after.misses - before.misses
    return {
        "ms_per_step": round(statistics.median(timed), 3),
        "ms_spread": round(max(timed) - min(timed), 3),
        "miss_rate": round(missed / read, 4),
        "MB_moved_per_step": round((after.bytes_fetched - before.bytes_fetched) / steps / 1e6, 2),
        "graphs": repr(cache.graphs),
        "buffer_bytes": cache.memory().buffer_bytes,
    }


def compare(
    model: PreTrainedModel, batch: int, history: int, buffer: int, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The four ways, for one history."""
    top_k = model.config.index_topk
    decoder, total = model.get_decoder(), 4 * (WARM_UP + steps)
    full = [layer.self_attn for layer in decoder.layers if layer.self_attn.indexer is not None]
    traces = [
        synthetic_trace(batch, top_k, history, total, PAPER_CURVE, seed, str(model.device))
        for seed in range(len(full))
    ]
    resident = history + total
    ways = {"resident": (resident, nullcontext()), "synchronous": (buffer, nullcontext())}
    ways |= {"prefetch": (buffer, nullcontext()), "oracle": (buffer, without_io())}
    players = [TracePlayer(each.indexer, trace) for each, trace in zip(full, traces, strict=True)]
    cache = None
    for way, (slots, context) in ways.items():
        if way in ("resident", "synchronous"):
            cache = None  # give its memory back first
            cache = HiSparseCache(model, device_buffer_tokens=slots)
            fill(cache, model, batch, history)
        assert cache is not None
        for layer in cache.hosted_layers:
            layer.settings = dataclasses.replace(layer.settings, prefetch=way == "prefetch")
        with context, ExitStack() as patches:
            for each, player in zip(full, players, strict=True):
                patches.enter_context(mock.patch.object(each.indexer, "forward", player))
            yield way, measure(model, cache, steps, f"{way}, {history} x {batch}")


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16, help="a multiple of 4: one full, three shared")
    parser.add_argument("--histories", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--buffer", type=int, default=4096, help="device_buffer_tokens")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("eval/results/prefetch.csv"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        args.layers, args.histories, args.batch, args.buffer, args.steps = 4, [400], 2, 64, 4
    model = build(args.layers, args.quick, device)
    rows: list[dict[str, Any]] = []
    for history in args.histories:
        sizes = {"layers": args.layers, "batch": args.batch, "history": history, "buffer": args.buffer}
        found = {}
        for way, result in compare(model, args.batch, history, args.buffer, args.steps):
            found[way] = result["ms_per_step"]
            rows.append({**sizes, "way": way, **result})
            print(rows[-1], flush=True)
        synchronous, prefetched = (found[way] - found["oracle"] for way in ("synchronous", "prefetch"))
        print(f"exposed IO at {history}: {synchronous:.3f} ms synchronous, {prefetched:.3f} ms with prefetch")
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
