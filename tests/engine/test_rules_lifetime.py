"""How requests with a restore end, and what can be seen of those that wait: aborts, failures, resets, counts, logs.

Unless a story says otherwise the pool has eight blocks, and "again" restores four and needs five.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier_connectors.contract import KVOptions
from kvtier_engine.errors import RequestError
from kvtier_engine.progress import EngineState
from kvtier_engine.request import FinishReason, RequestState, TextStream
from kvtier_engine.runner import BatchItem
from kvtier_engine.sampling import SamplingParams
from kvtier_engine.testing import unchanged
from kvtier_engine.testing.disk import disk_rigs
from kvtier_engine.verdict import Verdict
from tests.engine.restores import APART, BOUND_S, HELD, Restores, open_refused, prompt

Open = Callable[..., Restores]

URGENT = KVOptions(restore=False, store=False, priority=-1)
WAITING, RESTORING, RUNNING = RequestState.WAITING, RequestState.RESTORING, RequestState.RUNNING


def open_landing(open_restores: Open, **kwargs: object) -> Restores:
    """ "again" has its slot, and four of its blocks are being copied."""
    story = open_restores(**kwargs)
    story.hold(HELD)
    story.add("again", HELD)
    story.step()
    assert story.state("again") is RESTORING
    return story


def pinned(story: Restores) -> set[int]:
    return {block for block in range(story.pool.num_blocks) if story.pool.pins(block)}


# ---- aborts ----------------------------------------------------------------------------------------------------------


def test_r71_at_an_abort_slot_and_promise_are_free_at_once_and_the_blocks_after_the_copy(open_restores: Open) -> None:
    story = open_landing(open_restores, max_num_seqs=1)
    blocks = set(story.request("again").block_table)
    assert pinned(story) == blocks
    story.rig.abort("again")
    assert (story.pool.num_free, story.pool.num_held, pinned(story)) == (4, 4, blocks)
    story.add("next", prompt(3, 500), 3, APART)
    story.step()
    assert story.state("next") is RUNNING, "in the only slot, with all four free blocks"
    assert not blocks & set(story.request("next").block_table)
    assert story.rig.abort("again") is None
    assert pinned(story) == blocks
    story.land()
    story.step()
    assert pinned(story) == set()
    story.run()
    assert story.engine.cached_blocks(HELD) == []
    story.verify_quiet()


def test_r71_the_blocks_wait_for_the_last_of_two_ranks(open_scripted: Open) -> None:
    story = open_landing(open_scripted, num_ranks=2)
    kv = story.kv
    assert kv is not None
    [landing] = kv.tasks("land")
    story.rig.abort("again")
    kv.deliver(landing, rank=1)
    story.step()
    assert len(pinned(story)) == 4
    kv.deliver(landing, rank=0)
    kv.deliver(landing, rank=0)
    story.step()
    story.verify_quiet()


def test_r74_a_name_that_is_used_again_has_nothing_to_do_with_what_is_under_way(open_restores: Open) -> None:
    other = prompt(3, 500)
    story = open_restores(16)
    story.hold(HELD, other)
    story.add("again", HELD)
    story.step()
    old = pinned(story)
    story.rig.abort("again")
    story.add("again", other)
    story.step()
    new = set(story.request("again").block_table)
    assert story.state("again") is RESTORING
    story.land_first()
    story.step()
    assert story.state("again") is RESTORING, "that was the end of the old one's copy"
    assert pinned(story) == new - old
    assert story.engine.cached_blocks(HELD) == story.engine.cached_blocks(other) == []
    story.run()
    assert story.num_restored("again") == 3
    story.verify_quiet()


def test_r75_blocks_of_a_request_aborted_while_the_model_runs_come_back_after_the_step(open_restores: Open) -> None:
    story = open_restores()
    story.occupy(3, "a")
    story.occupy(3, "b")
    seen: list[int] = []

    def abort(_batch: Sequence[BatchItem]) -> None:
        story.rig.runner.fail = lambda _: None
        story.engine.abort("b")
        seen.append(story.pool.num_free)
        story.add("c", prompt(3, 900), 1, APART)

    story.rig.runner.fail = abort
    outputs = story.step().outputs
    assert (seen, story.pool.num_free) == ([2], 5)
    assert [output.request_id for output in outputs] == ["a"]
    story.step()
    assert "c" in story.rig.finished
    story.run()
    story.verify_quiet()


def test_r75_blocks_of_a_request_that_anothers_stream_aborts_come_back_after_the_step(open_restores: Open) -> None:
    story = open_restores(max_batch_tokens=128)
    seen: list[int] = []

    class Aborts(TextStream):
        def push(self, token: int) -> str:
            if story.request("a").output_tokens[1:]:
                story.engine.abort("b")
                seen.append(story.pool.num_free)
            return super().push(token)

    params = SamplingParams(max_tokens=2)
    story.rig.prompts["a"] = prompt(2, 500)
    story.engine.add_request("a", prompt(2, 500), params, stream=Aborts(), options=APART)
    story.occupy(3, "b")
    story.step()
    assert (seen, story.pool.num_free) == ([2], 8), "b stood behind a in the batch, and its output was still to come"
    assert story.num_computed("b") == 34, "and was computed in vain"
    story.step()
    story.verify_quiet()


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_r72_a_landing_that_failed_for_good_is_over_within_a_step(open_restores: Open, on_failure: str) -> None:
    story = open_landing(open_restores, max_attempts=1, on_failure=on_failure)
    story.land(num_good=0)
    outputs = story.step().outputs
    assert len(story.warnings()) == 1
    if on_failure == "fail":
        assert [(output.request_id, output.finish_reason) for output in outputs] == [("again", FinishReason.ERROR)]
    else:
        assert (story.state("again"), story.request("again").num_computed) == (RUNNING, 64)
    story.run()
    story.verify_quiet()


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_r72_a_landing_whose_end_nobody_tells_is_given_up_when_its_budget_is_used(
    open_restores: Open, on_failure: str
) -> None:
    story = open_landing(open_restores, num_blocks=16, on_failure=on_failure, episode_budget_s=10.0)
    blocks = pinned(story)
    assert story.step(9.9).next_deadline == pytest.approx(1010.0)
    assert (story.state("again"), story.warnings()) == (RESTORING, [])
    story.step(0.1)
    assert len(story.warnings()) == 1
    assert (pinned(story), story.pool.num_held) == (blocks, 4), "the copy may still write"
    if on_failure == "fail":
        assert story.rig.finished["again"].finish_reason is FinishReason.ERROR
    else:
        assert (story.state("again"), story.request("again").num_computed) == (RUNNING, 64), "elsewhere, in that step"
        assert not blocks & set(story.request("again").block_table)
        story.step()
        assert story.num_tokens("again") == 1
    story.land()
    story.step()
    story.run()
    assert len(story.warnings()) == 1
    story.verify_quiet()


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_r72_a_stage_that_failed_for_good_is_over_within_a_step(open_scripted: Open, on_failure: str) -> None:
    story = open_scripted(max_attempts=1, on_failure=on_failure)
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, tier="disk")
    story.add("again", HELD)
    kv.deliver_all()
    story.step()
    kv.deliver(kv.tasks("stage")[0], ok=False)
    story.step()
    if on_failure == "fail":
        assert story.rig.finished["again"].finish_reason is FinishReason.ERROR
    else:
        assert story.state("again") is RUNNING
    story.run()
    assert len(story.warnings()) == 1
    story.verify_quiet()


# ---- resets and the end ----------------------------------------------------------------------------------------------


def test_r76_a_reset_while_a_copy_is_under_way_is_refused_and_changes_nothing(open_restores: Open) -> None:
    story = open_landing(open_restores)
    with unchanged(story.pool, story.scheduler.waiting), pytest.raises(RequestError, match="unfinished"):
        story.engine.reset_cache()
    story.run()
    assert story.num_restored("again") == 4
    story.verify_quiet()


def test_r76_a_reset_that_includes_the_running_drops_ready_and_landing_restores(open_restores: Open) -> None:
    """ "first" lands, "second" was refused; what the one's copy brings is of before the reset."""
    story = open_restores()
    story.hold(HELD, prompt(4, 500))
    story.add("first", HELD)
    story.add("second", prompt(4, 500))
    story.step()
    assert (story.state("first"), story.state("second")) == (RESTORING, WAITING)
    blocks = pinned(story)
    story.engine.reset_cache(preempt_running=True)
    assert (story.state("first"), story.state("second")) == (WAITING, WAITING)
    assert pinned(story) == blocks
    story.step()
    assert RESTORING not in {request.state for request in story.scheduler.requests()}
    story.land()
    story.step()
    assert pinned(story) == set()
    story.run()
    assert (story.num_restored("first"), story.num_restored("second")) == (0, 0)
    story.verify_quiet()


