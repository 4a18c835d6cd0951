"""Who is at the other end of a connection, and whether that process still lives."""

from __future__ import annotations

import logging
import os
import select
from dataclasses import dataclass
from typing import Literal

__all__ = ["Peer", "Process", "note_connect"]

audit = logging.getLogger("kvtier.audit")


class Process:
    """A process by its pidfd, which never means another one, whatever becomes of the number.

    Owns the descriptor. Never blocks. Any thread, one at a time.
    """

    __slots__ = ("_pidfd", "_poll", "pid")

    def __init__(self, pid: int, pidfd: int) -> None:
        """pidfd: of SO_PEERPIDFD or `os.pidfd_open`; this object's from now on."""
        self.pid = pid
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    @classmethod
    def open(cls, pid: int) -> Process | None:
        """The process that has this number now; None where there is none, or none that may be watched."""
        try:
            return cls(pid, os.pidfd_open(pid)) if pid > 0 else None
        except OSError:
            return None

    def is_dead(self) -> bool:
        """Whether all of its threads have ended: it writes nothing any more. Once true, always true."""
        return self._pidfd < 0 or bool(self._poll.poll(0))

    def close(self) -> None:
        """Let go of the descriptor. Idempotent; it counts as dead then."""
        if self._pidfd >= 0:
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)


@dataclass(frozen=True, slots=True)
class Peer:
    """What the kernel, or TLS, says of who connected: nothing here was said by the peer itself."""

    kind: Literal["unix", "tcp"]
    address: str
    """For people: 'unix' or 'host:port'."""
    uid: int | None = None
    """Of a Unix socket's peer."""
    pid: int = 0
    """Of a Unix socket's peer; 0 where it is not visible from here."""
    process: Process | None = None
    """Of a Unix socket's peer, where it can be watched. The session that the peer is given to closes it."""
    certificate_name: str | None = None
    """The common name of the client certificate that TLS has verified."""

    @property
    def can_map(self) -> bool:
        """Whether it may have the pool's memory: only who is known to be dead, once he is, gives it back. Whoever has a
        dead process's connection is another."""
        return self.kind == "unix" and self.process is not None and not self.process.is_dead()

    @property
    def holder(self) -> str:
        """Who is charged for what the connection holds: the process, or the other machine."""
        if self.kind == "unix":
            return f"pid {self.pid}" if self.pid else f"uid {self.uid}"
        return f"host {self.address.rpartition(':')[0]}"


def note_connect(peer: Peer, tenant: str, outcome: str) -> None:
    """One line of the audit log: who connected, as what, and what came of it."""
    audit.info(
        "connect %s: %s",
        peer.address,
        outcome,
        extra={
            "peer": peer.kind,
            "address": peer.address,
            "uid": peer.uid,
            "pid": peer.pid,
            "certificate": peer.certificate_name,
            "tenant": tenant,
            "outcome": outcome,
        },
    )
