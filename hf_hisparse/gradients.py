"""No gradients flow through a hosted history; asking for them must not go unnoticed."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

# Later versions of transformers leave a layer its cache where no gradients are wanted.
_ALSO_WITHOUT_GRADIENTS = "__call__" in vars(GradientCheckpointingLayer)


class _Undifferentiable(torch.autograd.Function):
    """Identity that raises when its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "no gradients flow through the history of a HiSparseCache: train without a cache, or with DynamicCache"
        )


def without_gradient(output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """`output`, made to raise on `backward` if it depends on anything that wants gradients."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (output, *inputs)):
        return _Undifferentiable.apply(output, *inputs)
    return output


def refuse_checkpointing(decoder: torch.nn.Module) -> None:
    """Refuse a call with a `HiSparseCache` where gradient checkpointing keeps the cache from a layer (ValueError)."""
    if not decoder.training or not (torch.is_grad_enabled() or _ALSO_WITHOUT_GRADIENTS):
        return
    for layer in decoder.modules():
        if isinstance(layer, GradientCheckpointingLayer) and _checkpoints(layer):
            raise ValueError(
                "HiSparseCache: gradient checkpointing is on and the model in training mode, where transformers gives "
                f"{type(layer).__name__} no cache: call model.eval(), or model.gradient_checkpointing_disable(), or train "
                "without a cache"
            )


def _checkpoints(layer: GradientCheckpointingLayer) -> bool:
    """Whether this is a layer with a cache (not one of a vision tower) that does without it."""
    indices = (getattr(part, "layer_idx", None) for part in layer.modules())
    return (
        layer.gradient_checkpointing and layer.training and any(isinstance(index, int) for index in indices)
    )
