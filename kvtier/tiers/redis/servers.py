"""What the masters say of themselves: their mode, their role, their memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.calls import Caller
from kvtier.tiers.redis.channel import ChannelError
from kvtier.tiers.redis.exchange import commands
from kvtier.tiers.redis.resp import encode
from kvtier.tiers.redis.topology import Routes, WrongModeError

__all__ = ["ServerInfo", "Servers"]

SECTIONS = (b"server", b"memory", b"replication")
REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Of one server; what it did not tell is empty or 0."""

    mode: str
    role: str
    capacity_bytes: int
    used_bytes: int

    @classmethod
    def parse(cls, text: bytes) -> ServerInfo:
        fields: dict[str, str] = {}
        for line in text.decode("utf-8", "replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields[name] = value

        def number(name: str) -> int:
            digits = fields.get(name, "0")
            return int(digits) if digits.isdigit() and len(digits) < 20 else 0

        return cls(
            mode=fields.get("redis_mode", ""),
            role=fields.get("role", ""),
            capacity_bytes=number("maxmemory") or number("total_system_memory"),
            used_bytes=number("used_memory"),
        )


class Servers:
    """What INFO of each master said last. Any thread.

    Mutable state: `_infos`, replaced as a whole, and `_asked_at`, guarded by `_lock`.
    """

    def __init__(self, caller: Caller, clock: Clock) -> None:
        self._caller = caller
        self._clock = clock
        self._lock = threading.Lock()
        self._infos: Mapping[Address, ServerInfo] = {}
        self._asked_at: float | None = None

    @property
    def capacity_bytes(self) -> int:
        return sum(info.capacity_bytes for info in self._infos.values())

    @property
    def used_bytes(self) -> int:
        return sum(info.used_bytes for info in self._infos.values())

    def begin_refresh(self) -> bool:
        """Whether it is time to ask again; true for one of those who ask at once."""
        now = self._clock.now()
        with self._lock:
            if self._asked_at is not None and 0 <= now - self._asked_at < REFRESH_S:
                return False
            self._asked_at = now
            return True

    def refresh(self, routes: Routes, deadline: float) -> Mapping[Address, ChannelError]:
        """Ask every master; what befell those that did not answer, for which what they said before stays."""
        sections = [encode("INFO", section) for section in SECTIONS]
        exchanges = {address: commands(sections) for address in routes.masters}
        failures = self._caller.drive(exchanges, deadline)
        infos = {address: info for address, info in self._infos.items() if address in routes.masters}
        for address, exchange in exchanges.items():
            told = [reply for reply in exchange.answers if isinstance(reply, bytes)]
            if told:
                infos[address] = ServerInfo.parse(b"\r\n".join(told))
        with self._lock:
            self._infos = infos
            self._asked_at = self._clock.now()
        return failures

    def check_mode(self, wanted: str) -> None:
        """Raises WrongModeError where a server is another kind than redis.mode says. One that did not tell may be."""
        mode = {"cluster": "cluster"}.get(wanted, "standalone")
        for address, info in self._infos.items():
            if info.mode and info.mode != mode:
                raise WrongModeError(
                    f"redis.mode is {wanted!r}, but {address} runs as {info.mode}: set redis.mode to {info.mode!r}, "
                    f"or name another server in redis.url"
                )
