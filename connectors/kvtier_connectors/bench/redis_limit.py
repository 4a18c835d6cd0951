"""The least client of Redis: what servers take and give when nothing stands between sockets and the bytes.

Commands are made before the clock runs. A value is sent by one system call and received by one, straight from and to
where the block lies; nothing is checked of it but its length.
"""

from __future__ import annotations

import binascii
import queue
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Place", "RawBlock", "RawClient", "RawLookup", "run_jobs"]

DEFAULT_PORT = 6379
NUM_SLOTS = 16384
TIMEOUT_S = 60
SEND_BUFFER_BYTES = 1 << 20
"""As the tier's connections have."""
WINDOW = 2048
"""Commands sent ahead of their replies, twice: so few replies fit into a socket's buffer, and neither side waits for
the other to read."""
REPLY_BYTES = len(b":1\r\n")


@dataclass(frozen=True, slots=True)
class Place:
    """Servers, as the tier's settings name them. credentials: user and password."""

    urls: Sequence[str]
    is_cluster: bool = False
    credentials: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RawBlock:
    """A key's commands, made. node: which of the servers has it."""

    node: int
    set_head: bytes
    """SET up to the value."""
    get: bytes
    reply_head: bytes
    """What stands before the value in the answer to `get`."""
    unlink: bytes


class RawConnection:
    """One socket, one command at a time. A server that is silent for a minute raises BlockingIOError."""

    def __init__(self, url: str, credentials: tuple[str, str] | None) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or DEFAULT_PORT))
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            # By the kernel: a timeout of Python's makes every call two.
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", TIMEOUT_S, 0))
            if credentials is not None:
                self.ask(encode(b"AUTH", *(word.encode() for word in credentials)), b"+OK\r\n")
        except BaseException:
            self.close()
            raise

    def ask(self, command: bytes, expected: bytes) -> None:
        """Any command with a short answer that is known."""
        self.socket.sendall(command)
        self._expect(expected)

    def set(self, block: RawBlock, value: memoryview) -> None:
        sent = self.socket.sendmsg([block.set_head, value, b"\r\n"])
        total = len(block.set_head) + len(value) + 2
        if sent < total:
            self.socket.sendall(b"".join([block.set_head, value, b"\r\n"])[sent:])
        self._expect(b"+OK\r\n")

    def get(self, block: RawBlock, target: memoryview) -> None:
        self.socket.sendall(block.get)
        head, tail = bytearray(len(block.reply_head)), bytearray(2)
        got = self.socket.recvmsg_into([head, target, tail], 0, socket.MSG_WAITALL)[0]
        assert got == len(head) + len(target) + 2, f"the server sent {got} of {len(target)} bytes"
        assert head == block.reply_head, f"another answer was expected than {bytes(head)!r}"

    def _expect(self, expected: bytes) -> None:
        got = self.socket.recv(len(expected), socket.MSG_WAITALL)
        assert got == expected, f"the server answered {got!r}, not {expected!r}"

    def close(self) -> None:
        self.socket.close()


