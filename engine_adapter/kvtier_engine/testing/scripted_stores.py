"""The way down of a scripted connector: what is published, and copies of it to host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtier.keys import BlockDigest
from kvtier_connectors.contract import BlockPoolView
from kvtier_engine.testing.scripted_worker import FarSide
from kvtier_engine.testing.tasks import Task, TaskKind
from kvtier_engine.testing.tiers import HOST

__all__ = ["ScriptedStores"]

HOLDER = "store"


class ScriptedStores:
    """Owns which GPU block holds which published KV, and the pins of stores under way."""

    def __init__(self, far: FarSide, pool: BlockPoolView) -> None:
        self.num_stored = 0
        self.num_failed = 0
        self._far = far
        self._pool = pool
        self._published: dict[int, BlockDigest] = {}
        self._running: dict[int, bool] = {}  # a store's task, and whether it may still be committed

    def publish(self, blocks: Iterable[tuple[int, BlockDigest]]) -> None:
        self._published.update(blocks)

    def forget(self, reused: Sequence[int]) -> None:
        """These blocks were handed out: what they held is gone."""
        for block_id in reused:
            self._published.pop(block_id, None)

    def unstored(self) -> Iterator[tuple[int, BlockDigest]]:
        """Published blocks that are neither in host memory nor on their way there."""
        known = set(self._far.tiers.held(HOST))
        for task_id in self._running:
            task = self._far.board.get(task_id)
            known.update(task.digests if task is not None else ())
        for block_id, digest in self._published.items():
            if digest not in known:
                known.add(digest)
                yield block_id, digest

    def begin(self) -> list[Task]:
        """One task for everything that is unstored; none if nothing is."""
        blocks = list(self.unstored())
        if not blocks:
            return []
        block_ids = [block_id for block_id, _ in blocks]
        task = self._far.begin(TaskKind.STORE, "", [digest for _, digest in blocks], block_ids)
        for block_id in block_ids:
            self._pool.pin(block_id, HOLDER)
        self._running[task.task_id] = True
        return [task]

    def end(self, task: Task) -> None:
        """Every rank told: what all of them copied is in host memory now."""
        is_valid = self._running.pop(task.task_id)
        for block_id in task.block_ids:
            self._pool.unpin(block_id)
        for digest, data, ok in zip(task.digests, task.buffers, task.verdicts(), strict=True):
            if ok and is_valid:
                self._far.tiers.put(HOST, digest, bytes(data))
                self.num_stored += 1
            else:
                self.num_failed += 1

    def reset(self) -> None:
        """Forget what is published; copies under way come to nothing."""
        self._published.clear()
        self._running = dict.fromkeys(self._running, False)

    def pinned(self) -> list[int]:
        """Every block pinned by a store, as often as it is."""
        tasks = [self._far.board.get(task_id) for task_id in self._running]
        return [block_id for task in tasks if task is not None for block_id in task.block_ids]
