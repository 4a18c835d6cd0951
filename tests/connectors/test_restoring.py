"""Restores of a connector whose blocks are on disk: every wait has an end, and each end lets go of everything."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Settings
from kvtier.keys import make_key
from kvtier.reasons import MissReason
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.tiers.base import ReadOutcome, ReadRequest
from kvtier_connectors import arriving
from kvtier_connectors.contract import (
    CopyFailure,
    CopyResult,
    KVOptions,
    Match,
    RequestInfo,
    RestoreOutcome,
    StepDemand,
    StepWork,
)
from kvtier_engine.testing import ScriptedConnector
from kvtier_engine.testing.rig import ENOUGH_MEMORY, ConnectorRig, EngineRig

STAGING = Match(0, None, is_staging=True)
NO_DEMAND = StepDemand(0, 0, 0, StepWork(0, 0.0, 0.0, 0))
AT_ONCE = KVOptions(max_wait_s=3600.0)


def prompt(num_blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + 4 * num_blocks))


class Rig(ConnectorRig):
    """A connector over a disk whose jobs run when told, and whose reads may be told to fail."""

    def __init__(self, path: Path, num_blocks: int = 16, host_blocks: int = 32, **overrides: Any) -> None:
        self.disk_jobs = ManualExecutor()
        self.blocks: dict[str, list[int]] = {}
        clock = FakeClock()

        def make_store(settings: Settings) -> Store:
            return Store(settings, memory=ENOUGH_MEMORY, touch=False, clock=clock, disk_executor=self.disk_jobs)

        disk: dict[str, Any] = {"disk__path": [str(path)], "disk__size": "4MiB", "disk__min_free": 1}
        settings = disk | {"restore__max_wait_s": 5.0} | overrides
        super().__init__(num_blocks, host_blocks, "on_evict", make_store=make_store, clock=clock, **settings)
        self.failing: list[ReadOutcome] = []
        tier = self.store.lower[0]._meter._inner
        read = tier.read

        def maybe_failing(requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
            outcomes = read(requests)
            return [self.failing.pop(0) if self.failing else outcome for outcome in outcomes]

        tier.read = maybe_failing  # type: ignore[method-assign]
        self.compute_slowly()

    def compute_slowly(self) -> None:
        """A token takes a second, so that every restore is worth its wait."""
        self.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(1000, 0.0, 1000.0, 0)))

    def measure_disk(self) -> None:
        """A block takes a tenth of a second, so that none that waits is computed for want of a measurement."""
        self.start("measures", prompt(1, 900))
        self.clock.advance(0.1)
        self.disk_jobs.run_all()
        self.poll()
        self.end("measures")

    def decode(self, seconds: float) -> None:
        """Steps that compute no prompt, for so long."""
        for _ in range(10):
            self.clock.advance(seconds / 10)
            self.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(0, 0.0, seconds / 10, 0)))
            self.poll()

    def put_on_disk(self, *prompts: Sequence[int]) -> None:
        """Store prompts, and leave them on disk alone."""
        for number, tokens in enumerate(prompts):
            self.finish(f"before {number}", self.compute(f"before {number}", tokens))
            self.store_all()
            self.disk_jobs.run_all()
            for namespace in self.store.host.namespaces():
                self.store.host.reset(namespace)
            self.pool.reset_cache()
            self.plan()

    def admit(self, request_id: str, num_blocks: int, first: int = 0) -> int:
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None
        self.blocks[request_id] = blocks
        num_landing = self.scheduler.admit(request_id, first, num_blocks, blocks)
        self.check_integrity()
        return num_landing

    def end(self, request_id: str) -> None:
        self.finish(request_id, self.blocks.pop(request_id, []))
        self.check_integrity()

    def is_staging(self, request_id: str, num_local: int = 0) -> bool:
        return self.scheduler.match(request_id, num_local, 8).is_staging

    def verify_quiet(self) -> None:
        """Nothing is pinned, leased, or under way."""
        while self.disk_jobs.run_all() + self.executor.run_all():
            self.collect()
        self.poll()
        self.check_integrity()
        assert self.pins() == []
        assert self.pool.num_free == self.pool.num_blocks
        assert self.store.stats().leases == self.store.stats().staging_bytes == 0
        assert self.poll().num_active == self.stats.in_flight_blocks == self.ledger.pending == 0
        assert not len(self.scheduler._restores.arrivals._keeper)


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**kwargs: Any) -> Rig:
        rigs.append(Rig(tmp_path / f"disk {len(rigs)}", **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


OpenDisk = Callable[..., Rig]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "kvtier.restore" and r.levelno >= logging.WARNING]


# ---- the way of one request ------------------------------------------------------------------------------------------


def test_a_request_waits_is_named_once_and_lands(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3))
    assert rig.scheduler.match("a", 0, 3) == STAGING
    poll = rig.poll()
    assert (poll.ready, poll.outcomes, poll.num_active) == ((), (), 1)
    assert poll.next_deadline == rig.clock.now() + 5.0
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.poll().ready == ()
    assert rig.scheduler.match("a", 0, 3) == Match(3, None)
    assert rig.admit("a", 3) == 3
    assert rig.pool.holders() == {"restore of a": 3}
    rig.plan()
    assert rig.poll().num_active == 1
    assert rig.copy_all() == [RestoreOutcome("a", 0, 3)]
    rig.verify_landed(rig.blocks["a"], rig.digests["a"])
    rig.end("a")
    rig.verify_quiet()
    assert rig.store.stats().hits == {"disk": 3}
    assert rig.stats.restore.tier_rates.keys() >= {"disk"}


@pytest.mark.bug("PF11")
def test_a_miss_waits_for_nothing_and_is_never_named(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.start("a", prompt(3))
    assert rig.scheduler.match("a", 0, 3) == Match(0, MissReason.ABSENT)
    assert rig.poll().num_active == 0
    assert len(rig.disk_jobs) == 0
    assert rig.store.stats().host_used_bytes == 0
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.bug("AC13")
def test_who_opts_out_is_not_looked_up_and_counts_nowhere(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    before = rig.store.stats()
    rig.start("a", prompt(3), options=KVOptions(restore=False))
    assert rig.scheduler.match("a", 0, 3) == Match(0, MissReason.RESTORE_OFF)
    assert rig.poll().num_active == 0
    assert rig.admit("a", 3) == 0
    stats = rig.store.stats()
    assert (stats.lookups, stats.asked_blocks, stats.misses) == (before.lookups, before.asked_blocks, before.misses)
    assert rig.stats.restore.decisions == {}
    rig.end("a")
    rig.verify_quiet()


def test_asking_changes_nothing(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3))
    rig.start("b", prompt(3, 500))
    before = (rig.store.stats(), rig.stats, len(rig.disk_jobs))
    for _ in range(20):
        rig.scheduler.match("a", 0, 3)
        rig.scheduler.match("b", 0, 3)
    assert (rig.store.stats(), rig.stats, len(rig.disk_jobs)) == before
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    rig.end("a")
    rig.end("b")
    rig.verify_quiet()


# ---- failures and retries --------------------------------------------------------------------------------------------


@pytest.mark.bug("WR20")
def test_r64_a_failed_stage_is_looked_up_again_and_what_is_left_lands(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.failing = [ReadOutcome.OK, ReadOutcome.ERROR]
    rig.start("a", prompt(3))
    rig.disk_jobs.run_all()
    assert rig.poll().ready == (), "it is read once more"
    assert rig.is_staging("a")
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.scheduler.match("a", 0, 3) == Match(3, None)
    assert rig.admit("a", 3) == 3
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 3)]
    assert warnings_of(caplog) == []
    rig.end("a")
    rig.verify_quiet()


def test_r64_attempts_end_and_one_warning_says_so(open_disk: OpenDisk, caplog: pytest.LogCaptureFixture) -> None:
    rig = open_disk(restore__max_attempts=3)
    rig.put_on_disk(prompt(2))
    rig.failing = [ReadOutcome.ERROR] * 100
    rig.start("a", prompt(2))
    for _ in range(3):
        assert rig.is_staging("a")
        assert rig.disk_jobs.run_all()
        rig.poll()
    assert not rig.is_staging("a")
    assert rig.admit("a", 2) == 0
    (message,) = warnings_of(caplog)
    assert "tier_error" in message
    assert rig.store.stats().fallbacks == {"tier_error": 1}
    rig.end("a")
    rig.verify_quiet()


def test_r64_copies_that_fail_are_tried_again_behind_what_landed(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3))
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.admit("a", 3) == 3
    (job,) = rig.plan(submit=False).jobs
    assert rig.collect([CopyResult(job.job_id, (True, False, True))]) == [RestoreOutcome("a", 0, 1, will_retry=True)]
    blocks = rig.blocks.pop("a")
    rig.pool.release(blocks)
    assert rig.is_staging("a", 1)
    assert rig.poll().ready == ("a",)
    assert rig.scheduler.match("a", 1, 2) == Match(2, None)
    lookups = rig.store.stats().lookups
    assert rig.admit("a", 2, first=1) == 2
    assert rig.store.stats().lookups == lookups, "counted once"
    assert rig.stats.readmissions == 0
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 1, 2)]
    rig.verify_landed(rig.blocks["a"], rig.digests["a"][1:])
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_r72_a_stage_that_always_fails_ends_the_wait(open_disk: OpenDisk, on_failure: str) -> None:
    rig = open_disk(restore__max_attempts=2, restore__on_failure=on_failure)
    rig.put_on_disk(prompt(2))
    rig.failing = [ReadOutcome.ERROR] * 100
    rig.start("a", prompt(2))
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ()
    rig.disk_jobs.run_all()
    poll = rig.poll()
    assert (poll.ready, poll.failed) == ((("a",), ()) if on_failure == "recompute" else ((), ("a",)))
    rig.end("a")
    rig.verify_quiet()


def test_r50_what_is_computed_faster_by_now_is_not_copied(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2), prompt(2, 100))
    for name, start in (("a", 0), ("b", 100)):
        rig.start(name, prompt(2, start))
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.admit("a", 2) == 2
    (job,) = rig.plan(submit=False).jobs
    rig.collect([CopyResult(job.job_id, (True, True), seconds=1.0)])
    assert rig.scheduler.match("b", 0, 2) == Match(2, None)
    for _ in range(200):
        rig.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(1000, 0.0, 0.01, 0)))
    assert rig.scheduler.match("b", 0, 2) == Match(0, MissReason.COST)
    assert rig.admit("b", 2) == 0
    assert rig.store.stats().misses["cost"] == 2
    rig.end("a")
    rig.end("b")
    rig.verify_quiet()


@pytest.mark.bug("WR20")
@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_r72_copies_that_always_fail_end_the_restore(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture, on_failure: str
) -> None:
    rig = open_disk(restore__max_attempts=3, restore__on_failure=on_failure)
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2))
    rig.disk_jobs.run_all()
    outcomes: list[RestoreOutcome] = []
    for _ in range(3):
        assert rig.poll().ready == ("a",)
        assert rig.admit("a", 2) == 2
        (job,) = rig.plan(submit=False).jobs
        outcomes += rig.collect([CopyResult(job.job_id, (), CopyFailure.RAISED)])
        rig.pool.release(rig.blocks.pop("a"))
    assert [outcome.will_retry for outcome in outcomes] == [True, True, False]
    assert [outcome.must_fail for outcome in outcomes] == [False, False, on_failure == "fail"]
    assert rig.scheduler.match("a", 0, 2) == Match(0, MissReason.LAND_FAILED)
    assert len(warnings_of(caplog)) == 1
    rig.end("a")
    rig.verify_quiet()


# ---- what goes wrong within ------------------------------------------------------------------------------------------


class Raises:
    """In the place of a method: raises at the first call for `request_id`, if one is given, or at the first."""

    def __init__(self, real: Callable[..., Any], request_id: str | None = None) -> None:
        self._real, self._request_id, self.num_raised = real, request_id, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_meant = self._request_id is None or args[0].request_id == self._request_id
        if is_meant and not self.num_raised:
            self.num_raised += 1
            raise MemoryError("once")
        return self._real(*args, **kwargs)


def test_r72_a_poll_in_which_something_raises_loses_no_name(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2))
    rig.disk_jobs.run_all()
    flow = rig.scheduler._restores
    for target, name in ((flow.decision, "tick"), (flow, "_next_deadline")):
        monkeypatch.setattr(target, name, Raises(getattr(target, name)))
    assert rig.poll().ready + rig.poll().ready == ("a",)
    assert rig.poll().ready == ()
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.parametrize("broken", ["a", "b"])
def test_r72_who_cannot_be_polled_keeps_no_other_from_its_end(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2), prompt(2, 500))
    rig.start("a", prompt(2))
    rig.start("b", prompt(2, 500))
    rig.disk_jobs.run_all()
    decision = rig.scheduler._restores.decision
    for name in ("staged", "end"):
        monkeypatch.setattr(decision, name, Raises(getattr(decision, name), broken))
    named = [*rig.poll().ready, *rig.poll().ready]  # the broken one's blocks are read again
    rig.disk_jobs.run_all()
    assert sorted([*named, *rig.poll().ready]) == ["a", "b"]
    rig.end("a")
    rig.end("b")
    rig.verify_quiet()


@pytest.mark.parametrize("broken", ["a", "b"])
def test_r72_a_landing_that_cannot_be_polled_keeps_no_other_from_its_end(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    rig = open_disk(restore__episode_budget_s=4.0)
    rig.put_on_disk(prompt(2), prompt(2, 500))
    for name, tokens in (("a", prompt(2)), ("b", prompt(2, 500))):
        rig.start(name, tokens)
    rig.disk_jobs.run_all()
    rig.poll()
    assert [rig.admit(name, 2) for name in ("a", "b")] == [2, 2]
    rig.plan()
    rig.clock.advance(10.0)
    decision = rig.scheduler._restores.decision
    monkeypatch.setattr(decision, "poll", Raises(decision.poll, broken))
    outcomes = [*rig.poll().outcomes, *rig.poll().outcomes]
    assert sorted(outcome.request_id for outcome in outcomes) == ["a", "b"]
    rig.copy_all()
    rig.end("a")
    rig.end("b")
    rig.verify_quiet()


# ---- waits that end --------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS01")
def test_r65_a_tier_that_never_answers_is_waited_for_once(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    rig.start("slow", prompt(2), options=KVOptions(max_wait_s=0.2))
    assert rig.poll().next_deadline == rig.clock.now() + 0.2
    rig.clock.advance(0.2)
    assert rig.poll().ready == ("slow",)
    assert rig.admit("slow", 2) == 0
    (message,) = warnings_of(caplog)
    for word in ("slow", "disk", "timeout", "0.200 s"):
        assert word in message
    assert rig.store.stats().fallbacks == {"timeout": 1}
    before = rig.runner.pool.copy()
    rig.disk_jobs.run_all()
    assert (rig.runner.pool == before).all()
    rig.end("slow")
    rig.verify_quiet()


def test_r65_what_came_after_it_was_told_to_be_computed_is_computed(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2), options=KVOptions(max_wait_s=0.2))
    rig.clock.advance(0.2)
    assert rig.poll().ready == ("a",)
    rig.start("b", prompt(2))
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.scheduler.match("b", 0, 2) == Match(2, None)
    assert rig.scheduler.match("a", 0, 2) == Match(0, MissReason.TIMEOUT)
    assert rig.admit("a", 2) == 0
    assert rig.admit("b", 2) == 2
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("b", 0, 2)]
    assert len(warnings_of(caplog)) == 1
    assert rig.stats.restore.fallback_blocks == 2
    rig.end("a")
    rig.end("b")
    rig.verify_quiet()


def test_r72_copies_that_never_end_are_given_up_when_the_budget_is_over(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk(restore__episode_budget_s=4.0)
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2))
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.admit("a", 2) == 2
    (job,) = rig.plan(submit=False).jobs
    deadline = rig.poll().next_deadline
    assert deadline is not None
    rig.clock.advance(deadline - rig.clock.now() - 0.001)
    assert rig.poll().outcomes == ()
    rig.clock.advance(0.001)
    poll = rig.poll()
    assert poll.outcomes == (RestoreOutcome("a", 0, 0, is_abandoned=True),)
    assert (poll.num_active, poll.next_deadline) == (0, None)
    assert len(warnings_of(caplog)) == 1
    blocks = rig.blocks.pop("a")
    rig.pool.release(blocks)
    assert rig.pins() == sorted(blocks), "copies may still write them"
    assert rig.store.stats().leases == 2
    assert rig.collect([CopyResult(job.job_id, (True, True))]) == []
    assert rig.pins() == []
    assert rig.scheduler.match("a", 0, 2) == Match(0, MissReason.BUDGET)
    rig.end("a")
    rig.verify_quiet()


def open_expired(open_disk: OpenDisk, **overrides: Any) -> Rig:
    """A rig in which "a", of two blocks, has waited for GPU blocks for as long as it may."""
    rig = open_disk(restore__capacity_bound_s=30.0, **overrides)
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2))
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.scheduler.refuse_restore("a")
    assert rig.stats.restore.capacity_waiters == 1
    poll = rig.poll()
    assert (poll.num_active, poll.next_deadline) == (0, rig.clock.now() + 30.0)
    rig.clock.advance(29.0)
    assert rig.scheduler.refuse_restore("a")
    rig.clock.advance(1.0)
    assert not rig.scheduler.refuse_restore("a")
    assert rig.poll().next_deadline is None
    assert rig.stats.restore.capacity_waiters == 0
    return rig


def test_r48_what_was_staged_in_time_lands_after_the_bound_and_no_wait_begins_anew(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_expired(open_disk)
    rig.clock.advance(3600.0)
    assert rig.poll().num_active == 0
    assert rig.store.stats().leases == 2
    assert not rig.scheduler.refuse_restore("a"), "its wait is over for good"
    assert rig.scheduler.match("a", 0, 2).num_blocks == 2
    assert rig.admit("a", 2) == 2
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 2)]
    assert (len(warnings_of(caplog)), rig.stats.restore.fallbacks) == (1, {"capacity": 1})
    rig.end("a")
    rig.verify_quiet()


def test_r48_what_has_left_host_memory_by_then_is_not_looked_for(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_expired(open_disk)
    for namespace in rig.store.host.namespaces():
        rig.store.host.reset(namespace)
    rig.clock.advance(3600.0)
    rig.poll()
    assert (rig.poll().num_active, len(rig.disk_jobs)) == (0, 0)
    assert rig.scheduler.match("a", 0, 2) == Match(0, MissReason.CAPACITY)
    assert rig.admit("a", 2) == 0
    assert rig.store.stats().misses["capacity"] == 2
    assert len(warnings_of(caplog)) == 1
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_r48_a_copy_that_fails_after_the_bound_is_not_tried_again(
    on_failure: str, open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it fail the request, which was told to be computed."""
    rig = open_expired(open_disk, restore__on_failure=on_failure)
    assert rig.admit("a", 2) == 2
    (job,) = rig.plan().jobs
    assert rig.collect([CopyResult(job.job_id, (), CopyFailure.BACKLOG)]) == [RestoreOutcome("a", 0, 0)]
    assert (rig.poll().num_active, rig.is_staging("a")) == (0, False)
    assert len(warnings_of(caplog)) == 1
    rig.end("a")
    rig.verify_quiet()


