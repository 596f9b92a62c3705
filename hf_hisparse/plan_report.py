"""What one kind of cache needs, and all that `plan` says, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .host_memory import format_bytes
from .stats import Memory


@dataclass(frozen=True)
class CachePlan:
    """What one kind of cache needs, and how far it reaches.

    Attributes
    ----------
    name : str
    device : Memory
        Its bytes; of `DynamicCache` all are `native_bytes`.
    prefill_chunk : int
        Tokens per call of prefill that the activations are for.
    activations : int
        The estimate of `activation_bytes`.
    needed : int
        Device bytes in all: weights, activations, cache.
    fits : bool
    largest_batch : int
        Rows of this context that fit, 0 if none.
    largest_context : int
        Tokens of this batch that fit, 0 if none.
    """

    name: str
    device: Memory
    prefill_chunk: int
    activations: int
    needed: int
    fits: bool
    largest_batch: int
    largest_context: int


@dataclass(frozen=True)
class Plan:
    """The answer of `plan`; `print` shows it.

    Attributes
    ----------
    model, selector : str
    context, batch : int
    device_memory, host_memory : int
        Bytes there are.
    weights : int
        Bytes; see `weight_bytes`.
    caches : tuple of CachePlan
        `DynamicCache`, the same offloaded, `HiSparseCache`.
    device_buffer_tokens : int
        What to give `HiSparseCache`, 0 if it does not fit.
    resident : bool
        Whether the whole history stays on the GPU with that.
    miss_rate : float
        Share of what a step reads that must be fetched, expected or given.
    bytes_per_step : int
        Expected link traffic of one decode step of all rows.
    streamed : int
        What of it is dense layers, which move to the host where `device_memory` is too little for them.
    bandwidth : float or None
        Of the link, bytes per second.
    use : bool
        Whether HiSparse is advised.
    advice : str
    notes : tuple of str
        What the figures do not say.
    """

    model: str
    selector: str
    context: int
    batch: int
    device_memory: int
    host_memory: int
    weights: int
    caches: tuple[CachePlan, ...]
    device_buffer_tokens: int
    resident: bool
    miss_rate: float
    bytes_per_step: int
    streamed: int
    bandwidth: float | None
    use: bool
    advice: str
    notes: tuple[str, ...]

    @property
    def memory(self) -> Memory:
        """Where the bytes of the `HiSparseCache` would be, after a prefill of the whole context."""
        return self.caches[-1].device

    def __str__(self) -> str:
        def row(label: str, value: Callable[[CachePlan], str]) -> str:
            return f"{label:<30}" + "".join(f"{value(cache):>15}" for cache in self.caches)

        def size(label: str, name: str) -> str:
            return row(label, lambda cache: format_bytes(getattr(cache.device, name) or 0))

        lines = [
            f"{self.model}, {self.context} tokens x {self.batch}, {self.selector}",
            f"GPU {format_bytes(self.device_memory)}, host {format_bytes(self.host_memory)}",
            "",
            row("", lambda cache: cache.name),
            row("weights", lambda cache: format_bytes(self.weights)),
            row("prefill, tokens per call", lambda cache: str(cache.prefill_chunk)),
            row("activations (estimate)", lambda cache: format_bytes(cache.activations)),
            size("hot buffers", "buffer_bytes"),
            size("selector state", "selector_bytes"),
            size("page tables, order, masks", "table_bytes"),
            size("KV of layers on the GPU", "native_bytes"),
            row("GPU in all", lambda cache: format_bytes(cache.needed)),
            size("host", "host_reserved_bytes"),
            row("fits", lambda cache: "yes" if cache.fits else "no"),
            row(f"largest batch at {self.context}", lambda cache: str(cache.largest_batch)),
            row(f"largest context at batch {self.batch}", lambda cache: str(cache.largest_context)),
            "",
        ]
        if self.device_buffer_tokens:
            reach = "the whole history" if self.resident else f"{self.miss_rate:.1%} of reads missing"
            time = "" if not self.bandwidth else f", {1000 * self.bytes_per_step / self.bandwidth:.2f} ms"
            lines += [
                f"device_buffer_tokens={self.device_buffer_tokens} ({reach}): "
                f"{self.bytes_per_step / 1e6:.1f} MB over the link per step{time}",
                f"per token: {self.bytes_per_step / self.batch / 1e6:.1f} MB",
            ]
            if self.streamed:
                lines += [f"{self.streamed / 1e6:.1f} MB per step are dense layers, which are on the host"]
        return "\n".join([*lines, self.advice, *(f"Note: {note}" for note in self.notes)])
