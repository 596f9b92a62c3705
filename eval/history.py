"""A random history in any cache, without a prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from hf_hisparse import HiSparseCache, LayerHistory, Quest
from hf_hisparse.models.family import Family, family_of, native_layers
from hf_hisparse.models.kv_shape import KvShape


@torch.no_grad()
def fill(
    cache: Cache,
    model: PreTrainedModel,
    batch: int,
    tokens: int,
    recent: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Put `tokens` random tokens per row into every layer of an empty cache, as a prefill would leave them.

    All layers of one shape and all batch rows get the same numbers, made once: what a step takes does not depend on them.

    Parameters
    ----------
    cache : Cache
        A `HiSparseCache`, or one of transformers' own.
    recent : mapping, optional
        Hosted layer of a `HiSparseCache` -> what it read last, int64 ``[lanes, n]`` (see `LayerHistory`).
    """
    histories = _random(model, batch, tokens, isinstance(cache, HiSparseCache), recent or {})
    bar = tqdm(histories, total=len(cache.layers), desc="history", leave=False)
    if isinstance(cache, HiSparseCache):
        cache.put_history(bar)
        return
    for index, history in enumerate(bar):
        cache.update(history.keys, history.values, index)
        if history.indexer_keys is None:
            continue
        layer = cache.layers[index]
        if hasattr(layer, "update_indexer"):
            layer.update_indexer(history.indexer_keys)
        else:
            layer.update_index(history.indexer_keys[:, None])


def family(model: PreTrainedModel) -> Family:
    """What a `HiSparseCache` knows of the model; with a default `Quest` if it does not select by itself."""
    layers = native_layers(model.config)
    selects = any(hasattr(layer, "update_indexer") or hasattr(layer, "update_index") for layer in layers)
    return family_of(model.config, None if selects else Quest(), "absorb", "per_group", 0, True)


def _random(
    model: PreTrainedModel, batch: int, tokens: int, hosted: bool, recent: Mapping[int, torch.Tensor]
) -> Iterator[LayerHistory]:
    made: dict[KvShape, LayerHistory] = {}
    known = family(model)

    def rows(heads: int, width: int) -> torch.Tensor:
        one = torch.randn((1, heads, tokens, width), device=model.device, dtype=model.dtype)
        return one.expand(batch, -1, -1, -1)

    for index in range(len(native_layers(model.config))):
        shape = known.kv_shape(index, hosted)
        if shape not in made:
            keys, values = rows(shape.heads, shape.key_width), rows(shape.heads, shape.value_width)
            indexer_keys = rows(1, shape.index_width)[:, 0] if shape.index_width else None
            made[shape] = LayerHistory(keys, values, indexer_keys)
        yield made[shape]._replace(recent=recent.get(index))
