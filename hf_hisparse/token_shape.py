"""What all tokens of a layer have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch

_NAMES = ("batch size", "KV heads", "key width", "value width", "dtype", "device")


class TokenShape(NamedTuple):
    """The shape, type and device of keys and values ``[batch, heads, T, width]``, however many tokens."""

    batch: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> TokenShape:
        """That of these keys and values."""
        batch, heads, _, key_width = keys.shape
        return cls(batch, heads, key_width, values.shape[3], keys.dtype, keys.device)

    def blank(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of so many tokens, without memory or content."""
        one = torch.empty((1, 1, 1, 1), dtype=self.dtype, device=self.device)
        rows = (self.batch, self.heads, tokens)
        return one.expand(*rows, self.key_width), one.expand(*rows, self.value_width)

    def differences(self, held: TokenShape) -> str:
        """What of this differs from `held`, for a message."""
        return "; ".join(
            f"{name} {new}, but {old} is held"
            for name, new, old in zip(_NAMES, self, held, strict=True)
            if new != old
        )
