"""early_launch: only where GPU and compiler can do it, and then in every kernel of a decode step."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton.language as tl

from hisparse_kernels import (
    append,
    block_scores,
    early_launch,
    fetch,
    fetch_ahead,
    gqa_decode,
    mla_decode,
    quest_pages,
    quest_select,
    resolve,
    write_row,
)

MODULES = [
    append,
    block_scores,
    fetch,
    fetch_ahead,
    gqa_decode,
    mla_decode,
    quest_pages,
    quest_select,
    resolve,
    write_row,
]


def arguments(device: int | None) -> dict:
    return early_launch._arguments.__wrapped__(device)


@pytest.mark.parametrize("capability, able", [((8, 6), False), ((9, 0), True), ((12, 0), True)])
def test_gpus_that_can(monkeypatch, capability, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arguments(0) == ({"EARLY": True, "launch_pdl": True} if able else {"EARLY": False})


def test_other_backends_and_compilers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert arguments(0)["EARLY"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert arguments(0) == {"EARLY": False}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delattr(tl.extra.cuda, "gdc_wait")
    assert arguments(0) == {"EARLY": False}
    assert early_launch.early_launch(torch.zeros(1)) == {"EARLY": False}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_kernel_waits_before_it_touches_memory(module):
    """Else it would read what the kernel before it has not written yet; `fetch_ahead` says itself what it reads early."""
    kernels = [
        value for name, value in vars(module).items() if name.startswith("_") and name.endswith("_kernel")
    ]
    assert kernels
    for kernel in kernels:
        source = inspect.getsource(kernel.fn)
        wait = "tl.extra.cuda.gdc_wait()" if module is fetch_ahead else "wait_for_previous(EARLY)"
        assert source.count(wait) == 1
        if module is not fetch_ahead:
            before = source[: source.index(wait)]
            assert not any(touch in before for touch in ("tl.load", "tl.store", "tl.atomic"))
        assert "EARLY: tl.constexpr" in source
    launches = inspect.getsource(module).count("**early_launch(")
    assert launches == len(kernels)
