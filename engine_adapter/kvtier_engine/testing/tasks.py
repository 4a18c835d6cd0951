"""What a scripted connector has under way: tasks that end when every rank was told to deliver."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.keys import BlockDigest
from kvtier_connectors.contract import CopyDirection, CopyJob, CopyResult

__all__ = ["IgnoredDelivery", "Task", "TaskBoard", "TaskKind"]

logger = logging.getLogger("kvtier.testing")


class TaskKind(StrEnum):
    LOOKUP = "lookup"
    """Which blocks do the lower tiers hold?"""
    STAGE = "stage"
    """Blocks from lower tiers to host memory."""
    LAND = "land"
    """Blocks from host memory into the GPU pool."""
    STORE = "store"
    """Blocks from the GPU pool to host memory."""


class IgnoredDelivery(StrEnum):
    """Why a delivery came to nothing."""

    DOUBLE = "double"
    """That rank had delivered."""
    LATE = "late"
    """The task had ended, or nobody waits for it any more."""
    UNKNOWN = "unknown"
    """There never was such a task, or such a rank."""


@dataclass(eq=False, slots=True)
class Task:
    """Something under way.

    request_id: whom it is for; "" of a store. digests, block_ids: what it is about; lookups and stages have no blocks.
    tier: the lower tier asked first, "host" of copies. began_at: on the clock. due: when it delivers by itself.
    told: verdicts by rank, as far as the engine's side has taken them. delivered: ranks that have delivered.
    """

    task_id: int
    kind: TaskKind
    request_id: str
    digests: tuple[BlockDigest, ...]
    block_ids: tuple[int, ...]
    tier: str
    began_at: float
    due: float | None = None
    told: dict[int, list[bool]] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    buffers: list[bytearray] = field(default_factory=list)
    """A block's bytes each, on their way between host memory and GPU pool."""

    @property
    def num_blocks(self) -> int:
        return len(self.digests)

    def job(self) -> CopyJob:
        """A copy as a plan names it. Its offsets mean nothing: there is no host pool."""
        direction = CopyDirection.STORE if self.kind is TaskKind.STORE else CopyDirection.RESTORE
        return CopyJob(self.task_id, direction, self.block_ids, (0,) * self.num_blocks)

    def verdicts(self) -> list[bool]:
        """Blocks for which every rank that told said yes."""
        return [all(told) for told in zip(*self.told.values(), strict=True)]


class TaskBoard:
    """Owns the open tasks and what was delivered to them. `post` is the far side, `take` the engine's."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
        self.num_ranks = num_ranks
        self.ignored: Counter[IgnoredDelivery] = Counter()
        self._open: dict[int, Task] = {}
        self._last_id = 0
        self._has_logged = False

    def begin(
        self,
        kind: TaskKind,
        request_id: str,
        digests: Sequence[BlockDigest],
        *,
        now: float,
        block_ids: Sequence[int] = (),
        tier: str = "host",
    ) -> Task:
        self._last_id += 1
        task = Task(self._last_id, kind, request_id, tuple(digests), tuple(block_ids), tier, now)
        self._open[task.task_id] = task
        return task

    def get(self, task_id: int) -> Task | None:
        """The task, while it is open."""
        return self._open.get(task_id)

    def waiting(self, kind: TaskKind | None = None) -> list[Task]:
        """Tasks to which some rank has yet to deliver, the oldest first."""
        return [
            task for task in self._open.values() if len(task.delivered) < self.num_ranks and kind in (None, task.kind)
        ]

    def num_open_blocks(self, *kinds: TaskKind) -> int:
        return sum(task.num_blocks for task in self._open.values() if task.kind in kinds)

    def is_first(self, task_id: int, rank: int) -> bool:
        """Whether a delivery by this rank is the first; marks it as made. Any other moves no byte."""
        task = self._open.get(task_id)
        if task is None or not 0 <= rank < self.num_ranks or rank in task.delivered:
            return False
        task.delivered.add(rank)
        return True

    def take(self, result: CopyResult) -> Task | None:
        """A delivery reached the engine's side: the task, if that was the last one it waited for."""
        task = self._open.get(result.job_id)
        if task is None:
            is_known = 0 < result.job_id <= self._last_id
            self.ignore(IgnoredDelivery.LATE if is_known else IgnoredDelivery.UNKNOWN, result)
        elif not 0 <= result.rank < self.num_ranks:
            self.ignore(IgnoredDelivery.UNKNOWN, result)
        elif result.rank in task.told:
            self.ignore(IgnoredDelivery.DOUBLE, result)
        else:
            task.told[result.rank] = result.verdicts(task.num_blocks)
            if len(task.told) == self.num_ranks:
                return self._open.pop(task.task_id)
        return None

    def drop(self, task: Task) -> None:
        """It will never be delivered: a delivery is late."""
        self._open.pop(task.task_id, None)

    def ignore(self, why: IgnoredDelivery, result: CopyResult) -> None:
        self.ignored[why] += 1
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                "a %s delivery to task %d by rank %d was ignored (others are only counted)",
                why.value,
                result.job_id,
                result.rank,
            )
