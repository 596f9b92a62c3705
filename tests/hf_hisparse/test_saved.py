"""A saved cache goes on as if it had never left, or is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import zlib

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from hf_hisparse import HiSparseCache, Quest, enable
from tests.dsa_models import DSA_MODELS, dsa_twins
from tests.models import SUPPORTED, build, perturbed, prompt
from tests.msa_models import MSA_MODELS, msa_twins
from tests.quantised import quantise

SELECTOR = Quest(32, 4)


def _prefilled(model, selector, batch: int = 2, padded: bool = True, **settings) -> HiSparseCache:
    """A cache after a prefill and some decode calls."""
    device = str(model.device)
    cache = HiSparseCache(model, selector, **settings)
    with torch.no_grad():
        ids = prompt(batch, 203, device=device)
        mask = torch.ones_like(ids)
        mask[0, :7] = 0 if padded else 1
        model(ids, attention_mask=mask, past_key_values=cache)
        for rows in (5, 1):
            mask = torch.nn.functional.pad(mask, (0, rows), value=1)
            model(prompt(batch, rows, rows, device), attention_mask=mask, past_key_values=cache)
    return cache


def _continued(model, cache, padded: bool = True) -> torch.Tensor:
    """Logits and tokens of a long call, a short one and greedy steps."""
    batch, device = cache._batch, str(model.device)
    mask = torch.ones((batch, cache.get_seq_length()), dtype=torch.long, device=device)
    mask[0, :7] = 0 if padded else 1
    logits = []
    with torch.no_grad():
        for rows in (40, 3, *[1] * 12):
            ids = prompt(batch, rows, rows, device) if rows > 1 else logits[-1][:, -1:].argmax(-1)
            mask = torch.nn.functional.pad(mask, (0, rows), value=1)
            logits.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def _host_records(cache: HiSparseCache) -> list[torch.Tensor]:
    return [layer.pool.saved(layer.layout.count(layer.get_seq_length())) for layer in cache.hosted_layers]


def _assert_same(model, cache: HiSparseCache, loaded: HiSparseCache, padded: bool = True) -> None:
    assert loaded.get_seq_length() == cache.get_seq_length()
    for one, other in zip(_host_records(loaded), _host_records(cache), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(_continued(model, loaded, padded), _continued(model, copy.deepcopy(cache), padded))


@pytest.mark.parametrize("name", [*SUPPORTED, "glm_FSSF", "v32", "dots3_note", "mistral_large4"])
def test_round_trip(twins, device, name, tmp_path):
    if name not in SUPPORTED and name not in DSA_MODELS:
        pytest.skip("not in this transformers")
    model = (twins(name, device) if name in SUPPORTED else dsa_twins(name, device)).enabled
    selector = SELECTOR if name in SUPPORTED else None
    cache = _prefilled(model, selector)
    cache.save(tmp_path / "prefix")
    loaded = HiSparseCache.load(tmp_path / "prefix", model, verify=True)
    assert loaded._states == cache._states
    _assert_same(model, cache, loaded)
    assert not list(tmp_path.glob(".*"))


def test_generate_goes_on(model, tmp_path):
    """From a process that has another copy of the model, with other buffers and another budget of tokens."""
    ids = prompt(1, 300, device=str(model.device))
    cache = HiSparseCache(model, SELECTOR)
    model.generate(ids, past_key_values=cache, max_new_tokens=2)
    cache.crop(300 - cache.get_seq_length())
    cache.save(tmp_path / "prefix")
    longer = torch.cat([ids, prompt(1, 20, 1, str(model.device))], dim=1)
    fresh = build("qwen3").to(model.device)
    loaded = HiSparseCache.load(tmp_path / "prefix", fresh, device_buffer_tokens=400)
    expected = model.generate(longer, past_key_values=cache, max_new_tokens=30)
    assert torch.equal(fresh.generate(longer, past_key_values=loaded, max_new_tokens=30), expected)
    wider = HiSparseCache.load(tmp_path / "prefix", fresh, Quest(64, 4), device_memory="4MiB")
    fresh.generate(longer, past_key_values=wider, max_new_tokens=30)
    assert wider.stats().selected > loaded.stats().selected


@pytest.mark.parametrize("layout", ["per_group", "union"])
@pytest.mark.parametrize("name", MSA_MODELS)
def test_round_trip_of_blocks(device, name, layout, tmp_path):
    model = msa_twins(name, device).enabled
    cache = _prefilled(model, None, padded=False, layout=layout)
    cache.save(tmp_path / "prefix")
    loaded = HiSparseCache.load(tmp_path / "prefix", model, layout=layout, verify=True)
    _assert_same(model, cache, loaded, padded=False)


@pytest.mark.parametrize("rows", [[1, 0, 1], [1, 1], [0], [2, 0, 1]])
def test_rearranged_rows(model, rows, tmp_path):
    cache = _prefilled(model, SELECTOR, 3, padded=False)
    cache.reorder_cache(torch.tensor([2, 0, 0], device=model.device))
    cache.batch_select_indices(torch.tensor(rows))
    cache.save(tmp_path / "prefix")
    _assert_same(model, cache, HiSparseCache.load(tmp_path / "prefix", model), padded=False)


def test_a_loaded_cache_can_be_saved(model, tmp_path):
    cache = _prefilled(model, SELECTOR)
    cache.save(tmp_path / "one")
    HiSparseCache.load(tmp_path / "one", model).save(tmp_path / "two")
    for file in (tmp_path / "one").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_from_a_configuration(model, tmp_path):
    """Such a cache does not know the weights; its sizes are checked all the same."""
    full = _prefilled(model, SELECTOR)
    cache = HiSparseCache(model.config, SELECTOR)
    with torch.no_grad():
        model(prompt(1, 50, device=str(model.device)), past_key_values=cache)
    cache.save(tmp_path / "prefix")
    HiSparseCache.load(tmp_path / "prefix", model)
    assert full.fingerprint["weights"] is not None


OFFLOADS = {
    "cpu": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_an_offloaded_model(offload, tied, tmp_path):
    """Its weights are on the meta device; it is the same model, and its layers attend where its hooks bring them."""
    config = build("qwen3").config
    config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    other = perturbed(model, 1e-3)
    cache = _prefilled(model, SELECTOR)
    cache.save(tmp_path / "prefix")
    offloaded = OFFLOADS[offload](copy.deepcopy(model), str(tmp_path / "weights"))
    assert all(weight.is_meta for weight in offloaded.parameters())
    loaded = HiSparseCache.load(tmp_path / "prefix", offloaded)
    assert {layer.position.device.type for layer in loaded.hosted_layers} == {"cpu"}
    # The masks of tokens held come along, so left padding must still be known.
    ids, mask = prompt(2, 40), torch.ones((2, cache.get_seq_length() + 40), dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad():
        ours = offloaded(ids, attention_mask=mask, past_key_values=loaded).logits
        assert torch.equal(ours, model(ids, attention_mask=mask, past_key_values=cache).logits)
    loaded.save(tmp_path / "again")
    HiSparseCache.load(tmp_path / "again", model)
    with pytest.raises(ValueError, match="another model: its weights"):
        HiSparseCache.load(tmp_path / "prefix", OFFLOADS[offload](other, str(tmp_path / "others")))


def test_a_quantised_model(model, tmp_path):
    """Its weights are compared by what they are made of."""
    quantise(model)
    cache = _prefilled(model, SELECTOR)
    cache.save(tmp_path / "prefix")
    _assert_same(model, cache, HiSparseCache.load(tmp_path / "prefix", model))
    for part in ("scale", "qdata"):
        tensor = getattr(model.model.layers[1].mlp.up_proj.weight, part)
        before = tensor.clone()
        tensor.add_(1)
        with pytest.raises(ValueError, match="another model: its weights"):
            HiSparseCache.load(tmp_path / "prefix", model)
        tensor.copy_(before)
    HiSparseCache.load(tmp_path / "prefix", model)


def test_a_model_without_weights(model, saved):
    """A model on the meta device, of which the saved cache knows no weights either, is refused."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match="another model: its weights"):
        HiSparseCache.load(saved, empty)
    outer = json.loads((saved / "cache.json").read_text())
    content = json.loads(outer["content"])
    content["model"]["weights"] = None
    outer["content"] = json.dumps(content)
    outer["checksum"] = zlib.crc32(outer["content"].encode())
    (saved / "cache.json").write_text(json.dumps(outer))
    with pytest.raises(ValueError, match=r"layer 0 are on the meta device.*load the model with its weights"):
        HiSparseCache.load(saved, empty)


