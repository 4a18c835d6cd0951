"""A lower tier as the store runs it: in its wrappers, with its threads and the queue of blocks on their way down."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.breaker import Breaker
from kvtier.clock import Clock
from kvtier.config import DiskSettings
from kvtier.errors import TierError
from kvtier.executor import Executor, ThreadExecutor
from kvtier.keys import BlockDigest, make_key
from kvtier.metrics import DiskStats
from kvtier.pool import HostPool
from kvtier.tiers.base import Tier
from kvtier.tiers.guarded import GuardedTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.metered import MeteredTier
from kvtier.tiers.throttled import ThrottledTier
from kvtier.writebehind import WriteBehind

if TYPE_CHECKING:
    from kvtier.tiers.disk import DiskTier, Files

__all__ = ["LowerTier", "open_disk"]

logger = logging.getLogger("kvtier.store")

MAX_QUEUED_JOBS = 1024
"""Reads, and as many writes, that wait for a thread. A read of a prompt's blocks is one job for each 8 MiB."""
QUEUED_SHARE = 4
"""Blocks on their way down may hold this part of host memory, which cannot be evicted meanwhile: an engine whose pool
turns over offers as much as it holds at once, and a prefix that finds no room loses all behind it."""
RESET_TIMEOUT_S = 10.0
POLL_S = 0.1
MIN_CLOSE_S = 0.5
MAX_USES = 256  # prompts whose uses wait to be noted; beyond it the oldest are forgotten


def open_disk(settings: DiskSettings, clock: Clock, files: Files | None = None) -> DiskTier:
    """The disk tier of these settings, recovered from what its directories hold. Blocks on I/O; raises ConfigError."""
    from kvtier.tiers.disk import DiskTier  # and with it lz4 and xxhash, which a store without a disk needs not

    return DiskTier(
        [Path(path).expanduser() for path in settings.path],
        settings.size,
        min_free_bytes=settings.min_free,
        codec=settings.codec,
        clock=clock,
        files=files,
    )


