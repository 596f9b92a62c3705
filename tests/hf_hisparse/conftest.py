"""What tests of host memory share."""

from __future__ import annotations

import threading

import pytest
import torch


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
