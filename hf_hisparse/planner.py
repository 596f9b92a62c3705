"""What a model, a context and a batch need, what a machine has, and whether HiSparse is the answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .host_memory import available_host_memory, format_bytes, parse_bytes
from .hosted_layer import LayerSettings
from .models.family import Family, checked_buffer, family_of
from .models.quest import Quest
from .needs import activation_bytes, model_dtype, weight_bytes
from .plan_report import CachePlan, Plan
from .selector import Selector
from .sizes import Sizes, largest, whole_records, with_room
from .stats import Memory, Stats

# Share of what a step reads that misses, by buffer size as a multiple of what a step reads.
QUEST_MISSES = {1.0: 0.266, 2.0: 0.076, 4.0: 0.021}  # SmolLM2-135M, Quest(512), 7,012 tokens of prose
DSA_MISSES = {
    1.0: 0.30,
    2.0: 0.134,
    4.0: 0.067,
}  # GLM-5.1, 100,384 tokens: HiSparse (arXiv 2608.07009), figure 6
_CHUNKS = (32768, 16384, 8192, 4096, 2048, 1024)
_PREFILL_MEMORY = 2**31  # the default of `HiSparseCache`
_USABLE = 0.97  # of a GPU's memory: the allocator's blocks are never filled to the last byte
_MOST_TOKENS, _MOST_ROWS = 2**24, 2**12
_Measure = Callable[[int, int], tuple[Memory, bool]]


@dataclass(frozen=True)
class _Machine:
    device: int
    host: int


class _Planner:
    """The figures of one model on one machine, as functions of batch and context."""

    def __init__(
        self,
        config: PreTrainedConfig,
        selector: Selector | None,
        dtype: torch.dtype,
        machine: _Machine,
        weights: int,
        chunk: int | None,
    ) -> None:
        self.family, self.selects = _family(config, selector)
        self.config, self.dtype, self.machine, self.weights, self.chunk = (
            config,
            dtype,
            machine,
            weights,
            chunk,
        )
        settings = LayerSettings(self.family.top_k, self.family.top_k, 32, False, 0)
        self.sizes = Sizes(config, self.family, settings, dtype)

    def prefill(self, batch: int, context: int) -> tuple[int, int]:
        """Tokens per call of prefill, and its activations: the longest call that takes a quarter of what weights leave."""
        left = int(_USABLE * self.machine.device) - self.weights
        chunks = [self.chunk] if self.chunk else [context, *(size for size in _CHUNKS if size < context)]
        for size in chunks:
            extra = _PREFILL_MEMORY if self.selects else 0
            rows = min(size, context)
            activations = activation_bytes(self.config, batch, rows, context, self.dtype, extra)
            if 4 * activations <= left:
                break
        return rows, activations

    def left(self, batch: int, context: int) -> int:
        """Device bytes for a cache."""
        return int(_USABLE * self.machine.device) - self.weights - self.prefill(batch, context)[1]

    def dynamic(self, batch: int, context: int) -> tuple[Memory, bool]:
        """A `DynamicCache`, and whether it fits; each step needs one layer a second time."""
        layers = self.sizes.dynamic(batch, context)
        held = Memory(native_bytes=sum(layers))
        return held, held.device_bytes + max(layers) <= self.left(batch, context)

    def offloaded(self, batch: int, context: int) -> tuple[Memory, bool]:
        """The same, offloaded: two layers on the device, all on the host."""
        layers = self.sizes.dynamic(batch, context)
        held = Memory(native_bytes=2 * max(layers), host_bytes=sum(layers), host_reserved_bytes=sum(layers))
        fits = held.device_bytes + max(layers) <= self.left(batch, context)
        return held, fits and held.host_reserved_bytes <= self.machine.host

    def smallest(self, batch: int, context: int) -> tuple[Memory, bool]:
        """A `HiSparseCache` with the smallest hot buffer and no room for growth."""
        return self.hisparse(batch, context, self.family.top_k, (context,))

    def hisparse(
        self, batch: int, context: int, records: int, rooms: tuple[int, ...] = ()
    ) -> tuple[Memory, bool]:
        """A `HiSparseCache` with such a hot buffer, with room for growth if that can be had."""
        left = self.left(batch, context)
        for tokens in rooms or (with_room(context), context):
            capacity = whole_records(self.family, tokens)
            held = self.sizes.memory(batch, context, capacity, records)
            if held.device_bytes <= left and held.host_reserved_bytes <= self.machine.host:
                return held, True
        return held, False

    def records(self, batch: int, context: int) -> int:
        """Records per lane of the largest hot buffer that fits; the smallest possible if none does."""
        left = self.left(batch, context)
        capacities = (whole_records(self.family, tokens) for tokens in (with_room(context), context))
        found = (self.sizes.most_records(batch, capacity, left) for capacity in capacities)
        return next((records for records in found if records), self.family.top_k)

    def compare(self, batch: int, context: int, records: int) -> tuple[CachePlan, ...]:
        """`DynamicCache`, the same offloaded, and `HiSparseCache` with such a hot buffer."""
        activations = self.prefill(batch, context)[1]

        def needs(name: str, held: tuple[Memory, bool], measure: _Measure) -> CachePlan:
            memory, fits = held
            return CachePlan(
                name,
                memory,
                activations,
                self.weights + activations + memory.device_bytes,
                fits,
                largest(lambda rows: measure(rows, context)[1], 1, _MOST_ROWS),
                largest(lambda tokens: measure(batch, tokens)[1], 1, _MOST_TOKENS),
            )

        return (
            needs("DynamicCache", self.dynamic(batch, context), self.dynamic),
            needs("offloaded", self.offloaded(batch, context), self.offloaded),
            needs("HiSparseCache", self.hisparse(batch, context, records), self.smallest),
        )

    def missing(self, batch: int, context: int) -> list[str]:
        """What there is too little of for a `HiSparseCache`."""
        if self.weights >= self.machine.device:
            return [f"the weights alone take {format_bytes(self.weights)} (quantise them, or use more GPUs)"]
        held, _ = self.smallest(batch, context)
        short = []
        if (over := held.device_bytes - self.left(batch, context)) > 0:
            short.append(
                f"the GPU is short of {format_bytes(over)} even with the smallest hot buffer, {self.family.top_k} records "
                f"(selector state {format_bytes(held.selector_bytes)}, KV that stays there {format_bytes(held.native_bytes)})"
            )
        if (over := held.host_reserved_bytes - self.machine.host) > 0:
            short.append(f"the host is short of {format_bytes(over)}")
        return short


def plan(
    config: PreTrainedConfig,
    selector: Selector | None = None,
    *,
    context: int,
    batch: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    device_buffer_tokens: int | None = None,
    prefill_chunk: int | None = None,
    dtype: torch.dtype | None = None,
    weights: int | str | None = None,
    misses: float | Mapping[float, float] | Stats | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Say what a context and a batch need with each cache, from a model's configuration alone.

    The bytes of a `HiSparseCache` are what its own layers take when they are grown without memory; those of weights and
    `DynamicCache` are exact as well; activations are an estimate.

    Parameters
    ----------
    config : PreTrainedConfig
    selector : Selector, optional
        Default: ``Quest()`` for models that do not select by themselves.
    context, batch : int
        Tokens of each row, and rows.
    device_memory, host_memory : int or str, optional
        Bytes, or text such as "24GiB". Default: the GPU of this machine, and the host memory that is available.
    device_buffer_tokens : int, optional
        Default: the largest hot buffer that fits.
    prefill_chunk : int, optional
        ``prefill_chunk_size`` of generate. Default: the longest call whose activations take no more than a quarter of what
        the weights leave.
    dtype : torch.dtype, optional
        Default: the configuration's.
    weights : int or str, optional
        What the weights take, where that is not what the configuration says: quantised ones. 0 if they are elsewhere.
    misses : float or mapping or Stats, optional
        Share of what a step reads that must be fetched; or by buffer size as a multiple of what a step reads; or what
        ``cache.stats()`` has counted. Default: a measured curve.
    bandwidth : float, optional
        Bytes per second from pinned host memory to the GPU (see `link_bandwidth`), to tell time as well.

    Raises
    ------
    ValueError
        If the model is not supported or a number makes no sense.
    """
    for name, value in (("context", context), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"plan: {name}={value!r}, must be a whole number of at least 1")
    machine = _Machine(_device_memory(device_memory), _host_memory(host_memory))
    dtype = dtype or model_dtype(config)
    planner = _Planner(config, selector, dtype, machine, _weights(weights, config, dtype), prefill_chunk)
    family = planner.family
    if device_buffer_tokens is None:
        records = planner.records(batch, context)
    else:
        records = checked_buffer(device_buffer_tokens, family) // family.page_size
    caches = planner.compare(batch, context, records)
    resident = records * family.page_size >= context
    curve = misses if misses is not None else DSA_MISSES if planner.selects else QUEST_MISSES
    rate = 0.0 if resident else _miss_rate(curve, records / family.top_k)
    read = caches[-1].device.buffer_bytes // records * family.top_k
    chunk, _ = planner.prefill(batch, context)
    use, advice = _advice(planner, caches, batch, context, records)
    return Plan(
        model=f"{config.model_type}, {str(dtype).removeprefix('torch.')}",
        selector=repr(family),
        context=context,
        batch=batch,
        device_memory=machine.device,
        host_memory=machine.host,
        weights=planner.weights,
        prefill_chunk=chunk,
        caches=caches,
        device_buffer_tokens=records * family.page_size if caches[-1].fits else 0,
        resident=resident,
        miss_rate=rate,
        bytes_per_step=round(read * rate),
        bandwidth=bandwidth,
        use=use,
        advice=advice,
        notes=tuple(_notes(config, context, weights is None)),
    )


