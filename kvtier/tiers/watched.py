"""A tier whose changes are told: which blocks it holds by now, and which it holds no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.wrapper import TierWrapper

__all__ = ["OnGone", "OnStored", "WatchedTier"]

OnStored = Callable[[Sequence[tuple[Key, Key | None]]], None]
OnGone = Callable[[Sequence[Key]], None]

_HELD = (WriteOutcome.STORED, WriteOutcome.ALREADY_STORED)
_GONE = (ReadOutcome.MISS, ReadOutcome.DAMAGED)


class WatchedTier(TierWrapper):
    """Tells what is learnt of the tier by what goes through: blocks written, with their parents, and blocks that were
    not there, or were removed. What the tier gives up by itself it tells by `note_gone`.

    Callbacks run on the thread that learnt it, without a lock; they must be quick and must not raise.

    Mutable state: the callbacks, replaced as a whole.
    """

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._on_stored: tuple[OnStored, ...] = ()
        self._on_gone: tuple[OnGone, ...] = ()

    def subscribe(self, on_stored: OnStored, on_gone: OnGone) -> Callable[[], None]:
        """Call back from now on. Returns a call that ends it."""
        self._on_stored = (*self._on_stored, on_stored)
        self._on_gone = (*self._on_gone, on_gone)

        def unsubscribe() -> None:
            self._on_stored = tuple(callback for callback in self._on_stored if callback is not on_stored)
            self._on_gone = tuple(callback for callback in self._on_gone if callback is not on_gone)

        return unsubscribe

    def note_gone(self, keys: Sequence[Key]) -> None:
        """The tier holds these no more."""
        if keys:
            for callback in self._on_gone:
                callback(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        outcomes = self._inner.read(requests)
        self.note_gone([r.key for r, outcome in zip(requests, outcomes, strict=False) if outcome in _GONE])
        return outcomes

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        outcomes = self._inner.write(requests)
        held = [(r.key, r.parent) for r, outcome in zip(requests, outcomes, strict=False) if outcome in _HELD]
        if held:
            for callback in self._on_stored:
                callback(held)
        return outcomes

    def remove(self, keys: Sequence[Key]) -> int:
        num_removed = self._inner.remove(keys)
        self.note_gone(keys)
        return num_removed
