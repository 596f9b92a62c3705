"""Where a call runs, the Triton kernel or its reference, and what the wrappers check alike."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from .miss_plan import HostSource

QUAD_BYTES = 16  # what a thread reads of a record at once

# Set by tests on a machine without a GPU, together with TRITON_INTERPRET=1: run the kernels on CPU tensors.
interpret = False

_HERE = nullcontext()


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a call on this tensor runs the Triton kernel; otherwise it runs the reference."""
    return tensor.is_cuda or interpret


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """A context in which a kernel is launched on the tensor's GPU: Triton takes the current device."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return _HERE


def shared_memory(tensor: torch.Tensor) -> int:
    """Bytes of shared memory that a program can have on the tensor's GPU; in the interpreter those of an H200."""
    return _shared_memory(tensor.get_device()) if tensor.is_cuda else 232448


@functools.cache
def _shared_memory(device: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def block_of(size: int, smallest: int = 1) -> int:
    """The block, a power of two, that holds `size` elements (`triton.next_power_of_2` takes 4 us)."""
    return max(smallest, 1 << max(size - 1, 0).bit_length())


def ceil_div(size: int, part: int) -> int:
    """How many parts hold `size` elements (`triton.cdiv` takes 4 us)."""
    return -(-size // part)


def check_state(lanes: int, page_table: torch.Tensor, slot_records: torch.Tensor) -> None:
    """Check a hot buffer's tables: int32 ``[lanes, capacity]`` and ``[lanes, B]``.

    Raises
    ------
    ValueError
        For another dtype, another number of lanes, or a stride between columns.
    """
    if not page_table.dtype is slot_records.dtype is torch.int32:
        raise ValueError(
            f"page_table and slot_records must be int32, got {page_table.dtype} and {slot_records.dtype}"
        )
    if page_table.shape[0] != lanes or slot_records.shape[0] != lanes or slot_records.ndim != 2:
        raise ValueError(
            f"page_table and slot_records must be [{lanes}, capacity] and [{lanes}, B], "
            f"got {list(page_table.shape)} and {list(slot_records.shape)}"
        )
    if page_table.stride(1) != 1 or not slot_records.is_contiguous():
        raise ValueError("slot_records must be contiguous, page_table in its last dimension")


def check_selection(selection: torch.Tensor) -> None:
    """Check that a selection ``[lanes, k]`` is int32 or int64, and contiguous in its last dimension (ValueError)."""
    if selection.dtype not in (torch.int32, torch.int64) or (
        selection.shape[1] > 1 and selection.stride(1) != 1
    ):
        raise ValueError(
            "selection must be int32 or int64 and contiguous in its last dimension, "
            f"got {selection.dtype} with strides {selection.stride()}"
        )


def bytes_of_record(buffer: torch.Tensor) -> int:
    """The bytes of one record of a buffer ``[lanes, B, E]``; ValueError if threads cannot read it in quads."""
    record_bytes = buffer.shape[2] * buffer.element_size()
    if record_bytes % QUAD_BYTES:
        raise ValueError(
            f"a record must be a multiple of {QUAD_BYTES} bytes, got {buffer.shape[2]} x {buffer.dtype} = "
            f"{record_bytes} bytes"
        )
    return record_bytes


def check_position(position: torch.Tensor) -> None:
    """Check that a position is an int64 tensor of one element (ValueError)."""
    if position.dtype is not torch.int64 or position.numel() != 1:
        raise ValueError(
            f"position must be an int64 tensor of 1 element, got {position.dtype} {list(position.shape)}"
        )


def check_host_rows(host_rows: torch.Tensor, lanes: int) -> int:
    """Check int32 ``[batch, capacity]`` host rows (ValueError) and return the lanes of one batch row."""
    if host_rows.dtype is not torch.int32 or host_rows.stride(1) != 1:
        raise ValueError(
            f"host_rows must be int32 and contiguous in its last dimension, got {host_rows.dtype} "
            f"with strides {host_rows.stride()}"
        )
    return heads_per_row(lanes, host_rows.shape[0], "host_rows")


def heads_per_row(lanes: int, batch: int, name: str) -> int:
    """The lanes of one batch row; ValueError if the `batch` rows of tensor `name` do not divide the lanes."""
    return lanes_each(lanes, batch, name, "batch rows")


def lanes_each(lanes: int, parts: int, name: str, what: str) -> int:
    """The lanes of each of the `parts` of tensor `name`, called `what`; ValueError if they do not divide the lanes."""
    if parts == 0 or lanes % parts:
        raise ValueError(f"{name} has {parts} {what}, which must divide the {lanes} lanes")
    return lanes // parts


def check_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: torch.Tensor,
    buffer: torch.Tensor,
    tokens_per_record: int,
    parts: int = 1,
) -> None:
    """Check one token per lane and part, ``[lanes * parts, width]``, against the pool it is stored in.

    Raises
    ------
    ValueError
        For different dtypes, another number of lanes, a record of another width, or rows that are not contiguous.
    """
    lanes, key_width = keys.shape[0] // parts, keys.shape[1]
    value_width = values.shape[1]
    record_width = parts * tokens_per_record * (key_width + value_width)
    if not keys.dtype is values.dtype is pool.dtype is buffer.dtype:
        raise ValueError(
            "keys, values, pool and buffer must have one dtype, "
            f"got {keys.dtype}, {values.dtype}, {pool.dtype} and {buffer.dtype}"
        )
    if values.shape[0] != keys.shape[0] or pool.shape[1] < lanes or pool.shape[2] != record_width:
        raise ValueError(
            f"{lanes} lanes of {tokens_per_record} tokens x ({key_width} + {value_width}) need values "
            f"[{keys.shape[0]}, {value_width}] and a pool [records, at least {lanes}, {record_width}], "
            f"got {list(values.shape)} and {list(pool.shape)}"
        )
    if keys.stride(1) != 1 or values.stride(1) != 1 or not (pool.is_contiguous() and buffer.is_contiguous()):
        raise ValueError("pool and buffer must be contiguous, keys and values in their last dimension")


def check_source(source: HostSource, selection: torch.Tensor, buffer: torch.Tensor) -> int:
    """Check where missing records are read from, and return the lanes of one batch row.

    Raises
    ------
    ValueError
        If the pool does not suit the buffer, the plan is not of this selection, or a buffer is shared by lanes.
    """
    lanes, k = selection.shape
    if source.pool.dtype is not buffer.dtype or not source.pool.is_contiguous():
        raise ValueError(
            f"pool must be contiguous and {buffer.dtype} as the buffer, got {source.pool.dtype} with strides "
            f"{source.pool.stride()}"
        )
    if buffer.shape[0] != lanes or source.pool.shape[1] < lanes or source.pool.shape[2] != buffer.shape[2]:
        raise ValueError(
            f"{lanes} lanes need a buffer each and a pool [records, at least {lanes}, {buffer.shape[2]}], "
            f"got {buffer.shape[0]} buffers and {list(source.pool.shape)}"
        )
    table = source.page_table
    if table.dtype is not torch.int32 or table.shape[0] != lanes or table.stride(1) != 1:
        raise ValueError(
            f"page_table must be int32 [{lanes}, capacity], contiguous in its last dimension, got {table.dtype} "
            f"{list(table.shape)} with strides {table.stride()}"
        )
    missing = source.plan.missing
    if missing.shape != (lanes, k) or missing.dtype is not torch.bool or not missing.is_contiguous():
        raise ValueError(
            f"the plan must be of the selection: missing a contiguous bool [{lanes}, {k}], got {missing.dtype} "
            f"{list(missing.shape)}"
        )
    return check_host_rows(source.host_rows, lanes)
