"""Which of the waiting may be admitted: looked at in their order, nothing allocated, every refusal accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_connectors.contract import ConnectorScheduler
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.capacity import CapacityLedger
from kvtier_engine.config import EngineConfig
from kvtier_engine.request import Refusal, Request, RequestState
from kvtier_engine.tables import BlockTables
from kvtier_engine.waiting import WaitingQueue

__all__ = ["Admission", "Candidate", "Fitting"]

REPROBE_STEPS = 8
"""A refused request is tested again when there may be room for it, and every so many steps: more of its prefix may be
cached by now."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request for which there are a slot and blocks. num_held: blocks kept for those before it that were refused."""

    request: Request
    is_restore: bool
    num_held: int


@dataclass(frozen=True, slots=True)
class Fitting:
    """A candidate's cached blocks, and how many of the free ones it takes."""

    local: list[int]
    num_taken: int


@dataclass(frozen=True, slots=True)
class _Probe:
    """num_needed: blocks it must get. num_taken: those, and the cached ones that would leave the free queue."""

    is_restore: bool
    num_needed: int
    num_taken: int
    is_staging: bool = False


@dataclass(frozen=True, slots=True)
class _InVain:
    """A scan that found nobody, and what it saw: free blocks beyond the credits, how often blocks had become free, the
    front of the queue, the cache."""

    room: int
    num_freed: int
    front_version: int
    num_published: int
    step: int