class RawClient:
    """`threads` connections to each server; a call takes one to each, and waits for them where others have all.

    Any thread. Mutable state: `_free`, the connections that no call has.
    """

    def __init__(self, place: Place, threads: int) -> None:
        self._place = place
        self._node_of_slot = _slot_map(place) if place.is_cluster else None
        self._stack = ExitStack()
        self._free: queue.SimpleQueue[list[RawConnection]] = queue.SimpleQueue()
        with ExitStack() as stack:
            for _ in range(threads):
                self._free.put([self._connect(url, stack) for url in place.urls])
            self._stack = stack.pop_all()

    def _connect(self, url: str, stack: ExitStack) -> RawConnection:
        connection = RawConnection(url, self._place.credentials)
        stack.callback(connection.close)
        return connection

    def node_of(self, key: bytes) -> int:
        """Position among the place's URLs."""
        if self._node_of_slot is None:
            return 0
        return self._node_of_slot[binascii.crc_hqx(key, 0) % NUM_SLOTS]

    def block(self, key: bytes, nbytes: int) -> RawBlock:
        return RawBlock(
            self.node_of(key),
            b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, nbytes),
            encode(b"GET", key),
            b"$%d\r\n" % nbytes,
            encode(b"UNLINK", key),
        )

    def store(self, blocks: Sequence[RawBlock], values: Sequence[memoryview]) -> None:
        self._each(lambda connections, i: connections[blocks[i].node].set(blocks[i], values[i]), range(len(blocks)))

    def restore(self, blocks: Sequence[RawBlock], targets: Sequence[memoryview]) -> None:
        self._each(lambda connections, i: connections[blocks[i].node].get(blocks[i], targets[i]), range(len(blocks)))

    def remove(self, blocks: Sequence[RawBlock]) -> None:
        """Of blocks that are there."""
        self._each(
            lambda connections, i: connections[blocks[i].node].ask(blocks[i].unlink, b":1\r\n"), range(len(blocks))
        )

    def _each(self, work: Callable[[list[RawConnection], int], None], positions: Sequence[int]) -> None:
        """On one set of connections, in order, by the calling thread."""
        connections = self._free.get()
        try:
            for position in positions:
                work(connections, position)
        finally:
            self._free.put(connections)

    def lookup(self, keys: Sequence[bytes]) -> RawLookup:
        """Of these keys, on connections of its own that this client closes."""
        shares: list[list[bytes]] = [[] for _ in self._place.urls]
        for key in keys:
            shares[self.node_of(key)].append(encode(b"EXISTS", key))
        return RawLookup(
            [(self._connect(url, self._stack), s) for url, s in zip(self._place.urls, shares, strict=True)]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class RawLookup:
    """EXISTS for many keys, packed before: each server is sent its share, then each is heard."""

    def __init__(self, shares: Sequence[tuple[RawConnection, Sequence[bytes]]]) -> None:
        self._shares = [
            (connection.socket, [b"".join(share[i : i + WINDOW]) for i in range(0, len(share), WINDOW)])
            for connection, share in shares
        ]
        self._replies = [bytearray(REPLY_BYTES * len(share)) for _, share in shares]

    @property
    def num_found(self) -> int:
        """Of the last `ask`."""
        return sum(replies.count(b":1\r\n") for replies in self._replies)

    def ask(self) -> None:
        for sock, windows in self._shares:
            for window in windows[:2]:
                sock.sendall(window)
        for (sock, windows), replies in zip(self._shares, self._replies, strict=True):
            view = memoryview(replies)
            for number in range(len(windows)):
                part = view[REPLY_BYTES * WINDOW * number : REPLY_BYTES * WINDOW * (number + 1)]
                got = sock.recv_into(part, 0, socket.MSG_WAITALL)
                assert got == len(part), "the server closed the connection"
                if number + 2 < len(windows):
                    sock.sendall(windows[number + 2])


def encode(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def run_jobs(pool: ThreadPoolExecutor, job: Callable[[int, int], None], count: int, at_once: int) -> None:
    """`job(start, stop)` for all of `count` blocks, `at_once` of them a job."""
    for _ in pool.map(lambda start: job(start, min(start + at_once, count)), range(0, count, at_once)):
        pass


def _slot_map(place: Place) -> list[int]:
    """Which server has each slot, as the first of them says."""
    from kvtier.testing.redis_servers import RedisConnection

    nodes = {urlsplit(url).port: position for position, url in enumerate(place.urls)}
    parts = urlsplit(place.urls[0])
    slots = [0] * NUM_SLOTS
    with RedisConnection(parts.hostname or "", parts.port or DEFAULT_PORT, credentials=place.credentials) as connection:
        rows = connection.command("CLUSTER", "SLOTS")
    assert isinstance(rows, list)
    for row in rows:
        match row:
            case [int(first), int(last), [_, int(port), *_], *_]:
                slots[first : last + 1] = [nodes[port]] * (last + 1 - first)
            case _:
                raise AssertionError(f"no row of CLUSTER SLOTS: {row!r}")
    return slots
