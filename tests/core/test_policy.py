"""The orders in which blocks give way: what each must keep, LRU against a model of every use, S3-FIFO in stories."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ConfigError, IntegrityError
from kvtier.policy import NO_PARENT, S3FIFO, EvictionPolicy, GuardedPolicy, TailsFirstLRU, policy_factory
from kvtier.policy import named as named_module
from kvtier.policy.ghost import Ghosts
from kvtier.testing.policy_conformance import PolicyConformance


def anything(slot: int) -> bool:
    return True


def drain(policy: EvictionPolicy) -> list[int]:
    gone = []
    while (slot := policy.victim(anything)) is not None:
        policy.remove(slot)
        gone.append(slot)
    return gone


def chain(policy: EvictionPolicy, *slots: int) -> None:
    """Each block's fingerprint is a thousand more than its slot."""
    for slot, parent in zip(slots, (NO_PARENT, *slots), strict=False):
        policy.insert(slot, parent, 1000 + slot)


def no_fault(fault: Exception) -> None:
    raise AssertionError(fault)


class TestLRUConforms(PolicyConformance):
    def make_policy(self) -> EvictionPolicy:
        return TailsFirstLRU()


class TestS3FIFOConforms(PolicyConformance):
    def make_policy(self) -> EvictionPolicy:
        return S3FIFO()


class TestAGuardedPolicyConforms(PolicyConformance):
    def make_policy(self) -> EvictionPolicy:
        return GuardedPolicy(S3FIFO, no_fault)


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
    policy.insert(2, 1, 0)
    policy.insert(3, 1, 0)
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
        policy.insert(slot, NO_PARENT, 0)
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
        policy.insert(slot, NO_PARENT, 0)
    assert policy.victim(lambda slot: False) is None
    policy.insert(3, 0, 0)
    policy.remove(1)
    policy.insert(1, NO_PARENT, 0)
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
    policy.insert(0, NO_PARENT, 0)
    policy.check_integrity({0, 1})
    assert drain(policy) == [1, 0]


def test_the_heap_stays_in_proportion_to_the_blocks() -> None:
    policy = TailsFirstLRU()
    chain(policy, 0)
    for _ in range(2000):
        policy.insert(1, 0, 0)
        policy.remove(1)
        policy.touch([0])
    assert len(policy._heap) <= 2 * 2 + 65
    for slot in range(2, 502):
        policy.insert(slot, NO_PARENT, 0)
    for _ in range(200):
        policy.insert(1, 0, 0)
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
        policy.insert(0, NO_PARENT, 0)
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
        self.policy.insert(slot, parent, 0)

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


# ---- S3-FIFO ---------------------------------------------------------------------------------------------------------


def evict(policy: EvictionPolicy, number: int) -> list[int]:
    gone = []
    for _ in range(number):
        slot = policy.victim(anything)
        assert slot is not None
        policy.remove(slot)
        gone.append(slot)
    return gone


def test_what_was_used_once_goes_before_what_came_later_and_was_not() -> None:
    policy = S3FIFO()
    chain(policy, 0, 1)
    for slot in range(10, 16):
        policy.insert(slot, NO_PARENT, slot)
    policy.touch([0, 1])
    assert evict(policy, 4) == [10, 11, 12, 13]
    policy.check_integrity({0, 1, 14, 15})


def test_first_in_first_out_whatever_was_used_meanwhile() -> None:
    policy = S3FIFO()
    for slot in range(6):
        policy.insert(slot, NO_PARENT, slot)
    policy.touch([3])
    policy.touch([1])
    assert evict(policy, 4) == [0, 2, 4, 5]
    assert evict(policy, 2) == [1, 3], "they entered the main queue in the order of the small one"


def test_a_block_that_comes_back_soon_enters_the_main_queue_with_its_prefix() -> None:
    policy = S3FIFO()
    chain(policy, 0, 1)
    assert evict(policy, 1) == [1]
    policy.insert(5, 0, 1001)  # in another slot
    policy.check_integrity({0, 5})
    for slot in range(10, 14):
        policy.insert(slot, NO_PARENT, slot)
    assert evict(policy, 4) == [10, 11, 12, 13]
    assert evict(policy, 2) == [5, 0]


def test_a_block_that_was_forgotten_rather_than_evicted_is_no_ghost() -> None:
    policy = S3FIFO()
    policy.insert(0, NO_PARENT, 7)
    policy.insert(1, NO_PARENT, 8)
    policy.remove(0)
    policy.insert(2, NO_PARENT, 7)
    assert drain(policy) == [1, 2]
    policy.insert(0, NO_PARENT, 1)
    policy.insert(1, NO_PARENT, 2)
    assert policy.victim(anything) == 0
    policy.remove(1)
    policy.remove(0)
    policy.insert(3, NO_PARENT, 1)
    policy.insert(4, NO_PARENT, 2)
    assert drain(policy) == [3, 4]


def move_to_main(policy: S3FIFO, *slots: int) -> None:
    """Used once, and after that at their turn: others, which come and go, fill the small queue."""
    policy.touch(slots)
    others = range(1000, 1001 + len(slots))
    for slot in others:
        policy.insert(slot, NO_PARENT, slot)
    assert policy.victim(anything) == 1000
    for slot in others:
        policy.remove(slot)
    assert policy._num_small == 0


