"""What a model needs on the GPU beside its cache: weights, and an estimate of what a forward pass takes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from .models.kv_shape import gqa_shape

CONTEXT_BYTES = 2**29  # the CUDA context, libraries and their workspaces
_STAGING_BYTES = 2**27  # what a cache takes to copy long prompts to the host


def model_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The type in which a checkpoint of this configuration is loaded by default."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The model of this configuration, built without any memory.

    Raises
    ------
    ValueError
        If the installed transformers does not know the model, or the configuration names one that is not made of it.
    """
    architecture = _architecture(config)
    with torch.device("meta"):
        return architecture._from_config(config, dtype=dtype)


def _architecture(config: PreTrainedConfig) -> Any:
    """The class that `config` names, or the one that transformers has for such a configuration."""
    names = getattr(config, "architectures", None) or [""]
    named = getattr(transformers, str(names[0]), None)
    if isinstance(named, type) and issubclass(named, PreTrainedModel):
        made_from = named.config_class or PreTrainedConfig
        if not isinstance(config, made_from):
            raise ValueError(
                f"config.architectures={names!r} names a model that is made from a {made_from.__name__}, and this is a "
                f"{type(config).__name__}: correct it, set it to None, or give the size of the weights (weights)"
            )
        return named
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING)
    known = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if known is None:
        raise ValueError(
            f"transformers {transformers.__version__} has no model for the configuration of {config.model_type!r} "
            f"(architectures={names!r}): give the size of its weights (weights)"
        )
    return known


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights and buffers; of a quantised checkpoint's `empty_model` as if it were not quantised."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def activation_bytes(
    config: PreTrainedConfig, batch: int, rows: int, total: int, dtype: torch.dtype, prefill_memory: int = 0
) -> int:
    """An estimate of the device memory that a forward pass takes beyond weights and cache, the CUDA context included.

    The larger of what a layer's MLP and its attention hold at once, and the logits of the last token.

    Parameters
    ----------
    batch, rows : int
        New tokens in a call: `rows` of each batch row.
    total : int
        Tokens that attention reads.
    prefill_memory : int
        What a model that selects by itself may take for that (see `HiSparseCache`).
    """
    decoder = config.get_text_config(decoder=True)
    hidden, heads = decoder.hidden_size, decoder.num_attention_heads
    shape = gqa_shape(decoder, 0)
    cached = shape.heads * (shape.key_width + shape.value_width)  # of a token and layer
    expanded = shape.key_width + shape.value_width
    if getattr(decoder, "kv_lora_rank", None):
        expanded = decoder.qk_nope_head_dim + decoder.qk_rope_head_dim + decoder.v_head_dim
    mlp = 2 * hidden + _mlp_width(decoder)
    attention = 3 * hidden + 2 * heads * expanded + 2 * cached
    elements = batch * rows * max(mlp, attention)
    if rows < total:  # one layer's history, and the next one's on its way
        elements += 2 * batch * total * cached
    if rows < total and not prefill_memory:  # the same for all query heads, and a mask, bool and not
        elements += batch * total * (heads * expanded + rows * 3 // 2)
    logits = 3 * batch * decoder.vocab_size
    return (elements + logits) * dtype.itemsize + prefill_memory + _STAGING_BYTES + CONTEXT_BYTES


def _mlp_width(decoder: Any) -> int:
    """Elements that the widest MLP holds for a token: gate, up and their product, for each expert that it goes to."""
    dense = 3 * (getattr(decoder, "intermediate_size", None) or 4 * decoder.hidden_size)
    experts = getattr(decoder, "num_experts_per_tok", None)
    if not isinstance(experts, int):
        return dense
    inner = getattr(decoder, "moe_intermediate_size", None) or decoder.intermediate_size
    return max(dense, experts * (3 * inner + decoder.hidden_size))
