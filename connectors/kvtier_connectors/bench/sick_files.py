"""Files whose device hangs, or takes no writes, for as long as a fault of the benchmark asks for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from kvtier.testing.files import FaultyFiles

__all__ = ["SickFiles"]


class SickFiles(FaultyFiles):
    """Faults that `FaultyFiles` has, a device that hangs for as long as it likes, and one that only reads.

    Mutable state: the gates, which are events, and `read_only`; any thread.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.gates = {"read": threading.Event(), "write": threading.Event()}
        self.read_only = False
        for gate in self.gates.values():
            gate.set()

    def stall(self, what: str) -> None:
        """Each 'read' or 'write' hangs from now until `heal`."""
        self.gates[what].clear()

    def heal(self) -> None:
        super().heal()
        self.read_only = False
        for gate in self.gates.values():
            gate.set()

    def open(self, name: str, flags: int, directory: int) -> int:
        if flags & os.O_CREAT:
            self._check_writable()
        return super().open(name, flags, directory)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._check_writable()
        super().allocate(fd, nbytes)

    def preadv(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        self.gates["read"].wait()
        return super().preadv(fd, vectors, offset)

    def pwritev(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        self.gates["write"].wait()
        self._check_writable()
        return super().pwritev(fd, vectors, offset)

    def _check_writable(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
