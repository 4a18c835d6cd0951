"""The way up as a whole: each live request's attempt to restore, from its arrival to the end of its copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from kvtier.clock import Clock
from kvtier.config import RestoreSettings
from kvtier.fallbacks import Fallback
from kvtier.reasons import MissReason
from kvtier.restore import RestoreDecision, RestoreEpisode, RestorePhase, TierPart
from kvtier.staging import Stager
from kvtier.store import Space
from kvtier_connectors.arrival import Arrival
from kvtier_connectors.arriving import HOST, ArrivalFlow
from kvtier_connectors.contract import (
    NO_RESTORES,
    BlockPoolView,
    CopyResult,
    Match,
    RestoreOutcome,
    RestorePoll,
    StepWork,
)
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.history import admitted, given_up
from kvtier_connectors.hooks import hook
from kvtier_connectors.landing import Landing, LandingFlow
from kvtier_connectors.live import LiveRequest, check_index
from kvtier_connectors.matching import HostMatch, has_lost, is_held_back

__all__ = ["RestoreFlow"]

STAGING = Match(0, None, is_staging=True)


class RestoreFlow:
    """Owns the restore decision and joins the two stages of the way up. Engine's thread only.

    Mutable state: `_landing` (requests whose blocks are being copied), `_refused` (whose wait for GPU blocks runs),
    `_lost` (that match found to have lost leading blocks, and where), `_freed` (that wait no more, until `poll` named
    them), and each live request's record.
    """

    def __init__(
        self,
        space: Space,
        stager: Stager,
        pool: BlockPoolView,
        settings: RestoreSettings,
        clock: Clock,
        job_ids: Iterator[int],
        requests: Mapping[str, LiveRequest],
        why_off: Callable[[LiveRequest], MissReason | None],
        report: Callable[[str, BaseException], None],
    ) -> None:
        """requests: the live ones, which the caller keeps. why_off: why one may restore nothing at all; None if it may.
        report: told what was raised, and in which call."""
        self._space = space
        self._why_off = why_off
        self._requests = requests
        self._report = report
        self._clock = clock
        self._block_tokens = space.namespace.layout.block_tokens
        self.decision = RestoreDecision(
            settings, self._block_tokens, space.block_bytes, clock, on_fallback=self._note_fallback
        )
        self._host = HostMatch(space, self._block_tokens, report)
        self.landings = LandingFlow(space, pool, job_ids, settings.max_inflight_blocks)
        self.arrivals = ArrivalFlow(
            space, stager, self.decision, clock, lambda: self.landings.num_copying * space.block_bytes, report
        )
        self.counts: Counter[str] = Counter()
        self._landing: dict[LiveRequest, None] = {}
        self._refused: dict[LiveRequest, None] = {}
        self._lost: dict[LiveRequest, int] = {}
        self._freed: dict[str, None] = {}

    # ---- a request's way -----------------------------------------------------------------------------------------

    def start(self, request: LiveRequest, *, goes_on: bool = False) -> None:
        """It waits to be admitted, for the first time or again: look for what can be restored, and begin to.

        goes_on: it has not been admitted since the last time, and what it has waited counts.
        """
        check_index("num_local_blocks", request.num_local_blocks)
        before = request.arrival
        query = request.query(self._block_tokens, may_restore=self._why_off(request) is None)
        if before is not None:
            self.arrivals.close(before)
        if before is None:
            episode = self.decision.begin(query)
        elif goes_on:
            episode = self.decision.look_again(before.episode, query)
        else:
            episode = self.decision.again(before.episode, query)
        request.arrival = self._arrival(request, episode)
        self.arrivals.begin(request.arrival)
        if episode.must_fail:
            self._freed[request.request_id] = None

    def requeue(self, request: LiveRequest) -> None:
        """It was preempted. Copies into its blocks, which it lost, end on their own."""
        self._forget(request)
        request.is_retrying = False
        self.start(request)

    def match(self, request: LiveRequest, num_local: int, max_blocks: int) -> Match:
        """What could land now.

        Of a request that lost leading blocks it notes where, for only an engine that asks knows that: the next `poll`
        looks for them. Nothing else changes, however often it is asked: neither attempts nor waits.
        """
        arrival, why_not = request.arrival, self._why_not(request)
        if why_not is not None:
            return Match(0, why_not)
        if request in self._lost:
            return STAGING
        if arrival is not None:
            if arrival.is_waiting and num_local < arrival.end_block:
                return STAGING
            if has_lost(arrival, num_local):
                self._lost[request] = num_local
                return STAGING
        return self._host.look_up(request, num_local, max_blocks)

    def refuse(self, request: LiveRequest, *, is_permanent: bool) -> bool:
        arrival = request.arrival
        if arrival is not None and self.decision.refuse(arrival.episode, is_permanent=is_permanent):
            self._refused[request] = None
            return True
        self._refused.pop(request, None)
        self._lost.pop(request, None)
        if arrival is not None:
            self.arrivals.expire(arrival)
        return False

    def admit(self, request: LiveRequest, num_local: int, max_blocks: int, block_ids: Sequence[int]) -> int:
        """It leaves the queue."""
        self._forget(request)
        why_not = self._why_not(request)
        if len(block_ids) and why_not is None:
            request.landing = self._begin_landing(request, num_local, block_ids)
        if request.landing is not None:
            self._landing[request] = None
        num_landing = request.landing.num_blocks if request.landing else 0
        self._end_arrival(request)
        self._count_admission(request, num_local, max_blocks, num_landing, why_not)
        return num_landing

    def complete(self, result: CopyResult) -> list[RestoreOutcome]:
        """A job of a landing ended."""
        landed = self.landings.complete(result)
        if landed is None:
            return []
        landing, num_landed = landed.landing, landed.num_blocks
        self.counts["landed_blocks"] += num_landed
        self.counts["failed_landings"] += landing.num_blocks - num_landed
        self._release(landing)
        request = self._requests.get(landing.request_id)
        if request is None or request.landing is not landing:
            return []  # that request ended, or gave it up, and its id may be another's by now
        request.landing = None
        del self._landing[request]
        return [self._outcome(request, landing, num_landed, is_void=landed.is_void)]

    def finish(self, request: LiveRequest) -> None:
        """It ended, in whatever state."""
        self._forget(request)
        if request.arrival is not None:
            self.arrivals.close(request.arrival)
            self.decision.end(request.arrival.episode)

    # ---- once a step ---------------------------------------------------------------------------------------------

    def poll(self) -> RestorePoll:
        """Advance every restore that waits for a tier or a copy."""
        for request, num_local in list(self._lost.items()):
            self._look_again(request, num_local)
        self._freed.update((arrival.episode.request_id, None) for arrival in self.arrivals.poll())
        outcomes = [outcome for request in list(self._landing) if (outcome := self._check_landing(request))]
        self._tick()
        num_active = self.arrivals.num_waiting + len(self._landing)
        if not (self._freed or outcomes or num_active or self._refused):
            return NO_RESTORES
        live = [item for name in self._freed if (item := self._requests.get(name)) is not None]
        poll = RestorePoll(
            ready=tuple(item.request_id for item in live if not item.must_fail),
            failed=tuple(item.request_id for item in live if item.must_fail),
            outcomes=tuple(outcomes),
            num_active=num_active,
            next_deadline=self._next_deadline(),
        )
        self._freed.clear()
        return poll

    def note_work(self, work: StepWork) -> None:
        """What the engine's last step computed, and what is before a request that arrives now."""
        self.decision.observe_prefill(work.num_tokens, work.num_pairs, work.seconds)
        self.decision.set_backlog(work.backlog_tokens)
        if work.seconds > 0:
            self.arrivals.note_work()

    def void(self) -> None:
        """The cache was reset: let every attempt come to nothing."""
        self.landings.void()
        self._freed.update(dict.fromkeys(request.request_id for request in self._lost))
        self._lost.clear()
        self._refused.clear()
        for request in self._requests.values():
            arrival = request.arrival
            if arrival is None or request.landing is not None:
                continue
            if arrival.is_waiting:
                self._freed[request.request_id] = None
            self.arrivals.close(arrival)
            self.decision.end(arrival.episode)

    def close(self) -> None:
        """Every request ended before."""
        self._host.close()

    def check_integrity(self) -> None:
        self.landings.check_integrity()
        self.arrivals.check_integrity()
        live = self._requests
        for request in (*self._landing, *self._refused, *self._lost):
            assert live.get(request.request_id) is request, f"{request.request_id} ended, and its restore did not"
        assert all(request.landing is not None for request in self._landing)

    # ---- parts of it ---------------------------------------------------------------------------------------------

    def _arrival(self, request: LiveRequest, episode: RestoreEpisode) -> Arrival:
        info = request.info
        return Arrival(episode, info.digests, self._block_tokens, request.order, info.options.tenant)

    def _why_not(self, request: LiveRequest) -> MissReason | None:
        """Why nothing is restored for it now: it may not, or what host memory has for it is computed faster by now."""
        if (why := self._why_off(request)) is not None:
            return why
        if (arrival := request.arrival) is None or arrival.episode.phase is not RestorePhase.READY:
            return None
        return None if self.decision.is_worth_landing(arrival.episode) else MissReason.COST

    def _ready_episode(self, request: LiveRequest, num_local: int, num_blocks: int) -> RestoreEpisode:
        """The one that these blocks land for: the request's, or another where that found nothing when it looked."""
        arrival = request.arrival
        if arrival is not None:
            self.arrivals.give_up(arrival)
            if arrival.episode.phase is RestorePhase.READY or is_held_back(arrival):
                return arrival.episode
        request.num_local_blocks = num_local
        episode = self.decision.begin(request.query(self._block_tokens, may_restore=True))
        self.decision.answered(episode, [TierPart(HOST, num_blocks)])
        request.arrival = self._arrival(request, episode)
        if arrival is not None:
            self.arrivals.close(arrival)
            request.arrival.arrived = arrival.arrived
        return episode

    def _look_again(self, request: LiveRequest, num_local: int) -> None:
        del self._lost[request]
        request.num_local_blocks = num_local
        try:
            self.start(request, goes_on=True)
        except CAUGHT as error:
            self._report("poll_restores", error)
            if request.arrival is not None and request.arrival.is_waiting:
                self.arrivals.resume(request.arrival)
        if request.arrival is None or not request.arrival.is_waiting:
            self._freed[request.request_id] = None

    def _outcome(self, request: LiveRequest, landing: Landing, num_landed: int, *, is_void: bool) -> RestoreOutcome:
        arrival, will_retry, must_fail = request.arrival, False, False
        try:
            if arrival is not None and is_void:
                self.decision.end(arrival.episode)
            elif arrival is not None:
                if num_landed == landing.num_blocks:
                    num_bytes = num_landed * self._space.block_bytes
                    self.decision.observe_restore(HOST, num_bytes, 0, landing.seconds)
                self.decision.landed(arrival.episode, num_landed)
                must_fail, will_retry = arrival.episode.must_fail, arrival.is_waiting
        except CAUGHT as error:
            self._report("complete", error)
        if will_retry and arrival is not None:
            request.is_retrying = True
            self.arrivals.resume(arrival)
        return RestoreOutcome(request.request_id, landing.first_block, num_landed, will_retry, must_fail)

    @hook(lambda: cast("RestoreOutcome | None", None))
    def _check_landing(self, request: LiveRequest) -> RestoreOutcome | None:
        """Give a landing up whose time is over; its pins and leases stay until its copies ended."""
        landing, arrival = request.landing, request.arrival
        assert landing is not None
        assert arrival is not None
        if self.decision.poll(arrival.episode) is RestorePhase.LANDING:
            return None
        del self._landing[request]
        self.landings.abandon(landing)
        request.landing = None
        must_fail = arrival.episode.must_fail
        return RestoreOutcome(request.request_id, landing.first_block, 0, must_fail=must_fail, is_abandoned=True)

    @hook(lambda: cast("float | None", None))
    def _next_deadline(self) -> float | None:
        landing = [request.arrival.episode.deadline for request in self._landing if request.arrival is not None]
        waiting = [request.arrival.episode for request in self._refused if request.arrival is not None]
        refused = [self.decision.refused_until(episode) for episode in waiting]
        now = self._clock.now()  # a wait for GPU blocks that is over ends at the next refusal
        ends = (*landing, *(end for end in refused if end is not None and end > now), self.arrivals.next_deadline())
        return min((end for end in ends if end is not None), default=None)

    def _forget(self, request: LiveRequest) -> None:
        self._landing.pop(request, None)
        self._refused.pop(request, None)
        self._lost.pop(request, None)
        self._freed.pop(request.request_id, None)
        request.landing = None

    def _note_fallback(self, fallback: Fallback) -> None:
        try:
            self._space.count_fallback(fallback.reason)
            self._space.note_decision(given_up(fallback))
        except CAUGHT as error:
            self._report("count_fallback", error)

    # Hooks of their own, so that what they raise does not end the call around them.

    @hook(lambda: cast("Landing | None", None))
    def _begin_landing(self, request: LiveRequest, num_local: int, block_ids: Sequence[int]) -> Landing | None:
        check_index("num_local_blocks", num_local)
        num_allowed = self._host.num_allowed(request, num_local, len(block_ids))
        wanted = request.info.digests[num_local : num_local + num_allowed]
        if not wanted:
            return None
        episode = self._ready_episode(request, num_local, len(wanted))
        if episode.phase is not RestorePhase.READY:
            return None
        landing = self.landings.begin(request.request_id, num_local, wanted, block_ids)
        if landing is not None:
            self.decision.landing(episode, landing.num_blocks, position=num_local * self._block_tokens)
        return landing

    @hook(lambda: None)
    def _release(self, landing: Landing) -> None:
        self.landings.release(landing)

    @hook(lambda: None)
    def _end_arrival(self, request: LiveRequest) -> None:
        """It waits no more: let go of what its stage brought, which its landing has leased by now."""
        arrival = request.arrival
        if arrival is None:
            return
        if request.landing is None:
            self.arrivals.give_up(arrival)
            self.decision.end(arrival.episode)
        self.arrivals.close(arrival)

    @hook(lambda: None)
    def _count_admission(
        self, request: LiveRequest, num_local: int, max_blocks: int, num_landing: int, miss: MissReason | None
    ) -> None:
        is_first, is_retrying = not request.was_admitted, request.is_retrying
        request.was_admitted, request.is_retrying = True, False
        if not is_first:
            self.counts["readmissions"] += not is_retrying
            return
        if request.info.options.restore:
            num_asked = max(num_landing, min(max_blocks, len(request.info.digests) - num_local))
            miss = miss or self._host.why_missing(request, num_local, num_landing, max_blocks)
            arrived = None if request.arrival is None else request.arrival.arrived
            request.hit_sources = self._space.count_lookup(num_asked, num_landing, miss, arrived)
            self._space.note_decision(admitted(request.request_id, num_asked, request.hit_sources, miss))
        self._space.note_use(request.info.digests[: num_local + num_landing], None)

    @hook(lambda: None)
    def _tick(self) -> None:
        self.decision.tick()
