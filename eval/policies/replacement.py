"""Whom to evict: the hot buffer of one lane under different policies.

All do what the cache does but for the choice of victims:

- After a prefill the buffer holds what the prompt's last token selected, and the newest records.
- The first token of a record gets a slot at once, before it is known what that token selects: this may evict a record which is
  then missing.
- The records of one selection are in the buffer together: a step evicts none that it reads.
- Nothing is evicted while a slot is empty. While the whole history fits and nothing is missing, nothing is noted.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from eval.traces import Crop, Event, Prefill, Step


class Buffer:
    """The records of one lane that have a slot.

    Parameters
    ----------
    slots : int
        At least the different records of any selection.
    events : sequence of Event
        What is going to happen; only `Belady` looks ahead.

    Attributes
    ----------
    selected, misses : int
        Entries read so far, and records among them that had to be fetched: what the cache counts.
    held : dict
        The records with a slot, in the order in which they came unless a policy reorders them.
    """

    def __init__(self, slots: int, events: Sequence[Event]) -> None:
        self.slots = slots
        self.events = events
        self.held: dict[int, None] = {}
        self.selected = self.misses = 0

    def play(self) -> None:
        """Go through the events."""
        for index in range(len(self.events)):
            self.do(index)

    def do(self, index: int) -> None:
        """What one event does."""
        match self.events[index]:
            case Prefill(selection, records):
                self.fill(selection, records)
            case Step(selection, records, begins):
                if begins:
                    self.append(records - 1)
                self.read(selection, records)
            case Crop(records):
                self.forget(records)

    def fill(self, selection: list[int], records: int) -> None:
        """Hold what `selection` names, and the newest others of `records`."""
        self.forget(0)
        # As `HotBuffer.choose` does it.
        fits = records <= self.slots
        self.admit(list(range(records)) if fits else worth_after_prefill(selection, records)[-self.slots :])

    def append(self, record: int) -> None:
        """Give a new record a slot."""
        self.make_room(1, ())
        self.admit([record])

    def read(self, selection: list[int], records: int) -> None:
        """Let a token read `selection` (-1 for none) out of `records`."""
        entries = [record for record in selection if record >= 0]
        wanted = dict.fromkeys(entries)  # a set, in selection order
        missing = [record for record in wanted if record not in self.held]
        hits = [record for record in dict.fromkeys(reversed(entries)) if record in self.held][::-1]
        self.selected += len(entries)
        self.misses += len(missing)
        self.make_room(len(missing), wanted)
        self.admit(missing)
        if missing or records > self.slots:
            self.promote(hits)

    def forget(self, first: int) -> None:
        """Free the slots of the records from `first` on."""
        for record in [record for record in self.held if record >= first]:
            self.evict(record)

    def make_room(self, count: int, wanted: Collection[int]) -> None:
        """Evict until `count` slots are empty, nothing that is `wanted`."""
        surplus = len(self.held) + count - self.slots
        if surplus > 0:
            stale = [record for record in self.held if record not in wanted]
            for record in self.victims(stale, surplus):
                self.evict(record)

    # ------------------------------------------------------------------ what a policy may do otherwise

    def victims(self, stale: list[int], count: int) -> Iterable[int]:
        """`count` of the `stale` records, which are in the order of `held`."""
        return stale[:count]

    def admit(self, records: list[int]) -> None:
        """Take records that were not in the buffer."""
        self.held.update(dict.fromkeys(records))

    def evict(self, record: int) -> None:
        """Give up a record."""
        del self.held[record]

    def promote(self, hits: list[int]) -> None:
        """These were read and in the buffer; they are in selection order, each where it was named last."""


def worth_after_prefill(selection: list[int], records: int) -> list[int]:
    """All `records` from least to most worth keeping: oldest to newest, then those selected."""
    selected = {record for record in selection if record >= 0}
    return [*(record for record in range(records) if record not in selected), *sorted(selected)]


class CurrentOnly(Buffer):
    """No more than the last selection, whatever the slots: what is read twice in a row is a hit."""

    def make_room(self, count: int, wanted: Collection[int]) -> None:
        """See `Buffer`."""
        if wanted:
            for record in [record for record in self.held if record not in wanted]:
                self.evict(record)


class FIFO(Buffer):
    """The record that came first goes first, however often it was read since."""


class Random(Buffer):
    """Any record that is not being read, each as likely; a replay repeats itself."""

    def __init__(self, slots: int, events: Sequence[Event]) -> None:
        super().__init__(slots, events)
        self._random = random.Random(slots)

    def victims(self, stale: list[int], count: int) -> Iterable[int]:
        """See `Buffer`."""
        return self._random.sample(stale, count)


class LRU(Buffer):
    """The record that was read longest ago, exactly as the cache does it.

    What a step read and had ranks above what it fetched: HiSparse (arXiv 2608.07009), and `hisparse_kernels.reference.resolve`.
    """

    def promote(self, hits: list[int]) -> None:
        """Hits become the most recent, in selection order."""
        for record in hits:
            del self.held[record]
        self.held.update(dict.fromkeys(hits))


class LFU(LRU):
    """The record that was read in the fewest steps since it came; among equals the one read longest ago."""

    def __init__(self, slots: int, events: Sequence[Event]) -> None:
        super().__init__(slots, events)
        self._reads: dict[int, int] = {}

    def victims(self, stale: list[int], count: int) -> Iterable[int]:
        """See `Buffer`."""
        return heapq.nsmallest(count, stale, key=self._reads.__getitem__)  # stable, like `sorted`

    def admit(self, records: list[int]) -> None:
        """See `Buffer`."""
        super().admit(records)
        self._reads.update(dict.fromkeys(records, 1))

    def promote(self, hits: list[int]) -> None:
        """See `Buffer`."""
        super().promote(hits)
        for record in hits:
            self._reads[record] += 1


class CLOCK(Buffer):
    """A hand goes around the records; those read since its last visit it passes, and marks unread; the first unread one goes.

    Corbato, "A paging experiment with the Multics system", 1968. A record comes in unread and right behind the hand.
    """

    def __init__(self, slots: int, events: Sequence[Event]) -> None:
        super().__init__(slots, events)
        self._ring: list[int] = []
        self._hand = 0
        self._read: set[int] = set()

    def make_room(self, count: int, wanted: Collection[int]) -> None:
        """See `Buffer`."""
        while len(self.held) + count > self.slots:
            self._hand %= len(self._ring)
            record = self._ring[self._hand]
            if record in wanted:
                self._hand += 1
            elif record in self._read:
                self._read.remove(record)
                self._hand += 1
            else:
                self.evict(record)
        self._hand %= max(1, len(self._ring))

    def admit(self, records: list[int]) -> None:
        """See `Buffer`."""
        super().admit(records)
        self._ring[self._hand : self._hand] = records
        self._hand += len(records)

    def evict(self, record: int) -> None:
        """See `Buffer`."""
        super().evict(record)
        place = self._ring.index(record)
        del self._ring[place]
        if place < self._hand:
            self._hand -= 1
        self._read.discard(record)

    def promote(self, hits: list[int]) -> None:
        """See `Buffer`."""
        self._read.update(hits)


class SIEVE(CLOCK):
    """The hand of `CLOCK`, over a queue from oldest to newest: a record comes in at its end, not behind the hand.

    Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
    """

    def admit(self, records: list[int]) -> None:
        """See `Buffer`."""
        Buffer.admit(self, records)
        self._ring.extend(records)


class Belady(Buffer):
    """The record that is read again last: no policy misses less, but this one must know the future.

    Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. It holds for selections as for single
    records: those of a step must all be in, and of the others giving up the one that is needed last is never worse.
    """

    def __init__(self, slots: int, events: Sequence[Event]) -> None:
        super().__init__(slots, events)
        self._now = 0
        # Record -> events that decide over it, and when it is needed, which is never if it is written anew before.
        self._decided: dict[int, list[int]] = {}
        self._needed: dict[int, list[float]] = {}
        for index, event in enumerate(events):
            match event:
                case Step(selection, _, _):
                    self._decide(index, {record for record in selection if record >= 0}, index)
                case Prefill() | Crop():
                    first = event.records if isinstance(event, Crop) else 0
                    self._decide(index, [record for record in self._needed if record >= first], math.inf)

    def _decide(self, index: int, records: Iterable[int], needed: float) -> None:
        for record in records:
            self._decided.setdefault(record, []).append(index)
            self._needed.setdefault(record, []).append(needed)

    def do(self, index: int) -> None:
        """See `Buffer`."""
        self._now = index
        super().do(index)

    def victims(self, stale: list[int], count: int) -> Iterable[int]:
        """See `Buffer`."""
        return heapq.nlargest(count, stale, key=self._next_read)

    def _next_read(self, record: int) -> float:
        at = bisect_left(self._decided.get(record, ()), self._now)
        needed = self._needed.get(record, ())
        return needed[at] if at < len(needed) else math.inf


POLICIES: dict[str, type[Buffer]] = {
    "FIFO": FIFO,
    "random": Random,
    "LFU": LFU,
    "CLOCK": CLOCK,
    "SIEVE": SIEVE,
    "LRU": LRU,
    "Belady": Belady,
}
