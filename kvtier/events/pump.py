"""A store's KV events: who holds what, drained as it changes and published for one space."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from kvtier.errors import ConfigError
from kvtier.events.sources import (
    EventSpace,
    EventStore,
    WatchedLower,
    follow_host,
    follow_lower,
    held_by_host,
    held_by_lower,
    listing_of,
    medium_of,
)
from kvtier.events.tracker import TierEvents

if TYPE_CHECKING:
    from kvtier.config import EventSettings, Settings
    from kvtier.events.encoding import Event

__all__ = ["Publishes", "StoreEvents"]

logger = logging.getLogger("kvtier.events")

INTERVAL_S = 0.01
"""Between two drains: what comes and goes within it is not told, and what comes in pieces is told at once."""
LOOK_S = 1.0
"""How soon it is noticed that tiers were attached or detached, or a store reset that held nothing in host memory: of
these nobody tells."""
RETELL_S = 10.0
"""Everything is told anew at most so often, however many listeners ask for what is not kept."""
BATCH_BLOCKS = 1024
"""Blocks of one tier in one batch: about 100 KB where each continues no other."""
BATCHES_AT_ONCE = 8


class Publishes(Protocol):
    """Where batches go."""

    @property
    def num_dropped(self) -> int: ...

    def publish(self, events: Sequence[Event]) -> int | None: ...

    def close(self, timeout: float = 1.0) -> None: ...


class HasSettings(EventStore, Protocol):
    """A store that knows its settings."""

    @property
    def settings(self) -> Settings: ...


class _Followed:
    """One tier that is followed."""

    def __init__(self, tier: object, medium: str, tracker: TierEvents, unsubscribe: Callable[[], None]) -> None:
        self.tier = tier
        self.medium = medium
        self.tracker = tracker
        self.unsubscribe = unsubscribe
        self.has_ended = False


class StoreEvents:
    """Publishes what every tier of a store holds of one space, from a thread of its own, until closed.

    Events are drained at most every INTERVAL_S by the store's clock, of all tiers in one batch. A publisher's first
    batch clears what listeners know from another life of it. When a listener asks for a batch that is not kept any
    more, all that is held is told again.

    Mutable state: `_followed`, `_retold_at`, `_is_closed`, guarded by `_draining`; the flags are events.
    """

    def __init__(
        self, store: EventStore, space: EventSpace, settings: EventSettings, publisher: Publishes | None = None
    ) -> None:
        """Follows the tiers from now on; `start` begins to publish. With `settings.endpoint` off nothing is followed.

        publisher: in place of the one that the settings name. Raises ConfigError for an address that cannot be had, or
        where msgspec or pyzmq is not installed.
        """
        self._store = store
        self._space = space
        self._block_tokens = space.namespace.layout.block_tokens
        self._clock = store.clock
        self._pid = os.getpid()
        self._draining = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._must_retell = threading.Event()
        self._retold_at = self._clock.now() - RETELL_S
        self._followed: list[_Followed] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._publisher = publisher or self._open_publisher(settings)
        if self._publisher is not None:
            try:
                self._begin(self._publisher)
            except BaseException:
                self.close()
                raise

    def _begin(self, publisher: Publishes) -> None:
        from kvtier.events.encoding import AllBlocksCleared, events_of  # and with it msgspec

        self._events_of = events_of
        publisher.publish([AllBlocksCleared()])
        host = self._store.host
        tracker = TierEvents(self._space, held_by_host(host), on_change=self._changed.set)
        self._followed.append(_Followed(host, medium_of(host.name), tracker, follow_host(host, tracker)))
        self._follow_lower()

    @classmethod
    def open(cls, store: HasSettings, space: EventSpace) -> Self:
        """Begin to publish as the store's settings say, which may be not at all. Close it before the store."""
        events = cls(store, space, store.settings.events)
        events.start()
        return events

    def _open_publisher(self, settings: EventSettings) -> Publishes | None:
        if settings.endpoint == "off":
            return None
        try:
            from kvtier.events.publisher import EventPublisher
        except ImportError as error:
            raise ConfigError(
                f"events.endpoint = {settings.endpoint!r} needs msgspec and pyzmq ({error}): "
                f"pip install 'kvtier[events]', or leave it off"
            ) from error
        return EventPublisher(
            settings.endpoint,
            None if settings.replay_endpoint == "off" else settings.replay_endpoint,
            topic=settings.topic,
            buffer_batches=settings.buffer_batches,
            clock=self._clock,
            on_lost=self._note_lost,
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self._publisher is not None

    @property
    def num_dropped(self) -> int:
        """Batches that were not sent because too many waited; the replay address has them."""
        return 0 if self._publisher is None else self._publisher.num_dropped

    def start(self) -> None:
        """Publish from a thread of its own, from now on."""
        if self._publisher is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
            self._thread.start()

    def flush(self) -> bool:
        """Publish what has changed, in a few batches at most. Whether there is more. Not for the engine's step. Raises
        what a tier raised, when the others' changes are told; its own are told the next time."""
        with self._draining:
            if self._publisher is None or self._is_closed:
                return False
            self._follow_lower()
            self._retell_if_due()
            for _ in range(BATCHES_AT_ONCE):
                events, failure = self._drain()
                if events:
                    self._publisher.publish(events)
                if failure is not None:
                    raise failure
                if not self._has_changes():
                    return False
            return True

    def _drain(self) -> tuple[list[Event], Exception | None]:
        """One batch, and what kept it from being all of it."""
        events: list[Event] = []
        failure: Exception | None = None
        for each in self._followed:
            if each.tracker.has_changes:
                try:
                    changes = each.tracker.drain(BATCH_BLOCKS)
                except Exception as error:  # noqa: BLE001 - raised when all were asked
                    failure = error
                    continue
                events += self._events_of(changes, each.medium, self._block_tokens)
        return events, failure

    def close(self, timeout: float = 1.0) -> None:
        """Publish what has changed, and end within `timeout` seconds, and one more where a thread hangs. Idempotent; in
        a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(timeout / 2)
        if self._draining.acquire(timeout=timeout / 4):
            try:
                self._is_closed = True
                for each in self._followed:
                    each.unsubscribe()
                self._followed.clear()
            finally:
                self._draining.release()
        if self._publisher is not None:
            self._publisher.close(max(0.0, deadline - time.monotonic()))

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        has_failed = False
        has_more = True
        while not self._ended.is_set():
            if not has_more:
                self._changed.wait(LOOK_S)
            self._changed.clear()
            try:
                has_more = self.flush()
            except Exception:
                if not has_failed:
                    logger.exception("KV events: what tiers hold could not be told, and is tried again; said once")
                has_failed, has_more = True, False
            self._pause()
        try:
            self.flush()
        except Exception:
            logger.debug("KV events: the last changes could not be told", exc_info=True)

    def _pause(self) -> None:
        until = self._clock.now() + INTERVAL_S
        while not self._ended.is_set() and 0.0 < (left := until - self._clock.now()) <= INTERVAL_S:
            self._ended.wait(left)

    def _note_lost(self) -> None:
        self._must_retell.set()
        self._changed.set()

    def _retell_if_due(self) -> None:
        now = self._clock.now()
        if self._must_retell.is_set() and not 0.0 <= now - self._retold_at < RETELL_S:
            self._must_retell.clear()
            self._retold_at = now
            for each in self._followed:
                each.tracker.retell()

    def _has_changes(self) -> bool:
        return any(each.tracker.has_changes for each in self._followed)

    def _follow_lower(self) -> None:
        """Follow the lower tiers that the store has by now. Those that it has no more end, and go once all is told;
        until then none of their name is followed, whose blocks would be told before the others' removal."""
        there: list[WatchedLower] = list(self._store.lower)
        for each in self._followed:
            is_there = each.tier is self._store.host or any(each.tier is tier for tier in there)
            if not is_there and not each.has_ended:
                each.has_ended = True
                each.unsubscribe()
                each.tracker.end()
        self._followed = [each for each in self._followed if not each.has_ended or each.tracker.has_changes]
        for tier in there:
            medium = medium_of(tier.name)
            if all(each.medium != medium for each in self._followed):
                held, listing = held_by_lower(tier), listing_of(tier)
                tracker = TierEvents(self._space, held, listing, on_change=self._changed.set)
                self._followed.append(_Followed(tier, medium, tracker, follow_lower(tier, tracker)))
