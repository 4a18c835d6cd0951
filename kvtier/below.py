"""The tiers below host memory as a whole: their order, and what is asked of all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.clock import Clock
from kvtier.config import Settings
from kvtier.errors import ConfigError, TierError
from kvtier.executor import Executor
from kvtier.lower import LowerTier
from kvtier.metrics import LowerStats
from kvtier.opened import OpenedTier, open_disk, open_redis, open_server
from kvtier.slots import SlotPool
from kvtier.staging import Stager
from kvtier.tiers.host import HostTier

if TYPE_CHECKING:
    from kvtier.tiers.disk import Files

__all__ = ["LowerTiers", "open_tiers"]

logger = logging.getLogger("kvtier.store")


def open_tiers(
    settings: Settings, clock: Clock, files: Files | None = None, host_bytes: int | None = None
) -> list[OpenedTier]:
    """The lower tiers that the settings name, in the order in which they are asked. Blocks as opening each does; raises
    what that raises, and leaves none open then. host_bytes: of the host pool, where that is to be the server's."""
    opened: list[OpenedTier] = []
    try:
        if settings.disk.path:
            opened.append(open_disk(settings.disk, clock, files))
        if settings.server.url:
            opened.append(open_server(settings.server, clock, host_bytes))
        if settings.redis.url:
            opened.append(open_redis(settings.redis, clock))
        _agree(opened)
    except BaseException:
        for each in opened:
            each.tier.close()
        raise
    return opened


def _agree(opened: Sequence[OpenedTier]) -> None:
    """Tell tiers of this machine the latest epoch that any tier remembers: what they hold of before is of no use, and
    must be of none to a later process that cannot reach the tier which was told of the reset."""
    epoch = max((each.tier.epoch for each in opened), default=0)
    for each in opened:
        if each.tier.is_remote or each.tier.epoch >= epoch:
            continue
        try:
            each.tier.start_epoch(epoch)
        except TierError as error:
            logger.warning("%s: a process that cannot ask the others might find KV of before a reset", error)


class LowerTiers:
    """Owns the lower tiers of one store.

    Each is written to from host memory, by a queue of its own: there is no second way down. They are looked at, and
    asked, in their order. Calls that change them are the store's, one at a time; `tiers` may be read by any thread.

    Mutable state: `tiers`, replaced as a whole.
    """

    def __init__(self, host: HostTier, pool: SlotPool, stager: Stager, clock: Clock, max_age_s: float) -> None:
        self._host = host
        self._pool = pool
        self._stager = stager
        self._clock = clock
        self._max_age_s = max_age_s
        self.tiers: tuple[LowerTier, ...] = ()

    def add(self, opened: OpenedTier, executor: Executor | None = None, place: int | None = None) -> None:
        """Run it; it is asked after those before `place`, after all unless given. Blocks that come to host memory from
        now on go to it too."""
        place = len(self.tiers) if place is None else place
        lower = LowerTier(opened, self._host, self._pool, self._clock, self._max_age_s, executor)
        self._stager.attach(lower, place)
        self.tiers = (*self.tiers[:place], lower, *self.tiers[place:])

    def attach(self, opened: OpenedTier, epoch: int, place: int | None = None) -> None:
        """As `add`, of a store in use: what the tier holds of epochs before the store's is forgotten. Blocks; raises
        ConfigError where one of that name is there already, and what kept it from a new epoch. It is closed then."""
        try:
            if any(lower.name == opened.tier.name for lower in self.tiers):
                raise ConfigError(f"the store has a {opened.tier.name} tier: detach that first")
            if opened.tier.epoch < epoch:
                opened.tier.start_epoch(epoch)
            self.add(opened, place=place)
        except BaseException:
            opened.tier.close()
            raise

    def detach(self, name: str, timeout: float) -> None:
        """Close it within `timeout` seconds. Stages that read from it end; what is not written there is dropped, so
        `flush` first. Raises ConfigError where there is none of that name, and for one whose memory host memory is."""
        gone = self.find(name)
        if gone.tier.adopts:
            raise ConfigError(f"host.pool = 'server': host memory is the {name} tier's, which goes with the store")
        self.tiers = tuple(lower for lower in self.tiers if lower is not gone)
        gone.close(timeout)
        self._stager.detach(gone)

    def find(self, name: str) -> LowerTier:
        for lower in self.tiers:
            if lower.name == name:
                return lower
        there = ", ".join(lower.name for lower in self.tiers) or "none"
        raise ConfigError(f"the store has no {name} tier; its lower tiers are: {there}")

    def start_epoch(self, epoch: int) -> None:
        """All forget what they hold. Blocks; raises the first TierError, when all were told."""
        failures: list[TierError] = []
        for lower in self.tiers:
            try:
                lower.start_epoch(epoch)
            except TierError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def flush(self, timeout: float) -> int:
        """Wait until what is due below is written, at most `timeout` seconds; how many blocks are not."""
        deadline = time.monotonic() + timeout
        return sum(lower.flush(max(0.0, deadline - time.monotonic())) for lower in self.tiers)

    def stats(self) -> list[LowerStats]:
        return [lower.stats(self._stager.inflight_bytes_of(lower)) for lower in self.tiers]

    def close(self, timeout: float) -> None:
        """All at once, within `timeout` seconds: one that hangs takes no time from the others."""
        first, others = self.tiers[:1], self.tiers[1:]
        closing = [threading.Thread(target=each.close, args=(timeout,), name=f"closes {each.name}") for each in others]
        for thread in closing:
            thread.start()
        for lower in first:
            lower.close(timeout)
        for thread in closing:
            thread.join()
