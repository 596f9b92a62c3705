"""Select and fetch while the model still computes keys and values.

What `Quest` selects depends on the query and on whole pages before it, not on the new token's own key. A model computes its
query first; projections, norms and rotary embedding of keys and values come after it, and until then the GPU can already select
and the link can bring what is missing. So while a step is captured (see `graphs`) hooks take the query where it is made, and
selection, resolve and fetch go to a side stream, beside the rest of the layer; attention waits for them.

In the models named here the query is the rotated output of one projection or norm. That this holds for the model at hand is
checked bit for bit in the eager step before a capture; where it does not, the layer selects and fetches after keys and values.

Not to be confused with the kernel `fetch_ahead`, which begins before its own resolve has ended.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hisparse_kernels.rotate import rotate

from .active import current_call
from .models.gqa import GqaLayer

if TYPE_CHECKING:
    from .cache import HiSparseCache

# The part of each attention class of transformers whose output becomes the query, by its rotary embedding alone.
_QUERY_PARTS = {
    "LlamaAttention": "q_proj",
    "MistralAttention": "q_proj",
    "MixtralAttention": "q_proj",
    "Qwen2Attention": "q_proj",
    "Qwen2MoeAttention": "q_proj",
    "Qwen3Attention": "q_norm",
    "Qwen3MoeAttention": "q_norm",
}


@contextmanager
def early_queries(
    model: torch.nn.Module, cache: HiSparseCache, tell: Callable[[GqaLayer, Callable[[], torch.Tensor]], None]
) -> Iterator[None]:
    """In calls of `model` with `cache`, tell each layer that can use it of its query as soon as that can be made.

    On leaving, hooks are removed and layers forget what they expected.

    Parameters
    ----------
    model, cache
    tell : callable
        Called with a layer, and a function that makes its query, ``[batch, query heads, S, width]``.
    """
    embeddings: dict[Any, Any] = {}  # rotary, of the attention that is being called

    def is_asked() -> bool:
        """Whether this is a call with `cache`: hooks run in calls of other threads, too."""
        call = current_call()
        return call is not None and call.cache is cache

    def is_called(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and is_asked():  # None in another thread's call while this is removed
            embeddings[attention] = kwargs.get("position_embeddings")

    def made_for(attention: Any) -> Callable[..., None]:
        def is_made(part: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
            rotary = embeddings.pop(attention, None) if is_asked() else None
            if rotary is None:
                return
            if any(
                table.dtype is not output.dtype or table.shape[-1] != attention.head_dim for table in rotary
            ):
                return
            layer = cache.layers[attention.layer_idx]
            if isinstance(layer, GqaLayer) and layer.query_decides:
                tell(layer, functools.partial(_rotated, attention, output, *rotary))

        return is_made

    with ExitStack() as hooks:
        for attention, part in _query_parts(model):
            hooks.callback(attention.register_forward_pre_hook(is_called, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(made_for(attention)).remove)
        try:
            yield
        finally:
            for layer in cache.hosted_layers:
                layer.forget_ahead()


def _query_parts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Each attention of a known class, and the part of it that the query comes from.

    None whose forward or rotary embedding is somebody else's: what that does to the query may depend on more than one step can
    show.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__ not in _QUERY_PARTS or not kind.__module__.startswith("transformers.models."):
            continue
        part = getattr(module, _QUERY_PARTS[kind.__name__], None)
        rotary = getattr(sys.modules[kind.__module__], "apply_rotary_pos_emb", None)
        if isinstance(part, torch.nn.Module) and _is_theirs(module.forward) and _is_theirs(rotary):
            yield module, part


def _is_theirs(function: Any) -> bool:
    """Whether a function, and all that it wraps, is transformers' own, by its globals: `functools.wraps` copies `__module__`."""
    function = getattr(function, "__func__", function)
    theirs = getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers.")
    return theirs and (not hasattr(function, "__wrapped__") or _is_theirs(function.__wrapped__))


def _rotated(attention: Any, output: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The query, ``[batch, query heads, S, width]``, as the model makes it of the output of its projection or norm.

    One kernel instead of the model's five: attention waits for the selection, which waits for this.
    """
    query = output.reshape(*output.shape[:2], -1, attention.head_dim)
    return rotate(query.contiguous(), cos.contiguous(), sin.contiguous())