def test_r55_what_will_never_fit_is_refused_at_once(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2))
    rig.disk_jobs.run_all()
    rig.poll()
    assert not rig.scheduler.refuse_restore("a", is_permanent=True)
    assert not rig.scheduler.refuse_restore("nobody")
    rig.end("a")
    rig.verify_quiet()


def test_r66_what_waits_without_a_lease_is_looked_up_again_and_staged_again_when_it_is_lost(
    open_disk: OpenDisk,
) -> None:
    rig = open_disk(host_blocks=3)  # of which a third may be kept for those that wait
    rig.finish("first", rig.compute("first", prompt(2)))
    rig.store_all()
    rig.disk_jobs.run_all()
    rig.pool.reset_cache()
    rig.plan()
    rig.start("a", prompt(2))
    assert rig.store.stats().leases == 0
    assert rig.scheduler.match("a", 0, 2) == Match(2, None), "in host memory at once"
    for namespace in rig.store.host.namespaces():
        rig.store.host.reset(namespace)
    rig.clock.advance(9.0)
    assert rig.poll().num_active == 0
    rig.clock.advance(1.0)
    assert rig.poll().num_active == 1, "half the answer's lifetime is over"
    assert rig.is_staging("a")
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.scheduler.match("a", 0, 2).num_blocks == 1, "as much as one stage may bring"
    rig.end("a")
    rig.verify_quiet()


