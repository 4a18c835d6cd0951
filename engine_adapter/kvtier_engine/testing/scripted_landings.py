"""Landings of a scripted connector: copies into blocks of the engine's, pinned until every rank has told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.keys import BlockDigest
from kvtier_connectors.contract import BlockPoolView
from kvtier_engine.testing.scripted_worker import FarSide
from kvtier_engine.testing.tasks import Task, TaskKind

__all__ = ["Landing", "ScriptedLandings"]


@dataclass(eq=False, slots=True)
class Landing:
    """One request's copy. is_wanted: the request still waits for it. is_valid: no reset came between. is_given_up: its
    time was over."""

    task: Task
    first_block: int
    is_wanted: bool = True
    is_valid: bool = True
    is_given_up: bool = False

    @property
    def num_landed(self) -> int:
        """Leading blocks that every rank copied, once all have told."""
        return ([*self.task.verdicts(), False]).index(False) if self.is_valid else 0


class ScriptedLandings:
    """Owns the landings that have not ended and the pins on their destinations."""

    def __init__(self, far: FarSide, pool: BlockPoolView) -> None:
        self.num_landed = 0
        self.num_failed = 0
        self._far = far
        self._pool = pool
        self._running: dict[int, Landing] = {}
        self._planned: list[Task] = []

    def begin(
        self, request_id: str, first_block: int, digests: Sequence[BlockDigest], block_ids: Sequence[int]
    ) -> Landing:
        task = self._far.begin(TaskKind.LAND, request_id, digests, block_ids)
        for block_id in block_ids:
            self._pool.pin(block_id, f"restore of {request_id}")
        landing = self._running[task.task_id] = Landing(task, first_block)
        self._planned.append(task)
        return landing

    def plan(self) -> list[Task]:
        """Landings that no plan has named yet."""
        planned, self._planned = self._planned, []
        return [task for task in planned if task.task_id in self._running]

    def end(self, task: Task) -> Landing:
        """Every rank told: nothing writes the destinations any more."""
        landing = self._running.pop(task.task_id)
        for block_id in task.block_ids:
            self._pool.unpin(block_id)
        self.num_landed += landing.num_landed
        self.num_failed += task.num_blocks - landing.num_landed
        return landing

    def void(self) -> None:
        """What lands from now on was forgotten meanwhile."""
        for landing in self._running.values():
            landing.is_valid = False

    def cancel_planned(self) -> None:
        """Nobody copies what no plan has named, and at a close nobody will."""
        for task in self.plan():
            self._far.board.drop(task)
            self.end(task)

    def pinned(self) -> list[int]:
        """Every destination, as often as it is pinned."""
        return [block_id for landing in self._running.values() for block_id in landing.task.block_ids]

    def given_up(self) -> list[Task]:
        """Copies whose end nobody waits for."""
        return [landing.task for landing in self._running.values() if landing.is_given_up]

    def wanted(self) -> set[str]:
        """Requests that wait for a landing."""
        return {landing.task.request_id for landing in self._running.values() if landing.is_wanted}
