"""Whose turn it is to be staged: requests that wait for one, in their order, and how long each of them may."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from kvtier.clock import Clock
from kvtier.restore import RestoreDecision
from kvtier_connectors.arrival import Arrival, Queue

__all__ = ["MAX_TURNS", "StageTurns"]

MAX_TURNS = 64
"""Waiting requests that a step looks at, at most, so that it stays short."""
HELD_LOOK_S = 0.1
"""How often the next deadline is looked at while no time counts."""


class StageTurns:
    """Requests whose stage cannot begin yet. Engine's thread only.

    Each gives up when its own wait is over. While they are *held*, for want of room that is kept for requests that wait
    for the engine, and the engine computes, no time counts: others go first, whatever the tiers do, and that is
    ordinary queueing. An engine that computes nothing does not make them wait for long.

    Mutable state: `_waiting`; `_timers`, at the latest when each of them is to be looked at; `_is_held`; `_held_s`, how
    long that was, in all, while the engine computed; `_seen_at` and `_has_computed`, of the last tick and since.
    """

    def __init__(self, decision: RestoreDecision, clock: Clock) -> None:
        self._decision = decision
        self._clock = clock
        self._waiting = Queue()
        self._timers: list[tuple[float, int, Arrival]] = []
        self._serials = itertools.count()
        self._seen_at = clock.now()
        self._held_s = 0.0
        self._is_held = False
        self._has_computed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, arrival: Arrival) -> bool:
        return arrival in self._waiting

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._waiting)

    @property
    def first(self) -> Arrival | None:
        return self._waiting.first

    def add(self, arrival: Arrival) -> None:
        """It waits, in the order of arrival: one that was preempted, or lost what it had, goes before all that came
        later. Idempotent."""
        if arrival not in self._waiting:
            arrival.held_s = self._held_s
            self._waiting.add(arrival)
        self._set_timer(arrival)

    def discard(self, arrival: Arrival) -> None:
        """It waits no more. Idempotent."""
        self._waiting.discard(arrival)

    def note_work(self) -> None:
        """The engine computed something since the last tick."""
        self._has_computed = True

    def tick(self, *, is_held: bool) -> None:
        """Once a step, before anything else: time went by, in which they were held or not."""
        now = self._clock.now()
        if now < self._seen_at:  # the clock went back, and timers would ring as much too late: look when each is due
            self._timers = [(now, next(self._serials), arrival) for arrival in self._waiting]
        elif is_held and self._has_computed:
            self._held_s += now - self._seen_at
        self._seen_at, self._has_computed, self._is_held = now, False, is_held

    def settle(self, arrival: Arrival) -> None:
        """Take what does not count off its wait."""
        self._decision.excuse(arrival.episode, self._held_s - arrival.held_s)
        arrival.held_s = self._held_s

    def overdue(self) -> Iterator[Arrival]:
        """Those that are to be looked at: their wait is over, unless it is not counted."""
        for _ in range(MAX_TURNS):
            if not (self._timers and self._timers[0][0] <= self._clock.now()):
                return
            arrival = heapq.heappop(self._timers)[2]
            if arrival in self._waiting:
                yield arrival

    def look_later(self, arrival: Arrival) -> None:
        """Its wait goes on."""
        self._set_timer(arrival)

    def next_deadline(self) -> float | None:
        """When the first of these waits is to be looked at."""
        while self._timers and self._timers[0][2] not in self._waiting:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _set_timer(self, arrival: Arrival) -> None:
        if len(self._timers) > 2 * len(self._waiting) + MAX_TURNS:
            self._timers = [timer for timer in self._timers if timer[2] in self._waiting]
            heapq.heapify(self._timers)
        now, due = self._clock.now(), arrival.episode.deadline
        when = now if due is None else due
        heapq.heappush(
            self._timers, (max(when, now + HELD_LOOK_S) if self._is_held else when, next(self._serials), arrival)
        )
