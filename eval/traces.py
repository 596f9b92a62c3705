"""Selections to decode with: where records are read again decides what must be moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Share of a selection of k records that an LRU buffer of 1, 2 and 4 times k misses: HiSparse (arXiv 2608.07009), figure 6.
PAPER_CURVE = {1.0: 0.30, 2.0: 0.134, 4.0: 0.067}


def synthetic_trace(
    lanes: int,
    k: int,
    history: int,
    steps: int,
    curve: Mapping[float, float] = PAPER_CURVE,
    seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """Random selections with a set LRU miss curve.

    Records are kept in a stack, the most recently read on top. Each step reads, from each stretch of the stack between two
    points of the curve, the number of records that the curve says, evenly at random: so an LRU buffer of the size of a point
    misses that share (the newest token, which decoding appends, comes on top).

    Parameters
    ----------
    lanes, k, history, steps : int
        Each step reads `k` different records out of `history` in each lane.
    curve : mapping
        Buffer size as a multiple of `k` -> share of the selection that it misses.
    seed : int
    device : str
        Where the trace is made.

    Returns
    -------
    int32 ``[steps, lanes, k]``

    Raises
    ------
    ValueError
        If the history is too short for the curve.
    """
    points = sorted(curve.items())
    edges = [0, *(round(size * k) for size, _ in points), history]
    shares = [1.0, *(share for _, share in points), 0.0]
    counts = [round(k * (shares[i] - shares[i + 1])) for i in range(len(points) + 1)]
    counts[0] += k - sum(counts)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        if count > high - low:
            raise ValueError(
                f"a trace of k={k} over {history} records cannot read {count} of the {high - low} records between {low} and "
                f"{high} in the stack: take a longer history or another curve"
            )
    generator = torch.Generator(device=device).manual_seed(seed)
    stack = torch.rand((lanes, history), generator=generator, device=device).argsort(dim=1).int()
    trace = torch.empty((steps, lanes, k), dtype=torch.int32, device=device)
    for step in range(steps):
        places = []
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
            order = torch.rand((lanes, high - low), generator=generator, device=device)
            places.append(low + order.topk(count, dim=1).indices)
        place = torch.cat(places, dim=1)
        read = stack.gather(1, place)
        rest = torch.ones_like(stack, dtype=torch.bool).scatter_(1, place, False)
        stack = torch.cat([read, stack[rest].view(lanes, history - k)], dim=1)
        shuffle = torch.rand((lanes, k), generator=generator, device=device).argsort(dim=1)
        trace[step] = read.gather(1, shuffle)
    return trace
