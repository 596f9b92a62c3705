"""What transformers does to the batch rows of a cache layer, all told as one: which row each row goes on from."""

from __future__ import annotations

from abc import abstractmethod

import torch


def lanes_of(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The lanes of batch rows, int64 ``[len(rows) * heads]``, on the device of `rows` (int64 ``[n]``)."""
    return (rows[:, None] * heads + torch.arange(heads, device=rows.device)).flatten()


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
