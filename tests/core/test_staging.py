"""Staging: stories of a few blocks on their way to host memory, then any order of events, then threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier import fence as fence_module
from kvtier import filling as filling_module
from kvtier import readqueue as readqueue_module
from kvtier import staging as staging_module
from kvtier.errors import ClosedError, IntegrityError
from kvtier.executor import Executor, ThreadExecutor
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, Key, make_key, split_key
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.pool import HostPool, Owner
from kvtier.reasons import DropReason, MissReason
from kvtier.stage import Stage
from kvtier.staging import Stager
from kvtier.testing import DictTier, FakeClock, ManualExecutor
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation

SPACE, OTHER = b"a" * 16, b"b" * 16
SOON_S = 30.0


def name(number: int) -> BlockDigest:
    return BlockDigest(b"%032d" % number)


def number_of(digest: bytes) -> int:
    return int(digest)


def content(space: bytes, number: int) -> bytes:
    return (space + b"%016d" % number) * (PAGE_BYTES // 32)


class LowerTier(DictTier):
    """A dictionary that keeps a record of calls and fails where it is told to."""

    def __init__(self, label: str = "disk") -> None:
        super().__init__()
        self.name = label
        self.batches: list[list[int]] = []
        self.num_contains = 0
        self.answers: dict[int, object] = {}
        self.raises: Callable[[], BaseException] | None = None
        self.while_reading: Callable[[], object] = lambda: None

    @property
    def read_numbers(self) -> list[int]:
        return [number for batch in self.batches for number in batch]

    def put(self, *numbers: int, space: bytes = SPACE) -> None:
        self.write(
            [WriteRequest(make_key(space, name(n)), None, memoryview(content(space, n))) for n in numbers],
        )

    def drop(self, *numbers: int, space: bytes = SPACE) -> None:
        self.remove([make_key(space, name(number)) for number in numbers])

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self.num_contains += 1
        return super().contains(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        numbers = [number_of(split_key(request.key)[1]) for request in requests]
        self.batches.append(numbers)
        self.while_reading()
        if self.raises is not None:
            raise self.raises()
        outcomes: list[ReadOutcome] = []
        for request, number in zip(requests, numbers, strict=True):
            answer = self.answers.get(number)
            if answer is None:
                outcomes += super().read([request])
            else:
                request.buffer[:] = b"?" * len(request.buffer)
                outcomes.append(answer)  # type: ignore[arg-type]
        return outcomes


@dataclass(eq=False)
class Lower:
    """A source as the store builds them."""

    tier: LowerTier
    executor: Executor
    is_available: bool = True
    is_remote: bool = False

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def asking(self) -> Executor:
        return self.executor

    def held(self, keys: Sequence[Key]) -> list[bool]:
        return self.tier.contains(keys)

    def look(self, keys: Sequence[Key]) -> list[bool] | None:
        return self.tier.contains(keys)


class Harness:
    """A host tier over a few pages, two lower tiers of which the second is mostly empty, and what stories need."""

    def __init__(self, num_pages: int = 8, max_inflight: int = 100, max_queued: int = 100) -> None:
        self.pool = HostPool(PoolMemory(num_pages * PAGE_BYTES, touch=False), PAGE_BYTES)
        self.num_pages = num_pages
        self.host = HostTier(self.pool)
        self.clock = FakeClock()
        self.jobs = ManualExecutor(max_queued)
        self.far_jobs = ManualExecutor(max_queued)
        self.tier, self.far = LowerTier(), LowerTier("far")
        self.disk, self.remote = Lower(self.tier, self.jobs), Lower(self.far, self.far_jobs)
        self.stager = Stager(self.host, self.pool, [self.disk, self.remote], max_inflight * PAGE_BYTES, self.clock)
        self.max_inflight = max_inflight
        self.owner = self.pool.owner("test")
        self.stages: list[Stage] = []
        self.committed: list[int] = []
        self.came_from: list[str | None] = []
        self.ends = 0
        self.host.subscribe(on_commit=self.note_commit)
        self.stager.subscribe(self.note_end)

    def note_commit(self, blocks: Sequence[tuple[Key, Key | None]], came_from: str | None) -> None:
        self.committed += [number_of(split_key(key)[1]) for key, _ in blocks]
        self.came_from.append(came_from)

    def note_end(self) -> None:
        self.ends += 1

    def begin(
        self, *numbers: int, parent: int | None = None, wait_s: float = 1.0, space: bytes = SPACE, label: str = "r"
    ) -> Stage:
        stage = self.try_begin(*numbers, parent=parent, wait_s=wait_s, space=space, label=label)
        assert stage is not None
        return stage

    def try_begin(
        self, *numbers: int, parent: int | None = None, wait_s: float = 1.0, space: bytes = SPACE, label: str = "r"
    ) -> Stage | None:
        above = None if parent is None else name(parent)
        stage = self.stager.begin(label, space, [name(number) for number in numbers], above, PAGE_BYTES, wait_s)
        if stage is not None:
            self.stages.append(stage)
        self.check()
        return stage

    def run(self, position: int = 0) -> bool:
        ran = self.jobs.run_next(position)
        self.check()
        return ran

    def run_all(self) -> None:
        while self.run() or self.far_jobs.run_next():
            self.check()

    def reserve(self, number: int, parent: int | None = None, space: bytes = SPACE) -> Reservation | DropReason:
        above = None if parent is None else name(parent)
        return self.host.reserve(space, name(number), above, PAGE_BYTES, self.owner)

    def store(self, *numbers: int, space: bytes = SPACE) -> None:
        """By an engine."""
        parent: int | None = None
        for number in numbers:
            reservation = self.reserve(number, parent, space)
            assert isinstance(reservation, Reservation)
            reservation.lease.view[:] = content(space, number)
            assert self.host.commit([reservation]) == [True]
            parent = number
        self.committed.clear()

    def held(self, *numbers: int, space: bytes = SPACE) -> list[bool]:
        return self.host.contains([make_key(space, name(number)) for number in numbers])

    def read_host(self, number: int, space: bytes = SPACE) -> bytes | None:
        with self.pool.owner("reader") as owner:
            found = self.host.lease_blocks([(space, name(number))], owner)[0]
            return None if found is None else bytes(found.lease.view)

    def check(self) -> None:
        self.stager.check_integrity()
        self.host.check_integrity()
        for source, budget in self.stager._queue._budgets.items():
            assert budget.live_bytes <= max(self.max_inflight, 1) * PAGE_BYTES
            assert self.stager.inflight_bytes_of(source) <= max(2 * self.max_inflight, 1) * PAGE_BYTES
        for space, digest, *_, state in list(self.host._index.items()):
            if state is BlockState.COMMITTED:
                assert self.read_host(number_of(digest), space) == content(space, number_of(digest))

    def leased(self, stage: Stage) -> int:
        return stage._owner.num_leases

    def close(self) -> None:
        """Every way out has been taken: nothing is leased, and every slot can be had."""
        self.run_all()
        for stage in self.stages:
            stage.close()
            assert stage.done
            assert self.leased(stage) == 0
        self.check()
        assert self.stager.inflight_bytes == 0
        assert not self.stager._queue.reads
        assert not self.stager._queue._stages
        self.owner.close()
        assert self.pool.usage().num_leases == 0
        with self.pool.owner("all") as every:
            for number in range(self.num_pages):
                assert isinstance(self.host.reserve(OTHER, name(10**6 + number), None, PAGE_BYTES, every), Reservation)
        self.stager.close()
        self.host.close()
        self.pool.check_integrity()
        assert self.pool.usage().num_leases == 0
        self.pool.close()


@pytest.fixture(autouse=True)
def one_block_a_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", PAGE_BYTES)
    monkeypatch.setattr(staging_module, "JOBS_AT_ONCE", 100)
    yield
    caplog.get_records("call").clear()  # tracebacks in them hold views of the pool


@pytest.fixture
def eight() -> Iterator[Harness]:
    harness = Harness(8)
    yield harness
    harness.close()


# ---- what a stage has ------------------------------------------------------------------------------------------------


def test_there_is_no_stage_when_no_lower_tier_can_help(eight: Harness) -> None:
    assert eight.try_begin(0, 1) is None
    assert eight.try_begin() is None
    eight.store(0, 1)
    assert eight.try_begin(0, 1) is None
    assert eight.try_begin(0, 1, 2) is None
    eight.tier.put(3)
    assert eight.try_begin(0, 1, 2, 3) is None, "3 is behind a block that nobody has"
    assert eight.pool.usage().num_leases == 0
    assert len(eight.jobs) == 0


@pytest.mark.parametrize("wait_s", [0.0, -1.0])
def test_without_time_to_wait_there_is_no_stage(eight: Harness, wait_s: float) -> None:
    eight.tier.put(0)
    assert eight.try_begin(0, wait_s=wait_s) is None
    assert eight.tier.num_contains == 0


def test_a_prompt_whose_rest_is_below_comes_whole(eight: Harness) -> None:
    eight.store(0, 1)
    eight.tier.put(2, 3)
    stage = eight.begin(0, 1, 2, 3, 4)
    assert (stage.num_blocks, stage.num_end, stage.done, stage.tiers) == (4, 4, False, ["disk"])
    assert eight.leased(stage) == 2
    assert eight.stager.inflight_bytes == 2 * PAGE_BYTES
    eight.clock.advance(0.25)
    eight.run()
    assert (stage.poll(), dict(stage.arrived), eight.leased(stage), eight.ends) == (False, {"disk": 1}, 3, 0)
    eight.run()
    assert (stage.poll(), stage.miss, stage.num_end, eight.ends) == (True, None, 4, 1)
    assert dict(stage.arrived) == {"disk": 2}
    assert stage.seconds == 0.25
    assert eight.leased(stage) == 4
    assert eight.committed == [2, 3]
    assert eight.came_from[-2:] == ["disk", "disk"]
    for number in range(10, 14):
        eight.store(number)
    assert eight.held(0, 1, 2, 3) == [True] * 4, "leased"
    assert isinstance(eight.reserve(14), Reservation)


def test_a_tail_is_evicted_before_the_prefix_that_was_staged_with_it() -> None:
    harness = Harness(12)
    harness.tier.put(0, 1, 2, 3)
    stage = harness.begin(0, 1, 2, 3)
    for position in (3, 1, 0, 0):
        harness.run(position)
    stage.close()
    for number in range(10, 19):
        harness.store(number)
    assert harness.held(0, 1, 2, 3) == [True, True, True, False]
    harness.close()


def test_blocks_that_host_memory_has_further_on_are_leased_and_not_read(eight: Harness) -> None:
    eight.store(0, 1, 2, 3)
    eight.host.remove([make_key(SPACE, name(number)) for number in (0, 2)])
    eight.tier.put(0, 2)
    stage = eight.begin(0, 1, 2, 3)
    assert eight.leased(stage) == 2
    eight.run_all()
    assert eight.tier.read_numbers == [0, 2]
    assert stage.done
    assert eight.leased(stage) == 4


def test_a_block_that_somebody_is_storing_counts_as_coming(eight: Harness) -> None:
    eight.tier.put(1)
    reservation = eight.reserve(0)
    stage = eight.begin(0, 1)
    eight.run()
    assert (stage.poll(), stage.num_blocks, stage.num_end, stage.miss) == (True, 2, 2, None)
    assert eight.tier.read_numbers == [1]
    assert isinstance(reservation, Reservation)
    reservation.lease.view[:] = content(SPACE, 0)
    assert eight.host.commit([reservation]) == [True]
    assert eight.held(0, 1) == [True, True]


def test_a_block_that_came_otherwise_before_its_turn_is_leased_and_not_read(eight: Harness) -> None:
    eight.tier.put(0, 1)
    stage = eight.begin(0, 1)
    eight.store(0)
    eight.run_all()
    assert eight.tier.read_numbers == [1]
    assert (stage.done, stage.num_end, dict(stage.arrived)) == (True, 2, {"disk": 1})
    assert eight.leased(stage) == 2


def test_the_parent_is_known_where_the_digests_begin_in_mid_chain(eight: Harness) -> None:
    eight.store(0)
    eight.tier.put(1)
    stage = eight.begin(1, parent=0)
    eight.run()
    stage.close()
    for number in range(10, 17):
        eight.store(number)
    assert eight.held(0, 1) == [True, False], "the parent outlives its child"


def test_each_block_comes_from_the_first_tier_that_has_it(eight: Harness) -> None:
    eight.tier.put(0, 2)
    eight.far.put(0, 1, 3)
    stage = eight.begin(0, 1, 2, 3)
    assert stage.tiers == ["disk", "far"]
    eight.run_all()
    assert (eight.tier.read_numbers, eight.far.read_numbers) == ([0, 2], [1, 3])
    assert dict(stage.arrived) == {"disk": 2, "far": 2}
    assert eight.committed == [0, 1, 2, 3]


def test_a_prompt_is_looked_up_in_growing_pieces_and_only_as_far_as_something_is_there() -> None:
    harness = Harness(512, max_inflight=1)
    harness.tier.put(*range(200))
    stage = harness.begin(*range(500))
    assert stage.num_blocks == 200
    assert harness.tier.num_contains == 2
    stage.close()
    assert harness.try_begin(*range(1000, 9000)) is None
    assert harness.tier.num_contains == 3
    harness.close()


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [(3, 2, 1, 0), (1, 0, 1, 0), (2, 0, 1, 0), (0, 0, 0, 0)])
def test_blocks_are_asked_for_and_committed_prefix_first_however_the_reads_end(
    eight: Harness, positions: tuple[int, ...]
) -> None:
    eight.tier.put(0, 1, 2, 3)
    stage = eight.begin(0, 1, 2, 3)
    for position in positions:
        eight.run(position)
    assert eight.committed == [0, 1, 2, 3]
    assert (stage.done, eight.leased(stage)) == (True, 4)
    assert eight.stager.num_reads == 4


def test_a_block_whose_parent_is_still_being_read_cannot_be_found_yet(eight: Harness) -> None:
    eight.tier.put(0, 1)
    eight.begin(0, 1)
    eight.run(1)
    assert eight.committed == []
    assert eight.host.state(SPACE, name(1)) is BlockState.RESERVED
    assert eight.stager.inflight_bytes == PAGE_BYTES
    eight.run()
    assert eight.committed == [0, 1]


def test_a_job_takes_as_many_blocks_as_bytes_allow_and_of_one_tier(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 2 * PAGE_BYTES)
    eight.tier.put(0, 1, 2)
    eight.far.put(3)
    eight.begin(0, 1, 2, 3)
    eight.run_all()
    assert (eight.tier.batches, eight.far.batches) == ([[0, 1], [2]], [[3]])


def test_what_a_job_brought_is_committed_at_once_prefix_first_and_with_it_what_waited_for_it(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 2 * PAGE_BYTES)
    eight.tier.put(0, 1, 3)
    eight.far.put(2)
    stage = eight.begin(0, 1, 2, 3)
    eight.run(1)
    eight.far_jobs.run_next()
    assert eight.committed == [], "they continue what is still being read"
    eight.run()
    assert eight.committed == [0, 1, 2, 3]
    assert eight.came_from == ["disk", "far", "disk"]
    assert (stage.done, eight.leased(stage)) == (True, 4)


def test_one_hold_of_the_lock_commits_no_more_than_some_blocks(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(filling_module, "BLOCKS_AT_ONCE", 2)
    eight.tier.put(0, 1, 2)
    eight.begin(0, 1, 2)
    eight.run_all()
    assert eight.committed == [0, 1, 2]
    assert len(eight.came_from) == 2


def test_one_hold_of_the_lock_evicts_no_more_than_some_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(fence_module, "BLOCKS_AT_ONCE", 2)
    harness = Harness(16)
    harness.store(*range(10, 26))
    evicted: list[int] = []
    harness.host.subscribe(on_evict=lambda gone: evicted.append(len(gone)))
    harness.tier.put(*range(8))
    stage = harness.begin(*range(8))
    harness.run_all()
    assert (stage.num_end, stage.miss) == (8, None)
    assert evicted == [2, 2, 2, 2]
    harness.close()


def test_a_block_that_ends_while_the_one_before_it_is_committed_follows_it(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight.tier.put(0, 1, 2)
    stage = eight.begin(0, 1, 2)
    commit = eight.host.commit

    def and_the_next(reservations: Sequence[Reservation], came_from: str | None = None) -> list[bool]:
        monkeypatch.undo()
        outcomes = commit(reservations, came_from)
        monkeypatch.setattr(eight.host, "commit", and_the_next)
        while eight.jobs.run_next():
            pass
        return outcomes

    monkeypatch.setattr(eight.host, "commit", and_the_next)
    eight.run()
    assert eight.committed == [0, 1, 2]
    assert (stage.done, stage.miss, eight.leased(stage)) == (True, None, 3)


@pytest.mark.parametrize(("most", "batches"), [(0, 8), (1, 8), (2, 4), (3, 3), (5, 2), (8, 2)])
def test_a_job_is_as_large_as_its_tier_says_and_of_a_stage_a_share(
    monkeypatch: pytest.MonkeyPatch, most: int, batches: int
) -> None:
    harness = Harness(16)
    monkeypatch.setattr(harness.tier, "read_bytes", lambda least, share: max(least, min(share, most * least)))
    harness.tier.put(*range(8))
    harness.begin(*range(8))
    harness.run_all()
    assert [number for batch in harness.tier.batches for number in batch] == [*range(8)]
    assert len(harness.tier.batches) == batches
    harness.close()


def test_a_larger_job_takes_no_more_blocks_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(readqueue_module, "READ_BLOCKS", 2)
    harness = Harness(16)
    monkeypatch.setattr(harness.tier, "read_bytes", lambda least, share: 2 * least)
    harness.tier.put(*range(8))
    harness.begin(*range(8))
    harness.run_all()
    assert [len(batch) for batch in harness.tier.batches] == [2, 2, 2, 2]
    harness.close()


# ---- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.bug("PF07")
def test_stages_share_a_read_and_each_has_its_own_leases(eight: Harness) -> None:
    eight.tier.put(0, 1)
    one, two, three = eight.begin(0, 1), eight.begin(0, 1), eight.begin(0)
    eight.run_all()
    assert eight.tier.read_numbers == [0, 1]
    assert [stage.poll() for stage in (one, two, three)] == [True] * 3
    assert [eight.leased(stage) for stage in (one, two, three)] == [2, 2, 1]
    one.close()
    three.close()
    for number in range(10, 16):
        eight.store(number)
    assert eight.held(0, 1) == [True, True]
    two.close()
    for number in range(20, 28):
        eight.store(number)
    assert eight.held(0, 1) == [False, False]


@pytest.mark.parametrize("how", ["close", "time out"])
def test_one_of_those_that_share_a_read_may_go(eight: Harness, how: str) -> None:
    eight.tier.put(0, 1)
    going, staying = eight.begin(0, 1, wait_s=1.0), eight.begin(0, 1, wait_s=5.0)
    if how == "close":
        going.close()
    else:
        eight.clock.advance(1.0)
        assert going.poll()
    assert not staying.poll()
    eight.run_all()
    assert (staying.poll(), staying.num_end, eight.leased(staying)) == (True, 2, 2)
    assert eight.leased(going) == 0


def test_a_stage_that_comes_while_the_block_is_committed_has_its_lease_too(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after those that waited were given their leases, and others want every slot as soon as they can."""
    eight.tier.put(0)
    share, lease_run = eight.host.share, eight.host.lease_run
    late: list[Stage] = []

    def and_begin(reservations: Sequence[Reservation], owner: Owner) -> object:
        leases = share(reservations, owner)
        if owner is first._owner:
            late.append(eight.begin(0))
            first.close()
        return leases

    def others_first(namespace: bytes, digests: Sequence[BlockDigest], owner: Owner) -> object:
        if late:
            for number in range(10, 18):
                eight.store(number)
        return lease_run(namespace, digests, owner)

    first = eight.begin(0)
    monkeypatch.setattr(eight.host, "share", and_begin)
    monkeypatch.setattr(eight.host, "lease_run", others_first)
    eight.run()
    assert (late[0].done, late[0].miss, eight.leased(late[0])) == (True, None, 1)
    assert eight.held(0) == [True]
    assert eight.tier.read_numbers == [0]