def test_r76_a_reset_lets_one_go_that_was_to_be_looked_up_again(open_restores: Open) -> None:
    """ "again" lost the two blocks that the prefix cache held when it came."""
    story = open_restores(max_num_seqs=1)
    story.hold(HELD)
    story.add("first", HELD[:33], 1, APART)
    story.run()
    story.occupy(1)
    story.add("again", HELD)
    story.pool.reset_cache()
    story.rig.abort("busy")
    story.step()
    story.engine.reset_cache(preempt_running=True)
    story.run()
    assert story.num_restored("again") == 0
    story.verify_quiet()


def test_r76_a_copy_of_an_aborted_request_brings_nothing_over_a_reset(open_restores: Open) -> None:
    story = open_landing(open_restores)
    story.rig.abort("again")
    story.engine.reset_cache()
    assert len(pinned(story)) == 4
    story.land()
    story.step()
    assert story.engine.cached_blocks(HELD) == []
    story.verify_quiet()


def test_r77_the_engine_has_work_until_the_copies_into_its_blocks_have_ended(open_restores: Open) -> None:
    story = open_landing(open_restores)
    story.rig.abort("again")
    for _ in range(3):
        assert story.engine.has_work
        assert (story.step().verdict, story.engine.num_unfinished) == (Verdict.IDLE, 0)
    story.land()
    story.step()
    story.verify_quiet()


