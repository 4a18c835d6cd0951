"""Slots, slabs and leases: told stories at tiny sizes, then any order of calls against a plain model."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ClosedError, ConfigError, LayoutError, LeaseError
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.pool import HostPool, Lease, Owner

KIB = 1024


def make_pool(size: int, slab: int) -> HostPool:
    return HostPool(PoolMemory(size, touch=False), slab)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    """Four slabs of two pages."""
    pool = make_pool(32 * KIB, 8 * KIB)
    yield pool
    pool.check_integrity()
    pool.close()


def allocate(pool: HostPool, nbytes: int, owner: Owner, *, resident: bool = False) -> Lease:
    lease = pool.allocate(nbytes, owner, resident=resident)
    assert lease is not None
    return lease


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_slots_do_not_overlap_and_are_given_until_none_is_left(pool: HostPool) -> None:
    owner = pool.owner("test")
    leases = [allocate(pool, 4000, owner) for _ in range(8)]
    assert sorted(lease.offset for lease in leases) == list(range(0, 32 * KIB, 4 * KIB))
    assert pool.allocate(4000, owner) is None
    assert pool.usage().used_bytes == pool.usage().reserved_bytes == 32 * KIB
    assert leases[3].release()
    assert allocate(pool, 4000, owner).offset == leases[3].offset
    owner.close()
    assert pool.usage().used_bytes == 0


def test_a_lease_writes_its_own_bytes_of_the_pool(pool: HostPool) -> None:
    owner = pool.owner("test")
    one, other = allocate(pool, 5000, owner), allocate(pool, 100, owner)
    assert (one.nbytes, other.nbytes) == (8 * KIB, 4 * KIB)
    one.view[:] = b"1" * one.nbytes
    other.view[:] = b"2" * other.nbytes
    assert pool.buffer[one.offset : one.offset + one.nbytes].tobytes() == b"1" * one.nbytes
    assert pool.buffer[other.offset : other.offset + other.nbytes].tobytes() == b"2" * other.nbytes
    owner.close()


def test_leases_die_with_their_owner(pool: HostPool) -> None:
    ended: list[str] = []
    kept = allocate(pool, 100, pool.owner("stays"))
    with pool.owner("goes") as owner:
        lease = pool.allocate(100, owner, lambda: ended.append("one"))
        assert lease is not None
        allocate(pool, 100, owner)
        assert (owner.num_leases, pool.usage().num_leases) == (2, 3)
    assert not lease.live
    assert (owner.num_leases, pool.usage().num_leases, ended) == (0, 1, ["one"])
    with pytest.raises(LeaseError, match="after its lease ended"):
        _ = lease.view
    with pytest.raises(ClosedError, match="'goes'"):
        pool.allocate(100, owner)
    owner.close()
    assert ended == ["one"]
    assert kept.live
    kept.release()


@pytest.mark.bug("LK03")
def test_a_second_release_is_told_and_harmless(pool: HostPool) -> None:
    owner = pool.owner("test")
    ended: list[str] = []
    lease = pool.allocate(100, owner, lambda: ended.append("ended"))
    assert lease is not None
    with lease:
        assert lease.live
    assert not lease.release()
    again = allocate(pool, 100, owner)
    assert again.slot == lease.slot
    assert not lease.release()
    assert again.live
    assert (pool.usage().num_leases, ended) == (1, ["ended"])
    owner.close()
    assert not again.release()


def test_a_resident_slot_outlives_its_leases_and_a_leased_one_its_residence(pool: HostPool) -> None:
    owner = pool.owner("test")
    lease = allocate(pool, 100, owner, resident=True)
    assert not pool.can_evict(lease.slot)
    lease.release()
    assert pool.can_evict(lease.slot)
    assert pool.usage().num_slots_used == 1
    reader = pool.lease(lease.slot, owner)
    pool.clear_resident(lease.slot)
    assert pool.usage().num_slots_used == 1
    assert allocate(pool, 100, owner).slot != lease.slot
    reader.release()
    assert allocate(pool, 100, owner).slot == lease.slot
    owner.close()


def test_a_slot_that_no_index_names_cannot_be_leased_again(pool: HostPool) -> None:
    with pool.owner("test") as owner:
        lease = allocate(pool, 100, owner)
        with pytest.raises(AssertionError, match="not resident"):
            pool.lease(lease.slot, owner)
        with pytest.raises(AssertionError, match="not resident"):
            pool.clear_resident(lease.slot)


def test_a_leased_slot_is_made_resident_when_an_index_is_about_to_name_it(pool: HostPool) -> None:
    owner = pool.owner("test")
    lease = allocate(pool, 100, owner)
    pool.set_resident(lease.slot)
    with pytest.raises(AssertionError, match="is resident"):
        pool.set_resident(lease.slot)
    lease.release()
    assert pool.usage().num_slots_used == 1
    pool.lease(lease.slot, owner).release()
    with pytest.raises(AssertionError, match="not leased"):
        pool.set_resident(lease.slot)
    pool.clear_resident(lease.slot)
    assert pool.usage().num_slots_used == 0


def test_the_end_of_a_lease_may_be_told_to_who_comes_later(pool: HostPool) -> None:
    owner = pool.owner("test")
    ended: list[str] = []
    lease = allocate(pool, 100, owner)
    assert pool.on_end(lease, lambda: ended.append("ended"))
    with pytest.raises(AssertionError, match="told to another"):
        pool.on_end(lease, lambda: ended.append("twice"))
    owner.close()
    assert ended == ["ended"]
    assert not pool.on_end(lease, lambda: ended.append("late"))
    assert ended == ["ended"]


def test_a_pool_says_how_much_it_has_and_expects_nothing(pool: HostPool) -> None:
    pool.expect(100)
    assert pool.nbytes == 32 * KIB
    assert pool.usage().used_bytes == 0


def test_the_end_of_a_lease_is_told_outside_the_pools_lock(pool: HostPool) -> None:
    owner = pool.owner("test")
    used: list[int] = []
    lease = pool.allocate(100, owner, lambda: used.append(pool.usage().num_leases))
    assert lease is not None
    lease.release()
    assert pool.allocate(100, owner, lambda: used.append(pool.usage().num_leases))
    owner.close()
    assert used == [0, 0]


def test_a_slot_that_could_not_be_evicted_is_told_once_when_its_last_lease_ends(pool: HostPool) -> None:
    owner = pool.owner("test")
    watched, other = (allocate(pool, 100, owner, resident=True) for _ in range(2))
    second = pool.lease(watched.slot, owner)
    assert not pool.can_evict(watched.slot)
    assert not pool.can_evict(watched.slot)
    other.release()
    watched.release()
    assert pool.take_released() == []
    second.release()
    assert (pool.take_released(), pool.take_released()) == ([watched.slot], [])
    pool.lease(watched.slot, owner)
    assert not pool.can_evict(watched.slot)
    owner.close()
    assert pool.take_released() == [watched.slot]
    assert pool.can_evict(watched.slot)
    pool.lease(watched.slot, pool.owner("unwatched")).release()
    assert pool.take_released() == []


def test_a_closed_pool_refuses_and_its_leases_are_void() -> None:
    pool = make_pool(32 * KIB, 8 * KIB)
    owner = pool.owner("test")
    lease = allocate(pool, 100, owner)
    pool.close()
    with pytest.raises(ClosedError):
        _ = lease.view
    with pytest.raises(ClosedError):
        pool.allocate(100, owner)
    owner.close()
    assert pool.usage().num_leases == 0


# ---- slabs -----------------------------------------------------------------------------------------------------------


def test_a_slab_size_that_is_no_whole_page_is_refused() -> None:
    memory = PoolMemory(32 * KIB, touch=False)
    for slab in (0, 100, PAGE_BYTES + 1, -PAGE_BYTES):
        with pytest.raises(ConfigError, match=r"host\.slab"):
            HostPool(memory, slab)
    memory.close()


def test_a_block_larger_than_a_slab_is_refused_by_name(pool: HostPool) -> None:
    owner = pool.owner("test")
    for nbytes in (8 * KIB + 1, 0, -1):
        with pytest.raises(LayoutError, match=rf"{nbytes} bytes.*raise host\.slab \(now 8192\)"):
            pool.allocate(nbytes, owner)
    assert pool.slot_bytes(8 * KIB) == 8 * KIB
    assert pool.slot_bytes(1) == 4 * KIB


def test_capacity_counts_whole_slots_of_whole_slabs() -> None:
    pool = make_pool(7 * PAGE_BYTES, 3 * PAGE_BYTES)  # slabs of three, three and one page
    assert [pool.capacity_slots(pages * PAGE_BYTES) for pages in (1, 2, 3)] == [7, 2, 2]
    owner = pool.owner("test")
    assert len([*itertools.takewhile(bool, iter(lambda: pool.allocate(2 * PAGE_BYTES, owner), 0))]) == 2
    assert pool.allocate(PAGE_BYTES, owner) is not None  # the last slab is too small for the other class
    assert pool.allocate(PAGE_BYTES, owner) is None
    pool.check_integrity()
    owner.close()
    pool.close()


def test_size_classes_share_the_pool_by_slabs(pool: HostPool) -> None:
    owner = pool.owner("test")
    small = [allocate(pool, 4 * KIB, owner) for _ in range(3)]
    large = [allocate(pool, 8 * KIB, owner) for _ in range(2)]
    assert pool.allocate(8 * KIB, owner) is None
    allocate(pool, 4 * KIB, owner)
    spans = sorted((lease.offset, lease.offset + lease.nbytes) for lease in small + large)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    owner.close()


def test_an_unused_slab_passes_to_another_class(pool: HostPool) -> None:
    owner = pool.owner("test")
    small = [allocate(pool, 4 * KIB, owner) for _ in range(8)]
    assert pool.allocate(8 * KIB, owner) is None
    for lease in small[:1] + small[2:4]:  # one of the first slab's two slots, both of the second's
        lease.release()
    large = allocate(pool, 8 * KIB, owner)
    assert large.offset == small[2].offset
    assert pool.allocate(8 * KIB, owner) is None
    pool.check_integrity()
    large.release()
    assert {allocate(pool, 4 * KIB, owner).offset for _ in range(3)} == {
        lease.offset for lease in small[:1] + small[2:4]
    }
    owner.close()


def test_the_least_used_slab_without_leases_is_reclaimed(pool: HostPool) -> None:
    owner = pool.owner("test")
    leases = [allocate(pool, 4 * KIB, owner, resident=True) for _ in range(8)]
    assert pool.slab_to_reclaim(8 * KIB) == []
    for lease in leases[:6]:
        lease.release()
    pool.clear_resident(leases[2].slot)
    assert pool.slab_to_reclaim(8 * KIB) == [leases[3].slot]  # of slabs with 2, 1, 2 and, leased, 2
    assert pool.slab_to_reclaim(4 * KIB) == []
    assert pool.class_of(leases[3].slot) == 4 * KIB
    pool.clear_resident(leases[3].slot)
    assert allocate(pool, 8 * KIB, owner).offset == leases[2].offset
    for lease in leases[:2] + leases[4:]:
        pool.clear_resident(lease.slot)
    owner.close()


def test_a_slab_too_small_for_the_class_is_not_reclaimed_for_it() -> None:
    pool = make_pool(3 * PAGE_BYTES, 2 * PAGE_BYTES)  # slabs of two pages and one
    with pool.owner("test") as owner:
        leases = [allocate(pool, PAGE_BYTES, owner, resident=True) for _ in range(3)]
    assert set(pool.slab_to_reclaim(2 * PAGE_BYTES)) == {
        lease.slot for lease in leases if lease.offset < 2 * PAGE_BYTES
    }
    for lease in leases:
        pool.clear_resident(lease.slot)
    pool.close()


# ---- any order -------------------------------------------------------------------------------------------------------


@dataclass
class ModelSlot:
    offset: int
    nbytes: int
    resident: bool
    leases: set[Lease] = field(default_factory=set)


class PoolMachine(RuleBasedStateMachine):
    """A pool of three slabs of two pages and a remainder of one, against slots in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(7 * PAGE_BYTES, 2 * PAGE_BYTES)
        self.owners = [self.pool.owner(str(i)) for i in range(2)]
        self.slots: dict[int, ModelSlot] = {}
        self.owner_of: dict[Lease, Owner] = {}
        self.ended: Counter[int] = Counter()
        self.serials: dict[Lease, int] = {}

    @rule(pages=st.integers(1, 2), who=st.integers(0, 1), resident=st.booleans())
    def allocate(self, pages: int, who: int, resident: bool) -> None:
        serial = len(self.serials) + sum(self.ended.values())
        nbytes = pages * PAGE_BYTES
        lease = self.pool.allocate(nbytes - 1, self.owners[who], lambda: self.ended.update([serial]), resident=resident)
        if lease is None:
            assert not self.has_room(nbytes)
            return
        assert lease.slot not in self.slots
        assert lease.nbytes == nbytes
        span = range(lease.offset, lease.offset + nbytes)
        assert all(s.offset >= span.stop or s.offset + s.nbytes <= span.start for s in self.slots.values())
        self.slots[lease.slot] = ModelSlot(lease.offset, nbytes, resident, {lease})
        self.owner_of[lease] = self.owners[who]
        self.serials[lease] = serial

    def has_room(self, nbytes: int) -> bool:
        """Some slab has no slot of another class and space left."""
        size = 2 * PAGE_BYTES
        for start in range(0, 7 * PAGE_BYTES, size):
            inside = [slot for slot in self.slots.values() if start <= slot.offset < start + size]
            room = min(size, 7 * PAGE_BYTES - start) - sum(slot.nbytes for slot in inside)
            if room >= nbytes and all(slot.nbytes == nbytes for slot in inside):
                return True
        return False

    @precondition(lambda self: any(slot.resident for slot in self.slots.values()))
    @rule(data=st.data(), who=st.integers(0, 1))
    def lease_again(self, data: st.DataObject, who: int) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, model in self.slots.items() if model.resident)))
        lease = self.pool.lease(slot, self.owners[who])
        assert (lease.offset, lease.nbytes) == (self.slots[slot].offset, self.slots[slot].nbytes)
        self.slots[slot].leases.add(lease)
        self.owner_of[lease] = self.owners[who]

    @precondition(lambda self: self.owner_of)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.owner_of)))
        assert lease.release()
        self.forget(lease)
        assert not lease.release()

    @precondition(lambda self: any(slot.leases and not slot.resident for slot in self.slots.values()))
    @rule(data=st.data())
    def set_resident(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, m in self.slots.items() if m.leases and not m.resident)))
        self.pool.set_resident(slot)
        self.slots[slot].resident = True

    @precondition(lambda self: any(slot.resident for slot in self.slots.values()))
    @rule(data=st.data())
    def clear_resident(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, model in self.slots.items() if model.resident)))
        self.pool.clear_resident(slot)
        self.slots[slot].resident = False
        self.drop_if_free(slot)

    @rule(who=st.integers(0, 1))
    def owner_dies(self, who: int) -> None:
        owner = self.owners[who]
        owner.close()
        for free in self.pool._free.values():  # leases end in any order, and the same calls must find the same slots
            free.sort()
        for lease in [lease for lease, held_by in self.owner_of.items() if held_by is owner]:
            assert not lease.release()
            self.forget(lease)
        with pytest.raises(ClosedError):
            self.pool.allocate(1, owner)
        self.owners[who] = self.pool.owner("next")

    def forget(self, lease: Lease) -> None:
        del self.owner_of[lease]
        if lease in self.serials:
            assert self.ended[self.serials.pop(lease)] == 1
        self.slots[lease.slot].leases.remove(lease)
        self.drop_if_free(lease.slot)

    def drop_if_free(self, slot: int) -> None:
        if not self.slots[slot].resident and not self.slots[slot].leases:
            del self.slots[slot]

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        usage = self.pool.usage()
        assert usage.used_bytes == sum(slot.nbytes for slot in self.slots.values())
        assert usage.num_slots_used == len(self.slots)
        assert usage.num_slots_leased == sum(bool(slot.leases) for slot in self.slots.values())
        assert usage.num_leases == len(self.owner_of) == sum(owner.num_leases for owner in self.owners)
        for slot, model in self.slots.items():
            assert self.pool.can_evict(slot) == (not model.leases)
            assert self.pool.class_of(slot) == model.nbytes
        for nbytes in (PAGE_BYTES, 2 * PAGE_BYTES):
            gone = self.pool.slab_to_reclaim(nbytes)
            assert all(self.slots[slot].resident and not self.slots[slot].leases for slot in gone)
            assert all(self.slots[slot].nbytes != nbytes for slot in gone)

    def teardown(self) -> None:
        for owner in self.owners:
            owner.close()
        for slot in [slot for slot, model in self.slots.items() if model.resident]:
            self.pool.clear_resident(slot)
        self.pool.check_integrity()
        assert self.pool.usage().used_bytes == 0
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.bug("LK03")
def test_ten_thousand_random_calls_never_count_below_zero_and_end_at_zero() -> None:
    pool = make_pool(64 * KIB, 16 * KIB)
    rng = random.Random(20240611)
    owners = [pool.owner(str(i)) for i in range(4)]
    held: list[Lease] = []
    resident: set[int] = set()
    for _ in range(10_000):
        choice = rng.random()
        who = rng.randrange(4)
        if choice < 0.3 and (lease := pool.allocate(rng.choice([1, 2]) * PAGE_BYTES, owners[who], resident=True)):
            held.append(lease)
            resident.add(lease.slot)
        elif choice < 0.45 and resident:
            held.append(pool.lease(rng.choice(sorted(resident)), owners[who]))
        elif choice < 0.75 and held:
            rng.choice(held).release()  # often a second time
        elif choice < 0.8:
            owners[who].close()
            owners[who] = pool.owner("next")
        elif evictable := [slot for slot in sorted(resident) if pool.can_evict(slot)]:
            slot = rng.choice(evictable)
            pool.clear_resident(slot)
            resident.remove(slot)
        held = [lease for lease in held if lease.live or rng.random() < 0.5]
        usage = pool.usage()
        assert usage.num_leases == sum(lease.live for lease in held) >= usage.num_slots_leased >= 0
        assert all(lease.slot in resident for lease in held if lease.live)
    for owner in owners:
        owner.close()
    for slot in resident:
        pool.clear_resident(slot)
    pool.check_integrity()
    assert (pool.usage().num_leases, pool.usage().used_bytes) == (0, 0)
    pool.close()


