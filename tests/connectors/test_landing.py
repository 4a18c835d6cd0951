"""The way up, second stage: a verdict per block, nothing usable before it, destinations that stay whose they are."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from kvtier.errors import IntegrityError
from kvtier.reasons import MissReason
from kvtier_connectors.contract import CopyDirection, CopyFailure, CopyJob, CopyResult, RestoreOutcome
from kvtier_engine.testing.rig import ConnectorRig

OpenRig = Callable[..., ConnectorRig]


def prompt(num_blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + 4 * num_blocks))


def with_stored(open_rig: OpenRig, stored: int, **kwargs: Any) -> ConnectorRig:
    """A rig whose host tier holds a prompt of `stored` blocks, and whose GPU pool has forgotten it."""
    rig = open_rig(**kwargs)
    rig.finish("before", rig.compute("before", prompt(stored)))
    rig.store_all()
    assert rig.ledger.stored == stored
    rig.pool.reset_cache()
    rig.runner.pool[:] = -1
    return rig


def begin(rig: ConnectorRig, request_id: str, num_blocks: int, first: int = 0) -> list[int]:
    """Admit a request and let its restore begin; the blocks it goes to."""
    rig.start(request_id, prompt(num_blocks + first))
    blocks = rig.pool.allocate(num_blocks)
    assert blocks is not None
    assert rig.scheduler.admit(request_id, first, num_blocks, blocks) == num_blocks
    return blocks


def restore_jobs(rig: ConnectorRig) -> list[CopyJob]:
    jobs = rig.plan().jobs
    assert {job.direction for job in jobs} == {CopyDirection.RESTORE}
    return list(jobs)


def test_what_was_stored_lands_bit_for_bit(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 3)
    blocks = begin(rig, "a", 3)
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 3)]
    rig.verify_landed(blocks, rig.digests["a"])
    assert (rig.stats.landed_blocks, rig.stats.failed_landings) == (3, 0)


def test_only_the_part_after_the_local_hit_lands(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 3)
    digests = rig.start("a", prompt(3))
    blocks = rig.pool.allocate(2)
    assert blocks is not None
    assert rig.scheduler.match("a", 1, 2).num_blocks == 2
    assert rig.scheduler.admit("a", 1, 2, blocks) == 2
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 1, 2)]
    rig.verify_landed(blocks, digests[1:])


def test_nothing_is_told_before_the_last_copy_ended(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connectors.copies.JOB_BYTES", 64)
    rig = with_stored(open_rig, 3)
    blocks = begin(rig, "a", 3)
    assert rig.collect() == []
    assert len(restore_jobs(rig)) == 3
    assert rig.collect() == []
    for position in (2, 0):
        rig.executor.run_next(position)
        assert rig.collect() == []
        assert rig.pins() == sorted(blocks)
    rig.executor.run_next()
    assert rig.collect() == [RestoreOutcome("a", 0, 3)]
    assert rig.pins() == []


@pytest.mark.parametrize(
    ("verdicts", "landed"),
    [
        ((True, True, True), 3),
        ((True, True, False), 2),
        ((True, False, True), 1),
        ((False, True, True), 0),
        ((), 0),
        ((True,), 1),
    ],
)
def test_r63_only_the_prefix_with_positive_verdicts_counts(
    open_rig: OpenRig, verdicts: tuple[bool, ...], landed: int
) -> None:
    rig = with_stored(open_rig, 3)
    begin(rig, "a", 3)
    (job,) = restore_jobs(rig)
    expected = RestoreOutcome("a", 0, landed, will_retry=landed < 3)
    assert rig.collect([CopyResult(job.job_id, verdicts)]) == [expected]
    assert (rig.stats.landed_blocks, rig.stats.failed_landings) == (landed, 3 - landed)
    assert rig.pins() == []
    assert rig.store.stats().leases == 0


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_r63_a_job_that_fails_ends_the_prefix_before_it(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    monkeypatch.setattr("kvtier_connectors.copies.JOB_BYTES", 64)
    rig = with_stored(open_rig, 3)
    begin(rig, "a", 3)
    results = [CopyResult(job.job_id, (True,)) for job in restore_jobs(rig)]
    results[failed] = CopyResult(results[failed].job_id, (False,), CopyFailure.RAISED)
    assert rig.collect(results[::-1]) == [RestoreOutcome("a", 0, failed, will_retry=True)]


def test_a_prefix_that_was_evicted_in_between_lands_as_far_as_it_goes(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 3)
    digests = rig.start("a", prompt(3))
    assert rig.scheduler.match("a", 0, 3).num_blocks == 3
    blocks = rig.pool.allocate(3)
    assert blocks is not None
    rig.store.host.remove([rig.space.digest + digests[2]])  # type: ignore[list-item]
    assert rig.scheduler.admit("a", 0, 3, blocks) == 2


@pytest.mark.bug("LK07", "CR01", "CR03")
def test_r71_destinations_stay_pinned_until_the_last_job_ended_whatever_became_of_the_request(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connectors.copies.JOB_BYTES", 64)
    rig = with_stored(open_rig, 2, num_blocks=4)
    blocks = begin(rig, "a", 2)
    rig.plan()
    rig.finish("a", blocks)
    rig.scheduler.finish_request("a")
    assert rig.pins() == sorted(blocks)
    assert rig.pool.num_free == 2
    rig.executor.run_next()
    rig.collect()
    assert rig.pins() == sorted(blocks)
    rig.executor.run_next()
    assert rig.collect() == [], "nobody waits for it"
    assert rig.pins() == []
    assert rig.pool.num_free == 4
    assert rig.store.stats().leases == 0


@pytest.mark.bug("LK07", "CR03")
def test_r74_an_id_used_again_does_not_hear_of_its_predecessor(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2, num_blocks=4)
    old_blocks = begin(rig, "a", 2)
    (old,) = restore_jobs(rig)
    rig.finish("a", old_blocks)
    new_blocks = begin(rig, "a", 2)
    assert not set(new_blocks) & set(old_blocks)
    (new,) = restore_jobs(rig)
    assert rig.collect([CopyResult(old.job_id, (False, False), CopyFailure.RAISED)]) == []
    assert rig.pins() == sorted(new_blocks)
    assert rig.collect([CopyResult(new.job_id, (True, True))]) == [RestoreOutcome("a", 0, 2)]
    assert rig.pins() == []


def test_r74_the_newer_may_end_first(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2, num_blocks=4)
    old_blocks = begin(rig, "a", 2)
    (old,) = restore_jobs(rig)
    rig.finish("a", old_blocks)
    begin(rig, "a", 2)
    (new,) = restore_jobs(rig)
    assert rig.collect([CopyResult(new.job_id, (True, True))]) == [RestoreOutcome("a", 0, 2)]
    assert rig.pins() == sorted(old_blocks)
    assert rig.collect([CopyResult(old.job_id, (True, True))]) == []
    assert rig.pins() == []


@pytest.mark.bug("CR01", "LK07")
def test_r73_results_twice_late_or_from_nowhere_are_counted_and_ignored(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    (job,) = restore_jobs(rig)
    result = CopyResult(job.job_id, (True, True))
    assert len(rig.collect([result, result])) == 1
    assert rig.collect([result, CopyResult(999, (True,))]) == []
    assert rig.stats.stale_results == 3
    assert rig.stats.landed_blocks == 2
    assert [record.getMessage().count("is ignored") for record in caplog.records] == [1], "one line for all"


@pytest.mark.bug("WR23")
def test_r76_a_reset_during_a_landing_lets_nothing_land(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    rig.plan()
    rig.scheduler.reset()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 0)]
    assert rig.pins() == []
    rig.start("b", prompt(2))
    assert rig.scheduler.match("b", 0, 2).num_blocks == 0


@pytest.mark.bug("WR23")
def test_r76_a_reset_of_a_shared_store_by_another_engine_counts_too(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    rig.plan()
    rig.store.reset()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 0)]


@pytest.mark.bug("WR23")
def test_when_the_store_cannot_forget_nothing_of_before_is_served(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    rig.plan()

    def refuse() -> int:
        raise OSError("the tier is gone")

    monkeypatch.setattr(rig.store, "reset", refuse)
    rig.scheduler.reset()
    assert "connector.reset failed" in caplog.text
    assert rig.copy_all() == [RestoreOutcome("a", 0, 0)]
    rig.start("b", prompt(2))
    assert rig.scheduler.match("b", 0, 2).num_blocks == 0
    rig.finish("c", rig.compute("c", prompt(2, start=100)))
    rig.store_all()
    assert rig.ledger.stored == 2, "and nothing is added to what could not be forgotten"
    monkeypatch.undo()
    rig.scheduler.reset()
    assert rig.scheduler.match("b", 0, 2).miss is not MissReason.RESTORE_OFF


def test_the_worker_has_so_many_blocks_at_once_and_the_rest_follows(open_rig: OpenRig) -> None:
    """No restore is cut short by the bound, however long it is."""
    rig = with_stored(open_rig, 4, num_blocks=12, restore__max_inflight_blocks=3)
    for name in ("a", "b"):
        rig.start(name, prompt(4))
        blocks = rig.pool.allocate(4)
        assert blocks is not None
        assert rig.scheduler.admit(name, 0, 4, blocks) == 4
    assert len(rig.pins()) == 8
    assert [len(job.block_ids) for job in rig.plan().jobs] == [4], "one job in any case"
    assert rig.plan().jobs == (), "the other waits for its end"
    assert rig.copy_all() == [RestoreOutcome("a", 0, 4)]
    assert len(rig.plan().jobs) == 1
    assert rig.copy_all() == [RestoreOutcome("b", 0, 4)]
    assert rig.stats.in_flight_blocks == 0
    assert rig.pins() == []


def test_what_waits_for_the_worker_ends_with_a_close(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 4, num_blocks=12, restore__max_inflight_blocks=3)
    for name in ("a", "b"):
        rig.start(name, prompt(4))
        blocks = rig.pool.allocate(4)
        assert blocks is not None
        rig.scheduler.admit(name, 0, 4, blocks)
    rig.plan()
    rig.close()
    assert rig.pins() == []
    assert rig.stats.in_flight_blocks == 0


@pytest.mark.bug("LK08")
def test_the_budget_comes_back_on_every_way_out(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2, num_blocks=6, restore__max_inflight_blocks=2)
    for turn in range(200):
        blocks = begin(rig, "a", 2)
        match turn % 4:
            case 0:  # before its copy was handed out
                rig.finish("a", blocks)
                rig.plan()
            case 1:  # while it is copied
                rig.plan()
                rig.finish("a", blocks)
            case 2:  # landed
                rig.plan()
                assert len(rig.copy_all()) == 1
                rig.finish("a", blocks)
            case 3:  # its copy failed
                (job,) = rig.plan(submit=False).jobs
                rig.collect([CopyResult(job.job_id, (), CopyFailure.BACKLOG)])
                rig.finish("a", blocks)
        rig.copy_all()
        assert rig.stats.in_flight_blocks == 0
        assert rig.pool.num_free == 6
        assert rig.store.stats().leases == 0


def test_leased_slots_are_not_evicted_under_a_copy(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2, num_blocks=8, host_blocks=2)
    blocks = begin(rig, "a", 2)
    rig.plan()
    rig.finish("b", rig.compute("b", prompt(2, start=100)))
    rig.plan(step_budget=8)
    assert rig.copy_all() == [RestoreOutcome("a", 0, 2)]
    rig.verify_landed(blocks, rig.digests["a"])


@pytest.mark.bug("PF11")
def test_a_miss_reserves_nothing(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.start("a", prompt(3))
    assert rig.scheduler.match("a", 0, 3).miss is MissReason.ABSENT
    blocks = rig.pool.allocate(3)
    assert blocks is not None
    assert rig.scheduler.admit("a", 0, 3, blocks) == 0
    assert rig.pins() == []
    assert rig.store.stats().leases == 0
    assert rig.store.stats().host_used_bytes == 0
    assert rig.plan().in_flight == 0


def test_closing_ends_what_is_under_way(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    rig.plan()
    rig.scheduler.complete(rig.worker.close(1.0))
    rig.scheduler.close()
    assert rig.pins() == []
    assert rig.store.stats().leases == 0
    assert rig.stats.failed_landings == 2


def test_closing_over_a_worker_that_says_nothing(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    rig.plan(submit=False)
    pinned = rig.pins()
    rig.scheduler.close()
    rig.scheduler.close()
    assert rig.pins() == pinned, "a copy that may still run keeps its destination"
    assert rig.store.stats().leases == len(pinned) == 2, "and its slot"
    assert rig.stats.in_flight_blocks == 0


def test_the_check_sees_a_lost_block(open_rig: OpenRig) -> None:
    rig = with_stored(open_rig, 2)
    begin(rig, "a", 2)
    rig.scheduler._restores.landings._num_copying += 1
    with pytest.raises(IntegrityError, match="landing"):
        rig.scheduler.check_integrity()
    rig.scheduler._restores.landings._num_copying -= 1


@pytest.mark.parametrize("seconds", [None, "soon", nan, inf, -1.0, 10**400, [1.0]])
def test_r73_a_time_that_is_none_keeps_no_block(open_rig: OpenRig, seconds: Any) -> None:
    rig = with_stored(open_rig, 2)
    blocks = begin(rig, "a", 2)
    (job,) = rig.plan(submit=False).jobs
    assert rig.collect([CopyResult(job.job_id, (True, True), seconds=seconds)]) == [RestoreOutcome("a", 0, 2)]
    assert rig.pins() == []
    assert (rig.store.stats().leases, rig.stats.in_flight_blocks, rig.store.stats().errors) == (0, 0, {})
    rig.finish("a", blocks)