# ---- turns -----------------------------------------------------------------------------------------------------------


def open_full(open_disk: OpenDisk, **overrides: Any) -> Rig:
    """A rig whose host memory keeps what it may, the four blocks of "first", which waits for the engine; "second"
    waits for its turn to be staged."""
    rig = open_disk(host_blocks=8, **overrides)
    rig.put_on_disk(prompt(4), prompt(4, 100), prompt(4, 200))
    rig.start("first", prompt(4))
    rig.start("second", prompt(4, 100))
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("first",)
    assert (rig.store.stats().leases, len(rig.disk_jobs)) == (4, 0)
    return rig


def serve(rig: Rig, request_id: str, num_blocks: int = 4) -> None:
    """Have the engine admit it with all of its blocks, and end it."""
    assert rig.scheduler.match(request_id, 0, num_blocks) == Match(num_blocks, None)
    assert rig.admit(request_id, num_blocks) == num_blocks
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome(request_id, 0, num_blocks)]
    rig.end(request_id)


def test_no_time_counts_while_those_before_it_wait_for_the_engine(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_full(open_disk)
    rig.decode(300.0)
    assert rig.is_staging("second")
    serve(rig, "first")
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("second",)
    serve(rig, "second")
    assert warnings_of(caplog) == []
    rig.verify_quiet()


def test_time_counts_while_the_engine_computes_nothing(open_disk: OpenDisk, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever keeps the first from running: the engine learns that the second waits for nothing that will come."""
    rig = open_full(open_disk)
    rig.decode(300.0)
    rig.scheduler.plan_step([], NO_DEMAND)
    rig.clock.advance(4.9)
    assert rig.poll().ready == ()
    rig.clock.advance(0.2)
    assert rig.poll().ready == ("second",)
    assert ["(timeout)" in line for line in warnings_of(caplog)] == [True]
    for name in ("first", "second"):
        rig.end(name)
    rig.verify_quiet()


def test_nobody_is_excused_of_what_was_before_it(open_disk: OpenDisk, caplog: pytest.LogCaptureFixture) -> None:
    rig = open_full(open_disk)
    rig.decode(300.0)
    for name in ("second", "first"):
        rig.end(name)
    rig.start("a", prompt(4, 100))
    rig.start("b", prompt(4, 200))
    rig.clock.advance(5.1)
    assert set(rig.poll().ready) == {"a", "b"}, "the device gave nothing back in time"
    assert ["(timeout)" in line for line in warnings_of(caplog)] == [True, True]
    for name in ("a", "b"):
        rig.end(name)
    rig.verify_quiet()


def test_the_time_before_and_after_counts(open_disk: OpenDisk, caplog: pytest.LogCaptureFixture) -> None:
    """It may wait for 5 s in all; for a tier that reads for others, and once its own turn has come."""
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(4), prompt(4, 100))
    rig.start("first", prompt(4))
    rig.start("second", prompt(4, 100))
    rig.clock.advance(3.0)
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("first",)
    rig.decode(100.0)
    rig.end("first")
    rig.poll()
    rig.clock.advance(1.9)
    assert rig.poll().ready == ()
    rig.clock.advance(0.2)
    assert rig.poll().ready == ("second",), "its time is over"
    assert ["(timeout)" in line for line in warnings_of(caplog)] == [True]
    rig.end("second")
    rig.verify_quiet()


def test_at_its_turn_it_goes_for_what_is_held_by_then(open_disk: OpenDisk, caplog: pytest.LogCaptureFixture) -> None:
    rig = open_full(open_disk)
    rig.start("third", prompt(4, 200))
    tier = rig.store.lower[0].tier
    tier.remove([make_key(rig.space.digest, digest) for digest in rig.digests["second"][2:]])
    tier.remove([make_key(rig.space.digest, digest) for digest in rig.digests["third"]])
    rig.decode(100.0)
    rig.end("first")
    assert rig.poll().ready == ()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("second",)
    assert rig.scheduler.match("second", 0, 4).num_blocks == 2
    rig.end("second")
    assert rig.poll().ready == ("third",), "nothing is left for it"
    assert rig.scheduler.match("third", 0, 4).num_blocks == 0
    assert warnings_of(caplog) == []
    rig.end("third")
    rig.verify_quiet()


def test_who_came_first_is_staged_first_though_it_lost_its_place(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(4), prompt(4, 100))
    rig.start("first", prompt(4), num_local_blocks=4)  # the engine has it all
    rig.start("second", prompt(4, 100))
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("second",)
    assert rig.scheduler.match("first", 0, 4) == STAGING, "and by now has none of it"
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("first",)
    assert rig.store.stats().leases == 4, "kept for the first, no longer for the second"
    serve(rig, "first")
    assert rig.scheduler.match("second", 0, 4) == Match(4, None), "which is still there, as it happens"
    serve(rig, "second")
    assert warnings_of(caplog) == []
    rig.verify_quiet()


def test_what_was_taken_from_a_later_one_is_staged_anew_when_it_is_lost(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(4), prompt(4, 100))
    rig.start("first", prompt(4), num_local_blocks=4)
    rig.start("second", prompt(4, 100))
    rig.disk_jobs.run_all()
    rig.poll()
    rig.scheduler.match("first", 0, 4)
    rig.poll()
    rig.disk_jobs.run_all()
    rig.poll()
    for namespace in rig.store.host.namespaces():
        rig.store.host.remove([make_key(namespace, digest) for digest in rig.digests["second"]])
    rig.clock.advance(30.0)
    rig.poll()
    assert rig.is_staging("second"), "looked up again, and waits for its turn"
    serve(rig, "first")
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("second",)
    serve(rig, "second")
    rig.verify_quiet()


def test_nobody_lets_go_of_what_would_help_nobody(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(3), prompt(4, 100), prompt(1, 200))
    rig.start("first", prompt(3))
    rig.start("second", prompt(4, 100), num_local_blocks=4)  # the engine has it all
    rig.start("third", prompt(1, 200))
    rig.disk_jobs.run_all()
    rig.poll()
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.store.stats().leases == 4
    assert rig.scheduler.match("second", 0, 4) == STAGING, "and by now has none of it"
    for _ in range(3):
        rig.poll()
        rig.disk_jobs.run_all()
    assert rig.is_staging("second")
    assert rig.store.stats().leases == 4, "the first goes before it, and without its three no four are to be had"
    serve(rig, "first", 3)
    rig.poll()
    assert rig.store.stats().leases == 0, "now the third one gave way"
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("second",)
    serve(rig, "second")
    serve(rig, "third", 1)
    rig.verify_quiet()


def test_who_is_to_be_computed_keeps_nothing(open_disk: OpenDisk, caplog: pytest.LogCaptureFixture) -> None:
    """Its stage came to nothing in time: who waits behind it has the room at once, though it is not admitted yet."""
    rig = open_disk(host_blocks=8, disk__timeout_s=60.0)
    rig.put_on_disk(prompt(4), prompt(4, 100), prompt(1, 900))
    rig.measure_disk()
    rig.start("first", prompt(4))
    rig.clock.advance(4.0)
    rig.start("second", prompt(4, 100))
    rig.clock.advance(1.0)
    assert rig.poll().ready == ("first",)
    rig.disk_jobs.run_all()  # the device is well again
    assert rig.poll().ready == ("second",)
    serve(rig, "second")
    assert ["(timeout)" in line for line in warnings_of(caplog)] == [True]
    rig.end("first")
    rig.verify_quiet()


def test_who_waits_to_be_staged_again_keeps_nothing(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(3), prompt(4, 100))
    rig.start("later", prompt(3))
    rig.start("urgent", prompt(4, 100), options=KVOptions(priority=-1))
    rig.failing = [ReadOutcome.OK, ReadOutcome.OK, ReadOutcome.ERROR]
    rig.disk_jobs.run_all()
    rig.poll()
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("urgent",)
    serve(rig, "urgent")
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("later",)
    serve(rig, "later", 3)
    rig.verify_quiet()


def test_when_the_first_of_them_ends_the_next_is_looked_at(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(2), prompt(4, 100), prompt(2, 200))
    rig.start("kept", prompt(2))
    rig.disk_jobs.run_all()
    rig.poll()
    rig.start("large", prompt(4, 100))
    rig.start("small", prompt(2, 200))
    rig.poll()
    assert len(rig.disk_jobs) == 0, "there is room for the small one, which comes behind the large one"
    rig.end("large")
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("small",)
    for name in ("kept", "small"):
        serve(rig, name, 2)
    rig.verify_quiet()


def test_a_device_that_hangs_keeps_all_of_them_for_no_longer_than_one(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Though one that was staged before waits for the engine, which computes: what is in the way is the device."""
    rig = open_disk(host_blocks=8, disk__timeout_s=60.0)
    rig.put_on_disk(prompt(1), *(prompt(3, 100 * number) for number in range(1, 6)), prompt(1, 900))
    rig.measure_disk()
    rig.start("kept", prompt(1))
    rig.disk_jobs.run_all()
    rig.poll()
    names = [f"waits {number}" for number in range(1, 6)]
    for number, name in enumerate(names, 1):
        rig.start(name, prompt(3, 100 * number))
    rig.decode(4.9)
    assert all(map(rig.is_staging, names))
    rig.decode(1.5)  # of which a second showed that nothing is read any more
    assert not any(map(rig.is_staging, names))
    assert ["(timeout)" in line for line in warnings_of(caplog)] == [True] * 5
    for name in ("kept", *names):
        rig.end(name)
    rig.verify_quiet()


def test_nobody_lets_go_of_what_others_keep_too(open_disk: OpenDisk) -> None:
    """Those behind it share their blocks with one before it: without them there is no more room than with them."""
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(3), prompt(4, 100))
    rig.start("first", prompt(3))
    rig.start("second", prompt(4, 100), num_local_blocks=4)
    for number in range(3):
        rig.start(f"shares {number}", prompt(3))
    rig.disk_jobs.run_all()
    rig.poll()
    leases = rig.store.stats().leases
    assert rig.scheduler.match("second", 0, 4) == STAGING
    for _ in range(3):
        rig.poll()
    assert rig.is_staging("second")
    assert rig.store.stats().leases == leases == 12
    for number in range(3):
        rig.end(f"shares {number}")
    rig.end("first")
    rig.poll()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("second",)
    serve(rig, "second")
    rig.verify_quiet()


def test_a_step_begins_as_many_turns_as_it_has_time_for(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "MAX_LOOKED", 64)
    rig = open_disk(host_blocks=256)
    names = [f"waits {number}" for number in range(80)]
    rig.put_on_disk(prompt(14), *(prompt(1, 100 + 10 * number) for number in range(80)))
    monkeypatch.setattr(arriving, "MAX_ACTIVE", 1)
    rig.start("first", prompt(14))
    for number, name in enumerate(names):
        rig.start(name, prompt(1, 100 + 10 * number), options=KVOptions(max_wait_s=0.5))
    rig.end("first")
    monkeypatch.setattr(arriving, "MAX_ACTIVE", 1000)
    rig.space._store.host.reset(rig.space.digest)
    poll = rig.poll()
    num_begun = len(rig.scheduler._restores.arrivals._running)
    assert 0 < num_begun < 80
    assert poll.next_deadline == rig.clock.now(), "the next step goes on with it"
    for _ in range(10):
        rig.poll()
        rig.disk_jobs.run_all()
    for name in names:
        rig.end(name)
    rig.verify_quiet()


def test_what_a_store_raises_when_a_stage_begins_again_leaks_nothing(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(3))
    rig.failing = [ReadOutcome.OK, ReadOutcome.OK, ReadOutcome.ERROR]
    rig.start("a", prompt(3))
    rig.disk_jobs.run_all()
    stager = rig.store.stager
    queued_bytes, calls = stager.queued_bytes, itertools.count(1)

    def raising(source: Any) -> int:
        if next(calls) == 2:  # the first asks for the lookup, the second for the stage
            raise RuntimeError("queued_bytes")
        return queued_bytes(source)

    monkeypatch.setattr(stager, "queued_bytes", raising)
    rig.poll()
    assert next(calls) > 2
    rig.end("a")
    rig.verify_quiet()


def test_a_smaller_priority_goes_first(open_disk: OpenDisk) -> None:
    rig = open_full(open_disk)
    rig.start("urgent", prompt(4, 200), options=KVOptions(priority=-1))
    assert rig.poll().ready == ()
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("urgent",)
    assert rig.is_staging("second")
    for name in ("first", "urgent", "second"):
        rig.end(name)
    rig.verify_quiet()


def test_what_host_memory_has_for_one_that_waits_stays_there(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.finish("before", rig.compute("before", prompt(3)))
    rig.store_all()
    rig.pool.reset_cache()
    rig.plan()
    rig.start("a", prompt(3))
    assert rig.store.stats().leases >= 3
    for number in range(4):
        rig.finish(f"other {number}", rig.compute(f"other {number}", prompt(4, 100 * (number + 1))))
        rig.store_all()
        rig.disk_jobs.run_all()
    assert rig.scheduler.match("a", 0, 3) == Match(3, None)
    rig.end("a")
    rig.disk_jobs.run_all()
    assert rig.store.stats().leases == 0
    rig.verify_quiet()


# ---- the engine's own cache ------------------------------------------------------------------------------------------


@pytest.mark.bug("PF07")
def test_r67_who_has_it_all_in_the_gpu_pool_by_now_waits_no_more(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3))
    assert rig.is_staging("a", 0)
    assert rig.is_staging("a", 2)
    assert rig.scheduler.match("a", 3, 0) == Match(0, None)
    assert rig.admit("a", 0, first=3) == 0
    assert rig.poll().ready == ()
    rig.end("a")
    rig.verify_quiet()


def test_r67_a_prefix_that_the_gpu_pool_lost_is_looked_up(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(4))
    rig.start("a", prompt(4), num_local_blocks=2)
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.scheduler.match("a", 2, 2) == Match(2, None)
    assert rig.scheduler.match("a", 0, 4) == STAGING, "not a cold prefill"
    assert rig.scheduler.match("a", 0, 4) == STAGING
    assert len(rig.disk_jobs) == 0, "and asking begins nothing"
    rig.poll()
    assert len(rig.disk_jobs) == 1
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.scheduler.match("a", 0, 4) == Match(4, None)
    assert rig.admit("a", 4) == 4
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 4)]
    rig.end("a")
    rig.verify_quiet()


