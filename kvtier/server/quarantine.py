"""Quarantine: slots that a client left behind, and that it may still write to or read while its process lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.errors import IntegrityError
from kvtier.pool import Owner
from kvtier.server.peers import Process
from kvtier.server.status import QuarantineCounts

__all__ = ["Quarantine"]


@dataclass(eq=False, slots=True)
class _Entry:
    tenant: str
    owner: Owner
    num_slots: int
    nbytes: int
    process: Process
    on_end: Callable[[], None]
    died_at: float | None = None


class Quarantine:
    """Keeps the leases of connections that ended without a word until their process is dead and its devices' copies
    must be over. Loop's thread, but for `counts`; never blocks.

    Mutable state: the entries.
    """

    def __init__(self, clock: Clock, grace_s: float) -> None:
        """grace_s: for copies that a dead process's devices may still be at."""
        self._clock = clock
        self._grace_s = grace_s
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def keep(
        self, tenant: str, owner: Owner, num_slots: int, nbytes: int, process: Process, on_end: Callable[[], None]
    ) -> None:
        """Take over an owner's leases, and the process. on_end: called once, when they have ended."""
        self._entries.append(_Entry(tenant, owner, num_slots, nbytes, process, on_end))

    def poll(self) -> int:
        """End what may be ended; how many entries are left. O(entries)."""
        now = self._clock.now()
        left: list[_Entry] = []
        for entry in self._entries:
            if entry.died_at is None and entry.process.is_dead():
                entry.died_at = now
            if entry.died_at is not None and now - entry.died_at >= self._grace_s:
                _end(entry)
            else:
                left.append(entry)
        self._entries = left
        return len(left)

    def counts(self, tenant: str) -> QuarantineCounts:
        """What is kept of a tenant's memory. Any thread."""
        own = [entry for entry in self._entries if entry.tenant == tenant]
        slots, nbytes = sum(entry.num_slots for entry in own), sum(entry.nbytes for entry in own)
        return QuarantineCounts(len(own), slots, nbytes)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every entry still holds what it took over."""
        for entry in self._entries:
            if entry.owner.num_leases < entry.num_slots or not entry.num_slots:
                raise IntegrityError(
                    f"quarantine: {entry.owner.name} left {entry.num_slots} slots, {entry.owner.num_leases} are held"
                )
        if len({entry.owner for entry in self._entries}) != len(self._entries):
            raise IntegrityError("quarantine: a connection was taken over twice")

    def close(self) -> None:
        """Let go of everything: the memory goes too."""
        entries, self._entries = self._entries, []
        for entry in entries:
            _end(entry)


def _end(entry: _Entry) -> None:
    entry.owner.close()
    entry.process.close()
    entry.on_end()
