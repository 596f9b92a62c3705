"""A prompt of 128K tokens through DeepSeek-V3.2's attention: time, peak memory, and the model's own answer where that fits.

    python -m eval.long_prompt            # on a GPU; writes eval/results/long_prompt.csv
    python -m eval.long_prompt --quick    # toy sizes, on a CPU too

True attention sizes, few layers, small dense MLPs, random weights, random tokens. At `--compare` tokens the same model
runs in fp32 with its own DynamicCache, in the same calls, and logits are compared; at `--tokens` its own path would need
scores of tokens^2 x index heads x 4 bytes, so there HiSparse runs alone, in bf16. Its peak memory is taken twice, the second
time with an indexer and an attention that do nothing: the difference is what they need, which `--prefill-memory` bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import Cache, DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache, PreTrainedModel

from eval.environment import write_csv
from eval.flags import command_line
from eval.output import parse
from eval.shapes import TOY_DSA
from hf_hisparse import HiSparseCache, disable
from hf_hisparse.models.mla import LatentLayer


def build(layers: int, toy: bool, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A DeepSeek-V3.2 of `layers` layers with true attention sizes, or a toy."""
    config = DeepseekV32Config(
        **(TOY_DSA if toy else {}),
        num_hidden_layers=layers,
        intermediate_size=64 if toy else 2048,
        first_k_dense_replace=layers,
        mlp_layer_types=["dense"] * layers,
        vocab_size=1024,
        max_position_embeddings=2**18,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = DeepseekV32ForCausalLM._from_config(config, dtype=dtype).eval()
    with (
        torch.no_grad()
    ):  # weights of unit gain: with the usual 0.02 attention is uniform, and any selection looks right
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
    return model


@torch.no_grad()
def run(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, steps: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Prefill all but `steps` tokens, then feed those one by one; the logits of all calls' last rows, and what it took."""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    began = time.perf_counter()
    prompt = ids[:, : ids.shape[1] - steps]
    logits = [model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits]
    if cuda:
        torch.cuda.synchronize()
    result: dict[str, Any] = {"prefill_s": round(time.perf_counter() - began, 2)}
    if cuda:
        result["peak_bytes_over_weights"] = torch.cuda.max_memory_allocated() - held
        result["cache_bytes"] = torch.cuda.memory_allocated() - held
    for at in range(prompt.shape[1], ids.shape[1]):
        logits.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1).float(), result


@contextmanager
def without_attention(model: PreTrainedModel) -> Iterator[None]:
    """Every query selects the first records, and gets zeros."""

    def select(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shape = (*hidden_states.shape[:2], model.config.index_topk)
        return torch.zeros(shape, dtype=torch.int32, device=hidden_states.device)

    def attend(layer: LatentLayer, module: Any, query: torch.Tensor, *args: Any) -> torch.Tensor:
        batch, heads, count, _ = query.shape
        return query.new_zeros((batch, count, heads, model.config.v_head_dim))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(LatentLayer, "_prefill", attend))
        for layer in model.get_decoder().layers:
            patches.enter_context(mock.patch.object(layer.self_attn.indexer, "forward", select))
        yield


def main() -> None:
    """Compare, then run the long prompt; write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--compare", type=int, default=6144)
    parser.add_argument("--steps", type=int, default=8, help="tokens fed one by one after the prompt")
    parser.add_argument("--prefill-memory", default="2GiB")
    parser.add_argument("--quick", action="store_true")
    args = parse(parser, "long_prompt.csv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        args.tokens, args.compare = 2000, 500
    rows: list[dict[str, Any]] = []

    def note(**row: Any) -> None:
        rows.append({"layers": args.layers, "prefill_memory": args.prefill_memory, **row})
        print(rows[-1], flush=True)

    model = build(args.layers, args.quick, device, torch.float32)
    ids = torch.randint(0, 1024, (1, args.compare), device=device)
    own, result = run(model, DynamicCache(config=model.config), ids, args.steps)
    note(tokens=args.compare, dtype="float32", cache="DynamicCache", **result)
    ours, result = run(model, HiSparseCache(model, prefill_memory=args.prefill_memory), ids, args.steps)
    note(
        tokens=args.compare,
        dtype="float32",
        cache="HiSparseCache",
        **result,
        max_logit_difference=f"{(ours - own).abs().max().item():.1e}",
        logit_std=round(own.std().item(), 3),
        tokens_equal=bool(torch.equal(ours.argmax(-1), own.argmax(-1))),
    )
    disable(model)
    del model, own, ours

    model = build(args.layers, args.quick, device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(0, 1024, (1, args.tokens), device=device)
    cache = HiSparseCache(model, prefill_memory=args.prefill_memory)
    with without_attention(model):
        _, alone = run(model, cache, ids, steps=0)
    cache.reset()
    logits, result = run(model, cache, ids, args.steps)
    if device == "cuda":
        own_bytes = alone["peak_bytes_over_weights"]
        result["extra_peak_bytes"] = result["peak_bytes_over_weights"] - own_bytes
    assert torch.isfinite(logits).all()
    stats = cache.stats()
    note(
        tokens=args.tokens,
        dtype=str(model.dtype),
        cache="HiSparseCache",
        **result,
        hit_rate=round(stats.hit_rate, 4),
    )
    print(cache)
    write_csv(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
