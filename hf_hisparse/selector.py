"""What a selector is: the part that names the records a query reads.

To bring your own, write one class that has the attributes and the one method of `Selector` and returns an
object with the methods of `SelectorState`; `hf_hisparse.models.quest` is the example to copy. The state must
never need the main KV: it scores from what it keeps on the GPU itself.

What happens when: a prefill calls `grow`, `extend` with all new tokens, then `select` for the last. A decode call
does, for each of its new tokens in turn, `append`, then `select`. `crop` comes with the first token of a record; if
it is cut in the middle, the rest of that record is given again by `extend`. Padding inside a selected record is
masked by attention, but a record of nothing else is a wasted choice: `extend` and `append` say which tokens are
`valid`. A decode step may be replayed from a CUDA graph: `append` and `select` then run no Python, so they must work
on the same tensors each time (`grow` and `rearrange` may replace them). ``verify=True`` checks every selection.

A state whose `select` does not look at what `append` gave it of the newest token can say so with an attribute
``newest_counts = False``. Then a step that is captured, and the eager one before it, call `select` before `append`: of the record
of `position` nothing may have been appended yet. In replayed steps that is while the model computes keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class LayerShape:
    """What a selector is told of the layer it serves.

    Attributes
    ----------
    layer_idx, batch, heads : int
        `heads` are KV heads, each shared by a group of query heads.
    key_width : int
        Elements per key.
    dtype, device
        Of the keys.
    """

    layer_idx: int
    batch: int
    heads: int
    key_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def lanes(self) -> int:
        """Independent streams of selections."""
        return self.batch * self.heads


class SelectorState(Protocol):
    """The selector state of one layer, on the device.

    `append` and `select` run in every decode step: they must not synchronise with the host, and take the position as a
    tensor, int64 ``[1]``.
    """

    def grow(self, records: int) -> None:
        """Make room for `records` records."""

    def extend(self, keys: torch.Tensor, start: int, valid: torch.Tensor | None) -> None:
        """Take many tokens (prefill).

        `keys` is ``[batch, heads, T, key_width]`` from cache position `start` on; `valid` is bool ``[batch, T]``, False for
        padding, or None when there is none.
        """

    def append(self, keys: torch.Tensor, position: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Take one token per row (decode): `keys` ``[lanes, key_width]``, `valid` bool ``[batch]`` or None."""

    def select(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Name the records that the query at `position` reads; its own token was appended before, unless
        `newest_counts` is False.

        `query` is ``[lanes, group, key_width]``. Returns int ``[lanes, top_k]``, different records none of which
        begins after `position`, -1 for none; the record of `position` itself must be among them, or its slot may be given
        to another one, and what is read is wrong.
        """

    def crop(self, tokens: int) -> None:
        """Forget the tokens from position `tokens` on, the first of a record."""

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let lane `i` hold what lane ``lanes[i]`` held (int64 ``[new lanes]``)."""

    def clone(self) -> SelectorState:
        """An independent copy."""

    def saved(self, records: int) -> dict[str, torch.Tensor]:
        """What `load` needs to go on from here, of the first `records` records (for `HiSparseCache.save`)."""

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `saved` gave, now on the device; `grow` has made room for it."""

    @property
    def nbytes(self) -> int:
        """Device bytes."""


@runtime_checkable
class Selector(Protocol):
    """The settings of a selector.

    Attributes
    ----------
    page_size : int
        Tokens per record.
    top_k : int
        Records that one query reads, per lane.
    dense_layers : int
        So many first layers are not sparse; they stay on the GPU, unless the cache is to host them.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def dense_layers(self) -> int: ...

    def new_state(self, shape: LayerShape) -> SelectorState:
        """The empty state of one layer."""
