"""The conformance suite on our own tiers, and on wrong ones that it must catch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest

from kvtier.breaker import Breaker
from kvtier.clock import MonotonicClock
from kvtier.keys import Key
from kvtier.memory import PoolMemory
from kvtier.pool import HostPool
from kvtier.testing import DictTier, FakeClock, FaultyTier
from kvtier.testing.conformance import TierConformance
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.guarded import GuardedTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.metered import MeteredTier
from kvtier.tiers.throttled import ThrottledTier
from kvtier.tiers.wrapper import TierWrapper


class OwningHostTier(HostTier):
    """A host tier that closes its pool too, which a store does otherwise."""

    def close(self) -> None:
        super().close()
        self._pool.close()


def host_tier(capacity_bytes: int, slab: int) -> HostTier:
    return OwningHostTier(HostPool(PoolMemory(capacity_bytes, touch=False), slab))


class TestHostTier(TierConformance):
    def make_tier(self, capacity_blocks: int) -> Tier:
        return host_tier(capacity_blocks * self.block_bytes, 4 * self.block_bytes)


class TestHostTierWhereABlockFillsASlab(TierConformance):
    def make_tier(self, capacity_blocks: int) -> Tier:
        return host_tier(capacity_blocks * self.block_bytes, self.block_bytes)


class TestHostTierWithBlocksOfOddLength(TierConformance):
    block_bytes = 3 * 4096 - 1000

    def make_tier(self, capacity_blocks: int) -> Tier:
        return host_tier(capacity_blocks * 3 * 4096, 2 * 3 * 4096)


class TestDictTier(TierConformance):
    def make_tier(self, capacity_blocks: int) -> Tier:
        return DictTier(capacity_blocks * self.block_bytes)


# ---- around another tier ---------------------------------------------------------------------------------------------


def guarded(tier: Tier) -> Tier:
    return GuardedTier(tier, Breaker(FakeClock()), FakeClock(), timeout_s=1.0)


def metered(tier: Tier) -> Tier:
    return MeteredTier(tier, MonotonicClock())


def throttled(tier: Tier) -> Tier:
    return ThrottledTier(tier, 1 << 20, FakeClock(), wait=lambda seconds: None)


def without_faults(tier: Tier) -> Tier:
    return FaultyTier(tier, seed=1, latency_s=1.0, wait=lambda seconds: None)


def all_at_once(tier: Tier) -> Tier:
    return throttled(guarded(metered(without_faults(tier))))


WRAPPERS = {
    "plain": TierWrapper,
    "guarded": guarded,
    "metered": metered,
    "throttled": throttled,
    "without faults": without_faults,
    "all": all_at_once,
    "the other way round": lambda tier: without_faults(metered(guarded(throttled(tier)))),
}


class WrapperConformance(TierConformance):
    """Every test of the suite, around each wrapper."""

    wrap: Callable[[Tier], Tier]

    @pytest.fixture(params=WRAPPERS, autouse=True)
    def wrapper(self, request: pytest.FixtureRequest) -> None:
        self.wrap = WRAPPERS[request.param]


class TestWrappersAroundADictTier(WrapperConformance):
    def make_tier(self, capacity_blocks: int) -> Tier:
        return self.wrap(DictTier(capacity_blocks * self.block_bytes))


class TestWrappersAroundAHostTier(WrapperConformance):
    def make_tier(self, capacity_blocks: int) -> Tier:
        return self.wrap(host_tier(capacity_blocks * self.block_bytes, 4 * self.block_bytes))


# ---- tiers that are wrong in one way each ----------------------------------------------------------------------------


class FlipsAByte(DictTier):
    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        outcome = super()._read_one(request)
        request.buffer[-1] ^= 1
        return outcome


class ServesTheLastBlock(DictTier):
    """As if two keys shared one slot."""

    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        if request.key not in self._blocks:
            return ReadOutcome.MISS
        request.buffer[:] = [*self._blocks.values()][-1]
        return ReadOutcome.OK


class IgnoresTheNamespace(DictTier):
    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        return super()._write_one(WriteRequest(Key(request.key[16:]), None, request.buffer))

    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        return super()._read_one(ReadRequest(Key(request.key[16:]), request.buffer))


class Overwrites(DictTier):
    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        self._used_bytes -= len(self._blocks.pop(request.key, b""))
        return super()._write_one(request)


class AnswersOutOfOrder(DictTier):
    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        return sorted(super().read(requests), reverse=True)


class ExceedsItsCapacity(DictTier):
    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        self._capacity_bytes += len(request.buffer)
        outcome = super()._write_one(request)
        self._capacity_bytes -= len(request.buffer)
        return outcome


class HidesWhatItUses(ExceedsItsCapacity):
    def usage(self) -> TierUsage:
        usage = super().usage()
        return TierUsage(usage.num_blocks, min(usage.used_bytes, usage.capacity_bytes), usage.capacity_bytes)


class ServesAfterRemove(DictTier):
    def remove(self, keys: Sequence[Key]) -> int:
        return sum(self.contains(keys))


class KeepsTheCallersBuffer(DictTier):
    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        outcome = super()._write_one(request)
        if outcome is WriteOutcome.STORED:
            self._blocks[request.key] = request.buffer  # type: ignore[assignment]
        return outcome


class StopsAtADuplicate(DictTier):
    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        first = next((i for i, request in enumerate(requests) if request.key in self._blocks), len(requests))
        return super().write(requests[: first + 1])


class AnswersOtherLengths(DictTier):
    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        block = self._blocks.get(request.key)
        if block is None:
            return ReadOutcome.MISS
        size = min(len(block), len(request.buffer))
        request.buffer[:size] = block[:size]
        return ReadOutcome.OK


class AnswersAfterClose(DictTier):
    def close(self) -> None:
        pass


class ForgetsOnContains(DictTier):
    def contains(self, keys: Sequence[Key]) -> list[bool]:
        answers = super().contains(keys)
        self.remove(keys)
        return answers


class WritesAroundTheBuffer(DictTier):
    """As reads of whole pages do that end where the buffer does not."""

    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        outcome = super()._read_one(request)
        whole = memoryview(request.buffer.obj)
        if outcome is ReadOutcome.OK and len(whole) > len(request.buffer):
            whole[-1] ^= 1
        return outcome


class StoresAKeyTwice(DictTier):
    """As when a batch is looked up as a whole and written as a whole."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        known = self.contains([request.key for request in requests])
        outcomes = super().write(requests)
        return [
            WriteOutcome.STORED if not held and outcome is WriteOutcome.ALREADY_STORED else outcome
            for held, outcome in zip(known, outcomes, strict=True)
        ]


