"""Sizes that several measurements share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

# DeepSeek sparse attention small enough to run anywhere, to see that a measurement works.
TOY_DSA: dict[str, Any] = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    head_dim=8,
    v_head_dim=16,
    index_topk=32,
    index_head_dim=16,
    index_n_heads=16,
)

# Decoders with grouped-query attention, by name.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "qwen3-4b": dict(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "toy": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}


def build(
    name: str, device: str, dtype: torch.dtype | None = None, layers: int | None = None
) -> PreTrainedModel:
    """A model of a named shape with random weights, of only so many layers if given; or any model that transformers can load.

    `dtype` is bfloat16 on a GPU and float32 on a CPU if not given.
    """
    dtype = dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32)
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    sizes = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen3Config(
        **sizes,
        head_dim=128 if name != "toy" else 16,
        vocab_size=151936 if name != "toy" else 512,
        max_position_embeddings=2**18,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


# The same for MiniMax sparse attention: blocks of 8 tokens, 8 of them read.
TOY_MSA: dict[str, Any] = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rotary_dim=8,
    index_n_heads=2,
    index_head_dim=16,
    index_block_size=8,
    index_topk_blocks=8,
)
