"""Executors: bounded, restores first, and over when told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

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


def test_urgent_jobs_go_first_and_the_queue_has_a_bound(executor: ThreadExecutor) -> None:
    gate, done, last = Gate(), list[str](), threading.Event()
    executor.try_submit(gate, urgent=False)
    assert gate.running.wait(SOON_S)
    fill(executor, done)
    assert not submit(executor, done, "too many", urgent=True)
    gate.go.set()
    while not executor.try_submit(last.set, urgent=False):
        pass
    assert last.wait(SOON_S)
    assert done == ["restore", "store 1", "store 2"]


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
    executor.try_submit(gate, urgent=False)
    assert gate.running.wait(SOON_S)
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


def test_the_manual_executor_keeps_the_same_order_and_bound() -> None:
    executor, done = ManualExecutor(max_queued=3), list[str]()
    fill(executor, done)
    assert not submit(executor, done, "too many")
    assert len(executor) == 3
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
