"""A dense layer that stays on the GPU and keeps its place there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hisparse_kernels.gqa_decode import gqa_decode

from .gradients import without_gradient
from .hosted_layer import LAYER_ATTRIBUTE, UNSUPPORTED_ARGUMENTS
from .padding import Padding
from .records import RecordLayout, moved
from .rows import RearrangedRows, lanes_of
from .versions import new_version


class ResidentLayer(RearrangedRows, DynamicLayer):
    """What `DynamicLayer` is, in memory that grows in steps instead of with every token.

    Attention is the model's own, over views. Only in a captured decode step, where nothing may change its shape,
    attention is `gqa_decode` over all tokens: one token is one record, in the slot of its number.
    """

    is_compileable = False
    is_croppable = True
    _layer_type = None
    unsupported_arguments = UNSUPPORTED_ARGUMENTS
    alternative = "DynamicCache"

    def __init__(self, layer_idx: int, padding: Padding) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.padding = padding
        self.growth_target = 0  # tokens that the cache wants room for when the layer must grow
        self._length = 0
        self._before: int | None = None  # tokens held without those on their way into its rows
        self.version = new_version()

    rows: Any = None  # [lanes, capacity, key_width + value_width]
    position: torch.Tensor  # int64 [1]: where the next token of a captured step goes
    slots: torch.Tensor  # int32 [lanes, capacity]: every token is in the slot of its number

    @property
    def name(self) -> str:
        """How error messages call this layer."""
        return f"HiSparse, layer {self.layer_idx}"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start empty, for keys and values of this shape; memory that fits is used again."""
        self.batch, self.heads, _, self.key_width = key_states.shape
        self.device = key_states.device
        empty = key_states.new_empty((self.batch * self.heads, 0, self.key_width + value_states.shape[3]))
        held = self.rows
        fits = held is not None and held[:, :0].shape == empty.shape
        if not fits or held.dtype != empty.dtype or held.device != empty.device:
            self.version = new_version()
            self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.slots = torch.empty((empty.shape[0], 0), dtype=torch.int32, device=self.device)
            self.rows = empty
        self.is_initialized = True

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` tokens."""
        lanes, capacity, width = self.rows.shape
        if tokens <= capacity:
            return
        rows = self.rows.new_empty((lanes, max(tokens, self.growth_target), width))
        rows[:, :capacity] = self.rows
        slots = torch.arange(rows.shape[1], dtype=torch.int32, device=self.device).repeat(lanes, 1)
        self.version = new_version()
        self.rows, self.slots = rows, slots

    def shrink(self, tokens: int) -> None:
        """Give back room for more than `tokens` tokens, which is what it holds at most."""
        if self.rows is not None and self.rows.shape[1] > tokens:
            rows, slots = self.rows[:, :tokens].clone(), self.slots[:, :tokens].clone()
            self.version = new_version()
            self.rows, self.slots = rows, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens; return all, ``[batch, heads, T, width]``."""
        self._before = self._length
        if not self._length:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[2]
        new = torch.cat([key_states, value_states], dim=3).flatten(0, 1)
        if self.padding.capturing:
            self.rows.index_copy_(1, self.position, new)
            self._before = None
            keys = key_states.view_as(key_states)
            setattr(keys, LAYER_ATTRIBUTE, self)
            return keys, value_states
        self.grow(self._length)
        self.rows[:, start : self._length] = new.detach()
        self.position.fill_(self._length)
        self._before = None
        if start == 0:
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        return without_gradient(self.keys, key_states), without_gradient(self.values, value_states)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        base: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one new token per row in a captured step (see `HostedLayer.attend`)."""
        batch, heads, _, width = query.shape
        scaling = kwargs.get("scaling")
        output = gqa_decode(
            query.reshape(batch * self.heads, -1, width),
            self.rows,
            self.slots,
            self.slots,
            self.position,
            self.padding.captured,
            1,
            self.key_width,
            width**-0.5 if scaling is None else scaling,
        )
        self.position.add_(1)
        return output.view(batch, 1, heads, -1), None

    @property
    def keys(self) -> torch.Tensor | None:
        """``[batch, heads, T, key_width]``, a view; None before the first token."""
        return self._view(slice(None, self.key_width)) if self.is_initialized else None

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        assert value is None  # what the base class starts with

    @property
    def values(self) -> torch.Tensor | None:
        """``[batch, heads, T, value_width]``, a view; None before the first token."""
        return self._view(slice(self.key_width, None)) if self.is_initialized else None

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        assert value is None

    def _view(self, columns: slice) -> torch.Tensor:
        return self.rows[:, : self._length, columns].unflatten(0, (self.batch, self.heads))

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def kv_nbytes(self) -> int:
        """Device bytes held for keys and values."""
        return 0 if self.rows is None else self.rows.nbytes

    @property
    def table_nbytes(self) -> int:
        """Device bytes of the bookkeeping."""
        return 0 if self.rows is None else self.slots.nbytes + self.position.nbytes

    @property
    def counts(self) -> tuple[int]:
        """Tokens: all that a decode step changes in Python."""
        return (self._length,)

    def restore(self, counts: tuple[int]) -> None:
        """Back to `counts`: a capture runs nothing."""
        (self._length,) = counts
        self._before = None

    def take_back(self, tokens: int) -> None:
        """Forget new tokens: only the first `tokens` are left, if it holds so many."""
        if tokens <= (self._length if self._before is None else self._before):
            self._length = tokens
            if self.is_initialized:
                self.position.fill_(tokens)
            self._before = None

    @property
    def interrupted(self) -> bool:
        """Whether tokens were taken that did not get into its rows."""
        return self._before is not None

    def replayed(self) -> None:
        """A captured decode step was replayed."""
        self._length += 1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        if self.is_initialized and tokens_to_remove < 0:
            self._length = max(0, self._length + int(tokens_to_remove))
            self.position.fill_(self._length)

    def rearrange(self, rows: torch.Tensor) -> None:
        """Let batch row `i` hold what row ``rows[i]`` held (int64 ``[new batch]``)."""
        if not self._length:
            return
        rows = rows.to(self.device)
        self.rows = moved(self.rows, lanes_of(rows, self.heads))
        if rows.numel() != self.batch:
            self.batch = rows.numel()
            self.slots = self.slots[:1].repeat(self.rows.shape[0], 1)
            self.version = new_version()

    @property
    def held_rows(self) -> int:
        """Batch rows held, 0 before the first token."""
        return self.batch if self.is_initialized else 0

    def reset(self) -> None:
        """Forget everything; the memory stays for the next use."""
        self._length = 0
        self._before = None
        self.is_initialized = False

    def saved(self) -> dict[str, torch.Tensor]:
        """All that is held."""
        return {"rows": self.rows[:, : self._length]}

    def load(
        self, key_states: torch.Tensor, value_states: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Take what `saved` gave, of this layer or of a dense one on the host, of tokens of these shapes."""
        self.lazy_initialization(key_states, value_states)
        self._length = key_states.shape[2]
        self.grow(self._length)
        rows = tensors["rows"] if "rows" in tensors else self._rows_of(tensors["records"])
        self.rows[:, : self._length] = rows[:, : self._length].to(self.device)
        self.position.fill_(self._length)

    def _rows_of(self, records: torch.Tensor) -> torch.Tensor:
        """``[n, lanes, elements]`` -> ``[lanes, n * tokens of a record, width]``."""
        width = self.rows.shape[2]
        tokens = records.shape[2] // width
        layout = RecordLayout(tokens, self.key_width, width - self.key_width, records.dtype)
        return torch.cat(layout.unpack(records.transpose(0, 1), self.batch), dim=3).flatten(0, 1)

    def release(self) -> None:
        """Give back the device memory that a reset left behind."""
        self.rows, self.is_initialized = None, False
        vars(self).pop("slots", None)

    def clone(self, padding: Padding) -> ResidentLayer:
        """An independent copy with the copy's `padding`."""
        other = copy.copy(self)
        other.padding = padding
        other.version = new_version()
        if self.is_initialized:
            other.rows, other.position = self.rows.clone(), self.position.clone()
        else:  # what a reset left behind is this layer's alone
            other.rows = None
        return other
