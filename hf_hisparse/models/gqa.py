"""Grouped-query attention with a selector: a record is a page of tokens of one KV head, keys and values together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from hisparse_kernels.gqa_decode import gqa_decode
from hisparse_kernels.miss_plan import HostSource

from ..gradients import without_gradient
from ..hosted_layer import HostedLayer, LayerSettings
from ..masks import allowed_keys, valid_tokens
from ..modes import outside_inference_mode, own_sums
from ..padding import Padding
from ..records import RecordLayout
from ..selector import LayerShape, Selector, SelectorState
from ..side_stream import beside

logger = logging.getLogger(__name__)


class Read(NamedTuple):
    """What a query reads.

    Attributes
    ----------
    selection : int ``[lanes, k]``
    slots : int32 ``[lanes, k]``
    source : HostSource or None
        Where attention is to read what is missing, None where nothing is.
    """

    selection: torch.Tensor
    slots: torch.Tensor
    source: HostSource | None


class Ahead(NamedTuple):
    """A `Read` under way on the side stream.

    Attributes
    ----------
    query : callable
        What made the query: until `ready` its tensors must not be given back to the stream that they are of.
    ready : torch.cuda.Event or None
        None on a CPU.
    """

    read: Read
    query: Callable[[], torch.Tensor]
    ready: torch.cuda.Event | None


class GqaLayer(HostedLayer):
    """A hosted layer whose records a `Selector` chooses. Lane = batch row x KV head.

    Attributes
    ----------
    query_first : bool
        Whether the query of a captured step can be had before keys and values (see `hf_hisparse.query_first`).
    """

    state: SelectorState
    query_first = False
    _expected: torch.Tensor | None = None
    _ahead: Ahead | None = None

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
        as_ahead = self._is_expected(query)
        new = self.new_tokens()
        outputs = []
        for i in range(count):
            row = self._lanes(query[:, :, i])
            read = self._what_was_read(row, as_ahead)
            keys, values = new.keys[:, :, i].flatten(0, 1), new.values[:, :, i].flatten(0, 1)
            self.append(keys, values)
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
        """Keep what `query` makes, to be compared with the query that attention is handed (see `_is_expected`)."""
        self._expected = query()

    @own_sums
    def read_ahead(self, query: Callable[[], torch.Tensor]) -> None:
        """Select and fetch beside what the model does now, if it is known that `query` makes the step's query.

        On a GPU only while a step is captured: nothing is said to the allocator of what the side stream uses.

        Parameters
        ----------
        query : callable
            Makes it: ``[batch, query heads, 1, width]``.
        """
        if not self.query_first:
            return
        device = self.position.device
        side = beside(device) if device.type == "cuda" else nullcontext()
        with outside_inference_mode(), side as stream:
            read = self._claim_and_read(self._lanes(query()[:, :, 0]))
            self._ahead = Ahead(read, query, None if stream is None else stream.record_event())

    def forget_query(self) -> None:
        """Expect and read nothing any more: the call is over, or broke off."""
        self._expected = self._ahead = None

    def _claim_and_read(self, row: torch.Tensor) -> Read:
        """Select before the query's own token is stored, and bring what is missing."""
        self.claim()
        selection = self._select(row)
        return Read(selection, self.read(selection), None)

    def _what_was_read(self, row: torch.Tensor, as_ahead: bool) -> Read | None:
        """What was read ahead for the query; None if nothing was.

        With `as_ahead`, in the eager step before a capture, it is read now, by the kernels that the capture launches: so they are
        compiled.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._claim_and_read(row) if as_ahead else None
        if ahead.ready is not None:
            torch.cuda.current_stream(self.position.device).wait_event(ahead.ready)
        return ahead.read

    def _select_and_read(self, row: torch.Tensor) -> Read:
        """Select, and bring what is missing or let attention do it: `row` is ``[lanes, group, width]``."""
        selection = self._select(row)
        return Read(selection, *self.read_or_resolve(selection))

    def _select(self, row: torch.Tensor) -> torch.Tensor:
        selection = self.state.select(row, self.position).contiguous()
        self._check_selection(selection)
        return selection

    def _is_expected(self, query: torch.Tensor) -> bool:
        """Whether attention is handed what `expect_query` was told; if so, captured steps read ahead (waits for the device)."""
        if self._expected is None:
            return False
        self.query_first = torch.equal(self._expected, query)
        if not self.query_first:
            logger.debug(
                "%s: the query is not made as expected, so misses are fetched after keys and values",
                self.name,
            )
        return self.query_first

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
