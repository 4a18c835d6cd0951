"""The system calls that the disk tier makes, in one place, so that tests can put faults between.

Names are relative to an open directory, never paths: nothing outside it can be reached, and no link is followed. All
calls block; any thread. A read or write that the kernel cut short is carried on, and is an OSError where it cannot be.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

__all__ = ["MAX_VECTORS", "NO_SPACE", "Files", "is_shortage"]

MAX_VECTORS = 1024  # IOV_MAX of Linux
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR})


def is_shortage(error: OSError | MemoryError) -> bool:
    """Whether the process or the machine lacked something: that says nothing of the file."""
    return isinstance(error, MemoryError) or error.errno in SHORTAGE


class Files:
    """Opens, reads, writes and names files below a directory. Without state."""

    def open(self, name: str, flags: int, directory: int) -> int:
        """A descriptor of a file in `directory`, mode 0600 where it is made, closed on exec."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, vectors: Sequence[memoryview], offset: int) -> None:
        """Fill every vector with the file's bytes from `offset`. OSError at the file's end."""
        for start in range(0, len(vectors), MAX_VECTORS):
            left = list(vectors[start : start + MAX_VECTORS])
            while left:
                done = self.preadv(fd, left, offset)
                if done <= 0:
                    raise OSError(errno.EIO, "the file ends before what was asked of it")
                offset += done
                left = _rest(left, done)

    def write(self, fd: int, vectors: Sequence[memoryview], offset: int) -> None:
        """Write every vector, one after the other, at `offset`."""
        for start in range(0, len(vectors), MAX_VECTORS):
            left = list(vectors[start : start + MAX_VECTORS])
            while left:
                done = self.pwritev(fd, left, offset)
                if done <= 0:
                    raise OSError(errno.EIO, "a write made no progress")
                offset += done
                left = _rest(left, done)

    def preadv(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        """One call of preadv(2); how many bytes it read."""
        return os.preadv(fd, vectors, offset)

    def pwritev(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        """One call of pwritev(2); how many bytes it wrote."""
        return os.pwritev(fd, vectors, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give the file `nbytes` of room on the device. `fd` must not be open for direct I/O: where the file system
        cannot do it, libc writes a byte into every block.
        """
        os.posix_fallocate(fd, 0, nbytes)

    def free_bytes(self, directory: int) -> int:
        """What this user may still take of the file system."""
        found = os.fstatvfs(directory)
        return found.f_bavail * found.f_frsize

    def block_bytes(self, directory: int) -> int:
        """The unit in which the file system gives room away."""
        return os.fstatvfs(directory).f_frsize

    def stat(self, name: str, directory: int) -> os.stat_result:
        """Of the file itself, not of what a link points to."""
        return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def names(self, directory: int) -> list[str]:
        return sorted(os.listdir(directory))

    def unlink(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def replace(self, old: str, new: str, directory: int) -> None:
        """Rename, over `new` if it is there, at once."""
        os.replace(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def sync(self, fd: int) -> None:
        """fsync(2), of a file or a directory."""
        os.fsync(fd)


def _rest(vectors: list[memoryview], done: int) -> list[memoryview]:
    for position, vector in enumerate(vectors):
        if done < len(vector):
            return [vector[done:], *vectors[position + 1 :]]
        done -= len(vector)
    return []
