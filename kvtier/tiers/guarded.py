"""A tier that may be sick: its exceptions become outcomes, and a breaker leaves it alone while it fails or hangs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvtier.breaker import Breaker, Permit
from kvtier.clock import Clock
from kvtier.decisions import Decision
from kvtier.errors import ClosedError, ForkedError
from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.wrapper import TierWrapper

__all__ = ["GuardedTier"]

logger = logging.getLogger("kvtier.tiers")

_KNOWN_BY_HEART = (WriteOutcome.ALREADY_STORED, WriteOutcome.WITHDRAWN)

_FAILED = (ReadOutcome.ERROR, WriteOutcome.ERROR)

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class _Call:
    """A read or write that the tier has not come back from."""

    __slots__ = ("permit", "start", "tripped")

    def __init__(self, permit: Permit, start: float) -> None:
        self.permit = permit
        self.start = start
        self.tripped = False


class GuardedTier(TierWrapper):
    """Reads and writes go through the breaker; where it refuses, every block is REFUSED and the tier is not touched.
    So does whatever else asks a remote tier: where that is refused or fails, nothing is there.

    What counts as a failure of the device: an exception, any block that ended in ERROR, and a call that took longer
    than `timeout_s`. Anything else is an answer, a miss and a full tier too, but for a write of blocks that were all
    stored before or withdrawn: a tier knows that by heart, and a hung device would pass its probe by it. A call that
    takes longer than `timeout_s` opens the breaker at once, when it comes back badly or when someone looks before that
    (`is_available`, `num_overdue` or another call); nothing can end it, so its thread stays away until the device lets
    it go. When it comes back well after all, the breaker asks the device soon.

    While the breaker of a remote tier is not closed no call reaches the tier but `probe`, which nobody waits for: a
    request that was the probe would wait in vain once more each time.

    Raises ClosedError and ForkedError of the tier, which are no sickness, and nothing else from reads, writes, `touch`
    and `contains`. Adds no waiting of its own: whatever blocks is the tier.

    Mutable state: `_calls`, `_errors`, `_is_told_sick`, `_last_words`, guarded by `_lock`, which is never held while
    the tier works.
    Lock order: `_lock`, then the breaker's.
    """

    def __init__(
        self,
        tier: Tier,
        breaker: Breaker,
        clock: Clock,
        timeout_s: float,
        on_sick: Callable[[], None] = lambda: None,
    ) -> None:
        """on_sick: told, without a lock, by the thread of a call after which the breaker is not closed."""
        super().__init__(tier)
        self._on_sick = on_sick
        self._breaker = breaker
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}  # by a number of its own, oldest first
        self._num_calls = 0
        self._errors: Counter[str] = Counter()
        self._is_told_sick = False
        self._last_words = ""  # of the last exception, until they are told

    @property
    def breaker(self) -> Breaker:
        return self._breaker

    @property
    def is_available(self) -> bool:
        """Whether a call would be let through now. Never blocks; meant to be asked often, by any thread."""
        self._trip_overdue()
        return self._breaker.would_allow()

    @property
    def num_overdue(self) -> int:
        """Calls under way for longer than `timeout_s`: so many threads are away. Never blocks."""
        return self._trip_overdue()

    @property
    def errors(self) -> Mapping[str, int]:
        """Exceptions of the tier that became outcomes, by type."""
        with self._lock:
            return dict(self._errors)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """As the tier says; nothing is there where that raises, nor in a remote tier that is sick."""
        return self.look(keys) or [False] * len(keys)

    def look(self, keys: Sequence[Key]) -> list[bool] | None:
        """As `contains`; None where the tier was not asked, or did not answer."""
        if self.is_remote:
            return self._guarded("contains", self._inner.contains, keys, None, None, _answered)
        try:
            return self._inner.contains(keys)
        except (ClosedError, ForkedError):
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - counted and logged
            self._count(error, "contains")
            return None

    def touch(self, keys: Sequence[Key]) -> None:
        if self.is_remote:
            self._guarded("touch", self._inner.touch, keys, None, None, _untold)
        else:
            self._inner.touch(keys)

    def tell(self, decisions: Sequence[Decision]) -> None:
        self._guarded("tell", self._inner.tell, decisions, None, None, _untold)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        refused, failed = ([outcome] * len(requests) for outcome in (ReadOutcome.REFUSED, ReadOutcome.ERROR))
        return self._guarded("read", self._inner.read, requests, refused, failed, _verdict)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        refused, failed = ([outcome] * len(requests) for outcome in (WriteOutcome.REFUSED, WriteOutcome.ERROR))
        return self._guarded("write", self._inner.write, requests, refused, failed, _verdict)

    def try_probe(self) -> bool:
        """Ask a remote tier whether it is well again, if that is due; whether it was asked. Blocks as `probe` does."""
        self._trip_overdue()
        if self._breaker.is_closed or (permit := self._breaker.try_acquire()) is None:
            return False
        self._call("probe", self._inner.probe, permit, None, _answered)
        return True

    def _guarded(
        self,
        verb: str,
        operation: Callable[[Sequence[_Request]], _Answer],
        requests: Sequence[_Request],
        refused: _Answer,
        failed: _Answer,
        judge: Callable[[_Answer], bool | None],
    ) -> _Answer:
        if not requests:  # would be a probe that tries nothing
            return operation(requests)
        self._trip_overdue()
        permit = self._breaker.try_acquire(may_probe=not self.is_remote)
        if permit is None:
            return refused
        return self._call(verb, lambda: operation(requests), permit, failed, judge)

    def _call(
        self,
        verb: str,
        operation: Callable[[], _Answer],
        permit: Permit,
        failed: _Answer,
        judge: Callable[[_Answer], bool | None],
    ) -> _Answer:
        number, call = self._begin(permit)
        well: bool | None = None
        try:
            answer = operation()
            well = judge(answer)
        except (ClosedError, ForkedError):
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - counted and logged
            self._count(error, verb)
            answer, well = failed, False
        finally:
            self._end(number, call, well=well)
            self._tell_state()
            if not self._breaker.is_closed:
                self._on_sick()
        return answer

    # ---- calls under way -----------------------------------------------------------------------------------------

    def _begin(self, permit: Permit) -> tuple[int, _Call]:
        with self._lock:
            self._num_calls += 1
            number, call = self._num_calls, _Call(permit, self._clock.now())
            self._calls[number] = call
        return number, call

    def _end(self, number: int, call: _Call, *, well: bool | None) -> None:
        """well: None where nothing was learnt of the device."""
        with self._lock:
            del self._calls[number]
            in_time = self._clock.now() - call.start <= self._timeout_s
        if well is None and in_time:
            call.permit.cancel()
        elif well and (in_time or call.tripped):  # one that tripped has counted as a failure; its answer now is news
            call.permit.succeed()
        else:
            if not (well or in_time):
                call.permit.overdue()
            call.permit.fail()

    def _trip_overdue(self) -> int:
        """Open the breaker for every overdue call that has not done so; how many calls are overdue."""
        if not self._calls:
            return 0
        with self._lock:
            now = self._clock.now()
            late_start = now - self._timeout_s
            for call in self._calls.values():
                call.start = min(call.start, now)  # the clock went back: not to wait until the old time comes again
            overdue = [call for call in self._calls.values() if call.start < late_start]
            new = [call for call in overdue if not call.tripped]
            for call in new:
                call.tripped = True
                call.permit.overdue()
            self._is_told_sick |= bool(new)  # by the line below
        if new:
            logger.warning(
                "the %s tier: %d calls have not come back in %g s; it is left alone for a while",
                self.name,
                len(new),
                self._timeout_s,
            )
        return len(overdue)

    def _count(self, error: BaseException, verb: str) -> None:
        kind = type(error).__name__
        with self._lock:
            self._errors[kind] += 1
            first = self._errors[kind] == 1
            self._last_words = f" ({error})"
        if not first:
            return
        told = "from now on exceptions of this type are only counted"
        if self.is_remote:  # no bug of ours, and no trace: if it goes on, the one warning of the breaker says why
            logger.info("%s of the %s tier failed: %s; %s", verb, self.name, error, told)
        else:
            logger.error("%s of the %s tier raised; %s", verb, self.name, told, exc_info=error)

    def _tell_state(self) -> None:
        """One line when the breaker opens, and one when it closes again."""
        is_well = self._breaker.is_closed
        with self._lock:
            if is_well is not self._is_told_sick:
                return
            self._is_told_sick = not is_well
            why, self._last_words = self._last_words, ""
        if is_well:
            logger.info("the %s tier answers again", self.name)
        else:
            logger.warning("the %s tier fails%s: it is left alone until it answers again", self.name, why)


def _verdict(outcomes: Sequence[ReadOutcome | WriteOutcome]) -> bool | None:
    """Whether the device did well; None when nothing was learnt of it."""
    if any(outcome in _FAILED for outcome in outcomes):
        return False
    return None if all(outcome in _KNOWN_BY_HEART for outcome in outcomes) else True


def _answered(answer: object) -> bool:
    del answer
    return True


def _untold(answer: object) -> None:
    """A touch is allowed to do nothing, and does not say that it did."""
    del answer
