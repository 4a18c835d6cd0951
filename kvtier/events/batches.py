"""Batches on their way to listeners, and past ones for those that missed some."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

__all__ = ["Batch", "BatchBuffer"]


class Batch(NamedTuple):
    """An encoded batch and its place in the sequence, which begins at 0."""

    sequence: int
    payload: bytes


class BatchBuffer:
    """Numbers batches, hands each out to be sent once, and keeps the last ones. Never blocks; any thread.

    At most `max_queued` wait to be sent: of more, the oldest are passed over and counted. Those are kept as if they had
    been sent. Of batches that were sent, at most `max_kept` and `max_bytes` of payload are kept.

    Mutable state: all, guarded by `_lock`, a leaf.
    """

    def __init__(self, max_queued: int, max_kept: int, max_bytes: int) -> None:
        self._max_queued = max_queued
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()  # of consecutive sequences, the last one being `_next_sequence` - 1
        self._num_bytes = 0
        self._next_sequence = 0
        self._next_to_send = 0
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        """Batches that were passed over."""
        return self._num_dropped

    @property
    def next_sequence(self) -> int:
        """Of the batch that is added next."""
        return self._next_sequence

    @property
    def oldest(self) -> int:
        """The first sequence that is kept; that of the next batch where none is."""
        with self._lock:
            return self._next_sequence - len(self._batches)

    def add(self, payload: bytes) -> int:
        """Put a batch behind the others. Its sequence."""
        with self._lock:
            sequence = self._next_sequence
            self._batches.append(Batch(sequence, payload))
            self._num_bytes += len(payload)
            self._next_sequence += 1
            if self._next_sequence - self._next_to_send > self._max_queued:
                self._next_to_send += 1
                self._num_dropped += 1
            self._trim()
            return sequence

    def take(self) -> Batch | None:
        """The next batch to send; None when all are sent."""
        with self._lock:
            if self._next_to_send == self._next_sequence:
                return None
            batch = self._at(self._next_to_send)
            self._next_to_send += 1
            self._trim()
            return batch

    def since(self, sequence: int) -> Batch | None:
        """The first batch kept that is not before `sequence`, and was sent or passed over; None where there is none."""
        with self._lock:
            sequence = max(sequence, self._next_sequence - len(self._batches))
            return self._at(sequence) if sequence < self._next_to_send else None

    def _at(self, sequence: int) -> Batch:
        return self._batches[sequence - self._batches[0].sequence]

    def _trim(self) -> None:
        while self._batches and self._batches[0].sequence < self._next_to_send:
            num_past = self._next_to_send - self._batches[0].sequence
            if num_past <= self._max_kept and self._num_bytes <= self._max_bytes:
                return
            self._num_bytes -= len(self._batches.popleft().payload)
