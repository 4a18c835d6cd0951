"""The host tier: stories at a few slots, then any order of calls against dictionaries, then threads."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import ClosedError, ConfigError, ForkedError, IntegrityError, LayoutError, LeaseError
from kvtier.frame import payload_checksum
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.policy import TailsFirstLRU
from kvtier.pool import HostPool, Lease, Owner
from kvtier.reasons import DropReason, MissReason
from kvtier.tiers import host as host_module
from kvtier.tiers import naming
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction, PublishedAs, Reservation

SPACE, OTHER = b"a" * 16, b"b" * 16
SOON_S = 30.0


def name(number: int) -> BlockDigest:
    return BlockDigest(hashlib.sha256(b"block %d" % number).digest())


def content(key: object, nbytes: int = PAGE_BYTES) -> bytes:
    return random.Random(repr(key)).randbytes(nbytes)


class Harness:
    """A tier over a small pool, with what the stories need to say in one line."""

    def __init__(self, num_pages: int, slab_pages: int) -> None:
        self.pool = HostPool(PoolMemory(num_pages * PAGE_BYTES, touch=False), slab_pages * PAGE_BYTES)
        self.tier = HostTier(self.pool)
        self.owner = self.pool.owner("test")
        self.evicted: list[BlockDigest] = []
        self.tier.subscribe(on_evict=lambda gone: self.evicted.extend(item.digest for item in gone))

    def reserve(
        self, number: int, parent: int | None = None, owner: Owner | None = None, space: bytes = SPACE, pages: int = 1
    ) -> Reservation:
        outcome = self.try_reserve(number, parent, owner, space, pages)
        assert isinstance(outcome, Reservation)
        return outcome

    def try_reserve(
        self, number: int, parent: int | None = None, owner: Owner | None = None, space: bytes = SPACE, pages: int = 1
    ) -> Reservation | DropReason:
        above = None if parent is None else name(parent)
        return self.tier.reserve(space, name(number), above, pages * PAGE_BYTES, owner or self.owner)

    def store(self, number: int, parent: int | None = None, space: bytes = SPACE, pages: int = 1) -> None:
        reservation = self.reserve(number, parent, space=space, pages=pages)
        reservation.lease.view[:] = content(number, pages * PAGE_BYTES)
        assert self.tier.commit([reservation]) == [True]

    def lease(self, *numbers: int, owner: Owner | None = None, space: bytes = SPACE) -> list[Lease]:
        return self.tier.lease_run(space, [name(number) for number in numbers], owner or self.owner)

    def held(self, *numbers: int, space: bytes = SPACE) -> list[bool]:
        return [self.tier.committed_run(space, [name(number)]) == 1 for number in numbers]

    def close(self) -> None:
        self.tier.check_integrity()
        self.owner.close()
        self.tier.close()
        for space in (SPACE, OTHER):
            self.tier.reset(space)
        self.tier.check_integrity()
        usage = self.pool.usage()
        self.pool.close()
        assert (usage.num_leases, usage.used_bytes) == (0, 0), "free is not total after everything was released"


@pytest.fixture
def four() -> Iterator[Harness]:
    """Four slots, two a slab."""
    harness = Harness(4, 2)
    yield harness
    harness.close()


# ---- storing ---------------------------------------------------------------------------------------------------------


def test_a_block_is_found_only_after_its_commit(four: Harness) -> None:
    reservation = four.reserve(1)
    assert four.held(1) == [False]
    assert four.lease(1) == []
    assert four.tier.state(SPACE, name(1)) is BlockState.RESERVED
    assert four.tier.why_missing(SPACE, name(1)) is MissReason.BEING_STORED
    reservation.lease.view[:] = content(1)
    assert four.tier.commit([reservation]) == [True]
    assert four.tier.state(SPACE, name(1)) is BlockState.COMMITTED
    (lease,) = four.lease(1)
    assert lease.view == content(1)
    assert not reservation.lease.live


def test_an_aborted_block_was_never_there(four: Harness) -> None:
    reservation = four.reserve(1)
    four.tier.abort(reservation)
    four.tier.abort(reservation)
    assert four.tier.state(SPACE, name(1)) is None
    assert four.tier.why_missing(SPACE, name(1)) is MissReason.ABSENT
    assert four.tier.commit([reservation]) == [False]
    assert four.pool.usage().used_bytes == 0


def test_an_abort_after_the_commit_is_harmless(four: Harness) -> None:
    reservation = four.reserve(1)
    assert four.tier.commit([reservation, reservation]) == [True, False]
    four.tier.abort(reservation)
    assert four.held(1) == [True]
    assert four.tier.commit([reservation]) == [False]


def test_a_withdrawn_block_may_be_had_otherwise_and_keeps_its_slot(four: Harness) -> None:
    four.store(0)
    first = four.reserve(1, parent=0)
    four.tier.withdraw(first)
    four.tier.withdraw(first)
    assert four.evicted == [name(1)]
    assert four.tier.state(SPACE, name(1)) is None
    second = four.reserve(1, parent=0)
    assert second.lease.slot != first.lease.slot, "somebody may still write to it"
    second.lease.view[:] = content(1)
    assert four.tier.commit([second]) == [True]
    first.lease.view[:] = content("late")
    assert four.tier.commit([first]) == [False]
    four.tier.withdraw(second)
    four.tier.abort(first)
    (lease,) = four.lease(1)
    assert lease.view == content(1)
    assert four.evicted == [name(1)]


@pytest.mark.bug("CR20")
def test_of_two_stores_of_one_key_the_second_is_told(four: Harness) -> None:
    first = four.reserve(1, owner=four.pool.owner("one"))
    assert four.try_reserve(1, owner=four.pool.owner("two")) is DropReason.ALREADY_STORED
    first.lease.view[:] = content(1)
    assert four.tier.commit([first]) == [True]
    assert four.try_reserve(1) is DropReason.ALREADY_STORED
    assert four.lease(1)[0].view == content(1)


@pytest.mark.bug("CR20")
def test_a_duplicate_in_a_batch_spoils_none_of_the_others() -> None:
    harness = Harness(10, 10)
    harness.store(4)
    keys = [make_key(SPACE, name(number)) for number in range(10)]
    outcomes = harness.tier.write([WriteRequest(key, None, memoryview(content(key))) for key in keys])
    assert outcomes.count(WriteOutcome.STORED) == 9
    assert outcomes[4] is WriteOutcome.ALREADY_STORED
    assert all(harness.held(*range(10)))
    harness.close()


@pytest.mark.bug("HS17")
def test_a_writer_that_dies_leaves_the_key_to_the_next(four: Harness) -> None:
    dying = four.pool.owner("dying")
    reservation = four.reserve(1, owner=dying)
    reservation.lease.view[:] = content("torn")
    dying.close()
    assert four.tier.why_missing(SPACE, name(1)) is MissReason.ABSENT
    four.tier.check_integrity()
    four.store(1)
    assert four.tier.commit([reservation]) == [False]
    four.tier.abort(reservation)
    assert four.lease(1)[0].view == content(1)


def test_an_owner_that_ended_reserves_and_leases_nothing(four: Harness) -> None:
    four.store(1)
    gone = four.pool.owner("gone")
    gone.close()
    for parent in (None, 1):
        with pytest.raises(ClosedError, match="'gone'"):
            four.try_reserve(2, parent, owner=gone)
    with pytest.raises(ClosedError, match="'gone'"):
        four.lease(1, owner=gone)
    assert four.tier.state(SPACE, name(2)) is None
    assert four.pool.usage().num_leases == 0


def test_an_owner_that_ends_while_its_slot_is_being_given_loses_it_once(
    four: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread ends the lease between the pool's answer and the index's entry, then waits for our lock."""
    allocate, owner = four.pool.allocate, four.pool.owner("dying")
    closing = threading.Thread(target=owner.close)

    def and_die(
        nbytes: int, owner: Owner, on_end: Callable[[], None] | None = None, *, resident: bool = False
    ) -> Lease | None:
        lease = allocate(nbytes, owner, on_end, resident=resident)
        assert lease is not None
        closing.start()
        while lease.live:
            pass
        return lease

    monkeypatch.setattr(four.pool, "allocate", and_die)
    reservation = four.reserve(1, owner=owner)
    closing.join(SOON_S)
    assert four.tier.commit([reservation]) == [False]
    four.tier.check_integrity()
    assert four.pool.usage().used_bytes == 0


