"""Write-behind: stories of a few blocks on their way down, then any order of events, then threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier import writebehind as writebehind_module
from kvtier.errors import IntegrityError
from kvtier.executor import Executor, ThreadExecutor
from kvtier.keys import BlockDigest, Key, make_key, split_key
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.pool import HostPool
from kvtier.reasons import DropReason
from kvtier.testing import DictTier, FakeClock, InlineExecutor, ManualExecutor
from kvtier.tiers.base import WriteOutcome, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation
from kvtier.writebehind import WriteBehind

SPACE = b"a" * 16
SOON_S = 30.0


def name(number: int) -> BlockDigest:
    return BlockDigest(b"%032d" % number)


def key_of(number: int) -> Key:
    return make_key(SPACE, name(number))


def number_of(key: Key) -> int:
    return int(split_key(key)[1])


def content(number: int) -> bytes:
    return b"%032d" % number * (PAGE_BYTES // 32)


class LowerTier(DictTier):
    """A dictionary that keeps a record of calls and answers what it is told to."""

    name = "disk"

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []
        self.num_written: Counter[int] = Counter()
        self.answer: Callable[[int], object] = lambda number: None
        self.while_writing: Callable[[], object] = lambda: None
        self.raises: Callable[[], BaseException] | None = None

    @property
    def write_numbers(self) -> list[int]:
        return [number for batch in self.batches for number in batch]

    @property
    def numbers(self) -> set[int]:
        return {number_of(key) for key in self._blocks}

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        numbers = [number_of(request.key) for request in requests]
        self.batches.append(numbers)
        self.while_writing()
        if self.raises is not None:
            raise self.raises()
        outcomes: list[WriteOutcome] = []
        for request, number in zip(requests, numbers, strict=True):
            assert request.buffer == content(number)
            answer = self.answer(number)
            outcomes += super().write([request]) if answer is None else [answer]  # type: ignore[list-item]
            self.num_written[number] += outcomes[-1] is WriteOutcome.STORED
        return outcomes


MAX_AGE_S = 60.0


class Harness:
    """A host tier over a few pages, and a queue to one lower tier."""

    def __init__(
        self,
        num_pages: int = 8,
        max_blocks: int = 100,
        min_uses: int = 1,
        max_jobs: int = 1,
        executor: Executor | None = None,
        max_queued: int = 100,
    ) -> None:
        self.pool = HostPool(PoolMemory(num_pages * PAGE_BYTES, touch=False), PAGE_BYTES)
        self.num_pages = num_pages
        self.host = HostTier(self.pool)
        self.clock = FakeClock()
        self.jobs = ManualExecutor(max_queued)
        self.tier = LowerTier()
        self.writer = WriteBehind(
            self.host,
            self.pool,
            self.tier,
            executor or self.jobs,
            self.clock,
            max_bytes=max_blocks * PAGE_BYTES,
            max_age_s=MAX_AGE_S,
            min_uses=min_uses,
            max_jobs=max_jobs,
        )
        self.owner = self.pool.owner("test")

    def store(self, number: int, parent: int | None = None, came_from: str | None = None) -> bool:
        above = None if parent is None else name(parent)
        reservation = self.host.reserve(SPACE, name(number), above, PAGE_BYTES, self.owner)
        if not isinstance(reservation, Reservation):
            return False
        reservation.lease.view[:] = content(number)
        assert self.host.commit([reservation], came_from) == [True]
        self.check()
        return True

    def store_chain(self, *numbers: int) -> None:
        parent: int | None = None
        for number in numbers:
            assert self.store(number, parent)
            parent = number

    def use(self, *numbers: int, parent: int | None = None) -> None:
        above = None if parent is None else name(parent)
        self.writer.note_use(SPACE, [name(number) for number in numbers], above)
        self.check()

    def held(self, *numbers: int) -> list[bool]:
        return self.host.contains([key_of(number) for number in numbers])

    def forget(self, *numbers: int) -> None:
        self.host.remove([key_of(number) for number in numbers])

    def run(self, position: int = 0) -> bool:
        ran = self.jobs.run_next(position)
        self.check()
        return ran

    def run_all(self) -> None:
        while self.run():
            pass

    def counts(self) -> tuple[int, int, dict[DropReason, int], int]:
        ledger = self.writer.ledger.snapshot()
        return ledger.due, ledger.stored, dict(ledger.dropped), ledger.pending

    def check(self) -> None:
        self.writer.check_integrity()
        self.host.check_integrity()
        self.tier.check_integrity()
        for key, block in self.tier._blocks.items():
            assert block == content(number_of(key))

    def close(self) -> None:
        self.run_all()
        self.jobs.close(0)
        self.writer.close()
        self.check()
        assert self.writer.queued_bytes == 0
        assert self.writer.ledger.snapshot().pending == 0
        self.owner.close()
        assert self.pool.usage().num_leases == 0
        with self.pool.owner("all") as every:
            for number in range(self.num_pages):
                outcome = self.host.reserve(SPACE, name(10**6 + number), None, PAGE_BYTES, every)
                assert isinstance(outcome, Reservation)
        self.host.close()
        self.pool.check_integrity()
        self.pool.close()


@pytest.fixture(autouse=True)
def forget_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    caplog.get_records("call").clear()  # they hold views of the pool


@pytest.fixture
def eight() -> Iterator[Harness]:
    harness = Harness(8)
    yield harness
    harness.close()


@pytest.fixture
def narrow() -> Iterator[Harness]:
    """A queue of two blocks."""
    harness = Harness(8, max_blocks=2)
    yield harness
    harness.close()


# ---- on the way ------------------------------------------------------------------------------------------------------


def test_what_comes_to_host_memory_is_written_prefix_first(eight: Harness) -> None:
    eight.store_chain(0, 1, 2)
    assert (eight.counts(), eight.writer.queued_bytes) == ((3, 0, {}, 3), 3 * PAGE_BYTES)
    assert len(eight.jobs) == 1
    eight.run_all()
    assert eight.tier.batches == [[0, 1, 2]]
    assert (eight.counts(), eight.writer.queued_bytes) == ((3, 3, {}, 0), 0)
    assert eight.writer.flush(1.0) == 0


def test_the_tier_is_told_each_blocks_parent(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    parents: list[Key | None] = []
    write = eight.tier.write

    def noting(requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        parents.extend(request.parent for request in requests)
        return write(requests)

    monkeypatch.setattr(eight.tier, "write", noting)
    eight.store_chain(0, 1)
    eight.run_all()
    assert parents == [None, key_of(0)]


def test_a_job_writes_as_many_blocks_as_bytes_allow(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", 2 * PAGE_BYTES)
    eight.store_chain(0, 1, 2, 3, 4)
    eight.run_all()
    assert eight.tier.batches == [[0, 1], [2, 3], [4]]


def test_a_block_larger_than_a_job_is_written_alone(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", 1)
    eight.store_chain(0, 1)
    eight.run_all()
    assert eight.tier.batches == [[0], [1]]


def test_a_block_shorter_than_its_slot_is_written_at_its_length(eight: Harness) -> None:
    reservation = eight.host.reserve(SPACE, name(0), None, 100, eight.owner)
    assert isinstance(reservation, Reservation)
    reservation.lease.view[:100] = b"x" * 100
    lengths: list[int] = []
    eight.tier.write = lambda requests: [  # type: ignore[method-assign]
        lengths.append(len(request.buffer)) or WriteOutcome.STORED  # type: ignore[func-returns-value]
        for request in requests
    ]
    eight.host.commit([reservation])
    eight.run_all()
    assert lengths == [100]


def test_what_came_from_the_tier_is_not_written_back(eight: Harness) -> None:
    assert eight.store(0, came_from="disk")
    assert eight.store(1, came_from="another")
    eight.run_all()
    assert eight.tier.batches == [[1]]
    assert eight.counts() == (1, 1, {}, 0)


def test_a_block_is_leased_while_its_write_is_pending_and_no_longer() -> None:
    harness = Harness(2)
    harness.store_chain(0, 1)
    assert not harness.store(2)
    assert harness.held(0, 1) == [True, True]
    harness.run_all()
    assert harness.pool.usage().num_leases == 0
    assert harness.store(2)
    harness.close()


@pytest.mark.bug("PF05")
def test_one_prompt_offered_ten_times_is_written_once(eight: Harness) -> None:
    for turn in range(10):
        eight.store_chain(0, 1, 2)
        if turn % 2:
            eight.run_all()
        eight.use(0, 1, 2)
        eight.forget(0, 1, 2)
    eight.run_all()
    assert eight.tier.num_written == {0: 1, 1: 1, 2: 1}
    assert eight.counts() == (30, 3, {DropReason.ALREADY_STORED: 27}, 0)


def test_what_the_lower_tier_gave_up_is_written_when_it_comes_again(eight: Harness) -> None:
    eight.store_chain(0)
    eight.run_all()
    eight.tier.remove([key_of(0)])
    eight.forget(0)
    eight.store_chain(0)
    eight.run_all()
    assert eight.tier.numbers == {0}


# ---- how large a job is ----------------------------------------------------------------------------------------------


def sizes(harness: Harness) -> list[int]:
    return [len(batch) for batch in harness.tier.batches]


@pytest.mark.parametrize(
    ("scale", "max_jobs", "num_blocks", "expected"),
    [
        (1, 1, 12, [2] * 6),
        (1, 3, 12, [2] * 6),
        (4, 1, 12, [8, 4]),
        (4, 1, 20, [8, 8, 4]),
        (4, 2, 12, [6, 3, 2, 1]),
        (4, 2, 20, [8, 6, 3, 2, 1]),
        (4, 4, 12, [3, 2, 2, 2, 2, 1]),
        (4, 4, 4, [2, 2]),
        (4, 4, 1, [1]),
        (100, 1, 20, [20]),
    ],
)
def test_a_job_of_a_scaled_tier_takes_its_share_of_what_waits(
    monkeypatch: pytest.MonkeyPatch, scale: int, max_jobs: int, num_blocks: int, expected: list[int]
) -> None:
    """At least as much as another tier's, at most `scale` times that. One job after another."""
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", 2 * PAGE_BYTES)
    harness = Harness(num_blocks, max_jobs=max_jobs)
    harness.tier.job_scale = scale
    harness.store_chain(*range(num_blocks))
    harness.run_all()
    assert sizes(harness) == expected
    assert harness.tier.write_numbers == list(range(num_blocks))
    assert harness.counts() == (num_blocks, num_blocks, {}, 0)
    assert harness.writer.queued_bytes == 0
    harness.close()


