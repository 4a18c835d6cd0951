"""Which blocks are due, and what finding out costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from kvtier.errors import ConfigError
from kvtier.keys import BlockDigest
from kvtier_connectors.contract import StepDemand
from kvtier_connectors.due import OnEvict, StoreOff, WriteThrough, due_policy
from kvtier_connectors.published import PublishedBlock, PublishedBlocks

IDLE = StepDemand(allocated=0, step_budget=0, waiting=0)


class QueueOnly:
    """A free queue that counts who looks at it, and how far."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = list(range(num_blocks))
        self.queue_version = 0
        self.scans = 0
        self.seen = 0

    def free_queue(self) -> Iterable[int]:
        self.scans += 1
        return self._walk()

    def _walk(self) -> Iterator[int]:
        for block_id in self.blocks:
            self.seen += 1
            yield block_id

    def pin(self, block_id: int, holder: str) -> None:
        raise AssertionError("a policy holds no pins")

    def unpin(self, block_id: int) -> None:
        raise AssertionError("a policy holds no pins")


def dirty_blocks(count: int) -> PublishedBlocks:
    blocks = PublishedBlocks()
    for block_id in range(count):
        blocks.add(PublishedBlock(block_id, BlockDigest(block_id.to_bytes(32, "big")), None), dirty=True)
    return blocks


def due(policy: OnEvict, pool: QueueOnly, blocks: PublishedBlocks, demand: StepDemand) -> list[int]:
    pool.queue_version += 1
    return policy.due_blocks(pool, blocks, demand)


def test_the_depth_is_the_largest_of_the_three() -> None:
    pool, blocks = QueueOnly(10), dirty_blocks(10)
    assert due(OnEvict(2.5), pool, blocks, StepDemand(0, step_budget=3, waiting=1)) == [0, 1, 2]
    assert due(OnEvict(2.5), pool, blocks, StepDemand(0, step_budget=1, waiting=4)) == [0, 1, 2, 3]
    # One step's allocation of 10 moves the average to 2; times the horizon of 2.5.
    assert due(OnEvict(2.5), pool, blocks, StepDemand(10, step_budget=1, waiting=4)) == [0, 1, 2, 3, 4]


def test_r79_the_rate_follows_what_is_allocated_and_dies_away() -> None:
    pool, blocks, policy = QueueOnly(100), dirty_blocks(100), OnEvict(4.0)
    found = [len(due(policy, pool, blocks, StepDemand(5, 0, 0))) for _ in range(60)]
    assert found == sorted(found)
    assert found[-1] == 20, "five a step, four steps ahead"
    found = [len(due(policy, pool, blocks, IDLE)) for _ in range(60)]
    assert found[-1] <= 1


def test_blocks_beyond_the_depth_are_not_looked_at() -> None:
    pool, blocks = QueueOnly(1000), dirty_blocks(1000)
    due(OnEvict(2.5), pool, blocks, StepDemand(0, 3, 0))
    assert pool.seen <= 4


def test_clean_blocks_count_for_the_depth_and_are_not_due() -> None:
    pool, blocks = QueueOnly(6), dirty_blocks(6)
    blocks.mark_clean(0)
    blocks.mark_clean(2)
    assert due(OnEvict(2.5), pool, blocks, StepDemand(0, 4, 0)) == [1, 3]


def test_an_idle_step_does_not_scan() -> None:
    pool, blocks, policy = QueueOnly(6), dirty_blocks(6), OnEvict(2.5)
    demand = StepDemand(0, 2, 0)
    policy.due_blocks(pool, blocks, demand)
    for _ in range(50):
        assert policy.due_blocks(pool, blocks, demand) == []
    assert pool.scans == 1
    assert policy.due_blocks(pool, blocks, StepDemand(0, 4, 0)) == [0, 1, 2, 3], "a greater depth is looked at"
    pool.queue_version += 1
    policy.due_blocks(pool, blocks, demand)
    assert pool.scans == 3, "a changed queue too"


def test_with_nothing_dirty_nothing_is_scanned() -> None:
    pool = QueueOnly(6)
    due(OnEvict(2.5), pool, PublishedBlocks(), StepDemand(9, 9, 9))
    assert pool.scans == 0


def test_the_other_policies_never_look() -> None:
    pool, blocks = QueueOnly(6), dirty_blocks(6)
    for policy in (WriteThrough(), StoreOff()):
        assert policy.due_blocks(pool, blocks, StepDemand(9, 9, 9)) == []
    assert pool.scans == 0
    assert (WriteThrough().due_at_publish, StoreOff().tracks_blocks) == (True, False)


def test_policies_by_name() -> None:
    assert isinstance(due_policy("on_evict", 2.5), OnEvict)
    assert isinstance(due_policy("write_through", 2.5), WriteThrough)
    assert isinstance(due_policy("off", 2.5), StoreOff)
    with pytest.raises(ConfigError, match=r"store\.policy is 'lru'; it must be one of on_evict, write_through, off"):
        due_policy("lru", 2.5)
