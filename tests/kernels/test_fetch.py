"""fetch: the reference against a plain loop, the kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hisparse_kernels import fetch as fetch_module
from hisparse_kernels import reference
from hisparse_kernels.fetch import fetch
from hisparse_kernels.miss_plan import MissPlan

from .layers import GPU, POISON, Layer, assert_same_bits


def plan_misses(layer: Layer, seed: int = 0) -> None:
    """A random plan: any number of records per lane, none included, into different slots."""
    generator = torch.Generator().manual_seed(seed)
    lanes, k = layer.plan_records.shape
    layer.plan_records.fill_(-1)
    layer.plan_slots.fill_(-1)
    for lane in range(lanes):
        count = 0 if lane == 1 else k - lane % 3 if lane < k else k // 2
        layer.plan_count[lane] = count
        capacity, slots = layer.page_table.shape[1], layer.slot_records.shape[1]
        layer.plan_records[lane, :count] = torch.randperm(capacity, generator=generator)[:count].int()
        layer.plan_slots[lane, :count] = torch.randperm(slots, generator=generator)[:count].int()


def contract(layer: Layer) -> None:
    heads = len(layer.slot_records) // len(layer.host_rows)
    for lane in range(len(layer.slot_records)):
        for i in range(layer.plan_count[lane]):
            record, slot = layer.plan_records[lane, i].item(), layer.plan_slots[lane, i].item()
            host_row = layer.host_rows[lane // heads, record].item()
            layer.buffer[lane, slot] = layer.pool[record, host_row * heads + lane % heads]


def run(function, layer: Layer) -> None:
    function(layer.pool, layer.host_rows, layer.plan, layer.buffer)


def case(batch, heads, k, slots, capacity, record_width, dtype, *marks):
    size = record_width * dtype.itemsize
    name = f"{batch}x{heads}-k{k}-B{slots}-of{capacity}-{size}B-{dtype}".replace("torch.", "")
    return pytest.param(batch, heads, k, slots, capacity, record_width, dtype, id=name, marks=marks)


SMALL = [
    case(1, 1, 1, 1, 1, 8, torch.bfloat16),
    case(1, 3, 5, 7, 40, 24, torch.float16),
    case(2, 2, 16, 16, 63, 576, torch.bfloat16),
    case(2, 1, 3, 4, 10, 4096, torch.float32),
    case(3, 2, 2, 5, 9, 100, torch.float32),
]
BIG = [
    case(1, 1, 2048, 4096, 20_000, 576, torch.bfloat16, GPU),
    case(16, 1, 266, 2048, 5000, 576, torch.bfloat16, GPU),
    case(2, 8, 100, 256, 2000, 4096, torch.bfloat16, GPU),
    case(8, 8, 63, 128, 300, 2000, torch.float16, GPU),
    case(1, 4, 16, 32, 100, 32_768, torch.bfloat16, GPU),
    case(64, 1, 1, 2, 100, 8, torch.float16, GPU),
]
FIELDS = "batch, heads, k, slots, capacity, record_width, dtype"


def planned(batch, heads, k, slots, capacity, record_width, dtype) -> Layer:
    layer = Layer.new(
        batch=batch,
        heads=heads,
        k=k,
        slots=slots,
        capacity=capacity,
        record_width=record_width,
        dtype=dtype,
        spare_host_rows=2,
    )
    plan_misses(layer)
    return layer


@pytest.mark.parametrize(FIELDS, SMALL)
def test_reference_is_the_contract(batch, heads, k, slots, capacity, record_width, dtype):
    got = planned(batch, heads, k, slots, capacity, record_width, dtype)
    want = got.to("cpu")
    run(reference.fetch, got)
    contract(want)
    got.assert_same(want)


@pytest.mark.parametrize(FIELDS, SMALL + BIG)
def test_kernel_is_the_reference(device, batch, heads, k, slots, capacity, record_width, dtype):
    want = planned(batch, heads, k, slots, capacity, record_width, dtype)
    got = want.to(device)
    run(fetch, got)
    run(reference.fetch, want)
    got.assert_same(want)


@pytest.mark.parametrize("programs", [1, 7, 16])
@pytest.mark.parametrize(FIELDS, SMALL + BIG)
def test_few_programs_copy_the_same(device, batch, heads, k, slots, capacity, record_width, dtype, programs):
    want = planned(batch, heads, k, slots, capacity, record_width, dtype)
    got = want.to(device)
    fetch(got.pool, got.host_rows, got.plan, got.buffer, programs)
    reference.fetch(want.pool, want.host_rows, want.plan, want.buffer, programs)
    got.assert_same(want)


@pytest.mark.parametrize("parts", [1, 2, 5], ids="parts{}".format)
def test_programs_that_share_a_lane(device, monkeypatch, parts):
    """However the misses are cut into programs and rounds, records that straddle a cut included."""
    monkeypatch.setattr(fetch_module, "_QUADS_PER_WARP", 2)
    monkeypatch.setattr(fetch_module, "_PROGRAMS_PER_LANE", parts)
    want = planned(1, 2, 9, 12, 20, 24, torch.float16)
    got = want.to(device)
    run(fetch, got)
    run(reference.fetch, want)
    got.assert_same(want)


def test_views_with_a_row_stride_and_a_grown_pool(device):
    want = planned(2, 1, 4, 6, 20, 8, torch.float32)
    got = want.to(device)
    rows = torch.full((2, 31), POISON, dtype=torch.int32, device=device)
    rows[:, :20] = got.host_rows
    got.host_rows = rows[:, :20]
    for grown in (20, 37):
        pool = torch.zeros(grown, *want.pool.shape[1:], pin_memory=device == "cuda")
        pool[:20] = want.pool
        got.pool = pool
        run(fetch, got)
        run(reference.fetch, want)
        assert_same_bits("buffer", got.buffer, want.buffer)


@GPU
def test_addresses_beyond_int32(device):
    """The record lies, and its slot is, behind more than 2**31 elements."""
    records, width = 2**19 + 8, 2**12
    pool = torch.zeros(records, 1, width, dtype=torch.bfloat16, pin_memory=True)
    pool[-1] = torch.randn(width).bfloat16()
    buffer = torch.zeros(1, records, width, dtype=torch.bfloat16, device=device)
    last = torch.tensor([[records - 1]], dtype=torch.int32, device=device)
    host_rows = torch.zeros(1, records, dtype=torch.int32, device=device)
    fetch(pool, host_rows, MissPlan(last, last, torch.ones_like(last[0]), last.bool()), buffer)
    assert_same_bits("buffer", buffer[0, -1], pool[-1, 0])


@pytest.mark.parametrize(
    "name, width, value",
    [
        ("16 bytes", 4, None),
        ("pool", 8, torch.zeros(9, 1, 8, dtype=torch.float16)),
        ("pool", 8, torch.zeros(9, 2, 8, dtype=torch.float32)),
        ("pool", 8, torch.zeros(9, 2, 16, dtype=torch.float16)),
        ("host_rows", 8, torch.zeros(1, 9, dtype=torch.int64)),
        ("plan", 8, torch.zeros(2, 3, dtype=torch.int64)),
        ("plan", 8, torch.zeros(3, 3, dtype=torch.int32)),
    ],
    ids=["8B", "lanes", "dtype", "width", "host_rows", "plan-dtype", "plan-lanes"],
)
def test_wrong_arguments_are_named(name, width, value):
    layer = planned(1, 2, 3, 4, 9, width, torch.float16)
    arguments = {
        "pool": layer.pool,
        "host_rows": layer.host_rows,
        "plan": layer.plan,
        "buffer": layer.buffer,
    }
    if value is not None:
        arguments[name] = layer.plan._replace(records=value) if name == "plan" else value
    with pytest.raises(ValueError, match=name):
        fetch(**arguments)
