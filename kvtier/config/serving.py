"""Settings of kvtier-server, and of who uses one as a tier."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from kvtier.config.sizes import parse_quotas, parse_rate
from kvtier.config.subsystem import OptionalText, Subsystem
from kvtier.errors import ConfigError

__all__ = ["DEFAULT_TENANT", "Credential", "DaemonSettings", "ServerSettings", "split_address"]

DEFAULT_TENANT = "default"
"""The one tenant of a daemon that is told of none."""

_SERVER_URL_FORM = "write kvtier+unix:///path or kvtier+tcp://host:port, or 'none'"


def parse_server_url(value: object) -> str | None:
    """Where a kvtier-server listens; the word 'none' is no server."""
    if value == "none" or value is None:
        return None
    text = value if isinstance(value, str) else ""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(_SERVER_URL_FORM) from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("keep the token out of it: set server.token_file")
    is_unix = parts.scheme == "kvtier+unix" and not parts.netloc and len(parts.path) > 1
    is_tcp = parts.scheme == "kvtier+tcp" and bool(parts.hostname and port) and parts.path in ("", "/")
    if parts.query or parts.fragment or "\0" in text or not (is_unix or is_tcp):
        raise ValueError(_SERVER_URL_FORM)
    return text


def split_address(address: str) -> tuple[str, int]:
    """Host and port of 'host:port'; an IPv6 address stands in brackets, which are taken off."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]):(\d{1,5})", re.ASCII)
_ADDRESS_FORM = "write host:port, such as '127.0.0.1:9408' or '[::1]:9408', or 'off'"


def parse_address(value: object) -> str:
    """Where to listen, as 'host:port'; port 0 is any free one; or the word 'off'."""
    if value == "off":
        return "off"
    if isinstance(value, str) and (match := _ADDRESS.fullmatch(value)) and int(match[1]) < 1 << 16:
        return value
    raise ValueError(_ADDRESS_FORM)


_MAX_SOCKET_BYTES = 107
"""Of a Unix socket's path: what the kernel's address holds."""


def parse_socket(value: object) -> str:
    """The path of a Unix socket, or the word 'off'."""
    if isinstance(value, str) and value and "\0" not in value and not value.isspace():
        if len(os.fsencode(value)) > _MAX_SOCKET_BYTES:
            raise ValueError(f"a socket's path has at most {_MAX_SOCKET_BYTES} bytes; choose a shorter one")
        if value != "off" and not value.startswith("/"):
            raise ValueError("name the socket by its whole path, which begins with '/': engines start elsewhere")
        return value
    raise ValueError("write the path of a Unix socket, such as '/run/kvtier/kvtier.sock', or 'off'")


_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)


def parse_group(value: object) -> str | None:
    """A group's name or number; the word 'none' is none."""
    if value is None or value == "none":
        return None
    if isinstance(value, str) and _GROUP.fullmatch(value) and not (value.isdigit() and int(value) >= (1 << 32) - 1):
        return value
    raise ValueError("write a group's name, or its number in quotes, or 'none'")


def parse_admin_socket(value: object) -> str | None:
    """As `parse_socket`, or the word 'none' for the usual place."""
    return None if value is None or value == "none" else parse_socket(value)


def parse_tenants(value: object) -> Mapping[str, int]:
    """Bytes of host memory by tenant, each named; the word 'none' is one tenant, named 'default'."""
    tenants = parse_quotas(value)
    for name in tenants:
        if name in ("*", ".", ".."):
            raise ValueError(f"{name!r} is no name of a tenant here: each has a pool of its own, so name each")
    return tenants


class Credential(NamedTuple):
    """What shows that a connection is a tenant's."""

    tenant: str
    kind: Literal["uid", "token", "cert"]
    value: str
    """uid: a user's number. token: the path of a file with the token. cert: a certificate's common name."""


