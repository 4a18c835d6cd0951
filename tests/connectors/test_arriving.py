"""Blocks that come back from disk: staged from a request's arrival on, landed at its turn, each counted once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.executor import ThreadExecutor
from kvtier_connectors.contract import KVOptions, RequestInfo, StepDemand, StepWork
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_engine.request import RequestState
from kvtier_engine.testing.disk import DiskRig, disk_rigs
from kvtier_engine.verdict import Verdict

OpenDisk = Callable[..., DiskRig]

TWO_BLOCKS = 128  # bytes: a read job takes two blocks, and the next begins when it ended


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[OpenDisk]:
    with disk_rigs(tmp_path / "disk") as make:
        yield make


@pytest.fixture
def fill(open_disk: OpenDisk) -> Callable[..., None]:
    """Have an earlier engine store prompts of 17 tokens, which are four blocks and a token, and close."""

    def store(*starts: int, size: int = 17) -> None:
        rig = open_disk(num_blocks=max(8, size // 4 + 1))
        for start in starts or (0,):
            rig.generate(prompt(size, start))
        rig.close()

    return store


def scheduler_of(rig: DiskRig) -> KVTierScheduler:
    assert rig.engine.connector is not None
    return rig.engine.connector.scheduler


def state_of(rig: DiskRig, request_id: str) -> RequestState:
    return next(r.state for r in rig.engine.scheduler.requests() if r.request_id == request_id)


def counted(rig: DiskRig) -> tuple[dict[str, int], dict[str, int]]:
    """Hits and misses, which add up to what was asked for."""
    stats = rig.opened.stats()
    assert sum(stats.hits.values()) == stats.hit_blocks
    assert sum(stats.misses.values()) + stats.hit_blocks == stats.asked_blocks
    return dict(stats.hits), dict(stats.misses)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "kvtier.restore" and r.levelno >= logging.WARNING]


def compute_slowly(rig: DiskRig) -> None:
    """Let a token take a second: a request may then wait as long as it says."""
    scheduler_of(rig).plan_step([], StepDemand(0, 0, 0, StepWork(1000, 0.0, 1000.0, 0)))


# ---- from arrival to landing -----------------------------------------------------------------------------------------


@pytest.mark.bug("AC10", "AC12")
def test_a_hit_counts_for_disk_after_a_restart_and_for_host_memory_after_that(
    open_disk: OpenDisk, fill: Callable[..., None]
) -> None:
    fill()
    rig = open_disk()
    assert (rig.disk.recovered_blocks, rig.opened.stats().host_blocks) == (4, 0)
    output = rig.generate(prompt(17))
    assert (output.restored_tokens, output.gpu_hit_tokens) == (16, 0)
    assert rig.computed_tokens == 1
    assert counted(rig) == ({"disk": 4}, {})
    rig.flush_gpu()
    asked = rig.opened.stats().asked_blocks
    reads = rig.disk.reads
    assert rig.generate(prompt(17)).restored_tokens == 16
    hits, misses = counted(rig)
    assert hits == {"disk": 4, "host": 4}
    assert sum(misses.values()) == asked - 4, "all that the flushing prompt asked for"
    assert rig.disk.reads == reads == {"ok": 4}
    assert rig.opened.stats().fallbacks == {}
    rig.verify_quiet()


@pytest.mark.bug("PF02")
def test_waiting_costs_no_look_at_any_tier(
    open_disk: OpenDisk, fill: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    rig = open_disk()
    asked: Counter[str] = Counter()

    def spy(thing: object, name: str) -> None:
        real = getattr(thing, name)
        monkeypatch.setattr(thing, name, lambda *args: asked.update([name]) or real(*args))

    spy(rig.lower.tier, "contains")
    for name in ("committed_run", "states", "lease_run", "why_missing"):
        spy(rig.opened.host, name)
    rig.add("a", prompt(17))
    assert len(rig.disk_jobs) == 1, "it begins at arrival, not at a step"
    assert asked["contains"] == 1
    before = dict(asked)
    for _ in range(50):
        assert rig.engine.step().verdict is Verdict.WAIT
        assert scheduler_of(rig).match("a", 0, 4).is_staging
    assert asked == before
    rig.run()
    assert rig.finished["a"].restored_tokens == 16
    rig.verify_quiet()


def test_what_the_gpu_pool_holds_at_arrival_is_not_read(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.generate(prompt(17))
    rig.forget_host()
    rig.generate(prompt(19, 500))  # takes the four free blocks and the youngest cached one
    assert len(rig.engine.cached_blocks(prompt(17))) == 3
    rig.forget_host()
    output = rig.generate(prompt(17))
    assert (output.gpu_hit_tokens, output.restored_tokens) == (12, 4)
    assert rig.disk.reads == {"ok": 1}
    assert counted(rig)[0] == {"disk": 1}
    rig.verify_quiet()


def test_blocks_of_host_memory_and_of_disk_are_told_apart_in_one_prompt(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.generate(prompt(9))
    rig.generate(prompt(17))
    rig.forget_host()
    rig.flush_gpu()
    rig.forget_host()
    rig.generate(prompt(9))  # two blocks from disk, which are now in host memory
    rig.flush_gpu()
    before = counted(rig)[0]
    assert rig.generate(prompt(17)).restored_tokens == 16
    assert {tier: count - before.get(tier, 0) for tier, count in counted(rig)[0].items()} == {"disk": 2, "host": 2}
    rig.verify_quiet()


@pytest.mark.bug("PF07")
def test_one_read_serves_all_who_wait_for_it(open_disk: OpenDisk, fill: Callable[..., None]) -> None:
    fill()
    rig = open_disk(num_blocks=32, max_num_seqs=8)
    for i in range(6):
        rig.add(f"r{i}", [*prompt(16), 900 + i])
    assert rig.engine.scheduler.waiting.num_staging == 6
    rig.run()
    assert rig.disk.reads == {"ok": 4}
    assert {output.restored_tokens + output.gpu_hit_tokens for output in rig.finished.values()} == {16}
    rig.verify_quiet()


def test_a_prompt_of_more_than_half_of_host_memory_comes_in_part(
    open_disk: OpenDisk, fill: Callable[..., None]
) -> None:
    fill(size=25)
    rig = open_disk(host_blocks=8)
    assert rig.generate(prompt(25)).restored_tokens == 16
    assert counted(rig) == ({"disk": 4}, {"not_staged": 2})
    rig.verify_quiet()


# ---- others ----------------------------------------------------------------------------------------------------------


def test_others_pass_a_request_that_is_staging_in_their_order(open_disk: OpenDisk, fill: Callable[..., None]) -> None:
    fill()
    rig = open_disk(num_blocks=32, max_num_seqs=2)
    rig.add("staged", prompt(17))
    for name, start in (("b", 100), ("c", 200), ("d", 300)):
        rig.add(name, prompt(5, start), 3)
    rig.step()
    assert [item.request_id for item in rig.runner.batches[-1]] == ["b", "c"]
    rig.disk_jobs.run_all()
    rig.step()
    assert [request.request_id for request in rig.engine.scheduler.waiting] == ["staged", "d"]
    while "b" in rig.engine.scheduler:
        rig.step()
    rig.step()
    assert state_of(rig, "staged") is RequestState.RESTORING, "it had come before d"
    rig.run()
    rig.verify_quiet()
    assert rig.finished["staged"].restored_tokens == 16


def test_a_request_that_fits_nowhere_keeps_its_place_before_the_staged(
    open_disk: OpenDisk, fill: Callable[..., None]
) -> None:
    fill()
    rig = open_disk(num_blocks=8)
    rig.add("runs", prompt(8, 400), 8)
    rig.step()
    rig.add("large", prompt(28, 500))
    rig.add("staged", prompt(17))
    rig.add("small", prompt(3, 600))
    rig.step()
    assert [r.request_id for r in rig.engine.scheduler.waiting] == ["large", "staged"]
    rig.run()
    assert set(rig.finished) == {"runs", "large", "staged", "small"}
    rig.verify_quiet()


STATES = ["queued", "reading", "arrived", "landing"]


def bring_to(rig: DiskRig, state: str) -> None:
    """A request that was just added, and whose blocks are on disk, to one of `STATES`."""
    if state == "queued":
        return
    if state == "reading":
        rig.disk_jobs.shut()
        assert rig.disk_jobs.run_next()
        assert rig.disk_jobs.num_parked == 1
        return
    rig.disk_jobs.run_all()
    if state == "landing":
        rig.step()
        assert state_of(rig, "a") is RequestState.RESTORING


@pytest.mark.bug("LK08", "CR01", "LK01")
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("again", [False, True])
def test_aborts_in_every_state_leave_budgets_whole(
    open_disk: OpenDisk, fill: Callable[..., None], state: str, again: bool
) -> None:
    fill()
    rig = open_disk(restore__max_staging=4 * 64, restore__max_inflight_blocks=4)
    for _ in range(60):
        rig.add("a", prompt(17))
        bring_to(rig, state)
        rig.abort("a")
        if again:  # the id is used at once, while reads and copies of the one before run
            rig.add("a", prompt(17))
            rig.step()
            rig.abort("a")
        rig.disk_jobs.release()
        rig.settle()
        rig.step()
        rig.forget_host()
        while rig.engine.has_work:
            rig.step()
    rig.verify_quiet()
    rig.flush_gpu()
    rig.forget_host()
    rig.add("a", prompt(17))
    assert len(rig.disk_jobs) == 1, "it begins at once"
    rig.run()
    assert rig.finished["a"].restored_tokens == 16
    rig.verify_quiet()


@pytest.mark.parametrize("state", STATES)
def test_closing_in_every_state_ends_and_leaves_nothing(
    open_disk: OpenDisk, fill: Callable[..., None], caplog: pytest.LogCaptureFixture, state: str
) -> None:
    fill()
    rig = open_disk()
    rig.add("a", prompt(17))
    bring_to(rig, state)
    rig.engine.close(0.0)
    rig.opened.close()
    rig.disk_jobs.release()  # the read that stood there ends after all
    assert rig.opened.stats().leases == 0
    reopened = open_disk()
    assert reopened.generate(prompt(17)).restored_tokens == 16
    reopened.verify_quiet()
    caplog.get_records("call").clear()  # a traceback in it holds a view of the host pool, which would look like a leak


def test_an_engine_that_does_not_wait_takes_what_is_there(open_disk: OpenDisk, fill: Callable[..., None]) -> None:
    fill()
    rig = open_disk(restore__max_staging=TWO_BLOCKS)
    hooks, pool = scheduler_of(rig), rig.engine.pool
    hooks.start_request(RequestInfo("x", rig.engine.digests(prompt(16))))
    assert rig.disk_jobs.run_next()
    match = hooks.match("x", 0, 4)
    assert (match.num_blocks, match.miss, match.is_staging) == (0, None, True)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert hooks.admit("x", 0, 4, blocks) == 2, "two had come"
    assert counted(rig) == ({"disk": 2}, {"timeout": 2})
    assert not hooks.match("x", 2, 2).is_staging
    hooks.finish_request("x")
    pool.release(blocks)
    rig.run()
    rig.step()
    rig.settle()
    rig.step()
    assert rig.opened.stats().errors == {}
    rig.verify_quiet()


# ---- limits of waiting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "limit"), [(0.5, 0.5), (7.0, 7.0), (None, 2.0)])
def test_a_request_waits_as_long_as_it_says_or_as_is_set(
    open_disk: OpenDisk, fill: Callable[..., None], asked: float | None, limit: float
) -> None:
    fill()
    rig = open_disk(restore__max_wait_s=2.0)
    compute_slowly(rig)
    rig.add("a", prompt(17), options=KVOptions(max_wait_s=asked))
    rig.clock.advance(limit - 0.001)
    assert rig.step().verdict is Verdict.WAIT
    rig.clock.advance(0.001)
    assert rig.step().num_tokens == 17
    assert counted(rig) == ({}, {"timeout": 4})
    rig.run()
    rig.verify_quiet()


def test_a_request_that_will_not_wait_is_served_from_host_memory_alone(
    open_disk: OpenDisk, fill: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    rig = open_disk()
    assert rig.generate(prompt(17), options=KVOptions(max_wait_s=0)).restored_tokens == 0
    assert counted(rig) == ({}, {"not_staged": 4})
    rig.flush_gpu()
    assert rig.generate(prompt(17), options=KVOptions(max_wait_s=0)).restored_tokens == 16
    assert counted(rig)[0] == {"host": 4}
    assert rig.disk.reads == rig.opened.stats().fallbacks == {}
    assert warnings_of(caplog) == []
    rig.verify_quiet()


@pytest.mark.bug("HS01", "US10")
def test_what_came_in_time_lands_and_one_warning_says_what_did_not(
    open_disk: OpenDisk, fill: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    rig = open_disk(restore__max_staging=TWO_BLOCKS)
    rig.add("slow one", prompt(17), options=KVOptions(max_wait_s=0.25))
    assert rig.disk_jobs.run_next()
    rig.disk_jobs.shut()
    rig.clock.advance(0.25)
    assert rig.disk_jobs.run_next()
    assert rig.disk_jobs.num_parked == 1
    rig.step()
    rig.executor.run_all()
    while rig.engine.num_unfinished:
        rig.step()
    output = rig.finished["slow one"]
    assert (output.restored_tokens, rig.computed_tokens) == (8, 9)
    assert counted(rig) == ({"disk": 2}, {"timeout": 2})
    stats = rig.opened.stats()
    assert stats.fallbacks == {"timeout": 1}
    (message,) = warnings_of(caplog)
    for word in ("slow one", "2 blocks", "disk", "timeout", "waited 0.250 s", "limit 0.250 s", "8 tokens"):
        assert word in message, message
    before = rig.runner.pool.copy()
    rig.disk_jobs.release()
    rig.settle()
    assert (rig.runner.pool == before).all(), "the late read writes to no GPU block"
    assert rig.opened.stats().fallbacks == {"timeout": 1}
    rig.run()
    rig.verify_quiet()
    rig.flush_gpu()
    assert rig.generate(prompt(17)).restored_tokens == 16, "and was not for nothing"
    assert rig.disk.reads == {"ok": 4}
    rig.verify_quiet()


@pytest.mark.bug("HS01", "HS14", "HS16")
@pytest.mark.parametrize(("num_threads", "pause_s", "most"), [(4, 0.001, 1), (1, 0.001, 1), (1, 5.0, 2), (4, 5.0, 5)])
def test_a_device_that_hangs_costs_one_wait_and_not_one_a_request(
    open_disk: OpenDisk,
    fill: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    num_threads: int,
    pause_s: float,
    most: int,
) -> None:
    """pause_s: between requests. Longer than a cool-down, each new probe may cost one more, until no thread is left."""
    fill(*range(0, 2000, 40), size=9)
    rig = open_disk(num_threads=num_threads, disk__timeout_s=1.0, restore__max_wait_s=2.0, policy="off")
    compute_slowly(rig)
    rig.disk_jobs.shut()
    waits = 0
    for i in range(50):
        rig.add(f"r{i}", prompt(9, 40 * i))
        rig.disk_jobs.run_all()
        waits += rig.engine.scheduler.waiting.num_staging
        for _ in range(30):
            if f"r{i}" in rig.finished:
                break
            if rig.step().verdict is Verdict.WAIT:
                rig.clock.advance(0.1)
                rig.disk_jobs.run_all()
        assert rig.finished[f"r{i}"].restored_tokens == 0
        rig.clock.advance(pause_s)
    assert 1 <= waits <= most
    assert sum(rig.opened.stats().fallbacks.values()) == len(warnings_of(caplog)) == waits
    hits, misses = counted(rig)
    assert (hits, set(misses)) == ({}, {"tier_down"})
    assert rig.disk.available == 0
    assert rig.disk.breaker_opened == 1
    rig.disk_jobs.release()
    rig.settle()
    rig.clock.advance(120.0)
    assert rig.disk.available == 1
    rig.flush_gpu()
    assert rig.generate(prompt(9)).restored_tokens == 8, "the probe"
    rig.flush_gpu()
    assert rig.generate(prompt(9, 1960)).restored_tokens == 8
    assert rig.disk.breaker_opened == 1
    rig.run()
    rig.verify_quiet()


def test_a_tier_that_falls_sick_ends_the_waits_for_it(
    open_disk: OpenDisk, fill: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    rig = open_disk(disk__timeout_s=0.5, restore__max_wait_s=60.0)
    rig.disk_jobs.shut()
    rig.add("a", prompt(17))
    rig.disk_jobs.run_all()
    rig.clock.advance(0.6)
    assert rig.step().num_tokens == 17
    assert counted(rig) == ({}, {"tier_down": 4})
    assert rig.opened.stats().fallbacks == {"tier_down": 1}
    (message,) = warnings_of(caplog)
    assert "tier_down" in message
    rig.disk_jobs.release()
    rig.run()
    rig.verify_quiet()


@pytest.mark.bug("HS06", "PF09", "PF01")
@pytest.mark.parametrize("policy", ["write_through", "on_evict"])
def test_steps_go_on_while_every_call_of_the_device_hangs(
    open_disk: OpenDisk, fill: Callable[..., None], policy: str
) -> None:
    """Real threads; every hook is called by this thread, and the device lets go only after the last of them."""
    fill(0, 100, 200)
    executor = ThreadExecutor("kvtier-disk", 1024, 4)
    rig = open_disk(disk_executor=executor, policy=policy, disk__timeout_s=1.0, host_blocks=8, restore__max_wait_s=1.0)
    rig.files.hold("read")
    rig.files.hold("write")
    try:
        for i in range(30):
            rig.add(f"r{i}", prompt(17, 100 * (i % 5)), 1 + i % 3)
            if not i:
                rig.files.wait_stalled()
            for _ in range(4):
                rig.step()
                rig.executor.run_all()
                rig.clock.advance(0.5)
            if i % 7 == 3:
                rig.abort(f"r{i}")
        for _ in range(200):
            if not rig.engine.has_work:
                break
            rig.step()
            rig.executor.run_all()
            rig.clock.advance(0.5)
        assert not rig.engine.has_work
        assert rig.engine.num_unfinished == 0
        assert rig.disk.breaker_opened >= 1
        assert rig.lower._guard.num_overdue >= 1, "none of them has come back"
        assert not any(output.error for output in rig.finished.values())
    finally:
        rig.files.heal()


# ---- what a request asks for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "restored"), [(0, 0), (3, 0), (4, 4), (8, 8), (11, 8), (15, 12), (16, 16), (17, 16), (1000, 16)]
)
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_no_more_is_restored_than_a_request_allows(
    open_disk: OpenDisk, fill: Callable[..., None], tokens: int, restored: int, tier: str
) -> None:
    fill()
    rig = open_disk()
    if tier == "host":
        rig.generate(prompt(17))
        rig.flush_gpu()
    before_hits, before_misses = counted(rig)
    reads = sum(rig.disk.reads.values())
    output = rig.generate(prompt(17), options=KVOptions(max_restore_tokens=tokens))
    assert output.restored_tokens == restored
    hits, misses = counted(rig)
    assert hits.get(tier, 0) - before_hits.get(tier, 0) == restored // 4
    assert misses.get("limit", 0) == 4 - restored // 4
    assert sum(misses.values()) - sum(before_misses.values()) == 4 - restored // 4
    assert sum(rig.disk.reads.values()) - reads == (restored // 4 if tier == "disk" else 0)
    rig.verify_quiet()


def test_an_engine_that_asks_for_more_than_a_request_allows_gets_what_it_allows(
    open_disk: OpenDisk, fill: Callable[..., None]
) -> None:
    fill()
    rig = open_disk()
    rig.generate(prompt(17))
    hooks, pool = scheduler_of(rig), rig.engine.pool
    blocks = pool.allocate(4)
    assert blocks is not None
    hooks.start_request(RequestInfo("x", rig.engine.digests(prompt(16)), KVOptions(max_restore_tokens=8)))
    assert hooks.admit("x", 0, 4, blocks) == 2
    hooks.finish_request("x")
    pool.release(blocks)
    rig.step()
    rig.settle()
    rig.step()
    rig.verify_quiet()


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_what_a_request_keeps_to_itself_is_in_no_tier(open_disk: OpenDisk, policy: str) -> None:
    rig = open_disk(policy=policy)
    rig.generate(prompt(9))  # two blocks that anyone may keep
    rig.generate(prompt(17), options=KVOptions(store=False))
    rig.flush_gpu()
    assert rig.flush() == 0
    assert rig.opened.stats().host_blocks == 2 + 7
    assert rig.disk.blocks == 2 + 7
    rig.close()
    again = open_disk()
    assert again.generate(prompt(17)).restored_tokens == 8
    assert counted(again) == ({"disk": 2}, {"absent": 2})
    again.verify_quiet()


def test_a_prompt_kept_apart_is_kept_for_another_who_computes_it(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.generate(prompt(17), options=KVOptions(store=False))
    rig.engine.pool.reset_cache()
    rig.generate(prompt(17))
    assert rig.flush() == 0
    assert rig.disk.blocks == 4


@pytest.mark.bug("AC13")
def test_a_request_that_opts_out_is_not_staged_and_counts_nowhere(
    open_disk: OpenDisk, fill: Callable[..., None]
) -> None:
    fill()
    rig = open_disk()
    before = rig.opened.stats()
    assert rig.generate(prompt(17), options=KVOptions(restore=False)).restored_tokens == 0
    stats = rig.opened.stats()
    for field in ("lookups", "asked_blocks", "hit_blocks", "hits", "misses", "fallbacks", "staged_blocks", "errors"):
        assert getattr(stats, field) == getattr(before, field), field
    assert rig.disk.reads == {}
    rig.verify_quiet()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("restore", 1),
        ("restore", None),
        ("store", "yes"),
        ("max_wait_s", -0.1),
        ("max_wait_s", float("nan")),
        ("max_wait_s", float("inf")),
        ("max_wait_s", "2"),
        ("max_wait_s", True),
        ("max_restore_tokens", -1),
        ("max_restore_tokens", 1.5),
        ("max_restore_tokens", True),
        ("max_restore_tokens", "all"),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"KVOptions\.{field}") as caught:
        KVOptions(**{field: value})
    assert repr(value) in str(caught.value)


def test_a_sick_tier_is_the_reason_of_misses_and_no_look_elsewhere(
    open_disk: OpenDisk, fill: Callable[..., None]
) -> None:
    fill(0, 100)
    rig = open_disk(disk__timeout_s=1.0)
    compute_slowly(rig)
    rig.disk_jobs.shut()
    rig.add("a", prompt(17))
    rig.disk_jobs.run_all()
    rig.clock.advance(1.5)
    rig.step()
    rig.add("b", prompt(17, 100))
    assert rig.engine.scheduler.waiting.num_staging == 0
    rig.step()
    assert counted(rig) == ({}, {"tier_down": 8})
    assert rig.opened.stats().fallbacks == {"tier_down": 1}, "b waited for nothing"
    rig.disk_jobs.release()
    rig.run()
    rig.verify_quiet()
