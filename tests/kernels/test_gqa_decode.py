"""gqa_decode against attention in float64, token by token; its bits must not depend on the slots."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from hisparse_kernels import gqa_decode as gqa_module
from hisparse_kernels import reference
from hisparse_kernels.gqa_decode import gqa_decode
from hisparse_kernels.miss_plan import MissPlan

from .layers import GPU, WRONG_SOURCES, assert_same_bits, at, left_on_the_host

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """Arguments of gqa_decode, on the CPU; `history` holds the records `[lanes, records, E]`."""

    query: torch.Tensor
    history: torch.Tensor
    selection: torch.Tensor
    position: int
    allowed: torch.Tensor | None
    tokens: int
    key_width: int

    def inputs(self, slots: int, seed: int = 0, device: str = "cpu") -> dict:
        """The records of the selection in random slots of a hot buffer that holds NaN everywhere else."""
        generator = torch.Generator().manual_seed(seed)
        lanes, k = self.selection.shape
        buffer = torch.full((lanes, slots, self.history.shape[2]), float("nan"), dtype=self.query.dtype)
        where = torch.full((lanes, k), -1, dtype=torch.int32)
        for lane in range(lanes):
            chosen = self.selection[lane] >= 0
            free = torch.randperm(slots, generator=generator)[: int(chosen.sum())]
            where[lane, chosen] = free.int()
            buffer[lane, free] = self.history[lane, self.selection[lane, chosen].long()]
        arguments = {
            "query": self.query,
            "buffer": buffer,
            "selection": self.selection,
            "slots": where,
            "position": at(self.position),
            "allowed": self.allowed,
        }
        on_device = {name: value if value is None else value.to(device) for name, value in arguments.items()}
        settings = {"tokens_per_record": self.tokens, "key_width": self.key_width, "scaling": 0.3}
        return on_device | settings

    def oracle(self) -> torch.Tensor:
        """Softmax attention over the tokens that may be read, in float64."""
        lanes, group, _ = self.query.shape
        value_width = self.history.shape[2] // self.tokens - self.key_width
        output = torch.zeros(lanes, group, value_width, dtype=torch.float64)
        for lane in range(lanes):
            keys, values = (
                self.history[lane]
                .double()
                .split([self.tokens * self.key_width, self.tokens * value_width], dim=1)
            )
            keys, values = keys.reshape(-1, self.key_width), values.reshape(-1, value_width)
            readable = [
                token
                for record in self.selection[lane].tolist()
                if record >= 0
                for token in range(record * self.tokens, (record + 1) * self.tokens)
                if token <= self.position
                and (self.allowed is None or self.allowed[lane * len(self.allowed) // lanes, token])
            ]
            if readable:
                scores = 0.3 * self.query[lane].double() @ keys[readable].T
                output[lane] = scores.softmax(dim=-1) @ values[readable]
        return output


def make(
    *,
    batch: int = 1,
    heads: int = 2,
    group: int = 2,
    k: int = 4,
    tokens: int = 4,
    key_width: int = 16,
    value_width: int = 16,
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    seed: int = 0,
) -> Case:
    """A selection with padding at its end, the unfinished last record in it, NaN in tokens not yet written."""
    generator = torch.Generator().manual_seed(seed)
    lanes, records = batch * heads, 2 * k + 3
    position = records * tokens - 1 - tokens // 3
    parts = []
    for width in (key_width, value_width):
        part = torch.randn(lanes, records * tokens, width, generator=generator).to(dtype)
        part[:, position + 1 :] = float("nan")
        parts.append(part.reshape(lanes, records, -1))
    selection = torch.rand(lanes, records, generator=generator).argsort(dim=1)[:, :k].int()
    selection[:, 0] = records - 1
    for lane in range(lanes):
        others = selection[lane, 1:]
        others[others == records - 1] = records - 2 if (others != records - 2).all() else -1
        selection[lane, k - lane % 3 :] = -1
    selection[0, k // 2] = -1
    allowed = None
    if padded:
        allowed = torch.rand(batch, records * tokens + 5, generator=generator) < 0.7
    query = torch.randn(lanes, group, key_width, generator=generator).to(dtype)
    return Case(query, torch.cat(parts, dim=2), selection, position, allowed, tokens, key_width)


def shape(dtype, *marks, **sizes):
    name = "-".join(f"{key}{value}" for key, value in sizes.items()) + f"-{dtype}".replace("torch.", "")
    return pytest.param({"dtype": dtype, **sizes}, id=name, marks=marks)


SMALL = [
    shape(torch.float32, k=1, tokens=1),
    shape(torch.float32, k=7, tokens=1, group=1),
    shape(torch.float32, k=5, tokens=4, batch=2, padded=True),
    shape(torch.float32, k=3, tokens=16, key_width=20, value_width=12, group=5),
    shape(torch.float32, k=3, tokens=6, key_width=8, value_width=40, group=17),
    shape(torch.float32, k=20, tokens=5, batch=2, heads=1, padded=True),
    shape(torch.float16, k=6, tokens=16, batch=2, padded=True),
    shape(torch.float16, k=9, tokens=16, heads=1, key_width=24, value_width=16, group=3),
]
_BIG_SIZES = [
    {"k": 128, "tokens": 16, "heads": 8, "group": 4, "key_width": 128, "value_width": 128},
    {"k": 63, "tokens": 48, "heads": 3, "group": 5, "key_width": 80, "value_width": 96, "padded": True},
    {"k": 33, "tokens": 16, "heads": 1, "group": 1, "key_width": 256, "value_width": 256},
    {"k": 64, "tokens": 16, "batch": 8, "heads": 8, "key_width": 64, "value_width": 64, "padded": True},
    {"k": 16, "tokens": 128, "heads": 4, "group": 16, "key_width": 128, "value_width": 128},
    {"k": 100, "tokens": 64, "heads": 2, "group": 8, "key_width": 192, "value_width": 128},
    {"k": 2000, "tokens": 1, "heads": 1, "group": 20, "key_width": 96, "value_width": 72},
]
BIG = [shape(torch.bfloat16, GPU, **sizes) for sizes in _BIG_SIZES] + [
    shape(dtype, GPU, **sizes) for sizes in _BIG_SIZES[:3] for dtype in (torch.float16, torch.float32)
]


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", SMALL)
def test_reference_is_attention(sizes):
    case = make(**sizes)
    assert_close(reference.gqa_decode(**case.inputs(slots=2 * sizes["k"])), case.oracle(), sizes["dtype"])


@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_kernel_is_attention(device, sizes):
    case = make(**sizes)
    output = gqa_decode(**case.inputs(slots=2 * sizes["k"], device=device))
    assert_close(output, case.oracle(), sizes["dtype"])


@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_the_slots_do_not_change_a_bit(device, sizes):
    case = make(**sizes)
    first = gqa_decode(**case.inputs(slots=sizes["k"], seed=1, device=device))
    second = gqa_decode(**case.inputs(slots=3 * sizes["k"] + 1, seed=2, device=device))
    assert_same_bits("output", first, second)


IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [gqa_decode, reference.gqa_decode], ids=["kernel", "reference"]
)


@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_what_is_missing_is_read_from_the_host_and_stored(device, sizes):
    case = make(**sizes)
    inputs = case.inputs(slots=2 * sizes["k"], device=device)
    got, complete = dict(inputs), inputs["buffer"].clone()
    source = left_on_the_host(got, case.history, sizes.get("heads", 2))
    nothing_missing = left_on_the_host(dict(inputs), case.history, sizes.get("heads", 2), fraction=0.0)
    assert got["buffer"].isnan().sum() > complete.isnan().sum() or sizes["k"] == 1
    output = gqa_decode(**got, source=source)
    assert_same_bits("output", output, gqa_decode(**inputs, source=nothing_missing))
    assert_close(output, case.oracle(), sizes["dtype"])
    assert_same_bits("buffer", got["buffer"].nan_to_num(7.0), complete.nan_to_num(7.0))


@IMPLEMENTATIONS
@pytest.mark.parametrize("slots", [0, 3, None])
@pytest.mark.parametrize("sizes", SMALL + BIG)
def test_what_has_no_slot_is_read_from_the_host_and_kept_nowhere(device, implementation, sizes, slots):
    """Records above `slots` lie on the host alone; what follows the last token there is NaN and must not be read."""
    if implementation is reference.gqa_decode and sizes["dtype"] is torch.bfloat16:
        pytest.skip("the kernels' sizes")
    case = make(**sizes)
    lanes, records, _ = case.history.shape
    slots = records if slots is None else slots
    every = torch.arange(records, dtype=torch.int32).repeat(lanes, 1)
    case = case._replace(selection=every)
    inputs = case.inputs(slots=records, device=device)
    inputs["slots"] = every.masked_fill(every >= slots, -1).to(device)
    inputs["buffer"] = case.history[:, :slots].contiguous().to(device)
    before = inputs["buffer"].clone()
    source = left_on_the_host(
        dict(inputs, slots=every, buffer=case.history.to(device)), case.history, sizes.get("heads", 2)
    )
    missing = inputs["slots"] < 0
    nothing = torch.zeros(lanes, dtype=torch.int32, device=device)
    source = source._replace(plan=MissPlan(inputs["slots"], inputs["slots"], nothing, missing))
    output = implementation(**inputs, source=source)
    assert_close(output, case.oracle(), sizes["dtype"])
    assert_same_bits("buffer", inputs["buffer"].nan_to_num(7.0), before.nan_to_num(7.0))
    if implementation is gqa_decode:
        resident = inputs | {"slots": every.to(device), "buffer": case.history.to(device)}
        source = source._replace(plan=source.plan._replace(missing=torch.zeros_like(missing)))
        assert_same_bits("output", output, gqa_decode(**resident, source=source))


def test_padding_travels_with_its_record(device):
    case = make(batch=2, k=5, padded=True)
    case.allowed[:] = False
    got = case.inputs(slots=8, device=device)
    complete = got["buffer"].clone()
    source = left_on_the_host(got, case.history, heads=2, fraction=1.0)
    assert (gqa_decode(**got, source=source) == 0).all()
    assert_same_bits("buffer", got["buffer"].nan_to_num(7.0), complete.nan_to_num(7.0))


@IMPLEMENTATIONS
@pytest.mark.parametrize("padded", [False, True], ids=["all-allowed", "padded"])
def test_lanes_that_share_a_buffer_and_lanes_with_positions_of_their_own(device, implementation, padded):
    """As the queries of a prompt do, with record numbers as slots."""
    queries, generator = 3, torch.Generator().manual_seed(0)
    case = make(batch=2, heads=2, group=3, k=4, tokens=4, padded=padded)
    history = case.history.nan_to_num()
    records = history.shape[1]
    positions = torch.tensor([2, 17, records * 4 - 1]).repeat(4)
    selection = torch.rand(12, records, generator=generator).argsort(dim=1)[:, :4].int()
    selection[5, 2:] = -1
    query = torch.randn(12, 3, 16, generator=generator)
    output = implementation(
        query.to(device),
        history.to(device),
        selection.to(device),
        selection.to(device),
        positions.to(device),
        None if case.allowed is None else case.allowed.to(device),
        4,
        16,
        0.3,
    )
    for lane in range(12):
        allowed = None if case.allowed is None else case.allowed[[lane // 6]]
        own = lane // queries
        alone = case._replace(query=query[[lane]], history=history[[own]], selection=selection[[lane]])
        alone = alone._replace(position=int(positions[lane]), allowed=allowed)
        assert_close(output[[lane]], alone.oracle(), torch.float32)


@IMPLEMENTATIONS
def test_heads_that_lie_together_in_a_slot(device, implementation):
    """A record of all KV heads: slot times heads plus head names the part of one of them."""
    case = make(batch=2, heads=3, k=4)
    arguments = case.inputs(slots=9, device=device)
    want = implementation(**arguments)
    buffer = arguments["buffer"].view(2, 3, 9, -1).transpose(1, 2).reshape(2, 27, -1)
    head = torch.arange(3, device=device, dtype=torch.int32).repeat(2)[:, None]
    slots = arguments["slots"] * 3 + head
    assert_same_bits("output", implementation(**arguments | {"buffer": buffer, "slots": slots}), want)


@IMPLEMENTATIONS
def test_zeros_where_nothing_may_be_read(device, implementation):
    case = make(batch=3, heads=1, padded=True)
    case.selection[0] = -1  # nothing selected
    case.allowed[1] = False  # nothing but padding
    output = implementation(**case.inputs(slots=8, device=device))
    assert (output[:2] == 0).all()
    assert_close(output, case.oracle(), torch.float32)


@IMPLEMENTATIONS
def test_the_models_own_nan_is_not_hidden(device, implementation):
    case = make(heads=2)
    case.query[1, 0, 3] = float("nan")
    output = implementation(**case.inputs(slots=8, device=device))
    assert output[1, 0].isnan().all()
    assert not output[0].isnan().any() and not output[1, 1].isnan().any()


@pytest.mark.parametrize("splits", [1, 2, 3, 64], ids="splits{}".format)
@pytest.mark.parametrize("padded", [False, True], ids=["all-allowed", "padded"])
def test_however_the_tokens_are_split(device, monkeypatch, splits, padded):
    monkeypatch.setattr(gqa_module, "_FP32_TOKENS", 16)
    monkeypatch.setattr(gqa_module, "MAX_SPLITS", splits)
    case = make(k=23, tokens=6, padded=padded)
    assert_close(gqa_decode(**case.inputs(slots=30, device=device)), case.oracle(), torch.float32)


def test_scores_far_below_zero_in_splits_that_fill_no_tile(device, monkeypatch):
    """The tile's rows beside the three splits must not have the highest score."""
    monkeypatch.setattr(gqa_module, "_FP32_TOKENS", 16)
    monkeypatch.setattr(gqa_module, "MAX_SPLITS", 3)
    case = make(group=1, k=8, tokens=6)
    case = case._replace(history=case.history.abs(), query=-1e4 * case.query.abs())
    got = gqa_decode(**case.inputs(slots=30, device=device))
    assert got.isfinite().all() and (got != 0).all()
    assert_close(got, case.oracle(), torch.float32)


