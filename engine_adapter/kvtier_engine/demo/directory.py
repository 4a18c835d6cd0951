"""Where the demo's disk tier lies: a directory of the run's own, with room, gone when the run is."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvtier.errors import ConfigError

__all__ = ["check_room", "ended_by_exception", "file_system", "fresh_directory"]

ENDING = (signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger("kvtier.demo")


@contextmanager
def fresh_directory(parent: Path | None) -> Iterator[Path]:
    """A new directory below `parent`, or the system's temporary one, removed with all in it however this ends.

    Ctrl-C ends it by an exception as ever, and so do SIGTERM and SIGHUP meanwhile, if they would have ended the process
    without one; SIGKILL leaves it. Main thread only. Raises ConfigError when it cannot be made.
    """
    with ended_by_exception():
        try:
            path = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir=parent))
        except OSError as error:
            place = "the system's temporary directory" if parent is None else f"--disk {str(parent)!r}"
            raise ConfigError(f"{place} takes no directory for the disk tier: {error.strerror}") from error
        try:
            yield path.absolute()
        finally:
            _remove(path)


def check_room(directory: Path, num_bytes: int) -> None:
    """Raises ConfigError when the file system there has not that much."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ConfigError(
            f"the disk tier needs {num_bytes >> 20} MiB, and {str(directory.parent)!r} has {free >> 20} MiB free: name "
            "a directory with room by --disk"
        )


def file_system(path: Path) -> str:
    """The type of the file system there, such as 'ext4'; 'tmpfs' is memory, though it may take direct I/O."""
    path = path.resolve()
    found = (0, "unknown")
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), fields[4])
        if path.is_relative_to(point) and len(point) >= found[0]:  # of two at one place the later covers the other
            found = (len(point), fields[fields.index("-") + 1])
    return found[1]


def _remove(path: Path) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})  # an impatient second one
    try:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.error("%s could not be removed whole; remove it by hand", path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is within by an exception, if they would have ended the process without one."""
    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    sys.exit(128 + number)
