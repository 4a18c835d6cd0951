"""Whether, and how long, a request waits for its blocks: restore, wait, or compute, each wait with an end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvtier.choice import RestoreCosts
from kvtier.clock import Clock
from kvtier.config import RestoreSettings
from kvtier.episode import (
    ANSWERED,
    HOST,
    SEARCHING,
    RestoreEpisode,
    RestorePhase,
    RestoreQuery,
    Stopwatch,
    TierPart,
    clip,
    num_blocks_of,
    num_leading_host,
)
from kvtier.fallbacks import Fallback, FallbackLog
from kvtier.metrics import RestoreStatus
from kvtier.progress import RETRIED, RestoreProgress
from kvtier.reasons import MissReason
from kvtier.review import StageReview
from kvtier.waits import CapacityWaits

__all__ = ["Fallback", "RestoreDecision", "RestoreEpisode", "RestorePhase", "RestoreQuery", "TierPart"]

logger = logging.getLogger("kvtier.restore")

ANSWER_LIFETIME_S = 20.0  # how long a lookup's answer is relied on: at half of it, it is asked for again


class RestoreDecision:
    """Decides for every request of one connector. Pure: no I/O, no thread, time only from the clock.

    Engine's thread only, but `status`. Nothing here raises or blocks. Each call costs the same however many requests
    wait; `tick` and `status` cost as much as there are waits for GPU blocks.

    Owns the phases of the episodes that it made, the waits for GPU blocks, what was measured, and the one warning of
    each episode. The connector owns tickets, stages and leases, and tells what became of them.

    Mutable state: everything, and the episodes.
    """

    def __init__(
        self,
        settings: RestoreSettings,
        block_tokens: int,
        block_bytes: int,
        clock: Clock,
        on_fallback: Callable[[Fallback], None],
    ) -> None:
        """block_bytes: of one block in every tier. on_fallback: told of each fallback, once; must not raise."""
        self._settings = settings
        self._block_tokens = block_tokens
        self._clock = clock
        self._costs = RestoreCosts(settings.margin, block_tokens, block_bytes, clock)
        self._fallbacks = FallbackLog(clock, on_fallback)
        self._waits = CapacityWaits(settings.capacity_bound_s, clock)
        self._progress = RestoreProgress(settings, block_tokens, clock, self._costs, self._waits, self._fallbacks)
        self._review = StageReview(self._costs, self._progress, clock, settings.max_staging)

    # ---- what was measured -------------------------------------------------------------------------------------------

    def observe_prefill(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """A step computed so many prompt tokens, with so many pairs (see `PrefillCost`), in so many seconds."""
        self._costs.observe_prefill(num_tokens, num_pairs, seconds)

    def set_backlog(self, num_tokens: int) -> None:
        """Prompt tokens that are computed before those of a request that arrives now."""
        self._costs.backlog_tokens = num_tokens

    def observe_restore(self, tier: str, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """So many bytes, behind so many others, came from a tier in so many seconds; `host`: to the GPU.

        `staged` tells of stages by itself: this is for copies to the GPU, and whatever else was read.
        """
        self._costs.observe_tier(tier, nbytes, queued_bytes, seconds)

    # ---- an episode --------------------------------------------------------------------------------------------------

    def begin(self, query: RestoreQuery) -> RestoreEpisode:
        """A request arrived. LOOKING: ask the tiers, and tell `answered`. OVER: there is nothing to restore."""
        return self._progress.begin(query)

    def again(self, episode: RestoreEpisode, query: RestoreQuery) -> RestoreEpisode:
        """The request was preempted: a fresh episode, as from `begin`, in place of its last one, which ends.

        Without a token since that one began, its attempts count on, so that restoring and preempting ends; but for the
        one under way, where it has not come to a copy: the request lost what it had before it was admitted.
        """
        is_under_way = episode.phase in (RestorePhase.LOOKING, RestorePhase.STAGING, RestorePhase.READY)
        self.end(episode)
        attempts = episode.attempts - is_under_way
        return self._progress.begin(query, 0 if query.num_tokens > episode.num_tokens else attempts)

    def look_again(self, episode: RestoreEpisode, query: RestoreQuery) -> RestoreEpisode:
        """The engine lost leading blocks before the request was admitted: an episode from there, in place of its last.

        That goes on in it, with all that it has waited, for GPU blocks too, since its first refusal; what it failed at
        is told once, by this one. Its attempt under way has not come to a copy, and is not counted.
        """
        attempts = episode.attempts - (episode.phase in (*SEARCHING, RestorePhase.READY))
        self._progress.over(episode, "lost blocks that the engine had", is_final=False)
        return self._progress.begin(query, attempts, episode)

    def worth(self, episode: RestoreEpisode, parts: Sequence[TierPart]) -> tuple[int, float]:
        """Of these blocks, as for `answered`, how many it would go for, and the seconds that this saves. Pure."""
        parts = clip(parts, episode.max_blocks, is_host_only=not episode.max_wait_s)
        choice, gain_s = self._costs.weigh(episode.position, parts, episode, self._progress.most_s(episode))
        return choice.num_blocks, gain_s

    def answered(
        self, episode: RestoreEpisode, parts: Sequence[TierPart], unanswered: MissReason | None = None
    ) -> RestorePhase:
        """A lookup, or its refresh, found the leading blocks of these tiers, none or more, from `position` on.
        unanswered: why a tier did not say whether it has those behind them, if one did not.

        STAGING: begin a stage of `num_blocks`, for at most `stage_wait_s`, and tell `staged`. READY: all that it goes
        for is in host memory. OVER: there is nothing, or nothing worth restoring (`miss` is then COST). An answer that
        nobody waits for is ignored.
        """
        if self._ends_refresh(episode):
            if episode.phase is RestorePhase.STAGING:
                return self._answered_anew(episode, parts)
            is_held = num_leading_host(parts) >= episode.num_blocks
            return episode.phase if is_held else self._lost(episode, parts)
        if episode.phase is not RestorePhase.LOOKING:
            return episode.phase
        return self._decide(episode, parts, unanswered)

    def not_answered(self, episode: RestoreEpisode) -> RestorePhase:
        """The lookup failed: OVER. The failure of a refresh changes nothing."""
        if self._ends_refresh(episode):
            return episode.phase
        if episode.phase is RestorePhase.LOOKING:
            self._progress.give_up(episode, MissReason.TIER_ERROR)
        return episode.phase

    def poll(self, episode: RestoreEpisode) -> RestorePhase:
        """Once a step, in the phases that have a deadline: ends what is over.

        STAGING may become READY with what was in host memory from the start, or OVER: then close the stage and tell
        `staged` what had arrived, which counts. LANDING may become OVER: its copies still run, and what they write
        counts as nothing.
        """
        watch = episode.watch
        if watch is None:
            return episode.phase
        now = self._clock.now()
        is_over, elapsed_s = watch.has_reached(now, episode.allowed_s), watch.read(now)
        episode.deadline = watch.when(self._review.next_s(episode, elapsed_s))
        if episode.phase is RestorePhase.STAGING and (episode.is_blind or not is_over):
            if self._review.is_over(episode, elapsed_s):
                self._progress.stage_over(episode, episode.num_host, MissReason.COST, is_cut=True)
                return episode.phase
            is_over = watch.has_reached(now, episode.allowed_s) and not self._review.is_due(episode)
        if not is_over:
            return episode.phase
        if episode.phase is RestorePhase.LANDING:
            self._progress.fail(episode, 0, MissReason.BUDGET, HOST)
        elif episode.phase is RestorePhase.LOOKING:
            self._progress.give_up(episode, episode.time_over)
        else:
            self._progress.stage_over(episode, episode.num_host, episode.time_over, is_cut=True)
        return episode.phase

    def excuse(self, episode: RestoreEpisode, seconds: float) -> None:
        """So much of the wait under way, at most all of it, does not count: others were before it, whatever the tiers
        did."""
        if episode.watch is None:
            return
        seconds = min(seconds, episode.watch.read(self._clock.now()))
        if seconds > 0:
            episode.watch.excuse(seconds)
            episode.deadline = None if episode.deadline is None else episode.deadline + seconds
            episode.latest_end += seconds

    def refresh_due(self, episode: RestoreEpisode) -> bool:
        """Whether what it waits with, READY or for its stage to begin, is to be looked up again: the answer is half its
        lifetime old, and none is under way."""
        watch = episode.answered_at
        if episode.phase not in ANSWERED or episode.is_refreshing or episode.is_expired or watch is None:
            return False
        return watch.has_reached(self._clock.now(), ANSWER_LIFETIME_S / 2)

    def refreshing(self, episode: RestoreEpisode) -> None:
        """Its blocks are being looked up again: `answered` or `not_answered` will say how they stand."""
        episode.is_refreshing = episode.phase in ANSWERED and not episode.is_expired

    def staged(
        self,
        episode: RestoreEpisode,
        num_blocks: int,
        miss: MissReason | None,
        arrived: Mapping[str, int],
        seconds: float,
        queued_bytes: int,
    ) -> RestorePhase:
        """Its stage ended: so many leading blocks behind `position` are in host memory, and why not the next one.

        arrived: blocks that the stage brought, by tier. queued_bytes: to be read before them when it began. seconds:
        how long it ran. READY: what came may land. LOOKING: it failed, and is to be looked for again. OVER: nothing
        came. Ignored where no stage is known.
        """
        if episode.phase is not RestorePhase.STAGING and not episode.is_cut:
            return episode.phase
        num_blocks = min(max(num_blocks, 0), episode.goal)
        if episode.is_cut or (miss is None and num_blocks < episode.goal):
            miss = MissReason.COST if episode.is_unwanted else MissReason.TIMEOUT
        self._review.end(episode)
        self._costs.observe_stage(episode.parts, arrived, queued_bytes, seconds, miss)
        if num_blocks == episode.goal:
            episode.miss = None if episode.is_cut else episode.miss
            episode.is_cut = False
            self._progress.rest(episode, num_blocks)
        elif miss is None or miss is MissReason.TIMEOUT:
            self._progress.stage_over(episode, num_blocks, episode.time_over)
        elif miss in RETRIED:
            self._progress.fail(episode, num_blocks, miss, episode.lower_tiers)
        else:
            self._progress.stage_over(episode, num_blocks, miss)
        return episode.phase

    def observe_progress(
        self, episode: RestoreEpisode, arrived: Mapping[str, int], seconds: float, queued_bytes: int
    ) -> None:
        """Its stage has run for so long and brought so much by now; as for `staged`. Tell while it `is_blind`, before
        `poll`: from what came all that wait blindly learn what their tiers take."""
        if episode.phase is RestorePhase.STAGING and episode.is_blind:
            self._review.progressed(arrived, seconds, queued_bytes)

    def refuse(self, episode: RestoreEpisode, *, is_permanent: bool = False) -> bool:
        """The request could run now, but for the GPU blocks that its restore needs. True: ask again. False: compute it.

        False once `restore.capacity_bound_s` has passed since the first refusal: it is an ordinary prompt from here on,
        for which nothing more is looked for; what is in host memory for it when it is admitted may still land. False at
        once, and nothing lands, where the blocks will never be there.
        """
        phase = episode.phase
        if phase is not RestorePhase.READY and (phase not in SEARCHING or not is_permanent):
            return phase is not RestorePhase.OVER
        if episode.is_expired:
            return False
        if not (is_permanent or self._waits.refuse(episode)):
            return True
        self._progress.expire(episode, is_permanent=is_permanent)
        return False

    def refused_until(self, episode: RestoreEpisode) -> float | None:
        """When its wait for GPU blocks ends at the next refusal, by the clock as it is now; None before the first."""
        return self._waits.deadline(episode)

    def landing(self, episode: RestoreEpisode, num_blocks: int, *, position: int | None = None) -> None:
        """Copies of so many leading blocks began, at whatever age. Their end is told to `landed`.

        position: where these begin, if the engine's own prefix cache holds more by now than when it was looked.
        """
        if episode.phase in (RestorePhase.OVER, RestorePhase.LANDING):
            return
        if position is not None:
            self._advance(episode, (position - episode.position) // self._block_tokens)
        self._waits.end(episode, "starts")
        self._progress.go_for(episode, max(0, num_blocks))
        episode.is_cut = episode.is_refreshing = False
        self._progress.enter(episode, RestorePhase.LANDING)

    def landed(self, episode: RestoreEpisode, num_blocks: int) -> RestorePhase:
        """The copies ended; the first `num_blocks` are good. OVER, or LOOKING: look again, behind those."""
        if episode.phase is not RestorePhase.LANDING:
            return episode.phase
        num_blocks = min(max(num_blocks, 0), episode.goal)
        self._progress.tally.avoided_s += self._costs.compute_s(episode.position, num_blocks) or 0.0
        self._advance(episode, num_blocks)
        if num_blocks < episode.goal:
            self._progress.fail(episode, 0, MissReason.LAND_FAILED, HOST)
            return episode.phase
        self._progress.leave(episode)
        self._progress.record(episode)
        self._progress.rest(episode, 0)
        return episode.phase

    def is_worth_landing(self, episode: RestoreEpisode) -> bool:
        """Whether copying up what is in host memory still beats computing it. Pure."""
        return self._costs.is_landing_worth_it(episode.position, episode.num_blocks)

    def end(self, episode: RestoreEpisode) -> None:
        """The request was admitted without a copy, or it ended. Idempotent."""
        self._progress.over(episode, "ends")

    # ---- once a step -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a step: the log's lines about waits, and about warnings held back."""
        self._waits.tick()
        self._fallbacks.tick()

    def status(self) -> RestoreStatus:
        """This moment's counts. Any thread."""
        told, tally = self._fallbacks, self._progress.tally
        return RestoreStatus(
            active_waits=tally.num_active,
            capacity_waiters=self._waits.num_waiting,
            longest_capacity_wait_seconds=self._waits.longest_s,
            capacity_waits=self._waits.num_started,
            capacity_expired=tally.num_expired,
            fallbacks={reason.value: count for reason, count in told.num_requests.copy().items()},
            fallback_blocks=told.num_blocks,
            fallback_tokens=told.num_tokens,
            held_back_warnings=told.num_held_back,
            decisions=dict(tally.decisions),
            predictions=tally.num_predictions,
            predicted_seconds=tally.predicted_s,
            actual_seconds=tally.actual_s,
            error_seconds=tally.error_s,
            avoided_seconds=tally.avoided_s,
            restoring_seconds=tally.restoring_s,
            tier_rates=self._costs.rates,
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _decide(
        self, episode: RestoreEpisode, found: Sequence[TierPart], unanswered: MissReason | None = None
    ) -> RestorePhase:
        parts = clip(found, episode.max_blocks, is_host_only=not episode.max_wait_s)
        num_held = num_blocks_of(parts)
        if unanswered is not None and num_held < episode.max_blocks:
            self._progress.ask_in_vain(episode, unanswered)
        episode.answered_at = Stopwatch(self._clock.now())
        if self._progress.end_if_lost(episode, num_held):
            return episode.phase
        choice = self._costs.choose(episode.position, parts, episode, self._progress.most_s(episode))
        num_blocks = choice.num_blocks
        self._progress.go_for(episode, num_blocks)
        short = self._progress.why_short(episode, num_blocks_of(found), num_held)
        episode.miss = MissReason.COST if num_blocks < num_held else short or unanswered
        episode.parts = clip(parts, num_blocks)
        episode.num_host = num_leading_host(episode.parts)
        episode.predicted_s = choice.predicted_s
        if num_held:
            outcome = "restore" if num_blocks == num_held else "partial" if num_blocks else "recompute"
            self._progress.tally.decisions[outcome] += 1
            logger.debug("request %s: %s, %d of %d blocks", episode.request_id, outcome, num_blocks, num_held)
        if episode.num_host == num_blocks:
            self._progress.rest(episode, num_blocks)
        else:
            self._progress.enter(episode, RestorePhase.STAGING, self._progress.limit_s(episode, num_blocks))
        episode.stage_wait_s = episode.allowed_s
        if episode.phase is not RestorePhase.STAGING:
            self._progress.add_backlog(episode, num_blocks)
        else:
            self._review.begin(episode)
        episode.answered_active_s = episode.active_s
        if episode.phase is RestorePhase.STAGING and not episode.allowed_s:  # earlier attempts took all of it
            self._progress.stage_over(episode, episode.num_host, episode.time_over)
        return episode.phase

    def _advance(self, episode: RestoreEpisode, num_blocks: int) -> None:
        """The engine has so many blocks more."""
        num_blocks = max(0, num_blocks)
        episode.position += num_blocks * self._block_tokens
        episode.max_blocks -= min(num_blocks, episode.max_blocks)
        episode.num_landed += num_blocks

    def _ends_refresh(self, episode: RestoreEpisode) -> bool:
        """Whether the lookup that ended was the refresh of an answer."""
        if episode.phase not in ANSWERED or not episode.is_refreshing:
            return False
        episode.is_refreshing = False
        episode.answered_at = Stopwatch(self._clock.now())
        return True

    def _answered_anew(self, episode: RestoreEpisode, found: Sequence[TierPart]) -> RestorePhase:
        """Before its stage begins: what it goes for may be elsewhere by now, or no longer be there."""
        parts = clip(found, episode.num_blocks)
        if num_blocks_of(parts) < episode.num_blocks:
            return self._decide(episode, found)
        episode.parts, episode.num_host = parts, num_leading_host(parts)
        if episode.num_host == episode.num_blocks:
            self._progress.rest(episode, episode.num_blocks)
        return episode.phase

    def _lost(self, episode: RestoreEpisode, found: Sequence[TierPart]) -> RestorePhase:
        """Host memory gave up what it waits with: decide anew, as after a lookup."""
        self._waits.end(episode, "lost its blocks in host memory")
        if episode.attempts >= self._settings.max_attempts:
            found = clip(found, num_leading_host(found))
        else:
            episode.attempts += 1
        self._decide(episode, found)
        if episode.miss is None and episode.num_blocks < episode.num_missing:
            episode.miss = MissReason.EVICTED
        return episode.phase
