"""The device the kernels are tested on: the GPU, or Triton's interpreter on a machine without one."""

from __future__ import annotations

import os

import pytest
import torch

from hisparse_kernels import dispatch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    if torch.cuda.is_available():
        return "cuda"
    assert os.environ.get("TRITON_INTERPRET") == "1", "set by tests/__init__.py before Triton is imported"
    monkeypatch.setattr(dispatch, "interpret", True)
    return "cpu"
