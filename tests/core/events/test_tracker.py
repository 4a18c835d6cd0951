"""Who applies every change in order believes what the tier holds, whatever was heard, lost or reset in between."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.events import Changes, TierEvents, chains
from kvtier.events.sources import follow_lower, held_by_lower, listing_of
from kvtier.keys import BlockDigest, make_key

if TYPE_CHECKING:
    from tests.core.events.conftest import FakeTier, Rig


def block(number: int) -> BlockDigest:
    return BlockDigest(b"%032d" % number)


class Listener:
    """Believes what it is told, and checks how it is told."""

    def __init__(self) -> None:
        self.known: set[BlockDigest] = set()

    def apply(self, changes: Changes) -> None:
        assert self.known.issuperset(changes.gone)
        assert len(set(changes.gone)) == len(changes.gone)
        self.known -= set(changes.gone)
        stored = dict(changes.stored)
        for digest, parent in changes.stored:
            assert parent not in stored or parent in self.known, "a tail before its prefix"
            self.known.add(digest)


def follow(tier: FakeTier, **kwargs: Any) -> TierEvents:
    tracker = TierEvents(tier.space, held_by_lower(tier), listing_of(tier), **kwargs)
    follow_lower(tier, tracker)
    return tracker


@pytest.fixture
def tier(rig: Rig) -> FakeTier:
    return rig.fake_tier(rig.fake_space())


def test_a_chain_is_told_prefix_first_and_removals_before_it(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.put(1, 2, 3)
    assert tracker.drain() == ([], [(block(1), None), (block(2), block(1)), (block(3), block(2))])
    tier.put(4)
    tier.drop(3)
    assert tracker.has_changes
    assert tracker.drain() == ([block(3)], [(block(4), None)])
    assert not tracker.has_changes
    assert tracker.drain() == ([], [])


def test_a_tail_that_was_heard_of_first_comes_behind_its_prefix(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.put(3, parent=2)
    tier.put(2, parent=1)
    tier.put(1)
    assert [digest for digest, _ in tracker.drain().stored] == [block(1), block(2), block(3)]


def test_what_came_and_went_is_not_told(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.put(1)
    tier.drop(1)
    assert tracker.drain() == ([], [])
    tier.put(1)
    tracker.drain()
    tier.drop(1)
    tier.put(1)
    assert tracker.drain() == ([], [])


def test_callbacks_that_overtake_each_other_mislead_nobody(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.tell = False
    tier.put(1, 2)
    tier.drop(2)
    tracker.note_gone([tier.key(2)])
    tracker.note_stored([(tier.key(1), None), (tier.key(2), tier.key(1))])
    assert tracker.drain() == ([], [(block(1), None)])
    tier.put(2, parent=1)
    tracker.note_gone([tier.key(2)])
    assert tracker.drain() == ([], []), "its parent is not known before its own callback"
    tracker.note_stored([(tier.key(2), tier.key(1))])
    assert tracker.drain() == ([], [(block(2), block(1))])


def test_a_reset_removes_all_before_anything_of_the_new_epoch(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.put(1, 2, 3)
    tracker.drain()
    tier.space.reset()
    assert tracker.has_changes
    tier.put(2)
    assert tracker.drain(limit=2) == ([block(1), block(2)], [])
    assert tracker.drain(limit=2) == ([block(3)], [(block(2), None)])
    assert not tracker.has_changes


def test_a_reset_while_blocks_are_looked_up_loses_none(tier: FakeTier) -> None:
    tracker = follow(tier)

    class Turning:
        """Turns the epoch between two looks at it."""

        num_looks = 0

        @property
        def digest(self) -> bytes:
            self.num_looks += 1
            if self.num_looks == 2:
                tier.space.reset()
                tier.put(7)
            return tier.space.digest

    space: Any = Turning()
    tracker._space = space
    assert tracker.drain() == ([], [])
    assert tracker.drain() == ([], [(block(7), None)])


def test_other_namespaces_are_others_affair(tier: FakeTier) -> None:
    tracker = follow(tier)
    foreign = make_key(b"x" * 16, block(1))
    tracker.note_stored([(foreign, None)])
    tracker.note_gone([foreign])
    assert not tracker.has_changes


def test_what_a_tier_lists_is_told_at_first(rig: Rig) -> None:
    tier = rig.listing_tier(rig.fake_space())
    tier.put(2, parent=1)
    tier.put(1)
    tracker = follow(tier)
    assert tracker.has_changes
    assert tracker.drain() == ([], [(block(1), None), (block(2), block(1))])


def test_too_many_changes_are_looked_up_instead(rig: Rig) -> None:
    tier = rig.listing_tier(rig.fake_space())
    tracker, listener = follow(tier, max_waiting=4), Listener()
    tier.put(*range(10))
    listener.apply(tracker.drain())
    tier.drop(*range(3, 10))
    tier.put(*range(20, 30))
    while tracker.has_changes:
        listener.apply(tracker.drain(limit=3))
    assert listener.known == tier.digests() == {block(n) for n in (0, 1, 2, *range(20, 30))}


def test_of_a_tier_that_cannot_list_removals_are_never_lost(tier: FakeTier) -> None:
    tracker, listener = follow(tier, max_waiting=4), Listener()
    tier.put(1, 2, 3)
    listener.apply(tracker.drain())
    tier.drop(2)
    tier.put(*range(10, 20))
    listener.apply(tracker.drain())
    assert listener.known == {block(1), block(3)}


def test_more_blocks_than_listeners_are_to_know_are_told_as_gone_oldest_first(tier: FakeTier) -> None:
    tracker, listener = follow(tier, max_told=32), Listener()
    for start in range(0, 200, 20):
        tier.put(*range(start, start + 20))
        listener.apply(tracker.drain())
        assert len(listener.known) <= 32
    assert {block(n) for n in range(180, 200)} <= listener.known == set(tracker._told)
    tier.put(*range(200, 300))
    tracker.retell()
    changes = tracker.drain()
    listener.known -= set(changes.gone)
    listener.known.update(digest for digest, _ in changes.stored)
    assert listener.known == set(tracker._told)


def test_all_is_told_again_for_who_forgot_it(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.put(1, 2)
    tracker.drain()
    tier.drop(2)
    tier.put(3)
    tracker.retell()
    assert tracker.drain() == ([block(2)], [(block(3), None), (block(1), None)])


def test_a_tier_that_is_no_more_holds_nothing(tier: FakeTier) -> None:
    tracker = follow(tier)
    tier.put(1, 2)
    tracker.drain()
    tier.put(3)
    tracker.end()
    assert tracker.drain() == ([block(1), block(2)], [])
    assert not tracker.has_changes


def test_a_tier_that_raises_is_asked_again_and_nothing_is_lost(tier: FakeTier) -> None:
    tracker, listener = follow(tier), Listener()
    tier.put(1, 2, 3)
    listener.apply(tracker.drain())
    tier.drop(1)
    tier.put(4, parent=3)
    tier.failures = 1
    with pytest.raises(OSError, match="ill"):
        tracker.drain()
    while tracker.has_changes:
        listener.apply(tracker.drain())
    assert listener.known == tier.digests()


def test_every_change_wakes(tier: FakeTier) -> None:
    woken: list[None] = []
    follow(tier, on_change=lambda: woken.append(None))
    tier.put(1)
    tier.drop(1)
    assert len(woken) == 2


def test_runs_are_blocks_that_continue_each_other() -> None:
    a, b, c, d = map(block, range(4))
    assert list(chains([(a, None), (b, a), (d, c), (c, b)])) == [(None, [a, b]), (c, [d]), (b, [c])]
    assert list(chains([])) == []


def test_threads_that_store_and_evict_while_it_drains(rig: Rig) -> None:
    tier = rig.listing_tier(rig.fake_space())
    tracker, listener = follow(tier, max_waiting=50), Listener()

    def work(first: int) -> None:
        for turn in range(100):
            tier.put(*range(first, first + 10))
            tier.drop(*range(first + turn % 10, first + 10))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(3)]
    tier.keys = lambda namespace: [(key, None) for key in list(tier.blocks)]  # type: ignore[method-assign]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        listener.apply(tracker.drain(limit=20))
    for thread in threads:
        thread.join()
    while tracker.has_changes:
        listener.apply(tracker.drain(limit=20))
    assert listener.known == tier.digests()


class ListenerMachine(RuleBasedStateMachine):
    """Random stores, evictions, callbacks that come late or twice, resets and failures."""

    @initialize(lists=st.booleans())
    def begin(self, lists: bool) -> None:
        from tests.core.events.conftest import FakeSpace, FakeTier, ListingTier

        self.space = FakeSpace()
        self.tier: FakeTier = (ListingTier if lists else FakeTier)(self.space)
        self.tier.put(1, 2, 3)
        self.tracker = TierEvents(
            self.space, held_by_lower(self.tier), listing_of(self.tier), max_waiting=12 if lists else 1000
        )
        self.listener = Listener()
        if not lists:
            self.tracker.note_stored(list(self.tier.blocks.items()))
        self.late: list[tuple[bool, list[Any]]] = []

    @rule(first=st.integers(1, 40), count=st.integers(1, 8))
    def store(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        self.tier.put(*numbers, parent=first - 1 or None)
        keys = [self.tier.key(n) for n in numbers]
        self.late.append((True, [(key, self.tier.blocks[key]) for key in keys]))

    @rule(first=st.integers(1, 40), count=st.integers(1, 8))
    def evict(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        self.tier.drop(*numbers)
        self.late.append((False, [self.tier.key(n) for n in numbers]))

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        if self.late:
            self._hear(self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    def _hear(self, said: tuple[bool, list[Any]]) -> None:
        (self.tracker.note_stored if said[0] else self.tracker.note_gone)(said[1])

    @rule()
    def reset(self) -> None:
        self.space.reset()

    @rule()
    def retell(self) -> None:
        self.tracker.retell()

    @rule(limit=st.integers(1, 12))
    def drain(self, limit: int) -> None:
        self.listener.apply(self.tracker.drain(limit))

    @rule()
    def fail(self) -> None:
        self.tier.failures = 1
        with suppress(OSError):
            self.listener.apply(self.tracker.drain())
        self.tier.failures = 0

    @invariant()
    def knows_what_is_there_once_all_is_heard(self) -> None:
        if not hasattr(self, "late") or self.late:
            return
        while self.tracker.has_changes:
            self.listener.apply(self.tracker.drain(7))
        assert self.listener.known == self.tier.digests()

    def teardown(self) -> None:
        if hasattr(self, "late"):
            for said in self.late:
                self._hear(said)
            self.late.clear()
            self.knows_what_is_there_once_all_is_heard()


test_random_stores_evictions_and_resets = ListenerMachine.TestCase
