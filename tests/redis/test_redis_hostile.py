"""Servers that hang, trickle, lie about lengths, talk nonsense or break off: bounded time, bounded memory, no wrong
byte, and nothing left over for the next call.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.redis import RedisTier
from tests.redis.rig import FakeServer, block_of, frame_of, get, get_all, joining, key_of, opened, put

MARGIN_S = 0.25
"""Over a call's time, for a machine that is busy."""


def calls_of(tier: RedisTier) -> list[tuple[str, object]]:
    """Each call, with what it may answer or raise where the server is of no use."""

    def contains() -> object:
        try:
            return tier.contains([key_of(i) for i in range(3)])
        except TierError:
            return "raised"

    def probe() -> object:
        try:
            tier.probe()
        except TierError:
            return "raised"
        return "well"

    return [
        ("read", lambda: get_all(tier, 1, 2)),
        ("write", lambda: put(tier, 1, 2)),
        ("contains", contains),
        ("probe", probe),
    ]


def verify_bounded(tier: RedisTier, num_timeouts: int = 1) -> dict[str, object]:
    """No call takes longer than its time."""
    answers = {}
    for name, call in calls_of(tier):
        start = time.monotonic()
        assert callable(call)
        answers[name] = call()
        assert time.monotonic() - start < num_timeouts * 0.3 + MARGIN_S, name
        tier.check_integrity()
    return answers


@pytest.mark.bug("HS14")
def test_a_server_that_never_answers() -> None:
    with FakeServer(lambda sock, words: None) as fake:
        start = time.monotonic()
        with opened(fake.url) as tier:
            assert time.monotonic() - start < 0.3 + MARGIN_S
            answers = verify_bounded(tier)
        assert answers == {
            "read": [ReadOutcome.ERROR] * 2,
            "write": [WriteOutcome.ERROR] * 2,
            "contains": "raised",
            "probe": "raised",
        }


def test_a_port_that_takes_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):  # a full queue: the kernel does not answer
            filler = socket.socket()
            filler.settimeout(0)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        with opened(f"redis://127.0.0.1:{port}") as tier:
            assert verify_bounded(tier)["read"] == [ReadOutcome.ERROR] * 2
        for filler in fillers:
            filler.close()


def test_a_port_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with caplog.at_level(logging.INFO), opened(f"redis://127.0.0.1:{port}", password="hush") as tier:
        assert len(caplog.records) == 1
        assert caplog.records[0].levelno == logging.WARNING
        assert f"redis://127.0.0.1:{port}" in caplog.text
        assert "hush" not in caplog.text
        assert verify_bounded(tier)["write"] == [WriteOutcome.ERROR] * 2
        assert tier.epoch == 0


def trickle(data: bytes, fake: list[FakeServer]) -> object:
    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if (known := joining(words)) is not None:
            return known
        for i in range(len(data)):
            if fake[0].is_ended:
                break
            sock.sendall(data[i : i + 1])
            time.sleep(0.02)  # the wire's pace, not a wait
        return None

    return reply


@pytest.mark.parametrize("data", [b"$14096\r\n" + b"x" * 10_000, b"-ERR " + b"x" * 10_000, b"+" * 10_000, b"*" * 9999])
def test_a_trickle_does_not_lengthen_a_call(data: bytes) -> None:
    fakes: list[FakeServer] = []
    with FakeServer(trickle(data, fakes)) as fake:  # type: ignore[arg-type]
        fakes.append(fake)
        with opened(fake.url) as tier:
            start = time.monotonic()
            assert get(tier, 1) is ReadOutcome.ERROR
            assert time.monotonic() - start < 0.3 + MARGIN_S


def test_a_trickling_frame_does_not_lengthen_a_call() -> None:
    frame = frame_of(key_of(1), block_of(1))
    fakes: list[FakeServer] = []

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if (known := joining(words)) is not None:
            return known
        sock.sendall(b"$%d\r\n" % len(frame) + frame[:5000])
        for i in range(5000, len(frame)):
            if fakes[0].is_ended:
                break
            sock.sendall(frame[i : i + 1])
            time.sleep(0.02)  # the wire's pace
        return None

    with FakeServer(reply) as fake:
        fakes.append(fake)
        with opened(fake.url) as tier:
            start = time.monotonic()
            assert get(tier, 1) is ReadOutcome.ERROR
            assert time.monotonic() - start < 0.3 + MARGIN_S


