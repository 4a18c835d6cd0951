"""The half in each of vLLM's workers: copies between its part of the KV cache and the host pool."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvtier.executor import ThreadExecutor
from kvtier.memory import PoolMemory
from kvtier_connectors.contract import CopyDirection, CopyFailure, CopyResult, TransferPlan
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.vllm.device import Device
from kvtier_connectors.vllm.messages import HostAddress, StepPlan, StepReport
from kvtier_connectors.vllm.pages import Pages
from kvtier_connectors.worker import MAX_QUEUED_JOBS, KVTierWorker

__all__ = ["WorkerSide"]

logger = logging.getLogger("kvtier.vllm")

IDLE_S = 0.002
"""How long a step that computes nothing waits at most for the first copy that ends: vLLM would only ask again, and so
keep the copying thread from its work."""
FENCE_S = 0.25
"""How long a step waits at most for copies of what it overwrites: hundreds of blocks take a few milliseconds."""


class WorkerSide:
    """Owns the copying thread of one worker. Called by vLLM's model runner, in its order of a step. Nothing blocks, but
    for copies of what the step is about to overwrite, and for any copy where it has nothing to compute: each within a
    bound."""

    def __init__(self, pages: Pages, rank: int) -> None:
        """rank: of this worker among those that hold parts of the same blocks."""
        self._pages = pages
        self._rank = rank
        self._device: Device | None = None
        self._worker: KVTierWorker | None = None
        self._memory: PoolMemory | None = None
        self._is_pinned = threading.Event()
        """Set by the copying thread. Until then nothing is stored: no step waits for a copy that waits for this."""
        self._serial = 0
        self._is_idle = False
        self._num_copying = 0
        self._results: list[CopyResult] = []
        self._late: set[int] = set()
        """Jobs that a forward could not wait for: what they copied may be anything."""
        self._received: set[str] = set()
        self._lost: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises LayoutError for caches that are not what was configured, or that do not keep what is copied there."""
        self._device = Device(self._pages.planes(kv_caches))
        self._device.prove()

    def begin_step(self, plan: StepPlan) -> None:
        """Queue the plan's copies, once however often it is told."""
        if plan.serial <= self._serial:
            return
        self._serial, self._is_idle = plan.serial, plan.is_idle
        for landed in plan.landed:
            self._received.add(landed.request_id)
            self._lost.update(landed.lost)
        if plan.serial == 1:
            self._prepare(plan.host)
        # A load may go to blocks whose old content is to be stored first: the copying thread does loads before stores.
        self._submit(plan, CopyDirection.STORE)
        self._await(set(plan.fence))
        self._submit(plan, CopyDirection.RESTORE)

    def take_received(self) -> set[str]:
        """Requests whose load is over, each once."""
        received, self._received = self._received, set()
        self._is_idle &= not received  # vLLM goes on with these
        return received

    def take_lost(self) -> set[int]:
        """Blocks of these that do not hold their bytes."""
        lost, self._lost = self._lost, set()
        return lost

    def report(self) -> StepReport:
        """What the last step came to, for the scheduler half."""
        is_waiting = self._is_idle and self._num_copying and not self._results
        self._take_results(IDLE_S if is_waiting else 0.0)
        results, self._results = self._results, []
        return StepReport(self._serial, results)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close(1.0)
        if self._memory is not None:
            self._memory.close()

    def _prepare(self, host: HostAddress) -> None:
        """Map the host pool before there is anything to copy: its pages are entered meanwhile."""
        try:
            self._copier(host)
        except CAUGHT:  # each copy tries again, and tells that it failed
            logger.exception("the host pool could not be mapped")

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
            copier = self._copier(plan.host)
            if direction is CopyDirection.STORE and not self._is_pinned.is_set():
                self._results += [CopyResult(job.job_id, (), CopyFailure.BACKLOG, rank=self._rank) for job in jobs]
                return
            copier.submit(TransferPlan(jobs, 0), self._known_device.written())
            self._num_copying += len(jobs)
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
        self._num_copying -= len(results)
        self._results += told
        return told

    def _copier(self, host: HostAddress) -> KVTierWorker:
        if self._worker is None:
            device = self._known_device
            # A second mapping in the scheduler's process too: its pages are there already, and are only to be entered.
            self._memory = memory = PoolMemory(host.num_bytes, fd=_open(host), touch=not device.is_gpu)
            executor = ThreadExecutor("kvtier-copy", MAX_QUEUED_JOBS)
            if device.is_gpu:
                executor.try_submit(partial(self._pin, device, memory.buffer), urgent=True)
            else:
                self._is_pinned.set()
            self._worker = KVTierWorker(
                device.planes, memory.buffer, executor=executor, backend=device.backend, rank=self._rank
            )
        return self._worker

    def _pin(self, device: Device, memory: npt.NDArray[np.uint8]) -> None:
        try:
            device.pin(memory)
        finally:
            self._is_pinned.set()

    @property
    def _known_device(self) -> Device:
        assert self._device is not None, "vLLM registers its caches before the first step"
        return self._device


def _open(host: HostAddress) -> int:
    """A descriptor of the host pool of another process, or of this one."""
    return os.open(f"/proc/{host.pid}/fd/{host.fd}", os.O_RDWR | os.O_CLOEXEC)
