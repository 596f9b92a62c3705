"""The metrics of LongBench v1 as its `metrics.py` computes them, each a number from 0 to 1 for one answer.

Written anew over the same libraries: `rouge` for ROUGE-L, `jieba` for Chinese words, and for code difflib, which is what
the official `fuzzywuzzy` runs on without python-Levenshtein. Where an official function has a quirk that changes
scores, it is kept, and the comment says so.
"""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # noqa: RUF001
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def qa_f1(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """F1 over words; case, punctuation and articles do not count."""
    return _f1(_words(prediction), _words(answer))


def qa_f1_zh(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """F1 over the words that jieba cuts; case and punctuation do not count."""
    return _f1(_words_zh(prediction), _words_zh(answer))


def rouge(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F of the package `rouge`; what it cannot compute counts 0.

    That is an empty text, and (officially so) a sentence so long that the package's recursion ends in an error.
    """
    try:
        scores = _rouge_l().get_scores([prediction], [answer], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


def rouge_zh(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F over the words that jieba cuts."""
    return rouge(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """One over the number of classes that the answer names, if the right one is among them."""
    if classes is None:
        raise ValueError("a sample of a classification task needs all_classes")
    named = [name for name in classes if name in prediction]
    # Officially the list shrinks under the loop, so what follows a removed name is not looked at.
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """Share of the numbers in the prediction that are the right paragraph's."""
    return _share_of_numbers(prediction, _first_match(r"Paragraph (\d+)", answer))


def retrieval_zh(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """The same for "段落"."""
    return _share_of_numbers(prediction, _first_match(r"段落(\d+)", answer))


def count(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """Share of the numbers in the prediction that are the answer."""
    return _share_of_numbers(prediction, str(answer))


def code_similarity(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """Likeness, in whole percents, of the answer to the first line that is neither comment nor markup."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


Metric = Callable[[str, str, "Sequence[str] | None"], float]
METRICS: dict[str, Metric] = {
    metric.__name__: metric
    for metric in (
        qa_f1,
        qa_f1_zh,
        rouge,
        rouge_zh,
        classification,
        retrieval,
        retrieval_zh,
        count,
        code_similarity,
    )
}
_NEEDS = {"qa_f1_zh": ("jieba",), "rouge": ("rouge",), "rouge_zh": ("jieba", "rouge")}


def check_installed(metric: str) -> None:
    """Fail before a long run rather than after it (ModuleNotFoundError) if a metric's package is missing."""
    for package in _NEEDS.get(metric, ()):
        _package(package)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"scoring needs the package {name!r}: pip install {name} (or -e '.[eval]')"
        ) from error


@cache
def _rouge_l() -> Any:
    return _package("rouge").Rouge(metrics=["rouge-l"])


def _cut(text: str) -> list[str]:
    jieba = _package("jieba")
    jieba.setLogLevel("WARNING")
    return list(jieba.cut(text, cut_all=False))


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_ALL_PUNCTUATION).split()) for word in _cut(text))
    return [word for word in words if word]


def _f1(prediction: list[str], answer: list[str]) -> float:
    same = (Counter(prediction) & Counter(answer)).total()
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(answer)
    return 2 * precision * recall / (precision + recall)


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _first_match(pattern: str, answer: str) -> str:
    match = re.search(pattern, answer)
    if match is None:
        raise ValueError(f"a retrieval sample's answer must hold {pattern!r}, got {answer!r}")
    return match.group(1)
