"""What exact prefetch and reading ahead hide, in decode steps of a GLM-5-like stack.

Everything resident, fetched in its turn, prefetched, read ahead, and an oracle without IO, in one run:

    python -m eval.prefetch            # on a GPU; writes eval/results/prefetch.csv
    python -m eval.prefetch --quick    # toy sizes, on a CPU too, to see that it works

The model is transformers' GLM-5 with its true attention sizes, few layers, small dense MLPs and random weights. One layer of
`--shares` selects for as many: four in GLM-5; with 1 every layer selects, as in DeepSeek-V3.2. The history is random rows put
into the cache directly. Selections come from a synthetic trace with the miss curve of the HiSparse paper (see eval.traces); the
model's own indexer runs too, and its answer is dropped.

Ways, in a cache that holds everything and in one with a small buffer: "resident" and "ahead" are what a cache does. "in turn"
neither prefetches nor reads ahead, "prefetch" does the first alone. "oracle" skips every read of the host: its output is
invalid, and its time bounds what can be hidden. Only this program can switch these on.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, PreTrainedModel

from eval.decode_steps import gpu_step_time
from eval.environment import conditions, free_memory, write_csv
from eval.flags import command_line
from eval.history import fill
from eval.output import parse
from eval.shapes import TOY_DSA
from eval.traces import PAPER_CURVE, playing, synthetic_trace
from hf_hisparse import HiSparseCache
from hf_hisparse.graphs import DecodeGraphs
from hf_hisparse.link import link_bandwidth

WARM_UP = 6  # steps of each way before the timed ones: compile, capture, reach the trace's steady state


def build(layers: int, share: int, toy: bool, device: str) -> PreTrainedModel:
    """A GLM-5 of `layers` layers with true attention sizes, or a toy; one of `share` selects for the next ones, too."""
    config = GlmMoeDsaConfig(
        **(TOY_DSA if toy else {}),
        num_hidden_layers=layers,
        intermediate_size=64 if toy else 2048,
        mlp_layer_types=["dense"] * layers,
        indexer_types=["shared" if i % share else "full" for i in range(layers)],
        vocab_size=1024,
        max_position_embeddings=2**18,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return GlmMoeDsaForCausalLM._from_config(
            config, dtype=torch.float32 if device == "cpu" else torch.bfloat16
        ).eval()


def chosen(indexer: Any, step: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A step of a trace, int32 ``[batch, k]``, as an indexer answers."""
    return step[:, None]


@contextmanager
def without_io() -> Iterator[None]:
    """No record is read from the host: what is computed is wrong, and takes the time it would take without misses."""
    skip = lambda *args: None  # noqa: E731
    with ExitStack() as patches:
        patches.enter_context(mock.patch("hf_hisparse.hosted_layer.fetch_ahead", skip))
        patches.enter_context(mock.patch("hf_hisparse.prefetch.fetch", skip))
        yield


@contextmanager
def in_turn() -> Iterator[None]:
    """Nothing is read ahead in steps that are captured meanwhile."""
    with mock.patch("hf_hisparse.graphs.early_indexers", lambda *args, **kwargs: nullcontext()):
        yield


