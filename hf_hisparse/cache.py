"""`HiSparseCache`: hosted and native layers behind transformers' cache interface."""

from __future__ import annotations

import copy
import logging
import operator
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from . import saved
from .active import COMPILED, current_call, refuse_compiled
from .attention import BASES
from .change import Change
from .enable import enable, text_config
from .fingerprint import config_fingerprint, model_fingerprint
from .graphs import DecodeGraphs
from .host_memory import format_bytes, parse_bytes
from .hosted_layer import HostedLayer, LayerSettings
from .layer_history import LayerHistory
from .limits import DeviceLimit, HostLimit, Limits
from .models.family import (
    checked_buffer,
    connect,
    family_of,
    native_layers,
    new_layers,
    own_of,
    refuse_sinks,
)
from .modes import keeps
from .native import trim
from .needs import model_dtype
from .padding import Padding
from .resident_layer import ResidentLayer
from .room import Room
from .rows import check_rows, selected_rows
from .selector import Selector
from .sizes import Buffers, Sizes, memory_of
from .stats import Memory, Stats
from .token_shape import TokenShape
from .trace import TraceRecorder

logger = logging.getLogger(__name__)

_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
)  # sums are fp32: a wider type would lose what it is for
_CROP_TAKES_LENGTHS = Version(transformers.__version__) < Version("5.20")


