"""Attention masks as hosted layers read them."""

from __future__ import annotations

import torch


def check_mask(mask: object, where: str) -> None:
    """Refuse a mask that decode over slots could not honour (ValueError; `where` names the layer)."""
    if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] == 1):
        return
    shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise ValueError(
        f"{where}: an attention mask of shape {shape}; supported are None and [batch, 1, queries, keys], the same for "
        "all heads"
    )


def allowed_keys(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """A model's mask, bool or additive ``[batch or 1, 1, S, T]``, as bool ``[batch, S, T]``: True where a key may be read."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    return mask[:, 0].expand(batch, -1, -1)


def valid_tokens(allowed: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Which of the last `count` keys are no padding, bool ``[batch, count]``: the last query sees all keys."""
    return None if allowed is None else allowed[:, -1, -count:].contiguous()
