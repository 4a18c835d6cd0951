"""Bytes go out in their order, however slowly they are taken, and slots are kept for as long and no longer."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import random
import socket
from collections.abc import Iterator

import pytest

from kvtier.clock import MonotonicClock
from kvtier.server.output import PlainOutput
from kvtier.testing import FakeClock


class Pair:
    """An output and who reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: FakeClock | MonotonicClock) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.mine.settimeout(0.0)
        self.theirs.settimeout(0.0)
        self.drained = 0
        self.broken: list[OSError] = []
        self.output = PlainOutput(self.mine, loop, clock, self._drain, self.broken.append)

    def _drain(self) -> None:
        self.drained += 1

    async def read(self, nbytes: int) -> bytes:
        loop, got = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(20):
            while len(got) < nbytes:
                got += await loop.sock_recv(self.theirs, min(1 << 16, nbytes - len(got)))
        return bytes(got)

    def close(self) -> None:
        self.output.close()
        self.mine.close()
        self.theirs.close()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def pair(loop: asyncio.AbstractEventLoop) -> Iterator[Pair]:
    pair = Pair(loop, MonotonicClock())
    yield pair
    pair.close()


def test_what_fits_goes_at_once(pair: Pair) -> None:
    pair.output.send(b"one")
    pair.output.put(b"two")
    pair.output.flush()
    assert pair.theirs.recv(100) == b"onetwo"
    assert (pair.output.backlog_bytes, pair.output.standstill_s, pair.drained) == (0, 0.0, 0)


def test_what_does_not_fit_follows_in_its_order(pair: Pair, loop: asyncio.AbstractEventLoop) -> None:
    draw = random.Random(1)
    parts = [draw.randbytes(draw.choice((1, 12, 1000, 70_000, 3_000_000))) for _ in range(60)]
    sent: list[int] = []
    for number, part in enumerate(parts):
        if number % 3:
            pair.output.send(part)
        else:
            pair.output.put(memoryview(part), None, lambda number=number: sent.append(number))  # type: ignore[misc]
            pair.output.flush()
    whole = b"".join(parts)
    assert pair.output.backlog_bytes > 0
    assert len(sent) < 20

    assert loop.run_until_complete(pair.read(len(whole))) == whole
    assert sent == list(range(0, 60, 3))
    assert pair.output.backlog_bytes == 0
    assert pair.drained >= 1


def test_a_slot_is_kept_until_its_last_byte_is_out(pair: Pair, loop: asyncio.AbstractEventLoop) -> None:
    sent: list[int] = []
    pair.output.put(bytes(8 << 20), None, lambda: sent.append(1))
    pair.output.flush()
    loop.run_until_complete(pair.read(7 << 20))
    assert not sent
    loop.run_until_complete(pair.read(1 << 20))
    assert sent == [1]


def test_without_a_free_descriptor_it_is_tried_again(
    pair: Pair, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(self: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "dup", dup)
    data = random.Random(2).randbytes(8 << 20)
    pair.output.put(data)
    pair.output.flush()
    pair.output.flush()
    assert loop.run_until_complete(pair.read(4 << 20)) == data[: 4 << 20]
    monkeypatch.undo()
    assert loop.run_until_complete(pair.read(4 << 20)) == data[4 << 20 :]
    loop.run_until_complete(asyncio.sleep(0.05))
    assert pair.drained == 1
    assert not pair.broken


@pytest.mark.parametrize("before", [0, 4 << 20])
def test_a_descriptor_goes_with_its_own_message(pair: Pair, loop: asyncio.AbstractEventLoop, before: int) -> None:
    with open(os.devnull) as file:  # noqa: PTH123 - for its descriptor
        if before:
            pair.output.put(bytes(before))
        pair.output.put(b"with it", file.fileno())
        pair.output.put(b"after it")
        pair.output.flush()
        loop.run_until_complete(pair.read(before))
        data, ancillary, _, _ = pair.theirs.recvmsg(7, 100)
        assert data == b"with it"
        ((_, _, rights),) = ancillary
        (fd,) = array.array("i", rights)
        assert os.path.sameopenfile(fd, file.fileno())
        os.close(fd)
        assert loop.run_until_complete(pair.read(8)) == b"after it"


def test_a_peer_that_stands_still_is_told_from_one_that_is_slow(loop: asyncio.AbstractEventLoop) -> None:
    clock = FakeClock()
    pair = Pair(loop, clock)
    clock.advance(100.0)
    pair.output.send(bytes(8 << 20))
    clock.advance(3.0)
    assert pair.output.standstill_s == 3.0
    loop.run_until_complete(pair.read(4 << 20))
    assert pair.output.standstill_s == 0.0
    clock.advance(2.0)
    assert pair.output.standstill_s == 2.0
    pair.close()


def test_a_peer_that_is_gone_is_told_once(pair: Pair, loop: asyncio.AbstractEventLoop) -> None:
    pair.theirs.close()
    pair.output.send(b"anybody?")
    pair.output.send(b"no?")
    loop.run_until_complete(asyncio.sleep(0.01))
    (error,) = pair.broken
    assert isinstance(error, BrokenPipeError)
    pair.output.put(bytes(1 << 20))
    assert pair.output.backlog_bytes == 0
