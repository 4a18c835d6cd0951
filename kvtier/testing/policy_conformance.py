"""The tests that every eviction policy must pass, third-party ones too: subclass `PolicyConformance`.

    class TestMyPolicy(PolicyConformance):
        def make_policy(self) -> EvictionPolicy: ...

Needs pytest and hypothesis. The contract's words are in `kvtier.policy.EvictionPolicy`; which block goes among those
that may is a policy's own choice, and not tested here.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvtier.errors import IntegrityError
from kvtier.policy import NO_PARENT, EvictionPolicy

__all__ = ["PolicyConformance"]

SLOTS = st.integers(0, 11)
MANY = 20_000


def anything(slot: int) -> bool:  # noqa: ARG001
    return True


class PolicyConformance(ABC):
    """One new policy a test."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """An order of nothing."""

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return self.make_policy()

    def test_an_empty_order_has_no_victim(self, policy: EvictionPolicy) -> None:
        assert policy.victim(anything) is None
        policy.touch([])
        policy.released([0, 1])
        policy.check_integrity(set())

    def test_a_chain_goes_from_its_tail(self, policy: EvictionPolicy) -> None:
        for slot, parent in [(5, NO_PARENT), (3, 5), (9, 3)]:
            policy.insert(slot, parent, 1000 + slot)
        policy.touch([5, 3])
        gone = []
        while (victim := policy.victim(anything)) is not None:
            policy.remove(victim)
            gone.append(victim)
        assert gone == [9, 3, 5]

    def test_a_prefix_stays_for_its_last_tail(self, policy: EvictionPolicy) -> None:
        for slot, parent in [(0, NO_PARENT), (1, 0), (2, 0), (3, 0)]:
            policy.insert(slot, parent, slot)
        for _ in range(3):
            victim = policy.victim(anything)
            assert victim is not None
            assert victim in (1, 2, 3)
            policy.remove(victim)
        assert policy.victim(anything) == 0

    def test_a_refused_slot_is_asked_about_once_until_it_is_released(self, policy: EvictionPolicy) -> None:
        asked: list[int] = []

        def is_late(slot: int) -> bool:
            asked.append(slot)
            return slot >= 90

        for slot in range(100):
            policy.insert(slot, NO_PARENT, slot)
        for _ in range(10):
            victim = policy.victim(is_late)
            assert victim is not None
            assert victim >= 90
            policy.remove(victim)
        assert policy.victim(is_late) is None
        assert sorted(slot for slot in asked if slot < 90) == list(range(90))
        policy.released([5, 40, 99])
        found = policy.victim(anything)
        assert found in (5, 40)
        policy.check_integrity(set(range(90)))

    def test_a_slot_that_another_block_has_now_is_nobodys_parent(self, policy: EvictionPolicy) -> None:
        policy.insert(0, NO_PARENT, 10)
        policy.insert(1, 0, 11)
        policy.remove(0)
        policy.insert(0, NO_PARENT, 12)
        policy.check_integrity({0, 1})
        assert policy.victim(lambda slot: slot == 0) == 0

    def test_integrity_sees_a_slot_too_many_and_one_too_few(self, policy: EvictionPolicy) -> None:
        policy.insert(0, NO_PARENT, 0)
        policy.insert(1, 0, 1)
        for slots in ({0}, {0, 1, 2}, {0, 2}):
            with pytest.raises(IntegrityError):
                policy.check_integrity(slots)

    def test_thousands_of_blocks_are_no_objects_for_the_garbage_collector(self, policy: EvictionPolicy) -> None:
        """A full collection walks every tracked object, while the engine waits."""
        gc.collect()
        before = len(gc.get_objects())
        for slot in range(MANY):
            policy.insert(slot, slot - 1 if slot % 100 else NO_PARENT, slot * 7)
        for _ in range(MANY // 4):
            victim = policy.victim(anything)
            assert victim is not None
            policy.remove(victim)
        gc.collect()
        assert len(gc.get_objects()) - before < MANY // 20

    def test_any_order_of_calls(self) -> None:
        conformance = self

        class Machine(_PolicyMachine):
            def make_policy(self) -> EvictionPolicy:
                return conformance.make_policy()

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )


class _PolicyMachine(RuleBasedStateMachine):
    """Any order of calls, up to twelve slots. Knows of parents the life of the block that had the slot then."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make_policy()
        self.life: dict[int, int] = {}  # resident slot to the serial number of its block
        self.parent: dict[int, int | None] = {}  # block to parent block
        self.refused: set[int] = set()  # and not released since
        self.serial = 0

    def make_policy(self) -> EvictionPolicy:
        raise NotImplementedError

    def leaves(self) -> set[int]:
        parents = {self.parent[block] for block in self.life.values()}
        return {slot for slot, block in self.life.items() if block not in parents}

    def drop(self, slot: int) -> None:
        self.policy.remove(slot)
        del self.life[slot]
        self.refused.discard(slot)

    @precondition(lambda self: len(self.life) < 12)
    @rule(data=st.data(), with_parent=st.booleans(), fingerprint=st.integers(0, 20))
    def insert(self, data: st.DataObject, with_parent: bool, fingerprint: int) -> None:
        slot = data.draw(SLOTS.filter(lambda s: s not in self.life))
        parent = data.draw(st.sampled_from(sorted(self.life))) if with_parent and self.life else NO_PARENT
        self.serial += 1
        self.parent[self.serial] = self.life.get(parent)
        self.life[slot] = self.serial
        self.policy.insert(slot, parent, fingerprint + (1 << 64) - 21)

    @precondition(lambda self: self.life)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.policy.touch(data.draw(st.lists(st.sampled_from(sorted(self.life)), unique=True)))

    @precondition(lambda self: self.life)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.life))))

    @rule(leased=st.sets(SLOTS))
    def evict(self, leased: set[int]) -> None:
        ended = sorted(self.refused - leased)
        self.refused &= leased
        self.policy.released(ended)

        def can_evict(slot: int) -> bool:
            assert slot not in self.refused, f"slot {slot} was refused, and not released since"
            if slot in leased:
                self.refused.add(slot)
            return slot not in leased

        found = self.policy.victim(can_evict)
        may_go = self.leaves() - leased
        if not may_go:
            assert found is None, f"slot {found} may not go"
            return
        assert found in may_go, f"{found} is none of {may_go}, which may go"
        assert type(found) is int
        assert self.policy.victim(can_evict) == found, "asked again, it answered something else"
        self.drop(found)

    @rule(slots=st.sets(SLOTS))
    def release_more_than_was_refused(self, slots: set[int]) -> None:
        self.refused -= slots
        self.policy.released(sorted(slots))

    @invariant()
    def orders_exactly_the_resident(self) -> None:
        self.policy.check_integrity(set(self.life))

    def teardown(self) -> None:
        self.policy.released(range(12))
        while (slot := self.policy.victim(anything)) is not None:
            assert slot in self.leaves(), "a prefix went before its tail"
            self.drop(slot)
        assert not self.life, "never evicted"
        self.policy.check_integrity(set())