def test_threads_share_a_pool_without_losing_a_slot() -> None:
    pool = make_pool(32 * KIB, 8 * KIB)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mark = bytes([seed]) * 64
        for _ in range(150):
            with pool.owner(str(seed)) as owner:
                leases = [pool.allocate(rng.choice([1, 2]) * PAGE_BYTES, owner) for _ in range(rng.randrange(1, 4))]
                mine = [lease for lease in leases if lease is not None]
                for lease in mine:
                    lease.view[:64] = mark
                if any(lease.view[:64] != mark for lease in mine):
                    wrong.append(f"seed {seed}: another thread wrote into a leased slot")
                if mine and rng.random() < 0.5:
                    mine[0].release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.check_integrity()
    assert pool.usage().used_bytes == 0
    pool.close()


def test_a_full_pool_of_one_size_class_walks_no_slabs_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of a terabyte has thousands of slabs, and when it is full each new block asks for one."""
    memory = PoolMemory(64 * PAGE_BYTES, touch=False)
    pool = HostPool(memory, PAGE_BYTES)
    try:
        with pool.owner("all") as owner:
            assert all(pool.allocate(PAGE_BYTES, owner) for _ in range(64))

            class Counted(list[Any]):
                walks = 0

                def __iter__(self) -> Iterator[Any]:
                    Counted.walks += 1
                    return super().__iter__()

            monkeypatch.setattr(pool, "_slabs", Counted(pool._slabs))
            assert pool.allocate(PAGE_BYTES, owner) is None
            assert pool.slab_to_reclaim(PAGE_BYTES) == []
            assert Counted.walks == 0
    finally:
        pool.close()
