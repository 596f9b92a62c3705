"""Launching kernels early: only where both the GPU and the installed Triton can, and then every kernel of a decode step."""

from __future__ import annotations

import importlib
import inspect
import runpy
from pathlib import Path

import pytest
import torch
import triton.language as tl

from hisparse_kernels import early_launch

PREFILL = {"lightning_indexer"}  # long kernels, which gain nothing
KERNELS = sorted(
    path.stem
    for path in Path(early_launch.__file__).parent.glob("*.py")
    if "_kernel[" in path.read_text() and path.stem not in PREFILL
)
NVIDIA = pytest.mark.skipif(torch.version.hip is not None, reason="only NVIDIA's GPUs can")


@NVIDIA
@pytest.mark.parametrize(
    "capability, able", [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_gpus_that_can(monkeypatch, capability, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    arguments = early_launch._arguments.__wrapped__(0)
    assert arguments == ({"EARLY": True, "launch_pdl": True} if able else {"EARLY": False})
    assert early_launch.early_launch(torch.empty(1)) == {"EARLY": False}


def test_a_triton_without_cuda(monkeypatch):
    """One built for other GPUs alone may have nothing of CUDA's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delattr(tl.extra, "cuda")
    module = runpy.run_path(early_launch.__file__)  # as it is imported there
    assert module["_arguments"](0) == {"EARLY": False}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_waits_before_it_touches_memory(name):
    """Else it would read what the kernel before it has not written yet; `fetch_ahead` reads early, and writes nothing before."""
    module = importlib.import_module(f"hisparse_kernels.{name}")
    kernels = [
        value for key, value in vars(module).items() if key.startswith("_") and key.endswith("_kernel")
    ]
    assert kernels
    for kernel in kernels:
        source = inspect.getsource(kernel.fn)
        assert "EARLY: tl.constexpr" in source and source.count("wait_for_previous(EARLY") == 1
        before = source[: source.index("wait_for_previous(EARLY")]
        touches = ("tl.store", "tl.atomic") if name == "fetch_ahead" else ("tl.load", "tl.store", "tl.atomic")
        assert not any(touch in before for touch in touches)
    assert inspect.getsource(module).count("**early_launch(") == len(kernels)
