"""Decode steps of an unchanged `generate` with any cache on a filled history: what they take, move and hold, and the floors."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.answers import Clock, generate_exactly
from eval.environment import free_memory
from eval.floors import beside, bytes_read, kv_bytes_held
from eval.history import fill
from eval.methods import kv_bytes
from eval.selections import Workload, play
from hf_hisparse import HiSparseCache, Quest, disable, enable
from hf_hisparse.models.family import family_of
from hf_hisparse.sizes import whole_records

CONTENDERS = {
    "hisparse": "HiSparseCache, KV on the host",
    "hisparse-resident": "HiSparseCache with buffers that hold everything",
    "dynamic": "DynamicCache, sdpa",
    "static": "StaticCache, compiled by generate itself, timed after that",
    "offloaded": "DynamicCache(offloading=True); needs a GPU",
}
LEAST = 4  # tokens of a run that is short of time: two steps after the first
COMPILING = 8  # tokens for `generate` to compile in


@dataclass(frozen=True)
class Run:
    """What to decode.

    Attributes
    ----------
    cache : str
        One of `CONTENDERS`.
    batch, context : int
        Rows, and tokens of each that are held before the first step.
    new_tokens : int
    device_buffer_tokens : int
        Of "hisparse".
    seconds : float
        No further token after so many, once there are `LEAST`.
    """

    cache: str
    batch: int
    context: int
    new_tokens: int
    device_buffer_tokens: int
    seconds: float = 60.0

    @property
    def room(self) -> int:
        """Tokens that a row holds at the end."""
        return self.context + self.new_tokens + COMPILING + 1


class Contenders:
    """Empty caches for one model; all its `HiSparseCache`s are one, which keeps its pinned memory.

    Parameters
    ----------
    model : PreTrainedModel
    quest : Quest
    host_memory : int or str, optional
        Of the `HiSparseCache`.
    """

    def __init__(self, model: PreTrainedModel, quest: Quest, host_memory: int | str | None = None) -> None:
        self.model, self.quest, self.host_memory = model, quest, host_memory
        self.family = family_of(model.config, quest, "absorb", "per_group", 0, True)
        self._kept: HiSparseCache | None = None

    def empty(self, run: Run) -> Cache:
        """The cache for a run."""
        config = self.model.config
        if run.cache.startswith("hisparse"):
            return self._hisparse(self.buffer_tokens(run))
        disable(self.model)
        if run.cache == "dynamic":
            return DynamicCache(config=config)
        if run.cache == "static":
            return StaticCache(config=config, max_cache_len=run.room)
        if run.cache == "offloaded":
            return DynamicCache(config=config, offloading=True)
        raise ValueError(f"cache {run.cache!r}, must be one of {', '.join(CONTENDERS)}")

    def buffer_tokens(self, run: Run) -> int:
        """Tokens of the hot buffers of a `HiSparseCache`."""
        everything = whole_records(self.family, run.room)
        return everything if run.cache == "hisparse-resident" else run.device_buffer_tokens

    def _hisparse(self, buffer_tokens: int) -> HiSparseCache:
        if self._kept is None:
            self._kept = HiSparseCache(
                self.model, self.quest, device_buffer_tokens=buffer_tokens, host_memory=self.host_memory
            )
        enable(self.model)
        self._kept.reset()
        self._kept.resize_buffers(buffer_tokens)
        return self._kept

    def rest(self) -> None:
        """Give back all device memory, and pinned memory that torch keeps."""
        if self._kept is not None:
            self._kept.reset()
            self._kept.resize_buffers(self.quest.token_budget)
        torch._dynamo.reset()
        free_memory()
        if torch.cuda.is_available():
            torch._C._host_emptyCache()  # of offloading

    def close(self) -> None:
        """Give back everything."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        self.rest()


