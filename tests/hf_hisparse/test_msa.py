"""MiniMax-M3 with `HiSparseCache`: what is refused, selected, held and moved; parity is in tests/generate."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.hooks import add_hook_to_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DynamicCache,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
    Qwen3Config,
    StaticCache,
)
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

from hf_hisparse import HiSparseCache, Quest, disable, enable
from hf_hisparse.graphs import _only_known, as_captured
from hf_hisparse.models import block_indexer
from hf_hisparse.models.msa import LAYOUTS, BlockLayer
from hf_hisparse.models.watched_keys import scores_are_known
from tests.generate.scenarios import Session
from tests.hf_hisparse.test_dsa import _Counting, _Largest
from tests.models import VOCAB, prompt
from tests.msa_models import BLOCK, IMAGE, KINDS, TOP_K, build, msa_twins

HOSTED = KINDS.count("minimax_m3_sparse")


@pytest.fixture
def model(device):
    return build("two_groups").to(device)


@torch.no_grad()
def _logits(model, ids, cache=None, mask=None, **kwargs):
    return model(ids, attention_mask=mask, past_key_values=cache, **kwargs).logits


def _own_cache(model):
    return DynamicCache(config=model.config)


# ---------------------------------------------------------------------- enabling

CACHES = {
    "none": lambda model: None,
    "dynamic": _own_cache,
    "static": lambda model: StaticCache(config=model.config, max_cache_len=160),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["two_groups", "images"])
def test_other_caches_answer_as_before(name, attention, cache):
    native, model = (copy.deepcopy(twin) for twin in msa_twins(name, "cpu", 0, attention))
    disable(model)
    ids = prompt(2, 90)
    mask = torch.ones_like(ids)
    mask[1, 70:] = 0

    def answers(model):
        held = CACHES[cache](model)
        return [_logits(model, ids, held, mask), _logits(model, ids[:, :1], held)]

    expected = answers(native)
    enable(model)
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(answers(model), expected, strict=True))
        _logits(model, ids, HiSparseCache(model))  # leaves nothing behind
    disable(model)
    assert all(torch.equal(*pair) for pair in zip(answers(model), expected, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def test_under_hooks_of_accelerate(model):
    """They see one call of an indexer, whatever slices it is cut into."""
    ids = prompt(1, 300, device=str(model.device))
    expected = _logits(model, ids)
    hooks = {module: _Counting() for module in model.modules() if hasattr(module, "build_block_mask")}
    for module, hook in hooks.items():
        add_hook_to_module(module, hook)
    enable(model)
    cache = HiSparseCache(model, prefill_memory="200KB")
    torch.testing.assert_close(_logits(model, ids, cache), expected, atol=1e-4, rtol=0)
    assert {hook.calls for hook in hooks.values()} == {1}
    disable(model)
    assert torch.equal(_logits(model, ids), expected)


def test_a_copied_model_is_enabled_on_its_own(model):
    enable(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for module in twin.modules():
            if hasattr(module, "build_block_mask"):
                module.q_proj.weight.neg_()  # other blocks are the best now
    ids = prompt(1, 200, device=str(model.device))
    for each in (model, twin):
        expected = _logits(each, ids)
        torch.testing.assert_close(_logits(each, ids, HiSparseCache(each)), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(_logits(model, ids), _logits(twin, ids), atol=1e-2)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("layout", ["Union", None, "per_head"])
def test_an_unknown_layout(model, layout):
    with pytest.raises(ValueError, match=rf"layout={layout!r}.*per_group.*union"):
        HiSparseCache(model, layout=layout)


def test_a_layout_is_for_models_that_select_blocks():
    with pytest.raises(ValueError, match=r"layout='union'.*MiniMax-M3.*'qwen3' does not"):
        HiSparseCache(Qwen3Config(), Quest(), layout="union")


def test_settings_of_other_families(model):
    with pytest.raises(
        ValueError, match=r"brings its own selection \(index_topk_blocks=4\): leave the selector out"
    ):
        HiSparseCache(model, Quest(32, 8))
    with pytest.raises(ValueError, match=r"mla_mode='expand'.*latent attention"):
        HiSparseCache(model, mla_mode="expand")
    config = MiniMaxM3VLTextConfig(
        num_hidden_layers=1, layer_types=["minimax_m3_sparse"], num_key_value_heads=4, index_n_heads=8
    )
    with pytest.raises(ValueError, match=r"index_n_heads=8.*num_key_value_heads=4.*DynamicCache"):
        HiSparseCache(config)


@pytest.mark.parametrize(("layout", "least"), [("per_group", 32), ("union", 64)])
def test_the_buffer_holds_what_a_query_reads(model, layout, least):
    HiSparseCache(model, layout=layout, device_buffer_tokens=least)
    with pytest.raises(ValueError, match=rf"device_buffer_tokens={least - 8}.*page size 8.*take {least}"):
        HiSparseCache(model, layout=layout, device_buffer_tokens=least - 8)


def test_left_padding(model):
    """Before anything is changed, and in `generate` as well; without padding the same mask is fine."""
    cache, ids = HiSparseCache(model), prompt(2, 60, device=str(model.device))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    message = r"batch row 1 is padded on the left.*equal length, pad on the right, or run them one by one"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            _logits(model, ids, cache, mask)
        with pytest.raises(ValueError, match=message):
            model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 0
    four = mask[:, None, None].bool() & torch.ones(60, 60, dtype=torch.bool, device=ids.device).tril()
    with pytest.raises(ValueError, match=message):
        _logits(model, ids, cache, four)
    cache.reset()
    mask[:] = 1
    ours = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert ours.shape == (2, 62)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_on_the_right(layout):
    """A prompt padded on the right and continued, positions counted by the model: decode, prefill, decode."""
    native, enabled = msa_twins("two_groups", "cpu")
    ours, theirs = HiSparseCache(enabled, layout=layout, verify=True), _own_cache(native)
    ids = prompt(2, 300)
    mask = torch.ones_like(ids)
    mask[1, 276:] = 0  # 24 tokens, of which no query can select nothing but padding
    for rows in (300, 5, 1, 40, 1, 1):
        step = ids if rows == 300 else prompt(2, rows, seed=rows)
        mask = mask if rows == 300 else torch.cat([mask, mask.new_ones(2, rows)], dim=1)
        expected, logits = _logits(native, step, theirs, mask), _logits(enabled, step, ours, mask)
        seen = mask[:, -rows:].bool()
        torch.testing.assert_close(logits[seen], expected[seen], atol=1e-4, rtol=0)


def test_more_padding_than_a_query_can_look_past(model):
    """Then it may select nothing but padding, and the model would have it read all keys alike."""
    ids = prompt(2, 120, device=str(model.device))
    mask = torch.ones_like(ids)
    mask[1, 95:] = 0
    cache = HiSparseCache(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"25 tokens of padding; of more than 24 .* run them one by one"):
            _logits(model, ids, cache, mask)
    assert cache.get_seq_length() == 0
    mask[1, 95] = 1
    _logits(model, ids, cache, mask)
    more = torch.cat([mask, mask.new_tensor([[1, 1, 1], [1, 1, 0]])], dim=1)
    with pytest.raises(ValueError, match="25 tokens of padding"):
        _logits(model, ids[:, :3], cache, more)
    assert cache.get_seq_length() == 120
    _logits(model, ids[:, :3], cache, torch.cat([mask, mask.new_ones(2, 3)], dim=1))


def test_a_row_of_padding_in_a_long_generation():
    """The longest padding that is accepted, long enough for a query to come to lie in it: 80 generated tokens."""
    native, enabled = msa_twins("two_groups", "cpu")
    ids = prompt(2, 120)
    mask = torch.ones_like(ids)
    mask[1, 96:] = 0
    texts = [
        model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=80)
        for model, cache in ((native, _own_cache(native)), (enabled, HiSparseCache(enabled)))
    ]
    assert torch.equal(*texts)


def test_positions_beyond_the_tokens(model):
    """They are refused before anything is stored: the cache is as before."""
    cache, ids = HiSparseCache(model), prompt(1, 60, device=str(model.device))
    fresh = HiSparseCache(model)
    positions = torch.arange(60, device=ids.device)[None] + 3
    with pytest.raises(
        ValueError, match=r"position_ids give 3 to token 0 of batch row 0.*leave position_ids out"
    ):
        _logits(model, ids, cache, position_ids=positions)
    assert cache.get_seq_length() == 0
    assert torch.equal(_logits(model, ids, cache), _logits(model, ids, fresh))
    for rows in (5, 50):
        with pytest.raises(ValueError, match=r"position_ids give 63 to token 60"):
            _logits(model, ids[:, :rows], cache, position_ids=positions[:, :rows] + 60)
        assert {layer.get_seq_length() for layer in cache.layers} == {60}
    assert torch.equal(_logits(model, ids[:, :1], cache), _logits(model, ids[:, :1], fresh))


@pytest.mark.parametrize("memory", ["1MB", "2GiB"])
def test_masks_of_users_are_honoured(memory):
    """A 4-D mask made by hand may hide anything in a prefill, for each query otherwise."""
    native, enabled = msa_twins("two_groups", "cpu")
    ids = prompt(2, 90)
    mask = torch.ones(90, 90, dtype=torch.bool).tril().repeat(2, 1, 1)
    mask[0, 50:, 10:30] = False
    mask[1, 70:, 3:40] = False
    expected = _logits(native, ids, _own_cache(native), mask[:, None])
    ours = _logits(enabled, ids, HiSparseCache(enabled, prefill_memory=memory), mask[:, None])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- the selection


@torch.no_grad()
def _selections(model, ids, cache):
    """What the indexer of each sparse layer answers."""
    found = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: found.append(output))
        for module in model.modules()
        if hasattr(module, "build_block_mask")
    ]
    model(ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("memory", ["50KB", "1MB", "2GiB"])
@pytest.mark.parametrize("name", ["two_groups", "shared_selections", "local_blocks"])
def test_slices_select_what_the_model_selects(name, memory, monkeypatch):
    """Block by block, in the model's order, and each query scored once, by the kernel."""
    twins, rows, scored = msa_twins(name, "cpu"), 203, []
    kernel = block_indexer.block_scores
    monkeypatch.setattr(
        block_indexer, "block_scores", lambda *args: (scored.append(args[0].shape[2]), kernel(*args))[1]
    )
    ids = prompt(2, rows)
    expected = _selections(twins.native, ids, _own_cache(twins.native))
    cache = HiSparseCache(twins.enabled, prefill_memory=memory)
    ours = _selections(twins.enabled, ids, cache)
    assert sum(scored) == rows * HOSTED
    assert (len(scored) > HOSTED) == (memory != "2GiB")
    # Hidden states after the first layer differ by rounding: there a selection may flip.
    for one, other in list(zip(ours, expected, strict=True))[: 3 if memory == "2GiB" else 1]:
        assert torch.equal(one.sort(dim=-1).values, other.sort(dim=-1).values)  # local blocks tie
    for _ in range(3):  # decode is scored by the kernel, too
        _logits(twins.enabled, ids[:, :1], cache)
    assert sum(scored) == (rows + 3) * HOSTED