def test_r77_r80_a_stalled_disk_stops_no_step_and_keeps_no_engine_alive(tmp_path: Path) -> None:
    """More than host memory and the disk's queue can take is dropped, and counted."""
    with disk_rigs(tmp_path / "disk") as open_disk:
        rig = open_disk(num_blocks=8, host_blocks=4, num_threads=1)
        rig.disk_jobs.shut()
        for index in range(40):
            rig.add(f"r{index}", prompt(1, 100 * index), 2)
            for _ in range(12):
                rig.step()
                rig.copies.run_all()
                while rig.disk_jobs.run_next():
                    pass
            assert f"r{index}" in rig.finished
        assert not rig.engine.has_work
        assert rig.engine.pool.num_free == 8
        ledger = rig.ledger
        assert ledger.due == ledger.stored + sum(ledger.dropped.values()) + ledger.pending
        assert sum(ledger.dropped.values()) + sum(rig.disk.ledger.dropped.values()) > 0
        rig.disk_jobs.release()
        rig.verify_quiet()


# ---- what can be seen ------------------------------------------------------------------------------------------------


def test_r82_the_kinds_of_waiting_add_up_and_waits_for_blocks_have_a_name_of_their_own(open_scripted: Open) -> None:
    story = open_refused(open_scripted)
    kv = story.kv
    assert kv is not None
    kv.hold(prompt(4, 500), tier="disk")
    story.add("staged", prompt(4, 500))
    story.add("plain", prompt(4, 900), 1, APART)
    story.step()
    stats = story.stats
    assert (stats.waiting, stats.waiting_for_place, stats.waiting_for_stage) == (3, 2, 1)
    assert stats.restore_capacity_waits == 1
    kv.deliver_all()
    story.step()
    kv.deliver_all()
    story.run()
    seen = [step.stats for step in story.recorder.steps if step.stats is not None]
    assert all(stats.waiting == stats.waiting_for_place + stats.waiting_for_stage for stats in seen)
    assert {stats.waiting_for_stage for stats in seen} == {0, 1}


