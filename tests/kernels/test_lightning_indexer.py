"""lightning_indexer against float64 and, bit for bit, against the indexers of transformers."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig

from hisparse_kernels import reference
from hisparse_kernels.lightning_indexer import lightning_indexer

from .layers import GPU, assert_same_bits


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Case(NamedTuple):
    """Arguments of lightning_indexer, on the CPU."""

    query: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    start: int
    allowed: torch.Tensor | None
    softmax_scale: float

    def inputs(self, device: str = "cpu") -> dict:
        """The keys as the beginning of a longer buffer that holds NaN after them."""
        longer = torch.full((len(self.keys), self.keys.shape[1] + 9, self.keys.shape[2]), float("nan"))
        longer = longer.to(device, self.keys.dtype)
        longer[:, : self.keys.shape[1]] = self.keys.to(device)
        return {
            "query": self.query.to(device),
            "keys": longer[:, : self.keys.shape[1]],
            "weights": self.weights.to(device),
            "start": self.start,
            "allowed": None if self.allowed is None else self.allowed.to(device),
            "softmax_scale": self.softmax_scale,
        }

    def oracle(self) -> torch.Tensor:
        """In float64, one query after the other."""
        batch, queries, _, _ = self.query.shape
        scores = torch.full((batch, queries, self.keys.shape[1]), float("-inf"), dtype=torch.float64)
        for row in range(batch):
            for at in range(queries):
                seen = min(self.start + at + 1, self.keys.shape[1])
                products = self.query[row, at].double() @ self.keys[row, :seen].double().T
                score = self.weights[row, at].double() @ (self.softmax_scale * products).clamp(min=0)
                if self.allowed is not None:
                    score = score.masked_fill(~self.allowed[row, :seen], float("-inf"))
                scores[row, at, :seen] = score
        return scores


def make(
    *,
    batch: int = 1,
    queries: int = 1,
    history: int = 40,
    start: int | None = None,
    heads: int = 4,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    seed: int = 0,
) -> Case:
    """The queries are the last tokens of the history unless `start` says otherwise; NaN in padding keys."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, heads, width, generator=generator).to(dtype)
    keys = torch.randn(batch, history, width, generator=generator).to(dtype)
    weights = torch.randn(batch, queries, heads, generator=generator) * heads**-0.5
    allowed = None
    if padded:
        allowed = torch.rand(batch, history, generator=generator) < 0.7
        keys[~allowed] = float("nan")
    start = history - queries if start is None else start
    return Case(query, keys, weights, start, allowed, width**-0.5)


def shape(dtype, *marks, **sizes):
    name = "-".join(f"{key}{value}" for key, value in sizes.items()) + f"-{dtype}".replace("torch.", "")
    return pytest.param({"dtype": dtype, **sizes}, id=name, marks=marks)


SMALL = [
    shape(torch.float32, history=1),
    shape(torch.float32, history=77, batch=2, padded=True),
    shape(torch.float32, history=50, queries=50),
    shape(torch.float32, history=41, queries=9, heads=16, width=24, batch=2, padded=True),
    shape(torch.float32, history=30, queries=37, heads=7, width=20, start=0),
    shape(torch.float16, history=300, queries=1, heads=64, width=128),
    shape(torch.float16, history=260, queries=45, batch=2, heads=24, width=32, padded=True),
    shape(torch.float16, history=129, queries=129, heads=3, width=40),
    shape(torch.float16, history=130, queries=20, heads=70),
]
_BIG_SIZES = [
    {"history": 5000, "queries": 1, "heads": 64, "width": 128, "batch": 8, "padded": True},
    {"history": 3001, "queries": 300, "heads": 64, "width": 128, "batch": 2, "padded": True},
    {"history": 1024, "queries": 1024, "heads": 32, "width": 128},
    {"history": 777, "queries": 70, "heads": 16, "width": 64, "batch": 3},
    {"history": 2000, "queries": 33, "heads": 48, "width": 96, "start": 1000},
]
BIG = [shape(dtype, GPU, **sizes) for sizes in _BIG_SIZES for dtype in (torch.bfloat16, torch.float32)]
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [lightning_indexer, reference.lightning_indexer], ids=["kernel", "reference"]
)


