"""Slots of the server's memory as this process's host pool: granted ahead of need, and given back."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from kvtier.clock import Clock
from kvtier.errors import ClosedError, IntegrityError, TierError
from kvtier.granted import GrantedPool
from kvtier.memory import HostMemory
from kvtier.protocol.fields import HOLDING_SHARE
from kvtier.protocol.messages import MAX_BLOCKS, Abort, Grant, Granted, Release
from kvtier.tiers.server.calls import Caller
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.failures import DeadlineError, LostError, RefusedError, ServerError
from kvtier.tiers.server.mapping import Mapping, Mappings
from kvtier.tiers.server.opening import ForeignError, Opener
from kvtier.tiers.server.pool import close_connection

__all__ = ["HostMemory", "Keeper"]

logger = logging.getLogger("kvtier.tiers.server")

STOCK_BYTES = 512 << 20
STOCK_SHARE = 4
SERVER_SHARE = 16
"""Slots without a block that are held at most: as many bytes as this, and no more than that part of what the pool may
have, nor of the server's memory. An engine whose GPU pool turns over fills them within some steps, and they are had
again in milliseconds."""
REFILL_SHARE = 0.75
"""Of its stock, below which a size class is refilled."""
IDLE_S = 0.1
LINGER_S = 0.002
"""For which work is let gather."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between two tries to reach a server that is gone."""
FULL_PAUSE_S = 0.05
"""After the server had no more slots for us."""
REFUSED_PAUSE_S = 1.0
"""After it said that it can have none."""
JOIN_S = 5.0


class ForgetfulHost(Protocol):
    """The host tier over the pool."""

    def forget_slots(self, slots: Sequence[int], is_idle: Callable[[int], bool]) -> None:
        """Name no block any more in those of these that are idle."""

    def give_way(self, nbytes: int, number: int) -> None:
        """Forget so many blocks of this size class, those that go next and that nobody leases."""


