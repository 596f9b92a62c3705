"""Room for more tokens: host and device are asked for all layers before any grows, then it is made layer by layer."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch

from .change import Change
from .host_memory import available_host_memory, format_bytes
from .limits import Call, Growth, Limits, free_device_memory
from .models.dense import DenseLayer
from .models.family import connect, hosted_of, new_layers, own_of
from .padding import Padding
from .pinning_ahead import ALL_THREADS, FEW_THREADS, PinningAhead
from .resident_layer import ResidentLayer
from .sizes import Buffers, Sizes, memory_of, whole_records, with_room
from .stats import Memory
from .token_shape import TokenShape

logger = logging.getLogger(__name__)

_NEVER = 2**62


class Room:
    """How far the layers of a cache may grow, and their growth.

    When they grow, what they keep on the device gives way first: hot buffers shrink, and at last dense layers move to the host.

    Parameters
    ----------
    layers : list
        Those of the cache; dense ones that move to the host are replaced in it.
    change : Change
    sizes : Sizes
    limits : Limits
    padding : Padding
    host_dense_layers : bool or None
        Whether dense layers are on the host (see `HiSparseCache`).
    positions : int or None
        Tokens that the model was made for, if it says so.

    Attributes
    ----------
    hosted : list of HostedLayer
        The layers whose KV is on the host.
    limits : Limits
    ahead : PinningAhead
    pin_next_at : int
        Tokens from which on the next growth is pinned ahead.
    """

    def __init__(
        self,
        layers: list[Any],
        change: Change,
        sizes: Sizes,
        limits: Limits,
        padding: Padding,
        host_dense_layers: bool | None,
        positions: int | None,
    ) -> None:
        self.limits = limits
        self.ahead = PinningAhead()
        self.pin_next_at = _NEVER
        self._layers, self._change, self._padding = layers, change, padding
        self.hosted = hosted_of(layers)
        self._sizes = sizes
        self._host_dense_layers = host_dense_layers
        self._positions = positions

    def clone(self, layers: list[Any], change: Change, padding: Padding) -> Room:
        """The same for a copy of the cache."""
        other = copy.copy(self)
        other.ahead = PinningAhead()
        other._layers, other._change, other._padding = layers, change, padding
        other.hosted = hosted_of(layers)
        return other

    def close(self) -> None:
        """Let go of the layers."""
        self.ahead.wait()  # its thread stops at the piece it is at, and gives that back
        self._layers, self.hosted = [], []

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.hosted[0].capacity

    def make(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Let layers grow, each when its turn comes, for new tokens, of which these are the first hosted layer's.

        Parameters
        ----------
        keys, values : ``[batch, heads, T, width]``

        Raises
        ------
        MemoryError
            If host or device have too little; nothing is changed.
        """
        hosted = self.hosted
        batch, _, rows, _ = keys.shape
        tokens = hosted[0].get_seq_length() + rows
        room = hosted[0].room_for(keys, values)
        if tokens <= room:
            self._note(tokens)
            return
        self._note_positions(tokens)
        self.ahead.wait()
        if room:  # dense layers may have grown in a call that failed before the others did
            for layer in own_of(self._layers):
                if isinstance(layer, ResidentLayer):
                    layer.shrink(room)

        # Hosted layers grow in step and, in every supported model, have one shape.
        def asked(tokens: int, dense_on_host: bool) -> int:
            grown = hosted[0].host_bytes_for(tokens, keys, values) * len(hosted)
            moved = hosted[0].host_bytes_of(tokens, batch, keys, values) * len(self._to_move)
            return grown + moved * dense_on_host

        purpose = f"{tokens} tokens of {batch} row{'s' if batch > 1 else ''}"
        call = Call(batch, rows, keys.dtype, keys.device)
        growth = self.limits.growth(tokens, asked, self._held, call, purpose, self._dense_on_host)
        if not room:  # what an earlier request of another shape left
            for layer in own_of(self._layers):
                layer.release()
        self._allow(growth, tokens, call)
        wanted = [layer.wanted_for(growth.capacity, keys, values) for layer in self.hosted]
        self.ahead.start(wanted, keys.device, ALL_THREADS)

    def make_now(self, tokens: int, held: TokenShape) -> None:
        """Let all layers grow at once, if need be, for `tokens` more tokens like those `held` (MemoryError as in `make`)."""
        total = self.hosted[0].get_seq_length() + tokens
        if total <= self.capacity:
            self._note(total)
            return
        self.make(*held.blank(tokens))
        for layer in self._layers:
            layer.grow(total)

    def make_for_rows(self, batch: int, held: TokenShape) -> None:
        """Keep less on the device, before anything else changes, such that there is memory for `batch` rows.

        Parameters
        ----------
        batch : int
        held : TokenShape
            Of the first hosted layer, with fewer rows.

        Raises
        ------
        MemoryError
            If host or device have too little; nothing is changed.
        """
        self.ahead.wait()
        hosted, memory = self.hosted, self._held
        call = Call(batch, 1, held.dtype, held.device)
        purpose = f"{self.capacity} tokens of {batch} rows"
        buffers = self.limits.fitting(memory, call, self.capacity, purpose, self._dense_on_host)
        asked = 0
        new = sum(layer.host_bytes_for_rows(batch) for layer in hosted)
        if new:  # a layer's old memory goes when it has the new
            asked = new + hosted[-1].host_reserved_nbytes - memory.host_reserved_bytes
        if buffers.dense is not None:
            one = hosted[0].host_bytes_of(self.capacity, batch, *held.blank(1))
            asked += one * len(self._to_move)
        if asked > 0:
            self.limits.host.check(asked, memory, purpose)
        sparse = next(layer for layer in hosted if not layer.dense)
        fewer = min(buffers.records, sparse.buffer_records)
        self._keep(buffers._replace(records=fewer), call, self.capacity)

    def resize_buffers(self, records: int) -> None:
        """Let hot buffers have so many records per lane, now and whenever layers grow."""
        buffers = self.limits.buffers._replace(records=records)
        self.limits = replace(self.limits, buffers=buffers)
        with self._change:
            for layer in self.hosted:
                if not layer.dense:
                    layer.resize_buffer(records)

    def check_buffers(self, records: int) -> None:
        """Refuse hot buffers of so many records per lane that the devices of those held cannot have (MemoryError)."""
        held = [layer.buffer.data for layer in self.hosted if not layer.dense and layer.shape is not None]
        for device in {data.device for data in held}:
            here = [data for data in held if data.device == device]
            asked = sum(data.nbytes // data.shape[1] * (records - data.shape[1]) for data in here)
            free = free_device_memory(device) if device.type == "cuda" else available_host_memory()
            if asked > free:
                raise MemoryError(
                    f"resize_buffers: {records} records per lane need {format_bytes(asked)} more memory on {device}, "
                    f"{format_bytes(free)} is free: give fewer tokens"
                )

    def check_copy(self) -> None:
        """Refuse a copy of the cache that the host cannot hold (MemoryError)."""
        self.ahead.wait()  # what it takes is missing from what is available
        if self.limits.host.size is None:  # else the copy has the same limit to itself
            held = self._held
            self.limits.host.check(held.host_reserved_bytes, held, "a copy of the cache")

    # ------------------------------------------------------------------ how

    @property
    def _held(self) -> Memory:
        return memory_of(self._layers, self._padding)

    def _note(self, tokens: int) -> None:
        """There is room for `tokens` tokens: say so if they are too many for the model, and look ahead."""
        self._note_positions(tokens)
        if tokens >= self.pin_next_at:
            self._pin_next()

    def _note_positions(self, tokens: int) -> None:
        """Warn once of a history beyond the model's positions, as transformers does for `generate`."""
        most = self._positions
        if most is not None and tokens > most:
            self._positions = None
            logger.warning(
                "HiSparseCache: %d tokens are more than the model's max_position_embeddings=%d: it may answer worse, or fail",
                tokens,
                most,
            )

    def _pin_next(self) -> None:
        """Most of the room is used: begin to pin what the next growth takes, if there is host memory for it."""
        hosted = self.hosted
        if any(layer.shape is None for layer in hosted):
            return
        self.pin_next_at = _NEVER  # until the next growth
        target = whole_records(self._sizes.family, with_room(self.capacity + 1))
        asked = sum(layer.host_bytes_to_grow(target) for layer in hosted)
        if asked <= self.limits.host.left(self._held):
            wanted = [layer.wanted_to_grow(target) for layer in hosted]
            self.ahead.start(wanted, hosted[0].pool.device, FEW_THREADS)

    def _allow(self, growth: Growth, tokens: int, call: Call) -> None:
        """Let layers that must grow for `tokens` tokens do so; hot buffers give way first."""
        for layer in own_of(self._layers):
            layer.growth_target = growth.capacity
        self._keep(growth.buffers, call, growth.capacity)
        self.pin_next_at = growth.capacity - (growth.capacity - tokens) // 4

    def _keep(self, buffers: Buffers, call: Call, capacity: int) -> None:
        """Let layers keep so much on the device, beside room for `capacity` tokens."""
        with self._change:  # layers that share slots do so together
            for layer in self.hosted:
                if not layer.dense:
                    layer.resize_buffer(buffers.records)
                elif buffers.dense is not None:
                    layer.resize_buffer(buffers.dense)
        if buffers.dense is not None and self._to_move:
            self._move_dense_layers(buffers, call, capacity)

    @property
    def _to_move(self) -> list[ResidentLayer]:
        """The dense layers that may go to the host and are not there."""
        layers = [self._layers[index] for index in self._sizes.family.dense]
        return [layer for layer in layers if isinstance(layer, ResidentLayer)]

    @property
    def _dense_on_host(self) -> bool | None:
        """Whether the dense layers are on the host, None where that is to be decided."""
        on_host = any(layer.dense for layer in self.hosted)
        return True if on_host else self._host_dense_layers

    def _move_dense_layers(self, buffers: Buffers, call: Call, capacity: int) -> None:
        """Move dense layers to the host, for good."""
        sizes, family = self._sizes, self._sizes.family
        settings = replace(sizes.settings, dense_records=buffers.dense)
        fresh = new_layers(sizes.config, family, settings, self._padding)
        for layer in self._to_move:
            hosted: DenseLayer = fresh[layer.layer_idx]
            hosted.take_over(layer)
            with self._change:
                self._layers[layer.layer_idx] = hosted
                self.hosted = hosted_of(self._layers)
                connect(family, self._layers)
        streamed = replace(sizes, dtype=call.dtype).streamed(call.batch, capacity, buffers)
        logger.warning(
            "HiSparseCache: too little device memory for the dense layers (%s) beside the smallest hot buffers and room for %d "
            "tokens: they are on the host from now on. At so many tokens a step reads %s of them over the link, about %.1f ms at "
            "50 GB/s",
            ", ".join(map(str, family.dense)),
            capacity,
            format_bytes(streamed),
            1000 * streamed / 50e9,
        )
