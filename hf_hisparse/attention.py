"""The attention and mask functions that an enabled model calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .hosted_layer import LAYER_ATTRIBUTE, HostedLayer
from .masks import check_mask
from .resident_layer import ResidentLayer

# The implementation a model had -> the one it gets. One name per base, so that the base survives copying a model.
IMPLEMENTATIONS = {"sdpa": "hisparse", "eager": "hisparse_eager"}
BASES = {name: base for base, name in IMPLEMENTATIONS.items()}

# What a model may ask of its attention that changes the result and that decode over slots does not compute.
_UNSUPPORTED_ARGUMENTS = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "output_attentions",
    "sliding_window",
)


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
        return base(module, query, key, value, attention_mask, **kwargs)
    _check_arguments(layer, kwargs)
    check_mask(attention_mask, layer.name)
    return layer.attend(module, query, attention_mask, base, kwargs)


def _check_arguments(layer: HostedLayer | ResidentLayer, kwargs: dict[str, Any]) -> None:
    for name in _UNSUPPORTED_ARGUMENTS:
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"{layer.name}: the model's attention asks for {name}={shown}, which sparse decoding does not compute; "
                "use DynamicCache for this model (or this call)"
            )
    if kwargs.get("dropout"):
        raise ValueError(
            f"{layer.name}: attention dropout={kwargs['dropout']} is for training; call model.eval() first"
        )


def _base_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """What the module would call if the model were not enabled."""
    base = BASES[module.config._attn_implementation]
    if base == "eager":  # lives in the model's own file
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """The mask that the model would have made."""
    base = ALL_MASK_ATTENTION_FUNCTIONS[BASES[config._attn_implementation]]
    return base(*args, config=config, **kwargs)


for _name in BASES:
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
