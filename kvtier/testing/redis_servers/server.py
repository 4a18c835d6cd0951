"""One redis-server process: its configuration, its life, and a word with it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.clock import Clock, MonotonicClock
from kvtier.errors import KVTierError
from kvtier.testing.redis_servers.installed import require_redis_server
from kvtier.testing.redis_servers.process import ChildProcess, held_port, scratch_directory
from kvtier.testing.redis_servers.tls import TlsFiles
from kvtier.testing.redis_servers.waiting import wait_until
from kvtier.testing.redis_servers.wire import Argument, RedisConnection, RedisReplyError, Reply

__all__ = ["RedisServer", "ServerKind"]

HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0
START_TRIES = 5
SHOWN_LOG_CHARS = 1000
ADMIN = "kvtier-testing"


class ServerKind(StrEnum):
    """What a process is for."""

    ALONE = "alone"
    NODE = "node"
    """Of a cluster."""
    SENTINEL = "sentinel"


class RedisServer:
    """A server that is ready when its `with` block begins.

    maxmemory, policy: bytes for data, and what it does when they are used up; None: no bound.
    password: of the default user. users: ACL users by name, each with its rules, such as ">secret ~* +@all"; "default"
    may be among them. They are on unless a rule says off. `command` has a user of its own, whatever these say.
    tls: it then speaks nothing but TLS, and takes clients with a certificate of the same authority or with none;
    the option `tls-auth-clients yes` takes only the first. options: lines of configuration, which win over ours.
    clock: what deadlines are counted by.
    """

    host = HOST

    def __init__(
        self,
        *,
        maxmemory: int | None = None,
        policy: str = "noeviction",
        password: str = "",
        users: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        options: Sequence[str] = (),
        clock: Clock | None = None,
        kind: ServerKind = ServerKind.ALONE,
        admin_password: str | None = None,
    ) -> None:
        self.kind = kind
        self._maxmemory = maxmemory
        self._policy = policy
        self._password = password
        self._users = dict(users or {})
        self._tls = tls
        self._options = list(options)
        self._clock = clock or MonotonicClock()
        self._admin_password = admin_password or secrets.token_hex(16)
        self._stack = ExitStack()
        self._port = 0
        self._directory: Path | None = None
        self._process: ChildProcess | None = None

    # ---- where it is ---------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The same for as long as this object lives, and held while the server does not run."""
        return self._port

    @property
    def url(self) -> str:
        """Without credentials."""
        return f"{'redis' if self._tls is None else 'rediss'}://{HOST}:{self._port}"

    @property
    def directory(self) -> Path:
        """Its configuration (redis.conf), its output (server.log); gone at the end."""
        if self._directory is None:
            raise KVTierError("the server lives within a `with` block, which has not begun or has ended")
        return self._directory

    @property
    def socket_path(self) -> Path:
        """Its Unix socket."""
        return self.directory / "redis.sock"

    @property
    def admin_credentials(self) -> tuple[str, str]:
        """Of a user who may do everything."""
        return ADMIN, self._admin_password

    # ---- its life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        path = require_redis_server()
        for tries_left in reversed(range(START_TRIES)):
            try:
                self._open(path)
                break
            except BaseException as error:
                taken = self._directory is not None and "Address already in use" in self.log()
                self._close()
                if not (isinstance(error, KVTierError) and taken and tries_left):
                    raise
        return self

    def _open(self, path: str) -> None:
        self._port = self._stack.enter_context(held_port(with_bus=self.kind is ServerKind.NODE))
        self._directory = self._stack.enter_context(scratch_directory())
        config = self._directory / "redis.conf"
        config.write_text("".join(f"{line}\n" for line in self._config()))
        command = [path, str(config), *(["--sentinel"] if self.kind is ServerKind.SENTINEL else [])]
        self._process = ChildProcess(command, self._directory / "server.log", self._clock)
        self._stack.callback(self._process.close)
        self._process.start()
        self.wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._stack.close()
        self._process = self._directory = None

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it answers PING. KVTierError with the end of its output when it ended, or does not answer in time."""
        process = self._running()

        def answers() -> bool:
            if not process.is_running:
                raise KVTierError(f"redis-server ended: {self.log()[-SHOWN_LOG_CHARS:].strip()}")
            try:
                return self.command("PING", timeout_s=timeout_s) == b"PONG"
            except (OSError, RedisReplyError):  # not listening yet, or loading
                return False

        wait_until(f"the Redis server at {self.url} answers", answers, timeout_s, self._clock)

    @property
    def pid(self) -> int:
        """KVTierError while it does not run."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Also while it is stopped."""
        return self._process is not None and self._process.is_running

    def stop(self) -> None:
        """SIGSTOP: the system still takes connections for it, and nobody answers. Returns when it stands still."""
        self._running().stop()

    def cont(self) -> None:
        """SIGCONT."""
        self._running().cont()

    def kill(self) -> None:
        """SIGKILL: its connections are reset and new ones refused. Returns when it is gone; it may be so already."""
        self._running().kill()

    def restart(self) -> None:
        """Kill it if it runs, and start it again: ready, empty, on the same port, the same node of its cluster."""
        self.kill()
        self._running().start()
        self.wait_ready()

    def log(self) -> str:
        """What it printed so far."""
        return (self.directory / "server.log").read_text(errors="replace")

    # ---- a word with it ------------------------------------------------------------------------------------------

    def command(self, *args: Argument, timeout_s: float = 10.0) -> Reply:
        """One command on a connection of its own, as a user who may do everything."""
        with self.connect(timeout_s) as connection:
            return connection.command(*args)

    def connect(self, timeout_s: float = 10.0) -> RedisConnection:
        """To be closed by you."""
        context = None if self._tls is None else self._tls.client_context()
        return RedisConnection(HOST, self._port, credentials=self.admin_credentials, tls=context, timeout_s=timeout_s)

    def info(self, section: str) -> dict[str, str]:
        """The lines of INFO for that section, such as `memory`, by name."""
        reply = self.command("INFO", section)
        assert isinstance(reply, bytes)
        return dict(line.split(":", 1) for line in reply.decode().split("\r\n") if ":" in line)

    # ---- configuration -------------------------------------------------------------------------------------------

    def _running(self) -> ChildProcess:
        if self._process is None:
            raise KVTierError("the server lives within a `with` block, which has not begun or has ended")
        return self._process

    def _config(self) -> Iterator[str]:
        yield f"bind {HOST}"
        yield f"dir {_quoted(self.directory)}"
        yield from self._addresses()
        yield f"user {ADMIN} on >{self._admin_password} ~* &* +@all"
        yield from (f"user {name} on {rules}" for name, rules in self._users.items())
        if self._password:
            yield f"requirepass {_quoted(self._password)}"
        if self.kind is not ServerKind.SENTINEL:
            yield from ('save ""', "appendonly no")
            # By way of a file, which goes at once: without one a replica is sent nothing in its first second.
            yield from ("repl-diskless-sync no", "rdb-del-sync-files yes")
            # Replication goes on whatever the password is.
            yield from (f"masteruser {ADMIN}", f"masterauth {self._admin_password}")
            yield f"maxmemory-policy {self._policy}"
            if self._maxmemory is not None:
                yield f"maxmemory {self._maxmemory}"
        if self.kind is ServerKind.NODE:
            yield "cluster-enabled yes"
        yield from self._options

    def _addresses(self) -> Iterator[str]:
        if self._tls is None:
            yield f"port {self._port}"
        else:
            yield from ("port 0", f"tls-port {self._port}", f"tls-ca-cert-file {_quoted(self._tls.ca_file)}")
            yield f"tls-cert-file {_quoted(self._tls.server_cert_file)}"
            yield f"tls-key-file {_quoted(self._tls.server_key_file)}"
            yield from ("tls-auth-clients optional", "tls-replication yes")
            if self.kind is ServerKind.NODE:
                yield "tls-cluster yes"
        if self.kind is ServerKind.ALONE:
            yield f"unixsocket {_quoted(self.socket_path)}"


def _quoted(text: str | Path) -> str:
    """One word of a configuration line, whatever is in it."""
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