class HiSparseCache(Cache):
    """A cache that keeps the main KV in host memory and what is hot on the GPU.

    Every token's keys and values stay available in (pinned) host memory; each hosted layer has a hot buffer of
    `device_buffer_tokens` per lane (batch row and KV head) on the GPU. Decode steps read what the selector names,
    from the buffer where it is there and from the host where it is not: the output is that of the same sparse
    attention with everything on the GPU. Prefill is dense and exact.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        A model is enabled (see `enable`); with a config you enable the model yourself.
    selector : Selector
        Names what a query reads, for example ``Quest()``. None for a model that selects itself, as DeepSeek-V3.2, GLM-5 and
        MiniMax-M3 do: then prefill is as sparse as the model makes it.
    device_buffer_tokens : int, optional
        Tokens per lane that each hosted layer keeps on the GPU: a multiple of the selector's page size, at least its
        budget (what the model itself selects). Default: twice the budget.
    device_memory : int or str, optional
        Instead: the most GPU memory that this cache may hold, in bytes or as text ("6GiB"), with all that it keeps there.
        Everything stays resident until that is full, then the least recently used leaves; as what grows with the history
        grows, the hot buffers shrink. When they hold no more than a query reads, Quest's dense layers move to the host and keep
        as many of their first records on the GPU as there is room for; each step then reads the others over the link, and the
        log says how much that is. "auto" is what is free beside the activations of the call that makes it grow. Each copy
        may hold as much again; while a layer grows or moves, what it had lies beside what it gets.
    host_dense_layers : bool, optional
        Whether Quest's dense layers are on the host: True, from the start, each with its first `device_buffer_tokens` tokens
        on the GPU; False, never; by default only when `device_memory` is too little for them. The answers are the same,
        in bf16 but for the last bits.
    decode_rows : int
        A call with at most so many new tokens per row is decode, and sparse; a longer one is prefill, and dense.
    host_memory : int or str, optional
        The most host memory this cache may take, in bytes or as text ("64GiB"); each copy of it may take as much again.
        Default: what is available.
    mla_mode : str
        For models with latent attention. "absorb" attends to the latents themselves. "expand" runs the model's own
        `expand_kv` and attention on what was read: bit for bit its answer, slow, and with keys and values of one layer in
        full on the GPU; for checking.
    layout : str
        For MiniMax-M3. "per_group": each KV head has a hot buffer of its own. "union": one for all KV heads of a batch row; a
        block that any of them selects is kept and moved for all (one that several select counts as read by each, as missed
        once). The answers are the same.
    prefill_memory : int or str
        For models that select themselves: the most GPU memory that a long prompt may take beyond its results.
    prefetch : bool
        For models whose layers share selections: fetch for all of them as soon as the first has selected, beside what it
        computes next. False fetches when a layer's turn comes; the answers are the same.
    verify : bool
        Compare, in every step, each slot that is read with the host, bit for bit. Slow.
    graphs : bool
        Replay decode steps from a CUDA graph where the model allows it; False runs them eagerly.

    Raises
    ------
    ValueError
        If a setting or the model does not fit; the message names the value and what is allowed.

    Examples
    --------
    >>> cache = HiSparseCache(model, selector=Quest(token_budget=2048), device_buffer_tokens=4096)
    >>> out = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    >>> print(cache.stats())
    """

    _layers: list[Any] | None  # None once it is closed

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        selector: Selector | None = None,
        *,
        device_buffer_tokens: int | None = None,
        device_memory: int | str | None = None,
        host_dense_layers: bool | None = None,
        decode_rows: int = 32,
        host_memory: int | str | None = None,
        mla_mode: str = "absorb",
        layout: str = "per_group",
        prefill_memory: int | str = "2GiB",
        prefetch: bool = True,
        verify: bool = False,
        graphs: bool = True,
    ) -> None:
        config = model.config if isinstance(model, PreTrainedModel) else model
        if hasattr(model, "_orig_mod"):
            raise ValueError(COMPILED)
        if not isinstance(config, PreTrainedConfig):
            shown = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
            raise ValueError(
                f"HiSparseCache: {shown} is neither a transformers model nor a model's config{_if_wrapped(model)}"
            )
        extra = parse_bytes(prefill_memory, "prefill_memory")
        family = family_of(config, selector, mla_mode, layout, extra, prefetch)
        if isinstance(model, PreTrainedModel):
            refuse_sinks(model, family)
        if device_memory is not None and device_buffer_tokens is not None:
            raise ValueError(
                f"device_memory={device_memory!r} and device_buffer_tokens={device_buffer_tokens!r}: give one, either sets the "
                "hot buffers"
            )
        buffer_tokens = checked_buffer(device_buffer_tokens, family)
        if not isinstance(decode_rows, int) or isinstance(decode_rows, bool) or decode_rows < 1:
            raise ValueError(f"decode_rows={decode_rows!r}, must be a whole number of at least 1")
        for name, value in (("verify", verify), ("graphs", graphs), ("prefetch", prefetch)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}, must be True or False")
        if host_dense_layers is not None and not isinstance(host_dense_layers, bool):
            raise ValueError(f"host_dense_layers={host_dense_layers!r}, must be True, False or None")
        if host_dense_layers and not family.dense:
            raise ValueError(
                "host_dense_layers=True, but there is no dense layer that could be hosted: it is for the first layers of a "
                "selector with dense_layers, where they are full attention; leave it out"
            )
        host_limit = HostLimit(host_memory)
        # Addresses only: a layer can at most hold what its share of the machine's memory allows.
        self._settings = LayerSettings(
            top_k=family.top_k,
            device_buffer_records=buffer_tokens // family.page_size,
            decode_rows=decode_rows,
            verify=verify,
            reserve_bytes=2 * host_limit.reachable // len(family.hosted),
            dense_records=buffer_tokens // family.page_size if host_dense_layers else None,
        )
        dtype = model.dtype if isinstance(model, PreTrainedModel) else model_dtype(config)
        sizes = Sizes(config, family, self._settings, dtype)
        device_limit = None
        if device_memory is not None:
            device_limit = DeviceLimit(device_memory, sizes, extra, host_dense_layers is not False)
        buffers = Buffers(self._settings.device_buffer_records, self._settings.dense_records)
        self.padding = Padding()
        layers = new_layers(config, family, self._settings, self.padding)
        connect(family, layers)
        limits = Limits(host_limit, device_limit, family, buffers)
        positions = getattr(text_config(config), "max_position_embeddings", None)
        self.change = Change()
        self.room = Room(layers, self.change, sizes, limits, self.padding, host_dense_layers, positions)
        super().__init__(layers=layers)
        # Layers that hold tokens: all but linear attention.
        self._with_tokens = [i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        self._called = False  # whether a call has begun since layers were last compared
        self._config = config
        self._family = family
        self.graphs = DecodeGraphs(self, enabled=graphs)
        self.trace: TraceRecorder | None = None  # while one is being recorded
        self._states: dict[int, TokenShape] = {}  # of what each layer holds
        self.selector = selector
        self._model = weakref.ref(model) if isinstance(model, PreTrainedModel) else None
        if isinstance(model, PreTrainedModel):
            enable(model)

    # ------------------------------------------------------------------ its life

    def close(self) -> None:
        """Give back all memory, on the GPU and pinned on the host; any further use raises. Again, it changes nothing.

        Deleting the last reference to a cache does the same; ``with HiSparseCache(...) as cache:`` does it at the end.
        """
        if self._layers is None:
            return
        if self.trace is not None:
            self.trace.abandon("the cache was closed")
        self.graphs.forget()
        self.padding.reset()
        for layer in self.hosted_layers:
            layer.close()
        self.room.close()
        self._layers = None

    def __enter__(self) -> HiSparseCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def layers(self) -> list[Any]:
        """The layers; whatever is asked of a cache needs them."""
        if self._layers is None:
            raise RuntimeError("this HiSparseCache is closed: build a new one")
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    # ------------------------------------------------------------------ what transformers calls

    @property
    def is_initialized(self) -> bool:
        """Whether every layer holds keys. Some models ask, to tell a prompt from what follows.

        Transformers' own asks only layers that can be made beforehand: of hosted layers alone it is never true.
        """
        return all(layer.is_initialized for layer in self.layers)

    @property
    def hosted_layers(self) -> list[HostedLayer]:
        """The layers whose KV lives on the host."""
        _ = self.layers  # raises once it is closed
        return self.room.hosted

    @property
    def sparse_layers(self) -> list[HostedLayer]:
        """Those of them that read what is selected."""
        return [layer for layer in self.hosted_layers if not layer.dense]

    @keeps
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, ``[batch, heads, T, width]`` (see `HostedLayer.update`).

        Raises
        ------
        ValueError
            If batch size, heads, widths, dtype or device differ from those of the tokens held, or keys and values have
            different dtypes; nothing is changed.
        MemoryError
            If host memory does not suffice; nothing is changed.
        RuntimeError
            If the model is not enabled, or an earlier call was interrupted.
        """
        refuse_compiled(self)
        begins = layer_idx == self._with_tokens[0]
        if begins:  # first: another model's keys may well have another shape
            self._check_caller()
        _check_one_dtype(layer_idx, key_states, value_states)
        self._check_states(self.layers[layer_idx], layer_idx, key_states, value_states)
        if begins:
            self._begin_call(key_states, value_states)
        self._called = True
        if isinstance(self.layers[layer_idx], HostedLayer | ResidentLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        with self.change:  # transformers' own layers cannot tell how far they came
            rows = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            trim(self.layers[layer_idx])
        return rows

    def _check_caller(self) -> None:
        """Refuse a model that is not enabled."""
        call = current_call()
        if call is None or call.cache is not self or call.attention not in BASES:
            attention = text_config(self._config)._attn_implementation if call is None else call.attention
            found = "" if attention in BASES else f" (its attention is {attention!r})"
            raise RuntimeError(
                f"HiSparseCache needs an enabled model, called as a whole, and this one is not{found}: call "
                "hf_hisparse.enable(model), or build the cache from the model: HiSparseCache(model, ...)"
            )

    def _begin_call(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check, before any layer changes, that a forward pass may begin."""
        self._check_dtype(key_states)
        self.check_whole()
        self.room.make(key_states, value_states)
        stream = self.hosted_layers[0].stream
        stream.forget()
        stream.begin(key_states.shape[2])

    def _check_dtype(self, key_states: torch.Tensor) -> None:
        if key_states.dtype not in _DTYPES:
            raise ValueError(
                f"HiSparseCache: keys of {key_states.dtype}; supported are {', '.join(map(str, _DTYPES))}: load the model with "
                "one of them"
            )

    def check_whole(self) -> None:
        """Refuse to go on once it is closed, or after a call, or a change of all layers, that did not finish (RuntimeError).

        Layers are compared once after each eager call; a replayed step is a `Change` of all of them.
        """
        _ = self.layers  # refuses once it is closed
        if self._called and not self.change.unfinished:
            agree = self._layers_agree()
            if not agree:
                self.take_back()  # an error has done that, an interrupt has not
                agree = self._layers_agree()
            self._called = not agree
        if self._called or self.change.unfinished:
            raise RuntimeError(
                "the last call through this HiSparseCache did not finish, so its layers hold different tokens: call "
                "cache.reset() and start again. If it happens again without another error, the model is not enabled (call "
                "hf_hisparse.enable(model)) or changes its keys after the cache returned them (use DynamicCache)"
            )

    def _layers_agree(self) -> bool:
        """Whether all layers hold the same tokens and have finished with them."""
        layers = [self.layers[index] for index in self._with_tokens]
        lengths = {layer.get_seq_length() for layer in layers}
        return len(lengths) == 1 and not any(getattr(layer, "interrupted", False) for layer in layers)

    def take_back(self) -> None:
        """After a call that failed: be as before it, if no hosted layer has stored any of its tokens and no other layer lost any.

        Where that cannot be, `check_whole` refuses to go on.
        """
        # A failed capture is undone by who began it.
        if self._layers is None or self.padding.capturing or self.change.unfinished:
            return
        stored = {layer.stored for layer in self.hosted_layers}
        before = stored.pop()
        if stored or before is None:
            return
        ahead = [
            layer
            for layer in self.layers
            if not isinstance(layer, CacheLayerMixin) or layer.get_seq_length() != before
        ]
        # Of what a sliding window or linear attention held before, nothing is left.
        if before and not all(isinstance(layer, HostedLayer | ResidentLayer) for layer in ahead):
            self.change.unfinished = True
            return
        for layer in own_of(self.layers):
            layer.take_back(before)
        self.hosted_layers[0].stream.forget()
        if not before:
            self._renew_native_layers()
            self._states.clear()

    def check_batch(self, batch: int) -> None:
        """Refuse another batch size than that of the tokens held (ValueError)."""
        if batch != self._batch:
            raise ValueError(
                f"HiSparseCache: a call with batch size {batch}, but {self._batch} is held: pass what the tokens held came "
                "with, or call cache.reset() first"
            )

    def _check_states(
        self, layer: Any, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Hold a layer to the batch size, heads, widths, dtype and device of its first tokens."""
        got = TokenShape.of(key_states, value_states)
        held = self._states.get(layer_idx)
        if held is None or not layer.get_seq_length():
            devices = {state.device for state in self._states.values()} | {got.device}
            self.room.limits.check_foreseen(layer_idx, got[1:4], devices)
            self._states[layer_idx] = got
            return
        if got == held:
            return
        raise ValueError(
            f"HiSparseCache, layer {layer_idx}: keys and values with {got.differences(held)}: pass what the tokens held came "
            "with, or call cache.reset() first"
        )

    # ------------------------------------------------------------------ what captured steps need

    @property
    def verifies(self) -> bool:
        """Whether every step is compared with the host."""
        return self._settings.verify

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever memory that a decode step uses moves."""
        return (self.padding.version, *(layer.version for layer in self.layers))

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.hosted_layers[0].capacity

    def captured_mask(self) -> torch.Tensor:
        """The mask of the decode step that is being captured, over all there is room for: bool ``[batch, 1, 1, capacity]``."""
        layer = self.hosted_layers[0]
        keys = torch.arange(self.capacity, device=layer.position.device)
        mask = (keys <= layer.position).expand(self._batch, -1)
        if self.padding.captured is not None:
            mask = mask & self.padding.captured[:, : self.capacity]
        return mask[:, None, None]

    @keeps
    def make_room(self, tokens: int) -> None:
        """Grow, if need be, for `tokens` more tokens per row (MemoryError as in `update`)."""
        self.check_whole()
        self.room.make_now(tokens, self._states[self.hosted_layers[0].layer_idx])

    # ------------------------------------------------------------------ changing what is held

    @keeps
    def put_history(self, layers: Iterable[LayerHistory]) -> None:
        """Take a history that was computed elsewhere, without padding, as a prefill would leave it.

        Parameters
        ----------
        layers : iterable of LayerHistory
            One for each layer, in order; taken one at a time, so they need not all be in memory at once.

        Raises
        ------
        ValueError
            If the cache holds tokens already, or what is given is not what the model's layers have; the cache is empty then.
        MemoryError
            If host or device memory does not suffice; the cache is empty then.
        """
        self._refuse_while_recording("put_history")
        self.check_whole()
        if self.get_seq_length():
            raise ValueError(
                f"put_history: the cache holds {self.get_seq_length()} tokens already: call cache.reset() first"
            )
        try:
            self._put(iter(layers))
        except BaseException:
            self.reset()
            raise

    def _put(self, layers: Iterator[LayerHistory]) -> None:
        model = None if self._model is None else self._model()
        first: LayerHistory | None = None
        for index in range(len(self.layers)):
            history = next(layers, None)
            if history is None:
                raise ValueError(f"put_history: {index} layers are given, the model has {len(self.layers)}")
            if not isinstance(history, LayerHistory):
                raise ValueError(
                    f"put_history, layer {index} is of type {type(history).__name__}, must be a hf_hisparse.LayerHistory"
                )
            first = history if first is None else first
            shape = self._family.kv_shape(index, hosted=isinstance(self.layers[index], HostedLayer))
            history.check(index, shape, first, None if model is None else model.dtype)
            self._check_states(self.layers[index], index, history.keys, history.values)
            if index == self._with_tokens[0]:
                self._check_dtype(history.keys)
                self.room.make(history.keys, history.values)
            layer = self.layers[index]  # another one if dense layers have just moved to the host
            if isinstance(layer, HostedLayer):
                layer.put(history)
            else:
                layer.update(history.keys, history.values)
        if next(layers, None) is not None:
            raise ValueError(f"put_history: more than the model's {len(self.layers)} layers are given")

    @keeps
    def resize_buffers(self, device_buffer_tokens: int) -> None:
        """Let the hot buffers have another size, between two calls; what was used last stays. Hosted dense layers keep theirs.

        So one cache serves requests of different kinds and keeps its pinned memory; an empty one gives its device memory back.

        Raises
        ------
        ValueError
            If the size does not fit, or `device_memory` sets it.
        MemoryError
            If the cache holds tokens and its devices have too little memory for it; nothing is changed.
        """
        if self.room.limits.device is not None:
            raise ValueError(
                f"resize_buffers({device_buffer_tokens!r}): device_memory={self.room.limits.device.size or 'auto'} sets the hot "
                "buffers of this cache"
            )
        self._refuse_while_recording("resize_buffers")
        self.check_whole()
        records = checked_buffer(device_buffer_tokens, self._family) // self._family.page_size
        if self.get_seq_length():
            self.room.check_buffers(records)
        self._settings = replace(self._settings, device_buffer_records=records)
        if not self.get_seq_length():  # what an earlier request left on the device would have to be moved
            for layer in own_of(self.layers):
                layer.release()
            self.graphs.forget()
        self.room.resize_buffers(records)

    @keeps
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; 0 removes nothing.

        Before transformers 5.20 a positive number is the length to keep, as it was there.

        Raises
        ------
        ValueError
            For what is no whole number; for a positive one, from transformers 5.20 on.
        """
        try:
            tokens = operator.index(tokens_to_remove)
        except TypeError as error:
            raise ValueError(f"crop({tokens_to_remove!r}): must be a whole number of tokens") from error
        self.check_whole()
        if tokens > 0:
            if not _CROP_TAKES_LENGTHS:
                raise ValueError(
                    f"crop({tokens}): give the number of tokens to remove as a negative number, crop(-{tokens}), or 0"
                )
            tokens = min(0, tokens - self.get_seq_length())
        self._called = True
        for layer in self.layers:  # a sliding window may refuse, so it is asked before anything changes
            if not isinstance(layer, HostedLayer | ResidentLayer):
                layer.crop(tokens)
                trim(layer)
        with self.change:
            for layer in own_of(self.layers):
                layer.crop(tokens)
            self.padding.crop(self.get_seq_length())
            if not self.get_seq_length():
                self._renew_native_layers()  # what comes next may have another shape

    @keeps
    def reset(self) -> None:
        """Forget all tokens and counts. Pinned memory and hot buffers stay for the next use."""
        self._refuse_while_recording("reset()")
        own = own_of(self.layers)  # once it is closed there is nothing to change
        torn = self.change.unfinished
        with self.change:
            for layer in own:
                if torn:  # its parts may not fit together: they are built anew
                    layer.release()
                layer.reset()
            self._renew_native_layers()
            self.padding.reset()
            self.hosted_layers[0].stream.forget()
            self._states.clear()
        self._called = False

    def _renew_native_layers(self) -> None:
        """Empty the layers that are transformers' own; some versions only zero a layer that they reset."""
        fresh = native_layers(self._config)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, HostedLayer | ResidentLayer):
                self.layers[index] = fresh[index]

    @keeps
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let beam `i` go on from beam ``beam_idx[i]``; the host's records stay where they are.

        Raises
        ------
        ValueError
            If `beam_idx` is no tensor of whole numbers of one dimension, or names a row that is not held.
        """
        self._refuse_while_recording("reorder_cache (beam search)")
        check_rows(beam_idx, self._batch)
        self._make_way(beam_idx.numel())
        with self.change:
            super().reorder_cache(beam_idx)
            self._rows_changed(beam_idx)

    @keeps
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times, at least once (ValueError)."""
        self._refuse_while_recording("batch_repeat_interleave")
        if repeats < 1:
            raise ValueError(
                f"batch_repeat_interleave({repeats}) leaves no row, repeats must be at least 1: call reset() to empty the cache"
            )
        rows = torch.arange(self._batch).repeat_interleave(repeats)
        self._make_way(rows.numel())
        with self.change:
            super().batch_repeat_interleave(repeats)
            self._rows_changed(rows)

    @keeps
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows `indices`; any index of one dimension will do.

        Raises
        ------
        ValueError
            If `indices` is none, or keeps no row.
        """
        self._refuse_while_recording("batch_select_indices")
        rows = selected_rows(indices, self._batch)
        if not rows.numel():
            raise ValueError(
                f"batch_select_indices({indices}) keeps none of {self._batch} rows: call reset() to empty the cache"
            )
        self._make_way(rows.numel())
        with self.change:
            super().batch_select_indices(rows)
            self._rows_changed(rows)

    def _make_way(self, batch: int) -> None:
        """Keep less on the device, before anything else changes, such that there is memory for `batch` rows (MemoryError)."""
        self.check_whole()
        if batch > self._batch:
            self.room.make_for_rows(batch, self._states[self.hosted_layers[0].layer_idx])

    def _refuse_while_recording(self, what: str) -> None:
        if self.trace is not None:
            raise RuntimeError(
                f"HiSparseCache: {what} while a trace is being recorded to {self.trace.path}, which follows one run of the "
                "same rows: close the trace first"
            )

    @property
    def _batch(self) -> int:
        return next(iter(self._states.values())).batch if self._states else 0

    def _rows_changed(self, rows: torch.Tensor) -> None:
        self.padding.rearrange(rows)
        self._states = {index: held._replace(batch=rows.numel()) for index, held in self._states.items()}

    @keeps
    def __deepcopy__(self, memo: dict[int, Any]) -> HiSparseCache:
        """An independent cache that holds the same tokens, for another continuation of a shared prefix.

        Raises
        ------
        MemoryError
            If the host cannot hold a second copy.
        """
        self.check_whole()
        self.room.check_copy()
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.padding = self.padding.clone()
        other.change = Change()
        other.layers = [
            layer.clone(other.padding)
            if isinstance(layer, HostedLayer | ResidentLayer)
            else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        connect(self._family, other.layers)
        other.room = self.room.clone(other.layers, other.change, other.padding)
        other.graphs = DecodeGraphs(other, enabled=self.graphs.enabled)
        other.trace = None
        other._states = dict(self._states)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a HiSparseCache cannot be pickled (nor copied by copy.copy): cache.save(path) keeps what it holds and "
            "HiSparseCache.load(path, model) brings it back, copy.deepcopy(cache) makes an independent copy"
        )

    # ------------------------------------------------------------------ prefixes on a disk

    def save(self, path: str | Path) -> None:
        """Keep what this cache holds in the new folder `path`, to be loaded again: a prefill once, for many runs.

        The folder appears when it is complete.

        Raises
        ------
        FileExistsError
            If there is something at `path`.
        ValueError
            If the cache holds no tokens, or layers that cannot be saved.
        OSError
            If the disk has too little room.
        """
        self.check_whole()
        saved.save(self, path)

    @classmethod
    @keeps
    def load(
        cls, path: str | Path, model: PreTrainedModel, selector: Selector | None = None, **settings: Any
    ) -> HiSparseCache:
        """A cache that holds what was saved at `path` with the same model.

        Parameters
        ----------
        path : str or Path
        model : PreTrainedModel
        selector : Selector, optional
            Default: the `Quest` it was saved with. Another budget is fine, as a prefill does not depend on it.
        **settings
            Of the new cache, as `HiSparseCache` takes them; they need not be those it was saved with.

        Raises
        ------
        FileNotFoundError
            If there is no saved cache.
        ValueError
            If it is damaged, or was saved with another model, other sizes of pages, or another version of transformers.
        MemoryError
            If host or device have too little for it.
        """
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"HiSparseCache.load needs the model, not a {type(model).__name__}{_if_wrapped(model)}"
            )
        content = saved.read_index(Path(path))
        saved.check_model(Path(path), content, model)
        cache = cls(model, saved.selector_for(Path(path), content, selector), **settings)
        saved.restore(cache, Path(path), content, model)
        return cache

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What tells its model from others; without the weights if it was built from a configuration or its model is gone."""
        model = None if self._model is None else self._model()
        if model is not None:
            return model_fingerprint(model)
        return config_fingerprint(self._config)

    @property
    def layout(self) -> str | None:
        """How records are laid out, of a model that has a choice."""
        return getattr(self._family, "layout", None)

    # ------------------------------------------------------------------ what people look at

    def stats(self) -> Stats:
        """What decoding has read, hit, missed and moved since the last reset (waits for the device)."""
        return Stats(tuple(layer.stats() for layer in self.hosted_layers))

    def record_trace(self, path: str | Path) -> TraceRecorder:
        """Record which records are selected from now on, to replay them under other buffers (see `hf_hisparse.trace`).

        Decode runs eagerly meanwhile, as each selection is copied to the CPU; they stay there, ``4 * layers * lanes * top_k``
        bytes a step, until the file is written. `crop` is recorded; `reset` and what moves batch rows are refused.

        Parameters
        ----------
        path : str or Path
            The file to write, an ``.npz``; what is there is replaced.

        Returns
        -------
        TraceRecorder
            A context manager that writes the file at its end; or call its `close`. After an error nothing is written.

        Raises
        ------
        ValueError
            If the cache is not empty, its buffers change with `device_memory`, or `path` cannot be a file.
        RuntimeError
            If a trace is being recorded already.

        Examples
        --------
        >>> with cache.record_trace("trace.npz"):
        ...     out = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
        """
        if self.room.limits.device is not None:
            raise ValueError(
                "record_trace: a trace is of one hot buffer, those of device_memory change: give device_buffer_tokens instead"
            )
        if not isinstance(path, str | Path):
            raise ValueError(f"record_trace: path={path!r}, must be a file's name")
        family = self._family
        header = {
            "model": Path(self._config.name_or_path or "").name or self._config.model_type,
            "settings": repr(family),
            "page_size": family.page_size,
            "top_k": family.top_k,
            "device_buffer_records": self._settings.device_buffer_records,
        }
        self.trace = TraceRecorder(self, Path(path), header)
        return self.trace

    def memory(self) -> Memory:
        """Where the bytes are."""
        return memory_of(self.layers, self.padding)

    def __repr__(self) -> str:
        if self._layers is None:
            return "HiSparseCache(closed)"
        settings, memory = self._settings, self.memory()
        records, size = self.sparse_layers[0].buffer_records, self._family.page_size
        hosted = f"{len(self.hosted_layers)} hosted"
        if dense := [layer for layer in self.hosted_layers if layer.dense]:
            kept = f"each with {dense[0].buffer_records} records per lane on the GPU"
            hosted += f" ({len(dense)} of them dense, {kept})"
        limit = self.room.limits.device
        given = f"device_memory={limit.size or 'auto'}" if limit else f"device_buffer_tokens={records * size}"
        return (
            f"HiSparseCache({self._family!r}, {given}, "
            f"decode_rows={settings.decode_rows}, host_memory={self.room.limits.host.size}, verify={settings.verify}, "
            f"graphs={self.graphs.enabled})\n"
            f"  {self.get_seq_length()} tokens, {hosted} and "
            f"{len(self.layers) - len(self.hosted_layers)} native layers\n"
            f"  device: {format_bytes(memory.buffer_bytes)} hot buffers ({records} records of {size} tokens per lane), "
            f"{format_bytes(memory.selector_bytes)} selector state, {format_bytes(memory.table_bytes)} tables, "
            f"{format_bytes(memory.native_bytes)} native KV\n"
            f"  host: {format_bytes(memory.host_bytes)} in use, {format_bytes(memory.host_reserved_bytes)} held\n"
            f"  CUDA graphs: {self.graphs!r}"
        )


def _if_wrapped(model: Any) -> str:
    """What to do about a model that peft has wrapped, for the end of an error's message; nothing for others."""
    if not hasattr(model, "get_base_model"):
        return ""
    return ": pass what it wraps, model.get_base_model(), which has the adapters"


def _check_one_dtype(layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Refuse keys and values of different dtypes: to convert either would not be what the model's own cache answers."""
    if keys.dtype is not values.dtype:
        raise ValueError(
            f"HiSparseCache, layer {layer_idx}: keys of {keys.dtype} and values of {values.dtype}, must have one dtype; under "
            "torch.autocast they differ in most models with fp32 weights: convert the model once (model.to(torch.bfloat16)) and "
            "call it without autocast"
        )
