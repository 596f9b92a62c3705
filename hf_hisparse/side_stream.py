"""The stream beside the current one, for what is to run while the model computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of `device`."""
    return torch.cuda.Stream(device, priority=-1)  # what it runs is waited for


@contextmanager
def beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Run what is launched in it on the side stream, after all that the current stream has been given so far.

    Who uses the result waits for an event recorded there, in the same call where that is captured. Outside a capture the
    allocator must be told of the tensors used (``record_stream``).
    """
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
