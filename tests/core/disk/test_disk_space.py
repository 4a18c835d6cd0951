"""Bytes on disk: the cap, the floor, full file systems, and what eviction keeps."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.files import Fault
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome
from kvtier.tiers.disk.volume import READMIT_SHARE

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig

PAGE = 4096
SEGMENT = 64 << 10
PER_SEGMENT = 6  # blocks of a page, each with its header
MB = 1000 * 1000
HIT, MISS, DAMAGED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.DAMAGED
STORED, FULL = WriteOutcome.STORED, WriteOutcome.FULL


# ---- the cap ---------------------------------------------------------------------------------------------------------


@pytest.mark.bug("AC06")
@pytest.mark.parametrize("directories", [1, 3])
def test_the_cap_holds_for_real_bytes(rig: DiskRig, tmp_path: Path, directories: int) -> None:
    """30 MB into 10 MB; then a smaller cap over what is there, and a larger one, and a smaller one again."""
    paths = [tmp_path / str(number) for number in range(directories)]
    nbytes, name = 100_000, 0
    for capacity, close in ((10 * MB, True), (6 * MB, False), (12 * MB, True), (4 * MB, True)):
        tier = rig.open(*paths, capacity=capacity, segment_bytes=None)
        assert rig.real_bytes(*paths) <= capacity
        for _ in range(30 * MB // nbytes // 2):
            assert rig.put(tier, name, name + 1, nbytes=nbytes) == [STORED, STORED]
            name += 2
            used = rig.real_bytes(*paths)
            assert used == tier.usage().used_bytes <= capacity
        tier.check_integrity()
        found = rig.held(tier, range(name))
        assert rig.get(tier, *found, nbytes=nbytes) == [HIT] * len(found)
        assert len(found) * nbytes > capacity // 4
        assert tier.snapshot().evicted_blocks >= 300 - len(found)
        tier.close() if close else rig.crash(tier)
        assert rig.real_bytes(*paths) <= capacity


@pytest.mark.bug("AC06")
def test_a_smaller_cap_holds_before_anything_is_written(rig: DiskRig) -> None:
    tier = rig.open(capacity=2 << 20)
    for name in range(150):
        rig.put(tier, name)
    tier.close()
    written: list[int] = []
    real = rig.files.pwritev

    def pwritev(fd: int, vectors: list[memoryview], offset: int) -> int:
        written.append(rig.real_bytes())
        return real(fd, vectors, offset)

    rig.files.pwritev = pwritev  # type: ignore[method-assign,assignment]
    again = rig.open(capacity=1 << 20)
    assert written
    assert max(written) <= 1 << 20
    newest = rig.held(again, range(150))
    assert newest == list(range(150 - len(newest), 150))
    assert newest


@pytest.mark.parametrize(("capacity", "segment"), [(8 << 30, 256 << 20), (1 << 30, 1 << 26), (64 << 20, 8 << 20)])
def test_the_default_segment_follows_from_the_capacity(rig: DiskRig, capacity: int, segment: int) -> None:
    tier = rig.open(capacity=capacity, segment_bytes=None)
    rig.put(tier, "a")
    (file,) = rig.segments()
    assert 0.98 * segment <= file.stat().st_size <= segment
    assert file.stat().st_size % PAGE == 0


def test_a_block_longer_than_a_segment_is_refused_and_costs_nothing(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(12))
    longest = SEGMENT - 4 * PAGE
    assert rig.put(tier, "too long", nbytes=longest + 1) == [FULL]
    assert rig.held(tier, range(12)) == list(range(12))
    assert rig.put(tier, "longest", nbytes=longest) == [STORED]
    assert rig.get(tier, "longest", nbytes=longest) == [HIT]


# ---- eviction --------------------------------------------------------------------------------------------------------


def test_the_oldest_segment_goes_first(rig: DiskRig) -> None:
    tier = rig.open()
    for name in range(60):
        rig.put(tier, name)
        held = rig.held(tier, range(60))
        assert held == list(range(held[0], name + 1))
        assert not held[0] % PER_SEGMENT


def test_used_blocks_stay_once_for_each_use(rig: DiskRig) -> None:
    """Segments of 1 MiB: 8 % are 20 frames of a page."""
    tier = rig.open(capacity=6 << 20, segment_bytes=1 << 20)
    tier.check_integrity()

    def fill(start: int, number: int) -> None:
        for name in range(start, start + number, 10):
            rig.put(tier, *range(name, name + 10))

    fill(0, 100)
    used = list(range(0, 60, 2))
    for name in used:
        rig.get(tier, name)
    tier.touch([rig.key(name) for name in (1, 3)])
    budget = int(READMIT_SHARE * (1 << 20)) // (2 * PAGE)
    kept = sorted([1, 3, *used[-(budget - 2) :]])
    fill(1000, 600)
    assert rig.held(tier, range(100)) == kept
    assert tier.snapshot().readmitted_blocks == len(kept)
    tier.check_integrity()
    assert rig.get(tier, 3, 58) == [HIT, HIT]
    fill(2000, 700)
    assert rig.held(tier, range(100)) == [3, 58]
    fill(3000, 700)
    assert rig.held(tier, range(100)) == []
    counts = tier.snapshot()
    assert counts.written_bytes < 1.3 * counts.accepted_bytes * 2


def test_a_damaged_block_is_not_kept(rig: DiskRig) -> None:
    tier = rig.open(capacity=6 << 20, segment_bytes=1 << 20)
    rig.put(tier, *range(10))
    rig.get(tier, 3, 4)
    file, at = rig.find(3)
    rig.flip(file, at + PAGE + 100)
    for name in range(1000, 1700):
        rig.put(tier, name)
    assert rig.held(tier, range(10)) == [4]
    assert rig.get(tier, 4) == [HIT]
    assert tier.snapshot().damaged == 1


@pytest.mark.bug("WR22")
def test_a_reader_keeps_its_segment(rig: DiskRig) -> None:
    """A read stalls while everything else is evicted and written over: it gives the old bytes."""
    tier = rig.open()
    rig.put(tier, "old")
    rig.files.hold("read")
    outcome: list[ReadOutcome] = []
    reader = threading.Thread(target=lambda: outcome.extend(rig.get(tier, "old")))
    reader.start()
    rig.files.wait_stalled()
    for name in range(100):
        assert rig.put(tier, name) == [STORED]
    tier.check_integrity()
    rig.files.release("read")
    reader.join()
    assert outcome == [HIT]
    for name in range(200, 300):
        assert rig.put(tier, name) == [STORED]
    assert rig.held(tier, ["old"]) == []


@pytest.mark.bug("WR22")
def test_a_reader_that_comes_while_blocks_are_copied_keeps_the_segment(rig: DiskRig) -> None:
    """Whether anybody reads is asked again in the moment in which the blocks are forgotten."""
    tier = rig.open()
    rig.put(tier, *range(2 * PER_SEGMENT))
    catalog = tier._catalog
    oldest = catalog.segments_of(0)[0]
    outcomes = [MISS]
    frames = catalog.pin([ReadRequest(rig.key(0), memoryview(bytearray(PAGE)))], outcomes)
    assert not catalog.drop(oldest)
    assert rig.held(tier, [0]) == [0]
    frames[0].outcome = HIT
    catalog.settle(frames, outcomes)
    assert outcomes == [HIT]
    assert catalog.drop(oldest)
    assert rig.held(tier, range(12)) == list(range(6, 12))


def test_with_every_segment_in_use_nothing_changes(rig: DiskRig) -> None:
    tier = rig.open()
    for name in range(60):
        rig.put(tier, name)
    held = rig.held(tier, range(60))
    rig.files.hold("read")
    readers = [threading.Thread(target=rig.get, args=(tier, name)) for name in held[::PER_SEGMENT]]
    for reader in readers:
        reader.start()
    rig.files.wait_stalled(len(readers))
    outcomes = [rig.put(tier, name)[0] for name in range(100, 100 + 4 * PER_SEGMENT)]
    assert outcomes[-1] is FULL
    stored = outcomes.count(STORED)
    assert outcomes == [STORED] * stored + [FULL] * (len(outcomes) - stored)
    assert rig.held(tier, held) == held
    tier.check_integrity()
    rig.files.release("read")
    for reader in readers:
        reader.join()
    assert [rig.put(tier, name)[0] for name in range(200, 230)] == [STORED] * 30
    tier.check_integrity()


# ---- the floor and full file systems ---------------------------------------------------------------------------------


def test_the_floor_recycles_instead_of_growing(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10 * SEGMENT
    monkeypatch.setattr(
        rig.files, "free_bytes", lambda directory: free - sum(file.stat().st_size for file in rig.segments())
    )
    tier = rig.open(capacity=4 << 20, min_free_bytes=6 * SEGMENT)
    for name in range(100):
        assert rig.put(tier, name) == [STORED]
    assert len(rig.segments()) == 4
    assert rig.held(tier, range(100))
    tier.check_integrity()


def test_without_room_for_any_segment_writes_are_refused(rig: DiskRig) -> None:
    tier = rig.open(min_free_bytes=1 << 60)
    assert rig.put(tier, "a", "b") == [FULL, FULL]
    assert rig.segments() == []


@pytest.mark.parametrize("fault", [Fault.FULL_ON_ALLOCATE, Fault.FULL_ON_WRITE])
def test_a_full_file_system_is_left_alone_for_a_second(
    rig: DiskRig, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no segment can be evicted: the only one is open."""
    tier = rig.open(capacity=4 << 20)
    rig.put(tier, *range(3))
    rig.files.inject(fault, where="segment-")
    names = iter(range(100, 200))
    while rig.put(tier, next(names)) == [STORED]:
        pass
    struck = rig.files.counts[fault]
    assert [rig.put(tier, next(names)) for _ in range(20)] == [[FULL]] * 20
    assert rig.files.counts[fault] == struck
    (reason,) = tier.snapshot().read_only.values()
    assert reason is not None
    assert "No space left" in reason
    assert rig.get(tier, *range(3)) == [HIT] * 3
    rig.clock.advance(1.5)
    rig.put(tier, "probing")  # may still fit the open segment, if only the next could not be allocated
    assert rig.files.counts[fault] == struck + 1
    rig.files.heal()
    assert rig.put(tier, "a") == [FULL]
    rig.clock.advance(1.5)
    assert rig.put(tier, "a", "b") == [STORED, STORED]
    assert set(tier.snapshot().read_only.values()) == {None}
    assert rig.get(tier, "a", "b", 0) == [HIT] * 3
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
    tier.check_integrity()