@pytest.fixture
def saved(model, tmp_path):
    _prefilled(model, SELECTOR).save(tmp_path / "prefix")
    return tmp_path / "prefix"


def test_another_model(model, saved):
    with pytest.raises(ValueError, match=r"another model: its weights"):
        HiSparseCache.load(saved, perturbed(model, 1e-3))
    with pytest.raises(ValueError, match=r"another model: its type is qwen3.*llama"):
        HiSparseCache.load(saved, build("llama"))
    other = copy.deepcopy(model)
    other.config.rms_norm_eps *= 2
    with pytest.raises(ValueError, match=r"another model: its config"):
        HiSparseCache.load(saved, other)
    with pytest.raises(ValueError, match=r"another model: its weights"):
        HiSparseCache.load(saved, copy.deepcopy(model).to(torch.bfloat16))
    with pytest.raises(ValueError, match="needs the model"):
        HiSparseCache.load(saved, model.config)


@pytest.mark.parametrize("selector", [Quest(32, 8), Quest(32, 4, dense_layers=1)])
def test_another_selector(model, saved, selector):
    with pytest.raises(
        ValueError,
        match=r"another selector than Quest\(.*\): (page_size 4, not 8|dense_layers 2, not 1)\. Give",
    ):
        HiSparseCache.load(saved, model, selector)


