"""A circuit breaker: a sick device is left alone for a while and then asked once, instead of failing every call.

No I/O, no threads, and no call of anyone's code but the clock's; any thread may call anything here, and nothing blocks.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from enum import StrEnum

from kvtier.clock import Clock
from kvtier.errors import ConfigError

__all__ = ["Breaker", "BreakerSnapshot", "BreakerState", "Permit"]


class BreakerState(StrEnum):
    """What happens to a call now."""

    CLOSED = "closed"
    """It is let through."""
    OPEN = "open"
    """It is refused; when the cool-down is over, the next one is let through as the probe."""
    HALF_OPEN = "half_open"
    """The probe is under way; others are refused until it is reported."""


@dataclass(frozen=True, slots=True)
class BreakerSnapshot:
    """One moment of a breaker."""

    state: BreakerState
    failures_in_a_row: int
    """Failures since the last success; failed probes count."""
    open_for_s: float
    """Seconds since the breaker left CLOSED, through all failed probes; 0.0 while closed."""
    next_probe_in_s: float
    """Seconds until a call would be let through; 0.0 when one would be now."""
    times_opened: int
    """How often the breaker left CLOSED."""
    refused: int
    """Calls that got no permit."""


class Permit:
    """Leave to make one call, to be reported once: of `succeed`, `fail` and `cancel` the first counts.

    What a report does depends on what became of the breaker since:

    * The probe's decides: a success closes the breaker, a failure opens it again for twice as long.
    * While it stays closed, a success ends the row of failures, and a failure adds to it.
    * A call from before the breaker opened says nothing of the device as it is now when it fails. When it succeeds,
      the device lives after all, as one does that stalled and came back: the next probe is let through after the
      shortest cool-down from now, where a longer one was running. It does not close the breaker, because a success
      that late is also what a device gives that is too slow to be used.
    * A call from before the breaker closed again says nothing.
    """

    __slots__ = ("_breaker", "_generation", "_reported")

    def __init__(self, breaker: Breaker, generation: int) -> None:
        self._breaker = breaker
        self._generation = generation
        self._reported = False

    def succeed(self) -> None:
        """The device answered."""
        self._breaker._succeed(self)

    def fail(self) -> None:
        """The device failed."""
        self._breaker._fail(self)

    def cancel(self) -> None:
        """Nothing was tried. Where this was the probe, the next call is."""
        self._breaker._cancel(self)

    def overdue(self) -> None:
        """The call has not come back in time: counts as its failure and opens the breaker at once.

        Told again it does nothing; what is reported afterwards is of a call from before the breaker opened.
        """
        self._breaker._call_overdue(self)


class Breaker:
    """CLOSED until `failures` calls in a row have failed, or one is overdue; then OPEN for a cool-down; then one probe.

    cooldown_s: the first cool-down; each failed probe doubles it, up to `max_cooldown_s`, and so does a device that is
    sick again within `max_cooldown_s` of a probe that succeeded: it answers probes, and nothing else. probe_timeout_s:
    a probe that was not reported for so long, or for the cool-down where that is longer, is given up, and the next call
    is the probe.

    Mutable state: everything, guarded by `_lock`.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        failures: int = 3,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 60.0,
        probe_timeout_s: float = 10.0,
    ) -> None:
        if failures < 1 or not 0 < cooldown_s <= max_cooldown_s or not probe_timeout_s >= 0:
            raise ConfigError(
                "a breaker needs failures >= 1, 0 < cooldown_s <= max_cooldown_s and probe_timeout_s >= 0, not "
                f"{failures}, {cooldown_s:g}, {max_cooldown_s:g} and {probe_timeout_s:g}"
            )
        self._clock = clock
        self._failures = failures
        self._min_cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._probe_timeout_s = probe_timeout_s
        self._lock = threading.Lock()
        self._cooldown_s = cooldown_s
        self._closed_at = -math.inf
        self._failures_in_a_row = 0
        self._opened_at: float | None = None  # None: closed
        self._probe: Permit | None = None
        self._wait_from = 0.0  # the next probe is due `_wait_s` seconds after this
        self._wait_s = 0.0
        self._generation = 0  # how often the breaker closed again
        self._times_opened = 0
        self._refused = 0

    def would_allow(self) -> bool:
        """Whether `try_acquire` would now give a permit. Changes nothing."""
        with self._lock:
            return self._next_probe_in_s(self._clock.now()) <= 0

    @property
    def is_closed(self) -> bool:
        """Whether every call is let through. Never blocks."""
        return self._opened_at is None

    def try_acquire(self, *, may_probe: bool = True) -> Permit | None:
        """Leave for one call, or None where it is refused. may_probe: whether it would do as the probe."""
        with self._lock:
            now = self._clock.now()
            if self._next_probe_in_s(now) > 0 or not (may_probe or self._opened_at is None):
                self._refused += 1
                return None
            permit = Permit(self, self._generation)
            if self._opened_at is not None:
                self._probe = permit
                self._wait(now, max(self._cooldown_s, self._probe_timeout_s))
            return permit

    def trip(self) -> None:
        """Open at once, whatever was counted; a probe under way counts as failed. Does nothing while open."""
        with self._lock:
            if self._opened_at is None or self._probe is not None:
                self._failures_in_a_row += 1
                self._open()

    def snapshot(self) -> BreakerSnapshot:
        with self._lock:
            now = self._clock.now()
            return BreakerSnapshot(
                state=self._state(),
                failures_in_a_row=self._failures_in_a_row,
                open_for_s=0.0 if self._opened_at is None else max(0.0, now - self._opened_at),
                next_probe_in_s=self._next_probe_in_s(now),
                times_opened=self._times_opened,
                refused=self._refused,
            )

    # ---- reports of permits --------------------------------------------------------------------------------------

    def _succeed(self, permit: Permit) -> None:
        with self._lock:
            if not self._take_report(permit):
                return
            if self._probe is permit:
                self._close()
            elif self._opened_at is None:
                if permit._generation == self._generation:
                    self._failures_in_a_row = 0
            elif self._probe is None:
                now = self._clock.now()
                if self._next_probe_in_s(now) > self._min_cooldown_s:
                    self._wait(now, self._min_cooldown_s)

    def _fail(self, permit: Permit) -> None:
        with self._lock:
            if self._take_report(permit):
                self._count_failure(permit, at_once=False)

    def _cancel(self, permit: Permit) -> None:
        with self._lock:
            if self._take_report(permit) and self._probe is permit:
                self._probe = None
                self._wait_s = 0.0

    def _call_overdue(self, permit: Permit) -> None:
        with self._lock:
            if not permit._reported:
                self._count_failure(permit, at_once=True)

    # ---- under the lock ------------------------------------------------------------------------------------------

    @staticmethod
    def _take_report(permit: Permit) -> bool:
        first, permit._reported = not permit._reported, True
        return first

    def _count_failure(self, permit: Permit, *, at_once: bool) -> None:
        if self._probe is permit:
            self._failures_in_a_row += 1
            self._open()
        elif self._opened_at is None and permit._generation == self._generation:
            self._failures_in_a_row += 1
            if at_once or self._failures_in_a_row >= self._failures:
                self._open()

    def _open(self) -> None:
        now = self._clock.now()
        if self._opened_at is None:
            self._opened_at = now
            self._times_opened += 1
            is_relapse = 0.0 <= now - self._closed_at < self._max_cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s) if is_relapse else self._min_cooldown_s
        else:
            self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
        self._probe = None
        self._wait(now, self._cooldown_s)

    def _close(self) -> None:
        self._opened_at = None
        self._closed_at = self._clock.now()
        self._probe = None
        self._failures_in_a_row = 0
        self._generation += 1

    def _wait(self, now: float, seconds: float) -> None:
        self._wait_from = now
        self._wait_s = seconds

    def _next_probe_in_s(self, now: float) -> float:
        if self._opened_at is None or now < self._wait_from:  # a clock that went back cannot say when: ask the device
            return 0.0
        return max(0.0, self._wait_from + self._wait_s - now)

    def _state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._probe is None else BreakerState.HALF_OPEN