def test_r47_a_prefix_that_the_gpu_pool_lost_begins_no_wait_anew(open_disk: OpenDisk) -> None:
    rig = open_disk(restore__capacity_bound_s=60.0)
    rig.put_on_disk(prompt(4))
    rig.start("a", prompt(4), num_local_blocks=3)
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    end = rig.clock.now() + 60.0
    for num_local in (2, 1, 0):
        assert rig.scheduler.refuse_restore("a")
        rig.clock.advance(19.0)
        assert rig.scheduler.match("a", num_local, 4 - num_local) == STAGING
        rig.poll()
        rig.disk_jobs.run_all()
        rig.poll()
        assert rig.scheduler.match("a", num_local, 4 - num_local) == Match(4 - num_local, None)
        assert rig.poll().next_deadline == end
    assert rig.scheduler.refuse_restore("a")
    rig.clock.advance(3.0)
    assert not rig.scheduler.refuse_restore("a")
    rig.end("a")
    rig.verify_quiet()


def test_r17_a_question_takes_no_attempt_and_begins_no_wait_anew(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3), num_local_blocks=2)
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.scheduler.refuse_restore("a")
    arrival = rig.scheduler._requests["a"].arrival
    assert arrival is not None
    before, refused_until = arrival.episode, rig.clock.now() + 60.0
    rig.clock.advance(50.0)
    told = rig.stats
    for _ in range(3):
        assert rig.scheduler.match("a", 0, 3) == STAGING
    assert (rig.scheduler._requests["a"].arrival, arrival.episode, rig.stats) == (arrival, before, told)
    rig.poll()
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.scheduler.refuse_restore("a")
    after = rig.scheduler._requests["a"].arrival
    assert after is not None
    assert (after.episode.attempts, rig.poll().next_deadline) == (1, refused_until)
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.parametrize("num_local", [3, 4])
def test_r70_where_all_is_local_there_is_nothing_to_load(open_disk: OpenDisk, num_local: int) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3), num_local_blocks=num_local, num_tokens=12)
    assert rig.scheduler.match("a", num_local, 0) == Match(0, None)
    assert rig.poll().num_active == 0
    rig.end("a")
    rig.verify_quiet()


