"""Answers with blocks, however the bytes are cut on their way, and what is read of them too early."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.clock import MonotonicClock
from kvtier.tiers.base import ReadOutcome, ReadRequest
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.channel import Channel, DeadlineError, PolledChannel
from kvtier.tiers.redis.resp import ErrorReply
from kvtier.tiers.redis.transfer import Gets, Naming
from tests.redis.rig import block_of, frame_of, key_of

OK, MISS, DAMAGED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.DAMAGED
NIL = b"$-1\r\n"


@contextmanager
def wired(kind: type[Channel] = Channel, timeout_s: float = 5.0) -> Iterator[tuple[Channel, socket.socket]]:
    near, far = socket.socketpair()
    channel = kind(near, Address("peer", 1), MonotonicClock())
    channel.deadline = MonotonicClock().now() + timeout_s
    try:
        yield channel, far
    finally:
        channel.close()
        far.close()


def string(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def told(name: object, nbytes: int, **changes: Any) -> bytes:
    return string(frame_of(key_of(name), block_of(name, nbytes), **changes))


def read(
    channel: Channel, far: socket.socket, lengths: dict[str, int], answers: bytes, step: int, ttl_ms: int | None = None
) -> tuple[list[ReadOutcome | ErrorReply], list[bytearray]]:
    """Ask for blocks of these lengths, and hear these bytes, so many at a time."""

    def tell() -> None:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        for start in range(0, len(answers), step):
            far.sendall(answers[start : start + step])

    buffers = [bytearray(nbytes) for nbytes in lengths.values()]
    requests = [ReadRequest(key_of(name), memoryview(b)) for name, b in zip(lengths, buffers, strict=True)]
    teller = threading.Thread(target=tell)
    gets = Gets(requests, Naming("p:", "default"), ttl_ms)
    gets.begin(channel)
    teller.start()
    try:
        gets.finish(channel)
    finally:
        if not gets.is_done:
            channel.shut()
        teller.join()
    return gets.answers, buffers


@pytest.mark.parametrize("kind", [Channel, PolledChannel])
@pytest.mark.parametrize("ttl_ms", [None, 1000])
@pytest.mark.parametrize("nbytes", [1, 5000, 200_000, (1 << 20) + 5])
@pytest.mark.parametrize("step", [997, 70_001, 1 << 24])
def test_what_was_read_too_early_is_not_lost(kind: type[Channel], ttl_ms: int | None, nbytes: int, step: int) -> None:
    answers = [
        ("nil", NIL, MISS),
        ("nil too", NIL, MISS),
        ("a", told("a", nbytes), OK),
        ("b", told("b", nbytes), OK),
        ("an error", b"-LOADING wait\r\n", ErrorReply("LOADING wait")),
        ("c", told("c", nbytes), OK),
        ("short", string(b"x"), DAMAGED),
        ("empty", string(b""), DAMAGED),
        ("shorter", told("shorter", max(1, nbytes - 4096)), OK if nbytes == 1 else MISS),
        ("longer", told("longer", nbytes + 4096), MISS),
        ("d", told("d", nbytes), OK),
        ("wrong", told("wrong", nbytes, checksum=1), DAMAGED),
        ("packed", told("packed", nbytes, codec=1), DAMAGED),
        ("another", told("b", nbytes), DAMAGED),
        ("e", told("e", nbytes), OK),
        ("last", NIL, MISS),
    ]
    after = b"" if ttl_ms is None else b":1\r\n"
    with wired(kind) as (channel, far):
        outcomes, buffers = read(
            channel,
            far,
            {name: nbytes for name, _, _ in answers},
            b"".join(answer + after for _, answer, _ in answers),
            step,
            ttl_ms,
        )
        assert outcomes == [outcome for _, _, outcome in answers]
        for (name, _, outcome), buffer in zip(answers, buffers, strict=True):
            assert outcome is not OK or buffer == block_of(name, nbytes), name
        assert channel.is_idle
        assert not channel.is_readable


def test_blocks_of_several_lengths_in_one_call() -> None:
    lengths = {"a": 10, "b": 9000, "c": 300_000, "d": 10, "e": 9000}
    with wired() as (channel, far):
        outcomes, buffers = read(channel, far, lengths, b"".join(told(n, size) for n, size in lengths.items()), 1 << 24)
        assert outcomes == [OK] * len(lengths)
        assert [bytes(b) for b in buffers] == [block_of(n, size) for n, size in lengths.items()]


def test_a_last_answer_that_is_no_block_is_not_waited_for_as_one() -> None:
    with wired(timeout_s=60.0) as (channel, far):
        began = MonotonicClock().now()
        assert read(channel, far, {"a": 300_000}, NIL, 1)[0] == [MISS]
        assert MonotonicClock().now() - began < 10


@pytest.mark.parametrize("part", [3, 9, 100, 5000, 299_999])
def test_part_of_a_block_ends_with_the_time_and_spoils_the_connection(part: int) -> None:
    with wired(timeout_s=0.2) as (channel, far):
        with pytest.raises(DeadlineError):
            read(channel, far, {"a": 300_000}, told("a", 300_000)[:part], 1 << 24)
        assert not channel.is_idle


def test_more_than_the_buffer_holds_can_be_pushed_back() -> None:
    data = bytes(range(256)) * 1000
    with wired() as (channel, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        channel.send([b"GET"], 1)
        parts = [memoryview(bytearray(size)) for size in (10, 150_000, len(data) - 150_010)]
        far.sendall(data)
        received = channel.read_ahead(parts)
        channel.push_back(parts, received)
        assert channel.read_ahead(parts) == 0
        assert not channel.is_idle
        again = bytearray(len(data))
        channel.read_into([memoryview(again)])
        assert again == data
        far.sendall(b"+OK\r\n")
        assert channel.read_reply() == b"OK"
        assert channel.is_idle


@pytest.mark.parametrize(
    ("nbytes", "num_reads", "first", "then"),
    [
        (300_000, 1, 4, 3),  # 1 MiB of answers
        (2 << 20, 1, 2, 1),  # the next is there while one is read
        (300_000, 4, 2, 1),
        (2 << 20, 4, 1, 1),  # other reads have the server at work
        (30_000, 16, 4, 2),
        (300_000, 16, 1, 1),
    ],
)
def test_the_more_read_at_once_the_less_each_asks_for_ahead(nbytes: int, num_reads: int, first: int, then: int) -> None:
    names = [str(number) for number in range(12)]
    buffer = memoryview(bytearray(nbytes))  # of all of them: only what is asked for is looked at
    with wired() as (channel, far):
        far.settimeout(5.0)
        gets = Gets(
            [ReadRequest(key_of(name), buffer) for name in names], Naming("p:", "default"), None, num_reads=num_reads
        )
        gets.begin(channel)
        asked = [far.recv(1 << 16).count(b"GET")]

        def serve() -> None:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            for name in names[: asked[0]]:
                far.sendall(told(name, nbytes))
            while sum(asked) < len(names):
                asked.append(far.recv(1 << 16).count(b"GET"))
                for name in names[sum(asked[:-1]) : sum(asked)]:
                    far.sendall(told(name, nbytes))

        teller = threading.Thread(target=serve)
        teller.start()
        try:
            gets.finish(channel)
        finally:
            if not gets.is_done:
                channel.shut()
            teller.join()
        assert gets.answers == [OK] * len(names)
        assert channel.is_idle
        assert asked[0] == first
        assert min(asked[1:-1], default=then) >= then


def test_threads_and_exchanges_do_not_mix_up_their_answers() -> None:
    """What stands before a block goes to memory that a thread keeps from call to call."""

    def one(number: int) -> None:
        for turn in range(5):
            nbytes = 3000 * (1 + (number + turn) % 3)
            lengths = {f"{number} {turn} {i}": nbytes for i in range(4)}
            answers = b"".join(
                told(name, size, checksum=1) if "2" in name[-1] else told(name, size) for name, size in lengths.items()
            )
            with wired() as (channel, far):
                outcomes, buffers = read(channel, far, lengths, answers, 1 << 24)
            assert outcomes == [OK, OK, DAMAGED, OK]
            assert bytes(buffers[0]) == block_of(f"{number} {turn} 0", nbytes)

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(one, range(8)):
            pass


def test_a_time_that_an_earlier_call_had_ends_no_later_one() -> None:
    clock = MonotonicClock()
    with wired(timeout_s=0.3) as (channel, far):
        far.sendall(b"+OK\r\n")
        channel.send([b"PING"], 1)
        assert channel.read_reply() == b"OK"  # the kernel ends what takes longer than 0.3 s now
        channel.deadline = clock.now() + 0.5
        later = threading.Timer(0.4, far.sendall, [b"+OK\r\n"])
        later.start()
        channel.send([b"PING"], 1)
        assert channel.read_reply() == b"OK"
        later.join()
        began = clock.now()
        channel.deadline = began + 0.6
        channel.send([b"PING"], 1)
        with pytest.raises(DeadlineError, match="did not answer in time"):
            channel.read_reply()
        assert 0.6 <= clock.now() - began < 5
        assert not channel.is_idle


def test_a_request_that_is_not_taken_ends_with_the_call() -> None:
    clock = MonotonicClock()
    with wired(timeout_s=0.2) as (channel, _):
        channel.send([b"PING"], 1)
        began = clock.now()
        channel.deadline = began + 0.3
        with pytest.raises(DeadlineError, match="did not take a request in time"):
            channel.send([bytes(16 << 20)], 1)
        assert 0.3 <= clock.now() - began < 5
        assert not channel.is_idle
