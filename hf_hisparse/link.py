"""The link between host memory and GPU."""

from __future__ import annotations

from functools import cache

import torch


@cache
def link_bandwidth(size: int = 2**28, repeats: int = 8) -> float:
    """Host to device copy bandwidth from pinned memory, bytes per second; NaN without CUDA. Measured once."""
    if not torch.cuda.is_available():
        return float("nan")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        device.copy_(host, non_blocking=True)
    stop.record()
    stop.synchronize()
    return repeats * size / (start.elapsed_time(stop) / 1000)
