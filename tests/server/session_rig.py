"""Sessions without a connection: clients that say messages and hear answers, over stores whose jobs run when told."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from kvtier.config import Credential, DaemonSettings, MemorySnapshot, load_settings
from kvtier.frame import payload_checksum
from kvtier.keys import DIGEST_BYTES, NAMESPACE_BYTES
from kvtier.memory import PAGE_BYTES
from kvtier.protocol import messages as m
from kvtier.server.hub import Hub
from kvtier.server.peers import Peer, Process
from kvtier.server.session import Session
from kvtier.server.tenants import Tenant, Tenants
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor

SPACE = b"n" * NAMESPACE_BYTES
OTHER_SPACE = b"o" * NAMESPACE_BYTES
TOKEN = "a token of more than sixteen characters"

Said = TypeVar("Said", bound=m.ServerMessage)


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def joined(numbers: Sequence[int]) -> bytes:
    return b"".join(map(digest, numbers))


def content(number: int, nbytes: int = PAGE_BYTES) -> bytes:
    return number.to_bytes(8, "big") * (nbytes // 8)


def hello(
    number: int = 1, versions: Sequence[int] = (1,), token: str = "", *, software: str = "test 1", maps: bool = True
) -> m.Hello:
    return m.Hello(id=number, versions=list(versions), software=software, token=token, wants_mapping=maps)


class FakeProcess(Process):
    """One that dies when told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self.closed = False

    def is_dead(self) -> bool:
        assert not self.closed, "asked after it was closed"
        return self.dead

    def close(self) -> None:
        self.closed = True


@dataclass
class Heard:
    message: m.ServerMessage
    payload: list[bytes]
    fd: int | None


