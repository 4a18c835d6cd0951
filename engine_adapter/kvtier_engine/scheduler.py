"""Which requests compute which tokens in a step, over a pool that is smaller than they would like."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import IntegrityError
from kvtier_connectors.contract import (
    NO_RESTORES,
    ConnectorScheduler,
    RestoreOutcome,
    RestorePoll,
    StepDemand,
    StepWork,
)
from kvtier_engine.admission import Admission, Candidate
from kvtier_engine.batch import Batch, Scheduled
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.compute_share import ComputeShare, WorkClass
from kvtier_engine.config import EngineConfig
from kvtier_engine.request import FinishReason, Request, RequestState
from kvtier_engine.roster import Roster
from kvtier_engine.tables import BlockTables
from kvtier_engine.verdict import SchedulerStats, Stall, Verdict
from kvtier_engine.waiting import WaitingQueue

__all__ = ["Scheduled", "Scheduler", "StepPlan"]


RESTORE_FAILED = "its KV could not be restored, and restore.on_failure is 'fail'"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step is to compute, and what it came to.

    in_flight: copies, lookups and stages that have not ended. next_deadline: on the connector's clock, when the first
    wait ends by itself, long ago where the next step finds something new at once; None without one. preempted: requests
    that lost their slot and blocks in this step. failed: requests that cannot go on, each with why; the engine ends
    them. stall: with the verdict STALL, what there is.
    """

    scheduled: tuple[Scheduled, ...]
    verdict: Verdict
    in_flight: int
    next_deadline: float | None
    preempted: tuple[str, ...]
    failed: tuple[tuple[Request, str], ...]
    stall: Stall | None


@dataclass(frozen=True, slots=True)
class _Turn:
    work: WorkClass
    is_contended: bool


