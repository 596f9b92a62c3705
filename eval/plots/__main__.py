"""Plots of measurements, from their CSV files alone.

    python -m eval.plots eval/results/msa.csv            # writes eval/results/msa.png

Needs matplotlib (`pip install -e ".[eval]"`). Which plot: what the file's name begins with.
"""

from __future__ import annotations

from pathlib import Path

from eval.environment import read_csv
from eval.flags import command_line
from eval.plots.capacity import plot_capacity
from eval.plots.kernels import plot_kernels
from eval.plots.msa import plot_msa
from eval.plots.small_card import plot_small_card
from eval.plots.throughput import plot_throughput

PLOTS = {
    "msa": plot_msa,
    "kernels": plot_kernels,
    "throughput": plot_throughput,
    "capacity": plot_capacity,
    "small_card": plot_small_card,
}


def main() -> None:
    """Read a CSV, write a PNG beside it."""
    parser = command_line(__doc__)
    parser.add_argument("csv", type=Path, help=f"the result of eval.{', eval.'.join(PLOTS)}")
    parser.add_argument("--output", type=Path, help="default: the CSV's name with .png")
    args = parser.parse_args()
    kind = next((name for name in PLOTS if args.csv.stem.startswith(name)), None)
    if kind is None:
        raise SystemExit(
            f"{args.csv}: no plot is known for it, only for {', '.join(f'{name}*.csv' for name in PLOTS)}"
        )
    rows = read_csv(args.csv)
    if not rows:
        raise SystemExit(f"{args.csv}: is not there, or holds no rows")
    target = args.output or args.csv.with_suffix(".png")
    PLOTS[kind](rows, target)
    print(f"written: {target}")


if __name__ == "__main__":
    main()
