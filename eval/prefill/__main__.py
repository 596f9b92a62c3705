"""Time and memory of a dense prefill with Quest, beside DynamicCache: in one call, and in chunks on top of a growing history.

    python -m eval.prefill            # on a GPU; writes eval/results/prefill.csv
    python -m eval.prefill --quick    # toy sizes, on a CPU too

Random tokens through the first layers of a Qwen3-8B with random weights. The caches take turns after a first round, which is
given apart: it pins the host memory that later prompts use again.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from eval.environment import write_csv
from eval.flags import command_line
from eval.output import parse
from eval.shapes import SHAPES, build
from hf_hisparse import HiSparseCache, Quest


@torch.no_grad()
def prefill(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int) -> dict[str, Any]:
    """Feed `ids` in chunks; seconds, and peak bytes over what was allocated before."""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    began = time.perf_counter()
    for at in range(0, ids.shape[1], chunk):
        model(ids[:, at : at + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1)
    if not cuda:
        return {"s": time.perf_counter() - began}
    torch.cuda.synchronize()
    return {"s": time.perf_counter() - began, "peak": torch.cuda.max_memory_allocated() - held}


def compare(
    model: PreTrainedModel, tokens: int, chunk: int, rounds: int, quest: Quest
) -> list[dict[str, Any]]:
    """Both caches, taking turns."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    hisparse = HiSparseCache(model, quest)
    found: dict[str, list[dict[str, Any]]] = {"DynamicCache": [], "HiSparseCache": []}
    for _ in tqdm(range(1 + rounds), desc=f"{tokens} by {chunk}", leave=False):
        found["DynamicCache"].append(prefill(model, DynamicCache(config=model.config), ids, chunk))
        hisparse.reset()
        found["HiSparseCache"].append(prefill(model, hisparse, ids, chunk))
    rows = []
    for name, results in found.items():
        times = [result["s"] for result in results[1:]]
        row = {"tokens": tokens, "chunk": chunk, "cache": name, "first_s": round(results[0]["s"], 2)}
        row |= {"s": round(statistics.median(times), 3), "s_spread": round(max(times) - min(times), 3)}
        if "peak" in results[-1]:
            row["peak_bytes_over_weights"] = results[-1]["peak"]
        rows.append(row)
    rows[1]["times_dynamic"] = round(rows[1]["s"] / rows[0]["s"], 3)
    return rows


def main() -> None:
    """Measure, print, write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunks", type=int, nargs="+", default=[131072, 8192])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "prefill.csv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quest = Quest()
    if args.quick:
        args.model, args.layers, args.tokens, args.chunks = "toy", 4, 1000, [1000, 200]
        quest = Quest(64)
    model = build(args.model, device, layers=args.layers)
    rows = []
    for chunk in args.chunks:
        for row in compare(model, args.tokens, chunk, args.rounds, quest):
            rows.append({"model": args.model, "layers": args.layers, **row})
            print(rows[-1], flush=True)
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
