"""Needles stand where they should, prompts have their length, answers are scored, the map shows the scores."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
import torch

from eval.answers import answer
from eval.needle.__main__ import main, score_rows
from eval.needle.heatmap import draw
from eval.needle.probes import Plan, from_ruler, generate
from eval.needle.tasks import TASKS, score
from eval.prompts import encode

from . import tiny

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 on the CPU, where tokens must be equal")
LENGTH = 16_000  # tokens, and here characters


def probes(*tasks, lengths=(LENGTH,), depths=(0.5,), samples=1, seed=0, tokenizer=None):
    if set(tasks) & {"niah_single_1", "niah_multikey_2", "cwe"}:
        pytest.importorskip("wonderwords")
    return list(generate(Plan(tasks, lengths, depths, samples, seed), tokenizer or tiny.tokenizer()))


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_and_its_answer_fill_the_length(name):
    [probe] = probes(name)
    tokens = len(encode(tiny.tokenizer(), probe.question).ids) + TASKS[name].max_new_tokens
    assert 0.97 * LENGTH < tokens <= LENGTH


def test_no_prompt_is_longer_than_the_length():
    # A line is some 45 tokens, more or less; so at some of these lengths hardly any room is left over.
    for probe in probes("niah_multikey_2", lengths=range(880, 930, 10), samples=10):
        tokens = len(encode(tiny.tokenizer(), probe.question).ids) + probe.max_new_tokens
        assert tokens <= probe.length


@pytest.mark.parametrize("name", TASKS)
def test_the_text_holds_the_answer_and_the_question_does_not(name):
    [probe] = probes(name)
    context = probe.question.text.removesuffix(probe.question.tail)
    assert all(part in context for part in probe.expected)
    assert not any(part in probe.question.tail + probe.question.answer_start for part in probe.expected)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.has_depth])
def test_the_needle_stands_at_its_depth(name):
    found = probes(name, depths=(0, 0.3, 1))
    for probe in found:
        context = probe.question.text.removesuffix(probe.question.tail).split("\n\n", 1)[
            1
        ]  # the task stands first
        at = context.index(probe.expected[0]) / len(context)
        assert at == pytest.approx(probe.depth, abs=0.03)
        assert context.count(probe.expected[0]) == 1


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_decides(name):
    one, again, other = (probes(name, seed=seed)[0] for seed in (3, 3, 4))
    assert one == again
    assert one.question.text != other.question.text
    first, second = probes(name, samples=2)
    assert first.question.text != second.question.text and first.key != second.key


def test_what_is_asked_for_is_the_most_frequent():
    [probe] = probes("fwe")
    words = probe.question.text.removesuffix(probe.question.tail).split()
    counts = {word: words.count(word) for word in words if len(word) == 6 and word.isalpha()}
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    assert tuple(ranked[:3]) == probe.expected and counts[ranked[2]] > counts[ranked[3]]

    [probe] = probes("cwe")
    entries = probe.question.text.removesuffix(probe.question.tail).split("\n\n")[-1]
    listed = _numbered(entries)
    counts = {word: listed.count(word) for word in set(listed)}
    often = sorted(counts, key=counts.__getitem__, reverse=True)[:10]
    assert set(often) == set(probe.expected)
    assert {counts[word] for word in often} == {30} and {counts[w] for w in counts if w not in often} == {3}


def _numbered(text: str) -> list[str]:
    parts = text.split(" ")
    return [word for number, word in zip(parts[::2], parts[1::2], strict=True) if number.endswith(".")]


def test_the_chain_of_variables_can_be_followed():
    [probe] = probes("vt")
    text = probe.question.text.removesuffix(probe.question.tail).split("\n\n")[-1]
    value = probe.question.tail.split("value ")[1].split(",")[0]
    holding = set()
    for line in text.splitlines():
        if line.startswith("VAR"):
            name, source = line.removeprefix("VAR ").split(" = ")
            if source == value or source.removeprefix("VAR ") in holding:
                holding.add(name)
    assert holding == set(probe.expected) and len(holding) == 5


def test_the_score_is_the_share_that_was_found():
    assert score("It is ABC and def.", ("abc", "DEF")) == 1
    assert score("abc", ("abc", "def")) == 0.5
    assert score("", ("abc",)) == 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(tasks=["haystack"]), "unknown tasks haystack; there are needle, niah_single_1"),
        (dict(depths=[1.5]), r"depths \[1.5\], must be between 0"),
        (dict(samples=0), "samples=0"),
    ],
)
def test_a_plan_that_cannot_be(plan, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"tasks": ["needle"], "lengths": [100], "depths": [0], "samples": 1, "seed": 0, **plan})


def test_a_length_with_no_room_for_the_question():
    with pytest.raises(ValueError, match="niah_multikey_3 does not fit 200 tokens"):
        probes("niah_multikey_3", lengths=(200,))


def ruler_file(folder):
    path = folder / "niah_multikey_3.jsonl"
    line = {"input": "Some text.\nWhat is it? It is", "outputs": ["x", "y"], "length": 60}
    path.write_text("".join(json.dumps({"index": i, **line, "length": 60 + i}) + "\n" for i in range(3)))
    return path


def test_rulers_files_are_asked_as_they_are(tmp_path):
    found = from_ruler([ruler_file(tmp_path)], limit=2)
    assert [probe.sample for probe in found] == [0, 1]
    assert {probe.length for probe in found} == {61} and found[0].max_new_tokens == 128
    tokenizer = tiny.tokenizer()
    prompt = encode(tokenizer, found[0].question, split=True)
    assert prompt.ids == tokenizer("Some text.\nWhat is it? It is").input_ids
    assert tokenizer.decode(prompt.ids[prompt.question :]) == "What is it? It is"
    (tmp_path / "other.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(
        ValueError, match="line 1 is not of one of RULER's files: it has no index, no outputs"
    ):
        from_ruler([tmp_path / "other.jsonl"], None)


def split_file(folder, text="Some text.\nWhat is it?", indices=(0, 1), length=60):
    """As RULER writes them, ``TASK/validation.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"index": i, "input": text, "outputs": ["x"], "length": length} for i in indices]
    (folder / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "validation.jsonl"


def test_rulers_files_of_several_tasks_are_kept_apart(tmp_path, monkeypatch):
    names = ("vt", "qa_1", "niah_multivalue")
    found = from_ruler([split_file(tmp_path / name) for name in names], None)
    assert [probe.task for probe in found[::2]] == [f"RULER {name}" for name in names]
    assert [probe.max_new_tokens for probe in found[::2]] == [30, 32, 128]
    assert len({probe.key for probe in found}) == 6
    monkeypatch.chdir(tmp_path / "vt")
    assert from_ruler([Path("validation.jsonl")], None) == found[:2]


def test_the_same_task_twice_is_kept_apart_and_one_row(tmp_path):
    found = from_ruler([split_file(tmp_path / i / "vt", text=f"{i}?") for i in "ab"], None)
    assert len({probe.key for probe in found}) == 4
    measures = dict.fromkeys(
        ("prompt_tokens", "new_tokens", "sparse_steps", "selected", "hits", "kv_bytes"), 1
    )
    measures |= {"prompt_s": 1, "decode_s": 1}
    entries = {p.key: {"score": p.question.text == "a?", **measures} for p in found}
    [row] = score_rows("dynamic", [found[0], found[2], found[1], found[3]], entries)
    assert row["score"] == 50


def test_a_sample_of_ruler_that_comes_twice_is_refused(tmp_path):
    path = split_file(tmp_path / "vt")
    with pytest.raises(ValueError, match="sample 0 of RULER vt comes twice: give each file once"):
        from_ruler([path, path], None)
    with pytest.raises(ValueError, match=r"vt.validation\.jsonl, line 3 has the index 0 of line 1"):
        from_ruler([split_file(tmp_path / "vt", indices=(0, 1, 0))], None)


@pytest.mark.parametrize("outputs", ["x", None, [], [1]])
def test_a_line_of_ruler_without_a_list_of_answers(outputs, tmp_path):
    line = {"index": 0, "input": "?", "outputs": ["x"], "length": 1}
    lines = [line, {**line, "index": 1, "outputs": outputs}]
    (tmp_path / "vt.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"vt\.jsonl, line 2 .*outputs="):
        from_ruler([tmp_path / "vt.jsonl"], None)


def test_a_broken_line_of_ruler_is_named(tmp_path):
    (tmp_path / "vt.jsonl").write_text('\n{"index": 0')
    with pytest.raises(ValueError, match=r"vt\.jsonl, line 2 is not JSON"):
        from_ruler([tmp_path / "vt.jsonl"], None)


@pytest.mark.parametrize("limit", ["-1", "0"])
def test_a_limit_below_one_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        main(["--data", "vt.jsonl", "--limit", limit])
    assert f"--limit {limit}: must be at least 1" in capsys.readouterr().err


def test_a_budget_of_no_tokens_is_refused_before_the_model_is_read(tmp_path):
    with pytest.raises(SystemExit, match="Quest: token_budget=0"):
        main(["--model", str(tmp_path), "--token_budget", "0"])


@on_cpu
def test_only_samples_whose_content_changed_are_asked_again(tmp_path, monkeypatch):
    model = tiny.save_checkpoint(tmp_path / "tiny")
    asked = []

    def spy(caches, prompt, new):
        asked.append(prompt.ids)
        return answer(caches, prompt, new)

    monkeypatch.setattr("eval.needle.__main__.answer", spy)
    monkeypatch.setattr("eval.needle.__main__.draw", lambda *_: None)
    path = split_file(tmp_path / "vt")
    command = ["--model", str(model), "--data", str(path), "--methods", "dynamic"]
    command += ["--output_dir", str(tmp_path / "out")]
    assert main(command) == 0 and len(asked) == 2
    assert main(command) == 0 and len(asked) == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["input"] = "Another text."
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(command) == 0 and len(asked) == 3
    assert asked[2] == tiny.tokenizer()("Another text.").input_ids
    lines[0]["outputs"] = [""]  # which every answer holds
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(command) == 0 and len(asked) == 4
    [row] = csv.DictReader((tmp_path / "out" / "needle.csv").open())
    assert float(row["score"]) >= 50


@on_cpu
def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    model = tiny.save_checkpoint(tmp_path / "tiny")
    command = ["--model", str(model), "--tasks", "needle", "fwe", "--lengths", "1000", "1200"]
    command += ["--depths", "0", "1", "--token_budget", "64", "--question-as-decode"]
    command += ["--output_dir", str(tmp_path / "out")]
    assert main(command) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "needle.csv").open()))
    assert len(rows) == 3 * (2 * 2 + 2)  # methods; two depths or none at two lengths
    sparse = [row for row in rows if row["method"] == "hisparse"]
    assert all(int(row["sparse_steps"]) > 0 and 0 < float(row["hit_rate"]) < 1 for row in sparse)
    assert (tmp_path / "out" / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert "6 of 6 answers are identical" in capsys.readouterr().out

    journal = tmp_path / "out" / "journal" / "hisparse.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:4]) + lines[4][:20])  # as if killed within the fifth
    assert main(command) == 0
    again = [json.loads(line) for line in journal.read_text().splitlines()]
    before = [json.loads(line) for line in lines]
    assert [(line["key"], line["tokens"]) for line in again] == [
        (line["key"], line["tokens"]) for line in before
    ]

    changed = [json.loads(line) for line in lines]
    changed[5]["tokens"][0] += 1
    journal.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert main(command) == 1
    assert (
        f"{changed[5]['key']}: hisparse and hisparse-resident answer differently" in capsys.readouterr().out
    )


def test_the_map_takes_many_tasks_and_gaps(tmp_path):
    pytest.importorskip("matplotlib")
    rng = random.Random(0)
    rows = [
        {"method": method, "task": task, "length": length, "depth": depth, "score": rng.randrange(101)}
        for method in ("dynamic", "hisparse")
        for task, depths in (("needle", (0, 0.5, 1)), ("vt", (None,)), ("cwe", (None,)))
        for length in (1024, 131072)
        for depth in depths
    ]
    draw(rows[:-3], tmp_path / "map.png", "conditions\ncommand")
    assert (tmp_path / "map.png").stat().st_size > 10_000
