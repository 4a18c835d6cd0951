"""Who waits and who has a slot, and every way from the one to the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvtier_connectors.contract import ConnectorScheduler, RequestInfo
from kvtier_engine.admission import Admission
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.request import Request, RequestState
from kvtier_engine.tables import BlockTables
from kvtier_engine.waiting import WaitingQueue

__all__ = ["Roster"]

logger = logging.getLogger("kvtier.scheduler")


class Roster:
    """Owns the slots, and tells the connector of every change that concerns it. Engine's thread only."""

    def __init__(
        self,
        pool: BlockPool,
        waiting: WaitingQueue,
        tables: BlockTables,
        admission: Admission,
        connector: ConnectorScheduler | None,
    ) -> None:
        self.running: list[Request] = []
        """Requests with a slot, those whose blocks are landing included."""
        self.num_preemptions = 0
        self._preempted: list[str] = []
        self._pool = pool
        self._waiting = waiting
        self._tables = tables
        self._admission = admission
        self._connector = connector

    def computing(self) -> Iterator[Request]:
        """Requests with a slot that compute, first come first; one that loses its slot meanwhile is passed over."""
        for request in sorted(self.running, key=self._waiting.key):
            if request.state is RequestState.RUNNING:
                yield request

    def arrive(self, request: Request) -> None:
        """A new request: it waits, and what lower tiers hold of it begins to come."""
        num_local = len(self._tables.find_local(request))
        if self._connector is not None:
            priority, _ = self._waiting.key(request)
            options = replace(request.options, priority=priority)
            self._connector.start_request(
                RequestInfo(request.request_id, request.chain.digests, options, num_local, len(request.tokens))
            )
        self._enqueue(request, num_local)

    def leave(self, request: Request) -> list[int]:
        """It ended: out of its queue, or its slot; the blocks that it gives up, for the caller to release."""
        if request.state is RequestState.WAITING:
            self._dequeue(request)
        else:
            self.running.remove(request)
        if self._connector is not None:
            self._connector.finish_request(request.request_id)
        return request.forget_blocks()

    def start(self, request: Request, local: Sequence[int]) -> None:
        """Give a waiting request a slot and its cached blocks; begin a restore for what the tiers hold behind them."""
        self._dequeue(request)
        self._tables.share(request, local)
        if not request.was_admitted:
            request.gpu_hit_tokens = request.num_computed
        self.running.append(request)
        request.state = RequestState.RUNNING
        if self._connector is not None and self._begin_restore(self._connector, request):
            request.state = RequestState.RESTORING
        else:
            request.was_admitted = True

    def wait_again(self, request: Request, *, staging: bool) -> None:
        """Its restore ended without all of it: it gives its slot and its blocks up and waits, for `staging` or for
        room."""
        self._leave_slot(request)
        self._waiting.add(request, staging=staging)

    def preempt(self, victim: Request) -> None:
        """Take its slot and its blocks; it waits before all that came later."""
        logger.info("preempted request %s: %d tokens", victim.request_id, len(victim.tokens))
        self._leave_slot(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(victim.request_id)
        num_local = len(self._tables.find_local(victim))
        if self._connector is not None:
            self._connector.requeue_request(victim.request_id, num_local, len(victim.tokens))
        self._enqueue(victim, num_local)

    def take_preempted(self) -> tuple[str, ...]:
        """Who was preempted since the last call, each as often."""
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def preempt_for(self, request: Request, is_scheduled: Callable[[Request], bool]) -> bool:
        """Preempt the last that came, of those whose blocks are usable at once and that may lose them to `request`: who
        came later, and prompts. Several, where they share all they have. False if there is none.

        Live: what copies pin, or this step computes, is never a victim.
        """
        victims: list[Request] = []
        for victim in sorted(self.running, key=self._waiting.key, reverse=True):
            if victim is request or victim.state is not RequestState.RUNNING or is_scheduled(victim):
                continue
            if victim.is_decoding and self._waiting.key(victim) < self._waiting.key(request):
                continue
            victims.append(victim)
            if self._num_freed(victims):
                break
        else:
            return False
        for victim in victims[:-1]:  # whoever shares nothing that this frees keeps what it has
            others = [other for other in victims if other is not victim]
            victims = others if self._num_freed(others) else victims
        for victim in victims:
            self.preempt(victim)
        return True

    def give_way(self, request: Request) -> None:
        """Preempt who finds no block itself, if others can use its own at once; not where copies keep blocks that
        nobody references: these are free in a moment."""
        if not self._pool.num_held and self._num_freed([request]):
            self.preempt(request)

    def _num_freed(self, victims: Sequence[Request]) -> int:
        return self._pool.num_freed_by_release([block_id for victim in victims for block_id in victim.block_table])

    def _enqueue(self, request: Request, num_local: int) -> None:
        max_blocks = request.max_reusable_blocks - num_local
        staging = (
            self._connector is not None and self._connector.match(request.request_id, num_local, max_blocks).is_staging
        )
        self._waiting.add(request, staging=staging)

    def _dequeue(self, request: Request) -> None:
        self._admission.forget(request)
        self._waiting.discard(request)

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.release(request.forget_blocks())
        request.state = RequestState.WAITING

    def _begin_restore(self, connector: ConnectorScheduler, request: Request) -> bool:
        num_local = len(request.block_table)
        max_blocks = request.max_reusable_blocks - num_local
        num_blocks = connector.match(request.request_id, num_local, max_blocks).num_blocks
        blocks = (self._pool.allocate(num_blocks) or []) if num_blocks else []
        num_landing = connector.admit(request.request_id, num_local, max_blocks, blocks)
        self._pool.release(blocks[num_landing:])
        request.block_table += blocks[:num_landing]
        return num_landing > 0
