"""Who may have how many of the free blocks: needs of requests that came first, kept from those that came later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import IntegrityError
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.request import Request, RequestState

__all__ = ["CapacityLedger"]


@dataclass(slots=True)
class _Waiter:
    """A restore that was refused for lack of blocks."""

    num_needed: int
    is_refused_now: bool


class CapacityLedger:
    """Counts blocks; allocates and evicts none.

    * A *credit* is a block that an admitted prompt will still need, its first output token's included. Admissions leave
      credits alone; growth does not: a running decode takes any free block, and a prompt whose credits were taken waits
      for blocks like any other growth.
    * A *waiter* is a restore that found too few blocks. What it needs is held, within one step, against everyone who is
      considered behind it, and against nobody before it.
    * A *hold* keeps the need of any other blocked request, likewise.

    A request's own blocks count towards its need. Mutable state: everything; engine's thread only.
    """

    def __init__(self, pool: BlockPool, max_waiters: int, watermark: int) -> None:
        """watermark: blocks that a restore leaves free for running decodes, while there are any."""
        self._pool = pool
        self._max_waiters = max_waiters
        self._watermark = watermark
        self._waiters: dict[Request, _Waiter] = {}
        self.num_held = 0
        """Blocks kept, in this step so far, for those who were refused."""

    @property
    def num_waiters(self) -> int:
        return len(self._waiters)

    def start_step(self) -> None:
        """Nobody has been considered yet, so nothing is held."""
        self.num_held = 0
        for waiter in self._waiters.values():
            waiter.is_refused_now = False

    @staticmethod
    def needed(request: Request, num_local: int) -> int:
        """Blocks that a request must still get to compute all it has and put out one token, beside those it holds and
        `num_local` that it shares."""
        return max(0, request.blocks_for(len(request.tokens) + 1) - len(request.block_table) - num_local)

    def credits(self, running: Iterable[Request]) -> int:
        """Blocks that admitted prompts, landing ones included, will still take."""
        return sum(
            self.needed(request, 0)
            for request in running
            if request.state is RequestState.RESTORING or not request.is_decoding
        )

    def kept(self, *, is_restore: bool, is_busy: bool) -> int:
        """Of the blocks that are free and nobody's credits, those that the request considered next must leave.

        is_busy: whether something computes, for which a restore leaves the watermark.
        """
        return self.num_held + (self._watermark if is_restore and is_busy else 0)

    def waiters(self) -> list[Request]:
        return list(self._waiters)

    def can_wait(self, request: Request) -> bool:
        """Whether a refused restore may be a waiter: a bounded number may at once."""
        return request in self._waiters or len(self._waiters) < self._max_waiters

    def wait(self, request: Request, num_needed: int) -> None:
        """A restore was refused: hold what it needs against those behind it."""
        self._waiters[request] = _Waiter(num_needed, is_refused_now=True)
        self.num_held += num_needed

    def hold(self, num_blocks: int) -> None:
        """Keep a blocked request's need from those behind it."""
        self.num_held += num_blocks

    def release(self, request: Request) -> None:
        """The wait is over, for whatever reason: what was held for it is free at once. Idempotent."""
        waiter = self._waiters.pop(request, None)
        if waiter is not None and waiter.is_refused_now:
            self.num_held -= waiter.num_needed

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Raises IntegrityError unless every waiter waits, and there are not too many. O(waiting): for tests."""
        if not self._waiters.keys() <= set(waiting):
            raise IntegrityError("capacity: a restore holds blocks back, and waits no more")
        if len(self._waiters) > self._max_waiters or self.num_held < 0:
            raise IntegrityError(f"capacity: {len(self._waiters)} waiters, {self.num_held} blocks held back")
