"""Kernels that are wrong on purpose: what `tests.sanitizer` must find, or what it does not find elsewhere says nothing.

No file of pytest's own choosing (it is not called test_*): without the tools these tests pass or fail as it happens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

THREADS = 128


@triton.jit
def _faulty_read_kernel(values, output, THREADS: tl.constexpr):
    index = tl.arange(0, THREADS)
    tl.store(output + index, tl.load(values + index + 1))


@triton.jit
def _faulty_write_kernel(output, THREADS: tl.constexpr):
    index = tl.arange(0, THREADS)
    total = tl.sum(index, axis=0)  # over several warps, which takes shared memory
    value = tl.inline_asm_elementwise(
        "{ .reg .u32 first; mov.u32 first, 0; st.shared.u32 [first], $1; mov.u32 $0, $1; }",
        "=r,r",
        [index + total],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(output + index, value)


def test_a_read_past_the_end():
    output = torch.empty(THREADS, device="cuda")
    _faulty_read_kernel[(1,)](torch.zeros(THREADS, device="cuda"), output, THREADS)
    torch.cuda.synchronize()


def test_warps_that_write_to_one_place():
    output = torch.empty(THREADS, dtype=torch.int32, device="cuda")
    _faulty_write_kernel[(1,)](output, THREADS, num_warps=4)
    torch.cuda.synchronize()
