"""Tenants: each with a store, a pool and a memory of its own, and what shows that a connection is one's."""

from __future__ import annotations

import hmac
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from kvtier.config.serving import Credential
from kvtier.errors import ConfigError
from kvtier.executor import Executor
from kvtier.protocol.fields import HOLDING_SHARE
from kvtier.server.peers import Peer
from kvtier.store import Store

__all__ = ["Tenant", "Tenants", "read_token"]

logger = logging.getLogger("kvtier.server")

MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 512


class Tenant:
    """One domain of trust: who may map its memory may write to all of it, and to nobody else's.

    Owns nothing: the daemon opens and closes the store and the executor.

    Mutable state: `held_bytes` and the counts, of the loop's thread.
    """

    def __init__(self, name: str, store: Store, mapping_fd: int, executor: Executor) -> None:
        """mapping_fd: the sealed memfd behind the store's pool. executor: a thread for what blocks: resets, removals.
        The store is opened with `keeps_checksums` as `daemon.checksums` says."""
        self.name = name
        self.store = store
        self.mapping_fd = mapping_fd
        self.mapping_bytes = store.pool.buffer.nbytes
        self.max_held_bytes = self.mapping_bytes // HOLDING_SHARE
        """Of slots, for one client, at once."""
        self.max_payload_bytes = max(self.max_held_bytes, store.settings.host.slab)
        """Of one message: any block fits."""
        self.executor = executor
        self.held_bytes: Counter[str] = Counter()
        """Bytes of slots that clients hold, by `Peer.holder`, quarantined ones included."""
        self.outcomes: Counter[str] = Counter()
        """Blocks that were to be staged, by what became of them."""
        self.num_waits = 0
        """Stages that had to wait for a lower tier."""
        self.wait_seconds = 0.0
        """What those of them that ended waited."""
        self.served_bytes = 0
        """Of blocks that stages leased or sent."""

    def room(self, holder: str, slot_bytes: int) -> int:
        """Slots that a client may hold more than it does: one, however large, may who has none."""
        held_bytes = self.held_bytes[holder]
        return max(0 if held_bytes else 1, (self.max_held_bytes - held_bytes) // slot_bytes)

    def hold(self, holder: str, nbytes: int) -> None:
        """A client holds so many bytes more, or less."""
        held = self.held_bytes[holder] + nbytes
        if held > 0:
            self.held_bytes[holder] = held
        else:
            del self.held_bytes[holder]


class Tenants:
    """All tenants, and the credentials that show them. Loop's thread.

    Mutable state: the credentials, replaced as a whole by `reload`.
    """

    def __init__(self, tenants: Sequence[Tenant], credentials: Sequence[Credential]) -> None:
        """Reads the files of tokens. Raises ConfigError for a tenant that is none, a file that cannot be read, or that
        holds no token, naming it."""
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self.reload(credentials)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def reload(self, credentials: Sequence[Credential]) -> None:
        """Use these from now on, for connections to come. Raises as the constructor; nothing changes then."""
        shown: dict[tuple[str, str], str] = {}
        tokens: list[tuple[bytes, str]] = []
        for each in credentials:
            if each.tenant not in self._tenants:
                raise ConfigError(
                    f"daemon.credentials names the tenant {each.tenant!r}; there are {', '.join(self._tenants)}: add "
                    f"it to daemon.tenants"
                )
            if each.kind == "token":
                tokens.append((_digest(read_token(each.value)), each.tenant))
            else:
                shown[each.kind, each.value] = each.tenant
        by_token: dict[bytes, str] = {}
        for digest, name in tokens:
            if by_token.setdefault(digest, name) != name:
                raise ConfigError(
                    f"daemon.credentials: the tenants {by_token[digest]!r} and {name!r} have the same token; write "
                    f"another into the file of one"
                )
        self._shown, self._tokens = shown, tokens

    def find(self, peer: Peer, token: str) -> Tenant | None:
        """Whose connection this is: of a Unix socket its user's, of TCP that of the certificate or of the token; None
        where nothing shows it, or two things two tenants. In the same time whichever token is wrong."""
        if peer.kind == "unix":
            name = self._shown.get(("uid", str(peer.uid)))
            return None if name is None else self._tenants[name]
        names: set[str | None] = set()
        if peer.certificate_name is not None and ("cert", peer.certificate_name) in self._shown:
            names.add(self._shown["cert", peer.certificate_name])
        if token:
            names.add(self._of_token(token))
        name = names.pop() if len(names) == 1 else None
        return None if name is None else self._tenants[name]

    def _of_token(self, token: str) -> str | None:
        digest, found = _digest(token.encode("utf-8", "surrogatepass")), None
        for expected, name in self._tokens:  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, expected):
                found = name
        return found


def _digest(token: bytes) -> bytes:
    """Of one length, so that comparing tells nothing of the token's."""
    return sha256(token).digest()


def read_token(path: str) -> bytes:
    """The token in a file. Raises ConfigError for a file that cannot be read, or holds none, naming it."""
    try:
        with Path(path).open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 2).strip()
            if os.fstat(file.fileno()).st_mode & 0o077:
                logger.warning("daemon.credentials: others may use the token's file %s: `chmod 600` it", path)
    except OSError as error:
        raise ConfigError(
            f"daemon.credentials: the token's file {path} cannot be read: {error.strerror}; name one that the daemon's "
            "user can read"
        ) from error
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"daemon.credentials: a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} characters, that in {path} has "
            f"{len(token) if len(token) <= MAX_TOKEN_BYTES else 'more'}; `openssl rand -hex 32` makes one"
        )
    return token
