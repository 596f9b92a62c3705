"""mla_decode against attention in float64 and against torch's own; its bits must not depend on the slots."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from hisparse_kernels import mla_decode as module
from hisparse_kernels import reference
from hisparse_kernels.mla_decode import mla_decode

from .layers import GPU, assert_same_bits

TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALING = 0.2


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Case(NamedTuple):
    """Arguments of mla_decode, on the CPU; `history` holds the rows `[buffers, records, key_width]`."""

    query: torch.Tensor
    history: torch.Tensor
    selection: torch.Tensor
    value_width: int

    @property
    def sharing(self) -> int:
        return len(self.query) // len(self.history)

    def inputs(self, slots: int, seed: int = 0, device: str = "cpu") -> dict:
        """The records of the selections in random slots; NaN in all others."""
        generator = torch.Generator().manual_seed(seed)
        buffers, records, width = self.history.shape
        buffer = torch.full((buffers, slots, width), float("nan"), dtype=self.query.dtype)
        place = torch.stack([torch.randperm(slots, generator=generator)[:records] for _ in range(buffers)])
        owner = torch.arange(len(self.query))[:, None] // self.sharing
        selected = self.selection >= 0
        record = self.selection.clamp(min=0).long()
        slot = place[owner, record]
        owner = owner.expand_as(slot)[selected]
        buffer[owner, slot[selected]] = self.history[owner, record[selected]]
        arguments = {
            "query": self.query,
            "buffer": buffer,
            "selection": self.selection,
            "slots": slot.masked_fill(~selected, slots - 1).int(),  # not to be looked at
        }
        on_device = {name: value.to(device) for name, value in arguments.items()}
        return on_device | {"scaling": SCALING, "value_width": self.value_width}

    def oracle(self) -> torch.Tensor:
        """Softmax attention over the selected records, in float64."""
        lanes, heads, _ = self.query.shape
        output = torch.zeros(lanes, heads, self.value_width, dtype=torch.float64)
        for lane, selection in enumerate(self.selection.long()):
            rows = self.history[lane // self.sharing, selection[selection >= 0]].double()
            if len(rows):
                scores = SCALING * self.query[lane].double() @ rows.T
                output[lane] = scores.softmax(dim=-1) @ rows[:, : self.value_width]
        return output

    def torch_attention(self, device: str) -> torch.Tensor:
        """torch's own attention over the gathered rows, in the dtype of the query."""
        inputs = self.inputs(self.history.shape[1], device=device)
        owner = torch.arange(len(self.query), device=device)[:, None] // self.sharing
        selected = inputs["selection"] >= 0
        rows = inputs["buffer"][owner, inputs["slots"].clamp(min=0).long()]
        rows = rows.masked_fill(~selected[:, :, None], 0.0)[:, None]
        # On a GPU torch pads a mask to a multiple of 8 with what it has not written, and lets that count.
        missing = -selected.shape[1] % 16
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        selected = torch.nn.functional.pad(selected, (0, missing))
        return torch.nn.functional.scaled_dot_product_attention(
            inputs["query"][:, :, None],
            rows.expand(-1, self.query.shape[1], -1, -1),
            rows[..., : self.value_width].expand(-1, self.query.shape[1], -1, -1),
            attn_mask=selected[:, None, None],
            scale=SCALING,
        )[:, :, 0]


