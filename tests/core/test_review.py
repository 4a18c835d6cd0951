"""Stages looked at again: what they were begun on turns out otherwise, or was never known."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.config import RestoreSettings
from kvtier.cost import MAX_AGE_S, TierCost
from kvtier.progress import FIRST_WAIT_S
from kvtier.reasons import MissReason
from kvtier.restore import Fallback, RestoreDecision, RestoreEpisode, RestorePhase, RestoreQuery, TierPart
from kvtier.review import PATIENCE_S
from kvtier.testing import FakeClock

B = 16
BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 10
STAGING, READY, OVER = RestorePhase.STAGING, RestorePhase.READY, RestorePhase.OVER


class Herd:
    """Requests that arrive at once, each with blocks on disk, and the engine's part of a step."""

    def __init__(self, size: int = 0, **settings: Any) -> None:
        self.clock = FakeClock()
        self.fallbacks: list[Fallback] = []
        # max_staging of one block: what is read of a stage when it is given up is next to nothing.
        given: dict[str, Any] = {"max_wait_s": 1000.0, "episode_budget_s": 2000.0, "max_staging": BLOCK_BYTES}
        self.decision = RestoreDecision(
            RestoreSettings(**given | settings), B, BLOCK_BYTES, self.clock, self.fallbacks.append
        )
        self.episodes = [self.arrive(number) for number in range(size)]

    def arrive(self, number: int = 0, queued_blocks: int | None = None) -> RestoreEpisode:
        tokens = NUM_BLOCKS * B
        episode = self.decision.begin(RestoreQuery(f"r{number}", 0, tokens, NUM_BLOCKS))
        queued = number * NUM_BLOCKS if queued_blocks is None else queued_blocks
        self.decision.answered(episode, [TierPart("disk", NUM_BLOCKS, queued * BLOCK_BYTES)])
        return episode

    def computes(self, seconds_per_block: float) -> None:
        for _ in range(200):
            self.decision.observe_prefill(100 * B, 0.0, 100 * seconds_per_block)

    def reads(self, seconds_per_block: float) -> None:
        for _ in range(100):
            self.decision.observe_restore("disk", 100 * BLOCK_BYTES, 0, 100 * seconds_per_block)
            self.decision.observe_restore("host", 100 * BLOCK_BYTES, 0, 1e-6)

    def poll(self, seconds: float = 0.0) -> list[int]:
        """Time passes, and all that wait are polled, the last first; those that are given up. Their stages end."""
        self.clock.advance(seconds)
        given_up = []
        for number, episode in reversed(list(enumerate(self.episodes))):
            if episode.phase is STAGING and self.decision.poll(episode) is not STAGING:
                self.decision.staged(episode, 0, MissReason.TIMEOUT, {}, seconds, 0)
                given_up.append(number)
        return sorted(given_up)

    @property
    def staging(self) -> list[int]:
        return [number for number, episode in enumerate(self.episodes) if episode.phase is STAGING]


def test_an_idle_engine_is_given_one_at_a_time_of_those_that_wait_blindly_and_never_the_first() -> None:
    herd = Herd(3)
    assert herd.staging == [0, 1, 2]
    assert herd.episodes[1].deadline == pytest.approx(herd.clock.now() + PATIENCE_S)
    assert herd.poll() == []
    assert herd.poll(PATIENCE_S) == [2]
    assert herd.poll(PATIENCE_S) == []  # it is being computed
    herd.decision.set_backlog(0)
    assert herd.poll() == [1]
    herd.decision.set_backlog(0)
    assert herd.poll() == []
    assert herd.poll(FIRST_WAIT_S) == []  # the engine may be about to tell what computing takes
    assert herd.poll() == [0]
    assert [fallback.request_id for fallback in herd.fallbacks] == ["r0"]  # the others were a choice


def test_a_herd_whose_time_is_over_when_the_first_prompt_was_computed_is_decided_by_what_that_took() -> None:
    """A prompt is computed in 2 s, longer than anybody waits blindly, and read in 0.1 s."""
    herd = Herd(5)
    assert herd.poll(PATIENCE_S) == [4]
    herd.decision.set_backlog(0)
    herd.clock.advance(2.0)
    herd.decision.observe_progress(herd.episodes[0], {"disk": 1}, 0.01, 0)
    assert herd.poll() == [3]  # the step is over, and is told behind this poll: so another one is computed
    herd.computes(0.2)
    assert herd.poll() == []
    assert herd.staging == [0, 1, 2]
    assert not herd.fallbacks


def test_one_alone_is_not_hurried() -> None:
    herd = Herd(1)
    assert herd.episodes[0].deadline == herd.clock.now() + FIRST_WAIT_S
    assert herd.poll(FIRST_WAIT_S - 0.1) == []


def test_an_engine_with_work_takes_none_of_them() -> None:
    herd = Herd(3)
    herd.decision.set_backlog(1000)
    assert herd.poll(10 * PATIENCE_S) == []


