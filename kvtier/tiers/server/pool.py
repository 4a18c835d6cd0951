"""Connections to the server: leased to one call at a time, none with an answer unread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier.clock import Clock
from kvtier.errors import ClosedError, IntegrityError
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.failures import DeadlineError
from kvtier.tiers.server.mapping import Mappings
from kvtier.tiers.server.opening import Opener

__all__ = ["ConnectionPool", "close_connection"]


class ConnectionPool:
    """Owns every connection of the tier. Any thread; the lock is never held while a socket works.

    A connection comes back by `release`, which closes it unless all was answered and given back. At most `limit` are
    open; who wants one more waits for it, until his deadline.

    Mutable state: `_idle`, `_leased`, `_num_opening`, `_is_closed` and the counters, guarded by `_freed`'s lock.
    """

    def __init__(
        self, opener: Opener, mappings: Mappings, limit: int, clock: Clock, on_welcome: Callable[[Connection], None]
    ) -> None:
        """on_welcome: told of each new connection, by the thread that made it."""
        self._opener = opener
        self._mappings = mappings
        self._limit = limit
        self._clock = clock
        self._on_welcome = on_welcome
        self._freed = threading.Condition()
        # The last that was used is taken first: the others fall idle.
        self._idle: list[Connection] = []
        self._leased: set[Connection] = set()
        self._num_opening = 0
        self._is_closed = False
        self._num_connects = 0
        self._num_disconnects = 0

    @property
    def num_open(self) -> int:
        with self._freed:
            return len(self._leased) + len(self._idle)

    @property
    def num_leased(self) -> int:
        with self._freed:
            return len(self._leased) + self._num_opening

    @property
    def num_connects(self) -> int:
        return self._num_connects

    @property
    def num_disconnects(self) -> int:
        """Connections that were closed for cause: cut, late, or with an answer unread."""
        return self._num_disconnects

    def acquire(self, deadline: float) -> Connection:
        """A connection with nothing on it, on which all ends by the deadline; a new one is made at most once.

        Raises a ServerError when none can be had by then, and ClosedError.
        """
        while (connection := self._take(deadline)) is not None:
            if not connection.is_readable:
                connection.begin(deadline)
                return connection
            connection.is_broken = True  # it was cut, or holds what nobody asked for
            self.release(connection)
        return self._open(deadline)

    def release(self, connection: Connection) -> None:
        """The call has done with it."""
        with self._freed:
            self._leased.discard(connection)
            keep = connection.is_idle and not self._is_closed
            if keep:
                self._idle.append(connection)
            elif not self._is_closed:
                self._num_disconnects += 1
            self._freed.notify()
        if not keep:
            self._close(connection)
            self.sweep()

    def sweep(self) -> None:
        """Close what is idle and was cut: else the memory of a server that is gone would stay mapped."""
        with self._freed:
            gone = [connection for connection in self._idle if connection.is_readable]
            self._idle = [connection for connection in self._idle if connection not in gone]
            self._num_disconnects += len(gone)
            self._freed.notify_all()
        for connection in gone:
            self._close(connection)

    def close(self) -> None:
        """Close what is idle, and end what is under way. Idempotent."""
        with self._freed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._leased:
                connection.shut()  # not closed: its number could be another file's while its call still reads
            self._freed.notify_all()
        for connection in idle:
            self._close(connection)

    def check_integrity(self) -> None:
        """Raises IntegrityError where more are open than may be, or one that is idle is not."""
        with self._freed:
            num_open = len(self._idle) + len(self._leased) + self._num_opening
            if num_open > self._limit or self._num_opening < 0:
                raise IntegrityError(
                    f"server tier: {len(self._idle)} idle, {len(self._leased)} leased and {self._num_opening} opening "
                    f"connections, where {self._limit} may be"
                )
            if not all(connection.is_idle for connection in self._idle):
                raise IntegrityError("server tier: an idle connection owes an answer, or a slot")

    def _take(self, deadline: float) -> Connection | None:
        """An idle connection; or None, which is leave to open one."""
        with self._freed:
            while True:
                if self._is_closed:
                    raise ClosedError("the server tier is closed")
                if self._idle:
                    connection = self._idle.pop()
                    self._leased.add(connection)
                    return connection
                if len(self._leased) + self._num_opening < self._limit:
                    self._num_opening += 1
                    return None
                left = deadline - self._clock.now()
                if left <= 0 or not self._freed.wait(left):
                    raise DeadlineError(f"all {self._limit} connections are in use; see server.connections")

    def _open(self, deadline: float) -> Connection:
        connection = None
        try:
            connection = self._opener.open(deadline)
        finally:
            with self._freed:
                self._num_opening -= 1
                is_closed = self._is_closed
                if connection is not None:
                    self._num_connects += 1
                    if not is_closed:
                        self._leased.add(connection)
                self._freed.notify()
        if is_closed:
            self._close(connection)
            raise ClosedError("the server tier is closed")
        self._on_welcome(connection)
        return connection

    def _close(self, connection: Connection) -> None:
        close_connection(connection, self._mappings)


def close_connection(connection: Connection, mappings: Mappings, *, farewell: bool = True) -> None:
    """Leave, and its mapping with it. farewell: as of `Connection.close`."""
    connection.close(farewell=farewell)
    mapping, connection.mapping = connection.mapping, None
    if mapping is not None:
        mappings.release(mapping)
