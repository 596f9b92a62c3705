"""What a model, a context and a batch need, what a machine has, and whether HiSparse is the answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .host_memory import available_host_memory, format_bytes, parse_bytes
from .hosted_layer import LayerSettings
from .models.family import Family, checked_buffer, family_of, native_layers, refuse_sinks
from .models.quest import Quest
from .needs import activation_bytes, empty_model, model_dtype, weight_bytes
from .plan_report import CachePlan, Plan
from .selector import Selector
from .sizes import Buffers, Sizes, largest, whole_records, with_room
from .stats import Memory, Stats

# Share of what a step reads that misses, by buffer size as a multiple of what a step reads.
# SmolLM2-135M, Quest(512), 7,000 tokens of Python's documentation: LRU in eval/results/policies.csv
QUEST_MISSES = {1.0: 0.249, 1.5: 0.116, 2.0: 0.066, 3.0: 0.029, 4.0: 0.016, 6.0: 0.0055, 8.0: 0.0027}
DSA_MISSES = {
    1.0: 0.30,
    2.0: 0.134,
    4.0: 0.067,
}  # GLM-5.1, 100,384 tokens: HiSparse (arXiv 2608.07009), figure 6
_CHUNKS = (32768, 16384, 8192, 4096, 2048, 1024)
_PREFILL_MEMORY = 2**31  # the default of `HiSparseCache`
_SHARE = 4  # calls of prefill are such that HiSparse's hot buffers have most of what weights leave
_USABLE = 0.97  # of a GPU's memory: the allocator's blocks are never filled to the last byte
_MOST_TOKENS, _MOST_ROWS = 2**22, 2**10


class _Needs(NamedTuple):
    """What a cache holds, and the most device memory that it takes at once."""

    memory: Memory
    device: int


class _Chunk(NamedTuple):
    """Tokens per call of prefill, and their activations."""

    rows: int
    activations: int


@dataclass(frozen=True)
class _Planner:
    """The figures of one model on one machine, as functions of batch and context.

    Attributes
    ----------
    sizes : Sizes
    selects : bool
        Whether the model selects by itself.
    weights, device, host : int
        Bytes that the weights take, and that a model may have.
    chunk : int or None
        Tokens per call of prefill, None to choose.
    """

    sizes: Sizes
    selects: bool
    weights: int
    device: int
    host: int
    chunk: int | None

    @property
    def family(self) -> Family:
        """Of the model."""
        return self.sizes.family

    @property
    def left(self) -> int:
        """Device bytes for caches and activations."""
        return int(_USABLE * self.device) - self.weights

    def chunks(self, batch: int, context: int) -> list[_Chunk]:
        """Ways to split a prefill, the longest calls first."""
        sizes = (
            [min(self.chunk, context)]
            if self.chunk
            else [context, *(rows for rows in _CHUNKS if rows < context)]
        )
        extra = _PREFILL_MEMORY if self.selects else 0
        config, dtype = self.sizes.config, self.sizes.dtype
        return [_Chunk(rows, activation_bytes(config, batch, rows, context, dtype, extra)) for rows in sizes]

    def fits(self, needs: _Needs, activations: int) -> bool:
        """Whether a cache fits beside so many bytes of activations."""
        return needs.device + activations <= self.left and needs.memory.host_reserved_bytes <= self.host

    def choose(self, needs: _Needs, batch: int, context: int, share: int = 1) -> _Chunk:
        """The longest calls beside which a cache fits and that take at most one part in `share` of what weights leave."""
        chunks = self.chunks(batch, context)
        good = (
            chunk
            for chunk in chunks
            if share * chunk.activations <= self.left and self.fits(needs, chunk.activations)
        )
        return next(good, chunks[-1])

    def dynamic(self, batch: int, context: int) -> _Needs:
        """A `DynamicCache`; each step needs one layer a second time."""
        layers = self.sizes.dynamic(batch, context)
        return _Needs(Memory(native_bytes=sum(layers)), sum(layers) + max(layers))

    def offloaded(self, batch: int, context: int) -> _Needs:
        """The same, offloaded: two layers on the device, all on the host."""
        layers = self.sizes.dynamic(batch, context)
        held = Memory(native_bytes=2 * max(layers), host_bytes=sum(layers), host_reserved_bytes=sum(layers))
        return _Needs(held, 3 * max(layers))

    def smallest(self, batch: int, context: int) -> _Needs:
        """A `HiSparseCache` with the smallest hot buffer and no room for growth; dense layers on the host if they must be."""
        resident = self.smallest_of(batch, context, may_host=False)
        if resident.device + self.chunks(batch, context)[-1].activations <= self.left:
            return resident
        return self.smallest_of(batch, context, may_host=True)

    def smallest_of(self, batch: int, context: int, may_host: bool) -> _Needs:
        """The same, if dense layers may be on the host, or may not."""
        least = self.sizes.smallest(batch, whole_records(self.family, context), may_host)
        return _Needs(least, least.device_bytes)

    def hisparse(self, batch: int, context: int, capacity: int, buffers: Buffers) -> _Needs:
        """A `HiSparseCache` with room for `capacity` tokens that keeps so much on the device."""
        held = self.sizes.memory(batch, context, capacity, buffers)
        return _Needs(held, held.device_bytes)

    def largest_hisparse(
        self, batch: int, context: int, records: int | None
    ) -> tuple[_Needs, Buffers, _Chunk]:
        """What to give a `HiSparseCache` (with `records` or what fits): its needs, what it keeps, and calls.

        In the order in which a cache tries it: room for growth if that can be had, then dense layers on the device.
        """
        for tokens, may_host in itertools.product((with_room(context), context), (False, True)):
            capacity = whole_records(self.family, tokens)
            chunk = self.choose(self.smallest_of(batch, context, may_host), batch, context, share=_SHARE)
            limit = self.left - chunk.activations
            found = self.sizes.largest_buffers(batch, capacity, limit, hosted=None if may_host else False)
            found = Buffers(records) if records else found
            buffers = found or Buffers(self.family.top_k, 0 if self.family.dense else None)
            needs = self.hisparse(batch, context, capacity, buffers)
            if found and self.fits(needs, chunk.activations):
                break
        return needs, buffers, chunk

    def cache(
        self,
        name: str,
        needs: _Needs,
        chunk: _Chunk,
        measure: Callable[[int, int], _Needs],
        batch: int,
        context: int,
    ) -> CachePlan:
        """What one kind of cache needs, and how far it reaches (`measure`)."""

        return CachePlan(
            name,
            needs.memory,
            chunk.rows,
            chunk.activations,
            self.weights + chunk.activations + needs.device,
            self.fits(needs, chunk.activations),
            self.reach(measure, lambda rows: (rows, context), _MOST_ROWS),
            self.reach(measure, lambda tokens: (batch, tokens), _MOST_TOKENS),
        )

    def reach(
        self, measure: Callable[[int, int], _Needs], sizes: Callable[[int], tuple[int, int]], most: int
    ) -> int:
        """The largest number for which a cache of these batch and context fits, beside the shortest calls of prefill."""

        def device(number: int) -> int:
            return measure(*sizes(number)).device + self.chunks(*sizes(number))[-1].activations

        def host(number: int) -> int:
            return measure(*sizes(number)).memory.host_reserved_bytes

        return min(largest(device, 1, most, self.left), largest(host, 1, most, self.host))

    def missing(self, batch: int, context: int) -> list[str]:
        """What there is too little of for a `HiSparseCache`."""
        if self.weights >= self.device:
            return [f"the weights alone take {format_bytes(self.weights)} (quantise them, or use more GPUs)"]
        needs, activations = self.smallest(batch, context), self.chunks(batch, context)[-1].activations
        held = needs.memory
        short = []
        if (over := needs.device + activations - self.left) > 0:
            short.append(
                f"the GPU is short of {format_bytes(over)} even with the smallest hot buffer, {self.family.top_k} records "
                f"(selector state {format_bytes(held.selector_bytes)}, KV that stays there {format_bytes(held.native_bytes)})"
            )
        if (over := held.host_reserved_bytes - self.host) > 0:
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
        ``prefill_chunk_size`` of generate. Default: the longest calls beside which the cache fits.
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
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"plan: {config!r:.80} is no model's config: AutoConfig.from_pretrained brings it")
    for name, value in (("context", context), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"plan: {name}={value!r}, must be a whole number of at least 1")
    if prefill_chunk is not None and (not isinstance(prefill_chunk, int) or prefill_chunk < 1):
        raise ValueError(f"plan: prefill_chunk={prefill_chunk!r}, must be a whole number of at least 1")
    if bandwidth is not None and not 1e6 <= bandwidth < math.inf:
        raise ValueError(
            f"plan: bandwidth={bandwidth!r} bytes per second, must be a number of at least 1e6: 25 GB/s are 25e9"
        )
    dtype = dtype or model_dtype(config)
    family, selects = _family(config, selector)
    settings = LayerSettings(family.top_k, family.top_k, 32, False, 0)
    planner = _Planner(
        Sizes(config, family, settings, dtype),
        selects,
        _weights(weights, config, dtype, family),
        _device_memory(device_memory),
        _host_memory(host_memory),
        prefill_chunk,
    )
    asked = None
    if device_buffer_tokens is not None:
        asked = checked_buffer(device_buffer_tokens, family) // family.page_size
    needs, buffers, chunk = planner.largest_hisparse(batch, context, asked)
    records, streamed = buffers.records, planner.sizes.streamed(batch, context, buffers)
    caches = [planner.cache("HiSparseCache", needs, chunk, planner.smallest, batch, context)]
    for name, measure in (("offloaded", planner.offloaded), ("DynamicCache", planner.dynamic)):
        other = measure(batch, context)
        chunk = planner.choose(other, batch, context)
        caches.insert(0, planner.cache(name, other, chunk, measure, batch, context))
    resident = records * family.page_size >= context
    curve = misses if misses is not None else DSA_MISSES if selects else QUEST_MISSES
    expected = _miss_rate(curve, records / family.top_k)
    rate = 0.0 if resident else expected
    read = needs.memory.buffer_bytes // records * family.top_k
    use, advice = _advice(planner, caches, batch, context, buffers)
    return Plan(
        model=f"{config.model_type}, {str(dtype).removeprefix('torch.')}",
        selector=repr(family),
        context=context,
        batch=batch,
        device_memory=planner.device,
        host_memory=planner.host,
        weights=planner.weights,
        caches=tuple(caches),
        device_buffer_tokens=records * family.page_size if caches[-1].fits else 0,
        resident=resident,
        miss_rate=rate,
        bytes_per_step=round(read * rate) + streamed,
        streamed=streamed,
        bandwidth=bandwidth,
        use=use,
        advice=advice,
        notes=tuple(_notes(config, context, weights is None)),
    )


def _family(config: PreTrainedConfig, selector: Selector | None) -> tuple[Family, bool]:
    """The family, with `Quest` where a selector is needed and none is given; and whether the model selects by itself."""
    layers = native_layers(config)
    selects = any(hasattr(layer, "update_indexer") or hasattr(layer, "update_index") for layer in layers)
    selector = selector if selects or selector is not None else Quest()
    return family_of(config, selector, "absorb", "per_group", _PREFILL_MEMORY, True), selects


def _device_memory(size: int | str | None) -> int:
    if size is not None:
        return parse_bytes(size, "device_memory")
    if not torch.cuda.is_available():
        raise ValueError(
            "plan: this machine has no GPU to plan for: give device_memory (--device-memory), for example '24GiB'"
        )
    return torch.cuda.mem_get_info()[1]


def _host_memory(size: int | str | None) -> int:
    return available_host_memory() if size is None else parse_bytes(size, "host_memory")


def _weights(size: int | str | None, config: PreTrainedConfig, dtype: torch.dtype, family: Family) -> int:
    if size is None:
        model = empty_model(config, dtype)
        refuse_sinks(model, family)
        return weight_bytes(model)
    return 0 if str(size) == "0" else parse_bytes(size, "weights")


def _miss_rate(misses: float | Mapping[float, float] | Stats, multiple: float) -> float:
    """The share that a buffer of `multiple` times what a step reads misses; between points of a curve on a line in logarithms."""
    if isinstance(misses, Stats):
        if not misses.selected:
            raise ValueError(
                "plan: misses=cache.stats() of a cache that has decoded nothing yet: decode some tokens first"
            )
        return 1 - misses.hit_rate
    points = list(misses.items()) if isinstance(misses, Mapping) else [(1.0, misses)]
    numbers = all(isinstance(number, int | float) for point in points for number in point)
    if (
        not points
        or not numbers
        or not all(0 < size < math.inf and 0 <= share <= 1 for size, share in points)
    ):
        raise ValueError(
            f"plan: misses={misses!r}, must be a share from 0 to 1, shares by buffer size, or what cache.stats() gives"
        )
    points.sort()
    if multiple <= points[0][0]:
        return points[0][1]
    for (low, more), (high, fewer) in itertools.pairwise(points):
        if multiple <= high:
            at = math.log(multiple / low) / math.log(high / low)
            return more ** (1 - at) * fewer**at
    return points[-1][1]


def _advice(
    planner: _Planner, caches: list[CachePlan], batch: int, context: int, buffers: Buffers
) -> tuple[bool, str]:
    """Whether to use HiSparse, and why."""
    dynamic, _, hisparse = caches
    card = format_bytes(planner.device)
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
        family, chunk = planner.family, hisparse.prefill_chunk
        selector = "" if planner.selects else f"{family!r}, "
        roomy = planner.hisparse(batch, context, whole_records(family, with_room(context)), buffers)
        buffer = f"device_buffer_tokens={buffers.records * family.page_size}"
        # A limit keeps the cache from making room for more, and moves dense layers to the host.
        if buffers.dense is not None or not planner.fits(roomy, hisparse.activations):
            buffer = f"device_memory={hisparse.device.device_bytes}"
        call = f"HiSparseCache(model, {selector}{buffer})"
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
    if any(not isinstance(layer, CacheLayerMixin) for layer in native_layers(config)):
        yield "the states of linear attention, which do not grow, are not counted"
