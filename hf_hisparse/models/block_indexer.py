"""The indexer of a MiniMax-M3 model on slices of the queries, without the scores of single keys."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from transformers import PreTrainedModel

from hisparse_kernels.block_scores import block_scores

from ..active import Call, current_call, selected_ahead
from ..hosted_layer import HostedLayer
from .indexer import slice_rows
from .msa import BlockLayer
from .overrides import override, restore
from .watched_keys import StandInCache, UnknownScores, WatchedKeys, may_watch, note_scores, scores_are_known


def enable_msa(model: PreTrainedModel) -> None:
    """Let the indexers of a MiniMax-M3 model know the cache of a call; nothing for another kind of model."""
    for indexer in _indexers(model):
        override(indexer, "forward", sliced_forward)


def disable_msa(model: PreTrainedModel) -> None:
    """Undo `enable_msa`."""
    for indexer in _indexers(model):
        restore(indexer, "forward", sliced_forward)


def _indexers(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "build_block_mask")]


def sliced_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of an indexer; with `HiSparseCache` on slices of the queries, so that extra memory stays within bounds.

    The model's own code runs on each slice: its projections, its rotary embedding, what it hides and how it chooses. The
    scores ``[B, heads, S, T]`` of single keys in between are left to a kernel that never stores them, as long as the code
    does with them what the kernel does (`_Scores` watches that); otherwise the slices are smaller.

    Returns
    -------
    int64 ``[B, heads, S, k]``
        The blocks that each query reads, -1 for none.
    """
    selected = selected_ahead(self, args, kwargs)
    if selected is not None:
        return selected
    forward = types.MethodType(type(self).forward, self)
    call = current_call()
    layer: Any = None if call is None else call.cache.layers[self.layer_idx]
    if call is None or not isinstance(layer, BlockLayer):
        return forward(*args, **kwargs)
    bound = inspect.signature(forward).bind(*args, **kwargs)
    given = bound.arguments
    batch, rows, _ = given["hidden_states"].shape
    total = layer.get_seq_length()
    given["position_ids"] = _within(given["position_ids"], layer, call, total - rows)
    indices: Any = None
    first = 0
    known, lazily = scores_are_known(self), may_watch(self, layer)
    while first < rows:
        last = min(first + _slice_rows(self, layer, batch, lazily), rows)
        cache = _SlicedCache(layer, total - rows + first, lazily, looks=known is None)
        part = {name: slice_rows(value, first, last, rows, cache) for name, value in given.items()}
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
        if indices is None:
            if first == 0 and last == rows:
                return selected
            k = min(self.topk_blocks, -(-total // self.block_size))
            indices = selected.new_full((batch, selected.shape[1], rows, k), -1)
        indices[:, :, first:last, : selected.shape[3]] = selected
        first = last
    return indices


def _within(positions: torch.Tensor, layer: HostedLayer, call: Call, start: int) -> torch.Tensor:
    """`positions`, int64 ``[batch, rows]`` of the tokens from cache position `start` on, none of them beyond its token.

    Raises
    ------
    ValueError
        If a position of a call with several rows is beyond its token: the token would read what comes after it.
    """
    rows = positions.shape[1]
    if rows == 1:
        return torch.minimum(positions, layer.position)
    if not call.checked:
        held = torch.arange(start, start + rows, device=positions.device)
        beyond = (positions > held).nonzero()
        if len(beyond):
            row, token = beyond[0].tolist()
            raise ValueError(
                f"{layer.name}: position_ids give {int(positions[row, token])} to token {start + token} of batch row {row}; "
                "MiniMax-M3 compares them with cache positions, so they may not be larger: leave position_ids out"
            )
        call.checked = True
    return positions


def _slice_rows(indexer: Any, layer: Any, batch: int, lazily: bool) -> int:
    """Rows per slice such that the extra memory stays within the setting."""
    heads, width, total = indexer.num_heads, indexer.head_dim, layer.get_seq_length()
    keys = 0 if lazily and layer.position.is_cuda else 16 * heads * total  # fp32 scores with copies
    blocks = 48 * heads * -(-total // indexer.block_size)  # scores of blocks, and what top-k needs
    per_row = 2 * total + keys + blocks + 16 * heads * width  # first: which keys are hidden
    return max(1, layer.settings.prefill_memory // (batch * per_row))


class _SlicedCache(StandInCache):
    """What an indexer sees as its cache, and as any of its layers, while it works on rows from position `start` on."""

    def __init__(self, layer: Any, start: int, lazily: bool, looks: bool) -> None:
        self.layer, self.start, self.lazily, self.looks = layer, start, lazily, looks

    @property
    def layers(self) -> _SlicedCache:
        return self

    def __getitem__(self, layer_idx: int) -> _SlicedCache:
        return self

    def update_index(self, idx_k: torch.Tensor) -> Any:
        if self.layer.padding.capturing:
            held = self.layer.state.write_at(idx_k[:, 0], self.layer.position)
        else:
            held = self.layer.state.write(idx_k[:, 0], self.start)
        return _Scores(held, self.layer.layout.tokens, self.looks) if self.lazily else held[:, None]


class _Scores(WatchedKeys):
    """Stands for the keys in an indexer's code, then for the scores of single keys, until the best of each block is asked for.

    Attributes
    ----------
    keys : ``[B, T, D]``
    block_size : int
    query : ``[B, heads, S, D]``
    hidden : bool ``[B, S, T]``
        What the code hides.
    """

    def __init__(self, keys: torch.Tensor, block_size: int, looks: bool) -> None:
        padded = () if keys.shape[1] % block_size == 0 else ("pad",)
        steps = ("float", "transpose", "matmul", "masked_fill", *padded, "view", "amax")
        super().__init__(keys, steps, looks=looks)
        self.block_size = block_size
        self.hidden: Any = None

    @property
    def shape(self) -> torch.Size:
        batch, total, width = self.keys.shape
        if self.query is not None:
            raise UnknownScores("the shape of scores")
        return torch.Size((batch, 1, total, width))

    def transpose(self, first: int, second: int) -> _Scores:
        return self._step("transpose", {first % 4, second % 4} == {2, 3})

    def masked_fill(self, hidden: torch.Tensor, value: Any) -> _Scores:
        fits = hidden.dtype == torch.bool and hidden.ndim == 4 and hidden.shape[1] == 1
        self._step("masked_fill", fits and value == float("-inf"))
        batch, _, rows, _ = self.query.shape
        self.hidden = hidden[:, 0].expand(batch, rows, self.keys.shape[1])
        return self

    def view(self, *shape: int) -> _Scores:
        self._step("view", self.query is not None)
        batch, heads, rows, _ = self.query.shape
        if shape != (batch, heads, rows, -(-self.keys.shape[1] // self.block_size), self.block_size):
            raise UnknownScores(f"a view as {shape}")
        return self

    def amax(self, dim: int) -> torch.Tensor:
        self._step("amax", dim in (-1, 4))
        try:
            return block_scores(self.query, self.keys, self.hidden, self.block_size)
        except ValueError as error:
            raise UnknownScores(str(error)) from error

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.matmul and isinstance(args[1], cls) and isinstance(args[0], torch.Tensor):
            scores = args[1]._step("matmul", args[0].ndim == 4)
            scores._take_query(args[0])
            return scores
        if function is torch.nn.functional.pad and isinstance(args[0], cls):
            missing = -args[0].keys.shape[1] % args[0].block_size
            infinite = kwargs.get("value") == float("-inf") and kwargs.get("mode", "constant") == "constant"
            return args[0]._step("pad", infinite and args[1:] == ((0, missing),))
        raise UnknownScores(str(function))
