"""What a remote tier was found to hold, for as long as that is worth relying on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtier.clock import Clock
from kvtier.keys import Key

__all__ = ["KnownBlocks"]

LIFETIME_S = 300.0
"""A wrong yes costs a shorter prefix and one more lookup; asking costs a round trip."""
MAX_KNOWN = 1 << 17


class KnownBlocks:
    """Keys that a tier of another machine is believed to hold. Answers from memory; any thread.

    Nothing is known for longer than LIFETIME_S since it was last heard, nor of more than MAX_KNOWN keys: those that
    were heard first are forgotten.

    Mutable state: `_heard_at`, in the order in which they were heard, guarded by `_lock`, a leaf.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard_at: OrderedDict[Key, float] = OrderedDict()  # of bytes and floats: the collector walks none of it

    def __len__(self) -> int:
        return len(self._heard_at)

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """Which of them it is believed to hold now."""
        now = self._clock.now()
        with self._lock:
            heard_at = self._heard_at
            return [(at := heard_at.get(key)) is not None and 0.0 <= now - at < LIFETIME_S for key in keys]

    def add(self, keys: Iterable[Key]) -> None:
        """It holds them, as was just heard of it."""
        now = self._clock.now()
        with self._lock:
            for key in keys:
                self._heard_at.pop(key, None)
                self._heard_at[key] = now
            while len(self._heard_at) > MAX_KNOWN:
                self._heard_at.popitem(last=False)

    def discard(self, keys: Iterable[Key]) -> None:
        """It does not hold them, or nobody knows."""
        with self._lock:
            for key in keys:
                self._heard_at.pop(key, None)

    def clear(self) -> None:
        """Nothing is known. What was goes after the lock is given back: that takes milliseconds."""
        with self._lock:
            known, self._heard_at = self._heard_at, OrderedDict()
        known.clear()
