"""Whether an indexer computes from its keys what a kernel of ours does: its code is run on something that stands for them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

# Indexers that were looked at. A fact of the model: other caches need not find it out again.
_known: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def scores_are_known(indexer: torch.nn.Module) -> bool | None:
    """Whether the kernel computes what this indexer does; None if nobody has looked yet."""
    return _known.get(indexer)


def may_watch(indexer: torch.nn.Module, layer: Any) -> bool:
    """Whether to leave the scores of a call to the kernel, as long as the code does what is expected.

    A capture cannot look for the first time. Under autocast the model's products are not those of the kernel.
    """
    known = scores_are_known(indexer)
    if known is False or (known is None and layer.padding.capturing):
        return False
    return not torch.is_autocast_enabled(layer.position.device.type)


def note_scores(indexer: torch.nn.Module, known: bool) -> None:
    """Remember it."""
    if not known and _known.get(indexer) is not False:
        logger.debug("%s computes its scores in a way of its own, and runs as it is", type(indexer).__name__)
    _known[indexer] = known


class UnknownScores(Exception):
    """An indexer computes something else from its keys than the kernel that stands ready does."""


class StandInCache:
    """What an indexer sees as its cache; of a real one it has what transformers' indexers use.

    Attributes
    ----------
    lazily : bool
        Whether its keys are watched. If so, whatever else is asked of it makes the scores unknown.
    """

    lazily = True

    def __getattr__(self, name: str) -> Any:
        if self.lazily:
            raise UnknownScores(f"the cache's {name}")
        raise AttributeError(f"an indexer asks its cache for {name}, which HiSparseCache does not offer it")


class WatchedKeys:
    """Stands for the keys in an indexer's code, as long as that does with them what is expected, step by step.

    Parameters
    ----------
    keys : ``[B, T, D]``
    steps : sequence of str
        What is expected.
    optional : str
        A step that may be left out.
    looks : bool
        Whether to look at what tensors hold, which the GPU is waited for.
    """

    def __init__(
        self, keys: torch.Tensor, steps: Sequence[str], optional: str = "", looks: bool = False
    ) -> None:
        self.keys = keys
        self.query: Any = None
        self._steps, self._optional, self._looks = iter(steps), optional, looks

    def _step(self, name: str, fits: bool = True) -> Self:
        expected = next(self._steps, None)
        if expected == self._optional and name != expected:
            expected = next(self._steps, None)
        if name != expected or not fits:
            raise UnknownScores(f"{name} where {expected} was expected")
        return self

    def _take_query(self, query: torch.Tensor) -> None:
        """Note the query of the model's product in fp32: the kernel takes it in the keys' dtype, which must lose nothing."""
        self.query = query.to(self.keys.dtype).contiguous()
        if self._looks and not torch.equal(self.query.to(query.dtype), query):
            raise UnknownScores("a query with more digits than the keys have")

    def float(self) -> Self:
        """A step of its own."""
        return self._step("float")

    def __getattr__(self, name: str) -> Any:
        raise UnknownScores(f".{name}")


def _unknown(name: str) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise UnknownScores(name)

    return method


# Python looks for these on the class, past `__getattr__`.
_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
for _name in (
    *(prefix + operator for operator in _OPERATORS for prefix in ("", "r", "i")),
    *[
        "neg",
        "pos",
        "abs",
        "invert",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "bool",
        "len",
        "iter",
        "contains",
        "getitem",
        "setitem",
    ],
):
    setattr(WatchedKeys, f"__{_name}__", _unknown(f"__{_name}__"))
