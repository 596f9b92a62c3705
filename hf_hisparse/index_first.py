"""Let a model's indexer select, and fetch, while the model still computes queries, keys and values.

Models that select by themselves call their indexer after all of that, just before attention. What it reads is there long before:
the hidden state of the layer, and in DeepSeek's the compressed query. So while a step is captured (see `graphs`) the indexer is
called as soon as its arguments are there, on a side stream, and resolve and fetch follow it. When the model calls it, it gets the
selection that is there already (see `models.indexer`); attention waits for what is fetched.

That the model calls its indexer with what it was called with ahead is seen in the eager step before a capture, tensor by tensor;
where it does not, the layer selects and fetches in its turn. `query_first` does the like for selectors of this library.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .active import current_call, stand_ins
from .hot_buffer import HotBuffer
from .models.mla import LatentLayer
from .models.msa import BlockLayer

if TYPE_CHECKING:
    from .cache import HiSparseCache

_COMPRESSED_QUERY = "q_resid"  # as DeepSeek's indexer calls it
_MADE_BY = "q_a_layernorm"  # the part of attention that it comes from


class NotAhead(RuntimeError):
    """An indexer cannot be called ahead, although the eager step before said so."""


@contextmanager
def early_indexers(model: torch.nn.Module, cache: HiSparseCache, read: bool) -> Iterator[None]:
    """In calls of `model` with `cache`, let layers read ahead; or without `read` find out which of them can.

    On leaving, hooks are removed and layers forget what they expected.

    Raises
    ------
    NotAhead
        In a call with `read`.
    """
    with ExitStack() as undo:
        found: dict[torch.nn.Module, EarlyIndexer] = {}
        for attention in model.modules():
            # Its own: what wraps an attention may say that it has one, too.
            indexer, index = attention._modules.get("indexer"), getattr(attention, "layer_idx", None)
            if indexer is not None and indexer not in found and isinstance(index, int):
                found[indexer] = EarlyIndexer(attention, indexer, cache, read)
                found[indexer].listen(undo)
        undo.callback(stand_ins.reset, stand_ins.set(found))
        try:
            yield
        finally:
            for layer in cache.hosted_layers:
                layer.forget_ahead()


class EarlyIndexer:
    """Makes the call of one attention's indexer ahead of the model, and answers the model's own.

    Parameters
    ----------
    attention, indexer : torch.nn.Module
    cache : HiSparseCache
    read : bool
        Whether to call the indexer ahead, or to compare what it would have been called with.
    """

    def __init__(self, attention: Any, indexer: Any, cache: HiSparseCache, read: bool) -> None:
        self.attention, self.indexer, self.cache, self.read = attention, indexer, cache, read
        self.given: dict[str, Any] = {}  # to attention
        self.arguments: dict[str, Any] | None = None  # of the indexer, as far as they are known ahead
        self.contents: list[torch.Tensor] = []  # what tensors among them held then
        self.selected: torch.Tensor | None = None
        self.ready: torch.cuda.Event | None = None

    def listen(self, undo: ExitStack) -> None:
        """Be told when attention is called, and when its compressed query is there if the indexer needs that."""
        attention = self.attention
        undo.callback(attention.register_forward_pre_hook(self._is_called, with_kwargs=True).remove)
        part = attention._modules.get(_MADE_BY)
        if part is not None:
            undo.callback(part.register_forward_hook(self._is_compressed).remove)

    def _is_asked(self) -> bool:
        """Whether this is a call with the cache: hooks run in calls of other threads, too."""
        call = current_call()
        return call is not None and call.cache is self.cache

    def _is_called(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None or not self._is_asked():  # None in another thread's call while this is removed
            return
        self.given, self.arguments, self.selected = _by_name(attention, args, kwargs), None, None
        if _COMPRESSED_QUERY not in _parameters(self.indexer):
            self._begin()

    def _is_compressed(self, part: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self.given and self._is_asked():
            self.given[_COMPRESSED_QUERY] = output
            self._begin()

    def _begin(self) -> None:
        """All that the indexer needs is there."""
        given, self.given = self.given, {}
        layer = self._layer()
        if layer is None:
            return
        arguments = self.arguments = _arguments(self.indexer, given, expands=isinstance(layer, BlockLayer))
        if arguments is None:
            return
        if self.read:
            layer.read_ahead(functools.partial(self._select, arguments), given.get("attention_mask"))
        else:
            layer.expect_selection()
            self.contents = [tensor.clone() for tensor in _tensors(arguments)]

    def _layer(self) -> LatentLayer | BlockLayer | None:
        """The layer of this attention, if it is one that resolves what the indexer selects."""
        index, layers = self.attention.layer_idx, self.cache.layers
        layer = layers[index] if 0 <= index < len(layers) else None
        if not isinstance(layer, LatentLayer | BlockLayer) or not isinstance(layer.buffer, HotBuffer):
            return None
        return layer

    def _select(self, arguments: dict[str, Any]) -> torch.Tensor:
        """Run the indexer ahead."""
        token = stand_ins.set({})
        try:
            selected = self.indexer.forward(**arguments)
        except Exception as error:
            raise NotAhead(f"an indexer called ahead: {type(error).__name__}: {error}") from error
        finally:
            stand_ins.reset(token)
        if selected.is_cuda:
            self.ready = torch.cuda.current_stream(selected.device).record_event()
        self.selected = selected
        return selected

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What the indexer selects for these arguments, of the model's call; None if it is yet to be asked."""
        arguments, self.arguments = self.arguments, None
        layer = self._layer()
        if arguments is None or layer is None or not self._is_asked():
            return None
        same = _same(
            _by_name(self.indexer, args, kwargs, defaults=True),
            _by_name(self.indexer, (), arguments, defaults=True),
        )
        if not self.read:
            held, self.contents = self.contents, []
            layer.reads_ahead = same and all(map(torch.equal, held, _tensors(arguments)))
            return None
        selected, self.selected = self.selected, None
        if selected is None:  # this layer does not read ahead
            return None
        if not same:
            raise NotAhead(f"{layer.name}: the model calls its indexer with other tensors than a step before")
        if self.ready is not None:
            torch.cuda.current_stream(selected.device).wait_event(self.ready)
        return selected


