"""Addresses at which the memory of one run of the server after the other appears: the same for whoever copies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, ConfigError

__all__ = ["MAX_PLACED_BYTES", "Addresses"]

MAX_PLACED_BYTES = 1 << 40
"""Of a server's memory, at most. Addresses cost nothing but themselves."""
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000  # of Linux; the module has no name for it before Python 3.13


class Addresses:
    """Owns a stretch of addresses with nothing behind them until memory is placed there.

    Touching what is not placed ends the process: whoever has a slot's lease has its memory too. A fork's child has none
    of it. Calls are the owner's, one at a time.
    """

    def __init__(self, nbytes: int = MAX_PLACED_BYTES) -> None:
        """Raises ConfigError where the machine does not give so many addresses."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
            self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
            self._address = int(self._bytes.ctypes.data)
            self.take_away(nbytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"host.pool = 'server' needs {nbytes} bytes of addresses, without memory behind them, and this process "
                f"cannot have them ({error}): see `ulimit -v`, or set host.pool = 'own'"
            ) from error

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """All of them as bytes, of which those may be touched that memory is placed behind."""
        if self._bytes is None:
            raise ClosedError("the host pool is closed")
        return self._bytes

    def place(self, fd: int, nbytes: int) -> None:
        """Have the first `nbytes` of a file from the first address on, in place of what was there. Raises OSError."""
        self._remap(nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)

    def take_away(self, nbytes: int) -> None:
        """Have nothing behind the first `nbytes`. Raises OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._remap(nbytes, 0, flags, -1)

    def close(self) -> None:
        """Idempotent. A view that is still about keeps them, and what is placed there."""
        if self._bytes is None:
            return
        self._bytes = None
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map  # or we would keep it after the last view

    def _remap(self, nbytes: int, protection: int, flags: int, fd: int) -> None:
        if nbytes > len(self.buffer):
            raise OSError(errno.ENOMEM, f"more than the {len(self.buffer)} bytes of addresses set aside for it")
        at = ctypes.c_void_p(self._address)
        found = self._libc.mmap(at, ctypes.c_size_t(nbytes), protection, flags, fd, ctypes.c_long(0))
        if found != self._address:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            self._libc.madvise(at, ctypes.c_size_t(nbytes), advice)
