"""The tensors of one hosted layer, filled with poison and random bits, and how two of them are compared."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch

from hisparse_kernels.miss_plan import HostSource, MissPlan
from hisparse_kernels.recency import Recency

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
POISON = -77
LOG = "uses", "stamps", "span"  # one order of use has many

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern, NaN with all its payloads included."""
    integer = _INTEGER[dtype.itemsize]
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max, shape, dtype=integer, generator=generator).view(dtype)


def assert_same_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """`got` (on any device) holds the bits of `want`."""
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: got {got.dtype}, want {want.dtype}"
    integer = _INTEGER[want.dtype.itemsize]
    got, want = got.detach().cpu().contiguous().view(integer), want.detach().cpu().contiguous().view(integer)
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{name}: {len(wrong)} of {want.numel()} elements differ, the first at {list(first)}: "
            f"got {got[first].item()}, want {want[first].item()}"
        )


@dataclass
class Layer:
    """What append, resolve and fetch share; `pool` is pinned host memory beside tensors on a GPU."""

    pool: torch.Tensor
    host_rows: torch.Tensor
    buffer: torch.Tensor
    page_table: torch.Tensor
    slot_records: torch.Tensor
    uses: torch.Tensor
    stamps: torch.Tensor
    span: torch.Tensor
    counters: torch.Tensor
    slots: torch.Tensor
    plan_records: torch.Tensor
    plan_slots: torch.Tensor
    plan_count: torch.Tensor
    plan_missing: torch.Tensor

    @classmethod
    def new(
        cls,
        *,
        batch: int = 1,
        heads: int = 1,
        k: int = 1,
        slots: int = 1,
        capacity: int = 1,
        record_width: int = 8,
        dtype: torch.dtype = torch.float16,
        spare_host_rows: int = 0,
        seed: int = 0,
    ) -> Layer:
        """Nothing resident, every element of the data random, every output poisoned (on the CPU)."""
        generator = torch.Generator().manual_seed(seed)
        lanes = batch * heads
        host_batch = batch + spare_host_rows
        host_rows = torch.rand(host_batch, capacity, generator=generator).argsort(dim=0)
        poison = torch.full((lanes, k), POISON, dtype=torch.int32)
        return cls(
            pool=random_bits((capacity, host_batch * heads, record_width), dtype, generator),
            host_rows=host_rows[:batch].int(),
            buffer=random_bits((lanes, slots, record_width), dtype, generator),
            page_table=torch.full((lanes, capacity), -1, dtype=torch.int32),
            slot_records=torch.full((lanes, slots), -1, dtype=torch.int32),
            **Recency.of(torch.rand(lanes, slots, generator=generator).argsort(dim=1).int())._asdict(),
            counters=torch.randint(0, 2**40, (lanes, 2), generator=generator),
            slots=poison.clone(),
            plan_records=poison.clone(),
            plan_slots=poison.clone(),
            plan_count=poison[:, 0].clone(),
            plan_missing=torch.zeros(lanes, k, dtype=torch.bool),
        )

    @property
    def recency(self) -> Recency:
        return Recency(self.uses, self.stamps, self.span)

    @property
    def order(self) -> torch.Tensor:
        """Slots, least recently used first, int32 ``[lanes, B]``."""
        return self.recency.order()

    @property
    def plan(self) -> MissPlan:
        return MissPlan(self.plan_records, self.plan_slots, self.plan_count, self.plan_missing)

    def fill(self, fraction: float = 1.0, seed: int = 0) -> Layer:
        """Make random records resident, in the most recently used slots."""
        generator = torch.Generator().manual_seed(seed)
        lanes, slots = self.slot_records.shape
        order = self.order
        capacity = self.page_table.shape[1]
        count = min(int(fraction * slots), capacity)
        for lane in range(lanes):
            records = torch.randperm(capacity, generator=generator)[:count]
            taken = order[lane, slots - count :].long()
            self.slot_records[lane, taken] = records.int()
            self.page_table[lane, records] = taken.int()
        return self

    def poison(self) -> None:
        """Spoil all outputs."""
        for output in (self.slots, self.plan_records, self.plan_slots, self.plan_count):
            output.fill_(POISON)
        self.plan_missing.logical_not_()

    def to(self, device: str) -> Layer:
        """A copy on `device`."""

        def copy(name: str) -> torch.Tensor:
            tensor = getattr(self, name)
            if device == "cpu":
                return tensor.cpu().clone()
            return tensor.clone().pin_memory() if name == "pool" else tensor.to(device)

        return replace(self, **{field.name: copy(field.name) for field in fields(self)})

    def assert_same(self, want: Layer, when: str = "", but: tuple[str, ...] = ()) -> None:
        """Every tensor has the bits it has in `want`, but for those named."""
        if self.pool.is_pinned():
            torch.cuda.synchronize()
        for field in fields(self):
            if field.name not in but:
                assert_same_bits(f"{when}{field.name}", getattr(self, field.name), getattr(want, field.name))


