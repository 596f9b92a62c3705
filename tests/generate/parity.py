"""Runs one scenario with `HiSparseCache` and with what must answer the same, and compares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest
from tests.conftest import Twins
from tests.generate.scenarios import SCENARIOS, Session
from tests.oracle import QuestOracle, quest_oracle

TOLERANCE = 1e-4  # on logits of standard deviation 1 to 2


@dataclass(frozen=True)
class Settings:
    """How the cache is made; everything but the buffer is the oracle's too."""

    budget: int = 32
    page_size: int = 4
    dense_layers: int = 2
    decode_rows: int = 32
    buffer: int | None = field(default=None, compare=False)  # does not change an answer
    verify: bool = field(default=False, compare=False)
    host_dense_layers: bool | None = field(default=None, compare=False)

    def cache(self, model: torch.nn.Module) -> HiSparseCache:
        return HiSparseCache(
            model,
            Quest(self.budget, self.page_size, self.dense_layers),
            device_buffer_tokens=self.buffer,
            decode_rows=self.decode_rows,
            verify=self.verify,
            host_dense_layers=self.host_dense_layers,
        )


@functools.cache
def judge(twins: Twins, scenario: str, settings: Settings | None) -> tuple[Session, QuestOracle | None]:
    """The scenario on the model that the library never touched; dense on `DynamicCache` when `settings` is None."""
    model = twins.native
    session = Session(model, lambda: DynamicCache(config=model.config))
    if settings is None:
        SCENARIOS[scenario](session)
        return session, None
    with quest_oracle(
        model, settings.budget, settings.page_size, settings.dense_layers, settings.decode_rows
    ) as oracle:
        SCENARIOS[scenario](session)
    return session, oracle


def assert_parity(
    twins: Twins, scenario: str, settings: Settings, dense: bool = False
) -> list[HiSparseCache]:
    """Fails unless every text is the judge's, token by token, and every logit within `TOLERANCE`.

    Returns the caches that the scenario made.
    """
    expected, oracle = judge(twins, scenario, None if dense else settings)
    if oracle is None:
        hint = "the judge is dense"
    else:
        assert oracle.sparse_calls > 0, "the judge read everything: the scenario shows nothing"
        hint = f"closest choice of a page: {oracle.margin:.1e}; near 1e-6 take another seed"
    return _assert_answers(twins, scenario, expected, settings.cache, hint)


def assert_parity_of_own_selection(
    twins: Twins, scenario: str, same_bits: bool = False, **settings: object
) -> list[HiSparseCache]:
    """The same for a model that selects by itself, against its own `DynamicCache`; logits to the bit if asked for."""
    expected, _ = judge(twins, scenario, None)
    hint, tolerance = "the judge is the model with its own cache", 0.0 if same_bits else TOLERANCE
    return _assert_answers(
        twins, scenario, expected, lambda model: HiSparseCache(model, **settings), hint, tolerance
    )


def _assert_answers(
    twins: Twins,
    scenario: str,
    expected: Session,
    make: Callable[[torch.nn.Module], HiSparseCache],
    hint: str,
    tolerance: float = TOLERANCE,
) -> list[HiSparseCache]:
    caches: list[HiSparseCache] = []

    def new_cache() -> HiSparseCache:
        caches.append(make(twins.enabled))
        return caches[-1]

    ours = Session(twins.enabled, new_cache)
    SCENARIOS[scenario](ours)
    assert len(ours.texts) == len(expected.texts)
    assert len(ours.logits) == len(expected.logits)
    for call, (text, wanted) in enumerate(zip(ours.texts, expected.texts, strict=True)):
        assert text.shape == wanted.shape, f"text {call}: {list(text.shape)}, not {list(wanted.shape)}"
        wrong = (text != wanted).any(0).nonzero()
        assert len(wrong) == 0, (
            f"text {call} is another one from token {int(wrong[0])} of {text.shape[1]}; {hint}"
        )
    for call, (logits, wanted) in enumerate(zip(ours.logits, expected.logits, strict=True)):
        error = float((logits - wanted).abs().max())
        assert error <= tolerance, f"call {call}: logits are off by {error:.1e}; {hint}"
    return caches
