"""Which requests compute which tokens in a step, over a pool that is smaller than they would like."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier_connectors.contract import ConnectorScheduler, RequestInfo, RestoreOutcome, StepDemand
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.config import EngineConfig
from kvtier_engine.request import FinishReason, Request, RequestState

__all__ = ["Scheduled", "Scheduler", "Verdict"]

logger = logging.getLogger("kvtier.scheduler")


class Verdict(Enum):
    """What a step came to."""

    OK = "ok"
    """Tokens are to be computed."""
    IDLE = "idle"
    """No request is unfinished."""
    WAIT = "wait"
    """Nothing can be computed until a copy under way ends."""
    STALL = "stall"
    """Requests are unfinished, nothing can be computed, and nothing is under way: a bug, or blocks pinned for ever."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's share of a step: its next `num_tokens` tokens, for which its table has blocks."""

    request: Request
    num_tokens: int


class Scheduler:
    """Owns the queues and every request's state; decides, and leaves copying and computing to others.

    A step is six phases in a fixed order: events, restores, feasibility, turn, escape, verdict. FCFS. Decodes come
    before prefill chunks, running requests before new ones; the youngest is preempted for a decode that finds no block.

    A request whose blocks are still on their way from a lower tier keeps its place among the waiting; others pass it.

    Mutable state: `waiting`, `running` (restoring requests hold a place in it too), `_staging`, `_scheduled`. Engine's
    thread only.
    """

    def __init__(
        self, pool: BlockPool, connector: ConnectorScheduler | None, config: EngineConfig, block_tokens: int
    ) -> None:
        self.pool = pool
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # an ordered set: any of many can leave it at once
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._connector = connector
        self._config = config
        self._block_tokens = block_tokens
        self._requests: dict[str, Request] = {}
        self._scheduled: dict[str, Scheduled] = {}
        self._staging: dict[Request, None] = {}  # of the waiting: those whose blocks are on their way to host memory
        self._num_stalls = 0
        # The most a step can allocate: every token of it in a new block's place, rounded up once per request.
        self._step_budget = -(-config.max_batch_tokens // block_tokens) + config.max_num_seqs

    # ---- requests ------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_staging(self) -> int:
        """Waiting requests whose blocks are on their way to host memory."""
        return len(self._staging)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.waiting[request] = None
        if self._connector is not None:
            num_local = len(self.pool.match(request.root, self._reusable(request), request.tokens_of))
            info = RequestInfo(request.request_id, request.chain.digests, request.options, num_local)
            self._connector.start_request(info)
            if self._connector.match(request.request_id, num_local, 0).is_staging:
                self._staging[request] = None

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> Request | None:
        """End a request in whatever state it is; None when it is not live. Its blocks are free at once, except those
        that a copy under way still pins."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._staging.pop(request, None)
        if request.state is RequestState.WAITING:
            del self.waiting[request]
        else:
            self.running.remove(request)
        self._scheduled.pop(request_id, None)
        self.pool.release(request.forget_blocks())
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        if self._connector is not None:
            self._connector.finish_request(request_id)
        return request

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self, outcomes: Sequence[RestoreOutcome], *, copies_in_flight: int) -> tuple[list[Scheduled], Verdict]:
        """Decide a step. outcomes: restores that ended since the last one; copies_in_flight: copies that have not."""
        self._scheduled = {}
        # 1. Events.
        self._consume(outcomes)
        # 2. Restores under way end with their copies; a new one begins in 4, once its blocks are known to fit.
        self._poll_stages()
        # 3. Feasibility: counts only, nothing is touched.
        can_run = any(request.state is RequestState.RUNNING for request in self.running)
        can_admit = len(self.waiting) > len(self._staging) and len(self.running) < self._config.max_num_seqs
        # 4. Turn: decodes, running prompts, new requests.
        if can_run or can_admit:
            self._turn(self._config.max_batch_tokens)
        # 5. Escape.
        if can_run and not self._scheduled:
            self._escape()
        # 6. Verdict.
        return list(self._scheduled.values()), self._verdict(copies_in_flight)

    def demand(self) -> StepDemand:
        """How soon the free queue will be used up; asked after `schedule`."""
        ahead = [r for r in self.running if r.state is RequestState.RUNNING]
        slots = self._config.max_num_seqs - len(self.running)
        ahead += [request for request, _ in zip(self.waiting, range(slots), strict=False)]
        waiting = sum(max(0, r.blocks_for(len(r.tokens) + 1) - len(r.block_table)) for r in ahead)
        return StepDemand(self.pool.take_num_allocated(), self._step_budget, waiting)

    def confirm(self, scheduled: Scheduled, token: int | None, now: float) -> None:
        """The forward of a request's share succeeded: publish the blocks it filled, append the sampled token."""
        request = scheduled.request
        if request.state is not RequestState.RUNNING:
            return
        request.num_computed += scheduled.num_tokens
        self._publish(request)
        if token is not None:
            request.append(token, now)

    def check_integrity(self) -> None:
        """Raises IntegrityError when queues, tables and pool disagree. O(blocks): for tests."""
        self.pool.check_integrity([request.block_table for request in self._requests.values()])
        places = [*self.waiting, *self.running]
        if sorted(map(id, places)) != sorted(map(id, self._requests.values())):
            raise IntegrityError("scheduler: a live request stands in no queue, or in two")
        if not self._staging.keys() <= self.waiting.keys():
            raise IntegrityError("scheduler: a request is being staged that does not wait")
        if len(self.running) > self._config.max_num_seqs:
            raise IntegrityError(f"scheduler: {len(self.running)} run, more than max_num_seqs")
        for request in self._requests.values():
            waiting = request.state is RequestState.WAITING
            if waiting != (request in self.waiting) or (waiting and (request.block_table or request.num_computed)):
                raise IntegrityError(
                    f"scheduler: request {request.request_id} is {request.state.value} in the wrong place"
                )
            if request.num_computed > len(request.block_table) * self._block_tokens:
                raise IntegrityError(f"scheduler: request {request.request_id} has computed tokens without blocks")

    # ---- phases --------------------------------------------------------------------------------------------------

    def _consume(self, outcomes: Sequence[RestoreOutcome]) -> None:
        """Restores that ended: what landed is computed and matchable, what did not is the request's to compute."""
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is None or request.state is not RequestState.RESTORING:
                continue
            request.state = RequestState.RUNNING
            request.num_computed = (outcome.first_block + outcome.num_landed) * self._block_tokens
            if not request.was_admitted:
                request.restored_tokens = outcome.num_landed * self._block_tokens
            request.was_admitted = True
            self._publish(request)

    def _poll_stages(self) -> None:
        """Which of the waiting may be admitted now: their blocks came, or the wait for them is over."""
        for request in list(self._staging):
            if self._connector is None or not self._connector.match(request.request_id, 0, 0).is_staging:
                del self._staging[request]

    def _next_waiting(self) -> Request | None:
        """The first in the queue that waits for nothing but its turn."""
        return next((request for request in self.waiting if request not in self._staging), None)

    def _turn(self, budget: int) -> None:
        num_preempted = self.num_preemptions
        budget = self._run_decodes(budget)
        budget = self._run_prefills(budget)
        if self.num_preemptions == num_preempted:  # what was preempted must not come back in its own step
            self._admit_waiting(budget)

    def _run_decodes(self, budget: int) -> int:
        for request in list(self.running):
            if budget and request.state is RequestState.RUNNING and request.is_decoding:
                fits = self._grow(request, 1)
                while not fits and self._preempt_youngest(keep=request):
                    fits = self._grow(request, 1)
                if fits:
                    self._scheduled[request.request_id] = Scheduled(request, 1)
                    budget -= 1
        return budget

    def _run_prefills(self, budget: int) -> int:
        """Chunks of running prompts, oldest first. They take free blocks only; a decode is never preempted for them."""
        for request in list(self.running):
            if budget and request.state is RequestState.RUNNING and request.request_id not in self._scheduled:
                budget -= self._run_chunk(request, budget)
        return budget

    def _run_chunk(self, request: Request, budget: int) -> int:
        num_tokens = min(request.num_uncomputed, budget)
        if request.is_decoding or not self._grow(request, num_tokens):
            return 0
        self._scheduled[request.request_id] = Scheduled(request, num_tokens)
        return num_tokens

    def _admit_waiting(self, budget: int) -> None:
        while budget and len(self.running) < self._config.max_num_seqs:
            request = self._next_waiting()
            if request is None:
                break
            if (
                self.running
                and request.refused_with_free is not None
                and self.pool.num_free <= request.refused_with_free
            ):
                break  # no more room than when it was refused: walking its prefix again would change nothing
            local = self.pool.match(request.root, self._reusable(request), request.tokens_of)
            if not self._can_admit(request, local):
                request.refused_with_free = self.pool.num_free
                break
            request.refused_with_free = None
            del self.waiting[request]
            self._admit(request, local)
            if request.state is RequestState.RUNNING:
                budget -= self._run_chunk(request, budget)

    def _escape(self) -> None:
        """Nothing runs though something could: preempt the youngest until the oldest gets its blocks."""
        for request in list(self.running):
            if request.state is not RequestState.RUNNING:
                continue
            num_tokens = min(request.num_uncomputed, self._config.max_batch_tokens)
            fits = self._grow(request, num_tokens)
            while not fits and self._preempt_youngest(keep=request):
                fits = self._grow(request, num_tokens)
            if fits:
                self._scheduled[request.request_id] = Scheduled(request, num_tokens)
                return

    def _verdict(self, copies_in_flight: int) -> Verdict:
        if self._scheduled:
            verdict = Verdict.OK
        elif not self._requests:
            verdict = Verdict.IDLE
        elif copies_in_flight or self._staging or any(r.state is RequestState.RESTORING for r in self.running):
            verdict = Verdict.WAIT
        else:
            verdict = Verdict.STALL
            self._num_stalls += 1
        if verdict is not Verdict.STALL:
            self._num_stalls = 0
        return verdict

    @property
    def stalled(self) -> Request | None:
        """The request to fail when two steps in a row stalled; None otherwise."""
        if self._num_stalls < 2:
            return None
        return self.running[0] if self.running else next(iter(self.waiting))

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _reusable(self, request: Request) -> Sequence[BlockDigest]:
        return request.chain.digests[: request.max_reusable_blocks]

    def _can_admit(self, request: Request, local: list[int]) -> bool:
        """Pure: does all of the request, and one more token, fit beside what running prompts still need?"""
        outstanding = sum(
            max(0, r.blocks_for(len(r.tokens) + 1) - len(r.block_table)) for r in self.running if not r.is_decoding
        )
        available = self.pool.num_free - self.pool.num_free_of(local)
        needed = request.blocks_for(len(request.tokens)) - len(local)
        return needed + outstanding <= available

    def _admit(self, request: Request, local: list[int]) -> None:
        """Give the request its cached blocks and a place among the running; begin a restore for what the tiers hold."""
        self.pool.acquire(local)
        request.block_table = list(local)
        request.num_computed = len(local) * self._block_tokens
        request.num_published = len(local)
        if not request.was_admitted:
            request.gpu_hit_tokens = request.num_computed
        self.running.append(request)
        request.state = RequestState.RUNNING
        if self._connector is not None and self._begin_restore(request, len(local)):
            request.state = RequestState.RESTORING
            return
        request.was_admitted = True

    def _begin_restore(self, request: Request, num_local: int) -> bool:
        assert self._connector is not None
        max_blocks = request.max_reusable_blocks - num_local
        match = self._connector.match(request.request_id, num_local, max_blocks)
        blocks = (self.pool.allocate(match.num_blocks) or []) if match.num_blocks else []
        num_landing = self._connector.admit(request.request_id, num_local, max_blocks, blocks)
        self.pool.release(blocks[num_landing:])
        request.block_table += blocks[:num_landing]
        return num_landing > 0

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the next `num_tokens` tokens; False, and nothing changed, when too few are free."""
        needed = request.blocks_for(request.num_computed + num_tokens) - len(request.block_table)
        if needed <= 0:
            return True
        blocks = self.pool.allocate(needed)
        if blocks is None:
            return False
        request.block_table += blocks
        return True

    def _preempt_youngest(self, keep: Request) -> bool:
        """Send the youngest unscheduled request whose blocks are usable at once to the queue's front.

        False if there is none.
        """
        for victim in reversed(self.running):
            if victim is keep or victim.state is not RequestState.RUNNING or victim.request_id in self._scheduled:
                continue
            if not self.pool.num_freed_by_release(victim.block_table):
                continue
            self.running.remove(victim)
            self.pool.release(victim.forget_blocks())
            victim.state = RequestState.WAITING
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting[victim] = None
            self.waiting.move_to_end(victim, last=False)
            logger.info("preempted request %s: %d tokens", victim.request_id, len(victim.tokens))
            return True
        return False

    def _publish(self, request: Request) -> None:
        """Make the blocks that are full and computed matchable.

        Where another block holds the same KV, share that one.
        """
        first = start = request.num_published
        full = request.num_computed // self._block_tokens
        table = request.block_table
        for index in range(first, full):
            previous = table[index - 1] if index else None
            own = table[index]
            block_id = self.pool.publish(
                own, request.chain.digests[index], request.root, previous, request.tokens_of(index)
            )
            if block_id != own:
                self._tell_published(request, start, index)
                start = index + 1
                self.pool.acquire([block_id])
                table[index] = block_id
                self.pool.release([own])
        self._tell_published(request, start, full)
        request.num_published = max(first, full)

    def _tell_published(self, request: Request, start: int, end: int) -> None:
        known = [b for b in request.block_table[start:end] if self.pool.is_published(b)]
        if self._connector is not None and known:
            self._connector.publish(request.request_id, start, known)
