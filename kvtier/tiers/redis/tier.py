"""The Redis tier: one value a block, in one server, in the master that Sentinels name, or in a cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.clock import Clock
from kvtier.config.settings import RedisSettings
from kvtier.errors import ClosedError, ConfigError, IntegrityError, LayoutError, TierError
from kvtier.frame import frame_bytes
from kvtier.keys import Key, check_keys, split_key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.forked import OwnProcess
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.redis.backoff import FullBackoff
from kvtier.tiers.redis.blocks import Blocks
from kvtier.tiers.redis.calls import Caller
from kvtier.tiers.redis.channel import ChannelError
from kvtier.tiers.redis.epochs import Epochs, Era
from kvtier.tiers.redis.exchange import commands
from kvtier.tiers.redis.notices import Notices
from kvtier.tiers.redis.opening import Opener
from kvtier.tiers.redis.pool import ConnectionPool
from kvtier.tiers.redis.replies import hint
from kvtier.tiers.redis.resp import ErrorReply, encode
from kvtier.tiers.redis.servers import Servers
from kvtier.tiers.redis.snapshot import RedisSnapshot
from kvtier.tiers.redis.topology import Router, Routes, WrongModeError

__all__ = ["MAX_VALUE_BYTES", "RedisTier"]

MAX_VALUE_BYTES = 512 << 20
"""Of a value, as Redis is configured where nobody changes that."""


class RedisTier(OwnProcess, Tier):
    """Blocks in the memory of other machines, shared by every process with the same prefix, tenant and epoch.

    A value is a block's frame under `prefix:tenant:epoch:namespace:digest`, so what comes back is known to be what
    was asked for. Redis evicts as it is configured; its allkeys-lru goes well with reads, which count as uses. Where
    redis.ttl_s is set, a use gives a block that long again, unless it has longer (Redis 7; with an older one blocks
    live that long from when they were written).

    Any thread, several at a time, over at most redis.connections connections to each server, and one more. No call
    takes longer than redis.timeout_s, but for the lookup of a host's name; what is not done by then is ERROR. No lock
    is held while a server is waited for, but that resets wait for each other. Servers that fail make no call raise, but
    `contains`, `touch`, `remove`, `probe` and `start_epoch`.

    Mutable state: `_closed`, `_num_calls`, `_num_damaged`, guarded by `_lock`; `_is_joined` is only ever set.
    """

    name = "redis"
    _owned = "redis tier"
    is_remote = True

    def __init__(self, settings: RedisSettings, clock: Clock) -> None:
        """Try to reach the servers once. That they are down, loading or refuse us is logged, and no error: the tier
        joins them when they can be reached. ConfigError for files of the settings that cannot be used, and where
        redis-py is missing.
        """
        if not settings.url:
            raise ConfigError("redis.url names no server")
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._timeout_s = settings.timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._num_calls = 0
        self._num_damaged = 0
        self._is_joined = False
        self._resetting = threading.Lock()
        self._notices = Notices(clock)
        opener = Opener(settings, clock)
        # One more than blocks are moved by: a question is answered at once, whatever blocks are on their way.
        self._pool = ConnectionPool(opener, settings.connections + 1, clock)
        self._router = Router(settings, opener, clock, self._note_routes)
        self._caller = Caller(self._pool, self._router, self._notices.note)
        self._servers = Servers(self._caller, clock)
        self._epochs = Epochs(settings.prefix, settings.tenant, self._caller, clock)
        self._backoff = FullBackoff(clock)
        self._ledger = Ledger("redis")
        self._blocks = Blocks(settings, self._caller, self._backoff)
        self._try_to_join()

    @property
    def is_joined(self) -> bool:
        """Whether its servers have ever told what they are."""
        return self._is_joined

    @property
    def epoch(self) -> int:
        """As the servers told at the first connection; 0 before that."""
        era = self._epochs.current
        return era.epoch if era is not None else 0

    def start_epoch(self, epoch: int) -> None:
        """Begin `epoch`, or a later one where that was ever begun: each reset of a tenant has its own number.

        Blocks of the epoch before are removed from the servers within a few seconds; what is left then is found by
        nobody, and is evicted. Other processes keep the epoch that they have.

        Raises TierError when the servers cannot be told. Then the tier finds nothing and stores nothing, until a later
        reset succeeds.
        """
        with self._call():
            with self._resetting:
                before = self._epochs.current
                try:
                    self._epochs.start(epoch, self._clock.now() + self._timeout_s)
                except (ChannelError, TierError) as error:
                    raise TierError(f"the redis tier could not write down epoch {epoch}: {error}") from error
                finally:
                    self._ledger.clear()
            routes = self._router.current
            if before is not None and routes is not None:
                self._epochs.sweep(before.prefix, routes, self._timeout_s)

    def check_block(self, nbytes: int) -> None:
        """Raises ConfigError for a block that no value can hold."""
        if frame_bytes(nbytes) > MAX_VALUE_BYTES:
            raise ConfigError(
                f"redis.url is set, but a block of this model takes {frame_bytes(nbytes)} bytes, and a value of Redis "
                f"holds {MAX_VALUE_BYTES}: use fewer tokens a block, or no redis.url"
            )

    # ---- Tier ----------------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Have every master answer a PING, on whatever connection; before that the routes are asked for anew.

        Raises a TierError for what ails any of them.
        """
        with self._call() as deadline:
            try:
                routes = self._router.find(deadline)
                self._join(deadline)
                pings = {address: commands([encode("PING")]) for address in routes.masters}
                failures = self._caller.drive(pings, deadline)
            except ChannelError as error:
                raise TierError(f"the redis tier: {error}") from error
            for failure in failures.values():
                raise TierError(f"the redis tier: {failure}") from failure
            for address, ping in pings.items():
                answer = ping.answers[0]
                if isinstance(answer, ErrorReply):
                    self._caller.note(answer)
                    raise TierError(
                        f"the redis tier: {address} answered {answer.code}; {hint(answer) or answer.text[:80]}"
                    )

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Asks the servers. Raises TierError when any of them did not answer for its keys."""
        check_keys(keys)
        with self._call() as deadline:
            if not keys or (era := self._era(deadline)).is_mute:
                return [False] * len(keys)
            found = self._blocks.contains(era, keys, deadline)
        if self._ledger.holdings.num_blocks:
            self._ledger.discard([key for key, held in zip(keys, found, strict=True) if not held])
        return found

    def touch(self, keys: Sequence[Key]) -> None:
        """A use of each, so that eviction takes others first. Raises TierError when a server did not answer."""
        check_keys(keys)
        with self._call() as deadline:
            era = self._epochs.current
            if keys and self._is_joined and era is not None and not era.is_mute:
                self._blocks.touch(era, keys, deadline)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        """Copy blocks from the sockets straight into the buffers, every server's in one round trip.

        What is no block under a block's key is DAMAGED, and removed from the server. A block in the format of a later
        kvtier is a MISS, and stays.
        """
        check_keys([request.key for request in requests])
        for request in requests:
            if request.buffer.readonly:
                raise LayoutError("a block is read into a writable buffer")
        with self._call() as deadline:
            if not requests:
                return []
            era = self._era_or_none(deadline)
            if era is None:
                return [ReadOutcome.ERROR] * len(requests)
            if era.is_mute:
                return [ReadOutcome.MISS] * len(requests)
            outcomes = self._blocks.read(era, requests, deadline)
            if outcomes.count(ReadOutcome.OK) == len(outcomes):
                return outcomes
            gone = [
                r.key for r, o in zip(requests, outcomes, strict=True) if o in (ReadOutcome.MISS, ReadOutcome.DAMAGED)
            ]
            damaged = [r.key for r, o in zip(requests, outcomes, strict=True) if o is ReadOutcome.DAMAGED]
            if damaged:
                with self._lock:
                    self._num_damaged += len(damaged)
                self._blocks.forget(era, damaged, deadline)
        self._ledger.discard(gone)
        return outcomes

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        """Send the blocks that the servers do not hold, from where they lie.

        FULL when a server has no memory and evicts nothing; it gets no block for a second then. WITHDRAWN when a reset
        came in between.
        """
        for request in requests:
            split_key(request.key)
            if request.parent is not None:
                split_key(request.parent)
            if not request.buffer or frame_bytes(len(request.buffer)) > MAX_VALUE_BYTES:
                raise LayoutError(
                    f"a block of the redis tier has 1 to {MAX_VALUE_BYTES} bytes, not {len(request.buffer)}"
                )
        with self._call() as deadline:
            if not requests:
                return []
            era = self._era_or_none(deadline)
            if era is None:
                return [WriteOutcome.ERROR] * len(requests)
            if era.is_mute:
                return [WriteOutcome.WITHDRAWN] * len(requests)
            outcomes = self._blocks.write(era, requests, deadline)
            if self._epochs.current is not era:
                held = (WriteOutcome.STORED, WriteOutcome.ALREADY_STORED)
                return [WriteOutcome.WITHDRAWN if outcome in held else outcome for outcome in outcomes]
            self._ledger.add(
                (r.key, frame_bytes(len(r.buffer)))
                for r, outcome in zip(requests, outcomes, strict=True)
                if outcome is WriteOutcome.STORED
            )
            self._keep_up(deadline)
        return outcomes

    def remove(self, keys: Sequence[Key]) -> int:
        """Raises TierError when a server did not answer: what it holds may be found again."""
        check_keys(keys)
        with self._call() as deadline:
            self._ledger.discard(keys)
            if not keys or (era := self._era(deadline)).is_mute:
                return 0
            return self._blocks.remove(era, keys, deadline)

    def usage(self) -> TierUsage:
        """What this process put there, as far as it knows, and what the masters may use. From memory."""
        holdings = self._ledger.holdings
        capacity_bytes = self._servers.capacity_bytes
        return TierUsage(holdings.num_blocks, min(holdings.nbytes, capacity_bytes), capacity_bytes)

    def snapshot(self) -> RedisSnapshot:
        """As `usage`, and everything else that is counted. From memory."""
        usage = self.usage()
        routes = self._router.current
        return RedisSnapshot(
            num_blocks=usage.num_blocks,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            server_used_bytes=self._servers.used_bytes,
            connections=self._pool.num_open,
            connects=self._pool.num_connects,
            disconnects=self._pool.num_disconnects,
            redirects=self._router.num_redirects,
            errors=self._caller.errors,
            damaged=self._num_damaged,
            full_backoffs=self._backoff.num_begun,
            epoch=self.epoch,
            nodes={str(address): "master" for address in (routes.masters if routes and self._is_joined else ())},
        )

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        self._pool.check_integrity()
        with self._lock:
            is_quiet = not self._num_calls
            if is_quiet and self._pool.num_leased:
                raise IntegrityError(f"redis tier: {self._pool.num_leased} connections leased, and no call under way")

    def close(self) -> None:
        """Close every connection, which ends the calls under way. Idempotent; nothing in a fork's child."""
        if self.is_forked:
            return
        with self._lock:
            self._closed = True
        self._pool.close()

    # ---- calls under way -----------------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[float]:
        """A call, and the time by which it ends."""
        self.check_process()
        with self._lock:
            if self._closed:
                raise ClosedError("the redis tier is closed")
            self._num_calls += 1
        try:
            yield self._clock.now() + self._timeout_s
        finally:
            with self._lock:
                self._num_calls -= 1

    # ---- joining -------------------------------------------------------------------------------------------------

    def _try_to_join(self) -> None:
        try:
            self._join(self._clock.now() + self._timeout_s)
        except WrongModeError as error:
            self._notices.say("mode", str(error), level=logging.ERROR)
        except (ChannelError, TierError) as error:
            self._notices.say(
                "join",
                f"redis.url = {', '.join(self._settings.url)} is of no use yet: {error}; it joins by itself once the "
                "server answers, and until then nothing is stored there or read from there",
            )

    def _join(self, deadline: float) -> Era:
        """Know the routes, the memory and the epoch. Raises a ChannelError or TierError."""
        if not self._is_joined:
            routes = self._router.routes(deadline)
            failures = self._servers.refresh(routes, deadline)
            if len(failures) == len(routes.masters):
                raise next(iter(failures.values()))
            self._servers.check_mode(self._settings.mode)
            era = self._epochs.learn(deadline)
            self._is_joined = True
            return era
        return self._epochs.learn(deadline)

    def _era(self, deadline: float) -> Era:
        """The era, for calls that raise where the servers cannot be reached."""
        try:
            return self._join(deadline)
        except ChannelError as error:
            raise TierError(f"the redis tier: {error}") from error

    def _era_or_none(self, deadline: float) -> Era | None:
        try:
            return self._join(deadline)
        except WrongModeError as error:
            self._notices.say("mode", str(error), level=logging.ERROR)
        except (ChannelError, TierError) as error:
            self._notices.say("join", str(error))
        return None

    def _keep_up(self, deadline: float) -> None:
        """Once a second, behind a write: look at the memory, and keep the epoch in use."""
        routes = self._router.current
        if routes is None or not self._servers.begin_refresh():
            return
        try:
            self._servers.refresh(routes, deadline)
            self._epochs.remember(deadline)
        except (ChannelError, TierError):  # counted; the next call that needs the server tells
            return

    def _note_routes(self, routes: Routes) -> None:
        self._pool.keep_only(frozenset(routes.masters))
