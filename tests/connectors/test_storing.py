"""The way down: what is due is stored, or dropped with its reason, and the ledger adds up after every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.keys import BlockDigest, make_key
from kvtier.leases import Owner
from kvtier.reasons import DropReason
from kvtier.store import Space
from kvtier.tiers import WriteRequest
from kvtier.tiers.reservation import Reservation
from kvtier_connectors.contract import WRITTEN, CopyDirection, CopyFailure, CopyResult, StepDemand
from kvtier_connectors.room import LOOK_S, MAX_WAIT_S
from kvtier_engine.testing.rig import ConnectorRig

OpenRig = Callable[..., ConnectorRig]


def prompt(start: int, num_blocks: int) -> list[int]:
    return list(range(start, start + 4 * num_blocks))


def crowded(open_rig: OpenRig, num_left: int, **kwargs: Any) -> ConnectorRig:
    """A pool of which a request that never ends has half: as many blocks may be copied at once as are left."""
    rig = open_rig(num_blocks=2 * num_left, **kwargs)
    assert rig.pool.allocate(num_left) is not None
    rig.pool.take_num_allocated()
    return rig


# ---- when a block is due ---------------------------------------------------------------------------------------------


def test_a_block_is_stored_when_the_free_queue_may_soon_reach_it(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8)
    blocks = rig.compute("a", prompt(0, 3))
    assert rig.plan(step_budget=8).jobs == (), "referenced blocks are not in the queue"
    rig.finish("a", blocks)
    assert rig.plan(step_budget=5).jobs == (), "five others go first"
    plan = rig.plan(step_budget=6)
    assert [job.block_ids for job in plan.jobs] == [tuple(blocks)], "one is due, and its ancestors with it"
    rig.copy_all()
    rig.verify_stored(rig.digests["a"])
    assert (rig.ledger.due, rig.ledger.stored, rig.ledger.pending) == (3, 3, 0)


def test_r79_an_idle_engine_stores_no_more_than_the_clean_reserve(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=12, host_blocks=64)
    tables = [(name, rig.compute(name, prompt(100 * i, 3))) for i, name in enumerate("abcd")]
    for _ in range(60):
        rig.plan(step_budget=3)  # the rate of allocation dies away
    for name, blocks in tables:
        rig.finish(name, blocks)
    for _ in range(30):
        rig.plan(step_budget=3)
        rig.copy_all()
    assert rig.ledger.due == 3
    assert rig.held(rig.digests["a"]) == [True] * 3


def test_an_idle_engine_does_not_scan(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(num_blocks=8)
    rig.finish("a", rig.compute("a", prompt(0, 3)))
    rig.plan(step_budget=2)
    monkeypatch.setattr(rig.pool, "free_queue", lambda: pytest.fail("an idle step scanned the free queue"))
    for _ in range(20):
        rig.scheduler.plan_step([], StepDemand(0, 2, 0))
    assert rig.store.stats().errors == {}


def test_r79_an_idle_engine_over_a_host_pool_that_is_too_small_comes_to_rest(open_rig: OpenRig) -> None:
    """Each store evicts what another had just stored: without rest, the two would change places for ever."""
    rig = open_rig(num_blocks=6, host_blocks=2, store__max_inflight_blocks=1)
    for i, name in enumerate("abcdef"):
        rig.finish(name, rig.compute(name, prompt(100 * i, 1)))
    rig.store_all(steps=20)
    assert rig.ledger.stored <= 6


def test_what_the_host_evicted_is_dirty_again_while_the_gpu_holds_it(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, host_blocks=2)
    a = rig.compute("a", prompt(0, 1))
    rig.finish("a", a)
    rig.store_all()
    for i, name in enumerate("bc"):
        blocks = rig.compute(name, prompt(100 * (i + 1), 1))
        rig.finish(name, blocks)
        rig.store_all()
    assert rig.held(rig.digests["a"]) == [False], "two newer blocks took the room"
    rig.pool.acquire(a)
    rig.pool.release(a)
    rig.store_all()
    assert rig.held(rig.digests["a"]) == [True]


def test_write_through_stores_at_publication(open_rig: OpenRig) -> None:
    rig = open_rig(policy="write_through")
    rig.compute("a", prompt(0, 3))
    rig.plan()
    rig.copy_all()
    rig.verify_stored(rig.digests["a"])


def test_off_stores_nothing_and_still_restores(open_rig: OpenRig) -> None:
    rig = open_rig(policy="off")
    rig.finish("a", rig.compute("a", prompt(0, 3)))
    rig.plan(step_budget=8)
    assert rig.ledger.due == 0
    (digest,) = rig.start("b", prompt(500, 1))
    rig.store.host.write([WriteRequest(make_key(rig.space.digest, digest), None, memoryview(bytes(64)))])
    assert rig.scheduler.match("b", 0, 1).num_blocks == 1


# ---- the order -------------------------------------------------------------------------------------------------------


def test_r79_ancestors_become_due_with_their_descendant_and_go_first(open_rig: OpenRig) -> None:
    rig = crowded(open_rig, 6)
    blocks = rig.compute("a", prompt(0, 4))
    rig.pool.release(blocks[2:])  # the tail alone is evictable: another request still shares the prefix
    plan = rig.plan(step_budget=3)
    assert [job.block_ids for job in plan.jobs] == [tuple(blocks)]
    rig.copy_all()
    rig.verify_stored(rig.digests["a"])


def test_the_bound_on_copies_never_lets_a_tail_go_before_its_prefix(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8, store__max_inflight_blocks=2)
    blocks = rig.compute("a", prompt(0, 5))
    rig.finish("a", blocks)
    held: list[list[bool]] = []
    for _ in range(4):
        plan = rig.plan(step_budget=8)
        assert plan.in_flight <= 2
        assert rig.stats.in_flight_blocks <= 2
        rig.copy_all()
        held.append(rig.held(rig.digests["a"]))
    assert [sum(row) for row in held] == [2, 4, 5, 5]
    assert all(row == sorted(row, reverse=True) for row in held)


def test_who_has_stores_is_who_has_blocks_to_copy_now_or_next(open_rig: OpenRig) -> None:
    """An engine without requests steps on by it: not for ever, where a copy that was given up holds the others up."""
    rig = open_rig(num_blocks=8, policy="write_through", store__max_inflight_blocks=2)
    assert not rig.scheduler.has_stores
    rig.finish("a", rig.compute("a", prompt(0, 5)))
    for num_held in (0, 2, 4, 5):
        assert sum(rig.held(rig.digests["a"])) == num_held
        assert rig.scheduler.has_stores == (num_held < 5)
        rig.plan()
        assert rig.scheduler.has_stores == (num_held < 5)
        rig.copy_all()
    rig.finish("b", rig.compute("b", prompt(1, 3)))
    rig.plan()
    rig.clock.advance(1000.0)
    rig.plan()
    assert rig.dropped[DropReason.COPY_TIMEOUT] == 2
    assert not rig.scheduler.has_stores, "the third waits for the copies that were given up"
    rig.copy_all()
    assert rig.scheduler.has_stores


def test_a_parent_whose_copy_fails_takes_its_children_with_it(open_rig: OpenRig) -> None:
    rig = crowded(open_rig, 4)
    blocks = rig.compute("a", prompt(0, 3))
    rig.finish("a", blocks)
    (job,) = rig.plan(step_budget=4).jobs
    rig.collect([CopyResult(job.job_id, (True, False, True), CopyFailure.RAISED)])
    assert rig.held(rig.digests["a"]) == [True, False, False]
    assert rig.dropped == {DropReason.COPY_FAILED: 1, DropReason.ORPHAN: 1}
    assert rig.pins() == []


def test_a_dropped_block_that_the_gpu_still_holds_is_due_again_with_its_descendants(open_rig: OpenRig) -> None:
    """Else one failed copy of a system prompt would keep every conversation from being stored for ever."""
    rig = open_rig(num_blocks=8)
    blocks = rig.compute("a", prompt(0, 3))
    rig.finish("a", blocks)
    (job,) = rig.plan(step_budget=8, submit=False).jobs
    rig.collect([CopyResult(job.job_id, (False,) * 3, CopyFailure.BACKLOG)])
    longer = rig.start("b", prompt(0, 4))
    rig.pool.acquire(blocks)
    new = rig.pool.allocate(1)
    assert new is not None
    rig.write(new, longer[3:])
    rig.pool.publish(new[0], longer[3], b"root", blocks[-1], (3,))
    rig.scheduler.publish("b", 3, new)
    rig.finish("b", [*blocks, *new])
    rig.store_all()
    rig.verify_stored(longer)


def test_an_orphan_is_not_stored(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    digests = rig.start("a", prompt(0, 2))
    blocks = rig.pool.allocate(2)
    assert blocks is not None
    rig.write(blocks, digests)
    rig.pool.publish(blocks[0], digests[0], b"root", None, (0,))
    rig.pool.publish(blocks[1], digests[1], b"root", blocks[0], (1,))
    rig.scheduler.publish("a", 1, blocks[1:])  # the first block is in no tier, and the connector never heard of it
    rig.finish("a", blocks)
    rig.plan(step_budget=6)
    assert rig.dropped == {DropReason.ORPHAN: 1}


# ---- reasons ---------------------------------------------------------------------------------------------------------


def test_dropped_when_overtaken_dirty(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=3)
    rig.finish("a", rig.compute("a", prompt(0, 3)))
    assert rig.pool.allocate(3) is not None
    rig.plan()
    assert rig.dropped == {DropReason.OVERTAKEN: 3}
    assert rig.ledger.due == 3


def test_blocks_published_before_they_are_named_as_reused_are_lost_and_never_stored_wrong(open_rig: OpenRig) -> None:
    """The wrong order of a step: what they held is lost, and so is what they hold now."""
    rig = open_rig(num_blocks=3)
    rig.finish("a", rig.compute("a", prompt(0, 3)))
    rig.finish("b", rig.compute("b", prompt(100, 3)))
    rig.store_all()
    assert rig.dropped == {DropReason.OVERTAKEN: 6}
    assert rig.held([*rig.digests["a"], *rig.digests["b"]]) == [False] * 6


def test_dropped_when_overtaken_while_due(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=3, store__max_inflight_blocks=1)
    rig.finish("a", rig.compute("a", prompt(0, 3)))
    plan = rig.plan(step_budget=3)
    assert (plan.in_flight, rig.ledger.pending) == (1, 3)
    assert rig.pool.allocate(2) is not None, "the two that wait are not pinned"
    rig.plan()
    rig.copy_all()
    rig.plan()
    assert rig.dropped == {DropReason.OVERTAKEN: 2}
    assert rig.ledger.stored == 1


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (CopyFailure.BACKLOG, DropReason.BACKLOG),
        (CopyFailure.NO_FENCE, DropReason.COPY_FAILED),
        (CopyFailure.RAISED, DropReason.COPY_FAILED),
        (CopyFailure.CLOSED, DropReason.CLOSED),
        (None, DropReason.COPY_FAILED),
    ],
)
def test_dropped_by_how_the_copy_failed(open_rig: OpenRig, failure: CopyFailure | None, reason: DropReason) -> None:
    rig = crowded(open_rig, 3)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    (job,) = rig.plan(step_budget=3, submit=False).jobs
    rig.collect([CopyResult(job.job_id, (False, False), failure)])
    assert rig.dropped == {reason: 2}
    assert rig.pins() == []
    assert rig.store.stats().leases == 0


def test_a_result_without_a_verdict_for_a_block_stores_nothing_of_it(open_rig: OpenRig) -> None:
    rig = crowded(open_rig, 3)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    (job,) = rig.plan(step_budget=3).jobs
    rig.executor.run_all()
    rig.collect([CopyResult(job.job_id, (True,))])
    assert rig.held(rig.digests["a"]) == [True, False]
    assert rig.dropped == {DropReason.COPY_FAILED: 1}


def test_r79_dropped_when_every_slot_is_leased(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, host_blocks=2)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    rig.store_all()
    with rig.space.owner("a restore") as owner:
        assert len(rig.space.lease(rig.digests["a"], owner)) == 2
        rig.finish("b", rig.compute("b", prompt(100, 1)))
        rig.plan(step_budget=4)
        assert rig.dropped == {DropReason.HOST_FULL: 1}


@pytest.fixture
def full(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ConnectorRig, Owner]]:
    """A pool without a free slot that gets some by itself, with two blocks due; what takes its slots."""
    monkeypatch.setattr(Space, "gets_room", property(lambda _: True))
    rig = open_rig(num_blocks=8, host_blocks=2)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    rig.store_all()
    with rig.space.owner("all that there is") as owner:
        assert len(rig.space.lease(rig.digests["a"], owner)) == 2
        rig.finish("b", rig.compute("b", prompt(100, 2)))
        plan = rig.plan(step_budget=8)
        assert (plan.jobs, plan.in_flight, rig.ledger.pending, rig.dropped) == ((), 2, 2, {})
        yield rig, owner


def test_blocks_wait_for_slots_that_are_about_to_come(full: tuple[ConnectorRig, Owner]) -> None:
    rig, owner = full
    deadline = rig.poll().next_deadline
    assert deadline is not None
    assert 0 < deadline - rig.clock.now() <= LOOK_S, "an engine without requests looks again soon"
    owner.close()
    (job,) = rig.plan().jobs
    assert len(job.block_ids) == 2
    rig.copy_all()
    rig.verify_stored(rig.digests["b"])
    assert (rig.ledger.stored, rig.dropped) == (4, {})


def test_blocks_wait_for_slots_so_long_and_then_once_more_when_there_was_one(full: tuple[ConnectorRig, Owner]) -> None:
    rig, owner = full
    rig.clock.advance(MAX_WAIT_S)
    assert rig.plan(step_budget=8).in_flight == 0
    assert rig.dropped == {DropReason.HOST_FULL: 1, DropReason.ORPHAN: 1}
    rig.finish("c", rig.compute("c", prompt(200, 1)))
    assert rig.plan(step_budget=8).in_flight == 0, "those that come later do not wait"
    owner.close()
    rig.finish("d", rig.compute("d", prompt(300, 1)))
    plan = rig.plan(step_budget=8)
    assert sum(len(job.block_ids) for job in plan.jobs) == 2, "as many as there are slots"
    assert plan.in_flight == rig.ledger.pending == 4, "and the others wait anew"


def test_a_block_that_is_reused_while_it_waits_for_a_slot_is_overtaken(full: tuple[ConnectorRig, Owner]) -> None:
    rig, owner = full
    assert rig.pool.allocate(8) is not None
    assert rig.plan().in_flight == 0
    assert rig.dropped == {DropReason.OVERTAKEN: 2}
    owner.close()


def test_blocks_do_not_wait_for_slots_of_a_tier_that_is_gone(
    full: tuple[ConnectorRig, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = full
    monkeypatch.setattr(Space, "gets_room", property(lambda _: False))
    assert rig.plan(step_budget=8).in_flight == 0
    assert rig.dropped == {DropReason.HOST_FULL: 1, DropReason.ORPHAN: 1}


def test_dropped_when_another_store_of_the_key_came_first(open_rig: OpenRig) -> None:
    one = open_rig(num_blocks=4)
    one.finish("a", one.compute("a", prompt(0, 2)))
    two = ConnectorRig(num_blocks=4, make_store=lambda _: one.store)
    try:
        two.finish("a", two.compute("a", prompt(0, 2)))
        one.store_all()
        two.plan(step_budget=4)
        assert two.dropped == {DropReason.ALREADY_STORED: 2}
        assert two.pins() == []
    finally:
        two.worker.close(1.0)
        two.scheduler.close()


def test_what_the_store_has_is_clean_at_publication(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    rig.store_all()
    rig.finish("b", rig.compute("b", prompt(0, 2)))
    rig.store_all()
    assert rig.ledger.due == 2


def test_dropped_by_a_reset_under_way(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, store__max_inflight_blocks=2)
    rig.finish("a", rig.compute("a", prompt(0, 4)))
    rig.plan(step_budget=6)
    assert rig.stats.in_flight_blocks == 2
    rig.scheduler.reset()
    rig.pool.reset_cache()
    rig.check_integrity()
    rig.copy_all()
    assert rig.dropped == {DropReason.RESET: 4}
    assert rig.held(rig.digests["a"]) == [False] * 4
    rig.plan(step_budget=6)
    assert rig.ledger.due == 4, "blocks of before the reset are nobody's"


def test_dropped_by_closing(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, store__max_inflight_blocks=2)
    rig.finish("a", rig.compute("a", prompt(0, 4)))
    rig.plan(step_budget=6)
    rig.scheduler.complete(rig.worker.close(1.0))
    rig.scheduler.close()
    assert rig.dropped == {DropReason.CLOSED: 4}
    assert rig.ledger.pending == 0
    assert rig.pins() == []
    assert rig.store.stats().leases == 0


def test_dropped_by_closing_over_a_worker_that_says_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    rig.plan(step_budget=6, submit=False)
    rig.scheduler.close()
    assert rig.dropped == {DropReason.CLOSED: 2}
    assert rig.pins() == [0, 1], "a copy that may still run keeps its source"
    assert rig.store.stats().leases >= 2, "and its slot"


# ---- protection of the source ----------------------------------------------------------------------------------------


@pytest.mark.bug("WR13")
def test_r78_a_source_is_pinned_from_submission_until_the_copy_ended(open_rig: OpenRig) -> None:
    rig = crowded(open_rig, 3)
    blocks = rig.compute("a", prompt(0, 3))
    rig.finish("a", blocks)
    order = list(rig.pool.free_queue())
    rig.plan(step_budget=3)
    assert rig.pins() == sorted(blocks)
    assert rig.pool.allocate(1) is None
    rig.executor.run_all()
    assert rig.pool.allocate(1) is None, "copied, but not told yet"
    rig.collect()
    assert rig.pins() == []
    assert list(rig.pool.free_queue()) == order, "each is back in its place"
    rig.verify_stored(rig.digests["a"])


def test_what_a_step_overwrites_is_stored_where_the_engine_waits_for_it(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    blocks = rig.compute("a", prompt(0, 3))
    rig.finish("a", blocks)
    plan = rig.scheduler.plan_step(blocks[1:2], StepDemand(1, 0, 0), is_fenced=True)
    (job,) = plan.jobs
    assert job.block_ids == tuple(blocks[:2]), "with its ancestor, and nothing behind it"
    assert plan.fence == (job.job_id,)
    rig.worker.submit(plan, WRITTEN)
    rig.copy_all()
    assert rig.held(rig.digests["a"]) == [True, True, False]
    assert (rig.ledger.due, rig.ledger.stored, rig.dropped) == (2, 2, {})
    assert rig.pins() == []


def test_what_is_being_copied_when_a_step_overwrites_it_is_waited_for_too(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    blocks = rig.compute("a", prompt(0, 2))
    rig.finish("a", blocks)
    (job,) = rig.plan(step_budget=4).jobs
    plan = rig.scheduler.plan_step(blocks[:1], StepDemand(1, 0, 0), is_fenced=True)
    assert (plan.jobs, plan.fence) == ((), (job.job_id,))
    rig.copy_all()
    assert (rig.held(rig.digests["a"]), rig.dropped) == ([True, True], {})


def test_what_the_engine_could_not_wait_for_is_dropped(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    blocks = rig.compute("a", prompt(0, 2))
    rig.finish("a", blocks)
    (job,) = rig.scheduler.plan_step(blocks, StepDemand(2, 0, 0), is_fenced=True).jobs
    rig.collect([CopyResult(job.job_id, (), CopyFailure.RAISED)])
    assert (rig.held(rig.digests["a"]), rig.dropped) == ([False, False], {DropReason.COPY_FAILED: 2})
    assert rig.scheduler.plan_step([], StepDemand(0, 4, 0)).jobs == (), "the blocks hold something else by now"
    assert rig.pins() == []


def test_r78_what_is_reused_while_it_is_copied_is_not_stored(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    blocks = rig.compute("a", prompt(0, 2))
    rig.finish("a", blocks)
    assert rig.plan(step_budget=4).in_flight == 2
    rig.scheduler.plan_step(blocks[:1], StepDemand(1, 0, 0))
    rig.copy_all()
    assert rig.dropped == {DropReason.OVERTAKEN: 1, DropReason.ORPHAN: 1}
    assert rig.held(rig.digests["a"]) == [False, False]
    assert rig.pins() == []


def test_nothing_is_findable_before_its_copy_ended(open_rig: OpenRig) -> None:
    rig = crowded(open_rig, 3)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    rig.plan(step_budget=3)
    assert rig.held(rig.digests["a"]) == [False, False]
    rig.executor.run_all()
    assert rig.held(rig.digests["a"]) == [False, False]
    rig.collect()
    assert rig.held(rig.digests["a"]) == [True, True]


@pytest.mark.bug("LK07", "CR01")
def test_r73_results_twice_late_or_from_nowhere_are_counted_and_ignored(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=3)
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    (job,) = rig.plan(step_budget=3).jobs
    rig.executor.run_all()
    results = rig.worker.poll()
    rig.collect(results)
    before = rig.ledger
    rig.collect(results)
    rig.collect([CopyResult(job.job_id + 1000, (True,)), CopyResult(-1, ())])
    assert rig.stats.stale_results == 3
    assert rig.ledger == before
    assert rig.pins() == []


def test_a_job_larger_than_one_copy_is_split(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connectors.copies.JOB_BYTES", 2 * 64)
    rig = open_rig(num_blocks=10)
    rig.finish("a", rig.compute("a", prompt(0, 5)))
    plan = rig.plan(step_budget=10)
    assert [len(job.block_ids) for job in plan.jobs] == [2, 2, 1]
    assert {job.direction for job in plan.jobs} == {CopyDirection.STORE}
    rig.executor.run_next(-1)
    rig.collect()
    rig.start("b", prompt(0, 5))
    assert rig.scheduler.match("b", 0, 5).num_blocks == 0, "the tail's copy ended first, and nothing leads to it yet"
    rig.copy_all()
    assert rig.scheduler.match("b", 0, 5).num_blocks == 5
    assert (rig.ledger.stored, rig.ledger.pending) == (5, 0)


# ---- one commit a job ------------------------------------------------------------------------------------------------


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """The digests of each call of `Space.commit`."""
    calls: list[list[bytes]] = []
    commit = Space.commit

    def noting(space: Space, reservations: Sequence[Reservation]) -> list[bool]:
        calls.append([reservation.digest for reservation in reservations])
        return commit(space, reservations)

    monkeypatch.setattr(Space, "commit", noting)
    return calls


def copying(open_rig: OpenRig, chains: Mapping[str, list[int]]) -> tuple[ConnectorRig, int, dict[str, list[int]]]:
    """A rig that copies these prompts, sharing what they share, in one job in this order; the job, and the blocks of
    each. Their requests are over, and the copies have not run."""
    rig = open_rig(num_blocks=24, policy="write_through")
    blocks = {name: _compute_shared(rig, name, tokens) for name, tokens in chains.items()}
    for name, table in blocks.items():
        rig.finish(name, table)
    (job,) = rig.plan(submit=False).jobs
    assert job.block_ids == tuple(dict.fromkeys(block for table in blocks.values() for block in table))
    return rig, job.job_id, blocks


def copied(rig: ConnectorRig, job_id: int, blocks: Sequence[int], failed: Sequence[int] = ()) -> None:
    """The job ended: what it held of these was copied, but the copies of some failed."""
    for item in rig.scheduler._stores._jobs[job_id].blocks:
        item.reservation.lease.view[: rig.space.block_bytes] = rig.runner.pool[:, item.block.block_id].tobytes()
    verdicts = tuple(block not in failed for block in blocks)
    rig.collect([CopyResult(job_id, verdicts, CopyFailure.RAISED if failed else None)])


def nothing_is_kept(rig: ConnectorRig) -> None:
    """No slot and no source, of blocks that are not stored; and each is accounted for."""
    assert rig.pins() == []
    assert (rig.store.stats().leases, rig.store.pool.usage().num_slots_leased) == (0, 0)
    assert rig.ledger.pending == 0
    assert rig.ledger.due == rig.ledger.stored + sum(rig.dropped.values())
    rig.store.host.check_integrity()


A, B = prompt(0, 4), prompt(100, 3)


def again(rig: ConnectorRig, name: str) -> None:
    """A prompt that is one block longer makes what is not stored due anew."""
    tokens = {"a": A, "b": B}[name]
    table = _compute_shared(rig, f"{name} again", tokens + prompt(900 + len(rig.digests), 1))
    assert rig.plan().jobs
    rig.copy_all()
    rig.finish(f"{name} again", table)
    rig.verify_stored(rig.digests[f"{name} again"])


def test_the_blocks_of_a_copy_job_are_committed_by_one_call(open_rig: OpenRig, commits: list[list[bytes]]) -> None:
    rig, job, blocks = copying(open_rig, {"a": A, "b": B})
    copied(rig, job, [*blocks["a"], *blocks["b"]])
    assert commits == [[*rig.digests["a"], *rig.digests["b"]]], "prefix first"
    assert (rig.ledger.stored, rig.dropped) == (7, {})
    rig.verify_stored([*rig.digests["a"], *rig.digests["b"]])
    nothing_is_kept(rig)


def test_each_of_several_copy_jobs_is_committed_as_it_ends(
    open_rig: OpenRig, commits: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connectors.copies.JOB_BYTES", 3 * 64)
    rig = open_rig(num_blocks=24, policy="write_through")
    rig.finish("a", rig.compute("a", prompt(0, 7)))
    assert len(rig.plan().jobs) == 3
    rig.copy_all()
    digests = list(rig.digests["a"])
    assert commits == [digests[:3], digests[3:6], digests[6:]]
    rig.verify_stored(digests)


def test_a_job_of_which_nothing_was_copied_commits_nothing(open_rig: OpenRig, commits: list[list[bytes]]) -> None:
    rig, job, blocks = copying(open_rig, {"a": A})
    copied(rig, job, blocks["a"], failed=blocks["a"])
    assert commits == []
    assert rig.dropped == {DropReason.COPY_FAILED: 4}
    nothing_is_kept(rig)


LOST = {
    "failed": DropReason.COPY_FAILED,
    "overtaken": DropReason.OVERTAKEN,
    "void": DropReason.RESET,
}


def end_without(rig: ConnectorRig, job_id: int, blocks: Sequence[int], lost: int, how: str) -> None:
    """The job ends, and this one of its blocks is lost."""
    if how == "overtaken":
        rig.scheduler.plan_step([lost], StepDemand(1, 0, 0))
    elif how == "void":
        (item,) = (item for item in rig.scheduler._stores._jobs[job_id].blocks if item.block.block_id == lost)
        rig.store.host.withdraw(item.reservation)
    copied(rig, job_id, blocks, failed=[lost] if how == "failed" else [])


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("place", range(4))
def test_a_block_that_is_lost_takes_what_continues_it_and_nothing_of_another_chain(
    open_rig: OpenRig, commits: list[list[bytes]], how: str, order: str, place: int
) -> None:
    prompts = {"a": A, "b": B}
    rig, job, blocks = copying(open_rig, {name: prompts[name] for name in order})
    end_without(rig, job, [block for name in order for block in blocks[name]], blocks["a"][place], how)
    assert rig.held(rig.digests["a"]) == [True] * place + [False] * (4 - place)
    assert rig.held(rig.digests["b"]) == [True] * 3
    orphans = {DropReason.ORPHAN: 3 - place} if place < 3 else {}
    assert rig.dropped == {LOST[how]: 1} | orphans
    assert (rig.ledger.due, rig.ledger.stored) == (7, 3 + place)
    assert len(commits) == 1
    rig.verify_stored([*rig.digests["a"][:place], *rig.digests["b"]])
    nothing_is_kept(rig)


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("lost", ["the trunk", "a branch", "the other branch"])
def test_a_block_that_is_lost_takes_no_other_branch_of_its_prompt(open_rig: OpenRig, how: str, lost: str) -> None:
    trunk = prompt(0, 1)
    rig, job, blocks = copying(open_rig, {"a": trunk + prompt(100, 2), "b": trunk + prompt(200, 2)})
    a, b = blocks["a"], blocks["b"]
    assert a[0] == b[0]
    gone = {"the trunk": a[0], "a branch": a[1], "the other branch": b[1]}[lost]
    end_without(rig, job, [*a, *b[1:]], gone, how)
    assert rig.held(rig.digests["a"]) == [lost != "the trunk", *[lost == "the other branch"] * 2]
    assert rig.held(rig.digests["b"]) == [lost != "the trunk", *[lost == "a branch"] * 2]
    assert rig.dropped == {LOST[how]: 1, DropReason.ORPHAN: 4 if lost == "the trunk" else 1}
    nothing_is_kept(rig)


def test_blocks_that_are_lost_one_behind_the_other_have_each_its_reason(open_rig: OpenRig) -> None:
    rig, job, blocks = copying(open_rig, {"a": prompt(0, 5)})
    a = blocks["a"]
    rig.scheduler.plan_step([a[2]], StepDemand(1, 0, 0))
    copied(rig, job, a, failed=[a[1], a[4]])
    assert rig.held(rig.digests["a"]) == [True, *[False] * 4]
    assert rig.dropped == {DropReason.COPY_FAILED: 2, DropReason.OVERTAKEN: 1, DropReason.ORPHAN: 1}
    nothing_is_kept(rig)


@pytest.mark.parametrize("how", ["failed", "orphan"])
def test_what_was_lost_with_a_job_is_stored_by_a_later_one(open_rig: OpenRig, how: str) -> None:
    rig, job, blocks = copying(open_rig, {"a": A, "b": B})
    lost = blocks["a"][1:] if how == "failed" else [blocks["a"][1]]
    copied(rig, job, [*blocks["a"], *blocks["b"]], failed=lost)
    assert rig.held(rig.digests["a"]) == [True, False, False, False]
    again(rig, "a")
    rig.verify_stored(rig.digests["a"])
    assert (rig.ledger.stored, rig.ledger.pending) == (7 + 1, 0)


FAULTS = [RuntimeError("injected"), KeyError("injected"), asyncio.CancelledError("injected")]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_commit_that_raises_drops_the_job_and_all_of_it_may_be_stored_again(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    rig, job, blocks = copying(open_rig, {"a": A, "b": B})

    def raising(*_: object) -> bool:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Space, "commit", raising)
        copied(rig, job, [*blocks["a"], *blocks["b"]])
    assert (rig.ledger.stored, rig.dropped) == (0, {DropReason.TIER_ERROR: 7})
    assert rig.held([*rig.digests["a"], *rig.digests["b"]]) == [False] * 7
    assert rig.store.stats().host_blocks == 0
    nothing_is_kept(rig)
    for name in "ab":
        again(rig, name)
    assert (rig.ledger.stored, rig.dropped, rig.ledger.pending) == (9, {DropReason.TIER_ERROR: 7}, 0)
    nothing_is_kept(rig)


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_block_of_which_it_is_not_known_whether_it_can_be_reached_is_dropped(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    rig, job, blocks = copying(open_rig, {"a": A})
    reaches, parent = Space.reaches, rig.digests["a"][1]

    def raising(space: Space, digest: BlockDigest) -> bool:
        if digest == parent:
            raise error
        return reaches(space, digest)

    with monkeypatch.context() as patch:
        patch.setattr(Space, "reaches", raising)
        copied(rig, job, blocks["a"])
    assert rig.held(rig.digests["a"]) == [True, True, False, False]
    assert (rig.ledger.stored, rig.dropped) == (2, {DropReason.TIER_ERROR: 1, DropReason.ORPHAN: 1})
    nothing_is_kept(rig)
    again(rig, "a")
    rig.verify_stored(rig.digests["a"])


def test_a_commit_that_raises_keeps_the_reasons_of_what_was_lost_before(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, job, blocks = copying(open_rig, {"a": A, "b": B})

    def raising(*_: object) -> list[bool]:
        raise RuntimeError("injected")

    rig.scheduler.plan_step([blocks["b"][1]], StepDemand(1, 0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Space, "commit", raising)
        copied(rig, job, [*blocks["a"], *blocks["b"]], failed=[blocks["a"][2]])
    assert rig.dropped == {
        DropReason.COPY_FAILED: 1,  # the third of a
        DropReason.OVERTAKEN: 1,  # the second of b
        DropReason.ORPHAN: 2,  # the last of each
        DropReason.TIER_ERROR: 3,  # those before
    }
    assert rig.store.stats().host_blocks == 0
    nothing_is_kept(rig)


def test_a_commit_that_raises_when_all_was_committed_leaves_the_ledger_right(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, job, blocks = copying(open_rig, {"a": A, "b": B})
    commit = Space.commit

    def raising(space: Space, reservations: Sequence[Reservation]) -> list[bool]:
        commit(space, reservations)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Space, "commit", raising)
        copied(rig, job, [*blocks["a"], *blocks["b"]])
    assert (rig.ledger.stored, rig.dropped) == (0, {DropReason.TIER_ERROR: 7})
    rig.verify_stored([*rig.digests["a"], *rig.digests["b"]])
    nothing_is_kept(rig)
    again(rig, "a")
    assert rig.ledger.stored == 1, "the longer prompt's last block: the rest is there"
    nothing_is_kept(rig)


def test_a_commit_that_answers_for_too_few_drops_the_job(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, job, blocks = copying(open_rig, {"a": A})
    with monkeypatch.context() as patch:
        patch.setattr(Space, "commit", lambda *_: [False, True])
        copied(rig, job, blocks["a"])
    assert rig.ledger.stored == 0
    assert rig.store.stats().host_blocks == 0
    nothing_is_kept(rig)


def test_a_block_whose_abort_fails_keeps_no_other_from_being_dropped(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, job, blocks = copying(open_rig, {"a": A})
    abort, aborted = Space.abort, list[bytes]()

    def raising(space: Space, reservation: Reservation) -> None:
        abort(space, reservation)
        aborted.append(reservation.digest)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Space, "abort", raising)
        copied(rig, job, blocks["a"], failed=[blocks["a"][1]])
    assert list(dict.fromkeys(aborted)) == list(rig.digests["a"][1:])
    assert rig.dropped == {DropReason.COPY_FAILED: 1, DropReason.ORPHAN: 2}
    nothing_is_kept(rig)


@pytest.mark.parametrize("is_below", [True, False])
def test_a_block_is_stored_behind_one_that_only_a_lower_tier_has(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, is_below: bool
) -> None:
    rig, job, blocks = copying(open_rig, {"a": A})
    reaches = Space.reaches
    below = rig.digests["a"][1] if is_below else None
    with monkeypatch.context() as patch:
        patch.setattr(Space, "reaches", lambda space, digest: digest == below or reaches(space, digest))
        copied(rig, job, blocks["a"], failed=[blocks["a"][1]])
    assert rig.held(rig.digests["a"]) == [True, False, is_below, is_below]
    nothing_is_kept(rig)


# ---- all of it -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data())
def test_r79_due_is_stored_dropped_and_pending_after_each_step(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(["on_evict", "write_through", "off"]))
    rig = ConnectorRig(
        num_blocks=data.draw(st.integers(2, 8)),
        host_blocks=data.draw(st.integers(1, 6)),
        policy=policy,
        store__max_inflight_blocks=data.draw(st.integers(1, 4)),
    )
    live: dict[str, list[int]] = {}
    try:
        for step in range(data.draw(st.integers(1, 25))):
            match data.draw(st.sampled_from(["compute", "finish", "plan", "plan", "copy", "fail", "reset"])):
                case "compute":
                    size = data.draw(st.integers(1, 3))
                    if size <= rig.pool.num_free:
                        start = 1000 * data.draw(st.integers(0, 3))
                        live[f"r{step}"] = _compute_shared(rig, f"r{step}", prompt(start, size))
                case "finish" if live:
                    name = data.draw(st.sampled_from(sorted(live)))
                    rig.finish(name, live.pop(name))
                case "plan":
                    rig.plan(step_budget=data.draw(st.integers(0, 8)))
                case "copy":
                    rig.executor.run_next(data.draw(st.integers(0, 3)))
                    rig.collect()
                case "fail" if len(rig.executor):
                    rig.executor.run_next()
                    rig.collect([CopyResult(r.job_id, (), CopyFailure.RAISED) for r in rig.worker.poll()])
                case "reset" if not live:
                    rig.pool.reset_cache()
                    rig.scheduler.reset()
            rig.check_integrity()
        for name, blocks in live.items():
            rig.finish(name, blocks)
        rig.store_all()
        assert rig.ledger.pending == 0
        assert rig.pins() == []
        assert rig.store.stats().leases == 0
        assert rig.ledger.due == rig.ledger.stored + sum(rig.dropped.values())
        assert policy != "off" or rig.ledger.due == 0
    finally:
        rig.close()


def _compute_shared(rig: ConnectorRig, name: str, tokens: list[int]) -> list[int]:
    """Like `compute`, but shares what the pool's prefix cache has, as an engine does."""
    digests = rig.start(name, tokens)
    local = rig.pool.match(b"root", digests, lambda index: (index,))
    rig.pool.acquire(local)
    own = rig.pool.allocate(len(digests) - len(local))
    if own is None:
        rig.pool.release(local)
        rig.scheduler.finish_request(name)
        return []
    rig.write(own, digests[len(local) :])
    table = [*local, *own]
    for index in range(len(local), len(table)):
        previous = table[index - 1] if index else None
        rig.pool.publish(table[index], digests[index], b"root", previous, (index,))
    rig.scheduler.publish(name, len(local), own)
    return table


