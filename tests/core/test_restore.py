"""The restore decision: a request's wait told by a clock that stands still, rule by rule; then any order of events."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from kvtier.config import RestoreSettings
from kvtier.cost import MAX_AGE_S
from kvtier.episode import ACTIVE, Stopwatch
from kvtier.fallbacks import MAX_LINES
from kvtier.families import GAUGES, LABELS, StatsCollector
from kvtier.metrics import RestoreStatus
from kvtier.progress import FIRST_WAIT_S, RETRIED
from kvtier.reasons import MissReason
from kvtier.restore import (
    ANSWER_LIFETIME_S,
    Fallback,
    RestoreDecision,
    RestoreEpisode,
    RestorePhase,
    RestoreQuery,
    TierPart,
)
from kvtier.testing import FakeClock

B = 16
BLOCK_BYTES = 1 << 20
LOOKING, STAGING, READY = RestorePhase.LOOKING, RestorePhase.STAGING, RestorePhase.READY
LANDING, OVER = RestorePhase.LANDING, RestorePhase.OVER

LINE = re.compile(
    r"request (\S+): (\d+) blocks, (\d+) tokens, are recomputed: "
    r"not restored from (?:tier )?(.+?)(?: tier)? \((\w+)\), "
)
WAIT = re.compile(r"waited (-?[\d.]+) s, limit (-?[\d.]+) s")
HELD_BACK = re.compile(r"of (\d+) more requests: (\d+) blocks, (\d+) tokens, are recomputed")


class Rig:
    """A decision, its clock, and what it told."""

    def __init__(self, clock: FakeClock | None = None, **settings: Any) -> None:
        self.settings = RestoreSettings(**settings)
        self.clock = clock or FakeClock()
        self.fallbacks: list[Fallback] = []
        self.decision = RestoreDecision(self.settings, B, BLOCK_BYTES, self.clock, self.fallbacks.append)

    @property
    def status(self) -> RestoreStatus:
        return self.decision.status()

    def computes(self, seconds_per_block: float) -> None:
        """Computing is measured to take so long, wherever in the prompt."""
        for _ in range(200):
            self.decision.observe_prefill(100 * B, 0.0, 100 * seconds_per_block)

    def reads(self, tier: str, seconds_per_block: float) -> None:
        for _ in range(100):
            self.decision.observe_restore(tier, 100 * BLOCK_BYTES, 0, 100 * seconds_per_block)

    def begin(self, request_id: str = "r", num_blocks: int = 10, **query: Any) -> RestoreEpisode:
        return self.decision.begin(self.query(request_id, num_blocks, **query))

    def query(self, request_id: str = "r", num_blocks: int = 10, **query: Any) -> RestoreQuery:
        given: dict[str, Any] = {"request_id": request_id, "position": 0, "num_tokens": 500, "max_blocks": num_blocks}
        return RestoreQuery(**given | query)

    def answered(self, episode: RestoreEpisode, **num_blocks: int) -> RestorePhase:
        return self.decision.answered(episode, [TierPart(tier, count) for tier, count in num_blocks.items()])

    def staging(self, request_id: str = "r", num_blocks: int = 10, **query: Any) -> RestoreEpisode:
        episode = self.begin(request_id, num_blocks, **query)
        assert self.answered(episode, disk=num_blocks) is STAGING
        return episode

    def ready(self, request_id: str = "r", num_blocks: int = 10, **query: Any) -> RestoreEpisode:
        episode = self.begin(request_id, num_blocks, **query)
        assert self.answered(episode, host=num_blocks) is READY
        return episode

    def staged(
        self, episode: RestoreEpisode, num_blocks: int, miss: MissReason | None, seconds: float = 0.1
    ) -> RestorePhase:
        arrived = {"disk": num_blocks} if num_blocks else {}
        return self.decision.staged(episode, num_blocks, miss, arrived, seconds, 0)


@pytest.fixture
def rig() -> Rig:
    return Rig()


class Log:
    """The lines of the decision's logger, by level."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def lines(self, level: int) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno == level]

    @property
    def warnings(self) -> list[str]:
        return self.lines(logging.WARNING)

    @property
    def infos(self) -> list[str]:
        return self.lines(logging.INFO)

    def sums(self) -> tuple[int, int, int]:
        """Requests, blocks and tokens that the warnings tell of, those held back included."""
        sums = Counter[int]()
        for line in self.warnings:
            own = LINE.search(line)
            told = [(1, int(own[2]), int(own[3]))] if own else []
            told += [(int(a), int(b), int(c)) for a, b, c in HELD_BACK.findall(line)]
            assert told, line
            for numbers in told:
                sums.update(dict(enumerate(numbers)))
        return sums[0], sums[1], sums[2]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.DEBUG, logger="kvtier.restore")
    return Log(caplog)


# ---- a restore that goes well ----------------------------------------------------------------------------------------


def test_a_restore_goes_from_lookup_to_stage_to_copy(rig: Rig, log: Log) -> None:
    episode = rig.begin(num_blocks=12)
    assert (episode.phase, episode.num_blocks, episode.attempts) == (LOOKING, 12, 1)
    assert rig.answered(episode, host=4, disk=6) is STAGING
    assert (episode.num_blocks, episode.miss, episode.deadline) == (10, None, rig.clock.now() + episode.stage_wait_s)
    rig.clock.advance(0.25)
    assert rig.decision.poll(episode) is STAGING
    assert rig.status.active_waits == 1
    assert rig.decision.staged(episode, 10, None, {"disk": 6}, 0.25, 0) is READY
    assert (episode.num_blocks, episode.deadline, rig.status.active_waits) == (10, None, 0)
    rig.decision.landing(episode, 10)
    assert (episode.phase, rig.status.active_waits) == (LANDING, 1)
    assert rig.decision.landed(episode, 10) is OVER
    assert (episode.num_blocks, episode.position, rig.status.active_waits) == (0, 10 * B, 0)
    rig.decision.end(episode)
    assert (rig.fallbacks, log.warnings) == ([], [])
    assert rig.status.decisions == {"restore": 1}


def test_what_host_memory_holds_needs_no_stage_and_what_nobody_holds_no_wait(rig: Rig) -> None:
    here, nowhere = rig.begin("here"), rig.begin("nowhere")
    assert rig.answered(here, host=3) is READY
    assert (here.num_blocks, here.miss) == (3, None)
    assert rig.answered(nowhere) is OVER
    assert (nowhere.num_blocks, nowhere.miss, rig.status.decisions) == (0, None, {"restore": 1})


def test_parts_without_blocks_are_nothing(rig: Rig) -> None:
    episode = rig.begin()
    parts = [TierPart("disk", 0), TierPart("host", 2), TierPart("far", -1), TierPart("host", 1)]
    assert rig.decision.answered(episode, parts) is READY
    assert episode.num_blocks == 3


def test_host_memory_behind_a_lower_tier_s_blocks_is_staged_with_them(rig: Rig) -> None:
    episode = rig.begin()
    parts = [TierPart("disk", 2), TierPart("host", 3), TierPart("disk", 1)]
    assert rig.decision.answered(episode, parts) is STAGING
    assert episode.num_blocks == 6
    rig.clock.advance(FIRST_WAIT_S)
    assert rig.decision.poll(episode) is OVER  # no block in front was there


@pytest.mark.bug("AC13")
def test_a_request_that_opts_out_restores_nothing_and_is_in_no_count(rig: Rig, log: Log) -> None:
    for number in range(9):
        rig.ready(str(number))
    before = rig.status
    episode = rig.begin("out", may_restore=False)
    assert (episode.phase, episode.miss, episode.attempts) == (OVER, MissReason.RESTORE_OFF, 0)
    assert rig.answered(episode, host=5) is OVER
    assert rig.decision.refuse(episode) is False
    rig.decision.end(episode)
    assert (rig.status, log.warnings) == (before, [])
    off = Rig(enabled=False)
    assert off.begin().miss is MissReason.RESTORE_OFF


def test_a_limit_of_tokens_is_kept_to_whole_blocks(rig: Rig) -> None:
    episode = rig.begin(max_tokens=3 * B + 15)
    assert episode.num_blocks == 3
    assert rig.answered(episode, host=10) is READY
    assert (episode.num_blocks, episode.miss) == (3, MissReason.LIMIT)
    none = rig.begin(max_tokens=B - 1)
    assert (none.phase, none.miss) == (OVER, MissReason.LIMIT)
    enough = rig.begin(max_tokens=10 * B)
    assert (rig.answered(enough, host=10), enough.miss) == (READY, None)


def test_a_request_that_waits_for_nothing_takes_what_is_there_without_a_warning(rig: Rig, log: Log) -> None:
    episode = rig.begin(max_wait_s=0)
    assert rig.answered(episode, host=2, disk=8) is READY
    assert (episode.num_blocks, episode.miss) == (2, MissReason.NOT_STAGED)
    unanswered = rig.begin(max_wait_s=0)
    assert rig.decision.poll(unanswered) is OVER
    assert unanswered.miss is MissReason.NOT_STAGED
    for ended in (episode, unanswered):
        rig.decision.end(ended)
    assert (rig.fallbacks, log.warnings) == ([], [])


# ---- waiting for GPU blocks ------------------------------------------------------------------------------------------


