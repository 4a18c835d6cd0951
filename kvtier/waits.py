"""Restores that wait for GPU blocks: since when, and the log's lines that say so."""

from __future__ import annotations

import logging

from kvtier.clock import Clock
from kvtier.episode import RestoreEpisode, Stopwatch

__all__ = ["CapacityWaits"]

logger = logging.getLogger("kvtier.restore")

LOG_PERIOD_S = 30.0


class CapacityWaits:
    """Waits from a restore's first refusal on; one that comes back to it goes on where it was. Engine's thread; the
    properties on any.

    Mutable state: everything, and `refused` of the episodes.
    """

    def __init__(self, bound_s: float, clock: Clock) -> None:
        self._bound_s = bound_s
        self._clock = clock
        self._num_lines: dict[RestoreEpisode, int] = {}
        self.num_started = 0

    @property
    def num_waiting(self) -> int:
        return len(self._num_lines)

    @property
    def longest_s(self) -> float:
        """How long the longest of them has waited, now; 0.0 without any."""
        now = self._clock.now()
        watches = [episode.refused for episode in tuple(self._num_lines)]
        return max((watch.peek(now) for watch in watches if watch is not None), default=0.0)

    def refuse(self, episode: RestoreEpisode) -> bool:
        """It was refused blocks: whether it has waited for as long as it may, since the first time."""
        now = self._clock.now()
        if episode.refused is None:
            episode.refused = Stopwatch(now)
        if episode not in self._num_lines:
            self._num_lines[episode] = 0
            self.num_started += 1
        return episode.refused.has_reached(now, self._bound_s)

    def deadline(self, episode: RestoreEpisode) -> float | None:
        """When it will have waited for as long as it may, however the clock went; None before the first refusal."""
        if episode.refused is None:
            return None
        episode.refused.read(self._clock.now())
        return episode.refused.when(self._bound_s)

    def end(self, episode: RestoreEpisode, words: str) -> float:
        """It waits no more, and why, for the log: seconds since the first refusal; 0.0 without one. Idempotent."""
        num_lines = self._num_lines.pop(episode, 0)
        if episode.refused is None:
            return 0.0
        seconds = episode.refused.read(self._clock.now())
        if num_lines:
            logger.info("request %s: %s, having waited %.3f s for GPU blocks", episode.request_id, words, seconds)
        return seconds

    def tick(self) -> None:
        """Once a step: a line for each wait that outlasted the step, and one for each LOG_PERIOD_S that it goes on."""
        now = self._clock.now()
        for episode, num_lines in self._num_lines.items():
            seconds = 0.0 if episode.refused is None else episode.refused.read(now)
            if seconds < num_lines * LOG_PERIOD_S:
                continue
            self._num_lines[episode] = int(seconds // LOG_PERIOD_S) + 1
            logger.info(
                "request %s: waits for GPU blocks for %d blocks of its prompt, for %.3f s now, at most %g s",
                episode.request_id,
                episode.num_blocks,
                seconds,
                self._bound_s,
            )