def test_r70_one_token_is_left_to_compute(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3), num_tokens=12)
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.scheduler.match("a", 0, 2) == Match(2, None)
    assert sum(rig.store.lower[0].stats().reads.values()) == 2
    rig.end("a")
    rig.verify_quiet()


# ---- preemption, abort, reset ----------------------------------------------------------------------------------------


def test_r52_a_preempted_request_begins_again_and_is_counted_once(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    rig.start("a", prompt(3), num_tokens=13)
    rig.disk_jobs.run_all()
    rig.poll()
    assert rig.admit("a", 3) == 3
    (job,) = rig.plan(submit=False).jobs
    rig.pool.release(rig.blocks.pop("a"))
    rig.scheduler.requeue_request("a", 0, 13)
    assert rig.scheduler.match("a", 0, 3) == Match(3, None), "host memory has it"
    assert rig.admit("a", 3) == 3
    assert (rig.store.stats().lookups, rig.stats.readmissions) == (1, 1)
    (again,) = rig.plan(submit=False).jobs
    assert rig.collect([CopyResult(job.job_id, (True, True, True))]) == [], "the blocks of before are not its own"
    assert rig.collect([CopyResult(again.job_id, (True, True, True))]) == [RestoreOutcome("a", 0, 3)]
    rig.end("a")
    rig.verify_quiet()


def test_r52_restoring_and_preempting_without_a_token_ends(open_disk: OpenDisk) -> None:
    rig = open_disk(restore__max_attempts=3)
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2), num_tokens=9)
    rig.disk_jobs.run_all()
    rig.poll()
    for _ in range(3):
        assert rig.scheduler.match("a", 0, 2).num_blocks == 2
        assert rig.admit("a", 2) == 2
        rig.plan()
        rig.copy_all()
        rig.pool.release(rig.blocks.pop("a"))
        rig.scheduler.requeue_request("a", 0, 9)
    assert rig.scheduler.match("a", 0, 2) == Match(0, MissReason.BUDGET)
    rig.scheduler.requeue_request("a", 0, 10)
    assert rig.scheduler.match("a", 0, 2).num_blocks == 2, "a token came"
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.bug("HS01")
def test_r71_whoever_goes_lets_go_of_everything_in_every_state(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(3))
    for turn in range(40):
        rig.start("a", prompt(3))
        match turn % 4:
            case 1:
                rig.disk_jobs.run_all()
                rig.poll()
            case 2:
                rig.disk_jobs.run_all()
                rig.poll()
                assert rig.admit("a", 3) == 3
            case 3:
                rig.disk_jobs.run_all()
                rig.poll()
                assert rig.admit("a", 3) == 3
                rig.plan()
        rig.end("a")
        rig.scheduler.finish_request("a")
        rig.plan()
        rig.copy_all()
        rig.verify_quiet()
        for namespace in rig.store.host.namespaces():
            rig.store.host.reset(namespace)


