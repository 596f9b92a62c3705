"""What one layer holds of a history that was computed elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .models.kv_shape import KvShape


class LayerHistory(NamedTuple):
    """What one layer holds of a history that was computed elsewhere (see `HiSparseCache.put_history`).

    Attributes
    ----------
    keys, values : ``[batch, heads, T, width]``
    indexer_keys : ``[batch, T, width]`` or None
        Of a layer that has an indexer.
    recent : int64 ``[lanes, n]`` or None
        Different records, from least to most recently used, for a hosted layer's hot buffer; the newest others take the slots
        that are left. None: the newest.
    """

    keys: torch.Tensor
    values: torch.Tensor
    indexer_keys: torch.Tensor | None = None
    recent: torch.Tensor | None = None

    def check(self, layer_idx: int, shape: KvShape, first: LayerHistory, dtype: torch.dtype | None) -> None:
        """Hold this to a layer's shape, to the tokens of the `first` layer, and to the model's `dtype` if that is known.

        Raises
        ------
        ValueError
            If anything differs, or indexer keys are missing where the layer has an indexer, or given where it has none.
        """
        if first.keys.ndim != 4:
            raise ValueError(
                f"put_history, layer 0: keys are {list(first.keys.shape)}, must be [batch, heads, T, width]"
            )
        batch, _, tokens, _ = first.keys.shape
        index = (batch, tokens, shape.index_width) if shape.index_width else None
        wanted: dict[str, tuple[int, ...] | None] = {
            "keys": (batch, shape.heads, tokens, shape.key_width),
            "values": (batch, shape.heads, tokens, shape.value_width),
            "indexer_keys": index,
        }
        for name, expected in wanted.items():
            part: torch.Tensor | None = getattr(self, name)
            found = None if part is None else tuple(part.shape)
            if found != expected:
                raise ValueError(
                    f"put_history, layer {layer_idx}: {name} are {_shown(found)}, must be {_shown(expected)}, as the model and "
                    "the first layer's tokens have it"
                )
            if part is not None and part.dtype is not (dtype or first.keys.dtype):
                raise ValueError(
                    f"put_history, layer {layer_idx}: {name} of {part.dtype}, must be {dtype or first.keys.dtype}"
                )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "None" if shape is None else str(list(shape))


def check_recent(
    recent: torch.Tensor, lanes: int, slots: int, records: int, filling: bool, name: str
) -> None:
    """Hold the recently used records of a layer to its hot buffer.

    Parameters
    ----------
    recent : int64 ``[lanes, n]``
    lanes, slots, records : int
        Of the buffer, and of the history.
    filling : bool
        Whether the last record is not full yet: that must have a slot.
    name : str
        The layer's, for the message.

    Raises
    ------
    ValueError
        If they are not different records of the history that fit, the last among them while it is filling.
    """
    rule = f"different records of 0 to {records - 1}, int64 [{lanes}, 1 to {min(slots, records)}]"
    if recent.ndim != 2 or recent.shape[0] != lanes or recent.dtype is not torch.int64:
        raise ValueError(f"{name}: recent is {recent.dtype} {list(recent.shape)}, must be {rule}")
    if not 1 <= recent.shape[1] <= min(slots, records):
        raise ValueError(f"{name}: recent names {recent.shape[1]} records per lane, must be {rule}")
    ordered = recent.sort(dim=1).values
    if int(ordered.min()) < 0 or int(ordered.max()) >= records:
        raise ValueError(
            f"{name}: recent names records from {int(ordered.min())} to {int(ordered.max())}, must be {rule}"
        )
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError(f"{name}: recent names a record twice, must be {rule}")
    if filling and not bool((recent == records - 1).any(1).all()):
        raise ValueError(f"{name}: recent lacks record {records - 1}, which is filling, in some lane")
