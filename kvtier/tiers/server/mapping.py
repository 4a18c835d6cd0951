"""A server's memory in this process: mapped once for each run of the server, whatever connections there are to it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, IntegrityError
from kvtier.memory import MADV_POPULATE_WRITE
from kvtier.tiers.server.addresses import Addresses

__all__ = ["Mapping", "MappingBusyError", "MappingError", "Mappings"]

logger = logging.getLogger("kvtier.server")

GRANULE_BYTES = 1 << 16
"""By which it is remembered what is present: a slot's first and last may be so in part, and fault."""
CHUNK_BYTES = 16 << 20
"""What is fetched at a time, and once all of it was made: some milliseconds, for which an end waits."""
POLL_S = 0.05
PATIENCE_S = 60.0
"""For the server to make more of its memory; what it makes later comes here slot by slot."""


class MappingError(Exception):
    """A descriptor that must not be mapped; the text says why."""


class MappingBusyError(Exception):
    """It cannot be mapped now; the text says why."""


class Mapping:
    """Memory of one run of the server, shared with it and with every process of the same tenant.

    Whoever has it from `Mappings.take` may use slots of it until his `Mappings.release`. Any thread. One of its own
    fetches the pages that the server has made, so that no copy waits for them.

    Mutable state: `_is_present`, of which both write nothing but ones.
    """

    def __init__(self, identity: tuple[int, int], fd: int, nbytes: int, addresses: Addresses | None = None) -> None:
        """addresses: where it is to be; None: anywhere."""
        self.identity = identity
        """Of the file: another run of the server has another."""
        self.nbytes = nbytes
        self.num_users = 0
        self._addresses = addresses
        self._map: mmap.mmap | None = None
        self.fd: int | None = None
        """For other processes of ours, where it is at addresses set aside; closed with it."""
        try:
            if addresses is not None:
                self.fd = os.dup(fd)
                addresses.place(fd, nbytes)
            else:
                self._map = mmap.mmap(fd, nbytes)
                # A child has no use for it, and must not write there: its stores would be nobody's.
                self._map.madvise(mmap.MADV_DONTFORK)
        except (OSError, ValueError, OverflowError) as error:
            self.close_fd()
            raise MappingError(f"its memory of {nbytes} bytes cannot be mapped here: {error}") from error
        except ClosedError:
            self.close_fd()
            raise
        self.buffer: npt.NDArray[np.uint8]
        if addresses is not None:
            self.buffer = addresses.buffer[:nbytes]
        elif self._map is not None:
            self.buffer = np.frombuffer(self._map, np.uint8)
        self._address = int(self.buffer.ctypes.data)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._is_present = bytearray(-(-nbytes // GRANULE_BYTES))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._fetch_all, name="kvtier-server-map", daemon=True
        )
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            logger.warning("server.url: the server's memory is not fetched ahead (%s): first copies are slower", error)
            self._thread = None

    def wait_present(self, timeout: float) -> bool:
        """Block until every page is here, at most `timeout` seconds; for benchmarks and tests."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._is_present.find(0) < 0

    def slot(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes that were given to this process to fill or to read.

        Their pages come here at once, the first time: one by one, as they are touched, they would take longer than the
        copy. No others do: those that the server has not made yet are its to make, and to be charged for.
        """
        first, end = offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES)
        if self._is_present.find(0, first, end) >= 0:
            begin = offset - offset % mmap.PAGESIZE
            self._fetch(begin, offset + nbytes - begin)
            self._is_present[first:end] = b"\1" * (end - first)
        return self.buffer[offset : offset + nbytes]

    def _fetch(self, start: int, nbytes: int) -> bool:
        """False where a kernel before 5.14 refuses it: then touching a page brings it."""
        # ctypes lets other threads run meanwhile.
        at, length = ctypes.c_void_p(self._address + start), ctypes.c_size_t(nbytes)
        return not self._libc.madvise(at, length, MADV_POPULATE_WRITE)

    def _fetch_all(self) -> None:
        """In the order in which the server makes them, and as far as it has."""
        for start in range(0, self.nbytes, CHUNK_BYTES):
            size, waited_s = min(CHUNK_BYTES, self.nbytes - start), 0.0
            while not self._was_made(start, size):
                if waited_s >= PATIENCE_S or self._stop.wait(POLL_S):
                    return
                waited_s += POLL_S
            if self._stop.is_set() or not self._fetch(start, size):
                return
            first, end = start // GRANULE_BYTES, -(-(start + size) // GRANULE_BYTES)
            self._is_present[first:end] = b"\1" * (end - first)

    def _was_made(self, start: int, nbytes: int) -> bool:
        """Whether all of these pages are in memory, if not in this process's. Makes none."""
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        at, length = ctypes.c_void_p(self._address + start), ctypes.c_size_t(nbytes)
        failed = self._libc.mincore(at, length, ctypes.c_void_p(pages.ctypes.data))
        return not failed and bool((pages & 1).all())

    def stop(self) -> None:
        """Fetch nothing ahead any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close_fd(self) -> None:
        """No other process is to map it any more. Idempotent."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def leave(self) -> None:
        """Views of it may be used after its last user is gone: it goes with the last of them."""
        self._addresses = None

    def unmap(self) -> None:
        """Nobody uses it any more."""
        self.stop()
        del self.buffer
        if self._addresses is not None:
            with contextlib.suppress(OSError, ClosedError):  # closed, with all that was placed there
                self._addresses.take_away(self.nbytes)
        elif self._map is not None:
            with contextlib.suppress(BufferError):  # an error's traceback may hold a view: it goes with that
                self._map.close()
            self._map = None
        self.close_fd()


