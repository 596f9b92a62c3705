"""Prompts: filled, cut in the middle to the token, framed by the chat template, split before the question."""

from __future__ import annotations

import json
import sys

import pytest

from eval.longbench import prompts
from eval.longbench.jobs import chosen_tasks
from eval.longbench.predict import newline_stops
from eval.longbench.prompts import ask, cut
from eval.longbench.tasks import TASKS
from eval.prompts import Question, encode

from . import tiny

TEXT = "".join(chr(33 + i % 90) for i in range(100))  # a token a character, and `<s>` before it


@pytest.mark.parametrize("max_length", [10, 11, 40, 100])
def test_truncation_keeps_the_halves_to_the_token(max_length):
    half = max_length // 2  # of 101 tokens; the first is `<s>`, counted and not kept
    kept = prompts.truncate_middle(tiny.tokenizer(), TEXT, max_length)
    assert kept == TEXT[: half - 1] + TEXT[-half:]


@pytest.mark.parametrize(("max_length", "last"), [(10, 5), (11, 6)])
def test_truncation_of_v2_keeps_the_odd_token_too(max_length, last):
    kept = prompts.truncate_middle_v2(tiny.tokenizer(), TEXT, max_length)
    assert kept == TEXT[:4] + TEXT[-last:]


@pytest.mark.parametrize("truncate", [prompts.truncate_middle, prompts.truncate_middle_v2])
def test_what_fits_is_not_cut(truncate):
    assert truncate(tiny.tokenizer(), TEXT, 101) == TEXT


def test_the_halves_are_joined_as_text_and_tokenised_again():
    tokenizer = tiny.tokenizer(merges=(("a", "b"),))
    ids = encode(tokenizer, cut(tokenizer, Question("azzzby", "", chat=False), 4)).ids  # `<s> a` and `b y`
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "ab", "y"]


def test_a_template_of_v1_is_filled_as_format_does():
    template = "Read.\n{context}\nAsked: {input}\nSay:"
    question = ask(template, {"context": "A {b} c", "input": "Why?", "other": 1}, chat=True)
    assert question.text == template.format(context="A {b} c", input="Why?")
    assert question.tail == "\nAsked: Why?\nSay:"


def test_the_chat_template_goes_around_the_truncated_prompt():
    tokenizer = tiny.tokenizer()
    question = Question(TEXT, "", chat=True)
    kept = prompts.truncate_middle(tokenizer, TEXT, 40)
    ids = encode(tokenizer, cut(tokenizer, question, 40)).ids
    assert tokenizer.decode(ids) == f"<s>user:\n{kept}\nanswer:\n"
    assert ids.count(1) == 1  # the template's `<s>`, and no second one


@pytest.mark.parametrize("chat", [False, True])
def test_no_template_where_there_is_none_or_none_is_wanted(chat):
    tokenizer = tiny.tokenizer(chat=not chat)
    assert encode(tokenizer, Question(TEXT, "", chat=chat)).ids == tokenizer(TEXT).input_ids


def test_the_tasks_without_chat_template_are_the_official_ones():
    plain = {name for name, task in TASKS.items() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in TASKS.items() if task.first_line} == plain - {"lcc", "repobench-p"}
    assert [name for name, task in TASKS.items() if task.stop_at_newline] == ["samsum"]
    assert len(TASKS) == 21 and len(chosen_tasks(None, e=True)) == 13


def test_samsum_ends_at_the_text_end_or_a_newline():
    tokenizer = tiny.tokenizer()
    assert tokenizer.convert_ids_to_tokens(newline_stops(tokenizer)) == ["</s>", "Ċ"]


@pytest.mark.parametrize("max_length", [200, 60])
def test_the_question_begins_behind_the_context(max_length):
    tokenizer = tiny.tokenizer()
    question = Question(f"Read. {TEXT}\nAsked: Why? ", "\nAsked: Why? ", chat=True)
    prompt = encode(tokenizer, cut(tokenizer, question, max_length), split=True)
    assert tokenizer.decode(prompt.ids[prompt.question :]) == "Asked: Why? \nanswer:\n"


