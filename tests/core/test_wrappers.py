"""Wrappers of tiers: what a sick tier costs, what is counted, and how fast is written."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.breaker import Breaker, BreakerState
from kvtier.decisions import Decision
from kvtier.errors import ClosedError, ConfigError, ForkedError
from kvtier.keys import Key, make_key
from kvtier.testing import DictTier, FakeClock, FaultyTier
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.guarded import GuardedTier
from kvtier.tiers.metered import MeteredTier, MeterSnapshot
from kvtier.tiers.throttled import BURST_S, MAX_WAIT_S, ThrottledTier
from kvtier.tiers.watched import WatchedTier
from kvtier.tiers.wrapper import TierWrapper

SOON_S = 30.0
NBYTES = 100
TIMEOUT_S = 5.0


def key_of(name: object) -> Key:
    return make_key(bytes(16), hashlib.sha256(str(name).encode()).digest())


def reads(*names: object, nbytes: int = NBYTES) -> list[ReadRequest]:
    return [ReadRequest(key_of(name), memoryview(bytearray(nbytes))) for name in names]


def writes(*names: object, nbytes: int = NBYTES) -> list[WriteRequest]:
    return [WriteRequest(key_of(name), None, memoryview(bytes(nbytes))) for name in names]


class ScriptedTier(DictTier):
    """Answers as a dictionary, or with what is next in `script`: an exception, or an outcome for every block."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__()
        self.clock = clock or FakeClock()
        self.script: list[Any] = []
        self.calls = 0
        self.seconds = 0.0

    def _answer(self, requests: Sequence[Any]) -> list[Any] | None:
        self.calls += 1
        self.clock.advance(self.seconds)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, BaseException):
            raise step
        return None if step is None else [step] * len(requests)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._answer(keys)
        return super().contains(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        answer = self._answer(requests)
        return super().read(requests) if answer is None else answer

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        answer = self._answer(requests)
        return super().write(requests) if answer is None else answer


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def inner(clock: FakeClock) -> ScriptedTier:
    return ScriptedTier(clock)


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker(clock, failures=3, cooldown_s=1.0, max_cooldown_s=60.0)


@pytest.fixture
def guarded(inner: ScriptedTier, breaker: Breaker, clock: FakeClock) -> GuardedTier:
    return GuardedTier(inner, breaker, clock, TIMEOUT_S)


# ---- the plain wrapper -----------------------------------------------------------------------------------------------


CALLED: list[str] = []


class Recorded(Tier):
    name = "recorded"

    def __getattribute__(self, attribute: str) -> Any:
        if not attribute.startswith("_") and attribute not in ("name", "is_remote"):
            CALLED.append(attribute)
        return super().__getattribute__(attribute)

    epoch = 3

    def start_epoch(self, epoch: int) -> None: ...
    def probe(self) -> None: ...
    def read_bytes(self, least: int, share: int) -> int:
        return least + share

    def touch(self, keys: Sequence[Key]) -> None: ...
    def tell(self, decisions: Sequence[Decision]) -> None: ...
    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [True]

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        return [ReadOutcome.DAMAGED]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        return [WriteOutcome.FULL]

    def remove(self, keys: Sequence[Key]) -> int:
        return 7

    def usage(self) -> Any:
        return "usage"

    def check_integrity(self) -> None: ...
    def close(self) -> None: ...


def test_a_wrapper_forwards_the_whole_contract() -> None:
    CALLED.clear()
    inner = Recorded()
    wrapper = TierWrapper(inner)
    assert (wrapper.inner, wrapper.name, wrapper.epoch) == (inner, "recorded", 3)
    wrapper.start_epoch(4)
    wrapper.probe()
    assert wrapper.read_bytes(1, 2) == 3
    wrapper.touch([])
    wrapper.tell([])
    wrapper.check_integrity()
    assert wrapper.contains([]) == [True]
    assert wrapper.read([]) == [ReadOutcome.DAMAGED]
    assert wrapper.write([]) == [WriteOutcome.FULL]
    assert wrapper.remove([]) == 7
    assert str(wrapper.usage()) == "usage"
    wrapper.close()
    follows_from_another = {"job_bytes"}  # of `job_scale`
    assert {*CALLED, "is_remote"} | follows_from_another == {name for name in vars(Tier) if not name.startswith("_")}


def within_breaker(tier: Tier) -> Tier:
    return GuardedTier(tier, Breaker(FakeClock()), FakeClock(), TIMEOUT_S)


def at_a_rate(tier: Tier) -> Tier:
    return ThrottledTier(tier, 1 << 20, FakeClock(), wait=lambda seconds: None)


WRAP: dict[str, Callable[[Tier], Tier]] = {
    "plain": TierWrapper,
    "guarded": within_breaker,
    "metered": lambda tier: MeteredTier(tier, FakeClock()),
    "watched": WatchedTier,
    "faulty": lambda tier: FaultyTier(tier, seed=1),
    "several": lambda tier: WatchedTier(within_breaker(MeteredTier(tier, FakeClock()))),
}


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
@pytest.mark.parametrize("scale", [1, 4, 16])
def test_jobs_are_as_large_around_a_tier_as_of_it(wrap: Callable[[Tier], Tier], scale: int) -> None:
    inner = DictTier()
    inner.job_scale = scale
    wrapper = wrap(inner)
    assert wrapper.job_scale == scale
    for share in (0, 99, 100, 101, 399, 400, 1600, 10**6):
        expected = min(max(100, share), 100 * scale)
        assert (inner.job_bytes(100, share), wrapper.job_bytes(100, share)) == (expected, expected)


@pytest.mark.parametrize("wrap", [*WRAP.values(), at_a_rate], ids=[*WRAP, "throttled"])
def test_jobs_of_a_tier_without_a_scale_are_none_the_larger_for_what_waits(wrap: Callable[[Tier], Tier]) -> None:
    assert {wrap(DictTier()).job_bytes(100, share) for share in (0, 100, 10**6)} == {100}


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
def test_jobs_at_a_rate_are_as_those_of_any_tier(wrap: Callable[[Tier], Tier]) -> None:
    """One batch is what the rate may be passed by."""
    inner = DictTier()
    inner.job_scale = 16
    assert wrap(at_a_rate(inner)).job_bytes(100, 10**6) == 100
    assert at_a_rate(wrap(inner)).job_bytes(100, 10**6) == 100


# ---- guarded: exceptions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("io"), MemoryError(), asyncio.CancelledError(), ValueError("a client's")])
def test_an_exception_becomes_error_for_every_block(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, error: BaseException
) -> None:
    inner.script = [error, error, error]
    assert guarded.read(reads(1, 2)) == [ReadOutcome.ERROR] * 2
    assert guarded.write(writes(1, 2, 3)) == [WriteOutcome.ERROR] * 3
    assert guarded.contains([key_of(1), key_of(2)]) == [False, False]
    assert guarded.errors == {type(error).__name__: 3}
    assert breaker.snapshot().failures_in_a_row == 2


def test_an_exception_is_logged_once_a_type(
    guarded: GuardedTier, inner: ScriptedTier, caplog: pytest.LogCaptureFixture
) -> None:
    inner.script = [OSError("first"), None, OSError("second"), KeyError("third")]
    for _ in range(4):
        guarded.read(reads(1))
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "first" in caplog.text
    assert "Traceback" in caplog.text
    assert "second" not in caplog.text
    assert guarded.errors == {"OSError": 2, "KeyError": 1}


@pytest.mark.parametrize("error", [ClosedError("closed"), ForkedError("forked"), KeyboardInterrupt()])
def test_what_says_nothing_of_the_device_passes(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, clock: FakeClock, error: BaseException
) -> None:
    breaker.trip()
    clock.advance(1.0)
    inner.script = [error] * 3
    for _ in range(2):
        with pytest.raises(type(error)):
            guarded.read(reads(1))
    with pytest.raises(type(error)):
        guarded.contains([key_of(1)])
    assert guarded.errors == {}
    assert guarded.is_available
    assert guarded.num_overdue == 0
    assert guarded.read(reads(1)) == [ReadOutcome.MISS]
    assert breaker.snapshot().state is BreakerState.CLOSED


# ---- guarded: what counts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [o for o in ReadOutcome if o not in (ReadOutcome.ERROR, ReadOutcome.REFUSED)])
def test_any_answer_to_a_read_ends_a_row_of_failures(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, outcome: ReadOutcome
) -> None:
    inner.script = [ReadOutcome.ERROR, outcome]
    guarded.read(reads(1))
    assert breaker.snapshot().failures_in_a_row == 1
    assert guarded.read(reads(1, 2)) == [outcome] * 2
    assert breaker.snapshot().failures_in_a_row == 0


@pytest.mark.parametrize("outcome", [WriteOutcome.STORED, WriteOutcome.FULL])
def test_any_answer_to_a_write_ends_a_row_of_failures(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, outcome: WriteOutcome
) -> None:
    inner.script = [WriteOutcome.ERROR, outcome]
    guarded.write(writes(1))
    assert breaker.snapshot().failures_in_a_row == 1
    assert guarded.write(writes(1, 2)) == [outcome] * 2
    assert breaker.snapshot().failures_in_a_row == 0


def test_blocks_that_were_stored_before_say_nothing_of_the_device(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, clock: FakeClock
) -> None:
    inner.script = [*[WriteOutcome.ERROR] * 3, WriteOutcome.ALREADY_STORED]
    for _ in range(3):
        guarded.write(writes(1))
    clock.advance(60.0)
    assert guarded.write(writes(1, 2)) == [WriteOutcome.ALREADY_STORED] * 2
    assert breaker.snapshot().state is not BreakerState.CLOSED
    assert guarded.is_available, "the next call is as good a probe"
    inner.script = [WriteOutcome.STORED]
    guarded.write(writes(3))
    assert breaker.snapshot().state is BreakerState.CLOSED


def test_blocks_that_were_withdrawn_say_nothing_of_the_device(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, clock: FakeClock
) -> None:
    inner.script = [*[WriteOutcome.ERROR] * 3, WriteOutcome.WITHDRAWN]
    for _ in range(3):
        guarded.write(writes(1))
    clock.advance(1.0)
    assert guarded.write(writes(1, 2)) == [WriteOutcome.WITHDRAWN] * 2
    assert breaker.snapshot().state is not BreakerState.CLOSED
    assert guarded.write(writes(1)) == [WriteOutcome.STORED], "the probe is still to be had"
    assert breaker.snapshot().state is BreakerState.CLOSED


def test_one_error_in_a_batch_is_a_failure(clock: FakeClock, breaker: Breaker) -> None:
    class OneBad(DictTier):
        def _read_one(self, request: ReadRequest) -> ReadOutcome:
            return ReadOutcome.ERROR if request.key == key_of("bad") else super()._read_one(request)

    tier = GuardedTier(OneBad(), breaker, clock, TIMEOUT_S)
    tier.write(writes("good", "bad"))
    assert tier.read(reads("good", "bad", "good")) == [ReadOutcome.OK, ReadOutcome.ERROR, ReadOutcome.OK]
    assert breaker.snapshot().failures_in_a_row == 1


def test_a_sick_tier_is_left_alone_and_then_asked_once(
    guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker, clock: FakeClock
) -> None:
    inner.script = [ReadOutcome.ERROR, WriteOutcome.ERROR, OSError()]
    guarded.read(reads(1))
    guarded.write(writes(1))
    assert guarded.is_available
    guarded.read(reads(1))
    assert not guarded.is_available
    assert guarded.read(reads(1, 2)) == [ReadOutcome.REFUSED] * 2
    assert guarded.write(writes(1, 2)) == [WriteOutcome.REFUSED] * 2
    assert inner.calls == 3
    clock.advance(1.0)
    assert guarded.is_available
    assert guarded.write(writes(1)) == [WriteOutcome.STORED]
    assert guarded.read(reads(1)) == [ReadOutcome.OK]


def test_an_empty_batch_is_no_probe(guarded: GuardedTier, breaker: Breaker, clock: FakeClock) -> None:
    breaker.trip()
    clock.advance(1.0)
    assert guarded.read([]) == []
    assert guarded.write([]) == []
    assert breaker.snapshot().state is BreakerState.OPEN


def test_a_call_that_took_too_long_is_a_failure(guarded: GuardedTier, inner: ScriptedTier, breaker: Breaker) -> None:
    inner.seconds = TIMEOUT_S
    guarded.read(reads(1))
    assert breaker.snapshot().failures_in_a_row == 0
    inner.seconds = TIMEOUT_S + 0.1
    assert guarded.read(reads(1)) == [ReadOutcome.MISS]
    assert guarded.write(writes(1)) == [WriteOutcome.STORED]
    assert breaker.snapshot().failures_in_a_row == 2


# ---- guarded: calls that hang ----------------------------------------------------------------------------------------


class Stalling:
    """A guarded tier whose calls can be made to hang, and threads that make them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.breaker = Breaker(self.clock, cooldown_s=1.0, probe_timeout_s=60.0)
        self.faulty = FaultyTier(DictTier(), seed=0)
        self.tier = GuardedTier(self.faulty, self.breaker, self.clock, TIMEOUT_S)
        self.threads = ThreadPoolExecutor(4)

    def hang(self, num_calls: int) -> Any:
        self.faulty.read_gate.clear()
        call = self.threads.submit(self.tier.read, reads(1))
        assert self.faulty.wait_until_stalled(num_calls)
        return call

    def let_go(self) -> None:
        self.faulty.read_gate.set()


@pytest.fixture
def stalling() -> Iterator[Stalling]:
    stalling = Stalling()
    yield stalling
    stalling.let_go()
    stalling.threads.shutdown()


def test_a_call_that_hangs_opens_the_breaker_once(stalling: Stalling, caplog: pytest.LogCaptureFixture) -> None:
    tier, clock = stalling.tier, stalling.clock
    stalling.hang(1)
    clock.advance(TIMEOUT_S)
    assert tier.is_available
    assert tier.num_overdue == 0
    clock.advance(0.1)
    assert not tier.is_available
    assert tier.num_overdue == 1
    assert tier.write(writes(1)) == [WriteOutcome.REFUSED]
    clock.advance(1.0)
    assert tier.is_available  # for the probe
    assert tier.num_overdue == 1
    assert tier.write(writes(1)) == [WriteOutcome.STORED]
    assert tier.is_available
    assert stalling.breaker.snapshot().times_opened == 1
    assert caplog.text.count("have not come back") == 1


def test_a_call_that_hangs_is_found_though_the_clock_went_back(stalling: Stalling) -> None:
    stalling.hang(1)
    stalling.clock.advance(-1000.0)
    assert stalling.tier.num_overdue == 0
    stalling.clock.advance(TIMEOUT_S)
    assert stalling.tier.num_overdue == 0
    stalling.clock.advance(0.1)
    assert stalling.tier.num_overdue == 1
    assert not stalling.tier.is_available


def test_every_call_finds_those_that_hang(stalling: Stalling) -> None:
    stalling.hang(1)
    stalling.clock.advance(TIMEOUT_S + 0.1)
    assert stalling.tier.read(reads(1)) == [ReadOutcome.REFUSED]


def test_calls_that_hang_longer_do_not_end_the_probe(stalling: Stalling) -> None:
    tier, clock = stalling.tier, stalling.clock
    stalling.hang(1)
    clock.advance(TIMEOUT_S - 0.5)
    stalling.hang(2)
    clock.advance(1.0)
    assert not tier.is_available
    clock.advance(1.0)
    stalling.hang(3)  # the probe
    clock.advance(TIMEOUT_S - 0.5)
    assert tier.num_overdue == 2
    assert stalling.breaker.snapshot().state is BreakerState.HALF_OPEN
    clock.advance(1.0)
    assert tier.num_overdue == 3
    now = stalling.breaker.snapshot()
    assert (now.state, now.next_probe_in_s, now.times_opened) == (BreakerState.OPEN, 2.0, 1)


def test_a_device_that_comes_back_is_asked_soon(stalling: Stalling) -> None:
    tier, clock, breaker = stalling.tier, stalling.clock, stalling.breaker
    call = stalling.hang(1)
    clock.advance(TIMEOUT_S + 0.1)
    assert not tier.is_available
    while breaker.snapshot().next_probe_in_s < 16:
        clock.advance(breaker.snapshot().next_probe_in_s)
        permit = breaker.try_acquire()
        assert permit is not None
        permit.fail()
    stalling.let_go()
    assert call.result(SOON_S) == [ReadOutcome.MISS]
    assert tier.num_overdue == 0
    assert not tier.is_available
    clock.advance(1.0)
    assert tier.read(reads(1)) == [ReadOutcome.MISS]
    assert breaker.snapshot().state is BreakerState.CLOSED


def test_looking_is_possible_while_calls_hang_in_every_thread(stalling: Stalling) -> None:
    for num_calls in range(1, 5):
        stalling.hang(num_calls)
    looked = threading.Event()

    def look() -> None:
        assert stalling.tier.is_available
        assert stalling.tier.errors == {}
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(SOON_S)
    assert looked.is_set()


@given(st.integers(0, 2**32))
def test_whatever_a_tier_does_a_guard_answers(seed: int) -> None:
    clock = FakeClock()
    faulty = FaultyTier(
        DictTier(), seed, raise_rate=0.2, error_rate=0.1, damage_rate=0.1, latency_s=2 * TIMEOUT_S, wait=clock.advance
    )
    breaker = Breaker(clock)
    tier = GuardedTier(faulty, breaker, clock, TIMEOUT_S)
    for name in range(40):
        written, read = tier.write(writes(name, name + 1)), tier.read(reads(name, name + 1))
        assert len(written) == len(read) == 2, faulty
        assert len(tier.contains([key_of(name)])) == 1, faulty
        assert set(written) == {WriteOutcome.REFUSED} or WriteOutcome.REFUSED not in written, faulty
        clock.advance(0.5)
    assert tier.num_overdue == 0
    raised = {k: n for k, n in faulty.injected.items() if k not in ("latency", "error", "damage")}
    assert tier.errors == raised, faulty
    assert breaker.snapshot().failures_in_a_row <= 3 or breaker.snapshot().times_opened, faulty


# ---- metered ---------------------------------------------------------------------------------------------------------


def test_what_went_through_is_counted(inner: ScriptedTier, clock: FakeClock) -> None:
    tier = MeteredTier(inner, clock)
    inner.seconds = 0.5
    tier.write(writes(1, 2, 1))
    tier.write(writes(3))
    tier.read(reads(1, 2, "missing"))
    inner.script = [ReadOutcome.DAMAGED]
    tier.read(reads(3))
    assert tier.snapshot() == MeterSnapshot(
        read_calls=2,
        reads={"ok": 2, "miss": 1, "damaged": 1},
        read_bytes=2 * NBYTES,
        read_seconds=1.0,
        write_calls=2,
        writes={"stored": 3, "already_stored": 1},
        written_bytes=3 * NBYTES,
        write_seconds=1.0,
    )


def test_a_call_that_raises_took_its_time(inner: ScriptedTier, clock: FakeClock) -> None:
    tier = MeteredTier(inner, clock)
    inner.seconds = 0.5
    inner.script = [OSError(), OSError()]
    with pytest.raises(OSError):  # noqa: PT011 - the one above
        tier.read(reads(1))
    with pytest.raises(OSError):  # noqa: PT011
        tier.write(writes(1))
    now = tier.snapshot()
    assert (now.read_calls, now.reads, now.read_seconds) == (1, {}, 0.5)
    assert (now.write_calls, now.writes, now.write_seconds) == (1, {}, 0.5)


def test_a_clock_that_goes_back_takes_no_time_away(inner: ScriptedTier, clock: FakeClock) -> None:
    tier = MeteredTier(inner, clock)
    inner.seconds = -5.0
    tier.read(reads(1))
    assert tier.snapshot().read_seconds == 0.0


def test_threads_are_counted_exactly() -> None:
    tier = MeteredTier(DictTier(), FakeClock())

    def work(seed: int) -> None:
        for turn in range(100):
            tier.write(writes((seed, turn)))
            tier.read(reads((seed, turn), "missing"))

    with ThreadPoolExecutor(4) as threads:
        for running in [threads.submit(work, seed) for seed in range(4)]:
            running.result()
    now = tier.snapshot()
    assert (now.reads, now.writes) == ({"ok": 400, "miss": 400}, {"stored": 400})
    assert (now.read_calls, now.write_calls) == (400, 400)
    assert now.read_bytes == now.written_bytes == 400 * NBYTES


def test_a_snapshot_is_of_its_moment(clock: FakeClock) -> None:
    tier = MeteredTier(DictTier(), clock)
    before = tier.snapshot()
    tier.write(writes(1))
    assert all(not getattr(before, field.name) for field in fields(before))


# ---- throttled -------------------------------------------------------------------------------------------------------

RATE = 1000.0


class Waits:
    """Lets the clock pass instead of waiting."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.clock.advance(seconds)


@pytest.fixture
def waits(clock: FakeClock) -> Waits:
    return Waits(clock)


def throttle(clock: FakeClock, waits: Waits) -> ThrottledTier:
    return ThrottledTier(DictTier(), RATE, clock, waits)


def test_a_batch_is_paid_for_by_the_next(clock: FakeClock, waits: Waits) -> None:
    tier = throttle(clock, waits)
    tier.write(writes(1, nbytes=2250))  # nine times the bucket
    assert waits.seconds == []
    tier.write(writes(2, nbytes=500))
    tier.write(writes(3, nbytes=1))
    assert waits.seconds == [pytest.approx(2.0), pytest.approx(0.5)]


def test_a_pause_fills_the_bucket_and_no_more(clock: FakeClock, waits: Waits) -> None:
    tier = throttle(clock, waits)
    clock.advance(3600.0)
    tier.write(writes(1, nbytes=int(BURST_S * RATE)))
    tier.write(writes(2, nbytes=100))
    assert waits.seconds == []
    tier.write(writes(3))
    assert waits.seconds == [pytest.approx(0.1)]


def test_reads_and_empty_batches_wait_for_nothing(clock: FakeClock, waits: Waits) -> None:
    tier = throttle(clock, waits)
    tier.write(writes(1, nbytes=10_000))
    assert tier.read(reads(1, nbytes=10_000)) == [ReadOutcome.OK]
    assert tier.write([]) == []
    assert waits.seconds == []


@pytest.mark.parametrize("outcome", [WriteOutcome.ALREADY_STORED, WriteOutcome.FULL, WriteOutcome.REFUSED])
def test_what_was_not_written_costs_nothing(clock: FakeClock, waits: Waits, outcome: WriteOutcome) -> None:
    inner = ScriptedTier()
    tier = ThrottledTier(inner, RATE, clock, waits)
    inner.script = [outcome, None, WriteOutcome.ERROR]
    tier.write(writes(1, nbytes=100_000))
    tier.write(writes(1, nbytes=250))
    assert waits.seconds == []
    tier.write(writes(2, nbytes=1000))
    tier.write(writes(3))
    assert waits.seconds == [pytest.approx(1.0)]


def test_no_write_waits_longer_than_a_minute(clock: FakeClock, waits: Waits) -> None:
    tier = throttle(clock, waits)
    tier.write(writes(1, nbytes=1_000_000))
    tier.write(writes(2))
    assert waits.seconds == [MAX_WAIT_S]


def test_a_clock_that_goes_back_neither_pays_nor_charges(clock: FakeClock, waits: Waits) -> None:
    tier = throttle(clock, waits)
    tier.write(writes(1, nbytes=1250))
    clock.advance(-1000.0)
    tier.write(writes(2))
    assert waits.seconds == [pytest.approx(1.0)]


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 2)), min_size=1, max_size=50))
def test_the_rate_holds_over_any_time(batches: list[tuple[int, float]]) -> None:
    clock = FakeClock()
    tier = throttle(clock, Waits(clock))
    begun = []
    for number, (nbytes, pause) in enumerate(batches):
        tier.write(writes(number, nbytes=nbytes))
        begun.append((clock.now(), nbytes))
        clock.advance(pause)
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            before = sum(nbytes for _, nbytes in begun[first:last])
            assert before <= RATE * (begun[last][0] - begun[first][0] + BURST_S) + 1e-6


