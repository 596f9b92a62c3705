"""The miss plan: what one resolve asks the fetch to bring."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MissPlan(NamedTuple):
    """The records that one resolve must bring from the host, per lane.

    Attributes
    ----------
    records : int32 ``[lanes, k]``
        Record numbers to fetch, in selection order; -1 after the last.
    slots : int32 ``[lanes, k]``
        The slot each of them goes to; -1 after the last.
    count : int32 ``[lanes]``
        How many there are, ``0 <= count <= k``.
    """

    records: torch.Tensor
    slots: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # a tuple's own `count` is not needed

    @classmethod
    def empty(cls, lanes: int, k: int, device: torch.device | str) -> MissPlan:
        """Allocate a plan for `lanes` selections of `k` records; its content is undefined."""

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(new(lanes, k), new(lanes, k), new(lanes))