def test_a_token_that_holds_the_end_of_the_context_is_context():
    tokenizer = tiny.tokenizer(merges=(("z", "Q"),))
    prompt = encode(tokenizer, Question("xyzQ?", "Q?", chat=False), split=True)
    assert tokenizer.decode(prompt.ids[prompt.question :]) == "?"


def test_the_last_place_counts_if_the_context_quotes_the_question():
    tokenizer = tiny.tokenizer()
    prompt = encode(tokenizer, Question("Why? Why? Why?", " Why?", chat=False), split=True)
    assert tokenizer.decode(prompt.ids[prompt.question :]) == "Why?"


def test_a_question_that_is_cut_cannot_be_split():
    tokenizer = tiny.tokenizer()
    question = cut(tokenizer, Question(f"{TEXT} A long question?", " A long question?", chat=False), 20)
    with pytest.raises(ValueError, match=r"question 'A long question\?'\.\.\. was cut"):
        encode(tokenizer, question, split=True)
    assert encode(tokenizer, question).question is None


def test_official_files_are_taken_from_a_folder(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"qasper": "{context} {input}"}))
    with pytest.raises(ValueError, match=r"has no dataset2maxlen\.json"):
        prompts.load_config(tmp_path)
    (tmp_path / "config" / "dataset2maxlen.json").write_text(json.dumps({"qasper": 7}))
    config = prompts.load_config(tmp_path)
    assert config.prompts["qasper"] == "{context} {input}" and config.max_new_tokens["qasper"] == 7
    (tmp_path / "config" / "dataset2maxlen.json").write_text('{\n"qasper"')
    with pytest.raises(ValueError, match=r"dataset2maxlen\.json, line 2 is not JSON"):
        prompts.load_config(tmp_path)


YAML = """
dataset_name: {name}
doc_to_text: "{text}"
process_results: !function metrics.some_function
"""


def lm_eval(folder, monkeypatch, **texts):
    """A stand-in for an installed lm-eval, in its format."""
    (folder / "lm_eval" / "tasks" / "longbench").mkdir(parents=True)
    (folder / "lm_eval" / "__init__.py").touch()
    for name, text in texts.items():
        path = folder / "lm_eval" / "tasks" / "longbench" / f"{name.replace('_p', '-p')}.yaml"
        path.write_text(YAML.format(name=name, text=text))
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)  # the installed one
    monkeypatch.syspath_prepend(folder)


def test_white_space_of_lm_evals_prompts_is_put_right(tmp_path, monkeypatch):
    lm_eval(
        tmp_path,
        monkeypatch,
        qasper="Read {{context}}\\n\\nAsked: {{question}}",
        qasper_e="not looked at",
        trec="{{context}}\\n{{question}}",
        samsum="{{context}}\\n{{question}}",
        lcc="{{context}}Go on:",
        repobench_p="{{context}}{{question}}Go on:\\n",  # right already
        passage_count="{{context}} How many:",
    )
    config = prompts.load_config(None)
    assert config.prompts == {
        "qasper": "Read {context}\n\nAsked: {input}",
        "trec": "{context}\n{input}",
        "samsum": "{context}\n\n{input}",
        "lcc": "{context}Go on:\n",
        "repobench-p": "{context}{input}Go on:\n",
        "passage_count": "{context} How many: ",
    }


def test_without_any_source_it_says_where_to_get_prompts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install lm-eval, or give --config_dir"):
        prompts.load_config(None)


def test_every_task_has_a_prompt_in_the_installed_lm_eval():
    pytest.importorskip("lm_eval")
    config = prompts.load_config(None)
    assert set(config.prompts) == set(TASKS)
    for name, text in config.prompts.items():
        assert text.count("{context}") == 1, name
        text.format(context="", input="")
    template, _ = prompts.load_v2_template(None)
    assert all(f"${mark}$" in template for mark in ("DOC", "Q", "C_A", "C_B", "C_C", "C_D"))
