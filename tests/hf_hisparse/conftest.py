"""What stands in for a GPU: its driver, and its graphs."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from hf_hisparse import graphs


class Driver:
    """Stands in for the CUDA runtime: notes what is pinned, and refuses when told to."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.pinners: list[str] = []  # the thread of each call
        self.may_pin = threading.Event()  # without it a call waits
        self.may_pin.set()
        self.asked = threading.Event()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.set()
        assert self.may_pin.wait(30)
        if self.refuses:
            return 2
        assert not any(
            address < start + length and start < address + size for start, length in self.pinned.items()
        )
        self.pinned[address] = size
        self.pinners.append(threading.current_thread().name)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetLastError(self) -> int:
        return 2


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return driver


@pytest.fixture
def imagined_graphs(monkeypatch):
    """CUDA graphs without a GPU: a capture runs the step, and the first replay gives what that gave."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(graphs, "_obstacle", lambda model, cache: None)
    monkeypatch.setattr(
        graphs,
        "_is_decode",
        lambda cache, kwargs: kwargs["input_ids"].shape[1] == 1 and cache.get_seq_length() > 0,
    )
