"""The hub: what the connections of a daemon share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from kvtier.clock import Clock
from kvtier.config import DaemonSettings
from kvtier.server.quarantine import Quarantine
from kvtier.server.status import ClientCounts
from kvtier.server.tenants import Tenants

if TYPE_CHECKING:
    from kvtier.server.session import Session

__all__ = ["POLL_S", "Hub"]

POLL_S = 0.05
"""How often `Hub.poll` is called at least."""


class Hub:
    """Owns the sessions, the quarantine and the counts. Loop's thread, but for `wake` and what says so; nothing blocks.

    settings: as at start; a reload replaces them, for sessions to come.

    Mutable state: all of it.
    """

    def __init__(self, tenants: Tenants, settings: DaemonSettings, clock: Clock, wake: Callable[[], None]) -> None:
        """wake: called by any thread when `poll` has something to do: it must see to it that the loop calls that soon,
        and return at once."""
        self.tenants = tenants
        self.settings = settings
        self.clock = clock
        self.wake = wake
        self.quarantine = Quarantine(clock, settings.dma_grace_s)
        self._numbers = count(1)
        self._sessions: dict[Session, None] = {}  # in the order in which they came
        self._waiting: dict[Session, None] = {}
        self._refused: Counter[str] = Counter()
        self.num_void = 0
        """Reservations whose time was over."""
        self._unsubscribe = [tenant.store.stager.subscribe(wake) for tenant in tenants]

    @property
    def num_sessions(self) -> int:
        """Connections now, those that said nothing yet included."""
        return len(self._sessions)

    @property
    def has_requests(self) -> bool:
        """Whether some request has no answer yet: what a daemon that drains waits for."""
        return any(session.num_requests for session in self._sessions)

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections that were ended, by `FailureCode`. Any thread."""
        return dict(self._refused)

    def poll(self) -> None:
        """Answer what can be answered by now, void what is overdue, let go of what is quarantined no longer. To be
        called when `wake` was, and every POLL_S."""
        for session in list(self._waiting):
            session.poll()
            if not session.must_poll:
                self._waiting.pop(session, None)
        self.quarantine.poll()

    def client_counts(self, tenant: str) -> ClientCounts:
        """A tenant's connections, all together. Any thread: then it may be of two moments, one right after the
        other."""
        totals, now = self.tenants[tenant], self.clock.now()
        own = [session for session in self.sessions() if session.tenant_name == tenant]
        begun = [at for session in own for at in session.waits()]
        return ClientCounts(
            unix=sum(session.peer.kind == "unix" for session in own),
            tcp=sum(session.peer.kind == "tcp" for session in own),
            leases=sum(session.num_leases for session in own),
            reservations=sum(session.num_reservations for session in own),
            requests=sum(session.num_requests for session in own),
            waiting=len(begun),
            longest_wait_s=max((now - at for at in begun), default=0.0),
            waits=totals.num_waits,
            wait_seconds=totals.wait_seconds,
            served_bytes=totals.served_bytes,
            outcomes=dict(totals.outcomes),
        )

    def refuse(self, code: str) -> None:
        """Count a connection that came to its end with this code."""
        self._refused[code] += 1

    def check_integrity(self, *, stores: bool = True) -> None:
        """Raises IntegrityError when a session's, the quarantine's or, if asked, a store's own counts disagree, which
        takes time in proportion to its blocks."""
        for session in self._sessions:
            session.check_integrity()
        self.quarantine.check_integrity()
        for tenant in self.tenants if stores else ():
            tenant.store.check_integrity()

    def close(self) -> None:
        """End every session, unclean, and let go of the quarantine: before the stores are closed. Idempotent."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        for session in list(self._sessions):
            session.end(clean=False)
        self.quarantine.close()

    def sessions(self) -> Sequence[Session]:
        """All that have not ended. Any thread."""
        return list(self._sessions)

    # ---- for sessions --------------------------------------------------------------------------------------------

    def add(self, session: Session) -> int:
        """One more; its number, by which logs name it."""
        self._sessions[session] = None
        return next(self._numbers)

    def remove(self, session: Session) -> None:
        self._sessions.pop(session, None)
        self._waiting.pop(session, None)

    def watch(self, session: Session) -> None:
        """Poll it, until it has nothing to be polled for."""
        self._waiting[session] = None