def test_a_block_that_came_otherwise_and_went_before_it_was_leased_is_a_miss(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight.tier.put(0, 1)
    stage = eight.begin(0, 1)
    eight.store(1)
    lease_run = eight.host.lease_run

    def too_late(namespace: bytes, digests: Sequence[BlockDigest], owner: Owner) -> object:
        eight.host.remove([make_key(SPACE, name(1))])
        return lease_run(namespace, digests, owner)

    monkeypatch.setattr(eight.host, "lease_run", too_late)
    eight.run_all()
    assert (stage.done, stage.num_end, stage.miss) == (True, 1, MissReason.EVICTED)


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS01")
def test_at_its_deadline_a_stage_ends_with_what_came_and_the_rest_is_committed_later(eight: Harness) -> None:
    eight.tier.put(0, 1, 2)
    stage = eight.begin(0, 1, 2, wait_s=0.5)
    eight.run()
    eight.clock.advance(0.5 - 2**-10)
    assert not stage.poll()
    eight.clock.advance(2**-10)
    assert stage.poll()
    assert (stage.num_end, stage.miss, stage.seconds) == (1, MissReason.TIMEOUT, 0.5)
    assert eight.leased(stage) == 1
    stage.close()
    assert eight.stager.inflight_bytes == 2 * PAGE_BYTES
    eight.run_all()
    assert eight.held(0, 1, 2) == [True] * 3
    assert eight.pool.usage().num_leases == 0
    assert (stage.num_end, stage.miss) == (1, MissReason.TIMEOUT)


def test_a_stage_does_not_wait_for_a_clock_that_went_back(eight: Harness) -> None:
    eight.tier.put(0)
    stage = eight.begin(0, wait_s=0.5)
    eight.clock.advance(-100.0)
    assert (stage.poll(), stage.miss) == (True, MissReason.TIMEOUT)


def test_a_stage_whose_turn_never_came_ends_with_what_host_memory_has() -> None:
    harness = Harness(8, max_inflight=1)
    harness.store(0)
    harness.tier.put(1, 5)
    harness.begin(5)
    stage = harness.begin(0, 1)
    assert len(harness.jobs) == 1
    harness.clock.advance(1.0)
    assert stage.poll()
    assert (stage.num_end, stage.miss, harness.leased(stage)) == (1, MissReason.TIMEOUT, 1)
    harness.run_all()
    assert harness.tier.read_numbers == [5], "nobody waits for 1"
    harness.close()


@pytest.mark.bug("WR22")
def test_the_slot_of_an_abandoned_read_belongs_to_it_until_the_device_lets_go(eight: Harness) -> None:
    eight.tier.put(0)
    stage = eight.begin(0)

    def give_up() -> None:
        eight.clock.advance(1.0)
        assert stage.poll()
        stage.close()
        eight.host.reset(SPACE)
        filled = [eight.reserve(10 + number) for number in range(8)]
        assert filled.count(DropReason.HOST_FULL) == 1, "the slot being read into was given away"
        for item in filled:
            if isinstance(item, Reservation):
                item.lease.view[:] = content(SPACE, 10)
                eight.host.abort(item)

    eight.tier.while_reading = give_up
    eight.run()
    assert eight.held(0) == [False]
    assert eight.pool.usage().num_leases == 0


def test_polling_looks_nothing_up(eight: Harness) -> None:
    eight.tier.put(*range(4))
    stage = eight.begin(*range(4))
    assert [stage.poll() for _ in range(50)] == [False] * 50
    assert eight.tier.num_contains == 1


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ReadOutcome.MISS, MissReason.EVICTED),
        (ReadOutcome.DAMAGED, MissReason.DAMAGED),
        (ReadOutcome.ERROR, MissReason.TIER_ERROR),
        (ReadOutcome.REFUSED, MissReason.TIER_DOWN),
        ("nonsense", MissReason.TIER_ERROR),
    ],
)
@pytest.mark.parametrize("positions", [(0, 0, 0, 0), (3, 2, 1, 0)])
def test_a_block_that_fails_shortens_the_prefix_and_those_behind_it_are_kept(
    eight: Harness, answer: object, reason: MissReason, positions: Sequence[int]
) -> None:
    eight.tier.put(0, 1, 2, 3)
    eight.tier.answers[1] = answer
    stage, other = eight.begin(0, 1, 2, 3), eight.begin(0, 1)
    for position in positions:
        eight.run(position)
    for each in (stage, other):
        assert (each.poll(), each.num_end, each.miss) == (True, 1, reason)
        assert eight.leased(each) == 1, "what is behind a gap is of no use to the request"
    assert eight.held(0, 1, 2, 3) == [True, False, True, True]
    assert eight.ends >= 1


