"""Sizes that several measurements share."""

from __future__ import annotations

from typing import Any

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
