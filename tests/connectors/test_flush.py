"""Everything is stored before a shutdown, within a bound; and all is forgotten at a reset, or nothing used any more."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import lower as lower_module
from kvtier.errors import TierError
from kvtier.executor import ThreadExecutor
from kvtier.reasons import DropReason
from kvtier.testing import FakeClock
from kvtier.testing.files import Fault
from kvtier.tiers.throttled import ThrottledTier
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_engine.request import RequestState
from kvtier_engine.testing.disk import DiskRig, disk_rigs
from kvtier_engine.testing.rig import EngineRig, tiny_settings, tiny_store

OpenDisk = Callable[..., DiskRig]

BIG_BLOCK = 256  # tokens: 4 KiB, so that the bound of bytes on their way down is some blocks
LATE_S = 3.0  # a bound that was kept, on a machine that is busy


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[OpenDisk]:
    with disk_rigs(tmp_path / "disk") as make:
        yield make


class RealClock(FakeClock):
    """Time that passes."""

    def now(self) -> float:
        return super().now() + time.monotonic()


def open_threaded(open_disk: OpenDisk, **kwargs: Any) -> DiskRig:
    """Copies and disk on threads of their own, in real time."""
    return open_disk(
        executor=ThreadExecutor("copies", 64),
        disk_executor=ThreadExecutor("kvtier-disk", 1024, 4),
        clock=RealClock(),
        **kwargs,
    )


def scheduler_of(rig: EngineRig) -> KVTierScheduler:
    assert rig.engine.connector is not None
    return rig.engine.connector.scheduler


def compute(rig: DiskRig, *prompts: list[int]) -> None:
    """Run requests to their end, and no step more: what they filled is in the GPU pool alone."""
    for tokens in prompts:
        rig.add(f"compute {len(rig.prompts)}", tokens)
        while rig.engine.num_unfinished:
            rig.step()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- flush -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_a_flush_stores_all_full_blocks_those_of_running_requests_too(open_disk: OpenDisk, policy: str) -> None:
    rig = open_disk(policy=policy)
    rig.generate(prompt(9))
    rig.add("runs", prompt(10, 100), 8)
    rig.step()
    rig.step()
    assert rig.flush() == 0
    assert rig.disk.blocks == 2 + 2
    assert rig.flush() == 0
    ledger = rig.ledger
    assert (ledger.due, ledger.stored, ledger.pending) == (4, 4, 0)
    rig.run()
    assert rig.flush() == 0
    assert rig.disk.blocks == 2 + 4, "the request went on and filled more"
    rig.verify_quiet()
    assert rig.disk.writes == {"stored": 6}


def test_a_flush_with_a_host_pool_smaller_than_the_gpu_pool(open_disk: OpenDisk) -> None:
    rig = open_disk(num_blocks=16, host_blocks=4)
    for start in (0, 100, 200):
        rig.generate(prompt(17, start))
    assert rig.flush() == 0
    assert rig.disk.blocks == 12
    assert rig.flush() == 0
    assert rig.disk.writes.get("stored") == 12
    rig.close()
    again = open_disk(num_blocks=16, host_blocks=16)
    for start in (0, 100, 200):
        assert again.generate(prompt(17, start)).restored_tokens == 16
    again.verify_quiet()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("host_blocks", [4, 6, 16])
def test_a_flush_by_way_of_a_host_pool_where_little_may_wait_to_be_written(
    open_disk: OpenDisk, host_blocks: int, threaded: bool
) -> None:
    """No block is written over in host memory before it is on disk, and each is accounted for."""
    make: OpenDisk = functools.partial(open_threaded, open_disk) if threaded else open_disk
    rig = make(num_blocks=16, host_blocks=host_blocks, block_tokens=BIG_BLOCK, max_batch_tokens=2048)
    for start in (0, 10_000, 20_000):
        rig.add(f"r{start}", prompt(4 * BIG_BLOCK + 1, start))
        while rig.engine.num_unfinished:
            rig.step()
    unstored = rig.engine.flush(20.0) if threaded else rig.flush()
    assert unstored == 0
    assert rig.disk.blocks == 12
    rig.close()
    again = open_disk(num_blocks=16, host_blocks=32, block_tokens=BIG_BLOCK, max_batch_tokens=2048)
    for start in (0, 10_000, 20_000):
        assert again.generate(prompt(4 * BIG_BLOCK + 1, start)).restored_tokens == 4 * BIG_BLOCK
    again.verify_quiet()


def test_a_flush_while_a_restore_is_under_way_gives_the_engine_its_outcome(open_disk: OpenDisk) -> None:
    rig = open_disk(num_blocks=16)
    rig.generate(prompt(17))
    rig.forget_host()
    rig.engine.pool.reset_cache()
    scheduler_of(rig).plan_step(rig.engine.pool.take_reused(), rig.engine.scheduler.demand())
    rig.add("a", prompt(17))
    rig.disk_jobs.run_all()
    rig.step()
    (request,) = rig.engine.scheduler.running
    assert request.state is RequestState.RESTORING
    assert rig.flush() == 0
    rig.step()
    assert request.state is not RequestState.RESTORING
    rig.run()
    assert rig.finished["a"].restored_tokens == 16
    rig.verify_quiet()


def test_a_flush_takes_account_of_copies_that_wait_had_collected(open_disk: OpenDisk) -> None:
    """`wait` takes results from the worker; they are in nobody's queue when the flush or the close begins."""
    rig = open_disk(policy="write_through")
    rig.add("a", prompt(9))
    rig.step()
    rig.step()
    assert rig.stats.in_flight_blocks == 2
    rig.copies.run_all()
    rig.engine.wait(0.0)
    rig.engine._results += rig.engine.connector.worker.poll()  # type: ignore[union-attr]
    begun = time.monotonic()
    assert rig.flush(30.0) == 0
    assert time.monotonic() - begun < LATE_S
    rig.run()
    rig.verify_quiet()


