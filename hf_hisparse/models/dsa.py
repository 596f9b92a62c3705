"""What `enable` changes in the modules of a model with DeepSeek sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ..active import current_call, forget_calls, track_calls
from ..hosted_layer import LAYER_ATTRIBUTE
from .indexer import sliced_forward
from .mla import LatentLayer
from .overrides import override, restore


def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `expand_kv` of an attention module; for a hosted layer the identity, so that latents reach cache and attention."""
    call = current_call()
    hosted = call is not None and isinstance(call.cache.layers[self.layer_idx], LatentLayer)
    if hosted or hasattr(kv_nope, LAYER_ATTRIBUTE):
        return kv_nope, k_rot
    return type(self).expand_kv(self, kv_nope, k_rot)


def enable_dsa(model: PreTrainedModel) -> None:
    """Let the parts of `model` that need it know the cache of a call; nothing for another kind of model."""
    for decoder, attention in _attentions(model):
        track_calls(decoder)
        override(attention, "expand_kv", expand_kv)
        if attention.indexer is not None:
            override(attention.indexer, "forward", sliced_forward)


def disable_dsa(model: PreTrainedModel) -> None:
    """Undo `enable_dsa`."""
    for decoder, attention in _attentions(model):
        forget_calls(decoder)
        restore(attention, "expand_kv", expand_kv)
        if attention.indexer is not None:
            restore(attention.indexer, "forward", sliced_forward)


def _attentions(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, Any]]:
    """The attention modules with a latent cache and a place for an indexer, each with the decoder it is in."""
    for decoder in model.modules():
        if isinstance(decoder, PreTrainedModel):
            inner = [
                child
                for child in decoder.modules()
                if isinstance(child, PreTrainedModel) and child is not decoder
            ]
            below = {id(module) for child in inner for module in child.modules()}
            for module in decoder.modules():
                if id(module) not in below and hasattr(module, "expand_kv") and hasattr(module, "indexer"):
                    yield decoder, module
