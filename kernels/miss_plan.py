"""The miss plan: what one resolve found missing, and where the missing records are."""

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
    missing : bool ``[lanes, k]``
        Which entries of the selection ask for one of them, or for a record that has no slot and is to get none.
    """

    records: torch.Tensor
    slots: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # a tuple's own `count` is not needed
    missing: torch.Tensor

    @classmethod
    def empty(cls, lanes: int, k: int, device: torch.device | str) -> MissPlan:
        """Allocate a plan for `lanes` selections of `k` records; its content is undefined."""

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(new(lanes, k), new(lanes, k), new(lanes), new(lanes, k, dtype=torch.bool))


class HostSource(NamedTuple):
    """Where the records are that are not in their slots yet.

    Attributes
    ----------
    pool : ``[records, host_lanes, E]``
        In (pinned) host memory.
    host_rows : int32 ``[batch, capacity]``
    page_table : int32 ``[lanes, capacity]``
    plan : MissPlan
        Of the selection that is read.
    """

    pool: torch.Tensor
    host_rows: torch.Tensor
    page_table: torch.Tensor
    plan: MissPlan
