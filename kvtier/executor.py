"""Where copies and I/O run: off the engine's thread, through bounded queues, restores before stores."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtier.errors import ConfigError

__all__ = ["Executor", "ThreadExecutor"]

logger = logging.getLogger("kvtier.executor")


class Executor(Protocol):
    """Runs jobs that catch their own failures."""

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        """Queue a job; False, and the job is not kept, when the queue is full or closed. Never blocks.

        urgent: runs before every job that is not (restores before stores); in order among its kind.
        """

    def close(self, timeout: float) -> list[Callable[[], None]]:
        """Take no more jobs, wait for the running ones at most `timeout` seconds, return those never begun."""


class ThreadExecutor:
    """Daemon threads and two queues, of at most `max_queued` jobs each, so that stores never crowd out restores.

    Of two or more threads, one never runs a job that is not urgent: a restore finds a thread even when every store
    hangs. Jobs of one kind begin in order; with several threads they may end in another.

    Mutable state: `_urgent`, `_other`, `_others_running`, `_closed`, guarded by `_wake`.
    """

    def __init__(self, name: str, max_queued: int, num_threads: int = 1) -> None:
        if max_queued < 1 or num_threads < 1:
            raise ConfigError(f"an executor needs a queue and a thread, not {max_queued} and {num_threads}")
        self._max_queued = max_queued
        self._max_others_running = max(1, num_threads - 1)
        self._urgent: deque[Callable[[], None]] = deque()
        self._other: deque[Callable[[], None]] = deque()
        self._others_running = 0
        self._closed = False
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        try:
            for i in range(num_threads):
                thread_name = name if num_threads == 1 else f"{name}-{i}"
                thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # no more threads to be had: those that began must not wait for ever
            self.close(0)
            raise

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        queue = self._urgent if urgent else self._other
        with self._wake:
            if self._closed or len(queue) >= self._max_queued:
                return False
            queue.append(job)
            self._wake.notify()
            return True

    def close(self, timeout: float) -> list[Callable[[], None]]:
        """As the protocol says; `timeout` is for all threads together. Called by a job, it waits for the others."""
        with self._wake:
            self._closed = True
            left = [*self._urgent, *self._other]
            self._urgent.clear()
            self._other.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return left

    @property
    def idle(self) -> bool:
        """True when every thread has ended: nothing of ours can still touch memory."""
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (begun := self._next()) is not None:
            job, urgent = begun
            try:
                job()
            except BaseException:  # the top of a thread: a job that leaks an exception must not end the copies
                logger.exception("a job let an exception out")
            finally:
                # Not kept until the next job comes: it holds the caller's buffers.
                del job, begun
                if not urgent:
                    self._end_other()

    def _next(self) -> tuple[Callable[[], None], bool] | None:
        with self._wake:
            while True:
                if self._urgent:
                    return self._urgent.popleft(), True
                if self._other and self._others_running < self._max_others_running:
                    self._others_running += 1
                    return self._other.popleft(), False
                if self._closed:
                    return None
                self._wake.wait()

    def _end_other(self) -> None:
        with self._wake:
            self._others_running -= 1
            if self._other:
                self._wake.notify()
