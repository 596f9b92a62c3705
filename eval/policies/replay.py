"""A trace under every policy and size: misses per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from eval.traces import Event, Trace

from .replacement import LRU, POLICIES, Buffer, CurrentOnly
from .stack import misses_by_size


@dataclass(frozen=True)
class Misses:
    """What a buffer of `slots` records per lane reads and misses, over the lanes of a layer or over all layers.

    Attributes
    ----------
    layer : int or None
        None: all layers.
    policies : dict
        Policy -> misses.
    """

    layer: int | None
    slots: int
    selected: int
    policies: dict[str, int]

    def rate(self, policy: str) -> float:
        """Misses per record read."""
        return self.policies[policy] / self.selected if self.selected else float("nan")


def check_against_live(trace: Trace) -> None:
    """Hold the LRU replay to the cache's own counters.

    Raises
    ------
    RuntimeError
        If a layer's differ, be it by one.
    """
    counted = {
        layer: _count(LRU, trace.lanes(layer), trace.device_buffer_records) for layer in trace.selections
    }
    for layer, leader, selected, misses in zip(
        trace.layers, trace.leaders, trace.selected, trace.misses, strict=True
    ):
        if counted[leader] != (selected, misses):
            raise RuntimeError(
                f"layer {layer}: the cache counted {selected} reads and {misses} misses with {trace.device_buffer_records} "
                f"slots, its replay {counted[leader][0]} and {counted[leader][1]}"
            )


def replay(trace: Trace, sizes: Sequence[int]) -> list[Misses]:
    """Misses under each policy for buffers of `sizes` records per lane: all layers for each size, then each layer.

    Layers that share a selection count each, as the cache counts them; only the leading one is listed.
    """
    found: dict[int, list[Misses]] = {}
    with tqdm(total=len(trace.selections) * (1 + len(sizes) * len(POLICIES)), desc="replaying") as bar:
        for layer in trace.selections:
            lanes = trace.lanes(layer)
            selected, current = _count(CurrentOnly, lanes, trace.top_k)
            bar.update()
            for slots in sizes:
                misses = {"current selection only": current}
                for name, policy in POLICIES.items():
                    misses[name] = _count(policy, lanes, slots)[1]
                    bar.update()
                found.setdefault(slots, []).append(Misses(layer, slots, selected, misses))
    totals = [_total(each, trace) for each in found.values()]
    return totals + sorted((row for rows in found.values() for row in rows), key=lambda row: row.layer)


def lru_curve(trace: Trace, largest: int) -> np.ndarray:
    """The LRU miss rate of all layers at each size up to `largest`, float64 ``[largest + 1]`` (see `misses_by_size`).

    Raises
    ------
    ValueError
        If the trace has crops.
    """
    misses, selected = np.zeros(largest + 1, np.int64), sum(trace.selected)
    for layer in tqdm(trace.selections, desc="stack distances"):
        followers = trace.leaders.count(layer)
        for events in trace.lanes(layer):
            misses += followers * misses_by_size(events, largest)
    return misses / selected


def _count(policy: type[Buffer], lanes: list[list[Event]], slots: int) -> tuple[int, int]:
    """Reads and misses over lanes."""
    buffers = [policy(slots, events) for events in lanes]
    for buffer in buffers:
        buffer.play()
    return sum(buffer.selected for buffer in buffers), sum(buffer.misses for buffer in buffers)


def _total(layers: list[Misses], trace: Trace) -> Misses:
    times = {row.layer: trace.leaders.count(row.layer) for row in layers}
    return Misses(
        None,
        layers[0].slots,
        sum(times[row.layer] * row.selected for row in layers),
        {name: sum(times[row.layer] * row.policies[name] for row in layers) for name in layers[0].policies},
    )
