"""What kvtier counts, each event once.

Mutable counters inside, a frozen snapshot outside; `kvtier.families` makes metrics of the snapshot.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtier.errors import IntegrityError
from kvtier.reasons import DropReason, MissReason

__all__ = [
    "DiskStats",
    "Ledger",
    "LedgerSnapshot",
    "LowerStats",
    "RedisStats",
    "RemoteStats",
    "RestoreStatus",
    "RestoreTally",
    "ServerStats",
    "StatsSnapshot",
    "StoreCounters",
    "fields_of",
]


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Where every due block went: `due == stored + sum(dropped) + pending`. In blocks."""

    due: int
    """Blocks that were to be copied down."""
    stored: int
    """Copied and committed."""
    dropped: Mapping[DropReason, int]
    """Not stored, by reason; reasons with a count of 0 are absent."""
    pending: int
    """Being copied now."""


class Ledger:
    """Counts stores from due to stored or dropped. Owned by one thread; `snapshot` may be called from any.

    Mutable state: everything, guarded by `_lock`, so that the equation holds in every snapshot.
    """

    __slots__ = ("_dropped", "_due", "_lock", "_pending", "_stored")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due = 0
        self._stored = 0
        self._pending = 0
        self._dropped: Counter[DropReason] = Counter()

    def add_due(self, num_blocks: int) -> None:
        with self._lock:
            self._due += num_blocks
            self._pending += num_blocks

    def add_stored(self, num_blocks: int) -> None:
        with self._lock:
            self._pending -= num_blocks
            self._stored += num_blocks

    def add_dropped(self, reason: DropReason, num_blocks: int) -> None:
        if num_blocks:
            with self._lock:
                self._pending -= num_blocks
                self._dropped[reason] += num_blocks

    def snapshot(self) -> LedgerSnapshot:
        with self._lock:
            return LedgerSnapshot(self._due, self._stored, dict(self._dropped), self._pending)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless due = stored + dropped + pending and nothing is negative."""
        now = self.snapshot()
        if now.pending < 0 or now.due != now.stored + sum(now.dropped.values()) + now.pending:
            raise IntegrityError(f"ledger: due = stored + dropped + pending does not hold: {now}")


class StoreCounters:
    """The store's own events since it opened. Every reader and writer holds `lock`, so that a snapshot adds up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lookups = 0
        self.asked_blocks = 0
        self.hit_blocks = 0
        self.stored_blocks = 0
        self.stored_bytes = 0
        self.resets = 0
        self.hits: Counter[str] = Counter()
        self.misses: Counter[MissReason] = Counter()
        self.fallbacks: Counter[MissReason] = Counter()
        self.errors: Counter[str] = Counter()

    def add_lookup(self, asked: int, hit: int, miss: MissReason, tiers: Mapping[str, int]) -> Counter[str]:
        """One admission: `hit` of `asked` blocks are served, the others missed for one reason. tiers: who had them, as
        far as they go, in this order. Returns the served ones by tier."""
        hits: Counter[str] = Counter()
        left = hit
        for tier, num_blocks in tiers.items():
            if served := min(left, num_blocks):
                hits[tier] = served
                left -= served
        with self.lock:
            self.lookups += 1
            self.asked_blocks += asked
            self.hit_blocks += hit
            self.hits.update(hits)
            if asked > hit:
                self.misses[miss] += asked - hit
        return hits

    def add_absent(self, asked: int, absent: int) -> None:
        """A client was told that so many of these blocks are nowhere here: they are missed. It will come for the
        others, if there are any, and that is counted then."""
        if absent:
            with self.lock:
                self.lookups += absent == asked
                self.asked_blocks += absent
                self.misses[MissReason.ABSENT] += absent


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerStats:
    """One moment of a tier below host memory. Counters run from its opening."""

    blocks: int
    """Blocks there that can be read; of a remote tier those that this process stored, as far as it knows."""
    used_bytes: int
    """What these take, headers included; on disk of the file systems, spare segments included."""
    capacity_bytes: int
    """The most that it may hold: never passed."""
    reads: Mapping[str, int]
    """Blocks that were to be read, by outcome."""
    read_bytes: int
    """Bytes of blocks that were read well."""
    read_seconds: float
    """Time inside the tier, all threads together."""
    writes: Mapping[str, int]
    """Blocks that were to be written, by outcome."""
    written_bytes: int
    """Bytes of blocks that were stored."""
    write_seconds: float
    """As `read_seconds`."""
    errors: Mapping[str, int]
    """Exceptions of the tier turned into misses and drops, by type."""
    ledger: LedgerSnapshot
    """Where every block went that was to be written."""
    queued_bytes: int
    """Blocks that wait to be written, or are being written: host memory that cannot be evicted now."""
    staging_bytes: int
    """Bytes of host memory that reads of it may write now."""
    available: int
    """1 while it may be asked, 0 while its breaker is open."""
    breaker_opened: int
    """Times that it was found sick."""
    breaker_refused: int
    """Calls refused meanwhile."""


