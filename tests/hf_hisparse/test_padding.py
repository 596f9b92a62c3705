"""What is known of padding, while decode steps are replayed that have no mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache

from hf_hisparse import HiSparseCache, Quest, sizes
from hf_hisparse.padding import Padding
from tests.models import prompt
from tests.oracle import quest_oracle


class _Pair:
    """A cache whose every decode step is captured and replayed, and the oracle, called alike."""

    def __init__(self, twins, **settings) -> None:
        self.twins = twins("qwen3", "cpu")
        self.cache = HiSparseCache(self.twins.enabled, Quest(32, 4), **settings)
        self.own = DynamicCache(config=self.twins.native.config)

    @torch.no_grad()
    def call(self, tokens: int, mask: torch.Tensor | None = None) -> None:
        length = self.cache.get_seq_length()
        ids = prompt(2, tokens, seed=length)
        given = {"attention_mask": mask, "position_ids": torch.arange(length, length + tokens).expand(2, -1)}
        with quest_oracle(self.twins.native, 32, 4):
            expected = self.twins.native(ids, past_key_values=self.own, **given).logits
        self.cache.graphs._steps.clear()
        logits = self.twins.enabled(input_ids=ids, past_key_values=self.cache, **given).logits
        rows = slice(None) if mask is None else mask[:, -tokens:].bool().all(0)
        torch.testing.assert_close(logits[:, rows], expected[:, rows], atol=2e-4, rtol=0)

    def crop(self, tokens: int) -> None:
        for cache in (self.cache, self.own):
            cache.crop(-tokens)


def test_replayed_steps_go_beyond_what_was_known(twins, monkeypatch, imagined_graphs):
    """The layers grow meanwhile; then a page is cut, and a call has a mask again."""
    monkeypatch.setattr(sizes, "_GROWTH_TOKENS", 1)
    pair = _Pair(twins)
    pair.call(100)
    pair.call(3)  # several rows after others: the model makes a mask
    known = pair.cache.padding.allowed.shape[1]
    while pair.cache.get_seq_length() < known + 5:
        pair.call(1)
    assert pair.cache.graphs.replays > 5
    pair.crop(2)
    pair.call(3)
    pair.call(1)


def test_the_gpu_is_asked_once_what_masks_hid(monkeypatch):
    """And again when a mask has said something new, rows have moved, or keys were cut."""
    asked = []
    every = torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda tensor, *args: asked.append(1) or every(tensor, *args))
    padding = Padding()
    padding.note(0, 5, torch.ones(2, 5, dtype=torch.bool), 16)
    for length in range(5, 9):
        assert not padding.hides(length, length + 1)
        padding.note(length, length + 1, None, 16)
    assert len(asked) == 1
    padding.note(9, 11, torch.tensor([[True, True], [False, True]]), 16)
    for length in (11, 12):
        assert padding.hides(length, length + 1)
    assert len(asked) == 2
    padding.rearrange(torch.tensor([0, 0]))
    assert not padding.hides(11, 12)
    padding.take(torch.tensor([[False] + [True] * 11] * 2), 16)
    assert padding.hides(12, 13)
    padding.crop(0)
    assert not padding.hides(0, 1)
    padding.load({"allowed": torch.tensor([[True, False]])}, 2, 16, torch.device("cpu"))
    assert padding.hides(2, 3)
    padding.crop(1)
    assert not padding.hides(1, 2)


def test_padding_that_was_cropped_hides_nothing_that_comes_in_its_place(twins, imagined_graphs):
    pair = _Pair(twins)
    mask = torch.ones((2, 100), dtype=torch.long)
    mask[1, 90:] = 0
    pair.call(100, mask)
    pair.crop(12)
    for _ in range(10):
        pair.call(1)
    assert pair.cache.graphs.replays == 9
    pair.crop(1)  # the page is read again, by what is known of its tokens
    pair.call(3)
    pair.call(40)


@pytest.mark.parametrize("settings", [{}, {"host_dense_layers": True}], ids=["", "dense-layers-on-the-host"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("before, after", [*itertools.permutations(["none", "some", "others"], 2)])
def test_a_mask_that_says_otherwise_of_tokens_held(twins, imagined_graphs, before, after, tokens, settings):
    """As when rows of a batch ended early: the mask of the next turn hides what they were filled up with."""
    pair = _Pair(twins, **settings)
    hidden = {"none": (), "some": (5, 6, 7, 30, 61, 62, 63, 64, 65, 66), "others": (30, 31, 32, 33, 98)}

    def mask(which: str, length: int) -> torch.Tensor:
        mask = torch.ones((2, length), dtype=torch.long)
        mask[1, list(hidden[which])] = 0
        mask[0, 40 : 52 if which == "some" else 40] = 0
        return mask

    pair.call(100, mask(before, 100))
    for length in range(101, 104):
        pair.call(1, mask(before, length))
    held = 103 + tokens
    pair.call(tokens, mask(after, held))
    for length in range(held + 1, held + 4):
        pair.call(1, mask(after, length))
    assert pair.cache.graphs.replays >= 4


def test_no_mask_first_and_then_one_that_hides(twins, imagined_graphs):
    pair = _Pair(twins)
    pair.call(100)
    pair.call(1)
    pair.call(1)
    mask = torch.ones((2, 103), dtype=torch.long)
    mask[1, 50:70] = 0
    pair.call(1, mask)
    pair.call(1, torch.nn.functional.pad(mask, (0, 1), value=1))
