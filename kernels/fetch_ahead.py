"""Fetch what a resolve finds missing, beginning while that resolve still looks for slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import (
    block_of,
    bytes_of_record,
    ceil_div,
    check_selection,
    check_source,
    on_device_of,
    use_triton,
)
from .early_launch import early_launch, wait_for_previous
from .miss_plan import HostSource

# Over all lanes: what an H100 or H200 has places for beside the resolves, three for each multiprocessor.
_PROGRAMS = 396
_PROGRAMS_PER_LANE = 128
_WARPS = 4
# Of a selection that a program looks at at a time. One for each thread: of fewer every warp would read its own copy of the page
# table, which resolve changes meanwhile, so that what is one value to the program would differ from warp to warp.
_ENTRIES = 32 * _WARPS
_WORD_BYTES = 4
_WORDS = 2048  # that a program reads at a time: 16 of a thread


@triton.jit
def _entries_of(turn, wanted):
    """Which entry each of the next records is, bool ``[entries, turns]``, in the order of the entries."""
    rank = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    return wanted[:, None] & (rank[:, None] == turn[None, :])


@triton.jit
def _of(value, entries):
    """The value of each entry, ``[turns, 1]``, 0 where there is none."""
    return tl.sum(tl.where(entries, value[:, None], 0), axis=0)[:, None]


@triton.jit
def _copy(pool, buffer, row, slot, wanted, word, RECORD_WORDS: tl.constexpr, TOGETHER: tl.constexpr):
    """Copy the wanted records from their rows of the pool to their slots."""
    turn = tl.arange(0, TOGETHER)
    for first in range(0, tl.sum(wanted.to(tl.int32), axis=0), TOGETHER):
        entries = _entries_of(first + turn, wanted)
        inside = (_of(wanted.to(tl.int32), entries) > 0) & (word < RECORD_WORDS)
        data = tl.load(pool + _of(row, entries) * RECORD_WORDS, mask=inside)
        tl.store(buffer + _of(slot, entries) * RECORD_WORDS, data, mask=inside)


@triton.jit(
    do_not_specialize=[
        "selection_stride",
        "table_stride",
        "host_rows_stride",
        "host_lanes",
        "heads",
        "slot_count",
        "k",
    ]
)
def _fetch_ahead_kernel(
    selection,
    page_table,
    slots,
    missing,
    missing_count,
    pool,
    host_rows,
    buffer,
    selection_stride,
    table_stride,
    host_rows_stride,
    host_lanes,
    heads,
    slot_count,
    k,
    RECORD_WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    WORD_BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs (lane, part of its selection and piece of each record).

    A part is every n-th entry, so that what is missing is spread evenly over the parts, wherever it stands in the selection.
    """
    lane = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) // PIECES
    parts = tl.num_programs(1) // PIECES
    word = tl.program_id(1) % PIECES * WORD_BLOCK + tl.arange(0, WORD_BLOCK)[None, :]
    selection += lane * selection_stride
    page_table += lane * table_stride
    host_rows += lane // heads * host_rows_stride
    slots += lane * k
    missing += lane * k
    pool = pool.to(tl.pointer_type(tl.int32)) + word
    buffer = buffer.to(tl.pointer_type(tl.int32)) + lane * slot_count * RECORD_WORDS + word

    # Resolve may be running. What was written before it is read past the first level of caches, which may be older.
    entry = part + parts * tl.arange(0, ENTRIES)
    record = tl.load(selection + entry, mask=entry < k, other=-1, cache_modifier=".cg").to(tl.int64)
    valid = record >= 0
    host_row = tl.load(host_rows + record, mask=valid, other=0, cache_modifier=".cg")
    row = record * host_lanes + host_row * heads + lane % heads
    begun = record < -1
    if EARLY:
        # A record without a slot here is missing: resolve takes none away that is selected. One to which it gave a slot in
        # the meantime waits for its turn below, with those that are not read at once.
        place = tl.load(page_table + record, mask=valid, other=0, cache_modifier=".cg")
        entries = _entries_of(tl.arange(0, TOGETHER), place < 0)
        inside = (_of(valid.to(tl.int32), entries) > 0) & (word < RECORD_WORDS)
        data = tl.load(pool + _of(row, entries) * RECORD_WORDS, mask=inside, cache_modifier=".cg")
        begun = tl.sum(entries.to(tl.int32), axis=1) > 0
        wait_for_previous(EARLY, launch_next=False)

    if tl.load(missing_count + lane) > 0:
        slot = tl.load(slots + entry, mask=entry < k, other=-1).to(tl.int64)
        absent = tl.load(missing + entry, mask=entry < k, other=0) != 0
        if EARLY:
            target = _of(slot, entries)
            tl.store(buffer + target * RECORD_WORDS, data, mask=inside & (target >= 0))
        _copy(pool, buffer, row, slot, absent & (slot >= 0) & ~begun, word, RECORD_WORDS, TOGETHER)
        for start in range(part + parts * ENTRIES, k, parts * ENTRIES):
            entry = start + parts * tl.arange(0, ENTRIES)
            record = tl.load(selection + entry, mask=entry < k, other=0).to(tl.int64)
            slot = tl.load(slots + entry, mask=entry < k, other=-1).to(tl.int64)
            absent = tl.load(missing + entry, mask=entry < k, other=0) != 0
            wanted = absent & (slot >= 0)
            host_row = tl.load(host_rows + record, mask=wanted, other=0)
            row = record * host_lanes + host_row * heads + lane % heads
            _copy(pool, buffer, row, slot, wanted, word, RECORD_WORDS, TOGETHER)


