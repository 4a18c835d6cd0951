"""A lower tier as the store runs it: in its wrappers, with its threads and the queue of blocks on their way down."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvtier.breaker import Breaker, BreakerSnapshot
from kvtier.clock import Clock
from kvtier.decisions import Decision
from kvtier.errors import ClosedError, ForkedError, TierError
from kvtier.executor import Executor, ThreadExecutor
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.metrics import LowerStats, RemoteStats, fields_of
from kvtier.opened import OpenedTier
from kvtier.slots import SlotPool
from kvtier.tiers.base import Tier
from kvtier.tiers.guarded import GuardedTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.known import KnownBlocks
from kvtier.tiers.metered import MeteredTier
from kvtier.tiers.throttled import ThrottledTier
from kvtier.tiers.watched import OnGone, OnStored, WatchedTier
from kvtier.writebehind import WriteBehind

__all__ = ["LowerTier"]

logger = logging.getLogger("kvtier.store")

MAX_QUEUED_JOBS = 1024
"""Reads, and as many writes, that wait for a thread. A read of a prompt's blocks is one job for each 8 MiB."""
QUEUED_SHARE = 4
"""Blocks on their way down may hold this part of host memory, which cannot be evicted meanwhile: an engine whose pool
turns over offers as much as it holds at once, and a prefix that finds no room loses all behind it."""
ADOPTED_SHARE = 2
"""The same where host memory is the tier's, and holds nothing else for long; the rest is for restores."""
RESET_TIMEOUT_S = 10.0
POLL_S = 0.1
MIN_CLOSE_S = 0.5
MIN_PROBE_S = 0.01
UNLIMITED_RATE = 1e15  # bytes a second
MAX_USES = 256  # prompts whose uses wait to be noted; beyond it the oldest are forgotten


