"""Blocks that went not long ago, remembered by fingerprint."""

from __future__ import annotations

from array import array

__all__ = ["Ghosts"]


class Ghosts:
    """A queue of fingerprints: added last, forgotten first. O(1) amortised; integers alone, which no garbage collection
    walks: a dictionary of them is not tracked."""

    def __init__(self) -> None:
        self._serials: dict[int, int] = {}
        self._queue = array("Q")
        self._first = 0  # serial of the queue's first entry

    def __len__(self) -> int:
        return len(self._serials)

    def add(self, fingerprint: int, most: int) -> None:
        """Remember one more; of more than `most` the oldest are forgotten."""
        self._serials[fingerprint] = self._first + len(self._queue)
        self._queue.append(fingerprint)
        num_over = len(self._queue) - most
        if num_over > most // 4:  # in stretches, since an array moves all that stays
            self._forget(num_over)

    def take(self, fingerprint: int, most: int) -> bool:
        """Whether it is among the last `most`; it is forgotten."""
        serial = self._serials.pop(fingerprint, -1)
        return serial >= max(0, self._first + len(self._queue) - most)

    def _forget(self, number: int) -> None:
        for serial, fingerprint in enumerate(self._queue[:number], self._first):
            if self._serials.get(fingerprint) == serial:  # else it came back, or went once more
                del self._serials[fingerprint]
        del self._queue[:number]
        self._first += number
