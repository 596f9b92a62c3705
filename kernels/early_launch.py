"""Launch a kernel while the one before it still runs: the wait for each other moves from the launch into the kernel.

Between two kernels of a stream the GPU is idle for about a microsecond, which a step of many short kernels spends hundreds of
times. With programmatic dependent launch (NVIDIA's compute capability 9.0 and later) the second kernel's programs take their
places as soon as all programs of the first one run, and wait there, in `wait_for_previous`, until what it wrote is seen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

# None in a Triton built without CUDA: to name what is not there fails even where it is not compiled.
_cuda = getattr(tl.extra, "cuda", None)
gdc_wait: Any = getattr(_cuda, "gdc_wait", None)
gdc_launch_dependents: Any = getattr(_cuda, "gdc_launch_dependents", None)

_FIRST_CAPABILITY = 9, 0


@triton.jit
def wait_for_previous(EARLY: tl.constexpr, launch_next: tl.constexpr = True):
    """Stands in every kernel launched with `early_launch`, before its first access to what the kernel before it may change.

    The next kernel's programs take their places from then on; without `launch_next` when this one's have ended, which is
    faster where programs that wait would take the places of those that work.
    """
    if EARLY:
        gdc_wait()
        if launch_next:
            gdc_launch_dependents()


def early_launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Arguments to launch a kernel with, the ``EARLY`` of `wait_for_previous` among them, where its tensors are like this one."""
    return _arguments(tensor.get_device() if tensor.is_cuda else None)


@lru_cache
def _arguments(device: int | None) -> dict[str, Any]:
    able = gdc_wait is not None and torch.version.hip is None
    if able and device is not None and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
