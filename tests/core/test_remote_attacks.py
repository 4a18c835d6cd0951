"""What attacks on remote tiers found: each story once went wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier.breaker import Breaker
from kvtier.config import MemorySnapshot, load_settings
from kvtier.durability import DurabilityWatches
from kvtier.keys import Key, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.memory import PAGE_BYTES
from kvtier.opened import OpenedTier, TierLimits
from kvtier.reasons import DropReason, MissReason
from kvtier.store import Store
from kvtier.testing import DictTier, FakeClock, ManualExecutor, RemoteDictTier
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.guarded import GuardedTier
from kvtier.tiers.reservation import Reservation
from tests.core.test_remote import SPACE, Harness, key, name, names

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)
NAMESPACE = Namespace("m", "r", LAYOUT, "g", Shard(0, 1))
TIMEOUT_S = 0.5


@pytest.fixture
def harness() -> Iterator[Harness]:
    with ExitStack() as stack:
        made = Harness()
        stack.callback(made.close)
        yield made


def open_store() -> Store:
    sizes = {"host.size": 16 * PAGE_BYTES, "host.slab": PAGE_BYTES}
    return Store(load_settings(env={}, overrides=sizes), memory=MemorySnapshot(1 << 34, 1 << 34), touch=False)


# ---- a tier that goes ------------------------------------------------------------------------------------------------


def test_a_stage_that_was_located_before_its_tier_was_detached_ends_and_no_other_suffers(harness: Harness) -> None:
    """A request waits for its turn with what was located for it; meanwhile the tier goes."""
    harness.put(harness.remote, 0, 1)
    harness.ask(0, 1)
    harness.jobs.run_all()
    found = harness.stager.locate(SPACE, names(0, 1), PAGE_BYTES)
    assert len(found.digests) == 2
    harness.below.detach("remote", 1.0)
    stage = harness.stager.begin("r", SPACE, found.digests, None, PAGE_BYTES, 5.0, found)
    assert stage is not None
    assert stage.poll()
    assert stage.miss is MissReason.TIER_DOWN
    stage.close()
    harness.stager.check_integrity()
    assert harness.told, "whoever waits for it is woken"

    jobs = ManualExecutor()
    harness.below.add(OpenedTier(harness.near, harness.limits), jobs)
    harness.put(harness.near, 5, 6)
    other = harness.stager.begin("other", SPACE, names(5, 6), None, PAGE_BYTES, 5.0)
    assert other is not None
    jobs.run_all()
    assert other.poll()
    assert (other.miss, other.arrived) == (None, {"dict": 2})
    other.close()


def test_durability_of_a_tier_that_was_closed_is_told_at_once() -> None:
    """A device that hangs never ends its write; who asks just after the close must not wait for that."""
    watches = DurabilityWatches()
    watches.begin([key(0)])
    watches.close()
    ticket = watches.watch([key(0), key(1)], lambda others: dict.fromkeys(others, None))
    told = ticket.poll()
    assert told is not None
    assert told.lost == {key(0): DropReason.CLOSED, key(1): None}
    watches.end(key(0), None)


class HangingTier(DictTier):
    """Writes end when they are let go."""

    def __init__(self, name: str, let_go: threading.Event) -> None:
        super().__init__()
        self.name = name
        self._let_go = let_go
        self.is_asked = threading.Event()

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        self.is_asked.set()
        self._let_go.wait(30.0)
        return [WriteOutcome.FULL] * len(requests)


def test_close_is_bounded_for_all_tiers_together() -> None:
    let_go = threading.Event()
    store = open_store()
    tiers = [HangingTier(tier, let_go) for tier in "abc"]
    for tier in tiers:
        store.attach(OpenedTier(tier, TierLimits(writers=1, timeout_s=30.0)))
    space = store.open_space(NAMESPACE)
    with space.owner("test") as owner:
        reserved = space.reserve(name(0), None, owner)
        assert isinstance(reserved, Reservation)
        space.commit([reserved])
    assert all(tier.is_asked.wait(10.0) for tier in tiers)
    lowers = store.lower
    began = time.monotonic()
    store.close(1.0)
    assert time.monotonic() - began < 2.5
    let_go.set()
    for lower in lowers:
        lower.close(10.0)
        assert lower.write_behind.ledger.snapshot().pending == 0


# ---- a tier that is sick ---------------------------------------------------------------------------------------------


class DeadServer(RemoteDictTier):
    """Refuses connections at once; a touch is counted only, as the contract allows."""

    def touch(self, keys: Sequence[Key]) -> None:
        del keys


def test_touches_that_do_not_tell_end_no_row_of_failures() -> None:
    clock, tier = FakeClock(), DeadServer()
    breaker = Breaker(clock)
    guard = GuardedTier(tier, breaker, clock, TIMEOUT_S)
    tier.is_sick = True
    for _ in range(3):
        assert guard.read([ReadRequest(key(0), memoryview(bytearray(8)))]) == [ReadOutcome.ERROR]
        guard.touch([key(0)])
    assert not breaker.is_closed


def test_a_touch_that_takes_too_long_opens_the_breaker() -> None:
    clock = FakeClock()

    class Slow(RemoteDictTier):
        def touch(self, keys: Sequence[Key]) -> None:
            clock.advance(TIMEOUT_S + 0.1)

    breaker = Breaker(clock)
    GuardedTier(Slow(), breaker, clock, TIMEOUT_S).touch([key(0)])
    assert not breaker.is_closed


# ---- epochs that differ ----------------------------------------------------------------------------------------------


class StrictTier(DictTier):
    """As a disk: no epoch begins that is earlier than the present one."""

    def start_epoch(self, epoch: int) -> None:
        assert epoch > self.epoch
        super().start_epoch(epoch)


@pytest.mark.parametrize("make", [StrictTier, RemoteDictTier])
def test_a_reset_goes_past_the_epoch_of_a_tier_that_came_later(make: Callable[[], Any]) -> None:
    tier = make()
    tier.start_epoch(10)
    store = open_store()
    store.attach(OpenedTier(tier, TierLimits(writers=1, timeout_s=TIMEOUT_S)))
    store.reset()
    assert (store.epoch, tier.epoch) == (11, 11)
    store.close()
