"""What transformers does to the batch rows of a cache layer, all told as one: which row each row goes on from."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch


def lanes_of(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The lanes of batch rows, int64 ``[len(rows) * heads]``, on the device of `rows` (int64 ``[n]``)."""
    return (rows[:, None] * heads + torch.arange(heads, device=rows.device)).flatten()


def check_rows(beam_idx: Any, batch: int) -> None:
    """Refuse what does not say from which of `batch` rows each row goes on (ValueError); none are held before the first token."""
    if not isinstance(beam_idx, torch.Tensor) or beam_idx.dtype not in (torch.int64, torch.int32):
        found = beam_idx.dtype if isinstance(beam_idx, torch.Tensor) else type(beam_idx).__name__
        raise ValueError(f"reorder_cache: beam_idx is {found}, must be a tensor of int64")
    if beam_idx.ndim != 1 or not beam_idx.numel():
        raise ValueError(f"reorder_cache: beam_idx is {list(beam_idx.shape)}, must be [rows], at least one")
    if not batch:
        return
    low, high = torch.stack(beam_idx.aminmax()).tolist()
    if low < 0 or high >= batch:
        raise ValueError(
            f"reorder_cache: beam_idx names row {low if low < 0 else high}, but {batch} rows are held: must be from 0 to "
            f"{batch - 1}"
        )


def selected_rows(indices: Any, batch: int) -> torch.Tensor:
    """The rows of `batch` rows that an index of one dimension names, int64 ``[n]`` (ValueError if it is none)."""
    try:
        rows = torch.arange(batch)[indices.cpu() if isinstance(indices, torch.Tensor) else indices]
    except (IndexError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"batch_select_indices: {indices!r} is no index of {batch} rows: {error}") from error
    if rows.ndim != 1:
        raise ValueError(
            f"batch_select_indices: {indices!r} gives rows {list(rows.shape)}, must be of one dimension"
        )
    return rows


class RearrangedRows:
    """A layer whose rows move by `rearrange` alone."""

    @property
    @abstractmethod
    def held_rows(self) -> int:
        """Batch rows held, 0 before the first token."""

    @abstractmethod
    def rearrange(self, rows: torch.Tensor) -> None:
        """Let batch row `i` hold what row ``rows[i]`` held (int64 ``[new batch]``)."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let beam `i` go on from beam ``beam_idx[i]``."""
        self.rearrange(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        if self.held_rows:
            self.rearrange(torch.arange(self.held_rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows `indices`."""
        if self.held_rows:
            self.rearrange(torch.arange(self.held_rows, device=indices.device)[indices])