def test_a_gpu_with_little_shared_memory_reads_fewer_tokens_at_a_time(device, monkeypatch):
    monkeypatch.setattr(gqa_module, "shared_memory", lambda _: 4096)
    case = make(k=23, tokens=6, padded=True)
    assert_close(gqa_decode(**case.inputs(slots=30, device=device)), case.oracle(), torch.float32)


def test_a_selection_in_int64(device):
    case = make(group=3)
    arguments = case.inputs(slots=8, device=device)
    want = gqa_decode(**arguments)
    assert_same_bits(
        "output", gqa_decode(**arguments | {"selection": case.selection.long().to(device)}), want
    )


def test_a_query_that_is_a_view(device):
    case = make(group=3)
    arguments = case.inputs(slots=8, device=device)
    want = gqa_decode(**arguments)
    lanes, group, width = case.query.shape
    longer = torch.full((lanes, group, 3, width), float("nan"), device=device)
    longer[:, :, 1] = case.query.to(device)
    arguments["query"] = longer[:, :, 1]
    assert_same_bits("output", gqa_decode(**arguments), want)


def test_no_lanes(device):
    arguments = make(group=3).inputs(slots=8, device=device)
    none = {name: arguments[name][:0] for name in ("query", "selection", "slots")}
    assert gqa_decode(**arguments | none).shape == (0, *arguments["query"].shape[1:])


