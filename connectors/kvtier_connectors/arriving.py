"""The way up, first stage: from a request's arrival until its blocks are in host memory, or its wait is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from kvtier.clock import Clock
from kvtier.episode import HOST
from kvtier.located import Located
from kvtier.reasons import MissReason
from kvtier.restore import RestoreDecision, RestorePhase
from kvtier.staging import Stager
from kvtier.store import Space
from kvtier_connectors.arrival import Arrival
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.hooks import hook
from kvtier_connectors.keeping import MAX_LOOKED, HostKeeper
from kvtier_connectors.looking import Lookups
from kvtier_connectors.turns import MAX_TURNS, StageTurns

__all__ = ["HOST", "MAX_ACTIVE", "ArrivalFlow"]

MAX_ACTIVE = 64
"""Requests for which tiers read at once: enough to keep any device busy. Others wait for one of them to end."""
STUCK_S = 1.0
"""Without another read begun, after which those that wait for their turn wait for the tiers."""


class ArrivalFlow:
    """Drives episodes through lookup and stage. Engine's thread only.

    At most MAX_ACTIVE are staged at once, and what is leased, for these and for those that wait for their admission, is
    at most half of host memory. Others are *pending*: in their order they begin when one of these ends, or when one
    that goes after them lets go of what is kept for it; and each gives up when its own wait is over.

    Mutable state: `_new` (to be looked up at the next poll), those whose lookup has not ended, `_running`, `_pending`,
    those that the keeper keeps, and `_resting` (that wait for their admission with nothing kept for them), which are
    apart; what became of turns at the last poll; how many blocks were read, and when that last changed.
    """

    def __init__(
        self,
        space: Space,
        stager: Stager,
        decision: RestoreDecision,
        clock: Clock,
        landing_bytes: Callable[[], int],
        report: Callable[[str, BaseException], None],
    ) -> None:
        """landing_bytes: to be copied from host memory before others. report: told what the store raised, and where."""
        self._space = space
        self._stager = stager
        self._decision = decision
        self._clock = clock
        self._report = report
        self._lookups = Lookups(space, stager, decision, clock, landing_bytes, report)
        self._new: dict[Arrival, None] = {}
        self._running: dict[Arrival, None] = {}
        self._pending = StageTurns(decision, clock)
        self._resting: dict[Arrival, None] = {}
        self._keeper = HostKeeper(space, report)
        self._has_more = False  # nobody has looked at the rest of the pending since there is room
        self._num_reads, self._read_at = 0, clock.now()
        self._is_full = False  # the first of the pending was refused, and nothing has ended since
        self._is_blocked = False  # it was at the last poll

    @property
    def num_waiting(self) -> int:
        return len(self._new) + len(self._lookups) + len(self._running) + len(self._pending)

    def begin(self, arrival: Arrival) -> None:
        """Look its blocks up, and begin to bring what only lower tiers hold."""
        self._drive(arrival)

    def resume(self, arrival: Arrival) -> None:
        """It is to be looked up once more, at the next poll."""
        self._new[arrival] = None

    def note_work(self) -> None:
        """The engine's last step computed something."""
        self._pending.note_work()

    def poll(self) -> list[Arrival]:
        """Advance all that wait; returns those that wait no more. O(running), and the timers that ran out."""
        self._pending.tick(is_held=self._is_held())
        self._observe_first()
        ended = [arrival for arrival in (*self._new, *self._lookups) if self._has_ended(arrival)]
        # The last first: one that is given up lets the next be read, which would be in vain if that is given up too.
        ended += reversed([arrival for arrival in reversed(list(self._running)) if self._has_ended(arrival)])
        for others in (self._pending.overdue(), self._refreshed(), self._next_turns()):
            try:
                ended.extend(arrival for arrival in others if self._has_ended(arrival))
            except CAUGHT as error:
                self._report("stage", error)
        return ended

    def next_deadline(self) -> float | None:
        """When the first wait ends by itself."""
        if self._new or self._has_more:
            return self._clock.now()
        ends = [arrival.episode.deadline for arrival in self._running]
        ends += [self._lookups.next_deadline(), self._pending.next_deadline()]
        return min((end for end in ends if end is not None), default=None)

    def give_up(self, arrival: Arrival) -> None:
        """Wait no more; what came is kept, until `close`."""
        if arrival.episode.phase is RestorePhase.STAGING:
            self._end_stage(arrival)
        if arrival.is_waiting:  # it was to be looked up, for the first time or again
            self._decision.end(arrival.episode)

    def expire(self, arrival: Arrival) -> None:
        """Its wait for GPU blocks was too long: it waits for nothing more, and what is there for it stays."""
        if arrival.episode.phase is RestorePhase.READY:
            self._resting.pop(arrival, None)
        else:
            self.close(arrival)

    def close(self, arrival: Arrival) -> None:
        """Let go of what its stage brought, and wait no more for the rest. Idempotent."""
        for queue in (self._new, self._running, self._resting):
            queue.pop(arrival, None)
        self._lookups.discard(arrival)
        self._pending.discard(arrival)
        arrival.found = None
        self._let_go(arrival)  # which has the next one looked at, if it was the first of those that wait for a turn

    def check_integrity(self) -> None:
        """Raises AssertionError when queues and leases disagree. For tests."""
        assert len(self._running) <= MAX_ACTIVE
        assert all(arrival.is_running or arrival.stage is not None for arrival in self._running)
        assert all(arrival.episode.phase is RestorePhase.STAGING for arrival in self._pending)
        assert all(arrival.episode.phase is RestorePhase.READY for arrival in self._keeper.kept)
        assert not any(arrival.digests_kept for arrival in (*self._resting, *self._pending))
        assert all(arrival.is_waiting for arrival in self._lookups)
        self._keeper.check_integrity([*self._running, *self._new, *self._lookups])

    # ---- one request ---------------------------------------------------------------------------------------------

    def _has_ended(self, arrival: Arrival) -> bool:
        """Take it as far as it goes now; whether it waits no more. What it raises is no other's."""
        self._new.pop(arrival, None)
        try:
            self._drive(arrival)
        except CAUGHT as error:  # even its end failed
            self._report("stage", error)
            queues = (self._lookups, self._running, self._pending)
            if arrival.is_waiting and not any(arrival in queue for queue in queues):
                self._new[arrival] = None
        return not arrival.is_waiting

    def _drive(self, arrival: Arrival) -> None:
        """Take it as far as it goes now: to a stage that runs, the queue of the pending, or the end of its wait."""
        try:
            while arrival.is_waiting and self._advance(arrival):
                pass
        except CAUGHT as error:
            self._report("stage", error)
            self._decision.end(arrival.episode)
        if not arrival.is_waiting:
            self._lookups.discard(arrival)
            self._running.pop(arrival, None)
            self._pending.discard(arrival)
            self._rest(arrival)

    def _advance(self, arrival: Arrival) -> bool:
        """One transition; False when there is none now."""
        if arrival.episode.phase is RestorePhase.LOOKING:
            return self._lookups.look(arrival)
        if arrival in self._running:
            return self._poll_stage(arrival)
        if arrival in self._pending:
            if not arrival.has_turn:
                return self._poll_pending(arrival)
            self._pending.settle(arrival)
            if self._decision.refresh_due(arrival.episode):
                self._decision.refreshing(arrival.episode)
                self._lookups.look_again(arrival)
                return True
        return self._begin_stage(arrival)

    def _poll_pending(self, arrival: Arrival) -> bool:
        """Its time may be over."""
        self._pending.settle(arrival)
        self._decision.poll(arrival.episode)
        if arrival.is_waiting:
            self._pending.look_later(arrival)
            return False
        self._end_stage(arrival)
        return True

    def _begin_stage(self, arrival: Arrival) -> bool:
        episode, found = arrival.episode, arrival.found
        assert found is not None, "a stage begins with what a lookup found"
        chosen = found.first(episode.num_blocks)
        if (self._pending and not arrival.has_turn) or not self._has_room(chosen):
            self._let_go(arrival)  # of what an attempt before brought; and it may be the first by now
            arrival.has_turn = False
            self._pending.add(arrival)
            return False
        arrival.has_turn = False
        self._pending.discard(arrival)
        wait_s = episode.stage_wait_s
        if episode.is_blind:  # it may be prolonged
            wait_s = episode.latest_end - self._clock.now()
        elif episode.deadline is not None:
            wait_s = min(wait_s, episode.deadline - self._clock.now())
        if wait_s <= 0:
            self._end_stage(arrival)
            return True
        before, arrival.stage = arrival.stage, None
        parent = arrival.digests[arrival.first_block - 1] if arrival.first_block else None
        try:
            arrival.queued_bytes = sum(self._stager.queued_bytes(source) for source in set(chosen.sources) if source)
            stage = self._space.stage(episode.request_id, chosen.digests, parent, wait_s, chosen, arrival.tenant)
        except CAUGHT as error:
            self._report("stage", error)
            self._decision.staged(episode, 0, MissReason.TIER_ERROR, {}, 0.0, 0)
            return True
        finally:
            if before is not None:
                self._keeper.release(before)
        if stage is None:
            self._decision.staged(episode, 0, MissReason.EVICTED, {}, 0.0, 0)
            return True
        arrival.begun_at = self._clock.now()
        self._keeper.add_stage(arrival, stage)
        self._running[arrival] = None
        return True

    def _poll_stage(self, arrival: Arrival) -> bool:
        stage = arrival.stage
        assert stage is not None
        if not stage.poll():
            self._decision.poll(arrival.episode)
            if arrival.is_waiting:
                return False
        self._end_stage(arrival)
        return True

    @hook(lambda: None)
    def _observe_first(self) -> None:
        """While nobody knows how fast its tiers are, tell what the stage that is being read has brought so far."""
        arrival = next(iter(self._running), None)
        if arrival is not None and arrival.stage is not None and arrival.episode.is_blind:
            seconds = max(0.0, self._clock.now() - arrival.begun_at)
            self._decision.observe_progress(arrival.episode, arrival.stage.arrived, seconds, arrival.queued_bytes)

    def _end_stage(self, arrival: Arrival) -> None:
        """Its stage, or the wait for it to begin, is over: tell what came."""
        stage, episode = arrival.stage if arrival in self._running else None, arrival.episode
        self._running.pop(arrival, None)
        self._pending.discard(arrival)
        self._is_full = False
        if stage is None:  # it never began: that of an attempt before has been told of
            num_host = 0 if arrival.found is None else arrival.found.num_host
            self._decision.staged(episode, num_host, MissReason.TIMEOUT, {}, 0.0, 0)
            return
        if not stage.done:
            stage.stop()
        miss = stage.miss
        if miss is None and stage.num_end < episode.goal:
            miss = MissReason.EVICTED  # from host memory, since it was looked up
        arrival.arrived.update(stage.arrived)
        if stage.failed_tier is not None:
            arrival.failed.add(stage.failed_tier)
        self._decision.staged(episode, stage.num_end, miss, stage.arrived, stage.seconds, arrival.queued_bytes)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _has_room(self, chosen: Located) -> bool:
        return len(self._running) < MAX_ACTIVE and self._keeper.has_room(chosen.digests)

    def _make_room(self, arrival: Arrival, chosen: Located) -> bool:
        """Whether there is room to stage it, when those that go after it let go of what is kept for them."""
        if len(self._running) < MAX_ACTIVE and not self._keeper.has_room(chosen.digests):
            for later in self._keeper.whom_to_pass(arrival, chosen.digests):
                self._let_go(later)
                self._rest_unkept(later)
        return self._has_room(chosen)

    def _next_turns(self) -> Iterator[Arrival]:
        """Those of the pending for which there is room now, in their order, as many as a step has time for."""
        num_looked, self._has_more, self._is_blocked = 0, False, self._is_full
        while (arrival := self._pending.first) is not None and not self._is_full:
            if num_looked > MAX_LOOKED:
                self._has_more = True
                return
            assert arrival.found is not None
            chosen = arrival.found.first(arrival.episode.num_blocks)
            num_looked += len(chosen.digests) + MAX_LOOKED // MAX_TURNS
            if self._make_room(arrival, chosen):
                arrival.has_turn = True
                yield arrival
            else:
                self._is_full = self._is_blocked = True

    def _is_held(self) -> bool:
        """Whether those that wait for their turn wait for the engine: for room that is kept for others, while the tiers
        give back what they are asked for."""
        now, num_reads = self._clock.now(), self._stager.num_reads
        if num_reads != self._num_reads or not self._running or now < self._read_at:
            self._num_reads, self._read_at = num_reads, now
        is_moving = now - self._read_at < STUCK_S
        return is_moving and self._is_blocked and len(self._running) < MAX_ACTIVE and len(self._keeper.kept) > 0

    def _refreshed(self) -> Iterator[Arrival]:
        """Look up again what ready ones wait with, when the answer is old; those that lost it and are to be staged."""
        num_looked = 0
        for arrival in list(itertools.islice(self._resting, MAX_TURNS)):
            num_looked += arrival.episode.num_blocks
            if num_looked > 2 * MAX_LOOKED or not self._decision.refresh_due(arrival.episode):
                return  # they rest in the order in which they were answered
            del self._resting[arrival]
            self._decision.refreshing(arrival.episode)
            try:
                self._lookups.look_again(arrival)
            except CAUGHT as error:
                self._report("stage", error)
            if arrival.is_waiting:
                yield arrival
            else:
                self._rest(arrival)

    def _rest(self, arrival: Arrival) -> None:
        """It waits for its admission. What a stage brought is leased, and so is what was there, while there is room;
        other blocks may leave host memory meanwhile."""
        arrival.found, arrival.has_turn = None, False
        if arrival.episode.phase is not RestorePhase.READY:
            self._let_go(arrival)
        elif not self._keeper.keep(arrival):
            self._rest_unkept(arrival)

    def _let_go(self, arrival: Arrival) -> None:
        self._keeper.let_go(arrival)
        self._is_full = False

    def _rest_unkept(self, arrival: Arrival) -> None:
        if not arrival.episode.is_expired:  # else nothing is looked up for it again
            self._resting[arrival] = None