class Way:
    """One way to bring what is missing, on a cache that it may share with others.

    Parameters
    ----------
    name : str
    cache : HiSparseCache
    prefetch, ahead : bool
        Whether to prefetch for layers that share a selection, and to read ahead.
    reading : bool
        Whether the host is read at all.
    """

    def __init__(
        self, name: str, cache: HiSparseCache, prefetch: bool, ahead: bool, reading: bool = True
    ) -> None:
        self.name = name
        self.cache = cache
        self.prefetch = prefetch
        self.ahead = ahead
        self.reading = reading
        self.graphs = DecodeGraphs(cache, enabled=True)  # its own, so that none is captured anew
        self.times: list[float] = []
        self.read = self.missed = 0

    def run(self, model: PreTrainedModel, steps: int, timed: bool) -> None:
        """Decode `steps` tokens."""
        self.cache.graphs = self.graphs
        for layer in self.cache.hosted_layers:
            layer.settings = dataclasses.replace(layer.settings, prefetch=self.prefetch)
        tokens = torch.randint(0, 1000, (self.cache._states[0][0], 1), device=model.device)
        before = self.cache.stats()
        with ExitStack() as patches:
            if not self.reading:
                patches.enter_context(without_io())
            if not self.ahead:
                patches.enter_context(in_turn())
            times = [gpu_step_time(model, self.cache, tokens) for _ in range(steps)]
        after = self.cache.stats()
        if timed:
            self.times += times
            self.read += after.selected - before.selected
            self.missed += after.misses - before.misses

    def result(self) -> dict[str, Any]:
        """What was found."""
        bytes_missed = self.missed * self.cache.hosted_layers[0].layout.nbytes
        moved = bytes_missed / len(self.times) if self.reading else 0.0  # per step
        median = statistics.median(self.times)
        return {
            "way": self.name,
            "ms_per_step": round(median, 3),
            "ms_quartiles": " ".join(f"{each:.3f}" for each in statistics.quantiles(self.times, n=4)[::2]),
            "miss_rate": round(self.missed / self.read, 4),
            "MB_moved_per_step": round(moved / 1e6, 2),
            "moved_GB_per_s": round(moved / median / 1e6, 2),
            "link_floor_ms": round(1000 * moved / link_bandwidth(), 3),
            "graphs": f"{self.graphs.captures} captured, {self.graphs.replays} replayed",
            "buffer_bytes": self.cache.memory().buffer_bytes,
        }


def compare(
    model: PreTrainedModel, batch: int, history: int, buffer: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """All ways for one history; those with a cache in common take turns, so that what drifts meets them alike."""
    top_k = model.config.index_topk
    decoder, total = model.get_decoder(), 7 * (WARM_UP + rounds * (1 + steps))  # of all ways
    full = sum(layer.self_attn.indexer is not None for layer in decoder.layers)
    traces = [
        synthetic_trace(batch, top_k, history, total, PAPER_CURVE, seed, str(model.device))
        for seed in tqdm(range(full), desc="traces", leave=False)
    ]
    resident = HiSparseCache(model, device_buffer_tokens=history + total)
    fill(resident, model, batch, history)
    small = HiSparseCache(model, device_buffer_tokens=buffer)
    fill(small, model, batch, history)
    shared = full < len(decoder.layers)
    held = [
        Way("resident", resident, prefetch=False, ahead=True),
        Way("resident, in turn", resident, prefetch=False, ahead=False),
    ]
    turns = [
        Way("ahead", small, prefetch=True, ahead=True),
        Way("in turn", small, prefetch=False, ahead=False),
        *([Way("prefetch", small, prefetch=True, ahead=False)] if shared else []),
        Way("oracle", small, prefetch=False, ahead=True, reading=False),
        Way("oracle, in turn", small, prefetch=False, ahead=False, reading=False),
    ]
    with playing(model, traces, chosen):
        for ways in (held, turns):
            for way in ways:
                way.run(model, WARM_UP, timed=False)
            for _ in tqdm(range(rounds), desc=f"{history} x {batch}", leave=False):
                for way in ways:
                    way.run(model, 1, timed=False)
                    way.run(model, steps, timed=True)
    return [way.result() for way in held + turns]


def main() -> None:
    """Measure, print, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--shares", type=int, nargs="+", default=[4, 1], help="layers that read what one selects"
    )
    parser.add_argument("--histories", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--buffer", type=int, default=4096, help="device_buffer_tokens")
    parser.add_argument("--steps", type=int, default=8, help="per round and way")
    parser.add_argument("--rounds", type=int, default=6, help="in which the ways take turns")
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "prefetch.csv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        args.layers, args.histories, args.batch, args.buffer = 4, [400], 2, 64
        args.steps, args.rounds = 2, 2
    conditions()  # measures, while the memory is empty
    rows: list[dict[str, Any]] = []
    for share in args.shares:
        model = build(args.layers, share, args.quick, device)
        for history in args.histories:
            sizes = {
                "layers": args.layers,
                "share": share,
                "batch": args.batch,
                "history": history,
                "buffer": args.buffer,
            }
            for row in compare(model, args.batch, history, args.buffer, args.steps, args.rounds):
                rows.append(sizes | row)
                print(rows[-1], flush=True)
        del model
        free_memory()
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
