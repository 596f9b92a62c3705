"""Modes of torch that a call may come in, and that must not reach what a cache keeps or computes by itself.

A cache outlives the call that fills it: a tensor made in `torch.inference_mode` could never be written outside of it. And what
stands in for a model's attention has sums of its own precision, which `torch.autocast` would change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _OnDevice(Protocol):
    position: torch.Tensor


_L = TypeVar("_L", bound=_OnDevice)


def outside_inference_mode() -> AbstractContextManager[None]:
    """A context without gradients, whose tensors can be written in place in any mode."""
    return _left_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _left_inference_mode() -> Iterator[None]:
    # The order counts: to leave inference mode turns gradients on.
    with torch.inference_mode(False), torch.no_grad():
        yield


def keeps(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function that makes what is kept outside of inference mode; in any other mode as it is."""

    @functools.wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with outside_inference_mode():
            return function(*args, **kwargs)

    return outside


def own_sums(method: Callable[Concatenate[_L, _P], Any]) -> Callable[Concatenate[_L, _P], Any]:
    """Run a layer's method, which computes what the model does not, outside of autocast."""

    @functools.wraps(method)
    def exact(layer: _L, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        device = layer.position.device.type
        if not torch.is_autocast_enabled(device):
            return method(layer, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(layer, *args, **kwargs)

    return exact
