"""What harms servers again and again while traffic goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.errors import KVTierError

__all__ = ["Habits"]

REST_TIMEOUT_S = 60.0


class Habit:
    """Something that a thread of its own does again and again, from the first time until `rest`."""

    def __init__(self, work: Callable[[], object], pause_s: float, times: int | None) -> None:
        self._work = work
        self._pause_s = pause_s
        self._times = times
        self._resting = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-bench-habit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._resting.is_set() and self._times != 0:
            # It acts on servers that are being harmed: one that does not answer is no failure of the benchmark.
            with contextlib.suppress(KVTierError, OSError):
                self._work()
            self._times = None if self._times is None else self._times - 1
            self._resting.wait(self._pause_s)

    def rest(self) -> None:
        """Returns when it does nothing any more. KVTierError when that takes a minute."""
        self._resting.set()
        self._thread.join(REST_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVTierError("what harms the servers does not end")


@dataclass(slots=True)
class Habits:
    """What threads do to servers, until they rest. Owns the threads."""

    habits: list[Habit] = field(default_factory=list, kw_only=True)

    def keep_doing(self, work: Callable[[], object], *, pause_s: float = 0.0, times: int | None = None) -> None:
        """On a thread, until `rest`, or so many times. What it raises of servers that do not answer is ignored."""
        self.habits.append(Habit(work, pause_s, times))

    def rest(self) -> None:
        while self.habits:
            self.habits.pop().rest()
