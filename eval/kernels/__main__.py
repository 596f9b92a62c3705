"""The kernels alone, in CUDA graphs, beside what they can be measured against.

    python -m eval.kernels            # on a GPU; writes eval/results/kernels.csv
    python -m eval.kernels --quick    # toy sizes, on a CPU too (the references instead of the kernels)
    python -m eval.plots eval/results/kernels.csv

resolve + fetch: k records of a lane per call, a fresh selection each call, beside a fetch that begins when resolve has ended, and
the copy engine moving the same bytes.
resolve: alone, in large buffers, over as many calls as fill the log of uses once, so that clearing it is counted.
mla layer, gqa layer: from selection to output (us) as the cache does it, fetch first and attention then or, where that has a
kernel for it and there are many lanes, attention that reads missing records from the host itself; both ways stand beside, with
resolve and fetch alone, and resolve and attention alone, without what is missing.
block_scores, gqa_decode: MiniMax-M3's choice of blocks out of 131,072 tokens, and attention over 16 of them.
quest_select: the best pages of a history by their scores, beside the same from torch's operations.
mla_decode: absorbed attention over k selected rows, beside a gather and torch's SDPA.
Times are the median over replays of a graph of many calls, divided by the calls. Floors: what misses are at the bandwidth of the
link, and what attention reads at that of the GPU's memory, both measured in the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from eval.environment import conditions, memory_bandwidth, write_csv
from eval.flags import command_line
from eval.kernels.timing import DEVICE, microseconds
from eval.kernels.workload import Workload
from eval.output import parse
from hf_hisparse.hosted_layer import FEW_LANES
from hf_hisparse.link import link_bandwidth
from hf_hisparse.records import RecordLayout
from hisparse_kernels import reference
from hisparse_kernels.block_scores import block_scores
from hisparse_kernels.fetch import fetch
from hisparse_kernels.gqa_decode import gqa_decode
from hisparse_kernels.miss_plan import HostSource
from hisparse_kernels.mla_decode import mla_decode
from hisparse_kernels.quest_select import quest_select
from hisparse_kernels.recency import LOG_LENGTH

Row = dict[str, Any]

# Lanes and misses per lane -> us that resolve + fetch should take at most on an H200, k = 2048 of 4096, rows of 1152 bytes: below
# what SGLang 0.5.23's swap-in kernel took there in a trial (11.8, 14.1, 43.9, 45.9, 114.7, 402, 907).
GOALS = {(1, 0): 8, (64, 0): 10, (1, 266): 14, (4, 266): 31, (16, 266): 100, (64, 266): 380, (64, 614): 870}
RESOLVE_GOAL = 12  # us a layer, whatever the buffer's size


def link_floor(nbytes: float) -> float:
    """Microseconds to bring so many bytes over the link, at the bandwidth measured in this run."""
    return round(1e6 * nbytes / link_bandwidth(), 2)


def memory_floor(nbytes: float) -> float:
    """Microseconds to read so many bytes of GPU memory."""
    return round(1e6 * nbytes / memory_bandwidth(), 2)


def resolve_and_fetch(lanes: int, misses: int, layout: RecordLayout, k: int, slots: int) -> Row:
    """Time resolve and fetch beside a fetch that waits for resolve, and the copy engine moving the same bytes."""
    work = Workload(lanes, misses, layout, k, slots)

    def fetch_after(selection: torch.Tensor) -> None:
        work.buffer.resolve(selection, work.position)
        fetch(work.pool.records, work.pool.host_rows, work.buffer.plan, work.buffer.data)

    time, spread = work.time(work.read)
    after = work.time(fetch_after).us
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
        "fetch_after_us": round(after, 2),
        "copy_engine_us": round(work.copy_engine(moved), 2),
        "link_floor_us": link_floor(moved),
        "goal_us": GOALS.get((lanes, misses)) if layout.tokens == 1 else None,
    }


def resolve_alone(lanes: int, misses: int, k: int, slots: int) -> Row:
    """Time resolve in a buffer of many slots; it touches no record, so those are as small as can be."""
    layout = RecordLayout(1, 8, 0, torch.bfloat16)
    work = Workload(lanes, misses, layout, k, slots, calls=(LOG_LENGTH - 1) * slots // k)
    time, spread = work.time(lambda selection: work.buffer.resolve(selection, work.position))
    return {
        "what": "resolve",
        "lanes": lanes,
        "k": k,
        "slots": slots,
        "record_bytes": layout.nbytes,
        "misses_per_lane": round(work.misses_per_call() / lanes, 1),
        "us": round(time, 2),
        "us_spread": round(spread, 2),
        "goal_us": RESOLVE_GOAL if k == 2048 else None,
    }


def attention_with_misses(
    lanes: int, group: int, misses: int, layout: RecordLayout, k: int, slots: int
) -> Row:
    """Time a layer's step from selection to output, and its parts."""
    work = Workload(lanes, misses, layout, k, slots)
    latent = layout.tokens == 1
    width = layout.key_width + (layout.value_width if latent else 0)
    query = torch.randn(lanes, group, width, device=DEVICE, dtype=layout.dtype)

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

    first = work.time(lambda s: attend(s, work.read(s)))
    meanwhile = None if latent else work.time(read_while_attending)
    layer = first if meanwhile is None or lanes <= FEW_LANES else meanwhile
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
        "us": round(layer.us, 2),
        "us_spread": round(layer.spread, 2),
        "GB_per_s": round(moved / layer.us / 1000, 1),
        "copy_engine_us": round(work.copy_engine(moved), 2),
        "link_floor_us": link_floor(moved),
        "memory_floor_us": memory_floor(lanes * k * layout.nbytes),
        "times_slower_part": round(layer.us / max(hits.us, moving.us), 3),
        "fetch_then_attend_us": round(first.us, 2),
        "attend_and_read_us": None if meanwhile is None else round(meanwhile.us, 2),
        "resolve_fetch_us": round(moving.us, 2),
        "resolve_attend_us": round(hits.us, 2),
        "resolve_us": round(resolving.us, 2),
    }


