"""What the layers of a cache hold: of a living one, and of one that is only imagined, on the meta device.

There is no second formula: an imagined cache is made of the same layers and grown by the same code, with tensors that have
shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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


def memory_of(layers: list[Any], padding: Padding) -> Memory:
    """Where the bytes of these layers are."""
    hosted = [layer for layer in layers if isinstance(layer, HostedLayer) and layer.shape is not None]
    resident = [layer for layer in layers if isinstance(layer, ResidentLayer)]
    other = [layer for layer in layers if not isinstance(layer, HostedLayer | ResidentLayer)]
    masks = 0 if padding.allowed is None else padding.allowed.nbytes
    return Memory(
        buffer_bytes=sum(layer.buffer.buffer_nbytes for layer in hosted),
        selector_bytes=sum(layer.state.nbytes for layer in hosted),
        table_bytes=sum(layer.table_nbytes for layer in hosted)
        + sum(layer.table_nbytes for layer in resident)
        + masks,
        native_bytes=sum(layer.kv_nbytes for layer in resident)
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

    def memory(self, batch: int, tokens: int, capacity: int, records: int) -> Memory:
        """What a cache holds after a first call.

        Parameters
        ----------
        batch, tokens : int
            Rows, and tokens of each.
        capacity : int
            Tokens that there is room for, in whole records (see `whole_records` and `with_room`).
        records : int
            Records of a hot buffer, per lane.
        """
        padding = Padding()
        settings = replace(self.settings, device_buffer_records=records)
        layers = new_layers(self.config, self.family, settings, padding)
        self.family.connect(layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, HostedLayer | ResidentLayer):
                layer.growth_target = capacity
            _take(layer, self.family.kv_shape(index, hosted=True), batch, tokens, self.dtype)
        padding.reserve(batch, capacity, torch.device("meta"))
        return memory_of(layers, padding)

    def smallest(self, batch: int, capacity: int) -> Memory:
        """What a cache takes with the smallest hot buffer, when it is full."""
        return self.memory(batch, capacity, capacity, self.family.top_k)

    def most_records(self, batch: int, capacity: int, device_bytes: int) -> int:
        """The largest hot buffer, in records per lane, with which a cache stays within `device_bytes` of device memory.

        No more than the history has records; 0 if even the records of one query are too many.
        """

        def need(records: int) -> int:
            return self.memory(batch, capacity, capacity, records).device_bytes

        least, most = self.family.top_k, max(self.family.top_k, capacity // self.family.page_size)
        return largest(need, least, most, device_bytes)

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
