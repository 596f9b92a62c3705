"""Selections to decode with: where records are read again decides what must be moved.

`load_trace` reads what a real run selected (`HiSparseCache.record_trace`), `synthetic_trace` makes selections with a set miss
curve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_hisparse.trace import CROP, PREFILL, STEP, VERSION

# Share of a selection of k records that an LRU buffer of 1, 2 and 4 times k misses: HiSparse (arXiv 2608.07009), figure 6.
PAPER_CURVE = {1.0: 0.30, 2.0: 0.134, 4.0: 0.067}


def synthetic_trace(
    lanes: int,
    k: int,
    history: int,
    steps: int,
    curve: Mapping[float, float] = PAPER_CURVE,
    seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """Random selections with a set LRU miss curve.

    Records are kept in a stack, the most recently read on top. Each step reads, from each stretch of the stack between two
    points of the curve, the number of records that the curve says, evenly at random: so an LRU buffer of the size of a point
    misses that share, on average over a few steps where it is no whole number (the newest token, which decoding appends, comes on
    top).

    Parameters
    ----------
    lanes, k, history, steps : int
        Each step reads `k` different records out of `history` in each lane.
    curve : mapping
        Buffer size as a multiple of `k` -> share of the selection that it misses.
    seed : int
    device : str
        Where the trace is made.

    Returns
    -------
    int32 ``[steps, lanes, k]``

    Raises
    ------
    ValueError
        If the history is too short for the curve.
    """
    points = sorted(curve.items())
    edges = [0, *(round(size * k) for size, _ in points), history]
    shares = [1.0, *(share for _, share in points), 0.0]
    exact = np.array([k * (shares[i] - shares[i + 1]) for i in range(len(points) + 1)])
    counts = _rounded(exact, steps)
    for count, low, high in zip(counts.max(0), edges[:-1], edges[1:], strict=True):
        if count > high - low:
            raise ValueError(
                f"a trace of k={k} over {history} records cannot read {count} of the {high - low} records between {low} and "
                f"{high} in the stack: take a longer history or another curve"
            )
    generator = torch.Generator(device=device).manual_seed(seed)
    stack = _shuffled(lanes, history, generator)
    trace = torch.empty((steps, lanes, k), dtype=torch.int32, device=device)
    for step in range(steps):
        places = []
        for count, low, high in zip(counts[step].tolist(), edges[:-1], edges[1:], strict=True):
            order = torch.rand((lanes, high - low), generator=generator, device=device)
            places.append(low + order.topk(count, dim=1).indices)
        # What lay on top stays on top, and is named first: so an LRU buffer ranks it, whatever it misses.
        place = torch.cat(places, dim=1).sort(dim=1).values
        read = stack.gather(1, place)
        rest = torch.ones_like(stack, dtype=torch.bool).scatter_(1, place, False)
        stack = torch.cat([read, stack[rest].view(lanes, history - k)], dim=1)
        trace[step] = read
    return trace


def first_stack(lanes: int, history: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """The stack that `synthetic_trace` begins with, int32 ``[lanes, history]``, the most recently read first.

    An LRU buffer that holds its first records misses what the curve says from the first step on.
    """
    return _shuffled(lanes, history, torch.Generator(device=device).manual_seed(seed))


def _shuffled(lanes: int, history: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand((lanes, history), generator=generator, device=generator.device).argsort(dim=1).int()


def _rounded(exact: np.ndarray, steps: int) -> np.ndarray:
    """Whole numbers, int ``[steps, n]``: each step's add up as `exact` ``[n]`` does, each column's mean comes near to it."""
    whole = np.floor(exact + 1e-6).astype(int)
    counts = np.tile(whole, (steps, 1))
    owed = np.zeros_like(exact)
    for row in counts:
        owed += exact - whole
        extra = np.argsort(-owed, kind="stable")[: round(exact.sum()) - whole.sum()]
        row[extra] += 1
        owed[extra] -= 1
    return counts


class Prefill(NamedTuple):
    """The hot buffer of a lane was filled anew, out of `records` records; the prompt's last token read `selection`."""

    selection: list[int]
    records: int


class Step(NamedTuple):
    """A token reads `selection`; `records` are held, of which the last was begun by this token if `begins`."""

    selection: list[int]
    records: int
    begins: bool = False


