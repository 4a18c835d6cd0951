"""The host pool: one mapping carved into slots, by slabs per size class, and which of them are leased."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, ConfigError, IntegrityError, LayoutError, LeaseError
from kvtier.leases import Lease, Owner
from kvtier.memory import PAGE_BYTES, PoolMemory

__all__ = ["HostPool", "Lease", "Owner", "PoolUsage"]

NO_SLAB = 0xFFFFFFFF


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


@dataclass(slots=True)
class _Slab:
    """A stretch of the mapping, carved into slots of one size class, or none."""

    offset: int
    nbytes: int
    slot_bytes: int
    slots: list[int]
    num_used: int


class HostPool:
    """Owns slots: which are free, resident (an index names them) or leased. Knows nothing of keys.

    A slot is handed out leased, is resident while the index names it, and is free again when it is neither resident nor
    leased. Slots of a size class come from slabs; a slab whose slots are all free may pass to another class.

    Mutable state: everything below `_lock`, guarded by it. The lock is a leaf: no call is made under it.
    """

    def __init__(self, memory: PoolMemory, slab_bytes: int) -> None:
        if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES:
            raise ConfigError(f"host.slab must be a multiple of {PAGE_BYTES} bytes, not {slab_bytes}")
        self._memory = memory
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        sizes = range(0, memory.nbytes, slab_bytes)
        self._slabs = [_Slab(start, min(slab_bytes, memory.nbytes - start), 0, [], 0) for start in sizes]
        self._unassigned = list(range(len(self._slabs) - 1, -1, -1))
        self._free: dict[int, list[int]] = {}
        self._free_ids: list[int] = []
        self._offsets = array("Q")
        self._slab_of = array("I")
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
    def fd(self) -> int:
        """The memfd behind the mapping, for workers and clients that map it too."""
        return self._memory.fd

    def owner(self, name: str) -> Owner:
        return Owner(self, name)

    def slot_bytes(self, nbytes: int) -> int:
        """The size class for blocks of `nbytes`; raises LayoutError when no slab could hold one."""
        rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if nbytes < 1 or rounded > self._slabs[0].nbytes:
            raise LayoutError(
                f"a block of {nbytes} bytes does not fit a slab of {self._slabs[0].nbytes} bytes; "
                f"raise host.slab (now {self._slab_bytes}) and host.size (now {self._memory.nbytes})"
            )
        return rounded

    def capacity_slots(self, nbytes: int) -> int:
        """How many blocks of `nbytes` the pool would hold if it held nothing else."""
        slot_bytes = self.slot_bytes(nbytes)
        return sum(slab.nbytes // slot_bytes for slab in self._slabs)

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
            if not free and not self._assign_slab(slot_bytes):
                return None
            slot = free.pop()
            self._slabs[self._slab_of[slot]].num_used += 1
            self._resident[slot] = resident
            return self._lease(slot, owner, on_end)

    def allocate_all(self, nbytes: int, owner: Owner, on_ends: Sequence[Callable[[], None]]) -> list[Lease]:
        """As `allocate` of resident slots, one for each of `on_ends`, as far as there are slots without evicting."""
        slot_bytes = self.slot_bytes(nbytes)
        leases: list[Lease] = []
        with self._lock:
            self._check_open(owner)
            free = self._free.setdefault(slot_bytes, [])
            slabs, slab_of, offsets = self._slabs, self._slab_of, self._offsets
            for on_end in on_ends:
                if not free and not self._assign_slab(slot_bytes):
                    break
                slot = free.pop()
                slabs[slab_of[slot]].num_used += 1
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

    def clear_resident(self, slot: int) -> None:
        """The index forgot this slot; it is free once unleased."""
        with self._lock:
            assert self._resident[slot], f"slot {slot} is not resident"
            self._resident[slot] = 0
            if not self._leases[slot]:
                self._free_slot(slot)

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
        return self._slabs[self._slab_of[slot]].slot_bytes

    def slab_to_reclaim(self, nbytes: int) -> list[int]:
        """The resident slots of another class's least used slab without leases: evict them and `allocate` succeeds."""
        slot_bytes = self.slot_bytes(nbytes)
        with self._lock:
            if not self._free.keys() - {slot_bytes}:
                return []
            best: _Slab | None = None
            for slab in self._slabs:
                if slab.slot_bytes in (0, slot_bytes) or slab.nbytes < slot_bytes:
                    continue
                if (best is None or slab.num_used < best.num_used) and not any(self._leases[s] for s in slab.slots):
                    best = slab
            return [slot for slot in best.slots if self._resident[slot]] if best else []

    def usage(self) -> PoolUsage:
        with self._lock:
            used = [slab for slab in self._slabs if slab.slot_bytes]
            return PoolUsage(
                reserved_bytes=self._memory.nbytes,
                touched_bytes=self._memory.touched_bytes,
                pinned_bytes=self._memory.pinned_bytes,
                used_bytes=sum(slab.num_used * slab.slot_bytes for slab in used),
                num_slots_used=sum(slab.num_used for slab in used),
                num_slots_leased=self._num_leased,
                num_leases=self._num_leases,
            )

    def wait_touched(self, timeout: float) -> bool:
        """Block until every page is there; for benchmarks."""
        return self._memory.wait_touched(timeout)

    def close(self) -> None:
        """Unmap. Leases still out are void: using one raises. The caller has stopped every copy first."""
        with self._lock:
            self._closed = True
        self._memory.close()

    def check_integrity(self) -> None:
        """free + used = total, every count matches; raises IntegrityError naming what does not. O(slots)."""
        with self._lock:
            free = [slot for slots in self._free.values() for slot in slots]
            carved = [slot for slab in self._slabs for slot in slab.slots]
            used = [slot for slot in carved if self._leases[slot] or self._resident[slot]]
            checks = {
                "free and used slots are all slots, each once": sorted(free + used) == sorted(carved),
                "no slot is carved twice": len(set(carved)) == len(carved),
                "leases add up": sum(self._leases) == self._num_leases,
                "leased slots add up": sum(map(bool, self._leases)) == self._num_leased,
                "slabs count their used slots": all(
                    slab.num_used == sum(bool(self._leases[s] or self._resident[s]) for s in slab.slots)
                    for slab in self._slabs
                ),
                "slots lie inside their slab": all(
                    slab.offset <= self._offsets[s] <= slab.offset + slab.nbytes - slab.slot_bytes
                    for slab in self._slabs
                    for s in slab.slots
                ),
            }
        for claim, holds in checks.items():
            if not holds:
                raise IntegrityError(f"host pool: not true that {claim}")

    def _check_open(self, owner: Owner) -> None:
        if self._closed or owner._closed:
            raise ClosedError(f"{'the host pool' if self._closed else f'lease owner {owner.name!r}'} is closed")

    def _lease(self, slot: int, owner: Owner, on_end: Callable[[], None] | None) -> Lease:
        slot_bytes = self._slabs[self._slab_of[slot]].slot_bytes
        lease = Lease(self, owner, slot, self._offsets[slot], slot_bytes, on_end)
        owner._leases.add(lease)
        self._num_leases += 1
        self._num_leased += not self._leases[slot]
        self._leases[slot] += 1
        return lease

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
                self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        slab = self._slabs[self._slab_of[slot]]
        slab.num_used -= 1
        self._free[slab.slot_bytes].append(slot)

    def _view(self, lease: Lease) -> memoryview:
        if not lease._live:
            raise LeaseError(f"slot {lease.slot} was used after its lease ended")
        return self._memory.buffer[lease.offset : lease.offset + lease.nbytes].data

    def _assign_slab(self, slot_bytes: int) -> bool:
        """Give the class one more slab: an unassigned one, or one that another class no longer uses."""
        index = self._take_unassigned(slot_bytes)
        if index is None:
            index = self._dissolve_unused(slot_bytes)
        if index is None:
            return False
        slab = self._slabs[index]
        slab.slot_bytes = slot_bytes
        slab.slots = [self._new_slot(index, slab.offset + i * slot_bytes) for i in range(slab.nbytes // slot_bytes)]
        self._free[slot_bytes].extend(reversed(slab.slots))
        return True

    def _take_unassigned(self, slot_bytes: int) -> int | None:
        """Only the last slab of the pool can be too short, so this looks at two at most."""
        for place in range(len(self._unassigned) - 1, -1, -1):
            if self._slabs[self._unassigned[place]].nbytes >= slot_bytes:
                return self._unassigned.pop(place)
        return None

    def _dissolve_unused(self, slot_bytes: int) -> int | None:
        if not self._free.keys() - {slot_bytes}:  # there never was another class: do not walk the slabs for each block
            return None
        for index, slab in enumerate(self._slabs):
            if slab.slot_bytes and slab.slot_bytes != slot_bytes and not slab.num_used and slab.nbytes >= slot_bytes:
                gone = set(slab.slots)
                self._free[slab.slot_bytes] = [slot for slot in self._free[slab.slot_bytes] if slot not in gone]
                for slot in slab.slots:
                    self._slab_of[slot] = NO_SLAB
                self._free_ids.extend(reversed(slab.slots))
                slab.slots = []
                return index
        return None

    def _new_slot(self, slab: int, offset: int) -> int:
        if self._free_ids:
            slot = self._free_ids.pop()
            self._offsets[slot] = offset
            self._slab_of[slot] = slab
            return slot
        self._offsets.append(offset)
        self._slab_of.append(slab)
        self._leases.append(0)
        self._resident.append(0)
        self._is_watched.append(0)
        return len(self._offsets) - 1


def _tell(ended: Iterable[Lease]) -> None:
    for lease in ended:
        if lease._on_end is not None:
            on_end, lease._on_end = lease._on_end, None  # mostly it knows the lease: a circle else
            on_end()