@GPU
def test_addresses_beyond_int32(device):
    """The slots lie behind more than 2**31 elements of the buffer."""
    case = make(heads=1, k=4, tokens=16, key_width=128, value_width=128, dtype=torch.bfloat16)
    arguments = case.inputs(slots=8, device=device)
    want = gqa_decode(**arguments)
    slots = 2**19 + 16
    buffer = torch.zeros(1, slots, 4096, dtype=torch.bfloat16, device=device)
    buffer[:, -8:] = arguments["buffer"]
    arguments["buffer"] = buffer
    arguments["slots"] = torch.where(arguments["slots"] >= 0, arguments["slots"] + slots - 8, -1).int()
    assert_same_bits("output", gqa_decode(**arguments), want)


@GPU
def test_a_query_beyond_int32(device):
    """Its rows lie so far apart that the last one is behind 2**31 elements; before it there is zero."""
    case = make(heads=1, group=3, dtype=torch.float16)
    arguments = case.inputs(slots=8, device=device)
    memory = torch.zeros(2**32 + 16, dtype=torch.float16, device=device)
    query = memory[2**31 :].as_strided((1, 3, 16), (16, 2**30, 1))
    query.copy_(case.query)
    assert_same_bits("output", gqa_decode(**arguments | {"query": query}), gqa_decode(**arguments))


