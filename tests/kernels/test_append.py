"""append: the reference against a plain loop, the kernel against the reference, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hisparse_kernels import append as append_module
from hisparse_kernels import reference
from hisparse_kernels.append import append, claim
from hisparse_kernels.recency import Recency

from .layers import GPU, LOG, Layer, assert_same_bits, at, random_bits


def run(function, layer: Layer, keys, values, position: int, tokens: int, claimed: bool = False) -> None:
    device = layer.buffer.device
    function(
        keys.to(device),
        values.to(device),
        at(position, device),
        layer.pool,
        layer.host_rows,
        layer.buffer,
        layer.page_table,
        layer.slot_records,
        layer.recency,
        tokens,
        claimed,
    )


def contract(layer: Layer, keys, values, position: int, tokens: int) -> None:
    """One append as the design words it, one lane after another."""
    record, row = divmod(position, tokens)
    key_width, value_width = keys.shape[1], values.shape[1]
    heads = len(keys) // len(layer.host_rows)
    orders = layer.order
    for lane in range(len(keys)):
        table, owner, order = layer.page_table[lane], layer.slot_records[lane], orders[lane]
        if row == 0:
            slot = order[0].item()
            if owner[slot] >= 0:
                table[owner[slot].item()] = -1
            table[record], owner[slot] = slot, record
            order.copy_(torch.tensor(order.tolist()[1:] + [slot]))
            layer.host_rows[lane // heads, record] = lane // heads
        places = [layer.pool[record, lane]]
        if table[record] >= 0:
            places.append(layer.buffer[lane, table[record]])
        for place in places:
            all_keys, all_values = place.split([tokens * key_width, tokens * value_width])
            all_keys.view(tokens, key_width)[row] = keys[lane]
            if value_width:
                all_values.view(tokens, value_width)[row] = values[lane]
    layer.recency.set_order(orders)


def case(batch, heads, slots, tokens, key_width, value_width, dtype, *marks):
    name = f"{batch}x{heads}-B{slots}-{tokens}x({key_width}+{value_width})-{dtype}".replace("torch.", "")
    return pytest.param(batch, heads, slots, tokens, key_width, value_width, dtype, id=name, marks=marks)


SMALL = [
    case(1, 1, 1, 1, 8, 0, torch.bfloat16),
    case(2, 1, 5, 1, 36, 0, torch.float16),
    case(1, 2, 3, 4, 8, 8, torch.bfloat16),
    case(2, 2, 6, 3, 5, 12, torch.float32),
    case(3, 1, 7, 2, 20, 4, torch.float16),
]
BIG = [
    case(1, 1, 4096, 1, 576, 0, torch.bfloat16, GPU),
    case(16, 1, 5000, 1, 576, 0, torch.bfloat16, GPU),
    case(8, 8, 256, 16, 128, 128, torch.bfloat16, GPU),
    case(4, 4, 100, 63, 80, 96, torch.float16, GPU),
    case(2, 2, 33, 128, 192, 128, torch.float32, GPU),
    case(1, 2, 131_072, 1, 64, 64, torch.bfloat16, GPU),
]
FIELDS = "batch, heads, slots, tokens, key_width, value_width, dtype"


def layer_and_tokens(batch, heads, slots, tokens, key_width, value_width, dtype):
    layer = Layer.new(
        batch=batch,
        heads=heads,
        slots=slots,
        capacity=slots + 20,
        record_width=tokens * (key_width + value_width),
        dtype=dtype,
        spare_host_rows=1,
    ).fill(0.7)
    # Records from the 10th on are not there yet: nothing may be resident where the tests append.
    for lane in range(batch * heads):
        newer = layer.slot_records[lane] >= 10
        layer.slot_records[lane, newer] = -1
    layer.page_table[:, 10:] = -1
    generator = torch.Generator().manual_seed(slots)

    def token(width: int) -> torch.Tensor:
        return random_bits((batch * heads, width), dtype, generator)

    return layer, lambda: (token(key_width), token(value_width))


@pytest.mark.parametrize(FIELDS, SMALL)
def test_reference_is_the_contract(batch, heads, slots, tokens, key_width, value_width, dtype):
    got, new = layer_and_tokens(batch, heads, slots, tokens, key_width, value_width, dtype)
    want = got.to("cpu")
    for position in range(10 * tokens, 10 * tokens + 9):
        keys, values = new()
        run(reference.append, got, keys, values, position, tokens)
        contract(want, keys, values, position, tokens)
        got.assert_same(want, f"position {position}: ", but=LOG)
        assert_same_bits("order", got.order, want.order)


@pytest.mark.parametrize(FIELDS, SMALL + BIG)
def test_kernel_is_the_reference(device, batch, heads, slots, tokens, key_width, value_width, dtype):
    want, new = layer_and_tokens(batch, heads, slots, tokens, key_width, value_width, dtype)
    got = want.to(device)
    for position in range(10 * tokens, 10 * tokens + 10):
        keys, values = new()
        run(append, got, keys, values, position, tokens)
        run(reference.append, want, keys, values, position, tokens)
        got.assert_same(want, f"position {position}: ")


@pytest.mark.parametrize("slots", [8, 9, 63], ids="B{}".format)
def test_a_log_longer_than_one_tile(device, monkeypatch, slots):
    """It is cleared on the way, and what is current begins behind outdated entries."""
    monkeypatch.setattr(append_module, "_CLEAR_BLOCK", 4)
    monkeypatch.setattr(append_module, "_SCAN_BLOCK", 2)
    want, new = layer_and_tokens(1, 2, slots, 1, 8, 0, torch.float16)
    entries = want.uses.shape[1]
    want.uses[:, entries - slots - 2 : entries - 2] = want.order
    want.stamps += entries - slots - 2
    want.span[:, 1] = entries - 2
    got = want.to(device)
    for position in range(10, 15):
        keys, values = new()
        run(append, got, keys, values, position, 1)
        run(reference.append, want, keys, values, position, 1)
        got.assert_same(want, f"position {position}: ")


def run_claim(function, layer: Layer, position: int, tokens: int) -> None:
    tables = layer.host_rows, layer.page_table, layer.slot_records, layer.recency
    function(at(position, layer.buffer.device), *tables, tokens)


@pytest.mark.parametrize("claims", [1, 2])
@pytest.mark.parametrize(FIELDS, SMALL + BIG)
def test_a_slot_claimed_ahead(device, batch, heads, slots, tokens, key_width, value_width, dtype, claims):
    """Tables are those of `append` from then on, for the first token of a record and for later ones."""
    want, new = layer_and_tokens(batch, heads, slots, tokens, key_width, value_width, dtype)
    kernel, plain = want.to(device), want.to("cpu")
    for position in range(10 * tokens, 10 * tokens + 10):
        keys, values = new()
        run(reference.append, want, keys, values, position, tokens)
        for _ in range(claims):
            run_claim(claim, kernel, position, tokens)
            run_claim(reference.claim, plain, position, tokens)
        for got, function in ((kernel, append), (plain, reference.append)):
            got.assert_same(want, f"position {position}, claimed: ", but=("pool", "buffer"))
            run(function, got, keys, values, position, tokens, claimed=position % 3 > 0)
            got.assert_same(want, f"position {position}: ")


@pytest.mark.parametrize("implementation", [append, reference.append], ids=["kernel", "reference"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_claimed_slot_that_was_taken_away_is_not_replaced(device, implementation, tokens):
    """A selection that fills the buffer without the newest record evicts it: every slot is about to be read then."""
    layer, new = layer_and_tokens(2, 2, 4, tokens, 8, 8, torch.float16)
    layer = layer.to(device)
    position = 10 * tokens
    run_claim(claim, layer, position, tokens)
    lane = torch.arange(4, device=device)
    slot = layer.page_table[:, 10].long()
    layer.page_table[:, 10], layer.page_table[:, 9] = -1, slot.int()
    layer.slot_records[lane, slot] = 9
    before = layer.to("cpu")
    keys, values = new()
    run(implementation, layer, keys, values, position, tokens, claimed=True)
    for name in ("buffer", "page_table", "slot_records", "order"):
        assert_same_bits(name, getattr(layer, name), getattr(before, name))
    assert_same_bits("keys on the host", layer.pool[10, :4, :8], keys)
    assert layer.host_rows[:, 10].tolist() == [0, 1]


@pytest.mark.parametrize("function", [claim, reference.claim], ids=["kernel", "reference"])
def test_lanes_that_have_a_slot_claim_none(device, function):
    layer, _ = layer_and_tokens(1, 3, 4, 2, 8, 8, torch.float16)
    layer.page_table[1, 10] = layer.order[1, 0]
    layer.slot_records[1, layer.order[1, 0]] = 10
    before, got = layer.to("cpu"), layer.to(device)
    run_claim(function, got, position=20, tokens=2)
    assert (got.page_table[:, 10] >= 0).all()
    for name in ("page_table", "slot_records", "order"):
        assert_same_bits(name, getattr(got, name)[1], getattr(before, name)[1])
    assert_same_bits("order", got.order[0, :-1], before.order[0, 1:])
    assert_same_bits("the claimed slot", got.order[0, -1:], before.order[0, :1])


@pytest.mark.parametrize("implementation", [append, reference.append], ids=["kernel", "reference"])
def test_rows_rearranged_after_a_claim(device, implementation):
    """The record's first token is written to each batch row's own place, whatever `host_rows` said of it in the meantime."""
    layer, new = layer_and_tokens(3, 2, 4, 2, 8, 8, torch.float16)
    layer = layer.to(device)
    run_claim(claim, layer, position=20, tokens=2)
    layer.host_rows[:, 10] = layer.host_rows[:, 10].flip(0)
    keys, values = new()
    run(implementation, layer, keys, values, 20, 2)
    assert layer.host_rows[:, 10].tolist() == [0, 1, 2]
    layer.host_rows[:, 10] = layer.host_rows[:, 10].flip(0)
    run(implementation, layer, keys, values, 21, 2)
    assert layer.host_rows[:, 10].tolist() == [2, 1, 0]


@pytest.mark.parametrize("implementation", [append, reference.append], ids=["kernel", "reference"])
def test_a_cropped_record_is_continued_on_the_host_alone(device, implementation):
    layer, new = layer_and_tokens(1, 2, 4, 4, 8, 8, torch.float16)
    layer = layer.to(device)
    before = layer.to("cpu")
    keys, values = new()
    run(implementation, layer, keys, values, position=10 * 4 + 3, tokens=4)
    for name in ("buffer", "page_table", "slot_records", "order", "host_rows"):
        assert_same_bits(name, getattr(layer, name), getattr(before, name))
    assert_same_bits("keys on the host", layer.pool[10, :2, 24:32], keys)
    assert_same_bits("values on the host", layer.pool[10, :2, 56:64], values)


def test_tokens_that_are_views_of_a_longer_call(device):
    want, _ = layer_and_tokens(1, 3, 4, 2, 8, 8, torch.float32)
    got = want.to(device)
    keys = torch.randn(3, 5, 8)
    values = torch.randn(3, 2, 5, 8)[:, 1]
    run(append, got, keys.to(device)[:, 2], values.to(device)[:, 3], position=20, tokens=2)
    run(reference.append, want, keys[:, 2], values[:, 3], position=20, tokens=2)
    got.assert_same(want)


@GPU
def test_addresses_beyond_int32(device):
    """The pool and the buffer have more than 2**31 elements; the token goes behind them."""
    records, width = 2**19 + 8, 2**12
    generator = torch.Generator().manual_seed(0)
    layer = Layer.new(slots=3, capacity=records, record_width=8, dtype=torch.bfloat16).to(device)
    layer.pool = torch.zeros(records, 1, width, dtype=torch.bfloat16, pin_memory=True)
    layer.buffer = torch.zeros(1, records, width, dtype=torch.bfloat16, device=device)
    layer.slot_records = torch.full((1, records), -1, dtype=torch.int32, device=device)
    order = torch.arange(records - 1, -1, -1, dtype=torch.int32, device=device)[None].contiguous()
    layer.uses, layer.stamps, layer.span = Recency.of(order)
    keys, values = (random_bits((1, width // 2), torch.bfloat16, generator) for _ in "kv")
    run(append, layer, keys, values, position=records - 1, tokens=1)
    torch.cuda.synchronize()
    want = torch.cat([keys, values], dim=1)[0]
    assert_same_bits("pool", layer.pool[records - 1, 0], want)
    assert_same_bits("buffer", layer.buffer[0, records - 1], want)


@pytest.mark.parametrize(
    "name, value",
    [
        ("keys", torch.zeros(2, 8, dtype=torch.float32)),
        ("values", torch.zeros(2, 9, dtype=torch.float16)),
        ("position", torch.zeros(1, dtype=torch.int32)),
        ("pool", torch.zeros(30, 1, 64, dtype=torch.float16)),
        ("pool", torch.zeros(30, 64, 2, dtype=torch.float16).transpose(1, 2)),
        ("host_rows", torch.zeros(1, 30, dtype=torch.int64)),
        ("host_rows", torch.zeros(3, 30, dtype=torch.int32)),
        ("buffer", torch.zeros(2, 5, 64, dtype=torch.float16)),
        ("slot_records", torch.zeros(2, 4, dtype=torch.int64)),
        ("recency", Recency.of(torch.arange(5, dtype=torch.int32).repeat(2, 1))),
    ],
    ids=lambda value: (
        f"{list(value.shape)}-{value.dtype}" if isinstance(value, torch.Tensor) else str(value)[:7]
    ),
)
def test_wrong_arguments_are_named(name, value):
    layer, new = layer_and_tokens(1, 2, 4, 4, 8, 8, torch.float16)
    keys, values = new()
    arguments = {
        "keys": keys,
        "values": values,
        "position": at(40),
        "pool": layer.pool,
        "host_rows": layer.host_rows,
        "buffer": layer.buffer,
        "page_table": layer.page_table,
        "slot_records": layer.slot_records,
        "recency": layer.recency,
        "tokens_per_record": 4,
    }
    arguments[name] = value
    with pytest.raises(ValueError, match=name):
        append(**arguments)


@pytest.mark.parametrize("function", [append, reference.append], ids=["kernel", "reference"])
@pytest.mark.parametrize("position", [40, 43])
def test_a_record_of_several_parts(device, function, position):
    """What appending each part to a layer of its own gives, side by side."""
    batch, parts, tokens, slots = 3, 2, 4, 7
    generator = torch.Generator().manual_seed(0)
    width = tokens * (8 + 12)
    whole = Layer.new(batch=batch, slots=slots, capacity=20, record_width=parts * width, spare_host_rows=1)
    whole = whole.fill(0.6)
    whole.page_table[:, 10], whole.slot_records[whole.slot_records == 10] = -1, -1
    if position % tokens:  # begun before, but not in every lane
        whole.page_table[:2, 10] = whole.order[:2, 0]
        whole.slot_records[[0, 1], whole.order[:2, 0].long()] = 10
    keys, values = (random_bits((batch * parts, w), torch.float16, generator) for w in (8, 12))
    single = []
    for part in range(parts):
        columns = slice(part * width, (part + 1) * width)
        one = replace(
            whole.to("cpu"),
            pool=whole.pool[:, :, columns].contiguous(),
            buffer=whole.buffer[:, :, columns].contiguous(),
        )
        contract(one, keys[part::parts], values[part::parts], position, tokens)
        single.append(one)
    want = replace(
        single[0],
        pool=torch.cat([one.pool for one in single], dim=2),
        buffer=torch.cat([one.buffer for one in single], dim=2),
    )
    got = whole.to(device)
    run(function, got, keys, values, position, tokens)
    got.assert_same(want, but=LOG)
    assert_same_bits("order", got.order, want.order)
