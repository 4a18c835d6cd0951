"""Executors: bounded, restores first, and over when told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.executor import ThreadExecutor
from kvtier.testing import InlineExecutor, ManualExecutor

SOON_S = 30.0


class Gate:
    """A job that waits until it is let go."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> None:
        self.running.set()
        assert self.go.wait(SOON_S)


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor("kvtier-test", max_queued=3)
    yield executor
    executor.close(SOON_S)


def submit(executor: Any, done: list[str], name: str, *, urgent: bool = False) -> bool:
    return bool(executor.try_submit(lambda: done.append(name), urgent=urgent))


def fill(executor: Any, done: list[str]) -> None:
    assert submit(executor, done, "store 1")
    assert submit(executor, done, "store 2")
    assert submit(executor, done, "restore", urgent=True)


def overfill(executor: Any, done: list[str]) -> None:
    """Both queues to their bound of 3, which the other queue's jobs do not count for."""
    fill(executor, done)
    assert submit(executor, done, "store 3")
    assert not submit(executor, done, "store 4")
    assert submit(executor, done, "restore 2", urgent=True)
    assert submit(executor, done, "restore 3", urgent=True)
    assert not submit(executor, done, "restore 4", urgent=True)


IN_ORDER = ["restore", "restore 2", "restore 3", "store 1", "store 2", "store 3"]


def occupy(executor: ThreadExecutor, gate: Gate) -> Gate:
    assert executor.try_submit(gate, urgent=False)
    assert gate.running.wait(SOON_S)
    return gate


def test_urgent_jobs_go_first_and_each_queue_has_a_bound(executor: ThreadExecutor) -> None:
    gate, done, last = Gate(), list[str](), threading.Event()
    occupy(executor, gate)
    overfill(executor, done)
    gate.go.set()
    while not executor.try_submit(last.set, urgent=False):
        pass
    assert last.wait(SOON_S)
    assert done == IN_ORDER


