"""Servers that are out of memory, and are left alone with blocks for a while."""

from __future__ import annotations

import threading

from kvtier.clock import Clock
from kvtier.tiers.redis.address import Address

__all__ = ["FullBackoff"]

BACKOFF_S = 1.0
"""Long against the cost of sending blocks in vain, short against the time in which memory gets free."""


class FullBackoff:
    """Any thread. Mutable state: `_until` and `_num_begun`, guarded by `_lock`, a leaf."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[Address, float] = {}
        self._num_begun = 0

    @property
    def num_begun(self) -> int:
        return self._num_begun

    def begin(self, address: Address) -> None:
        with self._lock:
            self._until[address] = self._clock.now() + BACKOFF_S
            self._num_begun += 1

    def is_on(self, address: Address) -> bool:
        with self._lock:
            until = self._until.get(address)
            if until is None:
                return False
            if 0 < until - self._clock.now() <= BACKOFF_S:
                return True
            del self._until[address]
            return False
