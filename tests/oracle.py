"""The judge of the end-to-end tests: the same model and the same selector with everything resident.

Quest by the letter on transformers' own `DynamicCache`, written from the paper and our rule for incomplete pages, and
without a line of `hf_hisparse`: every call reads the full K, cuts it into pages afresh, and hands PyTorch's attention
a dense mask. Slow, stateless, and so simple that it can be read at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

_NAME = "quest_oracle"


@dataclass
class QuestOracle:
    """An attention function that selects pages by the literal rule.

    Parameters
    ----------
    budget : int
        Tokens that one query may read, ``budget / page_size`` pages.
    page_size, dense_layers, decode_rows : int
        As in the library: a call of more than `decode_rows` rows and the first `dense_layers` layers are dense.
    margin : float
        Output: the smallest difference seen between the last page taken and the first one left. Two runs whose
        scores differ by more than that in the last bits may take different pages and both be right.
    sparse_calls : int
        Output: how many calls left at least one readable key out.
    """

    budget: int
    page_size: int
    dense_layers: int = 2
    decode_rows: int = 32
    margin: float = field(default=math.inf, init=False)
    sparse_calls: int = field(default=0, init=False)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [B, H, S, D]
        key: torch.Tensor,  # [B, G, T, D]
        value: torch.Tensor,  # [B, G, T, D]
        attention_mask: torch.Tensor,  # bool [B, 1, S, T]
        scaling: float,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        rows = query.shape[2]
        mask = attention_mask
        if rows <= self.decode_rows and module.layer_idx >= self.dense_layers and sliding_window is None:
            mask = self._mask_of_selected_pages(query.float(), key.float(), mask)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        output = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=mask, scale=scaling
        )
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    def _mask_of_selected_pages(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """`mask` less the keys whose page the query's KV head did not choose: bool ``[B, H, S, T]``."""
        batch, heads, rows, width = query.shape
        kv_heads, tokens = key.shape[1:3]
        page = torch.arange(tokens, device=key.device) // self.page_size  # of each key, [T]
        pages = int(page[-1]) + 1
        position = torch.arange(tokens - rows, tokens, device=key.device)

        # Padding is what the last row may not see although nothing lies after it: [B, 1, T, 1].
        padding = ~mask[:, 0, -1, :][:, None, :, None]
        low = key.new_full((batch, kv_heads, pages, width), math.inf)
        high = key.new_full((batch, kv_heads, pages, width), -math.inf)
        index = page[:, None].expand(batch, kv_heads, tokens, width)
        low.scatter_reduce_(2, index, key.masked_fill(padding, math.inf), "amin")
        high.scatter_reduce_(2, index, key.masked_fill(padding, -math.inf), "amax")
        empty = (low > high).any(-1)  # [B, G, pages]

        chosen = torch.zeros(batch, kv_heads, rows, pages, dtype=torch.bool, device=key.device)
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, G, group, S, D]
        for row in range(rows):
            q = grouped[:, :, :, row, None, :]  # [B, G, group, 1, D]
            bound = torch.maximum(q * low[:, :, None], q * high[:, :, None]).sum(-1)  # [B, G, group, pages]
            score = bound.amax(2)
            own = int(position[row]) // self.page_size
            score = score.masked_fill(empty, -math.inf)
            score[:, :, own:] = -math.inf
            count = self.budget // self.page_size - 1
            ranked, order = score.sort(-1, descending=True)
            if count < pages:
                gap = ranked[..., count - 1] - ranked[..., count] if count else ranked.new_tensor(math.inf)
                self.margin = min(self.margin, float(gap.nan_to_num(nan=math.inf).min()))
            best = torch.zeros_like(empty)
            best.scatter_(2, order[..., :count], ranked[..., :count] > -math.inf)
            best[:, :, own] = True
            chosen[:, :, row] = best

        selected = mask & chosen[..., page]
        self.sparse_calls += int((selected != mask).any())
        return selected.repeat_interleave(heads // kv_heads, dim=1)


def _full_mask(*args: object, **kwargs: object) -> torch.Tensor:
    """Transformers' bool mask ``[B, 1, S, T]``, also where it would leave it to `is_causal`."""
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


@contextmanager
def quest_oracle(
    model: torch.nn.Module, budget: int, page_size: int, dense_layers: int = 2, decode_rows: int = 32
) -> Iterator[QuestOracle]:
    """Let `model` attend by `QuestOracle`; its attention implementation comes back at the end.

    One at a time: the attention function is registered under a single name.
    """
    attention = QuestOracle(budget, page_size, dense_layers, decode_rows)
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, _full_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield attention
    finally:
        model.set_attn_implementation(before)