class Deadline(Clock):
    """A clock that lets no further token come after so many seconds, once there are `LEAST`."""

    def __init__(self, bar: tqdm, seconds: float) -> None:
        super().__init__(bar)
        self.seconds = seconds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        go_on = super().__call__(input_ids, scores, **kwargs)
        late = len(self.times) >= LEAST and self.times[-1] - self.times[0] > self.seconds
        return torch.ones_like(go_on) if late else go_on


def decode(contenders: Contenders, run: Run, workload: Workload | None) -> dict[str, Any]:
    """Fill a cache and decode; without a workload, Quest selects by itself."""
    model, cache, device = contenders.model, contenders.empty(run), contenders.model.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    selections = {}
    if workload is not None and isinstance(cache, HiSparseCache):
        heads, slots = (
            model.config.num_key_value_heads,
            contenders.buffer_tokens(run) // workload.quest.page_size,
        )
        selections = {
            layer: workload.of_layer(index, run.batch, heads, run.context, run.new_tokens, slots, device)
            for index, layer in enumerate(contenders.family.hosted)
        }
    fill(cache, model, run.batch, run.context, {layer: each.recent for layer, each in selections.items()})
    if selections:
        play(cache, selections)
    tokens = run.context + 1
    if isinstance(cache, StaticCache):
        _generate(model, cache, run, tokens, COMPILING)
        tokens += COMPILING
    clock = _generate(model, cache, run, tokens, run.new_tokens)
    result = _times(clock, run.batch)
    if cuda:
        result["cache_bytes_allocator"] = torch.cuda.memory_allocated() - held
        result["peak_bytes_allocator"] = torch.cuda.max_memory_allocated()
    return result | _held(cache, device) | _traffic(model, cache, run, result["ms_per_step"])


def _generate(model: PreTrainedModel, cache: Cache, run: Run, held: int, new_tokens: int) -> Deadline:
    """Decode on top of ``held - 1`` tokens; when each token came."""
    ids = torch.randint(10, model.config.vocab_size, (run.batch, held), device=model.device)
    with tqdm(total=new_tokens, desc=f"{run.cache} {run.context} x {run.batch}", leave=False) as bar:
        clock = Deadline(bar, run.seconds)
        generate_exactly(model, cache, ids, new_tokens, clock)
    return clock


def _times(clock: Clock, batch: int) -> dict[str, Any]:
    first, *steps = [1000 * (after - before) for before, after in itertools.pairwise(clock.times)]
    median = statistics.median(steps)
    return {
        "ms_per_step": round(median, 3),
        "ms_min": round(min(steps), 3),
        "ms_max": round(max(steps), 3),
        "ms_first_step": round(first, 3),  # allocates and captures; not among the others
        "steps": len(steps),
        "tokens_per_s": round(1000 * batch / median, 2),
    }


def _held(cache: Cache, device: torch.device) -> dict[str, Any]:
    if not isinstance(cache, HiSparseCache):
        return {"native_bytes": kv_bytes(cache, device)}
    memory, stats = cache.memory(), cache.stats()
    return {
        "hit_rate": round(stats.hit_rate, 4),
        "device_buffer_tokens": cache.sparse_layers[0].buffer_records * cache.sparse_layers[0].layout.tokens,
        "buffer_bytes": memory.buffer_bytes,
        "selector_bytes": memory.selector_bytes,
        "table_bytes": memory.table_bytes,
        "native_bytes": memory.native_bytes,
        "host_bytes": memory.host_bytes,
    }


def _traffic(model: PreTrainedModel, cache: Cache, run: Run, ms: float) -> dict[str, Any]:
    """What a step reads and moves (see `eval.floors`)."""
    moved = selected = 0.0
    if isinstance(cache, HiSparseCache):
        stats = cache.stats()
        selected = stats.selected * cache.sparse_layers[0].layout.nbytes / stats.steps
        moved = stats.bytes_fetched / stats.steps
    elif run.cache == "offloaded":
        moved = kv_bytes_held(model, run.batch, run.context)
    return beside(bytes_read(model, cache, run.batch, run.context, selected), moved, ms)