def _parameters(module: torch.nn.Module) -> dict[str, inspect.Parameter]:
    """What the forward of a module's class is called with, by name; nothing where that cannot be said."""
    try:
        return dict(inspect.signature(types.MethodType(type(module).forward, module)).parameters)
    except (TypeError, ValueError):
        return {}


def _by_name(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], defaults: bool = False
) -> dict[str, Any]:
    """The arguments of a call of `module` by their names; none if they do not fit its forward."""
    parameters = _parameters(module)
    try:
        bound = inspect.Signature(list(parameters.values())).bind(*args, **kwargs)
    except TypeError:
        return {}
    if defaults:
        bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _arguments(indexer: torch.nn.Module, given: dict[str, Any], expands: bool) -> dict[str, Any] | None:
    """What attention, called with `given`, will hand to its indexer, as transformers' models do; None if that is not known.

    With `expands` position ids for all batch rows, as MiniMax-M3 makes them.
    """
    arguments = {}
    for name, parameter in _parameters(indexer).items():
        value = given.get(name)
        if name in given:
            if isinstance(value, torch.Tensor) and name == "attention_mask" and value.ndim == 4:
                value = value[:, 0]  # the same for all heads
            if isinstance(value, torch.Tensor) and name == "position_ids" and expands:
                hidden = given.get("hidden_states")
                if not isinstance(hidden, torch.Tensor):
                    return None
                value = (value if value.ndim > 1 else value[None]).expand(hidden.shape[0], -1)
            arguments[name] = value
        elif parameter.default is inspect.Parameter.empty:
            return None
    return arguments or None


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among some arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, tuple) else []


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same objects, or views of the same memory."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if one is other:
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return (
        one.data_ptr() == other.data_ptr() != 0
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )
