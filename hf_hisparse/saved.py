"""A cache in a folder: one expensive prefill, many runs.

The folder holds a safetensors file per layer, and ``cache.json``, which says what they are, what made them, and the checksum
of each tensor.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .fingerprint import layer_devices, model_fingerprint, tensor_checksum
from .host_memory import format_bytes
from .hosted_layer import HostedLayer
from .models.dense import DenseLayer
from .models.quest import Quest
from .resident_layer import ResidentLayer
from .selector import Selector
from .token_shape import TokenShape

if TYPE_CHECKING:
    from .cache import HiSparseCache

_FORMAT = 1
_INDEX = "cache.json"
_THREADS = 4  # that compute checksums


def save(cache: HiSparseCache, path: str | Path) -> None:
    """See `HiSparseCache.save`."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"cache.save: {path} exists already: remove it, or save elsewhere")
    if not cache.get_seq_length():
        raise ValueError("cache.save: the cache holds no tokens")
    _check_space(cache, path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        _write(cache, unfinished)
        os.rename(unfinished, path)
    except BaseException:  # an interrupt, too, leaves nothing
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_space(cache: HiSparseCache, path: Path) -> None:
    memory = cache.memory()
    needed = memory.host_bytes + memory.selector_bytes + memory.native_bytes
    place = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            f"cache.save: {path} takes more than {format_bytes(needed)}, {format_bytes(free)} is free there"
        )


