"""`HiSparseCache`: hosted and native layers behind transformers' cache interface."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .active import current_call
from .attention import BASES
from .enable import enable, text_config
from .graphs import DecodeGraphs
from .history_stream import HistoryStream
from .host_memory import available_host_memory, format_bytes, parse_bytes
from .hosted_layer import HostedLayer, LayerSettings
from .models.family import Family, family_of
from .padding import Padding
from .resident_layer import ResidentLayer
from .selector import Selector
from .stats import Memory, Stats
from .trace import TraceRecorder

_GROWTH_TOKENS = 1024
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

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        selector: Selector | None = None,
        *,
        device_buffer_tokens: int | None = None,
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
        if not isinstance(config, PreTrainedConfig):
            shown = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
            raise ValueError(f"HiSparseCache: {shown} is neither a transformers model nor a model's config")
        family = family_of(
            config, selector, mla_mode, layout, parse_bytes(prefill_memory, "prefill_memory"), prefetch
        )
        buffer_tokens = _checked_buffer(device_buffer_tokens, family)
        if not isinstance(decode_rows, int) or isinstance(decode_rows, bool) or decode_rows < 1:
            raise ValueError(f"decode_rows={decode_rows!r}, must be a whole number of at least 1")
        self._host_limit = None if host_memory is None else parse_bytes(host_memory, "host_memory")
        # Addresses only: a layer can at most hold what its share of the machine's memory allows.
        reachable = max(self._host_limit or 0, available_host_memory())
        self._settings = LayerSettings(
            top_k=family.top_k,
            device_buffer_records=buffer_tokens // family.page_size,
            decode_rows=decode_rows,
            verify=verify,
            reserve_bytes=2 * reachable // len(family.hosted),
        )
        self.padding = Padding()
        layers = family.layers(self._settings, self.padding)
        for index, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[index] = ResidentLayer(index, self.padding)
        super().__init__(layers=layers)
        self._config = config
        self._family = family
        self.graphs = DecodeGraphs(self, enabled=graphs)
        self.trace: TraceRecorder | None = None  # while one is being recorded
        self._states: dict[int, tuple[Any, ...]] = {}  # layer -> what its keys and values came with
        self._connect()
        if isinstance(model, PreTrainedModel):
            enable(model)

    def _connect(self) -> None:
        """Let the layers know what they share."""
        self._family.connect(self.layers)
        self._stream = HistoryStream(self.hosted_layers)
        for layer in self.hosted_layers:
            layer.stream = self._stream

    # ------------------------------------------------------------------ what transformers calls

    @property
    def hosted_layers(self) -> list[HostedLayer]:
        """The layers whose KV lives on the host."""
        return [layer for layer in self.layers if isinstance(layer, HostedLayer)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, ``[batch, heads, T, width]`` (see `HostedLayer.update`).

        Raises
        ------
        ValueError
            If batch size, heads, widths, dtype or device differ from those of the tokens held; nothing is changed.
        MemoryError
            If host memory does not suffice; nothing is changed.
        RuntimeError
            If the model is not enabled, or an earlier call was interrupted.
        """
        begins = layer_idx == self._first_layer
        if begins:  # first: another model's keys may well have another shape
            self._check_caller()
        self._check_states(self.layers[layer_idx], layer_idx, key_states, value_states)
        if begins:
            self._begin_call(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def _first_layer(self) -> int:
        return next(i for i, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin))

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
        if key_states.dtype not in _DTYPES:
            raise ValueError(
                f"HiSparseCache: keys of {key_states.dtype}; supported are {', '.join(map(str, _DTYPES))}: load the model with "
                "one of them"
            )
        self._check_whole()
        first = self.hosted_layers[0]
        tokens, batch = first.get_seq_length() + key_states.shape[2], key_states.shape[0]

        def asked(
            tokens: int,
        ) -> int:  # hosted layers grow in step and, in every supported model, have one shape
            return first.host_bytes_for(tokens, key_states, value_states) * len(self.hosted_layers)

        self._plan_growth(tokens, asked, f"{tokens} tokens of {batch} row{'s' if batch > 1 else ''}")
        if key_states.shape[2] > self._settings.decode_rows:
            self._stream.begin()

    def _plan_growth(self, tokens: int, asked: Callable[[int], int], purpose: str) -> None:
        """Decide how far to grow if `tokens` tokens do not fit: an eighth further while that can be had."""
        if not asked(tokens):
            return
        further = tokens + max(_GROWTH_TOKENS, tokens // 8)
        target = further if asked(further) <= self._host_memory_left() else tokens
        self._check_host_memory(asked(target), purpose)
        for layer in self.hosted_layers:
            layer.growth_target = target

    def _check_whole(self) -> None:
        lengths = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if len(lengths) > 1 or any(layer.interrupted for layer in self.hosted_layers):
            raise RuntimeError(
                "the last call through this HiSparseCache did not finish, so its layers hold different tokens: call "
                "cache.reset() and start again. If it happens again without another error, the model is not enabled (call "
                "hf_hisparse.enable(model)) or changes its keys after the cache returned them (use DynamicCache)"
            )

    def _host_memory_left(self) -> int:
        if self._host_limit is None:
            return available_host_memory()
        return self._host_limit - self.memory().host_reserved_bytes

    def _check_host_memory(self, asked: int, purpose: str) -> None:
        left = max(0, self._host_memory_left()) if asked > 0 else 0
        if asked <= left:
            return
        held = format_bytes(self.memory().host_reserved_bytes)
        limit = (
            "available"
            if self._host_limit is None
            else f"left of host_memory={format_bytes(self._host_limit)}"
        )
        raise MemoryError(
            f"HiSparseCache: {purpose} need {format_bytes(asked)} more host memory, {format_bytes(left)} is {limit} "
            f"({held} held already): lower the batch or the context, or raise host_memory if the machine has more"
        )

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
        got = (
            *key_states.shape[:2],
            key_states.shape[3],
            value_states.shape[3],
            key_states.dtype,
            key_states.device,
        )
        held = self._states.get(layer_idx)
        if held is None or not layer.get_seq_length():
            self._states[layer_idx] = got
            return
        if got == held:
            return
        names = ("batch size", "KV heads", "key width", "value width", "dtype", "device")
        wrong = [
            f"{name} {new}, but {old} is held"
            for name, new, old in zip(names, got, held, strict=True)
            if new != old
        ]
        raise ValueError(
            f"HiSparseCache, layer {layer_idx}: keys and values with {'; '.join(wrong)}: pass what the tokens held came "
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
        return (self.padding.version, *(layer.version for layer in self.layers))  # type: ignore[union-attr]

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

    def make_room(self, tokens: int) -> None:
        """Grow, if need be, for `tokens` more tokens per row (MemoryError as in `update`)."""
        self._check_whole()
        total = self.get_seq_length() + tokens
        self._plan_growth(
            total,
            lambda tokens: sum(layer.host_bytes_to_grow(tokens) for layer in self.hosted_layers),
            f"{total} tokens",
        )
        for layer in self.layers:
            layer.grow(total)  # type: ignore[union-attr]

    # ------------------------------------------------------------------ changing what is held

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; 0 removes nothing.

        Before transformers 5.20 a positive number is the length to keep, as it was there.

        Raises
        ------
        ValueError
            For a positive number, from transformers 5.20 on.
        """
        tokens = int(tokens_to_remove)
        self._check_whole()
        if tokens > 0:
            if not _CROP_TAKES_LENGTHS:
                raise ValueError(
                    f"crop({tokens}): give the number of tokens to remove as a negative number, crop(-{tokens}), or 0"
                )
            tokens = min(0, tokens - self.get_seq_length())
        # A sliding window may refuse, so it is asked before anything changes.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, HostedLayer | ResidentLayer)):
            layer.crop(tokens)  # type: ignore[union-attr]
        self.padding.crop(self.get_seq_length())

    def reset(self) -> None:
        """Forget all tokens and counts. Pinned memory and hot buffers stay for the next use."""
        self._refuse_while_recording("reset()")
        fresh = DynamicCache(config=self._config).layers  # some versions only zero a layer they reset
        for index, layer in enumerate(self.layers):
            if isinstance(layer, HostedLayer | ResidentLayer):
                layer.reset()
            else:
                self.layers[index] = fresh[index]
        self.padding.reset()
        self._states.clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let beam `i` go on from beam ``beam_idx[i]``; the host's records stay where they are."""
        self._refuse_while_recording("reorder_cache (beam search)")
        super().reorder_cache(beam_idx)
        self._rows_changed(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        self._refuse_while_recording("batch_repeat_interleave")
        used = self.memory().host_bytes
        self._check_host_memory(used * repeats, f"{repeats} copies of each row")
        rows = torch.arange(self._batch).repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)
        self._rows_changed(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows `indices`; any index of one dimension will do, an empty one raises ValueError."""
        self._refuse_while_recording("batch_select_indices")
        if isinstance(indices, torch.Tensor):
            indices = indices.cpu()
        rows = torch.arange(self._batch)[indices]
        if not rows.numel():
            raise ValueError(
                f"batch_select_indices({indices}) keeps none of {self._batch} rows: call reset() to empty the cache"
            )
        super().batch_select_indices(rows)
        self._rows_changed(rows)

    def _refuse_while_recording(self, what: str) -> None:
        if self.trace is not None:
            raise RuntimeError(
                f"HiSparseCache: {what} while a trace is being recorded to {self.trace.path}, which follows one run of the "
                "same rows: close the trace first"
            )

    @property
    def _batch(self) -> int:
        return next(iter(self._states.values()))[0] if self._states else 0

    def _rows_changed(self, rows: torch.Tensor) -> None:
        self.padding.rearrange(rows)
        self._states = {index: (rows.numel(), *state[1:]) for index, state in self._states.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> HiSparseCache:
        """An independent cache that holds the same tokens, for another continuation of a shared prefix.

        Raises
        ------
        MemoryError
            If the host cannot hold a second copy.
        """
        self._check_whole()
        if self._host_limit is None:  # a limit holds for each cache, and the copy is as large as this one
            self._check_host_memory(self.memory().host_reserved_bytes, "a copy of the cache")
        other = copy.copy(self)
        other.padding = self.padding.clone()
        other.layers = [
            layer.clone(other.padding)
            if isinstance(layer, HostedLayer | ResidentLayer)
            else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        other._connect()
        other.graphs = DecodeGraphs(other, enabled=self.graphs.enabled)
        other.trace = None
        other._states = dict(self._states)
        return other

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
            If the cache is not empty, or `path` cannot be a file.
        RuntimeError
            If a trace is being recorded already.

        Examples
        --------
        >>> with cache.record_trace("trace.npz"):
        ...     out = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
        """
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
        hosted = [layer for layer in self.hosted_layers if layer.shape is not None]
        resident = [layer for layer in self.layers if isinstance(layer, ResidentLayer)]
        other = [layer for layer in self.layers if not isinstance(layer, HostedLayer | ResidentLayer)]
        held = [
            tensor for layer in other for tensor in vars(layer).values() if isinstance(tensor, torch.Tensor)
        ]
        padding = 0 if self.padding.allowed is None else self.padding.allowed.nbytes
        return Memory(
            buffer_bytes=sum(layer.buffer.buffer_nbytes for layer in hosted),
            selector_bytes=sum(layer.state.nbytes for layer in hosted),
            table_bytes=sum(layer.table_nbytes for layer in hosted)
            + sum(layer.table_nbytes for layer in resident)
            + padding,
            native_bytes=sum(layer.kv_nbytes for layer in resident) + sum(tensor.nbytes for tensor in held),
            host_bytes=sum(layer.host_nbytes for layer in hosted),
            host_reserved_bytes=sum(layer.pool.area.size for layer in hosted),
        )

    def __repr__(self) -> str:
        settings, memory = self._settings, self.memory()
        records = settings.device_buffer_records
        size = self._family.page_size
        return (
            f"HiSparseCache({self._family!r}, device_buffer_tokens={records * size}, "
            f"decode_rows={settings.decode_rows}, host_memory={self._host_limit}, verify={settings.verify}, "
            f"graphs={self.graphs.enabled})\n"
            f"  {self.get_seq_length()} tokens, {len(self.hosted_layers)} hosted and "
            f"{len(self.layers) - len(self.hosted_layers)} native layers\n"
            f"  device: {format_bytes(memory.buffer_bytes)} hot buffers ({records} records of {size} tokens per lane), "
            f"{format_bytes(memory.selector_bytes)} selector state, {format_bytes(memory.table_bytes)} tables, "
            f"{format_bytes(memory.native_bytes)} native KV\n"
            f"  host: {format_bytes(memory.host_bytes)} in use, {format_bytes(memory.host_reserved_bytes)} held\n"
            f"  CUDA graphs: {self.graphs!r}"
        )


def _checked_buffer(tokens: int | None, family: Family) -> int:
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
