"""The kernels alone, in CUDA graphs, beside what they can be measured against.

    python -m eval.kernels            # on a GPU; writes eval/results/kernels.csv

resolve + fetch: k records of a lane per call, a fresh selection each call, beside the copy engine moving the same bytes.
mla layer, gqa layer: from selection to output (us), beside a fetch first and the attention then, resolve and fetch alone, and
resolve and attention alone, without what is missing. gqa_decode reads missing records from the host itself.
block_scores, gqa_decode: MiniMax-M3's choice of blocks out of 131,072 tokens, and attention over 16 of them.
mla_decode: absorbed attention over k selected rows, beside a gather and torch's SDPA, and the time to read the rows once.
Times are the median over replays of a graph of many calls, divided by the calls.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval.environment import write_csv
from eval.traces import synthetic_trace
from hf_hisparse.host_memory import PinnedArea
from hf_hisparse.host_pool import HostPool
from hf_hisparse.hot_buffer import HotBuffer
from hf_hisparse.records import RecordLayout
from hisparse_kernels.block_scores import block_scores
from hisparse_kernels.gqa_decode import gqa_decode
from hisparse_kernels.miss_plan import HostSource
from hisparse_kernels.mla_decode import mla_decode

REPLAYS = 7


def microseconds(
    calls: list[Callable[[], Any]], before: Callable[[], Any] = lambda: None
) -> tuple[float, float]:
    """Median and spread (max - min) of the time per call, in one CUDA graph; `before` runs ahead of each replay, untimed."""
    before()
    calls[0]()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        before()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the launch of the graph is not what is measured
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[1:]), max(times[1:]) - min(times[1:])


class Workload:
    """A layer's host pool and hot buffer in their steady state, and selections of which `misses` records per lane are missing.

    Parameters
    ----------
    lanes : int
    misses : int
        Per lane and call, on average.
    layout : RecordLayout
    k, slots : int
    calls : int
        Selections to measure with.
    """

    def __init__(
        self, lanes: int, misses: int, layout: RecordLayout, k: int, slots: int, calls: int = 24
    ) -> None:
        history = max(4 * slots, slots + calls * misses)
        device = torch.device("cuda")
        self.layout = layout
        self.pool = HostPool(
            lanes, 1, layout, device, PinnedArea(2 * history * lanes * layout.nbytes, pin=True)
        )
        self.pool.grow(history)
        for part in self.pool.records:  # not in one piece: a temporary of all of it would not fit
            part.copy_(torch.randn(part.shape))
        self.buffer = HotBuffer(lanes, slots, layout, device)
        self.buffer.grow(history)
        trace = synthetic_trace(lanes, k, history, calls + 8, {slots / k: misses / k}, device="cuda")
        self.position = torch.full((1,), history * layout.tokens - 1, dtype=torch.int64, device=device)
        self.buffer.fill(torch.arange(slots, device=device).repeat(lanes, 1), self.pool.read_range(0, slots))
        for selection in trace[:8]:
            self.read(selection)
        self.selections = trace[8:]
        self._state = [tensor.clone() for tensor in self._tables]

    @property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.buffer.page_table, self.buffer.slot_records, *self.buffer.recency

    def restore(self) -> None:
        """As before the first selection: the data is not, but who looks at it."""
        for held, kept in zip(self._tables, self._state, strict=True):
            held.copy_(kept)
        self.buffer.counters.zero_()

    def read(self, selection: torch.Tensor) -> torch.Tensor:
        """resolve, then fetch; the slots."""
        slots = self.buffer.resolve(selection, self.position)
        self.buffer.fetch(self.buffer.plan, self.pool)
        return slots

    def source(self) -> HostSource:
        """Where attention reads what the last resolve found missing."""
        return HostSource(self.pool.records, self.pool.host_rows, self.buffer.plan)

    def time(self, call: Callable[[torch.Tensor], Any]) -> tuple[float, float]:
        """Microseconds per selection, median and spread."""
        return microseconds([lambda s=selection: call(s) for selection in self.selections], self.restore)

    def misses_per_call(self) -> float:
        """Records missing per call, over all lanes."""
        self.restore()
        for selection in self.selections:
            self.buffer.resolve(selection, self.position)
        return self.buffer.totals()[1] / len(self.selections)

    def copy_engine(self, nbytes: int) -> float:
        """Microseconds that the copy engine takes for `nbytes` in one piece; NaN for none."""
        if not nbytes:
            return float("nan")
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        source = self.pool.area.bytes[:nbytes]
        return microseconds([lambda: target.copy_(source, non_blocking=True)] * len(self.selections))[0]


def resolve_and_fetch(lanes: int, misses: int, layout: RecordLayout, k: int, slots: int) -> dict[str, Any]:
    """Time resolve and fetch beside the copy engine moving the same bytes."""
    work = Workload(lanes, misses, layout, k, slots)
    time, spread = work.time(work.read)
    missed = work.misses_per_call()
    moved = int(missed) * layout.nbytes
    return {
        "what": "resolve+fetch",
        "lanes": lanes,
        "k": k,
        "slots": slots,
        "record_bytes": layout.nbytes,
        "misses_per_lane": round(missed / lanes, 1),
        "us": round(time, 2),
        "us_spread": round(spread, 2),
        "GB_per_s": round(moved / time / 1000, 1),
        "copy_engine_us": round(work.copy_engine(moved), 2),
    }


def attention_with_misses(
    lanes: int, group: int, misses: int, layout: RecordLayout, k: int, slots: int
) -> dict[str, Any]:
    """Time a layer's step from selection to output, and its parts."""
    work = Workload(lanes, misses, layout, k, slots)
    latent = layout.tokens == 1
    width = layout.key_width + (layout.value_width if latent else 0)
    query = torch.randn(lanes, group, width, device="cuda", dtype=layout.dtype)

    def attend(
        selection: torch.Tensor, slots: torch.Tensor, source: HostSource | None = None
    ) -> torch.Tensor:
        data, scaling = work.buffer.data, width**-0.5
        if latent:
            return mla_decode(query, data, selection, slots, scaling, layout.key_width)
        return gqa_decode(
            query, data, selection, slots, work.position, None, layout.tokens, width, scaling, source
        )

    def read_while_attending(selection: torch.Tensor) -> torch.Tensor:
        return attend(selection, work.buffer.resolve(selection, work.position), work.source())

    one_after_another = work.time(lambda s: attend(s, work.read(s)))
    together = one_after_another if latent else work.time(read_while_attending)
    moving = work.time(work.read)
    hits = work.time(lambda s: attend(s, work.buffer.resolve(s, work.position)))  # as if nothing were missing
    resolving = work.time(lambda s: work.buffer.resolve(s, work.position))
    missed = work.misses_per_call()
    moved = int(missed) * layout.nbytes
    return {
        "what": "mla layer" if latent else "gqa layer",
        "lanes": lanes,
        "k": k,
        "slots": slots,
        "heads": group,
        "record_bytes": layout.nbytes,
        "misses_per_lane": round(missed / lanes, 1),
        "us": round(together[0], 2),
        "us_spread": round(together[1], 2),
        "GB_per_s": round(moved / together[0] / 1000, 1),
        "copy_engine_us": round(work.copy_engine(moved), 2),
        "fetch_then_attend_us": round(one_after_another[0], 2),
        "resolve_fetch_us": round(moving[0], 2),
        "resolve_attend_us": round(hits[0], 2),
        "resolve_us": round(resolving[0], 2),
    }


