"""Which family a model belongs to: what its cache hosts, and with what kind of layer."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..history_stream import HistoryStream
from ..hosted_layer import HostedLayer, LayerSettings
from ..padding import Padding
from ..resident_layer import ResidentLayer
from ..selector import Selector
from .dense import DenseLayer
from .encoders import refuse_encoders
from .gqa import GqaLayer
from .kv_shape import KvShape, gqa_shape
from .mla import MLA_MODES, LatentFamily
from .msa import LAYOUTS, BlockFamily


class Family(Protocol):
    """What a cache has to know of the models it serves.

    Attributes
    ----------
    page_size : int
        Tokens per record.
    top_k : int
        Records that one query reads, per lane.
    budget : str
        How a message names the tokens that one query reads.
    hosted : list of int
        The layers to host.
    dense : list of int
        Layers that may be hosted as well, although they read everything.
    """

    page_size: int
    top_k: int
    budget: str
    hosted: list[int]
    dense: list[int]

    def layers(self, settings: LayerSettings, padding: Padding) -> list[Any]:
        """The layers of an empty cache; those not hosted are transformers' own."""

    def connect(self, layers: list[Any]) -> None:
        """Let copies of these layers know each other."""

    def kv_shape(self, index: int, hosted: bool) -> KvShape:
        """What layer `index` is handed in a `HiSparseCache`, or, if not `hosted`, in transformers' own caches."""


class SelectorFamily:
    """Decoders with grouped-query attention, for which a `Selector` chooses."""

    def __init__(
        self,
        decoder: PreTrainedConfig,
        layers: list[Any],
        hosted: list[int],
        dense: list[int],
        selector: Selector,
    ) -> None:
        self._decoder = decoder
        self.selector = selector
        self.page_size, self.top_k = selector.page_size, selector.top_k
        self.budget = f"the selector's budget of {self.page_size * self.top_k} tokens ({self.top_k} pages)"
        self.hosted, self.dense = hosted, dense
        self._layers = layers

    def layers(self, settings: LayerSettings, padding: Padding) -> list[Any]:
        """See `Family.layers`."""
        layers = list(self._layers)
        for index in self.hosted:
            layers[index] = GqaLayer(index, settings, padding, self.selector)
        for index in self.dense if settings.dense_records is not None else ():
            layers[index] = DenseLayer(index, settings, padding, self.selector)
        return layers

    def connect(self, layers: list[Any]) -> None:
        """No layer needs another."""

    def kv_shape(self, index: int, hosted: bool) -> KvShape:
        """See `Family.kv_shape`."""
        return gqa_shape(self._decoder, index)

    def __repr__(self) -> str:
        return repr(self.selector)


def native_layers(config: PreTrainedConfig) -> list[Any]:
    """transformers' own cache layers for this configuration."""
    # The file of some models registers a kind of layer, and a configuration alone has not loaded it.
    with contextlib.suppress(ImportError):
        importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    try:
        return list(DynamicCache(config=config).layers)
    except KeyError as error:
        raise ValueError(
            f"HiSparseCache: transformers knows no cache layer {error}, which {config.model_type!r} asks for: use the model's "
            "own cache"
        ) from error


def refuse_sinks(model: torch.nn.Module, family: Family) -> None:
    """Refuse a model whose attention has sinks, which decode over selected pages does not compute (ValueError)."""
    if isinstance(family, SelectorFamily) and any(
        name.endswith(".sinks") for name, _ in model.named_parameters()
    ):
        raise ValueError(
            f"HiSparseCache: the attention of {type(model).__name__} has sinks (s_aux=), which is not supported: use DynamicCache"
        )


def new_layers(
    config: PreTrainedConfig, family: Family, settings: LayerSettings, padding: Padding
) -> list[Any]:
    """The layers of an empty cache, none of which another cache has."""
    native = native_layers(config)
    layers = family.layers(settings, padding)
    for index, layer in enumerate(layers):
        if not isinstance(layer, HostedLayer):
            dense = type(native[index]) is DynamicLayer
            layers[index] = ResidentLayer(index, padding) if dense else native[index]
    return layers


def hosted_of(layers: list[Any]) -> list[HostedLayer]:
    """Those of a cache's layers whose KV lives on the host."""
    return [layer for layer in layers if isinstance(layer, HostedLayer)]


def own_of(layers: list[Any]) -> list[HostedLayer | ResidentLayer]:
    """Those of a cache's layers that are not transformers' own."""
    return [layer for layer in layers if isinstance(layer, HostedLayer | ResidentLayer)]


def connect(family: Family, layers: list[Any]) -> None:
    """Let the layers of one cache know what they share."""
    family.connect(layers)
    hosted = hosted_of(layers)
    stream = HistoryStream(hosted)
    for layer in hosted:
        layer.stream = stream


