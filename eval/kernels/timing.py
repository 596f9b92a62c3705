"""Microseconds of calls, in a CUDA graph where there is a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

REPLAYS = 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Time(NamedTuple):
    """Microseconds per call: the median over replays, the first of which is left out, and the spread (max - min)."""

    us: float
    spread: float


def microseconds(calls: Sequence[Callable[[], Any]], before: Callable[[], Any] = lambda: None) -> Time:
    """The time per call, of all of them in one CUDA graph; `before` runs ahead of each replay, untimed."""
    before()
    calls[0]()  # compile
    replay = _captured(calls) if DEVICE == "cuda" else _eager(calls)
    times = []
    for _ in range(REPLAYS):
        before()
        times.append(replay() / len(calls))
    return Time(statistics.median(times[1:]), max(times[1:]) - min(times[1:]))


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the launch of the graph is not what is measured
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return 1000 * start.elapsed_time(stop)

    return replay


def _eager(calls: Sequence[Callable[[], Any]]) -> Callable[[], float]:
    def replay() -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - began)

    return replay
