"""What is kept for whom while restores wait for GPU blocks, and what is not.

Unless a story says otherwise the pool has eight blocks, "busy" decodes in four of them, and "again" would restore four
and needs five.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier_connectors.contract import KVOptions
from kvtier_engine.admission import REPROBE_STEPS
from kvtier_engine.capacity import CapacityLedger
from kvtier_engine.request import Request, RequestState
from kvtier_engine.testing import unchanged
from tests.engine.restores import APART, BOUND_S, HELD, Restores, open_refused, prompt

Open = Callable[..., Restores]

SOON = REPROBE_STEPS + 3
"""Steps within which those that were refused are looked at anew."""
URGENT = KVOptions(restore=False, store=False, priority=-1)
WAITING, RESTORING, RUNNING = RequestState.WAITING, RequestState.RESTORING, RequestState.RUNNING


def test_r53_a_newer_one_takes_nothing_of_what_a_waiter_needs(open_restores: Open) -> None:
    other = prompt(1, 300)
    story = open_restores()
    story.hold(HELD, other)
    story.occupy(4)
    story.add("again", HELD)
    story.add("newer", other)
    story.add("small", prompt(0, 500), 3, APART)
    for _ in range(3):
        story.step()
    assert [story.state(name) for name in ("newer", "small")] == [WAITING, WAITING], "though four blocks are free"
    story.run()
    assert (story.num_restored("again"), story.num_restored("newer")) == (4, 1)
    story.verify_quiet()


def test_r53_whoever_is_considered_before_a_waiter_is_not_held_back(open_restores: Open) -> None:
    story = open_refused(open_restores, engine={"policy": "priority"})
    story.step()
    story.add("urgent", prompt(2, 500), 3, URGENT)
    story.step()
    assert (story.state("urgent"), story.state("again")) == (RUNNING, WAITING)
    story.run()
    story.verify_quiet()


@pytest.mark.parametrize("way_out", ["aborted", "restored", "expired", "rejected"])
def test_r54_at_its_end_what_was_kept_for_a_waiter_is_free_in_the_same_step(
    open_restores: Open, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = open_refused(open_restores, num_busy=7)
    story.add("small", prompt(0, 500), 3, APART)
    story.step()
    assert story.state("small") is WAITING
    if way_out == "aborted":
        story.rig.abort("again")
    elif way_out == "restored":
        story.rig.abort("busy")
    elif way_out == "expired":
        story.clock.advance(BOUND_S)
    else:
        needs_too_much(story, "again", monkeypatch)
    for _ in range(1 if way_out != "rejected" else SOON):
        story.step()
    assert story.num_computed("small") > 0
    assert story.stats.restore_capacity_waits == story.status.capacity_waiters == 0
    story.run()
    story.verify_quiet()


def test_r54_a_waiter_whose_blocks_no_tier_holds_any_more_is_none(open_restores: Open) -> None:
    story = open_refused(open_restores, num_busy=7)
    story.add("small", prompt(0, 500), 3, APART)
    story.forget_host()
    for _ in range(SOON):
        story.step(2.0)
    assert "small" in story.rig.finished
    assert story.stats.restore_capacity_waits == 0
    story.run()
    assert story.num_restored("again") == 0
    story.verify_quiet()


def test_r54_a_waiter_that_the_prefix_cache_covers_by_now_is_none(open_restores: Open) -> None:
    """Three of its blocks are in host memory; a request that goes first computes these."""
    story = open_restores(engine={"policy": "priority"})
    story.hold(HELD[:49])
    story.occupy(4)
    story.add("again", HELD)
    story.step()
    assert story.stats.restore_capacity_waits == 1
    story.add("twin", HELD[:49], 1, URGENT)
    story.add("small", prompt(0, 500), 3, APART)
    for _ in range(SOON):
        story.step()
    assert (story.state("small"), story.state("again")) == (RUNNING, WAITING)
    assert story.stats.restore_capacity_waits == 0
    story.run()
    assert (story.num_restored("again"), story.rig.finished["again"].gpu_hit_tokens) == (0, 48)
    story.verify_quiet()


def test_r54_a_waiter_that_is_staged_again_is_none(open_scripted: Open) -> None:
    """Its blocks leave host memory; the next refresh of the lookup finds them on disk."""
    story = open_scripted()
    kv = story.kv
    assert kv is not None
    kv.hold(HELD, tier="disk")
    digests = kv.hold(HELD)
    story.occupy(4)
    story.add("again", HELD)
    story.add("small", prompt(0, 500), 3, APART)
    story.step()
    assert story.stats.restore_capacity_waits == 1
    kv.drop(digests, "host")
    story.step(10.0)
    kv.deliver_all()
    for _ in range(SOON):
        story.step()
    assert (story.stats.waiting_for_stage, story.stats.restore_capacity_waits) == (1, 0)
    assert "small" in story.rig.finished
    kv.deliver_all()
    story.run()
    assert story.num_restored("again") == 4
    story.verify_quiet()


def needs_too_much(story: Restores, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits, this request needs more blocks than there are: engines that check lengths have none such."""
    needed = CapacityLedger.needed

    def needs(request: Request, num_local: int) -> int:
        is_it = request.request_id == name and request.state is WAITING
        return story.pool.num_blocks + 1 if is_it else needed(request, num_local)

    monkeypatch.setattr(CapacityLedger, "needed", staticmethod(needs))