def test_jobs_at_once_have_equal_shares_of_a_scaled_tiers_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", PAGE_BYTES)
    harness = Harness(12, max_jobs=3)
    harness.tier.job_scale = 100
    harness.store_chain(*range(12))
    assert len(harness.jobs) == 3
    harness.tier.while_writing = harness.jobs.run_next  # so that none of them has ended when the next begins
    harness.run_all()
    assert harness.tier.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert harness.counts() == (12, 12, {}, 0)
    harness.close()


@pytest.mark.parametrize("scale", [1, 4])
def test_a_block_larger_than_a_job_of_any_scale_is_written_alone(monkeypatch: pytest.MonkeyPatch, scale: int) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", PAGE_BYTES // 8)
    harness = Harness(8)
    harness.tier.job_scale = scale
    harness.store_chain(0, 1, 2)
    harness.run_all()
    assert harness.tier.batches == [[0], [1], [2]]
    harness.close()


@pytest.mark.parametrize("scale", [1, 4])
def test_a_job_writes_no_more_than_some_blocks_however_small(monkeypatch: pytest.MonkeyPatch, scale: int) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BLOCKS", 3)
    harness = Harness(8)
    harness.tier.job_scale = scale
    harness.store_chain(*range(8))
    harness.run_all()
    assert harness.tier.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert harness.counts() == (8, 8, {}, 0)
    harness.close()


