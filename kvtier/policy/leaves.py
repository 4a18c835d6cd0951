"""What the built-in policies share: chains of blocks by slot, and heaps of their leaves."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from kvtier.errors import IntegrityError
from kvtier.policy.base import NO_PARENT

__all__ = ["TailsFirst"]

PLACE_SHIFT = 32
SLOT_MASK = (1 << PLACE_SHIFT) - 1


class TailsFirst:
    """Who continues whom, and each block's place in the order, of which only leaves are ever asked for.

    A heap holds leaves by their places; an entry is dropped lazily when its leaf got another place, was removed, got a
    child, or is set aside because it is leased: thousands of leased ones may stand at the top while a device hangs.
    Arrays by slot and no object per block: a full garbage collection that walks them would stall the engine.

    A subclass says which heap a leaf stands in, and what moves places. Mutable state is the caller's to guard.
    """

    def __init__(self) -> None:
        self._place = array("q")  # 0 when not resident
        self._parent = array("q")
        self._life = array("q")  # counts a slot's inserts, so that a child knows its parent's slot was reused
        self._parent_life = array("q")
        self._children = array("q")
        self._columns = [self._place, self._parent, self._life, self._parent_life, self._children]
        self._aside: set[int] = set()
        self._now = 0
        self._num_resident = 0

    def _heap_of(self, slot: int) -> list[int]:
        raise NotImplementedError

    def _heaps(self) -> list[list[int]]:
        raise NotImplementedError

    def _link(self, slot: int, parent: int) -> None:
        """`slot` is resident at the newest place, without children. The caller pushes it."""
        if slot >= len(self._place):
            for column in self._columns:
                column.extend([0] * (slot + 1 - len(column)))
        assert not self._place[slot], f"slot {slot} inserted twice"
        self._now += 1
        self._place[slot] = self._now
        self._life[slot] += 1
        self._children[slot] = 0
        self._parent[slot] = parent
        if parent != NO_PARENT:
            self._parent_life[slot] = self._life[parent]
            self._children[parent] += 1
        self._num_resident += 1

    def _unlink(self, slot: int) -> int:
        """The block that it continued, where that is a leaf now, or NO_PARENT. The caller pushes that one."""
        assert self._place[slot], f"slot {slot} removed twice"
        self._place[slot] = 0
        self._aside.discard(slot)
        self._num_resident -= 1
        parent = self._parent_of(slot) if self._parent[slot] != NO_PARENT else NO_PARENT
        if parent != NO_PARENT:
            self._children[parent] -= 1
            if not self._children[parent]:
                return parent
        return NO_PARENT

    def _parent_of(self, slot: int) -> int:
        """The resident block that this one continues, or NO_PARENT."""
        parent = self._parent[slot]
        if parent != NO_PARENT and self._place[parent] and self._life[parent] == self._parent_life[slot]:
            return parent
        return NO_PARENT

    def _push(self, heap: list[int], slot: int) -> None:
        """A leaf takes its place in its heap."""
        if slot in self._aside:  # comes back when it is released
            return
        if len(heap) > 2 * self._num_resident + 64:
            # A parent that lost its children twice without a use between stands here twice.
            heap[:] = sorted({entry for entry in heap if self._is_current(entry)})
        heapq.heappush(heap, self._place[slot] << PLACE_SHIFT | slot)

    def _first(self, heap: list[int]) -> int | None:
        """The leaf with the lowest place."""
        while heap:
            if self._is_current(heap[0]):
                return heap[0] & SLOT_MASK
            heapq.heappop(heap)
        return None

    def _is_current(self, entry: int) -> bool:
        slot = entry & SLOT_MASK
        return self._place[slot] == entry >> PLACE_SHIFT and not self._children[slot] and slot not in self._aside

    def is_resident(self, slot: int) -> bool:
        return 0 <= slot < len(self._place) and self._place[slot] > 0

    def is_leaf(self, slot: int) -> bool:
        """Whether no resident block continues it; of a resident slot."""
        return not self._children[slot]

    def released(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._aside:
                self._aside.discard(slot)
                if not self._children[slot]:
                    self._push(self._heap_of(slot), slot)

    def check_integrity(self, slots: set[int]) -> None:
        resident = {slot for slot, place in enumerate(self._place) if place}
        leaves = {slot for slot in resident if not self._children[slot]}
        children = dict.fromkeys(resident, 0)
        for slot in resident:
            parent = self._parent_of(slot)
            if parent != NO_PARENT:
                children[parent] += 1
        here = [entry & SLOT_MASK for heap in self._heaps() for entry in set(heap) if self._is_current(entry)]
        checks = {
            "the policy orders exactly the resident slots": resident == slots and len(resident) == self._num_resident,
            "children are counted": all(children[slot] == self._children[slot] for slot in resident),
            "every leaf stands in the heap or is set aside": set(here) | (self._aside & leaves) == leaves,
            "no leaf stands in two heaps": len(here) == len(set(here)),
            "what is set aside is resident": self._aside <= resident,
        }
        for claim, holds in checks.items():
            if not holds:
                raise IntegrityError(f"eviction policy: not true that {claim}")
