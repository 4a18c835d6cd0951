"""Slots of memory that blocks are put into: which are free, named by an index or leased, wherever they come from."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, IntegrityError, LeaseError
from kvtier.leases import Lease, Owner

__all__ = ["Mapped", "PoolUsage", "SlotGroup", "SlotPool"]


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A moment of the pool, in bytes unless named otherwise."""

    reserved_bytes: int
    """What the mapping covers: the configured size, cut to whole pages."""
    touched_bytes: int
    """What has pages by the background thread's work; grows to `reserved_bytes` after start."""
    pinned_bytes: int
    """What is locked in memory."""
    used_bytes: int
    """Slots that are resident or leased, whole slots counted."""
    num_slots_used: int
    num_slots_leased: int
    num_leases: int


class Mapped(Protocol):
    """Memory that slots lie in."""

    @property
    def buffer(self) -> npt.NDArray[np.uint8]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class SlotGroup:
    """Slots of one size class that are counted together."""

    slot_bytes: int
    num_used: int


class SlotPool(ABC):
    """Owns slots: which are free, resident (an index names them) or leased. Knows nothing of keys.

    A slot is handed out leased, is resident while the index names it, and is given up when it is neither resident nor
    leased. Where slots come from, and what becomes of one that is given up, is a subclass's.

    Mutable state: everything below `_lock`, guarded by it. The lock is a leaf: no call is made under it.
    """

    def __init__(self, memory: Mapped) -> None:
        self._memory: Mapped = memory
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}  # by size class
        self._free_ids: list[int] = []
        self._groups: Sequence[SlotGroup] = []
        self._offsets = array("Q")  # by slot, as all that follow
        self._group_of = array("I")
        self._leases = array("I")
        self._resident = bytearray()
        self._is_watched = bytearray()
        self._released: list[int] = []
        self._num_leases = 0
        self._num_leased = 0
        self._closed = False

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole mapping as bytes; index it by a lease's offset."""
        return self._memory.buffer

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The most bytes of slots that there may be at once."""

    def owner(self, name: str) -> Owner:
        return Owner(self, name)

    @abstractmethod
    def slot_bytes(self, nbytes: int) -> int:
        """The size class for blocks of `nbytes`; raises LayoutError when no slot could hold one."""

    @abstractmethod
    def capacity_slots(self, nbytes: int) -> int:
        """How many blocks of `nbytes` the pool would hold if it held nothing else."""

    @abstractmethod
    def expect(self, nbytes: int) -> None:
        """Blocks of this length will come. Any thread, never blocks."""

    def allocate(
        self, nbytes: int, owner: Owner, on_end: Callable[[], None] | None = None, *, resident: bool = False
    ) -> Lease | None:
        """A free slot, leased to `owner`; None, and nothing changed, when there is none: evict and ask again.

        on_end: called once when the lease ends, whoever ends it, by that thread and without the pool's lock.
        resident: an index is about to name the slot; it stays used after its last lease, until `clear_resident`.
        """
        slot_bytes = self.slot_bytes(nbytes)
        with self._lock:
            self._check_open(owner)
            free = self._free.setdefault(slot_bytes, [])
            if not free and not self._refill(slot_bytes):
                return None
            slot = free.pop()
            self._groups[self._group_of[slot]].num_used += 1
            self._resident[slot] = resident
            return self._lease(slot, owner, on_end)

    def allocate_all(self, nbytes: int, owner: Owner, on_ends: Sequence[Callable[[], None]]) -> list[Lease]:
        """As `allocate` of resident slots, one for each of `on_ends`, as far as there are slots without evicting."""
        slot_bytes = self.slot_bytes(nbytes)
        leases: list[Lease] = []
        with self._lock:
            self._check_open(owner)
            free = self._free.setdefault(slot_bytes, [])
            groups, group_of, offsets = self._groups, self._group_of, self._offsets
            for on_end in on_ends:
                if not free and not self._refill(slot_bytes):
                    break
                slot = free.pop()
                groups[group_of[slot]].num_used += 1
                self._resident[slot] = 1
                self._leases[slot] = 1
                leases.append(Lease(self, owner, slot, offsets[slot], slot_bytes, on_end))
            owner._leases.update(leases)
            self._num_leases += len(leases)
            self._num_leased += len(leases)
        return leases

    def lease(self, slot: int, owner: Owner) -> Lease:
        """Another lease on a resident slot, for a caller who holds the index's lock: it is still the block's."""
        return self.lease_all([slot], owner)[0]

    def lease_all(self, slots: Sequence[int], owner: Owner) -> list[Lease]:
        """As `lease`, each of them: thousands in some milliseconds."""
        with self._lock:
            self._check_open(owner)
            assert all(map(self._resident.__getitem__, slots)), "a slot is not resident"
            return [self._lease(slot, owner, None) for slot in slots]

    def on_end(self, lease: Lease, on_end: Callable[[], None]) -> bool:
        """Have the end of a lease told, as `allocate` does, of one that nobody is told of yet. False, and never told,
        when it has ended."""
        with self._lock:
            if lease._live:
                assert lease._on_end is None, f"the end of the lease of slot {lease.slot} is told to another"
                lease._on_end = on_end
            return lease._live

    def release_all(self, leases: Iterable[Lease]) -> None:
        """As `Lease.release`, each of them."""
        ended: list[Lease] = []
        with self._lock:
            for lease in leases:
                if lease._live:
                    lease._owner._leases.discard(lease)
                    self._end(lease)
                    ended.append(lease)
        _tell(ended)

    def set_resident(self, slot: int) -> None:
        """An index is about to name this leased slot: it stays used after its last lease, until `clear_resident`."""
        with self._lock:
            assert self._leases[slot], f"slot {slot} is not leased"
            assert not self._resident[slot], f"slot {slot} is resident"
            self._resident[slot] = 1

    def clear_resident(self, slot: int) -> None:
        """The index forgot this slot; it is given up once unleased."""
        with self._lock:
            assert self._resident[slot], f"slot {slot} is not resident"
            self._resident[slot] = 0
            if not self._leases[slot]:
                self._give_up(slot)

    def can_evict(self, slot: int) -> bool:
        """Whether it has no lease. One that has is told by `take_released` once the last has ended."""
        with self._lock:
            self._is_watched[slot] = self._leases[slot] > 0
            return not self._is_watched[slot]

    def take_released(self) -> list[int]:
        """The slots that `can_evict` refused and that lost their last lease since. Each is told once."""
        with self._lock:
            released, self._released = self._released, []
            return released

    def class_of(self, slot: int) -> int:
        """The size class of a resident slot, in bytes."""
        return self._groups[self._group_of[slot]].slot_bytes

    @abstractmethod
    def slab_to_reclaim(self, nbytes: int) -> list[int]:
        """The resident slots whose eviction lets `allocate` succeed where it found no slot, though of another class."""

    def usage(self) -> PoolUsage:
        with self._lock:
            used = [group for group in self._groups if group.num_used]
            return PoolUsage(
                reserved_bytes=self.nbytes,
                touched_bytes=0,
                pinned_bytes=0,
                used_bytes=sum(group.num_used * group.slot_bytes for group in used),
                num_slots_used=sum(group.num_used for group in used),
                num_slots_leased=self._num_leased,
                num_leases=self._num_leases,
            )

    def close(self) -> None:
        """Unmap. Leases still out are void: using one raises. The caller has stopped every copy first."""
        with self._lock:
            self._closed = True
        self._memory.close()

    def check_integrity(self) -> None:
        """free + used = total, every count matches; raises IntegrityError naming what does not. O(slots)."""
        with self._lock:
            claims = self._claims()
        for claim, holds in claims.items():
            if not holds:
                raise IntegrityError(f"host pool: not true that {claim}")

    # ---- under the lock ------------------------------------------------------------------------------------------

    @abstractmethod
    def _refill(self, slot_bytes: int) -> bool:
        """Put slots into the free list of a class that has none; False when there are none to be had."""

    @abstractmethod
    def _give_up(self, slot: int) -> None:
        """It was used, and is now neither resident nor leased."""

    @abstractmethod
    def _all_slots(self) -> list[int]:
        """The slots that there are, free ones too."""

    def _claims(self) -> dict[str, bool]:
        """What must be true of every pool, in words, and whether it is."""
        slots = self._all_slots()
        free = [slot for free in self._free.values() for slot in free]
        used = [slot for slot in slots if self._leases[slot] or self._resident[slot]]
        counts = dict.fromkeys(range(len(self._groups)), 0)
        for slot in used:
            counts[self._group_of[slot]] += 1
        return {
            "free and used slots are all slots, each once": sorted(free + used) == sorted(slots),
            "no slot is there twice": len(set(slots)) == len(slots),
            "ids are slots or free, each once": sorted(slots + self._free_ids) == list(range(len(self._offsets))),
            "leases add up": sum(self._leases) == self._num_leases,
            "leased slots add up": sum(map(bool, self._leases)) == self._num_leased,
            "used slots are counted": list(counts.values()) == [group.num_used for group in self._groups],
        }

    def _check_open(self, owner: Owner) -> None:
        if self._closed or owner._closed:
            raise ClosedError(f"{'the host pool' if self._closed else f'lease owner {owner.name!r}'} is closed")

    def _lease(self, slot: int, owner: Owner, on_end: Callable[[], None] | None) -> Lease:
        slot_bytes = self._groups[self._group_of[slot]].slot_bytes
        lease = Lease(self, owner, slot, self._offsets[slot], slot_bytes, on_end)
        owner._leases.add(lease)
        self._num_leases += 1
        self._num_leased += not self._leases[slot]
        self._leases[slot] += 1
        return lease

    def _end(self, lease: Lease) -> None:
        lease._live = False
        slot = lease.slot
        self._num_leases -= 1
        self._leases[slot] -= 1
        if not self._leases[slot]:
            self._num_leased -= 1
            if self._is_watched[slot]:
                self._is_watched[slot] = 0
                self._released.append(slot)
            if not self._resident[slot]:
                self._give_up(slot)

    def _new_slot(self, group: int, offset: int) -> int:
        if self._free_ids:
            slot = self._free_ids.pop()
            self._offsets[slot] = offset
            self._group_of[slot] = group
            return slot
        self._offsets.append(offset)
        self._group_of.append(group)
        self._leases.append(0)
        self._resident.append(0)
        self._is_watched.append(0)
        return len(self._offsets) - 1

    # ---- what leases ask -----------------------------------------------------------------------------------------

    def _release(self, lease: Lease) -> bool:
        with self._lock:
            if not lease._live:
                return False
            lease._owner._leases.discard(lease)
            self._end(lease)
        if lease._on_end is not None:
            _tell([lease])
        return True

    def _close_owner(self, owner: Owner) -> None:
        with self._lock:
            owner._closed = True
            ended, owner._leases = owner._leases, set()
            for lease in ended:
                self._end(lease)
        _tell(ended)

    def _view(self, lease: Lease) -> memoryview:
        if not lease._live:
            raise LeaseError(f"slot {lease.slot} was used after its lease ended")
        return self._memory.buffer[lease.offset : lease.offset + lease.nbytes].data


def _tell(ended: Iterable[Lease]) -> None:
    for lease in ended:
        if lease._on_end is not None:
            on_end, lease._on_end = lease._on_end, None  # mostly it knows the lease: a circle else
            on_end()
