"""A worker's mapping of host memory, which is another with each run of a kvtier-server; the workers are told of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvtier.memory import HostMemory, PoolMemory
from kvtier.tiers.server.addresses import Addresses
from kvtier.tiers.server.mapping import MappingError
from kvtier_connectors.contract import WRITTEN, CopyDirection, CopyFailure, CopyJob, CopyResult
from kvtier_connectors.vllm import memory as module
from kvtier_connectors.vllm.address import AddressTeller
from kvtier_connectors.vllm.memory import WorkerMemory
from kvtier_connectors.vllm.messages import HostAddress, StepPlan
from kvtier_connectors.vllm.worker import WorkerSide
from tests.server.daemon_rig import wait_for
from tests.vllm.plugin import OpenRig, worker

NBYTES = 1 << 20


class Runs:
    """Memories of one run of a server after the other, in this process."""

    def __init__(self) -> None:
        self.pools: list[PoolMemory] = []

    def begin(self, *, touch: bool = True) -> HostAddress:
        pool = PoolMemory(NBYTES, touch=touch)
        self.pools.append(pool)
        return HostAddress(os.getpid(), pool.fd, NBYTES, len(self.pools))

    def __getitem__(self, run: int) -> npt.NDArray[np.uint8]:
        return self.pools[run - 1].buffer


@pytest.fixture
def runs() -> Iterator[Runs]:
    found = Runs()
    yield found
    for pool in found.pools:
        pool.close()


class Side:
    """A worker's half with two layers of 24 blocks, told its plans by hand."""

    def __init__(self, rig: Any) -> None:
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in rig.pool.tensors.items()}
        self.half = WorkerSide(worker(rig)._pages, 0)
        self.half.register(self.tensors)
        self._serial = 0

    def begin(self, host: HostAddress | None, *jobs: CopyJob) -> None:
        self._serial += 1
        self.half.begin_step(StepPlan(self._serial, host, jobs, (), ()))

    def results(self, number: int) -> list[CopyResult]:
        found: list[CopyResult] = []

        def ask() -> bool:
            found.extend(self.half.report().results)
            return len(found) >= number

        wait_for(f"{number} results", ask)
        return found

    def fill(self, block: int) -> bytes:
        """Random bytes in every layer's block; all of them."""
        for tensor in self.tensors.values():
            tensor[block].copy_(torch.randn(tensor[block].shape))
        return self.content(block)

    def content(self, block: int) -> bytes:
        return b"".join(tensor[block].view(torch.uint8).numpy().tobytes() for tensor in self.tensors.values())


@pytest.fixture
def side(open_rig: OpenRig) -> Iterator[Side]:
    found = Side(open_rig(num_blocks=24))
    yield found
    found.half.close()


def store(job: int, block: int, offset: int) -> CopyJob:
    return CopyJob(job, CopyDirection.STORE, (block,), (offset,))


def test_jobs_go_to_the_memory_that_their_own_message_tells(side: Side, runs: Runs) -> None:
    first = side.fill(3)
    side.begin(runs.begin(), store(1, 3, 8192))
    assert side.results(1)[0].copied == (True,)
    assert runs[1][8192 : 8192 + len(first)].tobytes() == first
    buffer = side.half._known_memory.buffer
    second = side.fill(3)
    side.begin(runs.begin(), store(2, 3, 8192))
    assert side.results(1)[0].copied == (True,)
    assert side.half._known_memory.buffer is buffer
    assert runs[1][8192 : 8192 + len(first)].tobytes() == first, "nothing is written to the run before any more"
    assert runs[2][8192 : 8192 + len(second)].tobytes() == second
    side.begin(None, CopyJob(3, CopyDirection.RESTORE, (5,), (8192,)))
    assert side.results(1)[0].copied == (True,)
    assert side.content(5) == second


def test_jobs_before_there_is_a_memory_fail_with_their_reason(
    side: Side, caplog: pytest.LogCaptureFixture, runs: Runs
) -> None:
    side.begin(None, store(1, 3, 0))
    side.begin(None, store(2, 3, 0))
    assert [result.failure for result in side.results(2)] == [CopyFailure.RAISED] * 2
    assert caplog.text.count("it is not known yet where that is") == 1
    side.begin(runs.begin(), store(3, 3, 0))
    assert side.results(1)[0].failure is None


