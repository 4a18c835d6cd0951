"""Decisions about requests, the last few thousand of them: what was restored for each, and why not the rest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.clock import Clock

__all__ = ["ADMITTED", "FAILED", "MAX_NAME", "RECOMPUTED", "Decision", "DecisionLog", "Past"]

MAX_DECISIONS = 8192
MAX_NAME = 128
"""Characters of a request's name that are kept, and compared."""

ADMITTED = "admitted"
"""The engine took the request up: what is served now is known, and what is computed."""
RECOMPUTED = "recomputed"
"""A restore came to nothing: its blocks are computed."""
FAILED = "failed"
"""A restore came to nothing, and the request ends with it (`restore.on_failure`)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided of one request. fate: ADMITTED, RECOMPUTED or FAILED.

    asked: blocks that were wanted of kvtier, or given up. served: those that are restored, by tier. reason: why not the
    others, a `MissReason`; empty where there are none. tier: that was waited for in vain, for waited_s of limit_s.
    """

    request_id: str
    fate: str
    asked: int
    served: Mapping[str, int]
    reason: str = ""
    tier: str = ""
    waited_s: float = 0.0
    limit_s: float = 0.0


class Past(NamedTuple):
    """A decision, whose it was (empty: this process's), and when: by the log's clock."""

    decision: Decision
    client: str
    at_s: float


class DecisionLog:
    """Keeps the last MAX_DECISIONS. Any thread; noting one costs as much however many there are.

    Mutable state: `_past`, guarded by `_lock`, a leaf.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._past: deque[Past] = deque(maxlen=MAX_DECISIONS)

    def note(self, decision: Decision, client: str = "") -> None:
        with self._lock:
            self._past.append(Past(decision, client, self._clock.now()))

    def find(self, request_id: str) -> list[Past]:
        """Those of requests with this name, oldest first. O(MAX_DECISIONS)."""
        with self._lock:
            past = list(self._past)
        return [each for each in past if each.decision.request_id[:MAX_NAME] == request_id[:MAX_NAME]]
