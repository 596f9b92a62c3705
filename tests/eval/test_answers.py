"""An answer through each method is that of the literal algorithm on transformers' own cache."""

from __future__ import annotations

import pytest
import torch

from eval.answers import answer
from eval.methods import Caches, Method
from eval.prompts import Prompt

from .. import models, msa_models
from ..oracle import quest_oracle

IDS = models.prompt(1, 400)[0].tolist()
BUDGET = 64


def answers(model, method, prompts, new=12):
    caches = Caches(model, method)
    return [answer(caches, prompt, new) for prompt in prompts]


@pytest.mark.parametrize("question", [None, 300, 390])
@pytest.mark.parametrize("method", ["hisparse", "hisparse-resident"])
def test_sparse_answers_are_those_of_the_literal_algorithm(method, question, twins):
    native, enabled = twins("qwen3", "cpu")
    prompts = [
        Prompt(IDS, question),
        Prompt(IDS[:350], question and question - 50),
    ]  # the second reuses the cache
    with quest_oracle(native, BUDGET, page_size=16) as oracle:
        expected = answers(native, Method("dynamic"), prompts)
    found = answers(enabled, Method(method, token_budget=BUDGET), prompts)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert oracle.sparse_calls and oracle.margin > 1e-5


@pytest.mark.parametrize("question", [None, 250, 390])
def test_what_a_question_fed_as_decode_costs(question, twins):
    """Each token of the question and of the answer but its last is a sparse step."""
    [found] = answers(twins("qwen3", "cpu").enabled, Method("hisparse", BUDGET), [Prompt(IDS, question)])
    fed = len(IDS) - question if question else 0
    measures = found.measures
    assert measures.sparse_steps == fed + 11
    assert measures.new_tokens == 12 and measures.prompt_tokens == 400
    assert 0 < measures.hits < measures.selected


def test_everything_resident_hits_always_and_holds_more(twins):
    model = twins("qwen3", "cpu").enabled
    prompt = [Prompt(IDS, 300)]
    [small], [resident] = (
        answers(model, Method(name, BUDGET), prompt) for name in ("hisparse", "hisparse-resident")
    )
    assert resident.measures.hits == resident.measures.selected == small.measures.selected
    assert resident.measures.kv_bytes > small.measures.kv_bytes > 0


def test_a_question_fed_densely_changes_nothing(twins):
    model = twins("qwen3", "cpu").native
    whole, split = answers(model, Method("dynamic"), [Prompt(IDS), Prompt(IDS, 300)])
    assert whole.tokens == split.tokens
    assert whole.measures.sparse_steps == 0
    # 4 layers, keys and values, 2 heads of 16 in fp32, 400 + 11 tokens
    assert whole.measures.kv_bytes == 4 * 2 * 2 * 16 * 4 * 411


def test_a_stop_token_ends_the_answer_but_not_before_its_first(twins):
    model = twins("qwen3", "cpu").native
    caches = Caches(model, Method("dynamic"))
    free = answer(caches, Prompt(IDS), 12).tokens
    stop = free[4]
    assert answer(caches, Prompt(IDS), 12, stop_tokens=[stop]).tokens == free[: free.index(stop) + 1]
    assert answer(caches, Prompt(IDS), 12, stop_tokens=[free[0]]).tokens[0] != free[0]


def test_more_than_the_model_was_made_for_is_refused(twins):
    caches = Caches(twins("qwen3", "cpu").native, Method("dynamic"))
    with pytest.raises(ValueError, match="400 tokens and an answer of up to 4000 are more than the 4096"):
        answer(caches, Prompt(IDS), 4000)


def test_settings_that_do_not_belong_together():
    with pytest.raises(ValueError, match="method 'sparse', must be one of dynamic, offloaded"):
        Method("sparse")
    with pytest.raises(ValueError, match="method 'dynamic' is dense"):
        Method("dynamic", token_budget=64)
    with pytest.raises(ValueError, match="method 'dynamic' is dense"):
        Method("dynamic", token_budget=0)
    with pytest.raises(ValueError, match="Quest: token_budget=0, must be a whole number of at least 1"):
        Method("hisparse", token_budget=0)


def test_a_buffer_of_no_tokens_is_refused(twins):
    with pytest.raises(ValueError, match="device_buffer_tokens=0"):
        Caches(twins("qwen3", "cpu").enabled, Method("hisparse", 64, 0))


def test_methods_that_this_machine_cannot_run_say_so(twins, monkeypatch):
    model = twins("qwen3", "cpu").native
    with pytest.raises(ValueError, match="'offloaded' copies KV over CUDA streams"):
        Caches(model, Method("offloaded"))
    for package in ("optimum_quanto", "hqq"):
        monkeypatch.setattr(f"eval.methods.is_{package}_available", lambda: False)
    with pytest.raises(ValueError, match="pip install optimum-quanto"):
        Caches(model, Method("quantized"))
    with pytest.raises(ValueError, match="device_buffer_tokens=32"):
        Caches(model, Method("hisparse", 64, 32))


def test_quantized_keeps_a_fraction(twins):
    pytest.importorskip("optimum.quanto")
    model = twins("qwen3", "cpu").native
    [found] = answers(model, Method("quantized"), [Prompt(IDS)])
    [dense] = answers(model, Method("dynamic"), [Prompt(IDS)])
    assert found.measures.kv_bytes < dense.measures.kv_bytes / 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("question", [None, 300])
def test_every_method_on_a_gpu(question, twins):
    native, enabled = twins("qwen3", "cuda")
    prompt = [Prompt(IDS, question)]
    [dense], [offloaded] = (answers(native, Method(name), prompt) for name in ("dynamic", "offloaded"))
    assert offloaded.tokens == dense.tokens
    assert 0 < offloaded.measures.kv_bytes < dense.measures.kv_bytes
    small, resident = (
        answers(enabled, Method(name, BUDGET), prompt)[0] for name in ("hisparse", "hisparse-resident")
    )
    assert small.tokens == resident.tokens
    assert small.measures.hits < small.measures.selected == resident.measures.hits


def test_a_model_that_selects_by_itself_takes_no_budget():
    model = models.build("dsa")
    with pytest.raises(ValueError, match="brings its own selection: leave it out"):
        Caches(model, Method("hisparse", token_budget=64))
    small, resident = (
        answers(model, Method(name), [Prompt(IDS)]) for name in ("hisparse", "hisparse-resident")
    )
    assert small[0].tokens == resident[0].tokens
    assert small[0].measures.sparse_steps == 11


@pytest.mark.parametrize("tokens", [1, 30, 411, 416])
def test_resident_holds_whole_blocks_of_a_model_that_selects_blocks(tokens):
    caches = Caches(msa_models.build("two_groups"), Method("hisparse-resident"))
    records = caches.empty(tokens).hosted_layers[0].buffer_records
    blocks = -(-tokens // msa_models.BLOCK)
    assert records == max(blocks, msa_models.TOP_K)


def test_answers_of_a_model_that_selects_blocks():
    native, enabled = msa_models.msa_twins("two_groups", "cpu")
    expected = answers(native, Method("dynamic"), [Prompt(IDS)])  # the model's own cache, and as sparse
    for name in ("hisparse", "hisparse-resident"):
        [found] = answers(enabled, Method(name), [Prompt(IDS)])
        assert found.tokens == expected[0].tokens and found.measures.sparse_steps == 11
