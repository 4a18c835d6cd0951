"""Whose turn a step is when prompts and decodes both want it, so that prompts take a set share of the compute time."""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import NamedTuple

from kvtier.errors import ConfigError

__all__ = ["ComputeShare", "WorkClass", "check_share"]


class WorkClass(Enum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> WorkClass:
        return WorkClass.DECODE if self is WorkClass.PREFILL else WorkClass.PREFILL


class _Reservation(NamedTuple):
    seconds: float
    """Of runtime, expected at dispatch."""
    weight: float
    """The share of its class at dispatch."""


class _Account:
    """One class: the runtime it was charged, what its quanta in flight are expected to add, its last measured cost."""

    def __init__(self) -> None:
        self.charged = 0.0
        self.last_seconds: float | None = None
        self.reservations: deque[_Reservation] = deque()

    @property
    def runtime(self) -> float:
        # Summed anew, not kept: what is added and taken back does not cancel exactly in floating point.
        return self.charged + sum(reservation.seconds for reservation in self.reservations)

    @property
    def may_dispatch(self) -> bool:
        """Until a cost was measured, quanta in flight weigh nothing: more than one of them would be free."""
        return self.last_seconds is not None or not self.reservations


class ComputeShare:
    """Divides contended steps between prompts and decodes by virtual runtime: seconds divided by the class's share.

    The class with the lower runtime is next, so that over time prompts take `share` of the seconds, whatever a step of
    either costs. Only steps that both wanted count ("contended"); time that one had to itself gives no credit and no
    debt. Steps that all measure 0 s charge nobody, and ties go to the decodes.

    For each step: `select`; then `dispatch`, and `record` when it was measured, or `withdraw` when it was empty. Steps
    of a class are recorded in the order of their dispatch.

    Pure: no clock, no I/O. Not thread-safe. Mutable state: the share and two accounts.
    """

    def __init__(self, share: float | None) -> None:
        """share: of the compute time, for prompts, between 0 and 1; None turns it off.

        Raises ConfigError for another value.
        """
        self._share = check_share(share, "share")
        self._accounts = {work: _Account() for work in WorkClass}

    @property
    def is_on(self) -> bool:
        """Off, `select` is not to be called, and no quantum that begins is charged."""
        return self._share is not None

    def runtime(self, work: WorkClass) -> float:
        """Virtual seconds of a class since contention began, those expected of its quanta in flight included."""
        return self._accounts[work].runtime

    def select(self, decode_runnable: bool, prefill_runnable: bool) -> WorkClass | None:
        """The class to run next.

        None when neither can run, and when both wait for the first measurement of what is in flight.
        """
        assert self.is_on, "select is not used when the share is off"
        if not (decode_runnable and prefill_runnable):
            self._end_contention()
            if decode_runnable:
                return WorkClass.DECODE
            return WorkClass.PREFILL if prefill_runnable else None
        return self._choose()

    def dispatch(self, work: WorkClass, contended: bool) -> None:
        """A quantum of `work` begins. contended: both classes were runnable when it was selected."""
        weight = self._weight(work)
        if contended and weight is not None:
            account = self._accounts[work]
            account.reservations.append(_Reservation((account.last_seconds or 0.0) / weight, weight))

    def record(self, work: WorkClass, seconds: float, contended: bool) -> None:
        """The oldest quantum of `work` in flight took `seconds`. contended: as at its dispatch.

        A time that is not above 0, or not finite, charges nothing. Without a quantum in flight nothing happens.
        """
        account = self._accounts[work]
        if not contended or not account.reservations:
            return
        weight = account.reservations.popleft().weight
        if not 0 < seconds < math.inf:
            return
        charge = seconds / weight
        account.last_seconds = seconds
        account.charged += charge
        # An outlier, or measurements that arrive late, must not keep the other class running for long.
        trailing = self._accounts[work.other]
        trailing.charged += max(0.0, account.runtime - charge - trailing.runtime)

    def withdraw(self, work: WorkClass) -> None:
        """The contended quantum of `work` that was dispatched last turned out empty: nobody is charged for it."""
        reservations = self._accounts[work].reservations
        if reservations:
            reservations.pop()

    def reconfigure(self, share: float | None) -> None:
        """Another share from now on. Quanta in flight settle with the share of their dispatch; other debt is dropped.

        Raises ConfigError, with nothing changed, for a value that is out of range.
        """
        self._share = check_share(share, "share")
        self._forget_charges()

    def _choose(self) -> WorkClass | None:
        prefill, decode = self._accounts[WorkClass.PREFILL], self._accounts[WorkClass.DECODE]
        first = WorkClass.PREFILL if prefill.runtime < decode.runtime else WorkClass.DECODE
        return next((work for work in (first, first.other) if self._accounts[work].may_dispatch), None)

    def _end_contention(self) -> None:
        """Contention is over, unless a quantum is in flight: a class that cannot run only because its own step has not
        come back has not left. With uncontended steps ignored, the next contention begins with both at 0."""
        if not any(account.reservations for account in self._accounts.values()):
            self._forget_charges()

    def _forget_charges(self) -> None:
        for account in self._accounts.values():
            account.charged = 0.0

    def _weight(self, work: WorkClass) -> float | None:
        if self._share is None:
            return None
        return self._share if work is WorkClass.PREFILL else 1 - self._share


def check_share(share: float | None, name: str) -> float | None:
    """`share` itself. Raises ConfigError, which names the setting, unless it is None or a number between 0 and 1."""
    if share is not None and not (type(share) in (int, float) and 0 < share < 1):
        raise ConfigError(f"{name} must be None or a number above 0 and below 1, not {share!r}")
    return share
