"""Slots that a server grants: told stories at tiny sizes, then any order of calls against a plain model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import ClosedError, IntegrityError, LayoutError, LeaseError
from kvtier.granted import GrantedPool, Handle, SlotKind, Stock
from kvtier.leases import Lease, Owner
from kvtier.memory import PAGE_BYTES

PRIVATE, SPARE, SHARED, LOST = SlotKind


class Pages:
    """Memory of a server, of so many pages."""

    def __init__(self, num_pages: int) -> None:
        self.buffer = np.zeros(num_pages * PAGE_BYTES, np.uint8)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """A pool that may have eight pages, of the 32 that the server has."""

    def __init__(self) -> None:
        self.calls = 0
        self.memory = Pages(32)
        self.pool = GrantedPool(self.memory, 8 * PAGE_BYTES, self.on_work)
        self.owner = self.pool.owner("test")

    def on_work(self) -> None:
        self.pool.usage()  # which takes the pool's lock
        self.calls += 1

    def add(self, *pages: int, era: int = 1) -> None:
        """A page each, whose handle is 100 more than its number."""
        grants = [(page + 100, page * PAGE_BYTES) for page in pages]
        assert self.pool.add(PAGE_BYTES, grants, era) == []

    def adopt(self, page: int, era: int = 1) -> Lease:
        (lease,) = self.pool.adopt_all(PAGE_BYTES, [(page + 100, page * PAGE_BYTES, self.owner)], era)
        assert lease is not None
        return lease

    def allocate(self, *, resident: bool = False) -> Lease:
        lease = self.pool.allocate(PAGE_BYTES, self.owner, resident=resident)
        assert lease is not None
        return lease

    def num_free(self) -> int:
        return self.pool.classes()[PAGE_BYTES].num_free

    def works(self) -> bool:
        """Whether the keeper was woken, once, since this was last asked."""
        calls, self.calls = self.calls, 0
        assert calls <= 1
        assert self.pool.take_work() == bool(calls)
        return bool(calls)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.pool.check_integrity()
    rig.owner.close()
    rig.pool.check_integrity()
    rig.pool.close()
    assert rig.memory.is_closed


# ---- granted and allocated -------------------------------------------------------------------------------------------


def test_granted_slots_are_allocated_each_once_and_are_free_again(rig: Rig) -> None:
    rig.add(7, 3, 12)
    leases = [rig.allocate() for _ in range(3)]
    assert [lease.offset for lease in leases] == [7 * PAGE_BYTES, 3 * PAGE_BYTES, 12 * PAGE_BYTES]
    assert rig.pool.allocate(1, rig.owner) is None
    assert rig.pool.handle_of(leases[1].slot) == Handle(103, 1)
    leases[1].view[:4] = b"here"
    assert rig.memory.buffer[3 * PAGE_BYTES :][:4].tobytes() == b"here"
    leases[1].release()
    assert rig.allocate().offset == leases[1].offset
    usage = rig.pool.usage()
    assert (usage.reserved_bytes, usage.used_bytes) == (8 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert (usage.touched_bytes, usage.pinned_bytes, usage.num_slots_used) == (0, 0, 3)
    assert rig.pool.slab_to_reclaim(PAGE_BYTES) == []


def test_many_are_allocated_as_far_as_they_go_and_are_resident(rig: Rig) -> None:
    rig.add(0, 1)
    ended: list[int] = []
    leases = rig.pool.allocate_all(1, rig.owner, [lambda i=i: ended.append(i) for i in range(3)])  # type: ignore[misc]
    assert len(leases) == 2
    rig.pool.release_all(leases)
    assert ended == [0, 1]
    assert rig.num_free() == 0
    for lease in leases:
        rig.pool.clear_resident(lease.slot)
    assert rig.num_free() == 2


def test_size_classes_do_not_mix(rig: Rig) -> None:
    rig.add(0)
    assert rig.pool.add(2 * PAGE_BYTES, [(1, 2 * PAGE_BYTES)], 1) == []
    large = rig.pool.allocate(PAGE_BYTES + 1, rig.owner)
    assert large is not None
    assert (large.nbytes, rig.pool.class_of(large.slot)) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert rig.pool.allocate(PAGE_BYTES + 1, rig.owner) is None
    assert rig.pool.classes() == {PAGE_BYTES: Stock(1, 1), 2 * PAGE_BYTES: Stock(0, 1)}
    assert (rig.pool.granted_bytes, rig.pool.capacity_slots(PAGE_BYTES), rig.pool.nbytes) == (
        3 * PAGE_BYTES,
        8,
        8 * PAGE_BYTES,
    )
    assert rig.pool.capacity_slots(3 * PAGE_BYTES) == 2


def test_a_block_larger_than_the_pool_is_refused(rig: Rig) -> None:
    for nbytes in (8 * PAGE_BYTES + 1, 0, -1):
        with pytest.raises(LayoutError, match=f"{nbytes} bytes does not fit .* raise host.size"):
            rig.pool.expect(nbytes)
    assert rig.pool.slot_bytes(8 * PAGE_BYTES) == 8 * PAGE_BYTES


def test_grants_beyond_the_pools_size_are_handed_back(rig: Rig) -> None:
    rig.add(*range(6))
    assert rig.pool.add(PAGE_BYTES, [(page + 100, page * PAGE_BYTES) for page in range(6, 10)], 1) == [108, 109]
    assert rig.pool.add(PAGE_BYTES, [(110, 10 * PAGE_BYTES)], 1) == [110]
    assert rig.pool.adopt_all(PAGE_BYTES, [(110, 10 * PAGE_BYTES, rig.owner)], 1) == [None]
    assert rig.pool.take_surplus(PAGE_BYTES, 1) == [105]
    assert rig.adopt(10).offset == 10 * PAGE_BYTES
    assert rig.pool.granted_bytes == rig.pool.nbytes


@pytest.mark.parametrize(
    ("grants", "said"),
    [
        ([(1, 3 * PAGE_BYTES)], "overlap a slot"),
        ([(1, 8 * PAGE_BYTES), (2, 9 * PAGE_BYTES)], "two slots of one grant"),
        ([(1, 8 * PAGE_BYTES), (1, 10 * PAGE_BYTES)], "handle"),
        ([(104, 8 * PAGE_BYTES)], "handle"),
        ([(1, 31 * PAGE_BYTES)], "no slot of"),
        ([(1, -2 * PAGE_BYTES)], "no slot of"),
        ([(1, 100)], "no slot of"),
    ],
)
def test_a_grant_that_cannot_be_is_an_error_and_changes_nothing(
    rig: Rig, grants: list[tuple[int, int]], said: str
) -> None:
    rig.add(4)
    with pytest.raises(IntegrityError, match=said):
        rig.pool.add(2 * PAGE_BYTES, grants, 1)
    if len(grants) == 1:
        assert rig.pool.adopt_all(2 * PAGE_BYTES, [(*grants[0], rig.owner)], 1) == [None]
    assert rig.pool.granted_bytes == PAGE_BYTES
    rig.pool.check_integrity()


def test_surplus_is_what_was_free_the_longest_and_is_gone(rig: Rig) -> None:
    rig.add(0, 1, 2, 3)
    lease = rig.allocate()
    assert lease.offset == 0
    assert rig.pool.take_surplus(2 * PAGE_BYTES, 1) == []
    assert rig.pool.take_surplus(PAGE_BYTES, 0) == []
    assert rig.pool.take_surplus(PAGE_BYTES, 2) == [103, 102]
    assert rig.pool.take_surplus(PAGE_BYTES, 9) == [101]
    assert rig.pool.granted_bytes == PAGE_BYTES
    rig.add(3)  # granted once more
    assert rig.allocate().slot != lease.slot


# ---- published and adopted -------------------------------------------------------------------------------------------


def test_an_adopted_block_is_used_until_nobody_leases_it_and_is_to_be_returned(rig: Rig) -> None:
    lease = rig.adopt(5)
    assert rig.pool.classes() == {}
    rig.pool.set_resident(lease.slot)
    lease.release()
    again = rig.pool.lease(lease.slot, rig.owner)
    rig.pool.clear_resident(lease.slot)
    assert rig.pool.take_returned(1) == []
    again.release()
    assert rig.pool.take_returned(2) == []
    assert (rig.pool.take_returned(1), rig.pool.take_returned(1)) == ([105], [])
    assert rig.pool.is_empty
    assert rig.pool.handle_of(lease.slot) is None


def test_an_adopted_block_that_no_index_names_is_returned_with_its_lease(rig: Rig) -> None:
    with rig.adopt(5) as lease:
        with pytest.raises(AssertionError, match="not resident"):
            rig.pool.lease(lease.slot, rig.owner)
        assert not rig.pool.can_evict(lease.slot)
    assert rig.pool.take_returned(1) == [105]
    assert rig.pool.take_released() == [lease.slot]
    with pytest.raises(AssertionError, match="not leased"):
        rig.pool.set_resident(lease.slot)


def test_what_is_adopted_is_looked_for_among_slots_and_not_in_each_of_them(rig: Rig) -> None:
    """As any slot that comes: the cost of one does not grow with how many there are."""

    class Handles(dict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all handles were gone through")

    rig.add(0, 1)
    rig.adopt(2).release()
    rig.pool._slot_of, rig.pool._returned = Handles(rig.pool._slot_of), Handles(rig.pool._returned)
    rig.add(3)
    lease = rig.adopt(4)
    assert rig.pool.adopt_all(PAGE_BYTES, [(104, 5 * PAGE_BYTES, rig.owner)], 1) == [None]
    assert rig.pool.adopt_all(PAGE_BYTES, [(102, 5 * PAGE_BYTES, rig.owner)], 1) == [None]
    lease.release()
    rig.pool._slot_of, rig.pool._returned = dict(rig.pool._slot_of.items()), dict(rig.pool._returned.items())
    assert rig.pool.take_returned(1) == [102, 104]


def test_blocks_are_adopted_each_by_its_owner_and_those_that_cannot_be_spoil_no_other(rig: Rig) -> None:
    other = rig.pool.owner("another")
    rig.add(0)
    grants = [(1, PAGE_BYTES, rig.owner), (1, 2 * PAGE_BYTES, other), (2, PAGE_BYTES, other), (3, 0, other)]
    leases = rig.pool.adopt_all(PAGE_BYTES, [*grants, (4, 3 * PAGE_BYTES, other)], 1)
    assert [None if lease is None else lease.offset // PAGE_BYTES for lease in leases] == [1, None, None, None, 3]
    assert (rig.owner.num_leases, other.num_leases) == (1, 1)
    rig.pool.check_integrity()
    other.close()
    assert rig.pool.take_returned(1) == [4]


def test_a_handle_to_return_is_in_use_until_it_is_taken(rig: Rig) -> None:
    rig.adopt(5).release()
    with pytest.raises(IntegrityError, match="handle"):
        rig.add(5)
    rig.pool.take_returned(1)
    rig.add(5)


def test_the_end_of_an_adopted_lease_is_told_to_whoever_asks(rig: Rig) -> None:
    ended: list[str] = []
    lease = rig.adopt(5)
    assert rig.pool.on_end(lease, lambda: ended.append("ended"))
    with pytest.raises(AssertionError, match="told to another"):
        rig.pool.on_end(lease, lambda: ended.append("twice"))
    lease.release()
    assert ended == ["ended"]
    assert not rig.pool.on_end(lease, lambda: ended.append("late"))
    assert rig.pool.on_end(rig.adopt(6), lambda: ended.append("adopted"))
    rig.owner.close()
    assert ended == ["ended", "adopted"]
    other = rig.pool.owner("another")
    with pytest.raises(ClosedError):
        rig.pool.adopt_all(PAGE_BYTES, [(1, 0, other), (2, PAGE_BYTES, rig.owner)], 1)
    assert other.num_leases == 0


def test_a_published_slot_is_idle_once_nobody_leases_it_and_goes_when_it_is_forgotten(rig: Rig) -> None:
    rig.add(0)
    lease = rig.allocate(resident=True)
    rig.pool.mark([lease.slot], SHARED)
    assert rig.pool.take_idle() == []
    assert not rig.pool.is_idle(lease.slot)
    lease.release()
    assert rig.pool.is_idle(lease.slot)
    assert (rig.pool.take_idle(), rig.pool.take_idle()) == ([lease.slot], [])
    again = rig.pool.lease(lease.slot, rig.owner)
    assert not rig.pool.is_idle(lease.slot)
    again.release()
    again = rig.pool.lease(lease.slot, rig.owner)
    assert rig.pool.take_idle() == []  # it is leased by now
    again.release()
    assert rig.pool.take_idle() == [lease.slot]
    rig.pool.clear_resident(lease.slot)
    assert rig.pool.take_returned(1) == [100]
    assert rig.pool.classes() == {PAGE_BYTES: Stock(0, 0)}


def test_a_spare_copy_is_idle_once_nobody_leases_it_and_then_free(rig: Rig) -> None:
    rig.add(0)
    lease = rig.allocate(resident=True)
    rig.pool.mark([lease.slot], SPARE)
    lease.release()
    assert rig.pool.take_idle() == [lease.slot]
    rig.pool.clear_resident(lease.slot)
    assert (rig.pool.take_returned(1), rig.num_free()) == ([], 1)
    again = rig.allocate(resident=True)
    assert again.slot == lease.slot
    again.release()
    assert rig.pool.take_idle() == []  # private again
    rig.pool.mark([again.slot], SHARED)
    assert rig.pool.take_idle() == [again.slot]


def test_only_a_used_private_slot_is_marked(rig: Rig) -> None:
    rig.add(0)
    lease = rig.allocate()
    with pytest.raises(AssertionError, match="cannot be made PRIVATE"):
        rig.pool.mark([lease.slot], PRIVATE)
    rig.pool.mark([lease.slot], SHARED)
    with pytest.raises(AssertionError, match="not private"):
        rig.pool.mark([lease.slot], SPARE)
    rig.add(1)
    free = rig.allocate()
    free.release()
    with pytest.raises(AssertionError, match="is free"):
        rig.pool.mark([free.slot], SHARED)


# ---- a connection lost -----------------------------------------------------------------------------------------------


def test_after_a_lost_connection_only_used_slots_stay_and_only_while_they_are(rig: Rig) -> None:
    rig.add(0, 1, 2)
    leased, named, idle = rig.allocate(), rig.allocate(resident=True), rig.adopt(9)
    rig.pool.set_resident(idle.slot)
    named.release()
    idle.release()
    rig.adopt(8).release()
    rig.pool.disown()
    assert rig.pool.classes() == {PAGE_BYTES: Stock(0, 3)}
    assert rig.pool.take_returned(1) == []
    assert [rig.pool.handle_of(lease.slot) for lease in (leased, named, idle)] == [None] * 3
    assert set(rig.pool.take_idle()) == {named.slot, idle.slot}
    leased.view[:2] = b"ok"
    rig.pool.mark([leased.slot], SHARED)
    for lease in (named, idle):
        rig.pool.clear_resident(lease.slot)
    assert not rig.pool.is_empty
    leased.release()
    assert rig.pool.is_empty
    assert rig.pool.take_returned(1) == []
    with pytest.raises(LeaseError):
        _ = leased.view


def test_a_lost_slot_is_in_the_way_until_it_is_gone(rig: Rig) -> None:
    rig.add(0, 1)
    lease = rig.allocate()
    rig.pool.disown()
    rig.add(1, era=2)
    with pytest.raises(IntegrityError, match="overlap"):
        rig.add(0, era=2)
    lease.release()
    rig.add(0, era=2)
    assert {rig.pool.handle_of(rig.allocate().slot) for _ in range(2)} == {Handle(100, 2), Handle(101, 2)}


def test_what_comes_late_from_a_lost_connection_is_not_taken(rig: Rig) -> None:
    rig.pool.disown()  # nothing was granted yet
    rig.add(0)
    rig.pool.disown()
    rig.pool.disown()
    assert rig.pool.add(PAGE_BYTES, [(5, 0)], 1) == []
    assert rig.pool.adopt_all(PAGE_BYTES, [(5, 0, rig.owner), (6, PAGE_BYTES, rig.owner)], 1) == [None, None]
    assert rig.pool.is_empty
    rig.add(0, era=2)
    with pytest.raises(IntegrityError, match="connection 3"):
        rig.add(1, era=3)


def test_a_lease_that_outlived_its_connection_may_be_named(rig: Rig) -> None:
    lease = rig.adopt(0)
    rig.pool.disown()
    rig.pool.set_resident(lease.slot)
    lease.release()
    assert rig.pool.take_idle() == [lease.slot]
    rig.pool.clear_resident(lease.slot)
    assert rig.pool.is_empty


def test_a_closed_pool_refuses(rig: Rig) -> None:
    rig.add(0)
    rig.pool.close()
    with pytest.raises(ClosedError, match="host pool is closed"):
        rig.pool.allocate(1, rig.owner)
    with pytest.raises(ClosedError, match="host pool is closed"):
        rig.pool.adopt_all(PAGE_BYTES, [(5, PAGE_BYTES, rig.owner)], 1)


# ---- work for the keeper ---------------------------------------------------------------------------------------------


def test_the_keeper_is_woken_once_until_it_looks(rig: Rig) -> None:
    rig.pool.expect(1)
    assert rig.calls == 1
    rig.pool.expect(2 * PAGE_BYTES)
    assert rig.pool.allocate(1, rig.owner) is None
    assert rig.works()
    rig.pool.expect(PAGE_BYTES)  # known by now
    assert not rig.works()
    assert rig.pool.classes().keys() == {PAGE_BYTES, 2 * PAGE_BYTES}


def test_an_allocation_is_work_where_fewer_slots_are_left_than_wanted(rig: Rig) -> None:
    rig.add(*range(5))
    rig.pool.want(PAGE_BYTES, 3)
    leases = [rig.allocate(), rig.allocate()]
    assert not rig.works()
    leases.append(rig.allocate())
    assert rig.works()
    rig.pool.release_all(leases)
    assert not rig.works()
    leases = rig.pool.allocate_all(1, rig.owner, [lambda: None] * 3)
    assert rig.works()
    rig.pool.want(PAGE_BYTES, 0)
    rig.allocate()
    rig.allocate()
    assert not rig.works()
    assert rig.pool.allocate(1, rig.owner) is None
    assert rig.works()
    assert len(rig.pool.allocate_all(1, rig.owner, [lambda: None])) == 0
    assert rig.works()


def test_handles_to_return_and_idle_slots_are_work(rig: Rig) -> None:
    rig.add(0, 1, 2)
    rig.adopt(9).release()
    assert rig.works()
    shared, spare, private = rig.allocate(resident=True), rig.allocate(), rig.pool.owner("other")
    rig.works()
    rig.pool.mark([shared.slot], SHARED)
    assert not rig.works()
    rig.pool.release_all([shared])
    assert rig.works()
    rig.pool.clear_resident(shared.slot)
    assert rig.works()
    rig.pool.mark([spare.slot], SPARE)
    rig.pool.set_resident(spare.slot)
    assert not rig.works()
    rig.pool.lease(spare.slot, private)
    spare.release()
    assert not rig.works()
    private.close()
    assert rig.works()
    rig.pool.clear_resident(spare.slot)
    assert not rig.works()  # it is free, and there are enough


def test_a_slot_published_while_nobody_leases_it_is_work(rig: Rig) -> None:
    rig.add(0)
    lease = rig.allocate(resident=True)
    lease.release()
    rig.works()
    rig.pool.mark([lease.slot], SPARE)
    assert rig.works()
    assert rig.pool.take_idle() == [lease.slot]


def test_the_keeper_is_told_of_a_lost_connection_and_of_its_last_slot(rig: Rig) -> None:
    one, other = rig.adopt(0), rig.adopt(1)
    rig.pool.disown()
    assert rig.works()
    one.release()
    assert not rig.works()
    other.release()
    assert rig.works()


def test_the_keeper_is_woken_though_the_end_of_a_lease_fails(rig: Rig) -> None:
    def fail() -> None:
        raise ValueError("no")

    ends: list[Callable[[Lease], object]] = [
        lambda lease: lease.release(),
        lambda lease: rig.pool.release_all([lease]),
        lambda lease: lease._owner.close(),
    ]
    for end in ends:
        (lease,) = rig.pool.adopt_all(PAGE_BYTES, [(1, 0, rig.pool.owner("fails"))], 1)
        assert lease is not None
        assert rig.pool.on_end(lease, fail)
        with pytest.raises(ValueError, match="no"):
            end(lease)
        assert rig.works()
        assert rig.pool.take_returned(1) == [1]


# ---- any order -------------------------------------------------------------------------------------------------------


@dataclass
class ModelSlot:
    handle: int
    offset: int
    nbytes: int
    kind: SlotKind
    resident: bool = False
    is_told: bool = False  # that it is idle
    leases: set[Lease] = field(default_factory=set)

    @property
    def is_used(self) -> bool:
        return self.resident or bool(self.leases)

    @property
    def is_idle(self) -> bool:
        return self.resident and not self.leases and self.kind != PRIVATE


class GrantedMachine(RuleBasedStateMachine):
    """Eight pages of sixteen, in slots of one and two pages, against slots in a dictionary by their offset."""

    @initialize()
    def begin(self) -> None:
        self.memory = Pages(16)
        self.num_told = 0
        self.pool = GrantedPool(self.memory, 8 * PAGE_BYTES, self.on_work)
        self.owners = [self.pool.owner(str(number)) for number in range(2)]
        self.slots: dict[int, ModelSlot] = {}
        self.owner_of: dict[Lease, Owner] = {}
        self.era = 1
        self.is_begun = False
        self.next_handle = 1
        self.returned: list[int] = []

    def on_work(self) -> None:
        self.num_told += 1

    # what the server says

    @rule(pages=st.integers(1, 2), places=st.lists(st.integers(0, 15), min_size=1, max_size=4))
    def add(self, pages: int, places: list[int]) -> None:
        self.is_begun = True
        nbytes = pages * PAGE_BYTES
        grants = []
        for place in places:
            grants.append((self.next_handle, place * PAGE_BYTES))
            self.next_handle += 1
        fitting = grants[: self.room() // nbytes]
        if not self.are_good(fitting, nbytes):
            with pytest.raises(IntegrityError):
                self.pool.add(nbytes, grants, self.era)
            return
        assert self.pool.add(nbytes, grants, self.era) == [handle for handle, _ in grants[len(fitting) :]]
        for handle, offset in fitting:
            self.slots[offset] = ModelSlot(handle, offset, nbytes, PRIVATE)

    @rule(
        pages=st.integers(1, 2),
        places=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 1)), min_size=1, max_size=4),
    )
    def adopt(self, pages: int, places: list[tuple[int, int]]) -> None:
        self.is_begun = True
        nbytes = pages * PAGE_BYTES
        grants = []
        for place, who in places:
            grants.append((self.next_handle, place * PAGE_BYTES, self.owners[who]))
            self.next_handle += 1
        leases = self.pool.adopt_all(nbytes, grants, self.era)
        for (handle, offset, owner), lease in zip(grants, leases, strict=True):
            can_be = self.room() >= nbytes and self.are_good([(handle, offset)], nbytes)
            assert (lease is not None) == can_be
            if lease is not None:
                assert (lease.offset, lease.nbytes) == (offset, nbytes)
                self.slots[offset] = ModelSlot(handle, offset, nbytes, SHARED)
                self.note_lease(lease, owner)

    @precondition(lambda self: any(slot.kind != LOST for slot in self.slots.values()))
    @rule(data=st.data())
    def a_handle_comes_twice(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([slot.handle for slot in self.slots.values() if slot.kind != LOST]))
        free = [place for place in range(16) if self.are_good([(handle, place * PAGE_BYTES)], PAGE_BYTES)]
        if free and self.room():
            with pytest.raises(IntegrityError):
                self.pool.add(PAGE_BYTES, [(handle, free[0] * PAGE_BYTES)], self.era)

    @rule()
    def disown(self) -> None:
        self.pool.disown()
        self.returned.clear()
        for slot in list(self.slots.values()):
            if not slot.is_used:
                del self.slots[slot.offset]
            elif slot.kind != LOST:
                slot.kind, slot.is_told = LOST, False
        if self.is_begun:
            assert self.pool.add(PAGE_BYTES, [(1, 0)], self.era) == []
            self.era += 1
        self.is_begun = False

    # what is done with slots

    @rule(pages=st.integers(1, 2), who=st.integers(0, 1), resident=st.booleans())
    def allocate(self, pages: int, who: int, resident: bool) -> None:
        nbytes = pages * PAGE_BYTES
        free = {slot.offset for slot in self.slots.values() if not slot.is_used and slot.nbytes == nbytes}
        lease = self.pool.allocate(nbytes - 1, self.owners[who], resident=resident)
        self.note_allocated([] if lease is None else [lease], min(1, len(free)), free, who, resident)

    @rule(pages=st.integers(1, 2), who=st.integers(0, 1), number=st.integers(0, 4))
    def allocate_all(self, pages: int, who: int, number: int) -> None:
        nbytes = pages * PAGE_BYTES
        free = {slot.offset for slot in self.slots.values() if not slot.is_used and slot.nbytes == nbytes}
        leases = self.pool.allocate_all(nbytes, self.owners[who], [lambda: None] * number)
        self.note_allocated(leases, min(number, len(free)), free, who, resident=True)

    def note_allocated(self, leases: list[Lease], expected: int, free: set[int], who: int, resident: bool) -> None:
        assert len(leases) == expected
        assert {lease.offset for lease in leases} <= free
        for lease in leases:
            self.slots[lease.offset].resident = resident
            self.note_lease(lease, self.owners[who])

    @precondition(lambda self: any(slot.resident for slot in self.slots.values()))
    @rule(data=st.data(), who=st.integers(0, 1))
    def lease(self, data: st.DataObject, who: int) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.slots.values() if slot.resident]))
        lease = self.pool.lease(self.id_of(slot), self.owners[who])
        assert lease.offset == slot.offset
        slot.is_told = False
        self.note_lease(lease, self.owners[who])

    @precondition(lambda self: self.owner_of)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.owner_of)))
        assert lease.release()
        assert not lease.release()
        self.note_end(lease)

    @rule(who=st.integers(0, 1))
    def owner_closes(self, who: int) -> None:
        owner = self.owners[who]
        owner.close()
        for free in self.pool._free.values():  # leases end in any order, and the same calls must find the same slots
            free.sort(key=self.pool._offsets.__getitem__)
        for lease in [lease for lease, held_by in self.owner_of.items() if held_by is owner]:
            assert not lease.live
            self.note_end(lease)
        self.owners[who] = self.pool.owner("next")

    @precondition(lambda self: any(slot.leases and not slot.resident for slot in self.slots.values()))
    @rule(data=st.data())
    def set_resident(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s in self.slots.values() if s.leases and not s.resident]))
        self.pool.set_resident(self.id_of(slot))
        slot.resident = True

    @precondition(lambda self: any(slot.resident for slot in self.slots.values()))
    @rule(data=st.data())
    def clear_resident(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.slots.values() if slot.resident]))
        self.pool.clear_resident(self.id_of(slot))
        slot.resident = slot.is_told = False
        self.note_given_up(slot)

    @precondition(lambda self: any(s.is_used and s.kind in (PRIVATE, LOST) for s in self.slots.values()))
    @rule(data=st.data(), kind=st.sampled_from([SPARE, SHARED]))
    def mark(self, data: st.DataObject, kind: SlotKind) -> None:
        slot = data.draw(st.sampled_from([s for s in self.slots.values() if s.is_used and s.kind in (PRIVATE, LOST)]))
        self.pool.mark([self.id_of(slot)], kind)
        if slot.kind == PRIVATE:
            slot.kind = kind

    # what the keeper takes

    @rule()
    def take_idle(self) -> None:
        due = [slot for slot in self.slots.values() if slot.is_idle and not slot.is_told]
        assert sorted(self.pool.take_idle()) == sorted(map(self.id_of, due))
        for slot in due:
            slot.is_told = True

    @rule()
    def take_returned(self) -> None:
        assert self.pool.take_returned(self.era - 1) == []
        assert sorted(self.pool.take_returned(self.era)) == sorted(self.returned)
        self.returned.clear()

    @rule(pages=st.integers(1, 2), number=st.integers(0, 3))
    def take_surplus(self, pages: int, number: int) -> None:
        free = {s.handle: s for s in self.slots.values() if not s.is_used and s.nbytes == pages * PAGE_BYTES}
        taken = self.pool.take_surplus(pages * PAGE_BYTES, number)
        assert len(set(taken)) == len(taken) == min(number, len(free))
        for handle in taken:
            del self.slots[free[handle].offset]

    @rule()
    def take_work(self) -> None:
        assert self.pool.take_work() == (self.num_told == 1)
        self.num_told = 0

    # the model

    def room(self) -> int:
        return 8 * PAGE_BYTES - sum(slot.nbytes for slot in self.slots.values())

    def are_good(self, grants: list[tuple[int, int]], nbytes: int) -> bool:
        taken = [(slot.offset, slot.nbytes) for slot in self.slots.values()]
        for _, offset in grants:
            if offset + nbytes > 16 * PAGE_BYTES or any(a < offset + nbytes and offset < a + n for a, n in taken):
                return False
            taken.append((offset, nbytes))
        return True

    def id_of(self, slot: ModelSlot) -> int:
        [found] = [i for i in self.pool._all_slots() if self.pool._offsets[i] == slot.offset]
        return found

    def note_lease(self, lease: Lease, owner: Owner) -> None:
        self.slots[lease.offset].leases.add(lease)
        self.owner_of[lease] = owner

    def note_end(self, lease: Lease) -> None:
        del self.owner_of[lease]
        slot = self.slots[lease.offset]
        slot.leases.remove(lease)
        self.note_given_up(slot)

    def note_given_up(self, slot: ModelSlot) -> None:
        if slot.is_used:
            return
        if slot.kind in (PRIVATE, SPARE):
            slot.kind = PRIVATE
            return
        if slot.kind == SHARED:
            self.returned.append(slot.handle)
        del self.slots[slot.offset]

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.num_told <= 1
        slots = self.slots.values()
        usage = self.pool.usage()
        assert usage.used_bytes == sum(slot.nbytes for slot in slots if slot.is_used)
        assert usage.num_slots_used == sum(slot.is_used for slot in slots)
        assert usage.num_slots_leased == sum(bool(slot.leases) for slot in slots)
        assert usage.num_leases == len(self.owner_of)
        assert self.pool.granted_bytes == sum(slot.nbytes for slot in slots)
        assert self.pool.is_empty == (not slots)
        for nbytes, stock in self.pool.classes().items():
            mine = [slot for slot in slots if slot.nbytes == nbytes]
            assert stock == Stock(sum(not slot.is_used for slot in mine), len(mine))
        for slot in slots:
            number = self.id_of(slot)
            assert self.pool.handle_of(number) == (None if slot.kind == LOST else Handle(slot.handle, self.era))
            assert self.pool.class_of(number) == slot.nbytes
            assert self.pool.is_idle(number) == slot.is_idle
            assert all(len(lease.view) == slot.nbytes for lease in slot.leases)
        if self.returned or any(slot.is_idle and not slot.is_told for slot in slots):
            assert self.num_told or self.had_work_before_taking()

    def had_work_before_taking(self) -> bool:
        """`take_work` may have come between; then its caller looks at all there is, which the model does by and by."""
        return not self.pool._has_work


TestGrantedMachine = GrantedMachine.TestCase
TestGrantedMachine.settings = settings(max_examples=80, stateful_step_count=40)


class Supplied:
    """A pool with a keeper's thread, who grants pages that the pool has not, as a server would, and takes back."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.pool = GrantedPool(Pages(64), 16 * PAGE_BYTES, self.wake.set)
        self.held: dict[int, int] = {}  # page by handle
        self.next_handle = 1
        self.is_over = False
        self.wrong: list[str] = []

    def supply(self) -> None:
        while not self.is_over:
            assert self.wake.wait(20), "the keeper was not woken"
            self.wake.clear()
            self.pool.take_work()
            self.take_back(0)
            free = sorted(set(range(64)) - set(self.held.values()))[: 16 - self.pool.granted_bytes // PAGE_BYTES]
            grants = {self.next_handle + i: page for i, page in enumerate(free)}
            self.next_handle += len(grants)
            self.held.update(grants)
            assert self.pool.add(PAGE_BYTES, [(h, page * PAGE_BYTES) for h, page in grants.items()], 1) == []

    def take_back(self, surplus: int) -> None:
        for slot in self.pool.take_idle():
            if self.pool.is_idle(slot):
                self.pool.clear_resident(slot)
        for handle in self.pool.take_returned(1) + self.pool.take_surplus(PAGE_BYTES, surplus):
            del self.held[handle]

    def work(self, seed: int) -> None:
        rng = random.Random(seed)
        mark = bytes([seed]) * 64
        for _ in range(2000):
            with self.pool.owner(str(seed)) as owner:
                leases = [self.pool.allocate(1, owner, resident=rng.random() < 0.5) for _ in range(rng.randrange(1, 4))]
                mine = [lease for lease in leases if lease is not None]
                for lease in mine:
                    lease.view[:64] = mark
                if any(lease.view[:64] != mark for lease in mine):
                    self.wrong.append(f"seed {seed}: another thread wrote into a leased slot")
                for lease in mine:
                    self.pool.mark([lease.slot], rng.choice([SPARE, SHARED]))


def test_threads_share_a_pool_with_a_keeper_and_nothing_is_lost() -> None:
    rig = Supplied()
    threads = [threading.Thread(target=rig.work, args=(seed,)) for seed in range(1, 5)]
    keeper = threading.Thread(target=rig.supply)
    rig.pool.expect(1)
    for thread in [keeper, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    rig.is_over = True
    rig.wake.set()
    keeper.join()
    rig.pool.check_integrity()
    for _ in range(2):  # what is forgotten first is free, or to be returned, then
        rig.take_back(16)
    assert rig.wrong == []
    rig.pool.check_integrity()
    assert (rig.pool.is_empty, rig.held, rig.next_handle > 17) == (True, {}, True)
    rig.pool.close()