def absorbed_attention(batch: int, heads: int, k: int, slots: int) -> Row:
    """Time `mla_decode` over rows of DeepSeek-V3.2's width, and the same by a gather and SDPA."""
    latent, rope = 512, 64
    torch.manual_seed(batch)
    buffer = torch.randn(batch, slots, latent + rope, device=DEVICE, dtype=torch.bfloat16)
    query = torch.randn(batch, heads, latent + rope, device=DEVICE, dtype=torch.bfloat16)
    chosen = torch.rand(batch, slots, device=DEVICE).argsort(dim=1)[:, :k].int()
    scaling = 192**-0.5

    def ours() -> torch.Tensor:
        return mla_decode(query, buffer, chosen, chosen, scaling, latent)

    lane = torch.arange(batch, device=DEVICE)[:, None]
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
        "memory_floor_us": memory_floor(moved),
    }


def choice_of_pages(lanes: int, pages: int, k: int) -> Row:
    """Time `quest_select` over scores, and its reference, which is torch's top-k, on the same device."""
    scores = torch.randn(lanes, pages, device=DEVICE)
    position = torch.full((1,), 16 * pages - 1, dtype=torch.int64, device=DEVICE)
    time, spread = microseconds([lambda: quest_select(scores, position, 16, k)] * 12)
    other, _ = microseconds([lambda: reference.quest_select(scores, position, 16, k)] * 12)
    return {
        "what": "quest_select",
        "lanes": lanes,
        "k": k,
        "slots": pages,
        "us": round(time, 2),
        "us_spread": round(spread, 2),
        "torch_us": round(other, 2),
    }