def test_a_chain_that_nobody_wants_any_more_ages_as_a_whole() -> None:
    """Three uses are three laps for the chain, not for every block of it."""
    policy = S3FIFO()
    chain(policy, *range(50))
    for slot in range(50, 80):
        policy.insert(slot, NO_PARENT, slot)
    move_to_main(policy, *range(80))
    for _ in range(3):
        policy.touch(range(80))
    assert drain(policy) == [*reversed(range(50)), *range(50, 80)]


def test_a_prefix_that_other_prompts_used_outlives_the_tail() -> None:
    policy = S3FIFO()
    chain(policy, 0, 1, 2)
    chain(policy, 5, 6)
    move_to_main(policy, 0, 1, 2, 5, 6)
    policy.touch([0, 1, 2])
    policy.touch([0, 1])
    policy.touch([5, 6])
    assert drain(policy) == [2, 6, 5, 1, 0]


def test_uses_beyond_three_count_no_more() -> None:
    policy = S3FIFO()
    for slot in (0, 1):
        policy.insert(slot, NO_PARENT, slot)
    for number in range(300):
        policy.touch([0] if number % 100 else [0, 1])
    policy.check_integrity({0, 1})
    assert drain(policy) == [0, 1]


def test_moving_to_the_main_queue_takes_the_prefix_along() -> None:
    policy = S3FIFO()
    chain(policy, *range(20))
    policy.insert(30, 9, 30)
    policy.touch([*range(20)])
    for slot in range(31, 43):
        policy.insert(slot, NO_PARENT, slot)
    assert evict(policy, 2) == [30, 31]
    assert policy._num_small == 11
    resident = {*range(20), *range(32, 43)}
    policy._is_main[4] = 0
    policy._num_small = 12
    with pytest.raises(IntegrityError, match="continue"):
        policy.check_integrity(resident)
    policy._is_main[4] = 1
    with pytest.raises(IntegrityError, match="small queue"):
        policy.check_integrity(resident)


def test_the_heaps_of_both_queues_stay_in_proportion_to_the_blocks() -> None:
    policy = S3FIFO()
    chain(policy, 0, 1)
    policy.touch([0, 1])
    for slot in range(2, 2000):
        policy.insert(slot, 0, slot)
        policy.touch([0, 1])
        policy.remove(slot) if slot % 2 else evict(policy, 1)
    assert len(policy._small) + len(policy._main) < 400
    assert len(policy._ghosts) < 100


def test_ghosts_are_forgotten_in_order_and_once_taken() -> None:
    ghosts = Ghosts()
    assert not ghosts.take(5, 100)
    for fingerprint in range(10):
        ghosts.add(fingerprint, 4)
    assert [ghosts.take(fingerprint, 4) for fingerprint in range(10)] == [False] * 6 + [True] * 4
    assert not ghosts.take(9, 4)
    for _ in range(3):
        ghosts.add(9, 4)
    ghosts.add(1, 4)
    assert ghosts.take(9, 4)
    for fingerprint in range(10_000):
        ghosts.add(fingerprint % 500, 50)
    assert len(ghosts) <= 63


def test_a_ghost_that_went_twice_is_as_young_as_its_last_going() -> None:
    ghosts = Ghosts()
    ghosts.add(1, 8)
    for fingerprint in range(100, 107):
        ghosts.add(fingerprint, 8)
    ghosts.add(1, 8)
    for fingerprint in range(110, 116):
        ghosts.add(fingerprint, 8)
    assert ghosts.take(1, 8)


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_the_built_in_policies_have_names() -> None:
    assert isinstance(policy_factory("lru")(), TailsFirstLRU)
    assert isinstance(policy_factory("s3fifo")(), S3FIFO)


POINTS = {
    "mine": "kvtier.policy:TailsFirstLRU",
    "twice": "kvtier.policy:S3FIFO",
    "absent": "kvtier.no_such_module:Policy",
    "number": "kvtier.policy:NO_PARENT",
    "lru": "kvtier.no_such_module:Policy",
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, value, named_module.POLICY_GROUP) for name, value in POINTS.items()]
    points.append(EntryPoint("twice", "other:Policy", named_module.POLICY_GROUP))
    find: Callable[..., object] = lambda *, group: [point for point in points if point.group == group]  # noqa: E731
    monkeypatch.setattr(named_module, "entry_points", find)


def test_another_name_is_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert policy_factory("mine") is TailsFirstLRU
    assert isinstance(policy_factory("lru")(), TailsFirstLRU), "a built-in name is nobody else's"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lfu", r"'lfu' is no policy: use one of lru, s3fifo, absent, mine, number, twice"),
        ("twice", r"'twice' is named by 2 packages"),
        ("absent", r"'absent': kvtier.no_such_module:Policy cannot be imported: ModuleNotFoundError"),
        ("number", r"'number': kvtier.policy:NO_PARENT is no callable"),
    ],
)
def test_a_name_that_makes_no_policy_is_refused(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ConfigError, match=rf"host\.policy = {words}"):
        policy_factory(name)
