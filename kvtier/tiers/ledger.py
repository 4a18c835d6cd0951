"""What this process has put into a remote tier, as far as it knows."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.keys import Key

__all__ = ["Holdings", "Ledger"]

MAX_BLOCKS = 1 << 17


class Holdings(NamedTuple):
    num_blocks: int
    nbytes: int


class Ledger:
    """Keys that were stored there, with the bytes that each takes; of at most MAX_BLOCKS, those that came last. Any
    thread.

    Mutable state: `_nbytes`, in the order in which they came, and `_total`, guarded by `_lock`, a leaf.
    """

    def __init__(self, tier: str) -> None:
        """tier: its name, for messages."""
        self._tier = tier
        self._lock = threading.Lock()
        self._nbytes: dict[Key, int] = {}
        self._total = 0

    @property
    def holdings(self) -> Holdings:
        with self._lock:
            return Holdings(len(self._nbytes), self._total)

    def add(self, blocks: Iterable[tuple[Key, int]]) -> None:
        with self._lock:
            for key, nbytes in blocks:
                self._total += nbytes - self._nbytes.pop(key, 0)
                self._nbytes[key] = nbytes
            while len(self._nbytes) > MAX_BLOCKS:
                self._total -= self._nbytes.pop(next(iter(self._nbytes)))

    def discard(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in self._nbytes.keys() & keys:
                self._total -= self._nbytes.pop(key)

    def clear(self) -> None:
        with self._lock:
            self._nbytes.clear()
            self._total = 0

    def check_integrity(self) -> None:
        with self._lock:
            if self._total != sum(self._nbytes.values()) or len(self._nbytes) > MAX_BLOCKS:
                raise IntegrityError(
                    f"{self._tier} tier: {len(self._nbytes)} blocks on the books do not add up to {self._total} bytes"
                )