def assert_scores(got: torch.Tensor, want: torch.Tensor) -> None:
    """-inf in the same places, elsewhere as close as fp32 sums are: the inputs enter exactly in every dtype."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sizes", [*SMALL, shape(torch.bfloat16, history=600, queries=90, heads=64, width=128, padded=True)]
)
def test_reference_is_the_formula(sizes):
    case = make(**sizes)
    assert_scores(reference.lightning_indexer(**case.inputs()), case.oracle())


@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_kernel_is_the_formula(device, sizes):
    case = make(**sizes)
    assert_scores(lightning_indexer(**case.inputs(device)), case.oracle())


@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_kernel_is_as_exact_as_torch(device, sizes):
    case = make(**sizes)
    got = lightning_indexer(**case.inputs(device)).cpu()
    torch_own = reference.lightning_indexer(**case.inputs(device)).cpu()
    oracle = case.oracle()
    finite = oracle.isfinite()

    def error(result: torch.Tensor) -> float:
        return (result.double() - oracle)[finite].square().mean().sqrt().item()

    assert error(got) <= 3 * error(torch_own) + 1e-7


@pytest.mark.parametrize("family, indexer", [("deepseek_v32", "DeepseekV32"), ("glm_moe_dsa", "GlmMoeDsa")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch, history", [(1, 120), (2, 301)])
def test_reference_selects_what_the_model_selects(family, indexer, dtype, batch, history):
    """The order of all keys is the model's own, for the prompt at once, in slices, and for its last token alone."""
    config = AutoConfig.for_model(
        family, hidden_size=64, q_lora_rank=32, index_n_heads=16, index_head_dim=32, qk_rope_head_dim=16
    )
    config.index_topk = history
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    module = getattr(modeling, f"{indexer}Indexer")(config, 0).to(dtype).eval()
    hidden, residual = torch.randn(batch, history, 64).to(dtype), torch.randn(batch, history, 32).to(dtype)
    no_rotation = torch.ones(batch, history, 16, dtype=dtype), torch.zeros(batch, history, 16, dtype=dtype)
    allowed = torch.ones(batch, history, dtype=torch.bool)
    allowed[-1, :17] = False
    mask = torch.ones(history, history, dtype=torch.bool).tril() & allowed[:, None]
    want = module(hidden, residual, no_rotation, mask, None)

    with torch.no_grad():
        query = module.wq_b(residual).view(batch, history, 16, 32)
        keys = module.k_norm(module.wk(hidden))
        weights = module.weights_proj(hidden).float() * 16**-0.5
    for first, last in ((0, history), (0, 50), (50, history), (history - 1, history)):
        part = slice(first, last)
        scores = reference.lightning_indexer(
            query[:, part], keys, weights[:, part], first, allowed, module.softmax_scale
        )
        assert_same_bits(f"queries {part}", scores.topk(history, dim=-1).indices.int(), want[:, part])


@IMPLEMENTATIONS
def test_the_models_own_nan_is_not_hidden(device, implementation):
    case = make(queries=3)
    case.query[0, 1, 2, 3] = float("nan")
    scores = implementation(**case.inputs(device)).cpu()
    assert scores[0, 1, :39].isnan().all() and scores[0, 1, 39] == float("-inf")
    assert not scores[0, ::2].isnan().any()


def test_arguments_that_are_slices(device):
    whole = make(batch=2, queries=30, padded=True).inputs(device)
    want = lightning_indexer(**whole)
    part = {name: whole[name][:, 11:] for name in ("query", "weights")} | {"start": whole["start"] + 11}
    torch.testing.assert_close(lightning_indexer(**whole | part), want[:, 11:])


@GPU
def test_scores_beyond_int32(device):
    queries, history = 33, 2**26 + 5
    case = make(queries=queries, history=500, heads=16, dtype=torch.bfloat16)
    arguments = case.inputs(device)
    keys = torch.zeros(1, history, 16, dtype=torch.bfloat16, device=device)
    keys[:, -500:] = arguments["keys"]
    scores = lightning_indexer(**arguments | {"keys": keys, "start": history - queries})
    assert_scores(scores[:, :, -500:], case.oracle())
    assert (scores[:, :, :1000] == 0).all()


@pytest.mark.parametrize(
    "name, value",
    [
        ("query", torch.zeros(1, 2, 4, 16, dtype=torch.float16)),
        ("query", torch.zeros(1, 4, 2, 16).transpose(1, 2)),
        ("keys", torch.zeros(1, 40, 15)),
        ("keys", torch.zeros(2, 40, 16)),
        ("keys", torch.zeros(1, 80, 16)[:, ::2]),
        ("weights", torch.zeros(1, 2, 4, dtype=torch.float16)),
        ("weights", torch.zeros(1, 2, 5)),
        ("allowed", torch.zeros(1, 40)),
        ("allowed", torch.zeros(1, 41, dtype=torch.bool)),
        ("softmax_scale", 0.0),
    ],
    ids=lambda value: value if isinstance(value, str | float) else f"{list(value.shape)}-{value.dtype}",
)
def test_wrong_arguments_are_named(name, value):
    arguments = make(queries=2).inputs() | {name: value}
    with pytest.raises(ValueError, match=name):
        lightning_indexer(**arguments)
