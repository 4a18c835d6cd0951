"""The lock of a cache directory: one process at a time, and it ends with the process."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tiers.disk.layout import LOCK_NAME

__all__ = ["DirectoryLock"]

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """flock(2) on the lock file, with the holder's pid in it. Never blocks.

    A fork's child shares the lock with its parent and would keep it after the parent's death: it lets go at once.
    The lock is given up by closing alone, since unlocking in a child would unlock the parent too.
    """

    def __init__(self, path: Path, directory: int, *, create: bool) -> None:
        """Raises ConfigError when another holds it; OSError when there is no lock file, or none can be made."""
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._fd = os.open(LOCK_NAME, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        try:
            self._lock(path, write_pid=create)
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def close(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self, path: Path, *, write_pid: bool) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            own = " (this one)" if holder == str(os.getpid()) else ""
            raise ConfigError(
                f"disk.path {str(path)!r} is in use by process {holder}{own}: a cache directory belongs to one store "
                "at a time. Give each engine a directory of its own, or stop that process"
            ) from None
        if write_pid:
            try:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                return  # a full disk: the lock holds all the same


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)