def test_copies_under_way_as_memory_becomes_another_are_never_continued_there(
    side: Side, runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler's half lets that never be."""
    side.begin(runs.begin(), store(1, 3, 0))
    side.results(1)
    copier, gate = side.half._worker, threading.Event()
    assert copier is not None
    gather = copier._gather
    monkeypatch.setattr(copier, "_gather", lambda *args: gate.wait(30) and gather(*args))
    content = side.fill(4)
    side.begin(None, store(2, 4, 0))
    side.begin(runs.begin(), store(3, 4, 0), CopyJob(4, CopyDirection.RESTORE, (6,), (0,)))
    assert {(result.job_id, result.failure) for result in side.results(2)} == {
        (3, CopyFailure.RAISED),
        (4, CopyFailure.RAISED),
    }
    assert caplog.text.count("1 copies of before have not ended") == 1
    gate.set()
    assert side.results(1)[0].copied == (True,)
    assert runs[1][: len(content)].tobytes() == content
    assert not runs[2].any()
    side.begin(None, store(5, 4, 0))
    assert side.results(1)[0].copied == (True,), "and then it is taken"
    assert runs[2][: len(content)].tobytes() == content


def test_memory_that_could_become_shorter_is_refused(
    side: Side, caplog: pytest.LogCaptureFixture, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, NBYTES)
        side.begin(HostAddress(os.getpid(), fd, NBYTES, 1), store(1, 3, 0))
        assert side.results(1)[0].failure is CopyFailure.RAISED
        side.begin(None, store(2, 3, 0))
        assert side.results(1)[0].failure is CopyFailure.RAISED
        assert "is not sealed" in caplog.text
    finally:
        os.close(fd)
    runs.begin()
    side.begin(runs.begin(), store(3, 3, 0))
    assert side.results(1)[0].failure is None, "another run's is another matter"


def test_who_would_copy_before_it_is_known_that_nothing_is_mapped_is_told(runs: Runs) -> None:
    """There is nothing behind the addresses then: who touched them would end the process."""
    memory = WorkerMemory(Driver())  # type: ignore[arg-type]
    host = replace(runs.begin(), num_bytes=2 * NBYTES)
    memory.take(host)
    early = memory.after(WRITTEN)
    wait_for("the end of it", lambda: memory.error)
    for fence in (early, memory.after(WRITTEN)):
        with pytest.raises(MappingError, match="fewer than the"):
            fence.wait(10)
    memory.close(is_used=False)


def test_a_worker_without_so_many_addresses_fails_its_copies(
    side: Side, runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "Addresses", lambda: Addresses(1 << 62))
        side.begin(runs.begin(), store(1, 3, 0))
        assert side.results(1)[0].failure is CopyFailure.RAISED
        assert "host memory: ConfigError: host.pool = 'server' needs" in caplog.text
    side.begin(None)
    wait_for("another try", lambda: side.half._known_memory.error is None)
    side.begin(None, store(2, 3, 0))
    assert side.results(1)[0].failure is None


class Driver:
    """Stands in for a Device on a GPU: what was pinned and let go of, in order, by the first byte there."""

    is_gpu = True

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self._pinned: npt.NDArray[np.uint8] | None = None

    def pin(self, host: npt.NDArray[np.uint8]) -> None:
        assert host.nbytes == NBYTES
        self._pinned = host
        self.done.append(("pin", int(host[0])))

    def unpin(self) -> None:
        if self._pinned is not None:
            self.done.append(("unpin", int(self._pinned[0])))
            self._pinned = None


@pytest.fixture
def on_a_gpu() -> Iterator[tuple[WorkerMemory, Driver]]:
    driver = Driver()
    found = WorkerMemory(driver)  # type: ignore[arg-type]
    yield found, driver
    found.close(is_used=False)


def test_the_driver_lets_go_of_a_run_before_the_next_is_mapped_and_pinned(
    on_a_gpu: tuple[WorkerMemory, Driver], runs: Runs
) -> None:
    memory, driver = on_a_gpu
    for run in (1, 2):
        address = runs.begin()
        runs[run][0] = run
        memory.take(address)
        wait_for("pinned", lambda: memory.is_ready)
    memory.close(is_used=False)
    assert driver.done == [("pin", 1), ("unpin", 1), ("pin", 2), ("unpin", 2)]


def test_a_driver_pins_what_the_server_has_made_and_makes_none(
    on_a_gpu: tuple[WorkerMemory, Driver], runs: Runs
) -> None:
    memory, driver = on_a_gpu
    memory.take(runs.begin(touch=False))
    assert memory._taking is not None
    assert memory._taking.is_over.wait(10)
    assert not memory._taking.is_ready.wait(3 * module.POLL_S)
    assert os.fstat(runs.pools[0].fd).st_blocks == 0
    runs.pools[0].start_touching()
    wait_for("pinned", lambda: memory.is_ready)
    assert driver.done == [("pin", 0)]


def test_a_run_that_is_over_before_it_was_pinned_never_is(on_a_gpu: tuple[WorkerMemory, Driver], runs: Runs) -> None:
    memory, driver = on_a_gpu
    memory.take(runs.begin(touch=False))
    second = runs.begin()
    runs[2][0] = 2
    memory.take(second)
    wait_for("pinned", lambda: memory.is_ready)
    assert driver.done == [("pin", 2)]


def test_an_end_while_a_copy_hangs_leaves_its_memory_in_place(runs: Runs) -> None:
    driver = Driver()
    memory = WorkerMemory(driver)  # type: ignore[arg-type]
    memory.take(runs.begin())
    wait_for("pinned", lambda: memory.is_ready)
    buffer = memory.buffer
    memory.close(is_used=True)
    runs[1][7] = 42
    assert buffer[7] == 42
    assert driver.done == [("pin", 0)]
    memory.close(is_used=False)
    assert driver.done[1:] == [("unpin", 0)]


class Home:
    host_memory: HostMemory | None = None


def test_an_address_is_told_until_every_worker_has_begun_a_plan_with_it() -> None:
    home, pid = Home(), os.getpid()
    teller = AddressTeller(home)
    assert teller.to_tell(1) is None
    home.host_memory = HostMemory(7, NBYTES, 1)
    first = HostAddress(pid, 7, NBYTES, 1)
    assert [teller.to_tell(2), teller.to_tell(3)] == [first, first]
    teller.note_begun(1)
    assert teller.to_tell(4) == first
    teller.note_begun(2)
    assert teller.to_tell(5) is None
    home.host_memory = None
    assert teller.to_tell(6) is None
    home.host_memory = HostMemory(7, NBYTES, 2)
    teller.note_begun(5)
    assert teller.to_tell(7) == HostAddress(pid, 7, NBYTES, 2)
    teller.note_begun(6)
    assert teller.to_tell(8) is not None
    teller.note_begun(8)
    assert teller.to_tell(9) is None