def test_r55_a_restore_that_never_fits_is_computed_at_once(
    open_restores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = open_restores()
    story.hold(HELD)
    needs_too_much(story, "again", monkeypatch)
    story.add("again", HELD)
    story.step()
    assert (story.state("again"), len(story.warnings())) == (RUNNING, 1)
    assert (story.status.capacity_waits, story.status.capacity_expired) == (0, 0)
    story.run()
    assert (story.num_restored("again"), len(story.warnings())) == (0, 1)
    story.verify_quiet()


def test_r56_refusals_leave_the_pool_as_it_is(open_restores: Open) -> None:
    """The free blocks are cached ones, and stand in the order in which they are to be reused."""
    story = open_restores()
    story.hold(HELD)
    story.add("cached", prompt(3, 700), 1, APART)
    story.run()
    story.occupy(4)
    assert len(story.engine.cached_blocks(prompt(3, 700))) == 3
    story.add("again", HELD)
    with unchanged(story.pool):
        for _ in range(SOON):
            story.step()
    assert story.stats.restore_capacity_waits == 1
    story.run()
    story.verify_quiet()


def test_r57_an_admitted_restore_owns_what_the_rest_of_its_prompt_needs(open_restores: Open) -> None:
    """Four blocks land, the fifth is promised: of eight, three are left."""
    story = open_restores()
    story.hold(HELD)
    story.add("again", HELD)
    story.step()
    assert (story.state("again"), story.pool.num_free) == (RESTORING, 4)
    story.add("four", prompt(3, 500), 3, APART)
    story.add("three", prompt(2, 600), 3, APART)
    story.step()
    assert (story.state("four"), story.state("three")) == (WAITING, RUNNING)
    story.run()
    assert story.scheduler.num_preemptions == 0
    story.verify_quiet()


def test_r57_r58_a_running_decode_may_use_up_the_promise_and_is_not_preempted_for_it(open_restores: Open) -> None:
    story = open_restores()
    story.hold(HELD)
    story.add("busy", prompt(2, 500, extra=14), 9, APART)
    story.step()
    story.add("again", HELD)
    story.step()
    assert (story.state("again"), story.pool.num_free) == (RESTORING, 1)
    for _ in range(3):
        story.step()
    assert story.pool.num_free == 0, "busy decodes into the last block"
    story.land()
    story.step()
    story.step()
    assert (story.state("again"), story.request("again").num_computed) == (RUNNING, 64), "it waits for a block"
    story.run()
    assert story.scheduler.num_preemptions == 0
    assert story.num_restored("again") == 4
    story.verify_quiet()


def test_r58_what_is_kept_for_a_waiter_is_a_decodes_to_take(open_restores: Open) -> None:
    story = open_restores()
    story.hold(HELD)
    story.add("busy", prompt(3, 500, extra=14), 20, APART)
    story.step()
    story.add("again", HELD)
    for step in range(1, 19):
        story.step()
        assert len(story.request("busy").output_tokens) == 1 + step, "in every step a token"
    assert story.stats.restore_capacity_waits == 1
    assert len(story.request("busy").block_table) == 5
    story.run()
    assert story.scheduler.num_preemptions == 0
    story.verify_quiet()


def test_r59_the_watermark_counts_for_restores_and_only_while_something_computes(open_restores: Open) -> None:
    """A hundredth of the pool is one block."""
    story = open_restores(100, host_blocks=128, max_batch_tokens=2000)
    story.hold(HELD)
    story.occupy(95)
    story.add("again", HELD)
    story.step()
    assert story.state("again") is WAITING, "exactly the free blocks are not enough"
    story.rig.abort("again")
    story.add("computed", prompt(4, 900), 1, APART)
    story.step()
    assert "computed" in story.rig.finished
    story.run()
    whole = prompt(99, 40_000, extra=2)
    story.hold(whole)
    story.add("whole", whole)
    story.step()
    assert story.state("whole") is RESTORING, "all blocks are, for one that is alone"
    story.run()
    story.verify_quiet()


def test_r60_a_restore_that_landed_behind_a_blocked_head_computes_in_the_next_step(open_restores: Open) -> None:
    story = open_restores(9)
    story.hold(HELD)
    story.occupy(2)
    story.add("head", prompt(7, 500), 2, APART)
    story.add("again", HELD)
    story.step()
    assert (story.state("head"), story.state("again")) == (WAITING, RESTORING)
    story.land()
    story.step()
    assert len(story.request("again").output_tokens) == 1
    story.run()
    story.verify_quiet()


@pytest.mark.bug("HS03")
def test_r60_ten_blocks_of_which_six_are_restored_behind_a_head_that_needs_eight(open_restores: Open) -> None:
    story = open_restores(10)
    restored = prompt(5, 300)
    story.hold(restored)
    story.occupy(3, max_tokens=3)
    story.add("head", prompt(7, 500), 2, APART)
    story.add("again", restored)
    story.step()
    assert (story.state("head"), story.state("again")) == (WAITING, RESTORING)
    story.run(max_steps=20)
    assert story.num_restored("again") == 5
    story.verify_quiet()


def test_r61_two_restores_need_room_for_their_first_output_too(open_restores: Open) -> None:
    """Two prompts of exactly four blocks fill the pool: then neither could put out a token."""
    first, second = prompt(4, 0, extra=0), prompt(4, 500, extra=0)
    story = open_restores()
    story.hold([*first, 1], [*second, 1])
    story.add("first", first)
    story.add("second", second)
    story.step()
    assert (story.state("first"), story.state("second")) == (RESTORING, WAITING)
    story.run()
    assert (story.num_restored("first"), story.num_restored("second")) == (3, 3)
    assert story.scheduler.num_preemptions == 0
    story.verify_quiet()


def test_r62_r63_what_landed_of_a_restore_that_failed_counts_for_its_next_attempt(open_restores: Open) -> None:
    """In a pool that holds this one request and no block more."""
    story = open_restores(5)
    story.hold(HELD)
    story.add("again", HELD)
    story.step()
    story.land(num_good=2)
    story.step()
    assert story.state("again") is RESTORING, "the rest of it, once more"
    assert len(story.engine.cached_blocks(HELD)) == 2, "and what did not land is found by nobody"
    assert story.request("again").num_computed == 32
    story.run()
    assert (story.num_restored("again"), story.warnings()) == (4, [])
    story.verify_quiet()


def test_r63_a_landing_that_one_of_two_ranks_confirmed_is_found_by_nobody(open_scripted: Open) -> None:
    story = open_scripted(num_ranks=2)
    kv = story.kv
    assert kv is not None
    story.hold(HELD)
    story.add("again", HELD)
    story.step()
    [landing] = kv.tasks("land")
    kv.deliver(landing, rank=0)
    story.step()
    assert (story.state("again"), story.engine.cached_blocks(HELD)) == (RESTORING, [])
    kv.deliver(landing, rank=1, num_blocks=3)
    story.step()
    assert len(story.engine.cached_blocks(HELD)) == 3
    kv.deliver_all()
    story.step()
    assert story.num_tokens("again") == 1
    kv.deliver_all()
    story.run()
    story.verify_quiet()