def test_r74_an_id_used_again_waits_for_its_own(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2), prompt(2, 100))
    rig.start("a", prompt(2))
    rig.end("a")
    rig.start("a", prompt(2, 100))
    assert rig.is_staging("a")
    rig.disk_jobs.run_all()
    assert rig.poll().ready == ("a",)
    assert rig.admit("a", 2) == 2
    rig.plan()
    assert rig.copy_all() == [RestoreOutcome("a", 0, 2)]
    rig.verify_landed(rig.blocks["a"], rig.digests["a"])
    rig.end("a")
    rig.verify_quiet()


@pytest.mark.parametrize("by_another", [False, True])
def test_r76_a_reset_ends_every_wait(open_disk: OpenDisk, by_another: bool) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2), prompt(2, 100))
    rig.start("reads", prompt(2))
    rig.start("ready", prompt(2, 100))
    rig.disk_jobs.run_next(1)
    rig.disk_jobs.run_all()
    rig.poll()
    rig.start("waits", prompt(3))
    for lower in rig.store.lower:
        lower.start_epoch = lambda _: None  # type: ignore[method-assign,assignment]
    if by_another:
        rig.store.reset()
    else:
        assert rig.scheduler.reset()
    ready = rig.poll().ready
    assert "ready" not in ready
    for name in ("reads", "ready", "waits"):
        assert rig.scheduler.match(name, 0, 2) == Match(0, MissReason.RESET)
        rig.end(name)
    assert rig.poll().num_active == 0
    rig.verify_quiet()


