"""One attempt of one request to have its prompt restored: where it stands, and what it has used up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from kvtier.reasons import MissReason

__all__ = [
    "ACTIVE",
    "ANSWERED",
    "HOST",
    "Cause",
    "RestoreEpisode",
    "RestorePhase",
    "RestoreQuery",
    "SEARCHING",
    "Stopwatch",
    "TierPart",
    "clip",
    "num_blocks_of",
    "num_leading_host",
]

HOST = "host"
"""The tier from which blocks are copied to the GPU; all others are read into it first."""


class RestorePhase(StrEnum):
    """Where a restore stands."""

    LOOKING = "looking"
    """Tiers are asked what they hold."""
    STAGING = "staging"
    """Blocks come from lower tiers to host memory."""
    READY = "ready"
    """What there is to restore is in host memory; it waits for its turn, or for GPU blocks."""
    LANDING = "landing"
    """Blocks are copied to the GPU pool."""
    OVER = "over"
    """Nothing more is restored."""


SEARCHING = frozenset({RestorePhase.LOOKING, RestorePhase.STAGING})
"""Phases in which blocks are on their way to host memory, or about to be."""
ACTIVE = frozenset({RestorePhase.LOOKING, RestorePhase.STAGING, RestorePhase.LANDING})
"""Phases in which it waits for a tier or a copy: they have a deadline and use up the budget."""
ANSWERED = frozenset({RestorePhase.STAGING, RestorePhase.READY})
"""Phases in which it waits with an answer, which grows old."""


@dataclass(frozen=True, slots=True)
class TierPart:
    """Consecutive blocks of a prompt that one tier holds; `host` is one. queued_bytes: to be read there before them."""

    tier: str
    num_blocks: int
    queued_bytes: int = 0


def num_blocks_of(parts: Iterable[TierPart]) -> int:
    return sum(part.num_blocks for part in parts)


def num_leading_host(parts: Iterable[TierPart]) -> int:
    """Blocks before the first that is not in host memory."""
    return num_blocks_of(takewhile(lambda part: part.tier == HOST, parts))


def clip(parts: Iterable[TierPart], max_blocks: int, *, is_host_only: bool = False) -> tuple[TierPart, ...]:
    """The parts of the first `max_blocks` blocks. is_host_only: no more than `num_leading_host`."""
    kept: list[TierPart] = []
    for part in parts:
        num_blocks = min(part.num_blocks, max_blocks)
        if num_blocks <= 0:
            continue
        if is_host_only and part.tier != HOST:
            break
        kept.append(TierPart(part.tier, num_blocks, max(0, part.queued_bytes)))
        max_blocks -= num_blocks
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class RestoreQuery:
    """What a request would have restored.

    position: leading tokens that the engine's own prefix cache holds. num_tokens: all of its tokens. max_blocks: full
    blocks behind `position` that could be restored, one token left to compute. may_restore: False opts out. max_wait_s:
    None is `restore.max_wait_s`; 0 takes only what is in host memory. max_tokens: the most that is restored; None: all.
    """

    request_id: str
    position: int
    num_tokens: int
    max_blocks: int
    may_restore: bool = True
    max_wait_s: float | None = None
    max_tokens: int | None = None


class Stopwatch:
    """Seconds since it was made, by a clock that may go back: a jump back takes nothing off, and adds nothing."""

    __slots__ = ("_began_at", "_seen_at")

    def __init__(self, now: float) -> None:
        self._began_at = self._seen_at = now

    def read(self, now: float) -> float:
        if now < self._seen_at:
            self._began_at -= self._seen_at - now
        self._seen_at = now
        return max(0.0, now - self._began_at)

    def peek(self, now: float) -> float:
        """As `read`, and changes nothing: for any thread."""
        return max(now, self._seen_at) - self._began_at

    def when(self, seconds: float) -> float:
        """The time at which it will read so much."""
        return self._began_at + seconds

    def excuse(self, seconds: float) -> None:
        """So much of the time since it was made does not count."""
        self._began_at += seconds

    def has_reached(self, now: float, seconds: float) -> bool:
        """Whether it reads so much by now: from the very moment that `when` says, however the difference rounds."""
        self.read(now)
        return now >= self.when(seconds)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why blocks are recomputed; see `Fallback`."""

    reason: MissReason
    tier: str
    waited_s: float
    limit_s: float


