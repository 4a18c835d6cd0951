"""Which GPU blocks hold what, and which of them are dirty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest
from kvtier_connectors.published import PublishedBlock, PublishedBlocks


def digest(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(32, "big"))


def block(block_id: int, number: int) -> PublishedBlock:
    return PublishedBlock(block_id, digest(number), None)


def test_a_reused_block_is_forgotten_once() -> None:
    blocks = PublishedBlocks()
    blocks.add(block(3, 1), dirty=True)
    assert blocks.forget(3) == block(3, 1)
    assert blocks.forget(3) is None
    assert (len(blocks), blocks.num_dirty, blocks.find(digest(1))) == (0, 0, None)


def test_adding_replaces_what_the_same_block_held() -> None:
    blocks = PublishedBlocks()
    blocks.add(block(3, 1), dirty=True)
    blocks.add(block(3, 2), dirty=False)
    assert blocks.find(digest(1)) is None
    assert blocks.get(3) == block(3, 2)
    assert blocks.num_dirty == 0


def test_forgetting_one_of_two_holders_keeps_the_other() -> None:
    blocks = PublishedBlocks()
    blocks.add(block(1, 7), dirty=True)
    blocks.add(block(2, 7), dirty=True)
    blocks.forget(1)
    assert blocks.find(digest(7)) == block(2, 7)
    blocks.check_integrity()


def test_dirty_again_only_while_the_gpu_holds_it() -> None:
    blocks = PublishedBlocks()
    blocks.add(block(1, 7), dirty=False)
    assert blocks.mark_dirty(digest(7))
    assert blocks.is_dirty(1)
    blocks.forget(1)
    assert not blocks.mark_dirty(digest(7))
    assert blocks.num_dirty == 0


def test_the_check_sees_a_broken_table() -> None:
    blocks = PublishedBlocks()
    blocks.add(block(1, 7), dirty=True)
    blocks._dirty.add(9)
    with pytest.raises(IntegrityError, match="dirty"):
        blocks.check_integrity()
    blocks.clear()
    blocks.add(block(1, 7), dirty=True)
    blocks._by_id[1] = block(1, 8)
    with pytest.raises(IntegrityError, match="digest"):
        blocks.check_integrity()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "forget", "clean", "dirty", "clear"]),
            st.integers(0, 3),
            st.integers(0, 4),
            st.booleans(),
        )
    )
)
def test_against_a_dictionary(operations: list[tuple[str, int, int, bool]]) -> None:
    blocks = PublishedBlocks()
    model: dict[int, int] = {}
    dirty: set[int] = set()
    for name, block_id, number, flag in operations:
        match name:
            case "add":
                if number in model.values() and model.get(block_id) != number:
                    continue  # an engine merges twins
                blocks.add(block(block_id, number), dirty=flag)
                model[block_id] = number
                dirty.discard(block_id)
                dirty |= {block_id} if flag else set()
            case "forget":
                assert (blocks.forget(block_id) is not None) == (model.pop(block_id, None) is not None)
                dirty.discard(block_id)
            case "clean":
                blocks.mark_clean(block_id)
                dirty.discard(block_id)
            case "dirty":
                held = {n: b for b, n in model.items()}
                assert blocks.mark_dirty(digest(number)) == (number in held)
                dirty |= {held[number]} if number in held else set()
            case "clear":
                blocks.clear()
                model.clear()
                dirty.clear()
        blocks.check_integrity()
        assert {b: blocks.get(b) for b in range(4)} == {b: block(b, model[b]) if b in model else None for b in range(4)}
        assert {b for b in range(4) if blocks.is_dirty(b)} == dirty
        assert blocks.num_dirty == len(dirty)
