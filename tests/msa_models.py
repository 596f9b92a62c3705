"""Tiny random MiniMax-M3 models: dense and sparse layers, and as many groups of query heads as asked for."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
    PreTrainedModel,
)

from tests.conftest import Twins
from tests.models import VOCAB, _randomise

BLOCK = 8  # tokens
TOP_K = 4  # blocks: 32 tokens of the 530 of a long prompt
KINDS = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]
IMAGE, VIDEO = VOCAB, VOCAB + 1  # tokens that stand for a part of an image


def _text(kv_heads: int, **more: object) -> MiniMaxM3VLTextConfig:
    return MiniMaxM3VLTextConfig(
        **{
            "vocab_size": VOCAB + 2,
            "hidden_size": 64,
            "intermediate_size": 32,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_hidden_layers": len(KINDS),
            "layer_types": KINDS,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": kv_heads,
            "head_dim": 16,
            "rotary_dim": 8,
            "index_n_heads": kv_heads,
            "index_head_dim": 16,
            "index_block_size": BLOCK,
            "index_topk_blocks": TOP_K,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        | more
    )


def _vision() -> dict[str, object]:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return sizes | {"image_size": 8, "patch_size": 2, "temporal_patch_size": 1}


def _with_vision(kv_heads: int) -> PreTrainedModel:
    config = MiniMaxM3VLConfig(
        text_config=_text(kv_heads),
        vision_config=_vision(),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        projector_hidden_size=32,
    )
    return MiniMaxM3SparseForConditionalGeneration(config)


MSA_MODELS = {
    "one_group": lambda: MiniMaxM3VLForCausalLM(_text(1)),
    "two_groups": lambda: MiniMaxM3VLForCausalLM(_text(2)),
    "four_groups": lambda: MiniMaxM3VLForCausalLM(_text(4)),
    "shared_selections": lambda: MiniMaxM3VLForCausalLM(_text(4, index_n_heads=2)),
    "local_blocks": lambda: MiniMaxM3VLForCausalLM(_text(2, index_local_blocks=2)),
    "no_experts": lambda: MiniMaxM3VLForCausalLM(_text(2, mlp_layer_types=["dense"] * len(KINDS))),
    "all_sparse": lambda: MiniMaxM3VLForCausalLM(
        _text(2, layer_types=["minimax_m3_sparse"] * 2, mlp_layer_types=["dense"] * 2, num_hidden_layers=2)
    ),
    "images": lambda: _with_vision(2),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The model `name` of the table above: fp32, on the CPU, in eval mode."""
    torch.manual_seed(seed)
    model = MSA_MODELS[name]().eval()
    _randomise(model, seed)
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "MiniMaxM3VLRMSNorm":
                module.weight.sub_(1)  # it multiplies by weight + 1
    return model


@functools.cache
def msa_twins(name: str, device: str, seed: int = 0, attention: str | None = None) -> Twins:
    """The model `name`, the same pair for the whole session."""
    native = build(name, seed).to(device)
    if attention is not None:
        native.set_attn_implementation(attention)
    return Twins(native, copy.deepcopy(native))
