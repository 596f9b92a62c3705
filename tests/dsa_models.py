"""Tiny random models with DeepSeek sparse attention; their attention is sharp, and ties in the indexer's scores are rare."""

from __future__ import annotations

import copy
import functools
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from tests.models import VOCAB, _randomise

TOP_K = 32
LAYERS = 4


def _common(layers: int, **more: object) -> dict[str, object]:
    """Settings that the configurations of all families share; 16 index heads keep the ReLU's ties at 0 rare."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "head_dim": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": TOP_K,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | more


def _config(family: str, layers: int = LAYERS, **more: object) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{family}Config")(**_common(layers, **more))


def _glm(pattern: str, **more: object) -> PreTrainedModel:
    kinds = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    return transformers.GlmMoeDsaForCausalLM(_config("GlmMoeDsa", len(kinds), indexer_types=kinds, **more))


def _mistral(pattern: str) -> PreTrainedModel:
    """Its second layer has no rotary embedding, so its records are narrower."""
    text = _config("MistralLarge4Text", len(pattern), no_rope_layers=[1, 0, 1, 1], index_topk_pattern=pattern)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.MistralLarge4Config(
        text_config=text, vision_config={"model_type": "pixtral", **vision}
    )
    return transformers.MistralLarge4ForConditionalGeneration(config)


def _dots() -> PreTrainedModel:
    narrow = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 24, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return transformers.Dots3NoteForCausalLM(
        _config(
            "Dots3NoteText",
            layer_types=["indexed_attention", "indexed_attention", "sliding_attention", "indexed_attention"],
            sliding_window=48,
            head_dim=24,
            moe_shared_expert_intermediate_size=32,
            **{f"swa_{name}": value for name, value in (narrow | heads).items()},
        )
    )


# Without experts: in fp32 their products cannot be captured.
_DENSE = {"mlp_layer_types": ["dense"] * LAYERS, "first_k_dense_replace": LAYERS}

_ALL_MODELS = {
    "v32_dense": lambda: transformers.DeepseekV32ForCausalLM(_config("DeepseekV32", **_DENSE)),
    "glm_FSSF_dense": lambda: _glm("FSSF", **_DENSE),
    "v32": lambda: transformers.DeepseekV32ForCausalLM(_config("DeepseekV32")),
    "glm_full": lambda: _glm("FFFF"),
    "glm_FSSF": lambda: _glm("FSSF"),
    "glm_FFFSSS": lambda: _glm("FFFSSS"),
    "glm_default": lambda: transformers.GlmMoeDsaForCausalLM(_config("GlmMoeDsa")),
    "axk2": lambda: transformers.AXK2ForCausalLM(_config("AXK2")),
    "hy_v4": lambda: transformers.HYV4ForCausalLM(_config("HYV4")),
    "dots3_note": _dots,
    "mistral_large4": lambda: _mistral("FSSF"),
}

# Those that the installed transformers has.
_SINCE = {"dots3_note": "Dots3NoteForCausalLM", "mistral_large4": "MistralLarge4ForConditionalGeneration"}
DSA_MODELS = {
    name: build
    for name, build in _ALL_MODELS.items()
    if name not in _SINCE or hasattr(transformers, _SINCE[name])
}


class Twins(NamedTuple):
    """The same weights twice: one model that the library never touches, and one to be enabled."""

    native: PreTrainedModel
    enabled: PreTrainedModel


@functools.cache
def dsa_twins(
    name: str,
    device: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> Twins:
    """The model `name`, the same pair for the whole session."""
    native = build(name, seed, dtype).to(device)
    if attention is not None:
        native.set_attn_implementation(attention)
    return Twins(native, copy.deepcopy(native))


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model `name` of the table above: on the CPU, in eval mode."""
    torch.manual_seed(seed)
    model = DSA_MODELS[name]().eval()
    _randomise(model, seed)
    return model.to(dtype)
