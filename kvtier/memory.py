"""Pages of the host pool: one memfd mapping, touched in the background and, if asked for, locked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import threading
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, ConfigError

__all__ = ["PAGE_BYTES", "HostMemory", "MlockPinner", "Pinner", "PoolMemory"]

PAGE_BYTES = 4096
CHUNK_BYTES = 16 << 20  # one touch: short enough to stop within tens of milliseconds
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Who is given the descriptor can cut nothing off under those that have it mapped, which would end them."""
MADV_POPULATE_WRITE = 23  # Linux 5.14; makes pages present and writable and leaves their content alone

logger = logging.getLogger("kvtier.memory")


class HostMemory(NamedTuple):
    """What the slots of a host pool lie in, for other processes: a memfd of this one. run: counts the memories that a
    kvtier-server has had, one after the other, from 1 on; 0: this process's own, which stays."""

    fd: int
    nbytes: int
    run: int = 0


class Pinner(Protocol):
    """Keeps pages where they are: mlock on a CPU, page-locked registration under a GPU. Raises OSError on refusal."""

    def pin(self, address: int, nbytes: int) -> None: ...


class MlockPinner:
    """mlock(2). The kernel drops the lock when the mapping ends."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def pin(self, address: int, nbytes: int) -> None:
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _refusal(asked: int, pool_bytes: int, error: OSError) -> str:
    """Host memory, bytes asked, the limit, the setting: what an operator needs to act."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return (
        f"host memory: locking {asked} bytes of the {pool_bytes}-byte host pool was refused "
        f"({error.strerror or error}); the process's memlock limit (RLIMIT_MEMLOCK) is {limit}. "
        f'Raise it (ulimit -l, or LimitMEMLOCK= of the service), lower host.size, or set host.pin = "off"'
    )


class PoolMemory:
    """Owns a memfd, or its own descriptor of one, and one mapping of it.

    Usable as soon as the constructor returns: pages that the background thread has not touched yet are made by the
    first write to them, at a tenth of the speed. Touching never changes bytes, so it may race with stores.

    Mutable state: `_touched`, `_pinned`, written by the touching thread only (by the constructor before it starts).
    """

    def __init__(
        self,
        nbytes: int,
        *,
        fd: int | None = None,
        pin: str = "off",
        pinner: Pinner | None = None,
        touch: bool = True,
    ) -> None:
        """fd: of a memfd that is this long already, closed with this: another process's pool, or another mapping."""
        if nbytes < PAGE_BYTES:
            if fd is not None:
                os.close(fd)
            raise ConfigError(f"host.size must be at least one page ({PAGE_BYTES} bytes), not {nbytes}")
        self.nbytes = nbytes - nbytes % PAGE_BYTES
        self.fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, self.nbytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.fd, self.nbytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.fd)
            raise ConfigError(
                f"host memory: mapping {self.nbytes} bytes for the host pool failed ({error}); lower host.size"
            ) from error
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self._address = int(self.buffer.ctypes.data)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pinner: Pinner | None = None if pin == "off" else pinner or MlockPinner()
        self._touched = 0
        self._pinned = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if pin == "require":
            self._pin_all()
        if touch:
            self.start_touching()

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole mapping as bytes. Views of it must not outlive `close()`."""
        if self._bytes is None:
            raise ClosedError("the host pool is closed")
        return self._bytes

    @property
    def touched_bytes(self) -> int:
        return self._touched

    @property
    def pinned_bytes(self) -> int:
        return self._pinned

    def start_touching(self) -> None:
        """Have the pages made in the background, from now on. Once; returns at once."""
        self._thread = self._start_touching()

    def wait_touched(self, timeout: float) -> bool:
        """Block until every page is there, at most `timeout` seconds; for benchmarks and tests."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._touched == self.nbytes

    def close(self) -> None:
        """Unmap and close. Waits for the touch in progress (tens of milliseconds). Idempotent."""
        if self._bytes is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._bytes = None
        try:
            self._map.close()
        except BufferError:
            logger.warning("a view of the host pool is still in use at close; its memory goes with the last view")
        del self._map  # or we would keep it after the last view
        os.close(self.fd)

    def _pin_all(self) -> None:
        assert self._pinner is not None
        try:
            self._pinner.pin(self._address, self.nbytes)
        except OSError as error:
            self.close()
            raise ConfigError(_refusal(self.nbytes, self.nbytes, error)) from error
        self._pinned = self.nbytes

    def _start_touching(self) -> threading.Thread | None:
        """None where the process may start no more threads: first use makes the pages then."""
        thread = threading.Thread(target=self._touch_all, name="kvtier-touch", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            unpinned = "" if self._pinner is None or self._pinned else ", and none of it is locked"
            logger.warning(
                "host memory: the host pool is not touched ahead (%s): the first store into a page is slower%s",
                error,
                unpinned,
            )
            return None
        return thread

    def _touch_all(self) -> None:
        for start in range(0, self.nbytes, CHUNK_BYTES):
            if self._stop.is_set():
                return
            size = min(CHUNK_BYTES, self.nbytes - start)
            if not self._populate(start, size):
                return
            self._touched = start + size
            if self._pinner is not None and self._pinned == start:
                self._pin_chunk(start, size)

    def _populate(self, start: int, size: int) -> bool:
        """True when the pages are there. ctypes releases the GIL for the call; mmap.madvise would not."""
        result = self._libc.madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
        if result == 0:
            return True
        code = ctypes.get_errno()
        try:
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            os.posix_fallocate(self.fd, start, size)  # older kernels: the pages exist, their first use still faults
        except OSError as error:
            logger.warning(
                "host memory: touching the host pool stopped at %d of %d bytes: %s", start, self.nbytes, error
            )
            return False
        return True

    def _pin_chunk(self, start: int, size: int) -> None:
        assert self._pinner is not None
        try:
            self._pinner.pin(self._address + start, size)
        except OSError as error:
            logger.warning("%s. %d bytes stay pageable", _refusal(size, self.nbytes, error), self.nbytes - self._pinned)
            self._pinner = None
            return
        self._pinned += size