def test_a_block_that_fits_no_slab_leaves_nothing_behind(four: Harness) -> None:
    four.store(1)
    with pytest.raises(LayoutError, match=r"host\.slab"):
        four.try_reserve(2, 1, pages=3)
    assert four.pool.usage().num_leases == 0
    assert four.tier.state(SPACE, name(2)) is None


def test_a_closed_tier_stores_nothing(four: Harness) -> None:
    four.store(1)
    four.tier.close()
    assert four.try_reserve(2) is DropReason.CLOSED
    with pytest.raises(ClosedError):
        four.tier.write([WriteRequest(make_key(SPACE, name(3)), None, memoryview(content(3)))])


# ---- eviction --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_gives_way_at_allocation(four: Harness) -> None:
    for number in range(4):
        four.store(number)
    assert four.evicted == []
    for lease in four.lease(0):
        lease.release()
    four.store(4)
    assert four.evicted == [name(1)]
    assert four.held(0, 1, 2, 3, 4) == [True, False, True, True, True]
    assert four.tier.why_missing(SPACE, name(1)) is MissReason.EVICTED
    assert four.tier.why_missing(SPACE, name(9)) is MissReason.ABSENT
    assert four.tier.num_evicted == 1
    four.store(1)
    four.tier.remove([make_key(SPACE, name(1))])
    assert four.tier.why_missing(SPACE, name(1)) is MissReason.ABSENT


def test_evictions_are_remembered_up_to_a_bound(four: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "MAX_GHOSTS", 2)
    for number in range(7):
        four.store(number)
    assert [four.tier.why_missing(SPACE, name(number)) for number in range(3)] == [
        MissReason.ABSENT,
        MissReason.EVICTED,
        MissReason.EVICTED,
    ]


def test_tails_go_before_prefixes(four: Harness) -> None:
    for number, parent in [(0, None), (1, 0), (2, 1), (3, 2)]:
        four.store(number, parent)
    for number in range(10, 14):
        four.store(number)
    assert four.evicted == [name(3), name(2), name(1), name(0)]


def test_a_chain_longer_than_the_pool_never_eats_its_own_prefix(four: Harness) -> None:
    for number in range(4):
        four.store(number, number - 1 if number else None)
    assert four.try_reserve(4, 3) is DropReason.HOST_FULL
    assert four.held(0, 1, 2, 3) == [True] * 4
    assert four.pool.usage().num_leases == 0


def test_a_parent_that_is_still_being_filled_stays_for_its_child(four: Harness) -> None:
    parent = four.reserve(1)
    child = four.reserve(2, 1)
    assert four.tier.commit([parent]) == [True]
    for number in (10, 11, 12):
        four.store(number)
    assert four.held(1) == [True]
    assert four.tier.commit([child]) == [True]
    for number in (13, 14):
        four.store(number)
    assert four.evicted[-3:] != [name(1), name(2)]
    assert four.held(1) >= four.held(2)


def test_reserved_and_leased_blocks_are_never_evicted(four: Harness) -> None:
    reservations = [four.reserve(number) for number in range(2)]
    four.store(2)
    four.store(3)
    leases = four.lease(2) + four.lease(3)
    assert four.try_reserve(4) is DropReason.HOST_FULL
    assert four.evicted == []
    leases[1].release()
    four.store(4)
    assert four.evicted == [name(3)]
    for reservation in reservations:
        four.tier.abort(reservation)


@pytest.mark.bug("LK01")
@pytest.mark.parametrize("used", [0, 1, 2])
def test_a_request_that_ends_frees_what_it_leased_used_or_not(four: Harness, used: int) -> None:
    four.store(0)
    four.store(1, 0)
    for _ in range(20):
        with four.pool.owner("request") as request:
            for lease in four.lease(0, 1, owner=request)[:used]:
                assert lease.view
                lease.release()
    assert four.pool.usage().num_leases == 0
    for number in range(10, 14):
        four.store(number)
    assert four.held(10, 11, 12, 13) == [True] * 4


@pytest.mark.bug("WR22")
def test_a_stalled_reader_keeps_the_old_bytes_whatever_happens_to_the_block(four: Harness) -> None:
    four.store(0)
    four.store(1)
    evict_me, remove_me = four.lease(0) + four.lease(1)
    for number in range(10, 20):
        four.store(number)
    assert four.held(0, 1) == [True, True]
    assert four.tier.remove([make_key(SPACE, name(1))]) == 1
    reset = four.tier.reset(SPACE)
    assert reset == 3
    assert four.held(0, 1) == [False, False]
    for number in range(20, 30):
        four.store(number)
    assert evict_me.view == content(0)
    assert remove_me.view == content(1)
    assert evict_me.release()
    with pytest.raises(LeaseError):
        _ = evict_me.view


def test_a_size_class_may_take_anothers_least_used_slab() -> None:
    harness = Harness(6, 2)
    for number in range(6):
        harness.store(number)
    (leased,) = harness.lease(0)
    assert harness.tier.remove([make_key(SPACE, name(2))]) == 1
    harness.store(100, space=OTHER, pages=2)
    assert harness.evicted == [name(2), name(3)]
    harness.store(101, space=OTHER, pages=2)
    assert harness.evicted[2:] in ([name(4), name(5)], [name(100)])
    assert leased.view == content(0)
    assert harness.held(0, 1) == [True, True]
    harness.close()


@pytest.mark.bug("WR25")
def test_groups_of_other_block_sizes_come_back_whole() -> None:
    harness = Harness(12, 4)
    for number, parent in [(0, None), (1, 0)]:
        harness.store(number, parent)
        harness.store(number, parent, space=OTHER, pages=3)
    for lease, number in zip(harness.lease(0, 1), (0, 1), strict=True):
        assert lease.view == content(number)
    for lease, number in zip(harness.lease(0, 1, space=OTHER), (0, 1), strict=True):
        assert lease.view == content(number, 3 * PAGE_BYTES)
    harness.close()


def test_a_parent_of_another_size_is_no_parent_in_the_order() -> None:
    harness = Harness(8, 4)
    harness.store(0)
    harness.store(1, pages=2)
    harness.store(2, 1)  # its slot's number is lower than its parent's
    assert harness.held(0, 1, 2) == [True] * 3
    harness.close()


# ---- for other tiers -------------------------------------------------------------------------------------------------


def test_a_slot_that_is_being_filled_may_be_leased_for_those_who_wait_for_it(four: Harness) -> None:
    waiting = four.pool.owner("waiting")
    reservation = four.reserve(1)
    (lease,) = four.tier.share([reservation], waiting)
    assert lease is not None
    assert lease.slot == reservation.lease.slot
    reservation.lease.view[:] = content(1)
    assert four.tier.commit([reservation]) == [True]
    for number in range(10, 14):
        four.try_reserve(number)
    assert (four.held(1), lease.view == content(1)) == ([True], True)
    assert four.tier.share([reservation], waiting) == [None], "committed: it is leased like any other"
    waiting.close()
    assert isinstance(four.try_reserve(14), Reservation)
    assert four.held(1) == [False]


