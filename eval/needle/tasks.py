"""Long prompts with something to find, made from a seed: a needle in prose, and tasks after RULER.

RULER (Hsieh et al., 2024, arXiv 2404.06654) has the tasks that bear its names here; what is hidden, how often and among what
is as there. The wording is ours, so scores are near the published ones but not comparable digit by digit: for those run
RULER's own files (`--data`) or lm-eval's tasks (`python -m eval.lm_eval`).
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from eval.prompts import Question
from examples.long_text import long_text

_FILLER = "The road is long. The water is clear. The wind is still. Someone walks by. Then it is quiet again."


@dataclass(frozen=True)
class Example:
    """A prompt and what a right answer holds.

    Attributes
    ----------
    context, question : str
    answer_start : str
        The answer's first words, given to the model.
    expected : tuple of str
        All of it must be in the answer; a part gives a part of the score.
    """

    context: str
    question: str
    answer_start: str
    expected: tuple[str, ...]

    def ask(self) -> Question:
        """As a prompt."""
        tail = f"\n\n{self.question}"
        return Question(self.context + tail, tail, chat=True, answer_start=f"\n{self.answer_start}")


_LARGEST = 2**22  # a task that runs out of different words stops growing

Make = Callable[[random.Random, int, float, Any], Example]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes
    ----------
    make : callable
        Random numbers, size in units of its own, depth and tokenizer -> `Example`.
    max_new_tokens : int
    has_depth : bool
        Whether the answer stands at one depth, 0 (start) to 1 (end).
    sized_in_tokens : bool
        Whether its size is in tokens.
    """

    make: Make
    max_new_tokens: int
    has_depth: bool = True
    sized_in_tokens: bool = False