class Other:
    """Quest by another name, whose state does not know how to be saved."""

    page_size, top_k, dense_layers = 4, 8, 2

    def new_state(self, shape):
        return _Unsaved(SELECTOR.new_state(shape))


class _Unsaved:
    def __init__(self, state):
        self.state = state

    def __getattr__(self, name):
        if name in ("saved", "state"):
            raise AttributeError(name)
        return getattr(self.state, name)


def test_a_selector_that_cannot_be_saved(model, tmp_path):
    with pytest.raises(ValueError, match="_Unsaved cannot be saved: it needs the methods saved and load"):
        _prefilled(model, Other()).save(tmp_path / "prefix")
    assert not list(tmp_path.iterdir())


def test_a_selector_of_another_class_must_be_given(model, tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine(Quest):
        pass

    _prefilled(model, Mine(32, 4)).save(tmp_path / "prefix")
    with pytest.raises(ValueError, match="selector of class Mine: give it to load as well"):
        HiSparseCache.load(tmp_path / "prefix", model)
    assert HiSparseCache.load(tmp_path / "prefix", model, Mine(32, 4)).get_seq_length() == 209


@pytest.mark.parametrize(
    "name", ["layer-00000.safetensors", "layer-00003.safetensors", "padding.safetensors", "cache.json"]
)
@pytest.mark.parametrize("harm", ["truncated", "flipped in front", "flipped at the end", "gone", "empty"])
def test_damaged_files(model, saved, name, harm):
    file = saved / name
    content = bytearray(file.read_bytes())
    if harm == "truncated":
        content = content[:-9]
    elif harm == "empty":
        content = bytearray()
    else:
        content[20 if harm == "flipped in front" else -20] ^= 1
    file.write_bytes(content)
    if harm == "gone":
        file.unlink()
    error, message = ValueError, "is damaged or incomplete .*prefill and save again"
    if name == "cache.json" and harm == "gone":
        error, message = FileNotFoundError, "holds no saved HiSparseCache"
    with pytest.raises(error, match=message):
        HiSparseCache.load(saved, model)


def test_every_byte_counts(model, saved):
    """A flip of any one bit in a file's data is seen."""
    file = saved / "layer-00002.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for at in torch.randint(header, len(content), (20,)).tolist():
        harmed = bytearray(content)
        harmed[at] ^= 1 << at % 8
        file.write_bytes(harmed)
        with pytest.raises(ValueError, match="damaged"):
            HiSparseCache.load(saved, model)


def test_another_version(model, saved):
    outer = json.loads((saved / "cache.json").read_text())
    body = outer["content"].replace('"format": 1', '"format": 2')
    (saved / "cache.json").write_text(json.dumps({"checksum": zlib.crc32(body.encode()), "content": body}))
    with pytest.raises(ValueError, match="in format 2, this is"):
        HiSparseCache.load(saved, model)


def test_saving_is_all_or_nothing(model, tmp_path, monkeypatch):
    cache = _prefilled(model, SELECTOR)
    written = []

    def fail_at_last(tensors, file):
        written.append(file)
        if len(written) == 3:
            raise KeyboardInterrupt
        file.write_bytes(b"half")

    monkeypatch.setattr("hf_hisparse.saved.save_file", fail_at_last)
    with pytest.raises(KeyboardInterrupt):
        cache.save(tmp_path / "prefix")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    cache.save(tmp_path / "prefix")
    with pytest.raises(FileExistsError, match="exists already"):
        cache.save(tmp_path / "prefix")
    _assert_same(model, cache, HiSparseCache.load(tmp_path / "prefix", model))


def test_too_little_room_on_the_disk(model, tmp_path, monkeypatch):
    cache = _prefilled(model, SELECTOR)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(OSError, match=r"takes more than .* MiB, 1000 B is free"):
        cache.save(tmp_path / "prefix")
    assert not list(tmp_path.iterdir())


def test_nothing_to_save(model, tmp_path):
    with pytest.raises(ValueError, match="holds no tokens"):
        HiSparseCache(model, SELECTOR).save(tmp_path / "prefix")


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ({}, {"host_dense_layers": True, "device_buffer_tokens": 48}),
        ({"host_dense_layers": True}, {}),
        ({"host_dense_layers": True}, {"host_dense_layers": True, "device_buffer_tokens": 400}),
        ({}, {"device_memory": "175KiB"}),
    ],
    ids=["to the host", "from the host", "on the host", "as memory asks"],
)
def test_dense_layers_are_where_the_new_cache_has_them(model, tmp_path, was, becomes):
    cache = _prefilled(model, SELECTOR, **was)
    cache.save(tmp_path / "prefix")
    loaded = HiSparseCache.load(tmp_path / "prefix", model, verify=True, **becomes)
    on_host = becomes.get("host_dense_layers", "device_memory" in becomes)
    assert [layer.dense for layer in loaded.hosted_layers] == [True] * 2 * on_host + [False] * 2
    assert loaded._states == cache._states
    torch.testing.assert_close(
        _continued(model, loaded), _continued(model, copy.deepcopy(cache)), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"host_memory": "64KiB"}, "more host memory"), ({"device_memory": "90KiB"}, "of device memory")],
)
def test_too_little_memory_to_load(model, saved, settings, message):
    with pytest.raises(MemoryError, match=f"209 tokens of 2 rows need .*{message}"):
        HiSparseCache.load(saved, model, **settings)


