"""resolve: the reference against the contract written as a plain loop, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hisparse_kernels import reference
from hisparse_kernels import resolve as resolve_module
from hisparse_kernels.miss_plan import MissPlan
from hisparse_kernels.recency import Recency
from hisparse_kernels.resolve import resolve

from .layers import GPU, LOG, POISON, Layer, assert_same_bits, at, random_selection


def run(function, layer: Layer, selection: torch.Tensor, position: int, tokens: int = 1) -> None:
    device = layer.buffer.device
    function(
        selection.to(device),
        at(position, device),
        layer.page_table,
        layer.slot_records,
        layer.recency,
        layer.counters,
        layer.slots,
        layer.plan,
        tokens,
    )


def contract(layer: Layer, selection: torch.Tensor, position: int, tokens: int = 1) -> None:
    """One resolve as the design words it, one lane and one record after another."""
    lanes, k = selection.shape
    orders = layer.order
    for lane in range(lanes):
        wanted = selection[lane].tolist()
        table = layer.page_table[lane].tolist()
        owner = layer.slot_records[lane].tolist()
        order = orders[lane].tolist()

        hits = {table[record] for record in wanted if record >= 0 and table[record] >= 0}
        misses = []
        for record in wanted:
            if record >= 0 and table[record] < 0 and record not in misses:
                misses.append(record)
        stale = [slot for slot in order if slot not in hits]
        fresh = stale[: len(misses)]
        for record, slot in zip(misses, fresh, strict=True):
            if owner[slot] >= 0:
                table[owner[slot]] = -1
            table[record], owner[slot] = slot, record
        everything_fits = position // tokens + 1 <= len(order)
        if misses or not everything_fits:
            named = [layer.page_table[lane, record].item() for record in wanted if record >= 0]
            used = list(dict.fromkeys(slot for slot in named if slot >= 0))
            order = stale[len(misses) :] + fresh[::-1] + used[::-1]

        padding = [-1] * (k - len(misses))
        layer.page_table[lane] = torch.tensor(table)
        layer.slot_records[lane] = torch.tensor(owner)
        orders[lane] = torch.tensor(order)
        layer.slots[lane] = torch.tensor([table[record] if record >= 0 else -1 for record in wanted])
        layer.plan_records[lane] = torch.tensor(misses + padding)
        layer.plan_slots[lane] = torch.tensor(fresh + padding)
        layer.plan_count[lane] = len(misses)
        layer.plan_missing[lane] = torch.tensor([record in misses for record in wanted])
        layer.counters[lane] += torch.tensor([sum(record >= 0 for record in wanted), len(misses)])
    layer.recency.set_order(orders)


def shape(lanes: int, k: int, slots: int, capacity: int, *marks):
    return pytest.param(lanes, k, slots, capacity, id=f"lanes{lanes}-k{k}-B{slots}-of{capacity}", marks=marks)


SMALL = [
    shape(1, 1, 1, 9),
    shape(2, 7, 7, 40),
    shape(3, 5, 12, 30),
    shape(2, 16, 64, 80),
    shape(1, 63, 100, 300),
    shape(5, 3, 50, 20),
]
BIG = [
    shape(1, 1, 4096, 100_000, GPU),
    shape(64, 63, 100, 2000, GPU),
    shape(7, 100, 2000, 5000, GPU),
    shape(8, 128, 256, 8192, GPU),
    shape(2, 2000, 2000, 9000, GPU),
    shape(16, 2048, 4096, 131_072, GPU),
    shape(1, 2048, 8192, 131_072, GPU),
    shape(3, 4096, 8192, 20_000, GPU),
    shape(2, 2048, 131_072, 200_000, GPU),
    shape(1, 2048, 131_072, 100_000, GPU),
]


@pytest.mark.parametrize("lanes, k, slots, capacity", SMALL)
def test_reference_is_the_contract(lanes, k, slots, capacity):
    generator = torch.Generator().manual_seed(k)
    got = Layer.new(heads=lanes, k=k, slots=slots, capacity=capacity).fill(0.6)
    want = got.to("cpu")
    for step in range(50):
        position = max(0, capacity * (step + 1) // 50 - 1)
        selection = random_selection(lanes, k, position + 1, generator)
        got.poison()
        run(reference.resolve, got, selection, position)
        contract(want, selection, position)
        got.assert_same(want, f"step {step}: ", but=LOG)
        assert_same_bits(f"step {step}: order", got.order, want.order)


@pytest.mark.parametrize("lanes, k, slots, capacity", SMALL + BIG)
def test_kernel_is_the_reference(device, lanes, k, slots, capacity):
    generator = torch.Generator().manual_seed(k)
    want = Layer.new(heads=lanes, k=k, slots=slots, capacity=capacity).fill(0.6)
    got = want.to(device)
    steps = 20
    for step in range(steps):
        position = max(0, capacity * (step + 1) // steps - 1)
        selection = random_selection(lanes, k, position + 1, generator)
        got.poison()
        run(resolve, got, selection, position)
        run(reference.resolve, want, selection, position)
        got.assert_same(want, f"step {step}: ")


@pytest.mark.parametrize("tokens", [1, 16, 48], ids="tokens{}".format)
@pytest.mark.parametrize("slots, block", [(12, 4), (13, 4), (40, 16)], ids=["B12", "B13", "B40"])
def test_a_log_longer_than_one_tile(device, monkeypatch, tokens, slots, block):
    monkeypatch.setattr(resolve_module, "_CLEAR_BLOCK", block)
    monkeypatch.setattr(resolve_module, "_SCAN_BLOCK", block // 2)
    generator = torch.Generator().manual_seed(slots)
    want = Layer.new(heads=2, k=9, slots=slots, capacity=60).fill(0.5)
    got = want.to(device)
    for step in range(12):
        records = 5 * (step + 1)
        position = records * tokens - 1
        selection = random_selection(2, 9, records, generator)
        got.poison()
        run(resolve, got, selection, position, tokens)
        run(reference.resolve, want, selection, position, tokens)
        got.assert_same(want, f"step {step}: ")


def small_layer(device: str, resident: list[int], k: int) -> Layer:
    """One lane with the records `resident` in slots 0, 1, ... from the oldest to the newest; 20 records exist."""
    layer = Layer.new(k=k, slots=len(resident), capacity=20)
    layer.counters.zero_()
    layer.recency.set_order(torch.arange(len(resident), dtype=torch.int32)[None])
    for slot, record in enumerate(resident):
        layer.slot_records[0, slot] = record
        if record >= 0:
            layer.page_table[0, record] = slot
    return layer.to(device)


IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [resolve, reference.resolve], ids=["kernel", "reference"]
)


@IMPLEMENTATIONS
def test_hits_rank_above_what_was_just_fetched(device, implementation):
    layer = small_layer(device, [10, 11, 12, 13], k=3)
    run(implementation, layer, torch.tensor([[11, 5, 10]]), position=19)
    assert layer.slots.tolist() == [[1, 2, 0]]
    assert layer.plan_records.tolist() == [[5, -1, -1]]
    assert layer.plan_slots.tolist() == [[2, -1, -1]]
    assert layer.order.tolist() == [[3, 2, 0, 1]], "stale | misses | hits, the first named last"


@IMPLEMENTATIONS
def test_a_duplicate_ranks_where_it_is_named_first(device, implementation):
    layer = small_layer(device, [10, 11, 12, 13], k=4)
    run(implementation, layer, torch.tensor([[12, 10, 12, 11]]), position=19)
    assert layer.order.tolist() == [[3, 1, 0, 2]]


@IMPLEMENTATIONS
def test_what_is_fetched_ranks_by_the_selection_too(device, implementation):
    layer = small_layer(device, [10, 11, 12, 13], k=3)
    run(implementation, layer, torch.tensor([[5, 6, 7]]), position=19)
    assert layer.slots.tolist() == [[0, 1, 2]]
    assert layer.order.tolist() == [[3, 2, 1, 0]]


@IMPLEMENTATIONS
def test_a_full_log_is_cleared(device, implementation):
    """Hits alone fill that of one lane, hits and misses that of the other, sooner."""
    want = Layer.new(heads=2, k=4, slots=6, capacity=20)
    want.slot_records[:] = torch.arange(6)
    want.page_table[:, :6] = torch.arange(6)
    want.recency.set_order(torch.arange(6, dtype=torch.int32).repeat(2, 1))
    got = want.to(device)
    cleared = [0, 0]
    for step in range(80):
        selection = torch.tensor([[step % 6, (step + 1) % 6, -1, -1], [4, 5, 4, 6 + step % 14]])
        if step == 25:
            selection[0, 3] = 17
        tails = got.span[:, 1].tolist()
        run(implementation, got, selection, position=19)
        contract(want, selection, position=19)
        assert_same_bits(f"step {step}: order", got.order, want.order)
        cleared = [
            n + (now < then) for n, then, now in zip(cleared, tails, got.span[:, 1].tolist(), strict=True)
        ]
    assert cleared[0] >= 2 and cleared[1] > cleared[0]
    assert got.slot_records.tolist() == want.slot_records.tolist()


@IMPLEMENTATIONS
def test_padding_and_duplicates_are_no_misses(device, implementation):
    layer = small_layer(device, [10, 11, 12, 13, 14, 15], k=6)
    run(implementation, layer, torch.tensor([[-1, 7, 12, 7, -1, 12]]), position=19)
    assert layer.plan_count.tolist() == [1]
    assert layer.plan_records.tolist() == [[7, -1, -1, -1, -1, -1]]
    assert layer.slots.tolist() == [[-1, 0, 2, 0, -1, 2]]
    assert layer.counters.tolist() == [[4, 1]], "4 records asked for, 1 of them missing"
    assert layer.order.tolist() == [[1, 3, 4, 5, 0, 2]]


@IMPLEMENTATIONS
def test_a_selection_of_padding_alone(device, implementation):
    layer = small_layer(device, [10, 11, 12], k=2)
    before = layer.to("cpu")
    run(implementation, layer, torch.tensor([[-1, -1]]), position=19)
    assert layer.slots.tolist() == [[-1, -1]]
    assert layer.plan_count.tolist() == [0]
    for name in ("page_table", "slot_records", "counters"):
        assert_same_bits(name, getattr(layer, name), getattr(before, name))
    assert_same_bits("order", layer.order, before.order)


@IMPLEMENTATIONS
def test_nothing_is_evicted_before_the_buffer_is_full(device, implementation):
    layer = small_layer(device, [-1, -1, 10, 11], k=2)
    run(implementation, layer, torch.tensor([[3, 4]]), position=19)
    assert layer.slots.tolist() == [[0, 1]]
    assert layer.slot_records.tolist() == [[3, 4, 10, 11]]
    assert layer.page_table[0, [10, 11]].tolist() == [2, 3]


@IMPLEMENTATIONS
@pytest.mark.parametrize("position, order", [(3, [0, 1, 2, 3]), (4, [1, 2, 3, 0])], ids=["fits", "exceeds"])
def test_the_order_stays_while_the_history_fits(device, implementation, position, order):
    layer = small_layer(device, [0, 1, 2, 3], k=1)
    run(implementation, layer, torch.tensor([[0]]), position)
    assert layer.order.tolist() == [order]


@IMPLEMENTATIONS
def test_a_selection_as_large_as_the_buffer_replaces_all_of_it(device, implementation):
    layer = small_layer(device, [10, 11, 12, 13], k=4)
    run(implementation, layer, torch.tensor([[4, 11, 2, 3]]), position=19)
    assert layer.slots.tolist() == [[0, 1, 2, 3]]
    assert layer.page_table[0, [10, 12, 13]].tolist() == [-1, -1, -1]
    assert layer.order.tolist() == [[3, 2, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("selection_stride, table_stride", [(11, 70), (8, 64)], ids=["odd", "even"])
def test_views_with_a_row_stride(device, selection_stride, table_stride, dtype):
    generator = torch.Generator().manual_seed(0)
    want = Layer.new(heads=3, k=6, slots=9, capacity=50).fill()
    got = want.to(device)
    table = torch.full((3, table_stride), POISON, dtype=torch.int32, device=device)
    table[:, :50] = got.page_table
    got.page_table = table[:, :50]
    selection = random_selection(3, 6, 50, generator, dtype)
    wide = torch.full((3, selection_stride), 49, dtype=dtype, device=device)
    wide[:, :6] = selection.to(device)
    run(resolve, got, wide[:, :6], position=49)
    run(reference.resolve, want, selection, position=49)
    got.assert_same(want)
    assert (table[:, 50:] == POISON).all()


RECENCY = Recency.of(torch.arange(8, dtype=torch.int32).repeat(2, 1))
WIDE = RECENCY._replace(stamps=RECENCY.stamps.long())
SHORT = RECENCY._replace(uses=RECENCY.uses[:, :15].contiguous())


def spoiled(name: str, value) -> pytest.param:
    return pytest.param(name, value, id=f"{name}-{list(value.shape)}-{value.dtype}".replace("torch.", ""))


@pytest.mark.parametrize(
    "name, value",
    [
        spoiled("selection", torch.zeros(2, 9, dtype=torch.int32)),
        spoiled("selection", torch.zeros(2, 4, dtype=torch.int16)),
        spoiled("position", torch.zeros(2, dtype=torch.int64)),
        spoiled("position", torch.zeros(1, dtype=torch.int32)),
        spoiled("page_table", torch.zeros(2, 50, dtype=torch.int64)),
        spoiled("slot_records", torch.zeros(2, 8, dtype=torch.int64)),
        pytest.param("recency", Recency.of(torch.zeros(2, 7, dtype=torch.int32)), id="recency-slots"),
        pytest.param("recency", WIDE, id="recency-dtype"),
        pytest.param("recency", SHORT, id="recency-length"),
        spoiled("counters", torch.zeros(2, 2, dtype=torch.int32)),
        spoiled("slots", torch.zeros(2, 5, dtype=torch.int32)),
        spoiled("slots", torch.zeros(2, 4, dtype=torch.int64)),
        spoiled("plan", MissPlan.empty(2, 5, "cpu").records),
    ],
)
def test_wrong_arguments_are_named(name, value):
    layer = Layer.new(heads=2, k=4, slots=8, capacity=50)
    arguments = {
        "selection": torch.zeros(2, 4, dtype=torch.int32),
        "position": at(3),
        "page_table": layer.page_table,
        "slot_records": layer.slot_records,
        "recency": layer.recency,
        "counters": layer.counters,
        "slots": layer.slots,
        "plan": layer.plan,
        "tokens_per_record": 1,
    }
    arguments[name] = layer.plan._replace(records=value) if name == "plan" else value
    with pytest.raises(ValueError, match=name):
        resolve(**arguments)
