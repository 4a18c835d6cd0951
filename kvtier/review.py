"""Stages under way, looked at again when what they were begun on turns out otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.choice import RestoreCosts
from kvtier.clock import Clock
from kvtier.episode import RestoreEpisode, RestorePhase
from kvtier.progress import RestoreProgress

__all__ = ["StageReview"]

PATIENCE_S = 0.01
"""How long an engine that has no prompt to compute is left without, while others than the first wait blindly."""


class StageReview:
    """Says which stages are no longer worth their wait. Engine's thread only.

    The first of them, whose blocks are being read, is over when its tier proves slower than computing. Those that began
    *blind*, before computing and their tiers were all measured, are decided anew once they are: in their order, each in
    view of what those before it then compute or read. Until then an engine with nothing to compute is given one of them
    at a time, never the first. So it does not idle for what may be a slow tier, and computing gets measured.

    Mutable state: `_staging`, in the order in which they began; what ended otherwise than by `end` stays until it comes
    to the front. `_has_given`: the engine was given one of them.
    """

    def __init__(self, costs: RestoreCosts, progress: RestoreProgress, clock: Clock, max_staging: int) -> None:
        """max_staging: bytes that are being read at once."""
        self._costs = costs
        self._progress = progress
        self._clock = clock
        self._max_staging = max_staging
        self._staging: dict[RestoreEpisode, None] = {}
        self._has_given = False

    def begin(self, episode: RestoreEpisode) -> None:
        """It waits for its blocks from now on, behind all others."""
        episode.is_unwanted = episode.is_overdue = False
        episode.is_blind = not self._is_known(episode)
        episode.latest_end = self._clock.now() + self._progress.most_s(episode)
        self._staging.pop(episode, None)
        self._staging[episode] = None
        if episode.watch is not None:
            episode.deadline = episode.watch.when(self.next_s(episode, 0.0))

    def end(self, episode: RestoreEpisode) -> None:
        """Its stage ended. Idempotent."""
        self._staging.pop(episode, None)

    def next_s(self, episode: RestoreEpisode, elapsed_s: float) -> float:
        """How long it will have waited, which is `elapsed_s` by now, when it is to be polled next at the latest."""
        is_blind = episode.phase is RestorePhase.STAGING and episode.is_blind and not self._costs.backlog_tokens
        is_soon = is_blind and elapsed_s < PATIENCE_S and episode is not self._first()
        return min(PATIENCE_S, episode.allowed_s) if is_soon else episode.allowed_s

    def progressed(self, arrived: Mapping[str, int], seconds: float, queued_bytes: int) -> None:
        """So much of it came in so many seconds: tiers of which nothing ever came are known from the first block on."""
        for tier, num_blocks in arrived.items():
            if not self._costs.is_measured(tier):
                self._costs.observe_blocks(tier, num_blocks, queued_bytes, seconds)

    def is_over(self, episode: RestoreEpisode, elapsed_s: float) -> bool:
        """Whether one that has waited for so long should wait no longer. Costs the same for any number of them, but
        once: when the last thing was measured that they wait for blindly."""
        if episode.is_blind:
            if not self._is_known(episode):
                return self._is_needed(episode)
            self._decide_anew()
        elif not episode.is_unwanted and episode is self._first():
            self._judge(episode, self._left_s(episode, {}, elapsed_s))
        return episode.is_unwanted

    def is_due(self, episode: RestoreEpisode) -> bool:
        """Whether one whose time is over waits until the next poll: the engine was given another one, and tells after
        the step that computes it, and after the poll of the next, how long that takes."""
        now, is_measured = self._clock.now(), self._costs.compute_s(0, 1) is not None
        is_late = episode.is_overdue or now >= episode.latest_end
        if not episode.is_blind or is_measured or not self._has_given or is_late:
            return False
        episode.is_overdue = True
        episode.deadline = now + PATIENCE_S
        return True

    def _is_known(self, episode: RestoreEpisode) -> bool:
        return self._costs.compute_s(0, 1) is not None and all(map(self._costs.is_measured, episode.tiers))

    def _is_needed(self, episode: RestoreEpisode) -> bool:
        """Whether the engine has nothing to compute but this."""
        is_patient = episode.watch is not None and not episode.watch.has_reached(self._clock.now(), PATIENCE_S)
        if self._costs.backlog_tokens or is_patient or episode is self._first():
            return False
        episode.is_unwanted = self._has_given = True
        self._progress.add_backlog(episode)
        return True

    def _decide_anew(self) -> None:
        """All that wait blindly, one after the other as if they came now. Those of tiers still unknown wait on."""
        now = self._clock.now()
        ahead: dict[str, int] = {}
        for episode in list(self._staging):
            if episode.phase is not RestorePhase.STAGING or episode.watch is None:
                del self._staging[episode]
                continue
            elapsed_s = episode.watch.read(now)
            if episode.is_blind and self._is_known(episode):
                episode.is_blind = False
                self._judge(episode, self._left_s(episode, ahead, elapsed_s))
                self._progress.limit_anew(episode, elapsed_s)
            is_first = not ahead
            for tier, nbytes in self._costs.reads(episode.parts).items():
                if not episode.is_unwanted:
                    ahead[tier] = ahead.get(tier, 0) + nbytes
                elif is_first:  # what is being read of it is read to its end
                    ahead[tier] = min(nbytes, self._max_staging)

    def _left_s(self, episode: RestoreEpisode, ahead: Mapping[str, int], elapsed_s: float) -> float | None:
        """Seconds until its blocks are there, when so many bytes are read before them; None when it is not known."""
        left_s = 0.0
        for tier, nbytes in self._costs.reads(episode.parts).items():
            seconds = self._costs.read_s(tier, nbytes, ahead.get(tier, 0))
            if seconds is None:
                return None
            # What is being read now has been since this began to wait, or since the one before it ended.
            left_s = max(left_s, seconds - max(0.0, min(elapsed_s, self._costs.since_last_s(tier))))
        return left_s

    def _judge(self, episode: RestoreEpisode, left_s: float | None) -> None:
        if left_s is not None and not self._costs.is_wait_worth_it(episode.position, episode.num_blocks, left_s):
            episode.is_unwanted = True
            self._progress.add_backlog(episode)

    def _first(self) -> RestoreEpisode | None:
        while (first := next(iter(self._staging), None)) is not None and first.phase is not RestorePhase.STAGING:
            del self._staging[first]
        return first
