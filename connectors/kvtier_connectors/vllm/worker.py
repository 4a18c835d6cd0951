"""The half in each of vLLM's workers: copies between its part of the KV cache and the host pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from kvtier_connectors.contract import CopyDirection, CopyFailure, CopyJob, CopyResult, TransferPlan
from kvtier_connectors.vllm.device import Device
from kvtier_connectors.vllm.memory import WorkerMemory
from kvtier_connectors.vllm.messages import HostAddress, StepPlan, StepReport
from kvtier_connectors.vllm.pages import Pages
from kvtier_connectors.worker import KVTierWorker

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
    bound.

    Until host memory is pinned, where it is to be, nothing is stored: no step waits for a copy that is slow for want of
    it. Loads are not waited for by steps."""

    def __init__(self, pages: Pages, rank: int) -> None:
        """rank: of this worker among those that hold parts of the same blocks."""
        self._pages = pages
        self._rank = rank
        self._device: Device | None = None
        self._worker: KVTierWorker | None = None
        self._memory: WorkerMemory | None = None
        self._host: HostAddress | None = None
        """Where the pool is, as it was told last."""
        self._why: str | None = None
        """What was logged last of why nothing is copied."""
        self._serial = 0
        self._is_idle = False
        self._outstanding: set[int] = set()
        """Jobs that the copying thread was given and has not told the end of."""
        self._results: list[CopyResult] = []
        self._late: set[int] = set()
        """Jobs that a forward could not wait for: what they copied may be anything."""
        self._received: set[str] = set()
        self._lost: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises LayoutError for caches that are not what was configured, or that do not keep what is copied there."""
        self._device = Device(self._pages.planes(kv_caches))
        self._device.prove()
        self._memory = WorkerMemory(self._device)

    def begin_step(self, plan: StepPlan) -> None:
        """Queue the plan's copies, once however often it is told. Whatever it raises, each is told the end of."""
        if plan.serial <= self._serial:
            return
        self._serial, self._is_idle = plan.serial, plan.is_idle
        for landed in plan.landed:
            self._received.add(landed.request_id)
            self._lost.update(landed.lost)
        self._host = plan.host or self._host
        unsubmitted = {job.job_id: job for job in plan.jobs}
        try:
            copier = self._copier(bool(plan.jobs))
            # A load may go to blocks whose old content is to be stored first: the copying thread does loads before
            # stores.
            self._submit(copier, unsubmitted, CopyDirection.STORE)
            self._await(set(plan.fence))
            self._submit(copier, unsubmitted, CopyDirection.RESTORE)
        finally:  # what is not told would be waited for without end
            self._fail(unsubmitted, CopyFailure.RAISED)

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
        is_waiting = self._is_idle and self._outstanding and not self._results
        self._take_results(IDLE_S if is_waiting else 0.0)
        results, self._results = self._results, []
        return StepReport(self._serial, results)

    def close(self) -> None:
        """Idempotent."""
        if self._worker is not None:
            self._outstanding -= {result.job_id for result in self._worker.close(1.0)}
        if self._memory is not None:
            self._memory.close(is_used=bool(self._outstanding))

    def _submit(self, copier: KVTierWorker | None, unsubmitted: dict[int, CopyJob], direction: CopyDirection) -> None:
        """Give the copying thread, if there is one, the jobs of one direction, and take them out of those that are not
        submitted."""
        shift = self._rank * self._pages.rank_bytes
        jobs = [job for job in unsubmitted.values() if job.direction is direction]
        if not jobs or copier is None:
            return
        memory = self._known_memory
        if direction is CopyDirection.STORE and not memory.is_ready:
            self._fail({job.job_id: unsubmitted.pop(job.job_id) for job in jobs}, CopyFailure.BACKLOG)
            return
        written = memory.after(self._known_device.written())
        for job in jobs:
            mine = replace(job, offsets=tuple(offset + shift for offset in job.offsets))
            copier.submit(TransferPlan((mine,), 0), written)
            del unsubmitted[job.job_id]
            self._outstanding.add(job.job_id)

    def _fail(self, jobs: Iterable[int], failure: CopyFailure) -> None:
        self._results += [CopyResult(job_id, (), failure, rank=self._rank) for job_id in jobs]

    def _await(self, fence: set[int]) -> None:
        """Let the copies end whose sources the forward will write, within a bound. Not while one is late already: who
        copies hangs, and every step would wait for as long."""
        deadline = time.monotonic() + (0.0 if self._late else FENCE_S)
        fence &= self._outstanding
        while fence and (left := deadline - time.monotonic()) > 0:
            fence -= {result.job_id for result in self._take_results(left)}
        self._late |= fence

    def _take_results(self, timeout: float) -> list[CopyResult]:
        results = [] if self._worker is None else self._worker.poll(timeout)
        told = [
            replace(result, copied=(), failure=CopyFailure.RAISED) if result.job_id in self._late else result
            for result in results
        ]
        ended = {result.job_id for result in results}
        self._late -= ended
        self._outstanding -= ended
        self._results += told
        return told

    def _copier(self, has_jobs: bool) -> KVTierWorker | None:
        """Who copies between the KV cache and the memory that was told last; None: nobody can, and why is logged."""
        why = self._why_unmapped()
        if why is None:
            self._why = None
            if self._worker is None and self._host is not None:
                device, memory = self._known_device, self._known_memory
                self._worker = KVTierWorker(device.planes, memory.buffer, backend=device.backend, rank=self._rank)
            return self._worker
        if has_jobs and why != self._why:
            self._why = why
            logger.error("nothing is copied to or from host memory: %s", why)
        return None

    def _why_unmapped(self) -> str | None:
        """None where it is mapped or about to be: sees to it that it is."""
        memory, host = self._known_memory, self._host
        if host is None:
            return "it is not known yet where that is"
        if memory.host == host and not memory.must_try_again:
            return memory.error
        self._take_results(0.0)
        if self._outstanding:
            # They would go on in what takes its place: in slots that may be anybody's.
            return f"it is another by now, and {len(self._outstanding)} copies of before have not ended"
        memory.take(host)
        return memory.error

    @property
    def _known_device(self) -> Device:
        assert self._device is not None, "vLLM registers its caches before the first step"
        return self._device

    @property
    def _known_memory(self) -> WorkerMemory:
        assert self._memory is not None, "vLLM registers its caches before the first step"
        return self._memory
