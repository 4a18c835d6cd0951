"""How a connection is made: reached, with TLS where that is set, and welcomed."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

from kvtier.clock import Clock
from kvtier.config.serving import ServerSettings
from kvtier.errors import ConfigError
from kvtier.protocol.messages import VERSIONS, FailureCode, Hello, Welcome
from kvtier.tiers.server.address import Address
from kvtier.tiers.server.channel import Channel, SharedChannel, TlsChannel, Wake, limit
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.failures import DeadlineError, GarbledError, LostError, RefusedError, plain
from kvtier.tiers.server.mapping import MappingBusyError, MappingError, Mappings

__all__ = ["ForeignError", "Opener"]

MIN_TIMEOUT_S = 0.001
MAX_TOKEN_LETTERS = 512


class ForeignError(GarbledError):
    """Whatever listens there did not welcome us as a kvtier-server does."""


class Opener:
    """Makes connections as the settings say. Any thread; keeps none of them.

    The one place that knows the token, which is read from its file at each connect and never kept.
    """

    def __init__(
        self, settings: ServerSettings, address: Address, mappings: Mappings, wake: Wake, clock: Clock
    ) -> None:
        """Raises ConfigError for a file of the settings that cannot be used."""
        self._address = address
        self._mappings = mappings
        self._wake = wake
        self._clock = clock
        self._token_file = settings.token_file
        self._tls = _tls_context(settings)
        self._read_token()

    def open(self, deadline: float) -> Connection:
        """Raises a ServerError for what went wrong, also where the token cannot be read any more. The connection's
        mapping is taken, and is for whoever closes it to release."""
        try:
            token = self._read_token()
        except ConfigError as error:
            raise LostError(str(error)) from error
        channel = self._reach(deadline)
        try:
            channel.deadline = deadline
            connection = Connection(channel)
            try:
                self._greet(connection, token)
            except GarbledError as error:
                raise ForeignError(f"{error}; name a kvtier-server's address in server.url") from error
            except LostError as error:
                if self._address.is_unix or self._tls is not None:
                    raise
                raise LostError(f"{error} before it welcomed us; if it speaks TLS, set server.tls_ca_file") from error
            finally:
                for fd in connection.fds:
                    os.close(fd)
                connection.fds.clear()
        except BaseException:
            channel.close()
            raise
        return connection

    def _greet(self, connection: Connection, token: str) -> None:
        software = _software()
        wants_mapping = self._address.is_unix

        def hello(number: int) -> Hello:
            return Hello(number, list(VERSIONS), software, token, wants_mapping)

        try:
            welcome = connection.call(hello, Welcome)
        except RefusedError as error:
            if error.code == FailureCode.VERSION and software not in error.text:
                raise RefusedError(
                    self._address,
                    error.code,
                    f"{error.text}; this is {software}, which speaks {_versions()} of the protocol: have both of one "
                    "release",
                    is_final=True,
                ) from error
            raise
        if welcome.version not in VERSIONS:
            raise RefusedError(
                self._address,
                FailureCode.VERSION,
                f"{welcome.software} speaks version {welcome.version} of the protocol, and this is {software}, which "
                f"speaks {_versions()}: have both of one release",
                is_final=True,
            )
        connection.welcome = welcome
        if welcome.mapping_bytes:
            self._map(connection, welcome.mapping_bytes)
        elif connection.fds:
            raise connection.garbled("a descriptor, and no memory for it")
        connection.is_welcome = True

    def _map(self, connection: Connection, nbytes: int) -> None:
        if len(connection.fds) != 1:
            raise connection.garbled(f"{len(connection.fds)} descriptors of its memory, where one comes")
        try:
            connection.mapping = self._mappings.take(connection.fds[0], nbytes)
        except MappingBusyError as error:
            raise LostError(f"{self._address}: {error}") from error
        except MappingError as error:
            raise connection.garbled(str(error)) from error

    # ---- reaching it ---------------------------------------------------------------------------------------------

    def _reach(self, deadline: float) -> Channel:
        try:
            if self._address.is_unix:
                return SharedChannel(self._connect_unix(deadline), self._address, self._clock, self._wake)
            sock = self._connect_tcp(deadline)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is None:
                    return Channel(sock, self._address, self._clock)
                sock.settimeout(self._left(deadline))
                wrapped = self._tls.wrap_socket(sock, server_hostname=self._address.host)
                return TlsChannel(wrapped, self._address, self._clock)
            except BaseException:
                sock.close()
                raise
        except (TimeoutError, BlockingIOError) as error:
            raise DeadlineError(f"{self._address} could not be reached in time") from error
        except (OSError, ValueError) as error:  # a host name that cannot be encoded is a ValueError
            reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            raise LostError(f"{self._address}: {plain(reason)}") from error

    def _connect_unix(self, deadline: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            limit(sock, socket.SO_SNDTIMEO, self._left(deadline))  # a full queue of connects is waited for
            sock.connect(self._address.path)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connect_tcp(self, deadline: float) -> socket.socket:
        failure: OSError | None = None
        for family, kind, protocol, _, place in socket.getaddrinfo(
            self._address.host, self._address.port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._left(deadline))
                sock.connect(place)
            except OSError as error:
                sock.close()
                failure = error
                continue
            except BaseException:
                sock.close()
                raise
            return sock
        raise failure or OSError("its name has no address")

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock.now()
        if left <= 0:
            raise DeadlineError(f"{self._address} could not be reached in time")
        return max(left, MIN_TIMEOUT_S)

    def _read_token(self) -> str:
        if not self._token_file:
            return ""
        try:
            token = Path(self._token_file).read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"server.token_file: {self._token_file} cannot be read: {reason}; name a file that this user can read"
            ) from None
        if not 0 < len(token) <= MAX_TOKEN_LETTERS:
            raise ConfigError(
                f"server.token_file: {self._token_file} has {len(token)} letters, where a token has 1 to "
                f"{MAX_TOKEN_LETTERS}; write the server's token there"
            )
        return token


def _software() -> str:
    from kvtier import __version__

    return f"kvtier {__version__}"


def _versions() -> str:
    return f"version{'s' if len(VERSIONS) > 1 else ''} {', '.join(map(str, VERSIONS))}"


def _tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """None without TLS. Raises ConfigError."""
    if not (settings.tls_ca_file or settings.tls_cert_file):
        return None
    context = ssl.create_default_context()
    try:
        if settings.tls_ca_file:
            context = ssl.create_default_context(cafile=settings.tls_ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server.tls_ca_file = {settings.tls_ca_file} cannot be used: {_reason(error)}; name a file of "
            "certificates in PEM"
        ) from error
    try:
        if settings.tls_cert_file:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server.tls_cert_file = {settings.tls_cert_file} with server.tls_key_file = {settings.tls_key_file} "
            f"cannot be used: {_reason(error)}; name a certificate and its key in PEM"
        ) from error
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
