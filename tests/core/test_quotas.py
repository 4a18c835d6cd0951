"""Quotas by tenant: stories of two tenants and those without a quota, then any order of calls against dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.config import MemorySnapshot, load_settings
from kvtier.errors import ConfigError, IntegrityError
from kvtier.memory import PAGE_BYTES
from kvtier.policy import S3FIFO, PolicyFactory, TailsFirstLRU
from kvtier.pool import Lease
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction, Reservation
from tests.core.test_eviction import PolicyHarness
from tests.core.test_host_tier import OTHER, SPACE, name

PAGE = PAGE_BYTES


class Harness(PolicyHarness):
    def ask(self, tenant: str, number: int, parent: int | None = None, pages: int = 1) -> Reservation | DropReason:
        above = None if parent is None else name(parent)
        return self.tier.reserve(SPACE, name(number), above, pages * PAGE, self.owner, tenant=tenant)

    def put(self, tenant: str, *numbers: int, parent: int | None = None, pages: int = 1) -> None:
        for number in numbers:
            outcome = self.ask(tenant, number, parent, pages)
            assert isinstance(outcome, Reservation)
            assert self.tier.commit([outcome]) == [True]
            self.tier.check_integrity()


@pytest.fixture
def eight() -> Iterator[Harness]:
    """Eight slots; a may have three, b four."""
    harness = Harness(8, 2, quotas={"a": 3 * PAGE, "b": 4 * PAGE})
    yield harness
    harness.close()


def test_at_its_quota_a_tenant_gives_up_its_own_coldest_tail(eight: Harness) -> None:
    eight.put("", 0)
    eight.put("b", 10)
    eight.put("a", 20)
    eight.put("a", 21, parent=20)
    eight.put("a", 22)
    eight.put("a", 23)
    assert eight.evicted == [name(21)], "though others are colder, and the pool has room"
    assert eight.tier.tenant_bytes == {"": PAGE, "b": PAGE, "a": 3 * PAGE}


def test_a_tenant_none_of_whose_blocks_may_go_is_told_so(eight: Harness) -> None:
    eight.put("", 0)
    eight.put("a", 20, 21)
    filling = eight.ask("a", 22)
    leases = eight.lease(20) + eight.lease(21)
    assert eight.ask("a", 23) is DropReason.QUOTA
    assert eight.evicted == []
    assert eight.tier.tenant_bytes["a"] == 3 * PAGE
    leases[1].release()
    eight.put("a", 23)
    assert eight.evicted == [name(21)]
    assert isinstance(filling, Reservation)
    eight.tier.abort(filling)
    assert eight.tier.tenant_bytes["a"] == 2 * PAGE


def test_a_chain_longer_than_the_quota_never_eats_its_own_prefix(eight: Harness) -> None:
    for number in range(3):
        eight.put("a", number, parent=number - 1 if number else None)
    assert eight.ask("a", 3, 2) is DropReason.QUOTA
    assert eight.held(0, 1, 2) == [True] * 3


def test_who_has_no_quota_shares_what_is_left(eight: Harness) -> None:
    eight.put("a", 0, 1)
    eight.put("c", *range(10, 13))
    eight.put("d", *range(13, 20))
    assert eight.evicted == [name(number) for number in range(10, 14)], "whoever of them is the coldest"
    assert eight.held(0, 1) == [True, True]
    assert eight.tier.tenant_bytes == {"a": 2 * PAGE, "d": 6 * PAGE}


def test_a_tenant_below_its_quota_takes_from_those_without_one(eight: Harness) -> None:
    eight.put("", *range(8))
    eight.put("a", 10, 11, 12)
    assert eight.evicted == [name(0), name(1), name(2)]
    eight.put("a", 13)
    assert eight.evicted[3:] == [name(10)]


def test_nobody_without_a_quota_takes_from_those_with_one() -> None:
    harness = Harness(4, 2, quotas={"a": 3 * PAGE, "b": 3 * PAGE})
    harness.put("a", 0, 1)
    harness.put("b", 10, 11)
    assert harness.ask("", 20) is DropReason.HOST_FULL
    assert harness.evicted == []
    harness.close()


def test_where_quotas_are_more_than_the_pool_who_used_more_of_its_own_gives_way() -> None:
    harness = Harness(6, 2, quotas={"a": 6 * PAGE, "b": 3 * PAGE})
    harness.put("a", *range(6))
    harness.put("b", 10, 11, 12)
    assert harness.evicted == [name(0), name(1), name(10)], "a third of b's quota, then 4 of 6 beside 2 of 3"
    harness.put("a", 20)
    assert harness.evicted[3:] == [name(2)]
    assert harness.tier.tenant_bytes == {"a": 4 * PAGE, "b": 2 * PAGE}
    harness.close()


def test_a_star_is_each_other_tenant() -> None:
    harness = Harness(8, 2, quotas={"*": 2 * PAGE, "a": 4 * PAGE})
    harness.put("x", 0, 1, 2)
    harness.put("y", 10, 11, 12)
    harness.put("a", 20, 21, 22)
    assert harness.evicted == [name(0), name(10)]
    assert harness.tier.tenant_bytes == {"x": 2 * PAGE, "y": 2 * PAGE, "a": 3 * PAGE}
    harness.close()


def test_tenants_without_blocks_cost_nothing() -> None:
    harness = Harness(4, 2, quotas={"*": 2 * PAGE})
    for number in range(100):
        harness.put(f"tenant {number}", number)
        harness.tier.remove([(SPACE + name(number))])  # type: ignore[list-item]
    assert harness.tier.tenant_bytes == {}
    assert len(harness.tier._order._tenants) == 1
    harness.close()


def test_a_block_larger_than_the_quota_evicts_nothing_in_vain() -> None:
    harness = Harness(16, 8, quotas={"a": 3 * PAGE})
    harness.put("a", 0, 1, 2)
    assert harness.ask("a", 10, pages=4) is DropReason.QUOTA
    assert harness.evicted == []
    harness.close()


def test_blocks_of_another_size_go_for_the_quota_too() -> None:
    harness = Harness(16, 8, quotas={"a": 5 * PAGE})
    harness.put("a", 0, 1, pages=2)
    harness.put("a", 10, 11, 12)
    assert harness.evicted == [name(10), name(11)], "the same size first"
    harness.put("a", 20, pages=3)
    assert harness.evicted[2:] == [name(0), name(1)]
    assert harness.tier.tenant_bytes == {"a": 4 * PAGE}
    harness.close()


def test_another_tenants_block_keeps_the_prefix_that_it_continues(eight: Harness) -> None:
    eight.put("a", 0, 1, 2)
    eight.put("b", 10, parent=0)
    eight.put("a", 3)
    assert eight.evicted == [name(1)]
    eight.tier.remove([SPACE + name(10)])  # type: ignore[list-item]
    eight.put("a", 4)
    assert eight.evicted[1:] == [name(10), name(0)]
    eight.put("b", 11, parent=2)
    eight.tier.remove([SPACE + name(2)])  # type: ignore[list-item]
    eight.tier.check_integrity()
    eight.put("a", 5, 6, 7, 8)
    eight.tier.check_integrity()


def test_a_use_counts_for_every_tenant_whose_blocks_it_were() -> None:
    harness = Harness(8, 2, quotas={"a": 2 * PAGE, "b": 2 * PAGE})
    harness.put("a", 0)
    harness.put("b", 1, parent=0)
    harness.put("", 2, parent=1)
    harness.put("a", 10)
    harness.put("b", 11)
    for lease in harness.lease(0, 1, 2):
        lease.release()
    harness.put("b", 12)
    harness.tier.remove([SPACE + name(2), SPACE + name(1)])  # type: ignore[list-item]
    harness.put("a", 13)
    assert [each for each in harness.evicted if each in (name(10), name(11))] == [name(11), name(10)]
    harness.close()


def test_a_slab_of_those_with_quotas_is_nobody_elses() -> None:
    harness = Harness(4, 2, quotas={"a": 4 * PAGE})
    harness.put("a", *range(4))
    assert harness.ask("", 10, pages=2) is DropReason.HOST_FULL
    assert harness.evicted == []
    harness.close()
    other = Harness(4, 2, quotas={"a": 2 * PAGE})
    other.put("", *range(4))
    other.put("a", 10, pages=2)
    assert len(other.evicted) == 2
    other.close()


def test_a_quota_of_nothing_is_refused(eight: Harness) -> None:
    with pytest.raises(ConfigError, match=r"quota of tenant 'a' must be at least 1 byte, not 0"):
        HostTier(eight.pool, quotas={"a": 0})


def test_integrity_sees_bytes_miscounted_and_a_quota_passed(eight: Harness) -> None:
    eight.put("a", 0, 1)
    order = eight.tier._order
    (tenant,) = order._tenants
    tenant.used_bytes -= PAGE
    with pytest.raises(IntegrityError, match="counted are"):
        eight.tier.check_integrity()
    tenant.used_bytes += PAGE
    order._quotas["a"] = PAGE
    with pytest.raises(IntegrityError, match="of a quota of"):
        eight.tier.check_integrity()
    order._quotas["a"] = 3 * PAGE
    order._num_tied[0] = 1
    with pytest.raises(IntegrityError, match="miscounted"):
        eight.tier.check_integrity()
    order._num_tied.clear()


def test_the_store_takes_the_quotas_that_are_set() -> None:
    sizes = {"host.size": "1MiB", "host.slab": "1MiB"}
    loaded = load_settings(env={"KVTIER_HOST__QUOTAS": "a=512KiB,*=4KiB"}, overrides=sizes)
    with Store(loaded, memory=MemorySnapshot(1 << 30, 1 << 30), touch=False) as store:
        owner = store.pool.owner("test")
        assert isinstance(store.host.reserve(SPACE, name(0), None, 4096, owner, tenant="b"), Reservation)
        assert store.host.reserve(SPACE, name(1), None, 4096, owner, tenant="b") is DropReason.QUOTA
        assert isinstance(store.host.reserve(SPACE, name(1), None, 4096, owner, tenant="a"), Reservation)
        owner.close()


# ---- any order -------------------------------------------------------------------------------------------------------

TENANTS = ("a", "b", "", "c")
QUOTAS = {"a": 2 * PAGE, "b": 5 * PAGE}
TREE: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 1, 4: None, 5: 4, 6: None, 7: None}
NUMBERS = st.sampled_from(sorted(TREE))


@dataclass
class Stored:
    life: int
    tenant: str
    parent_life: int | None


class QuotaMachine(RuleBasedStateMachine):
    """One size class, six slots; what tenants have is counted here by what was stored and what was told to be gone."""

    @initialize(policy=st.sampled_from([TailsFirstLRU, S3FIFO]))
    def build(self, policy: PolicyFactory) -> None:
        self.harness = Harness(6, 3, policy, QUOTAS)
        self.tier = self.harness.tier
        self.numbers = {name(number): number for number in TREE}
        self.held: dict[int, Stored] = {}
        self.leases: list[tuple[Lease, int]] = []
        self.lives = 0
        self.asking: str | None = None
        self.tier.subscribe(on_evict=self.note)

    def note(self, gone: Sequence[Eviction]) -> None:
        for item in gone:
            number = self.numbers[item.digest]
            if self.asking is not None:
                assert self.may_go(number), f"{number} was leased or had a block that continues it"
                owner = self.held[number].tenant
                if self.bytes_of(self.asking) == QUOTAS.get(self.asking):
                    assert owner == self.asking, "a tenant at its quota took from another"
                elif self.asking not in QUOTAS:
                    assert owner not in QUOTAS, "who has no quota took from who has one"
            self.forget(number)

    def may_go(self, number: int) -> bool:
        life = self.held[number].life
        return all(block != number for _, block in self.leases) and all(
            stored.parent_life != life for stored in self.held.values()
        )

    def bytes_of(self, tenant: str) -> int:
        return PAGE * sum(stored.tenant == tenant for stored in self.held.values())

    def forget(self, number: int) -> None:
        gone = self.held.pop(number)
        for stored in self.held.values():
            if stored.parent_life == gone.life:
                stored.parent_life = None

    @rule(number=NUMBERS, tenant=st.sampled_from(TENANTS))
    def store(self, number: int, tenant: str) -> None:
        parent = TREE[number]
        was_full = QUOTAS.get(tenant) == self.bytes_of(tenant)
        mine = [block for block in self.held if self.held[block].tenant == tenant and block != parent]
        self.asking = tenant
        outcome = self.harness.ask(tenant, number, parent)
        self.asking = None
        if isinstance(outcome, Reservation):
            assert self.tier.commit([outcome]) == [True]
            self.lives += 1
            above = self.held[parent].life if parent is not None and parent in self.held else None
            self.held[number] = Stored(self.lives, tenant, above)
        elif outcome is DropReason.QUOTA:
            assert was_full
            assert not any(map(self.may_go, mine)), "one of its own could have gone"
        elif outcome is DropReason.HOST_FULL:
            free = [block for block in self.held if self.held[block].tenant not in QUOTAS and block != parent]
            assert not any(map(self.may_go, free)), "one of those without a quota could have gone"
            assert tenant not in QUOTAS or not any(map(self.may_go, mine))
        else:
            assert outcome is DropReason.ALREADY_STORED
            assert number in self.held

    @rule(number=NUMBERS)
    def lease(self, number: int) -> None:
        path = [number]
        while (parent := TREE[path[0]]) is not None:
            path.insert(0, parent)
        leases = self.tier.lease_run(SPACE, [name(each) for each in path], self.harness.owner)
        self.leases += zip(leases, path, strict=False)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        assert self.leases.pop(index)[0].release()

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        for lease, block in self.leases:
            if block == number:
                lease.release()
        self.leases = [each for each in self.leases if each[1] != number]
        assert self.tier.remove([SPACE + name(number)]) in (0, 1)  # type: ignore[list-item]

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        assert self.tier.tenant_bytes == {t: self.bytes_of(t) for t in TENANTS if self.bytes_of(t)}
        assert all(self.bytes_of(tenant) <= quota for tenant, quota in QUOTAS.items())
        assert self.harness.held(*TREE) == [number in self.held for number in TREE]

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=80, stateful_step_count=40)


def test_namespaces_do_not_matter_to_a_quota(eight: Harness) -> None:
    for number, space in ((0, SPACE), (0, OTHER), (1, SPACE), (1, OTHER)):
        outcome = eight.tier.reserve(space, name(number), None, PAGE, eight.owner, tenant="a")
        assert isinstance(outcome, Reservation)
        eight.tier.commit([outcome])
    assert eight.tier.tenant_bytes == {"a": 3 * PAGE}
    assert eight.evicted == [name(0)]
