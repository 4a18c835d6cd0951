"""An engine over a real disk tier, under control: jobs run when told, and a device that stalls, or fails, when told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvtier.config import Settings
from kvtier.executor import Executor
from kvtier.lower import LowerTier
from kvtier.metrics import DiskStats
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.testing.files import FaultyFiles
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.disk import Files
from kvtier.tiers.wrapper import TierWrapper
from kvtier_engine.testing.rig import ENOUGH_MEMORY, EngineRig

__all__ = ["DiskRig", "StallingTier", "SteppedExecutor", "disk_rigs"]

BOUND_S = 30.0


class _Parked:
    """A job that stands at a shut gate, on its thread."""

    def __init__(self) -> None:
        self.arrived = threading.Event()  # at the gate, or at its end
        self.ended = False
        self.go = threading.Event()
        self.thread: threading.Thread | None = None


class SteppedExecutor(ManualExecutor):
    """Runs a job when told, until it ends or comes to the gate; with `inline`, as soon as it is submitted.

    One thread runs at a time, so that a story with stalls is the same each time. A stalled job keeps one of
    `num_threads`; when none is left nothing runs until `release`.
    """

    def __init__(self, num_threads: int = 4) -> None:
        super().__init__()
        self.inline = False
        self._num_threads = num_threads
        self._is_shut = False
        self._left: int | None = None
        self._parked: list[_Parked] = []
        self._here = threading.local()

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def shut(self, times: int | None = None) -> None:
        """From now on calls of the device, `times` of them or all, come to a stand, and never back, until `release`."""
        self._is_shut, self._left = True, times

    def release(self) -> None:
        """Open the gate and let what stood there end, one job after the other."""
        self._is_shut = False
        parked, self._parked = self._parked, []
        for job in parked:
            job.go.set()
            assert job.thread is not None
            job.thread.join(BOUND_S)
            assert not job.thread.is_alive(), "a job that was let go did not end"

    def stall(self) -> None:
        """Called where a device would block."""
        job: _Parked | None = getattr(self._here, "job", None)
        if self._is_shut and job is not None and self._left != 0:
            self._left = None if self._left is None else self._left - 1
            job.arrived.set()
            assert job.go.wait(BOUND_S), "nobody let a stalled job go"

    def try_submit(self, job: Callable[[], None], *, urgent: bool) -> bool:
        queued = super().try_submit(lambda: self._run(job), urgent=urgent)
        if queued and self.inline:
            self.run_all()
        return queued

    def run_next(self, position: int = 0) -> bool:
        return len(self._parked) < self._num_threads and super().run_next(position)

    def _run(self, job: Callable[[], None]) -> None:
        if not self._is_shut:
            job()
            return
        parked = _Parked()

        def run() -> None:
            self._here.job = parked
            try:
                job()
            finally:
                parked.ended = True
                parked.arrived.set()

        parked.thread = threading.Thread(target=run, name="kvtier-stepped", daemon=True)
        parked.thread.start()
        assert parked.arrived.wait(BOUND_S), "a job neither ended nor stalled"
        if parked.ended:
            parked.thread.join(BOUND_S)
        else:
            self._parked.append(parked)


class StallingTier(TierWrapper):
    """A tier whose calls stand at an executor's gate while that is shut, before the tier within has begun: it holds no
    lock of that tier's meanwhile, which a device that stalls might."""

    def __init__(self, tier: Tier, executor: SteppedExecutor) -> None:
        super().__init__(tier)
        self._executor = executor

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        self._executor.stall()
        return super().read(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        self._executor.stall()
        return super().write(requests)

    def start_epoch(self, epoch: int) -> None:
        self._executor.stall()
        super().start_epoch(epoch)


class DiskRig(EngineRig):
    """An engine whose store has a disk tier in `path`, over files that fail as `files` is told.

    Copies run on `executor`, reads and writes on `disk_jobs`, both when told; time passes on `clock`. A second rig over
    the same path, after `close` or `abandon` of the first, is a restart. Tiny: a block is one slot of a page in host
    memory, and two pages on disk.
    """

    def __init__(
        self,
        path: Path,
        num_blocks: int = 8,
        host_blocks: int = 16,
        policy: str = "on_evict",
        *,
        clock: FakeClock | None = None,
        num_threads: int = 4,
        disk_executor: Executor | None = None,
        files: Files | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        """disk_executor, files: instead of those under control."""
        self.clock = clock or FakeClock()
        self.disk_jobs = SteppedExecutor(num_threads + 1)  # as the store's own has
        self.files = FaultyFiles(seed)
        self._disk_executor = disk_executor or self.disk_jobs
        self._disk_files = files or self.files
        settings: dict[str, Any] = {
            "disk__path": [str(path)],
            "disk__size": "4MiB",
            "disk__min_free": 1,
            "disk__threads": num_threads,
        }
        copies = SteppedExecutor()
        super().__init__(
            num_blocks,
            host_blocks,
            policy,
            make_store=self._make_store,
            clock=self.clock,
            **(settings | {"executor": copies} | kwargs),
        )
        self.copies = copies
        self.put_between(lambda tier: tier)

    def _make_store(self, settings: Settings) -> Store:
        return Store(
            settings,
            memory=ENOUGH_MEMORY,
            touch=False,
            clock=self.clock,
            disk_executor=self._disk_executor,
            disk_files=self._disk_files,
        )

    def put_between(self, wrap: Callable[[Tier], Tier]) -> None:
        """Have calls pass a tier between the store's wrappers and the disk, in place of the one before."""
        lower = self.lower
        lower._meter._inner = wrap(StallingTier(lower.device, self.disk_jobs))

    @property
    def opened(self) -> Store:
        """The store."""
        assert self.store is not None
        return self.store

    @property
    def lower(self) -> LowerTier:
        return self.opened.lower[0]

    @property
    def disk(self) -> DiskStats:
        stats = self.opened.stats().disk
        assert stats is not None
        return stats

    def settle(self) -> None:
        """Run every job of the disk and every copy."""
        while self.executor.run_all() + self.disk_jobs.run_all():
            pass

    def flush(self, timeout: float = 5.0) -> int:
        """Flush, with jobs that run at once."""
        self._run_inline()
        try:
            unstored = self.engine.flush(timeout)
        finally:
            self._run_when_told()
        self.engine.check_integrity()
        return unstored

    def reset(self) -> None:
        """Reset, by a device that answers at once."""
        self.disk_jobs.release()
        self._run_inline()
        try:
            self.engine.reset_cache()
        finally:
            self._run_when_told()
        self.engine.check_integrity()

    def forget_host(self) -> None:
        """Empty host memory, which is written down before: all that is not in the GPU pool can only be on disk."""
        assert self.flush() == 0
        host = self.opened.host
        for namespace in host.namespaces():
            assert host.reset(namespace)

    def abandon(self) -> None:
        """End as a process does that is killed: what is not written by now never is."""
        self.disk_jobs.release()
        self.engine.close(0.0)
        self.opened.close()

    def close(self) -> None:
        self.disk_jobs.release()
        self._run_inline()
        self.engine.close()
        self.opened.close()

    def verify_quiet(self) -> None:
        """As that of an engine; and nothing is staged, queued or being written."""
        self.settle()
        super().verify_quiet()
        stats = self.opened.stats()
        assert stats.staging_bytes == self.disk.queued_bytes == self.disk.ledger.pending == 0
        assert not self.opened.stager._queue.reads

    def _run_jobs(self) -> None:
        self.settle()

    def _run_inline(self) -> None:
        self.copies.inline = self.disk_jobs.inline = True
        self.settle()

    def _run_when_told(self) -> None:
        self.copies.inline = self.disk_jobs.inline = False


@contextmanager
def disk_rigs(path: Path) -> Iterator[Callable[..., DiskRig]]:
    """Opens engines over one directory, one after the other; at the end they are closed."""
    with ExitStack() as stack:

        def make(**kwargs: Any) -> DiskRig:
            rig = DiskRig(path, **kwargs)
            stack.callback(rig.close)
            return rig

        yield make
