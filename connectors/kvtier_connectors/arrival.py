"""One request's attempt to restore, as the connector drives it, and several in their order."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.episode import SEARCHING
from kvtier.keys import BlockDigest
from kvtier.located import Located
from kvtier.pool import Owner
from kvtier.restore import RestoreEpisode
from kvtier.stage import Stage

__all__ = ["Arrival", "Keep", "Queue"]


class Keep:
    """Blocks of host memory that are kept there for a request."""

    def __init__(self, digests: Sequence[BlockDigest], owner: Owner) -> None:
        """owner: who leases them."""
        self.digests = digests
        self._owner = owner

    def close(self) -> None:
        """Let go of them. Idempotent."""
        self._owner.close()


@dataclass(eq=False, slots=True)
class Arrival:
    """One request's attempt to restore: the episode that decides, and the stage that brings its blocks.

    digests: of all the request's blocks; the list grows as tokens come.
    """

    episode: RestoreEpisode
    digests: Sequence[BlockDigest]
    block_tokens: int
    order: tuple[int, int]
    """Smaller goes first: its priority, and when it came. No two have the same."""
    tenant: str = ""
    """Who is charged for the host memory of what comes."""
    stage: Stage | None = None
    keep: Keep | None = None
    """In place of a stage, where host memory had all of it: what keeps it there."""
    found: Located | None = None
    """The last answer, while it waits for its turn to be staged."""
    queued_bytes: int = 0
    """What the tiers were to read before its stage began."""
    begun_at: float = 0.0
    """When its stage began."""
    arrived: Counter[str] = field(default_factory=Counter)
    """Blocks that its stages brought, by tier."""
    failed: set[str] = field(default_factory=set)
    """Tiers that did not give what they seemed to hold: others are preferred from then on."""
    has_turn: bool = False
    """It waited, and is the next to be staged."""
    held_s: float = 0.0
    """How long turns were held when its wait was last settled; see `StageTurns`."""

    @property
    def first_block(self) -> int:
        """The first block that it goes for."""
        return self.episode.position // self.block_tokens

    @property
    def end_block(self) -> int:
        """The block behind the last one that it goes for."""
        return self.first_block + self.episode.num_blocks

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are on their way to host memory, or about to be."""
        return self.episode.phase in SEARCHING

    @property
    def digests_kept(self) -> Sequence[BlockDigest]:
        """Blocks of host memory that are leased for it, or will be when they come."""
        kept = self.stage or self.keep
        return () if kept is None else kept.digests

    @property
    def is_running(self) -> bool:
        return self.stage is not None and not self.stage.done


class Queue:
    """Arrivals in their order. Joining and leaving cost a search by halves and one move of memory, whatever the length.

    Mutable state: `_arrivals`.
    """

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def __reversed__(self) -> Iterator[Arrival]:
        return reversed(self._arrivals)

    def __contains__(self, arrival: Arrival) -> bool:
        index = self._find(arrival)
        return index < len(self._arrivals) and self._arrivals[index] is arrival

    @property
    def first(self) -> Arrival | None:
        return self._arrivals[0] if self._arrivals else None

    def add(self, arrival: Arrival) -> None:
        """Idempotent."""
        if arrival not in self:
            self._arrivals.insert(self._find(arrival), arrival)

    def discard(self, arrival: Arrival) -> None:
        """Idempotent."""
        if arrival in self:
            del self._arrivals[self._find(arrival)]

    def _find(self, arrival: Arrival) -> int:
        return bisect_left(self._arrivals, arrival.order, key=lambda other: other.order)
