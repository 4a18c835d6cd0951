"""Which error reply means what, and what to say about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtier.tiers.redis.address import MAX_PORT, Address
from kvtier.tiers.redis.resp import ErrorReply

__all__ = ["COMMANDS", "Meaning", "Redirect", "hint", "meaning", "redirect"]

COMMANDS = (
    "+get +set +exists +unlink +touch +pexpire +incrby +scan +ping +info, with a cluster also +asking +cluster|slots, "
    "on the keys of redis.prefix"
)
"""The rights that kvtier needs, as an ACL rule names them."""


class Meaning(StrEnum):
    """What an error reply calls for."""

    MOVED = "moved"
    """Another node serves the slot, from now on."""
    ASK = "ask"
    """Another node has the key, this once."""
    FULL = "full"
    """No memory, and nothing that may be evicted."""
    READ_ONLY = "read_only"
    """A replica: the master is elsewhere."""
    NOT_READY = "not_ready"
    """The server is loading, busy or without its cluster; it comes back by itself."""
    DENIED = "denied"
    """Credentials or rights are wrong."""
    WRONG_TYPE = "wrong_type"
    """The key holds something that is no string: not ours."""
    FAILED = "failed"
    """Anything else."""


_MEANINGS = {
    "MOVED": Meaning.MOVED,
    "ASK": Meaning.ASK,
    "OOM": Meaning.FULL,
    "READONLY": Meaning.READ_ONLY,
    "LOADING": Meaning.NOT_READY,
    "BUSY": Meaning.NOT_READY,
    "TRYAGAIN": Meaning.NOT_READY,
    "CLUSTERDOWN": Meaning.NOT_READY,
    "MASTERDOWN": Meaning.NOT_READY,
    "NOREPLICAS": Meaning.NOT_READY,
    "NOAUTH": Meaning.DENIED,
    "WRONGPASS": Meaning.DENIED,
    "NOPERM": Meaning.DENIED,
    "WRONGTYPE": Meaning.WRONG_TYPE,
}

_HINTS = {
    "NOAUTH": "the server wants a password: set redis.password or redis.password_file, and redis.username where it has "
    "users",
    "WRONGPASS": "check redis.username and redis.password, or what redis.password_file holds",
    "NOPERM": f"redis.username lacks a right; kvtier needs {COMMANDS}",
    "OOM": "the server is at its maxmemory: raise that, or set its maxmemory-policy to allkeys-lru",
    "READONLY": "this is a replica: name the master in redis.url, or set redis.mode to 'sentinel'",
    "MISCONF": "the server refuses writes as it cannot save its data: see its log, or set its "
    "stop-writes-on-bgsave-error to no",
}

KNOWN_CODES = frozenset(_MEANINGS) | {"MISCONF"}
"""Codes that are counted by name; a server's other words are counted as one."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where else a key is: for good, or for one command after an ASKING."""

    slot: int
    address: Address
    asking: bool


def meaning(error: ErrorReply) -> Meaning:
    return _MEANINGS.get(error.code, Meaning.FAILED)


def hint(error: ErrorReply) -> str | None:
    """The way out, for errors that a person must mend."""
    if error.text.startswith(("ERR invalid password", "ERR AUTH", "ERR Client sent AUTH")):
        return _HINTS["WRONGPASS"]
    return _HINTS.get(error.code)


def redirect(error: ErrorReply, asked: Address) -> Redirect | None:
    """Where MOVED and ASK point to; None for a text that is neither. An empty host is that of the node asked."""
    words = error.text.split()
    if len(words) != 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    if not (words[1].isdigit() and port.isdigit() and len(words[1]) <= 5 and len(port) <= 5):
        return None
    slot, number = int(words[1]), int(port)
    if slot >= 1 << 14 or not 0 < number <= MAX_PORT:
        return None
    return Redirect(slot, Address(host.strip("[]") or asked.host, number), asking=words[0] == "ASK")
