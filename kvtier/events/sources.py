"""Where word of blocks that came and went is from: host memory, and the tiers below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvtier.clock import Clock
from kvtier.events.tracker import Held, Listing, TierEvents
from kvtier.index import BlockState
from kvtier.keys import BlockDigest, Key, Namespace, make_key
from kvtier.tiers.host import HostTier
from kvtier.tiers.reservation import Eviction

__all__ = [
    "EventSpace",
    "EventStore",
    "ListsBlocks",
    "WatchedLower",
    "follow_host",
    "follow_lower",
    "held_by_host",
    "held_by_lower",
    "listing_of",
    "medium_of",
]


class EventSpace(Protocol):
    """The part of a store that events are told of."""

    namespace: Namespace

    @property
    def digest(self) -> bytes:
        """The namespace's digest in the present epoch: another one after a reset."""


class WatchedLower(Protocol):
    """A tier below host memory, as its events need it. Calls come from any thread, and none may block."""

    name: str

    def subscribe(
        self,
        on_stored: Callable[[Sequence[tuple[Key, Key | None]]], None],
        on_gone: Callable[[Sequence[Key]], None],
    ) -> Callable[[], None]:
        """Call back, after the fact and on the thread that learnt it, of blocks that are there by now, with their
        parents, and of blocks that are there no more. Callbacks are quick and do not raise."""

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """Which blocks are there, from memory."""


@runtime_checkable
class ListsBlocks(Protocol):
    """A lower tier that can say what it holds, so that blocks found at its opening are told too."""

    def keys(self, namespace: bytes) -> Sequence[tuple[Key, Key | None]]:
        """Every block of that namespace digest, with its parent where that is known. May take time in proportion."""


class EventStore(Protocol):
    """The store, as its events need it."""

    @property
    def clock(self) -> Clock: ...

    @property
    def host(self) -> HostTier: ...

    @property
    def lower(self) -> Sequence[WatchedLower]: ...


def medium_of(tier: str) -> str:
    """A tier's name as listeners read it; host memory has the name that vLLM gives it."""
    return "CPU" if tier == HostTier.name else tier.upper()


def held_by_host(host: HostTier) -> Held:
    """Asks which blocks host memory holds."""

    def held(namespace: bytes, digests: Sequence[BlockDigest]) -> list[bool]:
        return [state is BlockState.COMMITTED for state in host.states(namespace, digests)]

    return held


def held_by_lower(lower: WatchedLower) -> Held:
    """Asks which blocks a lower tier holds."""

    def held(namespace: bytes, digests: Sequence[BlockDigest]) -> list[bool]:
        return lower.held([make_key(namespace, digest) for digest in digests])

    return held


def listing_of(lower: WatchedLower) -> Listing | None:
    """What a lower tier holds, if it can say so."""
    return lower.keys if isinstance(lower, ListsBlocks) else None


def follow_host(host: HostTier, tracker: TierEvents) -> Callable[[], None]:
    """Tell the tracker what comes to and leaves host memory. Returns a call that ends it."""

    def stored(blocks: Sequence[tuple[Key, Key | None]], came_from: str | None) -> None:
        del came_from
        tracker.note_stored(blocks)

    def gone(evicted: Sequence[Eviction]) -> None:
        tracker.note_gone([Key(item.namespace + item.digest) for item in evicted])

    return host.subscribe(on_commit=stored, on_evict=gone)


def follow_lower(lower: WatchedLower, tracker: TierEvents) -> Callable[[], None]:
    """Tell the tracker what comes to and leaves a lower tier. Returns a call that ends it."""
    return lower.subscribe(tracker.note_stored, tracker.note_gone)
