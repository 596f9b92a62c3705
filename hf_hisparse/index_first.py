"""Let a model's indexer select, and fetch, while the model still computes queries, keys and values.

Models that select by themselves call their indexer after all of that, just before attention. What it reads is there long before:
the hidden state of the layer, and in DeepSeek's the compressed query. So while a step is captured (see `graphs`) the indexer is
called as soon as its arguments are there, on a side stream, and resolve and fetch follow it. When the model calls it, it gets the
selection that is there already; attention waits for what is fetched.

That the model calls its indexer with the very tensors that it was called with ahead is seen in the eager step before a capture;
where it does not, the layer selects and fetches in its turn. `query_first` does the like for selectors of this library.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .active import current_call
from .hot_buffer import HotBuffer
from .models.mla import LatentLayer
from .models.msa import BlockLayer

if TYPE_CHECKING:
    from .cache import HiSparseCache

_COMPRESSED_QUERY = "q_resid"  # as DeepSeek's indexer calls it
_MADE_BY = "q_a_layernorm"  # the part of attention that it comes from


@contextmanager
def early_indexers(model: torch.nn.Module, cache: HiSparseCache, read: bool) -> Iterator[None]:
    """In calls of `model` with `cache`, let layers read ahead; or without `read` find out which of them can.

    On leaving, the model is as it was, and layers forget what they expected.
    """
    with ExitStack() as undo:
        for attention in model.modules():
            if isinstance(getattr(attention, "indexer", None), torch.nn.Module):
                _EarlyIndexer(attention, cache, read).install(undo)
        try:
            yield
        finally:
            for layer in cache.hosted_layers:
                layer.forget_ahead()


class _EarlyIndexer:
    """Stands in for the forward of one attention's indexer.

    Parameters
    ----------
    attention : torch.nn.Module
    cache : HiSparseCache
    read : bool
        Whether to call the indexer ahead, or to compare what it would have been called with.
    """

    def __init__(self, attention: Any, cache: HiSparseCache, read: bool) -> None:
        self.attention, self.cache, self.read = attention, cache, read
        self.indexer = attention.indexer
        self.forward = self.indexer.forward
        self.signature = _signature(self.indexer)
        self.given: dict[str, Any] = {}  # to attention
        self.arguments: dict[str, Any] | None = None  # of the indexer, as far as they are known ahead
        self.selected: torch.Tensor | None = None
        self.ready: torch.cuda.Event | None = None

    def install(self, undo: ExitStack) -> None:
        """Listen to attention, and take the place of its indexer's forward."""
        attention = self.attention
        undo.callback(attention.register_forward_pre_hook(self._is_called, with_kwargs=True).remove)
        if _COMPRESSED_QUERY in self.signature.parameters:
            part = getattr(attention, _MADE_BY, None)
            if not isinstance(part, torch.nn.Module):
                return
            undo.callback(part.register_forward_hook(self._is_compressed).remove)
        own = vars(self.indexer).get("forward")
        undo.callback(_put_back, self.indexer, own)
        self.indexer.forward = self

    def _is_asked(self) -> bool:
        """Whether this is a call with the cache: hooks run in calls of other threads, too."""
        call = current_call()
        return call is not None and call.cache is self.cache

    def _is_called(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_asked():
            return
        self.given, self.arguments, self.selected = _by_name(_signature(attention), args, kwargs), None, None
        if _COMPRESSED_QUERY not in self.signature.parameters:
            self._begin()

    def _is_compressed(self, part: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._is_asked() and self.given:
            self.given[_COMPRESSED_QUERY] = output
            self._begin()

    def _begin(self) -> None:
        """All that the indexer needs is there."""
        given, self.given = self.given, {}
        layer = self.cache.layers[self.attention.layer_idx]
        if not isinstance(layer, LatentLayer | BlockLayer) or not isinstance(layer.buffer, HotBuffer):
            return
        if isinstance(layer, BlockLayer) and isinstance(given.get("position_ids"), torch.Tensor):
            positions, batch = given["position_ids"], given["hidden_states"].shape[0]
            given["position_ids"] = (positions if positions.ndim > 1 else positions[None]).expand(batch, -1)
        self.arguments = self._arguments(given)
        if self.arguments is None:
            return
        if self.read:
            layer.read_ahead(self._select, given.get("attention_mask"))
        else:
            layer.expect_selection()

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """What attention will hand to its indexer, by name, as transformers' models do; None if it is not known."""
        arguments = {}
        for name, parameter in self.signature.parameters.items():
            if name in given:
                value = given[name]
                for_all_heads = (
                    name == "attention_mask" and isinstance(value, torch.Tensor) and value.ndim == 4
                )
                arguments[name] = value[:, 0] if for_all_heads else value
            elif parameter.default is inspect.Parameter.empty:
                return None
        return arguments

    def _select(self) -> torch.Tensor:
        """Run the indexer ahead."""
        assert self.arguments is not None
        self.selected = self.forward(**self.arguments)
        if self.selected.is_cuda:
            self.ready = torch.cuda.current_stream(self.selected.device).record_event()
        return self.selected

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._is_asked() or self.arguments is None:
            return self.forward(*args, **kwargs)
        arguments, self.arguments = self.arguments, None
        same = _same(
            _by_name(self.signature, args, kwargs, defaults=True),
            _by_name(self.signature, (), arguments, defaults=True),
        )
        layer = self.cache.layers[self.attention.layer_idx]
        if not self.read:
            layer.reads_ahead = same
            return self.forward(*args, **kwargs)
        selected, self.selected = self.selected, None
        if selected is None:  # this layer does not read ahead
            return self.forward(*args, **kwargs)
        if not same:
            raise RuntimeError(
                f"{layer.name}: the model calls its indexer with other tensors than a step before"
            )
        if self.ready is not None:
            torch.cuda.current_stream(selected.device).wait_event(self.ready)
        return selected


def _signature(module: torch.nn.Module) -> inspect.Signature:
    """How the forward of a module's class is called."""
    return inspect.signature(types.MethodType(type(module).forward, module))


def _by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], defaults: bool = False
) -> dict[str, Any]:
    """The arguments of a call by their names; none if it does not fit the signature."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    if defaults:
        bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same tensors, or views of the same memory, or the same objects."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.data_ptr() == other.data_ptr()
            and one.shape == other.shape
            and one.stride() == other.stride()
            and one.dtype == other.dtype
            and one.device == other.device
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is other


def _put_back(indexer: Any, own: Any) -> None:
    """Undo an assignment to `forward`."""
    if own is None:
        del indexer.forward
    else:
        indexer.forward = own