def test_r47_the_first_refusal_starts_the_wait_and_below_the_bound_it_goes_on(log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    assert rig.status.capacity_waits == 0
    for elapsed in (0.0, 29.0, 0.999):
        rig.clock.advance(elapsed)
        assert rig.decision.refuse(episode) is True
    assert (episode.phase, episode.num_blocks, log.warnings) == (READY, 10, [])
    assert (rig.status.capacity_waits, rig.status.capacity_waiters, rig.status.capacity_expired) == (1, 1, 0)


@pytest.mark.parametrize("elapsed", [30.0, 30.5])
def test_r48_at_the_bound_its_wait_is_over_once_and_for_all_with_one_warning(elapsed: float, log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready("req-7")
    rig.clock.advance(500)
    assert rig.decision.refuse(episode) is True
    rig.clock.advance(elapsed)
    assert rig.decision.poll(episode) is READY
    assert rig.decision.refuse(episode) is False
    assert rig.fallbacks == [Fallback("req-7", "host", 10, 160, elapsed, 30.0, MissReason.CAPACITY, may_land=True)]
    (line,) = log.warnings
    assert all(word in line for word in ("req-7", "160 tokens", "(capacity)", f"waited {elapsed:.3f} s", "limit 30.0"))
    rig.clock.advance(ANSWER_LIFETIME_S)
    for _ in range(3):
        assert rig.decision.refuse(episode) is False
        assert not rig.decision.refresh_due(episode)
        rig.decision.refreshing(episode)
        assert rig.answered(episode, disk=10) is READY, "nothing is looked for any more"
        assert rig.staged(episode, 10, None) is READY
    assert (episode.num_blocks, episode.miss) == (10, MissReason.CAPACITY)
    rig.decision.end(episode)
    status = rig.status
    assert (status.capacity_expired, status.capacity_waiters, status.fallbacks) == (1, 0, {"capacity": 1})
    assert len(log.warnings) == 1


@pytest.mark.parametrize("num_landed", [10, 4, 0])
def test_r48_what_was_there_in_time_may_land_and_nothing_is_tried_again(num_landed: int, log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.clock.advance(30)
    assert rig.decision.refuse(episode) is False
    rig.decision.landing(episode, 10)
    assert episode.phase is LANDING
    assert rig.decision.landed(episode, num_landed) is OVER
    assert (rig.status.fallbacks, len(log.warnings)) == ({"capacity": 1}, 1)


def test_r49_what_fits_is_granted_at_any_age_without_a_warning(log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.clock.advance(10_000)
    rig.decision.tick()
    rig.decision.landing(episode, 10)
    assert (episode.phase, rig.status.capacity_waiters) == (LANDING, 0)
    assert rig.decision.poll(episode) is LANDING  # nor has the wait used up its budget
    assert rig.decision.landed(episode, 10) is OVER
    assert (log.warnings, rig.fallbacks, rig.status.capacity_expired) == ([], [], 0)


def test_r50_waiting_for_a_slot_starts_nothing_and_expires_nothing(log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    for _ in range(1000):
        rig.clock.advance(60)
        assert rig.decision.poll(episode) is READY
    assert (rig.status.capacity_waits, rig.status.longest_capacity_wait_seconds) == (0, 0.0)
    assert rig.decision.refuse(episode) is True
    rig.clock.advance(29)
    assert rig.decision.refuse(episode) is True
    assert log.warnings == []


def test_r50_slot_wait_after_the_first_refusal_counts_and_is_looked_at_when_it_is_refused_again() -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.clock.advance(31)
    for _ in range(3):
        assert rig.decision.poll(episode) is READY
    assert rig.fallbacks == []
    assert rig.decision.refuse(episode) is False


def test_r50_a_restore_is_worth_it_when_the_slot_comes_or_not_by_what_is_known_then(rig: Rig) -> None:
    episode = rig.ready()
    assert rig.decision.is_worth_landing(episode)
    rig.computes(0.010)
    assert rig.decision.is_worth_landing(episode)
    rig.reads("host", 0.009)
    assert rig.decision.is_worth_landing(episode)
    rig.computes(0.0098)
    assert not rig.decision.is_worth_landing(episode)
    assert (episode.phase, episode.num_blocks) == (READY, 10)


def test_r52_a_preemption_after_a_token_starts_afresh(log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready(num_tokens=500)
    rig.decision.refuse(episode)
    rig.clock.advance(40)
    assert rig.decision.refuse(episode) is False
    fresh = rig.decision.again(episode, rig.query(num_tokens=501))
    assert (fresh.phase, fresh.attempts, fresh.miss) == (LOOKING, 1, None)
    assert rig.answered(fresh, host=10) is READY
    assert rig.decision.refuse(fresh) is True
    rig.clock.advance(29)
    assert rig.decision.refuse(fresh) is True
    assert len(log.warnings) == 1
    rig.clock.advance(1)
    assert rig.decision.refuse(fresh) is False
    assert len(log.warnings) == 2


def test_r52_restoring_and_preempting_without_a_token_ends(log: Log) -> None:
    rig = Rig(max_attempts=4)
    episode = rig.ready(num_tokens=500)
    for attempt in (2, 3, 4):
        rig.decision.landing(episode, 10)
        rig.decision.landed(episode, 10)
        episode = rig.decision.again(episode, rig.query(num_tokens=500))
        assert (episode.phase, episode.attempts) == (LOOKING, attempt)
        rig.answered(episode, host=10)
    rig.decision.landing(episode, 10)
    for _ in range(3):
        episode = rig.decision.again(episode, rig.query(num_tokens=500))
        assert (episode.phase, episode.miss, episode.attempts) == (OVER, MissReason.BUDGET, 4)
    assert [line for line in log.warnings if "(budget)" not in line] == []
    assert rig.decision.again(episode, rig.query(num_tokens=501)).attempts == 1


def test_r52_a_preemption_ends_the_episode_before(rig: Rig) -> None:
    waiting, looking = rig.ready("a"), rig.begin("b")
    rig.decision.refuse(waiting)
    for episode in (waiting, looking):
        rig.decision.again(episode, rig.query())
        assert episode.phase is OVER
    status = rig.status
    assert (status.capacity_waiters, status.active_waits, status.fallbacks) == (0, 2, {})


@pytest.mark.parametrize("phase", [LOOKING, STAGING, READY])
def test_r55_blocks_that_will_never_be_there_are_not_waited_for(phase: RestorePhase, rig: Rig, log: Log) -> None:
    begin: dict[RestorePhase, Callable[[], RestoreEpisode]] = {
        LOOKING: rig.begin,
        STAGING: rig.staging,
        READY: rig.ready,
    }
    episode = begin[phase]()
    assert episode.phase is phase
    assert rig.decision.refuse(episode, is_permanent=True) is False
    assert (episode.phase, episode.miss) == (OVER, MissReason.CAPACITY)
    status = rig.status
    assert (status.capacity_waits, status.capacity_waiters, status.capacity_expired) == (0, 0, 0)
    assert (status.fallbacks, status.fallback_tokens, status.active_waits) == ({"capacity": 1}, 160, 0)
    assert len(log.warnings) == 1


@pytest.mark.parametrize("begin", ["begin", "staging"])
def test_a_refusal_before_its_blocks_are_in_host_memory_starts_no_wait(begin: str, rig: Rig) -> None:
    episode = getattr(rig, begin)()
    assert rig.decision.refuse(episode) is True
    assert (rig.status.capacity_waits, rig.status.active_waits) == (0, 1)


def test_r69_a_bound_of_0_computes_at_the_first_refusal(log: Log) -> None:
    rig = Rig(capacity_bound_s=0.0)
    assert rig.decision.refuse(rig.ready()) is False
    assert rig.fallbacks == [Fallback("r", "host", 10, 160, 0.0, 0.0, MissReason.CAPACITY, may_land=True)]
    assert len(log.warnings) == 1
    never_refused = rig.ready()
    rig.decision.landing(never_refused, 10)
    assert never_refused.phase is LANDING


@pytest.mark.parametrize("name", ["capacity_bound_s", "episode_budget_s", "max_wait_s", "margin"])
@pytest.mark.parametrize("value", [-1.0, -0.001, nan, inf])
def test_r69_no_limit_is_negative_or_infinite(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        RestoreSettings.model_validate({name: value})


def test_r69_a_clock_that_goes_back_expires_nothing_and_prolongs_nothing(log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.clock.advance(20)
    assert rig.decision.refuse(episode) is True
    rig.clock.advance(-1_000_000)
    assert rig.decision.refuse(episode) is True
    assert rig.status.longest_capacity_wait_seconds == pytest.approx(20)
    rig.clock.advance(9.9)
    assert rig.decision.refuse(episode) is True
    assert log.warnings == []
    rig.clock.advance(0.2)
    assert rig.decision.refuse(episode) is False
    assert rig.fallbacks[0].waited_s == pytest.approx(30.1)


@pytest.mark.parametrize("begin", ["begin", "staging"])
def test_r69_nor_does_it_end_or_prolong_a_lookup_or_a_stage(begin: str, rig: Rig) -> None:
    episode = getattr(rig, begin)()
    phase = episode.phase
    rig.clock.advance(0.6)
    assert rig.decision.poll(episode) is phase
    rig.clock.advance(-5000)
    assert rig.decision.poll(episode) is phase
    assert episode.deadline == pytest.approx(rig.clock.now() + FIRST_WAIT_S - 0.6)
    rig.clock.advance(0.3)
    assert rig.decision.poll(episode) is phase
    rig.clock.advance(0.11)
    assert rig.decision.poll(episode) is OVER


def test_a_stopwatch_reads_the_same_to_whoever_only_looks() -> None:
    watch = Stopwatch(100.0)
    assert (watch.read(130.0), watch.peek(150.0), watch.read(140.0)) == (30.0, 50.0, 40.0)
    assert (watch.peek(0.0), watch.read(0.0), watch.read(5.0), watch.when(50.0)) == (40.0, 40.0, 45.0, 10.0)


@pytest.mark.parametrize("began_at", [1000.3, 12345.6789, 0.1])
def test_a_wait_ends_at_the_very_moment_that_its_deadline_names(began_at: float) -> None:
    rig = Rig(FakeClock(began_at), max_wait_s=0.2, capacity_bound_s=30.0)
    looking = rig.begin()
    assert looking.deadline is not None
    rig.clock.advance(0.2)
    assert rig.clock.now() == looking.deadline
    assert rig.decision.poll(looking) is OVER
    rig = Rig(FakeClock(began_at), capacity_bound_s=30.0)
    waiting = rig.ready()
    rig.decision.refuse(waiting)
    rig.clock.advance(30.0)
    assert rig.decision.refuse(waiting) is False


# ---- lookups ---------------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS01")
def test_r65_a_lookup_that_is_not_answered_ends_with_one_warning_and_its_late_answer_is_nothing(log: Log) -> None:
    rig = Rig(max_wait_s=0.2)
    episode = rig.begin("req-9")
    rig.clock.advance(0.199)
    assert rig.decision.poll(episode) is LOOKING
    rig.clock.advance(0.0011)
    assert rig.decision.poll(episode) is OVER
    assert (episode.num_blocks, episode.miss, episode.deadline) == (0, MissReason.TIMEOUT, None)
    (line,) = log.warnings
    words = ("req-9", "not restored from any tier", "(timeout)", "waited 0.200 s", "limit 0.200 s")
    assert all(word in line for word in words)
    assert rig.status.fallbacks == {"timeout": 1}
    assert rig.answered(episode, host=10) is OVER
    rig.decision.end(episode)
    assert (len(log.warnings), rig.status.decisions) == (1, {})


@pytest.mark.bug("HS01")
def test_r65_a_tier_that_never_gives_a_block_is_given_up_with_one_warning(log: Log) -> None:
    rig = Rig(max_wait_s=0.2)
    episode = rig.staging("req-9")
    rig.clock.advance(0.201)
    assert rig.decision.poll(episode) is OVER
    assert rig.staged(episode, 0, MissReason.TIMEOUT, seconds=0.2) is OVER
    (line,) = log.warnings
    assert all(word in line for word in ("req-9", "tier disk", "(timeout)", "waited 0.201 s", "limit 0.200 s"))
    rig.clock.advance(100)
    assert rig.staged(episode, 10, None) is OVER
    rig.decision.end(episode)
    assert (episode.num_blocks, len(log.warnings), rig.status.fallbacks) == (0, 1, {"timeout": 1})


@pytest.mark.bug("PF12")
@pytest.mark.parametrize("num_backlog", [0, 50_000])
def test_r65_the_limit_grows_with_the_prompt_up_to_its_cap_and_never_above_what_computing_takes(
    num_backlog: int,
) -> None:
    rig = Rig(max_wait_s=5.0)
    per_token_s, per_pair_s = 2e-5, 1e-10
    for position in (0, 50_000) * 40:
        pairs = 512.0 * (position + 256)
        rig.decision.observe_prefill(512, pairs, 512 * per_token_s + pairs * per_pair_s)
    rig.decision.set_backlog(num_backlog)
    limits, estimates = [], []
    for num_tokens in (1_000, 10_000, 100_000, 1_000_000):
        num_blocks = num_tokens // B
        episode = rig.begin(num_tokens=num_tokens, num_blocks=num_blocks)
        assert episode.deadline is not None
        limits.append(episode.deadline - rig.clock.now())
        rig.answered(episode, disk=num_blocks)
        assert episode.stage_wait_s == pytest.approx(limits[-1])
        backlog_s = num_backlog * (per_token_s + 25_256 * per_pair_s)
        estimates.append(backlog_s + num_blocks * B * (per_token_s + num_blocks * B / 2 * per_pair_s))
    assert limits == sorted(limits)
    assert all(limit <= 1.02 * estimate for limit, estimate in zip(limits, estimates, strict=True))
    assert limits[0] == pytest.approx(estimates[0], rel=0.02)
    assert limits[-1] == 5.0


def test_r65_before_computing_was_measured_a_second_is_the_most() -> None:
    patient, hasty = Rig(max_wait_s=100.0), Rig(max_wait_s=0.3)
    assert patient.begin().deadline == patient.clock.now() + FIRST_WAIT_S
    assert hasty.begin().deadline == hasty.clock.now() + 0.3
    assert patient.begin(max_wait_s=0.7).deadline == patient.clock.now() + 0.7
    assert patient.begin(max_wait_s=50.0).deadline == patient.clock.now() + FIRST_WAIT_S


def test_r65_lookup_and_stage_share_the_request_s_limit() -> None:
    rig = Rig()
    episode = rig.begin(max_wait_s=0.5)
    rig.clock.advance(0.3)
    assert rig.answered(episode, disk=10) is STAGING
    assert episode.stage_wait_s == pytest.approx(0.2)
    late = rig.begin(max_wait_s=0.5)
    rig.clock.advance(0.5)
    assert rig.answered(late, host=2, disk=8) is READY  # the lookup came in time for nothing but this
    assert (late.num_blocks, late.miss) == (2, MissReason.TIMEOUT)


def test_r65_a_lookup_that_fails_is_recomputed_with_one_warning(rig: Rig, log: Log) -> None:
    episode = rig.begin()
    assert rig.decision.not_answered(episode) is OVER
    assert rig.decision.not_answered(episode) is OVER
    assert (episode.miss, len(log.warnings)) == (MissReason.TIER_ERROR, 1)
    assert rig.status.fallbacks == {"tier_error": 1}


def test_r65_waiting_for_capacity_uses_up_neither_limit_nor_budget() -> None:
    rig = Rig(capacity_bound_s=1000.0, max_wait_s=2.0, episode_budget_s=10.0)
    episode = rig.ready()
    for _ in range(100):
        rig.clock.advance(9)
        assert rig.decision.refuse(episode) is True
    rig.decision.landing(episode, 10)
    assert episode.deadline == rig.clock.now() + 10.0
    assert rig.decision.landed(episode, 4) is LOOKING
    assert episode.deadline == rig.clock.now() + FIRST_WAIT_S


# ---- refreshes -------------------------------------------------------------------------------------------------------


def test_r66_an_answer_is_refreshed_at_half_its_lifetime_and_never_twice_at_once(rig: Rig) -> None:
    episode = rig.ready()
    rig.clock.advance(ANSWER_LIFETIME_S / 2 - 0.01)
    assert not rig.decision.refresh_due(episode)
    rig.clock.advance(0.01)
    assert rig.decision.refresh_due(episode)
    rig.decision.refreshing(episode)
    rig.clock.advance(10 * ANSWER_LIFETIME_S)
    assert not rig.decision.refresh_due(episode)
    assert rig.answered(episode, host=10) is READY
    assert not rig.decision.refresh_due(episode)
    rig.clock.advance(ANSWER_LIFETIME_S / 2)
    assert rig.decision.refresh_due(episode)
    assert rig.status.decisions == {"restore": 1}


def test_r66_a_refresh_that_fails_keeps_the_answer(rig: Rig, log: Log) -> None:
    episode = rig.ready()
    rig.clock.advance(ANSWER_LIFETIME_S)
    rig.decision.refreshing(episode)
    assert rig.decision.not_answered(episode) is READY
    assert (episode.num_blocks, log.warnings) == (10, [])
    assert not rig.decision.refresh_due(episode)
    rig.clock.advance(ANSWER_LIFETIME_S)
    assert rig.decision.refresh_due(episode)


def test_r66_what_is_no_longer_held_is_recomputed_without_a_warning(rig: Rig, log: Log) -> None:
    for num_left, phase in ((6, READY), (0, OVER)):
        episode = rig.ready()
        rig.decision.refreshing(episode)
        assert rig.answered(episode, host=num_left) is phase
        assert (episode.num_blocks, episode.miss) == (num_left, MissReason.EVICTED)
        rig.decision.end(episode)
    assert (log.warnings, rig.fallbacks) == ([], [])


def test_r66_what_left_host_memory_for_a_lower_tier_is_staged_again_within_the_same_bound() -> None:
    rig = Rig(capacity_bound_s=30.0, max_attempts=2)
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.clock.advance(20)
    rig.decision.refreshing(episode)
    assert rig.answered(episode, host=3, disk=7) is STAGING
    assert (episode.attempts, rig.status.capacity_waiters) == (2, 0)
    assert rig.staged(episode, 10, None) is READY
    assert rig.decision.refuse(episode) is True
    rig.decision.refreshing(episode)
    assert rig.answered(episode, host=3, disk=7) is READY  # its attempts are used up: it takes what is there
    assert episode.num_blocks == 3
    rig.clock.advance(10)
    assert rig.decision.refuse(episode) is False


def test_r66_only_what_waits_with_an_answer_is_refreshed(rig: Rig) -> None:
    landing, over = rig.ready(), rig.ready()
    rig.decision.refreshing(landing)
    rig.decision.landing(landing, 10)
    rig.decision.end(over)
    episodes = [rig.begin(), landing, over]
    rig.clock.advance(ANSWER_LIFETIME_S)
    for episode in episodes:
        phase = episode.phase
        assert not rig.decision.refresh_due(episode)
        rig.decision.refreshing(episode)
        assert not episode.is_refreshing
        assert episode.phase is phase


def test_r66_what_waits_for_its_stage_to_begin_is_refreshed_and_goes_where_its_blocks_are(log: Log) -> None:
    rig = Rig(max_wait_s=60.0)
    same, moved, short, gone = (rig.staging() for _ in range(4))
    rig.clock.advance(ANSWER_LIFETIME_S / 2)
    for episode in (same, moved, short, gone):
        rig.decision.excuse(episode, ANSWER_LIFETIME_S / 2)
        assert rig.decision.refresh_due(episode)
        rig.decision.refreshing(episode)
        assert not rig.decision.refresh_due(episode), "never two at once"
    assert rig.answered(same, host=2, disk=8) is STAGING
    assert (same.num_blocks, same.num_host) == (10, 2)
    assert rig.answered(moved, host=10) is READY
    assert rig.answered(short, disk=6) is STAGING
    assert short.num_blocks == 6
    assert rig.answered(gone) is OVER
    assert [episode.attempts for episode in (same, moved, short, gone)] == [1, 1, 1, 1]
    for episode in (same, short):
        assert rig.staged(episode, episode.num_blocks, None) is READY
    rig.decision.end(same)
    assert log.warnings == []


def test_r66_an_answer_to_a_stage_that_runs_is_nobodys(rig: Rig) -> None:
    episode = rig.staging()
    assert rig.answered(episode, host=1) is STAGING
    assert rig.decision.not_answered(episode) is STAGING
    assert episode.num_blocks == 10


def test_time_that_others_took_counts_against_no_wait(rig: Rig) -> None:
    episode = rig.staging()
    allowed, deadline = episode.allowed_s, episode.deadline
    assert deadline is not None
    rig.clock.advance(allowed)
    rig.decision.excuse(episode, allowed / 2)
    assert rig.decision.poll(episode) is STAGING
    assert episode.deadline == pytest.approx(deadline + allowed / 2)
    rig.clock.advance(allowed / 2)
    assert rig.decision.poll(episode) is OVER
    assert episode.waited_s == pytest.approx(allowed)
    rig.decision.excuse(episode, 1.0)
    assert episode.deadline is None
    again = rig.staging()
    rig.decision.excuse(again, 5.0)
    assert again.deadline == rig.clock.now() + again.allowed_s, "there was no wait yet to excuse it of"


def test_r67_what_the_engine_holds_itself_is_not_restored(rig: Rig, log: Log) -> None:
    covered = rig.begin(position=10 * B, num_blocks=0)
    assert (covered.phase, covered.attempts, covered.miss) == (OVER, 0, None)
    episode = rig.ready()
    rig.decision.end(episode)  # its blocks came to the engine's own cache meanwhile
    assert (episode.phase, rig.fallbacks, log.warnings) == (OVER, [], [])
    more = rig.ready()
    rig.decision.landing(more, 4, position=6 * B)
    assert rig.decision.landed(more, 4) is OVER
    assert (more.position, rig.fallbacks) == (10 * B, [])


def test_r67_blocks_that_the_engine_lost_are_looked_up_again(rig: Rig) -> None:
    episode = rig.ready(position=10 * B)
    anew = rig.decision.again(episode, rig.query(position=2 * B, num_blocks=18))
    assert (anew.phase, anew.position, anew.num_blocks, anew.attempts) == (LOOKING, 2 * B, 18, 1)


def test_r47_who_lost_a_prefix_goes_on_with_its_wait_for_blocks(log: Log) -> None:
    rig = Rig(capacity_bound_s=60.0)
    episode = rig.ready(position=10 * B)
    assert rig.decision.refuse(episode)
    for num_local in (9, 8, 7):
        rig.clock.advance(19.0)
        episode = rig.decision.look_again(episode, rig.query(position=num_local * B, num_blocks=20 - num_local))
        assert (episode.phase, episode.attempts) == (LOOKING, 1)
        assert rig.answered(episode, host=20 - num_local) is READY
        assert rig.decision.refuse(episode)
    assert rig.decision.refused_until(episode) == rig.clock.now() + 3.0
    rig.clock.advance(3.0)
    assert not rig.decision.refuse(episode)
    assert rig.fallbacks == [Fallback("r", "host", 13, 13 * B, 60.0, 60.0, MissReason.CAPACITY, may_land=True)]
    assert (rig.status.capacity_waiters, len(log.warnings)) == (0, 1)


def test_r64_who_lost_a_prefix_goes_on_with_its_budget(rig: Rig) -> None:
    rig.computes(1.0)
    episode = rig.staging(position=10 * B, max_wait_s=5.0)
    for num_local, elapsed in ((9, 2.0), (8, 2.5)):
        rig.clock.advance(elapsed)
        rig.staged(episode, 10, None)
        episode = rig.decision.look_again(episode, rig.query(position=num_local * B, max_wait_s=5.0))
        rig.answered(episode, disk=10)
    assert (episode.phase, episode.active_s, episode.waited_s, episode.stage_wait_s) == (STAGING, 4.5, 4.5, 0.5)
    rig.clock.advance(0.5)
    assert rig.decision.poll(episode) is OVER
    rig.staged(episode, 0, MissReason.TIMEOUT)
    assert [fallback.reason for fallback in rig.fallbacks] == [MissReason.TIMEOUT]


@pytest.mark.parametrize(("num_found", "told"), [(11, []), (5, [6])])
def test_r64_what_came_too_late_is_told_once_by_who_lost_a_prefix(num_found: int, told: list[int], rig: Rig) -> None:
    episode = rig.begin(position=2 * B)
    rig.answered(episode, host=4, disk=6)
    rig.clock.advance(10.0)
    assert rig.decision.poll(episode) is READY
    assert rig.staged(episode, 4, MissReason.TIMEOUT) is READY
    after = rig.decision.look_again(episode, rig.query(position=B, num_blocks=11))
    rig.decision.end(episode)
    assert rig.fallbacks == []
    assert rig.answered(after, host=num_found) is READY
    rig.decision.landing(after, num_found)
    rig.decision.landed(after, num_found)
    assert [fallback.num_blocks for fallback in rig.fallbacks] == told


def test_r69_a_clock_that_goes_back_moves_the_end_of_a_wait_for_blocks() -> None:
    rig = Rig(capacity_bound_s=60.0)
    episode = rig.ready()
    assert rig.decision.refused_until(episode) is None
    rig.decision.refuse(episode)
    rig.clock.advance(20.0)
    assert rig.decision.refuse(episode)
    rig.clock.advance(-500.0)
    assert rig.decision.refused_until(episode) == rig.clock.now() + 40.0


@pytest.mark.parametrize("max_blocks", [0, -1, -192])
def test_r70_nothing_to_restore_is_nothing_to_do(max_blocks: int, rig: Rig, log: Log) -> None:
    episode = rig.begin(num_blocks=max_blocks, position=640, num_tokens=448)
    assert (episode.phase, episode.num_blocks, episode.max_blocks, episode.deadline) == (OVER, 0, 0, None)
    assert rig.decision.poll(episode) is OVER
    assert rig.answered(episode, host=4) is OVER
    rig.decision.end(episode)
    assert log.warnings == []


def test_r70_no_count_is_ever_negative_or_above_what_was_asked(rig: Rig) -> None:
    episode = rig.begin(position=-5, num_blocks=10)
    assert episode.position == 0
    rig.decision.answered(episode, [TierPart("host", 2), TierPart("disk", 50, -7)])
    assert episode.num_blocks == 10
    assert rig.decision.staged(episode, -3, MissReason.TIMEOUT, {"disk": -3}, -1.0, -5) is OVER
    assert rig.fallbacks[-1].num_blocks == 10
    over = rig.staging()
    assert rig.staged(over, 99, None) is READY
    assert over.num_blocks == 10
    rig.decision.landing(over, -2)
    assert rig.decision.landed(over, -2) is OVER
    rig.decision.set_backlog(-100)
    again = rig.begin()
    assert again.deadline is not None
    assert again.deadline >= rig.clock.now()
    assert over.position == 0


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("miss", sorted(RETRIED))
def test_r64_a_stage_that_fails_is_looked_up_again_up_to_its_attempts(miss: MissReason, log: Log) -> None:
    rig = Rig(max_attempts=3)
    episode = rig.staging()
    for attempt in (2, 3):
        assert rig.staged(episode, 4, miss) is LOOKING
        assert (episode.attempts, episode.num_blocks, log.warnings) == (attempt, 10, [])
        assert rig.answered(episode, host=4, disk=6) is STAGING
    assert rig.staged(episode, 4, miss) is READY
    assert (episode.num_blocks, episode.miss, episode.attempts) == (4, miss, 3)
    rig.decision.landing(episode, 4)
    assert rig.decision.landed(episode, 4) is OVER
    assert rig.fallbacks == [Fallback("r", "disk", 6, 96, 0.0, FIRST_WAIT_S, miss)]
    assert len(log.warnings) == 1


def test_r64_a_shorter_prefix_may_win_and_the_rest_is_told(rig: Rig, log: Log) -> None:
    episode = rig.staging()
    rig.staged(episode, 0, MissReason.DAMAGED)
    assert rig.answered(episode, disk=7) is STAGING
    assert episode.miss is MissReason.DAMAGED
    assert rig.staged(episode, 7, None) is READY
    rig.decision.landing(episode, 7)
    rig.decision.landed(episode, 7)
    assert [(told.num_blocks, told.reason) for told in rig.fallbacks] == [(3, MissReason.DAMAGED)]


def test_r64_a_retry_that_brings_everything_was_no_failure(rig: Rig, log: Log) -> None:
    episode = rig.staging()
    rig.staged(episode, 3, MissReason.TIER_ERROR)
    rig.answered(episode, host=3, disk=7)
    assert rig.staged(episode, 10, None) is READY
    rig.decision.end(episode)
    assert (rig.fallbacks, log.warnings) == ([], [])


def test_r64_a_copy_that_fails_is_looked_up_again_behind_what_landed(rig: Rig, log: Log) -> None:
    episode = rig.ready()
    rig.decision.landing(episode, 10)
    assert rig.decision.landed(episode, 6) is LOOKING
    assert (episode.position, episode.max_blocks, episode.num_blocks, episode.attempts) == (6 * B, 4, 4, 2)
    assert rig.answered(episode, host=9) is READY
    assert episode.num_blocks == 4
    rig.decision.landing(episode, 4)
    assert rig.decision.landed(episode, 4) is OVER
    assert (episode.position, rig.fallbacks) == (10 * B, [])


def test_r64_the_last_copy_that_fails_is_told_once(log: Log) -> None:
    rig = Rig(max_attempts=2)
    episode = rig.ready()
    for num_landed, phase in ((6, LOOKING), (1, OVER)):
        rig.decision.landing(episode, episode.num_blocks)
        assert rig.decision.landed(episode, num_landed) is phase
        rig.answered(episode, host=4)
    assert rig.fallbacks == [Fallback("r", "host", 3, 48, 0.0, rig.settings.episode_budget_s, MissReason.LAND_FAILED)]
    assert not episode.must_fail
    rig.decision.end(episode)
    assert len(log.warnings) == 1


def test_r64_all_attempts_share_one_budget(log: Log) -> None:
    rig = Rig(max_attempts=100, episode_budget_s=10.0, max_wait_s=60.0)
    rig.computes(10.0)
    episode = rig.ready()
    num_tries = 0
    while episode.phase is not OVER:
        rig.decision.landing(episode, 10)
        rig.clock.advance(1.5)
        num_tries += 1
        rig.decision.landed(episode, 0)
        rig.answered(episode, host=10)
    assert num_tries == 5  # of 1.5 s each: then less is left than a copy is kept for
    assert [(told.reason, told.waited_s) for told in rig.fallbacks] == [(MissReason.LAND_FAILED, 7.5)]


def test_r64_a_copy_that_does_not_end_is_abandoned_when_the_budget_is_used_up(log: Log) -> None:
    rig = Rig(episode_budget_s=10.0)
    episode = rig.ready()
    rig.decision.landing(episode, 10)
    rig.clock.advance(9.99)
    assert rig.decision.poll(episode) is LANDING
    rig.clock.advance(0.01)
    assert rig.decision.poll(episode) is OVER
    assert (episode.num_blocks, episode.miss, episode.attempts) == (0, MissReason.BUDGET, 1)
    assert rig.decision.landed(episode, 10) is OVER
    assert (episode.position, len(log.warnings)) == (0, 1)
    (told,) = rig.fallbacks
    assert (told.tier, told.num_blocks, told.limit_s, told.reason) == ("host", 10, 10.0, MissReason.BUDGET)
    assert told.waited_s == pytest.approx(10.0)


@pytest.mark.parametrize("late_s", [0.0, 1.0, 2.5, 1000.0])
@pytest.mark.parametrize("is_polled", [False, True])
def test_r64_a_stage_that_the_budget_ends_leaves_time_to_copy_what_came(
    log: Log, late_s: float, *, is_polled: bool
) -> None:
    """However late the step comes that ends it."""
    rig = Rig(episode_budget_s=10.0, max_wait_s=60.0)
    rig.computes(10.0)
    episode = rig.staging()
    assert episode.stage_wait_s == 7.5
    rig.clock.advance(7.5 + late_s)
    if is_polled:
        rig.decision.poll(episode)
    assert rig.staged(episode, 6, MissReason.TIMEOUT, seconds=7.5) is READY
    assert episode.miss is MissReason.BUDGET
    rig.decision.landing(episode, 6)
    assert episode.deadline == rig.clock.now() + 2.5
    rig.decision.landed(episode, 6)
    assert [(told.num_blocks, told.reason, told.limit_s) for told in rig.fallbacks] == [(4, MissReason.BUDGET, 7.5)]


@pytest.mark.parametrize("miss", [MissReason.TIMEOUT, None, MissReason.RESET])
def test_r64_what_a_stage_brought_in_time_lands_and_the_rest_is_told(
    miss: MissReason | None, rig: Rig, log: Log
) -> None:
    episode = rig.staging()
    assert rig.staged(episode, 4, miss) is READY
    reason = miss or MissReason.TIMEOUT
    assert (episode.num_blocks, episode.miss, episode.attempts, log.warnings) == (4, reason, 1, [])
    rig.decision.landing(episode, 4)
    rig.decision.landed(episode, 4)
    assert [(told.num_blocks, told.tier, told.reason) for told in rig.fallbacks] == [(6, "disk", reason)]


@pytest.mark.parametrize("num_host", [0, 3])
@pytest.mark.parametrize("num_arrived", [0, 5, 10])
def test_what_had_arrived_when_the_time_was_over_counts_though_it_is_told_afterwards(
    num_host: int, num_arrived: int, rig: Rig, log: Log
) -> None:
    episode = rig.begin()
    rig.answered(episode, **({"host": num_host} if num_host else {}), disk=10 - num_host)
    rig.clock.advance(FIRST_WAIT_S)
    assert rig.decision.poll(episode) is (READY if num_host else OVER)
    assert (episode.num_blocks, log.warnings) == (num_host, [])
    num_there = max(num_host, num_arrived)
    assert rig.staged(episode, num_there, None) is (READY if num_there else OVER)
    assert (episode.num_blocks, episode.miss) == (num_there, None if num_there == 10 else MissReason.TIMEOUT)
    assert rig.staged(episode, 1, None) is episode.phase  # told once
    assert episode.num_blocks == num_there
    if num_there:
        rig.decision.landing(episode, num_there)
        rig.decision.landed(episode, num_there)
    rig.decision.end(episode)
    assert [told.num_blocks for told in rig.fallbacks] == ([10 - num_there] if num_there < 10 else [])


def test_a_stage_that_failed_when_its_time_was_over_anyway_is_not_tried_again(rig: Rig, log: Log) -> None:
    episode = rig.staging()
    rig.clock.advance(FIRST_WAIT_S)
    rig.decision.poll(episode)
    assert rig.staged(episode, 0, MissReason.TIER_ERROR) is OVER
    assert rig.status.fallbacks == {"timeout": 1}


def test_what_arrived_is_no_longer_heard_of_once_it_lands(rig: Rig) -> None:
    episode = rig.begin()
    rig.answered(episode, host=3, disk=7)
    rig.clock.advance(FIRST_WAIT_S)
    assert rig.decision.poll(episode) is READY
    rig.decision.landing(episode, 3)
    assert rig.staged(episode, 10, None) is LANDING
    assert rig.decision.landed(episode, 3) is OVER


def test_time_of_copies_is_of_the_budget_and_not_of_the_request_s_wait() -> None:
    rig = Rig(max_wait_s=0.5, episode_budget_s=8.0)
    episode = rig.begin()
    rig.clock.advance(0.25)
    rig.answered(episode, host=10)
    rig.decision.landing(episode, 10)
    rig.clock.advance(5.5)
    assert rig.decision.landed(episode, 0) is LOOKING
    assert episode.deadline == rig.clock.now() + 0.25  # of the budget's 6 s for lookups and stages, as much is left
    rig.clock.advance(0.25)
    assert rig.decision.poll(episode) is OVER
    assert episode.miss is MissReason.TIMEOUT


def test_it_is_the_limit_that_ends_a_wait_when_more_of_the_budget_is_left() -> None:
    rig = Rig(max_wait_s=1.0, episode_budget_s=8.0)
    episode = rig.begin()
    rig.clock.advance(0.75)
    rig.answered(episode, host=10)
    rig.decision.landing(episode, 10)
    rig.clock.advance(4.5)
    assert rig.decision.landed(episode, 0) is LOOKING
    rig.clock.advance(0.25)
    assert rig.decision.poll(episode) is OVER
    assert [(told.reason, told.waited_s, told.limit_s) for told in rig.fallbacks] == [(MissReason.TIMEOUT, 1.0, 1.0)]


def test_a_stage_that_is_never_heard_of_again_is_told_at_the_end(rig: Rig, log: Log) -> None:
    episode = rig.staging()
    rig.clock.advance(FIRST_WAIT_S)
    rig.decision.poll(episode)
    rig.decision.end(episode)
    assert rig.staged(episode, 10, None) is OVER
    assert (len(log.warnings), episode.num_blocks) == (1, 0)


@pytest.mark.parametrize("miss", [MissReason.NOT_STAGED, MissReason.LIMIT])
def test_what_was_never_asked_for_is_no_failure(miss: MissReason, rig: Rig, log: Log) -> None:
    episode = rig.staging()
    assert rig.staged(episode, 4, miss) is READY
    assert (episode.num_blocks, episode.miss) == (4, miss)
    rig.decision.end(episode)
    assert (log.warnings, rig.fallbacks) == ([], [])


@pytest.mark.parametrize(
    ("miss", "fails"),
    [
        (MissReason.TIER_ERROR, True),
        (MissReason.DAMAGED, True),
        (MissReason.EVICTED, False),
        (MissReason.TIMEOUT, False),
    ],
)
def test_on_failure_fail_ends_requests_whose_restore_failed_and_no_others(miss: MissReason, fails: bool) -> None:
    rig = Rig(on_failure="fail", max_attempts=1)
    episode = rig.staging()
    assert rig.staged(episode, 4, miss) is (OVER if fails else READY)
    assert episode.must_fail is fails
    landing = rig.ready()
    rig.decision.landing(landing, 10)
    assert rig.decision.landed(landing, 9) is OVER
    assert landing.must_fail
    stuck = rig.ready()
    rig.decision.landing(stuck, 10)
    rig.clock.advance(100)
    assert rig.decision.poll(stuck) is OVER
    assert stuck.must_fail


def test_on_failure_fail_is_about_the_last_attempt() -> None:
    rig = Rig(on_failure="fail", max_attempts=2)
    episode = rig.staging()
    assert rig.staged(episode, 0, MissReason.TIER_ERROR) is LOOKING
    assert not episode.must_fail
    rig.answered(episode, disk=10)
    rig.staged(episode, 10, None)
    rig.decision.landing(episode, 10)
    rig.decision.landed(episode, 10)
    assert not episode.must_fail


def test_admitted_or_ended_early_it_waits_no_more_and_nobody_is_warned(rig: Rig, log: Log) -> None:
    looking, staging, ready, landing, early = rig.begin(), rig.staging(), rig.ready(), rig.ready(), rig.staging()
    rig.decision.refuse(ready)
    rig.decision.landing(landing, 10)
    for episode in (looking, staging, ready, landing):
        rig.decision.end(episode)
        rig.decision.end(episode)
        assert (episode.phase, episode.num_blocks, episode.deadline) == (OVER, 0, None)
    assert rig.decision.landed(landing, 10) is OVER
    rig.decision.landing(early, 2)
    assert rig.staged(early, 10, None) is LANDING
    assert rig.decision.landed(early, 2) is OVER
    assert (rig.status.active_waits, rig.status.capacity_waiters, rig.fallbacks, log.warnings) == (0, 0, [], [])


# ---- restore or compute ----------------------------------------------------------------------------------------------


def test_it_restores_what_wins_by_the_margin_and_no_more(log: Log) -> None:
    rig = Rig(margin=0.1)
    rig.reads("host", 0.001)
    rig.reads("disk", 0.010)
    rig.computes(0.0122)  # a block takes 0.011 s to restore, and 10 % more is 0.0121 s
    restored = rig.begin()
    assert rig.answered(restored, disk=10) is STAGING
    rig.computes(0.0120)
    computed = rig.begin()
    assert rig.answered(computed, disk=10) is OVER
    assert (computed.miss, computed.num_blocks) == (MissReason.COST, 0)
    rig.decision.end(computed)
    assert rig.status.decisions == {"restore": 1, "recompute": 1}
    assert (log.warnings, rig.fallbacks) == ([], [])  # a decision, and no wait in vain
    assert log.lines(logging.DEBUG)[-1] == "request r: recompute, 0 of 10 blocks"
    assert rig.decision.again(computed, rig.query()).phase is LOOKING


def test_without_a_margin_it_restores_whatever_is_faster() -> None:
    rig = Rig(margin=0.0)
    rig.reads("host", 0.001)
    rig.reads("disk", 0.010)
    rig.computes(0.0111)
    assert rig.answered(rig.begin(), disk=10) is STAGING
    rig.computes(0.0109)
    assert rig.answered(rig.begin(), disk=10) is OVER


def test_of_several_tiers_it_takes_the_prefix_that_takes_least_time() -> None:
    rig = Rig()
    rig.computes(0.010)
    for tier, seconds in (("host", 0.0001), ("disk", 0.002), ("far", 0.5)):
        rig.reads(tier, seconds)
    episode = rig.begin(num_blocks=30)
    parts = [TierPart("host", 10), TierPart("disk", 10), TierPart("far", 10)]
    assert rig.decision.answered(episode, parts) is STAGING
    assert (episode.num_blocks, episode.miss) == (20, MissReason.COST)
    assert rig.status.decisions == {"partial": 1}
    rig.reads("disk", 0.5)
    only_host = rig.begin(num_blocks=30)
    assert rig.decision.answered(only_host, parts) is READY
    assert (only_host.num_blocks, only_host.miss) == (10, MissReason.COST)
    rig.decision.landing(only_host, 10)
    rig.decision.landed(only_host, 10)
    assert rig.fallbacks == []


def test_what_wins_by_the_margin_is_left_out_where_less_wins_more() -> None:
    rig = Rig()
    rig.computes(0.010)
    for tier, seconds in (("host", 0.0001), ("far", 0.012)):
        rig.reads(tier, seconds)
    episode = rig.begin(num_blocks=20)
    assert rig.answered(episode, host=10, far=10) is READY
    assert (episode.num_blocks, episode.miss) == (10, MissReason.COST)
    rig.decision.set_backlog(0)  # it was computed
    assert rig.answered(rig.begin(num_blocks=20), host=0, far=10) is OVER


def test_a_slow_tier_in_front_is_worth_it_for_what_comes_behind() -> None:
    rig = Rig()
    rig.computes(0.010)
    rig.reads("host", 0.0001)
    rig.reads("disk", 0.020)
    episode = rig.begin(num_blocks=100)
    assert rig.decision.answered(episode, [TierPart("disk", 10), TierPart("host", 90)]) is STAGING
    assert episode.num_blocks == 100
    alone = rig.begin(num_blocks=100)
    assert rig.answered(alone, disk=10) is OVER


def test_the_queue_ahead_at_a_tier_counts_and_the_prefill_backlog_hides_it() -> None:
    rig = Rig(max_wait_s=1000.0)
    rig.computes(0.010)
    rig.reads("host", 0.0001)
    rig.reads("disk", 0.001)
    queued = [TierPart("disk", 10, queued_bytes=1000 * BLOCK_BYTES)]
    assert rig.decision.answered(rig.begin(), queued) is OVER
    rig.decision.set_backlog(110 * B)
    assert rig.decision.answered(rig.begin(), queued) is STAGING
    rig.reads("host", 0.011)
    rig.decision.set_backlog(10_000 * B)
    assert rig.decision.answered(rig.begin(), queued) is OVER  # it hides the stage, and makes no copy faster
    rig.reads("host", 0.0001)
    rig.decision.set_backlog(0)
    assert rig.decision.answered(rig.begin(), queued) is OVER


def test_copies_queued_before_its_own_count_too() -> None:
    rig = Rig()
    rig.computes(0.010)
    rig.reads("host", 0.001)
    assert rig.decision.answered(rig.begin(), [TierPart("host", 10, 50 * BLOCK_BYTES)]) is READY
    assert rig.decision.answered(rig.begin(), [TierPart("host", 10, 500 * BLOCK_BYTES)]) is OVER


@pytest.mark.parametrize("known", [(), ("prefill",), ("host",), ("disk",), ("prefill", "host"), ("host", "disk")])
def test_what_is_not_known_is_tried(known: tuple[str, ...]) -> None:
    rig = Rig()
    for name in known:
        rig.computes(1e-3) if name == "prefill" else rig.reads(name, 9e-4)
    for _ in range(3):
        episode = rig.begin()
        assert rig.answered(episode, disk=10) is STAGING
        assert episode.num_blocks == 10
        assert episode.stage_wait_s == pytest.approx(0.010 if "prefill" in known else FIRST_WAIT_S)
    assert rig.status.predictions == 0


def test_a_slow_tier_is_tried_again_after_a_while_by_one_request_at_a_time() -> None:
    rig = Rig(max_wait_s=1000.0)
    rig.computes(0.010)
    rig.reads("host", 0.0001)
    rig.reads("disk", 1.0)
    for _ in range(int(MAX_AGE_S)):
        assert rig.answered(rig.begin(), disk=10) is OVER
        rig.clock.advance(1)
        rig.decision.set_backlog(0)  # it was computed
    rig.clock.advance(1)
    rig.reads("host", 0.0001)
    probe = rig.staging("probe")
    assert probe.stage_wait_s == pytest.approx(0.1)  # no longer than computing takes
    for _ in range(5):
        assert rig.answered(rig.begin(), disk=10) is OVER
    rig.decision.end(probe)
    second = rig.staging("second")  # the first ended without a measurement
    assert rig.answered(rig.begin(), disk=10) is OVER
    assert rig.staged(second, 10, None, seconds=0.01) is READY
    for _ in range(3):
        assert rig.answered(rig.begin(), disk=10) is STAGING  # it was measured, and is fast by now


def test_a_probe_is_over_when_it_was_measured_though_its_request_waits_on() -> None:
    rig = Rig(max_wait_s=1000.0)
    rig.computes(0.010)
    rig.reads("disk", 1.0)
    rig.clock.advance(MAX_AGE_S + 1)
    first = rig.staging("first")
    assert rig.staged(first, 10, None, seconds=10.0) is READY
    assert rig.answered(rig.begin(), disk=10) is OVER
    rig.clock.advance(MAX_AGE_S + 1)
    assert rig.answered(rig.begin(), disk=10) is STAGING


def test_a_probe_that_its_time_ended_keeps_the_tier_slow_for_another_while() -> None:
    rig = Rig()
    rig.computes(0.010)
    rig.reads("host", 0.0001)
    rig.reads("disk", 1.0)
    rig.clock.advance(MAX_AGE_S + 1)
    rig.reads("host", 0.0001)
    probe = rig.staging("probe")
    rig.clock.advance(0.1)
    rig.decision.poll(probe)
    assert rig.staged(probe, 0, MissReason.TIMEOUT, seconds=0.1) is OVER
    for _ in range(3):
        rig.clock.advance(MAX_AGE_S / 4)
        assert rig.answered(rig.begin(), disk=10) is OVER


def test_a_stage_measures_its_tier_and_one_that_failed_does_not() -> None:
    rig = Rig()
    failed = rig.staging()
    rig.staged(failed, 5, MissReason.TIER_ERROR, seconds=100.0)
    assert rig.status.tier_rates == {}
    rig.staged(rig.staging(), 10, None, seconds=0.01)
    assert rig.status.tier_rates == {"disk": pytest.approx(1000 * BLOCK_BYTES)}
    slow = Rig()
    slow.staged(slow.staging(), 2, MissReason.TIMEOUT, seconds=1.0)
    assert slow.status.tier_rates == {"disk": pytest.approx(2 * BLOCK_BYTES)}


def test_a_tier_that_gave_nothing_in_time_takes_at_least_so_long() -> None:
    rig = Rig()
    rig.staged(rig.staging(), 0, MissReason.TIMEOUT, seconds=1.0)
    assert rig.status.tier_rates == {"disk": pytest.approx(10 * BLOCK_BYTES)}
    slow = Rig()
    slow.reads("disk", 50.0)
    slow.staged(slow.staging(), 0, MissReason.TIMEOUT, seconds=1.0)
    assert slow.status.tier_rates == {"disk": pytest.approx(BLOCK_BYTES / 50)}


def test_two_tiers_are_read_side_by_side() -> None:
    rig = Rig()
    rig.computes(0.010)
    for tier in ("disk", "far"):
        rig.reads(tier, 0.008)
    rig.reads("host", 0.0001)
    episode = rig.begin(num_blocks=20)
    assert rig.decision.answered(episode, [TierPart("disk", 10), TierPart("far", 10)]) is STAGING
    assert episode.predicted_s == pytest.approx(0.082)
    one_after_the_other = rig.begin(num_blocks=20)
    assert rig.answered(one_after_the_other, disk=20) is STAGING
    assert one_after_the_other.predicted_s == pytest.approx(0.162)


# ---- what is counted and said ----------------------------------------------------------------------------------------


def test_predictions_are_held_against_what_came_of_them() -> None:
    rig = Rig()
    rig.computes(0.100)
    rig.reads("host", 0.001)
    rig.reads("disk", 0.009)
    for stage_s, landing_s in ((0.09, 0.01), (0.19, 0.01), (0.04, 0.01)):
        episode = rig.begin()
        rig.clock.advance(0.05)  # the lookup is no part of it
        rig.answered(episode, disk=10)
        rig.clock.advance(stage_s)
        rig.staged(episode, 10, None, seconds=0.09)
        rig.clock.advance(1000)  # nor is waiting for its turn
        rig.reads("host", 0.001)
        rig.reads("disk", 0.009)
        rig.decision.landing(episode, 10)
        rig.clock.advance(landing_s)
        rig.decision.landed(episode, 10)
    status = rig.status
    assert status.predictions == 3
    assert status.predicted_seconds == pytest.approx(0.3)
    assert status.actual_seconds == pytest.approx(0.1 + 0.2 + 0.05)
    assert status.error_seconds == pytest.approx(0.0 + 0.1 + 0.05)
    assert status.avoided_seconds == pytest.approx(3 * 10 * 0.100)
    assert status.restoring_seconds == pytest.approx(3 * 0.05 + 0.35)


def test_a_restore_that_its_time_ended_is_held_against_its_prediction_too() -> None:
    rig = Rig()
    rig.computes(0.100)
    rig.reads("host", 0.001)
    rig.reads("disk", 0.009)
    nothing, failed = rig.staging(), rig.staging()
    rig.staged(failed, 0, MissReason.TIER_ERROR)
    rig.decision.not_answered(failed)
    rig.clock.advance(1.0)
    rig.decision.poll(nothing)
    rig.staged(nothing, 0, MissReason.TIMEOUT, seconds=1.0)
    rig.decision.end(nothing)
    status = rig.status
    assert (status.predictions, status.avoided_seconds) == (1, 0.0)
    assert status.predicted_seconds == pytest.approx(0.1)
    assert status.error_seconds == pytest.approx(0.9)


def mixed_requests(rig: Rig, pause_s: float) -> None:
    """Twenty requests that end in every way there is."""

    def time_out(name: str) -> RestoreEpisode:
        episode = rig.staging(name, num_blocks=7)
        rig.staged(episode, 3, MissReason.TIMEOUT)
        rig.decision.landing(episode, 3)
        rig.decision.landed(episode, 3)
        return episode

    def expire(name: str) -> RestoreEpisode:
        episode = rig.ready(name, num_blocks=9)
        rig.decision.refuse(episode, is_permanent=True)
        return episode

    def lose_the_copy(name: str) -> RestoreEpisode:
        episode = rig.ready(name, num_blocks=5)
        rig.decision.landing(episode, 5)
        rig.decision.landed(episode, 2)
        rig.answered(episode, host=1)
        rig.decision.landing(episode, 1)
        rig.decision.landed(episode, 1)
        return episode

    def restore(name: str) -> RestoreEpisode:
        episode = rig.ready(name)
        rig.decision.landing(episode, 10)
        rig.decision.landed(episode, 10)
        return episode

    def fail_to_look(name: str) -> RestoreEpisode:
        episode = rig.begin(name, num_blocks=2)
        rig.decision.not_answered(episode)
        return episode

    ways = [time_out, expire, lose_the_copy, restore, fail_to_look]
    for number in range(20):
        rig.decision.end(ways[number % len(ways)](f"mixed-{number}"))
        rig.clock.advance(pause_s)
        rig.decision.tick()


@pytest.mark.bug("US08")
@pytest.mark.parametrize("pause_s", [0.0, 0.03, 1.0])
def test_the_log_s_sums_are_the_counters(pause_s: float, rig: Rig, log: Log) -> None:
    mixed_requests(rig, pause_s)
    rig.clock.advance(1.0)
    rig.decision.tick()
    status = rig.status
    assert log.sums() == (sum(status.fallbacks.values()), status.fallback_blocks, status.fallback_tokens)
    assert log.sums() == (16, 4 * (4 + 9 + 2 + 2), 4 * 17 * B)
    assert log.sums() == (
        len(rig.fallbacks),
        sum(told.num_blocks for told in rig.fallbacks),
        sum(told.num_tokens for told in rig.fallbacks),
    )
    assert status.fallbacks == {"timeout": 4, "capacity": 4, "land_failed": 4, "tier_error": 4}
    own = [found for line in log.warnings if (found := LINE.search(line))]
    assert status.held_back_warnings == 16 - len(own)
    assert (status.held_back_warnings == 0) is (pause_s == 1.0)
    if pause_s:
        assert Counter(found[5] for found in own).keys() == status.fallbacks.keys()
    assert all(float(number) >= 0 for line in own for number in WAIT.findall(line.string)[0])


@pytest.mark.bug("US10")
def test_ten_thousand_fallbacks_in_a_second_are_a_handful_of_lines(rig: Rig, log: Log) -> None:
    for number in range(10_000):
        rig.decision.not_answered(rig.begin(f"storm-{number}", num_blocks=3))
        rig.clock.advance(0.0001)
        rig.decision.tick()
    rig.clock.advance(1.0)
    rig.decision.tick()
    rig.decision.tick()
    assert len(log.warnings) <= MAX_LINES + 2
    for line in log.warnings[:MAX_LINES]:
        found = LINE.search(line)
        assert found is not None
        assert found[1].startswith("storm-")
        assert (found[4], found[5]) == ("any", "tier_error")
        assert WAIT.search(line)
    assert log.sums() == (10_000, 30_000, 30_000 * B)
    last = HELD_BACK.search(log.warnings[-1])
    assert last is not None
    assert int(last[1]) > 9_900 or sum(int(found[1]) for found in map(HELD_BACK.search, log.warnings) if found) > 9_900
    assert sum(rig.status.fallbacks.values()) == 10_000


@pytest.mark.bug("US10")
def test_what_was_held_back_is_said_by_the_next_line_or_when_the_second_is_over(rig: Rig, log: Log) -> None:
    def fall_back(count: int) -> None:
        for _ in range(count):
            rig.decision.not_answered(rig.begin(num_blocks=1))

    fall_back(MAX_LINES + 5)
    rig.decision.tick()
    assert len(log.warnings) == MAX_LINES
    rig.clock.advance(0.99)
    rig.decision.tick()
    assert len(log.warnings) == MAX_LINES
    rig.clock.advance(0.01)
    fall_back(1)
    assert log.warnings[-1].endswith("; before it, of 5 more requests: 5 blocks, 80 tokens, are recomputed")
    rig.decision.tick()
    assert len(log.warnings) == MAX_LINES + 1
    fall_back(MAX_LINES)
    rig.clock.advance(1.0)
    rig.decision.tick()
    assert log.warnings[-1] == "not restored, of 1 more requests: 1 blocks, 16 tokens, are recomputed"
    rig.clock.advance(50)
    rig.decision.tick()
    assert log.sums()[0] == 2 * MAX_LINES + 6


@pytest.mark.bug("US10")
def test_a_clock_that_goes_back_does_not_silence_the_log(rig: Rig, log: Log) -> None:
    for _ in range(MAX_LINES + 1):
        rig.decision.not_answered(rig.begin())
    rig.clock.advance(-10_000)
    rig.decision.not_answered(rig.begin())
    assert log.sums()[0] == MAX_LINES + 2


def test_r82_a_wait_is_said_at_its_start_every_30_seconds_and_at_its_end(log: Log) -> None:
    rig = Rig(capacity_bound_s=100.0)
    episode = rig.ready("slow-1")
    rig.decision.tick()
    assert log.infos == []
    rig.decision.refuse(episode)
    starts = []
    for second in range(95):
        rig.decision.tick()
        starts.append(len(log.infos))
        rig.clock.advance(1)
        assert second < 94 or rig.decision.refuse(episode)
    assert [index for index in range(1, 95) if starts[index] > starts[index - 1]] == [30, 60, 90]
    assert starts[0] == 1
    assert all("slow-1" in line and "10 blocks" in line for line in log.infos)
    assert "for 60.000 s now, at most 100 s" in log.infos[2]
    rig.decision.landing(episode, 10)
    assert log.infos[4:] == ["request slow-1: starts, having waited 95.000 s for GPU blocks"]
    rig.decision.tick()
    assert len(log.infos) == 5


def test_r82_a_wait_that_does_not_outlast_its_step_is_not_said(rig: Rig, log: Log) -> None:
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.decision.landing(episode, 10)
    rig.decision.tick()
    assert log.infos == []


@pytest.mark.parametrize("way", ["expired", "ended", "preempted", "landing", "lost"])
def test_r82_every_way_out_of_a_wait_ends_it_in_the_log_and_in_the_status(way: str, log: Log) -> None:
    rig = Rig(capacity_bound_s=30.0)
    episode = rig.ready()
    rig.decision.refuse(episode)
    rig.decision.tick()
    rig.clock.advance(40)
    if way == "expired":
        rig.decision.refuse(episode)
    elif way == "ended":
        rig.decision.end(episode)
    elif way == "preempted":
        rig.decision.again(episode, rig.query())
    elif way == "landing":
        rig.decision.landing(episode, 10)
    else:
        rig.decision.refreshing(episode)
        rig.answered(episode)
    status = rig.status
    assert (status.capacity_waiters, status.longest_capacity_wait_seconds) == (0, 0.0)
    assert (status.capacity_waits, status.capacity_expired) == (1, way == "expired")
    assert len(log.infos) == 2
    assert "waited 40.000 s" in log.infos[1]


def test_r82_the_longest_wait_is_live_whoever_polls() -> None:
    rig = Rig(capacity_bound_s=1000.0)
    rig.decision.refuse(rig.ready("first"))
    rig.clock.advance(5)
    rig.decision.refuse(rig.ready("second"))
    for elapsed in (5.0, 12.5, 100.0):
        assert rig.status.longest_capacity_wait_seconds == elapsed
        rig.clock.advance({5.0: 7.5, 12.5: 87.5}.get(elapsed, 0.0))
    assert (rig.status.capacity_waiters, rig.status.capacity_waits) == (2, 2)


class CountingClock(FakeClock):
    num_asked = 0

    def now(self) -> float:
        self.num_asked += 1
        return super().now()


@pytest.mark.parametrize("num_blocked", [0, 500])
def test_r68_a_step_costs_as_much_as_there_are_restores_under_way(num_blocked: int) -> None:
    clock = CountingClock()
    rig = Rig(clock)
    for number in range(num_blocked):
        rig.ready(str(number))
    copying = rig.ready("copying")
    rig.decision.landing(copying, 10)
    clock.num_asked = 0
    rig.decision.poll(copying)
    rig.decision.tick()
    assert rig.status.active_waits == 1
    assert clock.num_asked <= 4


def test_status_is_a_snapshot_and_prometheus_takes_it(rig: Rig) -> None:
    mixed_requests(rig, 0.5)
    rig.decision.refuse(rig.ready())
    rig.clock.advance(3)
    registry = CollectorRegistry()
    before = rig.status
    registry.register(StatsCollector(rig.decision.status))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.name for family in families} == {f"kvtier_{field}" for field in RestoreStatus.__dataclass_fields__}
    for family in families:
        name = family.name.removeprefix("kvtier_")
        value = getattr(before, name)
        assert family.type == ("gauge" if name in GAUGES else "counter"), name
        if name in LABELS:
            assert {sample.labels[LABELS[name]]: sample.value for sample in family.samples} == value
        else:
            assert [sample.value for sample in family.samples] == [value]
    rig.decision.not_answered(rig.begin())
    assert before.fallbacks != rig.status.fallbacks


def test_every_number_of_the_status_is_explained() -> None:
    fields = list(RestoreStatus.__dataclass_fields__)
    source = inspect.getsource(RestoreStatus)
    assert all(re.search(rf'^    {field}: .+\n    """', source, re.MULTILINE) for field in fields)
    text = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    table = text.split("### What became of restores\n", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert sorted(word for row in rows for word in re.findall("`(.+?)`", row)) == sorted(fields)


# ---- any order of events ---------------------------------------------------------------------------------------------

BUDGET_S, BOUND_S, MAX_ATTEMPTS = 4.0, 8.0, 3


class AnyOrder(RuleBasedStateMachine):
    """Requests to whose restores anything happens at any time, late and twice, under a clock that also goes back.

    Every step ends with a poll of every restore, as an engine's does.
    """

    @initialize(
        on_failure=st.sampled_from(["recompute", "fail"]),
        margin=st.sampled_from([0.0, 0.1, 1.0]),
        max_wait_s=st.sampled_from([0.0, 0.5, 2.0, 60.0]),
    )
    def open(self, on_failure: str, margin: float, max_wait_s: float) -> None:
        self.rig = Rig(
            on_failure=on_failure,
            margin=margin,
            max_wait_s=max_wait_s,
            episode_budget_s=BUDGET_S,
            capacity_bound_s=BOUND_S,
            max_attempts=MAX_ATTEMPTS,
        )
        self.live: list[RestoreEpisode] = []
        self.active_s: defaultdict[str, float] = defaultdict(float)
        self.refused_s: dict[str, float] = {}
        self.num_refused = 0
        self.num_decided = 0
        self.number = 0

    def teardown(self) -> None:
        """Whatever state they are in, all of them end by themselves, as long as the engine asks."""
        if not hasattr(self, "rig"):
            return
        for _ in range(int(BUDGET_S + BOUND_S) + 3):
            for episode in self.live:
                if episode.phase is READY:
                    self.refuse(episode)
            self.step(1.0)
        assert [episode.phase for episode in self.live if episode.phase is not OVER and not episode.is_expired] == []
        for episode in self.live:
            self.rig.decision.end(episode)
        self.check()
        status = self.rig.status
        assert (status.active_waits, status.capacity_waiters, status.longest_capacity_wait_seconds) == (0, 0, 0.0)

    def track(self, episode: RestoreEpisode) -> None:
        if episode.phase is not READY or episode.is_expired:
            self.refused_s.pop(episode.request_id, None)

    def refuse(self, episode: RestoreEpisode, *, is_permanent: bool = False) -> None:
        waits = episode.phase is READY and not (is_permanent or episode.is_expired)
        if waits and episode.request_id not in self.refused_s:
            self.num_refused += 1
            self.refused_s[episode.request_id] = 0.0
        goes_on = self.rig.decision.refuse(episode, is_permanent=is_permanent)
        assert goes_on == (episode.phase is not OVER and not episode.is_expired)
        self.track(episode)

    def step(self, seconds: float) -> None:
        for episode in self.live:
            if episode.phase in ACTIVE:
                self.active_s[episode.request_id] += max(0.0, seconds)
            if episode.request_id in self.refused_s:
                self.refused_s[episode.request_id] += max(0.0, seconds)
        self.rig.clock.advance(seconds)
        for episode in self.live:
            self.rig.decision.poll(episode)
            self.track(episode)
        self.rig.decision.tick()

    @rule(num_blocks=st.integers(-1, 12), max_wait_s=st.sampled_from([None, 0.0, 0.3, 5.0]), may=st.integers(0, 9))
    @precondition(lambda self: len(self.live) < 5)
    def begin(self, num_blocks: int, max_wait_s: float | None, may: int) -> None:
        self.number += 1
        query = self.rig.query(f"n{self.number}", num_blocks, max_wait_s=max_wait_s, may_restore=may > 0)
        self.live.append(self.rig.decision.begin(query))

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds: float) -> None:
        self.step(seconds)

    @rule(seconds=st.floats(-1000.0, 50.0))
    def jump(self, seconds: float) -> None:
        self.step(seconds)

    @rule(data=st.data(), seconds=st.floats(0.0, 5.0))
    @precondition(lambda self: self.live)
    def excuse(self, data: st.DataObject, seconds: float) -> None:
        episode = data.draw(st.sampled_from(self.live))
        if episode.watch is not None:
            self.active_s[episode.request_id] -= min(seconds, episode.watch.peek(self.rig.clock.now()))
        self.rig.decision.excuse(episode, seconds)

    @rule(tier=st.sampled_from(["host", "disk", "far"]), seconds=st.floats(1e-4, 5.0), backlog=st.integers(-1, 5000))
    def measure(self, tier: str, seconds: float, backlog: int) -> None:
        self.rig.decision.observe_restore(tier, BLOCK_BYTES, 0, seconds)
        self.rig.decision.set_backlog(backlog)

    @rule(seconds=st.floats(1e-4, 5.0))
    def compute(self, seconds: float) -> None:
        self.rig.decision.observe_prefill(B, 8.0 * B, seconds)

    @rule(data=st.data(), tiers=st.lists(st.sampled_from(["host", "disk", "far"]), max_size=3))
    @precondition(lambda self: self.live)
    def answer(self, data: st.DataObject, tiers: list[str]) -> None:
        episode = data.draw(st.sampled_from(self.live))
        counts = [data.draw(st.integers(1, 6)) for _ in tiers]
        self.rig.decision.answered(episode, [TierPart(*part) for part in zip(tiers, counts, strict=True)])
        self.track(episode)

    @rule(data=st.data(), count=st.integers(-1, 13), miss=st.sampled_from([None, *MissReason]))
    @precondition(lambda self: self.live)
    def stage(self, data: st.DataObject, count: int, miss: MissReason | None) -> None:
        self.rig.staged(data.draw(st.sampled_from(self.live)), count, miss)

    @rule(data=st.data(), count=st.integers(-1, 13), what=st.sampled_from(["landing", "landed", "refuse", "never"]))
    @precondition(lambda self: self.live)
    def land(self, data: st.DataObject, count: int, what: str) -> None:
        episode = data.draw(st.sampled_from(self.live))
        if what == "landing":
            self.rig.decision.landing(episode, count)
            self.track(episode)
        elif what == "landed":
            self.rig.decision.landed(episode, count)
        else:
            self.refuse(episode, is_permanent=what == "never")

    @rule(data=st.data(), what=st.sampled_from(["not_answered", "refreshing", "end", "poll", "is_worth_landing"]))
    @precondition(lambda self: self.live)
    def happen(self, data: st.DataObject, what: str) -> None:
        episode = data.draw(st.sampled_from(self.live))
        if what == "refreshing" and not self.rig.decision.refresh_due(episode):
            return
        getattr(self.rig.decision, what)(episode)
        self.track(episode)

    @rule(data=st.data(), num_tokens=st.sampled_from([500, 501]), num_blocks=st.integers(0, 12))
    @precondition(lambda self: self.live)
    def preempt(self, data: st.DataObject, num_tokens: int, num_blocks: int) -> None:
        before = data.draw(st.sampled_from(self.live))
        self.live.remove(before)
        self.number += 1
        query = self.rig.query(f"n{self.number}", num_blocks, num_tokens=before.num_tokens + num_tokens - 500)
        self.live.append(self.rig.decision.again(before, query))
        assert before.phase is OVER
        self.track(before)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def finish(self, data: st.DataObject) -> None:
        episode = data.draw(st.sampled_from(self.live))
        self.rig.decision.end(episode)
        self.live.remove(episode)
        self.track(episode)

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "rig"):
            return
        for episode in self.live:
            assert 0 <= episode.attempts <= MAX_ATTEMPTS
            assert (episode.deadline is not None) == (episode.phase in ACTIVE)
            assert (episode.num_blocks == 0) if episode.phase is OVER else (episode.num_blocks >= 0)
            assert episode.phase is not READY or episode.num_blocks > 0
            assert 0 <= episode.stage_wait_s <= BUDGET_S
            assert episode.position >= 0
            if episode.phase in ACTIVE:  # polled a moment ago, so that it has time left
                assert self.active_s[episode.request_id] < BUDGET_S + 1e-6
        told, status = self.rig.fallbacks, self.rig.status
        assert max(Counter(fallback.request_id for fallback in told).values(), default=0) <= 1
        assert all(fallback.num_blocks > 0 and fallback.waited_s >= 0 for fallback in told)
        assert status.fallbacks == Counter(fallback.reason.value for fallback in told)
        assert status.fallback_blocks * B == status.fallback_tokens == sum(fallback.num_tokens for fallback in told)
        assert status.active_waits == sum(episode.phase in ACTIVE for episode in self.live)
        assert (status.capacity_waiters, status.capacity_waits) == (len(self.refused_s), self.num_refused)
        assert status.longest_capacity_wait_seconds >= max(self.refused_s.values(), default=0.0) - 1e-6
        assert all(value >= 0 for value in (status.error_seconds, status.avoided_seconds, status.restoring_seconds))


TestAnyOrder = AnyOrder.TestCase
