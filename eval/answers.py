"""One greedy answer through a cache, and what it took."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache
from transformers.generation import StoppingCriteria

from eval.methods import Caches, kv_bytes
from eval.prompts import Prompt
from hf_hisparse import HiSparseCache

# From 5.24 on models and `generate` also call it `cache`; `past_key_values` is the name that all versions know.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)


@dataclass(frozen=True)
class Measures:
    """What one answer took.

    Attributes
    ----------
    prompt_tokens, new_tokens : int
    sparse_steps : int
        Tokens that were decoded sparsely: those of the answer, and of the question if it is fed as decode.
    selected, hits : int
        Records that those steps read, and those among them that were in the hot buffer.
    kv_bytes : int
        On the GPU after the last token (see `eval.methods.kv_bytes`).
    prompt_s, decode_s : float
        Seconds until the first new token, and from there to the last.
    """

    prompt_tokens: int
    new_tokens: int
    sparse_steps: int
    selected: int
    hits: int
    kv_bytes: int
    prompt_s: float
    decode_s: float


@dataclass(frozen=True)
class Answer:
    """New token ids, the end-of-text token included, and what they took."""

    tokens: list[int]
    measures: Measures


def answer(
    caches: Caches,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    stop_tokens: list[int] | None = None,
) -> Answer:
    """Answer greedily.

    If the prompt says where its question begins, only what comes before is prefilled; the question is fed in calls of at
    most `decode_rows` tokens, which a sparse method reads sparsely. The ids are the same either way.

    Parameters
    ----------
    caches
        Where the cache comes from; its model answers.
    stop_tokens
        End the answer, but not before its first token; default: what the model's generation config says.

    Raises
    ------
    ValueError
        If prompt and answer are longer than the model was made for.
    """
    model: Any = caches.model
    tokens = len(prompt.ids) + max_new_tokens
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    if tokens > most:
        raise ValueError(
            f"a prompt of {len(prompt.ids)} tokens and an answer of up to {max_new_tokens} are more than the {most} that the "
            "model was made for: lower the length"
        )
    cache = caches.empty(tokens)
    ids = torch.tensor([prompt.ids], device=model.device)
    clock = Clock()
    began = time.perf_counter()
    if prompt.question is not None:
        _read_in_steps(model, cache, ids, prompt.question, caches.method.decode_rows)
    stops = {} if stop_tokens is None else {"eos_token_id": stop_tokens, "min_new_tokens": 1}
    output = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=_pad_token(model),
        stopping_criteria=[clock],
        **stops,
    )
    new = output[0, ids.shape[1] :].tolist()
    times = [began, *clock.times]
    seconds = [after - before for before, after in pairwise(times)]
    stats = cache.stats() if isinstance(cache, HiSparseCache) else None
    return Answer(
        new,
        Measures(
            prompt_tokens=len(prompt.ids),
            new_tokens=len(new),
            sparse_steps=stats.steps if stats else 0,
            selected=stats.selected if stats else 0,
            hits=stats.hits if stats else 0,
            kv_bytes=kv_bytes(cache, model.device),
            prompt_s=round(seconds[0], 4),
            decode_s=round(sum(seconds[1:]), 4),
        ),
    )


@torch.no_grad()
def _read_in_steps(model: Any, cache: Cache, ids: torch.Tensor, question: int, rows: int) -> None:
    """Feed the context in one call, then the question `rows` tokens at a time; `generate` feeds the last of them."""
    ends = list(range(question, ids.shape[1], rows))
    for start, end in pairwise([0, *ends] if question else ends):
        model(ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=1)


def _pad_token(model: Any) -> int | None:
    """Something to pad with, so that `generate` does not warn; one row needs no padding."""
    config = model.generation_config
    if config.pad_token_id is not None:
        return config.pad_token_id
    return config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id


def generate_exactly(
    model: Any, cache: Cache, ids: torch.Tensor, new_tokens: int, clock: Clock, **settings: Any
) -> torch.Tensor:
    """Greedy tokens, so many whatever the model says, while the clock runs; all ids."""
    return model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=[clock],
        pad_token_id=0,
        **settings,
    )


class Clock(StoppingCriteria):
    """A stopping criterion that never stops: `generate` calls it once a token, and it notes when."""

    def __init__(self, bar: tqdm | None = None) -> None:
        self.times: list[float] = []
        self.bar = bar

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        if self.bar is not None:
            self.bar.update()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
