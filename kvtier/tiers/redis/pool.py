"""Connections by server: leased to one call at a time, so many to each, none with a reply unread."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain

from kvtier.clock import Clock
from kvtier.errors import ClosedError, IntegrityError
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.channel import Channel, DeadlineError
from kvtier.tiers.redis.opening import Opener

__all__ = ["ConnectionPool"]


class ConnectionPool:
    """Owns every connection of the tier. Any thread; the lock is never held while a socket works.

    A connection comes back by `release`, which closes it unless every reply that it owed was read. At most `limit`
    are open to a server; who wants one more waits for it, until his deadline.

    Mutable state: `_idle`, `_leased`, `_num_opening`, `_num_waiting` (for a connection), `_is_closed` and the counters,
    guarded by `_lock`.
    """

    def __init__(self, opener: Opener, limit: int, clock: Clock) -> None:
        self._opener = opener
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._num_waiting = 0
        # The last that was used is taken first: the others fall idle, and are cut.
        self._idle: dict[Address, list[Channel]] = {}
        self._leased: set[Channel] = set()
        self._num_opening: Counter[Address] = Counter()
        self._is_closed = False
        self._num_connects = 0
        self._num_disconnects = 0

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._leased) + sum(map(len, self._idle.values()))

    @property
    def num_leased(self) -> int:
        with self._lock:
            return len(self._leased) + self._num_opening.total()

    @property
    def num_connects(self) -> int:
        return self._num_connects

    @property
    def num_disconnects(self) -> int:
        """Connections that were closed for cause: cut, late, or with a reply unread."""
        return self._num_disconnects

    def acquire(self, address: Address, deadline: float, *, fresh: bool = False) -> Channel:
        """A connection with nothing on it. fresh: a new one, as those at hand may all be dead.

        Raises a ChannelError when none can be had by the deadline, and ClosedError.
        """
        while True:
            channel, doomed = self._take(address, deadline, fresh=fresh)
            if doomed is not None:
                doomed.close()
            if channel is None:
                return self._open(address, deadline)
            if not channel.is_readable:
                channel.deadline = deadline
                channel.num_received = 0
                return channel
            self._discard(channel)  # it was cut, or holds bytes that nobody asked for

    def release(self, channel: Channel) -> None:
        """The call has done with it."""
        channel.is_fresh = False
        with self._lock:
            self._leased.discard(channel)
            idle = self._idle.get(channel.address)
            keep = idle is not None and channel.is_idle and not self._is_closed
            if keep and idle is not None:
                idle.append(channel)
            elif not self._is_closed:
                self._num_disconnects += 1
            if self._num_waiting:
                self._freed.notify_all()
        if not keep:
            channel.close()

    def keep_only(self, addresses: frozenset[Address]) -> None:
        """Servers other than these are gone: close what is idle, and what is in use when it comes back."""
        with self._lock:
            gone = [self._idle.pop(address) for address in list(self._idle) if address not in addresses]
        for channel in chain.from_iterable(gone):
            channel.close()

    def close(self) -> None:
        """Close what is idle, and end what is under way. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle = [*chain.from_iterable(self._idle.values())]
            self._idle.clear()
            for channel in self._leased:
                channel.shut()  # not closed: its number could be another file's while its call still reads
            self._freed.notify_all()
        for channel in idle:
            channel.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError where more are open than may be, or one that is idle is not."""
        with self._lock:
            for address, idle in self._idle.items():
                leased, opening = self._num_leased(address), self._num_opening[address]
                if len(idle) + opening + leased > self._limit or opening < 0:
                    raise IntegrityError(
                        f"redis tier: {len(idle)} idle, {leased} leased and {opening} opening connections to "
                        f"{address}, where {self._limit} may be"
                    )
                if not all(channel.is_idle for channel in idle):
                    raise IntegrityError(f"redis tier: an idle connection to {address} owes a reply")

    def _num_leased(self, address: Address) -> int:
        return sum(channel.address == address for channel in self._leased)

    def _take(self, address: Address, deadline: float, *, fresh: bool) -> tuple[Channel | None, Channel | None]:
        """An idle connection, or leave to open one; and one to close in its favour."""
        with self._lock:
            while True:
                if self._is_closed:
                    raise ClosedError("the redis tier is closed")
                idle = self._idle.setdefault(address, [])
                if idle and not fresh:
                    channel = idle.pop()
                    self._leased.add(channel)
                    return channel, None
                if idle or self._num_leased(address) + self._num_opening[address] < self._limit:
                    full = self._num_leased(address) + self._num_opening[address] + len(idle) >= self._limit
                    self._num_opening[address] += 1
                    return None, idle.pop(0) if full else None
                left = deadline - self._clock.now()
                self._num_waiting += 1
                try:
                    is_late = left <= 0 or not self._freed.wait(left)
                finally:
                    self._num_waiting -= 1
                if is_late:
                    raise DeadlineError(f"all {self._limit} connections to {address} are in use; see redis.connections")

    def _open(self, address: Address, deadline: float) -> Channel:
        channel = None
        try:
            channel = self._opener.open(address, deadline)
        finally:
            with self._lock:
                self._num_opening[address] -= 1
                is_closed = self._is_closed
                if channel is not None:
                    self._num_connects += 1
                    if not is_closed:
                        self._leased.add(channel)
                self._freed.notify_all()
        if is_closed:
            channel.close()
            raise ClosedError("the redis tier is closed")
        channel.num_received = 0
        return channel

    def _discard(self, channel: Channel) -> None:
        channel.is_broken = True
        self.release(channel)
