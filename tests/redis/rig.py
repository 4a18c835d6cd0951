"""Redis tiers opened for a test, blocks by name, servers that lie, and a wire that breaks."""

from __future__ import annotations

import contextlib
import hashlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from kvtier.clock import Clock, MonotonicClock
from kvtier.config import RedisSettings
from kvtier.frame import FrameHeader, padded, payload_checksum
from kvtier.keys import Key, make_key
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.redis import RedisTier

__all__ = [
    "BLOCK_BYTES",
    "CutWire",
    "FakeServer",
    "Reply",
    "block_of",
    "frame_of",
    "get",
    "get_all",
    "joining",
    "key_of",
    "name_of",
    "opened",
    "put",
    "settings_of",
    "until",
]

BLOCK_BYTES = 10_000
TIMEOUT_S = 0.3


def key_of(name: object, namespace: str = "one") -> Key:
    return make_key(hashlib.sha256(namespace.encode()).digest()[:16], hashlib.sha256(str(name).encode()).digest())


def block_of(name: object, nbytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(str(name)).randbytes(nbytes)


def name_of(key: Key, epoch: int = 0, prefix: str = "kvtier", tenant: str = "default") -> str:
    """As the tier's contract says, and not as its code does."""
    return f"{prefix}:{tenant}:{epoch}:{key[:16].hex()}:{key[16:].hex()}"


def frame_of(key: Key, block: bytes, parent: Key | None = None, tenant: str = "default", **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "key": key,
        "parent": parent,
        "raw_bytes": len(block),
        "stored_bytes": len(block),
        "checksum": payload_checksum(block),
        "tenant": tenant,
    }
    return FrameHeader(**(fields | changes)).encode() + block.ljust(padded(len(block)), b"\0")


def settings_of(url: Any, **changes: Any) -> RedisSettings:
    fields: dict[str, Any] = {"url": url, "timeout_s": TIMEOUT_S}
    return RedisSettings(**(fields | changes))


@contextmanager
def opened(url: object, clock: Clock | None = None, **changes: Any) -> Iterator[RedisTier]:
    """A tier that is found in order at the end, and closed."""
    tier = RedisTier(settings_of(url, **changes), clock or MonotonicClock())
    try:
        yield tier
        tier.check_integrity()
    finally:
        tier.close()


def put(tier: RedisTier, *names: object, nbytes: int = BLOCK_BYTES, **changes: Any) -> list[WriteOutcome]:
    return tier.write(
        [WriteRequest(key_of(name), None, memoryview(block_of(name, nbytes)), **changes) for name in names]
    )


def get_all(tier: RedisTier, *names: object, nbytes: int = BLOCK_BYTES) -> list[ReadOutcome]:
    """The outcomes; what is OK is what was put."""
    buffers = [bytearray(nbytes) for _ in names]
    outcomes = tier.read([ReadRequest(key_of(n), memoryview(b)) for n, b in zip(names, buffers, strict=True)])
    for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
        assert outcome is not ReadOutcome.OK or buffer == block_of(name, nbytes), f"{name}: not its bytes"
    return outcomes


def get(tier: RedisTier, name: object, nbytes: int = BLOCK_BYTES) -> ReadOutcome:
    return get_all(tier, name, nbytes=nbytes)[0]


def until(what: str, ask: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Until the answer is true."""
    deadline = time.monotonic() + timeout_s
    while not ask():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.002)


# ---- servers that lie ------------------------------------------------------------------------------------------------

Reply = Callable[[socket.socket, list[bytes]], bytes | None]
"""What to answer to a command; None: nothing, though it may have sent some by itself."""


class FakeServer:
    """Understands commands, and answers each as `reply` says. `commands` is what came, over all connections."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.commands: list[list[bytes]] = []
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="fake redis")]
        self._threads[0].start()

    @property
    def port(self) -> int:
        number = self._listener.getsockname()[1]
        assert isinstance(number, int)
        return number

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    def count(self, verb: bytes) -> int:
        return sum(command[0] == verb for command in self.commands)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            if self._ended.is_set():
                accepted.close()
                return
            self.num_connections += 1
            self._sockets.append(accepted)
            thread = threading.Thread(target=self._serve, args=(accepted,), name="fake redis connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), accepted, accepted.makefile("rb") as stream:
            while line := stream.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(stream.readline()[1:])
                    words.append(stream.read(size + 2)[:-2])
                self.commands.append(words)
                answer = self._reply(accepted, words)
                if answer is not None:
                    accepted.sendall(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()  # wakes the thread that accepts
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


def joining(words: list[bytes]) -> bytes | None:
    """What a healthy empty server answers to what a tier asks when it joins; None to all else."""
    if words[0] == b"INFO":
        text = b"redis_mode:standalone\r\nmaxmemory:1000000000\r\nused_memory:1000\r\nrole:master\r\n"
        return b"$%d\r\n%b\r\n" % (len(text), text)
    if words[0] == b"GET" and words[1].endswith(b":epoch"):
        return b"$-1\r\n"
    if words[0] == b"EXISTS":
        return b":0\r\n"
    return b"+PONG\r\n" if words[0] == b"PING" else None


# ---- a wire that breaks ----------------------------------------------------------------------------------------------


class CutWire:
    """Passes bytes between clients and a server; each connection is cut after a number of bytes of one direction.

    `plan` gives that for each connection in turn: None for one that lives, a positive number for bytes from the
    server, a negative one for bytes to it. Bytes go in pieces of `piece` at most.
    """

    def __init__(self, port: int, plan: Callable[[], int | None], piece: int = 1 << 16) -> None:
        self._port = port
        self._plan = plan
        self._piece = piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = socket.socketpair()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._left: dict[socket.socket, int] = {}
        self.is_healed = False
        """Set it, and nothing is cut any more."""
        self._thread = threading.Thread(target=self._run, name="wire")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._listener, self._woken, *self._pairs], [], [])
            if self._woken in readable:
                break
            if self._listener in readable:
                self._join()
            for source in readable:
                if source in self._pairs:
                    self._pass(source)
        for sock in [*self._pairs, self._listener, self._wake, self._woken]:
            sock.close()

    def _join(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        self._pairs |= {client: server, server: client}
        limit = None if self.is_healed else self._plan()
        if limit is not None:
            self._left[server if limit > 0 else client] = abs(limit)

    def _pass(self, source: socket.socket) -> None:
        left = None if self.is_healed else self._left.get(source)
        try:
            data = source.recv(self._piece if left is None else min(self._piece, left))
            self._pairs[source].sendall(data)
        except OSError:
            data = b""
        if left is not None:
            self._left[source] = left - len(data)
        if not data or left == len(data):
            other = self._pairs.pop(source)
            del self._pairs[other]
            for sock in (source, other):
                self._left.pop(sock, None)
                sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.send(b"x")
        self._thread.join()
