"""Markdown tables of measurements, from their CSV files alone.

    python -m eval.tables eval/results/capacity.csv

Which table: what the file's name begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eval.environment import read_csv
from eval.flags import command_line

Row = dict[str, str]
Lines = Iterable[Sequence[str]]


def throughput(rows: list[Row]) -> Lines:
    """A line per run: its time with its spread, the least it could be, and what it is of the others'."""
    yield (
        "context x batch", "cache", "ms per step (fastest to slowest)", "floor, ms", "hits", "read, GB/s", "moved, MB (GB/s)",
        "of resident", "of HiSparse",
    )  # fmt: skip
    for row in rows:
        place = (f"{int(row['context']):,} x {row['batch']}", row["cache"])
        if not row.get("ms_per_step"):
            yield (*place, f"cannot run: {row['error']}", *[""] * 6)
            continue
        floor = max(float(row["memory_floor_ms"]), float(row["link_floor_ms"]))
        yield (
            *place,
            f"{_digits(row['ms_per_step'])} ({_digits(row['ms_min'])} to {_digits(row['ms_max'])})",
            _digits(floor),
            f"{float(row['hit_rate']):.1%}" if row.get("hit_rate") else "",
            _digits(row["read_GB_per_s"]),
            f"{_digits(row['MB_moved_per_step'])} ({_digits(row['moved_GB_per_s'])})",
            _digits(row.get("times_resident")),
            _digits(row.get("times_hisparse")),
        )


def capacity(rows: list[Row]) -> Lines:
    """A line per model, memory and context; tokens per second and batch of each cache."""
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    yield ("model", "memory", "context", *caches, "hisparse of the best dense", "fastest")
    for place in dict.fromkeys((row["model"], row["memory"], row["context"]) for row in rows):
        of = {row["cache"]: row for row in rows if (row["model"], row["memory"], row["context"]) == place}
        speeds = [
            f"{_digits(row['tokens_per_s'])} (batch {row['batch']})"
            if row is not None and row.get("tokens_per_s")
            else ("-" if row is None else "cannot run")
            for row in (of.get(name) for name in caches)
        ]
        ours = of.get("hisparse", {})
        dense = [of[name] for name in ("dynamic", "static", "offloaded") if name in of]
        if any(row.get("tokens_per_s") for row in dense):
            ratio = _digits(ours.get("times_best_dense"))
        else:
            ratio = "no dense cache runs" if dense else "-"
        fastest = max(of, key=lambda name: float(of[name].get("tokens_per_s") or 0))
        yield (place[0], place[1], f"{int(place[2]):,}", *speeds, ratio, fastest)


def kernels(rows: list[Row]) -> Lines:
    """A line per measurement, with what stands beside its time."""
    yield (
        "what", "lanes x misses", "read of slots", "record, bytes", "us (spread)", "GB/s", "link floor", "copy engine",
        "memory floor", "goal", "of the slower part",
    )  # fmt: skip
    for row in rows:
        misses = row.get("misses_per_lane")
        yield (
            row["what"] + (f", {row['heads']} heads" if row.get("heads") else ""),
            row["lanes"] + (f" x {_digits(misses)}" if misses else ""),
            f"{int(row['k']):,}" + (f" of {int(row['slots']):,}" if row.get("slots") else ""),
            f"{int(row['record_bytes']):,}" if row.get("record_bytes") else "",
            f"{_digits(row['us'])} ({_digits(row['us_spread'])})",
            _digits(row.get("GB_per_s")),
            *(_digits(row.get(name)) for name in ("link_floor_us", "copy_engine_us", "memory_floor_us")),
            _digits(row.get("goal_us")),
            _digits(row.get("times_slower_part")),
        )


def prefetch(rows: list[Row]) -> Lines:
    """A line per model and history; the IO that a step waits for is what it takes over the same step without any."""
    ways = ("resident", "resident, in turn", "in turn", "prefetch", "ahead")
    yield (
        "layers of one selection",
        "history x batch",
        *(f"{way}, ms" for way in ways),
        "IO waited for, ms: in turn, prefetch, ahead",
    )
    names = ("share", "history", "batch")
    for place in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        here = [row for row in rows if tuple(row[name] for name in names) == place]
        ms = {row["way"]: float(row["ms_per_step"]) for row in here}
        without = {"in turn": "oracle, in turn", "prefetch": "oracle, in turn", "ahead": "oracle"}
        waited = [f"{ms[way] - ms[bound]:.2f}" if way in ms else "-" for way, bound in without.items()]
        yield (
            place[0],
            f"{int(place[1]):,} x {place[2]}",
            *(_digits(ms[way]) if way in ms else "-" for way in ways),
            ", ".join(waited),
        )


def small_card(rows: list[Row]) -> Lines:
    """A line per turn: its times and its peaks."""
    yield (
        "cache, selection", "turn", "tokens then", "prompt, s", "ms per token (slowest)", "hits", "MB per step",
        "tensors, GiB", "torch holds, GiB", "outside, GiB",
    )  # fmt: skip
    for row in rows:
        times = ("out of memory", "", "", "")
        if not row["error"]:
            times = (
                _digits(row["prefill_s"]),
                f"{_digits(row['ms_per_token'])} ({_digits(row['ms_max'])})",
                f"{float(row['hit_rate']):.1%}" if row.get("hit_rate") else "",
                _digits(row.get("MB_fetched_per_step")),
            )
        peaks = (row.get(f"{name}_bytes") for name in ("peak_allocated", "peak_reserved", "outside"))
        yield (
            f"{row['cache']}, {row['selection']}",
            row["turn"],
            f"{int(row['tokens']):,}",
            *times,
            *(f"{int(peak) / 2**30:.2f}" if peak else "" for peak in peaks),
        )


def prefill(rows: list[Row]) -> Lines:
    """A line per cache and chunk."""
    yield ("tokens by chunk", "cache", "s (first)", "peak over the weights, GB", "of DynamicCache")
    for row in rows:
        peak = row.get("peak_bytes_over_weights")
        yield (
            f"{int(row['tokens']):,} by {int(row['chunk']):,}",
            row["cache"],
            f"{_digits(row['s'])} ({_digits(row['first_s'])})",
            f"{int(peak) / 1e9:.1f}" if peak else "",
            _digits(row.get("times_dynamic")),
        )


TABLES: dict[str, Callable[[list[Row]], Lines]] = {
    "throughput": throughput,
    "capacity": capacity,
    "kernels": kernels,
    "prefetch": prefetch,
    "small_card": small_card,
    "prefill": prefill,
}


def markdown(lines: Lines) -> str:
    """The lines, the first of which is the head."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * head.count(" | ") + "---|", *body])


def _digits(value: str | float | None) -> str:
    """Three digits, none of a whole number lost; nothing for what there is not."""
    if value in (None, "", "nan") or value != value:
        return ""
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def main() -> None:
    """Print the table of a CSV."""
    parser = command_line(__doc__)
    parser.add_argument("csv", type=Path, help=f"the result of eval.{', eval.'.join(TABLES)}")
    path = parser.parse_args().csv
    kind = next((name for name in TABLES if path.stem.startswith(name)), None)
    if kind is None:
        raise SystemExit(
            f"{path}: no table is known for it, only for {', '.join(f'{name}*.csv' for name in TABLES)}"
        )
    rows = read_csv(path)
    if not rows:
        raise SystemExit(f"{path}: is not there, or holds no rows")
    print(markdown(TABLES[kind](rows)))


if __name__ == "__main__":
    main()
