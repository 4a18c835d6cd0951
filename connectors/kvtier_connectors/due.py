"""When a block's copy is due: the store policies by name."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice

from kvtier.errors import ConfigError
from kvtier_connectors.contract import BlockPoolView, StepDemand
from kvtier_connectors.published import PublishedBlocks

__all__ = ["DuePolicy", "OnEvict", "StoreOff", "WriteThrough", "due_policy"]

RATE_WEIGHT = 0.2  # of the newest step in the moving average of the allocation rate


class DuePolicy(ABC):
    """Chooses blocks to copy; holds no pins and copies nothing. Engine's thread only."""

    tracks_blocks = True
    """False when nothing is ever due, so that blocks need not be known."""
    due_at_publish = False
    """True when a block is due as soon as it is published."""

    @abstractmethod
    def due_blocks(self, pool: BlockPoolView, blocks: PublishedBlocks, demand: StepDemand) -> list[int]:
        """Dirty blocks that are due in this step, the most urgent first."""


class OnEvict(DuePolicy):
    """A dirty block is due when it stands within the danger depth of the free queue.

    The depth is the largest of (blocks allocated a step, averaged, times `horizon_steps`), one step's budget, and what
    waiting requests need. So an idle engine keeps one step's worth of clean blocks and copies no more, and a busy one
    copies just ahead of its allocations. The idea of a danger depth is that of LMCache's lazy store.
    """

    def __init__(self, horizon_steps: float) -> None:
        self._horizon_steps = horizon_steps
        self._rate = 0.0
        self._scanned: tuple[int, int] | None = None  # queue version and depth of the last scan

    def due_blocks(self, pool: BlockPoolView, blocks: PublishedBlocks, demand: StepDemand) -> list[int]:
        depth = self._depth(demand, pool.num_blocks)
        if not blocks.num_dirty:
            return []
        version = pool.queue_version
        if self._scanned is not None and self._scanned[0] == version and depth <= self._scanned[1]:
            return []
        self._scanned = (version, depth)
        return blocks.dirty_among(islice(pool.free_queue(), depth))

    def _depth(self, demand: StepDemand, num_blocks: int) -> int:
        self._rate += RATE_WEIGHT * (operator.index(demand.allocated) - self._rate)
        ahead = min(self._rate * self._horizon_steps, num_blocks)
        return min(num_blocks, max(math.ceil(ahead), demand.step_budget, demand.waiting))


class WriteThrough(DuePolicy):
    """Every block is due when it is published."""

    due_at_publish = True

    def due_blocks(self, pool: BlockPoolView, blocks: PublishedBlocks, demand: StepDemand) -> list[int]:
        del pool, blocks, demand
        return []


class StoreOff(DuePolicy):
    """Nothing is ever due; what is stored already can still be restored."""

    tracks_blocks = False

    def due_blocks(self, pool: BlockPoolView, blocks: PublishedBlocks, demand: StepDemand) -> list[int]:
        del pool, blocks, demand
        return []


def due_policy(name: str, horizon_steps: float) -> DuePolicy:
    """The policy that `store.policy` names."""
    table: dict[str, Callable[[], DuePolicy]] = {
        "on_evict": lambda: OnEvict(horizon_steps),
        "write_through": WriteThrough,
        "off": StoreOff,
    }
    if name not in table:
        raise ConfigError(f"store.policy is {name!r}; it must be one of {', '.join(table)}")
    return table[name]()
