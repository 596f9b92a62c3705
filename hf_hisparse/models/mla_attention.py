"""Multi-head latent attention over rows of latents: absorbed, and as the model does it.

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1: with ``k = W_UK c`` and ``v = W_UV c`` of a latent `c`, scores
are ``(W_UK^T q) c`` and outputs ``W_UV (sum of p c)``, so no key or value is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hisparse_kernels.mla_decode import mla_decode

from ..masks import selection_mask
from ..plain import is_plain, plain_parts

Base = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class UpProjection:
    """The matrix by which an attention module takes latents to keys and values, whatever kind of module computes it.

    A plain linear layer's weight is used in place. Anything else (quantised, offloaded, with adapters) is asked for the
    images of the unit vectors, again whenever one of its tensors or its choice of adapters changes.
    """

    def __init__(self) -> None:
        self._matrix: torch.Tensor | None = None
        self._version: Any = None

    @property
    def derived(self) -> bool:
        """Whether the matrix is a copy of what the module computes, not a weight in place."""
        return self._matrix is not None

    def matrix(self, linear: torch.nn.Module, latent: int, like: torch.Tensor) -> torch.Tensor:
        """``[heads * (nope + value), latent]`` in the dtype and on the device of `like`."""
        weight: Any = getattr(linear, "weight", None)
        hooks = linear._forward_hooks or linear._forward_pre_hooks
        if (
            type(linear) is torch.nn.Linear
            and is_plain(weight)
            and weight.dtype == like.dtype
            and weight.device == like.device
            and not hooks
        ):
            return weight
        version = (_version(linear), like.dtype, like.device)
        if self._matrix is None or version != self._version:
            units = torch.eye(latent, dtype=like.dtype, device=like.device)
            self._matrix, self._version = linear(units).T.contiguous(), version
        return self._matrix


def _version(linear: torch.nn.Module) -> tuple[Any, ...]:
    tensors = [part for held in (*linear.parameters(), *linear.buffers()) for part in plain_parts(held)]
    adapters = [
        str(getattr(linear, name, None)) for name in ("active_adapters", "disable_adapters", "scaling")
    ]
    counts = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return (*adapters, *counts)


class Folded(NamedTuple):
    """A query with the up-projection of keys folded into it, and the one of values, for its result.

    Attributes
    ----------
    query : ``[lanes, heads, latent + rope]``
        Lane = batch row and new token.
    value : ``[heads, value, latent]``
    """

    query: torch.Tensor
    value: torch.Tensor


def fold(query: torch.Tensor, matrix: torch.Tensor, rope: int) -> Folded:
    """Fold the up-projection `matrix`, ``[heads * (nope + value), latent]``, into a query ``[batch, heads, S, nope + rope]``."""
    heads, width = query.shape[1], query.shape[3]
    key, value = matrix.view(heads, -1, matrix.shape[1]).tensor_split([width - rope], dim=1)
    query = query.transpose(1, 2).flatten(0, 1)  # [lanes, heads, nope + rope]
    nope, rotated = query.split([width - rope, rope], dim=2)
    folded = torch.bmm(nope.transpose(0, 1), key).transpose(0, 1)  # [lanes, heads, latent]
    return Folded(torch.cat([folded, rotated], dim=2), value)


def absorbed_attention(
    folded: Folded, rows: torch.Tensor, selection: torch.Tensor, slots: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention over selected rows.

    Parameters
    ----------
    folded : Folded
    rows : ``[batch, N, latent + rope]``
    selection : int ``[lanes, k]``
        -1 for none.
    slots : int ``[lanes, k]``
        Where in `rows` they are.
    scaling : float

    Returns
    -------
    ``[batch, S, heads, value]``
    """
    query, value = folded
    output = mla_decode(query, rows, selection, slots, scaling, value.shape[2])
    output = torch.bmm(output.transpose(0, 1), value.transpose(1, 2))  # [heads, lanes, value]
    return output.transpose(0, 1).unflatten(0, (rows.shape[0], -1))


class ExpandedAttention:
    """The model's own `expand_kv` and attention: its answer bit for bit, with its memory for one layer.

    Keys and values lie where the model has them, at their positions, because sums over another arrangement differ in the
    last bit; those that no row reads are zero.
    """

    def __init__(self, module: Any, base: Base, latent: int, kwargs: dict[str, Any]) -> None:
        self.module = module
        self.base = base
        self.latent = latent
        self.kwargs = kwargs

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, heads, N, width]`` of rows ``[batch, N, latent + rope]``."""
        rows = rows[:, None]
        latent, rope = rows[..., : self.latent].contiguous(), rows[..., self.latent :].contiguous()
        return type(self.module).expand_kv(self.module, latent, rope)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """The model's attention, ``[batch, S, heads, value]``; `mask` and `indices` as in `selection_mask`."""
        mask = selection_mask(mask, indices)
        return self.base(self.module, query, keys, values, mask, indices=None, **self.kwargs)[0]

    def decode(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        selection: torch.Tensor,
        mask: torch.Tensor,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one row over gathered rows ``[batch, k, latent + rope]`` of the records `selection` ``[batch, k]``."""
        lane, at = (selection >= 0).nonzero(as_tuple=True)
        record = selection[lane, at].long()
        full: list[torch.Tensor] = []
        for part in self.expand(rows):
            placed = part.new_zeros((*part.shape[:2], mask.shape[-1], part.shape[3]))
            placed[lane, :, record] = part[lane, :, at]
            full.append(placed)
        return self.attend(query, full[0], full[1], mask, indices)
