"""Prompts of LongBench, taken at run time from where they are published; none is copied here.

From `--config_dir`, a folder with the official files (``dataset2prompt.json`` and ``dataset2maxlen.json``; for v2
``0shot.txt``), or else from an installed `lm-eval`. For v1 lm-eval's prompts are the official ones but for white space in
six tasks, which is put right here. Its prompt for v2 asks for a letter where the official one asks for a sentence; without
``--config_dir`` our own sentence stands in the place of its last line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from eval.json_files import read_json
from eval.prompts import Question

_V2_LAST_LINE = (
    'Give your answer in exactly this form: "The correct answer is (A)", with the letter of your choice.'
)


@dataclass(frozen=True)
class Config:
    """Prompts of v1.

    Attributes
    ----------
    prompts : dict
        Task -> template with ``{context}`` and ``{input}``.
    max_new_tokens : dict
        Task -> length of an answer, where the source gives one.
    source : str
        Where they come from.
    """

    prompts: dict[str, str]
    source: str
    max_new_tokens: dict[str, int] = field(default_factory=dict)


def load_config(config_dir: Path | None) -> Config:
    """The prompts of v1.

    Raises
    ------
    ValueError
        If they are nowhere to be found; says where to get them.
    """
    if config_dir is None:
        folder = _lm_eval_folder() / "longbench"
        return Config(_from_lm_eval(folder), "lm-eval")
    prompts = read_json(_find(config_dir, "dataset2prompt.json"))
    lengths = read_json(_find(config_dir, "dataset2maxlen.json"))
    return Config(prompts, "official files", lengths)


def load_v2_template(config_dir: Path | None) -> tuple[str, str]:
    """The prompt of v2 with ``$DOC$``, ``$Q$`` and ``$C_A$`` ... ``$C_D$``, and where it comes from."""
    if config_dir is not None:
        return _find(config_dir, "0shot.txt").read_text(encoding="utf-8"), "official files"
    path = _lm_eval_folder() / "longbench2" / "_longbench_common_yaml"
    text = _read_yaml(path)["doc_to_text"]
    for theirs, ours in [
        ("{{context}}", "$DOC$"),
        ("{{question.strip()}}", "$Q$"),
        *((f"{{{{choices[{i}]}}}}", f"$C_{letter}$") for i, letter in enumerate("ABCD")),
        ("Answer:", _V2_LAST_LINE),
    ]:
        if text.count(theirs) != 1:
            raise ValueError(f"{path} does not read as expected: give the official prompt with --config_dir")
        text = text.replace(theirs, ours)
    return text, "lm-eval, last line ours"


def ask(template: str, sample: Mapping[str, Any], chat: bool) -> Question:
    """Fill a template of v1."""
    head, found, tail = template.partition("{context}")
    if not found:
        raise ValueError(f"the prompt {template[:80]!r}... has no {{context}}")
    tail = tail.format(**sample)
    return Question(head.format(**sample) + sample["context"] + tail, tail, chat)


def ask_v2(template: str, sample: Mapping[str, Any]) -> Question:
    """Fill the template of v2."""
    head, _, tail = template.partition("$DOC$")
    tail = tail.replace("$Q$", sample["question"].strip())
    for letter in "ABCD":
        tail = tail.replace(f"$C_{letter}$", sample[f"choice_{letter}"].strip())
    return Question(head + sample["context"].strip() + tail, tail, chat=True)


def truncate_middle(tokenizer: Any, text: str, max_length: int) -> str:
    """Keep the first and the last ``max_length // 2`` tokens, as v1's `pred.py` does.

    Special tokens that the tokenizer adds are counted, but not kept. The halves are decoded one by one and joined as text,
    so tokenised again it may be some tokens longer or shorter.
    """
    ids = tokenizer(text).input_ids
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    first, last = ids[:half], ids[-half:]
    return tokenizer.decode(first, skip_special_tokens=True) + tokenizer.decode(
        last, skip_special_tokens=True
    )


def truncate_middle_v2(tokenizer: Any, text: str, max_length: int) -> str:
    """The same as v2's `pred.py` does it: the halves are decoded together, and the last is longer if the length is odd."""
    ids = tokenizer(text).input_ids
    if len(ids) <= max_length:
        return text
    return tokenizer.decode(ids[: max_length // 2] + ids[-max_length // 2 :], skip_special_tokens=True)


def cut(
    tokenizer: Any,
    question: Question,
    max_length: int,
    truncate: Callable[[Any, str, int], str] = truncate_middle,
) -> Question:
    """The question with its text cut in the middle, before any chat template goes around it, as the official scripts do."""
    return replace(question, text=truncate(tokenizer, question.text, max_length))


def _find(folder: Path, name: str) -> Path:
    """A file in the folder itself or where the official repository keeps it."""
    for path in (folder / name, folder / "config" / name, folder / "prompts" / name):
        if path.is_file():
            return path
    raise ValueError(f"--config_dir {folder} has no {name}; it is in the official repository of LongBench")


def _lm_eval_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the prompts of LongBench are not part of this project: pip install lm-eval, or give --config_dir, the folder "
            "`config` of the official repository"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


# Where lm-eval's white space differs: between context and question, and at the very end.
_BLANK_LINE_BEFORE_QUESTION = ("triviaqa", "samsum")
_ENDINGS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}


def _from_lm_eval(folder: Path) -> dict[str, str]:
    prompts = {}
    for path in sorted(folder.glob("[!_]*.yaml")):
        task = path.stem
        if task.endswith("_e"):
            continue
        text = _read_yaml(path)["doc_to_text"]
        text = text.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
        if task in _BLANK_LINE_BEFORE_QUESTION:
            text = text.replace("{context}\n{input}", "{context}\n\n{input}")
        ending = _ENDINGS.get(task, "")
        prompts[task] = text if text.endswith(ending) else text + ending
    return prompts


class _Loader(yaml.SafeLoader):
    """Reads over lm-eval's ``!function`` tags."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _read_yaml(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
