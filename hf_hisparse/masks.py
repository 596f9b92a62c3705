"""Attention masks as hosted layers read them."""

from __future__ import annotations

from typing import overload

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


@overload
def allowed_keys(mask: torch.Tensor, batch: int) -> torch.Tensor: ...
@overload
def allowed_keys(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None: ...
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


def causal_rows(allowed: torch.Tensor, start: int) -> torch.Tensor:
    """What the last rows may read: bool ``[batch, T - start, T]``, from which keys are no padding, bool ``[batch, T]``."""
    keys = torch.arange(allowed.shape[1], device=allowed.device)
    return allowed[:, None] & (keys <= keys[start:, None])


def selection_mask(mask: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A model's mask narrowed to what each row has selected, as DSA models do it.

    Parameters
    ----------
    mask : bool or additive ``[batch or 1, 1, S, T]``
    indices : int ``[batch, S, k]``
        Selected keys; -1 for none.
    """
    total = mask.shape[-1]
    unselected = torch.ones((*indices.shape[:2], total + 1), dtype=torch.bool, device=indices.device)
    unselected.scatter_(-1, indices.long() % (total + 1), False)  # -1 goes to the column that is cut off
    unselected = unselected[:, None, :, :total]
    if mask.dtype == torch.bool:
        return mask & ~unselected
    return mask.masked_fill(unselected, torch.finfo(mask.dtype).min)


def readable(indices: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """`indices`, int ``[batch, S, k]``, with -1 for those that `allowed`, bool ``[batch, S, T]``, excludes."""
    chosen = allowed.gather(-1, indices.clamp(min=0).long()) & (indices >= 0)
    return indices.masked_fill(~chosen, -1)