def random_selection(
    lanes: int, k: int, history: int, generator: torch.Generator, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """``[lanes, k]`` records of a history: recent ones often, with padding, duplicates and empty rows."""
    reach = torch.rand(lanes, k, generator=generator) ** 2 * history
    selection = (history - 1 - reach.long()).clamp(min=0)
    padding = torch.rand(lanes, 1, generator=generator) ** 2 * 0.5
    selection[torch.rand(lanes, k, generator=generator) < padding] = -1
    selection[torch.rand(lanes, generator=generator) < 0.1] = -1
    return selection.to(dtype)


def left_on_the_host(
    inputs: dict, history: torch.Tensor, heads: int, fraction: float = 0.4, seed: int = 0
) -> HostSource:
    """Take some of the selected records out of `inputs["buffer"]`, whose slots then hold NaN, and put them into a pool.

    Parameters
    ----------
    inputs : dict
        Arguments of an attention kernel; "buffer", "selection" and "slots" are read, "buffer" is replaced.
    history : ``[lanes, records, E]``
    heads : int
        Lanes of a batch row.
    """
    generator = torch.Generator().manual_seed(seed)
    lanes, records, width = history.shape
    selection, slots = inputs["selection"].cpu().long(), inputs["slots"].cpu().long()
    device = inputs["buffer"].device
    missing = (torch.rand(selection.shape, generator=generator) < fraction) & (selection >= 0)

    batch = lanes // heads
    host_rows = torch.rand(batch + 1, records, generator=generator).argsort(dim=0)[:batch]
    pool = torch.full((records, (batch + 1) * heads, width), float("nan"), dtype=history.dtype)
    lane = torch.arange(lanes)[:, None]
    record = torch.arange(records).expand(lanes, -1)
    pool[record, host_rows[lane // heads, record] * heads + lane % heads] = history

    buffer = inputs["buffer"].clone()
    plan = MissPlan.empty(*selection.shape, "cpu")
    for part in (plan.records, plan.slots):
        part.fill_(-1)
    for i in range(lanes):
        count = int(missing[i].sum())
        plan.count[i] = count
        plan.records[i, :count] = selection[i, missing[i]].int()
        plan.slots[i, :count] = slots[i, missing[i]].int()
        buffer[i, slots[i, missing[i]].to(device)] = float("nan")
    plan.missing.copy_(missing)
    inputs["buffer"] = buffer
    on_device = MissPlan(*(part.to(device) for part in plan))
    page_table = torch.full((lanes, records), -1, dtype=torch.int32)
    for i in range(lanes):
        here = (selection[i] >= 0) & ~missing[i]
        page_table[i, selection[i, here]] = slots[i, here].int()
    return HostSource(
        pool if device.type == "cpu" else pool.pin_memory(),
        host_rows.int().to(device),
        page_table.to(device),
        on_device,
    )


WRONG_SOURCES = [  # what to do to a `HostSource`, and the word by which the error names it
    pytest.param(lambda source: source._replace(pool=source.pool.double()), "pool", id="dtype"),
    pytest.param(lambda source: source._replace(pool=source.pool[:, :1].contiguous()), "pool", id="lanes"),
    pytest.param(lambda source: source._replace(pool=source.pool[:, :, ::2]), "pool", id="strides"),
    pytest.param(
        lambda source: source._replace(host_rows=source.host_rows.long()), "host_rows", id="host_rows"
    ),
    pytest.param(
        lambda source: source._replace(page_table=source.page_table.long()), "page_table", id="page_table"
    ),
    pytest.param(
        lambda source: source._replace(plan=source.plan._replace(missing=source.plan.missing[:, 1:])),
        "missing",
        id="plan",
    ),
]


def at(position: int, device: str = "cpu") -> torch.Tensor:
    """A position as the kernels take it."""
    return torch.tensor([position], device=device)
