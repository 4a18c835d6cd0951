"""The host pool: one mapping carved into slots, by slabs per size class."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtier.errors import ConfigError, LayoutError
from kvtier.leases import Lease, Owner
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.slots import PoolUsage, SlotGroup, SlotPool

__all__ = ["HostPool", "Lease", "Owner", "PoolUsage"]

NO_SLAB = 0xFFFFFFFF


@dataclass(slots=True)
class _Slab(SlotGroup):
    """A stretch of the mapping, carved into slots of one size class, or none (0)."""

    offset: int
    nbytes: int
    slots: list[int]


class HostPool(SlotPool):
    """Owns the mapping's slabs. Slots of a size class come from slabs; a slab whose slots are all free may pass to
    another class.

    Mutable state: guarded by the lock of `SlotPool`.
    """

    def __init__(self, memory: PoolMemory, slab_bytes: int) -> None:
        if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES:
            raise ConfigError(f"host.slab must be a multiple of {PAGE_BYTES} bytes, not {slab_bytes}")
        super().__init__(memory)
        self._pages = memory
        self._slab_bytes = slab_bytes
        sizes = range(0, memory.nbytes, slab_bytes)
        self._slabs = [_Slab(0, 0, start, min(slab_bytes, memory.nbytes - start), []) for start in sizes]
        self._groups = self._slabs
        self._unassigned = list(range(len(self._slabs) - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """What the mapping covers."""
        return self._pages.nbytes

    def slot_bytes(self, nbytes: int) -> int:
        """The size class for blocks of `nbytes`; raises LayoutError when no slab could hold one."""
        rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if nbytes < 1 or rounded > self._slabs[0].nbytes:
            raise LayoutError(
                f"a block of {nbytes} bytes does not fit a slab of {self._slabs[0].nbytes} bytes; "
                f"raise host.slab (now {self._slab_bytes}) and host.size (now {self._pages.nbytes})"
            )
        return rounded

    def capacity_slots(self, nbytes: int) -> int:
        slot_bytes = self.slot_bytes(nbytes)
        return sum(slab.nbytes // slot_bytes for slab in self._slabs)

    def expect(self, nbytes: int) -> None:
        """Nothing to do: slabs are carved when the first block comes."""

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
        pages = self._pages
        return replace(super().usage(), touched_bytes=pages.touched_bytes, pinned_bytes=pages.pinned_bytes)

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _all_slots(self) -> list[int]:
        return [slot for slab in self._slabs for slot in slab.slots]

    def _claims(self) -> dict[str, bool]:
        return super()._claims() | {
            "slots lie inside their slab": all(
                self._slabs[self._group_of[s]] is slab
                and slab.offset <= self._offsets[s] <= slab.offset + slab.nbytes - slab.slot_bytes
                for slab in self._slabs
                for s in slab.slots
            ),
        }

    def _give_up(self, slot: int) -> None:
        slab = self._slabs[self._group_of[slot]]
        slab.num_used -= 1
        self._free[slab.slot_bytes].append(slot)

    def _refill(self, slot_bytes: int) -> bool:
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
                    self._group_of[slot] = NO_SLAB
                self._free_ids.extend(reversed(slab.slots))
                slab.slots = []
                return index
        return None
