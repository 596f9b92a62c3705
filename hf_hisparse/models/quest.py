"""Quest: pages of keys scored by their channel-wise minimum and maximum.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024 (arXiv 2406.10774), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse_kernels.quest_pages import quest_scores, quest_update
from hisparse_kernels.quest_select import quest_select

from ..records import moved
from ..selector import LayerShape


@dataclass(frozen=True)
class Quest:
    """Read the most promising pages of each KV head, for any GQA decoder.

    A query reads its own page and the ``token_budget / page_size - 1`` pages before it whose keys could give the
    largest product with any query head of the group. A budget that covers the history is dense attention.

    Parameters
    ----------
    token_budget : int
        Tokens that one query reads per KV head, a multiple of `page_size`.
    page_size : int
        Tokens per page, cut by cache position.
    dense_layers : int
        The first layers, which attend to everything.

    Raises
    ------
    ValueError
        If a setting is not positive (`dense_layers`: negative) or the budget is not a multiple of the page size.
    """

    token_budget: int = 2048
    page_size: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        for name, least in (("token_budget", 1), ("page_size", 1), ("dense_layers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Quest: {name}={value!r}, must be a whole number of at least {least}")
        if self.token_budget % self.page_size:
            sizes = [pages * self.page_size for pages in (self.top_k, self.top_k + 1) if pages]
            raise ValueError(
                f"Quest: token_budget={self.token_budget} is not a multiple of page_size={self.page_size}; "
                f"take {' or '.join(map(str, sizes))}"
            )

    @property
    def top_k(self) -> int:
        """Pages that one query reads."""
        return self.token_budget // self.page_size

    def new_state(self, shape: LayerShape) -> QuestState:
        """The empty page bounds of one layer."""
        return QuestState(self, shape)


class QuestState:
    """Page bounds of one layer: `bounds` ``[lanes, capacity, 2, key_width]``, minimum and maximum per page."""

    newest_counts = False  # the query's own page is always read, so its bounds are not looked at

    def __init__(self, settings: Quest, shape: LayerShape) -> None:
        self.settings = settings
        self.bounds = torch.empty(
            (shape.lanes, 0, 2, shape.key_width), dtype=shape.dtype, device=shape.device
        )

    @property
    def nbytes(self) -> int:
        """Device bytes of the bounds."""
        return self.bounds.nbytes

    def grow(self, records: int) -> None:
        """Make room for `records` pages."""
        missing = records - self.bounds.shape[1]
        if missing > 0:
            self.bounds = torch.nn.functional.pad(self.bounds, (0, 0, 0, 0, 0, missing))

    def extend(self, keys: torch.Tensor, start: int, valid: torch.Tensor | None) -> None:
        """Take many tokens, ``[batch, heads, T, key_width]`` from position `start` on."""
        size, total = self.settings.page_size, keys.shape[2]
        to_border = min(-start % size, total)  # tokens that complete a page begun before
        whole = (total - to_border) // size * size
        at = 0
        for count in (to_border, whole, total - to_border - whole):
            if count:
                tokens = slice(at, at + count)
                self._extend_pages(
                    keys[:, :, tokens], start + at, valid if valid is None else valid[:, tokens]
                )
                at += count

    def _extend_pages(self, keys: torch.Tensor, start: int, valid: torch.Tensor | None) -> None:
        """Take tokens that lie in one page, or make up whole pages."""
        size = min(self.settings.page_size, keys.shape[2])
        low = high = keys
        if valid is not None:
            keep = valid[:, None, :, None]
            low = torch.where(keep, keys, float("inf"))
            high = torch.where(keep, keys, float("-inf"))
        low = low.unflatten(2, (-1, size)).amin(3).flatten(0, 1)  # [lanes, pages, key_width]
        high = high.unflatten(2, (-1, size)).amax(3).flatten(0, 1)
        first, offset = divmod(start, self.settings.page_size)
        pages = self.bounds[:, first : first + low.shape[1]]
        if offset:  # the page was begun before
            low, high = torch.minimum(low, pages[:, :, 0]), torch.maximum(high, pages[:, :, 1])
        pages[:, :, 0], pages[:, :, 1] = low, high

    def append(self, keys: torch.Tensor, position: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Take one token per row, ``[lanes, key_width]``."""
        quest_update(keys, valid, position, self.bounds, self.settings.page_size)

    def select(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The query's own page and the best before it: int32 ``[lanes, top_k]``, -1 where there are fewer."""
        scores = quest_scores(query, self.bounds, position, self.settings.page_size)
        return quest_select(scores, position, self.settings.page_size, self.settings.top_k)

    def crop(self, tokens: int) -> None:
        """Nothing to forget: pages from the query's own on are no candidates, and a page's first token starts it afresh."""

    def rearrange(self, lanes: torch.Tensor) -> None:
        """Let lane `i` hold what lane ``lanes[i]`` held."""
        self.bounds = moved(self.bounds, lanes)

    def clone(self) -> QuestState:
        """An independent copy."""
        other = object.__new__(QuestState)
        other.settings, other.bounds = self.settings, self.bounds.clone()
        return other

    def saved(self, records: int) -> dict[str, torch.Tensor]:
        """The bounds of the first `records` pages."""
        return {"bounds": self.bounds[:, :records]}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `saved` gave."""
        bounds = tensors["bounds"]
        self.bounds[:, : bounds.shape[1]] = bounds
