"""What users do with a cache, written once and run on any: `Session` says with which model and cache.

A scenario takes a `Session` and leaves the texts and logits of every call in it; a test runs it twice, with the
oracle and with `HiSparseCache`, and compares. So both are called in the same sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from tests.models import VOCAB, perturbed, prompt

LONG = 530  # tokens of a prompt: more than 8 times the budgets of the tests, no multiple of a page
NEW = 16


@dataclass
class Session:
    """A model and caches for it, and what they answered.

    Parameters
    ----------
    model : PreTrainedModel
    new_cache : callable
        Makes an empty cache for the model.
    texts : list of ``[rows, tokens]``
        Output: what each `generate` returned.
    logits : list of ``[steps, rows, vocab]``
        Output: the raw logits of each call.
    """

    model: PreTrainedModel
    new_cache: Callable[[], Cache]
    texts: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def prompt(self, batch: int, length: int, seed: int = 0) -> torch.Tensor:
        return prompt(batch, length, seed, device=str(self.model.device))

    def generate(self, ids: torch.Tensor, cache: Cache, **kwargs: object) -> torch.Tensor:
        """Greedy unless told otherwise; the random state is the same for every call."""
        torch.manual_seed(0)
        settings = {
            "do_sample": False,
            "max_new_tokens": NEW,
            "attention_mask": torch.ones_like(ids),
        } | kwargs
        output = self.model.generate(
            ids, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **settings
        )
        self.texts.append(output.sequences)
        self.logits.append(torch.stack(output.logits))
        return output.sequences

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Run `ids` after what the cache holds; `mask` ``[B, T]`` covers both."""
        positions = None
        if mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        real = slice(None) if mask is None else mask[:, -ids.shape[1] :].bool().all(0)
        self.logits.append(output.logits[:, real].transpose(0, 1))
        return output.logits

    def emptied(self, cache: Cache) -> Cache:
        """`cache` after `reset()`; a new one for transformers' own, which before 5.18 only zeroes what it holds."""
        if isinstance(cache, DynamicCache):
            return self.new_cache()
        cache.reset()
        return cache

    def draft_model(self) -> PreTrainedModel:
        """A model that drafts 5 tokens a round, some of them right, with plain dense attention."""
        draft = perturbed(self.model, 0.03)
        draft.set_attn_implementation("sdpa")
        draft.generation_config.num_assistant_tokens = 5
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return draft

    def left_padded(self, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of prompts of these lengths: ids and attention mask, both ``[B, max]``."""
        ids = self.prompt(len(lengths), max(lengths))
        mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
        mask = mask.to(ids)
        return ids * mask, mask


def grown(mask: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """`mask` with ones for the tokens that `to` has more."""
    return torch.cat([mask, mask.new_ones(len(mask), to.shape[1] - mask.shape[1])], dim=1)


def greedy(s: Session) -> None:
    s.generate(s.prompt(1, LONG), s.new_cache(), max_new_tokens=24)


def greedy_batch(s: Session) -> None:
    s.generate(s.prompt(3, LONG), s.new_cache())


def page_boundaries(s: Session) -> None:
    """The prompt ends one token before, at and after the end of a page."""
    for length in (527, 528, 529):
        s.generate(s.prompt(1, length), s.new_cache(), max_new_tokens=10)


def left_padded(s: Session) -> None:
    """Of the last prompt nearly all pages are padding, and fewer are left than the budget has."""
    ids, mask = s.left_padded(LONG, 431, 37)
    s.generate(ids, s.new_cache(), attention_mask=mask)


def sampling(s: Session) -> None:
    s.generate(s.prompt(2, LONG), s.new_cache(), do_sample=True, temperature=0.9, top_k=50)


def return_sequences(s: Session) -> None:
    s.generate(s.prompt(2, LONG), s.new_cache(), do_sample=True, num_return_sequences=3)


def beams(s: Session) -> None:
    s.generate(s.prompt(2, LONG), s.new_cache(), num_beams=3, num_return_sequences=2)


def beams_left_padded(s: Session) -> None:
    ids, mask = s.left_padded(LONG, 470)
    s.generate(ids, s.new_cache(), attention_mask=mask, num_beams=4)


def beam_sampling(s: Session) -> None:
    s.generate(s.prompt(1, LONG), s.new_cache(), num_beams=3, do_sample=True)


def prompt_lookup(s: Session) -> None:
    """Drafts from a prompt that repeats itself; most are wrong, so the cache is cropped again and again."""
    ids = s.prompt(1, LONG // 5).repeat(1, 5)
    ids = torch.cat([ids, torch.arange(3, VOCAB, device=ids.device)[None]], dim=1)  # any token has a match
    s.generate(ids, s.new_cache(), prompt_lookup_num_tokens=6, max_matching_ngram_size=1, max_new_tokens=24)


def assisted(s: Session) -> None:
    s.generate(s.prompt(1, LONG), s.new_cache(), assistant_model=s.draft_model(), max_new_tokens=24)


def assisted_sampling(s: Session) -> None:
    ids, draft = s.prompt(1, LONG), s.draft_model()
    s.generate(ids, s.new_cache(), assistant_model=draft, do_sample=True, max_new_tokens=24)


def chunked_prefill(s: Session) -> None:
    """Chunks that are prefill, the rest a prefill or a decode."""
    for chunk in (128, 100):
        s.generate(s.prompt(2, LONG), s.new_cache(), prefill_chunk_size=chunk, max_new_tokens=8)


def sparse_prefill(s: Session) -> None:
    """Chunks so short that each is decode."""
    s.generate(s.prompt(1, 300), s.new_cache(), prefill_chunk_size=24, max_new_tokens=4)


def chunked_prefill_left_padded(s: Session) -> None:
    ids, mask = s.left_padded(LONG, 300)
    s.generate(ids, s.new_cache(), attention_mask=mask, prefill_chunk_size=64)


def turns(s: Session) -> None:
    """A long second turn is prefill with a history, a short third one is decode."""
    cache = s.new_cache()
    text = s.generate(s.prompt(1, LONG), cache)
    text = s.generate(torch.cat([text, s.prompt(1, 70, seed=1)], dim=1), cache)
    s.generate(torch.cat([text, s.prompt(1, 11, seed=2)], dim=1), cache)


def turns_left_padded(s: Session) -> None:
    cache = s.new_cache()
    ids, mask = s.left_padded(LONG, 260)
    text = s.generate(ids, cache, attention_mask=mask)
    text = torch.cat([text, s.prompt(2, 50, seed=1)], dim=1)
    text = s.generate(text, cache, attention_mask=grown(mask, text))
    text = torch.cat([text, s.prompt(2, 7, seed=2)], dim=1)
    s.generate(text, cache, attention_mask=grown(mask, text))


def holes(s: Session) -> None:
    """Padding in the middle: a batch padded on the right, then continued."""
    cache = s.new_cache()
    ids, mask = s.left_padded(LONG, 450)
    ids, mask = ids.flip(1), mask.flip(1)
    s.forward(ids, cache, mask)
    for length in (9, 40):  # decode, then prefill
        ids = torch.cat([ids, s.prompt(2, length, seed=length)], dim=1)
        mask = grown(mask, ids)
        s.forward(ids[:, -length:], cache, mask)
    ids = torch.cat([ids, s.prompt(2, 1, seed=5)], dim=1)
    s.generate(ids, cache, attention_mask=grown(mask, ids))


def shared_prefix(s: Session) -> None:
    """One prefill for several questions, short and long; the last asks the first again, in a batch of its own."""
    prefix, cache = s.prompt(1, LONG), s.new_cache()
    s.forward(prefix, cache)
    for length in (12, 60, 1, 12):
        s.generate(torch.cat([prefix, s.prompt(1, length, seed=length)], dim=1), copy.deepcopy(cache))
    s.generate(torch.cat([prefix, s.prompt(1, 12, seed=12)], dim=1), cache)


def copy_while_decoding(s: Session) -> None:
    """Copy and original go on, in turns, with texts of their own."""
    cache = s.new_cache()
    text = s.generate(s.prompt(2, LONG), cache)
    twin = copy.deepcopy(cache)
    ours, theirs = text, text
    for seed in (1, 2):
        ours = s.generate(torch.cat([ours, s.prompt(2, 5, seed)], dim=1), cache, max_new_tokens=8)
        theirs = s.generate(torch.cat([theirs, s.prompt(2, 9, seed + 7)], dim=1), twin, max_new_tokens=8)


def crop(s: Session) -> None:
    """Back into what was generated, then deep into the prompt and to a page's middle, then to a few tokens."""
    cache = s.new_cache()
    text = s.generate(s.prompt(1, LONG), cache)
    for back, new, seed in ((5, 2, 1), (0, 3, 2), (103, 9, 3), (16, 60, 4), (400, 90, 5)):
        cache.crop(-back)
        text = torch.cat([text[:, : cache.get_seq_length()], s.prompt(1, new, seed)], dim=1)
        text = s.generate(text, cache, max_new_tokens=12)


def crop_batch(s: Session) -> None:
    """Back into the text, then to the middle of a page that is half padding; each request padded otherwise."""
    cache = s.new_cache()
    for lengths in ((LONG, 200), (281, LONG), (300, 151)):
        cache = s.emptied(cache)
        ids, mask = s.left_padded(*lengths)
        text = s.generate(ids, cache, attention_mask=mask)
        for kept, new in ((max(lengths) - 14, 6), (max(lengths) - min(lengths) + 2, 45)):
            cache.crop(kept - cache.get_seq_length())
            text = torch.cat([text[:, :kept], s.prompt(2, new, seed=new)], dim=1)
            text = s.generate(text, cache, attention_mask=grown(mask[:, :kept], text), max_new_tokens=12)


def copies_with_padding(s: Session) -> None:
    """Original and copy are padded at other places of the same page, and both are cropped back into it."""
    cache = s.new_cache()
    ids, mask = s.left_padded(LONG, 300)
    s.forward(ids, cache, mask)
    branches = [(cache, 0), (copy.deepcopy(cache), 1)]
    text = s.prompt(2, 60, seed=1)
    masks = {}
    for branch, row in branches:
        masks[row] = grown(mask, torch.cat([ids, text], dim=1))
        masks[row][row, LONG : LONG + 5] = 0
        s.forward(text, branch, masks[row])
    for branch, row in branches:
        branch.crop(-(branch.get_seq_length() - LONG - 5))
        held = masks[row][:, : LONG + 5]
        for call in text.flip(1).split([40] + [1] * 12 + [8], dim=1):
            held = torch.cat([held, torch.ones_like(call)], dim=1)
            s.forward(call, branch, held)


def crop_after_reorder(s: Session) -> None:
    """Rows that came from one row part in the middle of a page that both have, then in one that is half padding."""
    cache = s.new_cache()
    ids, mask = s.left_padded(LONG, 200, 89)
    s.forward(ids, cache, mask)
    rows = torch.tensor([2, 2, 0], device=ids.device)
    cache.reorder_cache(rows)
    for kept, calls in ((LONG - 8, [1] * 24), (LONG - 87, [40] + [1] * 10)):
        cache.crop(kept - cache.get_seq_length())
        held = mask[rows, :kept]
        for call in s.prompt(3, sum(calls), seed=kept).split(calls, dim=1):
            held = torch.cat([held, torch.ones_like(call)], dim=1)
            s.forward(call, cache, held)


def repeat_and_select(s: Session) -> None:
    cache, ids = s.new_cache(), s.prompt(2, LONG)
    s.forward(ids, cache)
    ids = torch.cat([ids, s.prompt(2, 3, seed=1)], dim=1)
    s.generate(ids, cache, max_new_tokens=4)
    kept = cache.get_seq_length()
    ids = s.texts[-1][:, :kept].repeat_interleave(3, dim=0)
    cache.batch_repeat_interleave(3)
    text = s.generate(torch.cat([ids, s.prompt(6, 4, seed=2)], dim=1), cache)
    rows = torch.tensor([5, 0, 2], device=ids.device)
    cache.batch_select_indices(rows)
    text = torch.cat([text[rows], s.prompt(3, 7, seed=3)], dim=1)
    s.generate(text, cache)


def reorder(s: Session) -> None:
    """Beams as a user's own search would move them: rows die and double, at every place of a page."""
    cache, ids = s.new_cache(), s.prompt(4, LONG)
    s.forward(ids, cache)
    for step in range(20):
        s.forward(s.prompt(4, 1, seed=step), cache)
        cache.reorder_cache(prompt(1, 4, seed=step)[0].to(ids.device) % 4)
    s.forward(s.prompt(4, 40, seed=30), cache)
    s.forward(s.prompt(4, 5, seed=31), cache)


def reset_and_reuse(s: Session) -> None:
    """One cache for requests of other batch sizes and lengths."""
    cache = s.new_cache()
    for batch, length in ((1, LONG), (3, LONG + 20), (2, 300)):
        s.generate(s.prompt(batch, length, seed=batch), cache)
        cache = s.emptied(cache)


def short_prompts(s: Session) -> None:
    """A first call of at most `decode_rows` tokens is decode: it has a history to read within itself."""
    for length in (1, 7, 32, 33):
        s.generate(s.prompt(2, length, seed=length), s.new_cache(), max_new_tokens=24)


def short_left_padded(s: Session) -> None:
    """Decode whose queries are padding themselves."""
    ids, mask = s.left_padded(31, 30, 3)
    s.generate(ids, s.new_cache(), attention_mask=mask, max_new_tokens=24)


CUTS = (1, 5, 32)
CUT_TOKENS = 40


def cuts(s: Session) -> None:
    """The same text after the same prefill, cut into calls of one row and of many."""
    prefix, cache = s.prompt(2, LONG), s.new_cache()
    text = s.prompt(2, CUT_TOKENS, seed=1)
    s.forward(prefix, cache)
    for rows in CUTS:
        ours = copy.deepcopy(cache)
        for start in range(0, CUT_TOKENS, rows):
            s.forward(text[:, start : start + rows], ours)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        greedy, greedy_batch, page_boundaries, left_padded, sampling, return_sequences, beams, beams_left_padded,
        beam_sampling, prompt_lookup, assisted, assisted_sampling, chunked_prefill, sparse_prefill,
        chunked_prefill_left_padded, turns, turns_left_padded, holes, shared_prefix, copy_while_decoding, crop,
        crop_batch, crop_after_reorder, copies_with_padding, repeat_and_select, reorder, reset_and_reuse, short_prompts,
        short_left_padded, cuts,
    )
}  # fmt: skip
