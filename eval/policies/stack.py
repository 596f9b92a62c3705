"""LRU at all buffer sizes in one pass.

Mattson et al., "Evaluation techniques for storage hierarchies", 1970: an LRU buffer of n slots holds the first n records of one
and the same stack, so how deep a record lies says which sizes miss it. Here a whole selection moves to the top at once, in its
order. The cache differs in one tie: what a step fetches ranks below what it had, and what was fetched depends on the size, so no
single stack can tell. `LRU` replays that exactly, one size at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.traces import Crop, Event, Prefill, Step

from .replacement import worth_after_prefill


def misses_by_size(events: Sequence[Event], largest: int) -> np.ndarray:
    """Misses of one lane.

    Parameters
    ----------
    events : sequence of Event
        Without a `Crop`: what it frees is free in large buffers only.
    largest : int
        The largest size to tell.

    Returns
    -------
    int64 ``[largest + 1]``
        Misses of a buffer of so many slots; sizes that cannot hold a selection mean nothing.

    Raises
    ------
    ValueError
        If there is a `Crop`.
    """
    found_at = np.zeros(largest + 2, np.int64)  # depth -> reads, the deepest for all that lies deeper
    stack: list[int] = []  # most recently used last
    for event in events:
        match event:
            case Prefill(selection, records):
                stack = worth_after_prefill(selection, records)
            case Step(selection, records, begins):
                if begins:
                    stack.append(records - 1)
                place = {record: index for index, record in enumerate(stack)}
                wanted = list(dict.fromkeys(record for record in selection if record >= 0))
                for record in wanted:
                    depth = len(stack) - place[record] if record in place else largest + 1
                    found_at[min(depth, largest + 1)] += 1
                read = set(wanted)
                stack = [*(record for record in stack if record not in read), *wanted]
            case Crop():
                raise ValueError(
                    "one stack cannot tell the misses of a trace with crops: replay LRU for each size"
                )
    return found_at.sum() - found_at.cumsum()[: largest + 1]
