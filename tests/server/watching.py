"""A daemon as whoever watches it sees it, with real stores and no clients; and a plain HTTP client."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.config import MemorySnapshot, load_settings
from kvtier.keys import Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.memory import PAGE_BYTES
from kvtier.reasons import DropReason
from kvtier.server.http import HttpServer
from kvtier.server.status import ClientCounts, DaemonSnapshot, QuarantineCounts, State, tenant_snapshot
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.tiers.reservation import Reservation

__all__ = ["BLOCK_BYTES", "FakeDaemon", "Response", "TurningClock", "ask", "open_store", "put", "receive", "request"]

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)
BLOCK_BYTES = LAYOUT.block_bytes
TIMEOUT_S = 20.0


class TurningClock:
    """A clock that goes on by a second each time that it is looked at, so that no answer is an old one."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now


class FakeDaemon:
    """Tenants' stores, and whatever state and counts a test gives it."""

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self.stores = stores
        self.state: State = "serving"
        self.reason = ""
        self.clients: dict[str, ClientCounts] = {}
        self.quarantine: dict[str, QuarantineCounts] = {}
        self.refused: dict[str, int] = {}
        self.max_clients = 1024
        self.uptime_s = 100.0
        self.num_snapshots = 0

    @property
    def is_ready(self) -> bool:
        return self.state == "serving"

    def snapshot(self) -> DaemonSnapshot:
        """One moment, a second after the one before."""
        self.num_snapshots += 1
        self.uptime_s += 1.0
        return DaemonSnapshot(
            state=self.state,
            reason=self.reason,
            version="1.2.3",
            uptime_s=self.uptime_s,
            max_clients=self.max_clients,
            refused=dict(self.refused),
            tenants=[
                tenant_snapshot(name, store, self.clients.get(name), self.quarantine.get(name))
                for name, store in self.stores.items()
            ],
        )


def open_store(directory: Path | None = None, **overrides: Any) -> Store:
    """A store of 16 blocks, with a disk tier under a directory if one is given. Keywords: settings, __ for the dot."""
    settings: dict[str, Any] = {"host.size": 16 * PAGE_BYTES, "host.slab": PAGE_BYTES}
    if directory is not None:
        settings |= {"disk.path": [str(directory)], "disk.size": "4MiB", "disk.min_free": 1}
    settings |= {name.replace("__", "."): value for name, value in overrides.items()}
    return Store(
        load_settings(env={}, overrides=settings),
        memory=MemorySnapshot(1 << 34, 1 << 34),
        touch=False,
        clock=FakeClock(),
        disk_executor=ManualExecutor() if directory is not None else None,
    )


def put(store: Store, blocks: int) -> None:
    """The first blocks of a prompt into host memory, unless they are there, and on to the disk if there is one."""
    space = store.open_space(Namespace("m", "r", LAYOUT, "g", Shard(0, 1)))
    digests = digest_tokens(range(4 * blocks), 4, Extras(None, None, ()))
    with space.owner("put") as owner:
        for parent, digest in zip([None, *digests], digests, strict=False):
            reservation = space.reserve(digest, parent, owner)
            if isinstance(reservation, Reservation):
                space.commit([reservation])
            else:
                assert reservation is DropReason.ALREADY_STORED
            for lower in store.lower:
                if isinstance(lower.executor, ManualExecutor):
                    lower.executor.run_all()


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def request(path: str = "/", *, method: str = "GET", host: str = "localhost", headers: Sequence[str] = ()) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode("latin-1")


def receive(connection: socket.socket) -> bytes:
    """All bytes until the end of the connection."""
    received = bytearray()
    while data := connection.recv(1 << 16):
        received += data
    return bytes(received)


def ask(server: HttpServer, what: bytes | None = None) -> Response:
    """Send bytes, or a request for the page, over a connection of their own, and read the response to its end."""
    with closing(socket.create_connection(server.address, TIMEOUT_S)) as connection:
        connection.sendall(request() if what is None else what)
        head, _, body = receive(connection).partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    version, status, _ = line.split(" ", 2)
    assert version == "HTTP/1.1"
    headers = dict(field.split(": ", 1) for field in fields)
    assert len(body) == int(headers["Content-Length"])
    return Response(int(status), headers, body)
