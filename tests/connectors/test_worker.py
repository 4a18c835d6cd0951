"""The copying half: it waits for the engine's word that a block is written, and tells the end of every job once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numpy.typing import ArrayLike

from kvtier.executor import ThreadExecutor
from kvtier.testing import InlineExecutor, ManualExecutor
from kvtier_connectors.contract import WRITTEN, CopyDirection, CopyFailure, CopyJob, CopyResult, TransferPlan
from kvtier_connectors.worker import KVTierWorker
from kvtier_kernels import BlockPlanes, KernelBackend, default_backend
from kvtier_kernels.checks import Copies

BLOCK = 64
LIMIT_S = 10.0  # of waits that end at once unless something is broken


class Device:
    """A GPU pool whose writes show when an event fires, as those of a running kernel would; and host slots."""

    def __init__(self) -> None:
        self.pool = np.zeros((4, BLOCK), np.uint8)
        self.host = np.zeros(4 * BLOCK, np.uint8)
        self.unseen: dict[int, int] = {}
        self.waits: list[float] = []
        self.fires = True

    @property
    def planes(self) -> BlockPlanes:
        return BlockPlanes.from_arrays([self.pool])

    def write(self, block_id: int, value: int) -> None:
        self.unseen[block_id] = value

    def wait(self, timeout: float) -> bool:
        """The event, as a `WriteFence`."""
        self.waits.append(timeout)
        if self.fires:
            for block_id, value in self.unseen.items():
                self.pool[block_id] = value
        return self.fires

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        return self.host[index * BLOCK : (index + 1) * BLOCK]


class Gate:
    """A fence that opens when the test says so."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.open = threading.Event()

    def wait(self, timeout: float) -> bool:
        self.waiting.set()
        return self.open.wait(timeout)


class BrokenBackend(KernelBackend[BlockPlanes]):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def gather(
        self, planes: BlockPlanes, block_ids: ArrayLike, host: npt.NDArray[np.uint8], offsets: ArrayLike
    ) -> None:
        raise self.error

    scatter = gather

    def _gather(self, planes: BlockPlanes, copies: Copies, host: npt.NDArray[np.uint8]) -> None:
        raise NotImplementedError

    _scatter = _gather


def store(job_id: int, *block_ids: int) -> CopyJob:
    return CopyJob(job_id, CopyDirection.STORE, block_ids, tuple(b * BLOCK for b in block_ids))


def restore(job_id: int, *block_ids: int) -> CopyJob:
    return CopyJob(job_id, CopyDirection.RESTORE, block_ids, tuple(b * BLOCK for b in block_ids))


def plan(*jobs: CopyJob) -> TransferPlan:
    return TransferPlan(jobs, len(jobs))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def threaded(device: Device) -> Iterator[KVTierWorker]:
    worker = KVTierWorker(device.planes, device.host)
    yield worker
    worker.close(LIMIT_S)


@pytest.mark.bug("WR15")
def test_a_copy_begins_after_the_fence_fired(device: Device) -> None:
    executor = ManualExecutor()
    worker = KVTierWorker(device.planes, device.host, executor=executor)
    device.write(1, 7)
    worker.submit(plan(store(1, 1)), device)
    assert device.waits == [], "the engine's thread does not wait"
    executor.run_all()
    assert len(device.waits) == 1
    assert (device.slot(1) == 7).all()
    (result,) = worker.poll()
    assert (result.job_id, result.copied, result.failure) == (1, (True,), None)
    assert 0 <= result.seconds < LIMIT_S


@pytest.mark.bug("WR15")
def test_without_a_fence_nothing_is_copied(device: Device) -> None:
    worker = KVTierWorker(device.planes, device.host, executor=InlineExecutor())
    device.write(1, 7)
    device.slot(2)[:] = 9
    worker.submit(plan(store(1, 1), restore(2, 2)), None)
    assert worker.poll() == [
        CopyResult(1, (False,), CopyFailure.NO_FENCE),
        CopyResult(2, (False,), CopyFailure.NO_FENCE),
    ]
    assert not device.slot(1).any()
    assert not device.pool.any()


