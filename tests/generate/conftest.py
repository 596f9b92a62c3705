"""Where decode steps are captured."""

from __future__ import annotations

import pytest
import torch

from hf_hisparse import sizes
from tests.cpu_graphs import graphs_on_cpu


@pytest.fixture
def graph_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where steps are captured: the GPU, or a CPU that does as one; pools grow by few tokens at a time."""
    monkeypatch.setattr(sizes, "_GROWTH_TOKENS", 64)
    if torch.cuda.is_available():
        return "cuda"
    graphs_on_cpu(monkeypatch)
    return "cpu"
