"""Waits for GPU blocks and their bound, waits for a slot, attempts and their end.

Unless a story says otherwise the pool has eight blocks, "busy" decodes in four of them, and "again" would restore four
and needs five.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.errors import ConfigError
from kvtier_connectors.contract import KVOptions, Match
from kvtier_engine.request import RequestState
from kvtier_engine.testing.rig import EngineRig
from tests.engine.restores import APART, BOUND_S, HELD, Restores, open_refused, prompt

Open = Callable[..., Restores]

URGENT = KVOptions(restore=False, store=False, priority=-1)
STAGING = Match(0, None, is_staging=True)
WAITING, RESTORING, RUNNING = RequestState.WAITING, RequestState.RESTORING, RequestState.RUNNING


# ---- the bound -------------------------------------------------------------------------------------------------------


def test_r47_the_first_refusal_starts_the_wait_and_below_the_bound_nothing_is_said(open_restores: Open) -> None:
    story = open_refused(open_restores)
    assert story.status.capacity_waits == 1
    story.step(BOUND_S - 0.1)
    assert story.status.longest_capacity_wait_seconds == pytest.approx(BOUND_S - 0.1)
    assert (story.state("again"), story.warnings()) == (WAITING, [])
    assert story.status.capacity_expired == 0


def test_r48_at_the_bound_one_warning_and_the_prompt_is_recomputed_once(open_restores: Open) -> None:
    """By then host memory has none of it."""
    story = open_refused(open_restores, max_batch_tokens=128)
    story.step(BOUND_S)
    assert story.state("again") is WAITING, "as any prompt that does not fit"
    [warning] = [line for line in story.recorder.warnings() if line.logger == "kvtier.restore"]
    args = list(warning.args)
    assert {"again", 64} < set(args)
    assert args.count(BOUND_S) == 2, "what it waited, and the bound"
    assert (story.status.capacity_expired, story.status.fallbacks) == (1, {"capacity": 1})
    refusals = story.calls_of("refuse_restore")
    story.add("late", prompt(4, 700), 2, APART)
    story.step(BOUND_S)
    story.forget_host()
    story.rig.abort("busy")
    before = story.rig.computed_tokens
    story.step()
    assert (story.state("again"), story.rig.computed_tokens - before) == (RUNNING, len(HELD))
    story.run()
    assert story.num_computed("again") == len(HELD) + 1, "each token once, with the first of its output"
    assert (story.num_restored("again"), refusals, len(story.warnings())) == (0, [], 1)
    story.verify_quiet()


def test_r48_what_is_in_host_memory_lands_though_the_wait_is_over(open_restores: Open) -> None:
    story = open_refused(open_restores)
    story.step(BOUND_S)
    assert (story.state("again"), len(story.warnings())) == (WAITING, 1)
    refusals = story.calls_of("refuse_restore")
    story.step(BOUND_S)
    story.rig.abort("busy")
    story.step()
    assert story.state("again") is RESTORING
    story.run()
    assert (story.num_restored("again"), story.num_computed("again")) == (4, 2)
    assert (len(story.warnings()), story.status.capacity_expired, refusals) == (1, 1, [])
    story.verify_quiet()


def test_r49_a_restore_that_fits_is_granted_at_any_age(open_restores: Open) -> None:
    story = open_refused(open_restores)
    story.rig.abort("busy")
    story.step(1000 * BOUND_S)
    assert story.state("again") is RESTORING
    story.run()
    assert (story.num_restored("again"), story.warnings()) == (4, [])
    story.verify_quiet()


def test_r50_waiting_for_a_slot_is_no_refusal_however_long(open_restores: Open) -> None:
    story = open_restores(max_num_seqs=1)
    story.hold(HELD)
    story.occupy(4)
    story.add("again", HELD)
    refusals = story.calls_of("refuse_restore")
    for _ in range(5):
        story.step(BOUND_S)
    assert (refusals, story.status.capacity_waits) == ([], 0)
    assert story.stats.restore_capacity_waits == 0
    story.run()
    assert (story.num_restored("again"), story.warnings()) == (4, [])
    story.verify_quiet()


def test_r46_r50_with_full_slots_the_bound_is_not_looked_at_but_the_time_counts(open_restores: Open) -> None:
    story = open_refused(open_restores, max_num_seqs=2, engine={"policy": "priority"})
    story.add("urgent", prompt(0, 500), 3, URGENT)
    refusals, polls = story.calls_of("refuse_restore"), story.calls_of("poll_restores")
    story.step()
    story.step(BOUND_S)
    assert (story.state("urgent"), refusals, len(polls)) == (RUNNING, [], 2)
    assert story.warnings() == []
    assert story.status.longest_capacity_wait_seconds == BOUND_S, "live, though nobody was refused"
    story.step()
    assert "urgent" in story.rig.finished
    story.step()
    assert (len(story.warnings()), story.status.capacity_expired) == (1, 1), "at the next refusal with a slot"
    story.run()
    story.verify_quiet()


def test_r50_a_restore_that_is_slower_by_now_is_not_taken(open_restores: Open) -> None:
    """Measured while it waited for its slot: a copy to the GPU takes 5 s, and computing the prompt 1 s."""
    story = open_restores(max_num_seqs=1)
    story.hold(HELD)
    story.occupy(4)
    story.add("again", HELD)
    story.step()
    decision = story.decision
    decision.observe_prefill(64, 64 * 32, 1.0)
    decision.observe_restore("host", 4 * story.block_bytes, 0, 5.0)
    story.run()
    assert (story.num_restored("again"), story.warnings()) == (0, [])
    story.verify_quiet()


def test_r51_r53_an_expired_restore_holds_nobody_back_and_nobody_is_asked(
    open_restores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = open_restores()
    story.hold(HELD)
    story.occupy(7)
    story.add("again", HELD)
    story.add("small", prompt(0, 500), 3, APART)
    story.step(0.0)
    story.step(BOUND_S - 1.0)
    assert story.state("small") is WAITING, "the one free block is kept for the older one"
    story.add("late", prompt(0, 600), 3, APART)
    story.step(1.0)
    assert (story.state("again"), story.state("small")) == (WAITING, RUNNING)
    assert story.stats.restore_capacity_waits == 0
    story.rig.abort("busy")
    match = story.connector.match
    monkeypatch.setattr(
        story.connector, "match", lambda name, *rest: STAGING if name == "again" else match(name, *rest)
    )
    story.step()
    assert story.state("again") is not WAITING, "a connector that would rather wait is not asked"
    monkeypatch.undo()
    story.run()
    story.verify_quiet()


def test_r52_a_preemption_after_the_expiry_begins_anew(open_restores: Open) -> None:
    story = open_refused(open_restores, engine={"policy": "priority"})
    story.step(BOUND_S)
    story.rig.abort("busy")
    story.step()
    assert (story.state("again"), story.status.capacity_waits) == (RESTORING, 1)
    story.land()
    story.step()
    story.preempt()
    story.add("urgent", prompt(6, 500), 15, URGENT)
    story.step()
    assert (story.state("again"), story.status.capacity_waits) == (WAITING, 2), "it may wait as long as before"
    story.step(BOUND_S - 0.1)
    assert len(story.warnings()) == 1
    story.step(0.1)
    assert len(story.warnings()) == 2
    story.run()
    story.verify_quiet()


def test_r52_restoring_and_preempting_end_after_as_many_attempts(open_restores: Open) -> None:
    story = open_restores(max_attempts=3)
    story.hold(HELD)
    story.add("again", HELD)
    for _ in range(3):
        story.step()
        assert story.state("again") is RESTORING
        story.preempt()
        story.land()
    before = story.rig.computed_tokens
    story.step()
    assert story.state("again") is RUNNING
    assert story.rig.computed_tokens - before == 64, "as much as a step takes"
    assert len(story.warnings()) == 1
    story.run()
    story.verify_quiet()


def test_r52_a_token_since_then_makes_the_next_attempts_fresh(open_restores: Open) -> None:
    story = open_restores(max_attempts=2)
    story.hold(HELD)
    story.add("again", HELD, 12)
    for _ in range(6):
        story.step()
        assert story.state("again") is RESTORING
        story.land()
        story.step()
        story.preempt()
    story.run()
    assert story.warnings() == []
    story.verify_quiet()


# ---- settings and the clock ------------------------------------------------------------------------------------------


def test_r69_a_bound_of_zero_recomputes_at_the_first_refusal(open_restores: Open) -> None:
    story = open_restores(capacity_bound_s=0.0)
    story.hold(HELD)
    story.occupy(4)
    story.add("again", HELD)
    story.step()
    assert (story.state("again"), len(story.warnings())) == (WAITING, 1)
    assert (story.stats.restore_capacity_waits, story.status.capacity_expired) == (0, 1)
    story.run()
    story.verify_quiet()


def test_r69_a_clock_that_goes_back_ends_no_wait_and_takes_nothing_off_one(open_restores: Open) -> None:
    story = open_refused(open_restores)
    story.step(30.0)
    story.step(-10 * BOUND_S)
    story.step(29.0)
    assert (story.state("again"), story.warnings()) == (WAITING, [])
    story.step(1.0)
    assert (story.state("again"), len(story.warnings())) == (WAITING, 1)
    story.run()
    story.verify_quiet()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_r69_no_bound_is_negative_or_infinite(value: float) -> None:
    with pytest.raises(ConfigError, match="capacity_bound_s"):
        EngineRig(restore__capacity_bound_s=value)


def test_r67_who_lost_its_prefix_is_looked_for_in_the_next_step_at_once() -> None:
    """Nothing else is under way, whose end the engine could wait for."""
    with Restores("kvtier", max_num_seqs=1) as story:
        story.add("before", HELD, 1, KVOptions(store=False))
        story.run()
        story.occupy(3, max_tokens=4)
        story.add("again", HELD, 2, KVOptions(store=False))  # the pool has it all but a token
        story.rig.abort("busy")
        story.pool.reset_cache()
        result = story.step()
        assert (result.num_tokens, story.state("again")) == (0, WAITING)
        assert result.next_deadline is not None
        assert result.next_deadline <= story.clock.now()
        story.step()
        assert story.state("again") is RUNNING
        story.run()
        story.verify_quiet()


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 0), ("priority", -1)])
def test_the_connector_is_told_a_priority_where_the_engine_goes_by_it(
    policy: str, priority: int, open_restores: Open
) -> None:
    story = open_restores(engine={"policy": policy})
    told = story.calls_of("start_request")
    story.add("urgent", HELD, 2, KVOptions(priority=-1))
    [(request, *_)] = told
    assert request.options == KVOptions(priority=priority)
    story.run()
    story.verify_quiet()
