"""What a step asks of restores, however many wait, and what comes of lookups and stages.

Unless a story says otherwise the pool has eight blocks, "busy" decodes in four of them, and "again" would restore four
and needs five.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_connectors.contract import KVOptions
from kvtier_engine.request import RequestState
from kvtier_engine.testing import Recorder, linear_cost
from kvtier_engine.testing.disk import disk_rigs
from tests.engine.restores import APART, HELD, Restores, prompt

Open = Callable[..., Restores]

URGENT = KVOptions(restore=False, store=False, priority=-1)
WAITING, RESTORING, RUNNING = RequestState.WAITING, RequestState.RESTORING, RequestState.RUNNING


# ---- polls -----------------------------------------------------------------------------------------------------------


def test_r46_with_all_slots_taken_a_lookup_and_a_stage_are_noticed_when_they_end(open_scripted: Open) -> None:
    story = open_scripted(max_num_seqs=1)
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, tier="disk")
    story.occupy(4)
    story.add("again", HELD)
    for kind in ("lookup", "stage"):
        story.step()
        assert (story.stats.waiting_for_stage, len(kv.tasks(kind))) == (1, 1)
        kv.deliver_all()
    story.step()
    assert (story.stats.waiting_for_stage, story.stats.waiting_for_place) == (0, 1)
    assert kv.num_polls == len(story.recorder.steps)
    story.run()
    assert story.num_restored("again") == 4
    story.verify_quiet()


@pytest.mark.bug("HS03")
def test_r46_with_all_slots_taken_what_comes_from_disk_is_noticed(tmp_path: Path) -> None:
    with disk_rigs(tmp_path / "disk") as open_disk:
        first = open_disk()
        first.generate(prompt(1, 0))
        first.close()
        rig = open_disk(max_num_seqs=1)
        rig.add("busy", [900] * 5, 8)
        rig.step()
        rig.add("again", prompt(1, 0))
        assert rig.engine.scheduler.waiting.num_staging == 1
        rig.disk_jobs.run_all()
        rig.step()
        assert rig.engine.scheduler.waiting.num_staging == 0
        rig.run()
        assert rig.finished["again"].restored_tokens == 16
        rig.verify_quiet()


def test_r46_in_a_decode_turn_restores_are_polled_admitted_and_land(open_restores: Open) -> None:
    """Prompts have a tenth of the compute, and one that never ends wants it: nearly every turn is a decode's."""
    story = open_restores(
        16, engine={"prefill_share": 0.1}, max_batch_tokens=16, seconds=linear_cost(0.1), max_num_seqs=3
    )
    story.hold(HELD)
    story.occupy(2)
    story.add("long", prompt(5, 500), 2, APART)
    for _ in range(4):
        story.step()
    story.add("again", HELD)
    polls = story.calls_of("poll_restores")
    assert story.turn() == {"busy"}
    assert story.state("again") is RESTORING, "a landing computes nothing, and needs no turn"
    story.land()
    assert story.turn() == {"busy"}
    assert story.request("again").num_computed == 64
    assert len(polls) == 2
    story.run()
    story.verify_quiet()


def test_r46_of_many_refused_restores_a_bounded_number_waits_for_blocks(open_restores: Open) -> None:
    story = open_restores(engine={"max_capacity_waiters": 2})
    story.hold(HELD)
    story.occupy(4)
    for index in range(6):
        story.add(f"r{index}", [*HELD, index])
    refusals = story.calls_of("refuse_restore")
    for _ in range(5):
        refusals.clear()
        story.step()
        assert story.stats.restore_capacity_waits == story.status.capacity_waiters == 2
        assert {args[0] for args in refusals} == {"r0", "r1"}
    story.run()
    story.verify_quiet()


@pytest.mark.bug("HS19")
def test_r46_the_last_of_five_hundred_is_restored_in_the_step_after_its_blocks_came(open_scripted: Open) -> None:
    story = open_scripted(host_blocks=1024)
    kv = story.kv
    assert kv is not None
    for index in range(500):
        kv.hold(prompt(1, 100 * index), tier="disk")
        story.add(f"r{index}", prompt(1, 100 * index))
    kv.deliver_all()
    story.step()
    assert len(kv.tasks("stage")) == 500
    kv.deliver(kv.tasks("stage")[-1])
    story.step()
    assert (story.state("r499"), story.stats.waiting_for_stage) == (RESTORING, 499)


def test_r68_a_step_costs_as_many_calls_however_many_are_blocked(open_restores: Open) -> None:
    """One restore is under way, and nobody else has room."""
    counts = {}
    for num_blocked in (40, 500):
        story = open_restores()
        story.hold(HELD)
        story.occupy(2)
        story.add("copied", HELD)
        story.step()
        assert story.state("copied") is RESTORING
        for index in range(num_blocked):
            story.add(f"r{index}", [*HELD, index])
        names = ("poll_restores", "match", "refuse_restore", "start_request", "requeue_request", "admit")
        calls = [story.calls_of(name) for name in names]
        polls = story.calls_of("poll", owner=story.decision)
        for _ in range(10):
            story.step()
        assert len(polls) == 10, "one active restore, ten steps"
        counts[num_blocked] = [len(calls_of_one) for calls_of_one in calls]
    assert counts[500] == counts[40]
    assert counts[500][0] == 10


