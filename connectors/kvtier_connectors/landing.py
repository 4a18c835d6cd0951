"""The way up, second stage: from leased slots into the engine's blocks, with a verdict per block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier.pool import Lease, Owner
from kvtier.store import Space
from kvtier_connectors.contract import BlockPoolView, CopyDirection, CopyJob, CopyResult
from kvtier_connectors.copies import blocks_per_job

__all__ = ["Landed", "Landing", "LandingFlow"]


def holder_name(request_id: str) -> str:
    """Who keeps slots and blocks, for messages."""
    return f"restore of {request_id}"


@dataclass(eq=False, slots=True)
class Landing:
    """One request's restore. Lives until its last copy ended, even when the request ended first."""

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]
    space_digest: bytes | None
    """The namespace at the beginning; another one at the end means a reset, which voids the landing, as None does."""
    owner: Owner
    copied: list[bool]
    jobs: dict[int, slice] = field(default_factory=dict)
    """Jobs still running, and which of `block_ids` they write."""
    seconds: float = 0.0
    """What its copies took that have ended."""
    is_abandoned: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Landed:
    """What came of a landing: its first `num_blocks` blocks hold their bytes. is_void: a reset came first."""

    landing: Landing
    num_blocks: int
    is_void: bool


MAX_JOBS = 128
"""Jobs that the worker has at once: half of what its queue takes, the rest is for stores."""


class LandingFlow:
    """Owns the restores under way: their leases and the pins on their destinations. Engine's thread only.

    A landing begins whole, however long. The worker is given as much at a time as the bounds allow.
    """

    def __init__(self, space: Space, pool: BlockPoolView, job_ids: Iterator[int], max_inflight_blocks: int) -> None:
        self._space = space
        self._pool = pool
        self._job_ids = job_ids
        self._max_inflight = max_inflight_blocks
        self._by_job: dict[int, Landing] = {}
        self._queued: deque[CopyJob] = deque()
        self._given: dict[int, int] = {}  # jobs that the worker has, and how many blocks each copies
        self._num_given = 0
        self._num_copying = 0
        self._num_abandoned = 0

    @property
    def num_awaited(self) -> int:
        """Of the blocks being copied, those whose end somebody waits for."""
        return self._num_copying - self._num_abandoned

    @property
    def num_copying(self) -> int:
        return self._num_copying

    def knows_job(self, job_id: int) -> bool:
        return job_id in self._by_job

    def begin(
        self, request_id: str, first_block: int, digests: Sequence[BlockDigest], block_ids: Sequence[int]
    ) -> Landing | None:
        """Lease the slots, pin the destinations, queue the copies.

        None, and nothing changed, if no block is held now.
        """
        wanted = min(len(block_ids), len(digests))
        space_digest = self._space.digest  # before the leases: a reset between the two voids them
        owner = self._space.owner(holder_name(request_id))
        try:
            leases = self._space.lease(digests[:wanted], owner)
        except BaseException:
            owner.close()
            raise
        if not leases:
            owner.close()
            return None
        landing = Landing(
            request_id=request_id,
            first_block=first_block,
            block_ids=tuple(block_ids[: len(leases)]),
            space_digest=space_digest,
            owner=owner,
            copied=[False] * len(leases),
        )
        self._pin(landing)
        self._num_copying += len(leases)
        self._queue(landing, leases)
        return landing

    def plan(self) -> list[CopyJob]:
        """What the worker should have now, first come first: as much as the bounds leave, and one job in any case."""
        jobs: list[CopyJob] = []
        while self._queued and self._may_give(self._queued[0]):
            job = self._queued.popleft()
            self._given[job.job_id] = len(job.block_ids)
            self._num_given += len(job.block_ids)
            jobs.append(job)
        return jobs

    def _may_give(self, job: CopyJob) -> bool:
        has_room = len(self._given) < MAX_JOBS and self._num_given + len(job.block_ids) <= self._max_inflight
        return has_room or not self._given

    def complete(self, result: CopyResult) -> Landed | None:
        """A job ended; what came of the landing once it was its last: the blocks up to the first without a verdict."""
        landing = self._by_job[result.job_id]
        part = landing.jobs[result.job_id]
        landing.copied[part] = result.verdicts(part.stop - part.start)
        landing.seconds += result.seconds
        self._num_given -= self._given.pop(result.job_id, 0)
        del self._by_job[result.job_id], landing.jobs[result.job_id]
        if landing.jobs:
            return None
        self._num_copying -= landing.num_blocks
        self._num_abandoned -= landing.num_blocks if landing.is_abandoned else 0
        is_void = landing.space_digest != self._space.digest
        return Landed(landing, 0 if is_void else [*landing.copied, False].index(False), is_void)

    def release(self, landing: Landing) -> None:
        """After its outcome: nothing writes the destinations or reads the slots any more."""
        try:
            for block_id in landing.block_ids:
                self._pool.unpin(block_id)
        finally:
            landing.owner.close()

    def void(self) -> None:
        """Let the restores under way come to nothing."""
        for landing in self._by_job.values():
            landing.space_digest = None

    def abandon(self, landing: Landing) -> None:
        """Its time is over, and nobody waits for its copies any more; they stay accounted for until they end."""
        landing.is_abandoned = True
        self._num_abandoned += landing.num_blocks

    def take_unplanned(self) -> list[int]:
        """The jobs that no plan has named yet: nobody copies them, and now nobody will."""
        jobs, self._queued = self._queued, deque()
        return [job.job_id for job in jobs]

    def close(self) -> int:
        """Let go of landings whose copies have not ended; returns their blocks, which stay pinned and leased."""
        num_stuck = self._num_copying
        self._by_job.clear()
        self._given.clear()
        self._num_copying = self._num_given = self._num_abandoned = 0
        return num_stuck

    def check_integrity(self) -> None:
        landings = {id(landing): landing for landing in self._by_job.values()}
        if sum(landing.num_blocks for landing in landings.values()) != self._num_copying:
            raise IntegrityError(
                f"restores: {self._num_copying} blocks counted as landing, but their jobs say otherwise"
            )
        if sum(self._given.values()) != self._num_given or not self._given.keys() <= self._by_job.keys():
            raise IntegrityError(f"restores: {self._num_given} blocks counted as given to the worker, which are not")

    def _pin(self, landing: Landing) -> None:
        pinned: list[int] = []
        try:
            for block_id in landing.block_ids:
                self._pool.pin(block_id, holder_name(landing.request_id))
                pinned.append(block_id)
        except BaseException:
            landing.owner.close()
            for block_id in pinned:
                self._pool.unpin(block_id)
            raise

    def _queue(self, landing: Landing, leases: Sequence[Lease]) -> None:
        size = blocks_per_job(self._space.block_bytes)
        for start in range(0, len(leases), size):
            part = slice(start, min(start + size, len(leases)))
            job_id = next(self._job_ids)
            offsets = tuple(lease.offset for lease in leases[part])
            landing.jobs[job_id] = part
            self._by_job[job_id] = landing
            self._queued.append(CopyJob(job_id, CopyDirection.RESTORE, landing.block_ids[part], offsets))
