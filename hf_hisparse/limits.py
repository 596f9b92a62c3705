"""What a cache may take of host and device memory: asked before anything grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch

from .host_memory import available_host_memory, format_bytes, parse_bytes
from .models.family import Family
from .needs import CONTEXT_BYTES, activation_bytes
from .sizes import Sizes, whole_records, with_room
from .stats import Memory


class HostLimit:
    """The most host memory that a cache may take: `size` bytes, None for what is available."""

    def __init__(self, size: int | str | None) -> None:
        self.size = None if size is None else parse_bytes(size, "host_memory")

    @property
    def reachable(self) -> int:
        """Bytes that a cache can hold at most."""
        return max(self.size or 0, available_host_memory())

    def left(self, held: Memory) -> int:
        """Bytes that a cache which holds so much may still take."""
        return available_host_memory() if self.size is None else self.size - held.host_reserved_bytes

    def check(self, asked: int, held: Memory, purpose: str) -> None:
        """Refuse `asked` bytes that are not left (MemoryError)."""
        left = max(0, self.left(held)) if asked > 0 else 0
        if asked <= left:
            return
        limit = "available" if self.size is None else f"left of host_memory={format_bytes(self.size)}"
        raise MemoryError(
            f"HiSparseCache: {purpose} need {format_bytes(asked)} more host memory, {format_bytes(left)} is {limit} "
            f"({format_bytes(held.host_reserved_bytes)} held already): lower the batch or the context, or raise host_memory "
            "if the machine has more"
        )


class Call(NamedTuple):
    """A call that makes a cache grow: `rows` new tokens in each of `batch` rows, of this type and on this device."""

    batch: int
    rows: int
    dtype: torch.dtype
    device: torch.device


class Growth(NamedTuple):
    """How far a cache grows: tokens that there is to be room for, and records of its hot buffers, per lane."""

    capacity: int
    records: int


class DeviceLimit:
    """The device memory that a cache may take, all of it: hot buffers, selector state, tables, and layers that stay there.

    Hot buffers get what the rest leaves, as long as there are records to put there: everything stays resident until the limit
    is reached, and when the rest grows beyond it, the buffers shrink.

    Parameters
    ----------
    size : int or str
        Bytes; "auto" is what is free beside the activations of a call.
    sizes : Sizes
    prefill_memory : int
        What a model that selects by itself may take for that.

    Raises
    ------
    ValueError
        If `size` is less than the smallest cache takes.
    """

    def __init__(self, size: int | str, sizes: Sizes, prefill_memory: int) -> None:
        self.size = None if size == "auto" else parse_bytes(size, "device_memory")
        self.sizes = sizes
        family = sizes.family
        selects = any(family.kv_shape(index, hosted=True).index_width for index in family.hosted)
        self.prefill_memory = prefill_memory if selects else 0
        least = sizes.smallest(1, whole_records(family, 1)).device_bytes
        if self.size is not None and self.size < least:
            raise ValueError(
                f"device_memory={size!r} is too little: one row of {whole_records(family, 1)} tokens takes "
                f"{format_bytes(least)} ({least} bytes) with the smallest hot buffer, {family.top_k} records per lane"
            )

    def bytes(self, held: Memory, call: Call, total: int) -> int:
        """The limit for a cache that holds so much, in a call that brings it to `total` tokens."""
        if self.size is not None:
            return self.size
        if call.device.type != "cuda":
            return held.device_bytes + available_host_memory() // 2
        free = torch.cuda.mem_get_info(call.device)[0]
        unused = torch.cuda.memory_reserved(call.device) - torch.cuda.memory_allocated(call.device)
        activations = activation_bytes(
            self.sizes.config, call.batch, call.rows, total, call.dtype, self.prefill_memory
        )
        return (
            held.device_bytes + free + unused - (activations - CONTEXT_BYTES)
        )  # the context is there already

    def records(self, held: Memory, call: Call, capacity: int) -> int:
        """Records per lane of the hot buffers of a cache with room for `capacity` tokens, 0 if there is too little memory."""
        sizes = replace(self.sizes, dtype=call.dtype)
        return sizes.most_records(call.batch, capacity, self.bytes(held, call, capacity))

    def refuse(self, held: Memory, call: Call, capacity: int, purpose: str) -> NoReturn:
        """Say what is missing for `capacity` tokens (MemoryError)."""
        least = replace(self.sizes, dtype=call.dtype).smallest(call.batch, capacity)
        name = "is free for the cache" if self.size is None else "is device_memory"
        raise MemoryError(
            f"HiSparseCache: {purpose} need at least {format_bytes(least.device_bytes)} of device memory, "
            f"{format_bytes(self.bytes(held, call, capacity))} {name}: {format_bytes(least.buffer_bytes)} hot buffers of "
            f"{self.sizes.family.top_k} records per lane, {format_bytes(least.selector_bytes)} selector state, "
            f"{format_bytes(least.native_bytes)} layers that stay there, {format_bytes(least.table_bytes)} tables: raise "
            "device_memory, or lower the batch or the context"
        )


@dataclass(frozen=True)
class Limits:
    """What decides how far a cache may grow.

    Attributes
    ----------
    host : HostLimit
    device : DeviceLimit or None
        None for hot buffers of `buffer_records` records, whatever else there is.
    family : Family
    buffer_records : int
    """

    host: HostLimit
    device: DeviceLimit | None
    family: Family
    buffer_records: int

    def growth(
        self, tokens: int, asked: Callable[[int], int], held: Memory, call: Call, purpose: str
    ) -> Growth:
        """How far to grow for `tokens` tokens: with room for more while that can be had.

        Parameters
        ----------
        tokens : int
        asked : callable
            Host bytes that so many tokens take beyond what is held.
        held : Memory
        call : Call
        purpose : str
            What an error says they are for.

        Raises
        ------
        MemoryError
            If host or device have too little for the tokens themselves.
        """
        room, least = (whole_records(self.family, count) for count in (with_room(tokens), tokens))
        records = self._records(held, call, room)
        if records and asked(room) <= self.host.left(held):
            return Growth(room, records)
        self.host.check(asked(least), held, purpose)
        return Growth(least, self.records(held, call, least, purpose))

    def records(self, held: Memory, call: Call, capacity: int, purpose: str) -> int:
        """Records of hot buffers beside room for `capacity` tokens (MemoryError if the device has too little)."""
        records = self._records(held, call, capacity)
        if self.device is not None and not records:
            self.device.refuse(held, call, capacity, purpose)
        return records

    def _records(self, held: Memory, call: Call, capacity: int) -> int:
        return self.buffer_records if self.device is None else self.device.records(held, call, capacity)

    def check_foreseen(
        self, layer_idx: int, widths: tuple[int, int, int], devices: set[torch.device]
    ) -> None:
        """A limit of device memory counts on what can be known beforehand.

        Parameters
        ----------
        layer_idx : int
        widths : tuple
            KV heads, key width and value width of the layer's first tokens.
        devices : set
            Of the layers so far.

        Raises
        ------
        ValueError
            If these are not the widths that the model's configuration gives, or free memory is asked of several devices.
        """
        if self.device is None:
            return
        foreseen = self.family.kv_shape(layer_idx, hosted=True)[:3]
        if widths != foreseen:
            raise ValueError(
                f"HiSparseCache, layer {layer_idx}: keys and values have (heads, key width, value width) {widths}, where the "
                f"model's configuration says {foreseen}, which device_memory counts on: give device_buffer_tokens instead"
            )
        if self.device.size is None and len(devices) > 1:
            raise ValueError(
                f"HiSparseCache: device_memory='auto' is for a model on one GPU, this one is on "
                f"{', '.join(sorted(map(str, devices)))}: give a size, for all of them together"
            )
