"""Copies that stand in a request's way: those under way are waited for, one that was given up at its budget is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier_engine.request import FinishReason
from kvtier_engine.verdict import Verdict
from tests.engine.restores import APART, BLOCK, BOUND_S, HELD, Restores, prompt

Open = Callable[..., Restores]


def open_growing(open_restores: Open) -> Restores:
    """The four blocks of "again" are being copied; elsewhere it has room to begin, but not to end."""
    story = open_restores(9, episode_budget_s=10.0)
    story.hold(HELD)
    story.add("again", HELD, 40)
    assert story.step().verdict is Verdict.WAIT
    return story


@pytest.mark.parametrize("does_end", [True, False])
def test_r4_r36_a_decode_lacks_a_block_of_a_landing_that_was_given_up(open_restores: Open, does_end: bool) -> None:
    """At the first stalled step all is still well; at the second it is failed, and others go on."""
    story = open_growing(open_restores)
    story.step(10.0)
    results = [story.step()]
    while results[-1].verdict is Verdict.OK:
        results.append(story.step())
    assert (results[-1].verdict, results[-1].outputs, story.num_tokens("again")) == (Verdict.STALL, (), BLOCK)
    if does_end:
        story.land()
        assert story.step().verdict is Verdict.OK
        story.run()
        assert story.rig.finished["again"].finish_reason is FinishReason.LENGTH
    else:
        result = story.step()
        assert result.stall is not None
        assert [(o.finish_reason, o.error) for o in result.outputs] == [(FinishReason.ERROR, result.stall.describe())]
        assert result.stall.holders == {"restore of again": 4}
        story.add("next", HELD[:BLOCK])
        assert story.step().verdict is Verdict.OK
        story.run()
        story.land()
        story.step()
    assert len(story.warnings()) == 1
    story.verify_quiet()


def test_r3_r37_a_copy_under_way_is_waited_for_also_where_its_request_was_aborted(open_restores: Open) -> None:
    """It was not given up, and its end is an event."""
    story = open_growing(open_restores)
    story.rig.abort("again")
    story.add("large", prompt(6, 5000), options=APART)
    for _ in range(20):
        result = story.step(1.0)
        assert (result.verdict, result.in_flight, result.outputs) == (Verdict.WAIT, 4, ())
    story.land()
    assert story.step().verdict is Verdict.OK
    story.run()
    assert story.rig.finished["large"].finish_reason is FinishReason.LENGTH
    story.verify_quiet()


def open_lost(open_restores: Open, *held: list[int], **kwargs: Any) -> Restores:
    """Of ten blocks, six are free: a copy that was given up at its budget keeps four, and nobody runs."""
    story = open_restores(10, episode_budget_s=10.0, engine={"policy": "priority"}, **kwargs)
    story.hold(HELD, *held)
    story.add("again", HELD, 1)
    story.step()
    story.step(10.0)
    story.step()
    assert "again" in story.rig.finished
    assert (story.stats.blocks_free, story.stats.blocks_held) == (6, 4)
    return story


GROWS = prompt(4, 9000, extra=0), 40, APART
"""A step for its prompt, one for each token that two further blocks take; then it needs a seventh."""


def test_r4_r51_a_wait_for_blocks_that_has_no_slot_hides_no_stall(open_restores: Open) -> None:
    """The one slot is a decode's that never gets its block: no refusal comes that would end the other's wait."""
    waits = prompt(6, 5000)
    story = open_lost(open_restores, waits, max_num_seqs=1)
    story.add("waits", waits)
    story.step()
    assert story.stats.restore_capacity_waits == 1
    story.add("grows", *GROWS[:2], replace(APART, priority=-1))
    verdicts = [story.step(1.0).verdict for _ in range(2 * BLOCK + 3)]
    assert verdicts == [Verdict.OK] * (2 * BLOCK + 1) + [Verdict.STALL] * 2
    assert "restore of again" in str(story.rig.finished["grows"].error)
    story.land()
    story.run()
    assert story.num_restored("waits") == 6
    story.verify_quiet()


def test_r4_r37_who_runs_and_never_gets_its_block_is_failed_before_those_that_wait(open_restores: Open) -> None:
    """What it has is enough for one that waits and goes before it."""
    story = open_lost(open_restores)
    story.add("grows", *GROWS)
    story.step()
    story.add("urgent", prompt(4, 7000, extra=0), 1, replace(APART, priority=-1))
    while story.step().verdict is Verdict.OK:
        pass
    assert [output.request_id for output in story.step().outputs] == ["grows"]
    assert "restore of again" in str(story.rig.finished["grows"].error)
    assert story.step().verdict is Verdict.OK
    assert story.rig.finished["urgent"].finish_reason is FinishReason.LENGTH
    assert story.stats.stalls == 1
    story.land()
    story.step()
    story.verify_quiet()


def test_r3_a_wait_for_blocks_that_began_in_a_step_is_told_of_by_the_next(open_restores: Open) -> None:
    """Nothing is under way, and the connector was asked for deadlines before the first refusal."""
    waits = prompt(6, 5000)
    story = open_lost(open_restores, waits)
    story.add("waits", waits)
    end = story.clock.now() + BOUND_S
    results = [story.step(seconds) for seconds in (0.0, 0.0, 59.0)]
    assert [(result.verdict, result.in_flight) for result in results] == [(Verdict.WAIT, 0)] * 3
    assert [result.next_deadline for result in results] == [-math.inf, end, end]
    story.land()
    story.run()
    assert story.num_restored("waits") == 6
    story.verify_quiet()