def test_a_job_that_raises_is_logged_and_the_next_one_runs(
    executor: ThreadExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise SystemExit("not the end")

    last = threading.Event()
    executor.try_submit(fail, urgent=False)
    executor.try_submit(last.set, urgent=False)
    assert last.wait(SOON_S)
    assert "not the end" in caplog.text


def test_close_returns_what_never_began_and_waits_for_what_runs() -> None:
    executor, gate, done = ThreadExecutor("kvtier-test", max_queued=3), Gate(), list[str]()
    occupy(executor, gate)
    fill(executor, done)
    left = executor.close(timeout=0)
    assert not executor.idle
    assert not submit(executor, done, "late")
    for job in left:
        job()
    assert done == ["restore", "store 1", "store 2"]
    gate.go.set()
    assert executor.close(SOON_S) == []
    assert executor.idle


def test_an_idle_executor_closes_at_once() -> None:
    executor = ThreadExecutor("kvtier-test", max_queued=1)
    assert executor.close(SOON_S) == []
    assert executor.idle


@pytest.mark.parametrize("wrong", [{"max_queued": 0}, {"max_queued": 1, "num_threads": 0}])
def test_an_executor_needs_a_queue_and_a_thread(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ThreadExecutor("kvtier-test", **wrong)


# ---- several threads -------------------------------------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor("kvtier-test", max_queued=8, num_threads=3)
    yield executor
    executor.close(SOON_S)
    assert executor.idle


def test_jobs_run_on_several_threads_at_once(three: ThreadExecutor) -> None:
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        assert three.try_submit(gate, urgent=True)
    assert all(gate.running.wait(SOON_S) for gate in gates)
    for gate in gates:
        gate.go.set()


def test_a_restore_finds_a_thread_when_every_store_hangs(three: ThreadExecutor) -> None:
    hanging = [occupy(three, Gate()) for _ in range(2)]
    waiting = [Gate() for _ in range(3)]
    for gate in waiting:
        assert three.try_submit(gate, urgent=False)
    for _ in range(20):
        restored = threading.Event()
        assert three.try_submit(restored.set, urgent=True)
        assert restored.wait(SOON_S)
    assert not any(gate.running.is_set() for gate in waiting)
    for gate in [*hanging, *waiting]:
        gate.go.set()
    assert all(gate.running.wait(SOON_S) for gate in waiting)


def test_a_store_that_ends_lets_the_next_one_begin_beside_a_restore(three: ThreadExecutor) -> None:
    stores = [occupy(three, Gate()) for _ in range(2)]
    restore, third = Gate(), Gate()
    assert three.try_submit(restore, urgent=True)
    assert restore.running.wait(SOON_S)
    assert three.try_submit(third, urgent=False)
    stores[0].go.set()
    assert third.running.wait(SOON_S)
    for gate in (stores[1], restore, third):
        gate.go.set()


def test_a_job_that_raises_gives_its_place_back(three: ThreadExecutor) -> None:
    def fail() -> None:
        raise RuntimeError("counted")

    for _ in range(5):
        assert three.try_submit(fail, urgent=False)
    stores = [occupy(three, Gate()) for _ in range(2)]
    for gate in stores:
        gate.go.set()


def test_every_job_runs_once_or_is_returned() -> None:
    executor, lock, ran = ThreadExecutor("kvtier-test", max_queued=10_000, num_threads=4), threading.Lock(), list[int]()

    def job(number: int) -> None:
        with lock:
            ran.append(number)

    def submit_many(first: int) -> None:
        for number in range(first, 4000, 4):
            assert executor.try_submit(partial(job, number), urgent=number % 3 == 0)

    with ThreadPoolExecutor(4) as threads:
        for running in [threads.submit(submit_many, first) for first in range(4)]:
            running.result()
    for left in executor.close(SOON_S):
        left()
    assert executor.idle
    assert sorted(ran) == list(range(4000))


def test_close_waits_for_all_threads_within_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, now, waits = ThreadExecutor("kvtier-test", max_queued=8, num_threads=3), [100.0], list[float]()
    gates = [occupy(executor, Gate()) for _ in range(2)]

    def joining(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout or 0.0)
        now[0] += 0.75 * (timeout or 0.0)

    with monkeypatch.context() as patched:
        patched.setattr("kvtier.executor.time.monotonic", lambda: now[0])
        patched.setattr(threading.Thread, "join", joining)
        assert executor.close(8.0) == []
    assert waits == [8.0, 2.0, 0.5]
    assert not executor.idle
    for gate in gates:
        gate.go.set()
    assert executor.close(SOON_S) == []
    assert executor.idle


def test_a_job_may_close_its_executor() -> None:
    executor, closed = ThreadExecutor("kvtier-test", max_queued=8, num_threads=2), threading.Event()

    def close() -> None:
        executor.close(SOON_S)
        closed.set()

    assert executor.try_submit(close, urgent=False)
    assert closed.wait(SOON_S)
    executor.close(SOON_S)
    assert executor.idle


def test_a_machine_without_threads_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError, match="new thread"):
            ThreadExecutor("kvtier-test", max_queued=8, num_threads=3)
    for thread in started:
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_a_job_that_has_ended_is_not_kept(executor: ThreadExecutor) -> None:
    class Buffer:
        pass

    buffer, ended = Buffer(), threading.Event()
    freed = threading.Event()
    weakref.finalize(buffer, freed.set)
    executor.try_submit(partial(lambda held: ended.set(), buffer), urgent=False)
    del buffer
    assert ended.wait(SOON_S)
    assert freed.wait(SOON_S)


# ---- executors for tests ---------------------------------------------------------------------------------------------


def test_the_manual_executor_keeps_the_same_order_and_bounds() -> None:
    executor, done = ManualExecutor(max_queued=3), list[str]()
    overfill(executor, done)
    assert len(executor) == 6
    assert executor.run_all() == 6
    assert done == IN_ORDER


def test_the_manual_executor_runs_out_of_order_when_told() -> None:
    executor, done = ManualExecutor(), list[str]()
    fill(executor, done)
    assert executor.run_next()
    assert executor.run_next(position=1)
    assert executor.run_all() == 1
    assert not executor.run_next()
    assert done == ["restore", "store 2", "store 1"]


def test_the_manual_executor_closes_like_the_real_one() -> None:
    executor, done = ManualExecutor(), list[str]()
    fill(executor, done)
    for job in executor.close(0):
        job()
    assert done == ["restore", "store 1", "store 2"]
    assert not submit(executor, done, "late")
    assert executor.run_all() == 0


def test_the_inline_executor_runs_within_the_call() -> None:
    executor, done = InlineExecutor(), list[str]()
    assert submit(executor, done, "now")
    assert executor.close(0) == []
    assert not submit(executor, done, "late")
    assert done == ["now"]