class Keeper:
    """Owns the connection on which slots are granted, published and adopted, and the thread that keeps `pool` supplied.

    The pool has free slots of each size class in use, so that whoever fills one never waits for the server. What is the
    server's by now is forgotten by the host tier as soon as nobody leases it, and given back. When the connection is
    lost, so is all that was granted on it: the host tier forgets it, and what is leased stays where it is until its
    lease ends. Only then does the server hear that it may have those slots back, if it still runs, and only then is the
    memory of its next run taken.

    Any thread, `connection` for one question at a time. Mutable state: `_connection`, `_era`, `_mapping`, `_memory`,
    `_left`, guarded by `_lock`, `_memory` for who writes it; `_num_tries` and `_is_wanted`, guarded by `_tries`, a
    leaf; `_try_at`, `_pause_s` and `_full_until` are the thread's.
    """

    def __init__(
        self,
        opener: Opener,
        mappings: Mappings,
        pool: GrantedPool,
        work: threading.Event,
        caller: Caller,
        clock: Clock,
        timeout_s: float,
        on_welcome: Callable[[Connection], None],
    ) -> None:
        """work: that the pool sets when there is something to do. on_welcome: told of each connection."""
        self.pool = pool
        self._opener = opener
        self._mappings = mappings
        self._work = work
        self._caller = caller
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_welcome = on_welcome
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._era = 0
        self._mapping: Mapping | None = None
        self._run_id = 0
        self.has_checksums = True
        """Whether the server keeps them, as it last told."""
        self._memory: HostMemory | None = None
        self._left: list[tuple[Connection, int]] = []
        """That are lost, with their eras, while slots of theirs are used."""
        self._host: ForgetfulHost | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._tries = threading.Condition()
        self._num_tries = 0
        self._is_wanted = False
        self._why = "it was not tried yet"
        self._try_at = clock.now()
        self._pause_s = FIRST_PAUSE_S
        self._full_until: dict[int, float] = {}  # by size class

    def serve(self, host: ForgetfulHost) -> None:
        """Begin to supply the pool, whose slots `host` names. Once; returns at once."""
        self._host = host
        self._thread = threading.Thread(target=self._run, name="kvtier-server-slots", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> HostMemory | None:
        """Where the slots lie, for other processes of this engine; None before the first connection, and between two
        runs of the server. Another run's is told only once nobody uses a slot of the one before. Waits for nothing."""
        return self._memory

    @contextmanager
    def connection(self, deadline: float) -> Iterator[tuple[Connection, int]]:
        """The connection, for questions that the server answers at once, and its era in the pool.

        Where there is none one is made, if it can be. Raises a ServerError where there is none by the deadline. One
        that breaks is lost, with its slots.
        """
        with self._caller.noting():
            self._await_try(deadline)
            if not self._lock.acquire(timeout=max(0.0, deadline - self._clock.now())):
                raise DeadlineError("others asked the server all the time")
            try:
                connection = self._connection
                if connection is None:
                    raise LostError(f"the server's memory is not at hand: {self._why}")
                connection.begin(deadline)
                try:
                    yield connection, self._era
                finally:
                    if connection.is_broken:
                        self._lose(connection)
            finally:
                self._lock.release()

    def make_room(self, connection: Connection, slot_bytes: int, wanted: int) -> int:
        """How many slots more may be had of the server for blocks that it holds, `wanted` at most: blocks of ours that
        it does not hold give way, and then the stock, by whoever has `connection`."""
        mapped_bytes = 0 if connection.mapping is None else connection.mapping.nbytes
        most = max(min(self.pool.nbytes, mapped_bytes // HOLDING_SHARE), slot_bytes)
        for each in sorted(self.pool.classes(), key=lambda size: size != slot_bytes):
            short = wanted * slot_bytes - (most - self.pool.granted_bytes)
            if short > 0 and self._host is not None:
                number = -(-short // each)
                self._host.give_way(each, number)
                _let_go_of(connection, Abort, self.pool.take_surplus(each, number))
                self._give_back(connection, self._era)
        return min(wanted, max(0, self.pool.nbytes - self.pool.granted_bytes) // slot_bytes)

    def probe(self, deadline: float) -> None:
        """Whether there is a connection by then. Raises a TierError for why not."""
        try:
            with self.connection(deadline):
                pass
        except ServerError as error:
            raise TierError(f"the server tier: {error}") from error

    def look(self) -> None:
        """A connection may have ended. Any thread; never blocks."""
        self._work.set()

    def close(self) -> None:
        """Leave, after the calls under way were ended; the pool is still to be closed. Idempotent."""
        self._closing.set()
        self._work.set()
        with self._tries:
            self._tries.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        with self._lock:
            if self._connection is not None:
                self._lose(self._connection)
            is_used = self.pool.usage().num_leases > 0
            self._memory = None
            mapping, self._mapping = self._mapping, None
            if mapping is not None and is_used:
                mapping.leave()
            while self._left:
                close_connection(self._left.pop()[0], self._mappings, farewell=not is_used)
            if mapping is not None:
                self._mappings.release(mapping)

    def check_integrity(self) -> None:
        self.pool.check_integrity()

    def _await_try(self, deadline: float) -> None:
        """Without a connection have the thread try to make one, and wait for that."""
        if self._connection is not None or self._thread in (None, threading.current_thread()):
            return
        with self._tries:
            before, self._is_wanted = self._num_tries, True
            self._work.set()
            self._tries.wait_for(
                lambda: self._num_tries != before or self._closing.is_set(), max(0.0, deadline - self._clock.now())
            )

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._work.wait(IDLE_S) and self._connection is not None:
                self._closing.wait(LINGER_S)  # a message costs both sides as much as some tens of slots
            self._work.clear()
            self.pool.take_work()
            try:
                self._keep()
            except (ServerError, ClosedError):
                pass  # it was noted
            except BaseException:
                logger.exception("the server tier: keeping slots of the server's memory failed")
                self._closing.wait(LONGEST_PAUSE_S)

    def _keep(self) -> None:
        assert self._host is not None
        if idle := self.pool.take_idle():
            self._host.forget_slots(idle, self.pool.is_idle)
        self._let_go()
        if self._connection is None:
            if not self._is_due():
                return
            try:
                self._connect()
            except ServerError as error:
                self._why = str(error)
                raise
            finally:
                with self._tries:
                    self._num_tries += 1
                    self._is_wanted = False
                    self._tries.notify_all()
        with self.connection(self._clock.now() + self._timeout_s) as (connection, era):
            if connection.is_readable:
                connection.is_broken = True
                raise LostError(f"{connection.address} closed the connection")
            self._give_back(connection, era)
            self._refill(connection, era)

    def _is_due(self) -> bool:
        now = self._clock.now()
        is_past = not 0.0 < self._try_at - now <= LONGEST_PAUSE_S  # or the clock went back
        if not (is_past or self._is_wanted):
            return False
        self._try_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True

    def _connect(self) -> None:
        with self._caller.noting():
            connection = self._opener.open(self._clock.now() + self._timeout_s)
            mapping = connection.mapping
            if mapping is None:
                connection.close()
                raise ForeignError(f"{connection.address} does not share its memory: set host.pool = 'own'")
        with self._lock:
            if self._closing.is_set():  # it was left without waiting for us
                close_connection(connection, self._mappings)
                return
            self._connection = connection
            self.has_checksums = connection.welcome.checksums
            self._era += 1
            if self._mapping is None:
                self._mapping = mapping
                self._run_id += 1
                self._mappings.share(mapping)
                if mapping.fd is not None:
                    self._memory = HostMemory(mapping.fd, mapping.nbytes, self._run_id)
        self._pause_s = FIRST_PAUSE_S
        self._full_until.clear()
        self._on_welcome(connection)
        if self.pool.nbytes > mapping.nbytes:
            self._caller.say(
                "size",
                f"host.size = {self.pool.nbytes} is more than all of the server's memory, {mapping.nbytes} bytes, of "
                "which this engine may hold a part: lower it, or raise host.size of the server",
            )

    def _let_go(self) -> None:
        """Of connections that were lost, and of the memory of a run that is over, once no slot of theirs is used."""
        with self._lock:
            lost = self.pool.lost_eras() if self._left else set()
            gone = [left for left, era in self._left if era not in lost]
            self._left = [each for each in self._left if each[1] in lost]
            for left in gone:
                close_connection(left, self._mappings)
            if self._connection is None and self._mapping is not None and self.pool.is_empty:
                self._memory = None
                mapping, self._mapping = self._mapping, None
                self._mappings.release(mapping)

    def _lose(self, connection: Connection) -> None:
        """Under the lock: what was granted on it is the pool's no more. The server must not hear that no slot is used
        while a copy may still read or write one."""
        self._connection = None
        self.pool.disown()
        self._left.append((connection, self._era))
        self._work.set()

    def _give_back(self, connection: Connection, era: int) -> None:
        _let_go_of(connection, Release, self.pool.take_returned(era))

    def _refill(self, connection: Connection, era: int) -> None:
        now = self._clock.now()
        classes = self.pool.classes()
        most = 0 if connection.mapping is None else connection.mapping.nbytes // SERVER_SHARE
        stock_bytes = min(STOCK_BYTES, self.pool.nbytes // STOCK_SHARE, most) // max(1, len(classes))
        for slot_bytes, there in classes.items():
            if 0.0 < self._full_until.get(slot_bytes, now) - now <= REFUSED_PAUSE_S:
                continue
            stock = max(1, stock_bytes // slot_bytes)
            self.pool.want(slot_bytes, max(1, int(stock * REFILL_SHARE)))
            if there.num_free > stock:
                _let_go_of(connection, Abort, self.pool.take_surplus(slot_bytes, there.num_free - stock))
            elif there.num_free <= stock * REFILL_SHARE:
                room = (self.pool.nbytes - self.pool.granted_bytes) // slot_bytes
                if there.num_slots < stock:  # else its own blocks give way to one another
                    room = self.make_room(connection, slot_bytes, stock - there.num_free)
                self._ask_for(connection, era, slot_bytes, min(stock - there.num_free, room))

    def _ask_for(self, connection: Connection, era: int, slot_bytes: int, wanted: int) -> None:
        while wanted > 0:
            asked = min(wanted, MAX_BLOCKS)
            try:
                answer = connection.call(partial(Grant, block_bytes=slot_bytes, number=asked), Granted)
            except RefusedError as error:
                if error.is_final:
                    raise
                self._caller.say(
                    "grant",
                    f"{error}; no block of {slot_bytes} bytes is stored, or restored: see host.slab of the server",
                )
                self._rest(slot_bytes, REFUSED_PAUSE_S)
                return
            self.check_slots(connection, answer.offsets, slot_bytes)
            if len(answer.offsets) > asked:
                raise connection.garbled(f"{len(answer.offsets)} slots where {asked} were asked for")
            try:
                beyond = self.pool.add(slot_bytes, list(zip(answer.reservations, answer.offsets, strict=True)), era)
            except IntegrityError as error:
                raise connection.garbled(str(error)) from error
            _let_go_of(connection, Abort, beyond)
            wanted -= len(answer.offsets)
            if beyond or len(answer.offsets) < asked:  # we hold as much as we may, or all there is is held
                self._rest(slot_bytes, FULL_PAUSE_S)
                return

    def _rest(self, slot_bytes: int, pause_s: float) -> None:
        """Ask for none of this size class for a while."""
        self._full_until[slot_bytes] = self._clock.now() + pause_s
        self.pool.want(slot_bytes, 0)

    def check_slots(self, connection: Connection, offsets: Sequence[int], slot_bytes: int) -> None:
        """Each whole, and whole pages of the mapping. Raises GarbledError."""
        nbytes = 0 if connection.mapping is None else connection.mapping.nbytes
        if any(offset % mmap.PAGESIZE or not 0 <= offset <= nbytes - slot_bytes for offset in offsets):
            raise connection.garbled(
                f"slots of {slot_bytes} bytes at {min(offsets)} to {max(offsets)}, in {nbytes} bytes"
            )


def _let_go_of(connection: Connection, message: type[Abort | Release], handles: Sequence[int]) -> None:
    for start in range(0, len(handles), MAX_BLOCKS):
        connection.say(message(0, list(handles[start : start + MAX_BLOCKS])))
