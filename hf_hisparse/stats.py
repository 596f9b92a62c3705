"""What a cache has read, hit, missed and moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerStats:
    """Counters of one hosted layer, summed over its lanes.

    Attributes
    ----------
    layer_idx : int
    steps : int
        Sparse decode steps, one for each token: a short call of several tokens is as many steps.
    selected : int
        Records that were read.
    misses : int
        Records among them that were fetched from the host.
    record_bytes : int
        Bytes of one record.
    dense : bool
        Whether the layer reads everything, nothing being selected.
    """

    layer_idx: int
    steps: int = 0
    selected: int = 0
    misses: int = 0
    record_bytes: int = 0
    dense: bool = False

    @property
    def hits(self) -> int:
        """Records that were in the hot buffer already."""
        return self.selected - self.misses

    @property
    def hit_rate(self) -> float:
        """Hits among the records read; NaN before the first."""
        return self.hits / self.selected if self.selected else float("nan")

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came from the host."""
        return self.misses * self.record_bytes


@dataclass(frozen=True)
class Stats:
    """Counters of a cache: per hosted layer in `layers`, and in all; `print` shows a table.

    Of layers that read everything (`LayerStats.dense`) the bytes are counted with the others', the records are not: no
    selection and no buffer's size would change them.
    """

    layers: tuple[LayerStats, ...]

    @property
    def _selecting(self) -> list[LayerStats]:
        return [layer for layer in self.layers if not layer.dense]

    @property
    def steps(self) -> int:
        """Sparse decode steps, one for each token."""
        return max((layer.steps for layer in self.layers), default=0)

    @property
    def selected(self) -> int:
        """Records that were read."""
        return sum(layer.selected for layer in self._selecting)

    @property
    def misses(self) -> int:
        """Records that were fetched from the host."""
        return sum(layer.misses for layer in self._selecting)

    @property
    def hits(self) -> int:
        """Records that were in the hot buffer already."""
        return self.selected - self.misses

    @property
    def hit_rate(self) -> float:
        """Hits among the records read; NaN before the first."""
        return self.hits / self.selected if self.selected else float("nan")

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came from the host."""
        return sum(layer.bytes_fetched for layer in self.layers)

    def __repr__(self) -> str:
        if not self.selected:
            return "nothing decoded yet (a call of more than decode_rows new tokens per row is prefill)"
        head = f"{'layer':>6} {'steps':>7} {'selected':>12} {'hits':>12} {'misses':>12} {'hit rate':>9} {'MB fetched':>11}"
        rows: list[tuple[str, LayerStats | Stats]] = [
            (f"{layer.layer_idx}{'*' * layer.dense}", layer) for layer in self.layers
        ]
        lines = [head]
        for name, row in [*rows, ("all", self)]:
            lines.append(
                f"{name:>6} {row.steps:>7} {row.selected:>12} {row.hits:>12} {row.misses:>12} "
                f"{row.hit_rate:>9.2%} {row.bytes_fetched / 1e6:>11.2f}"
            )
        if len(self._selecting) < len(self.layers):
            lines.append("* dense: reads everything; of these layers only the MB count in the last line")
        return "\n".join(lines)


@dataclass(frozen=True)
class Memory:
    """Where the bytes of a cache are.

    Attributes
    ----------
    buffer_bytes : int
        Hot buffers on the GPU: lanes x hosted layers x records x bytes of a record.
    selector_bytes : int
        Selector state on the GPU; grows with the history.
    table_bytes : int
        Page tables, orders and counters on the GPU.
    native_bytes : int
        KV of the native layers on the GPU, room for growth included; of dense layers on the host, what stays on the GPU.
    host_bytes : int
        Records in use on the host.
    host_reserved_bytes : int
        Host memory held (pinned where there is a GPU).
    """

    buffer_bytes: int = 0
    selector_bytes: int = 0
    table_bytes: int = 0
    native_bytes: int = 0
    host_bytes: int = 0
    host_reserved_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """All of it that is on the GPU."""
        return self.buffer_bytes + self.selector_bytes + self.table_bytes + self.native_bytes