class Client:
    """A client of one session. Over TCP, what it hears as payload is out only once it says so, unless `reads`."""

    def __init__(self, rig: Rig, peer: Peer, *, reads: bool = True) -> None:
        self.rig = rig
        self.peer = peer
        self.heard: deque[Heard] = deque()
        self.ends: list[str] = []
        self.reads = reads
        self.ids = count(1)
        self.unsent = 0
        self.session = Session(rig.hub, peer, self._hear, self.ends.append)

    def _hear(self, message: m.ServerMessage, payload: Sequence[memoryview], fd: int | None) -> None:
        self.heard.append(Heard(message, [bytes(view) for view in payload], fd))
        self.unsent += bool(payload)

    def say(self, message: m.ClientMessage, payload: bytes = b"") -> None:
        """With the payload in the slots that the session names."""
        targets = self.session.handle(message, len(payload))
        if targets is not None:
            assert sum(map(len, targets)) == len(payload)
            at = 0
            for target in targets:
                target[:] = payload[at : at + len(target)]
                at += len(target)
            self.session.payload_end()
        if self.reads:
            self.take_payloads()

    def take_payloads(self) -> None:
        while self.unsent:
            self.unsent -= 1
            self.session.payload_sent()

    def hear(self, kind: type[Said]) -> Said:
        """The next answer, which is of this kind."""
        assert self.heard, f"nothing was said; {kind.__name__} was expected"
        heard = self.heard.popleft().message
        assert isinstance(heard, kind), heard
        return heard

    def ask(self, message: m.ClientMessage, kind: type[Said], payload: bytes = b"") -> Said:
        self.say(message, payload)
        return self.hear(kind)

    def hello(self, *, wants_mapping: bool = True, token: str = "", versions: Sequence[int] = (1,)) -> m.Welcome:
        return self.ask(hello(next(self.ids), versions, token, maps=wants_mapping), m.Welcome)

    def lookup(self, numbers: Sequence[int], space: bytes = SPACE) -> list[int]:
        return list(self.ask(m.Lookup(next(self.ids), space, joined(numbers)), m.Held).tiers)

    def reserve(self, numbers: Sequence[int], nbytes: int = PAGE_BYTES, space: bytes = SPACE) -> m.Reserved:
        parents = b"".join(digest(number - 1) if number else bytes(DIGEST_BYTES) for number in numbers)
        message = m.Reserve(next(self.ids), space, nbytes, joined(numbers), parents)
        return self.ask(message, m.Reserved)

    def fill(self, offset: int, block: bytes) -> None:
        """Through the mapping, whether it may or not."""
        self.rig.tenant(self).store.pool.buffer[offset : offset + len(block)] = memoryview(block)

    def at(self, offset: int, nbytes: int = PAGE_BYTES) -> bytes:
        return self.rig.tenant(self).store.pool.buffer[offset : offset + nbytes].tobytes()

    def commit(self, reserved: m.Reserved, blocks: Sequence[bytes]) -> list[int]:
        """These blocks into the slots that were reserved, in this order."""
        payload = b""
        if self.session.is_mapped:
            for offset, block in zip(reserved.offsets, blocks, strict=True):
                self.fill(offset, block)
        else:
            payload = b"".join(blocks)
        sums = [payload_checksum(block) for block in blocks]
        message = m.Commit(next(self.ids), reserved.reservations, sums)
        return list(self.ask(message, m.Committed, payload).outcomes)

    def store(self, numbers: Sequence[int], nbytes: int = PAGE_BYTES, space: bytes = SPACE) -> list[int]:
        """CommitOutcomes of those that could be reserved."""
        reserved = self.reserve(numbers, nbytes, space)
        mine = [n for n, outcome in zip(numbers, reserved.outcomes, strict=True) if not outcome]
        return self.commit(reserved, [content(number, nbytes) for number in mine])

    def grant(self, number: int, nbytes: int = PAGE_BYTES) -> m.Granted:
        return self.ask(m.Grant(next(self.ids), nbytes, number), m.Granted)

    def publish_message(
        self, handles: Sequence[int], numbers: Sequence[int], nbytes: int = PAGE_BYTES, **changes: Any
    ) -> m.Publish:
        fields: dict[str, Any] = {
            "id": next(self.ids),
            "namespace": SPACE,
            "block_bytes": nbytes,
            "reservations": list(handles),
            "digests": joined(numbers),
            "parents": b"".join(digest(number - 1) if number else bytes(DIGEST_BYTES) for number in numbers),
            "checksums": [payload_checksum(content(number, nbytes)) for number in numbers],
        }
        return m.Publish(**(fields | changes))

    def publish(
        self, granted: m.Granted, numbers: Sequence[int], nbytes: int = PAGE_BYTES, **changes: Any
    ) -> list[int]:
        """Fill granted slots, and name them; the PublishOutcomes."""
        for offset, number in zip(granted.offsets, numbers, strict=True):
            self.fill(offset, content(number, nbytes))
        message = self.publish_message(granted.reservations, numbers, nbytes, **changes)
        return list(self.ask(message, m.Published).outcomes)

    def stage_message(self, numbers: Sequence[int], max_wait_ms: int = 1000, **changes: Any) -> m.Stage:
        fields: dict[str, Any] = {
            "id": next(self.ids),
            "namespace": SPACE,
            "block_bytes": PAGE_BYTES,
            "digests": joined(numbers),
            "parent": digest(numbers[0] - 1) if numbers[0] else b"",
            "max_wait_ms": max_wait_ms,
            "inline": not self.session.is_mapped,
        }
        return m.Stage(**(fields | changes))

    def stage(self, numbers: Sequence[int], max_wait_ms: int = 1000, **changes: Any) -> m.Staged:
        return self.ask(self.stage_message(numbers, max_wait_ms, **changes), m.Staged)

    def release(self, staged: m.Staged) -> None:
        self.say(m.Release(0, staged.leases))

    def die(self) -> None:
        """Its process is gone, and with it the connection."""
        assert isinstance(self.peer.process, FakeProcess)
        self.peer.process.dead = True
        self.session.end(clean=False)


