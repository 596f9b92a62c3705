"""Assisted decoding is a faster way to the same text."""

from __future__ import annotations

import pytest

from tests.generate.parity import Settings
from tests.generate.scenarios import LONG, Session


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", ["model", "prompt lookup"])
def test_assisted_decoding_gives_the_tokens_of_greedy(twins, device, drafts, seed):
    """After the first call, that is: it holds prompt and draft together, and so it is prefill."""
    model = twins("qwen3", device).enabled
    session = Session(model, lambda: Settings(buffer=48).cache(model))
    ids = session.prompt(1, LONG, seed)
    cache, lengths = session.new_cache(), []
    crop = cache.crop

    def crop_and_note(tokens: int) -> None:
        crop(tokens)
        lengths.append(cache.get_seq_length())

    cache.crop = crop_and_note
    if drafts == "model":
        how = {"assistant_model": session.draft_model()}
    else:
        how = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}
    text = session.generate(ids, cache, max_new_tokens=24, **how)
    assert len(lengths) > 2

    cache = session.new_cache()
    session.forward(text[:, : lengths[0]], cache)  # the prompt, and of the first draft what was right
    known = text[:, : lengths[0] + 1]
    plain = session.generate(known, cache, max_new_tokens=text.shape[1] - known.shape[1])
    assert plain.tolist() == text.tolist()
