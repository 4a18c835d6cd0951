"""A server that lies, in every message: an error to that call, no byte in a wrong place, and a fresh start after."""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.errors import TierError
from kvtier.protocol.messages import (
    Commit,
    Committed,
    Count,
    Failed,
    Held,
    Hello,
    Lookup,
    Ping,
    Pong,
    Remove,
    Reserve,
    Stage,
    Staged,
)
from kvtier.protocol.wire import MAGIC, pack
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome
from tests.server_tier.rig import (
    BLOCK_BYTES,
    POOL_BYTES,
    TIMEOUT_S,
    FakeServer,
    Fd,
    Lie,
    Raw,
    Said,
    block_of,
    get,
    key_of,
    opened,
    put,
    sealed_memfd,
)

ERRORS = [WriteOutcome.ERROR] * 2
SLACK_S = 0.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "fake.sock") as server:
        yield server


@pytest.fixture
def tcp_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def header(message_bytes: int, payload_bytes: int = 0, magic: bytes = MAGIC) -> bytes:
    return struct.pack("<4sII", magic, message_bytes, payload_bytes)


def raw(*fields: object, payload: bytes = b"", end: bool = False) -> list[Said]:
    """A message that this kvtier would not make: its type's number, its fields, and the payload behind it."""
    body = msgspec.msgpack.encode(fields)
    return [Raw(header(len(body), len(payload)) + body + payload, end=end)]


def reserved(*fields: object) -> Lie:
    return lambda m: raw(68, m.id, *fields)


def staged(*fields: object, payload: bytes = b"") -> Lie:
    return lambda m: raw(70, m.id, *fields, payload=payload)


