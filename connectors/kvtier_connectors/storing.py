"""The way down: from due blocks to committed slots, each block accounted for in the ledger."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from kvtier.clock import Clock
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier.metrics import Ledger
from kvtier.reasons import DropReason
from kvtier.store import Space
from kvtier.tiers.reservation import Reservation
from kvtier_connectors.contract import BlockPoolView, CopyDirection, CopyFailure, CopyJob, CopyResult, StepDemand
from kvtier_connectors.copies import FAILURE_TO_REASON, TRIED_AGAIN, Copying, StoreJob, blocks_per_job
from kvtier_connectors.due import DuePolicy
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.published import PublishedBlock, PublishedBlocks
from kvtier_connectors.room import RoomWait

__all__ = ["StoreFlow"]

logger = logging.getLogger("kvtier.connector")

P = ParamSpec("P")
T = TypeVar("T")

COPY_TIMEOUT_S = 60.0
"""After how long a copy down that was not told over is given up. It takes milliseconds."""
PIN_HOLDER = "store"


class StoreFlow:
    """Owns the due queue, the stores under way, their pins, and the ledger. Engine's thread only.

    A block is dirty, then due (in `_due`, prefix before tail), then copying (in `_jobs`, pinned, slot reserved), then
    stored or dropped with a reason. A due block may be reused before its copy begins; a copying one is pinned. At most
    one entry of `_due` or `_copying` names a GPU block, so both are bounded by the pool.

    A job that is not told over in time is *abandoned*: dropped and unpinned, but its slots stay leased (in
    `_abandoned`) until its end is told, for the copy may still write them. No other begins before that: it would hang
    behind it, and keep its blocks from the engine for as long again.
    """

    def __init__(
        self,
        space: Space,
        pool: BlockPoolView,
        policy: DuePolicy,
        blocks: PublishedBlocks,
        job_ids: Iterator[int],
        max_inflight_blocks: int,
        clock: Clock,
        report: Callable[[str, BaseException], None],
    ) -> None:
        """report: told what the store or the engine's pool raised, and in which call."""
        self._space = space
        self._pool = pool
        self._policy = policy
        self._blocks = blocks
        self._job_ids = job_ids
        self._max_inflight = max_inflight_blocks
        self._clock = clock
        self._report = report
        self.room = RoomWait(space, clock)
        self._owner = space.owner("stores")
        self._due: OrderedDict[int, PublishedBlock] = OrderedDict()
        self._copying: dict[int, Copying] = {}
        self._jobs: dict[int, StoreJob] = {}
        self._abandoned: dict[int, list[Copying]] = {}
        self._seen_at = clock.now()
        # Blocks that no prompt can reach in the store, as an ancestor is neither there nor in the GPU pool; and the
        # digests of those ancestors. Each is dropped once, and looked at again when one of the ancestors comes back.
        self._lost: set[int] = set()
        self._missing: set[BlockDigest] = set()
        self._flushed: set[BlockDigest] | None = None  # what a flush under way has stored
        self.ledger = Ledger()
        self.enabled = True
        """False: blocks published from now on are never stored."""

    @property
    def num_copying(self) -> int:
        return len(self._copying)

    @property
    def num_to_begin(self) -> int:
        """Due blocks whose copies the next plans begin; none while a copy that was given up may yet read its source."""
        return 0 if self._abandoned else len(self._due)

    @property
    def num_awaited(self) -> int:
        """Blocks that are being copied, or will be in a moment."""
        return len(self._copying) + (len(self._due) if self.room.is_worth_it else 0)

    def knows_job(self, job_id: int) -> bool:
        return job_id in self._jobs or job_id in self._abandoned

    def publish(self, block: PublishedBlock) -> None:
        """A block became publishable: dirty, unless the store has it already."""
        if not self.enabled or not self._policy.tracks_blocks or self._blocks.get(block.block_id) == block:
            return
        self.forget(block.block_id)
        if block.digest in self._missing:
            self._lost.clear()
            self._missing.clear()
        dirty = not self._space.holds(block.digest)
        self._blocks.add(block, dirty=dirty)
        if dirty and self._policy.due_at_publish:
            self._make_due(block)

    def forget(self, block_id: int) -> None:
        """The GPU block was reused. If its KV is not stored yet, it is lost, and counted."""
        was_dirty = self._blocks.is_dirty(block_id)
        self._blocks.forget(block_id)
        self._lost.discard(block_id)
        if not self._lost:
            self._missing.clear()
        copying = self._copying.get(block_id)
        if copying is not None and not copying.is_fenced:
            copying.overtaken = True
        if self._due.pop(block_id, None) is not None:
            self.ledger.add_dropped(DropReason.OVERTAKEN, 1)
        elif was_dirty:
            self.ledger.add_due(1)
            self.ledger.add_dropped(DropReason.OVERTAKEN, 1)

    def forget_all(self) -> None:
        """It is not known which GPU blocks were reused: trust none."""
        for block_id in {*self._blocks.ids(), *self._copying}:
            self.forget(block_id)

    def plan(self, demand: StepDemand) -> list[CopyJob]:
        """Make what is due due, and begin as many copies as the bound allows."""
        self.give_up_overdue()
        for block_id in self._policy.due_blocks(self._pool, self._blocks, demand):
            block = self._blocks.get(block_id)
            if block is not None and self._blocks.is_dirty(block_id):
                self._make_due(block)
        return self._begin_due(self._max_inflight)

    def rescue(self, block_ids: Sequence[int]) -> tuple[list[CopyJob], tuple[int, ...]]:
        """These are reused in this step: begin to store what they hold; the jobs that read them, which the engine waits
        for before it writes them."""
        for block_id in block_ids:
            block = self._blocks.get(block_id)
            if block is not None and self._blocks.is_dirty(block_id):
                self._make_due(block)
        jobs, reused = self._begin_due(len(self._due) + len(self._copying)), set(block_ids)
        fence: list[int] = []
        for job_id, job in self._jobs.items():
            fenced = [item for item in job.blocks if item.block.block_id in reused]
            for item in fenced:
                item.is_fenced = True
            fence += [job_id] if fenced else []
        return jobs, tuple(fence)

    def _begin_due(self, max_copying: int) -> list[CopyJob]:
        """Begin copies, prefix before tail, until so many are under way, or slots are yet to come."""
        begun: list[Copying] = []
        while self._due and len(self._copying) < max_copying and not self._abandoned:
            block_id, block = next(iter(self._due.items()))
            reservation = self._attempt("reserve", self._reserve, block)
            if reservation is DropReason.HOST_FULL and self.room.note_full():
                break
            del self._due[block_id]
            copying = self._begin(block, reservation)
            if copying is not None:
                begun.append(copying)
        size = blocks_per_job(self._space.block_bytes)
        return [self._job(begun[start : start + size]) for start in range(0, len(begun), size)]

    def give_up_overdue(self) -> float | None:
        """Give up copies that were not told over in time, oldest first; when the next one's time is over, if any."""
        now = self._clock.now()
        if now < self._seen_at:  # the clock went back: none waits for longer than if it began now
            for job in self._jobs.values():
                job.begun_at = min(job.begun_at, now)
        self._seen_at = now
        while self._jobs:
            job_id, job = next(iter(self._jobs.items()))
            if now < job.begun_at + COPY_TIMEOUT_S:
                return job.begun_at + COPY_TIMEOUT_S
            del self._jobs[job_id]
            self._abandoned[job_id] = job.blocks
            self._release(job.blocks)
            self.ledger.add_dropped(DropReason.COPY_TIMEOUT, len(job.blocks))
            logger.warning(
                "a store of %d blocks has not ended in %.0f s and is given up; its slots stay leased, and nothing else "
                "is stored, until it ends",
                len(job.blocks),
                now - job.begun_at,
            )
        return None

    def begin_flush(self) -> None:
        """Until `end_flush` a block is stored once, though it leaves host memory again for a lower tier meanwhile."""
        self._flushed = set()

    def end_flush(self) -> None:
        self._flushed = None

    @property
    def num_unflushed(self) -> int:
        """Dirty blocks that this flush has not stored."""
        return len(self._unflushed())

    def make_all_due(self) -> None:
        """Whatever the flush has not stored is due, wherever it stands."""
        for block in self._unflushed():
            if self._blocks.is_dirty(block.block_id):
                self._make_due(block)

    def _unflushed(self) -> list[PublishedBlock]:
        dirty = [self._blocks.get(block_id) for block_id in self._blocks.dirty_ids()]
        return [block for block in dirty if block is not None and block.digest not in (self._flushed or ())]

    def complete(self, result: CopyResult) -> None:
        """A job of ours ended: commit what was copied, prefix first, drop the rest, unpin all."""
        if result.job_id in self._abandoned:
            self._end_abandoned(self._abandoned.pop(result.job_id))
            return
        copying = self._jobs.pop(result.job_id).blocks
        verdicts = result.verdicts(len(copying))
        reason = FAILURE_TO_REASON.get(result.failure or CopyFailure.RAISED, DropReason.COPY_FAILED)
        self._release(copying)
        wanted: list[Copying] = []
        for item, copied in zip(copying, verdicts, strict=True):
            check = item.why_not_stored
            why_not = self._attempt("commit", check, self._space.digest, self._reachable) if copied else reason
            if why_not is None:
                wanted.append(item)
            else:  # at once: blocks that continue one on its way count as reachable
                self._lose(item, why_not)
        are_stored = self._attempt("commit", self._commit, wanted) if wanted else ()
        for place, item in enumerate(wanted):
            if isinstance(are_stored, DropReason) or not are_stored[place]:
                self._lose(item, are_stored if isinstance(are_stored, DropReason) else DropReason.RESET)
            else:
                self.ledger.add_stored(1)
                if self._flushed is not None:
                    self._flushed.add(item.block.digest)

    def mark_evicted(self, digests: Sequence[BlockDigest]) -> None:
        """The store gave these up; where the GPU pool still holds them they are dirty again.

        They wait for the queue's next change: were they looked for at once, an idle engine over a small host pool would
        store for ever, each block in the place of another.
        """
        for digest in digests:
            block = self._blocks.find(digest)
            if block is not None and not self._is_pending(block) and not self._space.holds(digest):
                self._blocks.mark_dirty(digest)

    def reset(self) -> None:
        """Forget every block. Copies under way end as RESET when their commit is refused."""
        self._drop_due(DropReason.RESET)
        self._blocks.clear()
        self._lost.clear()
        self._missing.clear()

    def close(self) -> int:
        """Drop what is due and give every slot back.

        Returns the blocks whose copies have not ended: they are dropped too, but stay pinned and their slots leased.
        """
        self._drop_due(DropReason.CLOSED)
        num_stuck = len(self._copying)
        self.ledger.add_dropped(DropReason.CLOSED, num_stuck)
        num_stuck += sum(map(len, self._abandoned.values()))
        self._jobs.clear()
        self._copying.clear()
        self._abandoned.clear()
        if not num_stuck:
            self._owner.close()
        return num_stuck

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        self.ledger.check_integrity()
        copying = sum(len(job.blocks) for job in self._jobs.values())
        if copying != len(self._copying) or copying + len(self._due) != self.ledger.snapshot().pending:
            raise IntegrityError(
                f"stores: {copying} copying ({len(self._copying)} blocks) and {len(self._due)} due are not the "
                f"ledger's {self.ledger.snapshot().pending} pending"
            )

    def _make_due(self, block: PublishedBlock) -> None:
        """Queue a dirty block behind its unstored ancestors, so that no tail is stored before its prefix.

        The walk ends at the first ancestor that is stored or on its way, so a block is walked over once in its life. A
        clean ancestor that the store no longer holds (another engine may share it) is stored again.
        """
        chain: dict[int, PublishedBlock] = {}
        link: PublishedBlock | None = block
        missing: BlockDigest | None = None
        while link is not None and link.block_id not in chain and self._is_unstored(link):
            chain[link.block_id] = link
            missing = link.parent
            link = self._blocks.find(link.parent) if link.parent is not None else None
        for block_id in chain:
            self._blocks.mark_clean(block_id)
        self.ledger.add_due(len(chain))
        if self._is_lost(link, missing):
            self._lost |= chain.keys()
            self.ledger.add_dropped(DropReason.ORPHAN, len(chain))
        else:
            self._due.update(reversed(chain.items()))

    def _is_lost(self, link: PublishedBlock | None, missing: BlockDigest | None) -> bool:
        """Whether a walk that ended at `link`, or without one at the digest `missing`, leads to no stored block."""
        if link is not None:
            return link.block_id in self._lost
        if missing is None or self._space.reaches(missing):
            return False
        if len(self._missing) >= self._pool.num_blocks:
            self._lost.clear()
            self._missing.clear()
        self._missing.add(missing)
        return True

    def _is_pending(self, block: PublishedBlock) -> bool:
        return block.block_id in self._due or block.block_id in self._copying

    def _is_unstored(self, block: PublishedBlock) -> bool:
        if self._is_pending(block) or block.block_id in self._lost or block.digest in (self._flushed or ()):
            return False
        return self._blocks.is_dirty(block.block_id) or not self._space.holds(block.digest)

    def _begin(self, block: PublishedBlock, reservation: Reservation | DropReason) -> Copying | None:
        """Pin the source, or drop the block with its reason."""
        if not isinstance(reservation, DropReason):
            self.room.note_room()
            pinned = self._attempt("pin", self._pool.pin, block.block_id, PIN_HOLDER)
            if pinned is None:
                copying = self._copying[block.block_id] = Copying(block, reservation)
                return copying
            self._attempt("abort", self._space.abort, reservation)
            reservation = pinned
        self._drop(block, reservation)
        return None

    def _reserve(self, block: PublishedBlock) -> Reservation | DropReason:
        if not self._reachable(block.parent):
            return DropReason.ORPHAN
        return self._space.reserve(block.digest, block.parent, self._owner, block.tenant, block.ttl_s)

    def _release(self, copying: Sequence[Copying]) -> None:
        for item in copying:
            del self._copying[item.block.block_id]
            self._attempt("unpin", self._pool.unpin, item.block.block_id)

    def _end_abandoned(self, copying: Sequence[Copying]) -> None:
        """The copy ended after all: its slots are free, and what the GPU pool still holds may be stored again."""
        for item in copying:
            self._attempt("abort", self._space.abort, item.reservation)
            if self._blocks.get(item.block.block_id) == item.block and not self._is_pending(item.block):
                self._blocks.mark_dirty(item.block.digest)

    def _commit(self, copied: Sequence[Copying]) -> list[bool]:
        """Have all of them found at once; False for each that was void by then."""
        are_stored = self._space.commit([item.reservation for item in copied])
        if len(are_stored) != len(copied):
            raise IntegrityError(f"{len(are_stored)} outcomes for {len(copied)} blocks")
        return are_stored

    def _lose(self, item: Copying, reason: DropReason) -> None:
        self._attempt("abort", self._space.abort, item.reservation)
        self._drop(item.block, reason)

    def _attempt(self, where: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | DropReason:
        """What the call returns, or TIER_ERROR whatever it raises: then the block is just not stored."""
        try:
            return call(*args, **kwargs)
        except CAUGHT as error:
            self._report(where, error)
            return DropReason.TIER_ERROR

    def _reachable(self, parent: BlockDigest | None) -> bool:
        return parent is None or self._space.reaches(parent)

    def _job(self, copying: list[Copying]) -> CopyJob:
        job_id = next(self._job_ids)
        self._jobs[job_id] = StoreJob(copying, self._clock.now())
        block_ids = tuple(item.block.block_id for item in copying)
        return CopyJob(job_id, CopyDirection.STORE, block_ids, tuple(item.reservation.lease.offset for item in copying))

    def _drop(self, block: PublishedBlock, reason: DropReason) -> None:
        """Count a drop. A block that the GPU pool still holds, and whose prefix can be stored, is dirty again."""
        self.ledger.add_dropped(reason, 1)
        if reason not in TRIED_AGAIN or self._blocks.get(block.block_id) != block:
            return
        if reason is not DropReason.ORPHAN or (block.parent is not None and self._blocks.find(block.parent)):
            self._blocks.mark_dirty(block.digest)

    def _drop_due(self, reason: DropReason) -> None:
        self.ledger.add_dropped(reason, len(self._due))
        self._due.clear()