def test_blocks_that_waited_too_long_count_among_those_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at under the same hold of the lock."""
    monkeypatch.setattr(writebehind_module, "WRITE_BLOCKS", 2)
    harness = Harness(8)
    harness.store_chain(0, 1, 2)
    harness.clock.advance(MAX_AGE_S + 1.0)
    harness.store(3, parent=2)
    harness.store(4)
    assert harness.run()
    assert (harness.tier.batches, harness.counts()) == ([], (5, 0, {DropReason.AGED: 1, DropReason.ORPHAN: 1}, 3))
    assert harness.writer.queued_bytes == 3 * PAGE_BYTES
    harness.run_all()
    assert harness.tier.batches == [[4]], "3 continues what was dropped by an earlier job"
    assert harness.counts() == (5, 1, {DropReason.AGED: 1, DropReason.ORPHAN: 3}, 0)
    harness.close()


@pytest.mark.parametrize("answer", [WriteOutcome.FULL, WriteOutcome.ERROR])
def test_what_a_large_job_could_not_write_is_tried_again_at_its_next_use(
    monkeypatch: pytest.MonkeyPatch, answer: WriteOutcome
) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", PAGE_BYTES)
    harness = Harness(8)
    harness.tier.job_scale = 8
    harness.tier.answer = lambda number: answer if number in (2, 5) else None
    harness.store_chain(*range(8))
    harness.run_all()
    assert harness.tier.batches == [list(range(8))]
    due, stored, dropped, pending = harness.counts()
    assert (due, stored, sum(dropped.values()), pending) == (8, 6, 2, 0)
    harness.tier.answer = lambda number: None
    harness.use(*range(8))
    harness.run_all()
    assert harness.tier.numbers == set(range(8))
    assert max(harness.tier.num_written.values()) == 1
    harness.close()


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_beyond_the_bound_the_newest_are_dropped_and_those_behind_them(narrow: Harness) -> None:
    narrow.store_chain(0, 1, 2, 3)
    narrow.store(7)
    assert narrow.counts() == (5, 0, {DropReason.BACKLOG: 2, DropReason.ORPHAN: 1}, 2)
    assert narrow.writer.queued_bytes == 2 * PAGE_BYTES
    narrow.run_all()
    assert narrow.store(4, parent=3)
    narrow.run_all()
    assert narrow.tier.numbers == {0, 1}, "4 could not be reached without 2 and 3"


def test_what_was_dropped_is_written_when_a_prompt_uses_it_next(narrow: Harness) -> None:
    narrow.store_chain(0, 1, 2, 3)
    narrow.run_all()
    narrow.use(0, 1, 2, 3)
    narrow.run_all()
    assert narrow.tier.write_numbers == [0, 1, 2, 3]
    narrow.use(0, 1, 2, 3)
    assert narrow.counts() == (6, 4, {DropReason.BACKLOG: 1, DropReason.ORPHAN: 1}, 0)
    assert not narrow.writer._dropped


def test_a_use_from_mid_chain_knows_its_parent(narrow: Harness) -> None:
    narrow.store_chain(0, 1, 2, 3)
    narrow.run_all()
    narrow.use(3, parent=2)
    assert narrow.counts()[2][DropReason.ORPHAN] == 2, "2 is not there yet"
    narrow.use(2, 3, parent=1)
    narrow.run_all()
    assert narrow.tier.write_numbers == [0, 1, 2, 3]


def test_a_flush_writes_what_was_dropped_though_it_takes_several_rounds() -> None:
    harness = Harness(16, max_blocks=2, executor=None)
    harness.store_chain(*range(10))
    harness.run_all()
    harness.writer._changed.wait = lambda timeout=None: harness.jobs.run_next()  # type: ignore[method-assign]
    assert harness.writer.flush(100.0) == 0
    assert harness.tier.write_numbers == list(range(10))
    harness.close()


def test_what_left_host_memory_is_no_longer_waited_for(narrow: Harness) -> None:
    narrow.store_chain(0, 1, 2)
    narrow.run_all()
    narrow.forget(2)
    narrow.use(0, 1, 2)
    assert narrow.counts() == (3, 2, {DropReason.BACKLOG: 1}, 0)
    assert narrow.writer.flush(1.0) == 0
    assert narrow.counts() == (4, 2, {DropReason.BACKLOG: 1, DropReason.EVICTED: 1}, 0)
    narrow.store(2, 1)
    narrow.run_all()
    assert narrow.tier.numbers == {0, 1, 2}


def test_a_block_that_the_tier_turns_out_to_hold_makes_no_orphans(narrow: Harness) -> None:
    narrow.store_chain(0, 1, 2)
    narrow.run_all()
    narrow.forget(2)
    assert narrow.store(2, 1, came_from="disk")
    assert narrow.store(3, 2)
    narrow.run_all()
    assert narrow.tier.numbers == {0, 1, 3}


def test_a_block_that_was_dropped_while_its_write_was_pending_makes_no_orphans() -> None:
    harness = Harness(8, max_blocks=1)
    harness.store(0)
    harness.forget(0)
    harness.store(0)
    assert harness.counts() == (2, 0, {DropReason.BACKLOG: 1}, 1)
    harness.run_all()
    harness.store(1, 0)
    harness.run_all()
    assert harness.tier.numbers == {0, 1}
    assert harness.writer.flush(0.0) == 0
    harness.close()


def test_a_flush_writes_an_orphan_once_its_parent_is_written() -> None:
    harness = Harness(8, executor=InlineExecutor())
    harness.tier.answer = lambda number: WriteOutcome.ERROR
    harness.store_chain(0, 1)
    harness.use(0)
    assert list(harness.writer._dropped) == [key_of(1), key_of(0)], "the order in which they are tried"
    harness.tier.answer = lambda number: None
    assert harness.writer.flush(1.0) == 0
    assert harness.tier.numbers == {0, 1}
    harness.close()


@pytest.mark.bug("LK13")
def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind_module, "MAX_NOTED", 16)
    for min_uses in (1, 2):
        harness = Harness(8, max_blocks=0, min_uses=min_uses)
        for number in range(200):
            harness.store(number)
            harness.use(number, number + 1000)
        sizes = {key: len(value) for key, value in vars(harness.writer).items() if hasattr(value, "__len__")}
        assert {"_dropped", "_queue", "_uses"} <= sizes.keys()
        assert max(sizes.values()) <= 16, sizes
        harness.close()


# ---- the n-th use ----------------------------------------------------------------------------------------------------


@pytest.mark.bug("PF13")
def test_blocks_that_never_repeat_are_never_written() -> None:
    harness = Harness(8, min_uses=2)
    for turn in range(1000):
        harness.store(1000 + turn)
        repeated = turn % 10
        if turn < 20 and not harness.store(repeated):
            harness.use(repeated)
        harness.run_all()
    assert harness.tier.numbers == set(range(10))
    assert harness.counts()[0] == 10
    harness.close()


@pytest.mark.parametrize("min_uses", [2, 3])
def test_a_block_is_written_at_its_nth_use_and_not_at_later_ones(min_uses: int) -> None:
    harness = Harness(8, min_uses=min_uses)
    harness.store_chain(0, 1)
    for uses in range(2, 7):
        harness.use(0)
        harness.run_all()
        assert harness.tier.write_numbers == ([0] if uses >= min_uses else [])
    harness.close()


def test_a_use_while_the_block_is_not_in_host_memory_counts() -> None:
    harness = Harness(8, min_uses=2)
    harness.use(0)
    harness.use(0)
    assert harness.counts() == (0, 0, {}, 0)
    harness.store(0)
    harness.run_all()
    assert harness.tier.numbers == {0}
    harness.close()


def test_what_the_tier_gave_up_is_written_again_though_its_uses_are_known() -> None:
    harness = Harness(8, min_uses=2)
    harness.store(0)
    harness.use(0)
    harness.run_all()
    harness.tier.remove([key_of(0)])
    harness.forget(0)
    harness.store(0)
    harness.run_all()
    assert harness.tier.numbers == {0}
    harness.close()


def test_uses_of_what_came_from_the_tier_write_nothing() -> None:
    harness = Harness(8, min_uses=2)
    harness.store(0, came_from="disk")
    for _ in range(4):
        harness.use(0)
    assert harness.counts() == (0, 0, {}, 0)
    harness.close()


def test_of_a_long_prompt_the_prefix_is_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind_module, "MAX_NOTED", 4)
    harness = Harness(8, min_uses=2)
    harness.use(*range(8))
    harness.store_chain(*range(8))
    harness.run_all()
    assert harness.tier.write_numbers == [0, 1, 2, 3]
    harness.close()


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WriteOutcome.ALREADY_STORED, DropReason.ALREADY_STORED),
        (WriteOutcome.FULL, DropReason.TIER_FULL),
        (WriteOutcome.ERROR, DropReason.TIER_ERROR),
        (WriteOutcome.REFUSED, DropReason.TIER_DOWN),
        (WriteOutcome.WITHDRAWN, DropReason.RESET),
        ("nonsense", DropReason.TIER_ERROR),
    ],
)
def test_each_outcome_has_its_reason(eight: Harness, answer: object, reason: DropReason) -> None:
    eight.tier.answer = lambda number: answer if number == 1 else None
    eight.store_chain(0, 1)
    eight.run_all()
    assert eight.counts() == (2, 1, {reason: 1}, 0)
    assert eight.pool.usage().num_leases == 0
    eight.store(2, 1)
    eight.tier.answer = lambda number: None
    eight.use(0, 1, 2)
    eight.run_all()
    assert eight.tier.numbers == ({0, 2} if reason in (DropReason.ALREADY_STORED, DropReason.RESET) else {0, 1, 2})


@pytest.mark.bug("CR12")
@pytest.mark.parametrize("error", [OSError, TimeoutError, MemoryError, KeyError, asyncio.CancelledError, SystemExit])
def test_whatever_a_tier_raises_is_an_error_of_the_batch(eight: Harness, error: type[BaseException]) -> None:
    eight.tier.raises = error
    eight.store_chain(0, 1)
    eight.run_all()
    assert eight.counts() == (2, 0, {DropReason.TIER_ERROR: 2}, 0)
    assert eight.pool.usage().num_leases == 0
    eight.tier.raises = None
    eight.use(0, 1)
    eight.run_all()
    assert eight.tier.numbers == {0, 1}


def test_a_tier_that_answers_for_too_few_blocks_has_failed(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight.tier, "write", lambda requests: [WriteOutcome.STORED])
    eight.store_chain(0, 1)
    eight.run_all()
    assert eight.counts() == (2, 0, {DropReason.TIER_ERROR: 2}, 0)
    assert eight.pool.usage().num_leases == 0


def test_an_executor_that_refused_is_asked_again_even_when_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(8, max_blocks=2)
    with monkeypatch.context() as patch:
        patch.setattr(harness.jobs, "try_submit", lambda job, urgent: False)
        harness.store_chain(0, 1)
    assert harness.counts() == (2, 0, {}, 2)
    harness.store(2)
    assert harness.counts()[2] == {DropReason.BACKLOG: 1}
    harness.run_all()
    assert harness.tier.numbers == {0, 1}
    harness.close()


# ---- flush -----------------------------------------------------------------------------------------------------------


def test_a_job_goes_on_itself_where_the_executor_takes_no_successor(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", PAGE_BYTES)
    eight.store_chain(0, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(eight.jobs, "try_submit", lambda job, urgent: False)
        assert eight.run()
    assert eight.tier.batches == [[0], [1], [2]]
    assert (eight.counts(), eight.writer.queued_bytes) == ((3, 3, {}, 0), 0)
    eight.store(3)
    eight.run_all()
    assert eight.tier.numbers == {0, 1, 2, 3}


def test_a_job_that_goes_on_itself_stops_when_the_queue_is_closed(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", PAGE_BYTES)
    eight.store_chain(0, 1, 2)
    eight.tier.while_writing = eight.writer.close
    with monkeypatch.context() as patch:
        patch.setattr(eight.jobs, "try_submit", lambda job, urgent: False)
        assert eight.run()
    assert eight.tier.batches == [[0]]
    assert eight.counts() == (3, 1, {DropReason.CLOSED: 2}, 0)


def test_where_the_executor_took_no_job_at_all_the_next_use_asks_again(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(eight.jobs, "try_submit", lambda job, urgent: False)
        eight.store_chain(0, 1)
    assert len(eight.jobs) == 0
    eight.use(7)
    eight.run_all()
    assert eight.tier.numbers == {0, 1}


# ---- long prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_uses", [1, 2])
def test_a_long_prompt_is_noted_in_stretches_and_written_prefix_first(
    monkeypatch: pytest.MonkeyPatch, min_uses: int
) -> None:
    monkeypatch.setattr(writebehind_module, "NOTED_AT_ONCE", 2)
    harness = Harness(8, min_uses=min_uses)
    harness.tier.answer = lambda number: WriteOutcome.ERROR
    harness.store_chain(*range(7))
    harness.run_all()
    harness.tier.answer = lambda number: None
    harness.tier.batches.clear()
    harness.use(*range(7))
    harness.run_all()
    assert harness.tier.numbers == set(range(7))
    assert harness.tier.write_numbers == list(range(7)), "prefix first, so that none is an orphan"
    harness.close()


def test_of_a_prompt_longer_than_can_be_remembered_the_rest_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind_module, "NOTED_AT_ONCE", 2)
    monkeypatch.setattr(writebehind_module, "MAX_NOTED", 4)
    harness = Harness(8, min_uses=2)
    harness.use(*range(10))
    assert {number_of(key) for key in harness.writer._uses} == set(range(4))
    harness.close()


# ---- resets ----------------------------------------------------------------------------------------------------------


def test_a_reset_drops_what_is_queued_and_forgets_what_was_dropped_and_used() -> None:
    harness = Harness(8, max_blocks=2, min_uses=2)
    harness.use(0, 1, 2, 3)
    harness.store_chain(0, 1, 2, 3)
    assert harness.counts()[3] == 2
    assert harness.writer._dropped
    harness.writer.reset()
    assert harness.counts() == (4, 0, {DropReason.BACKLOG: 1, DropReason.ORPHAN: 1, DropReason.RESET: 2}, 0)
    assert (harness.writer.queued_bytes, harness.pool.usage().num_leases) == (0, 0)
    assert not harness.writer._dropped
    assert not harness.writer._uses
    harness.run_all()
    assert harness.tier.batches == []
    assert harness.writer.flush(1.0) == 0
    harness.use(0)
    assert harness.counts()[0] == 4, "one use of two"
    harness.use(0)
    harness.run_all()
    assert harness.tier.numbers == {0}
    harness.close()


@pytest.mark.parametrize("answer", [None, WriteOutcome.ERROR, WriteOutcome.WITHDRAWN])
def test_a_write_that_a_reset_overtakes_is_not_remembered(answer: WriteOutcome | None) -> None:
    harness = Harness(8, min_uses=2)
    harness.tier.answer = lambda number: answer
    harness.use(0)
    harness.store(0)
    harness.tier.while_writing = harness.writer.reset
    harness.run_all()
    assert not harness.writer._dropped
    assert not harness.writer._uses
    assert harness.counts()[3] == 0
    harness.close()


def test_what_is_leased_while_it_is_reset_is_not_queued(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    lease_blocks = eight.host.lease_blocks

    def and_reset(*args: object) -> object:
        found = lease_blocks(*args)  # type: ignore[arg-type]
        eight.writer.reset()
        return found

    monkeypatch.setattr(eight.host, "lease_blocks", and_reset)
    eight.store(0)
    assert eight.counts() == (1, 0, {DropReason.RESET: 1}, 0)
    assert eight.pool.usage().num_leases == 0


def test_a_flush_asks_an_executor_that_refused_again(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(eight.jobs, "try_submit", lambda job, urgent: False)
        eight.store_chain(0, 1)
    inline = InlineExecutor()
    monkeypatch.setattr(eight.writer, "_executor", inline)
    assert eight.writer.flush(1.0) == 0
    assert eight.tier.numbers == {0, 1}


def test_a_flush_ends_at_its_bound_when_the_device_is_stuck(eight: Harness) -> None:
    """Nothing runs what is queued; the wait for it is the clock's."""
    eight.store_chain(0, 1, 2)
    waits: list[float] = []

    def wait(timeout: float | None = None) -> bool:
        assert timeout is not None
        waits.append(timeout)
        eight.clock.advance(timeout)
        return False

    eight.writer._changed.wait = wait  # type: ignore[method-assign]
    assert eight.writer.flush(0.25) == 3
    assert waits == pytest.approx([0.1, 0.1, 0.05])
    assert eight.writer.flush(0.0) == 3
    assert len(waits) == 3


