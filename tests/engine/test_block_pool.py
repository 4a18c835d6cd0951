"""The block pool against a plain model: who may be handed out, in which order, and what can be found."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import ConfigError, IntegrityError
from kvtier_engine.block_pool import BlockPool

ROOT = b"root"


def digest_of(tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest()


def publish_chain(pool: BlockPool, blocks: list[int], prompt: tuple[int, ...], root: bytes = ROOT) -> list[int]:
    """Publish one token a block; the blocks that stand for the chain, twins merged as the scheduler does."""
    table = list(blocks)
    for index in range(len(table)):
        previous = table[index - 1] if index else None
        stands = pool.publish(table[index], digest_of(prompt[: index + 1]), root, previous, (prompt[index],))
        if stands != table[index]:
            pool.acquire([stands])
            pool.release([table[index]])
            table[index] = stands
    return table


def match(pool: BlockPool, prompt: tuple[int, ...], root: bytes = ROOT) -> list[int]:
    digests = [digest_of(prompt[: index + 1]) for index in range(len(prompt))]
    return pool.match(root, digests, lambda index: (prompt[index],))


def fingerprint(pool: BlockPool) -> dict[str, Any]:
    """Everything the pool remembers."""
    state = dict(vars(pool))
    return {name: list(value.items()) if hasattr(value, "items") else repr(value) for name, value in state.items()}


def allocate(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    before = fingerprint(pool)
    assert pool.allocate(4) is None
    assert fingerprint(pool) == before
    assert allocate(pool, 3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = allocate(pool, 2)
    publish_chain(pool, cached, (1, 2))
    plain = allocate(pool, 2)
    pool.release(cached)
    pool.release(plain)
    assert set(allocate(pool, 2)) == set(plain)
    assert match(pool, (1, 2)) == cached


def test_r29_tails_are_reused_before_prefixes() -> None:
    pool = BlockPool(4)
    blocks = allocate(pool, 4)
    publish_chain(pool, blocks, (1, 2, 3, 4))
    pool.release(blocks)
    for left in (3, 2, 1, 0):
        assert allocate(pool, 1) == [blocks[left]]
        assert match(pool, (1, 2, 3, 4)) == blocks[:left]


def test_r29_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(3)
    for value in (1, 2, 3):
        block = allocate(pool, 1)
        publish_chain(pool, block, (value,))
        pool.release(block)
    used = match(pool, (1,))
    pool.acquire(used)
    pool.release(used)
    allocate(pool, 2)
    assert match(pool, (1,)) == used
    assert match(pool, (2,)) == match(pool, (3,)) == []


def test_unpin_restores_the_exact_old_place() -> None:
    pool = BlockPool(5)
    order = list(pool.free_queue())
    pool.pin(2, "a copy")
    pool.pin(2, "a copy")
    assert list(pool.free_queue()) == order
    assert pool.num_free == 4
    pool.unpin(2)
    assert pool.num_free == 4, "pinned twice, unpinned once"
    pool.unpin(2)
    assert list(pool.free_queue()) == order
    assert allocate(pool, 5) == order


def test_pinned_blocks_are_passed_over() -> None:
    pool = BlockPool(3)
    pool.pin(0, "a copy")
    pool.pin(1, "a copy")
    assert pool.allocate(2) is None
    assert allocate(pool, 1) == [2]
    pool.unpin(1)
    assert allocate(pool, 1) == [1]


def test_a_pinned_block_can_be_shared_and_released() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 1)
    publish_chain(pool, blocks, (1,))
    pool.release(blocks)
    pool.pin(blocks[0], "a copy")
    assert pool.num_free_of(blocks) == 0
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.unpin(blocks[0])
    pool.check_integrity([[]])
    assert pool.num_free == 2


def test_double_release_and_double_unpin_are_our_bugs() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])
    with pytest.raises(AssertionError, match="unpinned more often"):
        pool.unpin(0)


def test_r22_a_reused_block_is_not_found_under_its_old_digest() -> None:
    pool = BlockPool(1)
    block = allocate(pool, 1)
    publish_chain(pool, block, (1,))
    pool.release(block)
    assert allocate(pool, 1) == block
    assert match(pool, (1,)) == []
    assert pool.take_reused() == block
    assert pool.take_reused() == []


def test_r17_probing_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = allocate(pool, 3)
    publish_chain(pool, blocks, (1, 2, 3))
    pool.release(blocks[1:])
    before = fingerprint(pool)
    for _ in range(5):
        assert match(pool, (1, 2, 3)) == blocks
        assert match(pool, (1, 9)) == blocks[:1]
        pool.num_free_of(blocks)
        pool.num_freed_by_release(blocks)
        list(pool.free_queue())
        pool.is_published(1)
        pool.check_integrity()
    assert fingerprint(pool) == before


def test_r23_twins_are_merged_with_exact_references() -> None:
    pool = BlockPool(4)
    one, two = allocate(pool, 2), allocate(pool, 2)
    table_one = publish_chain(pool, one, (1, 2))
    table_two = publish_chain(pool, two, (1, 2))
    assert table_one == table_two == one
    pool.check_integrity([table_one, table_two])
    assert [pool.refs(b) for b in one] == [2, 2]
    assert pool.num_free == 2
    pool.release(table_one)
    assert match(pool, (1, 2)) == one, "as long as either copy lives"
    pool.release(table_two)
    pool.check_integrity([[]])
    assert match(pool, (1, 2)) == one


def test_publishing_a_block_again_changes_nothing() -> None:
    pool = BlockPool(2)
    blocks = publish_chain(pool, allocate(pool, 2), (1, 2))
    before = fingerprint(pool)
    assert publish_chain(pool, blocks, (1, 2)) == blocks
    assert fingerprint(pool) == before


def test_what_follows_an_unpublished_block_cannot_be_published() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 2)
    assert pool.publish(blocks[1], digest_of((1, 2)), ROOT, blocks[0], (2,)) == blocks[1]
    assert not pool.is_published(blocks[1])


@pytest.mark.bug("SE08")
def test_r24_with_a_constant_hash_tokens_and_parents_still_tell_blocks_apart() -> None:
    constant = b"same for all"
    pool = BlockPool(4)
    a, b, c = allocate(pool, 3)
    assert pool.publish(a, constant, ROOT, None, (1,)) == a
    assert pool.publish(b, constant, ROOT, None, (2,)) == b
    assert pool.publish(c, constant, ROOT, a, (1,)) == c
    assert pool.num_collisions == 2
    assert not pool.is_published(b)
    assert pool.match(ROOT, [constant], lambda _: (1,)) == [a]
    assert pool.match(ROOT, [constant], lambda _: (2,)) == [], "tokens differ"
    assert pool.match(b"other root", [constant], lambda _: (1,)) == [], "roots differ"
    assert pool.match(ROOT, [constant, constant], lambda _: (1,)) == [a], "the second block has another parent"
    assert pool.publish(allocate(pool, 1)[0], constant, ROOT, None, (1,)) == a, "a true twin is still one"


def test_a_prefix_computed_again_can_be_continued() -> None:
    """Its tail outlived it, because it was pinned; the tail's old place in the chain is nobody's any more."""
    pool = BlockPool(4)
    blocks = publish_chain(pool, allocate(pool, 2), (1, 2))
    pool.release(blocks)
    pool.pin(blocks[1], "a copy")
    taken = allocate(pool, 3)
    pool.release(taken)
    pool.unpin(blocks[1])
    assert match(pool, (1, 2)) == []
    again = publish_chain(pool, allocate(pool, 2), (1, 2))
    assert match(pool, (1, 2)) == again
    assert pool.num_collisions == 0


def test_reset_forgets_what_blocks_hold_and_keeps_who_has_them() -> None:
    pool = BlockPool(3)
    blocks = publish_chain(pool, allocate(pool, 2), (1, 2))
    pool.pin(blocks[0], "a copy")
    pool.reset_cache()
    pool.check_integrity([blocks])
    assert match(pool, (1, 2)) == []
    assert sorted(pool.take_reused()) == blocks
    assert pool.num_free == 1


def test_every_change_of_the_queue_changes_its_version() -> None:
    pool = BlockPool(3)
    versions = [pool.queue_version]
    blocks = allocate(pool, 2)
    versions.append(pool.queue_version)
    publish_chain(pool, blocks, (1, 2))
    assert pool.queue_version == versions[-1]
    pool.release(blocks)
    versions.append(pool.queue_version)
    pool.acquire(blocks[:1])
    versions.append(pool.queue_version)
    assert len(set(versions)) == len(versions)
    pool.pin(2, "a copy")
    pool.unpin(2)
    assert pool.queue_version == versions[-1]


def test_the_check_sees_a_broken_pool() -> None:
    def broken(change: str) -> BlockPool:
        pool = BlockPool(2)
        publish_chain(pool, allocate(pool, 1), (1,))
        match change:
            case "refs":
                pool._refs[1] = 1
            case "free":
                pool._num_free = 2
            case "queue":
                pool._queue.clear()
            case "cache":
                pool._cached.clear()
        return pool

    for change in ("refs", "free", "queue", "cache"):
        with pytest.raises(IntegrityError):
            broken(change).check_integrity()
    with pytest.raises(IntegrityError, match="references equal the tables"):
        broken("").check_integrity([[0], [0]])


class PoolMachine(RuleBasedStateMachine):
    """Requests allocate, compute (one token a block), share, end; copies pin and unpin; the model is lists."""

    @initialize(num_blocks=st.integers(1, 8))
    def open(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[tuple[list[int], tuple[int, ...]]] = []
        self.pinned: list[int] = []
        self.place: dict[int, int] = {}

    def expected_free(self) -> set[int]:
        used = {block for table, _ in self.tables for block in table}
        return set(range(self.pool.num_blocks)) - used - set(self.pinned)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), confirm=st.booleans())
    def run_request(self, prompt: tuple[int, ...], confirm: bool) -> None:
        local = match(self.pool, prompt)
        for block, token in zip(local, prompt, strict=False):
            content = self.pool._contents[block]
            assert content is not None
            assert content.tokens == (token,)
        free = self.expected_free()
        self.pool.acquire(local)
        free -= set(local)
        queue = [block for block in self.pool.free_queue() if block in free]
        own = self.pool.allocate(len(prompt) - len(local))
        if len(prompt) - len(local) > len(free):
            assert own is None
            self.pool.release(local)
            return
        assert own == queue[: len(prompt) - len(local)], "the queue's order is the order of reuse"
        table = [*local, *own]
        if confirm:
            table = publish_chain(self.pool, table, prompt)
        self.tables.append((table, prompt))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        before = list(self.pool.free_queue())
        self.pool.pin(block, "a copy")
        self.pinned.append(block)
        assert list(self.pool.free_queue()) == before

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        before = list(self.pool.free_queue())
        self.pool.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))
        assert list(self.pool.free_queue()) == before

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        assert not self.pool._cached

    @invariant()
    def ledger_adds_up(self) -> None:
        self.pool.check_integrity([table for table, _ in self.tables])
        free = self.expected_free()
        assert self.pool.num_free == len(free)
        for block in range(self.pool.num_blocks):
            assert self.pool.refs(block) == sum(table.count(block) for table, _ in self.tables)
            assert self.pool.pins(block) == self.pinned.count(block)
        reused = self.pool.take_reused()
        assert len(reused) <= self.pool.num_blocks * 4

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for table, _ in self.tables:
            self.pool.release(table)
        for block in self.pinned:
            self.pool.unpin(block)
        self.pool.check_integrity([[]])
        assert self.pool.num_free == self.pool.num_blocks
        everything = self.pool.allocate(self.pool.num_blocks)
        assert everything is not None
        assert sorted(everything) == list(range(self.pool.num_blocks))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
