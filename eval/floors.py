"""What a decode step must read and move at least, as rates beside its time, and as the least time that would take."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from eval.environment import memory_bandwidth
from eval.history import family
from hf_hisparse import HiSparseCache
from hf_hisparse.link import link_bandwidth
from hf_hisparse.needs import weight_bytes


def beside(read: float, moved: float, ms: float) -> dict[str, Any]:
    """Columns for a step of `ms` milliseconds that reads so many bytes of GPU memory and moves so many over the link.

    Floors are at the bandwidths measured in this run.
    """
    return {
        "GB_read_per_step": round(read / 1e9, 3),
        "read_GB_per_s": round(read / ms / 1e6, 1),
        "memory_floor_ms": round(1000 * read / memory_bandwidth(), 3),
        "MB_moved_per_step": round(moved / 1e6, 3),
        "moved_GB_per_s": round(moved / ms / 1e6, 2),
        "link_floor_ms": round(1000 * moved / link_bandwidth(), 3),
    }


def bytes_read(model: PreTrainedModel, cache: Cache, batch: int, tokens: int, selected: float = 0.0) -> float:
    """What a decode step of `batch` rows must read of GPU memory: weights, and what attention and selector read.

    Parameters
    ----------
    tokens : int
        Held per row.
    selected : float
        Bytes of the records that hosted layers read.
    """
    native = range(len(cache.layers))
    if isinstance(cache, HiSparseCache):
        hosted = {layer.layer_idx for layer in cache.hosted_layers}
        native = [index for index in native if index not in hosted]
        selected += cache.memory().selector_bytes * tokens / cache.capacity
    known = family(model)
    shapes = [known.kv_shape(index, hosted=False) for index in native]
    token = sum(shape.heads * (shape.key_width + shape.value_width) + shape.index_width for shape in shapes)
    return weights_read(model) + selected + batch * tokens * token * model.dtype.itemsize


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of the weights; of an input embedding of its own a step reads no more than a row."""
    embedding: torch.Tensor = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return weight_bytes(model) - (0 if embedding is head else embedding.nbytes)


def kv_bytes_held(model: PreTrainedModel, batch: int, tokens: int) -> int:
    """Bytes of all keys and values, which offloading moves in every step."""
    known = family(model)
    shapes = [known.kv_shape(index, hosted=False) for index in range(model.config.num_hidden_layers)]
    token = sum(shape.heads * (shape.key_width + shape.value_width) for shape in shapes)
    return batch * tokens * token * model.dtype.itemsize