class LowerTier:
    """Owns one tier below host memory: its wrappers, its executors, its write-behind queue.

    Reads come from the stager, writes from the queue, both on the executor's threads; a remote tier has one thread
    more, for questions. Any thread may call; `flush`, `start_epoch` and `close` wait within bounds and are not for the
    engine's step, nor is `look`.
    """

    def __init__(
        self,
        opened: OpenedTier,
        host: HostTier,
        pool: SlotPool,
        clock: Clock,
        max_age_s: float,
        executor: Executor | None = None,
    ) -> None:
        """max_age_s: the longest that a block waits to be written. executor: for all of it, in place of own threads."""
        tier, limits = opened.tier, opened.limits
        self.name = tier.name
        logger.info("%s tier open: %s", tier.name, opened.words)
        self._opened = opened
        self._num_threads = limits.writers + 1  # the executor keeps one for reads
        self._meter = MeteredTier(tier, clock)
        breaker = Breaker(clock, max_cooldown_s=limits.max_cooldown_s, probe_timeout_s=2 * limits.timeout_s)
        self._guard = GuardedTier(self._meter, breaker, clock, limits.timeout_s, self._probe_soon)
        rate = limits.max_write_rate
        self._throttle = None if rate == "off" else ThrottledTier(self._guard, rate, clock)
        self._watched = WatchedTier(self._throttle or self._guard)
        self.tier: Tier = self._watched
        opened.on_gone(self._watched.note_gone)
        self._known = KnownBlocks(clock) if tier.is_remote else None
        if self._known is not None:
            known = self._known
            self._watched.subscribe(lambda blocks: known.add(key for key, _ in blocks), known.discard)
        self._uses: deque[tuple[bytes, Sequence[BlockDigest], BlockDigest | None]] = deque(maxlen=MAX_USES)
        self._decisions: deque[Decision] = deque(maxlen=MAX_USES)
        self._questions: Counter[str] = Counter()
        self._is_noting = False
        self._is_probing = False
        self._lock = threading.Lock()
        self._closed = False
        self._ended = threading.Event()
        self._has_own_threads = executor is None
        if executor is None:
            executor = ThreadExecutor(f"kvtier-{self.name}", MAX_QUEUED_JOBS, num_threads=self._num_threads)
        self.executor: Executor = executor
        self.asking = executor
        if self._has_own_threads and tier.is_remote:  # a question takes no time, and waits for no read
            self.asking = ThreadExecutor(f"kvtier-{self.name}-asks", MAX_QUEUED_JOBS)
        self.write_behind = WriteBehind(
            host,
            pool,
            self.tier,
            self.executor,
            clock,
            max_bytes=pool.nbytes // (ADOPTED_SHARE if tier.adopts else QUEUED_SHARE),
            max_age_s=max_age_s,
            min_uses=limits.min_uses,
            # A rate is kept by waiting on a thread: one waits, and the others are there for reads. To name blocks that
            # are in their place takes a message: the more of them the better.
            max_jobs=1 if self._throttle is not None or tier.adopts else limits.writers,
            # Where it adopts a slot may be freed only once the tier has said that it holds the block.
            known=None if self._known is None or tier.adopts else self._known.held,
            is_available=lambda: self.is_available,
        )

    @property
    def device(self) -> Tier:
        """The tier within all wrappers."""
        return self._opened.tier

    def check_block(self, nbytes: int) -> None:
        """Raises ConfigError for blocks that the tier can never hold."""
        self._opened.check_block(nbytes)

    def subscribe(self, on_stored: OnStored, on_gone: OnGone) -> Callable[[], None]:
        """Call back, on the thread that learnt it, of blocks that are there by now, with their parents, and of blocks
        that are there no more. See `WatchedTier`. Returns a call that ends it."""
        return self._watched.subscribe(on_stored, on_gone)

    def keys(self, namespace: bytes) -> Sequence[tuple[Key, Key | None]]:
        """Blocks of a namespace that are there, with their parents where these are known; of a remote tier none: there
        is no asking it for all."""
        return self._opened.keys(namespace)

    @property
    def is_remote(self) -> bool:
        return self._known is not None

    @property
    def is_available(self) -> bool:
        """Whether it may be asked now: its breaker lets a call through, and not every thread is away with an overdue
        one, behind which whoever asks would wait for its whole time. A remote one that is sick is asked for its health
        meanwhile, by a thread of its own."""
        if self._closed or self._guard.num_overdue >= self._num_threads:
            return False
        if not self.is_remote:
            return self._guard.is_available
        if self._guard.breaker.is_closed:
            return True
        self._probe_soon()
        return False

    @property
    def breaker(self) -> BreakerSnapshot:
        """Whether it is being left alone, since when, and when it is asked for its health next."""
        return self._guard.breaker.snapshot()

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """Which blocks are there, sick or not: of a remote tier, which are known to be. Answers from memory."""
        return self.tier.contains(keys) if self._known is None else self._known.held(keys)

    def holds(self, namespace: bytes, digest: BlockDigest) -> bool:
        """As `held`, of one block. One to be written is still in host memory."""
        return self.held([make_key(namespace, digest)])[0]

    def look(self, keys: Sequence[Key]) -> list[bool] | None:
        """Ask a remote tier which of these it holds, and remember it; None where it did not answer. Blocks."""
        held = self._guard.look(keys)
        with self._lock:
            self._questions["unanswered" if held is None else "answered"] += 1
        if held is not None and self._known is not None:
            self._known.add(key for key, is_held in zip(keys, held, strict=True) if is_held)
            self._watched.note_gone([key for key, is_held in zip(keys, held, strict=True) if not is_held])
        return held

    def _probe_soon(self) -> None:
        """Ask the sick remote tier whether it is well, when that is due, unless somebody is about to. Never blocks."""
        is_due = self._has_own_threads or self._guard.breaker.would_allow()
        if self._closed or not (self.is_remote and is_due):
            return
        with self._lock:
            begin, self._is_probing = not self._is_probing, True
        if begin and not self.asking.try_submit(self._probe, urgent=True):
            self._is_probing = False

    def _probe(self) -> None:
        """With threads of its own: until it is well, whether anyone wants it or not. What is asked meanwhile is refused
        in any case."""
        breaker = self._guard.breaker
        if self._known is not None:  # who comes back may have lost everything: better asked than believed
            self._known.clear()
        try:
            self._guard.try_probe()
            while self._has_own_threads and not (breaker.is_closed or self._closed):
                self._ended.wait(breaker.snapshot().next_probe_in_s + MIN_PROBE_S)
                self._guard.try_probe()
        except (ClosedError, ForkedError):
            return
        finally:
            self._is_probing = False

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
        self._note_soon()

    def note_decision(self, decision: Decision) -> None:
        """What was decided of a request, for a tier that keeps a history: as `note_use`, told by a thread of it."""
        if not self.tier.keeps_history:
            return
        with self._lock:
            self._decisions.append(decision)
        self._note_soon()

    def _note_soon(self) -> None:
        with self._lock:
            submit, self._is_noting = not self._is_noting, True
        if submit and not self.executor.try_submit(self._note_all, urgent=False):
            with self._lock:
                self._is_noting = False  # the next one tries again

    def _note_all(self) -> None:
        """All that was told since: one job however much it is, so that it takes no writer's place."""
        with self._lock:
            uses, decisions = list(self._uses), list(self._decisions)
            self._uses.clear()
            self._decisions.clear()
            self._is_noting = False
        if decisions:
            self.tier.tell(decisions)
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
        if self._known is not None:
            self._known.clear()
        queued = self.executor.try_submit(run, urgent=True)
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while queued and not done.wait(POLL_S):
            queued = time.monotonic() < deadline and not self._closed
        if not queued:
            raise TierError(
                f"the {self.name} tier did not remember the reset within {RESET_TIMEOUT_S:g} s: this process uses "
                f"none of its older blocks, a later one might; reset again, or empty it, before a restart"
            )
        if failures:
            raise TierError(
                f"the {self.name} tier could not remember the reset ({failures[0]}): this process uses none of its "
                f"older blocks, a later one might; reset again, or empty it, before a restart"
            ) from failures[0]

    def set_max_write_rate(self, rate: int | Literal["off"]) -> bool:
        """Write so many bytes a second at most from now on. False, and nothing is changed, where it was opened without
        a rate: its threads are shared out in another way then. Any thread."""
        if self._throttle is None:
            return False
        self._throttle.set_rate(UNLIMITED_RATE if rate == "off" else rate)
        return True

    def flush(self, timeout: float) -> int:
        """Wait until what is due is written, at most `timeout` seconds; how many blocks are not."""
        return self.write_behind.flush(timeout)

    def stats(self, staging_bytes: int = 0) -> LowerStats:
        """A snapshot; never blocks on I/O. staging_bytes: of reads of it under way, which the stager counts."""
        usage, meter, breaker = self.tier.usage(), self._meter.snapshot(), self._guard.breaker.snapshot()
        stats = LowerStats(
            blocks=usage.num_blocks,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            reads=meter.reads,
            read_bytes=meter.read_bytes,
            read_seconds=meter.read_seconds,
            writes=meter.writes,
            written_bytes=meter.written_bytes,
            write_seconds=meter.write_seconds,
            errors=self._guard.errors,
            ledger=self.write_behind.ledger.snapshot(),
            queued_bytes=self.write_behind.queued_bytes,
            staging_bytes=staging_bytes,
            available=int(self.is_available),
            breaker_opened=breaker.times_opened,
            breaker_refused=breaker.refused,
        )
        if self._known is not None:
            with self._lock:
                questions = dict(self._questions)
            stats = RemoteStats(**fields_of(stats), questions=questions, known_blocks=len(self._known))
        return self._opened.describe(stats)

    def check_integrity(self) -> None:
        self.write_behind.check_integrity()
        self.tier.check_integrity()

    def close(self, timeout: float) -> None:
        """Stop within `timeout` seconds. A thread that the device holds keeps its slots, and dies with the process."""
        self._closed = True
        self._ended.set()
        deadline = time.monotonic() + timeout
        if self._throttle is not None:
            self._throttle.stop_waiting()
        self.write_behind.close()  # else a job that runs would go on through the queue
        self.executor.close(timeout)
        if self.asking is not self.executor:
            self.asking.close(max(0.0, deadline - time.monotonic()))
        self.write_behind.close()  # what that job still held
        blocks, stored = self.tier.usage().num_blocks, self.write_behind.ledger.snapshot().stored
        closing = threading.Thread(target=self.tier.close, name=f"kvtier-{self.name}-close", daemon=True)
        closing.start()
        closing.join(max(MIN_CLOSE_S, deadline - time.monotonic()))
        if closing.is_alive():
            logger.warning("the %s tier was not closed within %g s: its device hangs", self.name, timeout)
            return
        there = "" if self.is_remote else f"{blocks} blocks are there, "
        logger.info("%s tier closed: %s%d blocks were stored by this process", self.name, there, stored)
