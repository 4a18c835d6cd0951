"""A stage: one request's blocks on their way from lower tiers to host memory, and the reads it shares with others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.clock import Clock
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier.located import Source
from kvtier.pool import Lease, Owner
from kvtier.reasons import MissReason
from kvtier.tiers.base import ReadOutcome
from kvtier.tiers.reservation import Reservation

__all__ = ["OUTCOME_TO_REASON", "ReadBudget", "Stage", "StageRead", "unasked_bytes"]

OUTCOME_TO_REASON = {
    ReadOutcome.MISS: MissReason.EVICTED,
    ReadOutcome.DAMAGED: MissReason.DAMAGED,
    ReadOutcome.ERROR: MissReason.TIER_ERROR,
    ReadOutcome.REFUSED: MissReason.TIER_DOWN,
}


OF_THE_TIER = frozenset(OUTCOME_TO_REASON.values())
"""Why a read came to nothing where another tier may do better."""


class StageKeeper(Protocol):
    """What a stage asks of whoever began it."""

    def poll(self, stage: Stage) -> bool:
        """See `Stage.poll`."""

    def close_stage(self, stage: Stage) -> None:
        """See `Stage.close`."""


@dataclass(eq=False, slots=True)
class StageRead:
    """One block being read, for every stage that wants it."""

    namespace: bytes
    digest: BlockDigest
    parent: BlockDigest | None
    nbytes: int
    source: Source
    waiters: list[tuple[Stage, int]]
    num_leased: int = 0
    """Of the waiters, in their order, those that were given their lease."""
    is_queued: bool = True
    """No thread of the tier has begun it: whoever clears this ends it."""
    is_read: bool = False
    num_live: int = 0
    """Of the waiters, those whose stage has not ended."""
    is_replaced: bool = False
    """The block is read otherwise since, for its tier seemed to give nothing back: what comes of this is dropped."""
    is_abandoned: bool = False
    """Nobody waited for it at some time since: it counts no more against what stages may have under way."""
    reservation: Reservation | None = None
    guard: Lease | None = None
    """Keeps the block in host memory until every waiter has its own lease."""
    failure: MissReason | None = None
    awaits: StageRead | None = None
    """It ended, and comes to host memory behind this one."""
    after: list[StageRead] = field(default_factory=list)
    """Reads of blocks that follow this one's, which ended before it."""

    def note_outcome(self, outcome: ReadOutcome) -> None:
        """What the tier answered."""
        ok = outcome is ReadOutcome.OK
        self.failure = None if ok else OUTCOME_TO_REASON.get(outcome, MissReason.TIER_ERROR)


LOST_S = 1.0
"""Without the end of any read, after which what was abandoned is taken for lost."""


class ReadBudget:
    """Bytes of one tier's reads under way: those that stages wait for within one bound, abandoned ones counted against
    another of the same size, so that what a device never gives back does not keep everybody else waiting.

    Mutable state: the sums, and when a read last ended, guarded by the stager's lock.
    """

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._moved_at = clock.now()
        self.live_bytes = 0
        self.abandoned_bytes = 0

    @property
    def is_still(self) -> bool:
        """None of its reads has ended of late."""
        return self._clock.now() - self._moved_at >= LOST_S

    @property
    def is_lost(self) -> bool:
        """So much was abandoned that nothing more is begun, and none of it comes back: a tier that is only slow gives
        back."""
        return self.abandoned_bytes > self._max_bytes and self.is_still

    def can_begin(self, nbytes: int) -> bool:
        """One alone may, however large."""
        has_room = not self.live_bytes or self.live_bytes + nbytes <= self._max_bytes
        return has_room and self.abandoned_bytes <= self._max_bytes

    def begin(self, read: StageRead) -> None:
        if not (self.live_bytes or self.abandoned_bytes):
            self._moved_at = self._clock.now()
        self.live_bytes += read.nbytes

    def leave(self, read: StageRead) -> None:
        """One stage that waited for it ended. It stays abandoned when another comes: the sum is bounded either way."""
        read.num_live -= 1
        if not (read.num_live or read.is_abandoned or read.is_read):
            read.is_abandoned = True
            self.live_bytes -= read.nbytes
            self.abandoned_bytes += read.nbytes

    def end(self, read: StageRead) -> None:
        read.is_read = True
        self._moved_at = self._clock.now()
        if read.is_abandoned:
            self.abandoned_bytes -= read.nbytes
        else:
            self.live_bytes -= read.nbytes

    def check_integrity(self, reads: Iterable[StageRead]) -> None:
        """Raises IntegrityError unless the sums are those of these reads, and only live stages' are live."""
        live = abandoned = 0
        for read in reads:
            num_live = sum(not stage.done for stage, _ in read.waiters)
            if read.num_live != num_live or not (num_live or read.is_abandoned or read.is_read):
                raise IntegrityError(f"staging: {num_live} stages wait for a read, {read.num_live} are counted")
            if not read.is_read:
                live += 0 if read.is_abandoned else read.nbytes
                abandoned += read.nbytes if read.is_abandoned else 0
        if (live, abandoned) != (self.live_bytes, self.abandoned_bytes):
            raise IntegrityError(
                f"staging: {self.live_bytes} and {self.abandoned_bytes} bytes counted under way, "
                f"{live} and {abandoned} are"
            )


