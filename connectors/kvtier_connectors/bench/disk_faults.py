"""The faults of the disk: what is done to it, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.testing.files import Fault
from kvtier_connectors.bench.fault_case import Change, FaultCase
from kvtier_connectors.bench.ground import Ground

__all__ = ["DISK_FAULTS", "STALLED", "flip_bits", "small_file_system"]

FILE_SYSTEM_BYTES = 32 << 20  # less than the tier may take
FLIP_STRIDE = 512 << 10


def _inject(*faults: Fault) -> Change:
    def begin(ground: Ground) -> None:
        for fault in faults:
            ground.files.inject(fault)

    return begin


def _stall(*what: str) -> Change:
    def begin(ground: Ground) -> None:
        for each in what:
            ground.files.stall(each)

    return begin


def _segments(ground: Ground) -> list[Path]:
    return sorted(ground.disk_directory.glob("segment-*"))


def flip_bits(ground: Ground) -> None:
    """A bit in every 512 KiB of every segment, behind the tier's back."""
    for path in _segments(ground):
        with path.open("r+b") as file:
            for offset in range(100_000, path.stat().st_size, FLIP_STRIDE):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 1]))
            file.flush()
            os.fsync(file.fileno())


def _halve(ground: Ground) -> None:
    path = _segments(ground)[0]
    os.truncate(path, path.stat().st_size // 2)


def _remove(ground: Ground) -> None:
    shutil.rmtree(ground.disk_directory)


def _make_read_only(ground: Ground) -> None:
    ground.files.read_only = True


def _fill_up(ground: Ground) -> None:
    """Really, where the file system is one of ours; by errors otherwise."""
    if not os.path.ismount(ground.disk_directory.parent):
        ground.files.inject(Fault.FULL_ON_WRITE)
        ground.files.inject(Fault.FULL_ON_ALLOCATE)
        return
    with (ground.disk_directory.parent / "ballast").open("wb") as ballast:
        found = os.fstatvfs(ballast.fileno())
        os.posix_fallocate(ballast.fileno(), 0, found.f_bavail * found.f_frsize)


def _make_room(ground: Ground) -> None:
    (ground.disk_directory.parent / "ballast").unlink(missing_ok=True)
    ground.files.heal()


STALLED = FaultCase("stall that ends", "reads and writes hang for a while", _stall("read", "write"), lasts_s=1.0)
DISK_FAULTS = (
    FaultCase("flipped bits", "a bit in every 512 KiB of the files", flip_bits),
    FaultCase("half a segment", "a segment's file is cut to half while open", _halve),
    FaultCase("half a segment, restart", "a segment's file is cut to half while closed", _halve, needs_restart=True),
    FaultCase(
        "disk full", "the file system is filled up, then has room again", _fill_up, _make_room, on_small_disk=True
    ),
    FaultCase("no space", "ENOSPC from every write", _inject(Fault.FULL_ON_WRITE, Fault.FULL_ON_ALLOCATE)),
    FaultCase("read errors", "EIO from every read", _inject(Fault.READ_ERROR)),
    FaultCase("write errors", "EIO from every write", _inject(Fault.WRITE_ERROR)),
    FaultCase("short reads", "each read gives a part of what was asked", _inject(Fault.SHORT_READ)),
    FaultCase("read-only", "EROFS from every write and open for writing", _make_read_only),
    FaultCase("directory removed", "the directory is deleted while open", _remove, is_endless=True),
    FaultCase("stalled reads", "every read hangs for ever", _stall("read"), is_endless=True, lasts_s=1.0),
    FaultCase("stalled writes", "every write hangs for ever", _stall("write"), is_endless=True, lasts_s=1.0),
    STALLED,
    FaultCase("no direct I/O", "EINVAL from O_DIRECT at a restart", _inject(Fault.NO_DIRECT), needs_restart=True),
)


@contextmanager
def small_file_system(directory: Path) -> Iterator[bool]:
    """Mount one at `directory`. False where that is not allowed: then it is a directory as any other."""
    directory.mkdir()
    mounted = os.geteuid() == 0 and _call("mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "tmpfs", directory)
    try:
        yield mounted
    finally:
        if mounted:
            _call("umount", directory)


def _call(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