def test_a_listener_that_raises_hurts_nobody_else(four: Harness, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*told: object) -> None:
        raise KeyError("what it must not")

    told: list[object] = []
    four.tier.subscribe(on_evict=fail, on_commit=fail)
    four.tier.subscribe(on_evict=told.append, on_commit=lambda blocks, _: told.append(len(blocks)))
    assert four.tier.commit([four.reserve(number) for number in range(4)]) == [True] * 4
    reservation = four.reserve(10)
    four.tier.abort(reservation)
    assert four.tier.reset(SPACE) == 3
    assert four.pool.usage().num_leases == 0
    assert [len(each) if isinstance(each, list) else each for each in told] == [4, 1, 1, 3]
    assert caplog.text.count("whoever follows what") == 4
    four.tier.check_integrity()


@pytest.mark.parametrize("how", ["abort", "reset", "owner dies"])
def test_a_void_reservation_is_shared_with_nobody_and_those_who_share_keep_their_bytes(four: Harness, how: str) -> None:
    filling, waiting = four.pool.owner("filling"), four.pool.owner("waiting")
    reservation = four.reserve(1, owner=filling)
    (early,) = four.tier.share([reservation], waiting)
    assert early is not None
    early.view[:] = content(1)
    if how == "abort":
        four.tier.abort(reservation)
    elif how == "reset":
        four.tier.reset(SPACE)
    else:
        filling.close()
    assert four.tier.share([reservation], waiting) == [None]
    if how == "owner dies":
        assert four.tier.share([reservation], filling) == [None]
    four.tier.abort(reservation)
    four.tier.check_integrity()
    assert [isinstance(four.try_reserve(number), Reservation) for number in range(10, 14)] == [True] * 3 + [False]
    assert early.view == content(1)
    waiting.close()
    with pytest.raises(ClosedError, match="'waiting'"):
        four.tier.share([four.reserve(20)], waiting)


def test_blocks_are_leased_one_by_one_wherever_they_are(four: Harness) -> None:
    four.store(1)
    four.store(1, space=OTHER)
    filling = four.reserve(2)
    short = four.tier.reserve(SPACE, name(3), None, 100, four.owner)
    assert isinstance(short, Reservation)
    short.lease.view[:100] = content(3, 100)
    four.tier.commit([short])
    asked = [(SPACE, name(9)), (OTHER, name(1)), (SPACE, name(2)), (SPACE, name(3)), (SPACE, name(1))]
    found = four.tier.lease_blocks(asked, four.owner)
    assert [block is not None for block in found] == [False, True, False, True, True]
    lengths = [block.nbytes for block in found if block is not None]
    assert lengths == [PAGE_BYTES, 100, PAGE_BYTES]
    assert found[3] is not None
    assert found[3].lease.view[:100] == content(3, 100)
    four.tier.abort(filling)
    with pytest.raises(ClosedError):
        four.tier.lease_blocks(asked, closed_owner(four))
    assert four.pool.usage().num_leases == 3


def closed_owner(harness: Harness) -> Owner:
    owner = harness.pool.owner("gone")
    owner.close()
    return owner


def test_a_lease_by_block_is_no_use(four: Harness) -> None:
    for number in range(4):
        four.store(number)
    for block in four.tier.lease_blocks([(SPACE, name(0))], four.owner):
        assert block is not None
        block.lease.release()
    four.store(4)
    assert four.evicted == [name(0)]


def test_the_states_of_several_blocks_are_told_at_once(four: Harness) -> None:
    four.store(1)
    reservation = four.reserve(2)
    assert four.tier.states(SPACE, []) == []
    assert four.tier.states(SPACE, [name(number) for number in (2, 3, 1)]) == [
        BlockState.RESERVED,
        None,
        BlockState.COMMITTED,
    ]
    assert four.tier.states(OTHER, [name(1)]) == [None]
    four.tier.abort(reservation)


def test_a_commit_says_where_its_blocks_came_from(four: Harness) -> None:
    told: list[tuple[int, str | None]] = []
    four.tier.subscribe(on_commit=lambda pairs, came_from: told.append((len(pairs), came_from)))
    four.store(1)
    assert four.tier.commit([four.reserve(2), four.reserve(3)], came_from="disk") == [True, True]
    void = four.reserve(4)
    four.tier.abort(void)
    assert four.tier.commit([void], came_from="disk") == [False]
    assert told == [(1, None), (2, "disk")]


def test_a_filling_that_comes_to_nothing_is_told_once_as_an_eviction(four: Harness) -> None:
    aborted, kept = four.reserve(1), four.reserve(2)
    four.tier.abort(aborted)
    four.tier.abort(aborted)
    assert four.evicted == [name(1)]
    assert four.tier.num_evicted == 0
    assert four.tier.why_missing(SPACE, name(1)) is MissReason.ABSENT
    four.tier.commit([kept])
    four.tier.abort(kept)
    dying = four.pool.owner("dying")
    four.reserve(3, owner=dying)
    dying.close()
    assert four.evicted == [name(1), name(3)]


# ---- reset and remove ------------------------------------------------------------------------------------------------


@pytest.mark.bug("WR23")
@pytest.mark.parametrize("how", ["reset", "remove"])
def test_what_was_being_stored_when_it_was_forgotten_never_becomes_visible(four: Harness, how: str) -> None:
    early, late = four.reserve(1), four.reserve(2, 1)
    if how == "reset":
        assert four.tier.reset(SPACE) == 2
    else:
        assert four.tier.remove([make_key(SPACE, name(number)) for number in (1, 2, 3)]) == 0
    early.lease.view[:] = content("old weights")
    four.tier.check_integrity()
    again = four.reserve(1)
    assert again.lease.slot != early.lease.slot
    assert four.tier.commit([early]) == [False]
    four.tier.abort(late)
    assert four.held(1, 2) == [False, False]
    again.lease.view[:] = content(1)
    assert four.tier.commit([again]) == [True]
    assert four.lease(1)[0].view == content(1)


def test_a_reset_leaves_other_namespaces_alone(four: Harness) -> None:
    four.store(1)
    four.store(1, space=OTHER)
    assert four.tier.reset(SPACE) == 1
    assert four.held(1) == [False]
    assert four.held(1, space=OTHER) == [True]


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_a_consumer_is_told_of_a_commit_before_the_block_can_go_and_may_lease_it(four: Harness) -> None:
    consumer = four.pool.owner("write-behind")
    told: list[tuple[Key, Key | None]] = []
    queue: list[Lease] = []

    def on_commit(pairs: Sequence[tuple[Key, Key | None]], came_from: str | None) -> None:
        told.extend(pairs)
        for key, _ in pairs:
            assert four.pool.usage().num_slots_leased > 0
            queue.extend(four.tier.lease_run(key[:16], [BlockDigest(key[16:])], consumer))

    end = four.tier.subscribe(on_commit=on_commit)
    four.store(0)
    four.store(1, 0)
    end()
    assert told == [
        (make_key(SPACE, name(0)), None),
        (make_key(SPACE, name(1)), make_key(SPACE, name(0))),
    ]
    for number in range(10, 20):
        four.store(number)
    assert [bytes(lease.view) for lease in queue] == [content(0), content(1)]
    assert four.held(0, 1) == [True, True]
    consumer.close()
    for number in range(20, 24):
        four.store(number)
    assert four.held(0, 1) == [False, False]
    assert len(told) == 2