@pytest.mark.bug("WR15")
def test_a_fence_that_never_fires_fails_the_copy(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    worker = KVTierWorker(device.planes, device.host, executor=InlineExecutor())
    device.write(1, 7)
    device.fires = False
    worker.submit(plan(store(1, 1)), device)
    assert worker.poll() == [CopyResult(1, (False,), CopyFailure.RAISED)]
    assert not device.slot(1).any()
    assert "waited 30 s for the device" in caplog.text


def test_both_directions_move_the_right_bytes_and_are_counted(device: Device) -> None:
    worker = KVTierWorker(device.planes, device.host, executor=InlineExecutor())
    device.pool[0], device.pool[3] = 1, 2
    worker.submit(plan(store(1, 0, 3)), WRITTEN)
    device.pool[:] = 0
    worker.submit(plan(restore(2, 3, 0)), WRITTEN)
    assert [result.copied for result in worker.poll()] == [(True, True), (True, True)]
    assert (device.pool[:, 0] == [1, 0, 0, 2]).all()
    for direction in CopyDirection:
        assert worker.totals(direction).num_bytes == 2 * BLOCK


def test_restores_go_before_stores(device: Device) -> None:
    executor = ManualExecutor()
    worker = KVTierWorker(device.planes, device.host, executor=executor)
    worker.submit(plan(store(1, 0), store(2, 1), restore(3, 2)), WRITTEN)
    executor.run_next()
    assert [result.job_id for result in worker.poll()] == [3]
    executor.run_all()
    assert [result.job_id for result in worker.poll()] == [1, 2]


@pytest.mark.parametrize("error", [OSError("bad"), MemoryError(), KeyboardInterrupt()])
def test_a_copy_that_raises_fails_its_job_alone(device: Device, error: BaseException) -> None:
    broken = KVTierWorker(device.planes, device.host, executor=InlineExecutor(), backend=BrokenBackend(error))
    broken.submit(plan(store(1, 0, 1), restore(2, 2)), WRITTEN)
    assert broken.poll() == [
        CopyResult(1, (False, False), CopyFailure.RAISED),
        CopyResult(2, (False,), CopyFailure.RAISED),
    ]
    assert broken.totals(CopyDirection.STORE).num_bytes == 0


def test_ids_out_of_range_fail_their_job_and_move_nothing(device: Device) -> None:
    worker = KVTierWorker(device.planes, device.host, executor=InlineExecutor())
    device.pool[:] = 5
    worker.submit(plan(store(1, 0, 4)), WRITTEN)
    assert worker.poll() == [CopyResult(1, (False, False), CopyFailure.RAISED)]
    assert not device.host.any()


def test_a_full_queue_is_told_as_backlog(device: Device) -> None:
    executor = ManualExecutor(max_queued=1)
    worker = KVTierWorker(device.planes, device.host, executor=executor)
    worker.submit(plan(store(1, 0), store(2, 1)), WRITTEN)
    assert worker.poll() == [CopyResult(2, (False,), CopyFailure.BACKLOG)]
    executor.run_all()
    assert [result.job_id for result in worker.poll()] == [1]
    worker.submit(plan(store(3, 1)), WRITTEN)
    executor.run_all()
    assert [result.copied for result in worker.poll()] == [(True,)]


def test_closing_tells_the_jobs_that_never_began(device: Device) -> None:
    executor = ManualExecutor()
    worker = KVTierWorker(device.planes, device.host, executor=executor)
    worker.submit(plan(store(1, 0), store(2, 1)), WRITTEN)
    executor.run_next()
    results = worker.close(1.0)
    assert [(result.job_id, result.failure) for result in results] == [(1, None), (2, CopyFailure.CLOSED)]
    assert worker.close(1.0) == []


def test_after_closing_nothing_is_copied(device: Device) -> None:
    worker = KVTierWorker(device.planes, device.host, executor=InlineExecutor())
    worker.close(1.0)
    device.pool[:] = 5
    worker.submit(plan(store(1, 0)), WRITTEN)
    assert worker.poll() == [CopyResult(1, (False,), CopyFailure.BACKLOG)]
    assert not device.host.any()


def test_a_job_that_the_executor_runs_after_closing_does_nothing(device: Device) -> None:
    executor = ManualExecutor()
    worker = KVTierWorker(device.planes, device.host, executor=executor)
    device.pool[:] = 5
    worker.submit(plan(store(1, 0)), WRITTEN)
    late = list(executor._other)
    assert [result.failure for result in worker.close(1.0)] == [CopyFailure.CLOSED]
    late[0]()
    assert worker.poll() == []
    assert not device.host.any()


def test_on_a_thread_a_poll_waits_for_the_first_result(threaded: KVTierWorker, device: Device) -> None:
    gate = Gate()
    threaded.submit(plan(store(1, 0)), gate)
    assert gate.waiting.wait(LIMIT_S)
    assert threaded.poll() == []
    assert threaded.poll(0.001) == [], "it waits no longer than told"
    gate.open.set()
    assert [result.job_id for result in threaded.poll(LIMIT_S)] == [1]


def test_a_copy_that_waits_for_its_fence_at_close_never_moves_a_byte(device: Device) -> None:
    executor = ThreadExecutor("copies under test", 8)
    worker = KVTierWorker(device.planes, device.host, executor=executor)
    gate = Gate()
    device.pool[:] = 5
    worker.submit(plan(store(1, 0), store(2, 1)), gate)
    assert gate.waiting.wait(LIMIT_S)
    results = worker.close(0.001)
    assert [(result.job_id, result.failure) for result in results] == [(1, CopyFailure.CLOSED), (2, CopyFailure.CLOSED)]
    gate.open.set()
    executor.close(LIMIT_S)
    assert executor.idle
    assert worker.poll() == []
    assert not device.slot(0).any()
    assert not device.slot(1).any()


def test_closing_does_not_wait_longer_than_told_for_a_copy_that_moves_bytes(device: Device) -> None:
    gate = Gate()

    class Slow(type(default_backend())):  # type: ignore[misc]
        def _gather(self, *arguments: Any) -> None:
            gate.wait(LIMIT_S)
            super()._gather(*arguments)

    executor = ThreadExecutor("copies under test", 8)
    worker = KVTierWorker(device.planes, device.host, executor=executor, backend=Slow())
    device.pool[:] = 5
    worker.submit(plan(store(1, 0), store(2, 1)), WRITTEN)
    assert gate.waiting.wait(LIMIT_S)
    results = worker.close(0.001)
    assert [(result.job_id, result.failure) for result in results] == [(2, CopyFailure.CLOSED)]
    gate.open.set()
    assert [(result.job_id, result.copied) for result in worker.poll(LIMIT_S)] == [(1, (True,))]
    executor.close(LIMIT_S)
    assert executor.idle
    assert not device.slot(1).any()


def test_a_hole_is_never_told_as_copied(device: Device) -> None:
    worker = KVTierWorker(device.planes, device.host, executor=InlineExecutor())
    worker.submit(plan(CopyJob(1, CopyDirection.STORE, (0, -1), (0, device.planes.block_bytes))), WRITTEN)
    assert [result.copied for result in worker.poll()] == [(True, False)]
    worker.close(LIMIT_S)


def test_the_default_backend_is_found(device: Device) -> None:
    assert isinstance(default_backend(), KernelBackend)
