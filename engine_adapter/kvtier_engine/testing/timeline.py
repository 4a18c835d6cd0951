"""Simulated time: a clock, what happens when, and things that are used by one at a time."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable

from kvtier.testing import FakeClock

__all__ = ["Event", "Lane", "SimulatedThreads", "Timeline"]

BOUND_S = 60.0
"""Real seconds after which a thread that does not give the turn back is a defect."""


class Event:
    """Something that will happen. `cancel` it, and it will not."""

    __slots__ = ("_action", "_timeline", "is_background", "when")

    def __init__(self, timeline: Timeline, when: float, action: Callable[[], None], *, is_background: bool) -> None:
        self._timeline = timeline
        self._action: Callable[[], None] | None = action
        self.when = when
        self.is_background = is_background

    @property
    def is_pending(self) -> bool:
        return self._action is not None

    def cancel(self) -> None:
        """Idempotent; does nothing once it has happened."""
        if self._action is not None:
            self._action = None
            self._timeline.num_background -= self.is_background

    def happen(self) -> None:
        action = self._action
        self.cancel()
        if action is not None:
            action()


class Timeline(FakeClock):
    """A clock that stands still but where it is moved, and the events on the way, in order of time and then of making.

    Two kinds: *background* events happen while the engine's thread computes, as copies and reads do; the others wait
    until it is free, as clients do. One thread runs at a time, whichever that is; so nothing here is locked, and a
    simulation is the same each time.
    """

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)
        self.num_background = 0
        """Background events that are to happen."""
        self._background: list[tuple[float, int, Event]] = []
        self._other: list[tuple[float, int, Event]] = []
        self._serials = itertools.count()

    def at(self, when: float, action: Callable[[], None], *, is_background: bool = False) -> Event:
        """Have `action` called at that time, or now where that is past."""
        event = Event(self, max(when, self._now), action, is_background=is_background)
        self.num_background += is_background
        heapq.heappush(self._background if is_background else self._other, (event.when, next(self._serials), event))
        return event

    def after(self, seconds: float, action: Callable[[], None], *, is_background: bool = False) -> Event:
        return self.at(self._now + seconds, action, is_background=is_background)

    def next_time(self) -> float | None:
        """When the next event of either kind happens; None without one."""
        times = [event.when for events in (self._background, self._other) if (event := self._first(events))]
        return min(times, default=None)

    def work_until(self, when: float) -> None:
        """The engine's thread works until then: background events happen on the way, each at its own time."""
        while (event := self._first(self._background)) is not None and event.when <= when:
            heapq.heappop(self._background)
            self._now = max(self._now, event.when)
            event.happen()
        self._now = max(self._now, when)

    def wait_until(self, when: float) -> None:
        """The engine's thread has nothing to do: it is free until then, and nothing happens before."""
        self._now = max(self._now, when)

    def run_due(self) -> int:
        """Have everything happen that is due by now; how much that was."""
        num_run = 0
        while True:
            due = [heap for heap in (self._background, self._other) if (e := self._first(heap)) and e.when <= self._now]
            if not due:
                return num_run
            _, _, event = heapq.heappop(min(due, key=lambda heap: heap[0][:2]))
            event.happen()
            num_run += 1

    @staticmethod
    def _first(events: list[tuple[float, int, Event]]) -> Event | None:
        while events and not events[0][2].is_pending:
            heapq.heappop(events)
        return events[0][2] if events else None


class Lane:
    """A device's bandwidth: one thing moves at a time, in the order in which they were asked for."""

    def __init__(self, timeline: Timeline, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        """Seconds for which it was used, those asked for included."""
        self._timeline = timeline
        self._free_at = 0.0

    def take(self, nbytes: int) -> float:
        """When so many bytes, asked for now, will have been moved."""
        seconds = nbytes / self.bytes_per_s
        self.busy_s += seconds
        self._free_at = max(self._free_at, self._timeline.now()) + seconds
        return self._free_at


class _Worker:
    """A thread that has the turn from when `go` is released until it releases `back`."""

    def __init__(self, threads: SimulatedThreads, name: str) -> None:
        self.go = threading.Semaphore(0)
        self.job: Callable[[], None] | None = None
        self.sleep: Event | None = None
        self._threads = threads
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            if self.job is None:
                return
            try:
                self.job()
            except BaseException as error:  # noqa: BLE001 - raised where the simulation runs
                self._threads.error = error
            self.job = None
            self._threads.back.release()


class SimulatedThreads:
    """An `Executor` whose jobs run at simulated times, with the bounds and the order of the real one.

    A job begins as soon as a thread is free, takes no time but where it calls `sleep_until`, and has the turn alone
    until then. What a job lets out is raised by the event that gave it the turn.
    """

    def __init__(self, timeline: Timeline, name: str, num_threads: int, max_queued: int = 1024) -> None:
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self._timeline = timeline
        self._max_queued = max_queued
        self._max_others_running = max(1, num_threads - 1)
        self._urgent: deque[Callable[[], None]] = deque()
        self._other: deque[Callable[[], None]] = deque()
        self._num_others = 0
        self._closed = False
        self._here = threading.local()
        self._workers = [_Worker(self, f"{name}-{i}") for i in range(num_threads)]
        self._idle = list(self._workers)
        self._dispatch: Event | None = None

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        queue = self._urgent if urgent else self._other
        if self._closed or len(queue) >= self._max_queued:
            return False
        queue.append(job)
        if self._dispatch is None or not self._dispatch.is_pending:
            self._dispatch = self._timeline.after(0.0, self._begin_jobs, is_background=True)
        return True

    def sleep_until(self, when: float) -> None:
        """Called by a job: it goes on at that time, and others have the turn until then. Elsewhere, and after `close`,
        no time passes."""
        worker: _Worker | None = getattr(self._here, "worker", None)
        if worker is None or self._closed:
            return
        worker.sleep = self._timeline.at(when, lambda: self._give_turn(worker), is_background=True)
        self.back.release()
        worker.go.acquire()

    def close(self, timeout: float) -> list[Callable[[], None]]:
        """As an executor's. What sleeps goes on at once."""
        self._closed = True
        left = [*self._urgent, *self._other]
        self._urgent.clear()
        self._other.clear()
        for worker in self._workers:
            if worker.sleep is not None and worker.sleep.is_pending:
                worker.sleep.cancel()
                self._give_turn(worker)
            worker.go.release()
            worker.thread.join(timeout)
        return left

    def _begin_jobs(self) -> None:
        while self._idle and not self._closed:
            if self._urgent:
                job, urgent = self._urgent.popleft(), True
            elif self._other and self._num_others < self._max_others_running:
                job, urgent = self._other.popleft(), False
                self._num_others += 1
            else:
                return
            worker = self._idle.pop()
            worker.job = self._wrapped(worker, job, urgent=urgent)
            self._give_turn(worker)

    def _wrapped(self, worker: _Worker, job: Callable[[], None], *, urgent: bool) -> Callable[[], None]:
        def run() -> None:
            self._here.worker = worker
            try:
                job()
            finally:
                self._num_others -= not urgent
                self._idle.append(worker)
                if not self._closed:
                    self._dispatch = self._timeline.after(0.0, self._begin_jobs, is_background=True)

        return run

    def _give_turn(self, worker: _Worker) -> None:
        worker.go.release()
        if not self.back.acquire(timeout=BOUND_S):
            raise RuntimeError("a simulated thread waits for something that only another one could give")
        error, self.error = self.error, None
        if error is not None:
            raise error