def test_a_file_system_without_room_for_more_segments_recycles(rig: DiskRig) -> None:
    tier = rig.open(capacity=4 << 20)
    rig.put(tier, *range(60))
    files = len(rig.segments())
    rig.files.inject(Fault.FULL_ON_ALLOCATE)
    for name in range(100, 200):
        assert rig.put(tier, name) == [STORED]
        rig.clock.advance(0.1)
    assert rig.files.counts[Fault.FULL_ON_ALLOCATE] <= 11
    assert len(rig.segments()) == files
    assert set(tier.snapshot().read_only.values()) == {None}
    tier.check_integrity()


@pytest.mark.parametrize("fault", [Fault.FULL_ON_ALLOCATE, Fault.NO_DESCRIPTOR])
def test_segments_of_another_length_outlive_a_file_that_cannot_be_made(rig: DiskRig, fault: Fault) -> None:
    tier = rig.open(capacity=2 << 20)
    rig.put(tier, *range(150))
    tier.close()
    again = rig.open(capacity=2 << 20, segment_bytes=2 * SEGMENT)
    before = again.snapshot().num_segments
    rig.files.inject(fault, where=".tmp")
    for name in range(200, 220):
        rig.put(again, name)
    assert again.snapshot().num_segments >= before - 1
    rig.files.heal()
    rig.clock.advance(10)
    assert rig.put(again, "a") == [STORED]
    again.check_integrity()