ANY_ANSWER: dict[str, Lie] = {
    "nothing": lambda _: None,
    "end": lambda _: [Raw(b"", end=True)],
    "half a message": lambda m: [Raw(pack(Pong(m.id))[:-1], end=True)],
    "trickle": lambda m: [Raw(pack(Failed(m.id, "failed", "x" * 500)), pause_s=0.01)],
    "another number": lambda m: [Pong(m.id + 1)],
    "number zero": lambda _: [Pong(0)],
    "another kind": lambda m: [Pong(m.id)],
    "no msgpack": lambda _: [Raw(header(4) + b"\xc1\xc1\xc1\xc1")],
    "a field too many": lambda m: [Raw(header(4) + bytes([0x93, 66, m.id, 1]))],
    "another magic": lambda m: [Raw(header(4, magic=b"KVT9") + b"1234")],
    "a message of 4 GiB": lambda _: [Raw(header(0xFFFFFFFF))],
    "an empty message": lambda _: [Raw(header(0))],
    "a payload": lambda m: [Raw(header(3, 1 << 20) + pack(Pong(m.id))[12:])],
    "a pickle": lambda _: [Raw(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")],
    "HTTP": lambda _: [Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")],
    "closing": lambda _: [Failed(0, "closing", "going down")],
    "no": lambda m: [Failed(m.id, "failed", "\x1b[31mno\nsecond line")],
    "no, by an unknown word": lambda m: [Failed(m.id, "whatever", "")],
}

RESERVED: dict[str, Lie] = {
    "too many outcomes": reserved(bytes(3), [1, 2, 3], [0, 1 << 14, 1 << 15]),
    "too few outcomes": reserved(bytes(1), [1], [0]),
    "an unknown outcome": reserved(b"\x09\x00", [1], [0]),
    "too few slots": reserved(bytes(2), [1], [0]),
    "too few offsets": reserved(bytes(2), [1, 2], [0]),
    "one slot twice": reserved(bytes(2), [1, 1], [0, 1 << 14]),
    "slots that overlap": reserved(bytes(2), [1, 2], [0, BLOCK_BYTES - 1]),
    "slots at one place": reserved(bytes(2), [1, 2], [1 << 14, 1 << 14]),
    "a slot past the end": reserved(bytes(2), [1, 2], [0, POOL_BYTES - BLOCK_BYTES + 1]),
    "a slot far past the end": reserved(bytes(2), [1, 2], [0, (1 << 62)]),
    "a handle that is none": reserved(bytes(2), [0, 1], [0, 1 << 14]),
    "a place below the first": reserved(bytes(2), [1, 2], [0, -(1 << 14)]),
    "a place that is no number": reserved(bytes(2), [1, 2], [0, "x"]),
}

STAGED: dict[str, Lie] = {
    "too many outcomes": staged(bytes(3), [1, 2, 3], [0, 1 << 14, 1 << 15], [0, 0, 0]),
    "too few outcomes": staged(bytes(1), [1], [0], [0]),
    "an unknown outcome": staged(b"\x09\x01", [], [], []),
    "too few leases": staged(bytes(2), [1], [0, 1 << 14], [0, 0]),
    "too few offsets": staged(bytes(2), [1, 2], [0], [0, 0]),
    "too few checksums": staged(bytes(2), [1, 2], [0, 1 << 14], [0]),
    "one lease twice": staged(bytes(2), [1, 1], [0, 1 << 14], [0, 0]),
    "slots that overlap": staged(bytes(2), [1, 2], [0, BLOCK_BYTES - 1], [0, 0]),
    "a slot past the end": staged(bytes(2), [1, 2], [0, POOL_BYTES - BLOCK_BYTES + 1], [0, 0]),
    "a slot far past the end": staged(bytes(2), [1, 2], [0, (1 << 63) - 1], [0, 0]),
    "a payload": staged(bytes(2), [], [], [0, 0], payload=bytes(2 * BLOCK_BYTES)),
    "leases and a payload": staged(bytes(2), [1, 2], [0, 1 << 14], [0, 0], payload=bytes(2 * BLOCK_BYTES)),
}

INLINE: dict[str, Lie] = {
    "no payload": staged(bytes(2), [], [], [0, 0]),
    "leases": staged(bytes(2), [1, 2], [0, 1 << 14], [0, 0], payload=bytes(2 * BLOCK_BYTES)),
    "a block less": staged(bytes(2), [], [], [0, 0], payload=bytes(BLOCK_BYTES)),
    "a byte less": staged(bytes(2), [], [], [0, 0], payload=bytes(2 * BLOCK_BYTES - 1)),
    "a byte more": staged(bytes(2), [], [], [0, 0], payload=bytes(2 * BLOCK_BYTES + 1)),
    "a payload of misses": staged(b"\x01\x01", [], [], [], payload=bytes(2 * BLOCK_BYTES)),
    "a payload that ends": lambda m: [
        Raw(pack(Staged(m.id, bytes(2), [], [], [0, 0]), 2 * BLOCK_BYTES) + bytes(BLOCK_BYTES), end=True)
    ],
    "a payload that stops": lambda m: [
        Raw(pack(Staged(m.id, bytes(2), [], [], [0, 0]), 2 * BLOCK_BYTES) + bytes(BLOCK_BYTES))
    ],
    "a payload that trickles": lambda m: [
        Raw(pack(Staged(m.id, bytes(2), [], [], [0, 0]), 2 * BLOCK_BYTES) + bytes(2 * BLOCK_BYTES), pause_s=0.005)
    ],
}


def expect(server: FakeServer, kind: type, lie: Lie, call: Callable[[Any], object]) -> None:
    """The call ends badly and in time, nothing but it suffers, and the next one is well."""
    with opened(server.url) as tier:
        put(tier, "before")
        server.lies[kind] = lie
        began = time.monotonic()
        call(tier)
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        del server.lies[kind]
        tier.check_integrity()
        assert get(tier, "before") == [ReadOutcome.OK]
        assert put(tier, "after") == [WriteOutcome.STORED]
        assert get(tier, "after", "before") == [ReadOutcome.OK] * 2
        assert sum(tier.snapshot().errors.values()) <= 1
        assert server.num_accepted <= 2, "at most one connect each call"


def write_fails(tier: Any) -> None:
    assert put(tier, "a", "b") == ERRORS


def read_fails(tier: Any) -> None:
    """No byte beside the buffers changes, whatever comes."""
    whole = bytearray(b"\xa5" * (2 * BLOCK_BYTES + 3))
    view = memoryview(whole)
    requests = [
        ReadRequest(key_of("x"), view[1 : 1 + BLOCK_BYTES]),
        ReadRequest(key_of("y"), view[2 + BLOCK_BYTES : 2 + 2 * BLOCK_BYTES]),
    ]
    assert tier.read(requests) == [ReadOutcome.ERROR] * 2
    assert whole[0] == whole[1 + BLOCK_BYTES] == whole[-1] == 0xA5


def raises(call: Callable[[Any], object]) -> Callable[[Any], None]:
    def check(tier: Any) -> None:
        with pytest.raises(TierError, match="server tier"):
            call(tier)

    return check


@pytest.mark.bug("SE01", "SE11")
@pytest.mark.parametrize("name", ANY_ANSWER)
@pytest.mark.parametrize("kind", [Reserve, Commit, Stage, Lookup, Remove, Ping])
def test_any_answer_may_be_a_lie(server: FakeServer, kind: type, name: str) -> None:
    calls: dict[type, Callable[[Any], None]] = {
        Reserve: write_fails,
        Commit: write_fails,
        Stage: read_fails,
        Lookup: raises(lambda tier: tier.contains([key_of("x")])),
        Remove: raises(lambda tier: tier.remove([key_of("x")])),
        Ping: raises(lambda tier: tier.probe()),
    }
    if kind is Ping and name == "another kind":
        return  # it is the right one
    expect(server, kind, ANY_ANSWER[name], calls[kind])
    assert not Path("/tmp/owned").exists()  # noqa: S108 - what the pickle would make


@pytest.mark.parametrize("name", RESERVED)
def test_slots_to_fill_are_looked_at(server: FakeServer, name: str) -> None:
    pool = bytes(server.pool)

    def write(tier: Any) -> None:
        before = bytes(server.pool)
        write_fails(tier)
        assert bytes(server.pool) == before, "nothing was written"

    assert pool == bytes(POOL_BYTES)
    expect(server, Reserve, RESERVED[name], write)


@pytest.mark.parametrize("name", STAGED)
def test_slots_to_read_are_looked_at(server: FakeServer, name: str) -> None:
    expect(server, Stage, STAGED[name], read_fails)


@pytest.mark.bug("SE11")
@pytest.mark.parametrize("name", INLINE)
def test_payload_is_looked_at(tcp_server: FakeServer, name: str) -> None:
    expect(tcp_server, Stage, INLINE[name], read_fails)


@pytest.mark.parametrize("num_outcomes", [1, 3])
def test_commits_are_looked_at(server: FakeServer, num_outcomes: int) -> None:
    expect(server, Commit, lambda m: [Committed(m.id, bytes(num_outcomes))], write_fails)


def test_lookups_are_looked_at(server: FakeServer) -> None:
    expect(server, Lookup, lambda m: [Held(m.id, bytes(3))], raises(lambda tier: tier.contains([key_of(1), key_of(2)])))


def test_an_answer_that_comes_twice_spoils_no_later_call(server: FakeServer) -> None:
    with opened(server.url) as tier:
        # in one piece: none is still under way when the next call begins
        server.lies[Remove] = lambda m: [Raw(pack(Count(m.id, 5)) + pack(Count(m.id, 7)) + pack(Count(m.id + 1, 9)))]
        assert tier.remove([key_of("x")]) == 5
        del server.lies[Remove]
        assert tier.remove([key_of("x")]) == 0
        assert put(tier, "a") == [WriteOutcome.STORED]


def test_an_answer_that_comes_twice_and_late_is_never_taken_for_another(server: FakeServer) -> None:
    with opened(server.url) as tier:
        server.lies[Remove] = lambda m: [Count(m.id - 1, 7), Count(m.id, 9)]  # the former as if it had been under way
        with pytest.raises(TierError, match=r"Count to number [0-9]+, which is not open"):
            tier.remove([key_of("x")])
        del server.lies[Remove]
        assert tier.remove([key_of("x")]) == 0
        assert put(tier, "a") == [WriteOutcome.STORED]


@pytest.mark.parametrize("is_tcp", [False, True])
def test_what_is_not_what_was_stored_is_damaged_and_forgotten(
    server: FakeServer, tcp_server: FakeServer, is_tcp: bool
) -> None:
    scribbled = tcp_server if is_tcp else server
    with opened(scribbled.url) as tier:
        put(tier, *range(4))
        offset, nbytes, _ = scribbled.blocks[key_of(2)]
        scribbled.pool[offset + nbytes - 1] ^= 1
        assert get(tier, *range(4)) == [ReadOutcome.OK, ReadOutcome.OK, ReadOutcome.DAMAGED, ReadOutcome.OK]
        assert get(tier, *range(4)) == [ReadOutcome.OK, ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.OK]
        assert tier.snapshot().damaged == 1
        assert tier.usage().num_blocks == 3


# ---- the handshake ---------------------------------------------------------------------------------------------------


def file_of(nbytes: int) -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)  # noqa: PTH108 - by a descriptor's path
    os.ftruncate(fd, nbytes)
    return fd


def welcomes(server: FakeServer) -> dict[str, tuple[Lie, str]]:
    def with_fds(make: Callable[[], Sequence[int]], **changes: Any) -> Lie:
        def lie(m: Hello) -> Sequence[Said]:
            fds, message = make(), server.welcome(m.id, **changes)
            return [Fd(message, fds) if fds else message]

        return lie

    return {
        "no descriptor": (with_fds(list), "0 descriptors"),
        "two descriptors": (with_fds(lambda: [sealed_memfd(POOL_BYTES), sealed_memfd(POOL_BYTES)]), "2 descriptors"),
        "a file": (with_fds(lambda: [file_of(POOL_BYTES)]), "no memfd"),
        "a pipe": (with_fds(lambda: [os.open("/dev/null", os.O_RDWR)]), "no memfd"),
        "a memfd that may shrink": (with_fds(lambda: [sealed_memfd(POOL_BYTES, 0)]), "not sealed"),
        "a memfd that is shorter": (with_fds(lambda: [sealed_memfd(4096)]), "fewer than"),
        "a memfd of no memory": (with_fds(lambda: [sealed_memfd(4096)], mapping_bytes=0), "no memory for it"),
        "a length beyond all memory": (with_fds(lambda: [sealed_memfd(4096)], mapping_bytes=1 << 62), "fewer than"),
        "another number": (lambda m: [server.welcome(m.id + 1)], "not open"),
        "HTTP": (lambda _: [Raw(b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", end=True)], "HTTP"),
        "TLS": (lambda _: [Raw(b"\x15\x03\x01\x00\x02\x02\x46", end=True)], "TLS"),
        "SSH": (lambda _: [Raw(b"SSH-2.0-OpenSSH_9.9\r\n", end=True)], "SSH"),
        "noise": (lambda _: [Raw(bytes(range(200)), end=True)], "no frame"),
        "another kind": (lambda m: [Pong(m.id)], "Pong"),
    }


WELCOMES = [
    "no descriptor",
    "two descriptors",
    "a file",
    "a pipe",
    "a memfd that may shrink",
    "a memfd that is shorter",
    "a memfd of no memory",
    "a length beyond all memory",
    "another number",
    "HTTP",
    "TLS",
    "SSH",
    "noise",
    "another kind",
]


@pytest.mark.bug("US05")
@pytest.mark.parametrize("name", WELCOMES)
def test_what_is_no_kvtier_server_is_said_once(server: FakeServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    lie, words = welcomes(server)[name]
    server.lies[Hello] = lie
    began = time.monotonic()
    with caplog.at_level(logging.INFO), opened(server.url) as tier:
        assert not tier.is_joined
        assert get(tier, "x") == [ReadOutcome.ERROR]
        assert put(tier, "x") == [WriteOutcome.ERROR]
        with pytest.raises(TierError):
            tier.contains([key_of("x")])
        assert time.monotonic() - began < 1.0
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        (line,) = lines
        assert "kvtier-server's address" in line
        assert words in line
        assert server.num_accepted == 4, "one connect a call"
        del server.lies[Hello]
        assert put(tier, "x") == [WriteOutcome.STORED], "as soon as one is there"
        assert "answers (fake 1.0)" in caplog.text


@pytest.mark.bug("US05")
@pytest.mark.parametrize("how", ["refused", "chosen"])
def test_another_version_is_named_once_with_both_sides(
    server: FakeServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvtier import __version__

    refusal = Failed(0, "version", "kvtier-server 9.9 speaks version 7 of the protocol, and not 1")
    server.lies[Hello] = lambda m: [
        refusal if how == "refused" else server.welcome(m.id, version=7, software="kvtier-server 9.9", mapping_bytes=0)
    ]
    with opened(server.url) as tier:
        for _ in range(3):
            assert get(tier, "x") == [ReadOutcome.ERROR]
        (line,) = [record.getMessage() for record in caplog.records]
        assert "version 7" in line
        assert f"kvtier {__version__}, which speaks version 1" in line
        assert tier.snapshot().errors == {"version": 4}


@pytest.mark.parametrize(("code", "advice"), [("denied", "server.token_file"), ("busy", "daemon.max_clients")])
def test_who_is_turned_away_is_told_what_to_look_at(
    server: FakeServer, code: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.lies[Hello] = lambda _: [Failed(0, code, "go\x1b[2J away\nnow")]
    with opened(server.url) as tier:
        assert get(tier, "x") == [ReadOutcome.ERROR]
        assert advice in caplog.text
        assert "\x1b" not in caplog.text
        assert tier.snapshot().errors == {code: 2}


def test_a_welcome_that_never_comes_takes_one_timeout(server: FakeServer) -> None:
    server.lies[Hello] = lambda _: None
    began = time.monotonic()
    with opened(server.url) as tier:
        assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + SLACK_S
        assert get(tier, "x") == [ReadOutcome.ERROR]
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S


def test_bytes_of_a_lie_stay_where_they_belong(tcp_server: FakeServer) -> None:
    """A payload for a call that has given up is not the answer to the next one."""
    with opened(tcp_server.url) as tier:
        put(tier, "a")
        tcp_server.lies[Stage] = lambda m: None
        assert get(tier, "a") == [ReadOutcome.ERROR]
        tcp_server.lies.clear()
        assert get(tier, "a") == [ReadOutcome.OK]
        assert tier.snapshot().disconnects == 1
    assert block_of("a")


def test_a_server_that_welcomes_us_and_then_fails_is_said_once(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.lies[Lookup] = lambda _: [Failed(0, "failed", "its log says more")]
    with opened(server.url) as tier:
        for _ in range(4):
            with pytest.raises(TierError, match="its log says more"):
                tier.contains([key_of("x")])
        assert len(caplog.records) == 1
        assert server.num_accepted == 4
        assert tier.snapshot().errors == {"failed": 4}
