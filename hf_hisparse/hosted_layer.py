"""One hosted layer's life: append, resolve, and all that a cache must do between."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hisparse_kernels.fetch_ahead import fetch_ahead
from hisparse_kernels.miss_plan import HostSource

from .history_stream import HistoryStream
from .host_memory import PinnedArea, host_area, whole_pages
from .host_pool import HostPool
from .hot_buffer import HotBuffer
from .layer_history import LayerHistory, check_recent
from .padding import Padding
from .pinning_ahead import Wanted
from .read_ahead import ReadsAhead
from .records import RecordLayout, chunks
from .rows import RearrangedRows, lanes_of
from .selector import LayerShape
from .stats import LayerStats
from .trace import LayerTrace
from .versions import new_version

LAYER_ATTRIBUTE = "_hisparse_layer"  # how the returned keys tell the attention function where they come from
# What a model may ask of its attention that changes the result and that decode over slots does not compute.
UNSUPPORTED_ARGUMENTS: tuple[str, ...] = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "output_attentions",
    "sliding_window",
)
# Attention that reads the host itself computes while it waits for the link; up to so many lanes what it does beside costs more.
FEW_LANES = 32


@dataclass(frozen=True)
class LayerSettings:
    """What all hosted layers of a cache share.

    Attributes
    ----------
    top_k : int
        Records that one query reads, per lane.
    device_buffer_records : int
        Slots per lane, to begin with.
    decode_rows : int
        Most new tokens per row of a decode call.
    verify : bool
        Compare each slot that is read with the host.
    reserve_bytes : int
        Address space of a layer's host pool.
    dense_records : int or None
        Of each dense layer that is hosted, so many first records per lane stay on the device, to begin with; None leaves
        them all there.
    """

    top_k: int
    device_buffer_records: int
    decode_rows: int
    verify: bool
    reserve_bytes: int
    dense_records: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class NewTokens:
    """Keys and values that `update` took and attention has not read yet."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int