def fields_of(stats: LowerStats) -> dict[str, Any]:
    """Its fields, to make of it the counts of a certain tier."""
    return {field.name: getattr(stats, field.name) for field in fields(stats)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats(LowerStats):
    """One moment of the disk tier."""

    device_written_bytes: int
    """All that was written to the devices: blocks, headers, indices, re-admissions."""
    evicted_blocks: int
    """Blocks that went with their segment."""
    readmitted_blocks: int
    """Blocks of such segments that were used, and so written again."""
    recovered_blocks: int
    """Blocks found at start."""
    damaged_blocks: int
    """Blocks whose bytes were not those written; each forgotten at once."""
    reclaimed_files: int
    """Leftovers of crashes removed at start."""
    modes: Mapping[str, str]
    """By directory: `direct`, or `buffered` where the file system refuses direct I/O."""
    read_only: Mapping[str, str]
    """Directories that take no writes now, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats(LowerStats):
    """One moment of a tier of another machine."""

    questions: Mapping[str, int]
    """Questions about a prompt's blocks, by how they ended: `answered`, or why not."""
    known_blocks: int
    """Blocks that it is believed to hold without being asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisStats(RemoteStats):
    """One moment of the Redis tier."""

    damaged_blocks: int
    """Values that were not what had been written; each removed at once."""
    connections: int
    """Connections open now."""
    connects: int
    """Connections made."""
    disconnects: int
    """Connections closed because something was wrong with them."""
    redirects: int
    """Blocks found on another node than was thought: a slot that moved."""
    refusals: Mapping[str, int]
    """Replies that refused something, by their first word."""
    nodes: Mapping[str, str]
    """Servers, by address, and what each is."""
    server_used_bytes: int
    """What the servers say that they use, for whomever, as last asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats(RemoteStats):
    """One moment of the tier over a kvtier-server."""

    damaged_blocks: int
    """Blocks that were not what had been stored; the server was told to forget each."""
    connections: int
    """Connections open now."""
    connects: int
    """Connections made."""
    disconnects: int
    """Connections closed because something was wrong with them."""
    refusals: Mapping[str, int]
    """Calls that came to nothing, by the server's code for it, or timeout, connection or protocol."""
    mapped_bytes: int
    """Memory of the server that is mapped here."""


@dataclass(frozen=True, slots=True)
class RestoreStatus:
    """One moment of the restore decision. Counters run from its making; nothing is ever negative."""

    active_waits: int
    """Restores that wait for a tier or a copy now."""
    capacity_waiters: int
    """Restores that were refused GPU blocks and wait for them now."""
    longest_capacity_wait_seconds: float
    """How long the longest of those has waited by now."""
    capacity_waits: int
    """Waits for GPU blocks begun."""
    capacity_expired: int
    """Of those, how many lasted until `restore.capacity_bound_s`."""
    fallbacks: Mapping[str, int]
    """Requests that compute what they had hoped to restore, by reason: each is one event of the log."""
    fallback_blocks: int
    """Blocks that these compute; after a wait for GPU blocks but for those that host memory has when there is room."""
    fallback_tokens: int
    """Tokens of these blocks."""
    held_back_warnings: int
    """Of those events, how many had no line of their own in the log: a later line has their sum."""
    decisions: Mapping[str, int]
    """Lookups that found something, by what was decided: `restore` all of it, `partial`, `recompute`."""
    predictions: int
    """Restores that ended by landing or by their time, of which it had been predicted how long they take."""
    predicted_seconds: float
    """What had been predicted for these, together."""
    actual_seconds: float
    """What these took; for one that its time ended, until then."""
    error_seconds: float
    """By how much each prediction was wrong, together."""
    avoided_seconds: float
    """What computing the blocks that landed would have taken, by estimate: to compare with `restoring_seconds`."""
    restoring_seconds: float
    """What all restores waited for lookups, tiers and copies, in vain or not."""
    tier_rates: Mapping[str, float]
    """Bytes a second by tier, as last measured; `host` is the copy to the GPU."""


class RestoreTally:
    """What the restore decision counts of its restores' time and choices. Engine's thread; others may read."""

    __slots__ = (
        "actual_s",
        "avoided_s",
        "decisions",
        "error_s",
        "num_active",
        "num_expired",
        "num_predictions",
        "predicted_s",
        "restoring_s",
    )

    def __init__(self) -> None:
        self.num_active = 0
        self.num_expired = 0
        self.decisions: Counter[str] = Counter()
        self.num_predictions = 0
        self.predicted_s = 0.0
        self.actual_s = 0.0
        self.error_s = 0.0
        self.avoided_s = 0.0
        self.restoring_s = 0.0

    def add_prediction(self, predicted_s: float, actual_s: float) -> None:
        self.num_predictions += 1
        self.predicted_s += predicted_s
        self.actual_s += actual_s
        self.error_s += abs(predicted_s - actual_s)


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """One moment of a store. Counters run from its opening; nothing is ever negative."""

    lookups: int
    """Admissions that asked the store, each counted once however long the request waited."""
    asked_blocks: int
    """Blocks those admissions asked for: the full blocks that the engine's own prefix cache did not have."""
    hit_blocks: int
    """Blocks of those that were here: `hit_blocks / asked_blocks` is the hit rate."""
    hits: Mapping[str, int]
    """Those blocks by the tier that had them when the request came; they add up to `hit_blocks`."""
    misses: Mapping[str, int]
    """Blocks asked for and not served, by reason: `asked = hit + sum(misses)`, until a restore of a hit fails."""
    stored_blocks: int
    """Blocks committed to the host tier."""
    stored_bytes: int
    """Bytes of those blocks."""
    evicted_blocks: int
    """Blocks that gave their slot to another."""
    resets: int
    """Times the cache was reset, which is the epoch."""
    errors: Mapping[str, int]
    """Exceptions caught and turned into misses or drops, by type."""
    host_blocks: int
    """Blocks in the host tier now."""
    host_used_bytes: int
    """Whole slots in use now, leased ones included."""
    host_reserved_bytes: int
    """The host pool's size."""
    host_touched_bytes: int
    """How much of the pool has pages yet by the background thread's work."""
    host_pinned_bytes: int
    """How much of the pool is locked in memory."""
    leases: int
    """Leases out now."""
    fallbacks: Mapping[str, int]
    """Requests that waited in vain, wholly or in part, by reason."""
    staged_blocks: int
    """Blocks asked of lower tiers, well or not, each once however many requests waited for it."""
    staging_bytes: int
    """Bytes of host memory that reads of lower tiers may write now."""
    disk: DiskStats | None = None
    """The disk tier; None without one."""
    server: ServerStats | None = None
    """The tier over a kvtier-server; None without one."""
    redis: RedisStats | None = None
    """The Redis tier; None without one."""

    @property
    def hit_rate(self) -> float:
        """Blocks served over blocks asked for; 0.0 before the first lookup."""
        return self.hit_blocks / self.asked_blocks if self.asked_blocks else 0.0
