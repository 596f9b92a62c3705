"""transformers' own layers in a `HiSparseCache`: what they hold is what they need."""

from __future__ import annotations

from typing import Any

import torch

_SLACK = 8  # one part in so many may be held in vain, so that a decode step copies nothing


def trim(layer: Any) -> None:
    """Copy keys and values that are views of much more: a sliding window would keep the whole prompt until the next call."""
    for name in ("keys", "values"):
        held = getattr(layer, name, None)
        if not isinstance(held, torch.Tensor) or held.is_meta:
            continue
        if held.untyped_storage().nbytes() > held.nbytes + held.nbytes // _SLACK:
            setattr(layer, name, held.clone(memory_format=torch.contiguous_format))