def test_r76_who_was_staging_at_a_reset_is_named(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    rig.start("a", prompt(2))
    assert rig.is_staging("a")
    for lower in rig.store.lower:
        lower.start_epoch = lambda _: None  # type: ignore[method-assign,assignment]
    rig.scheduler.reset()
    assert rig.poll().ready == ("a",)
    rig.end("a")
    rig.verify_quiet()


# ---- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.bug("PF07")
def test_requests_of_one_prefix_share_its_leases_and_reads(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(prompt(4))
    for number in range(50):
        rig.start(f"r{number}", prompt(4))
    assert rig.poll().num_active == 50
    rig.disk_jobs.run_all()
    assert len(rig.poll().ready) == 50
    assert rig.store.lower[0].stats().reads == {"ok": 4}
    for number in range(50):
        rig.end(f"r{number}")
    rig.verify_quiet()


def test_stages_lease_half_of_host_memory_and_others_wait_their_turn(open_disk: OpenDisk) -> None:
    rig = open_disk(host_blocks=8)
    rig.put_on_disk(*(prompt(2, 100 * number) for number in range(6)))
    for number in range(6):
        rig.start(f"r{number}", prompt(2, 100 * number))
    assert len(rig.scheduler._restores.arrivals._keeper) == 4, "half of host memory"
    assert rig.poll().num_active == 6
    finished: list[str] = []
    for _ in range(3):
        rig.disk_jobs.run_all()
        ready = rig.poll().ready
        assert len(ready) == 2
        finished += ready
        assert rig.poll().ready == (), "their leases end with their admission"
        for name in ready:
            assert rig.scheduler.match(name, 0, 2).num_blocks == 2
            rig.end(name)
        rig.poll()
    assert finished == [f"r{number}" for number in range(6)]
    rig.verify_quiet()


def test_few_are_staged_at_once_and_no_wait_is_longer_than_its_own(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "MAX_ACTIVE", 2)
    rig = open_disk()
    rig.put_on_disk(*(prompt(2, 100 * number) for number in range(5)))
    rig.scheduler._restores.decision.set_backlog(1)  # the engine does not idle for them
    for number in range(5):
        rig.start(f"r{number}", prompt(2, 100 * number), options=KVOptions(max_wait_s=1.0 + number))
    arrivals = rig.scheduler._restores.arrivals
    assert (len(arrivals._running), len(arrivals._pending)) == (2, 3)
    given_up: list[str] = []
    for _ in range(5):
        deadline = rig.poll().next_deadline
        assert deadline is not None
        rig.clock.advance(deadline - rig.clock.now())
        given_up += rig.poll().ready
    assert given_up == [f"r{number}" for number in range(5)]
    for number in range(5):
        assert rig.admit(f"r{number}", 2) == 0
        rig.end(f"r{number}")
    assert rig.store.stats().fallbacks == {"timeout": 5}
    rig.verify_quiet()


def test_r69_a_clock_that_goes_back_lengthens_no_wait_for_a_turn(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "MAX_ACTIVE", 1)
    rig = open_disk()
    rig.put_on_disk(prompt(2), prompt(2, 500), prompt(2, 900))
    rig.scheduler._restores.decision.set_backlog(1)
    rig.start("first", prompt(2), options=AT_ONCE)
    rig.start("second", prompt(2, 500), options=AT_ONCE)
    rig.start("third", prompt(2, 900), options=KVOptions(max_wait_s=4.0))
    rig.poll()
    rig.clock.advance(-900.0)
    assert rig.poll().ready == ("first",), "whose stage began later than now"
    rig.clock.advance(4.0)
    assert rig.poll().ready == ("third",)
    for name in ("first", "second", "third"):
        rig.end(name)
    rig.verify_quiet()


@pytest.mark.bug("HS01")
def test_a_dead_tier_costs_no_wait_of_each_that_waits_for_its_turn(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arriving, "MAX_ACTIVE", 1)
    rig = open_disk()
    rig.put_on_disk(*(prompt(2, 100 * number) for number in range(5)))
    for number in range(30):
        rig.start(f"r{number}", prompt(2, 100 * (number % 5)), options=AT_ONCE)
    rig.store.lower[0]._guard.breaker.trip()
    assert len(rig.poll().ready) == 30, "at once"
    for number in range(30):
        assert rig.admit(f"r{number}", 0) == 0
        rig.end(f"r{number}")
    assert rig.store.stats().fallbacks == {"tier_down": 30}
    assert len(warnings_of(caplog)) == 10, "a bounded number of lines"
    rig.verify_quiet()


@pytest.mark.bug("PF12")
def test_nobody_waits_longer_than_computing_takes(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    for _ in range(200):
        rig.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(1000, 0.0, 10.0, 0)))
    rig.start("a", prompt(2))
    deadline = rig.poll().next_deadline
    assert deadline is not None
    assert deadline - rig.clock.now() <= 0.1
    rig.end("a")
    rig.verify_quiet()


def test_a_tier_slower_than_computing_is_not_used(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2), prompt(2, 100))
    rig.start("a", prompt(2))
    rig.clock.advance(1.0)
    rig.disk_jobs.run_all()
    rig.poll()
    rig.end("a")
    for _ in range(200):
        rig.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(1000, 0.0, 0.01, 0)))
    rig.start("b", prompt(2, 100))
    assert rig.scheduler.match("b", 0, 2) == Match(0, MissReason.COST)
    assert rig.poll().num_active == 0
    assert rig.admit("b", 2) == 0
    assert rig.store.stats().misses["cost"] == 2
    rig.end("b")
    rig.verify_quiet()


