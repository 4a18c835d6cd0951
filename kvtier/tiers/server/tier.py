"""The server tier: a kvtier-server, whose memory and lower tiers several engines share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.clock import Clock
from kvtier.config.serving import ServerSettings
from kvtier.decisions import Decision
from kvtier.errors import ClosedError, ConfigError, IntegrityError, LayoutError, TierError
from kvtier.granted import GrantedPool
from kvtier.keys import Key, check_keys, split_key
from kvtier.memory import HostMemory
from kvtier.protocol.messages import Epoch, Ping, StartEpoch, Welcome
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.forked import OwnProcess
from kvtier.tiers.host import HostTier
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.server.address import parse_address
from kvtier.tiers.server.addresses import Addresses
from kvtier.tiers.server.blocks import Blocks
from kvtier.tiers.server.calls import Caller
from kvtier.tiers.server.channel import Wake
from kvtier.tiers.server.connection import Connection
from kvtier.tiers.server.failures import ServerError, plain
from kvtier.tiers.server.inplace import InPlace
from kvtier.tiers.server.keeper import Keeper
from kvtier.tiers.server.mapping import Mappings
from kvtier.tiers.server.notices import Notices
from kvtier.tiers.server.opening import Opener
from kvtier.tiers.server.pool import ConnectionPool
from kvtier.tiers.server.snapshot import ServerSnapshot
from kvtier.tiers.server.watch import Watch

__all__ = ["MAX_BLOCK_BYTES", "ServerTier"]

MAX_BLOCK_BYTES = 1 << 32
"""Of one block, as messages can name it."""
JOB_SCALE = 16
"""Over a Unix socket, where bytes move at the speed of memory: not over a network, which may be slow."""
RESET_S = 8.0
"""That a reset may take: the server tells each of its own tiers, and a reset that is not known to have been makes this
one mute."""


class ServerTier(OwnProcess, Tier):
    """Blocks in the memory of a kvtier-server, and in the tiers below that, shared by every client of one tenant.

    Over a Unix socket the server's memory is mapped here: bytes move by one copy, messages carry keys and offsets. Over
    TCP the bytes themselves go to and from the caller's buffers. Blocks that come back are verified by the checksum
    that was taken as they were stored, unless the server says that it keeps none.

    Any thread, several at a time, over at most server.connections connections, and one more. No call takes longer than
    server.timeout_s, but for a reset, and the lookup of a host's name. What is not done by then is ERROR. No lock is
    held while the server is waited for, but that resets wait for each other. A server that fails makes no call raise,
    but `contains`, `touch`, `remove`, `probe` and `start_epoch`.

    Mutable state: `_closed`, `_num_calls`, and what the server last told (`_welcome`, `_epoch`), guarded by `_lock`;
    `_era` and `_is_mute` are written by resets alone.
    """

    name = "server"
    _owned = "server tier"
    keeps_history = True
    is_remote = True

    def __init__(self, settings: ServerSettings, clock: Clock, host_bytes: int | None = None) -> None:
        """Try to reach the server once. That it is down or refuses us is logged, and no error: the tier joins it when
        it can be reached. ConfigError for files of the settings that cannot be used.

        host_bytes: of the server's memory that may be this process's host pool, which is `host_pool` then; None: it has
        one of its own.
        """
        if settings.url is None:
            raise ConfigError("server.url names no server")
        super().__init__()
        self._url = settings.url
        self._clock = clock
        self._timeout_s = settings.timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._num_calls = 0
        self._welcome: Welcome | None = None
        self._epoch = 0
        self._era = 0
        self._is_mute = False
        self._resetting = threading.Lock()
        self._notices = Notices(clock)
        self._ledger = Ledger("server")
        addresses = None if host_bytes is None else Addresses()
        self._mappings = Mappings(addresses)
        address = parse_address(settings.url)
        if address.is_unix:
            self.job_scale = JOB_SCALE
        self._wake = Wake()
        try:
            opener = Opener(settings, address, self._mappings, self._wake, clock)
        except BaseException:
            self._wake.close()
            if addresses is not None:
                addresses.close()
            raise
        # One more than blocks are moved by: a question is answered at once, whatever blocks are on their way.
        self._pool = ConnectionPool(opener, self._mappings, settings.connections + 1, clock, self._note_welcome)
        self._watch = Watch(self._wake, self._note_end) if address.is_unix else None
        self._caller = Caller(settings.url, self._pool, self._notices)
        self._blocks = Blocks(self._caller, clock, settings.timeout_s)
        self._keeper: Keeper | None = None
        self._in_place: InPlace | None = None
        if addresses is not None and host_bytes is not None:
            work = threading.Event()
            granted = GrantedPool(addresses, host_bytes, work.set)
            self._keeper = Keeper(
                opener, self._mappings, granted, work, self._caller, clock, settings.timeout_s, self._note_welcome
            )
            self._in_place = InPlace(self._keeper, self._caller, clock, self._blocks.remove)
            self.adopts = True
        self._try_to_join()

    @property
    def host_pool(self) -> GrantedPool | None:
        """The host pool of this process, where that is the server's memory: for the store, which closes it last."""
        return None if self._keeper is None else self._keeper.pool

    @property
    def host_memory(self) -> HostMemory | None:
        """What its slots lie in; None while there is none, see `Keeper.memory`."""
        return None if self._keeper is None else self._keeper.memory

    def serve(self, host: HostTier) -> None:
        """Supply the host pool with slots from now on, for this host tier over it. Once."""
        assert self._keeper is not None
        self._keeper.serve(host)

    def _note_end(self) -> None:
        """A connection has ended."""
        self._pool.sweep()
        if self._keeper is not None:
            self._keeper.look()

    @property
    def is_joined(self) -> bool:
        """Whether the server has ever welcomed us."""
        return self._welcome is not None

    @property
    def epoch(self) -> int:
        """As the server last told; 0 before that."""
        return self._epoch

    def start_epoch(self, epoch: int) -> None:
        """Have the server forget every block of this tenant, whoever stored it, and begin `epoch` or a later one.

        Raises TierError when that is not known to have happened within RESET_S, or server.timeout_s where that is
        longer. Then the tier finds nothing and stores nothing, until a later reset succeeds.
        """
        with self._call(max(self._timeout_s, RESET_S)) as deadline, self._resetting:
            self._is_mute = True
            self._era += 1
            self._ledger.clear()
            answer = self._caller.ask(
                lambda connection: connection.call(lambda number: StartEpoch(number, epoch), Epoch), deadline
            )
            if answer.epoch < epoch:
                raise TierError(
                    f"the server tier asked for epoch {epoch}, and is in {answer.epoch}: the server is not of this "
                    "kvtier's release"
                )
            with self._lock:
                self._epoch = answer.epoch
            self._ledger.clear()
            self._is_mute = False

    def check_block(self, nbytes: int) -> None:
        """Raises ConfigError for a block that the server can never hold, as far as it has told."""
        capacity_bytes = self._capacity_bytes
        if nbytes > MAX_BLOCK_BYTES or 0 < capacity_bytes < nbytes:
            raise ConfigError(
                f"server.url is set, but a block of this model takes {nbytes} bytes, and the server holds "
                f"{min(capacity_bytes or MAX_BLOCK_BYTES, MAX_BLOCK_BYTES)}: use fewer tokens a block, or no server.url"
            )

    # ---- Tier ----------------------------------------------------------------------------------------------------

    def read_bytes(self, least: int, share: int) -> int:
        return least if self._in_place is None else self._in_place.read_bytes(least, share)

    def probe(self) -> None:
        """Have the server answer a Ping, and be at hand with its memory where that is the host pool. Raises a TierError
        for what ails it."""
        with self._call() as deadline:
            self._caller.ask(lambda connection: connection.ping(Ping), deadline)
            if self._keeper is not None:
                self._keeper.probe(deadline)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Asks the server, whichever of its tiers has them. Raises TierError where it did not answer."""
        check_keys(keys)
        with self._call() as deadline:
            if not keys or self._is_mute:
                return [False] * len(keys)
            found = self._blocks.contains(keys, deadline)
        if self._ledger.holdings.num_blocks and not all(found):
            self._ledger.discard([key for key, held in zip(keys, found, strict=True) if not held])
        return found

    def touch(self, keys: Sequence[Key]) -> None:
        """A use of each, so that eviction takes others first. Raises TierError where the server cannot be told."""
        check_keys(keys)
        with self._call() as deadline:
            if keys and not self._is_mute:
                self._blocks.touch(keys, deadline)

    def tell(self, decisions: Sequence[Decision]) -> None:
        """The server keeps them for a while, for `kvtier explain`. Raises TierError where it cannot be told."""
        with self._call() as deadline:
            if decisions and not self._is_mute:
                self._blocks.tell(decisions, deadline)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        """Copy blocks from the server's memory, or receive them, into the buffers; or adopt all of them, where the host
        pool is the server's memory.

        What is not what was stored is DAMAGED, and the server is told to forget it. What the server could not bring up
        from a lower tier in time, or found no room for, is REFUSED.
        """
        for request in requests:
            split_key(request.key)
            if request.adoption is None and request.buffer.readonly:
                raise LayoutError("a block is read into a writable buffer")
            if not 0 < request.nbytes <= MAX_BLOCK_BYTES:
                raise LayoutError(f"a block has 1 to {MAX_BLOCK_BYTES} bytes, not {request.nbytes}")
        with self._call() as deadline:
            if not requests or self._is_mute:
                return [ReadOutcome.MISS] * len(requests)
            if requests[0].adoption is not None and self._in_place is not None:
                outcomes = self._in_place.read(requests, deadline)
            else:
                outcomes = self._blocks.read(requests, deadline)
        gone = (ReadOutcome.MISS, ReadOutcome.DAMAGED)
        self._ledger.discard([r.key for r, outcome in zip(requests, outcomes, strict=True) if outcome in gone])
        return outcomes

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        """Copy blocks that the server does not hold to its memory, or send them from where they lie; or publish all of
        them, where their slots are the server's memory.

        A block that another client stores just now is waited for, half of server.timeout_s at most; then it is FULL:
        there is no room for ours, and nothing is wrong with the server. WITHDRAWN when a reset came in between, or the
        server did not wait for us any more.
        """
        for request in requests:
            split_key(request.key)
            if request.parent is not None:
                split_key(request.parent)
            if not 0 < request.buffer.nbytes <= MAX_BLOCK_BYTES:
                raise LayoutError(f"a block has 1 to {MAX_BLOCK_BYTES} bytes, not {request.buffer.nbytes}")
        with self._call() as deadline:
            if not requests:
                return []
            era = self._era
            if self._is_mute:
                return [WriteOutcome.WITHDRAWN] * len(requests)
            if requests[0].slot is not None and self._in_place is not None:
                outcomes = self._in_place.write(requests, deadline)
            else:
                outcomes = self._blocks.write(requests, deadline)
            if self._era != era:
                held = (WriteOutcome.STORED, WriteOutcome.ALREADY_STORED)
                return [WriteOutcome.WITHDRAWN if outcome in held else outcome for outcome in outcomes]
            self._ledger.add(
                (r.key, r.buffer.nbytes)
                for r, outcome in zip(requests, outcomes, strict=True)
                if outcome is WriteOutcome.STORED
            )
        return outcomes

    def remove(self, keys: Sequence[Key]) -> int:
        """From every tier of the server. Raises TierError where it did not answer: they may be found again."""
        check_keys(keys)
        with self._call() as deadline:
            self._ledger.discard(keys)
            if not keys or self._is_mute:
                return 0
            return self._blocks.remove(keys, deadline)

    def usage(self) -> TierUsage:
        """What this process put there, as far as it knows, and what the server has for its tenant. From memory."""
        holdings, capacity_bytes = self._ledger.holdings, self._capacity_bytes
        return TierUsage(holdings.num_blocks, min(holdings.nbytes, capacity_bytes), capacity_bytes)

    def snapshot(self) -> ServerSnapshot:
        """As `usage`, and everything else that is counted. From memory."""
        usage = self.usage()
        welcome = self._welcome
        return ServerSnapshot(
            num_blocks=usage.num_blocks,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            mapped_bytes=self._mappings.mapped_bytes,
            connections=self._pool.num_open,
            connects=self._pool.num_connects,
            disconnects=self._pool.num_disconnects,
            errors=self._caller.errors,
            damaged=self._blocks.num_damaged + (self._in_place.num_damaged if self._in_place else 0),
            epoch=self._epoch,
            server="" if welcome is None else f"{plain(welcome.software)}, tenant {plain(welcome.tenant)}",
        )

    def wait_mapped(self, timeout: float) -> bool:
        """Block until all of the server's memory that is mapped here is present; for benchmarks."""
        return self._mappings.wait_present(timeout)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        self._pool.check_integrity()
        self._mappings.check_integrity()
        if self._keeper is not None:
            self._keeper.check_integrity()
        with self._lock:
            is_quiet = not self._num_calls
            if is_quiet and self._pool.num_leased:
                raise IntegrityError(f"server tier: {self._pool.num_leased} connections leased, and no call under way")

    def close(self) -> None:
        """Leave, which ends the calls under way. Idempotent; nothing in a fork's child."""
        if self.is_forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._num_calls += 1  # the last to leave closes the wake, which ends the others' waits
        self._caller.closing.set()
        self._wake.ring()
        self._pool.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._watch is not None:
            self._watch.close()
        self._leave()

    # ---- calls under way -----------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, timeout_s: float | None = None) -> Iterator[float]:
        """A call, and the time by which it ends."""
        self.check_process()
        with self._lock:
            if self._closed:
                raise ClosedError("the server tier is closed")
            self._num_calls += 1
        try:
            yield self._clock.now() + (self._timeout_s if timeout_s is None else timeout_s)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_calls -= 1
            is_last = self._closed and not self._num_calls
        if is_last:
            self._wake.close()

    # ---- what the server is like ---------------------------------------------------------------------------------

    @property
    def _capacity_bytes(self) -> int:
        welcome = self._welcome
        return 0 if welcome is None else welcome.capacity_bytes

    def _try_to_join(self) -> None:
        try:
            self._pool.release(self._pool.acquire(self._clock.now() + self._timeout_s))
        except ServerError as error:
            if not self._caller.note(error):
                self._notices.say(
                    "join",
                    f"server.url = {self._url} is of no use yet: {error}; it joins by itself once the server answers, "
                    "and until then nothing is stored there or read from there",
                )

    def _note_welcome(self, connection: Connection) -> None:
        with self._lock:
            if self._welcome is not None and connection.welcome.epoch != self._epoch:
                self._ledger.clear()  # somebody has reset it, or it has forgotten everything
            self._welcome = connection.welcome
            self._epoch = connection.welcome.epoch
        if self._watch is not None and connection.mapping is not None:
            self._watch.add(connection.fileno())
        self._notices.note_welcome(f"{self._url} answers ({plain(connection.welcome.software)})")
