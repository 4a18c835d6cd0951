"""Servers that refuse, send on, or are not ready: each error means one thing, and keeps its connection."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import pytest

from kvtier.errors import TierError
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from tests.redis.rig import FakeServer, Reply, get, get_all, joining, key_of, opened, put

ERRORS = {
    b"LOADING Redis is loading the dataset in memory": "LOADING",
    b"BUSY Redis is busy running a script": "BUSY",
    b"CLUSTERDOWN The cluster is down": "CLUSTERDOWN",
    b"MASTERDOWN Link with MASTER is down": "MASTERDOWN",
    b"NOREPLICAS Not enough good replicas to write.": "NOREPLICAS",
    b"TRYAGAIN Multiple keys request during rehashing of slot": "TRYAGAIN",
    b"READONLY You can't write against a read only replica.": "READONLY",
    b"NOAUTH Authentication required.": "NOAUTH",
    b"NOPERM this user has no permissions": "NOPERM",
    b"MISCONF Redis is configured to save RDB snapshots": "MISCONF",
    b"ERR unknown command": "other",
    b"EVIL %s %d ${x}": "other",
    b"": "other",
}


@pytest.mark.parametrize("error", ERRORS)
def test_error_replies_keep_the_connection(error: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if words[0] in (b"GET", b"SET", b"EXISTS") and not words[1].endswith(b":epoch"):
            return b"-" + error + b"\r\n"
        return joining(words)

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        for _ in range(3):
            assert get_all(tier, 1, 2) == [ReadOutcome.ERROR] * 2
            assert put(tier, 1, 2) == [WriteOutcome.ERROR] * 2
            with pytest.raises(TierError):
                tier.contains([key_of(1)])
        assert (fake.num_connections, tier.snapshot().disconnects) == (1, 0)
        assert tier.snapshot().errors == {ERRORS[error]: 15}
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) <= 1
    if error.startswith((b"NOAUTH", b"NOPERM")):
        assert "redis.username" in lines[0]


def as_cluster(ports: list[int], answer: Callable[[list[bytes]], str]) -> Reply:
    """A cluster of one node, which has all slots, and answers so for blocks."""

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if words[0] == b"CLUSTER":
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % ports[0]
        if words[0] == b"INFO":
            return b"$18\r\nredis_mode:cluster\r\n"
        if words[0] == b"ASKING":
            return b"+OK\r\n"
        if words[0] in (b"GET", b"SET", b"EXISTS") and not words[1].endswith(b":epoch"):
            return f"-{answer(words)}\r\n".encode()
        return joining(words)

    return reply


@pytest.mark.parametrize("where", ["MOVED 1 127.0.0.1:%d", "ASK 1 127.0.0.1:%d", "MOVED 1 :%d"])
@pytest.mark.bug("CR18")
def test_a_redirect_to_itself_ends(where: str) -> None:
    ports: list[int] = []
    with FakeServer(as_cluster(ports, lambda words: where % ports[0])) as fake:
        ports.append(fake.port)
        with opened(fake.url, mode="cluster") as tier:
            assert get_all(tier, 1, 2) == [ReadOutcome.ERROR] * 2
            assert put(tier, 1, 2) == [WriteOutcome.ERROR] * 2
            assert fake.count(b"GET") == 11  # the epoch, and each block five times


BAD = ["MOVED", "MOVED x y", "MOVED 99999 h:1", "MOVED 1 h:0", "MOVED 1 h:99999", "ASK 1 h"]


@pytest.mark.parametrize("bad", BAD)
def test_redirects_that_lead_nowhere(bad: str) -> None:
    ports: list[int] = []
    with FakeServer(as_cluster(ports, lambda words: bad)) as fake:
        ports.append(fake.port)
        with opened(fake.url, mode="cluster") as tier:
            assert get(tier, 1) is ReadOutcome.ERROR
            assert tier.snapshot().redirects == 0


def test_one_server_sends_nobody_elsewhere(server: RedisServer) -> None:
    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if words[0] == b"GET" and not words[1].endswith(b":epoch"):
            return b"-MOVED 1 127.0.0.1:%d\r\n" % server.port
        return joining(words)

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        assert get(tier, 1) is ReadOutcome.ERROR
        assert (fake.count(b"GET"), tier.snapshot().errors) == (2, {"MOVED": 1})


SLOTS = [
    b"*0\r\n",
    b"$-1\r\n",
    b"+OK\r\n",
    b"*1\r\n:5\r\n",
    b"*1\r\n*3\r\n:5\r\n:99999\r\n*0\r\n",
    b"-ERR no\r\n",
    b"*9999999\r\n",
]


@pytest.mark.parametrize("slots", SLOTS)
def test_slots_that_are_none(slots: bytes) -> None:
    with FakeServer(lambda sock, words: slots) as fake, opened(fake.url, mode="cluster") as tier:
        assert get_all(tier, 1, 2) == [ReadOutcome.ERROR] * 2
        assert put(tier, 1, 2) == [WriteOutcome.ERROR] * 2
        for call in (lambda: tier.contains([key_of(1)]), tier.probe):
            with pytest.raises(TierError):
                call()


def test_a_server_that_loads_is_joined_when_it_has_loaded(caplog: pytest.LogCaptureFixture) -> None:
    loading = [True]

    def reply(sock: socket.socket, words: list[bytes]) -> bytes | None:
        if loading[0] and words[0] != b"INFO":
            return b"-LOADING Redis is loading the dataset in memory\r\n"
        return joining(words) or b"$-1\r\n"

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "LOADING" in caplog.text
        for _ in range(3):
            assert get(tier, 1) is ReadOutcome.ERROR
            with pytest.raises(TierError, match="LOADING"):
                tier.probe()
        loading[0] = False
        assert get(tier, 1) is ReadOutcome.MISS
        tier.probe()
        assert fake.num_connections == 1
