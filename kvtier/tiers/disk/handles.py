"""Open descriptors of segments, at most so many at a time: a large cache has more files than a process may open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.tiers.disk.files import Files

__all__ = ["Handles"]

MAX_OPEN = 128


class _Handle:
    __slots__ = ("doomed", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.doomed = False


class Handles:
    """The segments of one directory by name. A descriptor in use stays open, whatever is dropped or closed meanwhile.

    Mutable state: `_open`, `_closed`, guarded by `_lock`, under which nothing is opened or closed. Any thread.
    """

    def __init__(self, files: Files, directory: int, flags: int, max_open: int = MAX_OPEN) -> None:
        self._files = files
        self._directory = directory
        self._flags = os.O_RDWR | flags
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """The descriptor of a segment, until the end of the block. OSError when it cannot be opened."""
        handle = self._find(name) or self._add(name)
        try:
            yield handle.fd
        finally:
            with self._lock:
                handle.users -= 1
                idle = handle.doomed and not handle.users
            if idle:
                self._files.close(handle.fd)

    def drop(self, name: str) -> None:
        """Close a segment's descriptor, now or after its last use."""
        with self._lock:
            handle = self._open.pop(name, None)
            idle = handle is not None and self._doom(handle)
        if handle is not None and idle:
            self._files.close(handle.fd)

    def close(self) -> None:
        """Close all, those in use after their last use."""
        with self._lock:
            self._closed = True
            idle = [handle for handle in self._open.values() if self._doom(handle)]
            self._open.clear()
        for handle in idle:
            self._files.close(handle.fd)

    @staticmethod
    def _doom(handle: _Handle) -> bool:
        handle.doomed = True
        return not handle.users

    def _find(self, name: str) -> _Handle | None:
        with self._lock:
            handle = self._open.get(name)
            if handle is not None:
                handle.users += 1
                self._open.move_to_end(name)
            return handle

    def _add(self, name: str) -> _Handle:
        handle = _Handle(self._files.open(name, self._flags, self._directory))
        unused: list[_Handle] = []
        with self._lock:
            if self._closed:
                handle.doomed = True
            elif (other := self._open.get(name)) is not None:  # another thread was faster
                unused.append(handle)
                handle = other
                handle.users += 1
            else:
                self._open[name] = handle
                unused = self._surplus()
        for old in unused:
            self._files.close(old.fd)
        return handle

    def _surplus(self) -> list[_Handle]:
        surplus = len(self._open) - self._max_open
        if surplus <= 0:
            return []
        names = [name for name, handle in self._open.items() if not handle.users][:surplus]
        return [self._open.pop(name) for name in names]
