"""The index: states, runs, counts, and namespaces apart."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.errors import IntegrityError
from kvtier.index import BlockIndex, BlockState

ONE, OTHER = b"1" * 16, b"2" * 16
DIGESTS = [bytes([i]) * 32 for i in range(6)]


def committed(index: BlockIndex, namespace: bytes, *places: int) -> BlockIndex:
    for place in places:
        index.reserve(namespace, DIGESTS[place], slot=place)
        index.commit(namespace, DIGESTS[place])
    return index


def test_a_block_is_reserved_then_committed_then_gone() -> None:
    index = BlockIndex()
    index.reserve(ONE, DIGESTS[0], slot=7)
    assert index.find(ONE, DIGESTS[0]) == (7, BlockState.RESERVED)
    assert (index.num_reserved, index.num_committed) == (1, 0)
    index.commit(ONE, DIGESTS[0])
    assert index.find(ONE, DIGESTS[0]) == (7, BlockState.COMMITTED)
    assert (index.num_reserved, index.num_committed) == (0, 1)
    index.remove(ONE, DIGESTS[0])
    assert index.find(ONE, DIGESTS[0]) is None
    assert (index.num_reserved, index.num_committed) == (0, 0)
    index.check_integrity()


def test_a_run_ends_at_the_first_block_that_is_absent_or_reserved() -> None:
    index = committed(BlockIndex(), ONE, 0, 1, 3)
    assert index.committed_run(ONE, DIGESTS) == [0, 1]
    index.reserve(ONE, DIGESTS[2], slot=2)
    assert index.committed_run(ONE, DIGESTS) == [0, 1]
    index.commit(ONE, DIGESTS[2])
    assert index.committed_run(ONE, DIGESTS) == [0, 1, 2, 3]
    assert index.committed_run(ONE, DIGESTS[4:]) == []
    assert index.committed_run(ONE, []) == []


def test_namespaces_are_apart() -> None:
    index = committed(BlockIndex(), ONE, 0)
    assert index.find(OTHER, DIGESTS[0]) is None
    assert index.committed_run(OTHER, DIGESTS) == []
    index.reserve(OTHER, DIGESTS[0], slot=5)
    index.remove(OTHER, DIGESTS[0])
    assert index.find(ONE, DIGESTS[0]) == (0, BlockState.COMMITTED)


def test_a_slot_number_of_any_size_survives_packing() -> None:
    index = BlockIndex()
    index.reserve(ONE, DIGESTS[0], slot=(1 << 31) + 1)
    assert index.find(ONE, DIGESTS[0]) == ((1 << 31) + 1, BlockState.RESERVED)


def test_our_own_mistakes_are_noticed() -> None:
    index = committed(BlockIndex(), ONE, 0)
    with pytest.raises(AssertionError, match="reserved twice"):
        index.reserve(ONE, DIGESTS[0], slot=1)
    with pytest.raises(AssertionError, match="committed twice"):
        index.commit(ONE, DIGESTS[0])
    index.reserve(OTHER, DIGESTS[1], slot=0)
    with pytest.raises(IntegrityError, match="one slot"):
        index.check_integrity()
    index.remove(OTHER, DIGESTS[1])
    index.check_integrity()
    index._num_committed += 1
    with pytest.raises(IntegrityError, match="counts"):
        index.check_integrity()


@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.integers(0, 5), st.sampled_from("rcx")), max_size=60))
def test_any_order_of_calls_against_a_dictionary(calls: list[tuple[bytes, int, str]]) -> None:
    index, model = BlockIndex(), dict[tuple[bytes, bytes], tuple[int, BlockState]]()
    for slot, (namespace, place, call) in enumerate(calls):
        key = (namespace, DIGESTS[place])
        if call == "r" and key not in model:
            index.reserve(*key, slot)
            model[key] = (slot, BlockState.RESERVED)
        elif call == "c" and key in model and model[key][1] is BlockState.RESERVED:
            index.commit(*key)
            model[key] = (model[key][0], BlockState.COMMITTED)
        elif call == "x" and key in model:
            index.remove(*key)
            del model[key]
        index.check_integrity()
        assert {(space, digest): (held, state) for space, digest, held, state in index.items()} == model
        assert index.find(*key) == model.get(key)
        assert index.num_committed == sum(state is BlockState.COMMITTED for _, state in model.values())
        assert index.num_reserved == len(model) - index.num_committed
        for space in (ONE, OTHER):
            run = []
            for digest in DIGESTS:
                held = model.get((space, digest))
                if held is None or held[1] is BlockState.RESERVED:
                    break
                run.append(held[0])
            assert index.committed_run(space, DIGESTS) == run
            for end in range(len(DIGESTS) + 1):
                assert index.committed_length(space, DIGESTS[:end]) == min(end, len(run))