# ---- copies that do not end ------------------------------------------------------------------------------------------


def hanging(open_rig: OpenRig) -> tuple[ConnectorRig, list[int], int]:
    """A rig whose worker was told to store a prompt of two blocks, and says nothing; the blocks, and the job."""
    rig = open_rig(num_blocks=4)
    blocks = rig.compute("a", prompt(0, 2))
    rig.finish("a", blocks)
    (job,) = rig.plan(step_budget=4, submit=False).jobs
    return rig, blocks, job.job_id


def test_r81_a_copy_that_is_not_told_over_in_time_is_given_up_and_keeps_its_slots_alone(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig, blocks, job = hanging(open_rig)
    rig.clock.advance(59.9)
    assert rig.plan().in_flight == 2
    assert rig.pins() == sorted(blocks)
    rig.clock.advance(0.1)
    assert rig.plan().in_flight == 0
    assert rig.pins() == []
    assert rig.pool.num_free == 4
    assert (rig.dropped, rig.ledger.pending) == ({DropReason.COPY_TIMEOUT: 2}, 0)
    assert rig.store.pool.usage().num_slots_leased == 2
    assert "a store of 2 blocks has not ended in 60 s" in caplog.text
    rig.plan(step_budget=4)
    assert rig.ledger.due == 2, "it is not tried again while the copy may still write"
    result = CopyResult(job, (True, True))
    assert rig.collect([result]) == []
    assert rig.store.stats().leases == 0
    assert rig.ledger.stored == 0
    assert rig.store.stats().host_blocks == 0
    rig.collect([result])
    assert rig.stats.stale_results == 1
    rig.pool.release(rig.pool.allocate(1) or [])  # the queue moves: it is looked at again
    rig.store_all()
    rig.verify_stored(rig.digests["a"])
    assert rig.ledger.stored == 2, "and now it is"


def test_r81_what_was_reused_meanwhile_is_not_stored_under_its_old_name(open_rig: OpenRig) -> None:
    rig, _, job = hanging(open_rig)
    rig.clock.advance(60.0)
    rig.plan()
    rig.finish("b", rig.compute("b", prompt(500, 4)))
    assert rig.collect([CopyResult(job, (True, True))]) == []
    rig.store_all()
    assert rig.held(rig.digests["a"]) == [False, False]
    rig.verify_stored([digest for digest in rig.digests["b"] if rig.held([digest])[0]])
    assert rig.store.stats().leases == 0


def test_r81_closing_over_a_copy_that_was_given_up_keeps_its_slots(open_rig: OpenRig) -> None:
    rig, _, _ = hanging(open_rig)
    rig.clock.advance(60.0)
    rig.plan()
    rig.scheduler.close()
    assert rig.pins() == []
    assert rig.store.pool.usage().num_slots_leased == 2
    assert rig.ledger.pending == 0


def test_r81_a_clock_that_goes_back_gives_nothing_up(open_rig: OpenRig) -> None:
    rig, blocks, _ = hanging(open_rig)
    rig.clock.advance(-1000.0)
    rig.plan()
    assert rig.pins() == sorted(blocks)


def test_r81_a_clock_that_went_back_gives_a_copy_its_time_anew_and_no_more(open_rig: OpenRig) -> None:
    rig, _, _ = hanging(open_rig)
    rig.clock.advance(-1000.0)
    rig.plan()
    assert rig.poll().next_deadline == rig.clock.now() + 60.0
    rig.clock.advance(60.0)
    rig.plan()
    assert rig.pins() == []


def test_r81_an_engine_is_told_when_a_copy_is_given_up(open_rig: OpenRig) -> None:
    rig, blocks, _ = hanging(open_rig)
    deadline = rig.clock.now() + 60.0
    rig.clock.advance(10.0)
    assert rig.poll().next_deadline == deadline
    rig.clock.advance(50.0)
    assert rig.poll().next_deadline is None
    assert rig.pins() == [], f"{blocks} are free before this step needs them"


def test_r81_nothing_is_stored_behind_a_copy_that_was_given_up(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, policy="write_through")
    rig.finish("a", rig.compute("a", prompt(0, 2)))
    (job,) = rig.plan(submit=False).jobs
    rig.clock.advance(60.0)
    rig.finish("b", rig.compute("b", prompt(500, 2)))
    for _ in range(3):
        assert rig.plan().jobs == ()
        rig.clock.advance(60.0)
    assert (rig.pins(), rig.ledger.pending) == ([], 2)
    rig.collect([CopyResult(job.job_id, (True, True))])
    rig.plan()
    rig.copy_all()
    assert rig.held(rig.digests["b"]) == [True, True]


@pytest.mark.bug("PF11")
def test_r80_an_engine_goes_on_while_no_copy_ends(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8)
    for turn in range(300):
        size = 1 + turn % 4
        blocks = rig.compute("a", prompt(100 * turn, size))
        rig.finish("a", blocks)
        plan = rig.plan(step_budget=8, submit=False)
        assert plan.in_flight <= 4, "half the pool can always be had"
        assert rig.pool.num_free >= 4
        rig.clock.advance(1.0)
    dropped = rig.dropped
    assert dropped[DropReason.OVERTAKEN] > 0
    assert dropped[DropReason.COPY_TIMEOUT] > 0
    assert rig.ledger.due == sum(dropped.values()) + rig.ledger.pending
    assert rig.ledger.stored == 0
