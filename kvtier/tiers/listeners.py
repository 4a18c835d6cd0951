"""Who is told of the host tier's blocks: of those that came, and of those that went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec

from kvtier.keys import Key, make_key
from kvtier.tiers.reservation import Eviction, Reservation

__all__ = ["Listened", "OnCommit", "OnEvict"]

logger = logging.getLogger("kvtier.tiers")

P = ParamSpec("P")
OnEvict = Callable[[Sequence[Eviction]], None]
OnCommit = Callable[[Sequence[tuple[Key, Key | None]], str | None], None]


class Listened:
    """Base of what tells. Mutable state: the lists of callbacks, each replaced as a whole."""

    def __init__(self) -> None:
        self._on_evict: list[OnEvict] = []
        self._on_commit: list[OnCommit] = []

    def subscribe(self, *, on_evict: OnEvict | None = None, on_commit: OnCommit | None = None) -> Callable[[], None]:
        """Call back, on the thread that caused it and without our lock, after blocks went or were committed.

        `on_commit` gets (key, parent's key) pairs, before the blocks can be evicted, and the name of the lower tier
        that they came from (None: from an engine). It is the write-behind hook: a lower tier's queue leases there what
        it wants to write. Callbacks must be quick; what one raises is logged, and hurts nobody else. Returns a call
        that ends the subscription.
        """
        if on_evict is not None:
            self._on_evict = [*self._on_evict, on_evict]
        if on_commit is not None:
            self._on_commit = [*self._on_commit, on_commit]

        def unsubscribe() -> None:
            self._on_evict = [callback for callback in self._on_evict if callback is not on_evict]
            self._on_commit = [callback for callback in self._on_commit if callback is not on_commit]

        return unsubscribe

    def _tell_evicted(self, evicted: Sequence[Eviction]) -> None:
        if evicted:
            _tell(self._on_evict, evicted)

    def _tell_committed(self, reservations: Sequence[Reservation], came_from: str | None) -> None:
        keys: list[tuple[Key, Key | None]] = []
        for reservation in reservations:
            space, parent = reservation.namespace, reservation.parent
            above = None if parent is None else make_key(space, parent)
            keys.append((make_key(space, reservation.digest), above))
        if keys:
            _tell(self._on_commit, keys, came_from)


def _tell(callbacks: Sequence[Callable[P, None]], *told: P.args, **more: P.kwargs) -> None:
    for callback in callbacks:
        try:
            callback(*told, **more)
        except Exception:  # it is somebody else's, and the blocks of all others are in our hands
            logger.exception("whoever follows what comes to host memory and leaves it failed: %r", callback)