def test_r68_a_step_costs_as_much_as_restores_are_active(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_disk()
    rig.put_on_disk(prompt(2))
    rig.start("staged", prompt(2))
    calls = itertools.count()
    drive = rig.scheduler._restores.arrivals._drive
    monkeypatch.setattr(rig.scheduler._restores.arrivals, "_drive", lambda item: next(calls) * 0 or drive(item))
    for number in range(500):
        rig.start(f"r{number}", prompt(2, 1000 + 100 * number))
    before = next(calls)
    rig.poll()
    assert next(calls) - before == 1 + 1
    rig.end("staged")
    for number in range(500):
        rig.scheduler.finish_request(f"r{number}")
    rig.verify_quiet()


def test_r47_a_scripted_wait_for_blocks_that_is_over_is_no_deadline() -> None:
    clock = FakeClock()
    scripted = ScriptedConnector(clock)
    tokens = list(range(17))
    with closing(EngineRig(8, kvtier=False, clock=clock, open_connector=scripted)):
        half = scripted.scheduler
        half.start_request(RequestInfo("a", scripted.hold(tokens)))
        assert half.refuse_restore("a")
        assert half.poll_restores().next_deadline == clock.now() + 60.0
        clock.advance(60.0)
        assert half.poll_restores().next_deadline is None


def test_r76_two_resets_of_a_scripted_connector_name_who_waited_once() -> None:
    clock = FakeClock()
    scripted = ScriptedConnector(clock)
    tokens = list(range(17))
    with closing(EngineRig(8, kvtier=False, clock=clock, open_connector=scripted)) as rig:
        scripted.hold(tokens, tier="disk")
        rig.add("a", tokens, 1)
        rig.step()
        for _ in range(2):
            rig.engine.reset_cache(preempt_running=True)
        for _ in range(20):
            rig.step()
            scripted.deliver_all()
        assert rig.engine.num_unfinished == 0
