"""Plain files: what a device takes and gives when nothing stands between it and the bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["JOB_BYTES", "PlainFile", "drop_cached"]

JOB_BYTES = 8 << 20
"""As one job of staging or of write-behind."""


class PlainFile:
    """A preallocated file, and threads that move blocks of equal length between it and memory: each takes the next job
    of up to 8 MiB of them and moves that by one system call.

    A write goes on behind the one before and begins again at the front when the end is reached, as a full tier does.
    A read gets what was written last.
    """

    def __init__(self, path: Path, nbytes: int, *, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        self._nbytes = nbytes
        self._start = 0
        self._end = 0

    def write(self, blocks: Sequence[memoryview], threads: int) -> None:
        total = sum(map(len, blocks))
        self._start = self._end if self._end + total <= self._nbytes else 0
        self._end = self._start + total
        self._move(os.pwritev, blocks, threads)

    def read(self, blocks: Sequence[memoryview], threads: int) -> None:
        self._move(os.preadv, blocks, threads)

    def read_one(self, index: int, block: memoryview) -> None:
        """The block at that place of the last write."""
        _check(os.preadv(self._fd, [block], self._start + index * len(block)), len(block))

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], blocks: Sequence[memoryview], threads: int
    ) -> None:
        size = len(blocks[0])
        at_once = max(1, JOB_BYTES // size)

        def job(first: int) -> None:
            own = blocks[first : first + at_once]
            _check(call(self._fd, own, self._start + first * size), size * len(own))

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(job, range(0, len(blocks), at_once)):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self.path.unlink()


def _check(done: int, wanted: int) -> None:
    assert done == wanted, f"the device moved {done} of {wanted} bytes"


def drop_cached(paths: Iterable[Path]) -> None:
    """Have the page cache let go of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