def test_a_server_that_does_not_read_what_is_sent() -> None:
    release = threading.Event()

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if words[0] == b"EXISTS":
            sock.sendall(b":0\r\n" * 8)
            release.wait(20)
        return joining(words)

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        start = time.monotonic()
        outcomes = put(tier, *range(8), nbytes=4 << 20)
        assert time.monotonic() - start < 0.3 + 1.5  # making the blocks is in it
        assert outcomes == [WriteOutcome.ERROR] * 8
        release.set()


LIES = {
    "a gibibyte": b"$1073741824\r\n" + b"x" * 100_000,
    "2**63": b"$9223372036854775808\r\n",
    "as many digits as there are": b"$" + b"9" * 5000 + b"\r\n",
    "below -1": b"$-2\r\n",
    "far below": b"$-9223372036854775808\r\n",
    "no digits": b"$\r\n",
    "letters": b"$12ab\r\n",
    "a plus": b"$+5\r\nhello\r\n",
    "an underscore": b"$1_0\r\n",
    "a digit of another script": "$\u0663\r\nabc\r\n".encode(),
    "an array": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "an array of many": b"*1000000000\r\n",
    "arrays in arrays": b"*1\r\n" * 10_000,
    "a number": b":1\r\n",
    "a status": b"+OK\r\n",
    "nothing of ours": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": bytes(10_000),
    "line feeds": b"\n" * 10_000,
    "a line without an end": b"-" + b"x" * (1 << 20),
    "no line feed": b"$5\rhello\r\n",
    "RESP3": b"_\r\n",
    "too short for its length": b"$14096\r\n" + b"x" * 10,
    "no end of a string": b"$5\r\nhelloworld\r\n",
    "more than was asked for": b"$-1\r\n" * 50,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize("verb", [b"GET", b"SET", b"EXISTS", b"INFO", b"PING"])
@pytest.mark.bug("SE11")
def test_lies(verb: bytes, lie: bytes) -> None:
    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        is_epoch = words[-1].endswith(b":epoch")
        if words[0] == verb and not is_epoch:
            return lie
        return joining(words) or (b"$-1\r\n" if words[0] == b"GET" else b"+OK\r\n")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeServer(reply) as fake, opened(fake.url) as tier:
        assert ReadOutcome.OK not in get_all(tier, 1, 2)
        put(tier, 1, 2)
        with contextlib.suppress(TierError):
            tier.contains([key_of(1), key_of(2)])
        with contextlib.suppress(TierError):
            tier.probe()
        tier.check_integrity()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.bug("CR17")
def test_a_server_that_is_out_of_memory_keeps_its_connection() -> None:
    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        return b"-OOM command not allowed\r\n" if words[0] == b"SET" else joining(words)

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        for _ in range(5):
            assert put(tier, *range(4), nbytes=100_000) == [WriteOutcome.FULL] * 4
        assert fake.count(b"SET") <= 4
        assert fake.num_connections == 1


def test_a_value_cut_in_its_middle_is_no_block_and_no_later_reply() -> None:
    frame = frame_of(key_of(1), block_of(1))
    cuts = iter(range(1, len(frame), 997))

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if (known := joining(words)) is not None:
            return known
        sock.sendall((b"$%d\r\n" % len(frame) + frame)[: next(cuts, 1)])
        sock.shutdown(socket.SHUT_RDWR)
        return None

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        for _ in range(12):
            assert get(tier, 1) is ReadOutcome.ERROR
            assert tier.snapshot().connections == 0


def test_bytes_that_nobody_asked_for_are_no_answer() -> None:
    """A late or forged reply that lies on an idle connection."""
    forged = frame_of(key_of(2), block_of(2))

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if words[0] == b"GET" and not words[1].endswith(b":epoch"):
            return b"$-1\r\n" + b"$%d\r\n" % len(forged) + forged
        return joining(words)

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        for _ in range(4):
            assert get(tier, 1) is ReadOutcome.MISS
        assert fake.num_connections == 4


# ---- nothing is left -------------------------------------------------------------------------------------------------


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.bug("LK14")
def test_thousands_of_misses_and_failures_leave_no_descriptor(server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    calls = [0]

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        calls[0] += 1
        return (b"$-5\r\n", b"+PO", b"-ERR no\r\n")[calls[0] % 2 * 2] if words[0] == b"PING" else joining(words)

    with opened(server.url) as tier, opened(closed) as nowhere, FakeServer(reply) as fake, opened(fake.url) as liar:
        get_all(tier, 1)
        before = num_descriptors()
        for i in range(3000):
            assert get(tier, i) is ReadOutcome.MISS
        for _ in range(1000):
            assert put(nowhere, 1) == [WriteOutcome.ERROR]
        for _ in range(1000):
            with pytest.raises(TierError):
                liar.probe()
        assert abs(num_descriptors() - before) <= 4
