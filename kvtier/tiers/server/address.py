"""Where a kvtier-server listens."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Address", "parse_address"]


class Address(NamedTuple):
    """Host and port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """Of a URL that the settings have checked: kvtier+unix:///path or kvtier+tcp://host:port."""
    parts = urlsplit(url)
    if parts.scheme == "kvtier+unix":
        return Address("", 0, parts.path)
    return Address(parts.hostname or "", parts.port or 0)
