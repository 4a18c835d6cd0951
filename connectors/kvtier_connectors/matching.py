"""What could land for a request now: what host memory holds of the blocks that it may restore."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.reasons import MissReason
from kvtier.restore import RestorePhase
from kvtier.store import Space
from kvtier_connectors.arrival import Arrival
from kvtier_connectors.contract import Match
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.known import KnownRuns
from kvtier_connectors.live import LiveRequest, check_index

__all__ = ["NOTHING_HELD", "HostMatch", "has_lost", "is_held_back"]

NOTHING_HELD = Match(0, MissReason.TIER_ERROR)

HELD_BACK = frozenset(
    {MissReason.COST, MissReason.CAPACITY, MissReason.BUDGET, MissReason.LAND_FAILED, MissReason.RESTORE_OFF}
)
"""Verdicts on an attempt: what it does not go for is not taken from host memory either, though it be there."""
GIVEN_UP = HELD_BACK - {MissReason.COST} | {MissReason.TIMEOUT}
"""After these nothing is looked up again."""


def is_held_back(arrival: Arrival) -> bool:
    """Whether no more lands than it goes for. Of blocks that were told to be recomputed none does, though they came."""
    return arrival.episode.miss in HELD_BACK or arrival.episode.is_told


def has_lost(arrival: Arrival, num_local: int) -> bool:
    """Whether blocks before those that it goes for are no longer the engine's, and may be looked up."""
    episode = arrival.episode
    is_open = episode.phase in (RestorePhase.READY, RestorePhase.OVER) and episode.miss not in GIVEN_UP
    return is_open and not episode.is_told and num_local < arrival.first_block


class HostMatch:
    """Looks up what a request may restore. Changes nothing. Engine's thread only."""

    def __init__(self, space: Space, block_tokens: int, report: Callable[[str, BaseException], None]) -> None:
        self._runs = KnownRuns(space)
        self._block_tokens = block_tokens
        self._report = report

    def close(self) -> None:
        self._runs.close()

    def num_allowed(self, request: LiveRequest, num_local: int, num_blocks: int) -> int:
        """How many of the blocks from `num_local` on may land, of so many."""
        limit, arrival = request.max_restored(self._block_tokens), request.arrival
        num_allowed = max(0, num_blocks if limit is None else min(num_blocks, limit))
        if arrival is not None and is_held_back(arrival):
            end = num_local if arrival.episode.phase is RestorePhase.OVER else arrival.end_block
            num_allowed = min(num_allowed, max(0, end - num_local))
        return num_allowed

    def look_up(self, request: LiveRequest, num_local: int, max_blocks: int) -> Match:
        """What host memory holds of the blocks that may land, and why it does not hold the next one. Asked again it
        costs as much as has changed since."""
        check_index("num_local_blocks", num_local)
        arrival, limit = request.arrival, request.max_restored(self._block_tokens)
        num_wanted = self.num_allowed(request, num_local, max_blocks)
        request.known, found = self._runs.look_up(request.known, request.info.digests, num_local, num_wanted)
        end = num_local + found.num_blocks
        is_told = arrival is not None and (end >= arrival.end_block or arrival.episode.is_expired)
        explained = arrival.episode.miss if arrival is not None and is_told else None
        if found.miss is not None:
            return Match(found.num_blocks, explained or found.miss)
        is_short = num_wanted < max_blocks and end < len(request.info.digests)
        is_limited = limit is not None and num_wanted == limit
        return Match(found.num_blocks, (MissReason.LIMIT if is_limited else explained) if is_short else None)

    def why_missing(self, request: LiveRequest, num_local: int, num_landing: int, max_blocks: int) -> MissReason:
        """Why the first block that is not restored is not."""
        limit = request.max_restored(self._block_tokens)
        if limit is not None and num_landing >= limit:
            return MissReason.LIMIT
        next_block, num_left = num_local + num_landing, min(1, max_blocks - num_landing)
        try:
            miss = self.look_up(request, next_block, num_left).miss
        except CAUGHT as error:
            self._report("match", error)
            return MissReason.TIER_ERROR
        return miss or MissReason.NO_ROOM
