"""append, resolve and fetch over many decode steps, as a hosted layer calls them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from hisparse_kernels import reference
from hisparse_kernels.append import append
from hisparse_kernels.fetch_ahead import fetch_ahead
from hisparse_kernels.miss_plan import HostSource
from hisparse_kernels.resolve import resolve

from .layers import GPU, Layer, assert_same_bits, at, random_bits, random_selection


class Kind(NamedTuple):
    batch: int
    heads: int
    k: int
    slots: int
    tokens: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    history: int  # tokens before the first step


STEPS = 50
SMALL = {
    "latents": Kind(2, 1, 5, 7, 1, 8, 0, torch.bfloat16, 30),
    "pages": Kind(1, 2, 4, 6, 4, 8, 8, torch.float16, 70),
    "k-equals-B": Kind(2, 1, 6, 6, 2, 4, 4, torch.float32, 41),
    "one-slot": Kind(1, 1, 1, 1, 3, 4, 4, torch.float32, 11),
    "from-nothing": Kind(1, 2, 3, 10, 1, 8, 8, torch.float16, 0),
    "odd": Kind(1, 1, 63, 100, 1, 8, 0, torch.bfloat16, 300),
}
BIG = {
    "glm": Kind(2, 1, 2048, 4096, 1, 512, 64, torch.bfloat16, 20_000),
    "glm-batch": Kind(16, 1, 2048, 2048, 1, 512, 64, torch.bfloat16, 5000),
    "quest": Kind(2, 8, 128, 256, 16, 128, 128, torch.bfloat16, 32_000),
    "quest-64-lanes": Kind(8, 8, 63, 100, 16, 64, 64, torch.float16, 4000),
    "msa": Kind(1, 4, 16, 32, 128, 128, 128, torch.bfloat16, 10_000),
}


class Step(NamedTuple):
    """What changes from step to step."""

    keys: torch.Tensor
    values: torch.Tensor
    selection: torch.Tensor
    position: torch.Tensor

    @classmethod
    def random(cls, kind: Kind, position: int, generator: torch.Generator) -> Step:
        lanes = kind.batch * kind.heads
        keys, values = (
            random_bits((lanes, width), kind.dtype, generator) for width in (kind.key_width, kind.value_width)
        )
        selection = random_selection(lanes, kind.k, position // kind.tokens + 1, generator)
        return cls(keys, values, selection, at(position))

    def to(self, device: str) -> Step:
        return Step(*(tensor.to(device) for tensor in self))


KERNELS = append, resolve, fetch_ahead
REFERENCES = reference.append, reference.resolve, reference.fetch_ahead


def run(functions: tuple, layer: Layer, kind: Kind, step: Step) -> None:
    append_, resolve_, fetch_ahead_ = functions
    host = layer.pool, layer.host_rows
    tables = layer.page_table, layer.slot_records, layer.recency
    outputs = layer.counters, layer.slots, layer.plan
    append_(step.keys, step.values, step.position, *host, layer.buffer, *tables, kind.tokens)
    resolve_(step.selection, step.position, *tables, *outputs, kind.tokens)
    source = HostSource(*host, layer.page_table, layer.plan)
    fetch_ahead_(step.selection, layer.slots, source, layer.buffer)


def before_the_first_step(kind: Kind, steps: int) -> Layer:
    """A layer with room for `steps` tokens more than its history, none of which is resident."""
    layer = Layer.new(
        batch=kind.batch,
        heads=kind.heads,
        k=kind.k,
        slots=kind.slots,
        capacity=(kind.history + steps - 1) // kind.tokens + 1,
        record_width=kind.tokens * (kind.key_width + kind.value_width),
        dtype=kind.dtype,
    )
    if kind.history % kind.tokens:  # a record is appended to only where its batch row owns it
        layer.host_rows[:, kind.history // kind.tokens] = torch.arange(kind.batch)
    return layer


def grow(layer: Layer, records: int) -> None:
    """Make room for more records, as a cache does between two steps."""
    pinned = layer.pool.is_pinned()
    pool = F.pad(layer.pool, (0, 0, 0, 0, 0, records))
    layer.pool = pool.pin_memory() if pinned else pool
    layer.page_table = F.pad(layer.page_table, (0, records), value=-1)
    layer.host_rows = F.pad(layer.host_rows, (0, records))


def assert_slots_hold_the_records(layer: Layer, kind: Kind, step: Step, when: str) -> None:
    """What attention will read is what the host has, whatever was hit, fetched or just written."""
    lane, i = (step.selection >= 0).nonzero(as_tuple=True)
    record = step.selection[lane, i].long()
    slot = layer.slots.cpu()[lane, i].long()
    assert (slot >= 0).all(), f"{when}a selected record has no slot"
    host_lane = layer.host_rows.cpu()[lane // kind.heads, record] * kind.heads + lane % kind.heads
    row = torch.arange(kind.tokens)
    row = torch.cat([row.repeat_interleave(kind.key_width), row.repeat_interleave(kind.value_width)])
    written = record[:, None] * kind.tokens + row <= step.position
    assert_same_bits(
        f"{when}record in its slot",
        layer.buffer.cpu()[lane, slot].masked_fill(~written, 0),
        layer.pool[record, host_lane].masked_fill(~written, 0),
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=name) for name, kind in SMALL.items()]
    + [pytest.param(kind, id=name, marks=GPU) for name, kind in BIG.items()],
)
def test_kernels_and_references_stay_the_same(device, kind):
    generator = torch.Generator().manual_seed(kind.k)
    want = before_the_first_step(kind, STEPS // 2)
    got = want.to(device)
    for i in range(STEPS):
        if i == STEPS // 2:
            grow(want, STEPS)
            grow(got, STEPS)
        step = Step.random(kind, kind.history + i, generator)
        got.poison()
        run(KERNELS, got, kind, step.to(device))
        run(REFERENCES, want, kind, step)
        got.assert_same(want, f"step {i}: ")
        assert_slots_hold_the_records(got, kind, step, f"step {i}: ")


@GPU
@pytest.mark.cuda_graph
@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in BIG.items()])
def test_steps_replayed_from_a_cuda_graph(device, kind):
    """One captured step serves them all: whatever changes is read from the tensors."""
    generator = torch.Generator().manual_seed(kind.k)
    want = before_the_first_step(kind, STEPS)
    got = want.to(device)
    inputs = Step.random(kind, kind.history, generator).to(device)
    run(KERNELS, want.to(device), kind, inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(KERNELS, got, kind, inputs)
    for i in range(STEPS):
        step = Step.random(kind, kind.history + i, generator)
        for old, new in zip(inputs, step, strict=True):
            old.copy_(new)
        got.poison()
        graph.replay()
        run(REFERENCES, want, kind, step)
        got.assert_same(want, f"step {i}: ")
