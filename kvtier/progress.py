"""A restore from phase to phase: how long each may take, and what becomes of it when that is over, or fails."""

from __future__ import annotations

from math import inf

from kvtier.choice import RestoreCosts
from kvtier.clock import Clock
from kvtier.config import RestoreSettings
from kvtier.episode import ACTIVE, HOST, SEARCHING, Cause, RestoreEpisode, RestorePhase, RestoreQuery
from kvtier.fallbacks import UNKNOWN_TIER, Fallback, FallbackLog
from kvtier.metrics import RestoreTally
from kvtier.reasons import MissReason
from kvtier.waits import CapacityWaits

__all__ = ["RETRIED", "RestoreProgress"]

FIRST_WAIT_S = 1.0
"""The most that is waited while it is not known what computing takes."""
LANDING_SHARE = 0.25
"""The part of the budget that lookups and stages leave to the copy: what came by then shall still land."""

UNASKED = frozenset({MissReason.NOT_STAGED, MissReason.LIMIT, MissReason.RESTORE_OFF, MissReason.COST})
"""Why a stage may end short without having failed: nothing was waited for in vain."""
FAILURES = frozenset({MissReason.TIER_ERROR, MissReason.DAMAGED, MissReason.LAND_FAILED})
"""What `restore.on_failure` is about; the others are a cache's ordinary misses."""

RETRIED = frozenset(
    {
        MissReason.ABSENT,
        MissReason.EVICTED,
        MissReason.BEING_STORED,
        MissReason.TIER_ERROR,
        MissReason.DAMAGED,
        MissReason.TIER_DOWN,
        MissReason.HOST_FULL,
        MissReason.BACKLOG,
    }
)
"""After these a new lookup may find another way to the block, or fewer blocks and those for sure."""