def test_a_new_rate_holds_for_what_is_not_paid_for_too(clock: FakeClock) -> None:
    waits: list[float] = []
    tier = ThrottledTier(DictTier(), RATE, clock, waits.append)
    tier.write(writes(0, nbytes=int(RATE * (1 + BURST_S))))  # a second's worth beyond the burst
    tier.set_rate(RATE / 2)
    tier.write(writes(1, nbytes=1))
    assert waits == [pytest.approx(2.0)]
    tier.set_rate(1e15)
    tier.write(writes(2, nbytes=1))
    assert waits[1:] == [] or waits[1] < 1e-6


def test_threads_wait_each_for_those_before_it(clock: FakeClock) -> None:
    waits: list[float] = []
    tier = ThrottledTier(DictTier(), RATE, clock, waits.append)
    with ThreadPoolExecutor(4) as threads:
        for running in [threads.submit(tier.write, writes(i, nbytes=1000)) for i in range(5)]:
            running.result()
    assert sorted(waits) == [pytest.approx(seconds) for seconds in (0.75, 1.75, 2.75, 3.75)]


def test_who_is_told_to_stop_waiting_writes_at_once_and_is_not_closed(clock: FakeClock) -> None:
    tier = ThrottledTier(DictTier(), 1.0, clock)
    tier.write(writes(1, nbytes=1000))
    ended = threading.Event()

    def write() -> None:
        assert tier.write(writes(2)) == [WriteOutcome.STORED]
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    tier.stop_waiting()
    assert ended.wait(SOON_S)
    thread.join(SOON_S)
    assert tier.write(writes(3)) == [WriteOutcome.STORED]
    assert tier.contains([key_of(2), key_of(3)]) == [True, True]


def test_closing_ends_a_wait(clock: FakeClock) -> None:
    tier = ThrottledTier(DictTier(), 1.0, clock)
    tier.write(writes(1, nbytes=1000))
    begun, ended = threading.Event(), list[type[BaseException]]()

    def write() -> None:
        begun.set()
        try:
            tier.write(writes(2))
        except ClosedError as error:
            ended.append(type(error))

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(SOON_S)
    tier.close()
    thread.join(SOON_S)
    assert ended == [ClosedError]
    with pytest.raises(ClosedError):
        tier.write(writes(3))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_more_than_nothing(clock: FakeClock, rate: float) -> None:
    with pytest.raises(ConfigError):
        ThrottledTier(DictTier(), rate, clock)
