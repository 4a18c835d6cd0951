"""S3-FIFO over the leaves of chains: what is used once goes soon, whatever came after it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvtier.errors import IntegrityError
from kvtier.policy.base import NO_PARENT
from kvtier.policy.ghost import Ghosts
from kvtier.policy.leaves import TailsFirst

__all__ = ["S3FIFO"]

MOST_USES = 3  # two bits
USES_TO_STAY = 1
SMALL_PART = 3  # the small queue is one part in so many


class S3FIFO(TailsFirst):
    """A small queue, a main queue and a ghost queue, each first in, first out.

    Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. A
    new block enters the small queue. At its turn it moves to the main queue if it was used since, else it goes and its
    fingerprint becomes a ghost; a block that comes back while it is one enters the main queue at once. At its turn
    there a block goes round once more for each use, up to three.

    What chains change:

    * Only leaves have a turn, so that tails go before prefixes. A prefix that loses its last tail has its turn next.
    * A block is in the main queue only with all that it continues: who moves there takes its prefix along. Else the
      prefixes, which have no turn, would fill the small queue, and nothing else would ever be evicted from there.
    * A prompt uses its whole prefix at once, and a prefix has no turn at which to count down. Were each block to count
      down only at its own turns, a chain that nobody wants would go round three times for every block of it. So time
      takes the uses away: one with each lap of the main queue, from every block alike, leaf or not. What is left of a
      prefix when its last tail goes are uses that the tail had not: those by other prompts.

    The paper's small queue is a tenth, and two uses move a block on. Prompts come back after minutes, and a chain that
    came back at all mostly does so again: with a third and one use more was hit in every trace that
    `benchmarks/eviction_policies.py` replays, at most sizes.

    Costs, amortised: O(log n) an insert, victim or release, and O(1) a touched block, which pays for going round.
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: list[int] = []
        self._main: list[int] = []
        self._ghosts = Ghosts()
        self._is_main = array("b")
        self._uses = array("b")  # as of the lap in `_counted_at`
        self._counted_at = array("q")
        self._fingerprint = array("Q")
        self._columns += [self._is_main, self._uses, self._counted_at, self._fingerprint]
        self._num_small = 0
        self._lap = 0
        self._lap_end = 0  # the place at which the main queue's present lap ends
        self._chosen = -1

    def insert(self, slot: int, parent: int, fingerprint: int) -> None:
        self._link(slot, parent)
        self._fingerprint[slot] = fingerprint
        self._is_main[slot] = 0
        self._num_small += 1
        self._clear_uses(slot)
        if self._ghosts.take(fingerprint, self._num_resident):
            self._move_to_main(slot)
        self._push(self._heap_of(slot), slot)

    def touch(self, slots: Sequence[int]) -> None:
        uses, counted_at, lap = self._uses, self._counted_at, self._lap
        for slot in slots:
            left = uses[slot] - (lap - counted_at[slot])
            uses[slot] = 1 if left < 1 else min(left + 1, MOST_USES)
            counted_at[slot] = lap

    def remove(self, slot: int) -> None:
        if not self._is_main[slot]:
            self._num_small -= 1
            if slot == self._chosen:
                self._ghosts.add(self._fingerprint[slot], self._num_resident)
        self._chosen = -1
        parent = self._unlink(slot)
        if parent != NO_PARENT:
            self._push(self._heap_of(parent), parent)

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        while (slot := self._next()) is not None:
            if self._stays(slot):
                self._push(self._main, slot)
            elif can_evict(slot):
                self._chosen = slot
                return slot
            else:
                self._aside.add(slot)
        return None

    def check_integrity(self, slots: set[int]) -> None:
        super().check_integrity(slots)
        parents = {slot: self._parent_of(slot) for slot in slots if self._is_main[slot]}
        checks = {
            "the small queue is counted": sum(not self._is_main[slot] for slot in slots) == self._num_small,
            "what the main queue's blocks continue is in it": all(
                parent == NO_PARENT or self._is_main[parent] for parent in parents.values()
            ),
            "uses fit two bits": all(0 <= self._uses[slot] <= MOST_USES for slot in slots),
        }
        for claim, holds in checks.items():
            if not holds:
                raise IntegrityError(f"eviction policy: not true that {claim}")

    def _heap_of(self, slot: int) -> list[int]:
        return self._main if self._is_main[slot] else self._small

    def _heaps(self) -> list[list[int]]:
        return [self._small, self._main]

    def _next(self) -> int | None:
        """Whose turn it is: the small queue's first leaf while that is full or the main queue has none."""
        if self._num_small * SMALL_PART < self._num_resident:
            slot = self._first(self._main)
            return slot if slot is not None else self._first(self._small)
        slot = self._first(self._small)
        return slot if slot is not None else self._first(self._main)

    def _stays(self, slot: int) -> bool:
        """At its turn: whether it moves to the main queue, or goes round there once more."""
        if not self._is_main[slot]:
            is_used = self._uses_left(slot) >= USES_TO_STAY
            if is_used:
                self._move_to_main(slot)
            return is_used
        if self._place[slot] >= self._lap_end:
            self._lap += 1
            self._lap_end = self._now + 1
        if not self._uses_left(slot):
            return False
        self._now += 1
        self._place[slot] = self._now
        return True

    def _move_to_main(self, slot: int) -> None:
        """With all that it continues; none of them has been used since."""
        while slot != NO_PARENT and not self._is_main[slot]:
            self._is_main[slot] = 1
            self._num_small -= 1
            self._now += 1
            self._place[slot] = self._now
            self._clear_uses(slot)
            slot = self._parent_of(slot)

    def _uses_left(self, slot: int) -> int:
        return max(0, self._uses[slot] - (self._lap - self._counted_at[slot]))

    def _clear_uses(self, slot: int) -> None:
        self._uses[slot] = 0
        self._counted_at[slot] = self._lap