class Mappings:
    """The mappings that are in use: more than one only while connections to an earlier run of the server are about,
    and never where they are to be at the same addresses.

    Any thread. Mutable state: `_mappings`, and the users of each, guarded by `_lock`, a leaf.
    """

    def __init__(self, addresses: Addresses | None = None) -> None:
        """addresses: where each is to be; None: anywhere."""
        self._addresses = addresses
        self._lock = threading.Lock()
        self._mappings: dict[tuple[int, int], Mapping] = {}

    @property
    def mapped_bytes(self) -> int:
        with self._lock:
            return sum(mapping.nbytes for mapping in self._mappings.values())

    def take(self, fd: int, nbytes: int) -> Mapping:
        """The memory of `nbytes` behind a descriptor, which stays the caller's. Raises MappingError, or
        MappingBusyError while that of an earlier run is in use at the same addresses.

        Only what cannot become shorter is mapped: touching what is no longer there would kill this process.
        """
        _check(fd, nbytes)
        found = os.fstat(fd)
        identity = (found.st_dev, found.st_ino)
        with self._lock:
            mapping = self._mappings.get(identity)
            if mapping is None:
                if self._addresses is not None and self._mappings:
                    raise MappingBusyError("its memory waits for blocks of its run before, which are still copied here")
                mapping = self._mappings[identity] = Mapping(identity, fd, nbytes, self._addresses)
            elif mapping.nbytes != nbytes:
                raise MappingError(f"its memory has {nbytes} bytes, and had {mapping.nbytes} before")
            mapping.num_users += 1
            return mapping

    def share(self, mapping: Mapping) -> None:
        """One more user of a mapping that has one."""
        with self._lock:
            mapping.num_users += 1

    def wait_present(self, timeout: float) -> bool:
        """As `Mapping.wait_present`, of each."""
        with self._lock:
            mappings = list(self._mappings.values())
        present = [mapping.wait_present(timeout) for mapping in mappings]
        return all(present)

    def release(self, mapping: Mapping) -> None:
        """One user less; the last one unmaps it."""
        with self._lock:
            mapping.num_users -= 1
            if mapping.num_users:
                return
            if self._addresses is not None:  # before another is placed there
                mapping.unmap()
            del self._mappings[mapping.identity]
        if self._addresses is None:
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