@pytest.mark.parametrize("memory", ["200KB", "2GiB"])
def test_an_unknown_indexer_runs_its_own_code_on_slices(model, monkeypatch, memory):
    """Scores that the kernel does not compute: nothing is replaced, and memory stays bounded all the same."""
    called = []
    monkeypatch.setattr(block_indexer, "block_scores", lambda *args: called.append(1))
    real = torch.matmul
    monkeypatch.setattr(  # an indexer that scales its scores
        modeling_minimax_m3_vl.torch,
        "matmul",
        lambda one, other: real(one, other * 0.5 if other.ndim == 4 else other),
    )
    ids = prompt(2, 200, device=str(model.device))
    expected = _logits(model, ids)
    cache = HiSparseCache(model, prefill_memory=memory)
    ours = [_logits(model, part, cache) for part in ids.split([198, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(ours, dim=1), expected, atol=1e-4, rtol=0)
    assert not called
    indexers = [module for module in model.modules() if hasattr(module, "build_block_mask")]
    assert [scores_are_known(indexer) for indexer in indexers] == [False] * HOSTED  # so no step tries again


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunked", [False, True])
def test_prefill_memory_does_not_grow_with_the_square(layout, chunked):
    """No mask over queries and keys for each head, no scores of single keys."""
    model = build("all_sparse")  # dense layers are the model's own affair
    enable(model)
    rows, budget = 2600, 6_000_000
    assert budget < rows * rows  # bytes of one bool mask over all
    ids = prompt(1, rows)
    cache = HiSparseCache(model, prefill_memory=budget, layout=layout)
    if chunked:
        _logits(model, ids[:, :700], cache)
        ids = ids[:, 700:]  # for a further call the model makes one bool mask
    with _Largest() as largest:
        _logits(model, ids, cache, logits_to_keep=1)
    assert largest.nbytes <= budget, largest.what


class _Peak(TorchDispatchMode):
    """Notes the most memory that tensors made within it take together."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._live = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        given = {
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)
        }
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        self.nbytes = max(self.nbytes, sum(nbytes for _, nbytes in self._live.values()))
        return output


def _extra(device, function, *args, **kwargs):
    """What `function` returns, and the bytes that it took beyond that."""
    if device == "cpu":
        with _Peak() as peak:
            output = function(*args, **kwargs)
        taken = peak.nbytes
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        output = function(*args, **kwargs)
        taken = torch.cuda.max_memory_allocated() - held
    result = output[0] if isinstance(output, tuple) else output
    return output, taken - result.nbytes


@torch.no_grad()
def test_a_long_prompt_stays_within_prefill_memory(device, monkeypatch):
    """Indexer and attention each: on a GPU 128K tokens at MiniMax-M3's sizes within the default, on a CPU a toy."""
    if device == "cpu":
        model, rows, budget = build("all_sparse"), 2500, 4_000_000
    else:
        config = MiniMaxM3VLTextConfig(
            num_hidden_layers=1,
            layer_types=["minimax_m3_sparse"],
            mlp_layer_types=["dense"],
            dense_intermediate_size=256,
            vocab_size=VOCAB,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device("cuda"):
            model = MiniMaxM3VLForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        rows, budget = 2**17, 2**31
    taken = []

    def noted(function):
        def measured(*args, **kwargs):
            output, nbytes = _extra(device, function, *args, **kwargs)
            taken.append(nbytes)
            return output

        return measured

    cache = HiSparseCache(model, prefill_memory=budget)
    monkeypatch.setattr(BlockLayer, "attend", noted(BlockLayer.attend))
    for module in model.modules():
        if hasattr(module, "build_block_mask"):
            monkeypatch.setattr(module, "forward", noted(module.forward))
    _logits(model, prompt(1, rows, device=device), cache, logits_to_keep=1)
    assert len(taken) == 2 * len(cache.hosted_layers)
    assert max(taken) <= budget, taken
    assert max(taken) > budget / 20, "so little shows nothing"


# ---------------------------------------------------------------------- decode steps


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_steps_as_they_are_captured(attention, layout, padded):
    """A captured step scores all keys that there is room for, and hides those that are not there yet."""
    native, enabled = msa_twins("two_groups", "cpu", 0, attention)
    ids = prompt(2, 150)
    mask = torch.ones(2, 180, dtype=torch.long)
    mask[1, 126:150] = 0 if padded else 1
    ours, theirs = HiSparseCache(enabled, device_buffer_tokens=72, layout=layout), _own_cache(native)
    _logits(enabled, ids, ours, mask[:, :150])
    _logits(native, ids, theirs, mask[:, :150])
    for layer in ours.hosted_layers:
        layer.state.keys[:, 150:] = 9.0  # what must not be read
    for length in range(151, 175):
        token, seen = prompt(2, 1, seed=length), mask[:, :length]
        expected = _logits(native, token, theirs, seen)
        ours.make_room(1)
        if padded:
            ours.padding.take(seen, ours.capacity)
        with as_captured(ours, padded):
            logits = _logits(enabled, token, ours)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_block_that_is_filling_stays_in_its_slot(model):
    """With the smallest buffer: until it is full; each token is on the host at once."""
    cache = HiSparseCache(model, device_buffer_tokens=BLOCK * TOP_K)
    _logits(model, prompt(2, 203, device=str(model.device)), cache)
    layer = cache.hosted_layers[1]
    seen = {}
    for step in range(203, 260):
        _logits(model, prompt(2, 1, seed=step, device=str(model.device)), cache)
        record, rows = step // BLOCK, step % BLOCK + 1
        slots = layer.buffer.page_table[:, record]
        assert bool((slots >= 0).all())
        assert torch.equal(seen.setdefault(record, slots.clone()), slots)
        layer.pool.synchronize()
        lanes = torch.arange(len(slots), device=slots.device)
        device = layer.layout.unpack(layer.buffer.data[lanes, slots.long()][:, None], 2)
        host = layer.layout.unpack(layer.pool.read_range(record, record + 1), 2)
        for one, other in zip(device, host, strict=True):
            assert torch.equal(one[:, :, :rows], other[:, :, :rows])


@pytest.mark.parametrize("name", ["two_groups", "four_groups"])
def test_layouts_and_buffers_change_no_bit(device, name):
    """Nor any count but the misses: a selection that both groups name is read once for each."""
    model = msa_twins(name, device).enabled
    heads = model.config.num_key_value_heads
    ids, found, stats = prompt(2, 300, device=device), [], {}
    for layout in LAYOUTS:
        for tokens in (heads * BLOCK * TOP_K, 512):
            cache = HiSparseCache(model, layout=layout, device_buffer_tokens=tokens)
            steps = [_logits(model, ids, cache)[:, -1:]]
            steps += [_logits(model, prompt(2, 1, seed=seed, device=device), cache) for seed in range(20)]
            found.append(torch.cat(steps, dim=1))
            stats[layout, tokens] = cache.stats()
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert len({each.selected for each in stats.values()}) == 1
    assert stats["per_group", 512].misses == stats["union", 512].misses == 0
    small = heads * BLOCK * TOP_K
    assert stats["union", small].bytes_fetched > stats["per_group", small].bytes_fetched > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_the_formula(device, layout):
    model = msa_twins("four_groups", device).enabled
    cache = HiSparseCache(model, layout=layout, device_buffer_tokens=160)
    _logits(model, prompt(3, 300, device=device), cache)
    memory, token = cache.memory(), (16 + 16) * 4
    assert memory.buffer_bytes == 3 * 4 * HOSTED * 160 * token
    assert memory.host_bytes == 3 * 4 * HOSTED * 304 * token
    capacity = cache.capacity
    assert 300 <= capacity <= 300 + 1024 + 300 // 8
    assert memory.selector_bytes == 3 * HOSTED * capacity * 16 * 4
    pointers = [layer.state.keys.data_ptr() for layer in cache.hosted_layers]
    for seed in range(30):
        _logits(model, prompt(3, 1, seed=seed, device=device), cache)
    assert pointers == [layer.state.keys.data_ptr() for layer in cache.hosted_layers]
    assert f"layout={layout!r}" in repr(cache)


def test_verify_finds_a_slot_that_is_off(model):
    for layout in LAYOUTS:
        cache = HiSparseCache(model, layout=layout, verify=True)
        _logits(model, prompt(1, 200, device=str(model.device)), cache)
        layer = cache.hosted_layers[0]
        layer.buffer.data[0, :, -5] += 1  # the values of the last head of a record
        layer.buffer.data[-1, :, -5] += 1
        with pytest.raises(RuntimeError, match=r"verify: layer 1, lane \d+, record"):
            _logits(model, prompt(1, 1, device=str(model.device)), cache)


# ---------------------------------------------------------------------- images


def _with_images(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Prompts that hold two images of 4 x 4 patches each, merged to 4 tokens."""
    ids = prompt(batch, length)
    for start in (20, 130):
        ids[:, start : start + 4] = IMAGE
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch * 2 * 16, 3 * 2 * 2, generator=generator)
    grid = torch.tensor([[1, 4, 4]]).repeat(batch * 2, 1)
    return {"ids": ids, "pixel_values": pixels, "image_grid_thw": grid}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_then_text(device, layout):
    """A prompt with images, then a further turn of text; the pictures show in the answer."""
    native, enabled = msa_twins("images", device)
    given = {name: tensor.to(device) for name, tensor in _with_images(2, 300).items()}
    ids = given.pop("ids")

    def run(model, cache, images):
        session = Session(model, lambda: cache)
        text = session.generate(ids, cache, **images)
        session.generate(torch.cat([text, session.prompt(2, 9, seed=1)], dim=1), cache)
        return session

    expected, ours = (
        run(native, _own_cache(native), given),
        run(enabled, HiSparseCache(enabled, layout=layout), given),
    )
    for text, wanted in zip(ours.texts, expected.texts, strict=True):
        assert torch.equal(text, wanted)
    for logits, wanted in zip(ours.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    other = run(enabled, HiSparseCache(enabled), given | {"pixel_values": -given["pixel_values"]})
    assert not torch.equal(other.logits[0], ours.logits[0])


def test_the_size_of_an_image_is_no_obstacle_to_a_graph():
    """`generate` passes it on to every step, where nothing reads it."""
    model = msa_twins("images", "cpu").enabled
    cache = HiSparseCache(model)
    step = {"input_ids": prompt(1, 1), "image_grid_thw": torch.ones(1, 3)}
    assert _only_known(cache, step)
    assert not _only_known(cache, step | {"pixel_values": torch.ones(1)})