def _family(config: PreTrainedConfig, selector: Selector | None) -> tuple[Family, bool]:
    """The family, with `Quest` where a selector is needed and none is given; and whether the model selects by itself."""
    layers = DynamicCache(config=config).layers
    selects = any(hasattr(layer, "update_indexer") or hasattr(layer, "update_index") for layer in layers)
    selector = selector if selects or selector is not None else Quest()
    return family_of(config, selector, "absorb", _PREFILL_MEMORY, True), selects


def _device_memory(size: int | str | None) -> int:
    if size is not None:
        return parse_bytes(size, "device_memory")
    if not torch.cuda.is_available():
        raise ValueError("plan: this machine has no GPU to plan for: give device_memory, for example '24GiB'")
    return torch.cuda.mem_get_info()[1]


def _host_memory(size: int | str | None) -> int:
    return available_host_memory() if size is None else parse_bytes(size, "host_memory")


def _weights(size: int | str | None, config: PreTrainedConfig, dtype: torch.dtype) -> int:
    if size is None:
        return weight_bytes(config, dtype)
    return parse_bytes(size, "weights") if size else 0


def _miss_rate(misses: float | Mapping[float, float] | Stats, multiple: float) -> float:
    """The share that a buffer of `multiple` times what a step reads misses; between points of a curve on a line in logarithms."""
    if isinstance(misses, Stats):
        return 1 - misses.hit_rate
    points = sorted(misses.items()) if isinstance(misses, Mapping) else [(1.0, misses)]
    if not points or not all(size > 0 and 0 <= share <= 1 for size, share in points):
        raise ValueError(f"plan: misses={misses!r}, must be a share from 0 to 1, or shares by buffer size")
    if multiple <= points[0][0]:
        return points[0][1]
    for (low, more), (high, fewer) in itertools.pairwise(points):
        if multiple <= high:
            at = math.log(multiple / low) / math.log(high / low)
            return more ** (1 - at) * fewer**at
    return points[-1][1]


