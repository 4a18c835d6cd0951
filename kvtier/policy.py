"""In which order resident blocks give way: least recently used, and tails before prefixes."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.errors import IntegrityError

__all__ = ["NO_PARENT", "EvictionPolicy", "TailsFirstLRU"]

NO_PARENT = -1
TICK_SHIFT = 32


class EvictionPolicy(Protocol):
    """Orders slots; holds no bytes, pins or keys. Called under the index's lock, so must not block or call back."""

    def insert(self, slot: int, parent: int) -> None:
        """`slot` became resident; `parent` is the slot of the block before it in the chain, or NO_PARENT."""

    def touch(self, slots: Sequence[int]) -> None:
        """A prompt used these blocks, first block first."""

    def remove(self, slot: int) -> None:
        """`slot` is no longer resident."""

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        """The slot to evict next, or None when `can_evict` holds for no slot that may go now. Changes no order.

        A slot that `can_evict` refused is not asked about again until `released` names it.
        """

    def released(self, slots: Sequence[int]) -> None:
        """`can_evict` may hold for these by now; any other slot may be among them."""

    def check_integrity(self, slots: set[int]) -> None:
        """Raises IntegrityError unless exactly `slots` are ordered."""


class TailsFirstLRU:
    """LRU over the leaves of the chains: a block goes only after every resident block that continues it.

    An evicted prefix would make its whole tail unreachable, so recency alone is not enough: blocks are stored prefix
    first, which makes the prefix the older. A heap holds the leaves by last use; entries are dropped lazily when a
    leaf was touched, removed, or got a child. While every leaf is leased nothing is a victim. Leaves found leased at
    the heap's top are set aside until they are released: thousands of them may stand there while a device hangs.

    Costs, amortised: O(log n) an insert, victim or release, O(1) a touched block. Arrays by slot, no object per block.
    """

    def __init__(self) -> None:
        self._tick = array("q")  # last use; 0 when not resident
        self._parent = array("q")
        self._life = array("q")  # counts a slot's inserts, so that a child knows its parent's slot was reused
        self._parent_life = array("q")
        self._children = array("q")
        self._heap: list[int] = []
        self._aside: set[int] = set()
        self._now = 0
        self._num_resident = 0

    def insert(self, slot: int, parent: int) -> None:
        self._grow(slot)
        assert not self._tick[slot], f"slot {slot} inserted twice"
        self._now += 1
        self._tick[slot] = self._now
        self._life[slot] += 1
        self._children[slot] = 0
        self._parent[slot] = parent
        if parent != NO_PARENT:
            self._parent_life[slot] = self._life[parent]
            self._children[parent] += 1
        self._num_resident += 1
        self._push(slot)

    def touch(self, slots: Sequence[int]) -> None:
        self._now += len(slots)
        for age, slot in enumerate(slots):
            self._tick[slot] = self._now - age
            if not self._children[slot]:
                self._push(slot)

    def remove(self, slot: int) -> None:
        assert self._tick[slot], f"slot {slot} removed twice"
        self._tick[slot] = 0
        self._aside.discard(slot)
        self._num_resident -= 1
        parent = self._parent[slot]
        if parent != NO_PARENT and self._tick[parent] and self._life[parent] == self._parent_life[slot]:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._push(parent)

    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        while self._heap:
            entry = self._heap[0]
            slot = entry & ((1 << TICK_SHIFT) - 1)
            if self._is_current(entry):
                if can_evict(slot):
                    return slot
                self._aside.add(slot)
            heapq.heappop(self._heap)
        return None

    def released(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._aside:
                self._aside.discard(slot)
                if not self._children[slot]:
                    self._push(slot)

    def check_integrity(self, slots: set[int]) -> None:
        resident = {slot for slot, tick in enumerate(self._tick) if tick}
        here = {entry & ((1 << TICK_SHIFT) - 1) for entry in self._heap if self._is_current(entry)}
        leaves = {slot for slot in resident if not self._children[slot]}
        children = dict.fromkeys(resident, 0)
        for slot in resident:
            parent = self._parent[slot]
            if parent in children and self._life[parent] == self._parent_life[slot]:
                children[parent] += 1
        checks = {
            "the policy orders exactly the resident slots": resident == slots and len(resident) == self._num_resident,
            "children are counted": all(children[slot] == self._children[slot] for slot in resident),
            "every leaf stands in the heap or is set aside": here | (self._aside & leaves) == leaves,
            "what is set aside is resident": self._aside <= resident,
        }
        for claim, holds in checks.items():
            if not holds:
                raise IntegrityError(f"eviction policy: not true that {claim}")

    def _is_current(self, entry: int) -> bool:
        slot = entry & ((1 << TICK_SHIFT) - 1)
        return self._tick[slot] == entry >> TICK_SHIFT and not self._children[slot] and slot not in self._aside

    def _push(self, slot: int) -> None:
        if slot in self._aside:  # comes back with its last use
            return
        if len(self._heap) > 2 * self._num_resident + 64:
            # A parent that lost its children twice without a use between stands here twice.
            self._heap = sorted({entry for entry in self._heap if self._is_current(entry)})
        heapq.heappush(self._heap, self._tick[slot] << TICK_SHIFT | slot)

    def _grow(self, slot: int) -> None:
        missing = slot + 1 - len(self._tick)
        if missing > 0:
            for column in (self._tick, self._parent, self._life, self._parent_life, self._children):
                column.extend([0] * missing)
