"""What the layers of a cache hold: of a living one, and of one that is only imagined, on the meta device.

There is no second formula: an imagined cache is made of the same layers and grown by the same code, with tensors that have
shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .hosted_layer import HostedLayer, LayerSettings
from .models.family import Family, native_layers, new_layers
from .models.kv_shape import KvShape
from .padding import Padding
from .resident_layer import ResidentLayer
from .stats import Memory

_GROWTH_TOKENS = 1024


def with_room(tokens: int) -> int:
    """Tokens to make room for when `tokens` do not fit: an eighth more, at least 1024, so that growth is rare."""
    return tokens + max(_GROWTH_TOKENS, tokens // 8)


def whole_records(family: Family, tokens: int) -> int:
    """Tokens of the records that hold `tokens` tokens, at least as many records as a query reads."""
    return max(-(-tokens // family.page_size), family.top_k) * family.page_size


class Buffers(NamedTuple):
    """What layers keep on the device of what is on the host, per lane.

    Attributes
    ----------
    records : int
        Records of a hot buffer.
    dense : int or None
        First records of each dense layer; None where those are not on the host at all.
    """

    records: int
    dense: int | None = None


def memory_of(layers: list[Any], padding: Padding) -> Memory:
    """Where the bytes of these layers are."""
    hosted = [layer for layer in layers if isinstance(layer, HostedLayer) and layer.shape is not None]
    resident = [layer for layer in layers if isinstance(layer, ResidentLayer)]
    other = [layer for layer in layers if not isinstance(layer, HostedLayer | ResidentLayer)]
    masks = 0 if padding.allowed is None else padding.allowed.nbytes
    return Memory(
        buffer_bytes=sum(layer.buffer.buffer_nbytes for layer in hosted if not layer.dense),
        selector_bytes=sum(layer.state.nbytes for layer in hosted),
        table_bytes=sum(layer.table_nbytes for layer in hosted)
        + sum(layer.table_nbytes for layer in resident)
        + masks,
        native_bytes=sum(layer.buffer.buffer_nbytes for layer in hosted if layer.dense)
        + sum(layer.kv_nbytes for layer in resident)
        + sum(tensor.nbytes for layer in other for tensor in _tensors(layer)),
        host_bytes=sum(layer.host_nbytes for layer in hosted),
        host_reserved_bytes=sum(
            layer.host_reserved_nbytes for layer in layers if isinstance(layer, HostedLayer)
        ),
    )


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    return (value for value in vars(layer).values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Sizes:
    """What caches of one model and one set of settings take.

    Attributes
    ----------
    config : PreTrainedConfig
    family : Family
    settings : LayerSettings
    dtype : torch.dtype
        Of keys and values.
    """

    config: PreTrainedConfig
    family: Family
    settings: LayerSettings
    dtype: torch.dtype

    def memory(self, batch: int, tokens: int, capacity: int, buffers: Buffers) -> Memory:
        """What a cache holds after a first call.

        Parameters
        ----------
        batch, tokens : int
            Rows, and tokens of each.
        capacity : int
            Tokens that there is room for, in whole records (see `whole_records` and `with_room`).
        buffers : Buffers
        """
        padding = Padding()
        settings = replace(self.settings, device_buffer_records=buffers.records, dense_records=buffers.dense)
        layers = new_layers(self.config, self.family, settings, padding)
        self.family.connect(layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, HostedLayer | ResidentLayer):
                layer.growth_target = capacity
            _take(layer, self.family.kv_shape(index, hosted=True), batch, tokens, self.dtype)
        padding.reserve(batch, capacity, torch.device("meta"))
        return memory_of(layers, padding)

    def smallest(self, batch: int, capacity: int, may_host: bool = True) -> Memory:
        """What a cache takes when it is full and keeps as little on the device as it can.

        `may_host` says whether its dense layers may go to the host.
        """
        dense = 0 if may_host and self.family.dense else None
        return self.memory(batch, capacity, capacity, Buffers(self.family.top_k, dense))

    def largest_buffers(
        self, batch: int, capacity: int, device_bytes: int, hosted: bool | None = None
    ) -> Buffers | None:
        """What layers can keep on the device such that a full cache stays within `device_bytes` of its memory.

        A byte of a hot buffer beyond what a query reads saves reading the fifth of a byte per step at best (Quest misses 25%
        with a buffer of the budget, 7% with twice that); a byte of a dense layer is read in every step. So hot buffers shrink
        first, down to what a query reads. Only when that is not enough, dense layers go to the host, and keep what there is
        room for.

        Parameters
        ----------
        batch, capacity, device_bytes : int
        hosted : bool or None
            Whether dense layers are on the host: True, False, or None to decide.

        Returns
        -------
        Buffers or None
            No more than the history has records; None if even the least is too much.
        """
        least, every = self.family.top_k, max(self.family.top_k, capacity // self.family.page_size)

        def need(records: int, dense: int | None) -> int:
            return self.memory(batch, capacity, capacity, Buffers(records, dense)).device_bytes

        dense = every if hosted and self.family.dense else None
        if records := largest(lambda records: need(records, dense), least, every, device_bytes):
            return Buffers(records, dense)
        if hosted is False or not self.family.dense:
            return None
        kept = largest(lambda kept: need(least, kept - 1), 1, every + 1, device_bytes)
        return Buffers(least, kept - 1) if kept else None

    def streamed(self, batch: int, tokens: int, buffers: Buffers) -> int:
        """Bytes of dense layers that are on the host alone and that a step at `tokens` tokens reads over the link."""
        if buffers.dense is None:
            return 0
        shapes = [self.family.kv_shape(index, hosted=True) for index in self.family.dense]
        width = sum(shape.heads * (shape.key_width + shape.value_width) for shape in shapes)
        away = max(0, tokens - buffers.dense * self.family.page_size)
        return batch * away * width * self.dtype.itemsize

    def dynamic(self, batch: int, tokens: int) -> list[int]:
        """Bytes that each layer of a `DynamicCache` holds."""
        bytes_of: dict[tuple[Any, ...], int] = {}  # many layers are alike

        def held(index: int, layer: Any) -> int:
            shape = self.family.kv_shape(index, hosted=False)
            kind = (type(layer), getattr(layer, "sliding_window", None), shape)
            if kind not in bytes_of:
                _take(layer, shape, batch, tokens, self.dtype)
                bytes_of[kind] = sum(tensor.nbytes for tensor in _tensors(layer))
            return bytes_of[kind]

        return [held(index, layer) for index, layer in enumerate(native_layers(self.config))]


def largest(need: Callable[[int], int], least: int, most: int, limit: int) -> int:
    """The largest number from `least` to `most` whose need is within `limit`, 0 if none is.

    The need must grow with the number. It is nearly always a straight line, so every other guess is where that would meet
    the limit.
    """
    low, high = need(least), need(most)
    if low > limit:
        return 0
    if high <= limit:
        return most
    on_line = True
    while most - least > 1:
        guess = least + (limit - low) * (most - least) // (high - low) if on_line else (least + most) // 2
        guess = min(max(guess, least + 1), most - 1)
        needed = need(guess)
        if needed <= limit:
            least, low = guess, needed
        else:
            most, high = guess, needed
        on_line = not on_line
    return least


def _take(layer: Any, shape: KvShape, batch: int, tokens: int, dtype: torch.dtype) -> None:
    """Let a layer take tokens that have no content."""
    if not isinstance(layer, CacheLayerMixin):  # linear attention: a state that does not grow
        return

    def rows(heads: int, width: int) -> torch.Tensor:
        return torch.empty((batch, heads, tokens, width), dtype=dtype, device="meta")

    layer.update(rows(shape.heads, shape.key_width), rows(shape.heads, shape.value_width))
    if shape.index_width and hasattr(layer, "update_indexer"):
        layer.update_indexer(rows(1, shape.index_width)[:, 0])
    elif shape.index_width:
        layer.update_index(rows(1, shape.index_width))  # type: ignore[attr-defined]
