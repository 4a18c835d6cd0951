"""Batches are numbered, sent once, kept for a while; what is dropped is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.events.batches import Batch, BatchBuffer


def test_each_is_handed_out_once_and_kept() -> None:
    buffer = BatchBuffer(max_queued=10, max_kept=2, max_bytes=100)
    assert [buffer.add(bytes([n])) for n in range(4)] == [0, 1, 2, 3]
    assert buffer.since(0) is None, "not sent yet"
    assert [buffer.take() for _ in range(5)] == [*(Batch(n, bytes([n])) for n in range(4)), None]
    assert buffer.oldest == 2
    assert buffer.since(0) == Batch(2, b"\2")
    assert buffer.since(3) == Batch(3, b"\3")
    assert buffer.since(4) is None
    assert buffer.num_dropped == 0


def test_of_too_many_the_oldest_are_passed_over_and_had_by_replay() -> None:
    buffer = BatchBuffer(max_queued=2, max_kept=10, max_bytes=100)
    for n in range(5):
        buffer.add(bytes([n]))
    assert buffer.num_dropped == 3
    assert buffer.take() == Batch(3, b"\3")
    assert buffer.since(0) == Batch(0, b"\0")


def test_bytes_are_bounded_but_never_at_the_cost_of_what_is_not_sent() -> None:
    buffer = BatchBuffer(max_queued=10, max_kept=10, max_bytes=10)
    for _ in range(4):
        buffer.add(bytes(6))
    assert [batch.sequence for batch in iter(buffer.take, None)] == [0, 1, 2, 3]
    assert buffer.oldest == 3


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 40),
    st.lists(st.one_of(st.integers(0, 20), st.none()), max_size=60),
)
def test_any_order_of_adding_and_taking(
    max_queued: int, max_kept: int, max_bytes: int, steps: list[int | None]
) -> None:
    buffer = BatchBuffer(max_queued, max_kept, max_bytes)
    sizes: list[int] = []
    taken: list[int] = []
    for size in steps:
        if size is not None:
            assert buffer.add(bytes(size)) == len(sizes)
            sizes.append(size)
        elif (batch := buffer.take()) is not None:
            assert len(batch.payload) == sizes[batch.sequence]
            taken.append(batch.sequence)
        next_to_send = len(sizes) if not sizes else len(sizes) - buffer_waiting(buffer)
        assert buffer_waiting(buffer) <= max_queued
        assert len(taken) + buffer.num_dropped + buffer_waiting(buffer) == len(sizes)
        past = range(buffer.oldest, next_to_send)
        assert len(past) <= max_kept
        assert not past or sum(sizes[past.start :]) <= max_bytes
    assert taken == sorted(set(taken))


def buffer_waiting(buffer: BatchBuffer) -> int:
    return buffer._next_sequence - buffer._next_to_send
