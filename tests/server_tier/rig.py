"""Server tiers opened for a test, blocks by name, and a small server in memory that lies as it is told."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvtier.clock import Clock, MonotonicClock
from kvtier.config import ServerSettings, load_settings
from kvtier.errors import ProtocolError
from kvtier.keys import DIGEST_BYTES, Key, make_key
from kvtier.protocol.messages import (
    Abort,
    Bye,
    ClientMessage,
    Commit,
    Committed,
    Count,
    Done,
    Epoch,
    Failed,
    Grant,
    Granted,
    Held,
    Hello,
    Lookup,
    Ping,
    Pong,
    Publish,
    Published,
    PublishOutcome,
    Release,
    Remove,
    Reserve,
    Reserved,
    ReserveOutcome,
    ServerMessage,
    Stage,
    Staged,
    StageOutcome,
    StartEpoch,
    Touch,
    Welcome,
)
from kvtier.protocol.wire import MAX_PAYLOAD_BYTES, Message, PayloadEnd, Receiver, pack
from kvtier.server.daemon import Daemon
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.server import ServerTier

__all__ = [
    "BLOCK_BYTES",
    "POOL_BYTES",
    "DaemonAt",
    "FakeServer",
    "Fd",
    "Raw",
    "block_of",
    "daemon_at",
    "get",
    "key_of",
    "opened",
    "put",
    "sealed_memfd",
    "settings_of",
    "until",
]

BLOCK_BYTES = 10_000
POOL_BYTES = 1 << 20
SLOT_BYTES = 1 << 14
TIMEOUT_S = 0.5
DEADLINE_S = 20.0


def key_of(name: object, namespace: str = "one") -> Key:
    return make_key(hashlib.sha256(namespace.encode()).digest()[:16], hashlib.sha256(str(name).encode()).digest())


def block_of(name: object, nbytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(str(name)).randbytes(nbytes)


def settings_of(url: str, **settings: Any) -> ServerSettings:
    fields: dict[str, Any] = {"url": url, "timeout_s": TIMEOUT_S} | settings
    return ServerSettings(**fields)


@contextmanager
def opened(url: str, clock: Clock | None = None, **settings: Any) -> Iterator[ServerTier]:
    """A tier that is checked when the block ends well, and closed in any case."""
    tier = ServerTier(settings_of(url, **settings), clock or MonotonicClock())
    try:
        yield tier
        tier.check_integrity()
    finally:
        tier.close()
    assert tier.snapshot().mapped_bytes == 0


def put(tier: ServerTier, *names: object, nbytes: int = BLOCK_BYTES) -> list[WriteOutcome]:
    return tier.write([WriteRequest(key_of(name), None, memoryview(block_of(name, nbytes))) for name in names])


def get(tier: ServerTier, *names: object, nbytes: int = BLOCK_BYTES) -> list[ReadOutcome]:
    """What came of each; what is OK is looked at."""
    buffers = [bytearray(nbytes) for _ in names]
    outcomes = tier.read([ReadRequest(key_of(n), memoryview(b)) for n, b in zip(names, buffers, strict=True)])
    for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
        assert outcome is not ReadOutcome.OK or buffer == block_of(name, nbytes), f"{name} has other bytes"
    return outcomes


def until(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> float:
    """Poll, at most so many seconds; how long it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < deadline_s, what
        time.sleep(0.005)
    return time.monotonic() - began


