"""What a cache directory must be, who may have it, and what else may lie in it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ClosedError, ConfigError, ForkedError
from kvtier.testing.files import Fault
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome
from kvtier.tiers.disk import DiskTier, list_directory, verify_directory

if TYPE_CHECKING:
    from tests.core.disk.conftest import DiskRig

HIT, MISS = ReadOutcome.OK, ReadOutcome.MISS
STORED = WriteOutcome.STORED


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_directory_and_files_are_private(rig: DiskRig, tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    tier = rig.open(path)
    assert rig.put(tier, "a") == [STORED]
    assert [mode_of(each) for each in (path.parent, path)] == [0o700, 0o700]
    assert {mode_of(file) for file in path.iterdir()} == {0o600}


def test_a_directory_open_to_others_is_closed_to_them(rig: DiskRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.path.mkdir(mode=0o755)
    with caplog.at_level(logging.INFO, "kvtier.disk"):
        rig.open()
    assert mode_of(rig.path) == 0o700
    assert any("0700" in record.getMessage() for record in caplog.records)
    assert warnings_of(caplog) == []


def test_a_directory_in_which_others_live_is_left_open(rig: DiskRig) -> None:
    rig.path.mkdir(mode=0o755)
    (rig.path / "other.txt").write_text("theirs")
    with pytest.raises(ConfigError, match=r"disk\.path .* open to others \(mode 755\) .*'other\.txt'.*cache/kvtier'"):
        rig.open()
    assert mode_of(rig.path) == 0o755
    assert [path.name for path in rig.path.iterdir()] == ["other.txt"]


def test_a_cache_that_others_put_files_into_is_closed_all_the_same(rig: DiskRig) -> None:
    rig.open().close()
    (rig.path / "other.txt").write_text("theirs")
    rig.path.chmod(0o755)
    rig.open()
    assert mode_of(rig.path) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_of_another_user_is_refused(rig: DiskRig) -> None:
    rig.path.mkdir()
    os.chown(rig.path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"disk\.path .* belongs to user 12345"):
        rig.open()


@pytest.mark.parametrize("below", [False, True])
def test_a_file_in_its_place_is_refused(rig: DiskRig, below: bool) -> None:
    rig.path.write_text("mine")
    with pytest.raises(ConfigError, match=r"disk\.path .*not a directory"):
        rig.open(rig.path / "below" if below else rig.path)
    assert rig.path.read_text() == "mine"


def test_a_place_where_nothing_can_be_made_is_refused(rig: DiskRig) -> None:
    with pytest.raises(ConfigError, match=r"disk\.path '/proc/kvtier' cannot be used"):
        rig.open(Path("/proc/kvtier"))


def test_a_read_only_file_system_is_refused(rig: DiskRig, tmp_path: Path) -> None:
    rig.path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m,mode=0700", "tmpfs", str(rig.path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(ConfigError, match=r"disk\.path .*[Rr]ead-only"):
            rig.open()
    finally:
        subprocess.run(["umount", str(rig.path)], check=True)


def test_no_directory_and_too_little_capacity_are_refused(rig: DiskRig) -> None:
    with pytest.raises(ConfigError, match=r"disk\.path"):
        DiskTier([], 1 << 30)
    for capacity in (1, 100 << 10, 3 * (64 << 10)):
        with pytest.raises(ConfigError, match=r"disk\.size"):
            rig.open(capacity=capacity, segment_bytes=None)
    with pytest.raises(ConfigError, match=r"disk\.size"):
        rig.open(capacity=10 << 20, segment_bytes=4 << 20)
    with pytest.raises(ConfigError, match="no codec 'zip'"):
        rig.open(codec="zip")


def test_a_failed_open_leaves_nothing_open(rig: DiskRig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(20):
        with pytest.raises(ConfigError):
            rig.open(rig.path, tmp_path / "file")
    assert rig.put(rig.open(), "a") == [STORED]


# ---- one store at a time ---------------------------------------------------------------------------------------------


def test_a_second_tier_is_refused(rig: DiskRig) -> None:
    tier = rig.open()
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} \(this one\).*a directory of its own"):
        rig.open()
    for look in (list_directory, verify_directory):
        with pytest.raises(ConfigError, match="in use"):
            look(rig.path)
    tier.close()
    rig.open()


HOLD = """
import sys
from pathlib import Path
from kvtier.tiers.disk import DiskTier
tier = DiskTier([Path(sys.argv[1])], 1 << 20, segment_bytes=64 << 10)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_dead(rig: DiskRig) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(rig.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid}:"):
            rig.open()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
    assert rig.put(rig.open(), "a") == [STORED]