class Stage:
    """One request's blocks on their way to host memory, and the leases that keep them there.

    Ends by itself when all arrived, at the first block that did not, or at its deadline, whichever comes first; what
    arrived by then stays leased until `close`. Polled, never awaited. Any thread.

    tiers: names of the lower tiers that it reads from.

    Mutable state: everything with an underscore, guarded by the stager's lock; `done` may be read without.
    """

    __slots__ = (
        "_arrived",
        "_begun_at",
        "_deadline",
        "_digests",
        "_done",
        "_end",
        "_ended_at",
        "_failed_tier",
        "_first",
        "_keeper",
        "_left",
        "_miss",
        "_namespace",
        "_nbytes",
        "_next",
        "_owner",
        "_parent",
        "_pending",
        "_sources",
        "client",
        "name",
        "tenant",
        "tiers",
    )

    def __init__(
        self,
        keeper: StageKeeper,
        name: str,
        namespace: bytes,
        digests: Sequence[BlockDigest],
        parent: BlockDigest | None,
        nbytes: int,
        sources: list[Source | None],
        begun_at: float,
        deadline: float,
        owner: Owner,
        num_held: int,
        tenant: str = "",
        client: str = "",
    ) -> None:
        """sources: where each block is to be read from; None for one that is in host memory, or coming there.

        num_held: leading blocks that are leased already.
        """
        self.name = name
        self.tenant = tenant
        self.client = client
        self._keeper = keeper
        self._namespace = namespace
        self._digests = digests
        self._parent = parent
        self._nbytes = nbytes
        self._sources = sources
        self._left = Counter(source for source in sources if source is not None)
        self.tiers = sorted(source.tier.name for source in self._left)
        self._begun_at = begun_at
        self._ended_at = begun_at
        self._deadline = deadline
        self._owner = owner
        self._next = num_held
        self._end = len(digests)
        self._pending: set[int] = set()
        self._first = num_held  # no block before this one is pending
        self._arrived: Counter[str] = Counter()
        self._miss: MissReason | None = None
        self._failed_tier: str | None = None
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    @property
    def miss(self) -> MissReason | None:
        """Why it ended short; None while it runs, and when every block came."""
        return self._miss

    @property
    def failed_tier(self) -> str | None:
        """The tier that did not give the block at which it ended short; None where that is no tier's fault."""
        return self._failed_tier

    @property
    def digests(self) -> Sequence[BlockDigest]:
        """Blocks that were to be had when it began, host memory's included."""
        return self._digests

    @property
    def num_blocks(self) -> int:
        return len(self._digests)

    @property
    def num_end(self) -> int:
        """Blocks before the first that failed."""
        return self._end

    @property
    def arrived(self) -> Mapping[str, int]:
        """Blocks that it brought to host memory, by the tier that held them."""
        return dict(self._arrived)

    @property
    def seconds(self) -> float:
        """How long it ran, once it is done."""
        return self._ended_at - self._begun_at

    def poll(self) -> bool:
        """True when it is done; ends it when its time is over or the tier that it waits for is sick."""
        return self._done or self._keeper.poll(self)

    def stop(self) -> None:
        """Wait no more, as at its deadline: what came stays leased until `close`."""
        self._deadline = self._begun_at
        self.poll()

    def why_over(self, now: float) -> MissReason | None:
        """Why it waits no longer: its time is over, as for a clock that went back, which would make it wait far longer;
        or the tier that it waits for is sick."""
        if not self._begun_at <= now < self._deadline:
            return MissReason.TIMEOUT
        return None if all(source.is_available for source in list(self._left)) else MissReason.TIER_DOWN

    def first_pending(self) -> int:
        """The first block that it waits for, or the first not asked for; under the stager's lock. O(1) amortised, for
        blocks become pending in order."""
        while self._first < self._next and self._first not in self._pending:
            self._first += 1
        return self._first

    def join(self, read: StageRead) -> None:
        """Wait for a read of its next block: of that read's tier, whichever it would have asked. Under the stager's
        lock."""
        read.waiters.append((self, self._next))
        read.num_live += 1
        self._pending.add(self._next)
        own = self._sources[self._next]
        if own is not read.source:
            self._sources[self._next] = read.source
            self._left[read.source] += 1
            if own is not None:
                self._leave(own)

    def _leave(self, source: Source) -> None:
        self._left[source] -= 1
        if not self._left[source]:
            del self._left[source]

    def note_end(self, read: StageRead, index: int) -> None:
        """The read of its block at `index` ended; under the stager's lock."""
        self._pending.discard(index)
        source = self._sources[index]
        if source is not None:
            self._leave(source)
        if self._done:
            return
        if read.failure is not None and index < self._end:
            self._end, self._miss = index, read.failure
            self._failed_tier = read.source.name if read.failure in OF_THE_TIER else None
        elif read.failure is None and read.reservation is not None:
            self._arrived[read.source.tier.name] += 1

    def close(self) -> None:
        """Let go of what arrived and want no more. Idempotent. Reads under way end on their own, for others."""
        self._keeper.close_stage(self)


def unasked_bytes(stages: Iterable[Stage], source: Source) -> int:
    """Bytes that these stages will ask one tier for; under the stager's lock. Those that begin with the same block
    share their reads: the longest counts."""
    ahead: dict[tuple[bytes, BlockDigest], int] = {}
    for stage in stages:
        first = (stage._namespace, stage._digests[0])
        unasked = max(0, stage._left[source] - len(stage._pending)) * stage._nbytes
        ahead[first] = max(ahead.get(first, 0), unasked)
    return sum(ahead.values())
