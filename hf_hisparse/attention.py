"""The attention and mask functions that an enabled model calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .active import capturing_cache, current_call
from .hosted_layer import LAYER_ATTRIBUTE, HostedLayer
from .masks import block_mask, check_mask, selection_mask
from .resident_layer import ResidentLayer

# The implementation a model had -> the one it gets. One name per base, so that the base survives copying a model.
IMPLEMENTATIONS = {"sdpa": "hisparse", "eager": "hisparse_eager"}
BASES = {name: base for base, name in IMPLEMENTATIONS.items()}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over a hosted layer; over anything else, what the model would have called.

    Parameters
    ----------
    query : ``[batch, query heads, S, key_width]``
    key, value : ``[batch, KV heads, T, width]``
        From a hosted layer: its new tokens only, T = S.
    attention_mask : bool or additive ``[batch, 1, S, history]`` or None

    Returns
    -------
    ``[batch, S, query heads, value_width]``, and None or the base's attention weights.
    """
    base = _base_attention(module)
    layer: HostedLayer | ResidentLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        # What the models do themselves under another implementation.
        if kwargs.get("indices") is not None and attention_mask is not None:
            attention_mask = selection_mask(attention_mask, kwargs.pop("indices"))
            kwargs["indices"] = None
        if kwargs.get("block_indices") is not None:
            attention_mask = block_mask(module, query, key.shape[2], attention_mask, kwargs)
        return base(module, query, key, value, attention_mask, **kwargs)
    _check_arguments(layer, kwargs)
    if isinstance(layer, HostedLayer):
        check_mask(attention_mask, layer, query.shape[2])
    return layer.attend(module, query, attention_mask, base, kwargs)


def _check_arguments(layer: HostedLayer | ResidentLayer, kwargs: dict[str, Any]) -> None:
    for name in layer.unsupported_arguments:
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"{layer.name}: the model's attention asks for {name}={shown}, which sparse decoding does not compute; "
                f"use {layer.alternative} for this model (or this call)"
            )
    if kwargs.get("dropout"):
        raise ValueError(
            f"{layer.name}: attention dropout={kwargs['dropout']} is for training; call model.eval() first"
        )


def _base_attention(module: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """What the module would call if the model were not enabled."""
    base = BASES[module.config._attn_implementation]
    if base == "eager":  # lives in the model's own file
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _mask(*, config: Any, **kwargs: Any) -> Any:
    """The mask that the model would have made; for a long call of a DSA model, its last row alone.

    That row sees every key that is no padding, so it says all of a mask but causality (see `Call.causal`).
    """
    base = ALL_MASK_ATTENTION_FUNCTIONS[BASES[config._attn_implementation]]
    call, captured = current_call(), capturing_cache.get()
    if call is None or call.cache is not captured:  # a call within the one that is being captured
        captured = None
    cache: Any = call and call.cache
    insists = False
    if cache is not None:
        layer: HostedLayer = cache.hosted_layers[0]
        selects = layer.model_selects and kwargs.get("local_size") is None
        insists = selects and layer.insists_on_mask and not kwargs.get("allow_is_causal_skip", True)
        if call is not None:
            call.causal |= insists or (selects and not layer.insists_on_mask)
            padding = kwargs.get("attention_mask")
            call.masked |= padding is not None
            if padding is not None and (kwargs["q_length"] > 1 or not layer.get_seq_length()):
                layer.check_padding(padding)
    if captured is not None:  # other layers read the mask from `Padding`
        return captured.captured_mask() if insists else None
    if insists and call is not None and kwargs["q_length"] > call.decode_rows:
        kwargs["q_offset"] += kwargs["q_length"] - 1
        kwargs["q_length"] = 1
    return base(config=config, **kwargs)


for _name in BASES:
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
