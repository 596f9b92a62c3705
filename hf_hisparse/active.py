"""Which `HiSparseCache` a model's forward pass is using: some parts of a model are not told of their cache."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

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
# Weak references: an interrupt leaves an entry behind.
_calls: ContextVar[tuple[tuple[weakref.ref[torch.nn.Module], Call | None], ...]] = ContextVar(
    "hisparse_calls", default=()
)


def current_call() -> Call | None:
    """The call under way, None if its cache is not a `HiSparseCache`."""
    calls = _calls.get()
    call = calls[-1][1] if calls else None
    return call if call is not None and call.cache is not None else None


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
    # An interrupt leaves without `_leave`: a decoder is in one call at a time.
    for inner, interrupted in _calls.get():
        if inner() is decoder and interrupted is not None and interrupted.cache is not None:
            interrupted.cache.take_back()
    outer = tuple(entry for entry in _calls.get() if entry[0]() not in (None, decoder))
    this = weakref.ref(decoder)
    _calls.set((*outer, (this, Call(this, weakref.ref(ours[0])) if ours else None)))


def _leave(decoder: torch.nn.Module, args: Any, output: Any) -> None:
    calls = _calls.get()
    if calls and calls[-1][0]() is decoder:  # not if an earlier hook failed before `_enter`
        _calls.set(calls[:-1])
        call = calls[-1][1]
        if output is None and call is not None and call.cache is not None:  # an error is under way
            call.cache.take_back()
