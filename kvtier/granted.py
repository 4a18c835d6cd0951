"""A host pool of slots in a kvtier-server's memory, which it grants one by one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from kvtier.errors import IntegrityError, LayoutError
from kvtier.grants import GrantedClass, Handle, PageMap, SlotKind, Stock
from kvtier.leases import Lease, Owner
from kvtier.memory import PAGE_BYTES
from kvtier.slots import Mapped, SlotPool

__all__ = ["GrantedPool", "Handle", "SlotKind", "Stock"]

PRIVATE, SPARE, SHARED, LOST = SlotKind  # names of this module: an enumeration finds its members slowly
GONE = 0  # no slot has this id


class GrantedPool(SlotPool):
    """Owns what is known of the slots; has no connection and no thread. A keeper, who has both, is woken when there is
    work, and does it: gets slots for a class that has few, tells the server what it has back, has idle blocks
    forgotten.

    A slot that is given up is free again, or gone: see `SlotKind`. Connections are counted by eras, which grow; all
    slots but lost ones are of one era. Handles are told apart within an era.

    Mutable state: guarded by the lock of `SlotPool`.
    """

    def __init__(self, memory: Mapped, max_bytes: int, on_work: Callable[[], None]) -> None:
        """max_bytes: of all slots at once, free ones too. on_work: called once there is work, and not again before
        `take_work`, by whichever thread made it and without the lock; must be quick."""
        super().__init__(memory)
        self._max_bytes = max_bytes
        self._on_work = on_work
        self._classes: list[GrantedClass] = []
        self._groups = self._classes
        self._class_ids: dict[int, int] = {}  # by slot_bytes
        self._kinds = bytearray()  # by slot, as the next
        self._handles = array("Q")  # of lost ones their era
        self._slot_of: dict[int, int] = {}  # by handle, of all that are not lost
        self._era: int | None = None
        self._lost_era: int | None = None
        self._returned: dict[int, None] = {}  # handles
        self._idle: dict[int, None] = {}
        self._pages = PageMap()
        self._granted_bytes = 0
        self._has_work = False
        self._is_told = False

    @property
    def nbytes(self) -> int:
        return self._max_bytes

    @property
    def granted_bytes(self) -> int:
        """Of all slots that there are; so much less than `nbytes` may come."""
        return self._granted_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is no slot, lost ones included: nobody uses the mapping."""
        return not self._granted_bytes

    def lost_eras(self) -> set[int]:
        """Which connections these slots are of. O(slots)."""
        with self._lock:
            return {self._handles[slot] for slot, kind in enumerate(self._kinds) if kind == LOST}

    def slot_bytes(self, nbytes: int) -> int:
        """The size class for blocks of `nbytes`; raises LayoutError when the pool could hold none."""
        rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if nbytes < 1 or rounded > self._max_bytes:
            raise LayoutError(f"a block of {nbytes} bytes does not fit {self._max_bytes} bytes; raise host.size")
        return rounded

    def capacity_slots(self, nbytes: int) -> int:
        return self._max_bytes // self.slot_bytes(nbytes)

    def slab_to_reclaim(self, nbytes: int) -> list[int]:  # noqa: ARG002
        """None: eviction gives no slot to another class. The keeper does, with `take_surplus`."""
        return []

    # ---- slots come and go, by the keeper ------------------------------------------------------------------------

    def expect(self, nbytes: int) -> None:
        slot_bytes = self.slot_bytes(nbytes)
        with self._lock:
            if slot_bytes not in self._free:
                self._free[slot_bytes] = []
                self._has_work = True
        self._tell_work()

    def classes(self) -> dict[int, Stock]:
        """The size classes that blocks were expected or allocated of."""
        with self._lock:
            return {size: Stock(len(free), self._class(size).num_slots) for size, free in self._free.items()}

    def want(self, slot_bytes: int, num_free: int) -> None:
        """Fewer free slots of this class are work, from the next allocation on; 1 at first. With 0 only an allocation
        that finds none is."""
        with self._lock:
            self._class(slot_bytes).num_wanted = num_free

    def add(self, slot_bytes: int, grants: Sequence[tuple[int, int]], era: int) -> list[int]:
        """The server granted slots, given by handle and offset: they are free. Returns the handles for which there is
        no room. Nothing is added, nor to be given back, of an era that is lost.

        Raises IntegrityError, and adds none, where a slot overlaps another, lost ones included, lies outside the
        mapping, or has a handle that is in use.
        """
        limit = self._memory.buffer.nbytes
        with self._lock:
            if not self._begin(era):
                return []
            num_fitting = max(0, self._max_bytes - self._granted_bytes) // slot_bytes
            fitting = grants[:num_fitting]
            self._check_new(slot_bytes, fitting, limit)
            slots = [self._put(slot_bytes, handle, offset, PRIVATE) for handle, offset in fitting]
            self._free.setdefault(slot_bytes, []).extend(reversed(slots))
        return [handle for handle, _ in grants[num_fitting:]]

    def adopt_all(self, slot_bytes: int, grants: Sequence[tuple[int, int, Owner]], era: int) -> list[Lease | None]:
        """The server leased us blocks, given by handle and offset: their slots, SHARED and each leased to its owner,
        not resident until `set_resident`. None, and nothing changed, for one for which there is no room, whose era is
        lost, or that `add` would not take: it may lie in a slot that is used here still for a block of before.

        Raises IntegrityError where slots of another era are here, ClosedError where an owner has ended."""
        limit = self._memory.buffer.nbytes
        leases: list[Lease | None] = []
        with self._lock:
            for owner in {owner for _, _, owner in grants}:
                self._check_open(owner)
            is_lost = not self._begin(era)
            for handle, offset, owner in grants:
                has_room = self._granted_bytes + slot_bytes <= self._max_bytes
                if is_lost or not has_room or self._flaw(slot_bytes, handle, offset, limit) is not None:
                    leases.append(None)
                    continue
                slot = self._put(slot_bytes, handle, offset, SHARED)
                self._groups[self._group_of[slot]].num_used += 1
                leases.append(self._lease(slot, owner, None))
        return leases

    def mark(self, slots: Iterable[int], kind: SlotKind) -> None:
        """These used slots were published, and are SHARED or SPARE from now on; those lost meanwhile stay lost."""
        assert kind in (SPARE, SHARED), f"a slot cannot be made {kind.name}"
        with self._lock:
            for slot in slots:
                if self._kinds[slot] == LOST:
                    continue
                assert self._kinds[slot] == PRIVATE, f"slot {slot} is not private"
                assert self._leases[slot] or self._resident[slot], f"slot {slot} is free"
                self._kinds[slot] = kind
                self._note_idle(slot)
        self._tell_work()

    def handle_of(self, slot: int) -> Handle | None:
        """None when it is lost, or no slot any more."""
        with self._lock:
            if self._era is None or self._kinds[slot] in (GONE, LOST):
                return None
            return Handle(self._handles[slot], self._era)

    def is_private(self, slot: int) -> bool:
        """Whether this used slot was not published, nor found to be the copy of a block that the server holds."""
        return self._kinds[slot] == PRIVATE

    def is_idle(self, slot: int) -> bool:
        """Whether it is resident for no good: nobody leases it, and it is not PRIVATE. Stays so for a caller who holds
        the index's lock."""
        with self._lock:
            return self._is_idle(slot)

    def take_work(self) -> bool:
        """Whether there was work since this was last asked. Ask first, then look at all there may be."""
        with self._lock:
            had_work, self._has_work, self._is_told = self._has_work, False, False
            return had_work

    def take_idle(self) -> list[int]:
        """Idle slots, which the index should forget; each once until it is leased again. Lost ones are among them.
        Whoever forgets them asks `is_idle` of each, under the index's lock: it may be leased by then."""
        with self._lock:
            idle, self._idle = self._idle, {}
            return [slot for slot in idle if self._is_idle(slot)]

    def take_returned(self, era: int) -> list[int]:
        """Handles of SHARED slots that were given up: they are gone here, and the server is to release them."""
        with self._lock:
            if era != self._era:
                return []
            returned, self._returned = self._returned, {}
            return list(returned)

    def take_surplus(self, slot_bytes: int, number: int) -> list[int]:
        """Handles of free slots, at most `number`, which are gone from here: the server is to have them back."""
        with self._lock:
            free = self._free.get(slot_bytes, [])
            taken, free[:number] = free[:number], []  # those that were free the longest
            handles = [self._handles[slot] for slot in taken]
            for slot in taken:
                self._drop(slot)
            return handles

    def disown(self) -> None:
        """The connection that all slots were granted on is lost. Free slots and handles to return are gone, used slots
        are LOST. O(slots)."""
        with self._lock:
            if self._era is None:
                return
            self._lost_era = self._era
            for slots in self._free.values():
                for slot in slots:
                    self._drop(slot)
                slots.clear()
            for slot in self._slot_of.values():
                self._kinds[slot], self._handles[slot] = LOST, self._era
                self._note_idle(slot)
            self._slot_of.clear()
            self._returned.clear()
            self._era = None
            self._has_work = True
        self._tell_work()

    # ---- as of any pool, and the keeper is told ------------------------------------------------------------------

    def allocate(
        self, nbytes: int, owner: Owner, on_end: Callable[[], None] | None = None, *, resident: bool = False
    ) -> Lease | None:
        lease = super().allocate(nbytes, owner, on_end, resident=resident)
        self._check_stock(nbytes)
        return lease

    def allocate_all(self, nbytes: int, owner: Owner, on_ends: Sequence[Callable[[], None]]) -> list[Lease]:
        leases = super().allocate_all(nbytes, owner, on_ends)
        self._check_stock(nbytes)
        return leases

    def clear_resident(self, slot: int) -> None:
        super().clear_resident(slot)
        self._tell_work()

    def release_all(self, leases: Iterable[Lease]) -> None:
        try:
            super().release_all(leases)
        finally:
            self._tell_work()

    def _release(self, lease: Lease) -> bool:
        try:
            return super()._release(lease)
        finally:
            self._tell_work()

    def _close_owner(self, owner: Owner) -> None:
        try:
            super()._close_owner(owner)
        finally:
            self._tell_work()

    def _check_stock(self, nbytes: int) -> None:
        slot_bytes = self.slot_bytes(nbytes)
        with self._lock:
            if len(self._free[slot_bytes]) < self._class(slot_bytes).num_wanted:
                self._has_work = True
        self._tell_work()

    def _tell_work(self) -> None:
        """Without the lock, after what may have made work."""
        if self._has_work and not self._is_told:
            with self._lock:
                is_new = self._has_work and not self._is_told
                self._is_told = self._has_work
            if is_new:
                self._on_work()

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _refill(self, slot_bytes: int) -> bool:  # noqa: ARG002
        self._has_work = True
        return False

    def _end(self, lease: Lease) -> None:
        super()._end(lease)
        self._note_idle(lease.slot)

    def _is_idle(self, slot: int) -> bool:
        return self._kinds[slot] > PRIVATE and bool(self._resident[slot]) and not self._leases[slot]

    def _note_idle(self, slot: int) -> None:
        if self._is_idle(slot):
            self._idle[slot] = None
            self._has_work = True

    def _give_up(self, slot: int) -> None:
        group, kind = self._classes[self._group_of[slot]], self._kinds[slot]
        group.num_used -= 1
        if kind in (PRIVATE, SPARE):
            self._kinds[slot] = PRIVATE
            self._free[group.slot_bytes].append(slot)
            return
        if kind == SHARED:
            self._returned[self._handles[slot]] = None
        self._drop(slot)
        if kind == SHARED or not self._granted_bytes:
            self._has_work = True

    def _class(self, slot_bytes: int) -> GrantedClass:
        return self._classes[self._class_id(slot_bytes)]

    def _class_id(self, slot_bytes: int) -> int:
        number = self._class_ids.setdefault(slot_bytes, len(self._classes))
        if number == len(self._classes):
            self._classes.append(GrantedClass(slot_bytes, 0))
        return number

    def _begin(self, era: int) -> bool:
        """False when it is lost. Raises when slots of another are there that nobody disowned."""
        if self._lost_era is not None and era <= self._lost_era:
            return False
        if era != self._era:
            if self._slot_of:
                raise IntegrityError(f"host pool: slots of connection {era}, but those of {self._era} are in use")
            self._era = era
            self._returned.clear()
        return True

    def _check_new(self, slot_bytes: int, grants: Sequence[tuple[int, int]], limit: int) -> None:
        flaws = (self._flaw(slot_bytes, handle, offset, limit) for handle, offset in grants)
        if (flaw := next(filter(None, flaws), None)) is not None:
            raise IntegrityError(f"host pool: {flaw}")
        if len({handle for handle, _ in grants}) < len(grants):
            raise IntegrityError("host pool: a handle was given to two slots")
        offsets = sorted(offset for _, offset in grants)
        if any(after - offset < slot_bytes for offset, after in pairwise(offsets)):
            raise IntegrityError("host pool: two slots of one grant overlap")

    def _flaw(self, slot_bytes: int, handle: int, offset: int, limit: int) -> str | None:
        """Why it can be no new slot, however many there are: thousands are looked at one by one."""
        if handle in self._slot_of or handle in self._returned:
            return "a handle was given to two slots"
        if offset % PAGE_BYTES or slot_bytes % PAGE_BYTES or not 0 <= offset <= limit - slot_bytes:
            return f"{slot_bytes} bytes at {offset} are no slot of {limit} bytes"
        if not self._pages.are_free(offset, slot_bytes):
            return f"{slot_bytes} bytes at {offset} overlap a slot that is in use"
        return None

    def _put(self, slot_bytes: int, handle: int, offset: int, kind: SlotKind) -> int:
        number = self._class_id(slot_bytes)
        slot = self._new_slot(number, offset)
        if slot == len(self._kinds):
            self._kinds.append(GONE)
            self._handles.append(0)
        self._kinds[slot] = kind
        self._handles[slot] = handle
        self._slot_of[handle] = slot
        self._classes[number].num_slots += 1
        self._granted_bytes += slot_bytes
        self._pages.take(offset, slot_bytes)
        return slot

    def _drop(self, slot: int) -> None:
        """It is gone."""
        group = self._classes[self._group_of[slot]]
        if self._kinds[slot] != LOST:
            del self._slot_of[self._handles[slot]]
        self._kinds[slot] = GONE
        self._free_ids.append(slot)
        group.num_slots -= 1
        self._granted_bytes -= group.slot_bytes
        self._pages.free(self._offsets[slot], group.slot_bytes)

    def _all_slots(self) -> list[int]:
        return [slot for slot, kind in enumerate(self._kinds) if kind != GONE]

    def _claims(self) -> dict[str, bool]:
        slots = self._all_slots()
        owned = {self._handles[slot]: slot for slot in slots if self._kinds[slot] != LOST}
        spans = sorted((self._offsets[slot], self._offsets[slot] + self.class_of(slot)) for slot in slots)
        sizes = dict.fromkeys(range(len(self._classes)), 0)
        for slot in slots:
            sizes[self._group_of[slot]] += 1
        return super()._claims() | {
            "slots do not overlap": all(end <= start for (_, end), (start, _) in pairwise(spans)),
            "the pages of slots, and no others, are taken": self._pages.num_taken * PAGE_BYTES == self._granted_bytes
            and all(self._pages.are_taken(start, end - start) for start, end in spans),
            "bytes add up": sum(end - start for start, end in spans) == self._granted_bytes,
            "there are no more bytes than there may be": self._granted_bytes <= self._max_bytes,
            "slots of each class are counted": list(sizes.values()) == [group.num_slots for group in self._classes],
            "free slots are private": all(
                self._kinds[slot] == PRIVATE for free in self._free.values() for slot in free
            ),
            "handles name the slots that are not lost": owned == self._slot_of,
            "handles to return are of no slot": self._slot_of.keys().isdisjoint(self._returned),
            "slots and handles are of an era": self._era is not None or not (self._slot_of or self._returned),
            "nobody is told of no work": self._has_work or not self._is_told,
        }
