"""Whether a store that finds no slot is put off or dropped."""

from __future__ import annotations

from kvtier.clock import Clock
from kvtier.store import Space

__all__ = ["LOOK_S", "MAX_WAIT_S", "RoomWait"]

MAX_WAIT_S = 0.5
"""Without a slot, after which blocks are dropped for want of one. A kvtier-server has some in milliseconds, unless
others hold all there are."""
LOOK_S = 0.005
"""After which an engine without anything to do looks again."""


class RoomWait:
    """Since when there is no slot, of a host pool that gets some by itself. Engine's thread only."""

    def __init__(self, space: Space, clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self._full_since: float | None = None

    @property
    def is_worth_it(self) -> bool:
        """Whether a slot is awaited now."""
        return self._full_since is not None and self._is_coming(self._full_since)

    def note_full(self) -> bool:
        """There was no slot: whether one is worth waiting for."""
        if self._full_since is None or self._clock.now() < self._full_since:
            self._full_since = self._clock.now()
        return self._is_coming(self._full_since)

    def note_room(self) -> None:
        """There was one."""
        self._full_since = None

    def next_look(self, end: float | None) -> float | None:
        """When to look again whether there is one, or at `end` where that is earlier."""
        if not self.is_worth_it:
            return end
        soon = self._clock.now() + LOOK_S
        return soon if end is None else min(soon, end)

    def _is_coming(self, since: float) -> bool:
        return self._space.gets_room and self._clock.now() - since < MAX_WAIT_S