def fit(name: str, tokenizer: Any, length: int, seed: str, count: Callable[[Example], int]) -> int:
    """The largest size of task `name` whose prompt, counted by `count`, leaves room for the answer in `length` tokens.

    Raises
    ------
    ValueError
        If not even the smallest fits.
    """
    task = TASKS[name]
    room = length - task.max_new_tokens

    def tokens(size: int) -> int:
        return count(task.make(random.Random(seed), size, 0.5, tokenizer))

    def fits(size: int) -> bool:
        return tokens(size) <= room

    least = tokens(1)
    if least > room:
        raise ValueError(
            f"{name} does not fit {length} tokens: {task.max_new_tokens} of them are for the answer; take a larger length"
        )
    if task.sized_in_tokens:
        return 1 + room - least
    low, high = 1, 2
    while high < _LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):  # to a percent
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def example(
    task: Task,
    tokenizer: Any,
    length: int,
    size: int,
    depth: float,
    seed: str,
    count: Callable[[Example], int],
) -> Example:
    """One example for `length` tokens; `size` was fitted with another seed, and may be a little too large."""
    while True:
        made = task.make(random.Random(seed), size, depth, tokenizer)
        if count(made) <= length - task.max_new_tokens or size == 1:
            return made
        size -= max(1, size // 100)


def _prose(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    """A sentence hidden in Python's documentation; `size` counts tokens."""
    place, number = rng.choice(_PLACES), _number(rng)
    needle = f"The special magic number of the {place} is {number}."
    needed = len(tokenizer(needle).input_ids)
    text = long_text(tokenizer, needed + size, needle, depth, seed=rng.randrange(10**6))
    return Example(
        f"Read this text, then answer the question below it.\n\n{text}",
        f"What is the special magic number of the {place}?",
        f"The special magic number of the {place} is",
        (number,),
    )


_PLACES = ("harbor", "library", "museum", "bakery", "station", "garden", "theater", "castle")


def _niah(rng: random.Random, size: int, depth: float, key: str, value: str, lines: list[str]) -> Example:
    """One line with the value of `key` among others."""
    kind = "id" if "-" in value else "number"
    at = round(depth * len(lines))
    lines = [*lines[:at], _needle(kind, key, value), *lines[at:]]
    text = "\n".join(lines)
    return Example(
        f"Some {kind}s are hidden in the text below. Remember them: one of them will be asked for.\n\n{text}",
        f"What is the magic {kind} of {key} in the text above?",
        f"The magic {kind} of {key} is",
        (value,),
    )


def _needle(kind: str, key: str, value: str) -> str:
    return f"The magic {kind} of {key} is {value}."


def _niah_single_1(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    return _niah(rng, size, depth, _word_pair(rng), _number(rng), [_FILLER] * size)


def _niah_multikey_2(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    pairs = [(_word_pair(rng), _number(rng)) for _ in range(size + 1)]
    return _niah(rng, size, depth, *pairs[0], [_needle("number", *pair) for pair in pairs[1:]])


def _niah_multikey_3(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    pairs = [(_uuid(rng), _uuid(rng)) for _ in range(size + 1)]
    return _niah(rng, size, depth, *pairs[0], [_needle("id", *pair) for pair in pairs[1:]])


def _vt(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    """One chain of four assignments among filler; a worked example comes first."""

    def chain(hops: int) -> tuple[list[str], str, list[str]]:
        names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(hops + 1)]
        value = str(rng.randrange(10_000, 100_000))
        steps = [
            f"VAR {names[0]} = {value}",
            *(f"VAR {b} = VAR {a}" for a, b in pairwise(names)),
        ]
        return names, value, steps

    def text(steps: list[str], lines: int) -> str:
        places = sorted(rng.choices(range(lines + 1), k=len(steps)), reverse=True)
        mixed = [_FILLER] * lines
        for place, step in zip(places, reversed(steps), strict=True):
            mixed.insert(place, step)
        return "\n".join(mixed)

    def question(value: str) -> str:
        return f"Which variables have the value {value}, directly or through others, in the text above?"

    def answer(value: str, count: int) -> str:
        return f"The {count} variables with the value {value} are"

    shown, shown_value, shown_steps = chain(4)
    names, value, steps = chain(4)
    worked = f"{text(shown_steps, 5)}\n\n{question(shown_value)}\n{answer(shown_value, 5)} {', '.join(shown)}"
    return Example(
        "Keep track of the assignments of variables in the text.\n\n" + worked + "\n\n" + text(steps, size),
        question(value),
        answer(value, 5),
        tuple(names),
    )


def _cwe(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    """Ten words that come 30 times among others that come 3 times; 6 and 1 in a short list, as in RULER."""
    often, seldom = (30, 3) if size >= 30 else (6, 1)

    def numbered(words: list[str]) -> str:
        return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))

    def shuffled(words: list[str], often: int, seldom: int) -> str:
        listed = words[:10] * often + words[10:] * seldom
        rng.shuffle(listed)
        return numbered(listed)

    question = "Which 10 words are the most common in the list above?"
    start = "The 10 most common words are:"
    shown = rng.sample(_single_words(), 20)
    words = rng.sample(_single_words(), min(10 + size, len(_single_words())))
    worked = f"{shuffled(shown, 3, 1)}\n\n{question}\n{start} {numbered(shown[:10])}"
    return Example(
        "Below are numbered lists of words, in which some come more often than others.\n\n"
        f"{worked}\n\n{shuffled(words, often, seldom)}",
        question,
        start,
        tuple(words[:10]),
    )


def _fwe(rng: random.Random, size: int, depth: float, tokenizer: Any) -> Example:
    """Coded words whose frequency falls with the square of their rank; the first is dots and does not count."""
    total = 100 + size  # fewer, and the third and the fourth could come equally often
    vocabulary = ["...."]
    while len(vocabulary) < total // 10:
        vocabulary.append("".join(rng.choices(string.ascii_lowercase, k=6)))
    first = total * 6 / math.pi**2  # all ranks together make `total`
    words = [word for rank, word in enumerate(vocabulary, start=1) for _ in range(int(first / rank**2))]
    rng.shuffle(words)
    return Example(
        f"The following text consists of coded words, some more frequent than others. {' '.join(words)}",
        "Leave out the dots '....'. Which three coded words are the most frequent in the text above?",
        "The three most frequent coded words are:",
        tuple(vocabulary[1:4]),
    )


TASKS = {
    "needle": Task(_prose, 24, sized_in_tokens=True),
    "niah_single_1": Task(_niah_single_1, 128),
    "niah_multikey_2": Task(_niah_multikey_2, 128),
    "niah_multikey_3": Task(_niah_multikey_3, 128),
    "vt": Task(_vt, 30, has_depth=False),
    "cwe": Task(_cwe, 120, has_depth=False),
    "fwe": Task(_fwe, 50, has_depth=False),
}


def score(text: str, expected: tuple[str, ...] | list[str]) -> float:
    """Share of what was expected that the answer holds, in any case: RULER's `string_match_all`."""
    return sum(part.lower() in text.lower() for part in expected) / len(expected)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _word_pair(rng: random.Random) -> str:
    return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"


@cache
def _single_words() -> list[str]:
    return sorted({word for kind in ("noun", "adjective", "verb") for word in _words(kind)})


@cache
def _words(kind: str) -> list[str]:
    """The nouns, adjectives or verbs of `wonderwords`, sorted."""
    try:
        from wonderwords import RandomWord
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "these tasks take their words from wonderwords: pip install wonderwords (or -e '.[eval]')"
        ) from error
    return sorted(RandomWord().filter(include_categories=[kind], exclude_with_spaces=True))
