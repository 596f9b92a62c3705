"""block_scores against float64, and the reference, bit for bit, against the indexer of transformers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

from hisparse_kernels import reference
from hisparse_kernels.block_scores import block_scores

from .layers import GPU, assert_same_bits

TOLERANCE = 2e-5  # times the width: products of 16-bit numbers are exact in fp32, and so is a maximum


class Case(NamedTuple):
    """Arguments of block_scores, on the CPU."""

    query: torch.Tensor
    keys: torch.Tensor
    hidden: torch.Tensor
    block_size: int

    def inputs(self, device: str = "cpu") -> tuple:
        """The keys as the beginning of a longer buffer that holds NaN after them."""
        batch, history, width = self.keys.shape
        longer = torch.full((batch, history + 9, width), float("nan"), dtype=self.keys.dtype, device=device)
        longer[:, :history] = self.keys.to(device)
        return self.query.to(device), longer[:, :history], self.hidden.to(device), self.block_size

    def oracle(self) -> torch.Tensor:
        """In float64, one block after the other."""
        scores = torch.einsum("bhsd,btd->bhst", self.query.double(), self.keys.double())
        scores = scores.masked_fill(self.hidden[:, None], float("-inf"))
        return torch.stack([block.amax(-1) for block in scores.split(self.block_size, dim=-1)], dim=-1)


def make(*, batch=1, heads=4, queries=1, history=40, width=16, block=8, dtype=torch.float32, seed=0) -> Case:
    """The queries are the last tokens of the history; some keys are hidden from some of them besides."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, queries, width, generator=generator).to(dtype)
    keys = torch.randn(batch, history, width, generator=generator).to(dtype)
    hidden = torch.rand(batch, queries, history, generator=generator) < 0.2
    own = torch.arange(history - queries, history)
    hidden |= torch.arange(history) > own[:, None]
    hidden[0, 0, : 2 * block] = True
    return Case(query, keys, hidden, block)


def case(dtype, *marks, **sizes):
    name = "-".join(f"{key}{value}" for key, value in sizes.items()) + f"-{dtype}".replace("torch.", "")
    return pytest.param({"dtype": dtype, **sizes}, id=name, marks=marks)


SMALL = [
    case(torch.float32),
    case(torch.float32, heads=1, queries=3, history=37),
    case(torch.float32, heads=3, queries=21, history=50, block=20, width=20),
    case(torch.float32, batch=2, heads=2, queries=5, history=65, block=1),
    case(torch.float16, batch=2, queries=40, history=130, block=33, width=24),
    case(torch.float16, queries=2, history=7, block=128),
]
_BIG_SIZES = [
    {"batch": 8, "history": 131072, "width": 128, "block": 128},
    {"queries": 700, "history": 3001, "width": 128, "block": 128},
    {"batch": 2, "heads": 16, "queries": 129, "history": 2000, "width": 64, "block": 48},
]
BIG = [case(torch.bfloat16, GPU, **sizes) for sizes in _BIG_SIZES] + [
    case(torch.float32, GPU, **sizes) for sizes in _BIG_SIZES[1:]
]


@pytest.mark.parametrize("sizes", SMALL)
def test_reference_is_the_best_of_each_block(sizes):
    case = make(**sizes)
    got = reference.block_scores(*case.inputs())
    torch.testing.assert_close(got.double(), case.oracle(), atol=TOLERANCE * case.keys.shape[2], rtol=0)


@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_kernel_is_the_best_of_each_block(device, sizes):
    case = make(**sizes)
    got = block_scores(*case.inputs(device))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), case.oracle(), atol=TOLERANCE * case.keys.shape[2], rtol=0)


def test_hidden_may_be_shared_by_the_batch(device):
    case = make(batch=3, queries=5)
    query, keys, _, size = case.inputs(device)
    hidden = case.hidden[:1].to(device).expand(3, -1, -1)
    assert_same_bits(
        "scores",
        block_scores(query, keys, hidden, size),
        block_scores(query, keys, hidden.contiguous(), size),
    )


@torch.no_grad()
def test_reference_has_the_bits_of_transformers(monkeypatch):
    """Caught where its indexer chooses."""
    sizes = {"index_n_heads": 4, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3}
    config = MiniMaxM3VLTextConfig(hidden_size=32, head_dim=16, rotary_dim=8, **sizes)
    torch.manual_seed(0)
    indexer = modeling_minimax_m3_vl.MiniMaxM3VLIndexer(config, 0)
    hidden_states, positions = torch.randn(2, 45, 32), torch.arange(45).expand(2, -1)
    angles = torch.rand(2, 45, 8)
    made, found = [], []
    real_matmul, real_scatter = torch.matmul, torch.Tensor.scatter_
    monkeypatch.setattr(torch, "matmul", lambda *args: (made.append(args), real_matmul(*args))[1])
    monkeypatch.setattr(
        torch.Tensor,
        "scatter_",
        lambda self, *args: (found.append(self.clone()), real_scatter(self, *args))[1],
    )
    indexer(hidden_states, (angles.cos(), angles.sin()), None, positions)
    monkeypatch.undo()
    query, keys = made[-1][0], made[-1][1][:, 0].transpose(1, 2)
    unseen = torch.arange(45) > positions[:, :, None]
    assert_same_bits("scores", reference.block_scores(query, keys, unseen, 8), found[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(1, 4, 1, 16, dtype=torch.float16)}, "one dtype"),
        ({"query": torch.zeros(1, 4, 1, 32)[..., ::2]}, "query must be contiguous"),
        ({"keys": torch.zeros(2, 40, 16)}, r"keys must be \[1, T, 16\]"),
        ({"hidden": torch.zeros(1, 1, 40)}, r"hidden must be bool \[1, 1, 40\]"),
        ({"hidden": torch.zeros(1, 1, 39, dtype=torch.bool)}, r"hidden must be bool \[1, 1, 40\]"),
        ({"hidden": torch.zeros(1, 1, 80, dtype=torch.bool)[..., ::2]}, "hidden must be contiguous"),
    ],
)
def test_wrong_arguments(changed, message):
    with pytest.raises(ValueError, match=message):
        block_scores(*make()._replace(**changed))
