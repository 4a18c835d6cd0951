"""The far side of a scripted connector: tiers, copies and answers, which move when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvtier.clock import Clock
from kvtier.keys import BlockDigest
from kvtier_connectors.contract import (
    ConnectorWorker,
    CopyFailure,
    CopyResult,
    TransferPlan,
    WriteFence,
)
from kvtier_engine.testing.tasks import Task, TaskBoard, TaskKind
from kvtier_engine.testing.tiers import PoolBytes, ScriptedTiers

__all__ = ["FarSide", "ScriptedWorker"]

COPIES = (TaskKind.LAND, TaskKind.STORE)
ANSWERS = (TaskKind.LOOKUP, TaskKind.STAGE)


class FarSide:
    """Owns the board, the tiers and what was delivered and not yet taken: `results` of copies, `answers` of the rest.

    auto: kinds of tasks that deliver by themselves at the next poll. latency: when a task delivers by itself, on the
    clock; None for one that waits for the test.
    """

    def __init__(
        self,
        clock: Clock,
        num_ranks: int,
        auto: Collection[TaskKind],
        latency: Callable[[Task], float | None] | None,
    ) -> None:
        self.board = TaskBoard(num_ranks)
        self.tiers = ScriptedTiers()
        self.pool_bytes: PoolBytes | None = None  # until it is opened beside an engine
        self.clock = clock
        self.results: list[CopyResult] = []
        self.answers: list[CopyResult] = []
        self._auto = frozenset(auto)
        self._latency = latency
        self._submitted: set[int] = set()

    def begin(
        self,
        kind: TaskKind,
        request_id: str,
        digests: Sequence[BlockDigest],
        block_ids: Sequence[int] = (),
        tier: str = "host",
    ) -> Task:
        now = self.clock.now()
        task = self.board.begin(kind, request_id, digests, now=now, block_ids=block_ids, tier=tier)
        if kind is TaskKind.LAND:  # what it reads is leased: a block dropped meanwhile is copied all the same
            task.buffers = [bytearray(self.tiers.held("host")[digest]) for digest in digests]
        if kind is TaskKind.STORE:
            task.buffers = [bytearray(self._bytes.block_bytes) for _ in digests]
        task.due = self._latency(task) if self._latency is not None else None
        if kind in self._auto:
            task.due = now
        return task

    def submit(self, task_id: int) -> None:
        """The engine handed the copy to the worker; before, nobody could have copied anything."""
        self._submitted.add(task_id)

    def deliver(
        self,
        task: Task | int,
        rank: int,
        verdicts: Sequence[bool],
        failure: CopyFailure | None = None,
    ) -> None:
        """One rank is done with a task. What it copied is in its place now; the engine hears of it at its next poll."""
        task_id = task if isinstance(task, int) else task.task_id
        found = self.board.get(task_id)
        is_copy = found is None or found.kind in COPIES
        if found is not None and is_copy and task_id not in self._submitted:
            raise ValueError(f"task {task_id} is in no plan yet: make a step before it is delivered")
        seconds = 0.0 if found is None else max(0.0, self.clock.now() - found.began_at)
        result = CopyResult(task_id, tuple(verdicts), failure, seconds, rank)
        has_begun = failure in (None, CopyFailure.RAISED)
        if self.board.is_first(task_id, rank) and found is not None and is_copy and has_begun:
            self._move(found, rank, result.verdicts(found.num_blocks))
        (self.results if is_copy else self.answers).append(result)

    def deliver_due(self, kinds: Collection[TaskKind] = tuple(TaskKind)) -> None:
        """Everything that delivers by itself, and whose time has come."""
        now = self.clock.now()
        for task in self.board.waiting():
            if task.kind in kinds and task.due is not None and task.due <= now and self.is_deliverable(task):
                self.deliver_rest(task, ok=True)

    def deliver_rest(self, task: Task, *, ok: bool, failure: CopyFailure | None = None) -> None:
        """Every rank that has not delivered does."""
        for rank in range(self.board.num_ranks):
            if rank not in task.delivered:
                self.deliver(task, rank, [ok] * task.num_blocks, failure)

    def next_due(self) -> float | None:
        """When the next task delivers by itself."""
        return min((task.due for task in self.board.waiting() if task.due is not None), default=None)

    @property
    def block_bytes(self) -> int:
        return self._bytes.block_bytes

    def is_deliverable(self, task: Task) -> bool:
        """Whether the engine has begun it: a copy is in a plan that was submitted."""
        return task.kind not in COPIES or task.task_id in self._submitted

    @property
    def _bytes(self) -> PoolBytes:
        assert self.pool_bytes is not None
        return self.pool_bytes

    def _move(self, task: Task, rank: int, copied: Sequence[bool]) -> None:
        for block_id, buffer, ok in zip(task.block_ids, task.buffers, copied, strict=True):
            if task.kind is TaskKind.LAND:
                self._bytes.write_share(block_id, rank, buffer, torn=not ok)
            elif ok:
                self._bytes.read_share(block_id, rank, buffer)


class ScriptedWorker(ConnectorWorker):
    """Hands over what was delivered. Has no thread: `poll` never waits."""

    def __init__(self, far: FarSide) -> None:
        self._far = far

    def submit(self, plan: TransferPlan, written: WriteFence | None) -> None:
        for job in plan.jobs:
            self._far.submit(job.job_id)
            task = self._far.board.get(job.job_id)
            if written is None and task is not None:
                self._far.deliver_rest(task, ok=False, failure=CopyFailure.NO_FENCE)

    def poll(self, timeout: float = 0.0) -> list[CopyResult]:
        del timeout
        self._far.deliver_due()
        results, self._far.results = self._far.results, []
        return results

    def close(self, timeout: float) -> list[CopyResult]:
        """Copies that were not delivered never are."""
        del timeout
        for task in self._far.board.waiting():
            if task.kind in COPIES:
                self._far.submit(task.task_id)
                self._far.deliver_rest(task, ok=False, failure=CopyFailure.CLOSED)
        results, self._far.results = self._far.results, []
        return results
