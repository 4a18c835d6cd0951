"""A daemon with named tenants' real stores and no loop, and an operator who says what he likes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from kvtier.config import MemorySnapshot, load_settings
from kvtier.executor import Executor
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.protocol import admin as a
from kvtier.protocol.wire import Receiver, pack
from kvtier.reasons import DropReason
from kvtier.server.status import DaemonSnapshot, State, tenant_snapshot
from kvtier.server.tenants import Tenant
from kvtier.store import Store
from kvtier.testing import ManualExecutor

BLOCK_BYTES = 16 << 10
TIMEOUT_S = 20.0
NAMESPACES = (b"a" * 16, b"b" * 16)


def digest_of(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(4, "little") * 8)


def content_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK_BYTES // 4)


def open_store(
    directory: Path | None = None, executor: Executor | None = None, *, keeps_checksums: bool = True, blocks: int = 64
) -> Store:
    settings: dict[str, Any] = {"host.size": blocks * BLOCK_BYTES, "host.slab": BLOCK_BYTES}
    if directory is not None:
        settings |= {"disk.path": [str(directory)], "disk.size": "16MiB", "disk.min_free": 1}
    return Store(
        load_settings(env={}, overrides=settings),
        memory=MemorySnapshot(1 << 34, 1 << 34),
        touch=False,
        keeps_checksums=keeps_checksums,
        disk_executor=executor,
    )


def put(store: Store, numbers: Sequence[int], namespace: bytes = NAMESPACES[0]) -> list[Key]:
    """Blocks into host memory, of content that tells them apart; their keys."""
    with store.pool.owner("put") as owner:
        for number in numbers:
            reserved = store.host.reserve(namespace, digest_of(number), None, BLOCK_BYTES, owner)
            assert not isinstance(reserved, DropReason), reserved
            reserved.lease.view[:BLOCK_BYTES] = content_of(number)
            assert store.host.commit([reserved]) == [True]
    return [make_key(namespace, digest_of(number)) for number in numbers]


def scribble(store: Store, number: int) -> None:
    """Change a byte of a block in host memory, as whoever maps it could."""
    with store.pool.owner("scribble") as owner:
        (held,) = store.host.lease_blocks([(NAMESPACES[0], digest_of(number))], owner)
        assert held is not None
        held.lease.view[7] ^= 1


class RigDaemon:
    """What `Administered` asks for."""

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self.tenants = [Tenant(name, store, store.memory.fd, ManualExecutor()) for name, store in stores.items()]
        self.state: State = "serving"
        self.reason = ""
        self.broken: BaseException | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "serving"

    def snapshot(self) -> DaemonSnapshot:
        return DaemonSnapshot(
            state=self.state,
            reason=self.reason,
            version="1.2.3",
            uptime_s=4.5,
            max_clients=7,
            tenants=[tenant_snapshot(tenant.name, tenant.store) for tenant in self.tenants],
        )

    def check_integrity(self) -> None:
        if self.broken is not None:
            raise self.broken


class Operator:
    """One connection to an admin socket, spoken step by step. Blocks TIMEOUT_S at most."""

    def __init__(self, path: str | Path, *, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(path))
        self.receiver: Receiver[a.AdminAnswer] = Receiver(a.AdminAnswer, max_payload_bytes=0)
        if greet:
            self.send(a.Greet(list(a.ADMIN_VERSIONS), "test"))
            assert isinstance(self.receive(), a.Greeted)

    def send(self, request: a.AdminRequest) -> None:
        self.sock.sendall(pack(request))

    def receive(self) -> a.AdminAnswer | None:
        """None: the connection is over."""
        while (event := self.receiver.next_event()) is None:
            try:
                nbytes = self.sock.recv_into(self.receiver.buffer())
            except ConnectionResetError:
                return None
            if not nbytes:
                return None
            self.receiver.received(nbytes)
        message: a.AdminAnswer = event.message  # type: ignore[union-attr]  # no answer has a payload
        return message

    def ask(self, request: a.AdminRequest) -> list[Any]:
        """Answers to the last, that one included; progress is left out."""
        self.send(request)
        answers: list[Any] = []
        while not answers or not isinstance(answers[-1], a.Ended | a.Failed):
            answer = self.receive()
            assert answer is not None, "the connection is over"
            if not isinstance(answer, a.Progress):
                answers.append(answer)
        return answers

    def failure(self) -> a.Failed:
        """What the connection ends with; then it is over."""
        answer = self.receive()
        assert isinstance(answer, a.Failed), answer
        assert self.receive() is None
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


@contextmanager
def daemon_of(stores: Mapping[str, Store]) -> Iterator[RigDaemon]:
    """Closes the stores, after a look whether all was given back."""
    try:
        yield RigDaemon(stores)
        for store in stores.values():
            assert store.pool.usage().num_leases == sum(len(lower.write_behind._queue) for lower in store.lower), (
                "leases are left"
            )
            store.check_integrity()
    finally:
        for store in stores.values():
            store.close()