def test_a_fork_has_no_part_in_it(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, "a")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            buffer = memoryview(bytearray(4096))
            for call in (
                lambda: tier.read([ReadRequest(rig.key("a"), buffer)]),
                lambda: rig.put(tier, "b"),
                lambda: tier.start_epoch(1),
                tier.check_integrity,
            ):
                try:
                    call()
                except ForkedError:
                    os.write(write, b"f")
            tier.close()
            os.write(write, b"c")
            os.read(0, 0)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"ffffc"
    os.close(read)
    os.close(write)
    assert rig.get(tier, "a") == [HIT]


def test_a_forked_child_does_not_keep_the_lock(rig: DiskRig) -> None:
    """The parent closes, or dies, while a child lives on."""
    tier = rig.open()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        os.sched_yield()
        tier.close()
        deadline = 1000
        while True:
            try:
                rig.open()
                break
            except ConfigError:  # the child has not come to its first instruction
                deadline -= 1
                assert deadline
    finally:
        os.close(write)
        os.waitpid(child, 0)


# ---- what else lies there --------------------------------------------------------------------------------------------


@pytest.mark.bug("SE06")
def test_foreign_files_and_links_are_left_alone(rig: DiskRig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    rig.path.mkdir(mode=0o700)
    (rig.path / "segment-00000001.kvt").symlink_to(outside)
    (rig.path / "segment-00000002.kvt").mkdir()
    (rig.path / "notes.txt").write_text("mine")
    (rig.path / "segment-1.kvt").write_text("mine")
    (rig.path / "Segment-00000009.kvt").write_text("mine")
    before = {file.name for file in rig.path.iterdir()}
    tier = rig.open()
    assert len(warnings_of(caplog)) == 1
    assert "and 2 more" in warnings_of(caplog)[0]
    for name in range(100):
        rig.put(tier, name)
    tier.start_epoch(1)
    tier.close()
    assert before <= {file.name for file in rig.path.iterdir()}
    assert outside.read_text() == "precious"
    assert (rig.path / "notes.txt").read_text() == "mine"
    assert set(verify_directory(rig.path).foreign) == before


@pytest.mark.bug("SE06", "WR12")
def test_names_never_become_paths(rig: DiskRig, tmp_path: Path) -> None:
    """Keys are digests, and no byte of one is in a file's name: hostile, equal but for case, or very long."""
    names = [
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a%2Fb",
        "A",
        "a",
        "..",
        ".",
        "x" * 300,
        "nul\0",
        "a\n",
        "\uff41",
    ]
    tier = rig.open(capacity=1 << 20)
    assert set(rig.put(tier, *names)) == {STORED}
    assert rig.get(tier, *names) == [HIT] * len(names)
    tier.close()
    assert {file.name for file in tmp_path.iterdir()} == {rig.path.name}
    assert {file.name.split("-")[0] for file in rig.path.iterdir()} == {"kvtier.lock", "kvtier.meta", "segment"}
    assert rig.get(rig.open(capacity=1 << 20), *names) == [HIT] * len(names)


@pytest.mark.bug("HS20")
def test_where_direct_io_is_refused_it_works_buffered_and_says_so_once(
    rig: DiskRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    rig.files.inject(Fault.NO_DIRECT, where="/cache/")
    tier = rig.open(rig.path, other, capacity=1 << 20)
    names = list(range(20))
    for name in names:
        assert rig.put(tier, name) == [STORED]
    assert rig.get(tier, *names) == [HIT] * 20
    assert tier.snapshot().mode == {str(rig.path): "buffered", str(other): "direct"}
    assert len(warnings_of(caplog)) == 1
    assert str(rig.path) in warnings_of(caplog)[0]


def test_a_directory_that_vanishes_is_no_reason_to_raise(rig: DiskRig) -> None:
    tier = rig.open()
    for name in range(8):
        rig.put(tier, name)
    shutil.rmtree(rig.path)
    for name in range(200):
        outcome = rig.put(tier, f"new {name}")[0]
        assert outcome in (STORED, WriteOutcome.FULL, WriteOutcome.ERROR)
        assert rig.get(tier, name % 8)[0] in (HIT, MISS, ReadOutcome.ERROR)
    tier.usage()
    tier.snapshot()
    tier.remove([])
    tier.close()
    with pytest.raises(ClosedError):
        rig.put(tier, "a")


def test_what_is_closed_gives_nothing_and_takes_nothing(rig: DiskRig) -> None:
    tier = rig.open()
    rig.put(tier, "a")
    tier.close()
    tier.close()
    assert rig.held(tier, ["a"]) == []
    assert tier.usage().num_blocks == 0
    tier.touch([])
    tier.check_integrity()
    for call in (lambda: rig.get(tier, "a"), lambda: rig.put(tier, "b"), lambda: tier.start_epoch(9)):
        with pytest.raises(ClosedError):
            call()
