"""Needles stand where they should, prompts have their length, answers are scored, the map shows the scores."""

from __future__ import annotations

import csv
import json
import random

import pytest
import torch

from eval.needle.__main__ import main
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
    found = from_ruler(ruler_file(tmp_path), limit=2)
    assert [probe.sample for probe in found] == [0, 1]
    assert {probe.length for probe in found} == {61} and found[0].max_new_tokens == 128
    tokenizer = tiny.tokenizer()
    prompt = encode(tokenizer, found[0].question, split=True)
    assert prompt.ids == tokenizer("Some text.\nWhat is it? It is").input_ids
    assert tokenizer.decode(prompt.ids[prompt.question :]) == "What is it? It is"
    (tmp_path / "other.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(ValueError, match="is not one of RULER's files"):
        from_ruler(tmp_path / "other.jsonl", None)


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
