"""What a tensor subclass of a quantisation library is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def is_plain(tensor: Any) -> bool:
    """Whether every kernel can read it: a tensor subclass (of torchao, say) holds its content in its own way."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold its content: itself, or those that a subclass wraps (see `__tensor_flatten__` in PyTorch)."""
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_parts(getattr(tensor, name))
