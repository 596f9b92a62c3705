"""The shape of what a layer caches, from a model's configuration alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig


class KvShape(NamedTuple):
    """What a layer is handed for each token of a batch row.

    Attributes
    ----------
    heads : int
        KV heads.
    key_width, value_width : int
        Elements per head.
    index_width : int
        Elements of the key by which the model selects, 0 for none.
    """

    heads: int
    key_width: int
    value_width: int
    index_width: int = 0


def layer_config(decoder: PreTrainedConfig, index: int) -> Any:
    """The configuration of one layer, where layers differ."""
    layers = getattr(decoder, "per_layer_config", None)
    return layers[index] if layers else decoder


def gqa_shape(decoder: PreTrainedConfig, index: int) -> KvShape:
    """Keys and values of attention that does not select: as transformers itself finds them for its static caches."""
    config = layer_config(decoder, index)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None):
        return KvShape(1, config.kv_lora_rank, config.qk_rope_head_dim)  # latents, expanded after caching
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvShape(heads, width, width)
