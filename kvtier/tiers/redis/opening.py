"""How a connection is made: redis-py finds the host, connects and does TLS; then its socket is ours."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtier.clock import Clock
from kvtier.config.settings import RedisSettings
from kvtier.errors import ConfigError
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.channel import Channel, DeadlineError, LostError, PolledChannel
from kvtier.tiers.redis.resp import ErrorReply, encode

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["DeniedError", "Opener"]

MIN_TIMEOUT_S = 0.001


class DeniedError(LostError):
    """The server did not take the credentials; `reply` is its answer."""

    def __init__(self, address: Address, reply: ErrorReply) -> None:
        super().__init__(f"{address} refused to authenticate: {reply.code}")  # its text may repeat what was sent
        self.reply = reply
        self.kind = reply.code if reply.code in ("WRONGPASS", "NOAUTH", "NOPERM", "LOADING") else "denied"


class Opener:
    """Makes authenticated connections as the settings say. Any thread; keeps none of them.

    The one place that knows redis-py, and the one that knows the password, which is read from its file at each
    connect and never kept.
    """

    def __init__(self, settings: RedisSettings, clock: Clock) -> None:
        """Raises ConfigError where redis-py is missing, or a file of the settings cannot be used."""
        self._clock = clock
        self._username = settings.username
        self._password = settings.password
        self._password_file = settings.password_file
        self._has_tls = any(urlsplit(url).scheme == "rediss" for url in settings.url)
        self._tls = _tls_arguments(settings) if self._has_tls else {}
        self._classes = _connection_classes()
        self._read_password()

    def open(self, address: Address, deadline: float, *, authenticate: bool = True) -> Channel:
        """Raises a ChannelError for what went wrong, also where the password cannot be read any more."""
        sock = self._connect(address, deadline)
        try:
            has_own_timeouts = isinstance(sock, ssl.SSLSocket) or sock.family == socket.AF_UNIX
            channel = (PolledChannel if has_own_timeouts else Channel)(sock, address, self._clock)
        except OSError as error:
            sock.close()
            raise LostError(f"{address}: {error.strerror}") from error
        try:
            channel.deadline = deadline
            if authenticate:
                self.authenticate(channel)
        except BaseException:
            channel.close()
            raise
        return channel

    def authenticate(self, channel: Channel) -> None:
        """Say who we are, where anything is set. Raises DeniedError."""
        try:
            password = self._read_password()
        except ConfigError as error:
            raise LostError(str(error)) from error
        if not (password or self._username):
            return
        user = [self._username] if self._username else []
        channel.send([encode("AUTH", *user, password)], 1)
        reply = channel.read_reply()
        if isinstance(reply, ErrorReply):
            raise DeniedError(channel.address, reply)

    def _connect(self, address: Address, deadline: float) -> socket.socket:
        left = max(deadline - self._clock.now(), MIN_TIMEOUT_S)
        # No retries, no health checks, no commands of its own: what is said on the connection is for the caller.
        arguments: dict[str, Any] = {
            "socket_timeout": left,
            "socket_connect_timeout": left,
            "redis_connect_func": _say_nothing,
            "protocol": 2,
        }
        connection: AbstractConnection
        if address.path:
            connection = self._classes["unix"](path=address.path, **arguments)
        else:
            kind = "tls" if self._has_tls else "tcp"
            connection = self._classes[kind](host=address.host, port=address.port, **self._tls, **arguments)
        from redis.exceptions import RedisError, TimeoutError  # noqa: A004 - by its own name, in this one place

        try:
            connection.connect()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise DeadlineError(f"{address} could not be reached in time") from error
        except (RedisError, OSError, ValueError) as error:  # a host name that cannot be encoded is a ValueError
            cause = error.__context__  # redis-py's own text names the address once more
            reason = cause.strerror if isinstance(cause, OSError) else None
            raise LostError(f"{address}: {reason or error}") from error
        return _take_socket(connection)

    def _read_password(self) -> str:
        if not self._password_file:
            return self._password.get_secret_value()
        try:
            return Path(self._password_file).read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"redis.password_file: {self._password_file} cannot be read: {reason}") from None


def _say_nothing(connection: object) -> None:
    del connection


def _connection_classes() -> Mapping[str, Any]:
    try:
        from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
    except ImportError as error:
        raise ConfigError("redis.url is set, but redis-py is not installed: pip install 'kvtier[redis]'") from error
    return {"tcp": Connection, "tls": SSLConnection, "unix": UnixDomainSocketConnection}


def _take_socket(connection: AbstractConnection) -> socket.socket:
    """Its socket, which it forgets, lest it close that with itself."""
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket):
        with contextlib.suppress(Exception):
            connection.disconnect()  # type: ignore[no-untyped-call]
        from redis import __version__ as version

        raise ConfigError(
            f"this kvtier cannot use redis-py {version}: a connection of it has no socket where one is expected; "
            "pip install 'kvtier[redis]' with another version of redis"
        )
    connection._sock = None
    return sock


def _tls_arguments(settings: RedisSettings) -> dict[str, Any]:
    """Checked by loading the files once, as every connection will."""
    context = ssl.create_default_context()
    arguments: dict[str, Any] = {}
    for name, path in (("tls_ca_file", settings.tls_ca_file), ("tls_cert_file", settings.tls_cert_file)):
        if not path:
            continue
        try:
            if name == "tls_ca_file":
                context.load_verify_locations(cafile=path)
                arguments["ssl_ca_certs"] = path
            else:
                context.load_cert_chain(path, settings.tls_key_file, password="")
                arguments |= {"ssl_certfile": path, "ssl_keyfile": settings.tls_key_file}
        except (OSError, ValueError) as error:
            key = f" with redis.tls_key_file = {settings.tls_key_file}" if name == "tls_cert_file" else ""
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ConfigError(f"redis.{name} = {path}{key} cannot be used: {reason}") from error
    return arguments
