"""The history of one layer after another on its way back to the device, for a long call on top of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .host_pool import HostPool
    from .hosted_layer import HostedLayer
    from .padding import Padding


class _Coming(NamedTuple):
    """Records under way: the first ``len(records)`` of a pool."""

    pool: HostPool
    records: torch.Tensor
    arrived: torch.cuda.Event


class HistoryStream:
    """Brings the records of each layer while the layer before it computes.

    At most one layer's records lie here, beside the keys and values that the layer before it has made of its own.

    Parameters
    ----------
    layers : list of HostedLayer
        In the order in which the model calls them.
    """

    def __init__(self, layers: list[HostedLayer]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]  # which refer to this stream
        self._coming: _Coming | None = None

    def forget(self) -> None:
        """What is under way is of a call that did not finish."""
        self._coming = None

    def begin(self, rows: int) -> None:
        """A call of so many new tokens per row begins: bring the first records that it streams."""
        first = next((layer for layer in self._living() if layer.streams(rows)), None)
        if first is not None and first.get_seq_length():
            self._bring(first, first.layout.count(first.get_seq_length()))

    def correct(self, padding: Padding, shown: torch.Tensor) -> None:
        """Where a mask, bool ``[batch or 1, length]``, says otherwise of the tokens held than masks did when they came, heed it.

        Attention asks the mask of each call; what a selector made of the keys, such as bounds of a page, is made again.
        """
        layers = self._living()
        shown = shown.expand(layers[0].pool.batch, -1)
        first = padding.first_change(shown)
        if first is None:
            return
        for layer in layers:
            layer.select_afresh(first, shown.shape[1], shown)
        padding.take(shown, layers[0].capacity)

    @contextmanager
    def records(self, layer: HostedLayer, count: int) -> Iterator[torch.Tensor]:
        """The first `count` records of a layer as they lie in its pool, ``[count, host_lanes, elements]`` on the device.

        Afterwards their memory serves the layer that follows.
        """
        if self._coming is None or self._coming.pool is not layer.pool or len(self._coming.records) != count:
            self._bring(layer, count)
        coming, self._coming = self._coming, None
        if coming is None:  # on the CPU they are where they are needed
            yield layer.pool.records[:count]
            return
        torch.cuda.current_stream(layer.pool.device).wait_event(coming.arrived)
        yield coming.records
        del coming
        following = self._after(layer)
        if following is not None and following.get_seq_length() == layer.new_tokens().start:
            self._bring(following, count)

    def _living(self) -> list[HostedLayer]:
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def _after(self, layer: HostedLayer) -> HostedLayer | None:
        """The next layer that streams in the call under way."""
        layers = self._living()
        at = next((i for i, other in enumerate(layers) if other is layer), len(layers))
        rows = layer.new_tokens().keys.shape[2]
        return next((other for other in layers[at + 1 :] if other.streams(rows)), None)

    def _bring(self, layer: HostedLayer, count: int) -> None:
        """Start to copy."""
        self._coming = None
        pool = layer.pool
        if pool.device.type != "cuda":
            return
        stream = _copy_stream(pool.device)
        with torch.cuda.device(pool.device):
            records = torch.empty(
                (count, *pool.records.shape[1:]), dtype=pool.records.dtype, device=pool.device
            )
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                pool.copy_to(records)
                arrived = stream.record_event()
            records.record_stream(stream)
        self._coming = _Coming(pool, records, arrived)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
