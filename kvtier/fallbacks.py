"""The one word when a restore came to nothing: one event feeds counters and log, within a rate of lines."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.reasons import MissReason

__all__ = ["UNKNOWN_TIER", "Fallback", "FallbackLog"]

logger = logging.getLogger("kvtier.restore")

UNKNOWN_TIER = "any"
MAX_LINES = 10
LINES_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Fallback:
    """A request computes what it had hoped to restore, or fails for want of it.

    tier: the tiers that it was to come from; `any` where none had answered yet, `host` for the copy to the GPU.
    num_blocks, num_tokens: what is computed instead. waited_s, limit_s: what it waited, and might have, in the wait
    that ended it. is_fatal: the engine ends the request (`restore.on_failure`). may_land: it is admitted as an ordinary
    prompt, and what is in host memory for it by then is not computed after all.
    """

    request_id: str
    tier: str
    num_blocks: int
    num_tokens: int
    waited_s: float
    limit_s: float
    reason: MissReason
    is_fatal: bool = False
    may_land: bool = False


class FallbackLog:
    """Counts every fallback and warns of it, in at most MAX_LINES lines of any second; what is held back is told by the
    next line, or by `tick`. Engine's thread; the counters may be read on any.

    Mutable state: everything.
    """

    def __init__(self, clock: Clock, on_fallback: Callable[[Fallback], None]) -> None:
        """on_fallback: told of each, after it was counted; must not raise."""
        self._clock = clock
        self._on_fallback = on_fallback
        self._line_times: deque[float] = deque(maxlen=MAX_LINES)
        self._held_back = (0, 0, 0)
        self.num_requests: Counter[MissReason] = Counter()
        self.num_blocks = 0
        self.num_tokens = 0
        self.num_held_back = 0

    def note(self, fallback: Fallback) -> None:
        self.num_requests[fallback.reason] += 1
        self.num_blocks += fallback.num_blocks
        self.num_tokens += fallback.num_tokens
        self._on_fallback(fallback)
        if not self._take_line():
            requests, blocks, tokens = self._held_back
            self._held_back = (requests + 1, blocks + fallback.num_blocks, tokens + fallback.num_tokens)
            self.num_held_back += 1
            return
        logger.warning(
            "request %s: %d blocks, %d tokens, %s: not restored from %s%s (%s), waited %.3f s, limit %.3f s%s%s",
            fallback.request_id,
            fallback.num_blocks,
            fallback.num_tokens,
            "are lost, and the request fails" if fallback.is_fatal else "are recomputed",
            "" if fallback.tier == UNKNOWN_TIER else "tier ",
            "any tier" if fallback.tier == UNKNOWN_TIER else fallback.tier,
            fallback.reason.value,
            fallback.waited_s,
            fallback.limit_s,
            ", unless host memory has them when there is room" if fallback.may_land else "",
            self._tell_held_back("; before it, of "),
        )

    def tick(self) -> None:
        """Tell what was held back, once the rate allows a line again."""
        if self._held_back[0] and self._take_line():
            logger.warning("%s", self._tell_held_back("not restored, of "))

    def _tell_held_back(self, words: str) -> str:
        requests, blocks, tokens = self._held_back
        self._held_back = (0, 0, 0)
        return f"{words}{requests} more requests: {blocks} blocks, {tokens} tokens, are recomputed" if requests else ""

    def _take_line(self) -> bool:
        now, times = self._clock.now(), self._line_times
        if times and now < times[-1]:  # the clock went back: what it says of these lines is nothing
            times.clear()
        if len(times) == MAX_LINES and now - times[0] < LINES_PERIOD_S:
            return False
        times.append(now)
        return True