def absorbed_attention(batch: int, heads: int = 128, k: int = 2048, slots: int = 4096) -> dict[str, Any]:
    """Time `mla_decode` at DeepSeek-V3.2's sizes, and the same by a gather and SDPA."""
    latent, rope = 512, 64
    torch.manual_seed(batch)
    buffer = torch.randn(batch, slots, latent + rope, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(batch, heads, latent + rope, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(batch, slots, device="cuda").argsort(dim=1)[:, :k].int()
    scaling = 192**-0.5

    def ours() -> torch.Tensor:
        return mla_decode(query, buffer, chosen, chosen, scaling, latent)

    lane = torch.arange(batch, device="cuda")[:, None]
    index = chosen.long()

    def gather_and_sdpa() -> torch.Tensor:
        rows = buffer[lane, index][:, None]  # [batch, 1, k, latent + rope]: one KV head for all query heads
        return torch.nn.functional.scaled_dot_product_attention(
            query[:, None], rows, rows[..., :latent], scale=scaling
        )[:, 0]

    torch.testing.assert_close(ours().float(), gather_and_sdpa().float(), atol=3e-3, rtol=3e-2)
    time, spread = microseconds([ours] * 10)
    other, _ = microseconds([gather_and_sdpa] * 10)
    moved = batch * k * (latent + rope) * 2
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    memory, _ = microseconds([lambda: target.copy_(source)] * 2)
    bandwidth = 2 * source.numel() / memory  # bytes per us
    return {
        "what": "mla_decode",
        "lanes": batch,
        "k": k,
        "slots": slots,
        "heads": heads,
        "record_bytes": (latent + rope) * 2,
        "us": round(time, 2),
        "us_spread": round(spread, 2),
        "GB_per_s": round(moved / time / 1000, 1),
        "TFLOP_per_s": round(2 * batch * heads * k * (2 * latent + rope) / time / 1e6, 1),
        "gather_sdpa_us": round(other, 2),
        "memory_floor_us": round(moved / bandwidth, 2),
    }


def block_attention(batch: int, history: int = 131072) -> list[dict[str, Any]]:
    """Time one layer's decode step at MiniMax-M3's sizes: the scores of all blocks, and attention over 16 of them."""
    heads, group, width, block, k, slots = 4, 16, 128, 128, 16, 32
    lanes, device = batch * heads, torch.device("cuda")

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    query = randn(batch, heads, 1, width)
    keys = [randn(batch, history, width) for _ in range(4)]  # more than the L2 cache holds
    hidden = torch.zeros((batch, 1, history), dtype=torch.bool, device=device)
    buffer, grouped = randn(lanes, slots, 2 * block * width), randn(lanes, group, width)
    chosen = torch.rand(lanes, slots, device=device).argsort(dim=1)[:, :k].int()
    position = torch.full((1,), history - 1, dtype=torch.int64, device=device)
    calls = {
        "block_scores": (
            lambda at: block_scores(query, keys[at % 4], hidden, block),
            keys[0].nbytes + hidden.nbytes,
        ),
        "gqa_decode": (
            lambda at: gqa_decode(grouped, buffer, chosen, chosen, position, None, block, width, width**-0.5),
            chosen.numel() * 2 * block * width * 2,
        ),
    }
    rows = []
    for what, (call, moved) in calls.items():
        time, spread = microseconds([lambda at=at, call=call: call(at) for at in range(12)])
        rows.append(
            {
                "what": what,
                "lanes": lanes,
                "k": history // block if what == "block_scores" else k,
                "record_bytes": 2 * block * width * 2,
                "us": round(time, 2),
                "us_spread": round(spread, 2),
                "GB_per_s": round(moved / time / 1000, 1),
            }
        )
    return rows


def main() -> None:
    """Measure all, print a line each, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("eval/results/kernels.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("eval.kernels measures GPU kernels: there is no CUDA device here")
    cases: list[Callable[[], dict[str, Any]]] = [
        lambda b=batch: absorbed_attention(b) for batch in (1, 8, 32)
    ]
    latents = RecordLayout(1, 512, 64, torch.bfloat16)  # DeepSeek-V3.2, GLM-5
    pages = RecordLayout(16, 128, 128, torch.bfloat16)  # Quest on Qwen3-8B
    blocks = RecordLayout(128, 128, 128, torch.bfloat16)  # MiniMax-M3
    for lanes, misses in ((1, 0), (64, 0), (1, 266), (4, 266), (16, 266), (64, 266), (64, 614)):
        cases.append(lambda n=lanes, m=misses: resolve_and_fetch(n, m, latents, 2048, 4096))
    for lanes, misses in ((8, 0), (8, 17), (64, 17)):
        cases.append(lambda n=lanes, m=misses: resolve_and_fetch(n, m, pages, 128, 256))
    for lanes, misses in ((4, 2), (32, 2)):
        cases.append(lambda n=lanes, m=misses: resolve_and_fetch(n, m, blocks, 16, 32))
    for heads, lanes, misses in (
        (64, 1, 274),
        (64, 4, 274),
        (64, 8, 274),
        (64, 8, 0),
        (128, 1, 274),
        (128, 8, 274),
    ):
        cases.append(lambda g=heads, n=lanes, m=misses: attention_with_misses(n, g, m, latents, 2048, 4096))
    for lanes, misses in ((8, 0), (8, 17), (32, 17), (64, 17)):
        cases.append(lambda n=lanes, m=misses: attention_with_misses(n, 4, m, pages, 128, 256))
    for lanes, misses in ((4, 0), (4, 2), (32, 2)):
        cases.append(lambda n=lanes, m=misses: attention_with_misses(n, 16, m, blocks, 16, 32))
    rows = []
    for case in tqdm(cases, desc="kernels"):
        rows.append(case())
        tqdm.write(str(rows[-1]))
        torch.cuda.empty_cache()
    for batch in (1, 8):
        for row in block_attention(batch):
            rows.append(row)
            tqdm.write(str(row))
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
