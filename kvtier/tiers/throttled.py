"""A tier that is written to no faster than told: what wears a flash device, or fills a link, is bytes a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtier.clock import Clock
from kvtier.errors import ConfigError
from kvtier.tiers.base import Tier, WriteOutcome, WriteRequest
from kvtier.tiers.wrapper import TierWrapper

__all__ = ["ThrottledTier"]

BURST_S = 0.25
"""What may be written at once after a pause, in seconds of the rate."""
MAX_WAIT_S = 60.0
"""No write waits longer. A debt beyond that is forgiven: it takes batches of a minute of the rate each."""

_WRITTEN = frozenset({WriteOutcome.STORED, WriteOutcome.ERROR})


class ThrottledTier(TierWrapper):
    """A token bucket on writes; reads pass.

    A batch goes through as soon as those before it are paid for, whatever its size, and is paid for afterwards: within
    any t seconds at most `bytes_per_second * (t + BURST_S)` bytes and one batch begin to be written. Blocks that the
    tier did not write (already stored, full, refused) cost nothing in the end.

    A write waits on its own thread, before the tier within is called, at most MAX_WAIT_S, and not after `stop_waiting`
    or `close`. So this goes around a `GuardedTier`, whose time limit would count the waiting otherwise.

    wait: called with seconds, by default one that `stop_waiting` ends.
    Mutable state: `_rate`, `_tokens`, `_filled_at`, guarded by `_lock`, which is not held while waiting.
    """

    def __init__(
        self, tier: Tier, bytes_per_second: float, clock: Clock, wait: Callable[[float], object] | None = None
    ) -> None:
        super().__init__(tier)
        self.job_scale = 1  # a batch is what the rate may be passed by
        if not 0 < bytes_per_second < float("inf"):
            raise ConfigError(f"a throttle needs a rate of more than 0 bytes a second, not {bytes_per_second:g}")
        self._rate = bytes_per_second
        self._clock = clock
        self._stopped = threading.Event()
        self._wait = self._stopped.wait if wait is None else wait
        self._lock = threading.Lock()
        self._tokens = bytes_per_second * BURST_S  # bytes; negative: written and not paid for
        self._filled_at = clock.now()

    def set_rate(self, bytes_per_second: float) -> None:
        """From the next write on. Any thread."""
        with self._lock:
            self._rate = bytes_per_second
            self._tokens = self._capped(self._tokens)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        delay = self._take(sum(len(request.buffer) for request in requests))
        if delay > 0 and not self._stopped.is_set():
            self._wait(delay)
        outcomes = self._inner.write(requests)
        unwritten = [r for r, outcome in zip(requests, outcomes, strict=False) if outcome not in _WRITTEN]
        self._give_back(sum(len(request.buffer) for request in unwritten))
        return outcomes

    def stop_waiting(self) -> None:
        """End every wait, now and later: for whoever is about to close the executor, which waits for the threads."""
        self._stopped.set()

    def close(self) -> None:
        """Ends every wait; what waited meets a closed tier."""
        self.stop_waiting()
        super().close()

    def _take(self, nbytes: int) -> float:
        """Charge the bytes; how many seconds the debt before them takes to pay."""
        with self._lock:
            now = self._clock.now()
            self._tokens = self._capped(self._tokens + max(0.0, now - self._filled_at) * self._rate)
            self._filled_at = now
            debt, self._tokens = -self._tokens, self._tokens - nbytes
            return max(0.0, debt / self._rate) if nbytes else 0.0

    def _give_back(self, nbytes: int) -> None:
        if nbytes:
            with self._lock:
                self._tokens = self._capped(self._tokens + nbytes)

    def _capped(self, tokens: float) -> float:
        return max(-MAX_WAIT_S * self._rate, min(BURST_S * self._rate, tokens))
