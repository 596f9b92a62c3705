"""The judge is judged first: by loops over pages and channels, and on whether a wrong selection can be seen at all."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import DynamicCache

from tests.generate.scenarios import SCENARIOS, Session
from tests.models import SUPPORTED
from tests.oracle import QuestOracle, quest_oracle


def _attend_by_loops(q, k, v, visible, rows_before, budget, page_size):
    """One query head group of one row: ``q [group, D]``, ``k, v [T, D]``, ``visible [T]`` (not padding)."""
    own = rows_before // page_size
    scores = {}
    for page in range(own):
        keys = [k[t] for t in range(page * page_size, (page + 1) * page_size) if visible[t]]
        if keys:
            low, high = (f(torch.stack(keys), 0).values for f in (torch.min, torch.max))
            scores[page] = max(
                sum(max(float(a * b), float(a * c)) for a, b, c in zip(head, low, high, strict=True))
                for head in q
            )
    best = sorted(scores, key=scores.get, reverse=True)[: budget // page_size - 1]
    read = [t for t in range(rows_before + 1) if visible[t] and t // page_size in (*best, own)]
    weights = torch.softmax(q @ k[read].T / math.sqrt(q.shape[1]), dim=-1)
    return weights @ v[read]


@pytest.mark.parametrize(("rows", "budget", "page_size"), [(1, 8, 4), (3, 8, 4), (5, 6, 2), (4, 4, 4)])
def test_oracle_is_the_rule_written_as_loops(rows, budget, page_size):
    torch.manual_seed(0)
    batch, kv_heads, group, width, tokens = 2, 2, 2, 6, 39
    q = torch.randn(batch, kv_heads * group, rows, width)
    k, v = torch.randn(2, batch, kv_heads, tokens, width).unbind(0)
    visible = torch.ones(batch, tokens, dtype=torch.bool)
    visible[1, :14] = False
    visible[1, 22] = False
    causal = torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)
    mask = visible[:, None, None] & causal

    module = torch.nn.Module()
    module.layer_idx = 5
    oracle = QuestOracle(budget, page_size)
    output, _ = oracle(module, q, k, v, mask, scaling=width**-0.5)  # [B, S, H, D]

    assert oracle.sparse_calls == 1
    for b, row, head in itertools.product(range(batch), range(rows), range(kv_heads)):
        group_of_head = slice(head * group, (head + 1) * group)
        expected = _attend_by_loops(
            q[b, group_of_head, row],
            k[b, head],
            v[b, head],
            visible[b],
            tokens - rows + row,
            budget,
            page_size,
        )
        torch.testing.assert_close(output[b, row, group_of_head], expected)


@pytest.mark.parametrize("name", SUPPORTED)
def test_oracle_that_selects_everything_is_the_model(twins, name):
    model = twins(name, "cpu").native
    plain = Session(model, lambda: DynamicCache(config=model.config))
    SCENARIOS["left_padded"](plain)
    full = Session(model, plain.new_cache)
    with quest_oracle(model, budget=4096, page_size=16, dense_layers=0) as oracle:
        SCENARIOS["left_padded"](full)
    assert oracle.sparse_calls == 0
    assert torch.equal(plain.texts[0], full.texts[0])
    torch.testing.assert_close(plain.logits[0], full.logits[0], atol=1e-5, rtol=0)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", SUPPORTED)
def test_selection_is_visible_in_the_text(twins, name):
    """Dense, Quest, and Quest with one page less give three texts: so a parity test can fail."""
    model = twins(name, "cpu").native
    texts = []
    for budget in (4096, 32, 28):
        session = Session(model, lambda: DynamicCache(config=model.config))
        with quest_oracle(model, budget, page_size=4, dense_layers=1):
            SCENARIOS["greedy"](session)
        texts.append(session.texts[0])
    for one, other in itertools.combinations(texts, 2):
        assert not torch.equal(one, other)
