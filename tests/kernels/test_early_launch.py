"""Launching kernels early: only where both the GPU and the installed Triton can."""

from __future__ import annotations

import runpy

import pytest
import torch
import triton.language as tl

from hisparse_kernels import early_launch

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


@pytest.mark.parametrize("missing", ["gdc_wait", "cuda"])
def test_a_triton_without_it(monkeypatch, missing):
    """Triton 3.3, which torch 2.7 brings, has no such wait; one built for other GPUs alone may have nothing of CUDA's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delattr(tl.extra if missing == "cuda" else tl.extra.cuda, missing)
    module = runpy.run_path(early_launch.__file__)  # as it is imported there
    assert module["_arguments"](0) == {"EARLY": False}