def checked_buffer(tokens: int | None, family: Family) -> int:
    """Tokens of a hot buffer, per lane; by default twice what a query reads (ValueError if they do not fit the family)."""
    budget, size = family.top_k * family.page_size, family.page_size
    if tokens is None:
        return 2 * budget
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < budget or tokens % size:
        least = -(-max(tokens, budget) // size) * size if isinstance(tokens, int) else 2 * budget
        raise ValueError(
            f"device_buffer_tokens={tokens!r}, must be a whole number, a multiple of the page size {size} and at least "
            f"{family.budget}: take {least}"
        )
    return tokens


def family_of(
    config: PreTrainedConfig,
    selector: Selector | None,
    mla_mode: str,
    layout: str,
    prefill_memory: int,
    prefetch: bool,
) -> Family:
    """The family of the model of this configuration; the last four are settings of `LatentSettings` and `BlockSettings`.

    Raises
    ------
    ValueError
        If the model is not supported, or the settings do not fit it.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"HiSparseCache serves decoder-only models, {config.model_type!r} is an encoder-decoder: use its own cache"
        )
    decoder = config.get_text_config(decoder=True)
    refuse_encoders(config, decoder)
    if mla_mode not in MLA_MODES:
        raise ValueError(f"mla_mode={mla_mode!r}, must be one of {MLA_MODES}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}, must be one of {LAYOUTS}")
    if any(getattr(decoder, "kv_sharing_modes", None) or ()) or getattr(
        decoder, "num_kv_shared_layers", None
    ):
        raise ValueError(
            f"HiSparseCache: layers of {decoder.model_type!r} share keys and values, which is not supported: use DynamicCache"
        )
    layers = native_layers(config)
    blocks = [i for i, layer in enumerate(layers) if hasattr(layer, "update_index")]
    latent = any(hasattr(layer, "update_indexer") for layer in layers)
    if mla_mode != "absorb" and not latent:
        raise ValueError(
            f"mla_mode={mla_mode!r} is for models with latent attention, {decoder.model_type!r} has none"
        )
    if layout != "per_group" and not blocks:
        raise ValueError(
            f"layout={layout!r} is for models that select blocks per KV head (MiniMax-M3), {decoder.model_type!r} does not: "
            "leave layout out"
        )
    if latent:
        indexed = _latent_layers(decoder, layers, selector)
        return LatentFamily(
            decoder, layers, indexed, mla_mode=mla_mode, prefill_memory=prefill_memory, prefetch=prefetch
        )
    if blocks:
        _check_blocks(decoder, selector)
        return BlockFamily(decoder, layers, blocks, layout, prefill_memory)
    return _selector_family(decoder, layers, selector)


def _latent_layers(decoder: PreTrainedConfig, layers: list[Any], selector: Selector | None) -> list[int]:
    indexed = [i for i, layer in enumerate(layers) if hasattr(layer, "update_indexer")]
    # glm5_next selects pools of tokens (index_kpool) and never hands a selection to the attention function.
    needed = ("index_topk", "kv_lora_rank", "qk_rope_head_dim")
    if not indexed or hasattr(decoder, "index_kpool") or any(not hasattr(decoder, name) for name in needed):
        raise _unknown_selection(decoder)
    _check_no_selector(decoder, selector, f"index_topk={decoder.index_topk}")
    return indexed


def _check_blocks(decoder: PreTrainedConfig, selector: Selector | None) -> None:
    needed = ("index_block_size", "index_topk_blocks", "index_n_heads", "num_key_value_heads")
    if any(not hasattr(decoder, name) for name in needed):
        raise _unknown_selection(decoder)
    _check_no_selector(decoder, selector, f"index_topk_blocks={decoder.index_topk_blocks}")
    if decoder.num_key_value_heads % decoder.index_n_heads:
        raise ValueError(
            f"HiSparseCache: {decoder.model_type!r} with index_n_heads={decoder.index_n_heads} selections for "
            f"num_key_value_heads={decoder.num_key_value_heads} KV heads; supported is a divisor: use DynamicCache"
        )


def _unknown_selection(decoder: PreTrainedConfig) -> ValueError:
    return ValueError(
        f"HiSparseCache: {decoder.model_type!r} selects by itself in a way that this version does not support: use "
        "DynamicCache"
    )


def _check_no_selector(decoder: PreTrainedConfig, selector: Selector | None, own: str) -> None:
    if selector is not None:
        raise ValueError(
            f"HiSparseCache: selector={selector!r}, but {decoder.model_type!r} brings its own selection ({own}): leave the "
            "selector out"
        )


def _selector_family(
    decoder: PreTrainedConfig, layers: list[Any], selector: Selector | None
) -> SelectorFamily:
    if softcap := getattr(decoder, "attn_logit_softcapping", None):
        raise ValueError(
            f"HiSparseCache: the attention of {decoder.model_type!r} has softcap={softcap}, which is not supported: use "
            "DynamicCache"
        )
    if selector is None:
        raise ValueError(
            "HiSparseCache: selector=None, but the model brings no selection of its own: pass one, for example "
            "selector=Quest(token_budget=2048)"
        )
    if isinstance(selector, type) or not isinstance(selector, Selector):
        raise ValueError(
            f"HiSparseCache: selector={selector!r} does not implement hf_hisparse.Selector (page_size, top_k, "
            "dense_layers, new_state); pass for example Quest(token_budget=2048)"
        )
    if getattr(decoder, "kv_lora_rank", None):
        raise ValueError(
            f"HiSparseCache: {decoder.model_type!r} caches latents and selects nothing by itself, which this version does not "
            "support: use DynamicCache"
        )
    # Exactly DynamicLayer: its subclasses keep a window or a state of their own and stay native.
    full = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    hosted = [i for i in full if i >= selector.dense_layers]
    if not hosted:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        lacks = f"HiSparseCache: {decoder.model_type!r} has {len(layers)} layers ({kinds}), none of which is full attention"
        if not full:
            raise ValueError(f"{lacks}, the only kind whose KV grows with all tokens: use DynamicCache")
        raise ValueError(
            f"{lacks} beyond the first dense_layers={selector.dense_layers}: lower dense_layers, to at most {full[-1]}, or use "
            "DynamicCache"
        )
    dense = [i for i in full if i < selector.dense_layers]
    return SelectorFamily(decoder, layers, hosted, dense, selector)
