"""The store: what a connector opens. One host pool, the tiers, the epoch, and the counts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from kvtier.below import LowerTiers, open_tiers
from kvtier.clock import Clock, MonotonicClock
from kvtier.config import MemorySnapshot, Settings
from kvtier.decisions import DecisionLog
from kvtier.errors import ClosedError, ConfigError, LayoutError
from kvtier.executor import Executor
from kvtier.keys import Namespace
from kvtier.lower import LowerTier
from kvtier.memory import HostMemory, Pinner, PoolMemory
from kvtier.metrics import DiskStats, RedisStats, ServerStats, StatsSnapshot, StoreCounters
from kvtier.opened import OpenedTier
from kvtier.policy import policy_factory
from kvtier.pool import HostPool
from kvtier.slots import SlotPool
from kvtier.space import Lookup, Space
from kvtier.staging import Stager
from kvtier.tiers.host import HostTier

if TYPE_CHECKING:
    from kvtier.tiers.disk import Files

__all__ = ["Lookup", "Space", "Store"]

logger = logging.getLogger("kvtier.store")


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
        keeps_checksums: bool = False,
        clock: Clock | None = None,
        disk_executor: Executor | None = None,
        disk_files: Files | None = None,
    ) -> None:
        """Open the pool, usable at once, and the disk tier, which takes as long as reading its indices does.

        Raises ConfigError for a size or a lock that the machine refuses, or a directory that cannot be used. memory:
        what the size is checked against, read from the machine if not given. keeps_checksums: for a pool that other
        processes map: blocks are told from what was written over them since. The rest is for tests.
        """
        if not isinstance(settings, Settings):
            raise ConfigError(f"settings must come from kvtier.config.load_settings, not {type(settings).__name__}")
        host = settings.host
        memory = memory or MemorySnapshot.read()
        pool_bytes = host.pool_bytes(memory)
        has_server_pool = settings.has_server_pool
        if not has_server_pool and pool_bytes * host.workers > memory.available_bytes:
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
        self._decisions = DecisionLog(self._clock)
        opened = open_tiers(settings, self._clock, disk_files, pool_bytes if has_server_pool else None)
        self._memory: PoolMemory | None = None
        self._find_memory: Callable[[], HostMemory | None]
        try:
            home = next((each for each in opened if each.host_pool is not None), None)
            if home is None:
                self._memory = PoolMemory(pool_bytes, pin=host.pin, pinner=pinner, touch=touch)
                own = HostMemory(self._memory.fd, self._memory.nbytes)
                self._find_memory = lambda: own
            else:
                self._find_memory = home.host_memory
            try:
                self._pool = _pool_of(home, self._memory, host.slab)
                self._host = HostTier(
                    self._pool,
                    policy=policy_factory(host.policy),
                    quotas=host.quotas,
                    keeps_checksums=keeps_checksums,
                )
                self._stager = Stager(self._host, self._pool, (), settings.restore.max_staging, self._clock)
                self._below = LowerTiers(self._host, self._pool, self._stager, self._clock, settings.store.max_age_s)
                for each in opened:
                    self._below.add(each, disk_executor if each.tier.name == "disk" else None)
                if home is not None:
                    home.serve(self._host)
            except BaseException:
                if self._memory is not None:
                    self._memory.close()
                raise
        except BaseException:
            for each in opened:
                each.tier.close()
                if each.host_pool is not None:
                    each.host_pool.close()
            raise
        self._epoch = max((tier.epoch for tier in self.lower), default=0)

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
    def pool(self) -> SlotPool:
        return self._pool

    @property
    def memory(self) -> PoolMemory:
        """What the host pool lies in; ConfigError where that is a kvtier-server's: see `host_memory`."""
        if self._memory is None:
            raise ConfigError("host.pool = 'server': there is no memory of this process's own; that needs 'own'")
        return self._memory

    @property
    def host_memory(self) -> HostMemory | None:
        """Where other processes of this engine find what the host pool's slots lie in. None while there is none: of a
        kvtier-server that was not reached yet, or is between two runs. It stays what it is while a slot is leased.
        Waits for nothing."""
        return self._find_memory()

    @property
    def stager(self) -> Stager:
        return self._stager

    @property
    def lower(self) -> Sequence[LowerTier]:
        """The tiers below host memory, in the order in which they are asked."""
        return self._below.tiers

    @property
    def decisions(self) -> DecisionLog:
        """What was decided of requests of late."""
        return self._decisions

    def tier(self, name: str) -> LowerTier:
        """The lower tier of that name; raises ConfigError where there is none."""
        return self._below.find(name)

    @property
    def is_writing(self) -> bool:
        """Whether blocks are on their way from host memory to a lower tier."""
        return any(lower.write_behind.ledger.snapshot().pending for lower in self.lower)

    @property
    def epoch(self) -> int:
        """Counts resets, across restarts where a lower tier remembers them; part of every namespace digest."""
        return self._epoch

    @property
    def counters(self) -> StoreCounters:
        return self._counters

    def attach(self, opened: OpenedTier, place: int | None = None) -> None:
        """Take one more lower tier into use, which is the store's from now on. See `LowerTiers.attach`."""
        self.check_usable()
        with self._resetting:
            self._below.attach(opened, self._epoch, place)

    def detach(self, name: str, timeout: float = 5.0) -> None:
        """Let go of a lower tier within `timeout` seconds; what it holds stays there. See `LowerTiers.detach`."""
        self.check_usable()
        with self._resetting:
            self._below.detach(name, timeout)

    def open_space(self, namespace: Namespace) -> Space:
        """The part of the store that one engine's blocks live in.

        Raises LayoutError or ConfigError when a block fits no slab of host memory, or no segment on disk.
        """
        self.check_usable()
        if self._pool.capacity_slots(namespace.layout.block_bytes) < 1:
            raise LayoutError(f"host.size holds not one block of {namespace.layout.block_bytes} bytes; raise it")
        slot_bytes = self._pool.slot_bytes(namespace.layout.block_bytes)
        for tenant, quota in self._settings.host.quotas.items():
            if quota < slot_bytes:
                raise ConfigError(
                    f"host.quotas: {tenant!r} may have {quota} bytes, and one block takes {slot_bytes} of the pool: "
                    f"raise it, or leave {tenant!r} out"
                )
        for lower in self.lower:
            lower.check_block(namespace.layout.block_bytes)
        self._pool.expect(namespace.layout.block_bytes)
        return Space(self, namespace)

    def reset(self) -> int:
        """Make everything stored so far unreachable, in every tier, and start a new epoch; returns blocks forgotten.

        For new weights under the same name. Copies under way end as `DropReason.RESET`; leases keep their bytes. Waits
        for lower tiers to remember it, for seconds at most each; raises TierError if one could not. This process is
        safe even then: it asks under the new epoch.
        """
        return self._start_epoch(0)

    def start_epoch(self, epoch: int) -> int:
        """As `reset`, and the new epoch is `epoch` at least; returns which it is."""
        self._start_epoch(epoch)
        return self._epoch

    def _start_epoch(self, at_least: int) -> int:
        self.check_usable()
        with self._resetting:
            # Past what any tier remembers too: one may have been joined or attached with a later epoch.
            self._epoch = max(at_least, 1 + max(self._epoch, *(lower.epoch for lower in self.lower), 0))
            with self._counters.lock:
                self._counters.resets += 1
            with self._stager.fence.shut():
                forgotten = sum(self._host.reset(namespace) for namespace in self._host.namespaces())
                self._below.start_epoch(self._epoch)
        return forgotten

    def start_touching(self) -> None:
        """Have the pool's pages made in the background from now on, of a store opened with `touch=False`. Once."""
        self.memory.start_touching()

    def flush(self, timeout: float) -> int:
        """Wait until every block of host memory that is due below is written, at most `timeout` seconds; how many
        blocks are not. Not for the engine's step."""
        self.check_usable()
        return self._below.flush(timeout)

    def stats(self) -> StatsSnapshot:
        """A snapshot; cheap enough for every scrape."""
        self._host.check_process()
        counters, usage = self._counters, self._pool.usage()
        below = self._below.stats()
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
                disk=next((each for each in below if isinstance(each, DiskStats)), None),
                server=next((each for each in below if isinstance(each, ServerStats)), None),
                redis=next((each for each in below if isinstance(each, RedisStats)), None),
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError when pool, index and order disagree. O(blocks): for tests and `kvtier selftest`."""
        self._host.check_integrity()
        self._stager.check_integrity()
        for lower in self.lower:
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
        self._below.close(timeout)
        self._stager.close()
        self._host.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pool_of(home: OpenedTier | None, memory: PoolMemory | None, slab: int) -> SlotPool:
    """Slots of a tier's memory, or of our own."""
    if home is not None and home.host_pool is not None:
        return home.host_pool
    assert memory is not None
    return HostPool(memory, slab)
