"""The longest decode step while the host pools grow, pinned when they are full or ahead of need; and a first prompt, likewise.

    python -m eval.growth            # on a GPU; writes eval/results/growth.csv
    python -m eval.growth --quick    # toy sizes, on a CPU too, where nothing is pinned

A prompt takes fresh memory (`prompt_s`). A second call fills most of the room that came with it, then steps of one token are
timed until some after the next growth, in which `pinned_bytes` are taken. Of that step, `ms_growth_step`, the pools take
`ms_pools`; the rest of what it has over `ms_median` is growth on the GPU, and capturing a new CUDA graph. `ms_longest_before` is
the longest step while memory is pinned beside it, or nothing happens.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.environment import free_memory, write_csv
from eval.flags import command_line
from eval.output import parse
from eval.shapes import SHAPES, build
from hf_hisparse import HiSparseCache, Quest
from hf_hisparse.host_memory import PinnedArea
from hf_hisparse.pinning_ahead import PinningAhead

WARM = 16  # steps before anything is looked at: kernels are compiled, a graph is captured
AFTER = 16


def timed(model: PreTrainedModel, cache: HiSparseCache, tokens: int) -> float:
    """Seconds of one call with so many random tokens."""
    ids = torch.randint(10, model.config.vocab_size, (1, tokens), device=model.device)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def run(model: PreTrainedModel, quest: Quest, tokens: int, ahead: bool) -> dict[str, Any]:
    """Prompt, filling up, and decode steps over the next growth."""
    pools: list[float] = []  # seconds of each `PinnedArea.grow`
    grow = PinnedArea.grow

    def timed_grow(area: PinnedArea, size: int) -> None:
        began = time.perf_counter()
        grow(area, size)
        pools.append(time.perf_counter() - began)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(PinnedArea, "grow", timed_grow))
        if not ahead:
            patches.enter_context(mock.patch.object(PinningAhead, "start"))
        cache = HiSparseCache(model, quest)
        row: dict[str, Any] = {"prompt_s": round(timed(model, cache, tokens), 3)}
        row["prompt_s_pools"] = round(sum(pools), 3)
        # Decode passes the mark from which on memory is pinned ahead.
        timed(model, cache, cache.room.pin_next_at - tokens - WARM - 1)
        pools.clear()
        before = cache.capacity - cache.get_seq_length()
        held = cache.memory().host_reserved_bytes
        steps = [1000 * timed(model, cache, 1) for _ in tqdm(range(before + 1 + AFTER), leave=False)]
        row |= {
            "steps": len(steps),
            "ms_median": round(statistics.median(steps), 2),
            "ms_growth_step": round(steps[before], 2),
            "ms_pools": round(1000 * sum(pools), 2),
            "ms_longest_before": round(max(steps[WARM:before]), 2),
            "pinned_bytes": cache.memory().host_reserved_bytes - held,
        }
        cache.close()
    return row


def main() -> None:
    """Measure, print, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen3-4b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="of the prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "growth.csv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quest = Quest()
    if args.quick:
        args.model, args.layers, args.tokens, quest = "toy", 4, [100], Quest(64)
    model = build(args.model, device, layers=args.layers)
    warm = HiSparseCache(model, quest)
    with torch.no_grad():
        timed(model, warm, 256)  # the libraries
    warm.close()
    rows = []
    for tokens in args.tokens:
        for number in range(args.rounds):
            for ahead in (False, True):
                row = {"model": args.model, "layers": args.layers, "tokens": tokens, "round": number + 1}
                row |= {"pinned": "ahead" if ahead else "when full", **run(model, quest, tokens, ahead)}
                rows.append(row)
                print(row, flush=True)
                free_memory()
                write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
