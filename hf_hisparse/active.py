"""Which `HiSparseCache` a model's forward pass is using: some parts of a model are not told of their cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from .gradients import refuse_checkpointing

_HANDLES = "_hisparse_hooks"
COMPILED = (
    "HiSparseCache: torch.compile has compiled the model, or a part of it that uses the cache, which is not supported, and not "
    "needed: decode steps are replayed from CUDA graphs. Use the model as it was before (compiled._orig_mod; a new one after "
    "model.compile() or model.forward = torch.compile(model.forward)), or StaticCache with the compiled one"
)


@dataclass(eq=False)
class Call:
    """One forward pass of a decoder.

    Attributes
    ----------
    causal : bool
        Whether the mask of its sparse layers was made by transformers: then no row reads what comes after it, and the last
        row says which keys are padding (DSA models are given that row alone in a long call).
    checked : bool
        Whether the position ids were looked at.
    masked : bool
        Whether the caller gave a mask; transformers drops one that hides nothing.
    """

    _decoder: weakref.ref[torch.nn.Module]
    _cache: weakref.ref[Any]
    causal: bool = False
    checked: bool = False
    masked: bool = False

    @property
    def attention(self) -> str | None:
        """The attention implementation of the decoder that is called."""
        decoder: Any = self._decoder()
        return decoder.config.get_text_config(decoder=True)._attn_implementation

    @property
    def cache(self) -> Any:
        """The `HiSparseCache` in use."""
        return self._cache()

    @property
    def decode_rows(self) -> int:
        """Most new tokens per row of a decode call."""
        return self.cache.hosted_layers[0].settings.decode_rows


capturing_cache: ContextVar[Any] = ContextVar("hisparse_capturing_cache", default=None)
# Indexers, each with what has called it ahead of the model or wants to see the model's call (see `index_first`).
stand_ins: ContextVar[Mapping[torch.nn.Module, Any]] = ContextVar("hisparse_stand_ins")
_Entry = tuple[weakref.ref[torch.nn.Module], Call | None]
# Weak references: an interrupt leaves an entry behind.
_calls: ContextVar[tuple[_Entry, ...]] = ContextVar("hisparse_calls", default=())


def current_call() -> Call | None:
    """The call under way, None if its cache is not a `HiSparseCache`."""
    calls = _calls.get()
    call = calls[-1][1] if calls else None
    return call if call is not None and call.cache is not None else None


def selected_ahead(
    indexer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """What an indexer that the model calls has selected already, None if nothing."""
    stand_in = stand_ins.get({}).get(indexer)
    return None if stand_in is None else stand_in.answer(args, kwargs)


def called_decoder() -> torch.nn.Module | None:
    """The decoder whose call began last, None outside of all."""
    calls = _calls.get()
    return calls[-1][0]() if calls else None


def track_calls(decoder: torch.nn.Module) -> None:
    """Note from now on the cache of each call of `decoder`; again, it changes nothing."""
    if not hasattr(decoder, _HANDLES):
        enter = decoder.register_forward_pre_hook(_enter, with_kwargs=True)
        leave = decoder.register_forward_hook(_leave, always_call=True)
        setattr(decoder, _HANDLES, (enter, leave))


def forget_calls(decoder: torch.nn.Module) -> None:
    """Undo `track_calls`."""
    for handle in getattr(decoder, _HANDLES, ()):
        handle.remove()
    if hasattr(decoder, _HANDLES):
        delattr(decoder, _HANDLES)


def refuse_compiled(cache: Any) -> None:
    """Refuse a `HiSparseCache` in code that `torch.compile` has compiled (RuntimeError when that runs)."""
    if torch.compiler.is_compiling() and hasattr(cache, "hosted_layers"):
        _say_compiled()


# Not compiled: an error raised while the compiler traces only makes it go on without.
@torch.compiler.disable(reason=COMPILED)
def _say_compiled() -> None:
    raise RuntimeError(COMPILED)


def _enter(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Versions of transformers name the argument differently, and it may come by place."""
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    ours = [cache for cache in caches if hasattr(cache, "hosted_layers")]
    if ours:
        refuse_compiled(ours[0])
    around, this = _calls_around(decoder), weakref.ref(decoder)
    _calls.set((*around, (this, None)))  # `_leave` follows also if this call is refused
    if ours:
        refuse_checkpointing(decoder)
        _refuse_nested(decoder, ours[0], around)
        _calls.set((*around, (this, Call(this, weakref.ref(ours[0])))))


def _calls_around(decoder: torch.nn.Module) -> tuple[_Entry, ...]:
    """The calls in which this one of `decoder` is nested: a hook may call the model that is calling it.

    An interrupt leaves without `_leave`, so an entry may also be of a call that is gone: what that took is taken back.
    """
    calls = tuple(entry for entry in _calls.get() if entry[0]() is not None)
    if all(entry[0]() is not decoder for entry in calls):
        return calls
    under_way, around = _depth(decoder) - 1, []
    for entry in calls:  # interrupted calls are above those under way: each call begins without them
        if entry[0]() is not decoder:
            around.append(entry)
        elif under_way > 0:
            under_way -= 1
            around.append(entry)
        elif entry[1] is not None and entry[1].cache is not None:
            entry[1].cache.take_back()
    return tuple(around)


def _depth(decoder: torch.nn.Module) -> int:
    """How many calls of `decoder` this thread is in, which its stack alone can tell."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None:
        depth += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is decoder
        frame = frame.f_back
    return depth


def _refuse_nested(decoder: torch.nn.Module, cache: Any, around: tuple[_Entry, ...]) -> None:
    """Refuse a call of `decoder` with the cache of another one that is under way (RuntimeError)."""
    for other, call in around:
        if other() is decoder and call is not None and call.cache is cache:
            raise RuntimeError(
                "a call of the model within a call of the same model, in a hook for example, with the same HiSparseCache: pass "
                "no cache to the inner one, or a copy that was made before (copy.deepcopy(cache))"
            )


def _leave(decoder: torch.nn.Module, args: Any, output: Any) -> None:
    calls = _calls.get()
    if calls and calls[-1][0]() is decoder:  # not if an earlier hook failed before `_enter`
        _calls.set(calls[:-1])
        call = calls[-1][1]
        if output is None and call is not None and call.cache is not None:  # an error is under way
            call.cache.take_back()
