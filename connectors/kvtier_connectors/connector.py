"""Opening kvtier beside an engine: one store, one space, both halves, and the checks that speak at start."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvtier.clock import Clock
from kvtier.config import Settings
from kvtier.errors import LayoutError
from kvtier.events import StoreEvents
from kvtier.executor import Executor
from kvtier.keys import Namespace
from kvtier.layout import KVLayout
from kvtier.metrics import StatsSnapshot
from kvtier.reasons import DropReason
from kvtier.store import Space, Store
from kvtier_connectors.contract import WRITTEN, BlockPoolView, RestoreOutcome, StepDemand, WriteFence
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_connectors.worker import KVTierWorker
from kvtier_kernels import BlockPlanes

__all__ = ["Connector", "FlushResult", "sizing_warning"]

logger = logging.getLogger("kvtier.connector")


def sizing_warning(store: Store, host_blocks: int, gpu_blocks: int) -> str | None:
    """What to tell the operator when the host pool is too small to help; None when it is not, or passes on what it
    gets."""
    if store.lower or host_blocks >= gpu_blocks:
        return None
    return (
        f"host.size holds {host_blocks} blocks, fewer than the GPU pool's {gpu_blocks}: whatever is evicted from the "
        f"GPU pool has mostly left the host pool before it is asked for again, so storing costs and brings little; "
        f"raise host.size to several times the GPU pool"
    )


def _check_planes(planes: BlockPlanes, layout: KVLayout, num_blocks: int) -> None:
    """That the planes are in `layout`'s order cannot be seen from here; that they are others can."""
    expected = (layout.segment_bytes,) * layout.num_planes
    if planes.segment_bytes != expected:
        raise LayoutError(
            f"the GPU pool has {planes.num_planes} planes of {sorted(set(planes.segment_bytes))} bytes a block; the "
            f"namespace's layout says {layout.num_planes} of {layout.segment_bytes}, layer 0 keys, layer 0 values, "
            f"layer 1 keys and so on"
        )
    if planes.num_blocks != num_blocks:
        raise LayoutError(f"the block pool has {num_blocks} blocks, its planes {planes.num_blocks}")


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush came to.

    num_unstored: blocks that are in no tier below the GPU, or not in the lowest that should have them.
    outcomes: restores that ended meanwhile, for the engine as those of `complete`.
    reasons: these blocks by why they are not stored, which adds up; None: there was no time.
    """

    num_unstored: int
    outcomes: tuple[RestoreOutcome, ...]
    reasons: Mapping[DropReason | None, int] = field(default_factory=dict)


POLL_S = 0.1
ROOM_POLL_S = 0.005
FLUSH_SHARE = 0.8  # of the time that a close may take
MIN_CLOSE_S = 0.5


class Connector:
    """kvtier in one process with its engine: owns the store, unless one is given, and both halves."""

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        pool: BlockPoolView,
        planes: BlockPlanes,
        *,
        store: Store | None = None,
        executor: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigError or LayoutError for settings, or a pool, that cannot work; then nothing stays open.

        store: shared with others; `settings.host` is then its own, the rest of `settings` this connector's. clock: of
        all waits, the machine's unless given; a store that is given has its own.
        """
        _check_planes(planes, namespace.layout, pool.num_blocks)
        self._owns_store = store is None
        self._closed = False
        self.store = Store(settings, clock=clock) if store is None else store
        try:
            self.space: Space = self.store.open_space(namespace)
            warning = sizing_warning(self.store, self.space.capacity_blocks, planes.num_blocks)
            if warning is not None:
                logger.warning("%s", warning)
            self.worker = KVTierWorker(planes, self.space.buffer, executor=executor)
            self._unsubscribe = self.store.stager.subscribe(self.worker.wake)
            try:
                self.scheduler = KVTierScheduler(self.store, self.space, pool, settings)
                self._events = StoreEvents.open(self.store, self.space)
            except BaseException:
                self._unsubscribe()
                self.worker.close(0.0)
                raise
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise

    def flush(self, timeout: float, reused: Sequence[int] = (), written: WriteFence | None = WRITTEN) -> FlushResult:
        """Store every publishable block, down to the lowest tier, within `timeout` seconds.

        Blocks the caller: for between steps, before a shutdown. reused, written: as in `plan_step` and `submit`; name
        what was handed out since the last plan.
        """
        deadline = time.monotonic() + timeout
        self.scheduler.begin_flush()
        try:
            outcomes = self._store_all(deadline, reused, written)
            num_unstored = self.scheduler.num_unflushed + self.scheduler.stats().ledger.pending
        finally:
            self.scheduler.end_flush()
        is_late = time.monotonic() >= deadline
        reasons = Counter({None if is_late else DropReason.HOST_FULL: num_unstored})
        self.store.flush(max(0.0, deadline - time.monotonic()))
        for lower in self.store.lower:
            reasons += lower.write_behind.unwritten()
        return FlushResult(sum(reasons.values()), tuple(outcomes), +reasons)

    def _store_all(self, deadline: float, reused: Sequence[int], written: WriteFence | None) -> list[RestoreOutcome]:
        """Copy what is to be flushed to host memory, in rounds; the restores that ended meanwhile."""
        outcomes: list[RestoreOutcome] = []
        stats = self.scheduler.stats()
        while (left := deadline - time.monotonic()) > 0:
            # A round takes the slots of blocks that came to host memory before: those not written by then are lost.
            asked_at = time.monotonic()
            self.store.flush(left / 2)
            may_get_room = time.monotonic() - asked_at >= left / 2
            self.scheduler.make_all_due()
            plan = self.scheduler.plan_step(reused, StepDemand(0, 0, 0))
            reused = ()
            self.worker.submit(plan, written)
            outcomes += self._await_copies(deadline)
            before, stats = stats, self.scheduler.stats()
            if not (self.scheduler.num_unflushed or stats.ledger.pending):
                break
            if not plan.jobs and stats.ledger.stored == before.ledger.stored and not may_get_room:
                if not self.scheduler.awaits_room:
                    break  # what is left finds no room, now or later
                outcomes += self.scheduler.complete(self.worker.poll(ROOM_POLL_S))
        return outcomes

    def _await_copies(self, deadline: float) -> list[RestoreOutcome]:
        outcomes: list[RestoreOutcome] = []
        while self.scheduler.stats().in_flight_blocks and (left := deadline - time.monotonic()) > 0:
            outcomes += self.scheduler.complete(self.worker.poll(min(left, POLL_S)))
        return outcomes

    def close(self, timeout: float = 5.0, reused: Sequence[int] = ()) -> None:
        """Stop copies, account for what is left, unmap. Idempotent. Between steps.

        What others can still find afterwards, in a lower tier or a store that is shared, is flushed first; all of it
        ends within `timeout` seconds, and a little more where a device hangs. reused: as in `flush`.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        if self.store.lower or not self._owns_store:
            result = self.flush(timeout * FLUSH_SHARE, reused)
            if result.num_unstored:
                late = f"not within {timeout * FLUSH_SHARE:g} s"
                why = sorted((late if reason is None else reason.value, n) for reason, n in result.reasons.items())
                logger.warning(
                    "connector closed: %d blocks could not be stored and are lost (%s)",
                    result.num_unstored,
                    ", ".join(f"{count} {reason}" for reason, count in why),
                )
        self.scheduler.complete(self.worker.close(max(MIN_CLOSE_S, deadline - time.monotonic())))
        self.scheduler.close()
        self._unsubscribe()
        self._events.close()
        if self._owns_store:
            self.store.close(max(MIN_CLOSE_S, deadline - time.monotonic()))

    def stats(self) -> StatsSnapshot:
        """What the store counts."""
        return self.store.stats()

    def num_in_flight(self) -> int:
        """Blocks being copied, down or up."""
        return self.scheduler.stats().in_flight_blocks

    def check_integrity(self) -> None:
        """Raises IntegrityError when ledger, jobs, pins or the store disagree. O(blocks): for tests."""
        self.scheduler.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
