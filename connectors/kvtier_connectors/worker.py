"""kvtier's worker half: copies between the GPU pool and slots, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvtier.executor import Executor, ThreadExecutor
from kvtier_connectors.contract import (
    ConnectorWorker,
    CopyDirection,
    CopyFailure,
    CopyJob,
    CopyResult,
    TransferPlan,
    WriteFence,
)
from kvtier_kernels import KernelBackend, Planes, default_backend

__all__ = ["CopyTotals", "KVTierWorker"]

logger = logging.getLogger("kvtier.worker")

P = TypeVar("P", bound=Planes)

MAX_QUEUED_JOBS = 256
FENCE_TIMEOUT_S = 30.0  # a device that does not finish a step in this time has other troubles


@dataclass(frozen=True, slots=True)
class CopyTotals:
    """Bytes copied in one direction and the seconds it took the copying thread."""

    num_bytes: int
    seconds: float


class KVTierWorker(ConnectorWorker):
    """Owns the copying thread and the results that wait to be polled.

    planes: the GPU pool. host: the host pool's bytes. The worker holds both while a copy runs, so that neither is
    unmapped under it.

    Mutable state: `_queued` (jobs that move no bytes yet), `_results`, `_totals`, `_woken`, guarded by `_arrived`.
    """

    def __init__(
        self,
        planes: P,
        host: npt.NDArray[np.uint8],
        *,
        executor: Executor | None = None,
        backend: KernelBackend[P] | None = None,
        rank: int = 0,
    ) -> None:
        """backend: for planes of this kind; the default takes BlockPlanes. rank: of this worker among those that copy
        their parts of the same blocks."""
        mover = cast("KernelBackend[P]", default_backend()) if backend is None else backend
        self._gather, self._scatter = partial(mover.gather, planes), partial(mover.scatter, planes)
        self._block_bytes = planes.block_bytes
        self._rank = rank
        self._host: npt.NDArray[np.uint8] | None = host
        self._executor = ThreadExecutor("kvtier-copy", MAX_QUEUED_JOBS) if executor is None else executor
        self._results: deque[CopyResult] = deque()
        self._totals = dict.fromkeys(CopyDirection, CopyTotals(0, 0.0))
        self._arrived = threading.Condition()
        self._queued: dict[int, CopyJob] = {}
        self._woken = False

    def submit(self, plan: TransferPlan, written: WriteFence | None) -> None:
        for job in plan.jobs:
            if written is None:
                self._fail(job, CopyFailure.NO_FENCE)
                continue
            with self._arrived:
                self._queued[job.job_id] = job
            if not self._executor.try_submit(self._copy(job, written), urgent=job.direction is CopyDirection.RESTORE):
                self._fail(job, CopyFailure.BACKLOG)

    def poll(self, timeout: float = 0.0) -> list[CopyResult]:
        if not timeout and not self._results:
            return []
        with self._arrived:
            if timeout and not self._results and not self._woken:
                self._arrived.wait(timeout)
            self._woken = False
            results = list(self._results)
            self._results.clear()
        return results

    def wake(self) -> None:
        """End a `poll` that waits, or the next one that would: something else has changed. Any thread."""
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def close(self, timeout: float) -> list[CopyResult]:
        self._executor.close(timeout)
        self._host = None
        with self._arrived:
            cancelled, self._queued = self._queued, {}
        for job in cancelled.values():
            self._fail(job, CopyFailure.CLOSED)
        return self.poll()

    def totals(self, direction: CopyDirection) -> CopyTotals:
        """What was copied so far; any thread."""
        return self._totals[direction]

    def _copy(self, job: CopyJob, written: WriteFence) -> Callable[[], None]:
        host = self._host

        def run() -> None:
            try:
                fired = written.wait(FENCE_TIMEOUT_S)
                with self._arrived:
                    begun = self._queued.pop(job.job_id, None) is not None
                if not begun or host is None:
                    return  # closed meanwhile, and told so: its slots and blocks may be others' by now
                if not fired:
                    logger.warning("a %s waited %g s for the device; not copied", job.direction.value, FENCE_TIMEOUT_S)
                    self._fail(job, CopyFailure.RAISED)
                else:
                    self._run(job, host)
            except BaseException:
                logger.exception(
                    "a %s of %d blocks failed; they are recomputed", job.direction.value, len(job.block_ids)
                )
                self._fail(job, CopyFailure.RAISED)

        return run

    def _run(self, job: CopyJob, host: npt.NDArray[np.uint8]) -> None:
        block_ids = np.asarray(job.block_ids, np.int64)
        offsets = np.asarray(job.offsets, np.int64)
        start = time.perf_counter()
        if job.direction is CopyDirection.STORE:
            self._gather(block_ids, host, offsets)
        else:
            self._scatter(block_ids, host, offsets)
        seconds = time.perf_counter() - start
        copied = tuple(block_id >= 0 for block_id in job.block_ids)  # a back end passes over negative ids
        self._tell(CopyResult(job.job_id, copied, None, seconds, self._rank), job)

    def _fail(self, job: CopyJob, failure: CopyFailure) -> None:
        self._tell(CopyResult(job.job_id, (False,) * len(job.block_ids), failure, rank=self._rank), job)

    def _tell(self, result: CopyResult, job: CopyJob) -> None:
        with self._arrived:
            self._queued.pop(job.job_id, None)
            if result.failure is None:
                totals = self._totals[job.direction]
                num_bytes = totals.num_bytes + len(job.block_ids) * self._block_bytes
                self._totals[job.direction] = CopyTotals(num_bytes, totals.seconds + result.seconds)
            self._results.append(result)
            self._arrived.notify()
