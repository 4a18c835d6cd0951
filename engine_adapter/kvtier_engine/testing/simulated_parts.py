"""What costs time in a simulation: a model that only takes it, copies and a disk that take it and then really copy."""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.keys import Key
from kvtier.layout import KVKind, KVLayout
from kvtier.testing import ManualExecutor
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.wrapper import TierWrapper
from kvtier_connectors.contract import CopyDirection, CopyFailure, CopyJob, CopyResult, TransferPlan, WriteFence
from kvtier_connectors.worker import MAX_QUEUED_JOBS, KVTierWorker
from kvtier_engine.runner import BatchItem, ModelRunner
from kvtier_engine.testing.timeline import Lane, SimulatedThreads, Timeline
from kvtier_kernels import BlockPlanes

__all__ = ["MachineRates", "SimulatedDisk", "SimulatedModel", "SimulatedWorker"]

STAMP_BYTES = 64
"""What stands for a block's bytes, at its beginning. Nothing else of a block is ever touched, so that pools of any size
cost a page a block."""
TOKEN = 7
MAP_NORESERVE = 0x4000
"""Of Linux: a mapping may be larger than memory."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What a machine does in a second. All above 0."""

    prefill_tokens_per_s: float
    """Prompt tokens."""
    decode_step_s: float
    """Seconds of a decode step, however many requests are in it."""
    decode_request_s: float
    """And of each request in it."""
    copy_bytes_per_s: float
    """Between GPU pool and host memory, one way at a time."""
    disk_bytes_per_s: float
    """Reads and writes together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"MachineRates.{field.name} must be above 0, not {getattr(self, field.name)!r}")


class SimulatedModel(ModelRunner):
    """Computes nothing, and puts out one token over and over; its steps take the time that the rates say.

    A share of one token counts as a decode, any other as prompt. The pool is memory of the nominal size that is
    reserved but not used.
    """

    def __init__(
        self, timeline: Timeline, rates: MachineRates, num_blocks: int, block_tokens: int, token_bytes: int
    ) -> None:
        self.layout = KVLayout(1, 1, token_bytes, "int8", block_tokens, KVKind.MLA)
        self.num_blocks = num_blocks
        self.max_positions = 1 << 20
        self.vocab_size = 1 << 16
        self.num_prefill_tokens = 0
        self._timeline = timeline
        self._rates = rates
        self._pool = _untouched(num_blocks * self.layout.block_bytes).reshape(num_blocks, -1)

    def planes(self) -> list[Any]:
        return [self._pool]

    def seconds_of(self, batch: Sequence[BatchItem]) -> float:
        """How long a step with this batch takes."""
        sizes = [len(item.token_ids) for item in batch]
        num_decodes = sizes.count(1)
        seconds = (sum(sizes) - num_decodes) / self._rates.prefill_tokens_per_s
        if num_decodes:
            seconds += self._rates.decode_step_s + num_decodes * self._rates.decode_request_s
        return seconds

    def execute(self, batch: Sequence[BatchItem]) -> list[int | None]:
        self.num_prefill_tokens += sum(len(item.token_ids) for item in batch if len(item.token_ids) > 1)
        self._timeline.work_until(self._timeline.now() + self.seconds_of(batch))
        return [None if item.sampler is None else TOKEN for item in batch]


class SimulatedWorker(KVTierWorker):
    """Copies one job at a time, restores first, as the real one; each ends after bytes / rate, and is copied then."""

    def __init__(
        self, planes: BlockPlanes, host: npt.NDArray[np.uint8], timeline: Timeline, bytes_per_s: float
    ) -> None:
        super().__init__(planes, host, executor=ManualExecutor())
        self._planes = planes
        self._timeline = timeline
        self._lane = Lane(timeline, bytes_per_s)
        self._lines: dict[CopyDirection, deque[CopyJob]] = {
            CopyDirection.RESTORE: deque(),
            CopyDirection.STORE: deque(),
        }
        self._is_copying = False

    def submit(self, plan: TransferPlan, written: WriteFence | None) -> None:
        for job in plan.jobs:
            if written is None:
                self._fail(job, CopyFailure.NO_FENCE)
            elif len(self._lines[job.direction]) >= MAX_QUEUED_JOBS:
                self._fail(job, CopyFailure.BACKLOG)
            else:
                self._queued[job.job_id] = job
                self._lines[job.direction].append(job)
        self._begin_next()

    def _begin_next(self) -> None:
        line = next((line for line in self._lines.values() if line), None)
        if line is None or self._is_copying:
            return
        self._is_copying = True
        job = line.popleft()
        end = self._lane.take(len(job.block_ids) * self._planes.block_bytes)
        seconds = end - self._timeline.now()
        self._timeline.at(end, partial(self._end, job, seconds), is_background=True)

    def _end(self, job: CopyJob, seconds: float) -> None:
        self._is_copying = False
        if job.job_id in self._queued and self._host is not None:  # else it was closed meanwhile, and told so
            self._copy_stamps(job, self._host)
            self._tell(CopyResult(job.job_id, (True,) * len(job.block_ids), None, seconds), job)
        self._begin_next()

    def _copy_stamps(self, job: CopyJob, host: npt.NDArray[np.uint8]) -> None:
        pool, size = self._planes.planes[0], min(STAMP_BYTES, self._planes.segment_bytes[0])
        for block_id, offset in zip(job.block_ids, job.offsets, strict=True):
            if job.direction is CopyDirection.STORE:
                host[offset : offset + size] = pool[block_id, :size]
            else:
                pool[block_id, :size] = host[offset : offset + size]


class SimulatedDisk(TierWrapper):
    """A disk that keeps blocks in a dictionary, and takes the time of their nominal bytes on a lane for both ways.

    It stands before a real disk tier that is never asked for a block. What is used longest ago goes first.
    """

    def __init__(
        self, tier: Tier, threads: SimulatedThreads, timeline: Timeline, bytes_per_s: float, capacity_bytes: int
    ) -> None:
        super().__init__(tier)
        self.lane = Lane(timeline, bytes_per_s)
        self._threads = threads
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._blocks: OrderedDict[Key, tuple[bytes, int]] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        self._blocks.clear()
        self._used_bytes = 0

    def touch(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [key in self._blocks for key in keys]

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        self._pass_time(sum(len(request.buffer) for request in requests if request.key in self._blocks))
        return [self._read_one(request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        self._pass_time(sum(len(request.buffer) for request in requests if request.key not in self._blocks))
        return [self._write_one(request) for request in requests]

    def remove(self, keys: Sequence[Key]) -> int:
        gone = [self._blocks.pop(key) for key in keys if key in self._blocks]
        self._used_bytes -= sum(nbytes for _, nbytes in gone)
        return len(gone)

    def _pass_time(self, nbytes: int) -> None:
        if nbytes:
            self._threads.sleep_until(self.lane.take(nbytes))

    def _read_one(self, request: ReadRequest) -> ReadOutcome:
        stamp, nbytes = self._blocks.get(request.key, (b"", -1))
        if nbytes != len(request.buffer):
            return ReadOutcome.MISS
        request.buffer[: len(stamp)] = stamp
        self._blocks.move_to_end(request.key)
        return ReadOutcome.OK

    def _write_one(self, request: WriteRequest) -> WriteOutcome:
        if request.key in self._blocks:
            return WriteOutcome.ALREADY_STORED
        nbytes = len(request.buffer)
        if nbytes > self._capacity_bytes:
            return WriteOutcome.FULL
        self._blocks[request.key] = (bytes(request.buffer[:STAMP_BYTES]), nbytes)
        self._used_bytes += nbytes
        while self._used_bytes > self._capacity_bytes:
            self._used_bytes -= self._blocks.popitem(last=False)[1][1]
        return WriteOutcome.STORED


def _untouched(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of which only those pages exist that were written."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
