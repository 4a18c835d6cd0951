"""A tier whose reads and writes are counted: calls, blocks by outcome, bytes that moved, seconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.wrapper import TierWrapper

__all__ = ["MeterSnapshot", "MeteredTier"]


@dataclass(frozen=True, slots=True)
class MeterSnapshot:
    """What went through a tier since it was opened; the fields are of one moment."""

    read_calls: int
    """Batches read that ended, with an exception too."""
    reads: Mapping[str, int]
    """Blocks asked for, by outcome; outcomes with a count of 0 are absent, and blocks of a batch that raised."""
    read_bytes: int
    """Bytes of the blocks that were OK."""
    read_seconds: float
    """Time inside the tier, of all threads together: more than passes on the wall when they overlap."""
    write_calls: int
    """Batches written that ended, with an exception too."""
    writes: Mapping[str, int]
    """Blocks offered, by outcome, as in `reads`."""
    written_bytes: int
    """Bytes of the blocks that were STORED."""
    write_seconds: float
    """As `read_seconds`."""


class _Meter:
    """Sums of one direction, guarded by the tier's lock."""

    __slots__ = ("blocks", "calls", "nbytes", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.blocks: Counter[str] = Counter()
        self.nbytes = 0
        self.seconds = 0.0

    def add(self, seconds: float, outcomes: Iterable[tuple[str, int]], moved: str) -> None:
        self.calls += 1
        self.seconds += max(0.0, seconds)
        for outcome, nbytes in outcomes:
            self.blocks[outcome] += 1
            if outcome == moved:
                self.nbytes += nbytes


class MeteredTier(TierWrapper):
    """Counts what the tier within answers, and is exact with any number of threads.

    Mutable state: the two meters, guarded by `_lock`, which is never held while the tier works.
    """

    def __init__(self, tier: Tier, clock: Clock) -> None:
        super().__init__(tier)
        self._clock = clock
        self._lock = threading.Lock()
        self._reads = _Meter()
        self._writes = _Meter()

    def snapshot(self) -> MeterSnapshot:
        """Any thread; never blocks."""
        with self._lock:
            return MeterSnapshot(
                read_calls=self._reads.calls,
                reads=dict(self._reads.blocks),
                read_bytes=self._reads.nbytes,
                read_seconds=self._reads.seconds,
                write_calls=self._writes.calls,
                writes=dict(self._writes.blocks),
                written_bytes=self._writes.nbytes,
                write_seconds=self._writes.seconds,
            )

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        start = self._clock.now()
        outcomes: list[ReadOutcome] = []
        try:
            outcomes = self._inner.read(requests)
        finally:
            self._add(self._reads, start, requests, outcomes, ReadOutcome.OK)
        return outcomes

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        start = self._clock.now()
        outcomes: list[WriteOutcome] = []
        try:
            outcomes = self._inner.write(requests)
        finally:
            self._add(self._writes, start, requests, outcomes, WriteOutcome.STORED)
        return outcomes

    def _add(
        self,
        meter: _Meter,
        start: float,
        requests: Sequence[ReadRequest | WriteRequest],
        outcomes: Sequence[ReadOutcome | WriteOutcome],
        moved: ReadOutcome | WriteOutcome,
    ) -> None:
        seconds = self._clock.now() - start
        told = [(outcome.value, request.nbytes) for request, outcome in zip(requests, outcomes, strict=False)]
        with self._lock:
            meter.add(seconds, told, moved.value)
