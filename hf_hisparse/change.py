"""Changes of a whole cache, which either come to their end or leave it unusable."""

from __future__ import annotations


class Change:
    """One change to several layers: ``with change: ...``; they do not nest.

    Attributes
    ----------
    unfinished : bool
        Whether one is under way, or did not come to its end (an error, an interrupt): then nobody knows what layers hold.
    """

    def __init__(self) -> None:
        self.unfinished = False

    def __enter__(self) -> None:
        self.unfinished = True

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if error is None:
            self.unfinished = False
