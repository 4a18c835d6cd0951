"""Page-aligned memory for what direct I/O cannot take from the caller's buffer: headers, tails, unaligned blocks."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtier.frame import STRIDE_BYTES

__all__ = ["ScratchPool", "is_aligned"]

MIN_BYTES = 64 << 10
MAX_IDLE_BYTES = 32 << 20


def is_aligned(buffer: memoryview) -> bool:
    """Whether the buffer begins on a page, as direct I/O wants it."""
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return address % STRIDE_BYTES == 0


class ScratchPool:
    """Lends pieces of aligned memory and keeps up to `MAX_IDLE_BYTES` of them for the next.

    Lent at any moment: at most one piece for each thread in a tier's call, as long as one transfer. Any thread.
    Mutable state: `_idle`, `_idle_bytes`, guarded by `_lock`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[memoryview]] = {}  # by length, a power of two
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        return self._idle_bytes

    @contextmanager
    def take(self, nbytes: int) -> Iterator[memoryview]:
        """At least `nbytes` until the end of the block, with any content. OSError when there is no memory."""
        length = max(MIN_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else MIN_BYTES
        piece = self._find(length)
        if piece is None:
            piece = memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        try:
            yield piece
        finally:
            self._keep(length, piece)

    def close(self) -> None:
        """Let go of what is idle. Pieces that are still lent follow when they come back and are not kept again."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    def _find(self, length: int) -> memoryview | None:
        with self._lock:
            pieces = self._idle.get(length)
            if not pieces:
                return None
            self._idle_bytes -= length
            return pieces.pop()

    def _keep(self, length: int, piece: memoryview) -> None:
        with self._lock:
            if self._idle_bytes + length <= MAX_IDLE_BYTES:
                self._idle.setdefault(length, []).append(piece)
                self._idle_bytes += length
