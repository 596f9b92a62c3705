"""What tells one model from others, and where its layers compute: also of a model whose weights accelerate has offloaded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .enable import decoders_of
from .plain import plain_parts

_SAMPLES = 64  # elements of each weight that tell one model from another
# What a configuration says that does not change what a model computes.
_INCIDENTAL = (
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
    "dtype",
    "architectures",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
)


def model_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from others: its type, and checksums of its configuration and of some elements of each weight."""
    return config_fingerprint(model.config) | {"weights": _checksum_of("".join(_samples(model)))}


def config_fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    """The same without the weights."""
    essential = json.dumps(_essential(config.to_dict()), sort_keys=True, default=str)
    return {"type": config.model_type, "config": _checksum_of(essential), "weights": None}


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Of a contiguous tensor on the CPU: its type, shape and bytes."""
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(kind))


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer of the decoder attends.

    Raises
    ------
    ValueError
        If a layer's weights are on the meta device, with nothing that brings them elsewhere.
    """
    modules = (module for decoder in decoders_of(model) for module in decoder.modules())
    devices = {}
    for module in modules:
        index, parameter = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if not isinstance(index, int) or parameter is None:
            continue
        places = (hook.execution_device for part in module.modules() for hook in _hooks(part))
        place = next((place for place in places if place is not None), None) if parameter.is_meta else None
        devices[index] = parameter.device if place is None else torch.device(place)
        if devices[index].type == "meta":
            raise ValueError(
                f"{type(model).__name__}: the weights of layer {index} are on the meta device, and no accelerate hook brings "
                "them to another: load the model with its weights"
            )
    return devices


def _hooks(module: torch.nn.Module) -> list[Any]:
    """Accelerate's hooks on a module that bring its weights to a device."""
    hook = getattr(module, "_hf_hook", None)
    return [one for one in getattr(hook, "hooks", [hook]) if hasattr(one, "execution_device")]


def _checksum_of(text: str) -> int:
    return zlib.crc32(text.encode())


def _essential(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {str(name): _essential(value) for name, value in config.items() if name not in _INCIDENTAL}


def _samples(model: PreTrainedModel) -> Iterator[str]:
    for name, weight in _weights(model):
        for part in plain_parts(weight):
            flat = part.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].cpu().contiguous()
            yield f"{name} {list(part.shape)} {tensor_checksum(some)}\n"


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and buffers by name, each once, those that are offloaded as well."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, weight in sorted([*model.named_parameters(), *model.named_buffers()]):
        if not weight.is_meta:
            yield name, weight
        elif name not in tied:  # offloading makes two of them
            path, _, own = name.rpartition(".")
            maps = (getattr(hook, "weights_map", None) for hook in _hooks(model.get_submodule(path)))
            found = next((known[own] for known in maps if known is not None), None)
            if found is not None:
                yield name, found