@pytest.mark.bug("LK05")
@pytest.mark.parametrize("answer", [WriteOutcome.FULL, WriteOutcome.ERROR, WriteOutcome.REFUSED])
def test_a_flush_to_a_tier_that_takes_nothing_ends_and_holds_nothing(answer: WriteOutcome) -> None:
    harness = Harness(8, max_blocks=2, executor=InlineExecutor())
    harness.tier.answer = lambda number: answer
    harness.store_chain(*range(6))
    assert harness.writer.flush(100.0) == 6
    assert harness.clock.now() == 1000.0
    assert len(harness.tier.batches) <= 2 * 6, "each is tried once more, not for ever"
    assert harness.pool.usage().num_leases == 0
    for number in range(10, 18):
        assert harness.store(number)
    harness.close()


@pytest.mark.bug("LK05")
@pytest.mark.parametrize("min_uses", [1, 2])
def test_while_the_tier_is_down_nothing_is_due_again(min_uses: int) -> None:
    harness = Harness(8, min_uses=min_uses, executor=InlineExecutor())
    harness.tier.answer = lambda number: WriteOutcome.REFUSED
    harness.writer._is_available = lambda: False
    harness.store_chain(*range(4))
    if min_uses == 2:
        harness.use(*range(4))
    counts = harness.counts()
    assert (counts[0], counts[3]) == (4, 0)
    for _ in range(3):
        assert harness.writer.flush(100.0) == 4
        harness.use(*range(4))
        assert harness.counts() == counts, "each has been counted"
    harness.forget(1, 3)
    assert harness.writer.flush(100.0) == 2, "what left host memory cannot be written"
    harness.writer._is_available = lambda: True
    harness.tier.answer = lambda number: None
    assert harness.writer.flush(100.0) == 0
    assert {0, 2} >= harness.tier.numbers >= {0}
    harness.close()


