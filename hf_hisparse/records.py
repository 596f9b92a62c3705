"""The layout of a record: the unit that is selected, stored and moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_CHUNK_BYTES = 2**26  # device memory that one step of a long copy may take


@dataclass(frozen=True)
class RecordLayout:
    """What one record of one lane holds.

    A record is a run of `tokens` consecutive cache positions of one lane: the keys of all of them
    (``[tokens, key_width]``), then the values (``[tokens, value_width]``); where a lane has several KV heads, that of
    one after another.

    Attributes
    ----------
    tokens : int
        Tokens per record: 16 for a Quest page of 16.
    key_width, value_width : int
        Elements per token; `value_width` is 0 where one row serves as both.
    dtype : torch.dtype
    heads : int
        KV heads per record.

    Raises
    ------
    ValueError
        If a record is not a multiple of 16 bytes, the unit in which GPU threads read the host.
    """

    tokens: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    heads: int = 1

    def __post_init__(self) -> None:
        if self.nbytes % 16:
            raise ValueError(
                f"a record of {self.tokens} tokens x ({self.key_width} + {self.value_width}) x {self.dtype} has "
                f"{self.nbytes} bytes, which must be a multiple of 16: take a larger page size, a multiple of 16"
            )

    @property
    def elements(self) -> int:
        """Elements of one record."""
        return self.heads * self.tokens * (self.key_width + self.value_width)

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return self.elements * self.dtype.itemsize

    def count(self, tokens: int) -> int:
        """Records that hold `tokens` tokens, the last one possibly not full."""
        return -(-tokens // self.tokens)

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Cut tokens into records.

        Parameters
        ----------
        keys : ``[batch, heads, T, key_width]``
        values : ``[batch, heads, T, value_width]``

        Returns
        -------
        ``[lanes, ceil(T / tokens), elements]``; what follows the last token in the last record is zero.
        """

        def cut(rows: torch.Tensor) -> torch.Tensor:
            missing = -rows.shape[2] % self.tokens
            rows = torch.nn.functional.pad(rows, (0, 0, 0, missing)).flatten(0, 1)
            return rows.unflatten(1, (-1, self.tokens)).flatten(2)

        return self._joined(torch.cat([cut(keys), cut(values)], dim=2))

    def pack_selected(self, keys: torch.Tensor, values: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Collect chosen records of a history that lies in `keys` and `values` from position 0 on.

        Parameters
        ----------
        keys, values : ``[batch, heads, T, width]``
        records : int64 ``[lanes, n]``
            -1 for none; such an entry, and what follows the last token of the history, is unspecified.

        Returns
        -------
        ``[lanes, n, elements]``
        """
        batch, heads, length, _ = keys.shape
        within = torch.arange(self.tokens, device=records.device)
        token = (records[:, :, None] * self.tokens + within).clamp(0, length - 1)
        token = token.repeat_interleave(self.heads, dim=0).view(batch, heads, -1, 1)

        def collect(rows: torch.Tensor) -> torch.Tensor:
            chosen = rows.gather(2, token.expand(-1, -1, -1, rows.shape[3]))
            return chosen.view(batch * heads, records.shape[1], self.tokens * rows.shape[3])

        return self._joined(torch.cat([collect(keys), collect(values)], dim=2))

    def _joined(self, data: torch.Tensor) -> torch.Tensor:
        """``[batch * heads, n, elements of one head]`` -> ``[lanes, n, elements]``."""
        if self.heads == 1:
            return data
        return data.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)

    def unpack(self, data: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of consecutive records, as views if a lane has one head.

        Parameters
        ----------
        data : ``[lanes, n, elements]``

        Returns
        -------
        ``[batch, heads, n * tokens, key_width]`` and ``[batch, heads, n * tokens, value_width]``
        """
        if self.heads > 1:
            data = data.unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
        lanes, count, _ = data.shape
        keys, values = data.split([self.tokens * self.key_width, self.tokens * self.value_width], dim=2)

        def join(rows: torch.Tensor, width: int) -> torch.Tensor:
            return rows.reshape(batch, lanes // batch, count * self.tokens, width)

        return join(keys, self.key_width), join(values, self.value_width)


def chunks(count: int, record_nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut `count` records of so many bytes into runs of bounded size: first, and first of the next."""
    step = max(1, _CHUNK_BYTES // record_nbytes)
    return ((start, min(start + step, count)) for start in range(0, count, step))


def moved(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`state` with row `i` taken from row ``rows[i]``: in place if it keeps its shape, so that captured graphs stay good."""
    result = state.index_select(0, rows)
    return state.copy_(result) if result.shape == state.shape else result
