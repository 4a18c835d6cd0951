"""What is said in the log about the server, and how often."""

from __future__ import annotations

import logging
import threading

from kvtier.clock import Clock

__all__ = ["UNREACHED", "Notices"]

logger = logging.getLogger("kvtier.tiers.server")

QUIET_S = 60.0
UNREACHED = frozenset({"join", "foreign", "version", "denied"})
"""Kinds of trouble that are over once the server has welcomed us."""


class Notices:
    """Logs each kind of trouble once: until it is known to be over, or for QUIET_S where that cannot be known. Any
    thread.

    Mutable state: `_said_at`, guarded by `_lock`, a leaf.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said_at: dict[str, float] = {}

    def say(self, kind: str, text: str) -> None:
        now = self._clock.now()
        with self._lock:
            said_at = self._said_at.get(kind)
            if said_at is not None and (kind in UNREACHED or 0 <= now - said_at < QUIET_S):
                return
            self._said_at[kind] = now
        logger.warning("the server tier: %s", text)

    def note_welcome(self, text: str) -> None:
        """It can be reached. Said only after it was said that it cannot."""
        with self._lock:
            is_news = not UNREACHED.isdisjoint(self._said_at)
            self._said_at = {kind: at for kind, at in self._said_at.items() if kind not in UNREACHED}
        if is_news:
            logger.info("the server tier: %s", text)
