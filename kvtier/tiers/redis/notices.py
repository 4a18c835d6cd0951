"""What is said in the log about a server, and how often."""

from __future__ import annotations

import logging
import threading

from kvtier.clock import Clock
from kvtier.tiers.redis.calls import Failure
from kvtier.tiers.redis.opening import DeniedError
from kvtier.tiers.redis.replies import hint
from kvtier.tiers.redis.resp import ErrorReply

__all__ = ["Notices"]

logger = logging.getLogger("kvtier.tiers.redis")

QUIET_S = 60.0
"""After a line the same kind is not logged again for so long: a sick server is met by every call."""


class Notices:
    """Logs each kind of trouble once a minute at most. Any thread.

    Mutable state: `_said_at`, guarded by `_lock`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said_at: dict[str, float] = {}

    def say(self, kind: str, text: str, *, level: int = logging.WARNING) -> None:
        now = self._clock.now()
        with self._lock:
            said_at = self._said_at.get(kind)
            if said_at is not None and 0 <= now - said_at < QUIET_S:
                return
            self._said_at[kind] = now
        logger.log(level, "the redis tier: %s", text)

    def note(self, failure: Failure) -> None:
        """Say it where a person can do something about it; what passes by itself is only counted."""
        reply = failure.reply if isinstance(failure, DeniedError) else failure
        if isinstance(reply, ErrorReply) and (advice := hint(reply)) is not None:
            self.say(reply.code, f"a server answered {reply.code}: {advice}")
