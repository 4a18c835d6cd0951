"""Devices that fail, stall and lie; callers' odd buffers; many threads and processes at once."""

from __future__ import annotations

import mmap
import random
import resource
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError, LayoutError, TierError
from kvtier.frame import FRAME_MAGIC
from kvtier.testing.files import Fault
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk.handles import Handles

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig

PAGE = 4096
HIT, MISS, DAMAGED, FAILED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.DAMAGED, ReadOutcome.ERROR
STORED, FULL, NOT_STORED = WriteOutcome.STORED, WriteOutcome.FULL, WriteOutcome.ERROR
WITHDRAWN = WriteOutcome.WITHDRAWN


# ---- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "lz4", "shuffle_lz4"])
@pytest.mark.parametrize("nbytes", [1, 511, 512, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 100_001])
@pytest.mark.parametrize("shift", [0, 1, 512, 64])
def test_every_length_and_address(rig: DiskRig, codec: str, nbytes: int, shift: int) -> None:
    """What lies around the caller's buffer is neither written nor read."""
    tier = rig.open(capacity=4 << 20, segment_bytes=1 << 20, codec=codec)
    for tight in (False, True):
        key = rig.key(tight)
        block = bytes(nbytes) if tight else rig.block("x", nbytes)
        around = rig.aligned(shift + nbytes + PAGE)
        around[shift : shift + nbytes] = block
        assert tier.write([WriteRequest(key, None, around[shift : shift + nbytes])]) == [STORED]
        around[:] = b"\xaa" * len(around)
        assert tier.read([ReadRequest(key, around[shift : shift + nbytes])]) == [HIT]
        assert around[shift : shift + nbytes] == block
        assert set(around[:shift]) | set(around[shift + nbytes :]) == {0xAA}


