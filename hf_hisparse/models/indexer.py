"""The indexer of a DSA model: its keys, and its scores on slices of the queries.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, section 2.1 (lightning indexer).
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from transformers import Cache

from hisparse_kernels.lightning_indexer import lightning_indexer

from ..active import current_call, selected_ahead
from ..masks import allowed_keys, causal_rows
from ..modes import keeps
from ..records import moved
from .watched_keys import StandInCache, UnknownScores, WatchedKeys, may_watch, note_scores, scores_are_known


class IndexerKeys:
    """The indexer keys of one layer, in a buffer that grows in steps: the selector state where the model selects.

    A layer that takes its selection from another one has none.

    Parameters
    ----------
    tokens_per_record : int
    lanes_per_row : int
        Lanes of one batch row; they share its keys.

    Attributes
    ----------
    keys : ``[batch, capacity, width]`` or None
        By cache position.
    """

    def __init__(self, tokens_per_record: int = 1, lanes_per_row: int = 1) -> None:
        self.keys: torch.Tensor | None = None
        self._capacity = 0
        self._tokens_per_record = tokens_per_record
        self._lanes_per_row = lanes_per_row

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return 0 if self.keys is None else self.keys.nbytes

    def grow(self, records: int) -> None:
        """Make room for `records` records."""
        capacity = records * self._tokens_per_record
        missing = capacity - self._capacity
        if missing > 0:
            if self.keys is not None:
                self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, missing))
            self._capacity = capacity

    @keeps
    def write(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """Take ``[batch, T, width]`` from position `start` on; the keys up to there, a view ``[batch, start + T, width]``."""
        if self.keys is None:
            self.keys = keys.new_zeros((keys.shape[0], self._capacity, keys.shape[2]))
        stop = start + keys.shape[1]
        self.keys[:, start:stop] = keys
        return self.keys[:, :stop]

    def write_at(self, keys: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Take ``[batch, 1, width]`` at `position`, int64 ``[1]``; all there is room for, ``[batch, capacity, width]``."""
        assert self.keys is not None
        return self.keys.index_copy_(1, position, keys)

    def crop(self, tokens: int) -> None:
        """Nothing to forget: a position is written again before it is read."""

    def extend(self, keys: torch.Tensor, start: int, valid: torch.Tensor | None) -> None:
        """Nothing to take over from the main keys of a record that was cut: the tokens left keep their indexer keys."""

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let lane `i` hold what lane ``lanes[i]`` held."""
        if self.keys is not None:
            rows = lanes[:: self._lanes_per_row] // self._lanes_per_row
            self.keys = moved(self.keys, rows)

    def clone(self) -> IndexerKeys:
        """An independent copy."""
        other = IndexerKeys(self._tokens_per_record, self._lanes_per_row)
        other.keys = None if self.keys is None else self.keys.clone()
        other._capacity = self._capacity
        return other

    def saved(self, records: int) -> dict[str, torch.Tensor]:
        """The keys of the first `records` records."""
        return {} if self.keys is None else {"keys": self.keys[:, : records * self._tokens_per_record]}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `saved` gave."""
        if tensors:
            self.write(tensors["keys"], 0)


