"""Who wrote which block when, held against what the pool says of it: what a use after free leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PagePool", "PageWrite", "PageWriteLog"]


class PagePool(Protocol):
    """What the log asks of a block pool; `kvtier_engine.block_pool.BlockPool` answers it."""

    def refs(self, block_id: int) -> int:
        """How many requests' tables hold the block: 0 when it is free."""

    def pins(self, block_id: int) -> int:
        """How often copies pin it."""

    def is_published(self, block_id: int) -> bool:
        """Whether others may match it."""


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A model's write into one block: KV of positions `start .. end`, for a request, in a step."""

    step: int
    request_id: str
    block_id: int
    start: int
    end: int


class PageWriteLog:
    """Every write of a runner, and what was wrong with it.

    A step may write a block that exactly one request references, that nobody can match and no copy pins, for that
    request only. Faults are collected, not raised, because an engine takes what its model raises for a failing forward;
    call `verify` after each step.

        runner = FakeRunner(num_blocks=8, block_tokens=4)
        runner.writes = PageWriteLog()
        engine = Engine(runner, ...)
        runner.writes.watch(engine.pool)

    check: a hook beside these rules, asked before each write; what it returns, if not None, is a fault.
    """

    def __init__(self, pool: PagePool | None = None, *, check: Callable[[PageWrite], str | None] | None = None) -> None:
        self.writes: list[PageWrite] = []
        self.faults: list[str] = []
        self.step = 0
        self._pool = pool
        self._check = check
        self._writers: dict[int, str] = {}  # of the blocks written in this step

    def watch(self, pool: PagePool) -> None:
        """Ask this pool from now on; without one only the hook, and two writers of one block, are looked at."""
        self._pool = pool

    def begin_step(self) -> None:
        """A forward begins. Called by the runner."""
        self.step += 1
        self._writers = {}

    def note(self, request_id: str, block_id: int, start: int, end: int) -> None:
        """A block is about to be written at positions `start .. end`. Called by the runner."""
        write = PageWrite(self.step, request_id, block_id, start, end)
        self.writes.append(write)
        for problem in self._problems(write):
            self.faults.append(
                f"step {write.step}: request {request_id} writes positions {start}..{end - 1} into block {block_id}, "
                f"{problem}"
            )
        self._writers.setdefault(block_id, request_id)

    def of_block(self, block_id: int) -> list[PageWrite]:
        return [write for write in self.writes if write.block_id == block_id]

    def of_request(self, request_id: str) -> list[PageWrite]:
        return [write for write in self.writes if write.request_id == request_id]

    def verify(self) -> None:
        """AssertionError that names every write so far that should not have been."""
        assert not self.faults, "; ".join(self.faults)

    def _problems(self, write: PageWrite) -> list[str]:
        problems: list[str] = []
        writer = self._writers.get(write.block_id, write.request_id)
        if writer != write.request_id:
            problems.append(f"which request {writer} writes in the same step")
        if self._pool is not None:
            refs = self._pool.refs(write.block_id)
            if not refs:
                problems.append("which is free")
            if refs > 1:
                problems.append(f"which {refs} requests share")
            if self._pool.is_published(write.block_id):
                problems.append("which is published: others may read it")
            if self._pool.pins(write.block_id):
                problems.append("which a copy pins")
        told = self._check(write) if self._check is not None else None
        return problems if told is None else [*problems, told]