def test_a_close_takes_account_of_copies_that_wait_had_collected(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk(policy="write_through")
    rig.add("a", prompt(9))
    rig.step()
    rig.step()
    rig.copies.run_all()
    rig.engine._results += rig.engine.connector.worker.poll()  # type: ignore[union-attr]
    rig.disk_jobs.inline = rig.copies.inline = True
    rig.engine.close(4.0)
    assert rig.opened.stats().leases == 0
    assert not any("had not ended" in message for message in messages(caplog))
    assert not any(rig.engine.pool.pins(block_id) for block_id in range(8))


def test_a_flush_that_ran_out_of_time_leaves_an_engine_that_goes_on(open_disk: OpenDisk) -> None:
    rig = open_disk()
    compute(rig, prompt(17))
    assert rig.engine.flush(0.05) == 4, "no copy ran"
    assert rig.engine.has_work, "copies are still under way"
    rig.run()
    assert rig.ledger.pending == 0
    assert rig.flush() == 0
    assert rig.disk.blocks == 4
    rig.verify_quiet()


@pytest.mark.bug("HS01", "PF09")
@pytest.mark.parametrize("what", ["write", "read"])
def test_a_flush_over_a_device_that_hangs_ends_in_time_and_says_what_is_missing(open_disk: OpenDisk, what: str) -> None:
    rig = open_threaded(open_disk)
    rig.add("a", prompt(17))
    while rig.engine.num_unfinished:
        rig.step()
    rig.files.hold(what)
    begun = time.monotonic()
    try:
        unstored = rig.engine.flush(0.4)
        assert time.monotonic() - begun < LATE_S
        assert unstored == (4 if what == "write" else 0)
        begun = time.monotonic()
        assert rig.engine.flush(0.2) == unstored
        assert time.monotonic() - begun < LATE_S
    finally:
        rig.files.heal()
    assert rig.engine.flush(20.0) == 0
    assert rig.disk.blocks == 4


@pytest.mark.parametrize("policy", ["on_evict", "write_through", "off"])
def test_a_close_flushes_what_a_restart_then_finds(open_disk: OpenDisk, policy: str) -> None:
    rig = open_disk(policy=policy)
    rig.generate(prompt(17))
    rig.close()
    again = open_disk()
    assert again.disk.recovered_blocks == (0 if policy == "off" else 4)
    assert again.generate(prompt(17)).restored_tokens == (0 if policy == "off" else 16)
    again.verify_quiet()


def test_off_flushes_what_host_memory_has_for_the_disk(open_disk: OpenDisk) -> None:
    rig = open_disk(policy="off")
    rig.generate(prompt(17))
    assert rig.flush() == 0
    assert rig.disk.blocks == rig.ledger.due == 0


def test_a_killed_process_loses_only_what_was_not_written(open_disk: OpenDisk) -> None:
    rig = open_disk(policy="write_through")
    rig.generate(prompt(17))
    rig.add("late", prompt(17, 100))
    rig.step()
    rig.abandon()
    again = open_disk()
    assert again.generate(prompt(17)).restored_tokens == 16
    assert again.generate(prompt(17, 100)).restored_tokens == 0
    again.verify_quiet()


def test_a_store_of_host_memory_alone_is_not_flushed_at_close(caplog: pytest.LogCaptureFixture) -> None:
    from kvtier_engine.config import EngineConfig
    from kvtier_engine.engine import Engine
    from kvtier_engine.sampling import SamplingParams
    from kvtier_engine.testing.fake_model import FakeRunner, FakeSampler
    from kvtier_engine.testing.rig import namespace_of

    runner = FakeRunner(8, 4)
    engine = Engine(
        runner,
        namespace_of(runner),
        EngineConfig(max_model_len=32),
        tiny_settings(16),
        make_sampler=FakeSampler,  # type: ignore[arg-type]
    )
    engine.add_request("a", prompt(17), SamplingParams(max_tokens=1))
    while engine.num_unfinished:
        engine.step()
    assert engine.connector is not None
    connector = engine.connector
    engine.close()
    assert connector.scheduler.stats().ledger.due == 0
    assert connector.store.stats().stored_blocks == 0


def test_a_shared_store_gets_all_when_one_of_its_engines_closes() -> None:
    with tiny_store(tiny_settings(16)) as store:
        copies = ThreadExecutor("copies", 64)
        rig = EngineRig(8, store=store, executor=copies, max_model_len=32)
        rig.add("a", prompt(17))
        while rig.engine.num_unfinished:
            rig.step()
        assert store.stats().stored_blocks == 0
        rig.engine.close()
        assert store.stats().host_blocks == 4
        other = EngineRig(8, store=store, max_model_len=32)
        assert other.generate(prompt(17)).restored_tokens == 16
        other.close()


def test_a_close_that_ran_out_of_time_says_how_many_blocks_are_lost(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_disk()
    compute(rig, prompt(17))
    rig.engine.close(0.05)
    assert "connector closed: 4 blocks could not be stored and are lost (4 not within 0.04 s)" in messages(caplog)


@pytest.mark.parametrize("num_chains", [1, 3])
@pytest.mark.parametrize("fault", [Fault.WRITE_ERROR, Fault.FULL_ON_WRITE, "sick"])
def test_the_reasons_that_a_close_gives_add_up_to_the_blocks_that_it_names(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture, fault: str, num_chains: int
) -> None:
    rig = open_disk(num_blocks=24, host_blocks=8)
    for number in range(num_chains):
        compute(rig, prompt(17, 100 * number))
    if fault == "sick":
        rig.lower._guard.breaker.trip()
    else:
        rig.files.inject(Fault(fault))
    rig._run_inline()
    rig.engine.close(0.5)
    (line,) = [line for line in messages(caplog) if "connector closed" in line]
    found = re.search(r"closed: (\d+) blocks .*\((.*)\)", line)
    assert found, line
    assert sum(int(part.split()[0]) for part in found[2].split(", ")) == int(found[1]) > 0, line


def test_a_flush_does_not_write_what_is_there(open_disk: OpenDisk) -> None:
    rig = open_disk()
    for _ in range(3):
        rig.generate(prompt(17))
        assert rig.flush() == 0
    assert rig.disk.writes == {"stored": 4}
    rig.verify_quiet()


# ---- reset -----------------------------------------------------------------------------------------------------------


@pytest.mark.bug("WR23")
def test_after_a_reset_and_a_restart_nothing_of_before_is_in_any_tier(open_disk: OpenDisk, tmp_path: Path) -> None:
    rig = open_disk()
    for start in range(0, 600, 100):
        rig.generate(prompt(17, start))
    assert rig.flush() == 0
    blocks = rig.disk.blocks
    assert blocks == 24
    rig.reset()
    assert (rig.opened.epoch, rig.disk.blocks, rig.opened.stats().host_blocks) == (1, 0, 0)
    assert rig.generate(prompt(17)).restored_tokens == 0
    rig.close()
    again = open_disk()
    assert again.opened.epoch == 1
    assert again.disk.recovered_blocks == 4, "those of after the reset"
    assert again.generate(prompt(17)).restored_tokens == 16
    assert again.generate(prompt(17, 100)).restored_tokens == 0
    again.reset()
    again.abandon()
    last = open_disk()
    assert (last.opened.epoch, last.disk.recovered_blocks) == (2, 0)
    assert last.generate(prompt(17)).restored_tokens == 0
    last.verify_quiet()


@pytest.mark.bug("WR23")
@pytest.mark.parametrize("how", ["stalls", "fails"])
def test_a_reset_that_a_tier_cannot_remember_turns_everything_off(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(lower_module, "RESET_TIMEOUT_S", 0.1)
    rig = open_disk()
    rig.generate(prompt(17))
    assert rig.flush() == 0
    if how == "fails":
        monkeypatch.setattr(rig.lower.device, "start_epoch", lambda epoch: (_ for _ in ()).throw(OSError("no room")))
        rig.disk_jobs.inline = True
    with pytest.raises(TierError, match="did not reach every tier"):
        rig.engine.reset_cache()
    rig.disk_jobs.inline = False
    assert any("did not remember" in str(r.exc_info) or "could not remember" in str(r.exc_info) for r in caplog.records)
    assert rig.opened.stats().errors == {"TierError": 1}
    for _ in range(2):
        assert rig.generate(prompt(17)).restored_tokens == 0
        rig.flush_gpu()
    assert rig.opened.stats().hits == {}
    assert rig.opened.stats().misses == {"absent": 4, "restore_off": 22}
    assert rig.opened.stats().host_blocks == 0, "and nothing is stored"
    if how == "stalls":
        rig.settle()  # the tier remembers after all
    monkeypatch.undo()
    rig.reset()
    rig.generate(prompt(17))
    rig.flush_gpu()
    assert rig.generate(prompt(17)).restored_tokens == 16, "a reset that worked turns them on again"
    rig.verify_quiet()
    caplog.get_records("call").clear()


@pytest.mark.bug("WR23")
@pytest.mark.parametrize("state", ["queued", "reading", "arrived", "landing"])
def test_a_reset_by_another_while_blocks_come(open_disk: OpenDisk, state: str) -> None:
    """The store is shared: whoever resets it does not ask this engine's requests."""
    first = open_disk()
    first.generate(prompt(17))
    first.close()
    rig = open_disk()
    rig.add("a", prompt(17))
    if state == "reading":
        rig.disk_jobs.shut(times=1)
        rig.disk_jobs.run_next()
    elif state != "queued":
        rig.disk_jobs.run_all()
    if state == "landing":
        rig.step()
    rig.disk_jobs.inline = True
    rig.opened.reset()
    rig.disk_jobs.inline = False
    rig.disk_jobs.release()
    rig.run()
    assert rig.finished["a"].restored_tokens == 0
    stats = rig.opened.stats()
    assert stats.hit_blocks + sum(stats.misses.values()) == 4
    assert state == "landing" or stats.misses == {"reset": 4}
    rig.verify_quiet()
    assert rig.generate(prompt(17, 500)).restored_tokens == 0
    rig.verify_quiet()


@pytest.mark.bug("WR23", "WR13")
@pytest.mark.parametrize("state", ["queued", "writing", "written"])
def test_a_reset_while_blocks_are_written_behind(open_disk: OpenDisk, state: str) -> None:
    rig = open_disk(policy="write_through")
    rig.add("a", prompt(17))
    rig.step()
    rig.step()
    rig.copies.run_all()
    rig.step()
    assert rig.disk.ledger.pending == 4
    if state == "writing":
        rig.disk_jobs.shut(times=1)
        rig.disk_jobs.run_next()
        assert rig.disk_jobs.num_parked == 1
    elif state == "written":
        rig.disk_jobs.run_all()
    rig.disk_jobs.inline = True
    rig.opened.reset()
    rig.disk_jobs.inline = False
    rig.disk_jobs.release()
    rig.run()
    rig.settle()
    assert rig.generate(prompt(17)).gpu_hit_tokens == 16, "the engine's own pool was not asked to forget"
    rig.flush_gpu()
    rig.verify_quiet()
    rig.abandon()
    again = open_disk()
    assert again.generate(prompt(17)).restored_tokens == 0
    again.verify_quiet()


def test_a_reset_raises_through_the_store_and_not_through_the_hooks(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_module, "RESET_TIMEOUT_S", 0.05)
    rig = open_disk()
    with pytest.raises(TierError, match="disk tier did not remember"):
        rig.opened.reset()
    assert scheduler_of(rig).reset() is False
    assert rig.opened.epoch == 2
    rig.settle()
    assert rig.lower.epoch == 2


# ---- what is written, and how often ----------------------------------------------------------------------------------


@pytest.mark.bug("PF13")
@pytest.mark.parametrize("host_blocks", [128, 24])
def test_with_min_uses_only_what_repeats_reaches_the_disk(open_disk: OpenDisk, host_blocks: int) -> None:
    rig = open_disk(host_blocks=host_blocks, disk__min_uses=2)
    repeated = [prompt(17, 100 * i) for i in range(3)]
    for turn in range(2):
        for tokens in repeated:
            rig.generate(tokens)
        for i in range(1 if host_blocks == 24 else 20):
            rig.generate(prompt(17, 10_000 + 5000 * turn + 100 * i))
    rig.flush_gpu()
    assert rig.flush() == 0
    assert rig.disk.blocks == 12
    rig.close()
    again = open_disk(disk__min_uses=2, host_blocks=host_blocks)
    for tokens in repeated:
        assert again.generate(tokens).restored_tokens == 16
    again.verify_quiet()


@pytest.mark.bug("PF13")
def test_uses_of_blocks_that_the_gpu_pool_holds_count_too(open_disk: OpenDisk) -> None:
    rig = open_disk(disk__min_uses=2)
    compute(rig, prompt(17))
    compute(rig, prompt(17))
    assert rig.opened.stats().host_blocks <= 4
    assert rig.flush() == 0
    assert rig.disk.blocks == 4
    rig.run()
    rig.verify_quiet()


@pytest.mark.bug("PF05")
def test_the_same_prompt_many_times_is_written_once(open_disk: OpenDisk) -> None:
    rig = open_disk(num_blocks=24, host_blocks=48, max_num_seqs=4)
    for turn in range(10):
        for i in range(3):
            rig.add(f"r{turn}.{i}", prompt(17))
        rig.run()
        rig.flush_gpu()
    rig.forget_host()
    for _ in range(10):
        rig.generate(prompt(17))
        rig.flush_gpu()
    writes = rig.disk.writes
    flushes = 20 * 23
    assert writes["stored"] <= 4 + flushes
    assert rig.disk.blocks == writes["stored"] - rig.disk.evicted_blocks
    assert rig.flush() == 0
    rig.verify_quiet()


def test_writes_go_no_faster_than_told(open_disk: OpenDisk) -> None:
    """Four blocks of 4 KiB a second, where a burst of a quarter is free: time passes in the throttle's waits alone."""
    rig = open_disk(block_tokens=BIG_BLOCK, host_blocks=32, max_batch_tokens=2048, disk__max_write_rate=4 * 4096)
    waited: list[float] = []
    throttle = rig.lower._watched.inner
    assert isinstance(throttle, ThrottledTier)

    def wait(seconds: float) -> None:
        waited.append(seconds)
        rig.clock.advance(seconds)

    throttle._wait = wait
    begun = rig.clock.now()
    for start in (0, 10_000, 20_000):
        rig.generate(prompt(4 * BIG_BLOCK + 1, start))
        assert rig.flush() == 0
    assert rig.disk.blocks == 12
    assert waited
    batches = 3
    assert rig.clock.now() - begun >= (12 - 4 - batches) / 4
    assert rig.disk.available == 1, "waiting is no sickness"
    rig.verify_quiet()


def test_blocks_dropped_for_want_of_a_prefix_are_counted(open_disk: OpenDisk) -> None:
    rig = open_disk(policy="write_through")
    rig.disk_jobs.shut()
    rig.generate(prompt(17))
    rig.disk_jobs.release()
    rig.settle()
    assert DropReason.ORPHAN not in rig.disk.ledger.dropped
    assert rig.disk.blocks == 4
    rig.verify_quiet()
