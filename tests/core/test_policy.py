"""The order in which blocks give way, against a model that remembers every chain and every use."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import IntegrityError
from kvtier.policy import NO_PARENT, TailsFirstLRU


def anything(slot: int) -> bool:
    return True


def drain(policy: TailsFirstLRU) -> list[int]:
    gone = []
    while (slot := policy.victim(anything)) is not None:
        policy.remove(slot)
        gone.append(slot)
    return gone


def chain(policy: TailsFirstLRU, *slots: int) -> None:
    for slot, parent in zip(slots, (NO_PARENT, *slots), strict=False):
        policy.insert(slot, parent)


def test_an_empty_order_has_no_victim() -> None:
    policy = TailsFirstLRU()
    assert policy.victim(anything) is None
    policy.check_integrity(set())


def test_a_chain_goes_from_its_tail() -> None:
    policy = TailsFirstLRU()
    chain(policy, 5, 3, 9)
    assert drain(policy) == [9, 3, 5]


def test_the_least_recently_used_chain_goes_first_and_whole() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0, 1, 2)
    chain(policy, 3, 4, 5)
    policy.touch([0, 1, 2])
    assert drain(policy) == [5, 4, 3, 2, 1, 0]


def test_a_shared_prefix_stays_for_its_last_tail() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0, 1)
    policy.insert(2, 1)
    policy.insert(3, 1)
    policy.touch([0, 1, 2])
    assert drain(policy) == [3, 2, 1, 0]


def test_a_use_of_the_prefix_alone_does_not_save_the_tail() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0, 1)
    chain(policy, 2)
    policy.touch([0])
    assert drain(policy) == [1, 2, 0]


def test_asking_for_a_victim_changes_no_order() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0)
    chain(policy, 1)
    assert [policy.victim(lambda slot: slot != 0) for _ in range(3)] == [1, 1, 1]
    assert policy.victim(lambda slot: False) is None
    policy.check_integrity({0, 1})
    policy.released([1, 0, 7])
    assert [policy.victim(anything) for _ in range(3)] == [0, 0, 0]
    policy.check_integrity({0, 1})


def test_a_leased_leaf_is_asked_about_once_until_it_is_released() -> None:
    policy = TailsFirstLRU()
    for slot in range(100):
        policy.insert(slot, NO_PARENT)
    asked: list[int] = []

    def is_late(slot: int) -> bool:
        asked.append(slot)
        return slot >= 90

    for expected in range(90, 100):
        assert policy.victim(is_late) == expected
        policy.remove(expected)
    assert len(asked) == 90 + 10
    policy.touch([5, 6])
    assert policy.victim(is_late) is None
    assert len(asked) == 100
    policy.released([5, 40])
    assert drain(policy) == [40, 5], "by their last use"
    policy.check_integrity(set(range(90)) - {5, 40})


def test_what_is_set_aside_may_go_or_get_a_child_meanwhile() -> None:
    policy = TailsFirstLRU()
    for slot in range(3):
        policy.insert(slot, NO_PARENT)
    assert policy.victim(lambda slot: False) is None
    policy.insert(3, 0)
    policy.remove(1)
    policy.insert(1, NO_PARENT)
    policy.check_integrity({0, 1, 2, 3})
    assert policy.victim(anything) == 3
    policy.released([0])
    policy.check_integrity({0, 1, 2, 3})
    assert drain(policy) == [3, 0, 1], "2 is still leased"
    policy.released([0, 1, 2])
    assert drain(policy) == [2]


def test_while_every_leaf_is_leased_nothing_goes() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0, 1, 2)
    assert policy.victim(lambda slot: slot != 2) is None


def test_a_slot_reused_by_another_block_is_nobodys_parent() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0, 1)
    policy.remove(0)
    policy.insert(0, NO_PARENT)
    policy.check_integrity({0, 1})
    assert drain(policy) == [1, 0]


def test_the_heap_stays_in_proportion_to_the_blocks() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0)
    for _ in range(2000):
        policy.insert(1, 0)
        policy.remove(1)
        policy.touch([0])
    assert len(policy._heap) <= 2 * 2 + 65
    for slot in range(2, 502):
        policy.insert(slot, NO_PARENT)
    for _ in range(200):
        policy.insert(1, 0)
        policy.remove(1)
    for slot in range(2, 502):
        policy.remove(slot)
    chain(policy, 1)
    policy.check_integrity({0, 1})
    assert len(policy._heap) <= 2 * 2 + 65


def test_a_mistake_of_the_caller_is_noticed() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0)
    with pytest.raises(AssertionError, match="inserted twice"):
        policy.insert(0, NO_PARENT)
    policy.remove(0)
    with pytest.raises(AssertionError, match="removed twice"):
        policy.remove(0)


def test_integrity_sees_a_slot_too_many_and_a_child_miscounted() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0, 1)
    for slots in ({0}, {0, 1, 2}):
        with pytest.raises(IntegrityError, match="resident"):
            policy.check_integrity(slots)
    policy._children[0] = 0
    with pytest.raises(IntegrityError, match="children"):
        policy.check_integrity({0, 1})
    policy._children[0] = 1
    policy._heap.clear()
    with pytest.raises(IntegrityError, match="leaf"):
        policy.check_integrity({0, 1})


SLOTS = st.integers(0, 11)


class PolicyMachine(RuleBasedStateMachine):
    """Last use as a number that only grows; parents as the life of the block that had the slot then."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = TailsFirstLRU()
        self.life: dict[int, int] = {}  # resident slot to the serial number of its block
        self.parent: dict[int, int | None] = {}  # block to parent block
        self.used: dict[int, int] = {}  # block to last use
        self.refused: set[int] = set()  # by the last answer of `can_evict`
        self.now = 0
        self.serial = 0

    def leaves(self) -> list[int]:
        parents = {self.parent[block] for block in self.life.values()}
        return [slot for slot, block in self.life.items() if block not in parents]

    @precondition(lambda self: len(self.life) < 12)
    @rule(data=st.data(), with_parent=st.booleans())
    def insert(self, data: st.DataObject, with_parent: bool) -> None:
        slot = data.draw(SLOTS.filter(lambda s: s not in self.life))
        parent = data.draw(st.sampled_from(sorted(self.life))) if with_parent and self.life else NO_PARENT
        self.serial += 1
        self.now += 1
        self.parent[self.serial] = self.life.get(parent)
        self.used[self.serial] = self.now
        self.life[slot] = self.serial
        self.policy.insert(slot, parent)

    @precondition(lambda self: self.life)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.life)), unique=True))
        self.now += len(slots)
        for age, slot in enumerate(slots):
            self.used[self.life[slot]] = self.now - age
        self.policy.touch(slots)

    @precondition(lambda self: self.life)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.life)))
        self.policy.remove(slot)
        del self.life[slot]

    @rule(leased=st.sets(SLOTS))
    def evict(self, leased: set[int]) -> None:
        self.policy.released(sorted(self.refused - leased))
        self.refused &= leased

        def can_evict(slot: int) -> bool:
            self.refused |= {slot} & leased
            return slot not in leased

        found = self.policy.victim(can_evict)
        free = [slot for slot in self.leaves() if slot not in leased]
        expected = min(free, key=lambda slot: self.used[self.life[slot]], default=None)
        assert found == expected
        if found is not None:
            self.policy.remove(found)
            del self.life[found]

    @invariant()
    def orders_exactly_the_resident(self) -> None:
        self.policy.check_integrity(set(self.life))

    @rule(slots=st.sets(SLOTS))
    def release_more_than_was_refused(self, slots: set[int]) -> None:
        self.policy.released(sorted(slots))
        self.refused -= slots

    def teardown(self) -> None:
        self.policy.released(range(12))
        while (slot := self.policy.victim(anything)) is not None:
            block = self.life.pop(slot)
            assert block not in {self.parent[other] for other in self.life.values()}, "a prefix went before its tail"
            self.policy.remove(slot)
        assert not self.life
        self.policy.check_integrity(set())


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=80, stateful_step_count=40)