@dataclass(eq=False, slots=True)
class RestoreEpisode:
    """From a request's arrival, or its preemption, to its admission and the end of its copies. Changed only by the
    `RestoreDecision` that made it.

    position, max_blocks: as in the query; what landed is added and taken off.
    max_wait_s: the query's or the setting's.
    """

    request_id: str
    position: int
    num_tokens: int
    max_blocks: int
    max_wait_s: float
    is_limited: bool = False
    """Its `max_tokens` leaves blocks out."""
    phase: RestorePhase = RestorePhase.OVER
    num_blocks: int = 0
    """Blocks behind `position` that it goes for: those looked for, staged, ready or being copied, by its phase."""
    miss: MissReason | None = None
    """Why it does not go for the block behind these; None: no tier holds it, or there is none."""
    deadline: float | None = None
    """When, on the clock, the wait under way ends; None while none is."""
    attempts: int = 0
    """Lookups begun, those of an admission that came to nothing included."""
    stage_wait_s: float = 0.0
    """How long a stage begun now may take."""
    must_fail: bool = False
    """It failed for good, and `restore.on_failure` is `fail`."""

    # What follows is the decision's own.
    watch: Stopwatch | None = None
    allowed_s: float = 0.0
    """How long the wait under way may take."""
    is_by_budget: bool = False
    """That is what is left of the budget, not of the limit."""
    limit_s: float = 0.0
    waited_s: float = 0.0
    """In LOOKING and STAGING, together bounded by `max_wait_s`, all attempts together."""
    active_s: float = 0.0
    """In LOOKING, STAGING and LANDING, of the budget."""
    answered_active_s: float = 0.0
    """`active_s` when what it waits for was decided."""
    answered_at: Stopwatch | None = None
    is_refreshing: bool = False
    refused: Stopwatch | None = None
    """Since it was first refused GPU blocks."""
    parts: tuple[TierPart, ...] = ()
    goal: int = 0
    """Blocks that the stage or the copy under way is to bring."""
    num_host: int = 0
    """Leading blocks of these that were in host memory before."""
    is_cut: bool = False
    """Its time ended its stage, whose last word is still to come."""
    num_landed: int = 0
    """Blocks behind the query's position that the engine has by now."""
    wanted: int = 0
    """The most blocks, landed ones included, that it went for at some time."""
    predicted_s: float | None = None
    cause: Cause | None = None
    """Why it did not get all of these, as far as that is a failure."""
    is_told: bool = False
    is_expired: bool = False
    """READY for too long: nothing more is looked for, and what is in host memory may land when it is admitted."""
    is_blind: bool = False
    """Its stage began before it was measured what computing and its tiers take."""
    latest_end: float = 0.0
    """When a stage that is blind ends in any case, whatever is measured meanwhile; it may be given up long before."""
    is_overdue: bool = False
    """It was polled after its time, and went on for once."""
    is_unwanted: bool = False
    """Its stage takes longer than it is worth."""

    def follow(self, before: RestoreEpisode, num_lost: int) -> None:
        """It goes on with another's wait, from so many blocks before: what that used up, and what it failed at and did
        not tell, is this one's."""
        self.refused, self.waited_s, self.active_s = before.refused, before.waited_s, before.active_s
        self.is_told = before.is_told
        if before.cause is not None:
            self.cause, before.cause = before.cause, None
            self.wanted = max(0, before.num_missing + num_lost)

    def enter(self, phase: RestorePhase, now: float, limit_s: float, budget_s: float) -> None:
        """A phase begins; the last one was left. limit_s: of LOOKING and STAGING, of which it has `waited_s` behind it;
        budget_s: of all phases that wait."""
        self.phase = phase
        if phase not in ACTIVE:
            return
        self.watch = Stopwatch(now)
        self.limit(limit_s, budget_s)

    def limit(self, limit_s: float, budget_s: float) -> None:
        """How long the wait under way may take; as for `enter`."""
        left_s = budget_s - self.active_s
        self.limit_s = limit_s
        self.is_by_budget = left_s < limit_s - self.waited_s
        self.allowed_s = max(0.0, min(limit_s - self.waited_s, left_s))
        self.deadline = None if self.watch is None else self.watch.when(self.allowed_s)

    def leave(self, now: float) -> float:
        """The phase ends: seconds that it waited in it; 0.0 in a phase that does not wait. Idempotent."""
        watch, self.watch, self.deadline = self.watch, None, None
        if watch is None:
            return 0.0
        seconds = watch.read(now)
        self.active_s += seconds
        if self.phase is not RestorePhase.LANDING:
            self.waited_s += seconds
        return seconds

    def has_taken(self, now: float, share: float) -> bool:
        """Whether the wait under way has taken so much of its time; there is none in a phase without a deadline."""
        return self.watch is None or self.watch.has_reached(now, share * self.allowed_s)

    def when_taken(self, share: float) -> float | None:
        """When it will have taken so much of it."""
        return None if self.watch is None else self.watch.when(share * self.allowed_s)

    @property
    def time_over(self) -> MissReason:
        """Why the wait under way, or the last one, ends when it takes all of its time."""
        return MissReason.BUDGET if self.is_by_budget else MissReason.TIMEOUT

    @property
    def tiers(self) -> set[str]:
        """Lower tiers that it is to be read from."""
        return {part.tier for part in self.parts} - {HOST}

    @property
    def lower_tiers(self) -> str:
        return " and ".join(sorted(self.tiers))

    @property
    def num_missing(self) -> int:
        """Blocks that it went for at some time, and that did not land."""
        return max(0, self.wanted - self.num_landed)