@pytest.mark.parametrize(
    "name", ["segment-99999999999999999.kvt", "segment-" + "9" * 246, "segment-9999999999999999.kvt"]
)
def test_names_of_others_do_not_become_ours(rig: DiskRig, name: str) -> None:
    rig.path.mkdir(mode=0o700)
    (rig.path / name).write_bytes(b"x")
    (rig.path / "segment-00000003.kvt").mkdir()
    for number in range(3):
        tier = rig.open()
        assert tier.usage().num_blocks == (number > 0) * len(rig.held(tier, range(100)))
        assert (number == 0) is not bool(rig.held(tier, range(100)))
        for each in range(20 * number, 20 * number + 20):
            assert rig.put(tier, each)[0] in (STORED, WriteOutcome.ALREADY_STORED)
        tier.check_integrity()
        tier.close()
        assert sum(file.lstat().st_blocks * 512 for file in rig.segments() if file.is_file()) <= 320 << 10
    assert (rig.path / "segment-00000003.kvt").is_dir()


def test_a_temporary_file_that_stays_counts_and_stops_others(rig: DiskRig) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.files.inject(Fault.FULL_ON_ALLOCATE, times=1)
    rig.files.inject(Fault.STUCK, where=".tmp")
    assert rig.put(tier, "a") == [FULL]
    for _ in range(5):
        rig.clock.advance(2)
        assert rig.put(tier, "a") == [FULL]
    assert len(list(rig.path.glob("*.tmp"))) == 1
    assert tier.usage().used_bytes == rig.real_bytes()
    rig.files.heal()
    rig.clock.advance(2)
    assert rig.put(tier, "a") == [STORED]
    assert not list(rig.path.glob("*.tmp"))
    tier.check_integrity()