def test_padding_of_another_batch_than_the_source_is_named():
    case = make(batch=2, padded=True)
    inputs = case.inputs(slots=8)
    source = left_on_the_host(inputs, case.history, heads=2)
    with pytest.raises(
        ValueError, match="allowed must have a row for each of the source's 2 batch rows, got 1"
    ):
        gqa_decode(**inputs | {"allowed": inputs["allowed"][:1]}, source=source)


@pytest.mark.parametrize("spoil, name", WRONG_SOURCES)
def test_a_wrong_source_is_named(spoil, name):
    case = make()
    inputs = case.inputs(slots=8)
    source = left_on_the_host(inputs, case.history, heads=2)
    with pytest.raises(ValueError, match=name):
        gqa_decode(**inputs, source=spoil(source))


@pytest.mark.parametrize(
    "name, value",
    [
        ("query", torch.zeros(2, 2, 8)),
        ("query", torch.zeros(2, 2, 16, dtype=torch.float16)),
        ("buffer", torch.zeros(2, 8, 127)),
        ("buffer", torch.zeros(3, 8, 128)),
        ("buffer", torch.zeros(2, 8, 64)),
        ("selection", torch.zeros(2, 3, dtype=torch.int32)),
        ("selection", torch.zeros(2, 4, dtype=torch.int16)),
        ("slots", torch.zeros(2, 4, dtype=torch.int64)),
        ("position", torch.zeros(1, dtype=torch.int32)),
        ("allowed", torch.zeros(1, 50)),
        ("allowed", torch.zeros(3, 50, dtype=torch.bool)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{list(value.shape)}-{value.dtype}",
)
def test_wrong_arguments_are_named(name, value):
    arguments = make().inputs(slots=8) | {name: value}
    with pytest.raises(ValueError, match=name):
        gqa_decode(**arguments)