def fetch_ahead(
    selection: torch.Tensor, slots: torch.Tensor, source: HostSource, buffer: torch.Tensor
) -> None:
    """Copy what the resolve of this selection found missing from the host into its slots; see `reference.fetch_ahead`.

    Launched right after that resolve, it reads the link while resolve runs.

    Raises
    ------
    ValueError
        If a record is not a multiple of 16 bytes, or a shape, dtype or memory layout is not as the reference names it.
    """
    heads = check_source(source, selection, buffer)
    lanes, slot_count, _ = buffer.shape
    words = bytes_of_record(buffer) // _WORD_BYTES
    _check(selection, slots, source.plan.count)
    if not use_triton(buffer):
        reference.fetch_ahead(selection, slots, source, buffer)
        return
    k = selection.shape[1]
    word_block = min(block_of(words), _WORDS)
    pieces = ceil_div(words, word_block)
    parts = min(k, _PROGRAMS_PER_LANE, max(1, _PROGRAMS // (lanes * pieces)))
    with on_device_of(buffer):
        _fetch_ahead_kernel[(lanes, parts * pieces)](
            selection,
            source.page_table,
            slots,
            source.plan.missing,
            source.plan.count,
            source.pool,
            source.host_rows,
            buffer,
            selection.stride(0),
            source.page_table.stride(0),
            source.host_rows.stride(0),
            source.pool.shape[1],
            heads,
            slot_count,
            k,
            words,
            pieces,
            word_block,
            _ENTRIES,
            _WORDS // word_block,
            **early_launch(buffer),
            num_warps=_WARPS,
        )


def _check(selection: torch.Tensor, slots: torch.Tensor, count: torch.Tensor) -> None:
    lanes, k = selection.shape
    check_selection(selection)
    if slots.shape != selection.shape or slots.dtype is not torch.int32 or not slots.is_contiguous():
        raise ValueError(
            f"slots must be a contiguous int32 {[lanes, k]}, got {slots.dtype} {list(slots.shape)}"
        )
    if count.shape != (lanes,) or count.dtype is not torch.int32 or not count.is_contiguous():
        raise ValueError(
            f"the plan's count must be a contiguous int32 [{lanes}], got {count.dtype} {list(count.shape)}"
        )