@dataclass
class Rig:
    """Two tenants, "a" of uid 1000 and of the token, and "b" of uid 2000. Stores have a disk below where given one."""

    blocks: int = 16
    disk: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    daemon: dict[str, Any] = field(default_factory=dict)
    token_file: Path | None = None

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.wakes = 0
        self.pids = count(100)
        self.settings = DaemonSettings(**self.daemon)
        self.tenants = [self._tenant(name) for name in ("a", "b")]
        credentials = [Credential("a", "uid", "1000"), Credential("b", "uid", "2000")]
        if self.token_file is not None:
            self.token_file.write_text(TOKEN)
            credentials.append(Credential("a", "token", str(self.token_file)))
        self.hub = Hub(Tenants(self.tenants, credentials), self.settings, self.clock, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def _tenant(self, name: str) -> Tenant:
        overrides: dict[str, Any] = {"host.size": self.blocks * PAGE_BYTES, "host.slab": PAGE_BYTES}
        if self.disk is not None:
            overrides |= {"disk.path": [str(self.disk / name)], "disk.size": "4MiB", "disk.min_free": 1}
        store = Store(
            load_settings(env={}, overrides=overrides | self.overrides),
            memory=MemorySnapshot(1 << 34, 1 << 34),
            touch=False,
            keeps_checksums=self.settings.checksums,
            clock=self.clock,
            disk_executor=None if self.disk is None else ManualExecutor(),
        )
        return Tenant(name, store, store.memory.fd, ManualExecutor())

    def tenant(self, client: Client) -> Tenant:
        return next(each for each in self.tenants if each.name == client.session.tenant_name)

    @property
    def store(self) -> Store:
        """Of tenant "a"."""
        return self.tenants[0].store

    @property
    def jobs(self) -> ManualExecutor:
        """Of the disk of tenant "a"."""
        executor = self.store.lower[0].executor
        assert isinstance(executor, ManualExecutor)
        return executor

    def run_jobs(self) -> None:
        """Of every tier and tenant, until none is left; then the hub is woken."""
        executors = [tenant.executor for tenant in self.tenants]
        executors += [lower.executor for tenant in self.tenants for lower in tenant.store.lower]
        manual = [executor for executor in executors if isinstance(executor, ManualExecutor)]
        while any(executor.run_all() for executor in manual):
            pass
        self.hub.poll()

    def unix(self, uid: int = 1000, pid: int | None = None, *, greets: bool = True, **hello: Any) -> Client:
        pid = next(self.pids) if pid is None else pid
        client = Client(self, Peer("unix", "unix", uid, pid, FakeProcess(pid) if pid else None))
        if greets:
            client.hello(**hello)
        return client

    def tcp(self, *, token: str = TOKEN, host: str = "10.0.0.1", reads: bool = True, greets: bool = True) -> Client:
        client = Client(self, Peer("tcp", f"{host}:4000"), reads=reads)
        if greets:
            client.hello(token=token)
        return client

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.hub.poll()

    def evict_host(self) -> None:
        """Host memory of tenant "a" is empty, as after a restart."""
        host = self.store.host
        for space in host.namespaces():
            host.reset(space)

    def check_integrity(self) -> None:
        self.hub.check_integrity()
        for tenant in self.tenants:
            held = sum(tenant.held_bytes.values())
            own = [each for each in self.hub.sessions() if each.tenant_name == tenant.name]
            kept = self.hub.quarantine.counts(tenant.name).nbytes
            assert held == sum(each.held_bytes for each in own) + kept

    def verify_baseline(self) -> None:
        """Nothing is leased, kept or waited for."""
        assert not len(self.hub.quarantine)
        for tenant in self.tenants:
            assert not tenant.held_bytes
            usage = tenant.store.pool.usage()
            assert usage.num_leases == usage.num_slots_leased == 0
            assert tenant.store.host._index.num_reserved == 0

    def close(self) -> None:
        self.hub.close()
        self.hub.close()
        for tenant in self.tenants:
            tenant.store.close()
