"""Decode steps such as are captured, run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from hf_hisparse import HiSparseCache
from hf_hisparse.graphs import as_captured

# Lets layers read ahead in the calls within it, or without the last argument finds out which of them can.
Early = Callable[[PreTrainedModel, HiSparseCache, bool], AbstractContextManager[None]]


@torch.no_grad()
def decode_logits(
    model: PreTrainedModel,
    cache: HiSparseCache,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    prompt: int,
    early: Early | None,
) -> torch.Tensor:
    """The logits of a decode step for each of `ids` after the first `prompt`; with `early` as captured after the first step."""
    start = slice(0, prompt)
    model(ids[:, start], attention_mask=None if mask is None else mask[:, start], past_key_values=cache)
    logits = []
    for at in range(prompt, ids.shape[1]):
        shown = None if mask is None else mask[:, : at + 1]
        step = {"input_ids": ids[:, at : at + 1], "past_key_values": cache}
        if mask is not None:
            step["position_ids"] = shown.sum(1, keepdim=True) - 1
        if early is None:
            output = model(**step, attention_mask=shown)
        elif at == prompt:
            with early(model, cache, False):
                output = model(**step, attention_mask=shown)
        else:
            cache.make_room(1)
            if mask is not None:
                cache.padding.take(shown, cache.capacity)
            with as_captured(cache, mask is not None), early(model, cache, True):
                output = model(**step, attention_mask=None)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