def sliced_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of an indexer; with `HiSparseCache` on slices of the queries, where their scores would take much memory.

    The model's own code runs on each slice: its projections, its rotary embedding, its top-k. The scores ``[B, S, heads, T]`` in
    between are left to a kernel that never stores them, as long as the code computes what the kernel does (`_Keys` watches that);
    otherwise the slices of a long call are smaller. Extra memory stays within `prefill_memory`.
    """
    selected = selected_ahead(self, args, kwargs)
    if selected is not None:
        return selected
    forward = types.MethodType(type(self).forward, self)
    call = current_call()
    if call is None or not call.causal:
        return forward(*args, **kwargs)
    layer = call.cache.layers[self.layer_idx]
    bound = inspect.signature(forward).bind(*args, **kwargs)
    given = bound.arguments
    batch, rows, _ = given["hidden_states"].shape
    mask = given["attention_mask"]
    decodes = rows <= layer.settings.decode_rows
    known, lazily = scores_are_known(self), may_watch(self, layer)
    if decodes and lazily and _slice_rows(self, layer, batch, mask.is_cuda) >= rows:
        cache: Any = _LazyCache(layer, looks=known is None)
        part = {name: slice_rows(value, 0, rows, rows, cache) for name, value in given.items()}
        whole = inspect.BoundArguments(bound.signature, part)
        try:
            selected = forward(*whole.args, **whole.kwargs)
        except UnknownScores:
            note_scores(self, False)
        else:
            note_scores(self, True)
            return selected
    lazily = lazily and not decodes
    if decodes and _slice_rows(self, layer, batch, fused=False) >= rows:
        return forward(*args, **kwargs)

    padding = None if decodes else allowed_keys(mask[:, None], batch)[:, 0]
    total = layer.get_seq_length()
    indices = torch.full(
        (batch, rows, min(layer.settings.top_k, total)), -1, dtype=torch.int32, device=mask.device
    )
    first = 0
    while first < rows:
        last = min(first + _slice_rows(self, layer, batch, lazily and mask.is_cuda), rows)
        start, stop = total - rows + first, total - rows + last
        cache = _SlicedCache(layer, start, lazily, looks=known is None)
        part = {name: slice_rows(value, first, last, rows, cache) for name, value in given.items()}
        if padding is not None:
            part["attention_mask"] = causal_rows(padding[:, :stop], start)
        else:
            part["attention_mask"] = mask[:, first:last, :stop]
        sliced = inspect.BoundArguments(bound.signature, part)
        try:
            selected = forward(*sliced.args, **sliced.kwargs)
        except UnknownScores:
            lazily = known = False
            note_scores(self, False)
            continue
        if lazily and known is None:
            known = True
            note_scores(self, True)
        indices[:, first:last, : selected.shape[2]] = selected
        first = last
    return indices


def _slice_rows(indexer: Any, layer: Any, batch: int, fused: bool) -> int:
    """Rows per slice such that the extra memory stays within the setting."""
    heads = getattr(indexer, "n_heads", None) or indexer.config.index_n_heads
    width = getattr(indexer, "head_dim", None) or indexer.config.index_head_dim
    total = layer.get_seq_length()
    scores = 16 * total if fused else 12 * (heads + width) * total  # per row: fp32 with copies, and masks
    return max(1, layer.settings.prefill_memory // (batch * (scores + 16 * heads * width)))


def slice_rows(value: Any, first: int, last: int, rows: int, cache: object) -> Any:
    """An argument for the rows ``first .. last - 1`` alone: what has `rows` of them in its second dimension is cut."""
    if isinstance(value, tuple):
        return tuple(slice_rows(each, first, last, rows, cache) for each in value)
    if isinstance(value, dict):
        return {name: slice_rows(each, first, last, rows, cache) for name, each in value.items()}
    if isinstance(value, Cache):
        return cache
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == rows:
        return value[:, first:last]
    return value


class _SlicedCache(StandInCache):
    """What an indexer sees as its cache while it works on a slice that begins at position `start`."""

    def __init__(self, layer: Any, start: int, lazily: bool, looks: bool) -> None:
        self.layer, self.start, self.lazily, self.looks = layer, start, lazily, looks

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> Any:
        held = self.layer.state.write(indexer_key_states, self.start)
        return _Keys(held, self.start, self.looks) if self.lazily else held


class _LazyCache(StandInCache):
    """What an indexer sees as its cache in a decode call; the mask that it is given says which keys a query may see."""

    def __init__(self, layer: Any, looks: bool) -> None:
        self.layer, self.looks = layer, looks

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> _Keys:
        held = self.layer.update_indexer(indexer_key_states)
        return _Keys(held, held.shape[1], self.looks)  # as if the queries came after all of them


class _Keys(WatchedKeys):
    """Stands for the keys in an indexer's code, until all of ``weights @ relu(query @ keys.T * scale)`` is known.

    Attributes
    ----------
    keys : ``[B, T, D]``
    start : int
        Position of the first query.
    """

    def __init__(self, keys: torch.Tensor, start: int, looks: bool) -> None:
        steps = ("transpose", "float", "unsqueeze", "matmul", "mul", "relu", "matmul")
        super().__init__(keys, steps, optional="mul", looks=looks)
        self.start, self.scale = start, 1.0

    def transpose(self, first: int, second: int) -> _Keys:
        return self._step("transpose", {first % 3, second % 3} == {1, 2})

    def unsqueeze(self, dim: int) -> _Keys:
        return self._step("unsqueeze", dim == 1)

    def __mul__(self, scale: Any) -> _Keys:
        self._step("mul", isinstance(scale, float) and scale > 0)
        self.scale = scale
        return self

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.nn.functional.relu, torch.relu):
            return args[0]._step("relu")
        if function is torch.matmul and isinstance(args[1], cls) and isinstance(args[0], torch.Tensor):
            return args[1]._matmul(args[0])
        raise UnknownScores(str(function))

    def _matmul(self, left: torch.Tensor) -> Any:
        self._step("matmul", left.ndim == 4)
        if self.query is None:  # [B, S, H, D]
            self._take_query(left)
            return self
        weights = left.squeeze(-2).contiguous()  # [B, S, H]
        try:
            scores = lightning_indexer(self.query, self.keys, weights, self.start, None, self.scale)
        except ValueError as error:
            raise UnknownScores(str(error)) from error
        return scores.unsqueeze(-2)  # [B, S, 1, T]
