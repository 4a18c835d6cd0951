"""The one source of time for the core: injected, so that tests own it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]


class Clock(Protocol):
    """Seconds since an arbitrary start. May be called from any thread and must not block."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock: unaffected by changes of the wall clock."""

    def now(self) -> float:
        return time.monotonic()
