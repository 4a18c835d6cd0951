"""What this process has put into the servers, as far as it knows."""

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
    """Keys that were stored here, with their frames' bytes; of at most MAX_BLOCKS, those that came last. Any thread.

    Mutable state: `_frame_bytes`, in the order in which they came, and `_total`, guarded by `_lock`, a leaf.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frame_bytes: dict[Key, int] = {}
        self._total = 0

    @property
    def holdings(self) -> Holdings:
        with self._lock:
            return Holdings(len(self._frame_bytes), self._total)

    def add(self, blocks: Iterable[tuple[Key, int]]) -> None:
        with self._lock:
            for key, nbytes in blocks:
                self._total += nbytes - self._frame_bytes.pop(key, 0)
                self._frame_bytes[key] = nbytes
            while len(self._frame_bytes) > MAX_BLOCKS:
                self._total -= self._frame_bytes.pop(next(iter(self._frame_bytes)))

    def discard(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                self._total -= self._frame_bytes.pop(key, 0)

    def clear(self) -> None:
        with self._lock:
            self._frame_bytes.clear()
            self._total = 0

    def check_integrity(self) -> None:
        with self._lock:
            if self._total != sum(self._frame_bytes.values()) or len(self._frame_bytes) > MAX_BLOCKS:
                raise IntegrityError(
                    f"redis tier: {len(self._frame_bytes)} blocks on the books do not add up to {self._total} bytes"
                )
