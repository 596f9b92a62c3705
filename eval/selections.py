"""What decode steps with Quest read instead of what Quest chooses: keys of random weights have no locality, and real text has.

Quest scores its pages all the same, so that its time counts; its answer is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eval.traces import PAPER_CURVE, PREFILL, STEP, first_stack, load_trace, synthetic_trace
from hf_hisparse import HiSparseCache, Quest


@dataclass(frozen=True)
class Selections:
    """What one hosted layer reads.

    Attributes
    ----------
    steps : int32 ``[steps, lanes, k]``
        Pages of each step, a query's own page first.
    recent : int64 ``[lanes, n]``
        Pages to begin with in the hot buffer, from least to most recently used.
    """

    steps: torch.Tensor
    recent: torch.Tensor


class Workload(Protocol):
    """Where selections come from; `name` is what a CSV says of it."""

    name: str
    quest: Quest

    def history(self, context: int) -> int:
        """Tokens to begin with, for a context of at least `context` tokens."""

    def of_layer(
        self, index: int, batch: int, heads: int, tokens: int, steps: int, slots: int, device: torch.device
    ) -> Selections:
        """What the hosted layer `index` reads in `steps` steps after `tokens` tokens, with a buffer of `slots` pages per lane."""


class Synthetic:
    """A `synthetic_trace` with the paper's miss curve, the same in every layer and batch row.

    Points of the curve for which the history is too short are left out.

    Parameters
    ----------
    quest : Quest
    seed : int
    """

    def __init__(self, quest: Quest, seed: int = 0) -> None:
        self.name = "paper's miss curve"
        self.quest, self.seed = quest, seed
        self._made: tuple[tuple[object, ...], Selections] | None = None

    def history(self, context: int) -> int:
        """Any will do."""
        return context

    def of_layer(
        self, index: int, batch: int, heads: int, tokens: int, steps: int, slots: int, device: torch.device
    ) -> Selections:
        """See `Workload`. A step reads its own page and ``k - 1`` of the trace."""
        asked = (batch, heads, tokens, steps, slots, device)
        if self._made is None or self._made[0] != asked:
            self._made = asked, self._make(*asked)
        return self._made[1]

    def _make(
        self, batch: int, heads: int, tokens: int, steps: int, slots: int, device: torch.device
    ) -> Selections:
        size, where = self.quest.page_size, str(device)
        pages, filling = divmod(tokens, size)
        k = self.quest.top_k - 1
        curve = {size: share for size, share in PAPER_CURVE.items() if (size + share) * k <= pages}
        others = synthetic_trace(heads, k, pages, steps, curve, self.seed, where)
        own = (torch.arange(tokens, tokens + steps, dtype=torch.int32, device=device) // size)[:, None, None]
        read = torch.cat([own.expand(-1, heads, 1), others], dim=2)
        recent = first_stack(heads, pages, self.seed, where)[:, : slots - (filling > 0)].long().flip(1)
        if filling:
            recent = torch.nn.functional.pad(recent, (0, 1), value=pages)
        return Selections(read.repeat(1, batch, 1), recent.repeat(batch, 1))


class Recorded:
    """What a real run selected, applied to a model that may have other layers, lanes and a longer history.

    Records are pages, counted from the end: the trace's last page is the history's last page, so a history that is longer has
    pages in front that are never read. It is made up to 15 tokens longer than asked, for pages to begin where they do in the
    trace. KV head `h` of batch row `b` in hosted layer `i` reads what head `h` of layer ``i + b`` did, both counted around; so
    rows of a batch differ.

    Parameters
    ----------
    path : str or Path
        As `HiSparseCache.record_trace` writes it.

    Raises
    ------
    ValueError
        If it is none of Quest, or holds more than one prompt and the steps after it.
    """

    def __init__(self, path: str | Path) -> None:
        self._trace = trace = load_trace(path)
        self.name = Path(path).name
        if not trace.settings.startswith("Quest("):
            raise ValueError(
                f"{path} was recorded with {trace.settings}: the model here selects with Quest, and needs a trace of it"
            )
        if trace.kinds[0] != PREFILL or (trace.kinds[1:] != STEP).any():
            raise ValueError(
                f"{path} holds several prompts, or a crop: record one prompt and one answer, nothing in between"
            )
        if any((selections[0] < 0).any() for selections in trace.selections.values()):
            raise ValueError(
                f"{path}: its prompt of {trace.positions[0]} tokens is shorter than the budget: record a longer one"
            )
        self.quest = Quest(trace.top_k * trace.page_size, trace.page_size)
        self._prompt, self._steps = int(trace.positions[0]), len(trace.kinds) - 1

    def history(self, context: int) -> int:
        """The tokens of at least `context` that end within a page as the trace's prompt does.

        Raises
        ------
        ValueError
            If the context is shorter than that prompt.
        """
        if context < self._prompt:
            raise ValueError(
                f"{self.name} was recorded after {self._prompt} tokens: a context of {context} lacks pages that it reads"
            )
        return context + (self._prompt - context) % self.quest.page_size

    def of_layer(
        self, index: int, batch: int, heads: int, tokens: int, steps: int, slots: int, device: torch.device
    ) -> Selections:
        """See `Workload` (ValueError if the trace has fewer steps)."""
        if steps > self._steps:
            raise ValueError(
                f"{self.name} has {self._steps} decode steps, {steps} are asked: decode fewer tokens"
            )
        trace, shift = self._trace, (tokens - self._prompt) // self.quest.page_size
        parts = []
        for row in range(batch):
            chosen = trace.leaders[(index + row) % len(trace.layers)]
            recorded = torch.from_numpy(trace.selections[chosen][: steps + 1])
            parts.append(recorded[:, torch.arange(heads) % recorded.shape[1]])
        read = torch.cat(parts, dim=1).to(device)
        read = torch.where(read >= 0, read + shift, read)
        return Selections(read[1:].contiguous(), read[0].long().sort(dim=1).values)


class TracePlayer:
    """Stands in for `QuestState.select`: lets it work, and answers with what a trace says of the position."""

    def __init__(
        self, select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], start: int, steps: torch.Tensor
    ) -> None:
        self.select, self.start, self.steps = select, start, steps

    def __call__(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.select(query, position)
        return self.steps.index_select(0, position - self.start)[0]  # on the device: a step may be captured


def play(cache: HiSparseCache, selections: Mapping[int, Selections]) -> None:
    """Let the layers of a filled cache read what is given for each."""
    for index, chosen in selections.items():
        layer = cache.layers[index]
        start = layer.get_seq_length()
        layer.state.select = TracePlayer(type(layer.state).select.__get__(layer.state), start, chosen.steps)
    cache.graphs.forget()  # what was captured would go on with an earlier trace
