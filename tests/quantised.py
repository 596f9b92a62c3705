"""Weights as torchao quantises them: a plain linear layer whose weight is a tensor subclass that knows few operators."""

from __future__ import annotations

from typing import Any

import torch


class Int8Weight(torch.Tensor):
    """A matrix in int8 with a scale for each row; all that works with it is a product from the left, and what keeps it whole."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Int8Weight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, dtype=scale.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            rows, weight, *bias = args
            return function(rows, weight.qdata.to(rows.dtype) * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale)
        raise NotImplementedError(f"Int8Weight: {function}")


def quantise(model: torch.nn.Module) -> None:
    """Let all linear layers of the decoder's layers have weights of this kind."""
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and ".layers." in name:
            quantised = Int8Weight.of(module.weight.detach())
            module.weight = torch.nn.Parameter(quantised, requires_grad=False)
