"""Attention masks as hosted layers read them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, overload

import torch

from .active import current_call

if TYPE_CHECKING:
    from .hosted_layer import HostedLayer


_CHECKED = "_hisparse_checked"  # on a mask: all layers of a call are handed the same one
_HIDES_NEW = "_hisparse_hides_new"
_HIDDEN = -1e3  # an additive mask hides a key by less than this; implementations differ in how much less


def check_mask(mask: object, layer: HostedLayer, rows: int) -> None:
    """Refuse a mask that could not be honoured; let selectors know where it says otherwise of keys held than masks before.

    Parameters
    ----------
    mask : bool or additive ``[batch or 1, 1, rows, T]``, or None
    layer : HostedLayer
        Which is asked for attention; it has taken the new tokens.
    rows : int
        New tokens per row.

    Raises
    ------
    ValueError
        If the mask differs between heads, is a bias, does not fit the tokens held, or lets a decode call read later keys.
    """
    if layer.padding.capturing:
        return
    total, where = layer.get_seq_length(), layer.name
    # What was found holds for this cache, at this length, under these settings.
    asked = (
        weakref.ref(layer.padding),
        total,
        rows,
        layer.settings.decode_rows,
        layer.model_selects,
        _version(mask),
    )
    if mask is not None and getattr(mask, _CHECKED, None) == asked:
        return
    start = total - rows
    if mask is None:
        if layer.padding.hides(start, total):
            call = current_call()
            if call is None or not call.masked:
                raise ValueError(
                    f"{where}: a call without a mask, but an earlier mask hid some of the {start} tokens held: pass the "
                    "attention mask of all tokens"
                )
            everything = torch.ones((layer.pool.batch, start), dtype=torch.bool, device=layer.position.device)
            layer.stream.correct(layer.padding, everything)
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != total:
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"{where}: an attention mask of shape {shape}; supported are None and [batch, 1, {rows}, {total}] (queries, keys), "
            "the same for all heads"
        )
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask > _HIDDEN)).any()):
        raise ValueError(
            f"{where}: an additive attention mask with a bias, {mask[(mask != 0) & (mask > _HIDDEN)][0].item():.3g} for example; "
            f"supported are 0 and less than {_HIDDEN:.0f} (hidden): use DynamicCache"
        )
    allowed = allowed_keys(mask, mask.shape[0])
    if 1 < rows <= layer.settings.decode_rows and bool(allowed[:, :, start:].triu(1).any()):
        raise ValueError(
            f"{where}: the attention mask lets a query read later keys, which a decode call ({rows} new tokens, at most "
            f"decode_rows={layer.settings.decode_rows}) does not do: build the cache with decode_rows={rows - 1} or less"
        )
    if not layer.model_selects:
        layer.stream.correct(layer.padding, allowed[:, :, :start].any(1))
    setattr(mask, _CHECKED, asked)


def _version(mask: object) -> int:
    """Changes when a mask is edited in place; torch does not tell for one that was made in inference mode."""
    return 0 if not isinstance(mask, torch.Tensor) or mask.is_inference() else mask._version


@overload
def allowed_keys(mask: torch.Tensor, batch: int) -> torch.Tensor: ...
@overload
def allowed_keys(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None: ...
def allowed_keys(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """A model's mask, bool or additive ``[batch or 1, 1, S, T]``, as bool ``[batch, S, T]``: True where a key may be read."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask > _HIDDEN
    return mask[:, 0].expand(batch, -1, -1)


def valid_tokens(allowed: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Which of the last `count` keys are no padding, bool ``[batch, count]``: those that any query may read."""
    return None if allowed is None else allowed[:, :, -count:].any(1)


def hides_new(mask: torch.Tensor | None, count: int) -> bool:
    """Whether any of the last `count` keys is padding; looked at once."""
    if mask is None:
        return False
    asked = (count, _version(mask))
    if getattr(mask, _HIDES_NEW, (None,))[0] != asked:
        valid = valid_tokens(allowed_keys(mask, mask.shape[0]), count)
        setattr(mask, _HIDES_NEW, (asked, not bool(valid.all())))  # type: ignore[union-attr]
    return getattr(mask, _HIDES_NEW)[1]


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


def block_mask(
    module: Any, query: torch.Tensor, total: int, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """The mask that a MiniMax-M3 attention module makes of the blocks it has selected; takes them out of `kwargs`.

    Parameters
    ----------
    module
        Its indexer narrows the mask.
    query : ``[batch, heads, S, width]``
    total : int
        Keys.
    mask : bool or additive ``[batch or 1, 1, S, total]``, or None
    kwargs : dict
        ``block_indices`` int ``[batch, index heads, S, k]``, and ``position_ids`` ``[batch or 1, S]``.

    Returns
    -------
    additive ``[batch, heads, S, total]``
    """
    positions = kwargs["position_ids"].expand(query.shape[0], -1)
    indices, kwargs["block_indices"] = kwargs["block_indices"], None
    return module.indexer.build_block_mask(indices, mask, total, query.dtype, query.device, positions)


def readable(indices: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """`indices`, int ``[batch, S, k]``, with -1 for those that `allowed`, bool ``[batch, S, T]``, excludes."""
    return torch.where(allowed.gather(-1, indices.clamp(min=0).long()), indices, -1)  # -1 stays -1 either way