class RestoreProgress:
    """Moves episodes from phase to phase, and ends them: with one warning, where what they waited for did not come.

    Engine's thread. Owns the time of every phase, the counts and the warnings; what to go for is decided elsewhere.

    Mutable state: the tally, and the episodes that it is given.
    """

    def __init__(
        self,
        settings: RestoreSettings,
        block_tokens: int,
        clock: Clock,
        costs: RestoreCosts,
        waits: CapacityWaits,
        fallbacks: FallbackLog,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._clock = clock
        self._costs = costs
        self._waits = waits
        self._fallbacks = fallbacks
        self.tally = RestoreTally()

    def begin(self, query: RestoreQuery, attempts: int = 0, before: RestoreEpisode | None = None) -> RestoreEpisode:
        """LOOKING, or OVER where there is nothing to restore. before: the one that it goes on with, which is over."""
        settings = self._settings
        most = query.max_blocks if query.max_tokens is None else query.max_tokens // self._block_tokens
        episode = RestoreEpisode(
            query.request_id,
            max(0, query.position),
            query.num_tokens,
            max_blocks=max(0, min(most, query.max_blocks)),
            max_wait_s=settings.max_wait_s if query.max_wait_s is None else query.max_wait_s,
            is_limited=most < query.max_blocks,
            attempts=attempts,
        )
        if before is not None:
            episode.follow(before, (before.position - episode.position) // self._block_tokens)
        if not (settings.enabled and query.may_restore):
            episode.miss = MissReason.RESTORE_OFF
        elif not episode.max_blocks:
            episode.miss = MissReason.LIMIT if episode.is_limited else None
        elif attempts < settings.max_attempts:
            self.look(episode)
        else:
            self.give_up(episode, MissReason.BUDGET)
        return episode

    def go_for(self, episode: RestoreEpisode, num_blocks: int) -> None:
        episode.num_blocks = episode.goal = num_blocks
        episode.wanted = max(episode.wanted, episode.num_landed + num_blocks)

    def look(self, episode: RestoreEpisode) -> None:
        episode.attempts += 1
        episode.num_blocks = episode.max_blocks
        episode.miss = None
        self.enter(episode, RestorePhase.LOOKING, self.limit_s(episode, episode.max_blocks))

    def limit_s(self, episode: RestoreEpisode, num_blocks: int) -> float:
        """The most that it waits, lookup and stage together: never longer than computing would take."""
        recompute_s = self._costs.recompute_s(episode.position, num_blocks)
        return min(episode.max_wait_s, FIRST_WAIT_S if recompute_s is None else recompute_s)

    def limit_anew(self, episode: RestoreEpisode, elapsed_s: float) -> None:
        """The stage under way, which has taken so long, may go on for as long as computing takes from now."""
        recompute_s = self._costs.recompute_s(episode.position, episode.num_blocks)
        if recompute_s is not None:
            limit_s = min(episode.max_wait_s, episode.waited_s + elapsed_s + recompute_s)
            episode.limit(limit_s, self._budget_s(RestorePhase.STAGING))

    def most_s(self, episode: RestoreEpisode) -> float:
        """The most that a stage begun now may ever take, whatever is measured meanwhile."""
        left_s = self._budget_s(RestorePhase.STAGING) - episode.active_s
        return max(0.0, min(episode.max_wait_s - episode.waited_s, left_s))

    def add_backlog(self, episode: RestoreEpisode, num_blocks: int = 0) -> None:
        """It computes its prompt, but for so many blocks: who comes before the engine counts again comes behind it."""
        restored = episode.position + num_blocks * self._block_tokens
        self._costs.backlog_tokens += max(0, episode.num_tokens - restored)

    def rest(self, episode: RestoreEpisode, num_blocks: int, *, is_final: bool = True) -> None:
        """Nothing more is waited for: so many blocks may land."""
        episode.num_blocks = num_blocks
        if num_blocks >= episode.num_missing:  # all that it ever went for: nothing has failed
            episode.cause = None
        if num_blocks:
            self.enter(episode, RestorePhase.READY)
        else:
            self.over(episode, "is computed", is_final=is_final)

    def stage_over(self, episode: RestoreEpisode, num_blocks: int, reason: MissReason, *, is_cut: bool = False) -> None:
        """A stage brought so many leading blocks and ends, not to be tried again. is_cut: its last word is to come."""
        self.leave(episode)
        if reason not in UNASKED:
            episode.cause = self._cause(episode, reason, episode.lower_tiers)
        episode.miss = reason
        episode.is_cut = is_cut
        self.rest(episode, num_blocks, is_final=not is_cut)

    def ask_in_vain(self, episode: RestoreEpisode, reason: MissReason) -> None:
        """A tier did not say whether it has what no other has. Told, if it was waited for."""
        if reason in (MissReason.TIMEOUT, MissReason.BUDGET, MissReason.TIER_DOWN) and episode.max_wait_s:
            episode.cause = self._cause(episode, reason, UNKNOWN_TIER)
            episode.wanted = max(episode.wanted, episode.num_landed + episode.max_blocks)

    def give_up(self, episode: RestoreEpisode, reason: MissReason) -> None:
        """A lookup came to nothing. One that asked for no wait has not waited in vain."""
        self.leave(episode)
        if reason is MissReason.TIMEOUT and not episode.max_wait_s:
            reason = MissReason.NOT_STAGED
        else:
            episode.cause = self._cause(episode, reason, UNKNOWN_TIER)
        episode.miss = reason
        episode.wanted = episode.wanted or episode.max_blocks
        self.rest(episode, 0)

    def expire(self, episode: RestoreEpisode, *, is_permanent: bool) -> None:
        """It waits for GPU blocks no longer: what is in host memory for it may land as an ordinary prompt's, unless
        they will never be there."""
        self.go_for(episode, episode.num_blocks)
        waited_s = self._waits.end(episode, "waits no longer")
        episode.cause = Cause(MissReason.CAPACITY, HOST, waited_s, self._settings.capacity_bound_s)
        episode.miss = MissReason.CAPACITY
        if is_permanent:
            self.rest(episode, 0)
            return
        self.tally.num_expired += 1
        episode.is_expired = True
        self.tell(episode)

    def why_short(self, episode: RestoreEpisode, num_found: int, num_blocks: int) -> MissReason | None:
        """Why not the block behind those that may be restored, where cost is not the reason."""
        if num_blocks == episode.max_blocks:
            return MissReason.LIMIT if episode.is_limited else None
        if num_blocks < num_found:
            return MissReason.NOT_STAGED
        return None if episode.cause is None else episode.cause.reason

    def fail(self, episode: RestoreEpisode, num_blocks: int, reason: MissReason, tier: str) -> None:
        """A stage or a copy failed: look again, or go on with the leading blocks that are in host memory."""
        is_failure = episode.phase is RestorePhase.LANDING or reason in FAILURES
        self.leave(episode)
        episode.cause = self._cause(episode, reason, tier)
        has_time = episode.active_s < self._budget_s(RestorePhase.LOOKING)
        if has_time and episode.attempts < self._settings.max_attempts and not episode.is_expired:
            self.look(episode)
            return
        episode.miss = reason
        # One whose wait for GPU blocks was too long was told to be computed.
        episode.must_fail = is_failure and self._settings.on_failure == "fail" and not episode.is_expired
        self.rest(episode, 0 if episode.must_fail else num_blocks)

    def end_if_lost(self, episode: RestoreEpisode, num_held: int) -> bool:
        """After a failed read or copy, less is held than had failed: whether that is the end of the request."""
        cause = episode.cause
        if self._settings.on_failure != "fail" or cause is None or cause.reason not in FAILURES:
            return False
        episode.must_fail = num_held < episode.num_missing
        if episode.must_fail:
            episode.miss = cause.reason
            self.rest(episode, 0)
        return episode.must_fail

    def enter(self, episode: RestoreEpisode, phase: RestorePhase, limit_s: float = inf) -> None:
        self.leave(episode)
        budget_s = self._budget_s(phase)
        if phase is RestorePhase.LANDING:  # the step that ended its stage may have come late: the share is kept
            budget_s = max(budget_s, episode.active_s + self._settings.episode_budget_s * LANDING_SHARE)
        episode.enter(phase, self._clock.now(), limit_s, budget_s)
        self.tally.num_active += phase in ACTIVE

    def leave(self, episode: RestoreEpisode) -> None:
        self.tally.num_active -= episode.watch is not None
        self.tally.restoring_s += episode.leave(self._clock.now())

    def over(self, episode: RestoreEpisode, words: str, *, is_final: bool = True) -> None:
        """Nothing more is restored. is_final: nothing more is heard of it either; so it is told, if it was in vain."""
        self._waits.end(episode, words)
        self._costs.release(episode)
        self.enter(episode, RestorePhase.OVER)
        episode.num_blocks = 0
        episode.is_refreshing = False
        if not is_final:
            return
        episode.is_cut = False
        self.tell(episode)

    def tell(self, episode: RestoreEpisode) -> None:
        """What it went for in vain; once."""
        cause, num_missing = episode.cause, episode.num_missing
        if cause is None or not num_missing or episode.is_told:
            return
        if cause.reason in (MissReason.TIMEOUT, MissReason.BUDGET):
            self.record(episode)
        episode.is_told = True
        self._fallbacks.note(
            Fallback(
                episode.request_id,
                cause.tier,
                num_missing,
                num_missing * self._block_tokens,
                cause.waited_s,
                cause.limit_s,
                cause.reason,
                episode.must_fail,
                episode.is_expired,
            )
        )

    def record(self, episode: RestoreEpisode) -> None:
        """What was predicted of it, beside what came of that; once."""
        predicted_s, episode.predicted_s = episode.predicted_s, None
        if predicted_s is not None:
            self.tally.add_prediction(predicted_s, episode.active_s - episode.answered_active_s)

    def _cause(self, episode: RestoreEpisode, reason: MissReason, tier: str) -> Cause:
        if reason in (MissReason.BUDGET, MissReason.LAND_FAILED):
            phase = RestorePhase.LANDING if tier == HOST else RestorePhase.STAGING  # it may be over by now
            return Cause(reason, tier, episode.active_s, self._budget_s(phase))
        return Cause(reason, tier, episode.waited_s, episode.limit_s)

    def _budget_s(self, phase: RestorePhase) -> float:
        share = 1.0 - LANDING_SHARE if phase in SEARCHING else 1.0
        return self._settings.episode_budget_s * share
