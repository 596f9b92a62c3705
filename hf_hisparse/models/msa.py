"""MiniMax sparse attention (MiniMax-M3): a record is a block of tokens, and the model selects blocks for each KV head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hisparse_kernels.gqa_decode import gqa_decode
from hisparse_kernels.miss_plan import HostSource

from ..active import current_call
from ..gradients import without_gradient
from ..hosted_layer import HostedLayer, LayerSettings
from ..masks import allowed_keys, block_mask, hides_new, valid_tokens
from ..modes import outside_inference_mode, own_sums
from ..padding import Padding
from ..read_ahead import Read
from ..records import RecordLayout
from ..selector import LayerShape
from .indexer import IndexerKeys
from .kv_shape import KvShape, gqa_shape

LAYOUTS = ("per_group", "union")

Base = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class BlockSettings(LayerSettings):
    """What all layers of blocks of a cache share.

    Attributes
    ----------
    block_size : int
        Tokens per block.
    blocks : int
        Blocks that one query reads per KV head.
    layout : str
        "per_group": a record is a block of one KV head, lane = batch row x KV head. "union": a record is a block of all KV
        heads, lane = batch row, and what any of its heads selects is fetched for all.
    prefill_memory : int
        Bytes of device memory that a long call may take beyond its results.
    """

    block_size: int
    blocks: int
    layout: str
    prefill_memory: int


class BlockLayer(HostedLayer):
    """A hosted layer of blocks that the model selects."""

    model_selects = True
    unread_inputs = ("image_grid_thw", "video_grid_thw")
    settings: BlockSettings
    state: IndexerKeys

    def layout_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> RecordLayout:
        """A block of one KV head, or of all of them."""
        heads = key_states.shape[1] if self.settings.layout == "union" else 1
        return RecordLayout(
            self.settings.block_size, key_states.shape[3], value_states.shape[3], key_states.dtype, heads
        )

    def new_state(self, shape: LayerShape) -> IndexerKeys:
        """No indexer keys yet."""
        return IndexerKeys(self.layout.tokens, shape.heads // self.layout.heads)

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Take the indexer keys ``[batch, 1, T, width]`` of the new tokens; those of all, ``[batch, 1, total, width]``."""
        return self.state.write(idx_k[:, 0], self.new_tokens().start)[:, None]

    def check_padding(self, valid: torch.Tensor) -> None:
        """Refuse padding on the left, and more on the right than a query can look past (ValueError).

        Parameters
        ----------
        valid : bool ``[batch, tokens]``
            All tokens so far, False for padding.
        """
        hidden, most = int((valid == 0).sum(1).max()), (self.settings.blocks - 1) * self.settings.block_size
        if hidden > most:
            raise ValueError(
                f"{self.name}: a batch row has {hidden} tokens of padding; of more than {most} MiniMax-M3 may select nothing but "
                "padding, and then reads all keys alike, which decode over selected blocks does not do: pass prompts of more "
                "equal length, or run them one by one"
            )
        if not bool(valid[:, 0].all()):
            row = int((~valid[:, 0]).nonzero()[0])
            raise ValueError(
                f"{self.name}: batch row {row} is padded on the left; MiniMax-M3 in transformers cuts blocks by cache position "
                "but compares them with positions that do not count padding, so its answers for such a batch are wrong and "
                "cannot be reproduced: pass prompts of equal length, pad on the right, or run them one by one"
            )

    # ------------------------------------------------------------------ attention

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        base: Base,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the new tokens over the blocks that the model selected, ``kwargs["block_indices"]``."""
        indices, positions = kwargs.get("block_indices"), kwargs.get("position_ids")
        if indices is None or positions is None:
            raise ValueError(
                f"{self.name}: the model's attention was called without block_indices or without position_ids, so it is none "
                "of the sparse models that HiSparseCache supports: use DynamicCache"
            )
        count = query.shape[2]
        # A query that is padding may read nothing of its selection, and then the model has it read all keys alike.
        all_keys = count > self.settings.decode_rows or (count > 1 and hides_new(mask, count))
        attend = self._prefill if all_keys else self._decode
        with outside_inference_mode():
            output = attend(module, query, mask, positions, base, kwargs)
            new = self.new_tokens()
            self.finish()
        return without_gradient(output, query, new.keys, new.values), None

    def _selections(self, indices: torch.Tensor) -> torch.Tensor:
        """One selection per KV head, always of one width: ``[batch, index heads, S, k]`` -> ``[batch, heads, S, blocks]``."""
        assert self.shape is not None
        missing = self.settings.blocks - indices.shape[3]
        if missing > 0:
            indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
        return indices.repeat_interleave(self.shape.heads // indices.shape[1], dim=1)

    def _records(self, selections: torch.Tensor) -> torch.Tensor:
        """``[batch, heads, k]`` as each lane reads them, ``[lanes, k or heads * k]``."""
        return selections.flatten(1) if self.layout.heads > 1 else selections.flatten(0, 1)

    def _scaling(self, query: torch.Tensor, kwargs: dict[str, Any]) -> float:
        scaling = kwargs.get("scaling")
        return query.shape[3] ** -0.5 if scaling is None else scaling

    @own_sums
    def _decode(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        base: Base,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """One new token after another: ``[batch, S, query heads, value_width]``."""
        batch, heads, count, width = query.shape
        if self.padding.capturing:
            captured = self.padding.captured
            allowed = None if captured is None else captured[:, None]
        else:
            allowed = allowed_keys(mask, batch)
            self._note(allowed, count)
        selections = None if self.is_under_way else self._selections(kwargs["block_indices"])
        new = self.new_tokens()
        lanes = batch * new.keys.shape[1]
        outputs = []
        for i in range(count):
            chosen = None if selections is None else selections[:, :, i].contiguous()
            read = self.what_was_read(functools.partial(self._claim_and_read, chosen))
            keys, values = new.keys[:, :, i].flatten(0, 1), new.values[:, :, i].flatten(0, 1)
            self.append(keys, values, claimed=read is not None)
            selection, slots, source = self._read(chosen) if read is None else read
            # The model hides what comes after a token by the mask, or by its position id where it makes none.
            last = self.position if allowed is not None else torch.minimum(positions[:, i], self.position)
            output = gqa_decode(
                query[:, :, i].reshape(lanes, -1, width),
                self._heads_apart(self.buffer.data),
                selection,
                slots,
                last,
                None if allowed is None else allowed[:, i],
                self.layout.tokens,
                self.layout.key_width,
                self._scaling(query, kwargs),
                source,
            )
            self.verify(selection.view(self.buffer.lanes, -1), self.buffer.slots)
            self.advance()
            outputs.append(output.view(batch, heads, -1))
        return torch.stack(outputs, dim=1)

    def _heads_apart(self, data: torch.Tensor) -> torch.Tensor:
        """``[lanes, slots, elements]`` with a place for each KV head of a slot, ``[lanes, slots * heads, elements of one]``."""
        return data.view(data.shape[0], -1, data.shape[2] // self.layout.heads)

    def read_ahead(self, select: Callable[[], torch.Tensor], mask: torch.Tensor | None) -> None:
        """Select and fetch beside what the model does now, if it is known that `select` gives what the model selects.

        Parameters
        ----------
        select : callable
            Runs the indexer: int64 ``[batch, index heads, 1, k]``.
        mask
            Not looked at: what it hides is not selected.
        """
        if not self.reads_ahead:
            return

        def read() -> Read:
            indices = select()
            with outside_inference_mode():
                return self._claim_and_read(self._selections(indices)[:, :, 0].contiguous())

        self.begin_ahead(read, select)

    def _claim_and_read(self, selection: torch.Tensor | None) -> Read:
        """Bring what is selected, ``[batch, heads, k]``, before the query's own token is stored."""
        assert selection is not None
        self.claim()
        return self._as_read_by_heads(selection, self.read(self._records(selection)), None)

    def _read(self, selection: torch.Tensor | None) -> Read:
        """Bring what is selected, ``[batch, heads, k]``, or let attention do it."""
        assert selection is not None  # only what was read ahead is not selected in its turn
        records = self._records(selection)
        if self.layout.heads > 1:  # several KV heads share a record, which one of them must have brought
            return self._as_read_by_heads(selection, self.read(records), None)
        return self._as_read_by_heads(selection, *self.read_or_resolve(records))

    def _as_read_by_heads(
        self, selection: torch.Tensor, slots: torch.Tensor, source: HostSource | None
    ) -> Read:
        """What each KV head reads, ``[batch * heads, k]``, and from which places of `_heads_apart`."""
        shared = self.layout.heads
        if shared > 1:
            head = torch.arange(shared, dtype=torch.int32, device=slots.device)[:, None]
            slots = (slots.unflatten(1, (shared, -1)) * shared + head).flatten(0, 1)
        return Read(selection.flatten(0, 1), slots, source)

    def _note(self, allowed: torch.Tensor | None, count: int) -> None:
        valid = valid_tokens(allowed, count)
        start = self.new_tokens().start
        if valid is not None and (count > 1 or not start):  # a mask that the caller made was not seen before
            earlier = self.padding.between(0, start, valid.device) if start else None
            self.check_padding(valid if earlier is None else torch.cat([earlier, valid], dim=1))
        self.note_padding(valid)

    def _prefill(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        base: Base,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """All new tokens, on slices of the queries: ``[batch, S, query heads, value_width]``."""
        batch, _, count, _ = query.shape
        allowed = allowed_keys(mask, batch)
        self._note(allowed, count)
        keys, values = self.history()
        selections = self._selections(kwargs["block_indices"])
        call = current_call()
        if mask is not None and not (call is not None and call.causal):
            output = self._prefill_as_the_model(module, query, keys, values, mask, base, kwargs)
        else:
            output = query.new_empty((batch, count, query.shape[1], values.shape[3]))
            own = torch.arange(keys.shape[2] - count, keys.shape[2], device=query.device)
            last = torch.minimum(positions, own) if mask is None else own[None]
            for row in range(batch):
                self._prefill_row(
                    output[row],
                    query[row],
                    keys[row],
                    values[row],
                    selections[row],
                    last[row if len(last) > 1 else 0],
                    None if allowed is None else allowed[row, -1:],
                    self._scaling(query, kwargs),
                )
        self.store(keys, values)
        self.warm(self._records(selections[:, :, -1]), keys, values)
        return output

    @own_sums
    def _prefill_row(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        selections: torch.Tensor,
        last: torch.Tensor,
        allowed: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """One batch row; each query is a lane of its own over the blocks of its KV head.

        Parameters
        ----------
        output : ``[S, query heads, value_width]``
            Output.
        query : ``[query heads, S, key_width]``
        keys, values : ``[heads, T, width]``
        selections : int ``[heads, S, k]``
        last : int64 ``[S]``
            The last key that a query may read.
        allowed : bool ``[1, T]`` or None
        """
        heads, _, width = keys.shape
        layout = replace(self.layout, heads=1)
        blocks = layout.pack(keys[None], values[None])
        step = self._slice_rows(query, blocks.nbytes)
        if allowed is not None:
            first_keys, mean = _first_keys(allowed[0], layout.tokens), values.mean(1)
        for part in (slice(first, first + step) for first in range(0, len(output), step)):
            own = query[:, part].unflatten(0, (heads, -1)).transpose(1, 2)  # [heads, rows, group, width]
            rows, group = own.shape[1:3]
            selection = selections[:, part].reshape(heads * rows, -1).int()
            result = gqa_decode(
                own.reshape(heads * rows, group, width),
                blocks,
                selection,
                selection,
                last[part].repeat(heads),
                allowed,
                layout.tokens,
                width,
                scaling,
            )
            result = result.view(heads, rows, group, -1)
            if allowed is not None:
                unread = (selection < 0) | (first_keys[selection] > last[part].repeat(heads)[:, None])
                nothing = unread.all(1).view(heads, rows, 1, 1)
                result = torch.where(nothing, mean[:, None, None], result)
            output[part] = result.transpose(0, 1).flatten(1, 2)

    def _slice_rows(self, query: torch.Tensor, taken: int) -> int:
        """Query rows per slice such that the extra memory, of which `taken` bytes are taken, stays within the setting."""
        heads, _, width = query.shape
        per_row = 16 * heads * (width + self.layout.value_width) + 32 * heads * self.settings.blocks
        if not query.is_cuda:  # the reference gathers
            assert self.shape is not None
            block = self.layout.nbytes // self.layout.heads // self.layout.dtype.itemsize
            per_row += 16 * self.shape.heads * self.settings.blocks * block
        return max(1, (self.settings.prefill_memory - taken) // per_row)

    def _prefill_as_the_model(
        self,
        module: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        base: Base,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """The model's own attention and mask on slices of the queries, for a mask that the caller made."""
        batch, heads, count, _ = query.shape
        step = max(1, self.settings.prefill_memory // (16 * batch * heads * keys.shape[2]))
        outputs = []
        for part in (slice(first, first + step) for first in range(0, count, step)):
            rows = dict(kwargs)
            rows["block_indices"] = kwargs["block_indices"][:, :, part]
            rows["position_ids"] = kwargs["position_ids"][:, part]
            narrowed = block_mask(module, query[:, :, part], keys.shape[2], mask[:, :, part], rows)
            outputs.append(base(module, query[:, :, part], keys, values, narrowed, **rows)[0])
        return torch.cat(outputs, dim=1)


def _first_keys(allowed: torch.Tensor, size: int) -> torch.Tensor:
    """The first key of each block of `size` that may be read, int64 ``[blocks]``, beyond all keys for none; from bool ``[T]``."""
    total = len(allowed)
    keys = torch.arange(total, device=allowed.device).masked_fill(~allowed, total)
    return torch.nn.functional.pad(keys, (0, -total % size), value=total).view(-1, size).amin(1)


class BlockFamily:
    """Models with MiniMax sparse attention that hand their selection to the attention function."""

    def __init__(
        self,
        decoder: PreTrainedConfig,
        layers: list[Any],
        indexed: list[int],
        layout: str,
        prefill_memory: int,
    ) -> None:
        self._decoder = decoder
        self.name = decoder.model_type
        self.layout = layout
        self.page_size, self._blocks = decoder.index_block_size, decoder.index_topk_blocks
        groups = decoder.num_key_value_heads if layout == "union" else 1
        self.top_k = groups * self._blocks
        self.budget = f"the {self._blocks} blocks (index_topk_blocks) that a query reads"
        if layout == "union":
            self.budget += f" in each of {groups} KV heads, {self.top_k * self.page_size} tokens in all"
        self.hosted = indexed
        self.dense: list[int] = []
        self._prefill_memory = prefill_memory
        self._layers = layers

    def layers(self, settings: LayerSettings, padding: Padding) -> list[Any]:
        """See `Family.layers`."""
        own = BlockSettings(
            **vars(settings),
            block_size=self.page_size,
            blocks=self._blocks,
            layout=self.layout,
            prefill_memory=self._prefill_memory,
        )
        layers = list(self._layers)
        for index in self.hosted:
            layers[index] = BlockLayer(index, own, padding)
        return layers

    def connect(self, layers: list[Any]) -> None:
        """No layer needs another."""

    def kv_shape(self, index: int, hosted: bool) -> KvShape:
        """See `Family.kv_shape`."""
        indexed = self._decoder.index_head_dim if index in self.hosted else 0
        return gqa_shape(self._decoder, index)._replace(index_width=indexed)

    def __repr__(self) -> str:
        return f"{self.name}, index_topk_blocks={self._blocks}, layout={self.layout!r}"
