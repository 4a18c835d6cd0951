"""How much of a prompt host memory was found to hold, so that who is asked at every step looks only at what changed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.keys import BlockDigest
from kvtier.reasons import MissReason
from kvtier.store import Lookup, Space
from kvtier.tiers.reservation import Eviction

__all__ = ["KnownRun", "KnownRuns"]

MAX_NOTED = 4096


@dataclass(slots=True)
class KnownRun:
    """Blocks `first` to `end` of a prompt were in host memory when `num_gone` blocks had left it."""

    epoch: bytes
    first: int
    end: int
    num_gone: int
    digests: set[BlockDigest]


class KnownRuns:
    """Looks prompts up in host memory. Engine's thread only, but for `_note`.

    A block is believed to be where it was until the store says that it went; a moment may lie between, as between any
    lookup and its use: what lands is leased first.

    Mutable state: `_gone` (the last blocks that left host memory) and `_num_gone` (how many ever did), guarded by
    `_lock`, for any thread may evict.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._gone: deque[BlockDigest] = deque(maxlen=MAX_NOTED)
        self._num_gone = 0
        self._unsubscribe = space.on_evict(self._note)

    def close(self) -> None:
        self._unsubscribe()

    def look_up(
        self, run: KnownRun | None, digests: Sequence[BlockDigest], first: int, num_blocks: int
    ) -> tuple[KnownRun | None, Lookup]:
        """Which leading ones of `num_blocks` blocks from `first` on are held; `run` is what the last call gave."""
        num_gone = self._num_gone  # before the index is read, so that what goes meanwhile is looked at again
        if run is None or not self._holds(run, first):
            run = KnownRun(self._space.digest, first, first, num_gone, set())
        end = first + num_blocks
        miss: MissReason | None = None
        if run.end < end:
            beyond = digests[run.end : end]
            found = self._space.lookup(beyond).poll()
            if found is None:
                return None, Lookup(0, MissReason.TIER_ERROR)
            run.digests.update(beyond[: found.num_blocks])
            run.end, miss = run.end + found.num_blocks, found.miss
        return run, Lookup(min(run.end, end) - first, miss)

    def _holds(self, run: KnownRun, first: int) -> bool:
        """Whether all of it is here yet, and it says something of block `first`."""
        if run.epoch != self._space.digest or not run.first <= first <= run.end:
            return False
        with self._lock:
            num_new, num_gone = self._num_gone - run.num_gone, self._num_gone
            if num_new > len(self._gone):
                return False
            if not run.digests.isdisjoint(islice(reversed(self._gone), num_new)):
                return False
        run.num_gone = num_gone
        return True

    def _note(self, evicted: Sequence[Eviction]) -> None:
        with self._lock:
            self._gone.extend(item.digest for item in evicted)
            self._num_gone += len(evicted)