class Admission:
    """Tests the first of the waiting, once a step, for a slot and blocks; owns what that needs to remember.

    A request fits when all of it and one more token do, beside what admitted prompts still need: then it can end
    whatever comes. One whose restore waited too long is an ordinary prompt, for which nothing is kept but what is for
    the first of them.

    Engine's thread only. Cost: while nothing changes, as many requests as are capacity waiters; else the first of the
    queue, a bounded number, of which only those are looked at closely for which there may be more room.
    """

    def __init__(
        self,
        pool: BlockPool,
        queue: WaitingQueue,
        tables: BlockTables,
        connector: ConnectorScheduler | None,
        config: EngineConfig,
    ) -> None:
        self.ledger = CapacityLedger(pool, config.max_capacity_waiters, pool.num_blocks // 100)
        self._pool = pool
        self._queue = queue
        self._tables = tables
        self._connector = connector
        self._config = config
        self.num_sent_back = 0
        """In the last scan: requests whose connector begins anew to look for what it restores, at its next poll."""
        self._step = 0
        self._in_vain: _InVain | None = None

    def could_admit(self, request: Request, running: Sequence[Request]) -> bool:
        """Would it fit now, were it the first to be considered? Pure."""
        probe = self._probe(request)
        room = self._pool.num_free - self.ledger.credits(running)
        return not probe.is_staging and probe.num_taken <= room

    def scan(self, running: Sequence[Request]) -> list[Candidate]:
        """The requests that may be admitted in this step, first come first; those in front of them that may not are
        refused, which starts and ends waits for capacity. Allocates and evicts nothing."""
        self.ledger.start_step()
        self.num_sent_back = 0
        self._step += 1
        num_slots = self._config.max_num_seqs - len(running)
        if num_slots <= 0 or not self._queue.num_ready:
            return []  # a wait for a slot is ordinary queueing: nobody is refused
        room = self._pool.num_free - self.ledger.credits(running)
        if self._is_in_vain(room) and self._refuse_again():
            return []
        is_busy = any(request.state is RequestState.RUNNING for request in running)
        found = self._find(num_slots, room, is_busy=is_busy)
        self._in_vain = (
            None
            if found
            else _InVain(room, self._pool.num_freed, self._queue.front_version, self._pool.num_published, self._step)
        )
        return found

    def look_anew(self) -> None:
        """Nothing moves any more: trust no earlier test."""
        self._in_vain = None
        for request in self._queue.front():
            request.refusal = None

    def fits(self, candidate: Candidate, running: Sequence[Request], num_promised: int) -> Fitting | None:
        """Look once more, now that the turn has taken its blocks; None when it fits no more. num_promised: blocks kept
        for candidates before it that were passed."""
        request = candidate.request
        local = self._tables.find_local(request)
        num_taken = self._needed(request, len(local)) + self._pool.num_free_of(local)
        room = self._pool.num_free - self.ledger.credits(running) - candidate.num_held - num_promised
        return Fitting(local, num_taken) if num_taken <= room else None

    def _find(self, num_slots: int, room: int, *, is_busy: bool) -> list[Candidate]:
        found: list[Candidate] = []
        num_refused = 0
        for request in self._queue.front():
            if len(found) == num_slots:
                break
            known = self._known_probe(request, room)
            probe = known or self._probe(request)
            if probe.is_staging:
                self._stage_again(request)
                continue
            if not probe.is_restore:
                self.ledger.release(request)
            num_held = self.ledger.num_held
            if not self._has_room(probe, room, is_busy=is_busy):
                if len(found) + num_refused >= num_slots:
                    continue  # the slots go to those before it: that, too, is ordinary queueing
                if known is None:
                    request.refusal = Refusal(probe.is_restore, probe.num_needed, probe.num_taken, self._step)
                probe = self._refuse(request, probe, is_first=not num_refused)
                num_refused += 1
                if not (request.restore_expired and self._has_room(probe, room, is_busy=is_busy)):
                    continue
            found.append(Candidate(request, probe.is_restore, num_held))
            room -= probe.num_taken
        return found

    def _has_room(self, probe: _Probe, room: int, *, is_busy: bool) -> bool:
        return probe.num_taken <= room - self.ledger.kept(is_restore=probe.is_restore, is_busy=is_busy)

    def _is_in_vain(self, room: int) -> bool:
        """Whether the last scan found nobody, and another would not either."""
        last = self._in_vain
        return (
            last is not None
            and room <= last.room
            and self._pool.num_freed == last.num_freed
            and self._queue.front_version == last.front_version
            and (
                self._step - last.step < REPROBE_STEPS
                or (self._pool.num_published == last.num_published and not self.ledger.num_waiters)
            )
        )

    def _refuse_again(self) -> bool:
        """Everybody stands as before, and is refused as before. False when a wait for capacity has ended by it."""
        assert self._connector is not None or not self.ledger.num_waiters
        first = next(self._queue.first_ready(1))
        first.num_refused += first.refusal is not None and not first.refusal.is_restore
        for request in self.ledger.waiters():
            if self._connector is not None and not self._connector.refuse_restore(request.request_id):
                self._expire(request)
                return False
        return True

    def _expire(self, request: Request) -> None:
        self.ledger.release(request)
        request.refusal = None
        request.restore_expired = True

    def forget(self, request: Request) -> None:
        """It left the queue, for whatever reason: what was held for it is free, and its wait is over."""
        self.ledger.release(request)
        request.refusal = None
        request.num_refused = 0
        request.restore_expired = False

    def _known_probe(self, request: Request, room: int) -> _Probe | None:
        """What the last test found, while there is not even room for the blocks that it lacks, whatever of its cached
        ones is free."""
        refusal = request.refusal
        if refusal is None or room >= refusal.num_needed or self._step - refusal.step >= REPROBE_STEPS:
            return None
        return _Probe(refusal.is_restore, refusal.num_needed, refusal.num_taken)

    def _probe(self, request: Request) -> _Probe:
        local = self._tables.find_local(request)
        num_needed = self._needed(request, len(local))
        num_taken = num_needed + self._pool.num_free_of(local)
        if self._connector is None or request.restore_expired:
            return _Probe(is_restore=False, num_needed=num_needed, num_taken=num_taken)
        num_local = len(local)
        match = self._connector.match(request.request_id, num_local, request.max_reusable_blocks - num_local)
        return _Probe(match.num_blocks > 0, num_needed, num_taken, match.is_staging)

    def _needed(self, request: Request, num_local: int) -> int:
        num_needed = self.ledger.needed(request, num_local)
        if not request.restore_expired or num_needed <= self._pool.num_blocks:
            return num_needed
        # It will never fit whole: it begins, and competes for the rest as it goes.
        chunk = min(len(request.tokens), num_local * request.block_tokens + self._config.max_batch_tokens)
        return min(num_needed, request.blocks_for(chunk) - num_local)

    def _refuse(self, request: Request, probe: _Probe, *, is_first: bool) -> _Probe:
        """Too few blocks: account for it; what it would take from here on, which is less when its restore expires."""
        if probe.is_restore and self._connector is not None:
            is_permanent = probe.num_needed > self._pool.num_blocks
            if not is_permanent and not self.ledger.can_wait(request):
                return probe  # enough restores wait for blocks: this one's turn to wait has not come
            if not self._connector.refuse_restore(request.request_id, is_permanent=is_permanent):
                self._expire(request)
                return self._probe(request)
            self.ledger.wait(request, probe.num_taken)
        elif is_first:
            request.num_refused += 1
            if request.num_refused >= self._config.head_patience:
                self.ledger.hold(probe.num_taken)
        return probe

    def _stage_again(self, request: Request) -> None:
        self.num_sent_back += 1
        self.forget(request)
        self._queue.discard(request)
        self._queue.add(request, staging=True)
