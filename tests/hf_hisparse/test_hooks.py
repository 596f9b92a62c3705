"""Forward hooks of users run in every decode step: a replay would leave them out."""

from __future__ import annotations

import torch

from hf_hisparse import HiSparseCache, Quest
from tests import models
from tests.models import prompt


@torch.no_grad()
def test_a_hook_is_not_left_out(imagined_graphs, caplog):
    model = models.build("qwen3")
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=1))
    model(prompt(1, 100), past_key_values=cache)
    step = {"input_ids": prompt(1, 1), "past_key_values": cache}

    def decode(count: int) -> int:
        replays = cache.graphs.replays
        for _ in range(count):
            cache.graphs._steps.clear()  # an imagined graph can be replayed once
            model(**step)
        return cache.graphs.replays - replays

    assert decode(3) == 2  # the first one is eager
    seen = []
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert decode(3) == 0 and len(seen) == 3
    assert [record.message for record in caplog.records if "Qwen3MLP has a forward hook" in record.message]
    handle.remove()
    assert decode(2) == 2


@torch.no_grad()
def test_hooks_that_change_nothing(imagined_graphs):
    """Those of transformers, which stay once outputs of inner layers were asked for, and those around the whole model."""
    model = models.build("qwen3")
    cache = HiSparseCache(model, Quest(32, 4, dense_layers=1))
    model(prompt(1, 100), past_key_values=cache, output_hidden_states=True)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        model(input_ids=prompt(1, 1), past_key_values=cache)
    assert cache.graphs.replays == 1 and len(seen) == 2