def test_a_flush_counts_no_orphan_again_whose_parent_stays_dropped() -> None:
    harness = Harness(12, max_blocks=2, executor=InlineExecutor())
    harness.tier.answer = lambda number: WriteOutcome.ERROR if number == 0 else None
    harness.store_chain(*range(6))
    harness.store_chain(*range(10, 14))
    before = harness.counts()
    assert before[2] == {DropReason.TIER_ERROR: 1, DropReason.ORPHAN: 5}
    for number in range(1, 4):
        assert harness.writer.flush(100.0) == 6
        due, stored, dropped, pending = harness.counts()
        assert (stored, pending, dropped[DropReason.ORPHAN]) == (before[1], 0, 5)
        assert due == before[0] + number, "the first of them, once a flush"
    harness.tier.answer = lambda number: None
    assert harness.writer.flush(100.0) == 0
    assert harness.tier.numbers == {*range(6), *range(10, 14)}
    harness.close()


def test_a_flush_does_not_wait_for_a_clock_that_went_back(eight: Harness) -> None:
    eight.store_chain(0, 1)
    waits: list[float | None] = []

    def wait(timeout: float | None = None) -> bool:
        waits.append(timeout)
        eight.clock.advance(-500.0)
        return False

    eight.writer._changed.wait = wait  # type: ignore[method-assign]
    assert eight.writer.flush(10.0) == 2
    assert len(waits) == 1