@pytest.mark.parametrize("fault", [Fault.FULL_ON_WRITE, Fault.WRITE_ERROR])
def test_a_clock_that_goes_back_ends_a_pause(rig: DiskRig, fault: Fault) -> None:
    tier = rig.open()
    rig.put(tier, "a")
    rig.files.inject(fault, times=1)
    assert rig.put(tier, "b") != [STORED]
    rig.clock._now -= 1000
    assert not tier._volumes[0].allotment.is_cooling
    assert rig.put(tier, "b") == [STORED]


def test_counting_asks_the_system_for_nothing(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = rig.open(capacity=1 << 20)
    rig.put(tier, *range(30))
    used = rig.real_bytes()

    def refuse(*_: object) -> object:
        raise AssertionError("a system call")

    for name in ("stat", "open", "free_bytes", "preadv"):
        monkeypatch.setattr(rig.files, name, refuse)
    assert tier.usage().used_bytes == tier.snapshot().used_bytes == used


def test_while_one_directory_is_full_the_others_take_the_blocks(rig: DiskRig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tier = rig.open(rig.path, other, capacity=4 << 20)
    rig.files.inject(Fault.FULL_ON_ALLOCATE, where="/cache/")
    for name in range(30):
        assert rig.put(tier, name) == [STORED]
    assert rig.segments() == []
    reasons = tier.snapshot().read_only
    assert reasons[str(rig.path)] is not None
    assert reasons[str(other)] is None


def test_a_floor_that_leaves_no_room_is_told_at_start_and_in_the_status(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    tier = rig.open(min_free_bytes=1 << 50)
    (told,) = [record.getMessage() for record in caplog.records if "disk.min_free" in record.getMessage()]
    assert "nothing can be stored there" in told
    assert rig.put(tier, "a") == [FULL]
    (reason,) = tier.snapshot().read_only.values()
    assert reason is not None
    assert "disk.min_free keeps 1125899906842624" in reason


def test_a_capacity_beyond_the_file_system_is_told_and_one_within_is_not(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.open(capacity=1 << 50, segment_bytes=None).close()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "disk.size" in told
    assert "nothing can be stored" not in told
    caplog.clear()
    tier = rig.open()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert rig.put(tier, "a") == [STORED]


def test_a_block_that_no_segment_can_hold_is_refused_with_both_sizes(rig: DiskRig) -> None:
    tier = rig.open()
    tier.check_block(9000)
    with pytest.raises(ConfigError, match=rf"disk\.size = \d+ .*takes {(1 << 20) + PAGE}"):
        tier.check_block(1 << 20)


@pytest.fixture
def small_disk(rig: DiskRig) -> Iterator[Path]:
    rig.path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(rig.path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield rig.path
    rig.close()
    subprocess.run(["umount", str(rig.path)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(PAGE)):
            pass


@pytest.mark.parametrize("sparse", [False, True])
def test_a_small_disk_fills_up_and_gets_room_again(rig: DiskRig, small_disk: Path, sparse: bool) -> None:
    """With `sparse` the file system cannot preallocate, so that writes meet the end of it."""
    if sparse:
        rig.files.allocate = os.ftruncate  # type: ignore[method-assign,assignment]
    tier = rig.open(capacity=64 << 20, segment_bytes=1 << 20)
    assert rig.put(tier, *range(10)) == [STORED] * 10
    fill_up(small_disk / "ballast")
    outcomes = [rig.put(tier, name, nbytes=5 * PAGE)[0] for name in range(100, 200)]
    assert set(outcomes) == ({FULL} if sparse else {STORED, FULL})
    assert rig.get(tier, *range(10)) == [HIT] * 10
    tier.check_integrity()
    (small_disk / "ballast").unlink()
    rig.clock.advance(2)
    assert [rig.put(tier, name, nbytes=5 * PAGE)[0] for name in range(100, 110)] == [
        STORED if outcome is FULL else WriteOutcome.ALREADY_STORED for outcome in outcomes[:10]
    ]
    assert rig.get(tier, *range(100, 110), nbytes=5 * PAGE) == [HIT] * 10
    tier.check_integrity()


def test_a_tier_opens_on_a_full_disk(rig: DiskRig, small_disk: Path) -> None:
    tier = rig.open(capacity=64 << 20, segment_bytes=1 << 20)
    rig.put(tier, *range(10))
    rig.crash(tier)
    fill_up(small_disk / "ballast")
    again = rig.open(capacity=64 << 20, segment_bytes=1 << 20)
    assert rig.get(again, *range(10)) == [HIT] * 10