def sealed_memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) -> int:
    fd = os.memfd_create("fake-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Raw(NamedTuple):
    """Bytes in place of a message. pause_s: between each two of them. end: whether the connection ends behind them."""

    data: bytes
    pause_s: float = 0.0
    end: bool = False


class Fd(NamedTuple):
    """A message with descriptors, which are closed once it was sent."""

    message: ServerMessage
    fds: Sequence[int]


Said = ServerMessage | Raw | Fd | tuple[ServerMessage, bytes]
Lie = Callable[[Any], Sequence[Said] | None]


class _Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.slots: dict[int, tuple[bytes, int, int]] = {}  # key, offset, length, by reservation


class FakeServer:
    """Keeps blocks in a memfd and forgets none. `lies`: by the type of a message, what to say instead; None of a lie:
    nothing. `path` for a Unix socket, else TCP. maps: whether clients get its memory, else as
    a Unix socket's do."""

    def __init__(
        self, path: Path | None = None, *, checksums: bool = True, credits_: int = 8, maps: bool | None = None
    ) -> None:
        self.lies: dict[type, Lie] = {}
        self.heard: list[ClientMessage] = []
        self.num_accepted = 0
        self.checksums = checksums
        self.credits = credits_
        self.max_payload_bytes = 1 << 20
        self.maps = path is not None if maps is None else maps
        self.epoch = 0
        self.fd = sealed_memfd(POOL_BYTES)
        self.pool = mmap.mmap(self.fd, POOL_BYTES)
        self.blocks: dict[bytes, tuple[int, int, int]] = {}  # offset, length, checksum
        self.next_slot = 0
        self.next_handle = 1
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._peers: list[_Peer] = []
        self._threads: list[threading.Thread] = []
        self.path = path
        if path is not None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self.url = f"kvtier+unix://{path}"
        else:
            self._listener = socket.socket(socket.AF_INET)
            self._listener.bind(("127.0.0.1", 0))
            self.url = f"kvtier+tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen(64)
        self._accepting = threading.Thread(target=self._accept, name="fake-accepts")
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        self.pool.close()
        os.close(self.fd)
        if self.path is not None:
            self.path.unlink()

    def cut(self) -> None:
        """End all connections."""
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def heard_of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def welcome(self, number: int, **changes: Any) -> Welcome:
        fields: dict[str, Any] = {
            "id": number,
            "version": 1,
            "software": "fake 1.0",
            "tenant": "default",
            "mapping_bytes": POOL_BYTES if self.maps else 0,
            "checksums": self.checksums,
            "epoch": self.epoch,
            "credits": self.credits,
            "max_payload_bytes": self.max_payload_bytes,
            "capacity_bytes": POOL_BYTES,
            "tiers": [],
        }
        return Welcome(**(fields | changes))

    # ---- on its threads ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = _Peer(sock)
            self._peers.append(peer)
            self.num_accepted += 1
            thread = threading.Thread(target=self._serve, args=(peer,), name="fake-serves")
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: _Peer) -> None:
        receiver: Receiver[ClientMessage] = Receiver(ClientMessage, max_payload_bytes=MAX_PAYLOAD_BYTES)
        pending: Message[ClientMessage] | None = None
        payload = bytearray()
        with peer.sock, contextlib.suppress(OSError, ProtocolError):
            while True:
                event = receiver.next_event()
                if event is None:
                    number = peer.sock.recv_into(receiver.buffer())
                    if not number:
                        return
                    receiver.received(number)
                elif isinstance(event, Message) and event.payload_bytes:
                    pending, payload = event, bytearray(event.payload_bytes)
                    receiver.take_payload([memoryview(payload)])
                elif isinstance(event, PayloadEnd):
                    assert pending is not None
                    self._take(peer, pending.message, bytes(payload))
                else:
                    self._take(peer, event.message, b"")
        self._peers.remove(peer)

    def _take(self, peer: _Peer, message: ClientMessage, payload: bytes) -> None:
        with self._lock:
            self.heard.append(message)
            lie = self.lies.get(type(message))
            said = self._answer(peer, message, payload) if lie is None else lie(message)
        for each in said or ():
            self._say(peer, each)

    def _say(self, peer: _Peer, said: Said) -> None:
        if isinstance(said, Fd):
            try:
                socket.send_fds(peer.sock, [pack(said.message)], list(said.fds))
            finally:
                for fd in said.fds:
                    os.close(fd)
        elif isinstance(said, Raw):
            pieces = [said.data] if not said.pause_s else [said.data[i : i + 1] for i in range(len(said.data))]
            for piece in pieces:
                peer.sock.sendall(piece)
                if said.pause_s and self._stopping.wait(said.pause_s):
                    return
            if said.end:
                peer.sock.shutdown(socket.SHUT_RDWR)
        elif isinstance(said, tuple):
            peer.sock.sendall(pack(said[0], len(said[1])) + said[1])
        else:
            peer.sock.sendall(pack(said))

    def _answer(self, peer: _Peer, message: ClientMessage, payload: bytes) -> list[Said]:  # noqa: C901 - one arm each
        match message:
            case Hello(id=number):
                return [Fd(self.welcome(number), [os.dup(self.fd)]) if self.maps else self.welcome(number)]
            case Ping(id=number):
                return [Pong(number)]
            case Lookup(id=number, namespace=namespace):
                return [Held(number, bytes(key in self.blocks for key in keys_in(namespace, message.digests)))]
            case Reserve(id=number):
                return [self._reserve(peer, message)]
            case Commit(id=number, reservations=handles, checksums=checksums):
                at = 0
                for handle, checksum in zip(handles, checksums, strict=True):
                    key, offset, nbytes = peer.slots.pop(handle)
                    if payload:
                        self.pool[offset : offset + nbytes] = payload[at : at + nbytes]
                        at += nbytes
                    self.blocks[key] = (offset, nbytes, checksum)
                return [Committed(number, bytes(len(handles)))]
            case Stage():
                return [self._stage(peer, message)]
            case Remove(id=number, namespace=namespace, digests=digests):
                gone = [self.blocks.pop(key, None) for key in keys_in(namespace, digests)]
                return [Count(number, sum(each is not None for each in gone))]
            case StartEpoch(id=number, epoch=epoch):
                self.blocks.clear()
                self.epoch = max(self.epoch + 1, epoch)
                return [Epoch(number, self.epoch)]
            case Release(id=number):
                return [Done(number)] if number else []
            case Grant():
                return [self._grant(peer, message)]
            case Publish():
                return [self._publish(peer, message)]
            case Touch() | Abort(id=0) | Bye():
                return []
        return [Failed(0, "protocol", f"not scripted: {message}")]

    def _reserve(self, peer: _Peer, message: Reserve) -> Reserved:
        outcomes, handles, offsets = bytearray(), [], []
        for key in keys_in(message.namespace, message.digests):
            if key in self.blocks:
                outcomes.append(ReserveOutcome.ALREADY_STORED)
            elif self.next_slot + message.block_bytes > POOL_BYTES:
                outcomes.append(ReserveOutcome.FULL)
            else:
                outcomes.append(ReserveOutcome.RESERVED)
                peer.slots[self.next_handle] = (key, self.next_slot, message.block_bytes)
                handles.append(self.next_handle)
                offsets.append(self.next_slot)
                self.next_handle += 1
                self.next_slot += -(-message.block_bytes // SLOT_BYTES) * SLOT_BYTES
        return Reserved(message.id, bytes(outcomes), handles, offsets)

    def _grant(self, peer: _Peer, message: Grant) -> Granted:
        slot_bytes = -(-message.block_bytes // SLOT_BYTES) * SLOT_BYTES
        number = min(message.number, (POOL_BYTES - self.next_slot) // slot_bytes)
        handles = [self.next_handle + i for i in range(number)]
        offsets = [self.next_slot + i * slot_bytes for i in range(number)]
        self.next_handle += number
        self.next_slot += number * slot_bytes
        peer.slots |= {handle: (b"", at, slot_bytes) for handle, at in zip(handles, offsets, strict=True)}
        return Granted(message.id, handles, offsets)

    def _publish(self, peer: _Peer, message: Publish) -> Published:
        keys = keys_in(message.namespace, message.digests)
        outcomes = bytearray()
        for key, handle, checksum in zip(keys, message.reservations, message.checksums, strict=True):
            if handle not in peer.slots:
                outcomes.append(PublishOutcome.VOID)
            elif key in self.blocks:
                outcomes.append(PublishOutcome.ALREADY_STORED)
            else:
                outcomes.append(PublishOutcome.STORED)
                self.blocks[key] = (peer.slots.pop(handle)[1], message.block_bytes, checksum)
        return Published(message.id, bytes(outcomes))

    def _stage(self, peer: _Peer, message: Stage) -> Said:
        outcomes, leases, offsets, checksums = bytearray(), [], [], []
        payload = b""
        for key in keys_in(message.namespace, message.digests):
            offset, nbytes, checksum = self.blocks.get(key, (0, 0, 0))
            outcomes.append(StageOutcome.OK if nbytes == message.block_bytes else StageOutcome.MISS)
            if outcomes[-1] == StageOutcome.OK:
                checksums.append(checksum)
                if message.inline:
                    payload += self.pool[offset : offset + nbytes]
                else:
                    leases.append(self.next_handle)
                    offsets.append(offset)
                    self.next_handle += 1
        staged = Staged(message.id, bytes(outcomes), leases, offsets, checksums)
        return (staged, payload) if payload else staged


def keys_in(namespace: bytes, digests: bytes) -> list[bytes]:
    return [namespace + digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


class DaemonAt(NamedTuple):
    daemon: Daemon
    unix_url: str
    tcp_url: str
    token_file: str


@contextmanager
def daemon_at(directory: Path, settings: dict[str, Any]) -> Iterator[DaemonAt]:
    """A daemon on a thread of this process, for this user and for whoever has the token."""
    token_file = directory / "token"
    token_file.write_text("a token that only tests know, and no other\n")
    token_file.chmod(0o600)
    places = {
        "daemon.socket": str(directory / "kvtier.sock"),
        "daemon.listen": "127.0.0.1:0",
        "daemon.http": "off",
        "daemon.credentials": f"default=uid:{os.getuid()},default=token:{token_file}",
    }
    with Daemon(load_settings(env={}, overrides=places | settings)) as daemon:
        assert daemon.tcp_address is not None
        tcp_url = f"kvtier+tcp://127.0.0.1:{daemon.tcp_address[1]}"
        yield DaemonAt(daemon, f"kvtier+unix://{directory}/kvtier.sock", tcp_url, str(token_file))
