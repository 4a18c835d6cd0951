"""Where the benchmarks put a disk tier, and a file system without direct I/O."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tiers.disk import Files

__all__ = ["BufferedFiles", "scratch_directory"]

GIB = 1 << 30


class BufferedFiles(Files):
    """Of a file system that refuses direct I/O."""

    def open(self, name: str, flags: int, directory: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(name, flags, directory)


@contextmanager
def scratch_directory(parent: Path | None, needed_bytes: int) -> Iterator[Path]:
    """A fresh directory in `parent`, or the current one, removed at the end. ConfigError when there is no room."""
    where = Path.cwd() if parent is None else parent
    try:
        free = shutil.disk_usage(where).free
        if free < needed_bytes:
            raise ConfigError(
                f"the benchmark needs {needed_bytes / GIB:.1f} GiB of free space and {where} has {free / GIB:.1f}: "
                "name another directory by --dir"
            )
        made = tempfile.mkdtemp(prefix="kvtier-bench-", dir=where)
    except OSError as error:
        raise ConfigError(f"--dir {str(where)!r} cannot be used: {error.strerror or error}") from error
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
