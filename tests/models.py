"""Tiny random models with attention sharp enough that a wrong selection changes the text."""

from __future__ import annotations

import copy
import math

import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 200
LAYERS = 4
SLIDING_WINDOW = 48
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def _common(heads: int, kv_heads: int, head_dim: int) -> dict[str, object]:
    """Settings that the configurations of all families share."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,  # texts of a fixed length
        "pad_token_id": 0,
    }


def _moe() -> dict[str, object]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


# Each group size (query heads per KV head) 1, 2 and 4 is here.
SUPPORTED = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_common(4, 2, 16))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_common(4, 4, 16))),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_common(4, 1, 32))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_common(8, 2, 16), sliding_window=None)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_common(4, 2, 16), **_moe())),
    "qwen3_sliding": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **_common(4, 2, 16),
            layer_types=_ALTERNATING,
            use_sliding_window=True,
            sliding_window=SLIDING_WINDOW,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_common(4, 2, 16),
            layer_types=_ALTERNATING,
            sliding_window=SLIDING_WINDOW,
            query_pre_attn_scalar=25,  # a scaling that is not head_dim ** -0.5
        )
    ),
}

UNSUPPORTED = {
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**_common(4, 2, 16), sliding_window=SLIDING_WINDOW)),
    "sinks": lambda: GptOssForCausalLM(GptOssConfig(**_common(4, 2, 16), num_local_experts=4)),
    "dsa": lambda: DeepseekV32ForCausalLM(
        DeepseekV32Config(
            **(_common(4, 4, 16) | {"head_dim": 8}),
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
        )
    ),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The model `name` of the tables above: fp32, on the CPU, in eval mode, on `sdpa` where the family has it."""
    torch.manual_seed(seed)
    model = (SUPPORTED | UNSUPPORTED)[name]().eval()
    _randomise(model, seed)
    return model


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights of unit gain, and queries and keys of `_SHARPNESS`.

    The usual 0.02 would give uniform attention, and then any selection looks right.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        gain = _SHARPNESS if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")) else 1.0
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            centre = 0.0 if name.endswith("bias") else gain
            weight.copy_(centre + 0.1 * noise)
        elif "embed_tokens" in name:
            weight.copy_(noise)
        else:
            weight.copy_(noise * gain / math.sqrt(weight.shape[-1]))


_SHARPNESS = 1.7  # scores q.k / sqrt(d) of standard deviation 1.7 ** 2


@torch.no_grad()
def perturbed(model: PreTrainedModel, noise: float, seed: int = 7) -> PreTrainedModel:
    """A copy whose weights are off by the relative `noise`: a draft model that is right now and then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.parameters():
        error = torch.randn(weight.shape, generator=generator).to(weight.device)
        weight.add_(noise * weight.abs().mean() * error)
    return draft


def prompt(batch: int, length: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Random token ids ``[batch, length]``, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(device)
