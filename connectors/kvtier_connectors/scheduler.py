"""kvtier's scheduler half: match, admit, plan and complete over one space of a store."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvtier.config import Settings
from kvtier.keys import BlockDigest
from kvtier.metrics import LedgerSnapshot
from kvtier.reasons import MissReason
from kvtier.store import Lookup, Space, Store
from kvtier.tiers.reservation import Eviction
from kvtier_connectors.arriving import Arrival, ArrivalFlow
from kvtier_connectors.contract import (
    NO_COPIES,
    BlockPoolView,
    ConnectorScheduler,
    CopyFailure,
    CopyJob,
    CopyResult,
    Match,
    RequestInfo,
    RestoreOutcome,
    StepDemand,
    TransferPlan,
)
from kvtier_connectors.due import due_policy
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.hooks import hook
from kvtier_connectors.landing import Landing, LandingFlow
from kvtier_connectors.published import PublishedBlock, PublishedBlocks
from kvtier_connectors.storing import StoreFlow

__all__ = ["ConnectorStats", "KVTierScheduler"]

logger = logging.getLogger("kvtier.connector")

MAX_NOTED_EVICTIONS = 1 << 16

NO_BLOCKS = Lookup(0, None)
NOTHING_HELD = Match(0, MissReason.TIER_ERROR)


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """One moment of a connector. Counters run from its opening."""

    ledger: LedgerSnapshot
    """Where every due block went."""
    landed_blocks: int
    """Blocks restored into the GPU pool and handed to the engine."""
    failed_landings: int
    """Blocks that were to land and did not."""
    readmissions: int
    """Admissions of a request that had been admitted before; their lookups are in no hit rate."""
    stale_results: int
    """Copy results for jobs unknown or over; ignored."""
    live_requests: int
    """Requests started and not finished."""
    in_flight_blocks: int
    """Blocks being copied, down or up."""


@dataclass(eq=False, slots=True)
class _Request:
    info: RequestInfo
    epoch_digest: bytes
    """The namespace when it began; after a reset its blocks are of no use to others, and theirs not to it."""
    admitted: bool = False
    arrival: Arrival | None = None
    landing: Landing | None = None


def _check_index(name: str, value: int) -> None:
    if operator.index(value) < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")


class KVTierScheduler(ConnectorScheduler):
    """Owns the records of live requests and joins the flows down and up. Engine's thread only.

    The store's evictions come from any thread, through `_evicted`, guarded by `_evicted_lock`.
    """

    def __init__(self, store: Store, space: Space, pool: BlockPoolView, settings: Settings | None = None) -> None:
        """settings: policy and bounds of this connector, where they are not those that the store was opened with."""
        self._settings = settings = settings or store.settings
        self._store = store
        self._space = space
        self._epoch_digest = space.digest
        self._num_gpu_blocks = pool.num_blocks
        self._restore_enabled = settings.restore.enabled
        self._blocks = PublishedBlocks()
        job_ids = itertools.count(1)
        self._stores = StoreFlow(
            space,
            pool,
            due_policy(settings.store.policy, settings.store.horizon_steps),
            self._blocks,
            job_ids,
            min(settings.store.max_inflight_blocks, max(1, pool.num_blocks // 2)),
            self._report,
        )
        self._arrivals = ArrivalFlow(space, settings.restore)
        self._landings = LandingFlow(space, pool, job_ids, settings.restore.max_inflight_blocks)
        self._requests: dict[str, _Request] = {}
        self._counts: Counter[str] = Counter()
        self._reported: set[tuple[str, str]] = set()
        # An engine that does not step while another fills the store forgets the oldest: their blocks stay clean and
        # are not stored again.
        self._evicted: deque[BlockDigest] = deque(maxlen=MAX_NOTED_EVICTIONS)
        self._evicted_lock = threading.Lock()
        self._closed = False
        self._unsubscribe = space.on_evict(self._note_evictions)

    # ---- the contract --------------------------------------------------------------------------------------------

    @hook(lambda: None)
    def start_request(self, request: RequestInfo) -> None:
        self._notice_reset()
        self.finish_request(request.request_id)
        record = self._requests[request.request_id] = _Request(request, self._epoch_digest)
        if self._may_restore(record):
            record.arrival = self._arrivals.begin(request)

    @hook(lambda: NOTHING_HELD)
    def match(self, request_id: str, num_local_blocks: int, max_blocks: int) -> Match:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is None or not self._restore_enabled or not request.info.options.restore:
            return Match(0, MissReason.RESTORE_OFF)
        if request.epoch_digest != self._epoch_digest:
            return Match(0, MissReason.RESET)
        if request.arrival is not None and request.arrival.is_running:
            return Match(0, None, is_staging=True)
        return self._look_up(request, num_local_blocks, max_blocks)

    @hook(lambda: 0)
    def admit(self, request_id: str, num_local_blocks: int, max_blocks: int, block_ids: Sequence[int]) -> int:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is None or request.landing is not None:
            return 0
        if len(block_ids) and self._may_restore(request):
            request.landing = self._begin_landing(request, num_local_blocks, block_ids)
        num_landing = len(request.landing.block_ids) if request.landing else 0
        self._end_arrival(request)
        self._count_admission(request, num_local_blocks, max_blocks, num_landing)
        return num_landing

    @hook(lambda: None)
    def publish(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        self._notice_reset()
        request = self._requests.get(request_id)
        if request is None or request.epoch_digest != self._epoch_digest or not request.info.options.store:
            return
        _check_index("first_block", first_block)
        digests = request.info.digests
        for index, block_id in enumerate(self._checked_ids(block_ids), first_block):
            parent = digests[index - 1] if index else None
            self._stores.publish(PublishedBlock(block_id, digests[index], parent))

    @hook(lambda: NO_COPIES)
    def plan_step(self, reused: Sequence[int], demand: StepDemand) -> TransferPlan:
        self._forget_reused(reused)
        jobs = (*self._landings.plan(), *self._plan_stores(demand))
        return TransferPlan(jobs, self._landings.num_copying + self._stores.num_copying)

    @hook(lambda: cast("list[RestoreOutcome]", []))
    def complete(self, results: Sequence[CopyResult]) -> list[RestoreOutcome]:
        outcomes: list[RestoreOutcome] = []
        for result in results:
            try:
                if self._stores.knows_job(result.job_id):
                    self._stores.complete(result)
                elif self._landings.knows_job(result.job_id):
                    outcomes += self._complete_landing(result)
                else:
                    self._counts["stale_results"] += 1
            except CAUGHT as error:  # one bad result spoils no other
                self._report("complete", error)
        return outcomes

    @hook(lambda: None)
    def finish_request(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and request.arrival is not None:
            request.arrival.stage.close()

    @hook(lambda: False)
    def reset(self) -> bool:
        self._landings.void()
        self._stores.reset()
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
        self.complete([CopyResult(job_id, (), CopyFailure.CLOSED) for job_id in self._landings.take_unplanned()])
        num_stuck = self._landings.close() + self._stores.close()
        if num_stuck:
            logger.warning(
                "the copies of %d blocks had not ended at close; the blocks stay pinned and their slots leased",
                num_stuck,
            )

    # ---- beside it -----------------------------------------------------------------------------------------------

    def stats(self) -> ConnectorStats:
        """A snapshot; any thread."""
        return ConnectorStats(
            ledger=self._stores.ledger.snapshot(),
            landed_blocks=self._counts["landed_blocks"],
            failed_landings=self._counts["failed_landings"],
            readmissions=self._counts["readmissions"],
            stale_results=self._counts["stale_results"],
            live_requests=len(self._requests),
            in_flight_blocks=self._landings.num_copying + self._stores.num_copying,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when ledger, jobs, pins or the store disagree. O(blocks): for tests."""
        self._stores.check_integrity()
        self._landings.check_integrity()
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

    @hook(lambda: None)
    def make_all_due(self) -> None:
        """Whatever is to be flushed is due at the next plan."""
        self._notice_reset()
        self._take_evictions()
        self._stores.make_all_due()

    def _may_restore(self, request: _Request) -> bool:
        return self._restore_enabled and request.info.options.restore and request.epoch_digest == self._epoch_digest

    def _look_up(self, request: _Request, num_local_blocks: int, max_blocks: int) -> Match:
        """What host memory holds of the request's blocks, and why it does not hold the next one."""
        _check_index("num_local_blocks", num_local_blocks)
        limit = self._arrivals.max_blocks(request.info)
        num_wanted = max(0, max_blocks if limit is None else min(max_blocks, limit))
        wanted = request.info.digests[num_local_blocks : num_local_blocks + num_wanted]
        found = self._space.lookup(wanted).poll() if wanted else NO_BLOCKS
        if found is None:
            return NOTHING_HELD
        if found.miss is None:
            is_limited = num_wanted < max_blocks and num_local_blocks + num_wanted < len(request.info.digests)
            return Match(found.num_blocks, MissReason.LIMIT if is_limited else None)
        staged = request.arrival.explains(num_local_blocks + found.num_blocks) if request.arrival is not None else None
        return Match(found.num_blocks, staged or found.miss)

    def _notice_reset(self) -> None:
        """The store was reset, by whoever shares it: what was published here before is of another epoch."""
        digest = self._space.digest
        if digest != self._epoch_digest:
            self._epoch_digest = digest
            self._stores.reset()  # landings under way see for themselves, when they end, that the namespace is another

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

    def _complete_landing(self, result: CopyResult) -> list[RestoreOutcome]:
        ended = self._landings.complete(result)
        if ended is None:
            return []
        landing, outcome = ended
        self._counts["landed_blocks"] += outcome.num_landed
        self._counts["failed_landings"] += len(landing.block_ids) - outcome.num_landed
        self._release_landing(landing)
        request = self._requests.get(outcome.request_id)
        if request is None or request.landing is not landing:
            return []  # that request ended, and its id may be another's by now
        request.landing = None
        return [outcome]

    # Hooks of their own, so that what they raise is not the end of the call around them.

    @hook(lambda: cast("Landing | None", None))
    def _begin_landing(self, request: _Request, num_local_blocks: int, block_ids: Sequence[int]) -> Landing | None:
        _check_index("num_local_blocks", num_local_blocks)
        ids = self._checked_ids(block_ids)[: self._arrivals.max_blocks(request.info)]
        wanted = request.info.digests[num_local_blocks : num_local_blocks + len(ids)]
        return self._landings.begin(request.info.request_id, num_local_blocks, wanted, ids)

    @hook(lambda: None)
    def _release_landing(self, landing: Landing) -> None:
        self._landings.release(landing)

    @hook(lambda: None)
    def _count_admission(self, request: _Request, num_local_blocks: int, max_blocks: int, num_landing: int) -> None:
        if request.admitted:
            self._counts["readmissions"] += 1
            return
        request.admitted = True
        if request.info.options.restore:
            num_asked = max(num_landing, min(max_blocks, len(request.info.digests) - num_local_blocks))
            miss = self._why_missing(request, num_local_blocks, num_landing, max_blocks)
            staged = request.arrival.stage.arrived if request.arrival is not None else None
            self._space.count_lookup(num_asked, num_landing, miss, staged)
        self._space.note_use(request.info.digests[: num_local_blocks + num_landing], None)

    def _why_missing(self, request: _Request, num_local_blocks: int, num_landing: int, max_blocks: int) -> MissReason:
        """Why the first block that is not restored is not."""
        limit = self._arrivals.max_blocks(request.info)
        if limit is not None and num_landing >= limit:
            return MissReason.LIMIT
        next_block = num_local_blocks + num_landing
        miss = self.match(request.info.request_id, next_block, min(1, max_blocks - num_landing)).miss
        return miss or MissReason.NO_ROOM

    @hook(lambda: None)
    def _end_arrival(self, request: _Request) -> None:
        if request.arrival is not None and not request.admitted:
            self._arrivals.end(request.info.request_id, request.arrival)

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
