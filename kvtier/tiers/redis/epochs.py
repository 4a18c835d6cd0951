"""The epoch: a number on the servers, part of every key, which a reset moves on so that older blocks are not found."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.calls import Caller, Failure
from kvtier.tiers.redis.channel import ChannelError
from kvtier.tiers.redis.exchange import Commands, commands
from kvtier.tiers.redis.replies import hint
from kvtier.tiers.redis.resp import KEY_ARGUMENT_BYTES, ErrorReply, Reply, encode
from kvtier.tiers.redis.slots import slot_of
from kvtier.tiers.redis.topology import Routes

__all__ = ["Era", "Epochs"]

logger = logging.getLogger("kvtier.tiers.redis")

SWEEP_S = 5.0
SCAN_COUNT = 1000
MAX_EPOCH = 1 << 62


@dataclass(frozen=True, slots=True)
class Era:
    """A stretch in which keys begin alike. Two are different ones even where their numbers agree."""

    number: int
    """Counts the resets that this tier has tried."""
    epoch: int
    prefix: str
    """Of every block's key."""
    is_mute: bool
    """A reset has failed: what is stored must not be found, and nothing is stored."""


class Epochs:
    """Reads and moves on the epoch of a tenant. Any thread; `start` is for one at a time.

    Every reset gets a number of its own, whoever else resets: the server counts. Where the counter was lost, as by
    eviction, it is moved past every number that this process knows.

    Mutable state: `_era`, replaced as a whole, guarded by `_lock`; None until a server has told the epoch.
    """

    def __init__(self, prefix: str, tenant: str, caller: Caller, clock: Clock) -> None:
        self._base = f"{prefix}:{tenant}:"
        self._name = f"{self._base}epoch"
        self._slot = slot_of(self._name)
        self._caller = caller
        self._clock = clock
        self._lock = threading.Lock()
        self._era: Era | None = None

    @property
    def current(self) -> Era | None:
        return self._era

    def learn(self, deadline: float) -> Era:
        """The era, asked for where it is not known. Raises a ChannelError or TierError."""
        era = self._era
        if era is not None:
            return era
        reply = self._caller.ask(self._slot, encode("GET", self._name), deadline)
        found = 0 if reply is None else self._number(reply)
        with self._lock:
            if self._era is None:
                self._era = Era(0, found, self._prefix(found), is_mute=False)
            return self._era

    def remember(self, deadline: float) -> None:
        """Put the number back where it was lost, or went back with a server that has forgotten a reset; and use it,
        that it be the last to be evicted. Raises a ChannelError or TierError."""
        era = self._era
        if era is None or not era.epoch or era.is_mute:
            return
        reply = self._caller.ask(self._slot, encode("GET", self._name), deadline)
        if reply is None:
            self._caller.ask(self._slot, encode("SET", self._name, era.epoch, "NX"), deadline)
        elif (behind := era.epoch - self._number(reply)) > 0:  # added, not set: others may do the same
            self._caller.ask(self._slot, encode("INCRBY", self._name, behind), deadline)

    def silence(self) -> None:
        """Until the next `start` that ends well nothing is found."""
        with self._lock:
            before = self._era or Era(0, 0, self._prefix(0), is_mute=False)
            self._era = Era(before.number + 1, before.epoch, before.prefix, is_mute=True)

    def start(self, epoch: int, deadline: float) -> Era:
        """Begin `epoch`, or a later one where that has been. Raises a ChannelError or TierError, and is mute then."""
        known = self._era
        self.silence()
        before = known.epoch if known is not None else 0
        lowest = max(epoch, before + 1)
        step = max(1, epoch - before)
        while True:
            found = self._number(self._caller.ask(self._slot, encode("INCRBY", self._name, step), deadline))
            if found >= lowest:
                break
            step = lowest - found
        with self._lock:
            number = self._era.number + 1 if self._era is not None else 0
            era = self._era = Era(number, found, self._prefix(found), is_mute=False)
        return era

    def sweep(self, prefix: str, routes: Routes, timeout_s: float) -> None:
        """Remove blocks whose keys begin so, for SWEEP_S at most; what is left is for eviction. Never raises a
        ChannelError.
        """
        end = self._clock.now() + SWEEP_S
        num_removed = 0
        for address in routes.masters:
            cursor = b"0"
            while True:
                if self._clock.now() >= end:
                    logger.info("the redis tier: %d blocks of an older epoch removed; the others age", num_removed)
                    return
                try:
                    cursor, number = self._sweep_some(address, prefix, cursor, self._clock.now() + timeout_s)
                except ChannelError as error:
                    logger.warning("the redis tier: blocks of an older epoch stay until they are evicted: %s", error)
                    break
                num_removed += number
                if cursor == b"0":
                    break

    def _sweep_some(self, address: Address, prefix: str, cursor: bytes, deadline: float) -> tuple[bytes, int]:
        scan = commands([encode("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", SCAN_COUNT)])
        self._drive(address, scan, deadline)
        match scan.answers[0]:
            case [bytes(following), [*names]]:
                # Another tenant's keys may begin so too, where a prefix has colons; theirs are longer, or shorter.
                nbytes = len(prefix) + KEY_ARGUMENT_BYTES
                doomed = [n for n in names if isinstance(n, bytes) and len(n) == nbytes and n[len(prefix) + 32] == 58]
            case other:
                raise ChannelError(f"{address} answered SCAN with {str(other)[:80]}")
        if doomed:
            unlink = commands([encode("UNLINK", name) for name in doomed])
            self._drive(address, unlink, deadline)
        return following, len(doomed)

    def _drive(self, address: Address, exchange: Commands, deadline: float) -> None:
        failures = self._caller.drive({address: exchange}, deadline)
        for error in failures.values():
            raise error

    def _prefix(self, epoch: int) -> str:
        return f"{self._base}{epoch}:"

    def _number(self, reply: Reply | Failure) -> int:
        if isinstance(reply, ErrorReply):
            raise TierError(
                f"the epoch of the redis tier, {self._name}: {reply.code}; {hint(reply) or reply.text[:80]}"
            )
        if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
            reply = int(reply)
        if not isinstance(reply, int) or not 0 <= reply <= MAX_EPOCH:
            raise TierError(f"the key {self._name} holds no epoch but {str(reply)[:40]}: remove it from the server")
        return reply
