"""kvtier's scheduler half: match, admit, plan and complete over one space of a store."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from kvtier.clock import Clock
from kvtier.config import Settings
from kvtier.keys import BlockDigest
from kvtier.reasons import MissReason
from kvtier.store import Space, Store
from kvtier.tiers.reservation import Eviction
from kvtier_connectors.contract import (
    NO_COPIES,
    NO_RESTORES,
    BlockPoolView,
    ConnectorScheduler,
    CopyFailure,
    CopyJob,
    CopyResult,
    Match,
    RequestInfo,
    RestoreOutcome,
    RestorePoll,
    StepDemand,
    TransferPlan,
)
from kvtier_connectors.counts import ConnectorStats
from kvtier_connectors.due import due_policy
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.hooks import hook
from kvtier_connectors.live import LiveRequest, check_index
from kvtier_connectors.matching import NOTHING_HELD
from kvtier_connectors.published import PublishedBlock, PublishedBlocks
from kvtier_connectors.ranks import RankResults
from kvtier_connectors.restoring import RestoreFlow
from kvtier_connectors.storing import StoreFlow

__all__ = ["KVTierScheduler"]

logger = logging.getLogger("kvtier.connector")

MAX_NOTED_EVICTIONS = 1 << 16


class KVTierScheduler(ConnectorScheduler):
    """Owns the records of live requests and joins the flows down and up. Engine's thread only.

    The store's evictions come from any thread, through `_evicted`, guarded by `_evicted_lock`.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        pool: BlockPoolView,
        settings: Settings | None = None,
        *,
        num_ranks: int = 1,
        clock: Clock | None = None,
    ) -> None:
        """settings: policy and bounds of this connector, where they are not those that the store was opened with.

        num_ranks: workers that each copy their part of every block; a job has ended when all have told. clock: the
        store's if not given.
        """
        self._settings = settings = settings or store.settings
        clock = clock or store.clock
        self._store = store
        self._space = space
        self._epoch_digest = space.digest
        self._num_gpu_blocks = pool.num_blocks
        self._restore_enabled = settings.restore.enabled
        self._blocks = PublishedBlocks()
        self._ranks = RankResults(num_ranks)
        job_ids = itertools.count(1)
        self._stores = StoreFlow(
            space,
            pool,
            due_policy(settings.store.policy, settings.store.horizon_steps),
            self._blocks,
            job_ids,
            min(settings.store.max_inflight_blocks, max(1, pool.num_blocks // 2)),
            clock,
            self._report,
        )
        self._requests: dict[str, LiveRequest] = {}
        self._restores = RestoreFlow(
            space, store.stager, pool, settings.restore, clock, job_ids, self._requests, self._why_off, self._report
        )
        self._num_stale = 0
        self._reported: set[tuple[str, str]] = set()
        # An engine that does not step while another fills the store forgets the oldest: their blocks stay clean and
        # are not stored again.
        self._evicted: deque[BlockDigest] = deque(maxlen=MAX_NOTED_EVICTIONS)
        self._evicted_lock = threading.Lock()
        self._closed = False
        self._orders = itertools.count()
        self._unsubscribe = space.on_evict(self._note_evictions)

    def known_digest(self, block_id: int) -> BlockDigest | None:
        """What this block of the engine's pool is known to hold."""
        block = self._blocks.get(block_id)
        return None if block is None else block.digest

    def forget_blocks(self) -> None:
        """It is not known what the engine's blocks hold: none of them is stored."""
        self._stores.forget_all()

    # ---- the contract --------------------------------------------------------------------------------------------

    @hook(lambda: None)
    def start_request(self, request: RequestInfo) -> None:
        self._notice_reset()
        self.finish_request(request.request_id)
        order = (request.options.priority, next(self._orders))
        record = LiveRequest(request, self._epoch_digest, request.num_local_blocks, request.num_tokens, order)
        self._requests[request.request_id] = record
        self._restores.start(record)

    @hook(lambda: None)
    def requeue_request(self, request_id: str, num_local_blocks: int, num_tokens: int) -> None:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is not None:
            request.num_local_blocks, request.num_tokens = num_local_blocks, num_tokens
            self._restores.requeue(request)

    @hook(lambda: NO_RESTORES)
    def poll_restores(self) -> RestorePoll:
        self._notice_reset()
        poll, end = self._restores.poll(), self._check_stores()
        if end is None or (poll.next_deadline is not None and poll.next_deadline <= end):
            return poll
        return replace(poll, next_deadline=end)

    @hook(lambda: NOTHING_HELD)
    def match(self, request_id: str, num_local_blocks: int, max_blocks: int) -> Match:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is None:
            return Match(0, MissReason.RESTORE_OFF)
        return self._restores.match(request, num_local_blocks, max_blocks)

    @hook(lambda: False)
    def refuse_restore(self, request_id: str, *, is_permanent: bool = False) -> bool:
        request = self._requests.get(request_id)
        return request is not None and self._restores.refuse(request, is_permanent=is_permanent)

    @hook(lambda: 0)
    def admit(self, request_id: str, num_local_blocks: int, max_blocks: int, block_ids: Sequence[int]) -> int:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is None or request.landing is not None:
            return 0
        return self._restores.admit(request, num_local_blocks, max_blocks, self._destinations(block_ids))

    @hook(lambda: None)
    def publish(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is None or request.epoch_digest != self._epoch_digest or not request.info.options.store:
            return
        check_index("first_block", first_block)
        digests, options = request.info.digests, request.info.options
        for index, block_id in enumerate(self._checked_ids(block_ids), first_block):
            parent = digests[index - 1] if index else None
            self._stores.publish(PublishedBlock(block_id, digests[index], parent, options.tenant, options.ttl_s))

    @hook(lambda: NO_COPIES)
    def plan_step(self, reused: Sequence[int], demand: StepDemand, *, is_fenced: bool = False) -> TransferPlan:
        rescued, fence = self._rescue(reused) if is_fenced else ([], ())
        self._forget_reused(reused)
        self._note_work(demand)
        jobs = (*self._restores.landings.plan(), *rescued, *self._plan_stores(demand))
        return TransferPlan(jobs, self._restores.landings.num_awaited + self._stores.num_awaited, fence)

    @hook(lambda: cast("list[RestoreOutcome]", []))
    def complete(self, results: Sequence[CopyResult]) -> list[RestoreOutcome]:
        outcomes: list[RestoreOutcome] = []
        for result in results:
            try:
                outcomes += self._complete(result)
            except CAUGHT as error:  # one bad result spoils no other
                self._report("complete", error)
        return outcomes

    @hook(lambda: None)
    def finish_request(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._restores.finish(request)

    @hook(lambda: False)
    def reset(self) -> bool:
        self._forget_all()
        # If the store cannot forget, both stay off: no KV is better than that of before.
        self._restore_enabled = self._stores.enabled = False
        self._store.reset()
        self._restore_enabled, self._stores.enabled = self._settings.restore.enabled, True
        self._epoch_digest = self._space.digest
        return True

    @hook(lambda: None)
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._requests):
            self.finish_request(request_id)
        self._unsubscribe()
        self._restores.close()
        landings = self._restores.landings
        unplanned = landings.take_unplanned()
        self.complete([CopyResult(job, (), CopyFailure.CLOSED, rank=r) for job in unplanned for r in self._ranks.all])
        num_stuck = landings.close() + self._stores.close()
        if num_stuck:
            logger.warning(
                "the copies of %d blocks had not ended at close; the blocks stay pinned and their slots leased",
                num_stuck,
            )

    # ---- beside it -----------------------------------------------------------------------------------------------

    def stats(self) -> ConnectorStats:
        """A snapshot; any thread."""
        counts = self._restores.counts
        return ConnectorStats(
            ledger=self._stores.ledger.snapshot(),
            restore=self._restores.decision.status(),
            landed_blocks=counts["landed_blocks"],
            failed_landings=counts["failed_landings"],
            readmissions=counts["readmissions"],
            stale_results=self._num_stale,
            live_requests=len(self._requests),
            in_flight_blocks=self._num_in_flight,
        )

    @property
    def has_stores(self) -> bool:
        """Whether blocks are being copied down, or will be by the next plans: an engine without requests steps on. For
        no longer than a minute for a copy that does not end."""
        return self._stores.num_copying > 0 or self._stores.num_to_begin > 0

    @property
    def has_landings(self) -> bool:
        """Whether blocks are being copied up, for whomever: nothing bounds a copy that does not end."""
        return self._restores.landings.num_copying > 0

    @property
    def _num_in_flight(self) -> int:
        return self._restores.landings.num_copying + self._stores.num_copying

    def hit_sources(self, request_id: str) -> Mapping[str, int]:
        """Of the blocks that its first admission began to restore, how many had been in which tier."""
        request = self._requests.get(request_id)
        return {} if request is None else request.hit_sources

    def check_integrity(self) -> None:
        """Raises IntegrityError when ledger, jobs, pins or the store disagree. O(blocks): for tests."""
        self._stores.check_integrity()
        self._restores.check_integrity()
        self._store.check_integrity()

    def begin_flush(self) -> None:
        """From here to `end_flush` every publishable block is to be stored, each once."""
        self._stores.begin_flush()

    def end_flush(self) -> None:
        self._stores.end_flush()

    @property
    def num_unflushed(self) -> int:
        """Publishable blocks that are neither due nor stored by the flush."""
        return self._stores.num_unflushed

    @property
    def awaits_room(self) -> bool:
        """Whether blocks to be stored are put off, as slots of host memory are about to come."""
        return self._stores.room.is_worth_it

    @hook(lambda: None)
    def make_all_due(self) -> None:
        """Whatever is to be flushed is due at the next plan."""
        self._notice_reset()
        self._take_evictions()
        self._stores.make_all_due()

    def _why_off(self, request: LiveRequest) -> MissReason | None:
        """Why nothing may be restored for it; None if something may."""
        if not self._restore_enabled or not request.info.options.restore:
            return MissReason.RESTORE_OFF
        return None if request.epoch_digest == self._epoch_digest else MissReason.RESET

    def _notice_reset(self) -> None:
        """The store was reset, by whoever shares it: what was published here before is of another epoch."""
        digest = self._space.digest
        if digest != self._epoch_digest:
            self._epoch_digest = digest
            self._forget_all()

    def _forget_all(self) -> None:
        self._restores.void()
        self._stores.reset()

    def _complete(self, result: CopyResult) -> list[RestoreOutcome]:
        is_store = self._stores.knows_job(result.job_id)
        is_known = is_store or self._restores.landings.knows_job(result.job_id)
        if not is_known or not self._ranks.can_take(result):
            if not self._num_stale:
                logger.warning(
                    "the result of copy job %r, rank %r, is ignored: the job is unknown or over, or the rank has told "
                    "it (later ones are only counted)",
                    result.job_id,
                    result.rank,
                )
            self._num_stale += 1
            return []
        joined = self._ranks.take(result)
        if joined is None:
            return []
        if is_store:
            self._stores.complete(joined)
            return []
        return self._restores.complete(joined)

    def _checked_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Plain integers within the pool, each once; ValueError otherwise."""
        ids = [operator.index(block_id) for block_id in block_ids]
        if ids and not (min(ids) >= 0 and max(ids) < self._num_gpu_blocks and len(set(ids)) == len(ids)):
            raise ValueError(f"block ids must lie in 0..{self._num_gpu_blocks - 1}, each once; got {ids[:16]}")
        return ids

    def _forget_reused(self, reused: Sequence[int]) -> None:
        try:
            for block_id in reused:
                self._stores.forget(operator.index(block_id))
        except CAUGHT as error:
            # Some reused block may not have been named; what it holds now must not be stored under its old digest.
            self._stores.forget_all()
            self._report("plan_step", error)

    @hook(lambda: cast("list[CopyJob]", []))
    def _plan_stores(self, demand: StepDemand) -> list[CopyJob]:
        self._notice_reset()
        self._take_evictions()
        return self._stores.plan(demand)

    @hook(lambda: cast("tuple[list[CopyJob], tuple[int, ...]]", ([], ())))
    def _rescue(self, reused: Sequence[int]) -> tuple[list[CopyJob], tuple[int, ...]]:
        self._notice_reset()
        self._take_evictions()
        return self._stores.rescue(reused)

    # Hooks of their own, so that what they raise is not the end of the call around them.

    @hook(lambda: cast("float | None", None))
    def _check_stores(self) -> float | None:
        return self._stores.room.next_look(self._stores.give_up_overdue())

    @hook(lambda: None)
    def _note_work(self, demand: StepDemand) -> None:
        self._restores.note_work(demand.work)

    @hook(lambda: cast("list[int]", []))
    def _destinations(self, block_ids: Sequence[int]) -> list[int]:
        return self._checked_ids(block_ids)

    def _note_evictions(self, evicted: Sequence[Eviction]) -> None:
        with self._evicted_lock:
            self._evicted.extend(item.digest for item in evicted)

    def _take_evictions(self) -> None:
        if self._evicted:
            with self._evicted_lock:
                digests = list(self._evicted)
                self._evicted.clear()
            self._stores.mark_evicted(digests)

    def _report(self, where: str, error: BaseException) -> None:
        """Log the first of each kind with its trace; count them all."""
        self._space.count_error(error)
        kind = (where, type(error).__name__)
        if kind not in self._reported:
            self._reported.add(kind)
            logger.error(
                "connector.%s failed; the engine recomputes (later ones of this kind are only counted)",
                where,
                exc_info=error,
            )
