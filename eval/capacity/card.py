"""Which batch of a cache fits into a card's memory."""

from __future__ import annotations

from dataclasses import dataclass

from eval.decoding import Run
from hf_hisparse.models.family import Family
from hf_hisparse.needs import CONTEXT_BYTES, activation_bytes
from hf_hisparse.sizes import Buffers, Sizes, largest, whole_records, with_room
from hf_hisparse.stats import Memory


@dataclass(frozen=True)
class Card:
    """Which batch of a cache fits.

    Attributes
    ----------
    sizes : Sizes
    device, host : int
        Bytes for the cache beside weights, and of the host.
    most : int
        Rows that a batch has at most.
    """

    sizes: Sizes
    device: int
    host: int
    most: int

    @property
    def family(self) -> Family:
        """Of the model."""
        return self.sizes.family

    def beside(self, batch: int, room: int) -> int:
        """Bytes that decoding takes beside the cache, or filling it: a few copies of one row of one layer."""
        decoding = activation_bytes(self.sizes.config, batch, 1, 1, self.sizes.dtype)
        return max(decoding, CONTEXT_BYTES + 3 * max(self.sizes.dynamic(1, room)))

    def batch(self, run: Run) -> int:
        """The largest for this cache and context, 0 for none."""
        most = 1 if run.cache == "offloaded" else self.most
        on_device = largest(lambda batch: self._on_device(run, batch), 1, most, self.device)
        return min(on_device, largest(lambda batch: self._on_host(run, batch), 1, most, self.host))

    def _on_device(self, run: Run, batch: int) -> int:
        beside = self.beside(batch, run.room)
        if run.cache.startswith("hisparse"):
            return beside + self._hisparse(run, batch).device_bytes
        layers = self.sizes.dynamic(batch, run.room)
        held = {"dynamic": sum(layers) + max(layers), "static": sum(layers), "offloaded": 3 * max(layers)}
        return beside + held[run.cache]

    def _on_host(self, run: Run, batch: int) -> int:
        if run.cache.startswith("hisparse"):
            return self._hisparse(run, batch).host_reserved_bytes
        return sum(self.sizes.dynamic(batch, run.room)) if run.cache == "offloaded" else 0

    def _hisparse(self, run: Run, batch: int) -> Memory:
        tokens = run.device_buffer_tokens
        if run.cache == "hisparse-resident":
            tokens = whole_records(self.family, run.room)
        buffers = Buffers(tokens // self.family.page_size)
        return self.sizes.memory(batch, run.context, self._capacity(run), buffers)

    def _capacity(self, run: Run) -> int:
        return whole_records(self.family, with_room(run.context))

    def buffer_tokens(self, run: Run) -> int:
        """The largest hot buffers beside this batch, at least those asked, at most for everything."""
        left = self.device - self.beside(run.batch, run.room)
        found = self.sizes.largest_buffers(run.batch, self._capacity(run), left, hosted=False)
        most = max(run.device_buffer_tokens, found.records * self.family.page_size if found else 0)
        return min(most, whole_records(self.family, run.room))