class HostedLayer(RearrangedRows, ReadsAhead, CacheLayerMixin):
    """A cache layer whose main KV lives on the host, with a hot buffer on the device.

    `update` returns only the new rows; the attention function finds this layer through an attribute of the key tensor
    and calls `attend`, which each family of models implements with the parts given here.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    _layer_type = None
    obstacle: str | None = None  # why a decode step cannot be captured in a CUDA graph
    dense = False  # whether it reads everything
    model_selects = False  # whether the selection comes from the model
    insists_on_mask = (
        False  # whether the model makes a mask for its selection in every call, and for nothing else
    )
    # What `generate` hands to every step although the model reads it in a call with images alone.
    unread_inputs: tuple[str, ...] = ()
    unsupported_arguments = UNSUPPORTED_ARGUMENTS
    alternative = "DynamicCache"  # what serves a model that asks for such an argument
    trace: LayerTrace | None = None  # of a run that is being recorded

    def __init__(self, layer_idx: int, settings: LayerSettings, padding: Padding) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.settings = settings
        self.padding = padding
        self.stream = HistoryStream([self])  # until the cache gives it the one that all its layers share
        self.version = new_version()
        self.shape: LayerShape | None = None
        self.steps = 0
        self.growth_target = 0  # tokens that the cache wants room for when the layer must grow
        self.buffer_records = settings.device_buffer_records  # records of the hot buffer, per lane
        self._length = 0
        self._new: NewTokens | None = None
        self._stored = False  # whether something of the new tokens is where it cannot be taken back from
        self._grows = False  # also after growth that was broken off: the next one completes it
        self._area: PinnedArea | None = None

    # The state of an initialised layer.
    layout: RecordLayout
    pool: HostPool
    buffer: HotBuffer
    state: Any  # a `SelectorState`, or what else of that life cycle a family selects from
    position: torch.Tensor  # int64 [1] on the device: where the next token of a decode step goes

    # ------------------------------------------------------------------ the cache contract

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Build pool, buffer and selector state for keys and values of this shape, on their device."""
        shape, layout = self._shape_of(key_states), self.layout_for(key_states, value_states)
        device = shape.device
        if not self._fits(shape, layout):
            area = self._own_area(device)
            self.layout = layout
            self.pool = HostPool(shape.batch, shape.heads // layout.heads, layout, device, area)
            self.buffer = self.new_buffer(shape, layout)
            self.state = self.new_state(shape)
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            self.version = new_version()
        self.shape = shape
        self.is_initialized = True

    @abstractmethod
    def layout_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> RecordLayout:
        """The record layout for keys and values ``[batch, heads, T, width]`` of these widths."""

    def new_buffer(self, shape: LayerShape, layout: RecordLayout) -> HotBuffer:
        """The empty hot buffer of this layer."""
        lanes, k = shape.lanes // layout.heads, self.settings.top_k
        return HotBuffer(lanes, self.buffer_records, layout, shape.device, selected=k)

    @abstractmethod
    def new_state(self, shape: LayerShape) -> Any:
        """The empty selector state of this layer."""

    def streams(self, rows: int) -> bool:
        """Whether a call of so many new tokens per row brings the whole history at once."""
        return rows > self.settings.decode_rows

    @abstractmethod
    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        base: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the new tokens over all that is held.

        Parameters
        ----------
        module : torch.nn.Module
            The attention module that asks.
        query : ``[batch, query heads, S, width]``
        mask : bool or additive ``[batch, 1, S, T]`` or None
        base : callable
            The attention that the model would use without HiSparse.
        kwargs : dict
            What else the model passes to its attention.

        Returns
        -------
        ``[batch, S, query heads, value width]``, and attention weights or None.
        """

    def check_padding(self, valid: torch.Tensor) -> None:
        """Refuse padding that could not be served (ValueError): `valid` bool ``[batch, tokens]`` of a cache's first call."""

    @property
    def name(self) -> str:
        """How error messages call this layer."""
        return f"HiSparse, layer {self.layer_idx}"

    def _fits(self, shape: LayerShape, layout: RecordLayout) -> bool:
        """Whether what a reset left behind can serve this shape."""
        return shape == self.shape and layout == self.layout and self.pool.host_batch == shape.batch

    def _shape_of(self, key_states: torch.Tensor) -> LayerShape:
        batch, heads, _, key_width = key_states.shape
        return LayerShape(self.layer_idx, batch, heads, key_width, key_states.dtype, key_states.device)

    def room_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Tokens of this shape that there is room for."""
        if self._length:
            return self.capacity
        shape, layout = self._shape_of(key_states), self.layout_for(key_states, value_states)
        return self.capacity if self.shape is not None and self._fits(shape, layout) else 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens; return them alone, for the attention function to find this layer by.

        Parameters
        ----------
        key_states, value_states : ``[batch, heads, T, width]``

        Raises
        ------
        MemoryError
            If the host cannot hold them; the layer stays as it was.
        """
        if not self._length:
            self.lazy_initialization(key_states, value_states)
        self.grow(self._length + key_states.shape[2])
        keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
        setattr(keys, LAYER_ATTRIBUTE, self)
        self._new, self._stored = NewTokens(keys, values, self._length), False
        self._length += key_states.shape[2]
        return keys, values

    @property
    def interrupted(self) -> bool:
        """Whether tokens were taken that attention never read."""
        return self._new is not None

    @property
    def stored(self) -> int | None:
        """Tokens held without new ones of which nothing was stored; None if attention was interrupted while it stored them."""
        if self._new is None:
            return self._length
        return None if self._stored else self._new.start

    def take_back(self, tokens: int) -> None:
        """Forget new tokens of which nothing was stored: only the first `tokens` are left."""
        self._length, self._new = tokens, None

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a call with `query_length` new tokens sees, and the position of the first."""
        return (self.capacity if self.padding.capturing else self._length + int(query_length)), 0

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return min(self.pool.records.shape[0], self.buffer.page_table.shape[1]) * self.layout.tokens

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def host_bytes_for(self, tokens: int, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Host bytes that holding `tokens` tokens of this shape takes, beyond what is held already."""
        wanted = self.host_bytes_of(tokens, self._host_batch(key_states), key_states, value_states)
        return max(0, wanted - self.host_reserved_nbytes)

    def _host_batch(self, key_states: torch.Tensor) -> int:
        return self.pool.host_batch if self._length else key_states.shape[0]

    def host_bytes_of(
        self, tokens: int, rows: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> int:
        """Host bytes of a layer with room for `tokens` tokens of this shape in each of `rows` rows."""
        layout = self.layout_for(key_states, value_states)
        lanes = rows * key_states.shape[1] // layout.heads
        return whole_pages(layout.count(tokens) * lanes * layout.nbytes)

    def wanted_for(self, tokens: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Wanted:
        """What is to be pinned to hold `tokens` tokens of this shape."""
        size = self.host_bytes_of(tokens, self._host_batch(key_states), key_states, value_states)
        return Wanted(self._own_area(key_states.device).backing, size)

    def wanted_to_grow(self, tokens: int) -> Wanted:
        """The same for tokens like those held."""
        return Wanted(
            self.pool.area.backing, whole_pages(self.layout.count(tokens) * self.pool.record_nbytes)
        )

    def host_bytes_to_grow(self, tokens: int) -> int:
        """Host bytes that holding `tokens` tokens like those held takes, beyond what is held already."""
        wanted = self.wanted_to_grow(tokens)
        return max(0, wanted.size - wanted.backing.size)

    def host_bytes_for_rows(self, batch: int) -> int:
        """Host bytes that a layer with `batch` rows takes, 0 if it needs no other memory than it has."""
        if not self._length or batch <= self.pool.host_batch:
            return 0
        return whole_pages(self.pool.nbytes_for(batch))

    def _own_area(self, device: torch.device) -> PinnedArea:
        if self._area is None:
            self._area = host_area(self.settings.reserve_bytes, device)
        return self._area

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` tokens (MemoryError if the host cannot hold them; the layer stays as it was)."""
        needed = self.layout.count(tokens)
        if needed <= min(self.pool.capacity, self.buffer.page_table.shape[1]) and not self._grows:
            return
        # More than is needed now, so that growth is rare; no less than the pool has, which grows first.
        capacity = max(self.layout.count(max(tokens, self.growth_target)), self.settings.top_k)
        capacity = max(capacity, self.pool.capacity)
        self._grows = True
        self.version = new_version()  # before anything moves
        self.pool.grow(capacity)
        self.buffer.grow(capacity)
        self.state.grow(capacity)
        self._grows = False

    def resize_buffer(self, records: int) -> None:
        """Let the hot buffer have `records` slots per lane, those of the most recently used records among them."""
        if self.shape is not None and records != self.buffer_records:
            self.version = new_version()
            self.buffer.resize(records)
        self.buffer_records = records

    def release(self) -> None:
        """Give back the device memory that a reset left behind."""
        self.shape, self.is_initialized = None, False
        for name in ("pool", "buffer", "state", "position"):
            vars(self).pop(name, None)

    def close(self) -> None:
        """Give back all memory, pinned host memory at once."""
        self.release()
        if self._area is not None:
            self._area.close()
            self._area = None

    # ------------------------------------------------------------------ parts of attention

    def new_tokens(self) -> NewTokens:
        """What `update` took last.

        Raises
        ------
        RuntimeError
            If attention has read it already.
        """
        if self._new is None:
            raise RuntimeError(
                f"{self.name}: attention asks for keys that another layer has consumed; models whose layers share keys "
                "and values are not supported: use DynamicCache for them"
            )
        return self._new

    def history(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, the new ones included: ``[batch, heads, T, width]`` on the device."""
        new = self.new_tokens()
        if new.start == 0:
            return new.keys, new.values
        full = []
        for rows in (new.keys, new.values):
            out = rows.new_empty((*rows.shape[:2], self._length, rows.shape[3]))
            out[:, :, new.start :] = rows
            full.append(out)
        with self.stream.records(self, self.layout.count(new.start)) as records:
            self.pool.unpack_tokens(records, full[0][:, :, : new.start], full[1][:, :, : new.start])
        return full[0], full[1]

    def note_padding(self, valid: torch.Tensor | None) -> None:
        """Remember which of the new tokens are padding: `valid` bool ``[batch, new tokens]``, None without a mask."""
        self._stored = True
        start = self.new_tokens().start
        self.padding.note(start, self._length, valid, self.capacity)

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new tokens of a prefill to the host: `keys`, `values` ``[batch, heads, T, width]``, the whole history."""
        self._stored = True
        first = self.new_tokens().start // self.layout.tokens
        tail = slice(first * self.layout.tokens, None)
        self.pool.write(first, keys[:, :, tail], values[:, :, tail])

    def warm(self, selection: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the hot buffer after a prefill with what the last query selected, then the newest, off the device copy."""
        records = self.choose(selection)
        self.buffer.fill(records, self.layout.pack_selected(keys, values, records))
        self.position.fill_(self._length)

    def put(self, history: LayerHistory) -> None:
        """Take the first tokens, as a prefill would leave them.

        Raises
        ------
        ValueError
            If `recent` does not suit the hot buffer (see `check_recent`).
        """
        self.update(history.keys, history.values)
        lanes, slots = self.pool.batch * self.pool.heads, self.buffer.data.shape[1]
        recent, last = history.recent, self.layout.count(self._length) - 1
        if recent is None:
            recent = torch.full((lanes, 1), last, device=self.position.device)
        check_recent(recent, lanes, slots, last + 1, self._length % self.layout.tokens > 0, self.name)
        if history.indexer_keys is not None:
            self.state.write(history.indexer_keys, 0)
        self.store(history.keys, history.values)
        self.state.extend(history.keys, 0, None)
        records = self.choose(recent)
        if records.shape[1] <= last:  # not all are resident, so the order counts
            records[:, -recent.shape[1] :] = recent
        count, heads = records.shape[1], self.pool.heads
        for row in range(self.pool.batch):  # all rows at once would need the buffer's memory twice more
            own, its_lanes = slice(row, row + 1), slice(row * heads, (row + 1) * heads)
            content = self.layout.pack_selected(history.keys[own], history.values[own], records[its_lanes])
            self.buffer.data[its_lanes, :count] = content
        self.buffer.fill(records, self.buffer.data[:, :count])
        self.position.fill_(self._length)
        self.finish()

    def choose(self, selection: torch.Tensor) -> torch.Tensor:
        """The records to fill the hot buffer with after a prefill (see `HotBuffer.choose`)."""
        if self.trace is not None:
            self.trace.prefill(selection, self._length)
        return self.buffer.choose(selection, self.layout.count(self._length))

    def append(self, keys: torch.Tensor, values: torch.Tensor, claimed: bool = False) -> None:
        """Store the token at `position`, ``[lanes, width]``; `claimed` if that was done for it and a selection read since."""
        self._stored = True
        self.pool.wait()
        self.buffer.append(keys, values, self.position, self.pool, claimed)

    def claim(self) -> None:
        """Give the record of the token at `position` its slot, so that what its query reads can be brought before `append`."""
        self._stored = True
        self.pool.wait()
        self.buffer.claim(self.position, self.pool)

    def resolve(self, selection: torch.Tensor) -> tuple[torch.Tensor, HostSource]:
        """The slots of the records that the query at `position` reads, int32 ``[lanes, k]``, and where the missing ones are."""
        if self.trace is not None:
            self.trace.step(selection, self.position)
        slots = self.buffer.resolve(selection, self.position)
        source = HostSource(self.pool.records, self.pool.host_rows, self.buffer.page_table, self.buffer.plan)
        return slots, source

    def read(self, selection: torch.Tensor) -> torch.Tensor:
        """Make the records that the query at `position` reads resident; their slots, int32 ``[lanes, k]``."""
        slots, source = self.resolve(selection)
        fetch_ahead(selection, slots, source, self.buffer.data)
        return slots

    def read_or_resolve(self, selection: torch.Tensor) -> tuple[torch.Tensor, HostSource | None]:
        """The slots, and where attention is to read what is missing; with few lanes all is brought first: faster then."""
        if selection.shape[0] <= FEW_LANES:
            return self.read(selection), None
        return self.resolve(selection)

    def verify(self, selection: torch.Tensor, slots: torch.Tensor) -> None:
        """With the setting `verify`, compare every slot that was read with its host record."""
        if self.settings.verify:
            self._verify(selection, slots)

    def advance(self) -> None:
        """Go on to the next token of a decode call."""
        self.position.add_(1)
        self.steps += 1

    def replayed(self) -> None:
        """A captured decode step of one token was replayed: note what it did not do in Python."""
        self._length += 1
        self.steps += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens and decode steps, all that a decode step changes in Python."""
        return self._length, self.steps

    def restore(self, counts: tuple[int, ...]) -> None:
        """Back to `counts`: a capture runs nothing."""
        self._length, self.steps = counts
        self._new = None

    def finish(self) -> None:
        """Attention has read the new tokens."""
        self._new = None

    def _verify(self, selection: torch.Tensor, slots: torch.Tensor) -> None:
        """Compare every slot just handed out with its host record, bit for bit."""
        self.pool.synchronize()
        position = int(self.position)
        size = self.layout.tokens
        lanes = selection.shape[0]
        heads = lanes // self.pool.batch
        lane, at = ((selection >= 0) & (slots >= 0)).nonzero(as_tuple=True)
        if not lane.numel():
            return
        record, slot = selection[lane, at].long(), slots[lane, at].long()
        row = self.pool.host_rows[lane // heads, record].long()
        host = self.pool.records[record.cpu(), (row * heads + lane % heads).cpu()].to(slots.device)
        device = self.buffer.data[lane, slot]
        written = (record[:, None] * size + torch.arange(size, device=record.device)) <= position
        for one, other in zip(
            self.layout.unpack(host[:, None], host.shape[0]),
            self.layout.unpack(device[:, None], host.shape[0]),
            strict=True,
        ):
            same = one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
            wrong = (~same.all(-1) & written[:, None]).flatten(1).any(1).nonzero()
            if len(wrong):
                bad = int(wrong[0])
                raise RuntimeError(
                    f"verify: layer {self.layer_idx}, lane {int(lane[bad])}, record {int(record[bad])}: slot "
                    f"{int(slot[bad])} does not hold what the host pool holds"
                )

    # ------------------------------------------------------------------ all else a cache can be asked

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (see `HiSparseCache.crop`)."""
        removed = -int(tokens_to_remove)
        if removed <= 0 or not self._length:
            return
        self._length = max(0, self._length - removed)
        self.buffer.forget(self.layout.count(self._length))
        self.position.fill_(self._length)
        if self._length % self.layout.tokens:  # the last record is filling again
            self.pool.wait()
            self.pool.own(self._length // self.layout.tokens)
        self.select_afresh(
            self._length, self._length, self.padding.between(0, self._length, self.position.device)
        )
        if self.trace is not None:
            self.trace.crop(self._length)

    def select_afresh(self, first: int, stop: int, valid: torch.Tensor | None) -> None:
        """Let the selector forget all from the record of token `first` on, and take its tokens before `stop` again.

        `valid` is bool ``[batch, stop]``, False for padding, or None when there is none.
        """
        size = self.layout.tokens
        begun, count = first // size, self.layout.count(stop)
        self.state.crop(begun * size)
        if self.model_selects or begun == count:  # a model's own selection is not made of these keys
            return
        self.pool.wait()
        for low, high in chunks(count - begun, self.pool.record_nbytes):
            keys, _ = self.layout.unpack(self.pool.read_range(begun + low, begun + high), self.pool.batch)
            tokens = slice((begun + low) * size, min((begun + high) * size, stop))
            keys = keys[:, :, : tokens.stop - tokens.start]
            self.state.extend(keys, tokens.start, None if valid is None else valid[:, tokens])

    def rearrange(self, rows: torch.Tensor) -> None:
        """Let batch row `i` hold what row ``rows[i]`` held (int64 ``[new batch]``)."""
        if not self._length or self.shape is None:
            return
        rows = rows.to(self.shape.device)
        batch = rows.numel()
        self.pool.wait()
        grows = batch > self.pool.host_batch
        area = host_area(self.settings.reserve_bytes, self.shape.device) if grows else self.pool.area
        self.pool.rearrange(rows, self.layout.count(self._length), area)
        self._area = area
        if self._length % self.layout.tokens:
            self.pool.own(self._length // self.layout.tokens)
        lanes = lanes_of(rows, self.pool.heads)
        self.buffer.rearrange(lanes)
        self.state.rearrange(lanes)
        if batch != self.shape.batch:
            self.shape = replace(self.shape, batch=batch)
            self.version = new_version()

    @property
    def held_rows(self) -> int:
        """Batch rows held, 0 before the first token."""
        return 0 if self.shape is None else self.shape.batch

    def reset(self) -> None:
        """Forget everything; pinned memory and the hot buffer stay for the next use."""
        self._length = 0
        self._new = None
        self.steps = 0
        if self.is_initialized:
            self.pool.reset()
            self.buffer.reset()
            self.state.crop(0)
            self.position.zero_()
            self.is_initialized = False

    def clone(self, padding: Padding) -> HostedLayer:
        """An independent copy, with pinned memory of its own and the copy's `padding`."""
        other = copy.copy(self)
        other.padding = padding
        other.trace = None
        other.reads_ahead = False  # not known of its graphs
        if not self._length or self.shape is None:
            other.release()  # what a reset left behind is this layer's alone
            other._area = None
            return other
        other._area = host_area(self.settings.reserve_bytes, self.shape.device)
        other.pool = self.pool.clone(self.layout.count(self._length), other._area)
        other.buffer = self.buffer.clone()
        other.state = self.state.clone()
        other.position = self.position.clone()
        other.version = new_version()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> HostedLayer:
        raise TypeError(
            f"{self.name}: a layer of a HiSparseCache shares its memory with others and cannot be copied alone: copy the whole "
            "cache, copy.deepcopy(cache)"
        )

    def saved(self) -> dict[str, torch.Tensor]:
        """What cannot be made again: the records, and the selector state.

        Raises
        ------
        ValueError
            If the selector state cannot be saved.
        """
        used = self.layout.count(self._length)
        if not hasattr(self.state, "saved"):
            raise ValueError(
                f"{self.name}: a {type(self.state).__name__} cannot be saved: it needs the methods saved and load of "
                "hf_hisparse.SelectorState"
            )
        state = {f"state.{name}": tensor for name, tensor in self.state.saved(used).items()}
        return {"records": self.pool.saved(used), **state}

    def load(
        self, key_states: torch.Tensor, value_states: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Take what `saved` gave, of tokens of these shapes; the newest records become resident."""
        self.update(key_states, value_states)
        self.finish()
        self.pool.load(tensors["records"])
        state = {name: tensor for name, tensor in tensors.items() if name.startswith("state.")}
        self.state.load(
            {name.removeprefix("state."): tensor.to(key_states.device) for name, tensor in state.items()}
        )
        self.position.fill_(self._length)
        lanes = self.pool.batch * self.pool.heads
        nothing = torch.full((lanes, 1), -1, dtype=torch.int64, device=key_states.device)
        newest = self.buffer.choose(nothing, self.layout.count(self._length))
        self.buffer.fill(newest, self.pool.read(newest.int()))

    def stats(self) -> LayerStats:
        """What decoding has read and moved so far (waits for the device)."""
        if not self.is_initialized:
            return LayerStats(self.layer_idx)
        read, missed = self.buffer.totals()
        return LayerStats(self.layer_idx, self.steps, read, missed, self.layout.nbytes)

    @property
    def table_nbytes(self) -> int:
        """Device bytes of the bookkeeping."""
        return self.buffer.table_nbytes + self.pool.host_rows.nbytes + self.position.nbytes

    @property
    def host_nbytes(self) -> int:
        """Host bytes in use."""
        return self.layout.count(self._length) * self.pool.record_nbytes

    @property
    def host_reserved_nbytes(self) -> int:
        """Host bytes held."""
        return 0 if self._area is None else self._area.size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layer_idx}, tokens={self._length})"