def test_r82_a_wait_for_blocks_is_logged_when_it_begins_every_thirty_seconds_and_at_its_end(
    open_restores: Open,
) -> None:
    story = open_refused(open_restores, max_num_seqs=2, engine={"policy": "priority"}, capacity_bound_s=100.0)

    def num_lines() -> int:
        return len(story.recorder.log("waits for GPU blocks", logging.INFO))

    story.step()
    assert num_lines() == 1
    story.step(29.0)
    assert num_lines() == 1
    story.add("urgent", prompt(0, 500), 3, URGENT)
    story.step(1.0)
    assert (num_lines(), story.state("urgent")) == (2, RUNNING), "with all slots taken too"
    story.step(30.0)
    assert num_lines() == 3
    assert story.status.longest_capacity_wait_seconds == 60.0
    story.clock.advance(5.0)
    assert story.status.longest_capacity_wait_seconds == 65.0, "by the clock, between two steps"
    story.rig.abort("busy")
    story.step()
    [line] = story.recorder.log("having waited", logging.INFO)
    assert set(line.args) >= {"again", 65.0}
    status = story.status
    assert (status.capacity_waits, status.capacity_waiters, status.capacity_expired) == (1, 0, 0)
    assert status.longest_capacity_wait_seconds == 0.0
    story.run()


def test_r82_who_expired_and_who_was_recomputed_is_counted(open_restores: Open) -> None:
    story = open_refused(open_restores)
    story.step(BOUND_S)
    status = story.status
    assert (status.capacity_waits, status.capacity_expired, status.capacity_waiters) == (1, 1, 0)
    assert (status.fallback_blocks, status.fallback_tokens) == (4, 64)
    story.run()


def test_r82_a_prompt_is_done_only_after_its_forward(open_restores: Open) -> None:
    def fail(_batch: Sequence[BatchItem]) -> None:
        raise RuntimeError("device lost")

    story = open_restores()
    story.rig.runner.fail = fail
    story.add("new", prompt(2, 500))
    story.step()
    assert story.rig.finished["new"].finish_reason is FinishReason.ERROR
    assert len(story.recorder.log("prefill of new begins", logging.INFO)) == 1
    assert story.recorder.log("prefill of new is done", logging.INFO) == []


def test_r82_the_heartbeat_tells_a_wait_from_work_and_from_rest(open_restores: Open) -> None:
    story = open_restores()
    story.hold(HELD)
    states = [story.engine.heartbeat.state]
    story.add("again", HELD, 3)
    for _ in range(4):
        story.step()
        states.append(story.engine.heartbeat.state)
        story.land()
    assert states == [EngineState.IDLE, EngineState.WAITING, EngineState.WORKING, EngineState.WORKING, EngineState.IDLE]


def test_r36_a_copy_that_never_ends_is_named_when_a_request_needs_its_blocks(open_restores: Open) -> None:
    """Given up at its budget, it is waited for no more: the request that cannot do without its blocks is failed."""
    story = open_landing(open_restores, num_blocks=5, episode_budget_s=10.0)
    story.step(10.0)
    assert story.state("again") is WAITING
    outputs = [output for _ in range(2) for output in story.step(1.0).outputs]
    (failed,) = outputs
    assert failed.finish_reason is FinishReason.ERROR
    assert "restore of again" in str(failed.error)
    assert not story.engine.has_work
    story.land()
    story.step()
    story.verify_quiet()