def make(
    *,
    lanes: int = 2,
    buffers: int | None = None,
    heads: int = 4,
    k: int = 7,
    latent: int = 16,
    rope: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random selections without duplicates; -1 in the middle of the first lane and at the end of others."""
    generator = torch.Generator().manual_seed(seed)
    buffers = lanes if buffers is None else buffers
    records = k + k // 2 + 2
    history = torch.randn(buffers, records, latent + rope, generator=generator).to(dtype)
    selection = torch.rand(lanes, records, generator=generator).argsort(dim=1)[:, :k].int()
    if k > 1:
        selection[0, k // 2] = -1
        for lane in range(lanes):
            selection[lane, k - lane % 3 :] = -1
    query = torch.randn(lanes, heads, latent + rope, generator=generator).to(dtype)
    return Case(query, history, selection, latent)


def shape(dtype, *marks, **sizes):
    name = "-".join(f"{key}{value}" for key, value in sizes.items()) + f"-{dtype}".replace("torch.", "")
    return pytest.param({"dtype": dtype, **sizes}, id=name, marks=marks)


SMALL = [
    shape(torch.float32, k=1, heads=1, lanes=1),
    shape(torch.float32, k=7),
    shape(torch.float32, k=33, latent=20, rope=0, heads=3),
    shape(torch.float32, k=100, latent=24, rope=12, heads=17, lanes=3),
    shape(torch.float16, k=63, lanes=6, buffers=2),
    shape(torch.float16, k=130, latent=40, rope=16, heads=20, lanes=1),
    shape(torch.float16, k=65, lanes=1, heads=70, latent=512, rope=64),
]
_WIDE = {"latent": 512, "rope": 64}
_BIG_SIZES = [
    {"k": 2048, "heads": 128, "lanes": 1, **_WIDE},
    {"k": 2048, "heads": 64, "lanes": 1, **_WIDE},
    {"k": 2048, "heads": 64, "lanes": 3, **_WIDE},
    {"k": 2047, "heads": 16, "lanes": 8, **_WIDE},
    {"k": 1, "heads": 128, "lanes": 64, **_WIDE},
    {"k": 100, "heads": 96, "lanes": 64, **_WIDE},
    {"k": 513, "heads": 32, "lanes": 300, "buffers": 2, **_WIDE},
    {"k": 1000, "heads": 8, "lanes": 5, "latent": 512, "rope": 0},
    {"k": 300, "heads": 5, "lanes": 7, "latent": 96, "rope": 24},
]
BIG = [shape(dtype, GPU, **sizes) for sizes in _BIG_SIZES for dtype in (torch.bfloat16, torch.float32)] + [
    shape(torch.float16, GPU, **_BIG_SIZES[0])
]
EVERY_SIZE = pytest.mark.parametrize("sizes", SMALL + BIG)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [mla_decode, reference.mla_decode], ids=["kernel", "reference"]
)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "sizes", [*SMALL, shape(torch.bfloat16, k=512, heads=16, **_WIDE), shape(torch.float32, k=512, **_WIDE)]
)
def test_reference_is_attention(sizes):
    case = make(**sizes)
    assert_close(reference.mla_decode(**case.inputs(slots=2 * sizes["k"] + 2)), case.oracle(), sizes["dtype"])


@EVERY_SIZE
def test_kernel_is_attention(device, sizes):
    case = make(**sizes)
    output = mla_decode(**case.inputs(slots=2 * sizes["k"] + 2, device=device))
    assert_close(output, case.oracle(), sizes["dtype"])


@EVERY_SIZE
def test_kernel_is_as_exact_as_torch(device, sizes):
    case = make(**sizes)
    output = mla_decode(**case.inputs(slots=case.history.shape[1], device=device))
    read = (case.selection >= 0).any(1)
    oracle = case.oracle()[read]

    def error(result: torch.Tensor) -> float:
        return (result[read].double() - oracle).square().mean().sqrt().item()

    ours, torchs = error(output.cpu()), error(case.torch_attention(device).cpu())
    # In fp32 torch sums pairwise, the kernel block by block; in half precision the rounding of weights decides.
    allowed = 10 if sizes["dtype"] is torch.float32 else 3
    assert ours <= allowed * torchs + 1e-7, f"{ours / torchs:.2f} times the error of torch"


@EVERY_SIZE
def test_the_slots_do_not_change_a_bit(device, sizes):
    case = make(**sizes)
    records = case.history.shape[1]
    first = mla_decode(**case.inputs(slots=records, seed=1, device=device))
    second = mla_decode(**case.inputs(slots=3 * records + 1, seed=2, device=device))
    assert_same_bits("output", first, second)


@pytest.mark.parametrize("shared_memory", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("lanes, heads, k", [(1, 128, 2048), (1, 64, 2048), (3, 64, 2048), (64, 16, 64)])
def test_blocks_fit_the_gpu(lanes, heads, k, element_size, shared_memory):
    row_bytes = 576 * element_size
    head_block, row_block, warps = module._blocks(lanes, heads, k, row_bytes, element_size, shared_memory)
    smallest = head_block == row_block == 16
    assert smallest or (head_block + module._STAGES * row_block) * row_bytes <= shared_memory
    assert 16 <= head_block <= max(16, heads) and warps in (4, 8)


def test_few_lanes_spread_their_heads_over_the_gpu():
    """Fewer heads at a time where there are places for more programs; as many as can be where there are not."""
    head_blocks = [module._blocks(lanes, 64, 2048, 1152, 2, 232448)[0] for lanes in (1, 2, 4, 8, 64)]
    assert head_blocks == [16, 32, 64, 64, 64]


@pytest.mark.parametrize("split", [(1, 4), (2, 2), (2, 3), (4, 1)], ids=str)
def test_any_split(device, monkeypatch, split):
    """Of a selection that is four blocks of rows long."""
    monkeypatch.setattr(module, "_split", lambda *_: split)
    case = make(lanes=2, heads=2, k=3 * module._FP32_ROWS + 4)
    case.selection[0, : 2 * module._FP32_ROWS] = -1  # a split, or a part of it, without a row
    output = mla_decode(**case.inputs(slots=200, device=device))
    assert_close(output, case.oracle(), torch.float32)


@IMPLEMENTATIONS
@pytest.mark.parametrize("k", [3, 70])
def test_zeros_where_nothing_is_selected(device, implementation, k):
    case = make(lanes=3, k=k)
    case.selection[1] = -1
    output = implementation(**case.inputs(slots=2 * k, device=device))
    assert (output[1] == 0).all()
    assert_close(output, case.oracle(), torch.float32)


@IMPLEMENTATIONS
def test_the_models_own_nan_is_not_hidden(device, implementation):
    case = make()
    case.query[1, 0, 3] = float("nan")
    output = implementation(**case.inputs(slots=16, device=device))
    assert output[1, 0].isnan().all()
    assert not output[0].isnan().any() and not output[1, 1].isnan().any()


@IMPLEMENTATIONS
def test_lanes_may_share_a_buffer(device, implementation):
    """As in a prefill: the queries of a row read one history, and the records' numbers are the slots."""
    case = make(lanes=6, buffers=2, k=40)
    shared = {
        "query": case.query,
        "buffer": case.history,
        "selection": case.selection,
        "slots": case.selection,
    }
    apart = shared | {"buffer": case.history.repeat_interleave(3, dim=0)}
    settings = {"scaling": SCALING, "value_width": case.value_width}
    got, want = (
        implementation(**{name: value.to(device) for name, value in arguments.items()}, **settings)
        for arguments in (shared, apart)
    )
    assert_same_bits("output", got, want)
    assert_close(got, case.oracle(), torch.float32)


def test_selection_and_slots_in_int64(device):
    case = make()
    arguments = case.inputs(slots=16, device=device)
    want = mla_decode(**arguments)
    long = {name: arguments[name].long() for name in ("selection", "slots")}
    assert_same_bits("output", mla_decode(**arguments | long), want)


def test_arguments_that_are_views(device):
    """The query as a batched product over the heads leaves it, selection and slots as slices of longer rows."""
    case = make(k=9)
    arguments = case.inputs(slots=16, device=device)
    want = mla_decode(**arguments)
    views = {"query": arguments["query"].transpose(0, 1).contiguous().transpose(0, 1)}
    for name in ("selection", "slots"):
        views[name] = torch.nn.functional.pad(arguments[name], (0, 5), value=3)[:, :9]
    assert_same_bits("output", mla_decode(**arguments | views), want)


def test_no_lanes(device):
    arguments = make().inputs(slots=16, device=device)
    none = {name: arguments[name][:0] for name in ("query", "selection", "slots")}
    assert mla_decode(**arguments | none).shape == (0, 4, 16)


class Launches:
    """A kernel that keeps what it was compiled to."""

    def __init__(self, kernel) -> None:
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **options: self.compiled.append(self.kernel[grid](*args, **options))


@GPU
@pytest.mark.parametrize("lanes", [16, 300], ids=["several-splits", "one-split"])
def test_products_do_not_wait_for_each_other(device, monkeypatch, lanes):
    """What ptxas makes of the kernel on Hopper: a wait for each product, where it does not see that it needs none."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("other products than Hopper's")
    launches = Launches(module._mla_split_kernel)
    monkeypatch.setattr(module, "_mla_split_kernel", launches)
    case = make(lanes=lanes, buffers=1, heads=64, k=640, dtype=torch.bfloat16, **_WIDE)
    mla_decode(**case.inputs(slots=1000, device=device))
    code = launches.compiled[0].asm["sass"]
    assert code.count("HGMMA") > 5 * code.count("WARPGROUP.DEPBAR") > 0


@GPU
def test_more_lanes_than_a_grid_has_rows(device):
    case = make(lanes=70000, buffers=1, heads=2, k=3)
    output = mla_decode(**case.inputs(slots=8, device=device))
    want = reference.mla_decode(**case.inputs(slots=8))
    torch.testing.assert_close(output.cpu(), want, atol=1e-5, rtol=1e-5)


@GPU
def test_slots_beyond_int32(device):
    """The slots lie behind more than 2**31 elements of the buffer."""
    case = make(lanes=1, k=64, dtype=torch.bfloat16, **_WIDE)
    arguments = case.inputs(slots=128, device=device)
    want = mla_decode(**arguments)
    slots = 2**31 // 576 + 200
    buffer = torch.zeros(1, slots, 576, dtype=torch.bfloat16, device=device)
    buffer[:, -128:] = arguments["buffer"]
    arguments["buffer"] = buffer
    arguments["slots"] = torch.where(arguments["slots"] >= 0, arguments["slots"] + slots - 128, -1)
    assert_same_bits("output", mla_decode(**arguments), want)


@GPU
def test_a_query_and_an_output_beyond_int32(device):
    lanes, heads = 2**15 + 3, 128
    case = make(lanes=1, heads=heads, k=5, dtype=torch.bfloat16, **_WIDE)
    arguments = case.inputs(slots=9, device=device)
    query = torch.zeros(heads, lanes, 576, dtype=torch.bfloat16, device=device).transpose(0, 1)
    query[-1:] = arguments["query"]
    for name in ("selection", "slots"):
        arguments[name] = arguments[name].repeat(lanes, 1)
    output = mla_decode(**arguments | {"query": query})
    assert_close(output[-1:], case.oracle(), torch.bfloat16)


@pytest.mark.parametrize(
    "name, value",
    [
        ("query", torch.zeros(2, 4, 24, dtype=torch.float16)),
        ("query", torch.zeros(2, 24, 4).transpose(1, 2)),
        ("buffer", torch.zeros(2, 16, 23)),
        ("buffer", torch.zeros(3, 16, 24)),
        ("buffer", torch.zeros(2, 32, 24)[:, ::2]),
        ("selection", torch.zeros(2, 7, dtype=torch.int16)),
        ("selection", torch.zeros(3, 7, dtype=torch.int32)),
        ("slots", torch.zeros(2, 6, dtype=torch.int32)),
        ("slots", torch.zeros(7, 2, dtype=torch.int32).T),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{list(value.shape)}-{value.dtype}",
)
def test_wrong_arguments_are_named(name, value):
    arguments = make().inputs(slots=16) | {name: value}
    with pytest.raises(ValueError, match=name):
        mla_decode(**arguments)


@pytest.mark.parametrize("value_width", [0, 25])
def test_wrong_value_widths_are_named(value_width):
    arguments = make().inputs(slots=16) | {"value_width": value_width}
    with pytest.raises(ValueError, match="value_width"):
        mla_decode(**arguments)