def _advice(
    planner: _Planner, caches: tuple[CachePlan, ...], batch: int, context: int, records: int
) -> tuple[bool, str]:
    """Whether to use HiSparse, and why."""
    dynamic, _, hisparse = caches
    card = format_bytes(planner.machine.device)
    further = (
        f"From batch {dynamic.largest_batch + 1}, or {dynamic.largest_context + 1} tokens, on it does not."
        if hisparse.largest_batch > dynamic.largest_batch
        else "HiSparseCache reaches no further on this machine."
    )
    if dynamic.fits:
        return False, (
            f"Do not use HiSparse here: DynamicCache fits, {format_bytes(dynamic.needed)} of {card}, and is the faster as "
            f"long as it does. {further}"
        )
    if hisparse.fits:
        family, chunk = planner.family, planner.prefill(batch, context)[0]
        selector = "" if planner.selects else f"{family!r}, "
        call = f"HiSparseCache(model, {selector}device_buffer_tokens={records * family.page_size})"
        chunked = "" if chunk >= context else f", prefill_chunk_size={chunk}"
        return True, (
            f"Use HiSparse: DynamicCache needs {format_bytes(dynamic.needed)} of {card}, HiSparseCache "
            f"{format_bytes(hisparse.needed)}.\n  cache = {call}\n"
            f"  model.generate(**inputs, past_key_values=cache{chunked}, max_new_tokens=...)"
        )
    missing = " and ".join(planner.missing(batch, context))
    reach = (
        f"batch {hisparse.largest_batch} at this context"
        if hisparse.largest_batch
        else f"{hisparse.largest_context} tokens at this batch"
        if hisparse.largest_context
        else "nothing of this model"
    )
    return False, f"It cannot fit: {missing}. What fits: {reach}."


def _notes(config: PreTrainedConfig, context: int, counted: bool) -> Iterator[str]:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions and context > positions:
        yield f"{context} tokens are more than the model's max_position_embeddings={positions}: expect worse answers"
    if counted and getattr(config, "quantization_config", None):
        yield "the checkpoint is quantised and its weights are counted as if it were not: give their size (weights)"
    if any(not isinstance(layer, CacheLayerMixin) for layer in DynamicCache(config=config).layers):
        yield "the states of linear attention, which do not grow, are not counted"
