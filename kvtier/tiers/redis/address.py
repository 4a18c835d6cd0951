"""Where a server listens."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["DEFAULT_PORT", "Address", "parse_address"]

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
MAX_PORT = 65535


class Address(NamedTuple):
    """Host and port, or the path of a Unix socket. Ordered, so that calls which need several take them in one order."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(url: str, default_port: int = DEFAULT_PORT) -> Address:
    """Of a URL that the settings have checked."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Address("", 0, parts.path)
    return Address(parts.hostname or "", parts.port or default_port)