class Crop(NamedTuple):
    """`records` are left."""

    records: int


Event: TypeAlias = Prefill | Step | Crop


@dataclass(frozen=True)
class Trace:
    """What a run selected; `hf_hisparse.trace` describes each attribute.

    Attributes
    ----------
    selections : dict
        Leading layer -> int32 ``[selections, lanes, top_k]``.
    """

    model: str
    settings: str
    page_size: int
    top_k: int
    device_buffer_records: int
    layers: list[int]
    leaders: list[int]
    selected: list[int]
    misses: list[int]
    kinds: np.ndarray
    positions: np.ndarray
    selections: dict[int, np.ndarray]

    def steps(self, layer: int) -> torch.Tensor:
        """The selections of a layer's decode steps, int32 ``[steps, lanes, top_k]``, like a `synthetic_trace`."""
        selecting = self.kinds[self.kinds != CROP]
        return torch.from_numpy(self.selections[layer][selecting == STEP])

    def lanes(self, layer: int) -> list[list[Event]]:
        """What happened in each lane of a layer, in order."""
        return [self._events(lane) for lane in self.selections[layer].swapaxes(0, 1).tolist()]

    def _events(self, selections: list[list[int]]) -> list[Event]:
        events: list[Event] = []
        selection = iter(selections)
        for kind, position in zip(self.kinds.tolist(), self.positions.tolist(), strict=True):
            if kind == STEP:
                record, offset = divmod(position, self.page_size)
                events.append(Step(next(selection), record + 1, offset == 0))
            else:
                records = -(-position // self.page_size)
                events.append(Prefill(next(selection), records) if kind == PREFILL else Crop(records))
        return events


def load_trace(path: str | Path) -> Trace:
    """Read what `HiSparseCache.record_trace` wrote.

    Raises
    ------
    ValueError
        If the file is none of those, or of another version.
    """
    with np.load(path, allow_pickle=False) as file:
        version = int(file["version"]) if "version" in file else None
        if version != VERSION:
            raise ValueError(f"{path} is no trace of version {VERSION} (but of {version}): record it again")
        leaders = file["leaders"].tolist()
        return Trace(
            model=str(file["model"]),
            settings=str(file["settings"]),
            page_size=int(file["page_size"]),
            top_k=int(file["top_k"]),
            device_buffer_records=int(file["device_buffer_records"]),
            layers=file["layers"].tolist(),
            leaders=leaders,
            selected=file["selected"].tolist(),
            misses=file["misses"].tolist(),
            kinds=file["kinds"],
            positions=file["positions"],
            selections={leader: file[f"selection_{leader}"] for leader in sorted(set(leaders))},
        )


class Playback:
    """The steps of a trace, one after another and again from the first: ``[steps, ...]`` -> ``[...]``.

    Which comes next stands on the device, so that a decode step can be replayed from a CUDA graph.
    """

    def __init__(self, trace: torch.Tensor) -> None:
        self._trace = trace
        self._step = torch.zeros(1, dtype=torch.int64, device=trace.device)

    def next(self) -> torch.Tensor:
        """The next step."""
        step = self._trace.index_select(0, self._step)[0]
        self._step.add_(1).remainder_(len(self._trace))
        return step


@contextmanager
def playing(
    model: PreTrainedModel,
    traces: list[torch.Tensor],
    answer: Callable[[Any, torch.Tensor, tuple[Any, ...], dict[str, Any]], torch.Tensor],
) -> Iterator[None]:
    """Let the model's indexers work, and answer with the next step of a trace each.

    Parameters
    ----------
    model : PreTrainedModel
        One that selects by itself.
    traces : list of tensors
        One for each layer that has an indexer.
    answer : callable
        Makes of an indexer, a step and the arguments of a call what the indexer answers.
    """
    indexers = [layer.self_attn.indexer for layer in model.get_decoder().layers]
    indexers = [indexer for indexer in indexers if indexer is not None]
    steps = {indexer: Playback(trace) for indexer, trace in zip(indexers, traces, strict=True)}
    own = type(indexers[0]).forward

    @functools.wraps(own)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        own(self, *args, **kwargs)
        return answer(self, steps[self].next(), args, kwargs)

    with mock.patch.object(type(indexers[0]), "forward", forward):
        yield