_CREDENTIALS_FORM = (
    "write what shows a tenant, such as 'a=uid:1000,a=token:/path/file,b=cert:name', a user's number, a file with a "
    "token or a certificate's common name each, or 'none'"
)
_CREDENTIAL = re.compile(r"([A-Za-z0-9_.-]{1,64})=(uid|token|cert):(.{1,255})")


def parse_credentials(value: object) -> str:
    """Text as in `_CREDENTIALS_FORM`, or a list of its parts; empty: none."""
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    text = value if isinstance(value, str) else "no text"
    parsed = split_credentials("" if text == "none" else text)
    if len({(each.kind, each.value) for each in parsed}) != len(parsed):
        raise ValueError("a credential is named twice: each shows one tenant")
    return ",".join(f"{each.tenant}={each.kind}:{each.value}" for each in parsed)


def split_credentials(text: str) -> tuple[Credential, ...]:
    """The credentials in text; raises ValueError for what is none."""
    credentials = []
    for part in text.split(",") if text else ():
        match = _CREDENTIAL.fullmatch(part.strip())
        if match is None or not match[3].isprintable():
            raise ValueError(_CREDENTIALS_FORM)
        tenant, kind, value = match.groups()
        if kind == "uid" and not (value.isascii() and value.isdigit() and int(value) < (1 << 32) - 1):
            raise ValueError(f"{value[:80]!r} is no user's number; `id -u NAME` tells it")
        if kind == "token" and not value.startswith("/"):
            raise ValueError(f"{value[:80]!r}: name the token's file by its whole path, which begins with /")
        credentials.append(Credential(tenant, kind, str(int(value)) if kind == "uid" else value))  # type: ignore[arg-type]  # one of the three, as matched
    return tuple(credentials)


Address = Annotated[str, BeforeValidator(parse_address)]


class ServerSettings(Subsystem):
    """A kvtier-server as a tier below host memory. Off unless it has a URL."""

    url: Annotated[str | None, BeforeValidator(parse_server_url)] = None
    """Where it listens; none: no such tier."""
    token_file: OptionalText = None
    """A file with the token that shows whose blocks these are, read at every connect."""
    tls_ca_file: OptionalText = None
    """Certificates that the server's must be signed by; none: the system's, where another file asks for TLS."""
    tls_cert_file: OptionalText = None
    """A certificate to show."""
    tls_key_file: OptionalText = None
    """Its key."""
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    """Connections, and reads and writes under way at once."""
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """After how many seconds without an answer the server counts as sick."""
    min_uses: Annotated[int, Field(ge=1, le=1000)] = 1
    """The use of a block at which it is written."""
    max_write_rate: Annotated[int | Literal["off"], BeforeValidator(parse_rate)] = "off"
    """Bytes a second that are written at most, or 'off'."""

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        if self.url is None:
            return self
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("server.tls_cert_file and server.tls_key_file go together: set both, or none")
        if (self.tls_ca_file or self.tls_cert_file) and self.url.startswith("kvtier+unix:"):
            raise ValueError("server.tls_ca_file and server.tls_cert_file need server.url to begin with kvtier+tcp://")
        return self