class CountsAKeyTwice(DictTier):
    def remove(self, keys: Sequence[Key]) -> int:
        removed = sum(self.contains(keys))
        super().remove(keys)
        return removed


class KeepsBlocksOverAnEpoch(DictTier):
    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch


class ForgetsItsEpoch(DictTier):
    @property
    def epoch(self) -> int:
        return 0


class LosesWhatIsTouched(DictTier):
    def touch(self, keys: Sequence[Key]) -> None:
        self.remove(keys)


class KnowsWhatIsTouched(DictTier):
    def touch(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._blocks.setdefault(key, b"")


WRONG = [
    WritesAroundTheBuffer,
    StoresAKeyTwice,
    CountsAKeyTwice,
    KeepsBlocksOverAnEpoch,
    ForgetsItsEpoch,
    LosesWhatIsTouched,
    KnowsWhatIsTouched,
    FlipsAByte,
    ServesTheLastBlock,
    IgnoresTheNamespace,
    Overwrites,
    AnswersOutOfOrder,
    ExceedsItsCapacity,
    HidesWhatItUses,
    ServesAfterRemove,
    KeepsTheCallersBuffer,
    StopsAtADuplicate,
    AnswersOtherLengths,
    AnswersAfterClose,
    ForgetsOnContains,
]


def failures(make: Callable[[int], Tier]) -> list[str]:
    """The names of the suite's tests that a tier fails."""

    class Suite(TierConformance):
        def make_tier(self, capacity_blocks: int) -> Tier:
            return make(capacity_blocks * self.block_bytes)

    failed = []
    for name, test in inspect.getmembers(Suite, inspect.isfunction):
        if name.startswith("test_"):
            suite = Suite()
            tier = suite.make_tier(suite.capacity_blocks)
            arguments = {"offset": 7} if "offset" in inspect.signature(test).parameters else {}
            try:
                test(suite, tier, **arguments)
                tier.check_integrity()
            except (AssertionError, ValueError, pytest.fail.Exception):
                failed.append(name)
            tier.close()
    return failed


def test_the_right_tier_fails_nothing() -> None:
    assert failures(DictTier) == []


@pytest.mark.parametrize("wrong", WRONG)
def test_the_suite_catches(wrong: type[DictTier]) -> None:
    assert failures(wrong)
