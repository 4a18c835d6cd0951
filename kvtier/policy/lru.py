"""Least recently used first, and tails before prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.policy.base import NO_PARENT
from kvtier.policy.leaves import TailsFirst

__all__ = ["TailsFirstLRU"]


class TailsFirstLRU(TailsFirst):
    """LRU over the leaves of the chains: a block goes only after every resident block that continues it.

    Recency alone is not enough: blocks are stored prefix first, which makes the prefix the older. A block's place is
    its last use. While every leaf is leased nothing is a victim.

    Costs, amortised: O(log n) an insert, victim or release, O(1) a touched block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[int] = []

    def insert(self, slot: int, parent: int, fingerprint: int) -> None:  # noqa: ARG002
        self._link(slot, parent)
        self._push(self._heap, slot)

    def touch(self, slots: Sequence[int]) -> None:
        self._now += len(slots)
        for age, slot in enumerate(slots):
            self._place[slot] = self._now - age
            if not self._children[slot]:
                self._push(self._heap, slot)

    def remove(self, slot: int) -> None:
        parent = self._unlink(slot)
        if parent != NO_PARENT:
            self._push(self._heap, parent)

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        while (slot := self._first(self._heap)) is not None:
            if can_evict(slot):
                return slot
            self._aside.add(slot)
        return None

    def _heap_of(self, slot: int) -> list[int]:  # noqa: ARG002
        return self._heap

    def _heaps(self) -> list[list[int]]:
        return [self._heap]
