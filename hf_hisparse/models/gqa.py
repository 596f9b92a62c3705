"""Grouped-query attention with a selector: a record is a page of tokens of one KV head, keys and values together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from hisparse_kernels.gqa_decode import gqa_decode

from ..gradients import without_gradient
from ..hosted_layer import HostedLayer, LayerSettings
from ..masks import allowed_keys, valid_tokens
from ..modes import outside_inference_mode, own_sums
from ..padding import Padding
from ..read_ahead import Read
from ..records import RecordLayout
from ..selector import LayerShape, Selector, SelectorState

logger = logging.getLogger(__name__)


class GqaLayer(HostedLayer):
    """A hosted layer whose records a `Selector` chooses. Lane = batch row x KV head."""

    state: SelectorState
    _expected: torch.Tensor | None = None

    def __init__(self, layer_idx: int, settings: LayerSettings, padding: Padding, selector: Selector) -> None:
        super().__init__(layer_idx, settings, padding)
        self.selector = selector

    def layout_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> RecordLayout:
        """Pages of the selector's size."""
        return RecordLayout(
            self.selector.page_size, key_states.shape[3], value_states.shape[3], key_states.dtype
        )

    def new_state(self, shape: LayerShape) -> SelectorState:
        """The selector's state for this layer."""
        return self.selector.new_state(shape)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        base: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the new tokens: dense over the whole history in a prefill, sparse in a decode call."""
        if self.streams(query.shape[2]):
            return self._prefill(module, query, mask, base, kwargs)
        scaling = kwargs.get("scaling")
        with outside_inference_mode():
            new = self.new_tokens()
            output = self._decode(query, mask, query.shape[3] ** -0.5 if scaling is None else scaling)
        return without_gradient(output, query, new.keys, new.values), None

    def _prefill(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        base: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        new = self.new_tokens()
        keys, values = self.history()
        output, weights = base(module, query, keys, values, mask, **kwargs)
        with outside_inference_mode():
            self._take(query, mask, keys, values)
        return (without_gradient(output) if new.start else output), weights

    @own_sums
    def _take(
        self, query: torch.Tensor, mask: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the new tokens of a prefill, whose whole history is `keys` and `values`, and note what its last query selects."""
        new = self.new_tokens()
        valid = valid_tokens(allowed_keys(mask, query.shape[0]), query.shape[2])
        self.note_padding(valid)
        self.store(keys, values)
        self.state.extend(new.keys, new.start, valid)
        self.position.fill_(self.get_seq_length() - 1)
        self.warm(self.state.select(self._lanes(query[:, :, -1]), self.position), keys, values)
        self.finish()

    @own_sums
    def _decode(self, query: torch.Tensor, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
        """One new token after another, each with a selection of its own: ``[batch, S, query heads, value_width]``."""
        batch, heads, count, _ = query.shape
        if self.padding.capturing:
            captured = self.padding.captured
            allowed = None if captured is None else captured[:, None]
            valid = None if captured is None else captured.index_select(1, self.position)
        else:
            allowed = allowed_keys(mask, batch)
            valid = valid_tokens(allowed, count)
            self.note_padding(valid)
        self._compare(query)
        new = self.new_tokens()
        outputs = []
        for i in range(count):
            row = self._lanes(query[:, :, i])
            read = self.what_was_read(functools.partial(self._claim_and_read, row))
            keys, values = new.keys[:, :, i].flatten(0, 1), new.values[:, :, i].flatten(0, 1)
            self.append(keys, values, claimed=read is not None)
            self.state.append(keys, self.position, None if valid is None else valid[:, i].contiguous())
            selection, slots, source = self._select_and_read(row) if read is None else read
            output = gqa_decode(
                row,
                self.buffer.data,
                selection,
                slots,
                self.position,
                None if allowed is None else allowed[:, i],
                self.layout.tokens,
                self.layout.key_width,
                scaling,
                source,
            )
            self.verify(selection, slots)
            self.advance()
            outputs.append(output.view(batch, heads, -1))
        self.finish()
        return torch.stack(outputs, dim=1)

    @property
    def query_decides(self) -> bool:
        """Whether a selection depends on the query and on earlier tokens alone."""
        return not getattr(self.state, "newest_counts", True)

    def expect_query(self, query: Callable[[], torch.Tensor]) -> None:
        """Keep what `query` makes, to be compared with the query that attention is handed (see `_compare`)."""
        self.expect_selection()
        self._expected = query()

    def forget_ahead(self) -> None:
        """See `ReadsAhead.forget_ahead`."""
        super().forget_ahead()
        self._expected = None

    @own_sums
    def read_ahead(self, query: Callable[[], torch.Tensor]) -> None:
        """Select and fetch beside what the model does now, if it is known that `query` makes the step's query.

        Parameters
        ----------
        query : callable
            Makes it: ``[batch, query heads, 1, width]``.
        """
        if self.reads_ahead:
            with outside_inference_mode():
                self.begin_ahead(lambda: self._claim_and_read(self._lanes(query()[:, :, 0])), query)

    def _claim_and_read(self, row: torch.Tensor) -> Read:
        """Select before the query's own token is stored, and bring what is missing."""
        self.claim()
        selection = self._select(row)
        return Read(selection, self.read(selection))

    def _select_and_read(self, row: torch.Tensor) -> Read:
        """Select, and bring what is missing or let attention do it: `row` is ``[lanes, group, width]``."""
        selection = self._select(row)
        return Read(selection, *self.read_or_resolve(selection))

    def _select(self, row: torch.Tensor) -> torch.Tensor:
        selection = self.state.select(row, self.position).contiguous()
        self._check_selection(selection)
        return selection

    def _compare(self, query: torch.Tensor) -> None:
        """If attention is handed what `expect_query` was told, captured steps read ahead (waits for the device)."""
        if self._expected is None:
            return
        self.reads_ahead = torch.equal(self._expected, query)
        if not self.reads_ahead:
            logger.debug(
                "%s: the query is not made as expected, so misses are fetched after keys and values",
                self.name,
            )

    def _check_selection(self, selection: torch.Tensor) -> None:
        """Hold a selector to its word: the shape always, the content, which the GPU would have to wait for, with `verify`."""
        shape = (self.buffer.lanes, self.settings.top_k)
        if selection.shape != shape or selection.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{self.name}: {self.selector!r} selected {selection.dtype} {list(selection.shape)}, must be int32 or int64 "
                f"{list(shape)}: lanes x top_k"
            )
        if not self.settings.verify:
            return
        own = int(self.position) // self.layout.tokens
        ordered = selection.sort(dim=1).values
        repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
        if repeated or int(selection.max()) > own or not bool((selection == own).any(1).all()):
            raise ValueError(
                f"{self.name}: {self.selector!r} must select different records up to the query's own, {own}, and that one in "
                f"every lane; it selected {selection.tolist()}"
            )

    def _lanes(self, query: torch.Tensor) -> torch.Tensor:
        """``[batch, query heads, width]`` -> ``[lanes, group, width]``."""
        return query.reshape(self.buffer.lanes, -1, query.shape[-1])
