"""A dense layer whose KV lives on the host: for GPUs that cannot hold even that."""

from __future__ import annotations

import torch

from hisparse_kernels.miss_plan import HostSource

from ..hosted_layer import LayerSettings
from ..layer_history import LayerHistory
from ..padding import Padding
from ..prefix_buffer import PrefixBuffer
from ..records import RecordLayout
from ..resident_layer import ResidentLayer
from ..selector import LayerShape, Selector
from ..stats import LayerStats
from .gqa import GqaLayer


class EveryRecord:
    """The selector state of a layer that reads everything: `records` int32 ``[lanes, capacity]``, the same in every step."""

    def __init__(self, shape: LayerShape) -> None:
        self.records = torch.empty((shape.lanes, 0), dtype=torch.int32, device=shape.device)

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.records.nbytes

    def _name_all(self, lanes: int, capacity: int) -> None:
        every = torch.arange(capacity, dtype=torch.int32, device=self.records.device)
        self.records = every.repeat(lanes, 1)

    def grow(self, records: int) -> None:
        """Name `records` records."""
        if records > self.records.shape[1]:
            self._name_all(self.records.shape[0], records)

    def extend(self, keys: torch.Tensor, start: int, valid: torch.Tensor | None) -> None:
        """Nothing to note."""

    def append(self, keys: torch.Tensor, position: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Nothing to note."""

    def select(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """All records there is room for; attention reads none of the tokens after `position`."""
        return self.records

    def crop(self, tokens: int) -> None:
        """Nothing to forget."""

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let there be as many lanes as that."""
        if lanes.numel() != self.records.shape[0]:
            self._name_all(lanes.numel(), self.records.shape[1])

    def clone(self) -> EveryRecord:
        """The tensors are only ever replaced: a copy may share them."""
        other = object.__new__(EveryRecord)
        other.records = self.records
        return other

    def saved(self, records: int) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Nothing."""


class DenseLayer(GqaLayer):
    """A hosted layer that attends to everything, as `ResidentLayer` does with all of it on the GPU.

    It keeps its first records on the GPU (see `PrefixBuffer`). In a step of one token per row attention reads the others
    straight from the host; a longer call brings the whole history, once for all its tokens, and attention is the model's own.
    """

    dense = True
    buffer: PrefixBuffer  # type: ignore[assignment]

    def __init__(self, layer_idx: int, settings: LayerSettings, padding: Padding, selector: Selector) -> None:
        super().__init__(layer_idx, settings, padding, selector)
        assert settings.dense_records is not None
        self.buffer_records = settings.dense_records
        self._read = self._missed = 0  # records, in steps of one token

    def new_buffer(self, shape: LayerShape, layout: RecordLayout) -> PrefixBuffer:  # type: ignore[override]
        """Room for the first records."""
        return PrefixBuffer(shape.lanes, self.buffer_records, layout, shape.device)

    def new_state(self, shape: LayerShape) -> EveryRecord:
        """The numbers of all records."""
        return EveryRecord(shape)

    def streams(self, rows: int) -> bool:
        """See `HostedLayer.streams`: to read everything again for each token would take longer than to bring it once."""
        return rows > 1

    def read_or_resolve(self, selection: torch.Tensor) -> tuple[torch.Tensor, HostSource | None]:
        """See `HostedLayer.read_or_resolve`; what has no slot is read from the host, and kept nowhere."""
        return self.resolve(selection)

    def select_afresh(self, first: int, stop: int, valid: torch.Tensor | None) -> None:
        """Nothing depends on what is padding."""

    def resize_buffer(self, records: int) -> None:
        """See `HostedLayer.resize_buffer`; no more than it has while it holds tokens, as nothing would bring them."""
        super().resize_buffer(min(records, self.buffer_records) if self._length else records)

    def take_over(self, layer: ResidentLayer) -> None:
        """Take all tokens of a layer that kept them on the GPU."""
        self.growth_target = layer.growth_target
        if not layer.get_seq_length():
            return
        keys, values = layer.keys, layer.values
        assert keys is not None and values is not None
        self.put(LayerHistory(keys, values))

    def put(self, history: LayerHistory) -> None:
        """See `HostedLayer.put`; there is nothing recent."""
        self.update(history.keys, history.values)
        self.store(history.keys, history.values)
        self._keep(history.keys, history.values)
        self.finish()

    def warm(self, selection: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep what is new among the first records."""
        self._keep(keys, values)

    def _keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.buffer.store(self.new_tokens().start // self.layout.tokens, keys, values)
        self.position.fill_(self._length)

    def _check_selection(self, selection: torch.Tensor) -> None:
        """It is all there is."""

    def _note_read(self) -> None:
        lanes, records = self.buffer.lanes, self.layout.count(self._length)
        self._read += lanes * records
        self._missed += lanes * max(0, records - self.buffer.data.shape[1])

    def advance(self) -> None:
        """See `HostedLayer.advance`."""
        super().advance()
        self._note_read()

    def replayed(self) -> None:
        """See `HostedLayer.replayed`."""
        super().replayed()
        self._note_read()

    @property
    def counts(self) -> tuple[int, ...]:
        """See `HostedLayer.counts`; records read and missed as well."""
        return (*super().counts, self._read, self._missed)

    def restore(self, counts: tuple[int, ...]) -> None:
        """See `HostedLayer.restore`."""
        super().restore(counts[:2])
        self._read, self._missed = counts[2:]

    def reset(self) -> None:
        """See `HostedLayer.reset`."""
        super().reset()
        self._read = self._missed = 0

    def load(
        self, key_states: torch.Tensor, value_states: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Take what `saved` gave, of this layer or of a `ResidentLayer`."""
        if "rows" in tensors:
            widths = [key_states.shape[3], value_states.shape[3]]
            rows = tensors["rows"].unflatten(0, key_states.shape[:2]).split(widths, dim=3)
            layout = self.layout_for(key_states, value_states)
            tensors = {"records": layout.pack(*rows).transpose(0, 1)}
        super().load(key_states, value_states, tensors)

    def stats(self) -> LayerStats:
        """What steps of one token have read and moved so far; longer calls bring the whole history besides."""
        if not self.is_initialized:
            return LayerStats(self.layer_idx, dense=True)
        return LayerStats(
            self.layer_idx, self.steps, self._read, self._missed, self.layout.nbytes, dense=True
        )
