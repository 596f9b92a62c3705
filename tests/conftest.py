"""Fixtures that all tests share: the device, and tiny models built once."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from . import models

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


# For tensors as tiny as these, threads cost more than they bring: here, and in programs that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


class Twins(NamedTuple):
    """The same weights twice: one model that the library never touches, and one to be enabled."""

    native: PreTrainedModel
    enabled: PreTrainedModel


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs on the CPU, and on the GPU where there is one."""
    return request.param


@functools.cache
def _twins(name: str, device: str) -> Twins:
    native = models.build(name).to(device)
    return Twins(native, copy.deepcopy(native))


@pytest.fixture(scope="session")
def twins() -> Callable[[str, str], Twins]:
    """``twins(name, device)``: a supported model of `models.SUPPORTED`, the same pair for the whole session."""
    return _twins


@pytest.fixture
def model(device: str) -> PreTrainedModel:
    """A Qwen3 of its own on `device`, for tests that change it or leave it broken."""
    return models.build("qwen3").to(device)
