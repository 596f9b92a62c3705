"""No gradients flow through a hosted history; asking for them must not go unnoticed."""

from __future__ import annotations

from typing import Any

import torch


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
