"""Long English prose that is on every machine: the language reference inside Python's own `help()`."""

from __future__ import annotations

import random
import re
from itertools import accumulate
from pydoc_data.topics import topics
from textwrap import dedent

from transformers import PreTrainedTokenizerBase


def long_text(
    tokenizer: PreTrainedTokenizerBase, tokens: int, needle: str, depth: float, seed: int = 0
) -> str:
    """Return a document of real prose with one sentence hidden in it.

    Parameters
    ----------
    tokenizer
        Counts the tokens.
    tokens
        Length of the document, needle included, give or take a sentence. The prose has about 30,000 tokens; a
        longer document starts it over.
    needle
        The sentence to hide; it stands between two sentences of the prose.
    depth
        Where: 0 is the start of the document, 1 its end.
    seed
        Which topics are taken, and in which order.

    Raises
    ------
    ValueError
        If `depth` is outside 0 to 1, or `tokens` leave no room for prose around the needle.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be between 0 (the start) and 1 (the end), got {depth}")
    needed = _lengths(tokenizer, [needle])[0]
    room = tokens - needed
    if room < 1:
        raise ValueError(f"a text of {tokens} tokens has no room for prose around a needle of {needed}")

    prose = _sentences(seed)
    lengths = _lengths(tokenizer, prose)
    times = -(-room // sum(lengths))
    ends = list(accumulate(lengths * times))
    count = _nearest(ends, room)
    at = _nearest(ends[:count], round(depth * room))
    sentences = (prose * times)[:count]
    return " ".join([*sentences[:at], needle, *sentences[at:]])


def _lengths(tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> list[int]:
    """Tokens of each sentence within a text, so with the space before it."""
    return [len(ids) for ids in tokenizer([" " + s for s in sentences], add_special_tokens=False).input_ids]


def _nearest(ends: list[int], target: int) -> int:
    """How many sentences come nearest to `target` tokens, from 0 to all of them."""
    return min(range(len(ends) + 1), key=lambda count: abs((ends[count - 1] if count else 0) - target))


def _sentences(seed: int) -> list[str]:
    """All the prose as sentences; the topics in an order made from `seed`, no paragraph twice."""
    names = sorted(topics)
    random.Random(seed).shuffle(names)
    paragraphs = [dedent(p).strip() for name in names for p in re.split(r"\n\s*\n", topics[name])]
    prose = dict.fromkeys(_plain(p) for p in paragraphs if _is_prose(p))  # topics quote each other
    return [sentence for paragraph in prose for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)]


def _is_prose(paragraph: str) -> bool:
    """Whether it is running text, a sentence or more: no heading, list, table, grammar or code."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    return (
        re.match(r"[A-Z]\w* .{80}", paragraph, re.DOTALL) is not None
        and paragraph.endswith(".")
        and "\n " not in paragraph
        and letters > 0.9 * len(paragraph)
    )


def _plain(paragraph: str) -> str:
    """One line without markup: no emphasis, no quotes around code, no footnote marks."""
    text = re.sub(r"-\n", "-", paragraph)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" \[\d+\]", "", text)
    text = re.sub(r"\*+(\w[^*]*?)\*+", r"\1", text)
    return re.sub(r'"+([^"\s]+)"+', r"\1", text)
