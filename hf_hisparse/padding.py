"""Which of the keys held are padding."""

from __future__ import annotations

import torch

from .modes import keeps
from .versions import new_version


class Padding:
    """What masks have said of the keys held, shared by the layers of a cache; nothing is kept until a mask is seen.

    Attributes
    ----------
    allowed : bool ``[batch, capacity]`` or None
        False for padding, by cache position, True for what no mask has spoken of; None when there never was a mask.
    version : int
        Changes whenever `allowed` moves.
    capturing : bool
        Whether a decode step is being captured: then layers read `captured` instead of the mask they are handed, and nothing
        may depend on how many tokens there are.
    masked : bool
        Whether the step that is being captured has a mask.
    """

    def __init__(self) -> None:
        self._noted = 0
        self._hidden: bool | None = None  # whether masks hid any key; None until somebody asks
        self.capturing = self.masked = False
        self._hold(None)

    def _hold(self, allowed: torch.Tensor | None) -> None:
        self.version = new_version()  # before anything moves
        self.allowed = allowed

    @property
    def captured(self) -> torch.Tensor | None:
        """The mask of the step that is being captured, bool ``[batch, capacity]``, None if it has none."""
        return self.allowed if self.masked else None

    @keeps
    def reserve(self, batch: int, capacity: int, device: torch.device) -> torch.Tensor:
        """`allowed`, made to cover `capacity` positions."""
        old = self.allowed
        if old is None or old.shape[1] < capacity:
            allowed = torch.ones((batch, capacity), dtype=torch.bool, device=device)
            if old is not None:
                allowed[:, : old.shape[1]] = old
            self._hold(allowed)
        assert self.allowed is not None
        return self.allowed

    def note(self, start: int, stop: int, valid: torch.Tensor | None, capacity: int) -> None:
        """Take over what a call's mask says of its new keys.

        Parameters
        ----------
        start, stop : int
            Their cache positions.
        valid : bool ``[batch, stop - start]`` or None
            False for padding; None without a mask.
        capacity : int
            Positions that the layer has room for.
        """
        if (valid is None and self.allowed is None) or self._noted >= stop:
            return
        if valid is not None:
            self._hidden = None
            self.reserve(valid.shape[0], max(capacity, stop), valid.device)
        assert self.allowed is not None
        self.reserve(self.allowed.shape[0], max(capacity, stop), self.allowed.device)
        self.allowed[:, start:stop] = True if valid is None else valid.to(self.allowed.device)
        self._noted = stop

    def take(self, mask: torch.Tensor, capacity: int) -> None:
        """Take over what a mask says of all keys so far, ``[batch, keys]``, in place."""
        self._hidden = None
        allowed = self.reserve(mask.shape[0], max(capacity, mask.shape[1]), mask.device)
        allowed[:, : mask.shape[1]] = mask
        self._noted = max(self._noted, mask.shape[1])

    def hides(self, length: int, total: int) -> bool:
        """Whether masks hid any of the `length` keys held; False for a call whose keys, up to `total`, are noted already.

        The GPU is waited for once after a mask: what comes without one hides nothing.
        """
        if self.allowed is None or self._noted >= total:
            return False
        if self._hidden is None:
            self._hidden = not bool(self.allowed[:, :length].all())
        return self._hidden

    def first_change(self, mask: torch.Tensor) -> int | None:
        """The first key held of which a mask, ``[batch, length]``, 0 or False for hidden, says otherwise than when it came.

        Waits for the GPU.
        """
        known = self.allowed
        changed = mask == 0 if known is None else mask.to(known.device) != known[:, : mask.shape[1]]
        if not changed.any():  # as in all steps of a `generate`: two short kernels
            return None
        return int(changed.any(0).nonzero()[0])

    def between(self, start: int, stop: int, device: torch.device) -> torch.Tensor | None:
        """What is known of some keys, bool ``[batch, stop - start]`` or None."""
        return None if self.allowed is None else self.allowed[:, start:stop].to(device)

    def crop(self, length: int) -> None:
        """Only `length` keys are left."""
        self._noted = min(self._noted, length)
        self._hidden = None
        if not length:
            self.reset()
        elif self.allowed is not None:
            self.allowed[:, length:] = True  # no mask has spoken of what comes there

    def rearrange(self, rows: torch.Tensor) -> None:
        """Let batch row `i` hold what row ``rows[i]`` held."""
        self._hidden = None
        if self.allowed is None:
            return
        allowed = self.allowed.index_select(0, rows.to(self.allowed.device))
        if allowed.shape == self.allowed.shape:
            self.allowed.copy_(allowed)
        else:
            self._hold(allowed)

    def clone(self) -> Padding:
        """An independent copy."""
        other = Padding()
        other._hold(None if self.allowed is None else self.allowed.clone())
        other._noted = self._noted
        return other

    def saved(self, length: int) -> tuple[dict[str, torch.Tensor], int]:
        """What is known of the first `length` keys, and of how many masks have spoken."""
        return ({} if self.allowed is None else {"allowed": self.allowed[:, :length]}), self._noted

    def load(self, tensors: dict[str, torch.Tensor], noted: int, capacity: int, device: torch.device) -> None:
        """Take what `saved` gave, with room for `capacity` keys."""
        self._noted = noted
        self._hidden = None
        if tensors:
            known = tensors["allowed"]
            self.reserve(known.shape[0], capacity, device)[:, : known.shape[1]] = known.to(device)

    def reset(self) -> None:
        """Forget all masks."""
        self._noted = 0
        self._hidden = None
        self._hold(None)