def test_what_was_built_from_a_configuration_knows_its_configuration(model, tmp_path):
    """The weights it cannot tell; nor can a cache whose model is gone."""
    enable(model)
    cache = HiSparseCache(model.config, SELECTOR)
    with torch.no_grad():
        model(prompt(1, 100, device=str(model.device)), past_key_values=cache)
    cache.save(tmp_path / "prefix")
    HiSparseCache.load(tmp_path / "prefix", model)
    model.config.rope_parameters["rope_theta"] = 123.0
    with pytest.raises(ValueError, match="another model: its config"):
        HiSparseCache.load(tmp_path / "prefix", model)


def test_another_buffer_of_the_model_is_another_model(tmp_path, device):
    """A router's bias, for example, is no parameter."""
    model = copy.deepcopy(dsa_twins("v32", device).enabled)
    model.register_buffer("bias_of_a_router", torch.zeros(4, device=device))
    _prefilled(model, None).save(tmp_path / "prefix")
    model.bias_of_a_router += 1
    with pytest.raises(ValueError, match="another model: its weights"):
        HiSparseCache.load(tmp_path / "prefix", model)


def test_a_configuration_may_differ_in_what_computes_nothing(model, tmp_path):
    _prefilled(model, SELECTOR).save(tmp_path / "prefix")
    model.config.pad_token_id = 7
    HiSparseCache.load(tmp_path / "prefix", model)


@pytest.mark.parametrize("layout", ["per_group", "union"])
def test_another_layout(device, layout, tmp_path):
    model = msa_twins("two_groups", device).enabled
    other = {"per_group": "union", "union": "per_group"}[layout]
    cache = HiSparseCache(model, layout=layout)
    with torch.no_grad():
        model(prompt(1, 100, device=device), past_key_values=cache)
    cache.save(tmp_path / "prefix")
    with pytest.raises(ValueError, match=rf"saved with layout='{layout}', this cache has layout='{other}'"):
        HiSparseCache.load(tmp_path / "prefix", model, layout=other)