def test_callbacks_may_call_the_tier_and_end_by_themselves(four: Harness) -> None:
    states: list[object] = []

    def on_evict(gone: Sequence[Eviction]) -> None:
        states.extend(four.tier.state(item.namespace, item.digest) for item in gone)
        end()

    end = four.tier.subscribe(on_evict=on_evict)
    for number in range(6):
        four.store(number)
    assert states == [None]


def test_integrity_sees_what_does_not_agree(four: Harness) -> None:
    four.store(1)
    reservation = four.reserve(2)
    broken: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: four.tier._names.pop(reservation.lease.slot), lambda: four.tier._names.update(names)),
        (four.tier._filling.clear, lambda: four.tier._filling.update(filling)),
        (lambda: four.pool._leases.__setitem__(slot, 0), lambda: four.pool._leases.__setitem__(slot, 1)),
        (lambda: four.pool._free[PAGE_BYTES].append(slot), four.pool._free[PAGE_BYTES].pop),
    ]
    names, filling, slot = dict(four.tier._names), dict(four.tier._filling), reservation.lease.slot
    for damage, repair in broken:
        damage()
        with pytest.raises(IntegrityError):
            four.tier.check_integrity()
        repair()
        four.tier.check_integrity()


# ---- any order -------------------------------------------------------------------------------------------------------

TREE: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: None, 6: 5}
BLOCKS = [(space, number) for space in (SPACE, OTHER) for number in TREE]
WORKERS = st.integers(0, 2)
Block = tuple[bytes, int]


@dataclass
class Held:
    """A committed block: its bytes, and which life of its parent it continues."""

    life: int
    data: bytes
    parent_life: int | None


@dataclass
class Filling:
    reservation: Reservation
    life: int
    block: Block
    data: bytes
    owner: Owner
    parent_life: int | None
    filled: bool = False


class HostTierMachine(RuleBasedStateMachine):
    """Two namespaces, one of one page a block and one of one or two, in 2 to 8 pages."""

    @initialize(pages=st.integers(2, 8), slab=st.sampled_from([1, 2, 4, 8]), other=st.integers(1, 2))
    def build(self, pages: int, slab: int, other: int) -> None:
        slab = min(slab, pages)
        self.pages = {SPACE: 1, OTHER: min(other, slab)}
        self.harness = Harness(pages, slab)
        self.tier, self.pool = self.harness.tier, self.harness.pool
        self.owners = [self.pool.owner(str(i)) for i in range(3)]
        self.held: dict[Block, Held] = {}
        self.filling: dict[Block, Filling] = {}
        self.void: list[Filling] = []
        self.leases: dict[Lease, tuple[Block, bytes, Owner]] = {}
        self.granted: dict[Lease, Owner] = {}
        self.ghosts: set[Block] = set()
        self.asking: bytes = SPACE
        self.lives = 0
        self.numbers = {name(number): number for number in TREE}
        self.removing: set[Block] = set()
        self.tier.subscribe(on_evict=self.note_evictions)

    # -- what the model thinks

    def life_of(self, block: Block) -> int | None:
        if block in self.held:
            return self.held[block].life
        return self.filling[block].life if block in self.filling else None

    def parent_of(self, block: Block) -> Block | None:
        parent = TREE[block[1]]
        return None if parent is None else (block[0], parent)

    def is_leased(self, block: Block) -> bool:
        life = self.held[block].life
        children = [*self.filling.values(), *(item for item in self.void if item.reservation.lease.live)]
        return any(
            found == (block, self.held[block].data) for found in ((b, d) for b, d, _ in self.leases.values())
        ) or (any(item.parent_life == life for item in children))

    def has_child(self, block: Block) -> bool:
        return any(item.parent_life == self.held[block].life for item in self.held.values())

    def note_evictions(self, gone: Sequence[Eviction]) -> None:
        blocks = [(item.namespace, self.numbers[item.digest]) for item in gone]
        for block in blocks:
            if block in self.removing:
                self.removing.remove(block)  # told once, leased or not
                continue
            if block in self.filling:
                continue  # its filling came to nothing
            assert not self.is_leased(block), "evicted while leased"
            if self.pages[block[0]] == self.pages[self.asking]:
                assert not self.has_child(block), "a prefix went before its tail"
            self.forget(block, evicted=True)

    def forget(self, block: Block, *, evicted: bool = False) -> None:
        gone = self.held.pop(block)
        for item in self.held.values():
            if item.parent_life == gone.life:
                item.parent_life = None
        if evicted:
            self.ghosts.add(block)

    def fill_one(self, item: Filling) -> None:
        item.reservation.lease.view[: len(item.data)] = item.data
        item.filled = True

    # -- calls

    @rule(block=st.sampled_from(BLOCKS), who=WORKERS)
    def reserve(self, block: Block, who: int) -> None:
        space, number = block
        self.asking, parent = space, self.parent_of(block)
        nbytes = self.pages[space] * PAGE_BYTES
        outcome = self.tier.reserve(
            space, name(number), None if parent is None else name(parent[1]), nbytes, self.owners[who]
        )
        if self.life_of(block) is not None:
            assert outcome is DropReason.ALREADY_STORED
        elif isinstance(outcome, DropReason):
            assert outcome is DropReason.HOST_FULL
            self.nothing_may_go(space, but=parent)
        else:
            self.lives += 1
            data = content((space, number, self.lives), nbytes)
            parent_life = None if parent is None else self.life_of(parent)
            self.filling[block] = Filling(outcome, self.lives, block, data, self.owners[who], parent_life)

    def nothing_may_go(self, space: bytes, but: Block | None = None) -> None:
        kept = [other for other in self.held if self.pages[other[0]] == self.pages[space] and other != but]
        assert all(self.is_leased(other) or self.has_child(other) for other in kept), "full beside an evictable block"

    @rule(space=st.sampled_from([SPACE, OTHER]), number=st.integers(1, 3), who=WORKERS)
    def grant(self, space: bytes, number: int, who: int) -> None:
        self.asking = space
        leases = self.tier.grant(self.pages[space] * PAGE_BYTES, number, self.owners[who])
        if len(leases) < number:
            self.nothing_may_go(space)
        self.granted.update(dict.fromkeys(leases, self.owners[who]))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.granted)))
        block = data.draw(
            st.sampled_from([each for each in BLOCKS if self.pages[each[0]] * PAGE_BYTES == lease.nbytes])
        )
        space, number = block
        parent = self.parent_of(block)
        self.lives += 1
        filled = content((space, number, self.lives), lease.nbytes)
        lease.view[:] = filled
        above = None if parent is None else name(parent[1])
        (outcome,) = self.tier.publish(space, [(name(number), above)], [lease], lease.nbytes)
        if block in self.held:
            assert outcome is PublishedAs.ALREADY_STORED
        elif block in self.filling:
            assert outcome is PublishedAs.BEING_STORED
        else:
            assert outcome is PublishedAs.STORED
            parent_life = self.held[parent].life if parent is not None and parent in self.held else None
            self.held[block] = Held(self.lives, filled, parent_life)
            self.ghosts.discard(block)
            self.leases[lease] = (block, filled, self.granted.pop(lease))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.granted)))
        del self.granted[lease]
        assert lease.release()

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.fill_one(self.filling[data.draw(st.sampled_from(sorted(self.filling)))])

    @precondition(lambda self: self.filling or self.void)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        known = [*self.filling.values(), *self.void]
        chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique_by=id))
        expected = [item.block in self.filling and self.filling[item.block] is item for item in chosen]
        for item, is_open in zip(chosen, expected, strict=True):
            if is_open:
                self.fill_one(item)
        assert self.tier.commit([item.reservation for item in chosen]) == expected
        for item, is_open in zip(chosen, expected, strict=True):
            if is_open:
                self.take_commit(item)
            else:
                self.void.remove(item)

    def take_commit(self, item: Filling) -> None:
        del self.filling[item.block]
        parent = self.parent_of(item.block)
        parent_life = self.held[parent].life if parent is not None and parent in self.held else None
        self.held[item.block] = Held(item.life, item.data, parent_life)
        self.ghosts.discard(item.block)

    @precondition(lambda self: self.filling or self.void)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([*self.filling.values(), *self.void]))
        self.tier.abort(item.reservation)
        if item in self.void:
            self.void.remove(item)
        else:
            del self.filling[item.block]
        assert not item.reservation.lease.live

    @rule(block=st.sampled_from(BLOCKS), who=WORKERS)
    def lease(self, block: Block, who: int) -> None:
        path = [block]
        while (parent := self.parent_of(path[0])) is not None:
            path.insert(0, parent)
        expected = []
        for step in path:
            if step not in self.held:
                break
            expected.append(step)
        leases = self.tier.lease_run(block[0], [name(number) for _, number in path], self.owners[who])
        assert len(leases) == len(expected)
        for lease, step in zip(leases, expected, strict=True):
            self.leases[lease] = (step, self.held[step].data, self.owners[who])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.leases)))
        assert lease.release()
        assert not lease.release()
        del self.leases[lease]

    @rule(who=WORKERS)
    def owner_dies(self, who: int) -> None:
        owner = self.owners[who]
        owner.close()
        self.filling = {block: item for block, item in self.filling.items() if item.owner is not owner}
        self.void = [item for item in self.void if item.owner is not owner]
        self.leases = {lease: known for lease, known in self.leases.items() if known[2] is not owner}
        self.granted = {lease: known for lease, known in self.granted.items() if known is not owner}
        self.owners[who] = self.pool.owner("next")

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), max_size=4, unique=True))
    def remove(self, blocks: list[Block]) -> None:
        there = [block for block in blocks if block in self.held]
        self.removing = {block for block in blocks if block in self.held or block in self.filling}
        assert self.tier.remove([make_key(space, name(number)) for space, number in blocks]) == len(there)
        assert not self.removing, "removed, and whoever relies on it was not told"
        for block in there:
            self.forget(block)
        self.void += [self.filling.pop(block) for block in blocks if block in self.filling]

    @rule(space=st.sampled_from([SPACE, OTHER]))
    def reset(self, space: bytes) -> None:
        there = [block for block in self.held if block[0] == space]
        voided = [block for block in self.filling if block[0] == space]
        self.removing = {*there, *voided}
        assert self.tier.reset(space) == len(there) + len(voided)
        assert not self.removing
        for block in there:
            self.forget(block)
        self.void += [self.filling.pop(block) for block in voided]

    @rule(block=st.sampled_from(BLOCKS))
    def copy_in(self, block: Block) -> None:
        """By the batch contract, which copies."""
        space, number = block
        self.asking, parent = space, self.parent_of(block)
        self.lives += 1
        data = content((space, number, self.lives), self.pages[space] * PAGE_BYTES)
        above = None if parent is None else make_key(space, name(parent[1]))
        life = self.life_of(block)
        (outcome,) = self.tier.write([WriteRequest(make_key(space, name(number)), above, memoryview(data))])
        if life is not None:
            assert outcome is WriteOutcome.ALREADY_STORED
        elif outcome is WriteOutcome.STORED:
            parent_life = self.held[parent].life if parent is not None and parent in self.held else None
            self.held[block] = Held(self.lives, data, parent_life)
            self.ghosts.discard(block)
        else:
            assert outcome is WriteOutcome.FULL

    # -- after every step

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        for block in BLOCKS:
            space, number = block
            digest = name(number)
            state = BlockState.COMMITTED if block in self.held else BlockState.RESERVED
            assert self.tier.state(space, digest) == (state if self.life_of(block) is not None else None)
            assert self.tier.committed_run(space, [digest]) == (block in self.held)
            if block not in self.held:
                absent = MissReason.EVICTED if block in self.ghosts else MissReason.ABSENT
                reason = MissReason.BEING_STORED if block in self.filling else absent
                assert self.tier.why_missing(space, digest) is reason

    @invariant()
    def bytes_are_those_written(self) -> None:
        for lease, (_, data, _) in self.leases.items():
            assert lease.view == data
        for item in [*self.filling.values(), *self.void]:
            assert not item.filled or item.reservation.lease.view == item.data
        for (space, number), held in self.held.items():
            buffer = memoryview(bytearray(len(held.data)))
            slots = self.tier._index.committed_run(space, [name(number)])
            offset = self.pool._offsets[slots[0]]
            buffer[:] = self.pool.buffer[offset : offset + len(held.data)].data
            assert buffer == held.data

    @invariant()
    def parents_are_there(self) -> None:
        lives = {item.life for item in self.held.values()}
        for item in self.held.values():
            assert item.parent_life is None or item.parent_life in lives

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            for owner in self.owners:
                owner.close()
            assert self.pool.usage().num_leases == 0
            self.removing = {*self.held, *self.filling}
        self.harness.close()


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(max_examples=80, stateful_step_count=40)


