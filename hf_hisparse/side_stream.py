"""The stream beside the current one, for what is to run while the model computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# A fetch on every multiprocessor holds up the products that it is meant to run beside: they want a multiprocessor's
# registers and shared memory, which it gives back only when its programs have ended. So few programs, each with much in flight.
BACKGROUND_PROGRAMS = 8


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one of `device`."""
    return torch.cuda.Stream(device, priority=-1)  # its few programs are to start at once


@contextmanager
def beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Run what is launched in it on the side stream, after all that the current stream has been given so far."""
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