@pytest.mark.bug("HS05")
def test_r60_with_endless_arrivals_who_was_restored_computes_at_once(open_restores: Open) -> None:
    """A pool for two of them, and another that would restore in every step."""
    story = open_restores(10)
    story.hold(HELD)
    landed_at: dict[str, int] = {}
    for index in range(60):
        story.add(f"r{index}", [*HELD, index])
        story.step()
        for request in story.scheduler.running:
            if request.num_computed >= 64:
                landed_at.setdefault(request.request_id, index)
            if request.request_id in landed_at and not request.output_tokens:
                assert index - landed_at[request.request_id] < 2, "it was restored, and does not compute"
        story.land()
    assert len(story.rig.finished) >= 20
    story.run(400)
    story.verify_quiet()


# ---- lookups and stages ----------------------------------------------------------------------------------------------


def test_r65_a_lookup_that_is_not_answered_in_time_is_given_up(open_scripted: Open) -> None:
    """While nothing was measured, a second; then as long as computing takes."""
    story = open_scripted()
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, tier="disk")
    story.add("again", HELD)
    assert story.step(0.99).next_deadline == pytest.approx(1001.0)
    assert (story.state("again"), story.warnings()) == (WAITING, [])
    story.step(0.01)
    assert (story.state("again"), len(story.warnings())) == (RUNNING, 1)
    story.run()
    story.decision.observe_prefill(64, 64 * 32, 0.2)
    kv.hold(prompt(4, 500), tier="disk")
    story.add("later", prompt(4, 500))
    story.step(0.19)
    assert story.state("later") is WAITING
    story.step(0.02)
    assert (story.state("later"), len(story.warnings())) == (RUNNING, 2)
    story.run()
    story.verify_quiet()


def test_r65_at_a_stages_deadline_the_leading_blocks_are_restored_and_the_rest_computed(open_scripted: Open) -> None:
    story = open_scripted()
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, num_blocks=3)
    kv.hold(HELD, tier="disk")
    story.add("again", HELD)
    kv.deliver_all()
    story.step()
    assert len(kv.tasks("stage")) == 1
    story.step(1.0)
    assert story.state("again") is RESTORING
    story.land()
    story.step()
    assert story.num_tokens("again") == 1
    story.run()
    assert (story.num_restored("again"), len(story.warnings())) == (3, 1)
    kv.deliver_all()


def test_r65_waiting_for_blocks_uses_up_none_of_it(open_scripted: Open) -> None:
    """For fifty seconds there is no room; then its blocks leave host memory, and there is the whole time to stage."""
    story = open_scripted(8)
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, tier="disk")
    digests = kv.hold(HELD)
    story.occupy(4)
    story.add("again", HELD)
    for _ in range(4):
        story.step(10.0)
        kv.deliver_all()
    kv.drop(digests, "host")
    story.step(10.0)
    kv.deliver_all()
    story.step()
    story.step(0.9)
    assert (len(kv.tasks("stage")), story.warnings()) == (1, [])
    kv.deliver_all()
    story.run()
    assert (story.num_restored("again"), story.warnings()) == (4, [])
    story.verify_quiet()


@pytest.mark.bug("HS01")
def test_r65_a_tier_that_never_answers_costs_its_limit_and_one_warning(tmp_path: Path) -> None:
    with disk_rigs(tmp_path / "disk") as open_disk:
        first = open_disk()
        first.generate(prompt(1, 0))
        first.close()
        rig = open_disk(restore__max_wait_s=0.2)
        rig.disk_jobs.shut()
        rig.add("again", prompt(1, 0))
        rig.disk_jobs.run_next()
        for _ in range(2):
            rig.step()
            assert rig.engine.scheduler.waiting.num_staging == 1
            rig.clock.advance(0.1)
        with Recorder(rig.clock) as recorder:
            rig.step()
        assert rig.finished["again"].restored_tokens == 0, "it is computed"
        [warning] = recorder.warnings()
        assert {"again", "disk", 0.2} < set(warning.args)
        status = rig.stats.restore
        assert (status.fallbacks, status.fallback_tokens) == ({"timeout": 1}, 16)
        rig.disk_jobs.release()
        rig.run()
        assert rig.stats.landed_blocks == 0, "the late answer is nobody's"
        rig.verify_quiet()


@pytest.mark.bug("PF11")
def test_r65_a_tier_that_never_hits_costs_its_answer_and_reserves_nothing(open_scripted: Open) -> None:
    story = open_scripted()
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, tier="disk")
    for index in range(4):
        story.add(f"r{index}", prompt(1, 1000 * (index + 1)))
    story.step()
    assert (story.stats.waiting_for_stage, story.pool.num_free, story.stats.running) == (4, 8, 0)
    kv.deliver_all()
    story.step(0.02)
    assert (story.stats.waiting_for_stage, story.stats.running) == (0, 4)
    assert story.status.restoring_seconds == pytest.approx(4 * 0.02)
    story.run()
    assert story.warnings() == []
    story.verify_quiet()