def test_a_flush_with_nothing_to_do_returns(eight: Harness) -> None:
    assert eight.writer.flush(0.0) == 0


def test_a_flush_waits_for_the_jobs_of_threads() -> None:
    executor = ThreadExecutor("writes", 8, num_threads=3)
    harness = Harness(16, max_jobs=2, executor=executor)
    go = threading.Event()
    harness.tier.while_writing = lambda: go.wait(SOON_S)
    harness.store_chain(*range(8))
    go.set()
    assert harness.writer.flush(SOON_S) == 0
    assert harness.tier.numbers == set(range(8))
    executor.close(SOON_S)
    harness.close()


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_closing_drops_what_is_queued_and_takes_no_more(eight: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    eight.store_chain(0, 1)
    left = eight.jobs.close(0)
    eight.writer.close()
    eight.writer.close()
    assert eight.counts() == (2, 0, {DropReason.CLOSED: 2}, 0)
    assert (eight.writer.queued_bytes, eight.pool.usage().num_leases) == (0, 0)
    eight.store(2)
    eight.use(0, 1, 2)
    eight.writer.offer([(key_of(0), None)], None)
    assert eight.counts()[0] == 2
    assert eight.writer.flush(1.0) == 0
    for job in left:
        job()
    assert eight.tier.batches == []
    with pytest.raises(Exception, match="closed"):
        eight.pool.lease(0, eight.writer._owner)


def test_a_write_that_outlives_the_close_keeps_its_slot_until_it_returns(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writebehind_module, "WRITE_BYTES", PAGE_BYTES)
    eight.store_chain(0, 1, 2)

    def close() -> None:
        eight.jobs.close(0)
        eight.writer.close()
        assert eight.pool.usage().num_leases == 1
        assert eight.counts() == (3, 0, {DropReason.CLOSED: 2}, 1)

    eight.tier.while_writing = close
    eight.run_all()
    assert eight.counts() == (3, 1, {DropReason.CLOSED: 2}, 0)
    assert eight.pool.usage().num_leases == 0


def test_what_is_offered_while_it_closes_is_dropped_with_its_lease(
    eight: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_blocks = eight.host.lease_blocks

    def and_close(*args: object) -> object:
        found = lease_blocks(*args)  # type: ignore[arg-type]
        eight.writer.close()
        return found

    monkeypatch.setattr(eight.host, "lease_blocks", and_close)
    eight.store(0)
    assert eight.counts() == (1, 0, {DropReason.CLOSED: 1}, 0)
    assert eight.pool.usage().num_leases == 0


def test_integrity_sees_what_does_not_agree(eight: Harness) -> None:
    eight.store(0)
    eight.writer._queued_bytes -= 1
    with pytest.raises(IntegrityError, match="bytes"):
        eight.writer.check_integrity()
    eight.writer._queued_bytes += 1
    eight.writer.check_integrity()


# ---- any order -------------------------------------------------------------------------------------------------------

TREE: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: None, 7: 6}
NUMBERS = st.sampled_from(sorted(TREE))


def path_to(number: int) -> list[int]:
    parent = TREE[number]
    return [*([] if parent is None else path_to(parent)), number]


class WriteBehindMachine(RuleBasedStateMachine):
    """The ledger adds up, leases are those of pending blocks, a flush to a well tier leaves nothing unwritten."""

    @initialize(
        pages=st.integers(2, 12),
        max_blocks=st.integers(0, 4),
        min_uses=st.integers(1, 3),
        max_jobs=st.integers(1, 2),
        queued=st.integers(1, 2),
        scale=st.integers(1, 3),
    )
    def build(self, pages: int, max_blocks: int, min_uses: int, max_jobs: int, queued: int, scale: int) -> None:
        logging.getLogger("kvtier.writebehind").setLevel(logging.CRITICAL)
        self.write_bytes, writebehind_module.WRITE_BYTES = writebehind_module.WRITE_BYTES, 2 * PAGE_BYTES
        self.harness = Harness(pages, max_blocks, min_uses, max_jobs, max_queued=queued)
        self.harness.tier.job_scale = scale
        self.min_uses, self.max_blocks = min_uses, max_blocks
        self.uses: Counter[int] = Counter()
        self.answers: dict[int, WriteOutcome] = {}
        self.harness.tier.answer = self.answers.get

    @rule(number=NUMBERS, came_from=st.sampled_from([None, None, "disk", "another"]))
    def store(self, number: int, came_from: str | None) -> None:
        if self.harness.store(number, TREE[number], came_from):
            self.uses[number] += self.min_uses if came_from == "disk" else 1

    @rule(number=NUMBERS)
    def use(self, number: int) -> None:
        path = path_to(number)
        self.uses.update(path)
        self.harness.use(*path)

    @rule(position=st.integers(0, 3))
    def run_a_job(self, position: int) -> None:
        self.harness.run(position)

    @rule(number=NUMBERS, answer=st.sampled_from([None, *WriteOutcome]))
    def answer(self, number: int, answer: WriteOutcome | None) -> None:
        self.answers.pop(number, None)
        if answer not in (None, WriteOutcome.STORED, WriteOutcome.ALREADY_STORED):
            self.answers[number] = answer

    @rule(raises=st.booleans())
    def raise_at_writes(self, raises: bool) -> None:
        self.harness.tier.raises = asyncio.CancelledError if raises else None

    @rule()
    def reset(self) -> None:
        self.harness.writer.reset()

    @rule(numbers=st.lists(NUMBERS))
    def evict(self, numbers: list[int]) -> None:
        self.harness.forget(*numbers)

    @rule(numbers=st.lists(NUMBERS))
    def evict_below(self, numbers: list[int]) -> None:
        self.harness.tier.remove([key_of(number) for number in numbers])

    def flush(self) -> int:
        def run_or_pass_time(timeout: float | None = None) -> bool:
            if not self.harness.jobs.run_next():
                self.harness.clock.advance(timeout or 0.0)
            return True

        self.harness.writer._changed.wait = run_or_pass_time  # type: ignore[method-assign]
        return self.harness.writer.flush(100.0)

    @rule()
    def flush_whatever_the_tier_does(self) -> None:
        start = self.harness.clock.now()
        left = self.flush()
        assert self.harness.clock.now() == start, "it ended for lack of work, not of time"
        assert left == sum(self.harness.host.contains(list(self.harness.writer._dropped)))

    @precondition(lambda self: self.min_uses == 1 and self.max_blocks)
    @rule()
    def flush_to_a_well_tier(self) -> None:
        self.answers.clear()
        self.harness.tier.raises = None
        assert self.flush() == 0
        assert self.harness.pool.usage().num_leases == 0

    @invariant()
    def agrees(self) -> None:
        harness = self.harness
        harness.check()
        due, stored, dropped, pending = harness.counts()
        assert due == stored + sum(dropped.values()) + pending
        assert harness.writer._owner.num_leases == pending
        assert harness.writer.queued_bytes == pending * PAGE_BYTES
        assert pending <= self.max_blocks + writebehind_module.ENQUEUED_AT_ONCE
        assert harness.pool.usage().num_leases == pending, "nothing but what is pending is leased"
        for number in harness.tier.num_written:
            assert self.uses[number] >= self.min_uses
        assert harness.tier.numbers <= set(TREE)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()
            writebehind_module.WRITE_BYTES = self.write_bytes
            logging.getLogger("kvtier.writebehind").setLevel(logging.NOTSET)


TestWriteBehindMachine = WriteBehindMachine.TestCase
TestWriteBehindMachine.settings = settings(max_examples=80, stateful_step_count=40)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.bug("PF05")
def test_several_threads_store_while_several_jobs_write_and_each_block_is_written_once() -> None:
    executor = ThreadExecutor("writes", 100, num_threads=3)
    harness = Harness(32, max_blocks=24, max_jobs=3, executor=executor)
    writer, host, pool = harness.writer, harness.host, harness.pool

    def work(seed: int) -> None:
        with pool.owner(str(seed)) as owner:
            for turn in range(100):
                number = (seed * 7 + turn) % 16
                parent = name(number - 1) if number % 4 else None
                reservation = host.reserve(SPACE, name(number), parent, PAGE_BYTES, owner)
                if isinstance(reservation, Reservation):
                    reservation.lease.view[:] = content(number)
                    host.commit([reservation])
                writer.note_use(SPACE, [name(number // 4 * 4 + i) for i in range(4)], None)
                if turn % 8 == seed:
                    host.remove([key_of(number)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    harness.clock.advance(1.0)
    assert writer.flush(SOON_S) == 0
    executor.close(SOON_S)
    assert set(harness.tier.num_written.values()) == {1}
    assert pool.usage().num_leases == 0
    harness.close()
