"""`python -m eval.longbench` from files to files, with a tiny model: official layout, resumed runs, several processes."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eval.answers import answer
from eval.longbench.__main__ import main
from eval.longbench.data import keys, load_v1, load_v2

from . import tiny

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="fp32 on the CPU, where tokens must be equal"
)

PROMPTS = {  # wordings of our own; what matters is where context and question stand
    "hotpotqa": "Text:\n{context}\nQ: {input}\nA:",
    "trec": "Kinds.\n{context}\n{input}",
    "passage_count": "Count.\n{context}\nHow many? ",
}
SAMPLES = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, prompts and data in the official formats."""
    folder = tmp_path_factory.mktemp("longbench")
    tiny.save_checkpoint(folder / "tiny")
    (folder / "config").mkdir()
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(PROMPTS))
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(PROMPTS, 6)))
    (folder / "config" / "0shot.txt").write_text("$DOC$\n\n$Q$ $C_A$ $C_B$ $C_C$ $C_D$ Say it.")
    (folder / "data").mkdir()
    rng = random.Random(0)
    for task in PROMPTS:
        for suffix, lengths in (("", (100, 400)), ("_e", (3000, 9000))):
            lines = [sample(task, i, rng, lengths) for i in range(SAMPLES)]
            (folder / "data" / f"{task}{suffix}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
    (folder / "data" / "data.json").write_text(json.dumps([sample_v2(i, rng) for i in range(SAMPLES)]))
    return folder


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefg hij\n", k=length))


def sample(task: str, number: int, rng: random.Random, lengths: tuple[int, int]) -> dict[str, object]:
    return {
        "input": "Why so?",
        "context": text(rng, rng.randint(100, 400)),
        "answers": ["an answer", "1"],
        "length": rng.randint(*lengths),
        "dataset": task,
        "language": "en",
        "all_classes": ["a", "an answer", "1"] if task == "trec" else None,
        "_id": f"{task}-{number}",
    }


def sample_v2(number: int, rng: random.Random) -> dict[str, object]:
    return {
        "_id": f"v2-{number}",
        "domain": "D",
        "sub_domain": "S",
        "difficulty": rng.choice(["easy", "hard"]),
        "length": rng.choice(["short", "medium", "long"]),
        "question": " Which? ",
        **{f"choice_{letter}": f" choice {letter}" for letter in "ABCD"},
        "answer": "A",
        "context": text(rng, 1500),
    }


def command(place: Path, output: Path, *more: str) -> list[str]:
    return [
        *(
            "--model",
            str(place / "tiny"),
            "--data_dir",
            str(place / "data"),
            "--config_dir",
            str(place / "config"),
        ),
        *("--output_dir", str(output), "--max_length", "300"),
        *more,
    ]


SPARSE = ("--token_budget", "64", "--question-as-decode")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def _name(entry: dict[str, object]) -> str:
    return str(entry["key"]).partition("@")[0]


def start(place: Path, output: Path, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The same as a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, *launcher, "-m", "eval.longbench", *command(place, output, *more)]
    return subprocess.Popen(
        call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_official_layout_and_what_stands_beside_a_score(place, tmp_path, capsys):
    assert main(command(place, tmp_path, *SPARSE, "--tasks", *PROMPTS)) == 0
    folder = tmp_path / "pred" / "tiny-hisparse"
    assert {path.name for path in folder.glob("*.jsonl")} == {f"{task}.jsonl" for task in PROMPTS}
    for task in PROMPTS:
        found = lines(folder / f"{task}.jsonl")
        given = lines(place / "data" / f"{task}.jsonl")
        assert list(found[0]) == ["pred", "answers", "all_classes", "length", "_id", "tokens"]
        for field in ("answers", "all_classes", "length", "_id"):
            assert [line[field] for line in found] == [line[field] for line in given]
        assert all(len(line["tokens"]) == 6 for line in found)
    result = json.loads((folder / "result.json").read_text())
    assert set(result) == set(PROMPTS) and all(isinstance(score, float) for score in result.values())
    report = {row["task"]: row for row in csv.DictReader((folder / "report.csv").open())}
    assert float(report["trec"]["score"]) == result["trec"]
    question = len("Why so?")  # after the chat template's end has gone: trec has none
    assert int(report["trec"]["sparse_steps"]) == SAMPLES * (question + 5)
    assert 0 < float(report["trec"]["hit_rate"]) < 1
    assert int(report["trec"]["peak_kv_bytes"]) > 0 and float(report["trec"]["tokens_per_s"]) > 0
    assert report["trec"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "sparse_steps" in printed and "hit_rate" in printed


@pytest.mark.parametrize("split", [(), ("--question-as-decode",)])
def test_hisparse_and_resident_predict_the_same(split, place, tmp_path, capsys):
    for method in ("hisparse", "hisparse-resident"):
        main(
            command(place, tmp_path, "--method", method, "--token_budget", "64", *split, "--tasks", *PROMPTS)
        )
    one, other = (tmp_path / "pred" / f"tiny-{method}" for method in ("hisparse", "hisparse-resident"))
    assert main(["--compare", str(one), str(other)]) == 0
    assert f"{3 * SAMPLES} predictions are identical" in capsys.readouterr().out

    changed = lines(other / "trec.jsonl")
    changed[2]["tokens"][3] += 1
    (other / "trec.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    (other / "hotpotqa.jsonl").unlink()
    assert main(["--compare", str(one), str(other)]) == 1
    printed = capsys.readouterr().out
    assert "trec, sample trec-2: differs from new token 3 on" in printed
    assert "hotpotqa: only in" in printed
    assert f"{2 * SAMPLES - 1} predictions are identical, 2 differences" in printed


def test_a_lost_sample_is_a_difference(place, tmp_path, capsys):
    main(command(place, tmp_path, *SPARSE, "--tasks", "trec"))
    whole = tmp_path / "pred" / "tiny-hisparse" / "trec.jsonl"
    part = tmp_path / "part.jsonl"
    part.write_text("".join(json.dumps(line) + "\n" for line in lines(whole)[:-1]))
    assert main(["--compare", str(whole), str(part)]) == 1
    part.write_text("")
    with pytest.raises(SystemExit, match="is empty"):
        main(["--compare", str(whole), str(part)])


@pytest.mark.parametrize("v2", [False, True])
def test_a_comparison_says_which_settings_differ(v2, place, tmp_path, capsys):
    which = ["--v2"] if v2 else ["--tasks", "trec"]
    runs = []
    for budget in ("64", "128"):
        output = tmp_path / budget
        main(command(place, output, *which, "--limit", "1", "--token_budget", budget))
        runs.append(output / ("results/tiny-hisparse.jsonl" if v2 else "pred/tiny-hisparse"))
    capsys.readouterr()
    main(["--compare", *map(str, runs)])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "settings: token_budget is 64 and 128"
    assert not any(line.startswith("settings") for line in others)
    main(["--compare", str(runs[0]), str(runs[0])])
    assert "settings" not in capsys.readouterr().out
    for path in tmp_path.glob("128/*/*/settings.json"):
        path.unlink()
    main(["--compare", *map(str, runs)])
    assert capsys.readouterr().out.startswith(f"settings: there is no settings.json of {runs[1]}\n")


BROKEN = [
    ('{"_id": "a", "tokens": [1]}\n{"_id', "line 2 is not JSON"),
    ('{"_id": "a", "tokens": [1]}\n\n[1]\n', "line 3 is list, must be a JSON object"),
    ('{"_id": "a"}\n', "line 1 has no tokens: these are not predictions"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_broken_predictions_name_file_and_line(content, message, tmp_path):
    (tmp_path / "trec.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=rf"trec\.jsonl, {message}"):
        main(["--compare", str(tmp_path), str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trec.jsonl", b'{"_id": "a"}\n{"_id": "b', r"trec\.jsonl, line 2 is not JSON"),
        ("trec.jsonl", b'{"_id": "\xe4"}\n', r"trec\.jsonl, line 1 is not JSON"),
        ("data.json", b'[\n{"_id": "a"},\n{"_id"]', r"data\.json, line 3 is not JSON"),
        ("data.json", b'[\n"\xe4"]', r"data\.json, line 2 is not JSON"),
        ("data.json", b'{"_id": "a"}', r"data\.json must be a list of JSON objects"),
    ],
)
def test_broken_data_name_file_and_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        if name == "data.json":
            load_v2(tmp_path, None)
        else:
            load_v1("trec", e=False, data_dir=tmp_path, limit=None)


def test_longbench_e_scores_by_length(place, tmp_path):
    main(command(place, tmp_path, "--e", "--method", "dynamic", "--tasks", "trec"))
    folder = tmp_path / "pred_e" / "tiny-dynamic"
    assert list(json.loads((folder / "result.json").read_text())["trec"]) == ["0-4k", "4-8k", "8k+"]
    assert [line["_id"] for line in lines(folder / "trec.jsonl")] == [f"trec-{i}" for i in range(SAMPLES)]


def test_v2(place, tmp_path):
    main(command(place, tmp_path, "--v2", *SPARSE, "--limit", "2"))
    found = lines(tmp_path / "results" / "tiny-hisparse.jsonl")
    given = json.loads((place / "data" / "data.json").read_text())
    assert len(found) == 2
    for line, sample in zip(found, given[:2], strict=True):
        assert line["context"] == sample["context"].strip()[:1000]
        assert line["judge"] is (line["pred"] == "A")
        assert line["_id"] == sample["_id"] and line["question"] == sample["question"]
    folder = tmp_path / "longbench_v2" / "tiny-hisparse"
    assert set(json.loads((folder / "result.json").read_text())) == {
        "Overall",
        "Easy",
        "Hard",
        "Short",
        "Medium",
        "Long",
    }
    assert not list(tmp_path.glob("results/*.csv"))  # the official result.py reads all that lies there


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory) -> bytes:
    """The predictions of a run in one go."""
    output = tmp_path_factory.mktemp("undisturbed")
    main(command(place, output, *SPARSE, "--tasks", "hotpotqa"))
    return (output / "pred" / "tiny-hisparse" / "hotpotqa.jsonl").read_bytes()


def test_a_killed_run_goes_on_and_gives_the_same_file(place, tmp_path, undisturbed):
    folder = tmp_path / "pred" / "tiny-hisparse"
    journal = folder / "journal" / "hotpotqa.0.jsonl"
    process = start(place, tmp_path, *SPARSE, "--tasks", "hotpotqa")
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output
    done = journal.read_bytes().count(b"\n")
    assert 2 <= done < SAMPLES
    journal.write_bytes(journal.read_bytes() + b'{"key": "hotpotqa-4", "pre')  # as if killed within a line
    before = journal.read_bytes()[: journal.read_bytes().rfind(b"\n") + 1]

    assert main(command(place, tmp_path, *SPARSE, "--tasks", "hotpotqa")) == 0
    assert journal.read_bytes().startswith(before)  # what was done is not done again
    assert sorted(_name(line) for line in lines(journal)) == [f"hotpotqa-{i}" for i in range(SAMPLES)]
    assert (folder / "hotpotqa.jsonl").read_bytes() == undisturbed


def test_a_finished_run_predicts_nothing_again(place, tmp_path, undisturbed, monkeypatch):
    main(command(place, tmp_path, *SPARSE, "--tasks", "hotpotqa", "--limit", "2"))
    main(command(place, tmp_path, *SPARSE, "--tasks", "hotpotqa"))
    path = tmp_path / "pred" / "tiny-hisparse" / "hotpotqa.jsonl"
    assert path.read_bytes() == undisturbed
    monkeypatch.setattr("eval.longbench.predict.answer", None)
    main(command(place, tmp_path, *SPARSE, "--tasks", "hotpotqa"))
    assert path.read_bytes() == undisturbed


def test_only_samples_whose_content_changed_are_predicted_again(place, tmp_path, monkeypatch):
    asked = []

    def spy(*args, **kwargs):
        asked.append(args)
        return answer(*args, **kwargs)

    monkeypatch.setattr("eval.longbench.predict.answer", spy)
    data = tmp_path / "data"
    data.mkdir()
    given = lines(place / "data" / "hotpotqa.jsonl")[:3]

    def run() -> tuple[int, list[dict[str, object]], float]:
        (data / "hotpotqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
        before = len(asked)
        main(command(place, tmp_path, *SPARSE, "--tasks", "hotpotqa", "--data_dir", str(data)))
        folder = tmp_path / "pred" / "tiny-hisparse"
        score = json.loads((folder / "result.json").read_text())["hotpotqa"]
        return len(asked) - before, lines(folder / "hotpotqa.jsonl"), score

    count, first, _ = run()
    assert count == 3
    given[1]["context"] = "Something else. " * 10
    count, second, _ = run()
    assert count == 1 and second[1]["tokens"] != first[1]["tokens"]
    assert second[0] == first[0] and second[2] == first[2]
    for sample, line in zip(given, second, strict=True):
        sample["answers"] = [line["pred"]]
    count, third, score = run()
    assert count == 0 and [line["answers"] for line in third] == [line["answers"] for line in given]
    assert score > 0  # of the answers as they are now


def test_two_processes_share_the_samples_and_merge_in_order(place, tmp_path, undisturbed):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    process = start(place, tmp_path, *SPARSE, "--tasks", "hotpotqa", launcher=launcher)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    folder = tmp_path / "pred" / "tiny-hisparse"
    journals = [lines(folder / "journal" / f"hotpotqa.{rank}.jsonl") for rank in (0, 1)]
    assert [[_name(line) for line in journal] for journal in journals] == [
        [f"hotpotqa-{i}" for i in range(rank, SAMPLES, 2)] for rank in (0, 1)
    ]
    assert (folder / "hotpotqa.jsonl").read_bytes() == undisturbed


def test_samples_from_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        fields = {"question": "Why?", "context": "c", "answers": ["a"], "length": 1, "all_classes": None}
        return [fields, {**fields, "input": "How?", "_id": "x"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_v1("qasper", e=True, data_dir=None, limit=None)
    assert [(sample["_id"], sample["input"]) for sample in found] == [("qasper_e-0", "Why?"), ("x", "How?")]
    assert asked == [(("Xnhyacinth/LongBench", "qasper_e"), {"split": "test"})]

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"no network\): give the official files with --data_dir"):
        load_v2(None, limit=None)


def test_samples_that_share_an_id_are_kept_apart():
    assert keys([{"_id": "a"}, {"_id": "b"}, {"_id": "a"}]) == ["a", "b", "a#2"]


def test_scores_of_other_tasks_stay(place, tmp_path):
    for task in ("trec", "hotpotqa", "trec"):
        main(command(place, tmp_path, "--method", "dynamic", "--tasks", task, "--limit", "1"))
    folder = tmp_path / "pred" / "tiny-dynamic"
    assert set(json.loads((folder / "result.json").read_text())) == {"trec", "hotpotqa"}
    rows = list(csv.DictReader((folder / "report.csv").open()))
    assert [row["task"] for row in rows] == ["hotpotqa", "trec"]
    assert {row["torch"] for row in rows} == {torch.__version__}


def test_settings_are_not_mixed(place, tmp_path):
    main(command(place, tmp_path, *SPARSE, "--tasks", "trec", "--limit", "1"))
    with pytest.raises(SystemExit, match="token_budget=64 there, 128 asked"):
        main(command(place, tmp_path, "--token_budget", "128", "--question-as-decode", "--tasks", "trec"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tasks", "trek"), "unknown tasks trek; LongBench has narrativeqa, qasper"),
        (("--tasks", "musique", "--e"), "unknown tasks musique; LongBench-E has qasper"),
        (("--tasks", "qasper"), "there is no prompt for qasper in the official files"),
        (("--method", "offloaded", "--tasks", "trec"), "copies KV over CUDA streams"),
        (("--method", "dynamic", "--token_budget", "64"), "method 'dynamic' is dense"),
        (("--token_budget", "0", "--tasks", "trec"), "Quest: token_budget=0"),
        (("--tasks", "trec", "--data_dir", "."), "has no trec.jsonl"),
        (("--tasks", "trec", "--max_length", "5000"), "more than the 4096 that the model was made for"),
    ],
)
def test_what_cannot_be_run_gives_one_clear_error(more, message, place, tmp_path):
    if "--max_length" in more:
        long = sample("trec", 0, random.Random(1), (1, 2)) | {"context": "x" * 6000}
        (tmp_path / "trec.jsonl").write_text(json.dumps(long) + "\n")
        more = (*more, "--data_dir", str(tmp_path))
    with pytest.raises(SystemExit, match=message):
        main(command(place, tmp_path, *more))
