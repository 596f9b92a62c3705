"""From the text of a prompt to token ids, with the place where its question begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    """A prompt before it is tokens.

    Attributes
    ----------
    text : str
    tail : str
        The part of `text` behind the context: the question.
    chat : bool
        Whether the model's chat template goes around it, if it has one.
    answer_start : str
        Words put into the model's mouth, with the white space before them.
    """

    text: str
    tail: str
    chat: bool
    answer_start: str = ""


@dataclass(frozen=True)
class Prompt:
    """Token ids to answer.

    Attributes
    ----------
    ids : list of int
    question : int or None
        Index of the first token of the question, behind the context; it is fed through decode steps. None: all is prefill.
    """

    ids: list[int]
    question: int | None = None


def encode(tokenizer: Any, question: Question, split: bool = False) -> Prompt:
    """Put the chat template around a prompt, and tokenise it.

    With `split`, find where the question begins. It is what follows the context in the prompt, the chat template's end
    included: its first token is the first that begins at or after the last occurrence of `question.tail`.

    Raises
    ------
    ValueError
        With `split`: if the question is not whole in the prompt, or the tokenizer does not say where its tokens begin.
    """
    chat = question.chat and tokenizer.chat_template is not None
    text = question.text + question.answer_start
    if chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        text += question.answer_start.lstrip()
    # Chat templates write the special tokens themselves.
    encoded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=split and tokenizer.is_fast)
    if not split:
        return Prompt(encoded.input_ids)
    return Prompt(encoded.input_ids, _question_start(text, question.tail, encoded))


def _question_start(text: str, tail: str, encoded: Any) -> int:
    if "offset_mapping" not in encoded:
        raise ValueError("--question-as-decode needs a fast tokenizer, one that says where its tokens begin")
    tail = tail.strip()  # chat templates may strip white space
    at = text.rfind(tail)
    if at < 0:
        raise ValueError(
            f"the question {tail[:60]!r}... was cut: --question-as-decode needs it whole, so raise --max_length to more than "
            "twice its length"
        )
    starts = [start for start, _ in encoded.offset_mapping]
    return next((index for index, start in enumerate(starts) if start >= at), len(starts) - 1)
