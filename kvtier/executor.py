"""Where copies and I/O run: off the engine's thread, through a bounded queue, restores before stores."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Executor", "ThreadExecutor"]

logger = logging.getLogger("kvtier.executor")


class Executor(Protocol):
    """Runs jobs that catch their own failures."""

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        """Queue a job; False, and the job is not kept, when the queue is full or closed. Never blocks.

        urgent: runs before every job that is not (restores before stores); in order among its kind.
        """

    def close(self, timeout: float) -> list[Callable[[], None]]:
        """Take no more jobs, wait for the running one at most `timeout` seconds, return those never begun."""


class ThreadExecutor:
    """One daemon thread and two queues with one bound.

    Mutable state: `_urgent`, `_other`, `_closed`, guarded by `_wake`.
    """

    def __init__(self, name: str, max_queued: int) -> None:
        self._max_queued = max_queued
        self._urgent: deque[Callable[[], None]] = deque()
        self._other: deque[Callable[[], None]] = deque()
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        with self._wake:
            if self._closed or len(self._urgent) + len(self._other) >= self._max_queued:
                return False
            (self._urgent if urgent else self._other).append(job)
            self._wake.notify()
            return True

    def close(self, timeout: float) -> list[Callable[[], None]]:
        with self._wake:
            self._closed = True
            left = [*self._urgent, *self._other]
            self._urgent.clear()
            self._other.clear()
            self._wake.notify()
        self._thread.join(timeout)
        return left

    @property
    def idle(self) -> bool:
        """True when the thread has ended: nothing of ours can still touch memory."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException:  # the top of a thread: a job that leaks an exception must not end the copies
                logger.exception("a job let an exception out")

    def _next(self) -> Callable[[], None] | None:
        with self._wake:
            while not self._urgent and not self._other:
                if self._closed:
                    return None
                self._wake.wait()
            return (self._urgent or self._other).popleft()
