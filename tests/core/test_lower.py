"""A lower tier as the store runs it: whether it may be asked, and ends of its calls that come late, badly or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier import lower as lower_module
from kvtier import writebehind as writebehind_module
from kvtier.config import DiskSettings, load_settings
from kvtier.errors import ConfigError, TierError
from kvtier.executor import ThreadExecutor
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.lower import LowerTier
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.opened import open_disk
from kvtier.pool import HostPool
from kvtier.reasons import DropReason
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.testing.files import Fault, FaultyFiles
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Reservation
from kvtier.tiers.throttled import ThrottledTier

SPACE = b"s" * 16
LATE_S = 3.0
MAX_AGE_S = 60.0


def name(number: int) -> BlockDigest:
    return BlockDigest(b"%032d" % number)


def content(number: int) -> bytes:
    return b"%016d" % number * (PAGE_BYTES // 16)


class Harness:
    """A host tier of some pages over a disk tier whose files and clock are under control."""

    def __init__(self, path: Path, num_pages: int = 16, *, threads: bool = False, **settings: Any) -> None:
        overrides = {"disk.path": [str(path)], "disk.size": "4MiB", "disk.min_free": 1}
        overrides |= {f"disk.{key}": value for key, value in settings.items()}
        self.settings: DiskSettings = load_settings(env={}, overrides=overrides).disk
        self.clock = FakeClock()
        self.files = FaultyFiles()
        self.pool = HostPool(PoolMemory(num_pages * PAGE_BYTES, touch=False), PAGE_BYTES)
        self.host = HostTier(self.pool)
        self.jobs = ManualExecutor()
        disk = open_disk(self.settings, self.clock, self.files)
        executor = None if threads else self.jobs
        self.lower = LowerTier(disk, self.host, self.pool, self.clock, MAX_AGE_S, executor)
        self.owner = self.pool.owner("test")

    def put(self, *numbers: int) -> None:
        """By an engine."""
        for number in numbers:
            reserved = self.host.reserve(SPACE, name(number), None, PAGE_BYTES, self.owner)
            assert isinstance(reserved, Reservation)
            reserved.lease.view[:] = content(number)
            assert self.host.commit([reserved]) == [True]

    def read(self, number: int) -> ReadOutcome:
        buffer = bytearray(PAGE_BYTES)
        (outcome,) = self.lower.tier.read([ReadRequest(make_key(SPACE, name(number)), memoryview(buffer))])
        assert outcome is not ReadOutcome.OK or buffer == content(number)
        return outcome

    def write(self, number: int) -> WriteOutcome:
        return self.lower.tier.write([WriteRequest(make_key(SPACE, name(number)), None, memoryview(content(number)))])[
            0
        ]

    def close(self) -> None:
        self.files.heal()
        self.lower.check_integrity()
        self.lower.close(5.0)
        self.host.close()
        self.pool.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    with ExitStack() as stack:

        def build(*args: Any, **kwargs: Any) -> Harness:
            harness = Harness(tmp_path / "disk", *args, **kwargs)
            stack.callback(harness.close)
            return harness

        yield build


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# ---- the way down ----------------------------------------------------------------------------------------------------


def test_what_comes_to_host_memory_is_written_and_found(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.put(1, 2, 3)
    assert harness.lower.stats().queued_bytes == 3 * PAGE_BYTES
    assert not harness.lower.holds(SPACE, name(1))
    harness.jobs.run_all()
    assert harness.lower.flush(0.0) == 0
    assert [harness.lower.holds(SPACE, name(n)) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert harness.read(2) is ReadOutcome.OK
    stats = harness.lower.stats()
    assert (stats.blocks, stats.writes, stats.reads) == (3, {"stored": 3}, {"ok": 1})
    assert (stats.written_bytes, stats.read_bytes) == (3 * PAGE_BYTES, PAGE_BYTES)
    assert (stats.queued_bytes, stats.ledger.pending, stats.available) == (0, 0, 1)
    assert stats.used_bytes <= stats.capacity_bytes == 4 << 20
    assert harness.pool.usage().num_leases == 0


def test_little_waits_and_what_found_no_room_is_written_by_a_flush(make: Callable[..., Harness]) -> None:
    harness = make(16)
    harness.put(*range(12))
    assert harness.lower.stats().queued_bytes == 16 * PAGE_BYTES // 4
    for _ in range(5):
        harness.jobs.run_all()
        harness.lower.flush(0.0)
    assert harness.lower.flush(0.0) == 0
    assert harness.lower.stats().blocks == 12


def test_as_much_may_wait_as_an_engines_pool_holds_at_once(tmp_path: Path) -> None:
    """A pool of a GPU turns over in one step: where a block of a prompt finds no room, all behind it are lost too."""
    block_bytes, gibibyte = 40 << 20, 1 << 30
    overrides = {"disk.path": [str(tmp_path)], "disk.size": "4MiB", "disk.min_free": 1}
    settings: DiskSettings = load_settings(env={}, overrides=overrides).disk
    pool = HostPool(PoolMemory(8 * gibibyte, touch=False), 64 << 20)
    host, clock = HostTier(pool), FakeClock()
    lower = LowerTier(open_disk(settings, clock), host, pool, clock, MAX_AGE_S, ManualExecutor())
    owner = pool.owner("test")
    for number in range(2 * gibibyte // block_bytes):
        parent = name(number - 1) if number else None
        reserved = host.reserve(SPACE, name(number), parent, block_bytes, owner)
        assert isinstance(reserved, Reservation)
        assert host.commit([reserved]) == [True]
    stats = lower.stats()
    assert (stats.queued_bytes, stats.ledger.dropped) == (51 * block_bytes, {})
    lower.close(5.0)
    host.close()
    pool.close()


def test_a_use_is_told_to_the_tier_off_the_engines_thread(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.put(1)
    harness.jobs.run_all()
    harness.lower.note_use(SPACE, [], None)
    assert len(harness.jobs) == 0, "nothing to say"
    harness.lower.note_use(SPACE, [name(1), name(2)], None)
    assert len(harness.jobs) == 1
    harness.jobs.run_all()
    assert isinstance(disk := harness.lower.device, DiskTier)
    assert disk._catalog._segments[next(iter(disk._catalog._segments))].used


@pytest.mark.bug("PF13")
def test_a_block_is_written_at_the_use_that_is_set(make: Callable[..., Harness]) -> None:
    harness = make(min_uses=3)
    harness.put(1, 2)
    for _ in range(2):
        harness.jobs.run_all()
        assert harness.lower.stats().blocks == 0
        harness.lower.note_use(SPACE, [name(1)], None)
    harness.jobs.run_all()
    assert harness.lower.holds(SPACE, name(1))
    assert not harness.lower.holds(SPACE, name(2))
    assert harness.lower.flush(0.0) == 0, "the other is not due"


def test_a_rate_of_writing_is_kept_and_reads_pass(make: Callable[..., Harness]) -> None:
    harness = make(max_write_rate=PAGE_BYTES)
    throttle = harness.lower._watched.inner
    assert isinstance(throttle, ThrottledTier)
    waits: list[float] = []
    throttle._wait = waits.append
    for number in range(4):
        assert harness.write(number) is WriteOutcome.STORED
    assert harness.read(3) is ReadOutcome.OK
    assert waits == pytest.approx([0.75, 1.75, 2.75])


def test_a_rate_may_change_where_there_is_one(make: Callable[..., Harness]) -> None:
    harness = make(max_write_rate=PAGE_BYTES)
    throttle = harness.lower._watched.inner
    assert isinstance(throttle, ThrottledTier)
    waits: list[float] = []
    throttle._wait = waits.append
    assert harness.lower.set_max_write_rate("off")
    for number in range(4):
        assert harness.write(number) is WriteOutcome.STORED
    assert sum(waits) < 1e-6


def test_a_store_without_a_rate_has_no_throttle(make: Callable[..., Harness]) -> None:
    lower = make().lower
    assert not isinstance(lower._watched.inner, ThrottledTier)
    assert not lower.set_max_write_rate(1)


# ---- whether it may be asked -----------------------------------------------------------------------------------------


@pytest.mark.bug("HS16")
def test_after_failures_it_is_left_alone_for_a_while_and_then_probed(make: Callable[..., Harness]) -> None:
    harness = make()
    assert harness.write(1) is WriteOutcome.STORED
    harness.files.inject(Fault.WRITE_ERROR)
    for number in range(2, 5):
        harness.clock.advance(10.0)
        assert harness.write(number) is WriteOutcome.ERROR
    assert not harness.lower.is_available
    assert (harness.lower.stats().available, harness.lower.stats().breaker_opened) == (0, 1)
    assert harness.lower.holds(SPACE, name(1)), "what it has is known all the same"
    assert harness.read(1) is ReadOutcome.REFUSED
    assert harness.lower.stats().breaker_refused == 1
    harness.files.heal()
    harness.clock.advance(60.0)
    assert harness.lower.is_available
    assert harness.read(1) is ReadOutcome.OK
    assert harness.lower.stats().available == 1


@pytest.mark.bug("HS14", "HS16")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_while_every_thread_is_away_it_is_not_asked_however_long_that_takes(
    make: Callable[..., Harness], num_threads: int
) -> None:
    harness = make(threads=True)
    harness.lower._num_threads = num_threads
    assert harness.write(1) is WriteOutcome.STORED
    harness.files.hold("read")
    readers = []
    for number in range(1, num_threads + 1):
        assert harness.lower.is_available
        readers.append(in_thread(lambda: harness.read(1)))
        harness.files.wait_stalled()
        harness.clock.advance(5.1)  # overdue
        assert not harness.lower.is_available
        harness.clock.advance(600.0)  # a probe would be let through, if there were a thread to make it
        assert harness.lower.is_available == (number < num_threads)
    for _ in range(50):
        harness.clock.advance(60.0)
        assert not harness.lower.is_available
        assert harness.lower.stats().available == 0
    assert harness.lower.stats().breaker_opened == 1
    harness.files.heal()
    for reader in readers:
        reader.join(10.0)
    harness.clock.advance(60.0)
    assert harness.lower.is_available
    assert harness.read(1) is ReadOutcome.OK


# ---- epochs ----------------------------------------------------------------------------------------------------------


def test_an_epoch_is_begun_on_a_thread_of_the_tier(make: Callable[..., Harness]) -> None:
    harness = make(threads=True)
    harness.put(1, 2)
    assert harness.lower.flush(20.0) == 0
    harness.lower.start_epoch(7)
    assert harness.lower.epoch == 7
    assert not harness.lower.holds(SPACE, name(1))
    with pytest.raises(TierError, match=r"could not remember the reset.*in epoch 7"):
        harness.lower.start_epoch(3)
    assert harness.lower.epoch == 7


@pytest.mark.bug("WR23")
def test_an_epoch_that_no_thread_begins_is_an_error_in_time(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_module, "RESET_TIMEOUT_S", 0.05)
    harness = make()
    begun = time.monotonic()
    with pytest.raises(TierError, match=r"did not remember the reset within 0\.05 s"):
        harness.lower.start_epoch(1)
    assert time.monotonic() - begun < LATE_S
    harness.jobs.run_all()
    assert harness.lower.epoch == 1, "late, and right"
    harness.jobs.close(0.0)
    with pytest.raises(TierError, match="did not remember"):
        harness.lower.start_epoch(2)


def test_a_reset_drops_what_is_queued(make: Callable[..., Harness]) -> None:
    harness = make(threads=True)
    harness.files.hold("write")
    harness.put(*range(4))
    harness.files.wait_stalled()
    harness.files.heal()
    harness.lower.start_epoch(1)
    assert harness.lower.flush(20.0) == 0
    ledger = harness.lower.stats().ledger
    assert set(ledger.dropped) <= {DropReason.RESET}
    assert ledger.due == ledger.stored + sum(ledger.dropped.values()) == 4
    assert not any(harness.lower.holds(SPACE, name(number)) for number in range(4))
    assert harness.lower.stats().available == 1, "a reset is no failure of the device"


def test_a_reset_that_meets_a_close_ends_with_it(make: Callable[..., Harness]) -> None:
    harness = make()
    ended = threading.Event()

    def reset() -> None:
        with pytest.raises(TierError, match="did not remember"):
            harness.lower.start_epoch(1)
        ended.set()

    resetting = in_thread(reset)
    harness.lower.close(0.0)
    assert ended.wait(LATE_S)
    resetting.join()


# ---- uses ------------------------------------------------------------------------------------------------------------


def test_uses_wait_as_one_job_and_the_oldest_are_forgotten(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.put(1, 2)
    harness.jobs.run_all()
    touched: list[Sequence[Key]] = []
    harness.lower.tier.touch = touched.append  # type: ignore[method-assign,assignment]
    for _ in range(1000):
        harness.lower.note_use(SPACE, [name(1)], None)
    harness.lower.note_use(SPACE, [name(2)], None)
    assert len(harness.jobs) == 1
    harness.jobs.run_all()
    assert len(touched) == lower_module.MAX_USES
    assert touched[-1] == [make_key(SPACE, name(2))]
    harness.lower.note_use(SPACE, [name(1)], None)
    assert len(harness.jobs) == 1


def test_the_engines_thread_looks_at_no_block_of_a_prompt(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(min_uses=2)
    harness.put(*range(4))
    harness.jobs.run_all()
    made: list[bytes] = []

    def counting(namespace: bytes, digest: bytes) -> Key:
        made.append(digest)
        return make_key(namespace, digest)

    with monkeypatch.context() as patch:
        for module in (lower_module, writebehind_module):
            patch.setattr(module, "make_key", counting)
        harness.lower.note_use(SPACE, [name(number) for number in range(4)], None)
    assert made == []
    assert len(harness.jobs) == 1
    harness.jobs.run_all()
    assert all(harness.lower.holds(SPACE, name(number)) for number in range(4)), "its second use"


def test_uses_that_the_executor_refused_are_noted_with_the_next(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(min_uses=2)
    harness.put(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(harness.jobs, "try_submit", lambda job, urgent: False)
        harness.lower.note_use(SPACE, [name(1)], None)
    harness.lower.note_use(SPACE, [name(2)], None)
    harness.jobs.run_all()
    assert [harness.lower.holds(SPACE, name(number)) for number in (1, 2)] == [True, True]


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_an_executor_that_is_empty_is_used_all_the_same(make: Callable[..., Harness]) -> None:
    harness = make()
    assert len(harness.jobs) == 0
    assert harness.lower.executor is harness.jobs


def test_the_threads_are_as_many_as_set_and_end_with_it(tmp_path: Path) -> None:
    before = threading.active_count()
    harness = Harness(tmp_path / "disk", threads=True)
    executor = harness.lower.executor
    assert isinstance(executor, ThreadExecutor)
    assert harness.settings.threads == 4
    assert threading.active_count() == before + 5, "one more, which never writes"
    harness.close()
    assert executor.idle


def test_what_is_queued_at_close_is_dropped_and_counted(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.put(1, 2)
    harness.lower.close(0.0)
    ledger = harness.lower.stats().ledger
    assert (ledger.due, sum(ledger.dropped.values()), ledger.pending) == (2, 2, 0)
    assert harness.pool.usage().num_leases == 0
    harness.put(3)
    assert harness.lower.stats().ledger.due == 2
    harness.lower.close(0.0)


def test_a_device_that_hangs_at_close_is_left_behind_in_time(
    make: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = make(threads=True)
    harness.put(1)
    assert harness.lower.flush(20.0) == 0
    harness.files.hold("write")  # the open segment's footer is to be written
    begun = time.monotonic()
    harness.lower.close(0.1)
    assert time.monotonic() - begun < LATE_S
    assert "the disk tier was not closed within 0.1 s: its device hangs" in caplog.messages


def test_a_rate_holds_up_no_close(make: Callable[..., Harness]) -> None:
    harness = make(threads=True, max_write_rate=1)
    harness.put(1, 2, 3, 4)
    begun = time.monotonic()
    harness.lower.close(20.0)
    assert time.monotonic() - begun < LATE_S


def test_a_directory_that_cannot_be_used_is_an_error_of_its_setting(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    settings = load_settings(env={}, overrides={"disk.path": [str(tmp_path / "disk")], "disk.size": "4MiB"}).disk
    with pytest.raises(ConfigError, match=r"disk\.path"):
        open_disk(settings, FakeClock())


def test_the_settings_reach_the_tier(tmp_path: Path) -> None:
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    overrides = {"disk.path": paths, "disk.size": "8MiB", "disk.min_free": 1, "disk.codec": "lz4"}
    disk = open_disk(load_settings(env={}, overrides=overrides).disk, FakeClock()).tier
    assert isinstance(disk, DiskTier)
    try:
        snapshot = disk.snapshot()
        assert sorted(snapshot.mode) == paths
        assert snapshot.capacity_bytes == 8 << 20
        assert disk._codec.name.lower() == "lz4"
    finally:
        disk.close()
