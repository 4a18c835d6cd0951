"""What the lower tiers of a rig stand on, and what can be harmed of it: files, Redis servers of whatever kind, a
kvtier-server."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from kvtier.config import DiskSettings, RedisSettings, ServerSettings
from kvtier.testing.redis_servers import RedisCluster, RedisConnection, RedisSentinel, RedisServer
from kvtier_connectors.bench.habits import Habits
from kvtier_connectors.bench.proxy import SickProxy
from kvtier_connectors.bench.rig import HOST_BYTES, FaultRig, disk_at
from kvtier_connectors.bench.server_rig import Server
from kvtier_connectors.bench.sick_files import SickFiles

__all__ = [
    "Ground",
    "RedisGround",
    "RedisKind",
    "ServerGround",
    "ServerKind",
    "alone",
    "behind_proxy",
    "clustered",
    "in_memory",
    "named_user",
    "over_tcp",
    "over_disk",
    "watched",
]

TIMEOUT_S = 0.5
USER, PASSWORD = "bench", "as-it-was"
# A script that runs for longer makes its server answer BUSY; the default is 5 s of silence.
OPTIONS = ("lua-time-limit 50",)


@dataclass(slots=True)
class RedisGround(Habits):
    """Redis as a tier finds it. servers: those with data. sentinel, cluster, proxy: where they are of that kind."""

    settings: RedisSettings
    servers: Sequence[RedisServer]
    sentinel: RedisSentinel | None = None
    cluster: RedisCluster | None = None
    proxy: SickProxy | None = None

    @property
    def server(self) -> RedisServer:
        """The only one, or the first."""
        return self.servers[0]

    def change_values(self, change: Callable[[RedisConnection, bytes, int], object]) -> int:
        """Do something to every block that the servers hold, given its key and length; how many these were."""
        changed = 0
        for server in self.servers:
            with server.connect() as connection:
                keys = connection.command("KEYS", f"{self.settings.prefix}:*")
                assert isinstance(keys, list)
                for key in keys:
                    assert isinstance(key, bytes)
                    if connection.command("TYPE", key) != b"string":
                        continue
                    length = connection.command("STRLEN", key)
                    if isinstance(length, int) and length > MIN_BLOCK_BYTES:
                        change(connection, key, length)
                        changed += 1
        return changed


MIN_BLOCK_BYTES = 4096  # longer than whatever else the tier keeps there

RedisKind = Callable[[], AbstractContextManager[RedisGround]]


def _settings(urls: Sequence[str], **more: object) -> RedisSettings:
    return RedisSettings(url=tuple(urls), **{"timeout_s": TIMEOUT_S, **more})  # type: ignore[arg-type]


@contextmanager
def alone() -> Iterator[RedisGround]:
    """One server."""
    with RedisServer(options=OPTIONS) as server:
        yield RedisGround(_settings([server.url]), [server])


@contextmanager
def named_user() -> Iterator[RedisGround]:
    """One server, at which the tier has a user with a password."""
    with RedisServer(users={USER: f">{PASSWORD} ~* &* +@all"}) as server:
        secret = SecretStr(PASSWORD)
        yield RedisGround(_settings([server.url], username=USER, password=secret), [server])


@contextmanager
def behind_proxy() -> Iterator[RedisGround]:
    """One server, behind a proxy that is well as yet."""
    with RedisServer(options=OPTIONS) as server, SickProxy(server.port) as proxy:
        host = urlsplit(server.url).hostname
        yield RedisGround(_settings([f"redis://{host}:{proxy.port}"]), [server], proxy=proxy)


@contextmanager
def watched() -> Iterator[RedisGround]:
    """A master and a replica that Sentinel watches."""
    with RedisSentinel() as sentinel:
        settings = _settings(sentinel.urls, mode="sentinel", service=sentinel.service)
        yield RedisGround(settings, sentinel.servers, sentinel=sentinel)


def clustered(replicas: int = 0) -> RedisKind:
    """A cluster of three masters, each with so many replicas."""

    @contextmanager
    def ground() -> Iterator[RedisGround]:
        with RedisCluster(3, replicas) as cluster:
            yield RedisGround(_settings(cluster.urls, mode="cluster"), cluster.nodes, cluster=cluster)

    return ground


@dataclass(slots=True)
class ServerGround(Habits):
    """A kvtier-server as a tier finds it."""

    settings: ServerSettings
    server: Server


ServerKind = Callable[[], AbstractContextManager[ServerGround]]
SERVER_POOL_BYTES = 256 << 20
SERVER_DISK_BYTES = 512 << 20


@contextmanager
def in_memory() -> Iterator[ServerGround]:
    """A kvtier-server that forgets all when it ends, reached by its Unix socket."""
    with Server(SERVER_POOL_BYTES) as server:
        yield ServerGround(ServerSettings(url=server.unix_url, timeout_s=TIMEOUT_S), server)


@contextmanager
def over_disk() -> Iterator[ServerGround]:
    """One with a disk below its memory."""
    with Server(SERVER_POOL_BYTES, disk_bytes=SERVER_DISK_BYTES) as server:
        yield ServerGround(ServerSettings(url=server.unix_url, timeout_s=TIMEOUT_S), server)


@contextmanager
def over_tcp() -> Iterator[ServerGround]:
    """One that forgets, and whose clients get its blocks through a TCP connection."""
    with Server(SERVER_POOL_BYTES) as server:
        settings = ServerSettings(url=server.tcp_url, token_file=str(server.token_file), timeout_s=TIMEOUT_S)
        yield ServerGround(settings, server)


class Ground:
    """What one rig stands on: a directory for a disk tier, Redis, both, or a kvtier-server. Opens rigs there, one
    after the other.

    Mutable state: the servers and files themselves, as faults leave them.
    """

    def __init__(
        self, directory: Path | None, redis: RedisGround | None = None, server: ServerGround | None = None
    ) -> None:
        """directory: None for no disk tier."""
        self.directory = directory
        self.files = SickFiles()
        self._redis = redis
        self._server = server
        self.random = random.Random(0)

    @property
    def redis(self) -> RedisGround:
        assert self._redis is not None, "a fault of Redis needs one"
        return self._redis

    @property
    def server(self) -> ServerGround:
        assert self._server is not None, "a fault of a kvtier-server needs one"
        return self._server

    @property
    def disk_directory(self) -> Path:
        assert self.directory is not None, "a fault of the disk needs one"
        return self.directory

    def disk_settings(self, timeout_s: float) -> DiskSettings | None:
        return None if self.directory is None else disk_at(self.directory, timeout_s=timeout_s)

    def open(self, *, timeout_s: float = TIMEOUT_S, max_wait_s: float = 0.5, host_bytes: int = HOST_BYTES) -> FaultRig:
        """timeout_s: of each tier."""
        redis = None if self._redis is None else self._redis.settings.model_copy(update={"timeout_s": timeout_s})
        server = None if self._server is None else self._server.settings.model_copy(update={"timeout_s": timeout_s})
        disk = self.disk_settings(timeout_s)
        return FaultRig(disk, redis, server, self.files, host_bytes=host_bytes, max_wait_s=max_wait_s)

    def heal(self) -> None:
        """Let go of whatever a fault holds, so that a rig can be closed."""
        self.files.heal()
        if self._redis is not None:
            self.heal_redis()
        if self._server is not None:
            self._server.rest()
            self._server.server.cont()

    def heal_redis(self) -> None:
        self.redis.rest()
        for server in self.redis.servers:
            if server.is_running:
                server.cont()
