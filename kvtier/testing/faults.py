"""A tier that fails as devices and clients do, by a seed."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvtier.errors import ConfigError
from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.wrapper import TierWrapper

__all__ = ["FaultyTier"]

STALL_BOUND_S = 60.0
"""A stalled call that nobody lets go raises TimeoutError after this, so that a broken test ends."""

_EXCEPTIONS: tuple[Callable[[], BaseException], ...] = (
    lambda: OSError(errno.EIO, "injected"),
    lambda: OSError(errno.ENOSPC, "injected"),
    lambda: ConnectionResetError("injected"),
    lambda: TimeoutError("injected"),
    lambda: MemoryError("injected"),
    lambda: RuntimeError("injected"),
    lambda: KeyError("injected"),
    lambda: asyncio.CancelledError("injected"),
)


class FaultyTier(TierWrapper):
    """Injects faults into reads, writes and `contains`; with every rate at 0 it is the tier within.

    seed: chooses every fault; one thread's calls fail the same way each time, several threads' as they interleave.
    raise_rate: of calls raise an exception of one of several types, half of them after the tier did its work.
    error_rate: of blocks end in ERROR; a read leaves rubbish in the buffer, a write keeps the block or does not.
    damage_rate: of blocks that would be read are DAMAGED and forgotten, the buffer full of rubbish.
    latency_s: each read and write first calls `wait` with up to so many seconds.

    Clear `read_gate` or `write_gate` to stall calls until it is set again, or the tier closed.

    Mutable state: random numbers and counts, guarded by `_lock`; `_num_stalled`, guarded by `_stalled`.
    """

    def __init__(
        self,
        tier: Tier,
        seed: int,
        *,
        raise_rate: float = 0.0,
        error_rate: float = 0.0,
        damage_rate: float = 0.0,
        latency_s: float = 0.0,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(tier)
        if latency_s and wait is None:
            raise ConfigError("latency needs a `wait` to spend it in")
        self.seed = seed
        self.read_gate = threading.Event()
        self.write_gate = threading.Event()
        self._raise_rate = raise_rate
        self._error_rate = error_rate
        self._damage_rate = damage_rate
        self._latency_s = latency_s
        self._wait = wait
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._injected: Counter[str] = Counter()
        self._stalled = threading.Condition()
        self._num_stalled = 0
        self.read_gate.set()
        self.write_gate.set()

    def __repr__(self) -> str:
        return f"FaultyTier({self._inner!r}, seed={self.seed}, injected={dict(self.injected)})"

    @property
    def injected(self) -> Mapping[str, int]:
        """Faults so far: `stall`, `latency`, `error`, `damage`, and exceptions by their type's name."""
        with self._lock:
            return dict(self._injected)

    def wait_until_stalled(self, num_calls: int = 1, timeout: float = STALL_BOUND_S / 2) -> bool:
        """Block until that many calls stand at a closed gate; False where they do not within `timeout` seconds."""
        with self._stalled:
            return self._stalled.wait_for(lambda: self._num_stalled >= num_calls, timeout)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._maybe_raising():
            return self._inner.contains(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        self._delay(self.read_gate)
        with self._maybe_raising():
            outcomes = self._inner.read(requests)
            return [self._spoil_read(r, outcome) for r, outcome in zip(requests, outcomes, strict=True)]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        self._delay(self.write_gate)
        with self._maybe_raising():
            dropped = [self._draw("error", self._error_rate / 2) for _ in requests]
            outcomes = iter(self._inner.write([r for r, drop in zip(requests, dropped, strict=True) if not drop]))
            return [WriteOutcome.ERROR if drop else self._spoil_write(next(outcomes)) for drop in dropped]

    def close(self) -> None:
        self.read_gate.set()
        self.write_gate.set()
        super().close()

    def _delay(self, gate: threading.Event) -> None:
        if not gate.is_set():
            self._stall(gate)
        if self._latency_s and self._wait is not None:
            with self._lock:
                self._injected["latency"] += 1
                seconds = self._random.uniform(0, self._latency_s)
            self._wait(seconds)

    def _stall(self, gate: threading.Event) -> None:
        with self._lock:
            self._injected["stall"] += 1
        with self._stalled:
            self._num_stalled += 1
            self._stalled.notify_all()
        try:
            if not gate.wait(STALL_BOUND_S):
                raise TimeoutError(f"nobody let a stalled call of {self!r} go")
        finally:
            with self._stalled:
                self._num_stalled -= 1

    @contextmanager
    def _maybe_raising(self) -> Iterator[None]:
        with self._lock:
            raises = self._random.random() < self._raise_rate
            error = self._random.choice(_EXCEPTIONS)()
            late = self._random.random() < 0.5
            if raises:
                self._injected[type(error).__name__] += 1
        if raises and not late:
            raise error
        yield
        if raises:
            raise error

    def _draw(self, kind: str, rate: float) -> bool:
        with self._lock:
            drawn = self._random.random() < rate
            if drawn:
                self._injected[kind] += 1
            return drawn

    def _spoil_read(self, request: ReadRequest, outcome: ReadOutcome) -> ReadOutcome:
        if self._draw("error", self._error_rate):
            spoiled = ReadOutcome.ERROR
        elif outcome is ReadOutcome.OK and self._draw("damage", self._damage_rate):
            self._inner.remove([request.key])
            spoiled = ReadOutcome.DAMAGED
        else:
            return outcome
        with self._lock:
            request.buffer[:] = self._random.randbytes(len(request.buffer))
        return spoiled

    def _spoil_write(self, outcome: WriteOutcome) -> WriteOutcome:
        return WriteOutcome.ERROR if self._draw("error", self._error_rate / 2) else outcome
