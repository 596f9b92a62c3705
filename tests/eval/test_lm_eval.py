"""lm-eval's tasks through our caches; skipped where lm-eval is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not among the test requirements")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="fp32 on the CPU, where tokens must be equal"
)

from lm_eval.models.huggingface import HFLM  # noqa: E402

from eval.lm_eval import HiSparseLM  # noqa: E402

from ..oracle import quest_oracle  # noqa: E402
from . import tiny  # noqa: E402

CONTEXT = "abc def ghi." * 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny.save_checkpoint(tmp_path_factory.mktemp("lm_eval") / "tiny"))


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


SCORED = requests((CONTEXT, " yes"), (CONTEXT, " n" * 40), ("a" * 40, "b"), ("", "text"))
ASKED = requests((CONTEXT, {"until": [], "max_gen_toks": 12, "do_sample": False}))


def test_dense_methods_score_as_lm_eval_does(checkpoint):
    ours = HiSparseLM(checkpoint, method="dynamic", device="cpu").loglikelihood(SCORED, disable_tqdm=True)
    theirs = HFLM(checkpoint, device="cpu").loglikelihood(SCORED, disable_tqdm=True)
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


@pytest.mark.parametrize("method", ["hisparse", "hisparse-resident"])
def test_sparse_methods_score_and_generate_as_the_literal_algorithm(checkpoint, method):
    literal = HiSparseLM(checkpoint, method="dynamic", device="cpu")
    dense = literal.loglikelihood(SCORED, disable_tqdm=True)
    with quest_oracle(literal.model, 64, page_size=16) as oracle:
        scores = literal.loglikelihood(SCORED, disable_tqdm=True)
        text = literal.generate_until(ASKED, disable_tqdm=True)
    assert oracle.sparse_calls
    assert abs(scores[0][0] - dense[0][0]) > 1e-3  # sparsity is seen even in a short continuation

    sparse = HiSparseLM(checkpoint, method=method, token_budget=64, device="cpu")
    found = sparse.loglikelihood(SCORED, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in scores], abs=1e-3)
    assert sparse.generate_until(ASKED, disable_tqdm=True) == text
    info = sparse.get_model_info()
    assert info["method"] == method
    tokens = sum(len(tiny.tokenizer()(each.args[1], add_special_tokens=False).input_ids) for each in SCORED)
    assert info["sparse_steps"] == tokens + 11
    assert info["hit_rate"] == 1 if method == "hisparse-resident" else 0 < info["hit_rate"] < 1


def test_a_task_by_the_command_line(checkpoint, tmp_path):
    task = tmp_path / "tasks"
    task.mkdir()
    lines = [{"text": CONTEXT, "answer": "x"}, {"text": CONTEXT[4:], "answer": "y"}]
    (task / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (task / "tiny.yaml").write_text(
        f"""
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {task / "data.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
    )
    arguments = f"pretrained={checkpoint},method=hisparse,token_budget=64"
    command = [sys.executable, "-m", "eval.lm_eval", "--model", "hf-hisparse", "--model_args", arguments]
    command += [
        "--tasks",
        "tiny",
        "--include_path",
        str(task),
        "--output_path",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [path] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert "exact_match,none" in results["results"]["tiny"]
    assert results["config"]["sparse_steps"] == 2 * 4