def test_once_all_is_measured_each_is_decided_in_view_of_those_before_it() -> None:
    """A prompt is computed in 1 s and read in 4 s: of each five that come at once, the tier gets one."""
    herd = Herd(20)
    herd.decision.set_backlog(1)
    herd.poll()
    herd.decision.set_backlog(0)
    herd.computes(0.1)
    herd.clock.advance(0.4)
    herd.decision.observe_progress(herd.episodes[0], {"disk": 1}, 0.4, 0)
    given_up = herd.poll()
    assert len(given_up) == 20 - len(herd.staging)
    assert 3 <= len(herd.staging) <= 4
    assert herd.staging[0] in (3, 4)  # the first to wait longer for the engine than for the tier
    assert not herd.fallbacks
    for episode in (herd.episodes[number] for number in herd.staging):
        assert episode.deadline is not None
        assert episode.deadline > herd.clock.now() + 4.0 - 0.5  # prolonged: nothing else was known when it began


def test_a_fast_tier_keeps_a_herd_that_began_blindly() -> None:
    herd = Herd(10)
    herd.decision.set_backlog(1)
    herd.poll()
    herd.decision.set_backlog(0)
    herd.computes(1.0)
    herd.clock.advance(0.01)
    herd.decision.observe_progress(herd.episodes[0], {"disk": 1}, 0.01, 0)
    assert herd.poll() == []
    assert len(herd.staging) == 10


def test_progress_measures_only_what_nobody_knows() -> None:
    herd = Herd(1)
    first = herd.episodes[0]
    herd.decision.observe_progress(first, {"disk": 2}, 1.0, 0)
    assert herd.decision.status().tier_rates == {"disk": pytest.approx(2 * BLOCK_BYTES)}
    herd.decision.observe_progress(first, {"disk": 3}, 100.0, 0)
    herd.decision.observe_progress(first, {}, 100.0, 0)
    assert herd.decision.status().tier_rates == {"disk": pytest.approx(2 * BLOCK_BYTES)}


def test_a_stage_is_over_when_its_tier_proves_slower_than_computing() -> None:
    herd = Herd()
    herd.computes(0.1)
    herd.reads(0.05)
    herd.episodes = [herd.arrive()]
    assert herd.staging == [0]
    assert herd.poll(0.1) == []
    herd.reads(1.0)
    assert herd.poll(0.1) == [0]
    assert herd.episodes[0].miss is MissReason.COST
    assert not herd.fallbacks


def test_what_requests_compute_between_two_steps_is_backlog_for_those_behind_them() -> None:
    """A prompt is computed in 1 s and read in 2 s."""
    herd = Herd()
    herd.computes(0.1)
    herd.reads(0.2)
    phases = [herd.arrive(number, queued_blocks=0).phase for number in range(3)]
    assert phases == [OVER, OVER, STAGING]
    herd.decision.set_backlog(0)
    assert herd.arrive(queued_blocks=0).phase is OVER


def test_no_stage_is_begun_that_would_be_given_up_before_its_end() -> None:
    herd = Herd(max_wait_s=3.0)
    herd.computes(1.0)
    herd.reads(0.2)
    assert herd.arrive(queued_blocks=0).phase is STAGING
    assert herd.arrive(queued_blocks=10).phase is OVER  # 4 s, less than computing, and more than it may wait


def test_a_stage_that_was_read_after_others_ended_measures_the_time_since_then() -> None:
    """20 blocks were queued before the second, and only one of them was read: the rest was given up."""
    herd = Herd()
    herd.computes(10.0)
    herd.reads(0.1)
    first, second = herd.arrive(queued_blocks=0), herd.arrive(queued_blocks=20)
    herd.clock.advance(0.1)
    herd.decision.staged(first, 1, MissReason.TIMEOUT, {"disk": 1}, 0.1, 0)
    herd.clock.advance(1.0)
    assert herd.decision.staged(second, 10, None, {"disk": 10}, 1.1, 20 * BLOCK_BYTES) is READY
    assert herd.decision.status().tier_rates["disk"] == pytest.approx(10 * BLOCK_BYTES, rel=0.1)


def test_a_tier_of_which_nothing_came_in_time_is_no_faster_for_it() -> None:
    clock = FakeClock()
    cost = TierCost(clock)
    for _ in range(20):
        cost.observe(1000, 0, 10.0)
    clock.advance(MAX_AGE_S + 1)
    assert cost.estimate(1000, 0) is None
    cost.observe_at_least(1000, 0, 0.1)
    assert cost.estimate(1000, 0) == pytest.approx(10.0)  # confirmed, and young again
    cost.observe_at_least(1000, 0, 50.0)
    assert 10.0 < (cost.estimate(1000, 0) or 0.0) <= 50.0


def test_where_nothing_ever_came_the_time_that_it_did_not_come_in_is_all_there_is() -> None:
    cost = TierCost(FakeClock())
    cost.observe_at_least(1000, 1000, 0.0)
    assert cost.estimate(1000, 0) is None
    cost.observe_at_least(1000, 1000, 2.0)
    assert cost.estimate(1000, 0) == pytest.approx(1.0)
    assert (cost.num_bytes_per_s, cost.is_measured) == (1000.0, False)
    cost.observe_at_least(1000, 0, 0.5)
    assert cost.estimate(1000, 0) == pytest.approx(1.0)
    cost.observe(1000, 0, 3.0)  # what is measured counts alone
    assert cost.estimate(1000, 0) == pytest.approx(3.0)
    assert cost.is_measured