def _write(cache: HiSparseCache, folder: Path) -> None:
    selector = cache.selector
    settings = dataclasses.asdict(selector) if type(selector) is Quest else {}
    content: dict[str, Any] = {
        "format": _FORMAT,
        "transformers": transformers.__version__,
        "model": cache.fingerprint,
        "selector": None if selector is None else _described(selector) | {"settings": settings},
        "layout": cache.layout,
        "tokens": cache.get_seq_length(),
        "layers": [],
    }
    parts = [
        (f"layer-{index:05}", layer, cache._states.get(index)) for index, layer in enumerate(cache.layers)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, layer, states in tqdm(parts, desc="saving", unit="layer"):
            tensors, values = _parts_of(layer)
            content["layers"].append(
                {
                    "kind": type(layer).__name__,
                    "states": states and [*states[:4], str(states[4]).removeprefix("torch.")],
                    "values": values,
                    "checksums": _store(threads, folder / f"{name}.safetensors", tensors),
                }
            )
        masks, noted = cache.padding.saved(cache.get_seq_length())
        content["padding"] = {
            "noted": noted,
            "checksums": _store(threads, folder / "padding.safetensors", masks),
        }
    body = json.dumps(content)
    with (folder / _INDEX).open("w") as file:
        json.dump({"checksum": zlib.crc32(body.encode()), "content": body}, file)
        file.flush()
        os.fsync(file.fileno())


def _store(threads: ThreadPoolExecutor, file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Write tensors, unless there are none; their checksums."""
    if not tensors:
        return {}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = threads.map(tensor_checksum, tensors.values())  # beside writing
    save_file(tensors, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())
    return dict(zip(tensors, sums, strict=True))


def _parts_of(layer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a layer, and its plain values."""
    if isinstance(layer, HostedLayer | ResidentLayer):
        return layer.saved(), {}
    held = vars(layer)
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    plain = {
        name: value for name, value in held.items() if value is None or type(value) in (bool, int, float)
    }
    rest = {name for name, value in held.items() if name not in (*tensors, *plain, "device", "dtype")}
    if rest or (tensors and not isinstance(layer, DynamicLayer)):
        raise ValueError(
            f"cache.save: layers of kind {type(layer).__name__} cannot be saved ({', '.join(sorted(rest))})"
        )
    return tensors, plain


# ---------------------------------------------------------------------- loading


def read_index(path: Path) -> dict[str, Any]:
    """What is said of a saved cache.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none, or it is damaged, or of another version.
    """
    if not (path / _INDEX).is_file():
        raise FileNotFoundError(f"{path} holds no saved HiSparseCache: {_INDEX} is missing")
    try:
        outer = json.loads((path / _INDEX).read_text())
        if zlib.crc32(outer["content"].encode()) != outer["checksum"]:
            raise ValueError("wrong checksum")
        content = json.loads(outer["content"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path / _INDEX, error) from error
    if content["format"] != _FORMAT or content["transformers"] != transformers.__version__:
        raise ValueError(
            f"{path} was saved by transformers {content['transformers']} in format {content['format']}, this is transformers "
            f"{transformers.__version__} and format {_FORMAT}: prefill and save again"
        )
    return content


def check_model(path: Path, content: dict[str, Any], model: PreTrainedModel) -> None:
    """Refuse another model than that which filled the cache (ValueError)."""
    saved, found = content["model"], model_fingerprint(model)
    for name in ("type", "config", "weights"):
        if saved[name] is not None and saved[name] != found[name]:
            raise ValueError(
                f"{path} was saved with another model: its {name} {'is' if name == 'type' else 'gave the checksum'} "
                f"{saved[name]}, that of this {type(model).__name__} {found[name]}"
            )


def selector_for(path: Path, content: dict[str, Any], selector: Selector | None) -> Selector | None:
    """The selector to load with: `selector` if it fits what was saved, or that itself."""
    saved = content["selector"]
    if saved is None:
        return selector  # which the family refuses
    if selector is None and saved["class"] != Quest.__name__:
        raise ValueError(
            f"{path} was saved with a selector of class {saved['class']}: give it to load as well"
        )
    if selector is None:
        return Quest(**saved["settings"])
    if isinstance(selector, type) or not isinstance(selector, Selector):
        return selector  # which the family refuses
    found = _described(selector)
    wrong = [f"{name} {saved[name]!r}, not {found[name]!r}" for name in found if saved[name] != found[name]]
    if wrong:
        raise ValueError(
            f"{path} was saved with another selector than {selector!r}: {'; '.join(wrong)}. Give one that agrees in that, or "
            "none for the one it was saved with"
        )
    return selector


def restore(cache: HiSparseCache, path: Path, content: dict[str, Any], model: PreTrainedModel) -> None:
    """Fill an empty cache (ValueError if a file is damaged)."""
    kinds = [type(layer).__name__ for layer in cache.layers]
    saved = [layer["kind"] for layer in content["layers"]]
    if list(map(_loaded_alike, kinds)) != list(map(_loaded_alike, saved)):
        raise ValueError(f"{path} was saved with layers {saved}, this cache has {kinds}")
    if content["layout"] != cache.layout:
        raise ValueError(
            f"{path} was saved with layout={content['layout']!r}, this cache has layout={cache.layout!r}: load it with the former"
        )
    devices = layer_devices(model)
    tokens = content["tokens"]
    held = [
        _shape(layer["states"], devices.get(index, model.device))
        for index, layer in enumerate(content["layers"])
    ]
    shapes = [shape.blank(tokens) for shape in held]
    cache.room.make(*shapes[cache.hosted_layers[0].layer_idx])
    parts = [
        (path / f"layer-{index:05}.safetensors", layer["checksums"])
        for index, layer in enumerate(content["layers"])
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        read = threads.map(lambda part: _read(*part), parts)
        for index, tensors in enumerate(tqdm(read, desc="loading", unit="layer", total=len(parts))):
            layer, blank = cache.layers[index], shapes[index]
            if isinstance(layer, HostedLayer | ResidentLayer):
                layer.load(*blank, tensors)
            else:
                _load_native(layer, blank, tensors, content["layers"][index]["values"])
    masks = _read(path / "padding.safetensors", content["padding"]["checksums"])
    cache.padding.load(masks, content["padding"]["noted"], cache.capacity, shapes[0][0].device)
    cache._states = {
        index: shape
        for index, (layer, shape) in enumerate(zip(content["layers"], held, strict=True))
        if layer["states"]
    }


def _loaded_alike(kind: str) -> str:
    """One name for dense layers on the host and on the device: what either has saved the other loads."""
    return ResidentLayer.__name__ if kind == DenseLayer.__name__ else kind


def _shape(states: list[Any] | None, device: torch.device) -> TokenShape:
    """That of what a layer held."""
    batch, heads, key_width, value_width, dtype = states or (0, 0, 0, 0, "float32")
    return TokenShape(batch, heads, key_width, value_width, getattr(torch, dtype), device)


def _read(file: Path, checksums: dict[str, int]) -> dict[str, torch.Tensor]:
    """Memory-mapped tensors, after a look at all of their bytes."""
    if not checksums:
        return {}
    try:
        with safe_open(file, "pt") as held:
            tensors = {name: held.get_tensor(name) for name in checksums}
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from error
    for name, tensor in tensors.items():
        if tensor_checksum(tensor) != checksums[name]:
            raise _damaged(file, f"wrong checksum of {name}")
    return tensors


def _damaged(file: Path, reason: object) -> ValueError:
    return ValueError(f"{file} is damaged or incomplete ({reason}): prefill and save again")


def _load_native(
    layer: Any,
    blank: tuple[torch.Tensor, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    values: dict[str, Any],
) -> None:
    if tensors:
        layer.lazy_initialization(*blank)
    for name, value in values.items():
        setattr(layer, name, value)
    for name, tensor in tensors.items():
        setattr(layer, name, tensor.to(blank[0].device, copy=True))


def _described(selector: Selector) -> dict[str, Any]:
    """What of a selector decides what is stored."""
    return {
        "class": type(selector).__name__,
        "page_size": selector.page_size,
        "dense_layers": selector.dense_layers,
    }
