"""The store: what a connector opens. One host pool, the tiers, the epoch, and the counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvtier.clock import Clock, MonotonicClock
from kvtier.config import MemorySnapshot, Settings
from kvtier.errors import ClosedError, ConfigError, LayoutError, TierError
from kvtier.executor import Executor
from kvtier.keys import BlockDigest, Namespace
from kvtier.located import Located
from kvtier.lower import LowerTier, open_disk
from kvtier.memory import Pinner, PoolMemory
from kvtier.metrics import StatsSnapshot, StoreCounters
from kvtier.pool import HostPool, Lease, Owner
from kvtier.reasons import DropReason, MissReason
from kvtier.stage import Stage
from kvtier.staging import Stager
from kvtier.tickets import Ticket
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction, Reservation

if TYPE_CHECKING:
    from kvtier.tiers.disk import Files

__all__ = ["Lookup", "Space", "Store"]

logger = logging.getLogger("kvtier.store")


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of a lookup: how many leading blocks are held, and why the next one is not."""

    num_blocks: int
    miss: MissReason | None
    """None when every block asked for is held."""


class Store:
    """Owns the host pool and the tiers of one process. Opened once, shared by the spaces of several layouts.

    Calls decide in memory and return at once; lower tiers do their I/O on threads of their own. `reset`, `flush` and
    `close` may wait for a lower tier, each within a bound; opening takes as long as the device does. Calls may come
    from any thread. A store opened before a fork refuses to be used in the child, where its threads and locks would be
    dead copies.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        memory: MemorySnapshot | None = None,
        pinner: Pinner | None = None,
        touch: bool = True,
        clock: Clock | None = None,
        disk_executor: Executor | None = None,
        disk_files: Files | None = None,
    ) -> None:
        """Open the pool, usable at once, and the disk tier, which takes as long as reading its indices does.

        Raises ConfigError for a size or a lock that the machine refuses, or a directory that cannot be used. memory:
        what the size is checked against, read from the machine if not given. The rest is for tests.
        """
        if not isinstance(settings, Settings):
            raise ConfigError(f"settings must come from kvtier.config.load_settings, not {type(settings).__name__}")
        host = settings.host
        memory = memory or MemorySnapshot.read()
        pool_bytes = host.pool_bytes(memory)
        if pool_bytes * host.workers > memory.available_bytes:
            logger.warning(
                "host.size: %d bytes for each of %d workers are more than this machine has available now (%s); "
                "lower it before the pool fills",
                pool_bytes,
                host.workers,
                memory.describe(),
            )
        self._settings = settings
        self._counters = StoreCounters()
        self._closed = False
        self._resetting = threading.Lock()  # one after the other: each tier is told every epoch in turn
        self._clock = clock or MonotonicClock()
        disk = open_disk(settings.disk, self._clock, disk_files) if settings.disk.path else None
        try:
            self._memory = PoolMemory(pool_bytes, pin=host.pin, pinner=pinner, touch=touch)
            try:
                self._pool = HostPool(self._memory, host.slab)
                self._host = HostTier(self._pool)
                self._lower: list[LowerTier] = []
                if disk is not None:
                    lower = LowerTier(disk, settings.disk, self._host, self._pool, self._clock, disk_executor)
                    self._lower.append(lower)
            except BaseException:
                self._memory.close()
                raise
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        self._stager = Stager(self._host, self._pool, self._lower, settings.restore.max_staging, self._clock)
        self._epoch = max((tier.epoch for tier in self._lower), default=0)

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def host(self) -> HostTier:
        return self._host

    @property
    def pool(self) -> HostPool:
        return self._pool

    @property
    def stager(self) -> Stager:
        return self._stager

    @property
    def lower(self) -> Sequence[LowerTier]:
        """The tiers below host memory, in the order in which they are asked."""
        return self._lower

    @property
    def is_writing(self) -> bool:
        """Whether blocks are on their way from host memory to a lower tier."""
        return any(lower.write_behind.ledger.snapshot().pending for lower in self._lower)

    @property
    def epoch(self) -> int:
        """Counts resets, across restarts where a lower tier remembers them; part of every namespace digest."""
        return self._epoch

    @property
    def counters(self) -> StoreCounters:
        return self._counters

    def open_space(self, namespace: Namespace) -> Space:
        """The part of the store that one engine's blocks live in.

        Raises LayoutError or ConfigError when a block fits no slab of host memory, or no segment on disk.
        """
        self.check_usable()
        if self._pool.capacity_slots(namespace.layout.block_bytes) < 1:
            raise LayoutError(f"host.size holds not one block of {namespace.layout.block_bytes} bytes; raise it")
        for lower in self._lower:
            lower.check_block(namespace.layout.block_bytes)
        return Space(self, namespace)

    def reset(self) -> int:
        """Make everything stored so far unreachable, in every tier, and start a new epoch; returns blocks forgotten.

        For new weights under the same name. Copies under way end as `DropReason.RESET`; leases keep their bytes. Waits
        for lower tiers to remember it, for seconds at most each; raises TierError if one could not. This process is
        safe even then: it asks under the new epoch.
        """
        self.check_usable()
        with self._resetting:
            self._epoch += 1
            with self._counters.lock:
                self._counters.resets += 1
            forgotten = sum(self._host.reset(namespace) for namespace in self._host.namespaces())
            failures: list[TierError] = []
            for lower in self._lower:
                try:
                    lower.start_epoch(self._epoch)
                except TierError as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return forgotten

    def flush(self, timeout: float) -> int:
        """Wait until every block of host memory that is due below is written, at most `timeout` seconds; how many
        blocks are not. Not for the engine's step."""
        self.check_usable()
        deadline = time.monotonic() + timeout
        return sum(lower.flush(max(0.0, deadline - time.monotonic())) for lower in self._lower)

    def stats(self) -> StatsSnapshot:
        """A snapshot; cheap enough for every scrape."""
        self._host.check_process()
        counters, usage = self._counters, self._pool.usage()
        disk = self._lower[0].stats() if self._lower else None
        with counters.lock:
            return StatsSnapshot(
                lookups=counters.lookups,
                asked_blocks=counters.asked_blocks,
                hit_blocks=counters.hit_blocks,
                hits=dict(counters.hits),
                misses={reason.value: count for reason, count in sorted(counters.misses.items())},
                stored_blocks=counters.stored_blocks,
                stored_bytes=counters.stored_bytes,
                evicted_blocks=self._host.num_evicted,
                resets=counters.resets,
                errors=dict(counters.errors),
                host_blocks=self._host.num_blocks,
                host_used_bytes=usage.used_bytes,
                host_reserved_bytes=usage.reserved_bytes,
                host_touched_bytes=usage.touched_bytes,
                host_pinned_bytes=usage.pinned_bytes,
                leases=usage.num_leases,
                fallbacks={reason.value: count for reason, count in sorted(counters.fallbacks.items())},
                staged_blocks=self._stager.num_reads,
                staging_bytes=self._stager.inflight_bytes,
                disk=disk,
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError when pool, index and order disagree. O(blocks): for tests and `kvtier selftest`."""
        self._host.check_integrity()
        self._stager.check_integrity()
        for lower in self._lower:
            lower.check_integrity()

    def check_usable(self) -> None:
        """Raises ClosedError after `close`, ForkedError in a forked child."""
        if self._closed:
            raise ClosedError("the store is closed")
        self._host.check_process()

    def close(self, timeout: float = 5.0) -> None:
        """Stop the lower tiers, within `timeout` seconds, and unmap the pool. What is not written by then is dropped:
        `flush` first. The connector has stopped its copies before. Idempotent; in a forked child it does nothing."""
        if self._closed or self._host.is_forked:
            return
        self._closed = True
        for lower in self._lower:
            lower.close(timeout)
        self._stager.close()
        self._host.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Space:
    """One namespace's view of the store; binds every call to that namespace and the current epoch."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._host = store.host
        self.namespace = namespace
        self.block_bytes = namespace.layout.block_bytes
        self._epoch_digest = (store.epoch, namespace.digest(store.epoch))

    @property
    def digest(self) -> bytes:
        """The namespace's digest in the current epoch."""
        epoch, digest = self._epoch_digest
        if epoch != self._store.epoch:
            epoch = self._store.epoch
            digest = self.namespace.digest(epoch)
            self._epoch_digest = (epoch, digest)
        return digest

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The host pool's bytes; a lease's offset points into it."""
        return self._store.pool.buffer

    @property
    def capacity_blocks(self) -> int:
        """Blocks of this layout that the host pool holds when it holds nothing else."""
        return self._store.pool.capacity_slots(self.block_bytes)

    def owner(self, name: str) -> Owner:
        """A holder for leases and reservations; closing it ends them all."""
        return self._store.pool.owner(name)

    def lookup(self, digests: Sequence[BlockDigest]) -> Ticket[Lookup]:
        """Which leading blocks of a prompt are held. Pure: no lease, no recency, no statistics."""
        self._store.check_usable()
        held = self._host.committed_run(self.digest, digests)
        miss = None if held == len(digests) else self._why_missing(digests[held])
        return Ticket.resolved(Lookup(held, miss))

    def _why_missing(self, digest: BlockDigest) -> MissReason:
        miss = self._host.why_missing(self.digest, digest)
        if miss is not MissReason.BEING_STORED:
            for lower in self._store.lower:
                if lower.holds(self.digest, digest):
                    return MissReason.NOT_STAGED if lower.is_available else MissReason.TIER_DOWN
        return miss

    def locate(self, digests: Sequence[BlockDigest]) -> Located:
        """Which tier holds each of a prompt's leading blocks, of lower tiers' only what half the host pool takes. Pure,
        as `lookup`; `stage` can begin with the answer."""
        self._store.check_usable()
        return self._store.stager.locate(self.digest, digests, self.block_bytes, self.capacity_blocks // 2)

    def stage(
        self,
        name: str,
        digests: Sequence[BlockDigest],
        parent: BlockDigest | None,
        max_wait_s: float,
        found: Located | None = None,
    ) -> Stage | None:
        """Begin to bring a prompt's blocks from lower tiers to host memory; None if those have none. Never blocks. See
        `Stager.begin`. name: the request's, for messages. parent: the block before `digests`."""
        self._store.check_usable()
        return self._store.stager.begin(name, self.digest, digests, parent, self.block_bytes, max_wait_s, found)

    def note_use(self, digests: Sequence[BlockDigest], parent: BlockDigest | None) -> None:
        """A prompt was admitted that begins with these blocks: tell the lower tiers, which did not serve them all."""
        self._store.check_usable()
        for lower in self._store.lower:
            lower.note_use(self.digest, digests, parent)

    def holds(self, digest: BlockDigest) -> bool:
        """True when the block is in the host tier or being copied there: there is nothing left to store."""
        self._host.check_process()
        return self._host.state(self.digest, digest) is not None

    def reaches(self, digest: BlockDigest) -> bool:
        """True when some tier has the block, or is about to: those that continue it can be restored."""
        return self.holds(digest) or any(
            lower.is_available and lower.holds(self.digest, digest) for lower in self._store.lower
        )

    def lease(self, digests: Sequence[BlockDigest], owner: Owner) -> list[Lease]:
        """Leases on the leading blocks held, which count as used now."""
        self._store.check_usable()
        return self._host.lease_run(self.digest, digests, owner)

    def reserve(self, digest: BlockDigest, parent: BlockDigest | None, owner: Owner) -> Reservation | DropReason:
        """A slot to copy one block into; store the parent first. See `HostTier.reserve`."""
        self._store.check_usable()
        return self._host.reserve(self.digest, digest, parent, self.block_bytes, owner)

    def commit(self, reservations: Sequence[Reservation]) -> list[bool]:
        """Make filled blocks findable; False where a reset or the owner's end came first."""
        self._store.check_usable()
        outcomes = self._host.commit(reservations)
        counters = self._store.counters
        with counters.lock:
            counters.stored_blocks += sum(outcomes)
            counters.stored_bytes += sum(outcomes) * self.block_bytes
        return outcomes

    def abort(self, reservation: Reservation) -> None:
        """Give a reserved slot back. Idempotent."""
        self._host.abort(reservation)

    def count_lookup(
        self, asked: int, hit: int, miss: MissReason | None, staged: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Count one admission, once: `asked` blocks of which `hit` are served and the rest missed for one reason.

        staged: how many of them came from lower tiers for this request, by tier; the rest are host memory's. Returns
        the served ones by tier.
        """
        tiers = {**(staged or {}), self._host.name: hit}
        return self._store.counters.add_lookup(asked, hit, miss or MissReason.ABSENT, tiers)

    def count_fallback(self, reason: MissReason) -> None:
        """Count a request that waited for a lower tier in vain."""
        counters = self._store.counters
        with counters.lock:
            counters.fallbacks[reason] += 1

    def count_error(self, error: BaseException) -> None:
        counters = self._store.counters
        with counters.lock:
            counters.errors[type(error).__name__] += 1

    def on_evict(self, callback: Callable[[Sequence[Eviction]], None]) -> Callable[[], None]:
        """Call back with this space's evicted blocks; on the evicting thread, so be quick and do not raise.

        Returns a call that ends it.
        """

        def mine(evicted: Sequence[Eviction]) -> None:
            own = [item for item in evicted if item.namespace == self.digest]
            if own:
                callback(own)

        return self._host.subscribe(on_evict=mine)
