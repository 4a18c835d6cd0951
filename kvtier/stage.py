"""A stage: one request's blocks on their way from lower tiers to host memory, and the reads it shares with others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.errors import IntegrityError
from kvtier.executor import Executor
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, make_key
from kvtier.pool import Lease, Owner
from kvtier.reasons import MissReason
from kvtier.tiers.base import ReadOutcome, Tier
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation

__all__ = [
    "OUTCOME_TO_REASON",
    "Located",
    "ReadBudget",
    "Source",
    "Stage",
    "StageRead",
    "lease_held",
    "locate",
    "unasked_bytes",
]

OUTCOME_TO_REASON = {
    ReadOutcome.MISS: MissReason.EVICTED,
    ReadOutcome.DAMAGED: MissReason.DAMAGED,
    ReadOutcome.ERROR: MissReason.TIER_ERROR,
    ReadOutcome.REFUSED: MissReason.TIER_DOWN,
}

FIRST_LOOK = 64
"""Blocks asked for first; each next time four times as many, so that a prompt of which nothing is here costs little."""


class Source(Protocol):
    """A lower tier as staging needs it: the tier, its threads, and whether it can be asked now."""

    @property
    def tier(self) -> Tier: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def is_available(self) -> bool:
        """Pure and quick: the engine's thread asks."""


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
    is_abandoned: bool = False
    """Nobody waited for it at some time since: it counts no more against what stages may have under way."""
    reservation: Reservation | None = None
    guard: Lease | None = None
    """Keeps the block in host memory until every waiter has its own lease."""
    failure: MissReason | None = None
    after: list[StageRead] = field(default_factory=list)
    """Reads of blocks that follow this one's, which ended before it."""

    def note_outcome(self, outcome: ReadOutcome) -> None:
        """What the tier answered."""
        ok = outcome is ReadOutcome.OK
        self.failure = None if ok else OUTCOME_TO_REASON.get(outcome, MissReason.TIER_ERROR)


class ReadBudget:
    """Bytes of reads under way: those that stages wait for within one bound, abandoned ones counted against another of
    the same size, so that what a device never gives back does not keep everybody else waiting.

    Mutable state: the sums, guarded by the stager's lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes_of: Counter[Source] = Counter()
        self.live_bytes = 0
        self.abandoned_bytes = 0

    def bytes_of(self, source: Source) -> int:
        """Bytes that one tier is reading, for whomever."""
        return self._bytes_of[source]

    @property
    def is_lost(self) -> bool:
        """So much was abandoned and has not come back that nothing more is begun."""
        return self.abandoned_bytes > self._max_bytes

    def can_begin(self, nbytes: int) -> bool:
        """One alone may, however large."""
        return not self.is_lost and (not self.live_bytes or self.live_bytes + nbytes <= self._max_bytes)

    def begin(self, read: StageRead) -> None:
        self._bytes_of[read.source] += read.nbytes
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
        self._bytes_of[read.source] -= read.nbytes
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
        if (live, abandoned) != (self.live_bytes, self.abandoned_bytes) or live + abandoned != self._bytes_of.total():
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
        "name",
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
    ) -> None:
        """sources: where each block is to be read from; None for one that is in host memory, or coming there.

        num_held: leading blocks that are leased already.
        """
        self.name = name
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
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    @property
    def miss(self) -> MissReason | None:
        """Why it ended short; None while it runs, and when every block came."""
        return self._miss

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

    def note_end(self, read: StageRead, index: int) -> None:
        """The read of its block at `index` ended; under the stager's lock."""
        self._pending.discard(index)
        source = self._sources[index]
        if source is not None:
            self._left[source] -= 1
            if not self._left[source]:
                del self._left[source]
        if self._done:
            return
        if read.failure is not None and index < self._end:
            self._end, self._miss = index, read.failure
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


@dataclass(frozen=True, slots=True)
class Located:
    """Where the leading blocks of a prompt were when it was looked up: what a stage can begin with.

    sources: for each the lower tier to read it from, or None: it is in host memory, or somebody copies it there.
    num_host: leading blocks that were in host memory.
    """

    digests: Sequence[BlockDigest]
    sources: Sequence[Source | None]
    num_host: int

    def first(self, count: int) -> Located:
        return Located(self.digests[:count], self.sources[:count], min(self.num_host, count))


def locate(
    host: HostTier,
    lower: Sequence[Source],
    namespace: bytes,
    digests: Sequence[BlockDigest],
    max_reads: int,
    max_leased: int | None = None,
) -> Located:
    """The leading blocks that some tier holds. Ends before more than `max_reads` would have to be read, and where any
    is, behind `max_leased` blocks."""
    num_host = host.committed_run(namespace, digests)
    found: list[Source | None] = [None] * num_host
    step, num_reads, num_gone, is_full = FIRST_LOOK, 0, 0, False
    while not (is_full or num_gone) and (asked := digests[len(found) : len(found) + step]):
        here = _locate(host, lower, namespace, asked)
        for source in here:
            num_reads += source is not None
            is_over = max_leased is not None and len(found) >= max_leased
            is_full = num_reads > max_reads or (num_reads > 0 and is_over)
            if is_full:
                break
            found.append(source)
        num_gone = len(asked) - len(here)
        step *= 4
    return Located(digests[: len(found)], found, num_host)


def _locate(
    host: HostTier, lower: Sequence[Source], namespace: bytes, digests: Sequence[BlockDigest]
) -> list[Source | None]:
    states = host.states(namespace, digests)
    missing = [index for index, state in enumerate(states) if state is not BlockState.COMMITTED]
    holders: dict[int, Source] = {}
    for source in lower:
        unclaimed = [index for index in missing if index not in holders]
        if not unclaimed or not source.is_available:
            continue
        held = source.tier.contains([make_key(namespace, digests[index]) for index in unclaimed])
        holders |= {index: source for index, is_held in zip(unclaimed, held, strict=True) if is_held}
    gaps = (index for index in missing if states[index] is None and index not in holders)
    return [holders.get(index) for index in range(next(gaps, len(digests)))]


def lease_held(
    host: HostTier,
    namespace: bytes,
    digests: Sequence[BlockDigest],
    sources: Sequence[Source | None],
    owner: Owner,
) -> tuple[int, int]:
    """Lease what host memory holds of blocks that were located: how many leading ones it does, and how many blocks
    there are to be had: fewer than were located where one was evicted since."""
    num_leading = next(index for index, source in enumerate(sources) if source is not None)
    num_held = len(host.lease_run(namespace, digests[:num_leading], owner))
    rest = [index for index in range(num_held, len(sources)) if sources[index] is None]
    held = host.lease_blocks([(namespace, digests[index]) for index in rest], owner)
    gone = [index for index, block in zip(rest, held, strict=True) if block is None]
    states = host.states(namespace, [digests[index] for index in gone])
    evicted = (index for index, state in zip(gone, states, strict=True) if state is None)
    return num_held, next(evicted, len(sources))
