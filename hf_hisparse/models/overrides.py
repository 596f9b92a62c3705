"""Let single modules of a model call another function in place of one of their methods, and undo it."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

_OLD_FORWARD = "_old_forward"  # where accelerate's hooks keep the forward that they wrap


class Override:
    """A method of one module alone: calls `function` with the module first.

    It goes with a copy or a pickle of the module, bound to that, which a bound method in a module's attributes does not; and it
    does not keep the module alive.

    Parameters
    ----------
    module : torch.nn.Module
    function : callable
        Of a file's own scope, so that it can be pickled.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self.function = function
        parameters = list(inspect.signature(function).parameters.values())
        self.__signature__ = inspect.Signature(parameters[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(alive(self._module), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        return Override(copied(self._module, memo), self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return Override, (alive(self._module), self.function)


def alive(module: weakref.ref[Any]) -> Any:
    """What is referred to; without it a method that was taken out of it is of no use."""
    found = module()
    if found is None:
        raise ReferenceError(
            "a method of a model that is gone is asked for, which a shallow copy (copy.copy) shares with it: keep the model as "
            "long as its methods and shallow copies, or make a copy of its own (copy.deepcopy) while it is there"
        )
    return found


def copied(module: weakref.ref[Any], memo: dict[int, Any]) -> Any:
    """The copy of a module in whose attributes a deep copy is just copying, or else the module itself."""
    original = alive(module)
    return memo.get(id(original), original)


def override(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Let this one module call `function` in place of its method `name`."""
    # Under accelerate's hooks, not around them: they bring a module's weights and inputs to its device.
    place = _OLD_FORWARD if name == "forward" and hasattr(module, _OLD_FORWARD) else name
    setattr(module, place, Override(module, function))


def restore(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Undo `override`; nothing if it was not done."""
    places = vars(module)
    if getattr(places.get(name), "function", None) is function:
        delattr(module, name)
    if name == "forward" and getattr(places.get(_OLD_FORWARD), "function", None) is function:
        setattr(module, _OLD_FORWARD, types.MethodType(type(module).forward, module))
