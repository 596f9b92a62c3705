"""The command line: ``python -m hf_hisparse plan MODEL --context 131072``."""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoConfig

from .link import link_bandwidth
from .models.quest import Quest
from .planner import plan


def _curve(text: str) -> float | dict[float, float]:
    """``0.08``, or ``1:0.27,2:0.08,4:0.02``: shares by buffer size as a multiple of what a step reads."""
    if ":" not in text:
        return float(text)
    points = [(float(size), float(share)) for size, share in (point.split(":") for point in text.split(","))]
    curve = dict(points)
    if len(curve) < len(points):
        raise argparse.ArgumentTypeError(f"{text!r} gives a buffer size twice")
    return curve


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hf_hisparse", description="HiSparse for transformers")
    command = parser.add_subparsers(required=True, metavar="plan").add_parser(
        "plan",
        help="what a context and a batch need with each cache, and whether to use HiSparse",
        description=(plan.__doc__ or "").split("\n\n    Parameters")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("model", help="id on the hub, folder, or config.json; its weights are not needed")
    add("--context", type=int, required=True, help="tokens per row")
    add("--batch", type=int, default=1, help="rows")
    add("--device-memory", help="of the GPU, as '24GiB'; default: this machine's")
    add("--host-memory", help="default: what this machine has available")
    add(
        "--token-budget",
        type=int,
        help=f"tokens that a query reads, for models that do not select by themselves; default {Quest.token_budget}",
    )
    add("--page-size", type=int, help=f"of Quest, default {Quest.page_size}")
    add("--dense-layers", type=int, help=f"of Quest, default {Quest.dense_layers}")
    add("--device-buffer-tokens", type=int, help="default: the largest hot buffer that fits")
    add("--prefill-chunk", type=int, help="prefill_chunk_size of generate")
    add("--dtype", choices=["bfloat16", "float16", "float32"])
    add("--weights", help="what the weights take, where they are quantised: '9GiB'")
    add(
        "--misses",
        type=_curve,
        help="share of reads that miss: 0.08, or by buffer size: 1:0.27,2:0.08,4:0.02",
    )
    link = command.add_mutually_exclusive_group()
    link.add_argument("--probe", action="store_true", help="measure the link of this machine's GPU")
    link.add_argument("--bandwidth", type=float, help="of the link, in GB per second")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print a plan."""
    args = _arguments(arguments)
    if args.probe and not torch.cuda.is_available():
        sys.exit(
            "--probe measures the link to a GPU, and this machine has none: give --bandwidth, or neither"
        )
    try:
        config = AutoConfig.from_pretrained(args.model)
        given = {name: getattr(args, name) for name in ("token_budget", "page_size", "dense_layers")}
        given = {name: value for name, value in given.items() if value is not None}
        selector = Quest(**given) if given else None
        bandwidth = None if args.bandwidth is None else 1e9 * args.bandwidth
        print(
            plan(
                config,
                selector,
                context=args.context,
                batch=args.batch,
                device_memory=args.device_memory,
                host_memory=args.host_memory,
                device_buffer_tokens=args.device_buffer_tokens,
                prefill_chunk=args.prefill_chunk,
                dtype=args.dtype and getattr(torch, args.dtype),
                weights=args.weights,
                misses=args.misses,
                bandwidth=link_bandwidth() if args.probe else bandwidth,
            )
        )
    except (OSError, ValueError) as error:
        sys.exit(f"{args.model}: {error}")


if __name__ == "__main__":
    main()