class Scheduler:
    """Owns every request's state; decides, and leaves copying and computing to others.

    A step is six phases in a fixed order: events, restores, feasibility, turn, escape, verdict. Restores are polled in
    every step, whatever its turn is, and whether or not there is a slot. Decodes come before prompts, unless the
    compute share gives the step to these; a decode that finds no block preempts the request that came last. A step that
    would be empty though something runs preempts until it is not.

    Mutable state: everything that is not a collaborator. Engine's thread only.
    """

    def __init__(
        self, pool: BlockPool, connector: ConnectorScheduler | None, config: EngineConfig, block_tokens: int
    ) -> None:
        self.pool = pool
        self.waiting = WaitingQueue(by_priority=config.policy == "priority")
        self.num_stalls = 0
        self._connector = connector
        self._config = config
        self._tables = BlockTables(pool, connector, block_tokens)
        self.admission = Admission(pool, self.waiting, self._tables, connector, config)
        self._roster = Roster(pool, self.waiting, self._tables, self.admission, connector)
        self._share = None if config.prefill_share is None else ComputeShare(config.prefill_share)
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._step = 0
        self._scheduled: dict[str, Scheduled] = {}
        self._turn: _Turn | None = None
        self._is_computing = False
        self._deferred: list[list[int]] = []  # blocks of requests that ended while a step with them is computed
        self._work = StepWork(0, 0.0, 0.0, 0)
        self._num_stalled_steps = 0
        # The most a step can allocate: every token of it in a new block's place, rounded up once per request.
        self._step_budget = -(-config.max_batch_tokens // block_tokens) + config.max_num_seqs

    # ---- requests ------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a slot, those whose blocks are landing included."""
        return self._roster.running

    @property
    def num_preemptions(self) -> int:
        return self._roster.num_preemptions

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def add(self, request: Request) -> None:
        request.arrival_index = next(self._arrivals)
        self._requests[request.request_id] = request
        self._roster.arrive(request)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> Request | None:
        """End a request in whatever state it is; None when it is not live.

        Its slot is free at once; so are its blocks, except those that a copy under way pins, and those of a request in
        the step that is being computed, which are free when that ends.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        blocks = self._roster.leave(request)
        if self._is_computing and request_id in self._scheduled:
            self._deferred.append(blocks)
        else:
            self.pool.release(blocks)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        return request

    def preempt_all(self) -> None:
        """Every request with a slot loses it and its blocks, and waits: for a reset of the cache while they run."""
        for request in list(self.running):
            self._roster.preempt(request)

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self, outcomes: Sequence[RestoreOutcome], *, copies_in_flight: int) -> StepPlan:
        """Decide a step. outcomes: restores that ended since the last one; copies_in_flight: copies that have not."""
        self._step += 1
        batch = Batch(self._roster, self._tables, self.admission, self._step, self._config.max_batch_tokens)
        # 1. Events.
        failed = self._consume(outcomes)
        # 2. Restores: all active ones, then the waits for capacity, where a slot is free.
        poll = self._poll_restores()
        failed += self._consume(poll.outcomes)
        failed += [(self._requests[name], RESTORE_FAILED) for name in poll.failed if name in self._requests]
        candidates = self.admission.scan(self.running)
        # 3. Feasibility: counts only, nothing is touched.
        could_decode = any(request.is_decoding for request in self._roster.computing())
        could_prefill = self._could_prefill() or any(not candidate.is_restore for candidate in candidates)
        # 4. Turn.
        self._turn = self._take_turn(batch, candidates, could_decode=could_decode, could_prefill=could_prefill)
        # 5. Escape.
        if not batch.shares:
            batch.escape()
        # 6. Verdict.
        self._scheduled = batch.shares
        return self._judge(poll, copies_in_flight, failed)

    def demand(self) -> StepDemand:
        """How soon the free queue will be used up, and what prompts cost; asked after `schedule`."""
        prompts = [request for request in self._roster.computing() if not request.is_decoding]
        backlog = self.waiting.num_ready_tokens + sum(request.num_uncomputed for request in prompts)
        # What this step computes is done before anybody arrives.
        backlog -= sum(share.num_tokens for share in self._scheduled.values() if share.is_prefill)
        ahead = [*self._roster.computing(), *self.waiting.first_ready(self._config.max_num_seqs - len(self.running))]
        waiting = sum(self.admission.ledger.needed(request, 0) for request in ahead)
        work, self._work = self._work, StepWork(0, 0.0, 0.0, 0)
        return StepDemand(
            self.pool.take_num_allocated(), self._step_budget, waiting, replace(work, backlog_tokens=backlog)
        )

    @property
    def is_computing(self) -> bool:
        """Between `begin_compute` and `end_compute`."""
        return self._is_computing

    def begin_compute(self) -> None:
        """The step's forward begins: blocks in it are not given to others until `end_compute`, whoever aborts."""
        self._is_computing = True

    def end_compute(self, seconds: float) -> None:
        """The step's output was processed, well or not. seconds: how long its forward took; 0 when it failed."""
        self._is_computing = False
        for blocks in self._deferred:
            self.pool.release(blocks)
        self._deferred.clear()
        chunks = [(share.num_tokens, share.start) for share in self._scheduled.values() if share.is_prefill]
        pairs = sum(count * (start + count / 2) for count, start in chunks)
        self._work = StepWork(sum(count for count, _ in chunks), pairs, seconds, 0)
        if self._share is not None and self._turn is not None:
            self._share.record(self._turn.work, seconds, self._turn.is_contended)
            self._turn = None

    def confirm(self, scheduled: Scheduled, token: int | None, now: float) -> None:
        """The forward of a request's share succeeded: publish the blocks it filled, append the sampled token."""
        request = scheduled.request
        if request.state is not RequestState.RUNNING:
            return
        request.num_computed += scheduled.num_tokens
        self._tables.publish(request)
        if token is not None:
            request.append(token, now)

    def stats(self) -> SchedulerStats:
        """A snapshot. O(running)."""
        num_restoring = sum(request.state is RequestState.RESTORING for request in self.running)
        pool = self.pool
        return SchedulerStats(
            running=len(self.running) - num_restoring,
            restoring=num_restoring,
            waiting=len(self.waiting),
            waiting_for_place=self.waiting.num_ready,
            waiting_for_stage=self.waiting.num_staging,
            restore_capacity_waits=self.admission.ledger.num_waiters,
            blocks_free=pool.num_free,
            blocks_used=pool.num_blocks - pool.num_free - pool.num_held,
            blocks_held=pool.num_held,
            preemptions=self.num_preemptions,
            stalls=self.num_stalls,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when queues, tables and pool disagree. O(blocks): for tests."""
        tables = [request.block_table for request in self._requests.values()]
        self.pool.check_integrity(tables + self._deferred)
        self.waiting.check_integrity()
        self.admission.ledger.check_integrity(self.waiting)
        places = [*self.waiting, *self.running]
        if sorted(map(id, places)) != sorted(map(id, self._requests.values())):
            raise IntegrityError("scheduler: a live request stands in no queue, or in two")
        if len(self.running) > self._config.max_num_seqs:
            raise IntegrityError(f"scheduler: {len(self.running)} run, more than max_num_seqs")
        for request in self._requests.values():
            waiting = request.state is RequestState.WAITING
            if waiting != (request in self.waiting) or (waiting and (request.block_table or request.num_computed)):
                raise IntegrityError(
                    f"scheduler: request {request.request_id} is {request.state.value} in the wrong place"
                )
            if request.num_computed > len(request.block_table) * request.block_tokens:
                raise IntegrityError(f"scheduler: request {request.request_id} has computed tokens without blocks")

    # ---- phases --------------------------------------------------------------------------------------------------

    def _consume(self, outcomes: Sequence[RestoreOutcome]) -> list[tuple[Request, str]]:
        """Restores that ended: what landed is computed and matchable, what did not is the request's to compute, or to
        restore once more. Returns the requests for which that is fatal."""
        failed: list[tuple[Request, str]] = []
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is None or request.state is not RequestState.RESTORING:
                continue
            if not (outcome.is_abandoned or outcome.must_fail):
                self._take_landed(request, outcome)
            if outcome.must_fail:
                failed.append((request, RESTORE_FAILED))
            elif outcome.is_abandoned or outcome.will_retry:
                self._roster.wait_again(request, staging=outcome.will_retry)
        return failed

    def _take_landed(self, request: Request, outcome: RestoreOutcome) -> None:
        request.state = RequestState.RUNNING
        request.num_computed = (outcome.first_block + outcome.num_landed) * request.block_tokens
        if not request.num_preemptions:
            request.restored_tokens += outcome.num_landed * request.block_tokens
        request.was_admitted = True
        self._tables.publish(request)

    def _poll_restores(self) -> RestorePoll:
        if self._connector is None:
            return NO_RESTORES
        poll = self._connector.poll_restores()
        for request_id in poll.ready:
            request = self._requests.get(request_id)
            if request is not None and self.waiting.is_staging(request):
                self.waiting.make_ready(request)
        return poll

    def _could_prefill(self) -> bool:
        return any(
            not request.is_decoding and self._tables.num_fitting(request, 1) for request in self._roster.computing()
        )

    def _take_turn(
        self, batch: Batch, candidates: list[Candidate], *, could_decode: bool, could_prefill: bool
    ) -> _Turn | None:
        """Fill the batch; without a compute share with both kinds of work, else with one."""
        if self._share is None:
            batch.run_decodes()
            batch.run_prefills()
            batch.admit(candidates, may_compute=True)
            return None
        work = self._share.select(could_decode, could_prefill)
        is_contended = could_decode and could_prefill
        if work is WorkClass.PREFILL:
            batch.run_prefills()
            batch.admit(candidates, may_compute=True)
        else:
            batch.run_decodes()
            may_compute = not batch.shares
            if may_compute:
                work, is_contended = WorkClass.PREFILL, False
                batch.run_prefills()
            batch.admit(candidates, may_compute=may_compute)  # landing computes nothing, and needs no turn of its own
        if not batch.shares or work is None:
            return None
        self._share.dispatch(work, is_contended)
        return _Turn(work, is_contended)

    def _judge(self, poll: RestorePoll, copies_in_flight: int, failed: list[tuple[Request, str]]) -> StepPlan:
        num_landing = sum(request.state is RequestState.RESTORING for request in self.running)
        in_flight = max(copies_in_flight, num_landing) + self.waiting.num_staging
        stall: Stall | None = None
        if self._scheduled:
            verdict = Verdict.OK
        elif not self._requests:
            verdict = Verdict.IDLE
        elif in_flight or failed or self._is_wait_for_room():
            verdict = Verdict.WAIT
        else:
            verdict, stall = Verdict.STALL, self._describe_stall()
            failed = failed + self._end_stall(stall)
        if stall is None:
            self._num_stalled_steps = 0
        # Whom this step sent back to look anew, or refused for the first time, has a deadline from the next poll on.
        is_untold = verdict is Verdict.WAIT and not in_flight and poll.next_deadline is None
        return StepPlan(
            scheduled=tuple(self._scheduled.values()),
            verdict=verdict,
            in_flight=in_flight,
            next_deadline=-math.inf if self.admission.num_sent_back or is_untold else poll.next_deadline,
            preempted=self._roster.take_preempted(),
            failed=tuple(failed),
            stall=stall,
        )

    def _is_wait_for_room(self) -> bool:
        """A restore waits for blocks, and for so long: without a slot it is not refused, and no time runs out."""
        return self.admission.ledger.num_waiters > 0 and len(self.running) < self._config.max_num_seqs

    def _end_stall(self, stall: Stall) -> list[tuple[Request, str]]:
        """One stalled step may be a matter of moments; at the second, fail the request that stands in the way."""
        self._num_stalled_steps += 1
        if self._num_stalled_steps == 1:
            self.num_stalls += 1
            self.admission.look_anew()
            return []
        self._num_stalled_steps = 0
        return [(self._requests[stall.request_id], stall.describe())]

    def _describe_stall(self) -> Stall:
        # Who runs keeps blocks, and has given all others' up in vain: those that wait may do with what it has.
        first = min(self.running or self.waiting.first_ready(1), key=self.waiting.key)
        stats = self.stats()
        return Stall(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free=stats.blocks_free,
            num_used=stats.blocks_used,
            num_held=stats.blocks_held,
            request_id=first.request_id,
            num_needed=self.admission.ledger.needed(first, 0),
            holders=self.pool.holders(),
        )
