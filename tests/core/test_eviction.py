"""The host tier under a policy of somebody else's: whatever that does, blocks go in an order that is safe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import pytest

from kvtier.config import MemorySnapshot, load_settings
from kvtier.errors import ConfigError, IntegrityError
from kvtier.memory import PAGE_BYTES
from kvtier.policy import S3FIFO, EvictionPolicy, PolicyFactory, TailsFirstLRU
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier.tiers.host import HostTier
from tests.core.test_host_tier import Harness, name

LOGGER = "kvtier.tiers.eviction"


class PolicyHarness(Harness):
    """As `Harness`, with a policy and quotas."""

    def __init__(
        self,
        num_pages: int,
        slab_pages: int,
        policy: PolicyFactory = TailsFirstLRU,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(num_pages, slab_pages)
        self.tier.close()
        self.tier = HostTier(self.pool, policy=policy, quotas=quotas)
        self.tier.subscribe(on_evict=lambda gone: self.evicted.extend(item.digest for item in gone))


class Healthy(TailsFirstLRU):
    """Right in everything, and not built in."""


class Stubborn(TailsFirstLRU):
    def __init__(self) -> None:
        raise OSError("no policy today")


def raising(method: str) -> type[TailsFirstLRU]:
    def fail(self: object, *arguments: object) -> None:
        raise RuntimeError(f"{method} is not ready")

    return type("Raising", (TailsFirstLRU,), {method: fail})


def answering(answer: Callable[[TailsFirstLRU], object]) -> type[TailsFirstLRU]:
    def victim(self: TailsFirstLRU, can_evict: Callable[[int], bool]) -> object:
        return answer(self)

    return type("Answering", (TailsFirstLRU,), {"victim": victim})


class AsksNonsense(TailsFirstLRU):
    def victim(self, can_evict: Callable[[int], bool]) -> int | None:
        can_evict(-7)
        return super().victim(can_evict)


class SpoilsArguments(TailsFirstLRU):
    def touch(self, slots: Sequence[int]) -> None:
        slots.clear()  # type: ignore[attr-defined]


FAULTY: dict[str, Callable[[], object]] = {
    "making it raises": Stubborn,
    "it is none": lambda: 7,
    "insert raises": raising("insert"),
    "touch raises": raising("touch"),
    "remove raises": raising("remove"),
    "victim raises": raising("victim"),
    "no victim": answering(lambda policy: None),
    "a slot that does not exist": answering(lambda policy: 10**9),
    "a slot below zero": answering(lambda policy: -1),
    "no number": answering(lambda policy: "the oldest"),
    "true": answering(lambda policy: True),
    "a leased slot": answering(lambda policy: max(slot for slot, place in enumerate(policy._place) if place)),
    "a prefix": answering(lambda policy: min(slot for slot, place in enumerate(policy._place) if place)),
    "it asks of no slot": AsksNonsense,
    "it changes what it is given": SpoilsArguments,
}


@pytest.mark.parametrize("how", FAULTY)
def test_a_faulty_policy_is_logged_once_and_lru_goes_on(how: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = PolicyHarness(6, 2, FAULTY[how])  # type: ignore[arg-type]
    for number, parent in [(0, None), (1, 0), (2, None), (3, None), (4, None), (5, None)]:
        harness.store(number, parent)
    for lease in harness.lease(2):
        lease.release()
    (leased,) = harness.lease(5)
    harness.tier.check_integrity()
    for number in (10, 11, 12):
        harness.store(number)
        harness.tier.check_integrity()
    assert harness.evicted == [name(1), name(0), name(3)], "least recently used, tails first"
    for number in (13, 14):
        harness.store(number)
    assert harness.evicted[3:] == [name(4), name(2)], "each block at its last use, before the fault too"
    assert leased.live
    errors = [record for record in caplog.records if record.name == LOGGER]
    assert [record.levelno for record in errors] == [logging.ERROR]
    assert "blocks of 4096 bytes go on in the order of 'lru'" in errors[0].getMessage()
    assert errors[0].exc_info is not None
    harness.close()


def test_a_policy_that_keeps_to_the_contract_stays(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Healthy] = []

    def make() -> Healthy:
        made.append(Healthy())
        return made[-1]

    harness = PolicyHarness(4, 2, make)
    leases = []
    for number in range(4):
        harness.store(number, number - 1 if number % 2 else None)
    leases += harness.lease(0, 1)
    harness.store(9)
    harness.store(10)
    leases += harness.lease(9) + harness.lease(10)
    assert harness.try_reserve(11) is DropReason.HOST_FULL
    assert harness.evicted == [name(3), name(2)]
    harness.tier.check_integrity()
    made[0].check_integrity({lease.slot for lease in leases})
    assert not caplog.records
    for lease in leases:
        lease.release()
    for number in range(20, 28):
        harness.store(number)
    assert not caplog.records
    harness.close()


def test_a_fault_in_one_size_class_leaves_the_policy_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    made: list[EvictionPolicy] = []

    def make() -> EvictionPolicy:
        made.append(Healthy() if made else raising("victim")())
        return made[-1]

    harness = PolicyHarness(8, 4, make)
    for number in range(4):
        harness.store(number)
    for number in (10, 11):
        harness.store(number, pages=2)
    harness.store(4)
    harness.store(12, pages=2)
    assert harness.evicted == [name(0), name(10)]
    assert len(made) == 2
    made[1].check_integrity({slot for slot in harness.tier._names if harness.pool.class_of(slot) == 2 * PAGE_BYTES})
    assert len(caplog.records) == 1
    harness.close()


def test_a_policy_is_not_called_again_after_its_fault() -> None:
    calls: list[str] = []

    class Counting(TailsFirstLRU):
        def insert(self, slot: int, parent: int, fingerprint: int) -> None:
            calls.append("insert")

        def victim(self, can_evict: Callable[[int], bool]) -> int | None:
            raise ValueError

    harness = PolicyHarness(2, 2, Counting)
    for number in range(6):
        harness.store(number)
    assert calls == ["insert"] * 2
    harness.close()


def test_integrity_of_somebody_elses_policy_is_checked_too() -> None:
    for method, error in (("victim", None), ("check_integrity", IntegrityError)):
        harness = PolicyHarness(2, 2, raising(method))
        harness.store(0)
        if error is None:
            harness.tier.check_integrity()
        else:
            with pytest.raises(error, match="check_integrity raised RuntimeError"):
                harness.tier.check_integrity()
        harness.tier.close()
        harness.owner.close()
        harness.pool.close()


def test_blocks_that_come_back_are_known_to_the_policy_by_their_keys() -> None:
    seen: list[int] = []

    class Noting(S3FIFO):
        def insert(self, slot: int, parent: int, fingerprint: int) -> None:
            seen.append(fingerprint)
            super().insert(slot, parent, fingerprint)

    harness = PolicyHarness(2, 2, Noting)
    for number in (0, 1, 2, 0):
        harness.store(number)
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3
    assert all(0 <= each < 1 << 64 for each in seen)
    harness.close()


def test_the_host_tier_works_under_s3fifo() -> None:
    harness = PolicyHarness(6, 2, S3FIFO)
    for number, parent in [(0, None), (1, 0), (2, None), (3, None), (4, None), (5, None)]:
        harness.store(number, parent)
    for lease in harness.lease(0, 1):
        lease.release()
    for number in range(10, 14):
        harness.store(number)
        harness.tier.check_integrity()
    assert harness.evicted == [name(2), name(3), name(4), name(5)]
    harness.close()


def test_the_store_takes_the_policy_that_is_set() -> None:
    machine = MemorySnapshot(1 << 30, 1 << 30)
    settings = load_settings(env={}, overrides={"host.size": "1MiB", "host.slab": "1MiB", "host.policy": "s3fifo"})
    with Store(settings, memory=machine, touch=False) as store:
        assert store.host._order._make_policy is S3FIFO
    unknown = load_settings(env={}, overrides={"host.size": "1MiB", "host.slab": "1MiB", "host.policy": "lfu"})
    with pytest.raises(ConfigError, match=r"host\.policy = 'lfu' is no policy: use one of lru, s3fifo"):
        Store(unknown, memory=machine, touch=False)
