"""fetch_ahead: after a resolve, the kernel against the reference and against what the host holds, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hisparse_kernels import early_launch, reference
from hisparse_kernels import fetch_ahead as fetch_ahead_module
from hisparse_kernels.fetch_ahead import fetch_ahead
from hisparse_kernels.miss_plan import HostSource
from hisparse_kernels.resolve import resolve

from .layers import GPU, WRONG_SOURCES, Layer, assert_same_bits, random_selection
from .test_fetch import BIG, FIELDS, SMALL


def source_of(layer: Layer) -> HostSource:
    return HostSource(layer.pool, layer.host_rows, layer.page_table, layer.plan)


def run(resolve_, fetch_ahead_, layer: Layer, selection: torch.Tensor) -> None:
    """Resolve and fetch, nothing between them, as a decode step does."""
    capacity = layer.page_table.shape[1]
    tables = layer.page_table, layer.slot_records, layer.recency
    position = torch.full(
        (1,), capacity - 1, device=layer.buffer.device
    )  # not copied there: a graph is captured of it
    resolve_(selection, position, *tables, layer.counters, layer.slots, layer.plan, 1)
    fetch_ahead_(selection, layer.slots, source_of(layer), layer.buffer)


def layer_of(batch, heads, k, slots, capacity, record_width, dtype) -> Layer:
    shape = {"batch": batch, "heads": heads, "k": k, "slots": slots, "capacity": capacity}
    return Layer.new(**shape, record_width=record_width, dtype=dtype, spare_host_rows=1).fill(0.5)


@pytest.mark.parametrize(FIELDS, SMALL + BIG)
def test_kernel_is_the_reference(device, batch, heads, k, slots, capacity, record_width, dtype):
    generator = torch.Generator().manual_seed(k)
    want = layer_of(batch, heads, k, slots, capacity, record_width, dtype)
    got = want.to(device)
    for step in range(4):
        selection = random_selection(batch * heads, k, capacity, generator)
        run(resolve, fetch_ahead, got, selection.to(device))
        run(reference.resolve, reference.fetch_ahead, want, selection)
        got.assert_same(want, f"step {step}: ")


@pytest.mark.parametrize("programs, words", [(1, 16), (9, 64), (512, 256)])
@pytest.mark.parametrize("k", [11, pytest.param(600, marks=GPU)])
def test_however_the_work_is_cut(device, monkeypatch, k, programs, words):
    """Into parts of a selection, rounds of entries and of records, pieces of a record that does not divide into them."""
    monkeypatch.setattr(fetch_ahead_module, "_PROGRAMS", programs)
    monkeypatch.setattr(fetch_ahead_module, "_WORDS", words)
    generator = torch.Generator().manual_seed(0)
    want = layer_of(2, 2, k, k + 2, 5 * k, 200, torch.float16)
    got = want.to(device)
    for step in range(3):
        selection = random_selection(4, k, 5 * k, generator, torch.int64)
        run(resolve, fetch_ahead, got, selection.to(device))
        run(reference.resolve, reference.fetch_ahead, want, selection)
        got.assert_same(want, f"step {step}: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU resolve does run meanwhile")
@pytest.mark.parametrize("programs, words", [(1, 16), (9, 64), (512, 16)])
def test_whatever_of_the_page_table_is_there_already(device, monkeypatch, programs, words):
    """Beside a resolve: each program finds each missing record absent, claimed by an entry, or in its slot, and waits once."""
    monkeypatch.setattr(fetch_ahead_module, "_PROGRAMS", programs)
    monkeypatch.setattr(fetch_ahead_module, "_WORDS", words)
    monkeypatch.setattr(fetch_ahead_module, "_ENTRIES", 8)  # of 21: one program has several rounds
    monkeypatch.setattr(fetch_ahead_module, "early_launch", lambda tensor: {"EARLY": True})
    generator = torch.Generator().manual_seed(0)
    k, capacity, steps = 21, 100, 3
    want = layer_of(1, 2, k, k + 2, capacity, 48, torch.float16)
    got, waits = want.to(device), []

    def resolving() -> None:
        lane, entry = want.plan_missing.nonzero(as_tuple=True)
        record = selection[lane, entry].long()
        seen = torch.stack([torch.full_like(record, -1), entry - (1 << 30), want.slots[lane, entry]])
        got.page_table[lane, record] = seen.gather(0, torch.randint(3, (1, len(record))))[0].int()

    def wait() -> None:
        waits.append(1)
        for name in ("slots", "plan_count", "plan_missing"):
            getattr(got, name).copy_(getattr(want, name))
        resolving()  # for the next program

    monkeypatch.setattr(early_launch, "gdc_wait", wait)
    monkeypatch.setattr(early_launch, "gdc_launch_dependents", lambda: None)
    for step in range(steps):
        selection = random_selection(2, k, capacity, generator, torch.int64)
        run(reference.resolve, reference.fetch_ahead, want, selection)
        got.poison()
        resolving()
        fetch_ahead(selection, got.slots, source_of(got), got.buffer)
        assert_same_bits(f"step {step}: buffer", got.buffer, want.buffer)
    assert len(waits) >= 2 * steps


@GPU
@pytest.mark.cuda_graph
@pytest.mark.parametrize("lanes", [1, 5, 64])
def test_nothing_is_read_before_it_is_written(device, lanes):
    """All host records change and the selection is made right before each resolve, in one graph."""
    k, capacity = 2048, 9000
    got = Layer.new(batch=lanes, k=k, slots=4096, capacity=capacity, record_width=64).to(device)
    pinned = torch.empty_like(got.pool, pin_memory=True)
    got.pool = pinned.copy_(got.pool)
    generator = torch.Generator().manual_seed(lanes)
    chosen = random_selection(lanes, k, capacity, generator).to(device)
    selection = torch.empty_like(chosen)
    written = got.pool.to(device).view(torch.int16)

    def step() -> None:
        got.pool.view(torch.int16).copy_(written.add_(1), non_blocking=True)
        torch.add(chosen, 0, out=selection)
        run(resolve, fetch_ahead, got, selection)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    fetched_ones = 0
    for _ in range(200):
        chosen.copy_(random_selection(lanes, k, capacity, generator))
        graph.replay()
        lane, i = got.plan_missing.nonzero(as_tuple=True)
        record, slot = selection[lane, i].long(), got.slots[lane, i].long()
        fetched_ones += len(lane)
        fetched = written[record, got.host_rows[lane, record].long()]
        assert_same_bits("slots", got.buffer[lane, slot].view(torch.int16), fetched)
    assert fetched_ones > 10_000 * lanes


@pytest.mark.parametrize("change, name", WRONG_SOURCES)
def test_wrong_source(change, name):
    layer = layer_of(2, 2, 4, 6, 20, 8, torch.float16)
    selection = torch.zeros(4, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=name):
        fetch_ahead(selection, layer.slots, change(source_of(layer)), layer.buffer)


def test_wrong_selection_or_count():
    layer = layer_of(2, 2, 4, 6, 20, 8, torch.float16)
    selection = torch.zeros(4, 8, dtype=torch.int32)
    source = source_of(layer)
    for wrong in (selection[:, ::2], selection[:, :4].short(), selection[:, :4].bool()):
        with pytest.raises(ValueError, match="selection must be int32 or int64 and contiguous"):
            fetch_ahead(wrong, layer.slots, source, layer.buffer)
    for count in (source.plan.count.long(), source.plan.count[:3], source.plan.count.repeat(2)[::2]):
        with pytest.raises(ValueError, match=r"count must be a contiguous int32 \[4\]"):
            fetch_ahead(
                selection[:, :4],
                layer.slots,
                source._replace(plan=source.plan._replace(count=count)),
                layer.buffer,
            )


def test_wrong_slots_or_records():
    layer = layer_of(2, 2, 4, 6, 20, 8, torch.float16)
    selection = torch.zeros(4, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"slots must be a contiguous int32 \[4, 4\]"):
        fetch_ahead(selection, layer.slots[:, :3], source_of(layer), layer.buffer)
    with pytest.raises(ValueError, match="slots must be a contiguous int32"):
        fetch_ahead(selection, layer.slots.long(), source_of(layer), layer.buffer)
    layer = layer_of(2, 2, 4, 6, 20, 5, torch.float16)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        fetch_ahead(selection, layer.slots, source_of(layer), layer.buffer)