class DaemonSettings(Subsystem):
    """kvtier-server itself: where it listens, to whom, and how long it waits."""

    socket: Annotated[str, BeforeValidator(parse_socket)] = "/run/kvtier/kvtier.sock"
    """The Unix socket for engines of this machine, or 'off'."""
    socket_group: Annotated[str | None, BeforeValidator(parse_group)] = None
    """The group that may open the Unix socket too; none: its owner alone. Who is let in is said by `credentials`."""
    listen: Address = "off"
    """The address for engines of other machines, or 'off'."""
    http: Address = "127.0.0.1:9407"
    """The address of metrics, health and the status page, or 'off'."""
    admin_socket: Annotated[str | None, BeforeValidator(parse_admin_socket)] = None
    """The Unix socket for commands to the daemon; none: that of engines with .admin behind it; or 'off'."""
    tenants: Annotated[Mapping[str, int], BeforeValidator(parse_tenants)] = {}
    """Bytes of host memory by tenant; none: one tenant, 'default', with that of host.size."""
    credentials: Annotated[str, BeforeValidator(parse_credentials)] = ""
    """What shows that a connection is a tenant's; none: whoever runs as the daemon's own user is the one tenant."""
    tls_cert_file: OptionalText = None
    """The certificate that is shown at `listen`; none: no TLS."""
    tls_key_file: OptionalText = None
    """Its key."""
    tls_client_ca_file: OptionalText = None
    """Certificates that those of clients must be signed by; none: clients show none."""
    checksums: bool = True
    """Whether blocks are verified from memory to memory."""
    reservation_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds in which a client fills a slot; then another may store that block."""
    dma_grace_s: Annotated[float, Field(ge=0, le=600)] = 1.0
    """Seconds for which a dead client's slots are kept, for copies that its devices may still be at."""
    client_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds for a client's first message, for the rest of one that it began, and for reading what it asked for."""
    max_clients: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Connections at once."""
    credits: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Requests of one connection that may be without an answer at once."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds that stopping takes at most."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged at least."""
    log_format: Literal["text", "json"] = "text"
    """Whether a line of the log is for people, or a JSON object."""

    @property
    def bound_credentials(self) -> tuple[Credential, ...]:
        """`credentials`, taken apart."""
        return split_credentials(self.credentials)

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(self.tenants) or (DEFAULT_TENANT,)

    @property
    def admin_path(self) -> str:
        """The admin socket's path, or 'off'."""
        if self.admin_socket is not None:
            return self.admin_socket
        return "off" if self.socket == "off" else f"{self.socket}.admin"

    def check(self) -> None:
        """Raises ConfigError for what a daemon must not start with. Engines may share its file, and need none of it."""
        for wrong in (self._wrong_places(), self._wrong_credentials(), self._wrong_listen()):
            if wrong is not None:
                raise ConfigError(wrong)

    def _wrong_places(self) -> str | None:
        if self.socket == self.listen == "off":
            return "daemon.socket and daemon.listen are both 'off': nobody could reach the daemon; set one"
        if self.socket == "off" and self.socket_group is not None:
            return f"daemon.socket_group = {self.socket_group!r} needs daemon.socket: set it, or the group to 'none'"
        if self.socket != "off" and self.admin_path == self.socket:
            return f"daemon.admin_socket must be another path than daemon.socket = {self.socket!r}"
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            return "daemon.tls_cert_file and daemon.tls_key_file go together: set both, or none"
        if self.tls_client_ca_file and not self.tls_cert_file:
            return "daemon.tls_client_ca_file needs TLS: set daemon.tls_cert_file and daemon.tls_key_file too"
        return None

    def _wrong_credentials(self) -> str | None:
        names, credentials = self.tenant_names, self.bound_credentials
        for each in credentials:
            if each.tenant not in names:
                return (
                    f"daemon.credentials names the tenant {each.tenant!r}, which is none of daemon.tenants "
                    f"({', '.join(names)}); add it there, or correct the name"
                )
            if each.kind == "cert" and not self.tls_client_ca_file:
                return (
                    f"daemon.credentials: the certificate {each.value!r} cannot be checked; set "
                    "daemon.tls_client_ca_file, daemon.tls_cert_file and daemon.tls_key_file"
                )
        if self.tenants and set(self.tenants) != {DEFAULT_TENANT}:
            for name in set(names) - {each.tenant for each in credentials}:
                return f"daemon.tenants: nothing shows who is {name!r}; add '{name}=uid:1000' to daemon.credentials"
        return None

    def _wrong_listen(self) -> str | None:
        if self.listen == "off" or any(each.kind in ("token", "cert") for each in self.bound_credentials):
            return None
        return (
            f"daemon.listen = {self.listen!r} is open to whoever reaches it: add a token's file to daemon.credentials "
            "('default=token:/etc/kvtier/token'), or for mTLS set daemon.tls_cert_file, daemon.tls_key_file and "
            "daemon.tls_client_ca_file and name a certificate there ('default=cert:name')"
        )