def block_attention(batch: int, history: int) -> list[Row]:
    """Time one layer's decode step at MiniMax-M3's sizes: the scores of all blocks, and attention over 16 of them."""
    heads, group, width, block, k, slots = 4, 16, 128, 128, 16, 32
    lanes, device = batch * heads, torch.device(DEVICE)

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
                "memory_floor_us": memory_floor(moved),
            }
        )
    return rows


def cases() -> Iterator[Callable[[], list[Row]]]:
    """What is measured on a GPU."""
    latents = RecordLayout(1, 512, 64, torch.bfloat16)  # DeepSeek-V3.2, GLM-5
    pages = RecordLayout(16, 128, 128, torch.bfloat16)  # Quest on Qwen3-8B
    blocks = RecordLayout(128, 128, 128, torch.bfloat16)  # MiniMax-M3
    for batch in (1, 8, 32):
        yield lambda b=batch: [absorbed_attention(b, heads=128, k=2048, slots=4096)]
    for lanes, misses in GOALS:
        yield lambda n=lanes, m=misses: [resolve_and_fetch(n, m, latents, 2048, 4096)]
    for lanes, misses in ((8, 0), (8, 17), (64, 17)):
        yield lambda n=lanes, m=misses: [resolve_and_fetch(n, m, pages, 128, 256)]
    for lanes, misses in ((4, 2), (32, 2)):
        yield lambda n=lanes, m=misses: [resolve_and_fetch(n, m, blocks, 16, 32)]
    for lanes in (1, 8):
        yield lambda n=lanes: [resolve_alone(n, 60, 2048, 32768)]
    for heads, lanes, misses in (
        *itertools.product((64,), (1, 4, 8), (274,)),
        (64, 8, 0),
        *itertools.product((128,), (1, 8), (274,)),
    ):
        yield lambda g=heads, n=lanes, m=misses: [attention_with_misses(n, g, m, latents, 2048, 4096)]
    for lanes, misses in ((8, 0), (8, 17), (16, 17), (32, 17), (64, 17)):
        yield lambda n=lanes, m=misses: [attention_with_misses(n, 4, m, pages, 128, 256)]
    for lanes, misses in ((4, 0), (4, 2), (16, 2), (32, 2)):
        yield lambda n=lanes, m=misses: [attention_with_misses(n, 16, m, blocks, 16, 32)]
    for batch in (1, 8):
        yield lambda b=batch: block_attention(b, history=131072)
    for lanes, count in itertools.product((8, 64), (2048, 8192)):
        yield lambda n=lanes, c=count: [choice_of_pages(n, c, 128)]


def toy_cases() -> Iterator[Callable[[], list[Row]]]:
    """One of each, as small as can be."""
    latents, pages = RecordLayout(1, 512, 64, torch.bfloat16), RecordLayout(16, 128, 128, torch.bfloat16)
    yield lambda: [absorbed_attention(1, heads=4, k=16, slots=32)]
    for misses in (0, 4):
        yield lambda m=misses: [resolve_and_fetch(2, m, latents, 32, 64)]
    yield lambda: [resolve_alone(2, 3, 32, 512)]
    yield lambda: [attention_with_misses(1, 4, 4, latents, 32, 64)]
    yield lambda: [attention_with_misses(2, 4, 2, pages, 16, 32)]
    yield lambda: block_attention(1, history=4096)
    yield lambda: [choice_of_pages(2, 64, 8)]


def main() -> None:
    """Measure all, print a line each, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "kernels.csv")
    if DEVICE == "cpu" and not args.quick:
        raise SystemExit(
            "eval.kernels measures GPU kernels: there is no CUDA device here (--quick goes without)"
        )
    conditions()  # measures, while the memory is empty
    rows = []
    for case in tqdm(list(toy_cases() if args.quick else cases()), desc="kernels"):
        for row in case():
            rows.append(row)
            tqdm.write(str(row))
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
