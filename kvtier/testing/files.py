"""Files that fail as devices do: errors, short and torn transfers, flipped bits, full file systems, stalls."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvtier.tiers.disk.files import Files

__all__ = ["Fault", "FaultyFiles"]

GATE_TIMEOUT_S = 30.0


class Fault(StrEnum):
    """What can go wrong with one call."""

    READ_ERROR = "read_error"
    """EIO."""
    WRITE_ERROR = "write_error"
    """EIO; nothing is written."""
    SHORT_READ = "short_read"
    """A part of what was asked, in whole pages where there are several; the rest may be asked for again."""
    SHORT_WRITE = "short_write"
    """A part is written, and the call says so."""
    TORN_WRITE = "torn_write"
    """A part is written, then EIO."""
    LOST_WRITE = "lost_write"
    """A part is written, and the call says that all was: a device that lies."""
    FLIP_ON_READ = "flip_on_read"
    """One bit of what was read is another."""
    FLIP_ON_WRITE = "flip_on_write"
    """One bit of what is written is another."""
    FULL_ON_WRITE = "full_on_write"
    """ENOSPC; nothing is written."""
    FULL_ON_ALLOCATE = "full_on_allocate"
    """ENOSPC."""
    NO_DIRECT = "no_direct"
    """EINVAL from an open for direct I/O."""
    NO_DESCRIPTOR = "no_descriptor"
    """EMFILE from an open."""
    STUCK = "stuck"
    """EBUSY from an unlink."""
    SLOW = "slow"
    """The call of read or write begins with `pause`."""


@dataclass(slots=True)
class _Rule:
    fault: Fault
    probability: float
    skip: int
    times: int | None
    where: str


class FaultyFiles(Files):
    """Real files with faults between, by rules that `inject` adds. Any thread.

    seed: of the one random generator; `repr` names it, for assertion messages. pause: called for `Fault.SLOW`.
    counts: faults injected so far, by kind. calls: of preadv and pwritev, by name.
    Mutable state: rules, counts, gates, guarded by `_lock`.
    """

    def __init__(self, seed: int = 0, pause: Callable[[], None] | None = None) -> None:
        self.seed = seed
        self.counts: Counter[Fault] = Counter()
        self.calls: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._pause = pause
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._gates: dict[str, threading.Event] = {}
        self._waiting = threading.Semaphore(0)

    def __repr__(self) -> str:
        return f"FaultyFiles(seed={self.seed}, injected={dict(self.counts)})"

    # ---- rules ---------------------------------------------------------------------------------------------------

    def inject(
        self, fault: Fault, *, probability: float = 1.0, skip: int = 0, times: int | None = None, where: str = ""
    ) -> None:
        """From the call after the next `skip` on, at most `times` times, each with `probability`.

        where: part of the path of the files concerned.
        """
        with self._lock:
            self._rules.append(_Rule(fault, probability, skip, times, where))

    def heal(self) -> None:
        """Drop every rule and open every gate; counts stay."""
        with self._lock:
            self._rules.clear()
        self.release("read")
        self.release("write")

    def hold(self, what: str) -> None:
        """Stall each 'read' or 'write' from now until `release`; a test that forgets it fails after half a minute."""
        with self._lock:
            self._gates[what] = threading.Event()

    def release(self, what: str) -> None:
        with self._lock:
            gate = self._gates.pop(what, None)
        if gate is not None:
            gate.set()

    def wait_stalled(self, number: int = 1) -> None:
        """Block until so many calls more have come to a gate."""
        for _ in range(number):
            assert self._waiting.acquire(timeout=GATE_TIMEOUT_S), f"nobody came to a gate of {self}"

    # ---- Files ---------------------------------------------------------------------------------------------------

    def open(self, name: str, flags: int, directory: int) -> int:
        if flags & os.O_DIRECT and self._strikes(Fault.NO_DIRECT, directory, name):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self._strikes(Fault.NO_DESCRIPTOR, directory, name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(name, flags, directory)

    def unlink(self, name: str, directory: int) -> None:
        if self._strikes(Fault.STUCK, directory, name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        super().unlink(name, directory)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail(Fault.FULL_ON_ALLOCATE, fd, errno.ENOSPC)
        super().allocate(fd, nbytes)

    def preadv(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        self._begin("read", fd)
        self._fail(Fault.READ_ERROR, fd, errno.EIO)
        if self._strikes(Fault.SHORT_READ, fd):
            vectors = self._part(vectors)
        done = super().preadv(fd, vectors, offset)
        if done and self._strikes(Fault.FLIP_ON_READ, fd):
            self._flip(vectors, done)
        return done

    def pwritev(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        self._begin("write", fd)
        self._fail(Fault.WRITE_ERROR, fd, errno.EIO)
        self._fail(Fault.FULL_ON_WRITE, fd, errno.ENOSPC)
        if self._strikes(Fault.SHORT_WRITE, fd):
            return super().pwritev(fd, self._part(vectors), offset)
        if self._strikes(Fault.TORN_WRITE, fd):
            super().pwritev(fd, self._part(vectors), offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._strikes(Fault.LOST_WRITE, fd):
            super().pwritev(fd, self._part(vectors), offset)
            return sum(map(len, vectors))
        if self._strikes(Fault.FLIP_ON_WRITE, fd):
            return self._write_flipped(fd, vectors, offset)
        return super().pwritev(fd, vectors, offset)

    # ---- faults --------------------------------------------------------------------------------------------------

    def _begin(self, what: str, fd: int) -> None:
        with self._lock:
            self.calls[what] += 1
            gate = self._gates.get(what)
        if gate is not None:
            self._waiting.release()
            assert gate.wait(GATE_TIMEOUT_S), f"the gate for every {what} was never opened: {self}"
        if self._pause is not None and self._strikes(Fault.SLOW, fd):
            self._pause()

    def _fail(self, fault: Fault, fd: int, code: int) -> None:
        if self._strikes(fault, fd):
            raise OSError(code, os.strerror(code))

    def _strikes(self, fault: Fault, fd: int, name: str = "") -> bool:
        with self._lock:
            for rule in self._rules:
                if rule.fault is not fault or rule.times == 0 or not self._concerns(rule, fd, name):
                    continue
                if rule.skip:
                    rule.skip -= 1
                elif self._random.random() < rule.probability:
                    rule.times = None if rule.times is None else rule.times - 1
                    self.counts[fault] += 1
                    return True
        return False

    @staticmethod
    def _concerns(rule: _Rule, fd: int, name: str) -> bool:
        return not rule.where or rule.where in str(Path(f"/proc/self/fd/{fd}").readlink() / name)

    def _part(self, vectors: Sequence[memoryview]) -> list[memoryview]:
        """Some leading whole vectors or, of a single one, some leading sectors; at least one byte."""
        with self._lock:
            if len(vectors) > 1:
                return list(vectors[: self._random.randrange(1, len(vectors))])
            sectors = max(1, len(vectors[0]) // 512)
            return [vectors[0][: 512 * self._random.randrange(1, sectors + 1)]]

    def _bit_of(self, nbytes: int) -> tuple[int, int]:
        with self._lock:
            return self._random.randrange(nbytes), 1 << self._random.randrange(8)

    def _flip(self, vectors: Sequence[memoryview], nbytes: int) -> None:
        at, bit = self._bit_of(nbytes)
        for vector in vectors:
            if at < len(vector):
                vector[at] ^= bit
                return
            at -= len(vector)

    def _write_flipped(self, fd: int, vectors: Sequence[memoryview], offset: int) -> int:
        """A damaged copy is written: the caller's buffer is not the device's to change."""
        done = super().pwritev(fd, vectors, offset)
        at, bit = self._bit_of(done)
        start = at
        for vector in vectors:
            if start < len(vector):
                byte = bytes([vector[start] ^ bit])
                break
            start -= len(vector)
        else:
            return done
        plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(plain, byte, offset + at)
        finally:
            os.close(plain)
        return done
