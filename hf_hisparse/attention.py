"""The attention and mask functions that an enabled model calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hisparse_kernels.gqa_decode import gqa_decode

from .hosted_layer import LAYER_ATTRIBUTE, HostedLayer

# The implementation a model had -> the one it gets. One name per base, so that the base survives copying a model.
IMPLEMENTATIONS = {"sdpa": "hisparse", "eager": "hisparse_eager"}
_BASES = {name: base for base, name in IMPLEMENTATIONS.items()}

# What a model may ask of its attention that changes the result and that decode over slots does not compute.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "output_attentions", "sliding_window")


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
    layer: HostedLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        return base(module, query, key, value, attention_mask, **kwargs)
    _check_arguments(layer, query, key, attention_mask, kwargs)
    if query.shape[2] > layer.settings.decode_rows:
        keys, values = layer.history()
        output, weights = base(module, query, keys, values, attention_mask, **kwargs)
        with torch.no_grad():
            last = _lanes(query[:, :, -1], layer)
            allowed = _allowed(attention_mask, query)
            layer.finish_prefill(last, keys, values, _new_columns(allowed, query.shape[2]))
        return (output if keys is key else _without_gradient(output)), weights
    scaling = kwargs.get("scaling")
    with torch.no_grad():
        output = _decode(
            layer, query, _allowed(attention_mask, query), query.shape[3] ** -0.5 if scaling is None else scaling
        )
    return _without_gradient(output, query), None


def _decode(
    layer: HostedLayer, query: torch.Tensor, allowed: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Sparse attention, one new token after another, each with a selection of its own."""
    batch, heads, count, _ = query.shape
    valid = _new_columns(allowed, count)
    new = layer.begin_decode(valid)
    outputs = []
    for i in range(count):
        keys, values = new.keys[:, :, i].flatten(0, 1), new.values[:, :, i].flatten(0, 1)
        layer.append(keys, values, None if valid is None else valid[:, i])
        row = _lanes(query[:, :, i], layer)
        selection, slots = layer.select(row)
        output = gqa_decode(
            row,
            layer.buffer.data,
            selection,
            slots,
            layer.position,
            None if allowed is None else allowed[:, i],
            layer.layout.tokens,
            layer.layout.key_width,
            scaling,
        )
        layer.advance()
        outputs.append(output.view(batch, heads, -1))
    layer.end_decode()
    return torch.stack(outputs, dim=1)


def _lanes(query: torch.Tensor, layer: HostedLayer) -> torch.Tensor:
    """``[batch, query heads, width]`` -> ``[lanes, group, width]``."""
    return query.reshape(layer.buffer.order.shape[0], -1, query.shape[-1])


def _allowed(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A model's mask as bool ``[batch, S, history]``, True where a key may be read."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    return mask[:, 0].expand(query.shape[0], -1, -1)


def _new_columns(allowed: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Which of the last `count` keys are no padding, bool ``[batch, count]``: the last query sees all keys."""
    return None if allowed is None else allowed[:, -1, -count:]


def _check_arguments(
    layer: HostedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    where = f"HiSparse, layer {layer.layer_idx}"
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            value = kwargs[name]
            shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"{where}: the model's attention asks for {name}={shown}, which sparse decoding does not compute; "
                "use DynamicCache for this model (or this call)"
            )
    if kwargs.get("dropout"):
        raise ValueError(f"{where}: attention dropout={kwargs['dropout']} is for training; call model.eval() first")
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{where}: {query.shape[1]} query heads over {key.shape[1]} KV heads; their number must be a multiple"
        )
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[1] != 1):
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"{where}: an attention mask of shape {shape}; supported are None and [batch, 1, queries, keys], the same for "
            "all heads"
        )


class _Undifferentiable(torch.autograd.Function):
    """Identity that says so when somebody asks for gradients that were never computed."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "no gradients flow through the history of a HiSparseCache: train without a cache, or with DynamicCache"
        )


def _without_gradient(output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (output, *inputs)):
        return _Undifferentiable.apply(output, *inputs)
    return output


def _base_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """What the module would call if the model were not enabled."""
    base = _BASES[module.config._attn_implementation]
    if base == "eager":  # lives in the model's own file
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """The mask that the model would have made."""
    base = ALL_MASK_ATTENTION_FUNCTIONS[_BASES[config._attn_implementation]]
    return base(*args, config=config, **kwargs)


for _name in _BASES:
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
