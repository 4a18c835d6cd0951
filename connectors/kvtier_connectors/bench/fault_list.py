"""The faults themselves: what is done to a tier, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.testing.files import Fault
from kvtier_connectors.bench.traffic import FaultRig, SickFiles

__all__ = ["FAULTS", "NO_FAULT", "FaultCase", "small_file_system"]

FILE_SYSTEM_BYTES = 32 << 20  # less than the tier may take
FLIP_STRIDE = 512 << 10

Change = Callable[[FaultRig, SickFiles], None]


def _nothing(rig: FaultRig, files: SickFiles) -> None:
    del rig, files


def _heal(rig: FaultRig, files: SickFiles) -> None:
    del rig
    files.heal()


def _inject(*faults: Fault) -> Change:
    def begin(rig: FaultRig, files: SickFiles) -> None:
        del rig
        for fault in faults:
            files.inject(fault)

    return begin


def _stall(*what: str) -> Change:
    def begin(rig: FaultRig, files: SickFiles) -> None:
        del rig
        for each in what:
            files.stall(each)

    return begin


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A fault. needs_restart: it happens while no process has the tier open. is_endless: nothing ends it.

    on_small_disk: on a file system of its own with less room than the tier may take, where one can be mounted.
    """

    name: str
    injected: str
    begin: Change = _nothing
    end: Change = _heal
    needs_restart: bool = False
    is_endless: bool = False
    lasts_s: float = 0.0
    on_small_disk: bool = False


def _segments(rig: FaultRig) -> list[Path]:
    return sorted(rig.directory.glob("segment-*"))


def _flip(rig: FaultRig, files: SickFiles) -> None:
    """A bit in every 512 KiB of every segment, behind the tier's back."""
    del files
    for path in _segments(rig):
        with path.open("r+b") as file:
            for offset in range(100_000, path.stat().st_size, FLIP_STRIDE):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 1]))
            file.flush()
            os.fsync(file.fileno())


def _halve(rig: FaultRig, files: SickFiles) -> None:
    del files
    path = _segments(rig)[0]
    os.truncate(path, path.stat().st_size // 2)


def _remove(rig: FaultRig, files: SickFiles) -> None:
    del files
    shutil.rmtree(rig.directory)


def _make_read_only(rig: FaultRig, files: SickFiles) -> None:
    del rig
    files.read_only = True


def _fill_up(rig: FaultRig, files: SickFiles) -> None:
    """Really, where the file system is one of ours; by errors otherwise."""
    if not os.path.ismount(rig.directory.parent):
        files.inject(Fault.FULL_ON_WRITE)
        files.inject(Fault.FULL_ON_ALLOCATE)
        return
    with (rig.directory.parent / "ballast").open("wb") as ballast:
        found = os.fstatvfs(ballast.fileno())
        os.posix_fallocate(ballast.fileno(), 0, found.f_bavail * found.f_frsize)


def _make_room(rig: FaultRig, files: SickFiles) -> None:
    (rig.directory.parent / "ballast").unlink(missing_ok=True)
    files.heal()


NO_FAULT = FaultCase("none", "nothing: what the others are compared with")
FAULTS = (
    FaultCase("flipped bits", "a bit in every 512 KiB of the files", _flip),
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
    FaultCase("stall that ends", "reads and writes hang for a while", _stall("read", "write"), lasts_s=1.0),
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
