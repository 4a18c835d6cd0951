"""The half in each of vLLM's workers: copies between its part of the KV cache and the host pool."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvtier_connectors.contract import WRITTEN, CopyDirection, CopyFailure, CopyResult, TransferPlan
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.vllm.messages import HostAddress, StepPlan, StepReport
from kvtier_connectors.vllm.pages import Pages
from kvtier_connectors.worker import KVTierWorker
from kvtier_kernels import BlockPlanes

__all__ = ["WorkerSide"]

logger = logging.getLogger("kvtier.vllm")

FENCE_S = 0.25
"""How long a step waits at most for copies of what it overwrites: hundreds of blocks take a few milliseconds."""


class WorkerSide:
    """Owns the copying thread of one worker. Called by vLLM's model runner, in its order of a step. Nothing blocks, but
    for copies of what the step is about to overwrite, and these within a bound."""

    def __init__(self, pages: Pages, rank: int) -> None:
        """rank: of this worker among those that hold parts of the same blocks."""
        self._pages = pages
        self._rank = rank
        self._planes: BlockPlanes | None = None
        self._worker: KVTierWorker | None = None
        self._serial = 0
        self._results: list[CopyResult] = []
        self._late: set[int] = set()
        """Jobs that a forward could not wait for: what they copied may be anything."""
        self._received: set[str] = set()
        self._lost: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises LayoutError for caches that are not what was configured."""
        self._planes = self._pages.planes(kv_caches)

    def begin_step(self, plan: StepPlan) -> None:
        """Queue the plan's copies, once however often it is told."""
        if plan.serial <= self._serial:
            return
        self._serial = plan.serial
        for landed in plan.landed:
            self._received.add(landed.request_id)
            self._lost.update(landed.lost)
        # A load may go to blocks whose old content is to be stored first: the copying thread does loads before stores.
        self._submit(plan, CopyDirection.STORE)
        self._await(set(plan.fence))
        self._submit(plan, CopyDirection.RESTORE)

    def take_received(self) -> set[str]:
        """Requests whose load is over, each once."""
        received, self._received = self._received, set()
        return received

    def take_lost(self) -> set[int]:
        """Blocks of these that do not hold their bytes."""
        lost, self._lost = self._lost, set()
        return lost

    def report(self) -> StepReport:
        """What the last step came to, for the scheduler half."""
        self._take_results(0.0)
        results, self._results = self._results, []
        return StepReport(self._serial, results)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close(1.0)

    def _submit(self, plan: StepPlan, direction: CopyDirection) -> None:
        shift = self._rank * self._pages.rank_bytes
        jobs = tuple(
            replace(job, offsets=tuple(offset + shift for offset in job.offsets))
            for job in plan.jobs
            if job.direction is direction
        )
        if not jobs:
            return
        try:
            self._copier(plan.host).submit(TransferPlan(jobs, 0), WRITTEN)
        except CAUGHT:  # what is not told would be waited for without end
            logger.exception("%d copies could not be begun", len(jobs))
            failed = [CopyResult(job.job_id, (), CopyFailure.RAISED, rank=self._rank) for job in jobs]
            self._results += failed

    def _await(self, fence: set[int]) -> None:
        """Let the copies end whose sources the forward will write, within a bound."""
        deadline = time.monotonic() + FENCE_S
        fence -= {result.job_id for result in self._results}
        while fence and (left := deadline - time.monotonic()) > 0:
            fence -= {result.job_id for result in self._take_results(left)}
        self._late |= fence

    def _take_results(self, timeout: float) -> list[CopyResult]:
        results = [] if self._worker is None else self._worker.poll(timeout)
        told = [
            replace(result, copied=(), failure=CopyFailure.RAISED) if result.job_id in self._late else result
            for result in results
        ]
        self._late -= {result.job_id for result in results}
        self._results += told
        return told

    def _copier(self, host: HostAddress) -> KVTierWorker:
        if self._worker is None:
            assert self._planes is not None, "vLLM registers its caches before the first step"
            self._worker = KVTierWorker(self._planes, _map(host), rank=self._rank)
        return self._worker


def _map(host: HostAddress) -> npt.NDArray[np.uint8]:
    """The host pool of another process, or of this one, by its descriptor."""
    descriptor = os.open(f"/proc/{host.pid}/fd/{host.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, host.num_bytes), np.uint8)
    finally:
        os.close(descriptor)