class LowerTier:
    """Owns one tier below host memory: its wrappers, its executor, its write-behind queue.

    Reads come from the stager, writes from the queue, both on the executor's threads. Any thread may call; `flush`,
    `start_epoch` and `close` wait within bounds and are not for the engine's step.
    """

    def __init__(
        self,
        disk: DiskTier,
        settings: DiskSettings,
        host: HostTier,
        pool: HostPool,
        clock: Clock,
        executor: Executor | None = None,
    ) -> None:
        self.name = disk.name
        found = disk.snapshot()
        logger.info(
            "%s tier open: %d blocks found, %d of %d bytes used, %s",
            disk.name,
            found.num_blocks,
            found.used_bytes,
            found.capacity_bytes,
            ", ".join(f"{path} ({mode} I/O)" for path, mode in found.mode.items()),
        )
        self._num_threads = settings.threads + 1  # the executor keeps one for reads
        self._disk = disk
        self._meter = MeteredTier(disk, clock)
        self._guard = GuardedTier(
            self._meter, Breaker(clock, probe_timeout_s=2 * settings.timeout_s), clock, settings.timeout_s
        )
        rate = settings.max_write_rate
        self._throttle = None if rate == "off" else ThrottledTier(self._guard, rate, clock)
        self.tier: Tier = self._throttle or self._guard
        self._uses: deque[tuple[bytes, Sequence[BlockDigest], BlockDigest | None]] = deque(maxlen=MAX_USES)
        self._is_noting = False
        self._lock = threading.Lock()
        self._closed = False
        if executor is None:
            executor = ThreadExecutor(f"kvtier-{self.name}", MAX_QUEUED_JOBS, num_threads=self._num_threads)
        self.executor: Executor = executor
        self.write_behind = WriteBehind(
            host,
            pool,
            self.tier,
            self.executor,
            clock,
            max_bytes=pool.buffer.nbytes // QUEUED_SHARE,
            min_uses=settings.min_uses,
            # A rate is kept by waiting on a thread: one waits, and the others are there for reads.
            max_jobs=1 if self._throttle is not None else settings.threads,
        )

    def check_block(self, nbytes: int) -> None:
        """Raises ConfigError for blocks that the tier can never hold."""
        self._disk.check_block(nbytes)

    @property
    def is_available(self) -> bool:
        """Whether it may be asked now: its breaker lets a call through, and not every thread is away with an overdue
        one, behind which whoever asks would wait for its whole time."""
        return self._guard.num_overdue < self._num_threads and self._guard.is_available

    def holds(self, namespace: bytes, digest: BlockDigest) -> bool:
        """Whether the block is there, sick or not. Answers from memory. One to be written is still in host memory."""
        return self.tier.contains([make_key(namespace, digest)])[0]

    @property
    def epoch(self) -> int:
        return self.tier.epoch

    def note_use(self, namespace: bytes, digests: Sequence[BlockDigest], parent: BlockDigest | None) -> None:
        """A prompt uses these blocks, whichever tier served them; `parent` comes before the first. A thread of the tier
        notes it: this only remembers the prompt."""
        if not digests:
            return
        with self._lock:
            self._uses.append((namespace, digests, parent))
            submit, self._is_noting = not self._is_noting, True
        if submit and not self.executor.try_submit(self._note_uses, urgent=False):
            with self._lock:
                self._is_noting = False  # the next use tries again

    def _note_uses(self) -> None:
        """All uses that were told since: one job however many they are, so that they take no writer's place."""
        with self._lock:
            uses = list(self._uses)
            self._uses.clear()
            self._is_noting = False
        for namespace, digests, parent in uses:
            self.write_behind.note_use(namespace, digests, parent)
            self.tier.touch([make_key(namespace, digest) for digest in digests])

    def start_epoch(self, epoch: int) -> None:
        """Forget every block and remember the epoch. Waits at most RESET_TIMEOUT_S; raises TierError if that failed."""
        done = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self.tier.start_epoch(epoch)
            except BaseException as error:  # noqa: BLE001 - raised below, on the thread that asked
                failures.append(error)
            done.set()

        self.write_behind.reset()
        queued = self.executor.try_submit(run, urgent=True)
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while queued and not done.wait(POLL_S):
            queued = time.monotonic() < deadline and not self._closed
        if not queued:
            raise TierError(
                f"the {self.name} tier did not remember the reset within {RESET_TIMEOUT_S:g} s: this process uses "
                f"none of its older blocks, a later one might; reset again, or empty its directories, before a restart"
            )
        if failures:
            raise TierError(
                f"the {self.name} tier could not remember the reset ({failures[0]}): this process uses none of its "
                f"older blocks, a later one might; reset again, or empty its directories, before a restart"
            ) from failures[0]

    def flush(self, timeout: float) -> int:
        """Wait until what is due is written, at most `timeout` seconds; how many blocks are not."""
        return self.write_behind.flush(timeout)

    def stats(self) -> DiskStats:
        """A snapshot; never blocks on I/O."""
        disk, meter, breaker = self._disk.snapshot(), self._meter.snapshot(), self._guard.breaker.snapshot()
        return DiskStats(
            blocks=disk.num_blocks,
            used_bytes=disk.used_bytes,
            capacity_bytes=disk.capacity_bytes,
            reads=meter.reads,
            read_bytes=meter.read_bytes,
            read_seconds=meter.read_seconds,
            writes=meter.writes,
            written_bytes=meter.written_bytes,
            write_seconds=meter.write_seconds,
            device_written_bytes=disk.written_bytes,
            evicted_blocks=disk.evicted_blocks,
            readmitted_blocks=disk.readmitted_blocks,
            recovered_blocks=disk.recovered_blocks,
            damaged_blocks=disk.damaged,
            reclaimed_files=disk.reclaimed_files,
            errors=self._guard.errors,
            ledger=self.write_behind.ledger.snapshot(),
            queued_bytes=self.write_behind.queued_bytes,
            available=int(self.is_available),
            breaker_opened=breaker.times_opened,
            breaker_refused=breaker.refused,
            modes=disk.mode,
            read_only={path: reason for path, reason in disk.read_only.items() if reason},
        )

    def check_integrity(self) -> None:
        self.write_behind.check_integrity()
        self.tier.check_integrity()

    def close(self, timeout: float) -> None:
        """Stop within `timeout` seconds. A thread that the device holds keeps its slots, and dies with the process."""
        self._closed = True
        deadline = time.monotonic() + timeout
        if self._throttle is not None:
            self._throttle.stop_waiting()
        self.write_behind.close()  # else a job that runs would go on through the queue
        self.executor.close(timeout)
        self.write_behind.close()  # what that job still held
        blocks, stored = self._disk.snapshot().num_blocks, self.write_behind.ledger.snapshot().stored
        closing = threading.Thread(target=self.tier.close, name=f"kvtier-{self.name}-close", daemon=True)
        closing.start()
        closing.join(max(MIN_CLOSE_S, deadline - time.monotonic()))
        if closing.is_alive():
            logger.warning("the %s tier was not closed within %g s: its device hangs", self.name, timeout)
            return
        logger.info("%s tier closed: %d blocks are there, %d of them stored by this process", self.name, blocks, stored)
