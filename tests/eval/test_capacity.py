"""The batch that is said to fit fits, and the search finds it without measuring anything twice."""

from __future__ import annotations

import dataclasses
import sys
from unittest import mock

import pytest
import torch

from eval.capacity import __main__ as capacity
from eval.capacity.card import Card
from eval.decoding import Contenders, Run, decode
from eval.methods import kv_bytes
from eval.selections import Synthetic
from eval.shapes import build
from hf_hisparse import Quest
from hf_hisparse.hosted_layer import LayerSettings
from hf_hisparse.sizes import Sizes

QUEST = Quest(64)


@pytest.fixture(scope="module")
def model():
    return build("toy", "cpu", torch.float32)


def _card(model, device, host=2**30, most=16):
    contenders = Contenders(model, QUEST)
    sizes = Sizes(model.config, contenders.family, LayerSettings(4, 4, 32, False, 0), torch.float32)
    return Card(sizes, device, host, most), contenders


@pytest.mark.parametrize("name", ["hisparse", "hisparse-resident", "dynamic", "static"])
def test_the_batch_that_is_said_to_fit_fits(model, name):
    run = Run(name, 1, 512, 4, 128)
    spare, _ = _card(model, 0)
    room = spare.beside(1, run.room)
    card, contenders = _card(model, room + 2**22)
    batch = card.batch(run)
    assert 1 < batch < 16
    run = dataclasses.replace(run, batch=batch)
    if name == "hisparse":
        run = dataclasses.replace(run, device_buffer_tokens=card.buffer_tokens(run))
        assert run.device_buffer_tokens % 16 == 0 and run.device_buffer_tokens >= 128
    cache, made = None, Contenders.empty

    def keep(self, run):
        nonlocal cache
        cache = made(self, run)
        return cache

    with mock.patch.object(Contenders, "empty", keep):
        decode(contenders, run, Synthetic(QUEST))
    held = kv_bytes(cache, torch.device("cpu"))
    if name == "dynamic":  # a step holds one of four layers a second time
        held *= 5 / 4
    beside = card.beside(batch, run.room)
    assert held + beside <= card.device
    if name != "hisparse":  # whose buffers then take what is left
        assert held * (batch + 1) / batch + beside > card.device - 2**18


def test_the_host_limits_the_batch_too(model):
    card, _ = _card(model, 2**40, host=3 * 2**20)
    run = Run("hisparse", 1, 512, 4, 128)
    one = card._on_host(run, 1)
    assert card.batch(run) == 3 * 2**20 // one < 16


def _main(tmp_path, *more):
    calls = []

    def measured(contenders, run, workload):
        calls.append(run)
        if run.cache == "dynamic" and run.batch == 2:
            raise MemoryError("too much\nof it")
        return {"ms_per_step": 2.0, "tokens_per_s": run.batch * (9.0 if run.cache == "hisparse" else 2.0)}

    output = tmp_path / "capacity.csv"
    argv = ["capacity", "--quick", "--output", str(output), *more]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(capacity, "decode", measured):
        capacity.main()
    return calls, capacity.merge_rows(output, [], capacity.KEY)


def test_the_next_smaller_batch_is_tried_and_nothing_twice(tmp_path):
    calls, rows = _main(tmp_path)
    assert len(calls) == len(set(calls))
    found = {(row["memory"], row["cache"]): row for row in rows}
    assert (found["2GiB", "dynamic"]["batch"], found["2GiB", "static"]["batch"]) == ("1", "2")
    assert (
        sum(run.cache == "dynamic" for run in calls) == 2
    )  # 2, then 1, which is the row without a cap as well
    assert found["2GiB", "hisparse"]["times_best_dense"] == "4.5"  # 2 x 9 over 2 x 2
    assert found["all", "hisparse"]["times_best_dense"] == "4.5"


def test_some_caches_again_leave_the_others_rows(tmp_path):
    _main(tmp_path)
    calls, rows = _main(tmp_path, "--caches", "static")
    assert {run.cache for run in calls} == {"static"}
    assert len(rows) == 8
