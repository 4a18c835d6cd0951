"""The breaker: who is let through, who decides, and that it never stays shut for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kvtier.breaker import Breaker, BreakerState, Permit
from kvtier.errors import ConfigError
from kvtier.testing import FakeClock

FAILURES, COOLDOWN_S, MAX_COOLDOWN_S, PROBE_TIMEOUT_S = 3, 1.0, 8.0, 4.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return make(clock)


def make(clock: FakeClock) -> Breaker:
    return Breaker(
        clock,
        failures=FAILURES,
        cooldown_s=COOLDOWN_S,
        max_cooldown_s=MAX_COOLDOWN_S,
        probe_timeout_s=PROBE_TIMEOUT_S,
    )


def acquire(breaker: Breaker) -> Permit:
    permit = breaker.try_acquire()
    assert permit is not None
    return permit


def probe(breaker: Breaker, clock: FakeClock) -> Permit:
    clock.advance(breaker.snapshot().next_probe_in_s)
    permit = acquire(breaker)
    assert breaker.snapshot().state is BreakerState.HALF_OPEN
    return permit


def state(breaker: Breaker) -> BreakerState:
    return breaker.snapshot().state


def test_failures_in_a_row_open_it(breaker: Breaker, clock: FakeClock) -> None:
    for _ in range(FAILURES - 1):
        acquire(breaker).fail()
    acquire(breaker).succeed()
    for _ in range(FAILURES - 1):
        acquire(breaker).fail()
    assert state(breaker) is BreakerState.CLOSED
    acquire(breaker).fail()
    assert state(breaker) is BreakerState.OPEN
    assert not breaker.would_allow()
    assert breaker.try_acquire() is None
    clock.advance(0.25)
    now = breaker.snapshot()
    assert (now.failures_in_a_row, now.open_for_s, now.next_probe_in_s) == (FAILURES, 0.25, 0.75)
    assert (now.times_opened, now.refused) == (1, 1)


def test_asking_whether_it_would_allow_takes_nothing(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    assert not breaker.would_allow()
    clock.advance(COOLDOWN_S)
    assert [breaker.would_allow() for _ in range(3)] == [True] * 3
    assert breaker.snapshot().refused == 0
    assert state(breaker) is BreakerState.OPEN
    acquire(breaker)
    assert not breaker.would_allow()


def test_one_probe_closes_it(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    permit = probe(breaker, clock)
    assert breaker.try_acquire() is None
    permit.succeed()
    now = breaker.snapshot()
    assert (now.state, now.failures_in_a_row, now.open_for_s, now.next_probe_in_s) == (BreakerState.CLOSED, 0, 0.0, 0.0)


def test_a_failed_probe_doubles_the_cool_down_up_to_a_bound(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    waited = []
    for _ in range(5):
        waited.append(breaker.snapshot().next_probe_in_s)
        probe(breaker, clock).fail()
    assert waited == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert breaker.snapshot().open_for_s == sum(waited)
    assert breaker.snapshot().times_opened == 1
    probe(breaker, clock).succeed()
    clock.advance(MAX_COOLDOWN_S)
    breaker.trip()
    assert breaker.snapshot().next_probe_in_s == COOLDOWN_S


def test_a_device_that_answers_probes_alone_is_left_alone_for_longer_each_time(
    breaker: Breaker, clock: FakeClock
) -> None:
    waited = []
    for _ in range(6):
        breaker.trip()
        waited.append(breaker.snapshot().next_probe_in_s)
        probe(breaker, clock).succeed()
        clock.advance(0.5 * MAX_COOLDOWN_S)
    assert waited == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_permit_is_reported_once(breaker: Breaker, clock: FakeClock) -> None:
    permit = acquire(breaker)
    permit.fail()
    for _ in range(FAILURES):
        permit.fail()
        permit.succeed()
        permit.cancel()
        permit.overdue()
    assert breaker.snapshot().failures_in_a_row == 1
    breaker.trip()
    permit = probe(breaker, clock)
    permit.fail()
    permit.succeed()
    assert state(breaker) is BreakerState.OPEN


def test_a_cancelled_probe_is_the_next_calls(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    probe(breaker, clock).cancel()
    assert state(breaker) is BreakerState.OPEN
    acquire(breaker).succeed()
    assert state(breaker) is BreakerState.CLOSED
    acquire(breaker).cancel()
    assert breaker.snapshot().failures_in_a_row == 0


def test_a_probe_that_is_never_reported_is_given_up(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    lost = probe(breaker, clock)
    clock.advance(PROBE_TIMEOUT_S - 0.5)
    assert breaker.try_acquire() is None
    clock.advance(0.5)
    second = acquire(breaker)
    assert breaker.try_acquire() is None
    lost.fail()
    assert state(breaker) is BreakerState.HALF_OPEN
    second.succeed()
    assert state(breaker) is BreakerState.CLOSED


def test_a_long_cool_down_waits_as_long_for_its_probe(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    for _ in range(3):
        probe(breaker, clock).fail()
    probe(breaker, clock)
    clock.advance(MAX_COOLDOWN_S - 0.5)
    assert not breaker.would_allow()
    clock.advance(0.5)
    assert breaker.would_allow()


# ---- calls that come back late ---------------------------------------------------------------------------------------


def test_a_late_success_hastens_the_next_probe_and_closes_nothing(breaker: Breaker, clock: FakeClock) -> None:
    stalled = acquire(breaker)
    stalled.overdue()
    for _ in range(4):
        probe(breaker, clock).fail()
    assert breaker.snapshot().next_probe_in_s == MAX_COOLDOWN_S
    stalled.succeed()
    assert state(breaker) is BreakerState.OPEN
    assert breaker.snapshot().next_probe_in_s == COOLDOWN_S
    probe(breaker, clock).fail()
    assert breaker.snapshot().next_probe_in_s == MAX_COOLDOWN_S


def test_a_late_success_never_delays_the_probe(breaker: Breaker, clock: FakeClock) -> None:
    stalled = acquire(breaker)
    stalled.overdue()
    clock.advance(COOLDOWN_S * 0.75)
    stalled.succeed()
    assert breaker.snapshot().next_probe_in_s == COOLDOWN_S * 0.25


def test_a_late_report_does_not_decide_for_the_probe(breaker: Breaker, clock: FakeClock) -> None:
    before = [acquire(breaker) for _ in range(3)]
    breaker.trip()
    permit = probe(breaker, clock)
    half_open = breaker.snapshot()
    before[0].succeed()
    before[1].fail()
    before[2].overdue()
    assert breaker.snapshot() == half_open
    assert half_open.state is BreakerState.HALF_OPEN
    permit.succeed()
    assert state(breaker) is BreakerState.CLOSED


def test_what_began_before_it_closed_again_says_nothing(breaker: Breaker, clock: FakeClock) -> None:
    before = [acquire(breaker) for _ in range(FAILURES + 2)]
    breaker.trip()
    probe(breaker, clock).succeed()
    before.pop().overdue()
    acquire(breaker).fail()
    before.pop().succeed()
    assert breaker.snapshot().failures_in_a_row == 1
    for permit in before:
        permit.fail()
    assert state(breaker) is BreakerState.CLOSED


def test_an_overdue_call_opens_it_at_once_and_counts_once(breaker: Breaker) -> None:
    permit = acquire(breaker)
    permit.overdue()
    permit.overdue()
    assert state(breaker) is BreakerState.OPEN
    permit.fail()
    now = breaker.snapshot()
    assert (now.failures_in_a_row, now.times_opened) == (1, 1)


def test_an_overdue_probe_has_failed(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    permit = probe(breaker, clock)
    permit.overdue()
    assert breaker.snapshot().next_probe_in_s == 2 * COOLDOWN_S
    permit.succeed()
    assert state(breaker) is BreakerState.OPEN


def test_tripping(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    breaker.trip()
    assert breaker.snapshot().next_probe_in_s == COOLDOWN_S
    probe(breaker, clock)
    breaker.trip()
    assert state(breaker) is BreakerState.OPEN
    assert breaker.snapshot().next_probe_in_s == 2 * COOLDOWN_S


def test_a_clock_that_goes_back_does_not_shut_it_for_ever(breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    clock.advance(-1e6)
    assert breaker.would_allow()
    assert breaker.snapshot().open_for_s == 0.0
    acquire(breaker).succeed()
    assert state(breaker) is BreakerState.CLOSED


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures": 0},
        {"cooldown_s": 0.0},
        {"cooldown_s": 2.0, "max_cooldown_s": 1.0},
        {"cooldown_s": float("nan")},
        {"probe_timeout_s": -1.0},
    ],
)
def test_settings_that_make_no_breaker(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Breaker(FakeClock(), **wrong)  # type: ignore[arg-type]


def test_of_many_threads_one_gets_the_probe(breaker: Breaker, clock: FakeClock) -> None:
    start = threading.Barrier(8)

    def ask() -> int:
        start.wait(30)
        return sum(breaker.try_acquire() is not None for _ in range(50))

    breaker.trip()
    clock.advance(COOLDOWN_S)
    with ThreadPoolExecutor(8) as threads:
        got = [asked.result() for asked in [threads.submit(ask) for _ in range(8)]]
    assert sum(got) == 1
    assert breaker.snapshot().refused == 8 * 50 - 1


# ---- any order of events ---------------------------------------------------------------------------------------------


class BreakerMachine(RuleBasedStateMachine):
    """The rules of the module's words, beside a model of whose report counts."""

    permits = Bundle("permits")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.breaker = make(self.clock)
        self.probe: Permit | None = None

    @rule(target=permits)
    def ask(self) -> object:
        before, would = state(self.breaker), self.breaker.would_allow()
        permit = self.breaker.try_acquire()
        assert (permit is not None) is would
        if permit is None:
            assert before is not BreakerState.CLOSED
            return multiple()
        if before is not BreakerState.CLOSED:
            self.probe = permit
        return permit

    @rule(permit=permits)
    def report_twice_for_nothing(self, permit: Permit) -> None:
        if permit._reported:
            before = self.breaker.snapshot()
            permit.succeed()
            permit.fail()
            permit.cancel()
            permit.overdue()
            assert self.breaker.snapshot() == before

    @rule(permit=permits)
    def succeed(self, permit: Permit) -> None:
        before = self.breaker.snapshot()
        counts = not permit._reported
        permit.succeed()
        after = self.breaker.snapshot()
        if permit is self.probe and counts:
            assert after.state is BreakerState.CLOSED
            self.probe = None
        else:
            assert after.state is before.state
            assert after.next_probe_in_s <= before.next_probe_in_s

    @rule(permit=consumes(permits), how=st.sampled_from(["fail", "overdue"]))
    def fail(self, permit: Permit, how: str) -> None:
        before = self.breaker.snapshot()
        counts = not permit._reported
        getattr(permit, how)()
        after = self.breaker.snapshot()
        if permit is self.probe and counts:
            assert after.state is BreakerState.OPEN
            assert after.next_probe_in_s >= 2 * COOLDOWN_S
            self.probe = None
        elif before.state is not BreakerState.CLOSED:
            assert after == before
        elif after.state is BreakerState.OPEN:
            assert how == "overdue" or before.failures_in_a_row == FAILURES - 1

    @rule(permit=consumes(permits))
    def cancel(self, permit: Permit) -> None:
        counts = not permit._reported
        permit.cancel()
        if permit is self.probe and counts:
            assert state(self.breaker) is BreakerState.OPEN
            assert self.breaker.would_allow()
            self.probe = None

    @rule()
    def trip(self) -> None:
        self.breaker.trip()
        self.probe = None
        assert state(self.breaker) is BreakerState.OPEN

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: state(self.breaker) is not BreakerState.CLOSED)
    @rule()
    def the_longest_wait_ends_in_a_probe(self) -> None:
        self.clock.advance(max(MAX_COOLDOWN_S, PROBE_TIMEOUT_S))
        self.probe = acquire(self.breaker)
        self.probe.succeed()
        self.probe = None
        assert state(self.breaker) is BreakerState.CLOSED

    @invariant()
    def adds_up(self) -> None:
        now = self.breaker.snapshot()
        assert self.breaker.would_allow() is (now.next_probe_in_s == 0)
        assert 0 <= now.next_probe_in_s <= MAX_COOLDOWN_S
        if now.state is BreakerState.CLOSED:
            assert now.failures_in_a_row < FAILURES
            assert now.open_for_s == now.next_probe_in_s == 0
        else:
            assert now.failures_in_a_row > 0
            assert now.times_opened > 0
        assert (now.state is BreakerState.HALF_OPEN) is (self.probe is not None)


TestAnyOrder = BreakerMachine.TestCase
