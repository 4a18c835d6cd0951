"""The least client that can ask a Redis server something: one connection, one command at a time.

Tests look at a server with it by a path that shares nothing with the tier's client.
"""

from __future__ import annotations

import socket
import ssl
from types import TracebackType
from typing import Self, TypeAlias

from kvtier.errors import KVTierError

__all__ = ["Argument", "RedisConnection", "RedisReplyError", "Reply"]

Argument: TypeAlias = bytes | bytearray | memoryview | str | int | float
Reply: TypeAlias = "bytes | int | list[Reply] | None"


class RedisReplyError(KVTierError):
    """The server answered with an error; the text is the server's, such as 'MOVED 42 127.0.0.1:7001'."""


class RedisConnection:
    """One TCP connection. OSError when the server is gone or is silent for `timeout_s`; it is of no use afterwards.

    credentials: user and password.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        credentials: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self._read = None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            self._read = self._socket.makefile("rb")
            if credentials is not None:
                self.command("AUTH", *credentials)
        except BaseException:
            self.close()
            raise

    def command(self, *args: Argument) -> Reply:
        """What the server answers, status lines as bytes; RedisReplyError for an error, also for one in a list."""
        parts = [arg.encode() if isinstance(arg, str) else _plain(arg) for arg in args]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts))
        return self._reply()

    def _reply(self) -> Reply:
        line = self._exactly_one_line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise RedisReplyError(rest.decode(errors="replace"))
        if kind == b":":
            return int(rest)
        count = int(rest)
        if count < 0:
            return None
        if kind == b"*":
            return [self._reply() for _ in range(count)]
        assert kind == b"$", f"no reply of RESP2: {line!r}"
        assert self._read is not None
        data = self._read.read(count + 2)
        if len(data) < count + 2:
            raise ConnectionError("the server closed the connection within a reply")
        return data[:-2]

    def _exactly_one_line(self) -> bytes:
        assert self._read is not None
        line = self._read.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        return line[:-2]

    def close(self) -> None:
        if self._read is not None:
            self._read.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(arg: bytes | bytearray | memoryview | float) -> bytes:
    return bytes(arg) if isinstance(arg, (bytes, bytearray, memoryview)) else b"%b" % str(arg).encode()