def test_aligned_blocks_are_not_copied(rig: DiskRig) -> None:
    """The vectors of the system calls are the caller's pages themselves; a batch is one call."""
    seen: list[memoryview] = []
    for name in ("pwritev", "preadv"):
        real = getattr(rig.files, name)

        def call(fd: int, vectors: list[memoryview], offset: int, real: object = real) -> int:
            seen.extend(vectors)
            return real(fd, vectors, offset)  # type: ignore[operator,no-any-return]

        setattr(rig.files, name, call)
    tier = rig.open(capacity=1 << 30, segment_bytes=None)
    buffers = [rig.aligned(360 << 10) for _ in range(20)]
    keys = [rig.key(name) for name in range(20)]
    warm = rig.aligned(PAGE)
    tier.write([WriteRequest(rig.key("warm"), None, warm)])
    for batch in (
        lambda: tier.write([WriteRequest(key, None, buffer) for key, buffer in zip(keys, buffers, strict=True)]),
        lambda: tier.read([ReadRequest(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]),
    ):
        seen.clear()
        before = dict(rig.files.calls)
        batch()
        assert sum(rig.files.calls.values()) - sum(before.values()) == 1
        assert [vector.obj for vector in seen if len(vector) > PAGE] == [buffer.obj for buffer in buffers]


def test_a_callers_mistakes_are_its_own(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, "a")
    with pytest.raises(LayoutError, match="writable"):
        tier.read([ReadRequest(rig.key("a"), memoryview(bytes(PAGE)))])
    with pytest.raises(LayoutError, match="1 to"):
        tier.write([WriteRequest(rig.key("b"), None, memoryview(b""))])
    short = rig.key("b")[:-1]
    for call in (
        lambda: tier.write([WriteRequest(short, None, memoryview(b"x"))]),  # type: ignore[arg-type]
        lambda: tier.read([ReadRequest(short, memoryview(bytearray(1)))]),  # type: ignore[arg-type]
        lambda: tier.contains([short]),  # type: ignore[list-item]
    ):
        with pytest.raises(ConfigError, match="a key has"):
            call()
    tier.check_integrity()
    assert rig.get(tier, "a") == [HIT]


# ---- the device fails ------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS06")
def test_a_block_that_cannot_be_read_is_asked_for_at_most_twice(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(4))
    rig.files.inject(Fault.READ_ERROR)
    assert rig.get(tier, *range(4)) == [FAILED] * 4
    calls = rig.files.calls["read"]
    assert rig.files.counts[Fault.READ_ERROR] <= 2 * 4
    for _ in range(10):
        assert rig.get(tier, *range(4)) == [MISS] * 4
    assert rig.files.calls["read"] == calls
    assert tier.snapshot().read_errors == 4
    rig.files.heal()
    assert rig.put(tier, *range(4)) == [STORED] * 4
    assert rig.get(tier, *range(4)) == [HIT] * 4


@pytest.mark.bug("HS06")
def test_a_file_that_is_gone_or_cut_short_is_a_miss_after_one_look(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(4))
    for volume in tier._volumes:
        volume._handles.close()
        volume._handles = Handles(rig.files, volume.directory.fd, volume.directory.open_flags)
    (file,) = rig.segments()
    content = file.read_bytes()
    file.unlink()
    assert rig.get(tier, 0) == [FAILED]
    assert rig.get(tier, 0) == [MISS]
    file.write_bytes(content[: 4 * PAGE])
    assert rig.get(tier, *range(4)) == [MISS, HIT, FAILED, FAILED] or rig.get(tier, *range(4))[2:] == [MISS, MISS]
    calls = rig.files.calls["read"]
    assert rig.get(tier, 2, 3) == [MISS, MISS]
    assert rig.files.calls["read"] == calls


def test_one_bad_block_spoils_no_other(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(6))
    _, at = rig.find(3)
    real = rig.files.preadv

    def preadv(fd: int, vectors: list[memoryview], offset: int) -> int:
        if offset <= at < offset + sum(map(len, vectors)):
            raise OSError(5, "Input/output error")
        return real(fd, vectors, offset)

    rig.files.preadv = preadv  # type: ignore[method-assign,assignment]
    assert rig.get(tier, *range(6)) == [HIT, HIT, HIT, FAILED, HIT, HIT]
    assert rig.held(tier, range(6)) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("fault", [Fault.WRITE_ERROR, Fault.TORN_WRITE])
def test_a_failed_write_leaves_a_hole_and_nothing_else(rig: DiskRig, fault: Fault) -> None:
    tier = rig.open()
    rig.put(tier, *range(2))
    rig.files.inject(fault, times=1)
    assert rig.put(tier, "x", "y") == [NOT_STORED, NOT_STORED]
    assert rig.held(tier, ["x", "y"]) == []
    tier.check_integrity()
    assert rig.put(tier, "z", "x") == [STORED, STORED]
    assert tier.snapshot().write_errors == 1
    rig.crash(tier)
    again = rig.open()
    assert rig.get(again, 0, 1, "z", "x") == [HIT] * 4
    again.check_integrity()


def test_a_failing_directory_comes_last_for_a_while(rig: DiskRig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tier = rig.open(rig.path, other, capacity=2 << 20)
    rig.put(tier, *range(4))
    assert rig.put(tier, 4, 5) == [STORED, STORED]
    rig.files.inject(Fault.WRITE_ERROR, where="/cache/")
    assert [rig.put(tier, name) for name in range(10, 30)] == [[STORED]] * 20
    assert rig.files.counts[Fault.WRITE_ERROR] == 1
    rig.clock.advance(60)
    rig.files.heal()
    assert [rig.put(tier, name) for name in range(30, 40)] == [[STORED]] * 10
    rig.files.inject(Fault.READ_ERROR, where="/cache/")
    outcomes = rig.get(tier, *range(6))
    assert set(outcomes) == {HIT, FAILED}
    assert tier.snapshot().read_errors == outcomes.count(FAILED)
    tier.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_what_a_flaky_device_gives_is_right_or_nothing(rig: DiskRig, seed: int) -> None:
    """Everything at once, and the tier opened again and again."""
    rig.files = type(rig.files)(seed)
    rng = random.Random(seed)
    faults = [fault for fault in Fault if fault not in (Fault.NO_DIRECT, Fault.SLOW)]
    for _ in range(6):
        tier = rig.open()
        for fault in faults:
            rig.files.inject(fault, probability=0.05, where="segment-")
        for _ in range(80):
            names = [rng.randrange(60) for _ in range(rng.randrange(1, 5))]
            action = rng.random()
            if action < 0.5:
                rig.put(tier, *names)
            elif action < 0.95:
                rig.get(tier, *names)
            else:
                tier.remove([rig.key(name) for name in names])
            rig.clock.advance(0.5)
        tier.check_integrity()
        assert rig.real_bytes() <= tier.usage().capacity_bytes, repr(rig.files)
        rig.crash(tier) if rng.random() < 0.5 else tier.close()
        rig.files.heal()
    assert sum(rig.files.counts.values()) > 50, repr(rig.files)


def test_a_kept_log_record_keeps_no_buffer(rig: DiskRig, caplog: pytest.LogCaptureFixture) -> None:
    """An exception among a record's arguments would, by way of its traceback, keep slots of the host pool."""
    tier = rig.open()
    rig.put(tier, "a")
    rig.files.inject(Fault.WRITE_ERROR)
    buffer = rig.aligned(PAGE)
    assert tier.write([WriteRequest(rig.key("b"), None, buffer)]) == [NOT_STORED]
    tier.remove([rig.key("a")])
    rig.files.heal()
    assert caplog.records
    mapped = buffer.obj
    assert isinstance(mapped, mmap.mmap)
    buffer.release()
    mapped.close()  # BufferError while any view is left


def test_a_failing_device_does_not_flood_the_log(rig: DiskRig, caplog: pytest.LogCaptureFixture) -> None:
    tier = rig.open()
    rig.files.inject(Fault.WRITE_ERROR, probability=0.5, where="segment-")
    for name in range(100):
        rig.put(tier, name)
        rig.clock.advance(1)
    assert rig.files.counts[Fault.WRITE_ERROR] > 20
    assert 1 <= len([record for record in caplog.records if record.name == "kvtier.disk"]) <= 3


# ---- leaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.bug("LK12")
@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_damaged_payloads_cost_no_memory(rig: DiskRig, codec: str) -> None:
    """10,000 blocks, each damaged, each asked for twice: each is read once."""
    number, nbytes = 10_000, 2 * PAGE
    tier = rig.open(capacity=256 << 20, segment_bytes=32 << 20, codec=codec)
    keys = [rig.key(name) for name in range(number)]
    blocks = [memoryview(name.to_bytes(4, "little") * (nbytes // 4)) for name in range(number)]
    for start in range(0, number, 100):
        part = slice(start, start + 100)
        tier.write([WriteRequest(key, None, block) for key, block in zip(keys[part], blocks[part], strict=True)])
    for file in rig.segments():
        with file.open("r+b") as stream:
            content = stream.read()
            for at in range(PAGE, len(content), PAGE):
                if content[at : at + 8] == FRAME_MAGIC:
                    stream.seek(at + PAGE + 5)
                    stream.write(bytes([content[at + PAGE + 5] ^ 0xFF]))
    buffer = memoryview(bytearray(nbytes))
    tier.read([ReadRequest(key, buffer) for key in keys[:500]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in keys[500:]:
        assert tier.read([ReadRequest(key, buffer)]) == [DAMAGED]
    calls = rig.files.calls["read"]
    for key in keys:
        assert tier.read([ReadRequest(key, buffer)]) == [MISS]
    assert rig.files.calls["read"] == calls
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
    assert (tier.snapshot().damaged, tier.usage().num_blocks) == (number, 0)


@pytest.mark.bug("LK14")
def test_misses_damage_and_failures_leave_no_descriptor(rig: DiskRig) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    tier = rig.open(capacity=2 << 20)
    rig.put(tier, *range(100))
    rig.get(tier, 0)
    before = descriptors()
    for name in range(5000):
        assert rig.get(tier, f"never {name}") == [MISS]
    rig.files.inject(Fault.FLIP_ON_READ, probability=0.3)
    rig.files.inject(Fault.READ_ERROR, probability=0.3)
    for name in range(100):
        rig.get(tier, name)
    rig.files.heal()
    for _ in range(50):
        with pytest.raises(ConfigError):
            rig.open()
    assert descriptors() <= before + 20  # one for each segment
    tier.close()
    assert descriptors() <= before - 3


def test_descriptors_are_bounded(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.disk.handles.MAX_OPEN", 4)
    monkeypatch.setattr(Handles.__init__, "__defaults__", (4,))
    tier = rig.open(capacity=2 << 20)
    rig.put(tier, *range(150))
    for name in range(0, 150, 7):
        assert rig.get(tier, name) == [HIT]
    assert len(rig.segments()) > 20
    assert sum("segment-" in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()) <= 4


def test_scratch_is_used_again(rig: DiskRig) -> None:
    tier = rig.open(capacity=64 << 20, segment_bytes=None)
    for name in range(50):
        rig.put(tier, name, nbytes=1 << 20)
        rig.get(tier, name, nbytes=1 << 20)
    assert 0 < tier._scratch.idle_bytes <= 32 << 20


# ---- several at once -------------------------------------------------------------------------------------------------


@pytest.mark.bug("CR13", "PF05")
def test_eight_threads_write_each_block_once(rig: DiskRig) -> None:
    tier = rig.open(capacity=16 << 20, segment_bytes=1 << 20)
    names = list(range(200))
    start = threading.Barrier(8)

    def work(seed: int) -> list[WriteOutcome]:
        rng = random.Random(seed)
        start.wait()
        mine = rng.sample(names, len(names))
        return [outcome for at in range(0, 200, 8) for outcome in rig.put(tier, *mine[at : at + 8])]

    with ThreadPoolExecutor(8) as threads:
        outcomes = [outcome for done in threads.map(work, range(8)) for outcome in done]
    assert outcomes.count(STORED) == 200
    assert outcomes.count(WriteOutcome.ALREADY_STORED) == 7 * 200
    assert tier.snapshot().accepted_bytes == 200 * PAGE
    assert rig.get(tier, *names) == [HIT] * 200
    for name in names:
        rig.find(name)  # exactly one frame
    tier.check_integrity()


WRITE = """
import hashlib, random, sys
from pathlib import Path
from kvtier.errors import ConfigError
from kvtier.keys import make_key
from kvtier.tiers.base import WriteRequest
from kvtier.tiers.disk import DiskTier
space = hashlib.sha256(b"one").digest()[:16]
print("ready", flush=True)
sys.stdin.readline()
while True:
    try:
        tier = DiskTier([Path(sys.argv[1])], 16 << 20, segment_bytes=1 << 20)
        break
    except ConfigError as error:
        assert "in use" in str(error), error
stored = 0
for name in range(200):
    block = random.Random(str(name)).randbytes(4096)
    key = make_key(space, hashlib.sha256(str(name).encode()).digest())
    stored += tier.write([WriteRequest(key, None, memoryview(block))]) == ["stored"]
tier.close()
print(stored, flush=True)
"""


@pytest.mark.bug("CR13", "WR01")
def test_eight_processes_take_turns_and_write_each_block_once(rig: DiskRig) -> None:
    arguments = [sys.executable, "-c", WRITE, str(rig.path)]
    writers = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        stored = [int(writer.communicate("go\n", timeout=60)[0]) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert sorted(stored) == [0] * 7 + [200]
    tier = rig.open(capacity=16 << 20, segment_bytes=1 << 20)
    assert rig.get(tier, *range(200)) == [HIT] * 200
    assert {file.name for file in rig.path.iterdir()} - {file.name for file in rig.segments()} == {
        "kvtier.lock",
        "kvtier.meta",
    }


@pytest.mark.bug("PF09")
def test_slow_writes_do_not_slow_reads(rig: DiskRig) -> None:
    """Every write hangs: reads, lookups, uses and counts go on; what is being written is a miss meanwhile."""
    tier = rig.open()
    rig.put(tier, *range(4))
    rig.files.hold("write")
    done: list[WriteOutcome] = []
    writers = [threading.Thread(target=lambda name=name: done.extend(rig.put(tier, name))) for name in ("w1", "w2")]
    for writer in writers:
        writer.start()
    rig.files.wait_stalled(2)
    assert rig.get(tier, *range(4), "w1") == [HIT] * 4 + [MISS]
    assert rig.held(tier, [0, "w1"]) == [0]
    assert rig.put(tier, "w1") == [WriteOutcome.ALREADY_STORED]
    tier.touch([rig.key(0)])
    assert tier.usage().num_blocks == 4
    tier.check_integrity()
    rig.files.release("write")
    for writer in writers:
        writer.join()
    assert done == [STORED, STORED]
    assert rig.get(tier, "w1", "w2") == [HIT, HIT]


def test_a_change_of_segments_does_not_slow_reads(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(6))
    rig.files.hold("write")
    writer = threading.Thread(target=rig.put, args=(tier, "next"))
    writer.start()
    rig.files.wait_stalled()
    assert rig.get(tier, *range(6)) == [HIT] * 6
    rig.files.release("write")
    writer.join()
    assert rig.get(tier, "next") == [HIT]


def test_a_check_does_not_wait_for_a_device_that_hangs_at_any_write(rig: DiskRig) -> None:
    """A block's, a footer's, a new file's header: whichever locks its thread holds."""
    tier = rig.open()
    with ThreadPoolExecutor(2) as threads:
        for number in range(30):  # through several segments, the last of them an evicted one's file
            rig.files.hold("write")
            writing = threads.submit(rig.put, tier, number)
            rig.files.wait_stalled()
            checking = threads.submit(tier.check_integrity)
            try:
                checking.result(timeout=10.0)
            finally:
                rig.files.release("write")
            writing.result()
        assert tier.usage().num_blocks < 30
        tier.check_integrity()


def test_eight_threads_of_everything(rig: DiskRig) -> None:
    tier = rig.open(rig.path, rig.path.with_name("other"), capacity=2 * (320 << 10))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            names = rng.sample(range(80), rng.randrange(1, 6))
            action = rng.random()
            if action < 0.45:
                rig.put(tier, *names)
            elif action < 0.85:
                rig.get(tier, *names)
            elif action < 0.9:
                tier.remove([rig.key(name) for name in names])
            elif action < 0.95:
                tier.touch([rig.key(name) for name in names])
            else:
                usage = tier.usage()
                assert usage.used_bytes <= usage.capacity_bytes
                tier.check_integrity()

    with ThreadPoolExecutor(8) as threads:
        for running in [threads.submit(work, seed) for seed in range(8)]:
            running.result()
    tier.check_integrity()
    assert tier.snapshot().damaged == 0
    held = rig.held(tier, range(80))
    assert rig.get(tier, *held) == [HIT] * len(held)


# ---- resets ----------------------------------------------------------------------------------------------------------


@pytest.mark.bug("WR23")
@pytest.mark.parametrize("crash", [False, True])
def test_a_reset_outlives_the_process(rig: DiskRig, tmp_path: Path, crash: bool) -> None:
    paths = [rig.path, tmp_path / "other"]
    tier = rig.open(*paths, capacity=2 << 20)
    rig.put(tier, *range(20))
    tier.start_epoch(3)
    assert rig.get(tier, *range(20)) == [MISS] * 20
    rig.put(tier, "new")
    rig.crash(tier) if crash else tier.close()
    again = rig.open(*paths, capacity=2 << 20)
    assert again.epoch == again.snapshot().epoch == 3
    assert rig.held(again, [*range(20), "new"]) == ["new"]
    rig.crash(again)
    assert rig.open(paths[1], capacity=1 << 20).epoch == 3


def test_a_write_from_before_a_reset_is_not_found_after_it(rig: DiskRig) -> None:
    """Nor by the scan after a crash, nor when it is the first to come to the new epoch's segment."""
    tier = rig.open()
    rig.put(tier, "first")
    outcomes: list[WriteOutcome] = []
    rig.files.hold("write")
    writer = threading.Thread(target=lambda: outcomes.extend(rig.put(tier, "old")))
    writer.start()
    rig.files.wait_stalled()
    resetter = threading.Thread(target=tier.start_epoch, args=(1,))
    resetter.start()
    rig.files.wait_stalled()
    assert rig.held(tier, ["first"]) == []
    rig.files.release("write")
    writer.join()
    resetter.join()
    assert outcomes == [WITHDRAWN]
    assert rig.put(tier, "new") == [STORED]
    assert rig.held(tier, ["first", "old", "new"]) == ["new"]
    rig.crash(tier)
    assert rig.held(rig.open(), ["first", "old", "new"]) == ["new"]


@pytest.mark.bug("WR23")
def test_a_reset_that_cannot_be_written_down_says_so(rig: DiskRig, tmp_path: Path) -> None:
    tier = rig.open(rig.path, tmp_path / "other", capacity=2 << 20)
    rig.put(tier, "a")
    rig.files.inject(Fault.WRITE_ERROR, where="other/kvtier.meta")
    with pytest.raises(TierError, match=r"could not write down epoch 1: .*/other"):
        tier.start_epoch(1)
    assert rig.held(tier, ["a"]) == []
    with pytest.raises(TierError, match="could not"):
        tier.start_epoch(1)
    rig.files.heal()
    tier.start_epoch(1)
    rig.put(tier, "b")
    tier.start_epoch(1)  # nothing to do
    assert rig.held(tier, ["a", "b"]) == ["b"]
    with pytest.raises(TierError, match="is in epoch 1"):
        tier.start_epoch(0)


def test_a_directory_that_missed_a_reset_is_reset_at_the_next_open(rig: DiskRig, tmp_path: Path) -> None:
    paths = [rig.path, tmp_path / "other"]
    tier = rig.open(*paths, capacity=2 << 20)
    rig.put(tier, *range(4))
    rig.put(tier, *range(4, 8))
    rig.files.inject(Fault.WRITE_ERROR, where="other/kvtier.meta")
    with pytest.raises(TierError):
        tier.start_epoch(1)
    rig.files.heal()
    rig.crash(tier)
    again = rig.open(*paths, capacity=2 << 20)
    assert again.epoch == 1
    assert rig.held(again, range(8)) == []
    again.close()
    assert rig.open(paths[1], capacity=1 << 20).epoch == 1


def test_what_is_removed_while_it_is_written_is_not_found_later(rig: DiskRig) -> None:
    tier = rig.open()
    rig.files.hold("write")
    outcomes: list[WriteOutcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(rig.put(tier, "a", "b")))
    writer.start()
    rig.files.wait_stalled()
    assert tier.remove([rig.key("a")]) == 0
    rig.files.release("write")
    writer.join()
    assert outcomes == [WITHDRAWN, STORED]
    rig.crash(tier)
    assert rig.held(rig.open(), ["a", "b"]) == ["b"]


def test_a_close_leaves_the_rest_to_the_last_call_under_way(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(3))
    rig.files.hold("write")
    outcomes: list[WriteOutcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(rig.put(tier, "late")))
    writer.start()
    rig.files.wait_stalled()
    tier.close()
    with pytest.raises(ConfigError, match="in use"):
        rig.open()
    rig.files.release("write")
    writer.join()
    assert outcomes == [STORED]
    assert rig.get(rig.open(), *range(3), "late") == [HIT] * 4


def test_a_vanished_file_system_gives_errors_only(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, *range(6))
    shutil.rmtree(rig.path)
    rig.files.inject(Fault.READ_ERROR)
    rig.files.inject(Fault.WRITE_ERROR)
    assert set(rig.get(tier, *range(6))) == {FAILED}
    assert set(rig.put(tier, "a", "b")) <= {NOT_STORED, FULL}
    assert tier.remove([rig.key(0)]) == 0
    with pytest.raises(TierError):
        tier.start_epoch(1)
    tier.usage()
    tier.close()


def test_a_tier_can_be_opened_after_one_that_was_never_closed(rig: DiskRig) -> None:
    """Only its process's end frees the directory: there is no thread or destructor that could."""
    tier = DiskTier([rig.path], 320 << 10, segment_bytes=64 << 10)
    with pytest.raises(ConfigError, match="in use"):
        rig.open()
    tier.close()
    rig.open()
