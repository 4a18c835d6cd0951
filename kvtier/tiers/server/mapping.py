"""A server's memory in this process: mapped once for each run of the server, whatever connections there are to it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.memory import MADV_POPULATE_WRITE

__all__ = ["Mapping", "MappingError", "Mappings"]

GRANULE_BYTES = 1 << 16
"""By which it is remembered what is present: a slot's first and last may be so in part, and fault."""


class MappingError(Exception):
    """A descriptor that must not be mapped; the text says why."""


class Mapping:
    """Memory of one run of the server, shared with it and with every process of the same tenant.

    Whoever has it from `Mappings.take` may use slots of it until his `Mappings.release`. Any thread.
    """

    def __init__(self, identity: tuple[int, int], fd: int, nbytes: int) -> None:
        self.identity = identity
        """Of the file: another run of the server has another."""
        self.nbytes = nbytes
        self.num_users = 0
        try:
            self._map = mmap.mmap(fd, nbytes)
            # A child has no use for it, and must not write there: its stores would be nobody's.
            self._map.madvise(mmap.MADV_DONTFORK)
        except (OSError, ValueError, OverflowError) as error:
            raise MappingError(f"its memory of {nbytes} bytes cannot be mapped here: {error}") from error
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._address = int(self.buffer.ctypes.data)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._is_present = bytearray(-(-nbytes // GRANULE_BYTES))

    def slot(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes that were given to this process to fill or to read.

        Their pages come here at once, the first time: one by one, as they are touched, they would take longer than the
        copy. No others do: those that the server has not made yet are its to make, and to be charged for.
        """
        first, end = offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES)
        if self._is_present.find(0, first, end) >= 0:
            begin = offset - offset % mmap.PAGESIZE
            # ctypes lets other threads run meanwhile. A kernel before 5.14 refuses; then touching it is.
            self._libc.madvise(
                ctypes.c_void_p(self._address + begin), ctypes.c_size_t(offset + nbytes - begin), MADV_POPULATE_WRITE
            )
            self._is_present[first:end] = b"\1" * (end - first)
        return self.buffer[offset : offset + nbytes]

    def unmap(self) -> None:
        """Nobody uses it any more."""
        del self.buffer
        with contextlib.suppress(BufferError):  # an error's traceback may hold a view: it goes with that
            self._map.close()
        del self._map


class Mappings:
    """The mappings that are in use: more than one only while connections to an earlier run of the server are about.

    Any thread. Mutable state: `_mappings`, and the users of each, guarded by `_lock`, a leaf.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[tuple[int, int], Mapping] = {}

    @property
    def mapped_bytes(self) -> int:
        with self._lock:
            return sum(mapping.nbytes for mapping in self._mappings.values())

    def take(self, fd: int, nbytes: int) -> Mapping:
        """The memory of `nbytes` behind a descriptor, which stays the caller's. Raises MappingError.

        Only what cannot become shorter is mapped: touching what is no longer there would kill this process.
        """
        _check(fd, nbytes)
        found = os.fstat(fd)
        identity = (found.st_dev, found.st_ino)
        with self._lock:
            mapping = self._mappings.get(identity)
            if mapping is None:
                mapping = self._mappings[identity] = Mapping(identity, fd, nbytes)
            elif mapping.nbytes != nbytes:
                raise MappingError(f"its memory has {nbytes} bytes, and had {mapping.nbytes} before")
            mapping.num_users += 1
            return mapping

    def release(self, mapping: Mapping) -> None:
        """One user less; the last one unmaps it."""
        with self._lock:
            mapping.num_users -= 1
            if mapping.num_users:
                return
            del self._mappings[mapping.identity]
        mapping.unmap()

    def check_integrity(self) -> None:
        """Raises IntegrityError for a mapping that nobody uses."""
        with self._lock:
            for mapping in self._mappings.values():
                if mapping.num_users <= 0:
                    raise IntegrityError(
                        f"server tier: {mapping.nbytes} bytes are mapped for {mapping.num_users} users"
                    )


def _check(fd: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise MappingError(f"what came as its memory cannot be looked at: {error.strerror}") from error
        raise MappingError("what came as its memory is no memfd") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise MappingError("its memory is not sealed: it could become shorter while it is in use")
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise MappingError(f"its memory has {size} bytes, fewer than the {nbytes} that it names")
