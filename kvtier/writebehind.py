"""Write-behind: blocks that came to host memory, on their way to a lower tier, each accounted for."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.clock import Clock
from kvtier.drops import NOT_AGAIN, OUTCOME_TO_REASON, DroppedBlocks, keep_newest
from kvtier.durability import Durability, DurabilityWatches
from kvtier.errors import ClosedError, IntegrityError
from kvtier.executor import Executor
from kvtier.keys import BlockDigest, Key, make_key, split_key
from kvtier.metrics import Ledger
from kvtier.reasons import DropReason
from kvtier.slots import SlotPool
from kvtier.tickets import Ticket
from kvtier.tiers.base import Tier, WriteOutcome, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import HeldBlock

__all__ = ["WriteBehind"]

logger = logging.getLogger("kvtier.writebehind")
WRITE_BYTES = 8 << 20
"""One job: a read that comes meanwhile waits for no more than that on its thread. See `Tier.job_bytes`."""
WRITE_BLOCKS = 512  # and no more, however small: taken under one hold of the lock, about half a millisecond
MAX_NOTED = 1 << 16  # dropped blocks, and uses of blocks, that are remembered: a few MiB each
ENQUEUED_AT_ONCE = 16  # blocks by which the bound can be passed
NOTED_AT_ONCE = 1024  # uses of a prompt's blocks, under one hold of the lock: about a millisecond


class _Pending(NamedTuple):
    key: Key
    parent: Key | None
    held: HeldBlock
    due_at: float

    def request(self) -> WriteRequest:
        lease, nbytes, ttl_s, checksum = self.held
        return WriteRequest(self.key, self.parent, lease.view[:nbytes], ttl_s, checksum, lease.slot)


class WriteBehind:
    """Owns the queue of blocks to be written to one tier, their leases, and the ledger of that way down.

    A block is offered when it is committed to host memory. At its `min_uses`-th use it is due: leased and queued, in
    order, within a bound of bytes; beyond the bound it is dropped, as is one that waited too long, and so are blocks
    behind it in its chain, which nobody could reach. What was dropped for a passing reason is due again when a prompt
    next uses it, or at a flush, if the tier may be asked then.

    `offer` never blocks and is for the engine's thread; jobs run on the tier's executor, which does reads first. A job
    whose successor the executor refuses goes on itself; where none runs, the next offer or use asks again.

    Mutable state: everything, guarded by `_changed`: nothing is called under it but the watches' bookkeeping.
    """

    def __init__(
        self,
        host: HostTier,
        pool: SlotPool,
        tier: Tier,
        executor: Executor,
        clock: Clock,
        *,
        max_bytes: int,
        max_age_s: float,
        min_uses: int = 1,
        max_jobs: int = 1,
        known: Callable[[Sequence[Key]], list[bool]] | None = None,
        is_available: Callable[[], bool] = lambda: True,
    ) -> None:
        """max_bytes: of blocks queued and being written: host memory that cannot be evicted meanwhile. max_age_s: the
        longest that a block waits in the queue. known: what a remote tier is known to hold, and is not due there.
        is_available: whether the tier may be asked now."""
        self._host = host
        self._tier = tier
        self._executor = executor
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._min_uses = min_uses
        self._max_jobs = max_jobs
        self._known = known
        self._is_available = is_available
        self._owner = pool.owner(f"writes to the {tier.name} tier")
        self._changed = threading.Condition()
        self._queue: deque[_Pending] = deque()
        self._queued_bytes = 0
        self._num_jobs = self._num_running = self._num_resets = 0
        self._dropped = DroppedBlocks()
        self._uses: OrderedDict[Key, int] = OrderedDict()
        self._closed = False
        self.watches = DurabilityWatches()
        self.ledger = Ledger()
        self._unsubscribe = host.subscribe(on_commit=self.offer)

    @property
    def queued_bytes(self) -> int:
        """Bytes of blocks that are queued or being written."""
        return self._queued_bytes

    def offer(self, blocks: Sequence[tuple[Key, Key | None]], came_from: str | None) -> None:
        """Blocks came to host memory, prefix first, each with its parent's key."""
        if self._closed:
            return
        if came_from == self._tier.name:
            self._note_held([key for key, _ in blocks])
            return
        if self._known is not None:
            known = list(zip(blocks, self._known([key for key, _ in blocks]), strict=True))
            self._note_held([key for (key, _), is_held in known if is_held])
            blocks = [block for block, is_held in known if not is_held]
        self._make_due(list(blocks) if self._min_uses == 1 else self._count_uses(blocks, is_new=True))

    def note_use(self, namespace: bytes, digests: Sequence[BlockDigest], parent: BlockDigest | None) -> None:
        """A prompt used these blocks, wherever they were; `parent` comes before the first. Costs in proportion to the
        prompt: for a thread of the tier. A stretch at a time, since the engine's thread waits for the same lock."""
        self._start_jobs()  # the executor may have refused the last time
        for start in range(0, min(len(digests), MAX_NOTED), NOTED_AT_ONCE):
            if self._closed or (self._min_uses == 1 and not self._dropped):
                return
            above = digests[start - 1] if start else parent
            self._note_use(namespace, digests[start : start + NOTED_AT_ONCE], above)

    def _note_use(self, namespace: bytes, digests: Sequence[BlockDigest], parent: BlockDigest | None) -> None:
        keys = [make_key(namespace, digest) for digest in digests]
        before = [None if parent is None else make_key(namespace, parent), *keys]
        blocks = list(zip(keys, before, strict=False))
        if self._min_uses > 1:
            due = self._count_uses(blocks, is_new=False)
        else:
            due = [block for block in blocks if block[0] in self._dropped]
        if not self._is_available():  # what was dropped for that is not due again until it is
            due = [block for block in due if block[0] not in self._dropped]
        # What is not in host memory is due when it comes there.
        here = self._host.contains([key for key, _ in due])
        self._make_due([block for block, is_here in zip(due, here, strict=True) if is_here])

    def flush(self, timeout: float) -> int:
        """Block until everything due is written, at most `timeout` seconds, trying again what was dropped and is still
        in host memory, unless the tier is sick: then that is not due again. Returns how many blocks of host memory are
        not written. Not for the engine's step."""
        begun_at, tried = self._clock.now(), set[Key]()
        while True:
            again = self._enqueue_dropped(tried) if self._is_available() else 0
            self._start_jobs()
            elapsed = self._clock.now() - begun_at
            left = timeout - elapsed if elapsed >= 0 else 0.0  # a clock that went back tells no time
            with self._changed:
                if self._closed or left <= 0 or not (self._queue or self._num_jobs or again):
                    break
                if self._queue or self._num_jobs:
                    self._changed.wait(min(left, 0.1))
        return sum(self.unwritten().values())

    def unwritten(self) -> Counter[DropReason | None]:
        """Blocks of host memory that are due and not written, by why not; None: they are on their way."""
        with self._changed:
            dropped = self._dropped.copy()
        return dropped.reasons_of(self._host.contains) + Counter({None: self.ledger.snapshot().pending})

    def _enqueue_dropped(self, tried: set[Key]) -> int:
        """Once the queue is empty, try again what found no room, and of the rest what was not tried yet. How many were
        queued."""
        with self._changed:
            if self._queue or self._num_jobs:
                return 0
            again = self._dropped.to_try_again(tried)
        num_queued = 0
        for start in range(0, len(again), ENQUEUED_AT_ONCE):
            if self._queued_bytes >= self._max_bytes:
                break
            blocks = again[start : start + ENQUEUED_AT_ONCE]
            tried.update(key for key, _ in blocks)
            self.ledger.add_due(len(blocks))
            num_queued += self._enqueue(blocks)
        return num_queued

    def watch(self, keys: Sequence[Key], held: Callable[[Sequence[Key]], list[bool]]) -> Ticket[Durability]:
        """Whether these blocks are in the tier, once none of them is on its way there. held: which ones are there, from
        memory. What is neither there nor on its way is not awaited. Never blocks."""

        def why_lost(others: Sequence[Key]) -> dict[Key, DropReason | None]:
            gone = [key for key, is_held in zip(others, held(others), strict=True) if not is_held]
            with self._changed:
                return {key: self._dropped.reason(key) for key in gone}

        return self.watches.watch(keys, why_lost)

    def reset(self) -> None:
        """Drop what is queued, and forget what was dropped and used: its blocks are of before. What is being written
        is the tier's to withdraw."""
        with self._changed:
            self._num_resets += 1
            self._dropped.clear()
            self._uses.clear()
            left = self._take_queue()
            self._changed.notify_all()
        self._give_up(left, DropReason.RESET)

    def close(self) -> None:
        """Drop what is queued. Blocks that are being written stay leased until another call, once they are not: a stuck
        thread's for good."""
        self._unsubscribe()
        with self._changed:
            self._closed = True
            left = self._take_queue()
            stuck = self._num_running
        self._give_up(left, DropReason.CLOSED)
        self.watches.close()
        if not stuck:
            self._owner.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError when the ledger or the bytes of the queue are wrong."""
        self.ledger.check_integrity()
        with self._changed:
            queued = sum(block.held.nbytes for block in self._queue)
            if queued > self._queued_bytes or (not self._num_jobs and queued != self._queued_bytes):
                raise IntegrityError(f"write-behind: {self._queued_bytes} bytes counted, {queued} queued")

    # ---- inside --------------------------------------------------------------------------------------------------

    def _count_uses(self, blocks: Sequence[tuple[Key, Key | None]], *, is_new: bool) -> list[tuple[Key, Key | None]]:
        """Count one use of each; those that are due by it.

        is_new: they just came to host memory, not from this tier. Such a block is due at every use from the one that
        makes it due on, for the tier may have given it up since; another only at that one, or when it was dropped.
        """
        with self._changed:
            due: list[tuple[Key, Key | None]] = []
            for key, parent in reversed(blocks):  # so that the prefix is remembered longest
                uses = self._uses[key] = self._uses.pop(key, 0) + 1
                if uses == self._min_uses or (is_new and uses > self._min_uses) or key in self._dropped:
                    due.append((key, parent))
            keep_newest(self._uses, MAX_NOTED)
        return due[::-1]

    def _note_held(self, keys: Sequence[Key], num_resets: int | None = None) -> None:
        """The tier holds them, whatever was dropped: no use makes them due, unless they come from elsewhere."""
        with self._changed:
            if num_resets is not None and num_resets != self._num_resets:
                return
            for key in keys:
                self._dropped.pop(key, None)
                if self._min_uses > 1:
                    self._uses[key] = max(self._min_uses, self._uses.pop(key, 0))
            keep_newest(self._uses, MAX_NOTED)

    def _make_due(self, blocks: Sequence[tuple[Key, Key | None]]) -> None:
        """Lease and queue; what finds no room, or is not in host memory any more, is dropped."""
        self.ledger.add_due(len(blocks))
        for start in range(0, len(blocks), ENQUEUED_AT_ONCE):
            self._enqueue(blocks[start : start + ENQUEUED_AT_ONCE])
        self._start_jobs()  # also when nothing was queued: the executor may have refused the last time

    def _enqueue(self, blocks: Sequence[tuple[Key, Key | None]]) -> int:
        """How many were queued."""
        num_resets = self._num_resets
        wanted: list[tuple[Key, Key | None]] = []
        for (key, parent), reason in zip(blocks, self._why_not(blocks), strict=True):
            if reason is None:
                wanted.append((key, parent))
            else:
                self._drop(key, parent, reason)
        try:
            held = self._host.lease_blocks([split_key(key) for key, _ in wanted], self._owner)
        except ClosedError:
            held = [None] * len(wanted)
        now = self._clock.now()
        found = [_Pending(*names, block, now) for names, block in zip(wanted, held, strict=True) if block is not None]
        self.ledger.add_dropped(DropReason.EVICTED, len(wanted) - len(found))
        with self._changed:
            if not self._closed and num_resets == self._num_resets:
                self._queue.extend(found)
                self.watches.begin(block.key for block in found)
                self._queued_bytes += sum(block.held.nbytes for block in found)
                return len(found)
        self._give_up(found, DropReason.CLOSED if self._closed else DropReason.RESET)
        return 0

    def _take_queue(self) -> list[_Pending]:
        """All of it, under the lock."""
        left, self._queue = list(self._queue), deque()
        self._queued_bytes -= sum(block.held.nbytes for block in left)
        return left

    def _give_up(self, blocks: Sequence[_Pending], reason: DropReason) -> None:
        self.ledger.add_dropped(reason, len(blocks))
        for block in blocks:
            block.held.lease.release()
            self.watches.end(block.key, reason)

    def _why_not(self, blocks: Sequence[tuple[Key, Key | None]]) -> list[DropReason | None]:
        """Why each block cannot be queued; None for one that can."""
        with self._changed:
            is_full = self._queued_bytes >= self._max_bytes
            reasons: list[DropReason | None] = []
            gone: set[Key] = set()
            for key, parent in blocks:
                self._dropped.pop(key, None)
                is_orphan = parent is not None and (parent in gone or parent in self._dropped)
                reasons.append(DropReason.ORPHAN if is_orphan else DropReason.BACKLOG if is_full else None)
                if reasons[-1] is not None:
                    gone.add(key)
        return reasons

    def _drop(self, key: Key, parent: Key | None, reason: DropReason, num_resets: int | None = None) -> None:
        """Count it; remember it if it can be written later, and was not reset since `num_resets`."""
        self.ledger.add_dropped(reason, 1)
        with self._changed:
            if reason not in NOT_AGAIN and num_resets in (None, self._num_resets):
                self._dropped.note(key, reason, parent, MAX_NOTED)

    def _start_jobs(self) -> None:
        while True:
            with self._changed:
                wanted = self._num_jobs < self._max_jobs and len(self._queue) > 0
                self._num_jobs += wanted
            if not wanted:
                return
            if not self._executor.try_submit(self._run, urgent=False):
                with self._changed:
                    self._num_jobs -= 1
                    self._changed.notify_all()
                return  # what is queued waits for the next offer or use, or for a job that runs

    def _run(self) -> None:
        """One job, on a thread of the tier: may block for as long as the device does. Reads that wait go between two
        batches, unless the executor takes no job."""
        while True:
            batch, aged, num_resets = self._take()
            try:
                for block, reason in aged:
                    block.held.lease.release()
                    self._drop(block.key, block.parent, reason, num_resets)
                    self.watches.end(block.key, reason)
                if batch:
                    self._write(batch, num_resets)
            finally:
                with self._changed:
                    self._queued_bytes -= sum(block.held.nbytes for block in batch)
                    self._num_running -= 1
                    goes_on = len(self._queue) > 0
                    self._num_jobs -= not goes_on
                    self._changed.notify_all()
            if not goes_on or self._executor.try_submit(self._run, urgent=False):
                self._start_jobs()
                return

    def _take(self) -> tuple[list[_Pending], list[tuple[_Pending, DropReason]], int]:
        """The next blocks to write; those before them that waited too long, with what continues these; and as of which
        reset."""
        batch: list[_Pending] = []
        aged: list[tuple[_Pending, DropReason]] = []
        gone: set[Key] = set()
        nbytes = 0
        now = self._clock.now()
        with self._changed:
            most = self._tier.job_bytes(WRITE_BYTES, self._queued_bytes // self._max_jobs)
            for _ in range(WRITE_BLOCKS):
                if not self._queue or (batch and nbytes + self._queue[0].held.nbytes > most):
                    break
                block = self._queue.popleft()
                is_orphan = block.parent in gone or block.parent in self._dropped
                if is_orphan or now - block.due_at > self._max_age_s:
                    gone.add(block.key)
                    aged.append((block, DropReason.ORPHAN if is_orphan else DropReason.AGED))
                    self._queued_bytes -= block.held.nbytes
                    continue
                batch.append(block)
                nbytes += block.held.nbytes
            self._num_running += 1
            return batch, aged, self._num_resets

    def _write(self, batch: Sequence[_Pending], num_resets: int) -> None:
        try:
            outcomes = self._tier.write([item.request() for item in batch])
            if len(outcomes) != len(batch):
                raise IntegrityError(f"{len(outcomes)} outcomes for {len(batch)} blocks")
        except BaseException as error:
            if not (self._closed and isinstance(error, ClosedError)):
                logger.exception("writing %d blocks to the %s tier failed", len(batch), self._tier.name)
            outcomes = [WriteOutcome.ERROR] * len(batch)
        for block, outcome in zip(batch, outcomes, strict=True):
            block.held.lease.release()
            reason = None
            if outcome is WriteOutcome.STORED:
                self.ledger.add_stored(1)
            else:
                reason = OUTCOME_TO_REASON.get(outcome, DropReason.TIER_ERROR)
                self._drop(block.key, block.parent, reason, num_resets)
            self.watches.end(block.key, None if reason is DropReason.ALREADY_STORED else reason)
        are_held = [outcome in (WriteOutcome.STORED, WriteOutcome.ALREADY_STORED) for outcome in outcomes]
        self._note_held([block.key for block in compress(batch, are_held)], num_resets)
