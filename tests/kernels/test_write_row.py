"""write_row leaves in pool and buffer what `append` leaves there; the kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hisparse_kernels import reference
from hisparse_kernels.write_row import write_row

from .layers import GPU, Layer, assert_same_bits, at, random_bits


def case(batch, heads, slots, key_width, value_width, dtype, *marks):
    name = f"{batch}x{heads}-B{slots}-({key_width}+{value_width})-{dtype}".replace("torch.", "")
    return pytest.param(batch, heads, slots, key_width, value_width, dtype, id=name, marks=marks)


SMALL = [
    case(1, 1, 1, 8, 0, torch.bfloat16),
    case(2, 1, 5, 24, 12, torch.float16),
    case(2, 2, 6, 5, 12, torch.float32),
    case(3, 1, 7, 20, 4, torch.float16),
]
BIG = [
    case(1, 1, 4096, 512, 64, torch.bfloat16, GPU),
    case(16, 1, 5000, 512, 64, torch.bfloat16, GPU),
    case(64, 1, 300, 512, 0, torch.float32, GPU),
]
FIELDS = "batch, heads, slots, key_width, value_width, dtype"


def layer_and_row(batch, heads, slots, key_width, value_width, dtype):
    width, lanes = key_width + value_width, batch * heads
    layer = Layer.new(
        batch=batch,
        heads=heads,
        slots=slots,
        capacity=slots + 20,
        record_width=width,
        dtype=dtype,
        spare_host_rows=1,
    )
    generator = torch.Generator().manual_seed(slots)
    row = [random_bits((lanes, width), dtype, generator) for width in (key_width, value_width)]
    return layer, row


def run(function, layer: Layer, keys, values, position: int, slots) -> None:
    device = layer.buffer.device
    function(
        keys.to(device),
        values.to(device),
        at(position, device),
        slots.to(device),
        layer.pool,
        layer.host_rows,
        layer.buffer,
    )


@pytest.mark.parametrize("function", [write_row, reference.write_row], ids=["kernel", "reference"])
@pytest.mark.parametrize(FIELDS, SMALL + BIG)
def test_the_same_as_append_in_the_slots_it_chose(
    device, function, batch, heads, slots, key_width, value_width, dtype
):
    got, (keys, values) = layer_and_row(batch, heads, slots, key_width, value_width, dtype)
    want = got.to("cpu")
    got = got.to(device)
    position = 13
    reference.append(
        keys,
        values,
        at(position),
        want.pool,
        want.host_rows,
        want.buffer,
        want.page_table,
        want.slot_records,
        want.recency,
        1,
    )
    run(function, got, keys, values, position, want.page_table[:, position].contiguous())
    if device == "cuda":
        torch.cuda.synchronize()
    for name in ("pool", "host_rows", "buffer"):
        assert_same_bits(name, getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("function", [write_row, reference.write_row], ids=["kernel", "reference"])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_a_longer_record(device, function, offset, dtype):
    """Its key among the keys, its value among the values; -1 for the host alone."""
    record, tokens, widths = 2, 4, (24, 12)
    layer = Layer.new(
        batch=2,
        heads=2,
        slots=5,
        capacity=9,
        record_width=tokens * sum(widths),
        dtype=dtype,
        spare_host_rows=1,
    )
    generator = torch.Generator().manual_seed(offset)
    keys, values = (random_bits((4, width), dtype, generator) for width in widths)
    slots = torch.tensor([0, 4, 2, -1], dtype=torch.int32)
    want, got = layer.to("cpu"), layer.to(device)
    want.host_rows[:, record] = torch.arange(len(want.host_rows))
    for rows, start in ((keys, 0), (values, tokens * widths[0])):
        columns = slice(start + offset * rows.shape[1], start + (offset + 1) * rows.shape[1])
        want.pool[record, :4, columns] = rows
        for lane in range(3):
            want.buffer[lane, slots[lane], columns] = rows[lane]
    new = (part.to(device) for part in (keys, values, at(record * tokens + offset), slots))
    function(*new, got.pool, got.host_rows, got.buffer, tokens)
    got.assert_same(want)


@pytest.mark.parametrize("function", [write_row, reference.write_row], ids=["kernel", "reference"])
def test_a_row_without_a_slot_goes_to_the_host_alone(device, function):
    layer, (keys, values) = layer_and_row(3, 1, 4, 8, 8, torch.float16)
    before, layer = layer, layer.to(device)
    run(function, layer, keys, values, 7, torch.tensor([-1, 2, -1], dtype=torch.int32))
    if device == "cuda":
        torch.cuda.synchronize()
    row = torch.cat([keys, values], dim=1)
    assert_same_bits("pool", layer.pool[7, :3], row)
    assert_same_bits("written", layer.buffer[1, 2], row[1])
    before.buffer[1, 2] = row[1]
    assert_same_bits("buffer", layer.buffer, before.buffer)
    assert layer.host_rows[:, 7].tolist() == [0, 1, 2]


def test_rows_that_are_views_of_a_longer_call(device):
    want, _ = layer_and_row(3, 1, 4, 8, 4, torch.float32)
    got = want.to(device)
    keys, values = torch.randn(3, 1, 5, 8)[:, 0, 2], torch.randn(3, 1, 5, 4)[:, 0, 2]
    slots = torch.tensor([3, 0, 2], dtype=torch.int32)
    run(write_row, got, keys, values, 9, slots)
    run(reference.write_row, want, keys, values, 9, slots)
    got.assert_same(want)


@pytest.mark.parametrize(
    "name, value",
    [
        ("keys", torch.zeros(2, 8, dtype=torch.float32)),
        ("values", torch.zeros(2, 9, dtype=torch.float16)),
        ("position", torch.zeros(1, dtype=torch.int32)),
        ("slots", torch.zeros(2, dtype=torch.int64)),
        ("slots", torch.zeros(3, dtype=torch.int32)),
        ("pool", torch.zeros(30, 1, 16, dtype=torch.float16)),
        ("host_rows", torch.zeros(1, 30, dtype=torch.int64)),
        ("buffer", torch.zeros(2, 5, 15, dtype=torch.float16)),
        ("buffer", torch.zeros(3, 5, 16, dtype=torch.float16)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{list(value.shape)}-{value.dtype}",
)
def test_wrong_arguments_are_named(name, value):
    layer, (keys, values) = layer_and_row(1, 2, 4, 8, 8, torch.float16)
    arguments = {
        "keys": keys,
        "values": values,
        "position": at(4),
        "slots": torch.zeros(2, dtype=torch.int32),
        "pool": layer.pool,
        "host_rows": layer.host_rows,
        "buffer": layer.buffer,
    } | {name: value}
    with pytest.raises(ValueError, match=name):
        write_row(**arguments)
