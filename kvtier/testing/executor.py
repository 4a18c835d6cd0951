"""An executor that runs jobs when the test says so, in the order the test chooses."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["InlineExecutor", "ManualExecutor"]


class ManualExecutor:
    """Keeps jobs until `run_next` or `run_all`; obeys the same bounds and order as the real one.

    max_queued: of urgent jobs, and of others.
    """

    def __init__(self, max_queued: int = 1 << 30) -> None:
        self._max_queued = max_queued
        self._urgent: list[Callable[[], None]] = []
        self._other: list[Callable[[], None]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._urgent) + len(self._other)

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        queue = self._urgent if urgent else self._other
        if self._closed or len(queue) >= self._max_queued:
            return False
        queue.append(job)
        return True

    def run_next(self, position: int = 0) -> bool:
        """Run the job at `position`, counted in the real order.

        False when there is none. `position` > 0 is out of order.
        """
        if not len(self):
            return False
        position %= len(self)
        queue, place = (
            (self._urgent, position) if position < len(self._urgent) else (self._other, position - len(self._urgent))
        )
        queue.pop(place)()
        return True

    def run_all(self) -> int:
        """Run until nothing is queued; how many ran."""
        ran = 0
        while self.run_next():
            ran += 1
        return ran

    def close(self, timeout: float) -> list[Callable[[], None]]:
        del timeout  # nothing is ever running between calls
        self._closed = True
        left = [*self._urgent, *self._other]
        self._urgent.clear()
        self._other.clear()
        return left


class InlineExecutor:
    """Runs each job within `try_submit`."""

    def __init__(self) -> None:
        self._closed = False

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        del urgent
        if self._closed:
            return False
        job()
        return True

    def close(self, timeout: float) -> list[Callable[[], None]]:
        del timeout
        self._closed = True
        return []