@pytest.mark.bug("CR12")
@pytest.mark.parametrize(
    "error",
    [OSError, TimeoutError, MemoryError, KeyError, asyncio.CancelledError, SystemExit, ClosedError],
)
def test_whatever_a_tier_raises_ends_the_read_and_no_more(
    eight: Harness, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    eight.tier.put(0, 1)
    eight.tier.raises = error
    stage = eight.begin(0, 1)
    eight.run_all()
    assert (stage.poll(), stage.num_end, stage.miss) == (True, 0, MissReason.TIER_ERROR)
    assert ("blocks from the" in caplog.text) == (error is not ClosedError), "its end, in the middle, is no fault"
    caplog.clear()
    assert eight.held(0, 1) == [False, False]
    assert eight.pool.usage().num_leases == 0
    eight.tier.raises = None
    again = eight.begin(0, 1)
    eight.run_all()
    assert (again.done, again.miss) == (True, None)


def test_a_tier_that_answers_for_too_few_blocks_has_failed(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    eight.tier.put(0, 1)
    monkeypatch.setattr(eight.tier, "read", lambda requests: [ReadOutcome.OK])
    stage = eight.begin(0, 1)
    eight.run_all()
    assert (stage.num_end, stage.miss) == (0, MissReason.TIER_ERROR)


@pytest.mark.parametrize("num_well", [0, 1])
def test_a_commit_that_raises_leaks_nothing(eight: Harness, monkeypatch: pytest.MonkeyPatch, num_well: int) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(filling_module, "BLOCKS_AT_ONCE", 1)
    eight.tier.put(0, 1)
    commit, calls = eight.host.commit, []

    def fail(reservations: Sequence[Reservation], came_from: str | None = None) -> list[bool]:
        calls.append(came_from)
        if len(calls) > num_well:
            raise KeyError("a fault of our own")
        return commit(reservations, came_from)

    monkeypatch.setattr(eight.host, "commit", fail)
    stage = eight.begin(0, 1)
    eight.run_all()
    assert (stage.poll(), stage.num_end, stage.miss) == (True, num_well, MissReason.TIER_ERROR)
    assert eight.leased(stage) == num_well + 1, "it leased the block that it waited for, until it is closed"
    stage.close()
    assert eight.pool.usage().num_leases == 0


@pytest.mark.parametrize("fails", [False, True])
def test_listeners_of_host_memory_that_raise_cost_nobody_a_block(
    eight: Harness, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)

    def fail(*told: object) -> None:
        raise KeyError("a subscriber that does what it must not")

    eight.store(*range(10, 18))
    eight.tier.put(0, 1, 2)
    if fails:
        eight.tier.answers[1] = ReadOutcome.ERROR
    end = eight.host.subscribe(on_commit=fail, on_evict=fail)
    stage = eight.begin(0, 1, 2)
    eight.run_all()
    end()
    expected = (True, 1, MissReason.TIER_ERROR, 1) if fails else (True, 3, None, 3)
    assert (stage.done, stage.num_end, stage.miss, eight.leased(stage)) == expected
    assert eight.held(0, 1, 2) == [True, not fails, True]


@pytest.mark.parametrize("how", ["void", "came and went"])
def test_nothing_is_leased_behind_a_block_that_went_while_its_job_was_read(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    harness = Harness(16)
    harness.tier.put(0, 1, 2, 3)
    stage = harness.begin(0, 1, 2, 3)
    if how == "came and went":
        harness.store(1)
    harness.tier.while_reading = lambda: harness.host.remove([make_key(SPACE, name(1))])
    harness.run_all()
    reason = MissReason.RESET if how == "void" else MissReason.EVICTED
    assert (stage.done, stage.num_end, stage.miss, harness.leased(stage)) == (True, 1, reason, 1)
    assert harness.held(0, 1, 2, 3) == [True, False, True, True], "they are right, and kept for others"
    harness.tier.while_reading = lambda: None
    harness.close()


def test_a_read_that_is_replaced_while_its_slot_is_set_aside_keeps_no_name(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who replaces it finds no reservation to withdraw yet."""
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    eight.tier.put(0, 1)
    eight.far.put(0, 1)
    reserve_all = eight.host.reserve_all
    others: list[Stage] = []

    def and_another_comes(*args: Any, **more: Any) -> object:
        outcomes = reserve_all(*args, **more)
        if not others:
            eight.disk.is_available = False
            stage = eight.stager.begin("other", SPACE, [name(0), name(1)], None, PAGE_BYTES, 1.0)
            assert stage is not None
            others.append(stage)
        return outcomes

    def meanwhile() -> None:
        assert eight.host.states(SPACE, [name(0), name(1)]) == [None, None]
        while eight.far_jobs.run_next():
            pass

    monkeypatch.setattr(eight.host, "reserve_all", and_another_comes)
    eight.tier.while_reading = meanwhile
    first = eight.begin(0, 1)
    eight.run()
    eight.stages += others
    (other,) = others
    assert (first.done, first.miss) == (True, MissReason.TIER_DOWN)
    assert (other.done, other.miss, eight.leased(other)) == (True, None, 2)
    assert eight.far.batches == [[0, 1]]


def test_a_key_that_went_between_lookup_and_read_is_a_miss(eight: Harness) -> None:
    eight.tier.put(0, 1)
    stage = eight.begin(0, 1)
    eight.tier.drop(1)
    eight.run_all()
    assert (stage.done, stage.num_end, stage.miss) == (True, 1, MissReason.EVICTED)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_block_that_goes_between_lookup_and_lease_ends_the_stage_before_it(
    eight: Harness, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    eight.store(0, 1)
    eight.tier.put(2)
    lease_run = eight.host.lease_run

    def too_late(namespace: bytes, digests: Sequence[BlockDigest], owner: Owner) -> object:
        eight.host.remove([make_key(SPACE, name(gone))])
        return lease_run(namespace, digests, owner)

    monkeypatch.setattr(eight.host, "lease_run", too_late)
    assert eight.try_begin(0, 1, 2) is None
    assert eight.pool.usage().num_leases == 0


def test_a_tier_whose_breaker_is_open_is_not_asked(eight: Harness) -> None:
    eight.tier.put(0)
    eight.disk.is_available = False
    assert eight.try_begin(0) is None
    assert eight.tier.num_contains == 0
    eight.far.put(0)
    stage = eight.begin(0)
    eight.run_all()
    assert dict(stage.arrived) == {"far": 1}


def test_a_tier_that_falls_sick_ends_those_that_wait_for_it(eight: Harness) -> None:
    eight.tier.put(0, 1)
    eight.far.put(2, 3)
    stage, elsewhere = eight.begin(0, 1), eight.begin(2, 3)
    eight.run()
    eight.disk.is_available = False
    assert (stage.poll(), stage.num_end, stage.miss) == (True, 1, MissReason.TIER_DOWN)
    assert not elsewhere.poll()
    eight.run_all()
    assert elsewhere.poll()
    assert eight.held(0, 1) == [True, True]


def test_a_tier_that_falls_sick_when_its_part_is_done_ends_nothing(eight: Harness) -> None:
    eight.tier.put(0)
    eight.far.put(1)
    stage = eight.begin(0, 1)
    eight.run()
    eight.disk.is_available = False
    assert not stage.poll()
    assert eight.far_jobs.run_next()
    assert (stage.poll(), stage.miss) == (True, None)


@pytest.mark.bug("WR23")
def test_a_reset_during_a_read_leaves_nothing_to_be_found(eight: Harness) -> None:
    eight.tier.put(0, 1)
    stage = eight.begin(0, 1)
    eight.tier.while_reading = lambda: eight.host.reset(SPACE)
    eight.run_all()
    assert (stage.poll(), stage.num_end, stage.miss) == (True, 0, MissReason.RESET)
    assert eight.held(0, 1) == [False, False]
    assert eight.host.state(SPACE, name(0)) is None
    stage.close()
    assert eight.pool.usage().used_bytes == 0


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_reads_under_way_stay_within_their_bytes_and_the_next_stage_goes_on() -> None:
    harness = Harness(12, max_inflight=2)
    harness.tier.put(*range(6))
    one, two = harness.begin(0, 1, 2), harness.begin(3, 4, 5)
    assert (len(harness.jobs), harness.stager.inflight_bytes) == (2, 2 * PAGE_BYTES)
    for expected in (2, 2, 2, 2, 1, 0):
        harness.run()
        assert harness.stager.inflight_bytes == expected * PAGE_BYTES
    assert harness.tier.read_numbers == [0, 1, 2, 3, 4, 5], "in the order in which the stages began"
    assert one.done
    assert two.done
    harness.close()


@pytest.mark.parametrize("jobs_at_once", [1, 2])
def test_the_engines_thread_begins_a_few_jobs_and_the_tiers_threads_the_rest(
    monkeypatch: pytest.MonkeyPatch, jobs_at_once: int
) -> None:
    monkeypatch.setattr(staging_module, "JOBS_AT_ONCE", jobs_at_once)
    harness = Harness(64)
    harness.tier.put(*range(40))
    one, two = harness.begin(*range(20)), harness.begin(*range(20, 30))
    assert len(harness.jobs) == 2 * jobs_at_once
    one.close()
    three = harness.begin(*range(30, 40))
    harness.run_all()
    assert (two.done, two.num_end, three.done, three.num_end) == (True, 10, True, 10)
    harness.close()


def test_a_refused_job_of_the_engines_thread_keeps_no_other_stage_from_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_module, "JOBS_AT_ONCE", 1)
    harness = Harness(16)
    harness.tier.put(0, 1)
    harness.far.put(5, 6)
    with monkeypatch.context() as patch:
        patch.setattr(harness.jobs, "try_submit", lambda job, urgent: False)
        refused = harness.begin(0, 1)
        assert (refused.done, refused.miss) == (True, MissReason.BACKLOG)
    stage = harness.begin(5, 6)
    harness.run_all()
    assert (stage.done, stage.miss) == (True, None)
    harness.close()


def test_a_job_takes_no_more_than_some_blocks_however_small(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 64 * PAGE_BYTES)
    monkeypatch.setattr(readqueue_module, "READ_BLOCKS", 2)
    eight.tier.put(0, 1, 2)
    eight.begin(0, 1, 2)
    eight.run_all()
    assert eight.tier.batches == [[0, 1], [2]]


@pytest.mark.parametrize("last_first", [False, True])
def test_what_a_stage_waits_for_is_looked_at_once_a_block(monkeypatch: pytest.MonkeyPatch, last_first: bool) -> None:
    """Each look at a set of pending blocks is counted: as many as there are blocks, not their square."""

    class Counted(set[int]):
        looks = 0

        def __contains__(self, item: object) -> bool:
            Counted.looks += 1
            return super().__contains__(item)

        def __iter__(self) -> Iterator[int]:
            Counted.looks += len(self)
            return super().__iter__()

    monkeypatch.setattr(staging_module, "JOBS_AT_ONCE", 1000)
    harness = Harness(520, max_inflight=1000, max_queued=1000)
    harness.tier.put(*range(256))
    stage = harness.begin(*range(256))
    stage._pending = Counted(stage._pending)
    while len(harness.jobs):
        harness.jobs.run_next(len(harness.jobs) - 1 if last_first else 0)
    assert (stage.done, stage.num_end) == (True, 256)
    assert Counted.looks <= 3 * 256
    harness.close()


def hang(harness: Harness, *numbers: int) -> None:
    """Stages whose reads no thread comes back from, and that nobody waits for any more."""
    for number in numbers:
        harness.begin(number).close()


@pytest.mark.parametrize("how", ["close", "time out"])
def test_reads_that_nobody_waits_for_leave_the_budget_to_others(how: str) -> None:
    harness = Harness(16, max_inflight=2)
    harness.tier.put(*range(6))
    first, waiting = harness.begin(0, 1, wait_s=1.0), harness.begin(2, 3, wait_s=5.0)
    assert len(harness.jobs) == 2
    if how == "close":
        first.close()
    else:
        harness.clock.advance(1.0)
        assert first.poll()
    assert len(harness.jobs) == 4, "those that waited go on, though nothing came back"
    assert harness.stager.inflight_bytes == 4 * PAGE_BYTES
    harness.run(2)
    harness.run(2)
    assert (waiting.done, waiting.num_end) == (True, 2)
    harness.close()


def test_where_nothing_comes_back_even_beyond_the_second_bound_stages_end_at_once() -> None:
    harness = Harness(16, max_inflight=1)
    harness.tier.put(*range(6))
    harness.store(7)
    hang(harness, 0, 1)
    assert (len(harness.jobs), harness.stager.inflight_bytes) == (2, 2 * PAGE_BYTES)
    harness.clock.advance(1.0)
    ends = harness.ends
    stage = harness.begin(7, 3) if harness.held(7) == [True] else None
    assert stage is not None
    assert (stage.done, stage.num_end, stage.miss) == (True, 1, MissReason.TIER_DOWN)
    assert (harness.ends, len(harness.jobs)) == (ends + 1, 2)
    harness.run()
    again = harness.begin(3)
    assert not again.done
    harness.run_all()
    assert (again.done, again.miss) == (True, None)
    harness.close()


def test_a_tier_that_is_only_slow_is_waited_for_even_beyond_the_second_bound() -> None:
    harness = Harness(16, max_inflight=1)
    harness.tier.put(*range(6))
    hang(harness, 0, 1)
    harness.clock.advance(0.9)
    stage = harness.begin(3)
    assert (stage.done, len(harness.jobs)) == (False, 2), "nothing more is begun, and nobody is sent away"
    harness.run()  # one comes back
    harness.clock.advance(0.9)
    assert not stage.poll()
    harness.run_all()
    assert (stage.done, stage.num_end, stage.miss) == (True, 1, None)
    harness.close()


def test_a_read_that_two_wait_for_is_abandoned_when_both_have_gone() -> None:
    harness = Harness(16, max_inflight=1)
    harness.tier.put(0, 1)
    one, two, three = harness.begin(0), harness.begin(0), harness.begin(1)
    one.close()
    assert len(harness.jobs) == 1
    two.close()
    assert len(harness.jobs) == 2
    late = harness.begin(0)
    harness.run_all()
    assert (three.done, late.done, late.miss) == (True, True, None)
    harness.close()


def test_a_block_larger_than_the_budget_comes_alone() -> None:
    harness = Harness(8, max_inflight=0)
    harness.tier.put(0, 1, 2)
    stage = harness.begin(0, 1, 2)
    for _ in range(3):
        assert len(harness.jobs) == 1
        harness.run()
    assert (stage.done, stage.num_end) == (True, 3)
    harness.close()


def test_a_stage_that_gives_up_lets_the_next_one_have_its_turn() -> None:
    harness = Harness(12, max_inflight=1)
    harness.tier.put(*range(8))
    one, two = harness.begin(0, 1, 2, 3), harness.begin(6, 7)
    one.close()
    harness.run_all()
    assert harness.tier.read_numbers == [0, 6, 7]
    assert two.done
    harness.close()


@pytest.mark.bug("LK08")
def test_after_a_thousand_stages_ended_in_every_way_the_budget_is_whole() -> None:
    harness = Harness(8, max_inflight=2)
    harness.tier.put(*range(4))
    for turn in range(1000):
        stage = harness.begin(turn % 4, (turn + 1) % 4) if harness.held(turn % 4) == [False] else None
        if stage is not None:
            if turn % 3 == 0:
                harness.run()
            if turn % 5 == 0:
                harness.clock.advance(1.0)
                stage.poll()
            stage.close()
            harness.stages.remove(stage)
        if turn % 7 == 0:
            harness.jobs.run_all()
            harness.host.reset(SPACE)
    harness.run_all()
    harness.host.reset(SPACE)
    assert harness.stager.inflight_bytes == 0
    stage = harness.begin(0, 1)
    assert len(harness.jobs) == 2, "the next one begins at once"
    harness.close()


def test_a_host_pool_full_of_leases_ends_the_stage(eight: Harness) -> None:
    reservations = [eight.reserve(10 + number) for number in range(7)]
    eight.tier.put(0, 1, 2)
    stage = eight.begin(0, 1, 2)
    eight.run_all()
    assert (stage.poll(), stage.num_end, stage.miss) == (True, 1, MissReason.HOST_FULL)
    assert eight.ends == 1
    stage.close()
    for item in reservations:
        assert isinstance(item, Reservation)
        eight.host.abort(item)


def test_behind_a_block_without_a_slot_nobody_elses_block_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readqueue_module, "READ_BYTES", 8 * PAGE_BYTES)
    harness = Harness(8)
    real, asked = harness.host._reserve_one, []

    def reserve(reservation: Reservation, *rest: Any) -> Reservation | DropReason:
        asked.append(reservation.digest)
        return DropReason.HOST_FULL if reservation.digest == name(1) else real(reservation, *rest)

    harness.store(*range(10, 18))  # whoever gets a slot evicts one of these
    monkeypatch.setattr(harness.host, "_reserve_one", reserve)
    harness.tier.put(0, 1, 2)
    stage = harness.begin(0, 1, 2)
    harness.run_all()
    assert (stage.num_end, stage.miss) == (1, MissReason.HOST_FULL)
    assert harness.tier.read_numbers == [0]
    assert asked == [name(0), name(1)]
    assert harness.held(*range(10, 18)).count(False) == 1
    monkeypatch.undo()
    harness.close()


def test_a_full_queue_of_the_executor_ends_the_stage() -> None:
    harness = Harness(8, max_queued=1)
    harness.tier.put(0, 1, 2)
    stage = harness.begin(0, 1, 2)
    assert not stage.done
    harness.run_all()
    assert (stage.done, stage.num_end, stage.miss) == (True, 1, MissReason.BACKLOG)
    blocked = harness.begin(1)
    other = harness.begin(2)
    assert (other.done, other.num_end, other.miss) == (True, 0, MissReason.BACKLOG)
    assert not blocked.done
    assert harness.ends == 2
    harness.close()


def test_one_stage_reads_no_more_than_half_the_pool(eight: Harness) -> None:
    eight.store(0)
    eight.tier.put(*range(1, 8))
    stage = eight.begin(*range(8))
    assert stage.num_blocks == 1 + 4
    eight.run_all()
    assert (stage.num_end, eight.leased(stage)) == (5, 5)


@pytest.mark.parametrize(
    ("host", "below", "most", "found"),
    [
        ((), range(8), None, 4),
        ((), range(8), 3, 3),
        (range(6), (6, 7), 4, 6),
        (range(2), range(2, 8), 4, 4),
        (range(1, 8), (0,), 4, 4),
        (range(1, 8), (0,), None, 8),
    ],
)
def test_looking_finds_no_more_than_a_stage_may_read_and_lease(
    host: Sequence[int], below: Sequence[int], most: int | None, found: int
) -> None:
    harness = Harness(8)
    harness.store(*host)
    harness.tier.put(*below)
    used = harness.pool.usage()
    located = harness.stager.locate(SPACE, [name(number) for number in range(8)], PAGE_BYTES, most)
    assert len(located.sources) == len(located.digests) == found
    assert located.num_host == (len(host) if 0 in host else 0)
    assert harness.pool.usage() == used, "pure"
    harness.close()


def test_a_stage_begins_with_what_was_found_and_looks_nothing_up(eight: Harness) -> None:
    eight.store(0)
    eight.tier.put(1, 2)
    digests = [name(number) for number in range(3)]
    found = eight.stager.locate(SPACE, digests, PAGE_BYTES)
    looked = eight.tier.num_contains
    assert eight.stager.queued_bytes(eight.disk) == 0
    stage = eight.stager.begin("r", SPACE, digests[:2], None, PAGE_BYTES, 1.0, found.first(2))
    assert stage is not None
    eight.stages.append(stage)
    assert eight.tier.num_contains == looked
    assert stage.digests == digests[:2]
    assert eight.stager.queued_bytes(eight.disk) == PAGE_BYTES
    assert eight.stager.queued_bytes(eight.remote) == 0
    eight.run_all()
    assert (stage.done, stage.num_end, dict(stage.arrived)) == (True, 2, {"disk": 1})
    assert eight.stager.queued_bytes(eight.disk) == 0


def test_bytes_queued_count_each_prefix_once() -> None:
    harness = Harness(64, max_inflight=2)
    harness.tier.put(*range(20))
    for _ in range(5):
        harness.begin(*range(8))
    assert harness.stager.queued_bytes(harness.disk) <= 10 * PAGE_BYTES
    harness.begin(*range(10, 14))
    assert 10 * PAGE_BYTES <= harness.stager.queued_bytes(harness.disk) <= 14 * PAGE_BYTES
    harness.close()


def test_a_stage_that_is_told_to_stop_keeps_what_came(eight: Harness) -> None:
    eight.tier.put(0, 1)
    stage = eight.begin(0, 1, wait_s=100.0)
    eight.run()
    stage.stop()
    assert (stage.done, stage.miss, stage.num_end, eight.leased(stage)) == (True, MissReason.TIMEOUT, 1, 1)
    eight.check()


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_closing_a_stage_is_idempotent_and_lets_go_of_everything(eight: Harness) -> None:
    eight.tier.put(0, 1, 2)
    stage = eight.begin(0, 1, 2)
    eight.run()
    stage.close()
    stage.close()
    assert (stage.done, stage.poll(), stage.num_end, eight.leased(stage)) == (True, True, 1, 0)
    eight.run_all()
    assert eight.leased(stage) == 0
    assert eight.held(0, 1, 2) == [True] * 3
    assert eight.pool.usage().num_leases == 0


def test_a_stage_may_be_closed_by_another_thread_while_its_block_arrives(eight: Harness) -> None:
    eight.tier.put(0, 1)
    stage = eight.begin(0, 1)
    closing = threading.Thread(target=stage.close)

    def close_now() -> None:
        if not closing.ident:
            closing.start()
            closing.join(SOON_S)

    eight.tier.while_reading = close_now
    eight.run_all()
    assert eight.leased(stage) == 0
    assert eight.pool.usage().num_leases == 0


def test_listeners_are_told_at_each_end_until_they_unsubscribe(eight: Harness) -> None:
    eight.tier.put(0, 1)
    told: list[bool] = []
    end = eight.stager.subscribe(lambda: told.append(stage.done))
    stage = eight.begin(0, 1)
    eight.run()
    assert told == []
    eight.run()
    assert told == [True], "done by the time they are told"
    end()
    eight.tier.put(2)
    eight.begin(2)
    eight.run()
    assert told == [True]


def test_closing_the_stager_ends_every_stage_and_gives_up_what_was_not_begun() -> None:
    harness = Harness(8, max_inflight=2)
    harness.tier.put(0, 1, 2, 3)
    reading, waiting = harness.begin(0, 1), harness.begin(2, 3)
    harness.run()
    left = harness.jobs.close(0)
    harness.stager.close()
    harness.check()
    for stage, num_end in ((reading, 1), (waiting, 0)):
        assert (stage.done, stage.num_end, stage.miss) == (True, num_end, MissReason.TIMEOUT)
    assert harness.stager.inflight_bytes == 0
    assert harness.ends == 1
    for job in left:
        job()  # by a thread that was about to
    assert harness.tier.read_numbers == [0]
    assert harness.try_begin(2, 3) is None
    harness.stager.close()
    reading.close()
    assert harness.pool.usage().num_leases == 0
    harness.close()


def test_a_read_that_outlives_the_stager_keeps_its_slot_until_it_returns() -> None:
    harness = Harness(8)
    harness.tier.put(0, 1)
    stage = harness.begin(0, 1)

    def close() -> None:
        harness.jobs.close(0)
        harness.stager.close()
        stage.close()
        assert harness.pool.usage().num_slots_leased == 1
        harness.tier.while_reading = lambda: None

    harness.tier.while_reading = close
    harness.run()
    assert harness.stager.inflight_bytes == 0
    assert harness.pool.usage().num_leases == 0
    harness.close()


def test_nothing_begins_in_a_stager_that_closes_meanwhile(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    eight.store(0)
    eight.tier.put(1)
    now = eight.clock.now

    def close_and_tell() -> float:
        eight.stager.close()
        return now()

    monkeypatch.setattr(eight.clock, "now", close_and_tell)
    assert eight.try_begin(0, 1) is None
    assert eight.pool.usage().num_leases == 0


def test_integrity_sees_what_does_not_agree(eight: Harness) -> None:
    eight.tier.put(0)
    stage = eight.begin(0)
    budget = eight.stager._queue._budgets[eight.disk]
    budget.live_bytes += 1
    with pytest.raises(IntegrityError, match="bytes"):
        eight.stager.check_integrity()
    budget.live_bytes -= 1
    (read,) = eight.stager._queue.reads.values()
    read.num_live = 2
    with pytest.raises(IntegrityError, match="stages wait"):
        eight.stager.check_integrity()
    read.num_live = 1
    read.waiters.clear()
    read.num_live, read.is_abandoned = 0, True
    budget.live_bytes, budget.abandoned_bytes = 0, PAGE_BYTES
    stage._pending.add(5)
    eight.stager._queue.add(stage)
    with pytest.raises(IntegrityError, match="nobody reads"):
        eight.stager.check_integrity()
    eight.stager._queue._stages.clear()
    stage._pending.discard(5)
    read.waiters.append((stage, 0))
    read.num_leased, read.num_live = 0, 1
    eight.stager.check_integrity()


# ---- any order -------------------------------------------------------------------------------------------------------

TREE: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: None, 7: 6}
SPACES = st.sampled_from([SPACE, OTHER])
NUMBERS = st.sampled_from(sorted(TREE))
FAILURES = {
    ReadOutcome.MISS: MissReason.EVICTED,
    ReadOutcome.DAMAGED: MissReason.DAMAGED,
    ReadOutcome.ERROR: MissReason.TIER_ERROR,
    ReadOutcome.REFUSED: MissReason.TIER_DOWN,
}


def path_to(number: int) -> list[int]:
    parent = TREE[number]
    return [*([] if parent is None else path_to(parent)), number]


@dataclass
class Begun:
    stage: Stage
    space: bytes
    path: list[int]
    deadline: float


class StagingMachine(RuleBasedStateMachine):
    """What is found in host memory has its key's bytes; leases are those of live stages; what began ends."""

    @initialize(pages=st.integers(4, 16), budget=st.integers(0, 4), queued=st.sampled_from([1, 2, 100]))
    def build(self, pages: int, budget: int, queued: int) -> None:
        logging.getLogger("kvtier.staging").setLevel(logging.CRITICAL)
        self.read_bytes, readqueue_module.READ_BYTES = readqueue_module.READ_BYTES, 2 * PAGE_BYTES
        self.harness = Harness(pages, budget, queued)
        self.begun: list[Begun] = []
        self.stored = 0

    @rule(numbers=st.lists(NUMBERS, min_size=1), space=SPACES, far=st.booleans())
    def put_below(self, numbers: list[int], space: bytes, far: bool) -> None:
        (self.harness.far if far else self.harness.tier).put(*numbers, space=space)

    @rule(numbers=st.lists(NUMBERS), space=SPACES)
    def evict_below(self, numbers: list[int], space: bytes) -> None:
        self.harness.tier.drop(*numbers, space=space)

    @rule(number=NUMBERS, answer=st.sampled_from([None, *FAILURES]))
    def fail(self, number: int, answer: ReadOutcome | None) -> None:
        if answer is None:
            self.harness.tier.answers.pop(number, None)
        else:
            self.harness.tier.answers[number] = answer

    @rule(raises=st.booleans())
    def raise_at_reads(self, raises: bool) -> None:
        self.harness.far.raises = asyncio.CancelledError if raises else None

    @rule(number=NUMBERS, space=SPACES, wait_s=st.sampled_from([0.5, 1.0, 4.0]))
    def begin(self, number: int, space: bytes, wait_s: float) -> None:
        path, harness = path_to(number), self.harness
        here = harness.held(*path, space=space)
        keys = [make_key(space, name(n)) for n in path]
        below = [
            a or b
            for a, b in zip(DictTier.contains(harness.tier, keys), DictTier.contains(harness.far, keys), strict=True)
        ]
        stage = harness.try_begin(*path, space=space, wait_s=wait_s)
        first = here.index(False) if False in here else len(path)
        if first < len(path) and below[first] and harness.disk.is_available and harness.remote.is_available:
            assert stage is not None
            assert stage.num_blocks > first
        if stage is not None:
            self.begun.append(Begun(stage, space, path, harness.clock.now() + wait_s))

    @rule(position=st.integers(0, 8), far=st.booleans())
    def run_a_job(self, position: int, far: bool) -> None:
        (self.harness.far_jobs if far else self.harness.jobs).run_next(position)

    @rule(seconds=st.sampled_from([0.25, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.begun))
        assert item.stage.poll() or self.harness.clock.now() < item.deadline

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def close_stage(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.begun))
        item.stage.close()
        assert item.stage.done
        assert self.harness.leased(item.stage) == 0
        self.begun.remove(item)

    @rule(number=NUMBERS, space=SPACES)
    def an_engine_stores(self, number: int, space: bytes) -> None:
        outcome = self.harness.reserve(number, TREE[number], space)
        if isinstance(outcome, Reservation):
            outcome.lease.view[:] = content(space, number)
            assert self.harness.host.commit([outcome]) == [True]

    @rule(count=st.integers(1, 4))
    def others_store(self, count: int) -> None:
        for _ in range(count):
            self.stored += 1
            outcome = self.harness.reserve(1000 + self.stored)
            if isinstance(outcome, Reservation):
                outcome.lease.view[:] = content(SPACE, 1000 + self.stored)
                self.harness.host.commit([outcome])

    @rule(space=SPACES)
    def reset(self, space: bytes) -> None:
        self.harness.host.reset(space)

    @rule(disk=st.booleans(), far=st.booleans())
    def breakers(self, disk: bool, far: bool) -> None:
        self.harness.disk.is_available, self.harness.remote.is_available = disk, far

    @invariant()
    def agrees(self) -> None:
        harness = self.harness
        harness.check()
        under_way = len(harness.stager._queue.reads)
        assert harness.stager._owner.num_leases <= 2 * under_way, "a block and its parent for each read"
        for item in self.begun:
            stage = item.stage
            assert harness.leased(stage) <= stage.num_blocks
            assert 0 <= stage.num_end <= stage.num_blocks
            if stage.done and stage.miss is None:
                assert stage.num_end == stage.num_blocks
        if not (len(harness.jobs) or len(harness.far_jobs)):
            assert harness.stager.inflight_bytes == 0
            assert not harness.stager._queue._stages
            assert all(item.stage.done for item in self.begun)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run_all()
            assert all(item.stage.done for item in self.begun)
            self.harness.close()
            readqueue_module.READ_BYTES = self.read_bytes
            logging.getLogger("kvtier.staging").setLevel(logging.NOTSET)


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=80, stateful_step_count=40)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS18")
def test_requests_on_four_threads_over_two_reading_threads_find_what_was_written() -> None:
    harness = Harness(16, max_inflight=3)
    executor = ThreadExecutor("reads", 1000, num_threads=2)
    lower = Lower(harness.tier, executor)
    stager = Stager(harness.host, harness.pool, [lower], 3 * PAGE_BYTES, harness.clock)
    harness.tier.put(*range(12))
    ended, wrong = threading.Condition(), Counter[str]()

    def tell() -> None:
        with ended:
            ended.notify_all()

    stager.subscribe(tell)

    def work(seed: int) -> None:
        for turn in range(60):
            first = (seed + turn) % 3 * 4
            digests = [name(first + i) for i in range(4)]
            stage = stager.begin(f"{seed}.{turn}", SPACE, digests, None, PAGE_BYTES, 1.0)
            if stage is not None:
                with ended:
                    if turn % 4 and not ended.wait_for(lambda: stage.done, SOON_S):  # noqa: B023
                        wrong["stuck"] += 1
                with harness.pool.owner("landing") as owner:
                    leases = harness.host.lease_run(SPACE, digests, owner)
                    for i, lease in enumerate(leases):
                        if bytes(lease.view) != content(SPACE, first + i):
                            wrong["bytes"] += 1
                stage.close()
            if turn % 5 == seed:
                harness.host.remove([make_key(SPACE, digest) for digest in digests[1:]])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    executor.close(SOON_S)
    stager.check_integrity()
    assert stager.inflight_bytes == 0
    stager.close()
    assert not wrong
    harness.close()
