"""Traces: which records a run selected, step by step, in a file to replay.

The file is a compressed ``.npz`` (`numpy.load` reads it). With `layers` hosted layers, `events` of three kinds and
`selections` = the prefills and steps among them:

=====================  ==========================  ====================================================================
name                   type                        content
=====================  ==========================  ====================================================================
version                int                         1
model, settings        str                         the model's name or type, the selector or family with its settings
page_size, top_k       int                         tokens per record, records per selection
device_buffer_records  int                         slots per lane of the cache that was recorded
layers                 int32 ``[layers]``          the hosted layers
leaders                int32 ``[layers]``          whose selections each of them reads: its own, or those it shares
record_bytes           int64 ``[layers]``          bytes of a record
selected, misses       int64 ``[layers]``          what the cache's own counters say of the whole run
kinds                  int8 ``[events]``           0 prefill, 1 step, 2 crop
positions              int64 ``[events]``          prefill: tokens held after it; step: position of its token, which was
                                                   appended before it selected; crop: tokens left
selection_<layer>      int32 ``[selections,        of each leading layer. A prefill's is that of its last token, which the
                       lanes, top_k]``             hot buffer is filled with (see `HotBuffer.choose`). -1: none
=====================  ==========================  ====================================================================

That is all it takes to replay the hot buffer exactly, at any size (`eval.policies` does): a record gets a slot when its first
token is appended, ``position % page_size == 0``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .cache import HiSparseCache
    from .hosted_layer import HostedLayer

logger = logging.getLogger(__name__)

VERSION = 1
PREFILL, STEP, CROP = range(3)


class LayerTrace:
    """What one hosted layer did, in order. Each selection is copied to the CPU, which waits for the device."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []  # kind, position
        self.selections: list[np.ndarray] = []

    def prefill(self, selection: torch.Tensor, tokens: int) -> None:
        """The hot buffer was filled: `selection` ``[lanes, k]`` of the last of `tokens` tokens."""
        self._note(PREFILL, tokens, selection)

    def step(self, selection: torch.Tensor, position: torch.Tensor) -> None:
        """The token at `position` (int64 ``[1]``) reads `selection` ``[lanes, k]``."""
        self._note(STEP, int(position), selection)

    def crop(self, tokens: int) -> None:
        """So many tokens are left."""
        self.events.append((CROP, tokens))

    def _note(self, kind: int, position: int, selection: torch.Tensor) -> None:
        self.events.append((kind, position))
        # A copy on the CPU too: the next step may overwrite it.
        self.selections.append(selection.to(device="cpu", dtype=torch.int32, copy=True).numpy())


class TraceRecorder:
    """Records a run of a cache until it is closed (see `HiSparseCache.record_trace`).

    Parameters
    ----------
    cache : HiSparseCache
    path : Path
    header : dict
        What the file says of the cache's model and settings.
    """

    path: Path

    def __init__(self, cache: HiSparseCache, path: Path, header: dict[str, Any]) -> None:
        if cache.trace is not None:
            raise RuntimeError(
                f"record_trace: a trace is being recorded to {cache.trace.path} already: close it first"
            )
        held, steps = cache.get_seq_length(), cache.stats().steps
        if held or steps:
            raise ValueError(
                f"record_trace: the cache holds {held} tokens and has counted {steps} decode steps, and a replay must know how "
                "the hot buffer was filled: begin before the prompt, with a new cache or after reset()"
            )
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"record_trace: {path} cannot be written: name a file in a folder that exists")
        self.path = path
        self.header = header
        self._cache: HiSparseCache | None = cache
        for layer in cache.sparse_layers:
            layer.trace = LayerTrace()

    def close(self) -> None:
        """Write the file and end the recording; again, it does nothing.

        Raises
        ------
        RuntimeError
            If the last call through the cache did not finish; nothing is written.
        """
        if self._cache is None:
            return
        try:
            self._cache.check_whole()
        except RuntimeError as error:
            self._detach()
            raise RuntimeError(f"no trace is written to {self.path}: {error}") from error
        try:
            content = self._content(self._cache.sparse_layers)
        finally:
            self._detach()
        with self.path.open("wb") as file:
            np.savez_compressed(file, **content)

    def _detach(self) -> None:
        assert self._cache is not None
        for layer in self._cache.sparse_layers:
            layer.trace = None
        self._cache.trace = None
        self._cache = None  # its host memory is to go with it, not with this

    def _content(self, layers: list[HostedLayer]) -> dict[str, Any]:
        stats = [layer.stats() for layer in layers]
        leaders = _leaders(layers)
        traces = {layer.layer_idx: layer.trace for layer in layers if layer.layer_idx in leaders}
        events = [trace.events for trace in traces.values() if trace is not None]
        if any(layer.interrupted for layer in layers) or events.count(events[0]) < len(events):
            raise RuntimeError(
                f"the last call through the cache did not finish, so no trace is written to {self.path}"
            )
        return {
            "version": VERSION,
            **self.header,
            "layers": np.array([layer.layer_idx for layer in layers], np.int32),
            "leaders": np.array(leaders, np.int32),
            "record_bytes": np.array([layer.record_bytes for layer in stats], np.int64),
            "selected": np.array([layer.selected for layer in stats], np.int64),
            "misses": np.array([layer.misses for layer in stats], np.int64),
            "kinds": np.array([kind for kind, _ in events[0]], np.int8),
            "positions": np.array([position for _, position in events[0]], np.int64),
            **{
                f"selection_{index}": _stacked(trace.selections, self.header["top_k"])
                for index, trace in traces.items()
                if trace is not None
            },
        }

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon(f"a {kind.__name__}")

    def abandon(self, reason: str) -> None:
        """End the recording without a file."""
        if self._cache is not None:
            self._detach()
            logger.warning("no trace is written to %s after %s", self.path, reason)


def _leaders(layers: list[HostedLayer]) -> list[int]:
    """The layer whose selections each layer reads."""
    used = [layer for layer in layers if layer.is_initialized]
    index_of = {id(layer.buffer): layer.layer_idx for layer in used}
    leading = {layer.layer_idx: index_of[id(getattr(layer.buffer, "leader", layer.buffer))] for layer in used}
    return [leading.get(layer.layer_idx, layer.layer_idx) for layer in layers]


def _stacked(selections: list[np.ndarray], top_k: int) -> np.ndarray:
    """One array ``[selections, lanes, top_k]``; a prompt shorter than a selection has fewer records to name."""
    if len({each.shape[0] for each in selections}) > 1:
        raise RuntimeError(
            "the cache was cropped to nothing and went on with another batch: no trace is written"
        )
    padded = [np.pad(each, ((0, 0), (0, top_k - each.shape[1])), constant_values=-1) for each in selections]
    return np.stack(padded) if padded else np.empty((0, 0, top_k), np.int32)
