"""A master with replicas that Sentinel watches, and what it takes to make it fail over."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from types import TracebackType
from typing import Self

from kvtier.clock import Clock, MonotonicClock
from kvtier.errors import KVTierError
from kvtier.testing.redis_servers.server import RedisServer, ServerKind
from kvtier.testing.redis_servers.tls import TlsFiles
from kvtier.testing.redis_servers.waiting import wait_until
from kvtier.testing.redis_servers.wire import RedisReplyError

__all__ = ["FailOver", "RedisSentinel"]

FORM_TIMEOUT_S = 30.0
# How often a sentinel does things, instead of every second to ten. Redis before 7.0 has no such command, and takes
# longer. Not the pings: a replica whose last word is five of them old is not made master, and those of a dead master
# are asked every second.
PERIODS_MS = {
    "info-period": 1000,
    "ask-period": 100,
    # After four of these a sentinel undoes a promotion that it has not heard of; the one that promotes looks after 1 s.
    "publish-period": 500,
    "min-link-reconnect-period": 1000,
}


class FailOver(StrEnum):
    """What befalls the master."""

    KILL = "kill"
    """SIGKILL: its connections are reset."""
    STOP = "stop"
    """SIGSTOP: it is silent. After `cont` it believes for a moment that it is still the master."""
    COMMAND = "command"
    """Nothing: a sentinel is told to make another one master, as for maintenance."""


class RedisSentinel:
    """All of them up and knowing each other when the `with` block begins.

    num_sentinels: of which more than half must agree. down_after_ms, failover_timeout_ms: as Sentinel's own settings
    of these names. password: also the sentinels'. The other arguments are those of each `RedisServer`.
    """

    def __init__(
        self,
        num_replicas: int = 1,
        num_sentinels: int = 1,
        *,
        service: str = "mymaster",
        down_after_ms: int = 500,
        failover_timeout_ms: int = 2000,
        maxmemory: int | None = None,
        policy: str = "noeviction",
        password: str = "",
        users: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        options: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self.service = service
        self._num_replicas = num_replicas
        self._num_sentinels = num_sentinels
        self._down_after_ms = down_after_ms
        self._failover_timeout_ms = failover_timeout_ms
        self._maxmemory = maxmemory
        self._policy = policy
        self._password = password
        self._users = users
        self._tls = tls
        self._options = list(options)
        self._clock = clock or MonotonicClock()
        self._admin_password = secrets.token_hex(16)
        self._servers: list[RedisServer] = []
        self._sentinels: list[RedisServer] = []
        self._stack = ExitStack()

    @property
    def urls(self) -> list[str]:
        """Of the sentinels."""
        return [sentinel.url for sentinel in self._sentinels]

    @property
    def sentinels(self) -> list[RedisServer]:
        return list(self._sentinels)

    @property
    def servers(self) -> list[RedisServer]:
        """Those with data: the one that began as master, then the others."""
        return list(self._servers)

    @property
    def master(self) -> RedisServer:
        """The server that the first sentinel which runs names as master."""
        for sentinel in self._sentinels:
            if sentinel.is_running:
                return self._named_by(sentinel)
        raise KVTierError("no sentinel runs")

    # ---- forming -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            master = stack.enter_context(self._server(self._options))
            # A sentinel asks servers of its own accord only every 10 s: what it finds at first should be all.
            following = [*self._options, f"replicaof {master.host} {master.port}"]
            self._servers = [master]
            self._servers += [stack.enter_context(self._server(following)) for _ in range(self._num_replicas)]
            wait_until("replicas follow the master", self._all_follow, FORM_TIMEOUT_S, self._clock)
            self._sentinels = [stack.enter_context(self._sentinel(master)) for _ in range(self._num_sentinels)]
            for sentinel in self._sentinels:
                with suppress(RedisReplyError):
                    sentinel.command("SENTINEL", "DEBUG", *(word for pair in PERIODS_MS.items() for word in pair))
            wait_until("sentinels know each other", self._all_known, FORM_TIMEOUT_S, self._clock)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _server(self, options: Sequence[str]) -> RedisServer:
        return RedisServer(
            maxmemory=self._maxmemory,
            policy=self._policy,
            password=self._password,
            users=self._users,
            tls=self._tls,
            options=options,
            clock=self._clock,
            admin_password=self._admin_password,
        )

    def _sentinel(self, master: RedisServer) -> RedisServer:
        user, secret = master.admin_credentials
        watched = [
            f"sentinel monitor {self.service} {master.host} {master.port} {self._num_sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {self.service} {self._down_after_ms}",
            f"sentinel failover-timeout {self.service} {self._failover_timeout_ms}",
            f"sentinel auth-user {self.service} {user}",
            f"sentinel auth-pass {self.service} {secret}",
            f"sentinel sentinel-user {user}",
            f"sentinel sentinel-pass {secret}",
        ]
        return RedisServer(
            password=self._password,
            users=self._users,
            tls=self._tls,
            options=watched,
            clock=self._clock,
            kind=ServerKind.SENTINEL,
            admin_password=self._admin_password,
        )

    def _all_follow(self) -> bool:
        """By what the master says: it keeps writes back from a replica until that is online."""
        master = self._servers[0].info("replication")
        return all("state=online" in master.get(f"slave{i}", "") for i in range(self._num_replicas))

    def _all_known(self) -> bool:
        return all(map(self._knows_all, self._sentinels))

    def _knows_all(self, sentinel: RedisServer) -> bool:
        """Whether it could make any replica the master now, and has the others to agree with."""
        (master,) = self._told_by(sentinel, "MASTERS")
        replicas = self._told_by(sentinel, "REPLICAS", self.service)
        others = self._told_by(sentinel, "SENTINELS", self.service)
        return (
            master["flags"] == "master"
            and [(told["flags"], told.get("master-link-status")) for told in replicas]
            == [("slave", "ok")] * self._num_replicas
            and [told["flags"] for told in others] == ["sentinel"] * (self._num_sentinels - 1)
        )

    # ---- failing over --------------------------------------------------------------------------------------------

    def fail_over(self, how: FailOver = FailOver.KILL, timeout_s: float = 30.0) -> RedisServer:
        """Make another server the master, and return it once every sentinel that runs names it and it takes writes.

        The old master stays as `how` left it; `restart` or `cont` makes it a replica.
        """
        old, how = self.master, FailOver(how)
        if how is FailOver.KILL:
            old.kill()
        elif how is FailOver.STOP:
            old.stop()
        else:
            running = next(sentinel for sentinel in self._sentinels if sentinel.is_running)
            running.command("SENTINEL", "FAILOVER", self.service)

        def new_master() -> RedisServer | None:
            named = {self._named_by(sentinel) for sentinel in self._sentinels if sentinel.is_running}
            if len(named) != 1 or old in named:
                return None
            (new,) = named
            return new if new.info("replication")["role"] == "master" else None

        return wait_until("another server becomes the master", new_master, timeout_s, self._clock)

    def _named_by(self, sentinel: RedisServer) -> RedisServer:
        reply = sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        assert isinstance(reply, list)
        _, port = reply
        assert isinstance(port, bytes)
        return next(server for server in self._servers if server.port == int(port))

    def _told_by(self, sentinel: RedisServer, *question: str) -> list[dict[str, str]]:
        reply = sentinel.command("SENTINEL", *question)
        assert isinstance(reply, list)
        rows = [[word.decode() for word in row if isinstance(word, bytes)] for row in reply if isinstance(row, list)]
        return [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
