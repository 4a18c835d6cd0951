"""Blocks that host memory keeps for requests on their way up: leased, within half of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.keys import BlockDigest
from kvtier.stage import Stage
from kvtier.store import Space
from kvtier_connectors.arrival import Arrival, Keep, Queue
from kvtier_connectors.faults import CAUGHT

__all__ = ["MAX_LOOKED", "HostKeeper"]

MAX_LOOKED = 1 << 14
"""Blocks that are looked at for one thing in one step: some milliseconds."""


class HostKeeper:
    """Owns the leases of stages, and of what was in host memory from the start. Engine's thread only.

    Mutable state: `kept`, those that wait for their admission with what they go for leased; `_leased`, each block as
    often as it is leased.
    """

    def __init__(self, space: Space, report: Callable[[str, BaseException], None]) -> None:
        """report: told what the store raised, and where."""
        self._space = space
        self._report = report
        self._max_leased = max(1, space.capacity_blocks // 2)
        self._leased: Counter[BlockDigest] = Counter()
        self.kept = Queue()

    def __len__(self) -> int:
        return len(self._leased)

    def num_over(self, digests: Sequence[BlockDigest]) -> int:
        """By how many blocks there is too little room for these; not above 0 where there is enough."""
        return len(self._leased) + sum(digest not in self._leased for digest in digests) - self._max_leased

    def has_room(self, digests: Sequence[BlockDigest]) -> bool:
        """Whether they may be staged. One request alone may, whatever it takes."""
        return not self._leased or self.num_over(digests) <= 0

    def add_stage(self, arrival: Arrival, stage: Stage) -> None:
        arrival.stage = stage
        self._leased.update(stage.digests)

    def keep(self, arrival: Arrival) -> bool:
        """It waits for its admission: whether what it goes for stays in host memory until then."""
        if arrival.stage is None and not self._lease(arrival):
            return False
        self.kept.add(arrival)
        return True

    def whom_to_pass(self, arrival: Arrival, digests: Sequence[BlockDigest]) -> list[Arrival]:
        """Those that go after it and must let go of what is kept for them, last first, so that there is room for it;
        none where that would not do. Pure."""
        num_over = self.num_over(digests)
        wanted = set(digests)
        found: list[Arrival] = []
        uses: Counter[BlockDigest] = Counter()
        num_freed = num_looked = 0
        for kept in reversed(self.kept):
            if num_freed >= num_over or kept.order < arrival.order or num_looked > MAX_LOOKED:
                break
            found.append(kept)
            for digest in kept.digests_kept:
                num_looked += 1
                uses[digest] += 1
                num_freed += uses[digest] == self._leased[digest] and digest not in wanted
        return found if num_freed >= num_over else []

    def let_go(self, arrival: Arrival) -> None:
        """Of all that is leased for it. Idempotent."""
        self.kept.discard(arrival)
        stage, keep, arrival.stage, arrival.keep = arrival.stage, arrival.keep, None, None
        for held in (stage, keep):
            if held is not None:
                self.release(held)

    def release(self, held: Stage | Keep) -> None:
        """What no arrival has any more."""
        self._leased.subtract(held.digests)
        for digest in held.digests:
            if not self._leased[digest]:
                del self._leased[digest]
        held.close()

    def check_integrity(self, others: Sequence[Arrival]) -> None:
        """Raises AssertionError when counts and arrivals disagree. others: that may hold something beside `kept`."""
        held = Counter(digest for arrival in (*self.kept, *others) for digest in arrival.digests_kept)
        assert held == self._leased, "blocks are leased for nobody, or for more than was counted"
        assert len(self._leased) <= self._max_leased

    def _lease(self, arrival: Arrival) -> bool:
        digests = arrival.digests[arrival.first_block : arrival.end_block]
        if self.num_over(digests) > 0:
            return False
        owner = self._space.owner(f"wait of {arrival.episode.request_id}")
        try:
            is_held = len(self._space.lease(digests, owner)) == len(digests)
        except CAUGHT as error:
            self._report("lease", error)
            is_held = False
        if not is_held:
            owner.close()
            return False
        arrival.keep = Keep(digests, owner)
        self._leased.update(digests)
        return True