# ---- threads ---------------------------------------------------------------------------------------------------------


class LockOrder:
    """Which lock was ever taken under which, over all threads; a pair in both orders is a deadlock to come."""

    def __init__(self) -> None:
        self._held = threading.local()
        self.pairs: set[tuple[str, str]] = set()
        self.wrong: list[str] = []

    def held(self) -> list[str]:
        if not hasattr(self._held, "names"):
            self._held.names = []
        names: list[str] = self._held.names
        return names

    def check_none_held(self, where: str) -> None:
        if self.held():
            self.wrong.append(f"{where} under {self.held()}")


class OrderedLock:
    def __init__(self, name: str, order: LockOrder) -> None:
        self._lock = threading.Lock()
        self._name = name
        self._order = order

    def __enter__(self) -> None:
        held = self._order.held()
        for other in held:
            self._order.pairs.add((other, self._name))
            if other == self._name or (self._name, other) in self._order.pairs:
                self._order.wrong.append(f"{self._name} taken under {other}")
        assert self._lock.acquire(timeout=SOON_S), f"stalled at {self._name}"
        held.append(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._order.held().remove(self._name)
        self._lock.release()


def test_the_lock_checker_sees_an_inversion() -> None:
    order = LockOrder()
    one, other = OrderedLock("one", order), OrderedLock("other", order)
    with one, other:
        order.check_none_held("a callback")
    with other, one:
        pass
    assert order.wrong == ["a callback under ['one', 'other']", "one taken under other"]


class RandomRequests:
    """One thread's requests, which store and read three chains of four blocks."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.tier, self.pool = harness.tier, harness.pool
        self.rng = random.Random(seed)
        self.wrong: list[str] = []

    def run(self) -> None:
        for turn in range(60):
            with self.pool.owner(str(turn)) as owner:
                for _ in range(self.rng.randrange(1, 4)):
                    self.rng.choice([self.store, self.store, self.restore])(owner)
            if self.rng.random() < 0.1:
                self.tier.remove([make_key(SPACE, name(self.rng.randrange(12)))])
            if self.rng.random() < 0.02:
                self.tier.reset(SPACE)
            self.tier.usage()

    def store(self, owner: Owner) -> None:
        number = self.rng.randrange(12)
        parent = name(number - 1) if number % 4 else None
        reservation = self.tier.reserve(SPACE, name(number), parent, PAGE_BYTES, owner)
        if isinstance(reservation, DropReason):
            return
        reservation.lease.view[:] = content(number)
        if self.rng.random() < 0.2:
            self.tier.abort(reservation)
        elif self.rng.random() < 0.8:
            self.tier.commit([reservation])

    def restore(self, owner: Owner) -> None:
        first = self.rng.randrange(3) * 4
        for i, lease in enumerate(self.tier.lease_run(SPACE, [name(first + i) for i in range(4)], owner)):
            if lease.view != content(first + i):
                self.wrong.append(f"block {first + i}")


@pytest.mark.bug("HS18")
def test_eight_threads_store_and_restore_in_one_lock_order_and_read_only_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, order = Harness(8, 2), LockOrder()
    tier, pool = harness.tier, harness.pool
    monkeypatch.setattr(tier, "_lock", OrderedLock("tier", order))
    monkeypatch.setattr(pool, "_lock", OrderedLock("pool", order))
    tier.subscribe(
        on_evict=lambda gone: order.check_none_held("on_evict"),
        on_commit=lambda pairs, came_from: order.check_none_held("on_commit"),
    )
    requests = [RandomRequests(harness, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for running in [threads.submit(each.run) for each in requests]:
            running.result()
    assert order.wrong == [each for request in requests for each in request.wrong] == []
    assert ("tier", "pool") in order.pairs
    assert tier.num_evicted > 0
    assert pool.usage().num_leases == 0
    harness.close()


@pytest.mark.bug("HS17", "HS18")
def test_owners_that_die_at_any_moment_of_a_store_lose_no_slot() -> None:
    harness = Harness(4, 2)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for turn in range(80):
            owner = harness.pool.owner(f"{seed}.{turn}")
            killer = threading.Thread(target=owner.close)
            killer.start()
            try:
                outcome = harness.try_reserve(rng.randrange(6), owner=owner)
                if isinstance(outcome, Reservation):
                    harness.tier.commit([outcome])
            except (ClosedError, LeaseError):
                pass
            killer.join()

    with ThreadPoolExecutor(4) as threads:
        for running in [threads.submit(work, seed) for seed in range(4)]:
            running.result()
    assert harness.pool.usage().num_leases == 0
    harness.close()


def test_reads_of_a_batch_are_misses_or_right_while_blocks_come_and_go() -> None:
    harness = Harness(4, 2)
    keys = [make_key(SPACE, name(number)) for number in range(8)]

    def work(seed: int) -> list[int]:
        rng, wrong = random.Random(seed), []
        for _ in range(100):
            number = rng.randrange(8)
            if rng.random() < 0.5:
                harness.tier.write([WriteRequest(keys[number], None, memoryview(content(number)))])
            else:
                buffer = bytearray(PAGE_BYTES)
                outcome = harness.tier.read([ReadRequest(keys[number], memoryview(buffer))])[0]
                if outcome is ReadOutcome.OK and buffer != content(number):
                    wrong.append(number)
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(work, range(4))] == [[]] * 4
    harness.close()


def test_leased_blocks_cost_one_look_each_however_many_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(64, 64)
    looks: list[int] = []
    can_evict = harness.pool.can_evict

    def counting(slot: int) -> bool:
        looks.append(slot)
        return can_evict(slot)

    for number in range(64):
        harness.store(number)
    leases = [harness.lease(number)[0] for number in range(40)]
    for number in range(40, 64):  # so that the leased ones are the least recently used
        harness.lease(number)[0].release()
    with monkeypatch.context() as patch:
        patch.setattr(harness.pool, "can_evict", counting)
        for number in range(100, 124):
            harness.store(number)
    assert len(looks) <= 40 + 24
    assert harness.held(*range(64)) == [True] * 40 + [False] * 24
    for lease in leases[10:20]:
        lease.release()
    for number in range(200, 210):
        harness.store(number)
    assert harness.held(*range(40)) == [True] * 10 + [False] * 10 + [True] * 20
    harness.close()


def test_a_lease_that_ends_while_everything_is_leased_makes_room(four: Harness) -> None:
    for number in range(4):
        four.store(number)
    leases = four.lease(0) + four.lease(1) + four.lease(2) + four.lease(3)
    assert four.try_reserve(9) is DropReason.HOST_FULL
    four.tier.check_integrity()
    leases[2].release()
    four.store(9)
    assert four.held(0, 1, 2, 3, 9) == [True, True, False, True, True]


def test_another_policy_may_be_given() -> None:
    pool = HostPool(PoolMemory(2 * PAGE_BYTES, touch=False), PAGE_BYTES)
    made: list[TailsFirstLRU] = []

    def make() -> TailsFirstLRU:
        made.append(TailsFirstLRU())
        return made[-1]

    tier = HostTier(pool, policy=make)
    tier.write([WriteRequest(make_key(SPACE, name(1)), None, memoryview(content(1)))])
    assert len(made) == 1
    tier.close()
    pool.close()


def test_a_forked_child_is_refused_by_the_tier_too(four: Harness) -> None:
    """The mapping is shared with the child, the index is not: a write there could change a block of the parent's."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: four.tier.write([WriteRequest(make_key(SPACE, name(1)), None, memoryview(bytearray(PAGE_BYTES)))]),
            lambda: four.tier.lease_run(SPACE, [name(1)], four.owner),
            lambda: four.tier.reserve(SPACE, name(1), None, PAGE_BYTES, four.owner),
        ):
            try:
                call()
            except ForkedError:
                refused += 1
        os.write(writer, bytes([refused]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == bytes([3])
    os.close(reader)
    os.close(writer)


def test_a_digest_of_another_length_is_refused_before_anything_is_set_aside(four: Harness) -> None:
    with pytest.raises(ConfigError, match="32"):
        four.tier.reserve(SPACE, BlockDigest(b"short"), None, PAGE_BYTES, four.owner)
    four.tier.check_integrity()


def test_a_reset_goes_on_past_one_hold_of_the_lock(four: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "RESET_STRETCH", 2)
    for number in range(4):
        four.store(number)
    assert four.tier.reset(SPACE) == 4
    assert four.held(0, 1, 2, 3) == [False] * 4
    four.tier.check_integrity()


def test_slots_are_forgotten_past_one_hold_of_the_lock(four: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "RESET_STRETCH", 2)
    holds: list[list[int]] = []

    class Counted:
        def __enter__(self) -> None:
            lock.acquire()
            holds.append([])

        def __exit__(self, *_: object) -> None:
            lock.release()

    def is_idle(slot: int) -> bool:
        holds[-1].append(slot)
        return True

    for number in range(4):
        four.store(number)
    slots, lock = sorted(four.tier._names), four.tier._lock
    monkeypatch.setattr(four.tier, "_lock", Counted())
    four.tier.forget_slots(slots, is_idle)
    assert holds == [slots[:2], slots[2:]]
    assert four.held(0, 1, 2, 3) == [False] * 4
    four.tier.check_integrity()


@dataclass(frozen=True)
class Wanted:
    """One call of `reserve_all`, and what is committed of it."""

    blocks: list[tuple[int, int | None]]
    pages: int
    tenant: str
    committed: list[bool]


wanted = st.builds(
    Wanted,
    st.lists(st.tuples(st.integers(0, 11), st.none() | st.integers(0, 11)), max_size=8),
    st.integers(1, 2),
    st.sampled_from(["a", "b"]),
    st.lists(st.booleans(), min_size=8, max_size=8),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(wanted, max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_a_batch_is_what_its_blocks_are_one_by_one(
    calls: list[Wanted], quotas: bool, checksums: bool, is_chain: bool
) -> None:
    limits = {"a": 3 * PAGE_BYTES} if quotas else None
    sides = []
    for _ in range(2):
        pool = HostPool(PoolMemory(8 * PAGE_BYTES, touch=False), 4 * PAGE_BYTES)
        tier = HostTier(pool, quotas=limits, keeps_checksums=checksums)
        sides.append((pool, tier, pool.owner("test"), _heard(tier)))
    (pool, tier, owner, told), (other_pool, other, other_owner, other_told) = sides
    for call in calls:
        blocks = [(name(i), None if parent is None else name(parent)) for i, parent in call.blocks]
        nbytes = call.pages * PAGE_BYTES - 1
        at_once = tier.reserve_all(SPACE, blocks, nbytes, owner, tenant=call.tenant, is_chain=is_chain)
        one_by_one: list[Reservation | DropReason] = []
        for block in blocks:
            reason = next((each for each in one_by_one if _is_refusal(each)), None) if is_chain else None
            one_by_one.append(reason or other.reserve(SPACE, *block, nbytes, other_owner, tenant=call.tenant))
        assert [_told(each) for each in at_once] == [_told(each) for each in one_by_one]
        tier.check_integrity()
        made = [each for each in at_once if isinstance(each, Reservation)]
        singly = [each for each in one_by_one if isinstance(each, Reservation)]
        chosen = [filled for filled, is_chosen in zip(made, call.committed, strict=False) if is_chosen]
        assert tier.commit(chosen) == [True] * len(chosen)
        assert all(other.commit([twin]) == [True] for twin, is_chosen in zip(singly, call.committed) if is_chosen)  # noqa: B905
        for filled, twin in zip(made, singly, strict=True):  # harmless for those that are committed
            tier.abort(filled)
            other.abort(twin)
        assert told == other_told
        assert pool.usage() == other_pool.usage()
        assert tier.digests(SPACE) == other.digests(SPACE)
        assert tier.tenant_bytes == other.tenant_bytes
        tier.check_integrity()
    leases = [tier.lease_run(SPACE, [BlockDigest(digest)], owner)[0] for digest in tier.digests(SPACE)]
    pool.release_all([*leases, *leases])
    assert pool.usage() == other_pool.usage()
    assert not any(lease.live for lease in leases)
    tier.check_integrity()
    pool.close()
    other_pool.close()


def _heard(tier: HostTier) -> list[object]:
    """What its listeners are told, from now on."""
    told: list[object] = []
    tier.subscribe(
        on_evict=lambda gone: told.extend(item.digest for item in gone),
        on_commit=lambda keys, source: told.extend((key, source) for key in keys),
    )
    return told


def _is_refusal(outcome: Reservation | DropReason) -> bool:
    return isinstance(outcome, DropReason) and outcome is not DropReason.ALREADY_STORED


def _told(outcome: Reservation | DropReason) -> object:
    if isinstance(outcome, Reservation):
        return outcome.digest, outcome.parent, outcome.lease.slot, outcome.lease.nbytes
    return outcome


def test_a_batch_of_slots_that_are_leased_already_takes_these_and_lets_go_of_the_rest() -> None:
    harness = Harness(8, 8)
    assert harness.tier.commit([harness.reserve(1)]) == [True]
    leases = [harness.pool.allocate(PAGE_BYTES, harness.owner) for _ in range(4)]
    given = [lease for lease in leases if lease is not None]
    given[3].release()
    blocks = [(name(i), None if i == 0 else name(i - 1)) for i in range(4)]
    made = harness.tier.reserve_all(SPACE, blocks, PAGE_BYTES, harness.owner, leases=given)
    assert [isinstance(each, Reservation) for each in made] == [True, False, True, False]
    assert made[1::2] == [DropReason.ALREADY_STORED, DropReason.CLOSED]
    kept = [each for each in made if isinstance(each, Reservation)]
    assert [each.lease for each in kept] == [given[0], given[2]]
    assert [lease.live for lease in given] == [True, False, True, False]
    assert harness.tier.commit(kept) == [True, True]
    assert harness.held(0, 1, 2, 3) == [True, True, True, False]
    harness.tier.check_integrity()
    lease = harness.pool.allocate(PAGE_BYTES, harness.owner)
    assert lease is not None
    with pytest.raises(ConfigError):
        harness.tier.reserve_all(SPACE, [(BlockDigest(b"short"), None)], PAGE_BYTES, harness.owner, leases=[lease])
    assert not lease.live
    harness.owner.close()
    assert harness.pool.usage().num_slots_used == 3
    harness.pool.close()


def test_a_batch_dies_with_its_owner() -> None:
    harness = Harness(4, 4)
    made = harness.tier.reserve_all(SPACE, [(name(0), None), (name(1), name(0))], PAGE_BYTES, harness.owner)
    assert all(isinstance(each, Reservation) for each in made)
    harness.owner.close()
    assert harness.pool.usage().num_slots_used == 0
    assert harness.tier.states(SPACE, [name(0), name(1)]) == [None, None]
    with pytest.raises(ClosedError):
        harness.tier.reserve_all(SPACE, [(name(2), None)] * 2, PAGE_BYTES, harness.owner)
    with pytest.raises(LayoutError):
        harness.tier.reserve_all(SPACE, [(name(2), None)], 64 * PAGE_BYTES, harness.owner)
    with pytest.raises(ConfigError):
        harness.tier.reserve_all(SPACE, [(name(2), None), (BlockDigest(b"short"), None)], PAGE_BYTES, harness.owner)
    harness.tier.close()
    assert harness.tier.reserve_all(SPACE, [(name(2), None)] * 2, PAGE_BYTES, harness.owner) == [DropReason.CLOSED] * 2
    harness.tier.check_integrity()
    harness.pool.close()


# ---- filled first, then named ----------------------------------------------------------------------------------------


class Granting(Harness):
    """Blocks that get their names once their slots are filled."""

    def __init__(self, num_pages: int, slab_pages: int, **options: Any) -> None:
        super().__init__(num_pages, slab_pages)
        self.tier = HostTier(self.pool, **options)
        self.told: list[object] = []
        self.tier.subscribe(
            on_evict=lambda gone: self.told.extend(("evict", item.digest) for item in gone),
            on_commit=lambda keys, came_from: self.told.append((list(keys), came_from)),
        )

    def grant(self, number: int = 1, pages: int = 1, tenant: str = "") -> list[Lease]:
        return self.tier.grant(pages * PAGE_BYTES, number, self.owner, tenant=tenant)

    def publish(self, blocks: dict[int, int | None], leases: Sequence[Lease], **options: Any) -> list[PublishedAs]:
        """Numbers with those of their parents."""
        for number, lease in zip(blocks, leases, strict=True):
            lease.view[:] = content(number, lease.nbytes)
        named = [(name(number), None if above is None else name(above)) for number, above in blocks.items()]
        outcomes = self.tier.publish(SPACE, named, leases, leases[0].nbytes if leases else PAGE_BYTES, **options)
        self.tier.check_integrity()
        return outcomes


NEW, ALREADY, BEING, FULL = PublishedAs


@pytest.fixture
def slots() -> Iterator[Granting]:
    harness = Granting(4, 4)
    yield harness
    harness.close()


def test_a_granted_slot_is_no_block_until_it_is_published_and_then_is_found_where_it_was_filled(
    slots: Granting,
) -> None:
    leases = slots.grant(2)
    assert slots.tier.num_blocks == 0
    assert slots.publish({0: None, 1: 0}, leases) == [NEW, NEW]
    found = slots.lease(0, 1)
    assert [lease.slot for lease in found] == [lease.slot for lease in leases]
    assert [lease.view for lease in found] == [content(0), content(1)]
    assert all(lease.live for lease in leases)


def test_a_published_block_stays_while_it_is_leased_and_goes_after(slots: Granting) -> None:
    leases = slots.grant(4)
    slots.publish({0: None, 1: None, 2: None, 3: None}, leases)
    assert slots.grant() == []
    leases[2].release()
    assert len(slots.grant()) == 1
    assert slots.held(0, 1, 2, 3) == [True, True, False, True]


def test_a_grant_takes_what_is_free_then_evicts_the_coldest_and_says_so(slots: Granting) -> None:
    for number in range(3):
        slots.store(number)
    kept = slots.lease(0)
    slots.told.clear()
    leases = slots.grant(7)
    assert len(leases) == 3
    assert slots.told == [("evict", name(1)), ("evict", name(2))]
    assert slots.tier.num_evicted == 2
    assert slots.tier.why_missing(SPACE, name(1)) is MissReason.EVICTED
    assert slots.held(0) == [True]
    assert kept[0].live


def test_a_slot_that_was_not_published_is_free_once_it_is_released(slots: Granting) -> None:
    for lease in slots.grant(4):
        lease.release()
    assert slots.pool.usage().used_bytes == 0
    assert len(slots.grant(4)) == 4


def test_what_is_there_or_on_its_way_is_not_stored_and_its_slot_keeps_no_name(slots: Granting) -> None:
    slots.store(0)
    filling = slots.reserve(1)
    leases = slots.grant(2)
    slots.told.clear()
    assert slots.publish({0: None, 1: None}, leases) == [ALREADY, BEING]
    assert slots.told == []
    assert slots.publish({2: None, 3: 2}, leases) == [NEW, NEW]
    slots.tier.abort(filling)
    assert slots.held(0, 1, 2, 3) == [True, False, True, True]


def test_a_batch_names_each_block_once(slots: Granting) -> None:
    leases = slots.grant(2)
    named = [(name(7), None)] * 2
    assert slots.tier.publish(SPACE, named, leases, PAGE_BYTES) == [NEW, ALREADY]


def test_who_listens_is_told_of_what_is_stored_alone_and_may_lease_it(slots: Granting) -> None:
    slots.store(0)
    leased: list[Lease] = []
    writer = slots.pool.owner("write-behind")
    slots.tier.subscribe(
        on_commit=lambda keys, _: leased.extend(
            block.lease
            for block in slots.tier.lease_blocks([(SPACE, BlockDigest(key[16:])) for key, _ in keys], writer)
            if block is not None
        )
    )
    slots.told.clear()
    leases = slots.grant(3)
    assert slots.publish({0: None, 1: 0, 2: 1}, leases) == [ALREADY, NEW, NEW]
    keys = [make_key(SPACE, name(number)) for number in (0, 1, 2)]
    assert slots.told == [([(keys[1], keys[0]), (keys[2], keys[1])], None)]
    slots.owner.close()
    assert [lease.view for lease in leased] == [content(1), content(2)]
    writer.close()


def test_chains_that_are_published_go_tails_first(slots: Granting) -> None:
    leases = slots.grant(4)
    slots.publish({0: None, 1: 0, 2: 1, 3: 2}, leases)
    slots.pool.release_all(leases)
    slots.told.clear()
    slots.grant(3)
    assert slots.told == [("evict", name(number)) for number in (3, 2, 1)]


@pytest.mark.parametrize("given", [True, False])
def test_checksums_are_kept_as_given_or_summed_up(given: bool) -> None:
    harness = Granting(4, 4, keeps_checksums=True)
    harness.store(0)
    leases = harness.grant(3)
    assert harness.publish({0: None, 1: None, 2: None}, leases, checksums=[5, 6, 7] if given else None) == [
        ALREADY,
        NEW,
        NEW,
    ]
    held = harness.tier.lease_blocks([(SPACE, name(number)) for number in (1, 2)], harness.owner)
    expected = [6, 7] if given else [payload_checksum(content(number)) for number in (1, 2)]
    assert [block.checksum for block in held if block is not None] == expected
    harness.close()


def test_no_checksum_is_kept_where_nobody_else_writes(slots: Granting) -> None:
    slots.publish({0: None}, slots.grant(), checksums=[5], ttl_s=3.0)
    (held,) = slots.tier.lease_blocks([(SPACE, name(0))], slots.owner)
    assert held is not None
    assert (held.checksum, held.ttl_s, held.nbytes) == (None, 3.0, PAGE_BYTES)


def test_at_its_quota_a_tenant_publishes_in_place_of_its_own_coldest_and_never_of_the_parent() -> None:
    harness = Granting(8, 4, quotas={"a": 3 * PAGE_BYTES})
    leases = harness.grant(5, tenant="a")
    assert harness.publish({0: None, 1: None, 2: None}, leases[:3], tenant="a") == [NEW] * 3
    assert harness.publish({3: None}, leases[3:4], tenant="a") == [FULL]  # its own are leased
    assert harness.publish({10: None}, leases[3:4], tenant="b") == [NEW]
    harness.pool.release_all(leases[:3])
    harness.told.clear()
    assert harness.publish({4: 0}, leases[4:], tenant="a") == [NEW]
    assert harness.told[0] == ("evict", name(1))
    assert harness.held(0, 1, 2, 4, 10) == [True, False, True, True, True]
    assert harness.tier.tenant_bytes == {"a": 3 * PAGE_BYTES, "b": PAGE_BYTES}
    harness.close()


def test_a_closed_tier_grants_and_publishes_nothing(slots: Granting) -> None:
    leases = slots.grant()
    slots.tier.close()
    assert slots.grant() == []
    assert slots.publish({0: None}, leases) == [FULL]


def test_what_is_no_slot_of_a_grant_is_refused_and_nothing_is_stored() -> None:
    harness = Granting(8, 4)
    first, second, ended = harness.grant(3)
    (longer,) = harness.grant(pages=2)
    harness.publish({0: None}, [first])
    ended.release()
    for leases, error in (
        ([second, first], LeaseError),
        ([second, ended], LeaseError),
        ([second, second], LeaseError),
        ([second, longer], LayoutError),
    ):
        with pytest.raises(error):
            harness.tier.publish(SPACE, [(name(1), None), (name(2), None)], leases, PAGE_BYTES)
    with pytest.raises(ConfigError):
        harness.tier.publish(SPACE, [(BlockDigest(b"short"), None)], [second], PAGE_BYTES)
    with pytest.raises(LayoutError):
        harness.grant(pages=5)
    with pytest.raises(ClosedError):
        harness.tier.grant(PAGE_BYTES, 1, closed_owner(harness))
    assert harness.held(0, 1, 2) == [True, False, False]
    assert harness.tier.num_blocks == 1
    harness.close()


def test_a_published_block_that_is_forgotten_keeps_its_bytes_for_the_publisher(slots: Granting) -> None:
    (lease,) = slots.grant()
    slots.publish({0: None}, [lease])
    slots.tier.reset(SPACE)
    assert slots.held(0) == [False]
    assert len(slots.grant(4)) == 3
    assert lease.view == content(0)
