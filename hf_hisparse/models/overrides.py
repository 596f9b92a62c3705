"""Let single modules of a model call another function in place of one of their methods, and undo it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

_OLD_FORWARD = "_old_forward"  # where accelerate's hooks keep the forward that they wrap


def override(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Let this one module call `function`. Bound like this, it survives copying the model."""
    # Under accelerate's hooks, not around them: they bring a module's weights and inputs to its device.
    place = _OLD_FORWARD if name == "forward" and hasattr(module, _OLD_FORWARD) else name
    setattr(module, place, types.MethodType(function, module))


def restore(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Undo `override`; nothing if it was not done."""
    places = vars(module)
    if getattr(places.get(name), "__func__", None) is function:
        delattr(module, name)
    if name == "forward" and getattr(places.get(_OLD_FORWARD), "__func__", None) is function:
        setattr(module, _OLD_FORWARD, types.MethodType(type(module).forward, module))
