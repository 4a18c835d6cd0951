"""An engine whose requests wait for blocks on disk: who runs meanwhile, what a step says, and how it all ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.executor import ThreadExecutor
from kvtier.testing.files import Fault
from kvtier_connectors.contract import KVOptions
from kvtier_engine.request import FinishReason, RequestState
from kvtier_engine.testing.disk import DiskRig, disk_rigs
from kvtier_engine.verdict import Verdict

OpenDisk = Callable[..., DiskRig]


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[OpenDisk]:
    """Engines over a directory that holds the prompts of 17 tokens from 0, 100 and 200 on."""
    with disk_rigs(tmp_path / "disk") as make:
        first = make()
        for start in (0, 100, 200):
            first.generate(prompt(17, start))
        first.close()
        yield make


def state(rig: DiskRig, request_id: str) -> RequestState:
    return next(r.state for r in rig.engine.scheduler.requests() if r.request_id == request_id)


def test_a_step_in_which_all_are_staging_waits_and_is_no_stall(open_disk: OpenDisk) -> None:
    rig = open_disk(restore__max_wait_s=100.0)
    rig.add("a", prompt(17))
    rig.add("b", prompt(17, 100))
    for _ in range(10):
        result = rig.step()
        assert (result.verdict, result.outputs, result.num_tokens) == (Verdict.WAIT, (), 0)
        assert rig.engine.has_work
        assert rig.engine.scheduler.waiting.num_staging == 2
        assert rig.engine.pool.num_free == rig.engine.pool.num_blocks, "nothing is allocated for what may come"
    rig.run()
    assert {output.restored_tokens for output in rig.finished.values()} == {16}
    rig.verify_quiet()


def test_the_one_whose_blocks_come_first_goes_first(open_disk: OpenDisk) -> None:
    rig = open_disk(num_blocks=32)
    rig.add("a", prompt(17))
    rig.add("b", prompt(17, 100))
    rig.disk_jobs.run_next(1)
    rig.step()
    assert (state(rig, "a"), state(rig, "b")) == (RequestState.WAITING, RequestState.RESTORING)
    rig.run()
    rig.verify_quiet()


def test_of_those_whose_blocks_came_the_first_to_arrive_is_first(open_disk: OpenDisk) -> None:
    rig = open_disk(num_blocks=32, max_num_seqs=1)
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        rig.add(name, prompt(17, start))
    rig.add("d", prompt(5, 900), 6)
    rig.step()
    assert state(rig, "d") is RequestState.RUNNING
    for position in (2, 1, 0):  # they come in the other order
        rig.disk_jobs.run_next(position)
        rig.step()
    order: list[str] = []
    while rig.engine.num_unfinished:
        order += [output.request_id for output in rig.step().outputs if output.finished]
        rig.settle()
    assert order == ["d", "a", "b", "c"]
    rig.run()
    rig.verify_quiet()


def test_a_preempted_request_comes_back_from_disk(open_disk: OpenDisk) -> None:
    """Its blocks have left the pool and host memory by the time that there is room for it: it is staged again."""
    rig = open_disk(num_blocks=8, host_blocks=4)
    rig.add("a", prompt(14, 700), 12)
    rig.add("b", prompt(14, 800), 12)
    staged = preempted = False
    for _ in range(60):
        if not rig.engine.num_unfinished:
            break
        rig.step()
        preempted |= rig.engine.scheduler.num_preemptions > 0
        staged |= preempted and rig.engine.scheduler.waiting.num_staging == 1
        rig.settle()
    assert preempted
    assert staged
    rig.run()
    rig.verify_quiet()


@pytest.mark.parametrize("stalled", [False, True])
def test_an_abort_while_staging_gives_its_output_and_frees_the_name(open_disk: OpenDisk, stalled: bool) -> None:
    rig = open_disk()
    rig.add("a", prompt(17))
    if stalled:
        rig.disk_jobs.shut()
        rig.disk_jobs.run_next()
    output = rig.abort("a")
    assert output is not None
    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, ())
    assert rig.engine.scheduler.waiting.num_staging == 0
    assert rig.abort("a") is None
    assert not rig.engine.has_work
    rig.add("a", prompt(17, 100))
    rig.disk_jobs.release()
    rig.run()
    assert rig.finished["a"].restored_tokens == 16
    rig.verify_quiet()


def test_a_name_in_use_is_refused_while_it_is_staging(open_disk: OpenDisk) -> None:
    from kvtier_engine.errors import RequestError

    rig = open_disk()
    rig.add("a", prompt(17))
    with pytest.raises(RequestError, match="in use"):
        rig.engine.add_request("a", prompt(5), rig.engine.scheduler._requests["a"].params)
    rig.run()
    assert rig.finished["a"].restored_tokens == 16


def test_a_reset_is_refused_while_one_is_staging(open_disk: OpenDisk) -> None:
    from kvtier_engine.errors import RequestError

    rig = open_disk()
    rig.add("a", prompt(17))
    with pytest.raises(RequestError, match="unfinished"):
        rig.engine.reset_cache()
    rig.run()


@pytest.mark.bug("HS19")
def test_waiting_ends_as_soon_as_blocks_came(open_disk: OpenDisk) -> None:
    """`wait` is woken by the reading thread, though no copy ended."""
    rig = open_disk(disk_executor=ThreadExecutor("kvtier-disk", 64))
    rig.files.hold("read")
    try:
        rig.add("a", prompt(17))
        assert rig.step().verdict is Verdict.WAIT
        begun = time.monotonic()
        rig.engine.wait(0.05)
        assert time.monotonic() - begun >= 0.04
        rig.files.wait_stalled()
        threading.Timer(0.05, rig.files.heal).start()
        begun = time.monotonic()
        while rig.engine.scheduler.waiting.num_staging:
            rig.engine.wait(20.0)
            rig.step()
        assert time.monotonic() - begun < 10.0
    finally:
        rig.files.heal()
    rig.run()
    assert rig.finished["a"].restored_tokens == 16


def test_wait_returns_at_once_when_nothing_is_under_way(open_disk: OpenDisk) -> None:
    rig = open_disk()
    begun = time.monotonic()
    rig.engine.wait(20.0)
    assert time.monotonic() - begun < 5.0


@pytest.mark.bug("PF01", "AC02")
def test_two_hundred_staging_requests_are_counted_once_each(open_disk: OpenDisk) -> None:
    rig = open_disk(num_blocks=16, restore__max_wait_s=10.0)
    for i in range(200):
        rig.add(f"r{i}", [*prompt(16, 100 * (i % 3)), 5000 + i])
    assert rig.engine.scheduler.waiting.num_staging == 200
    for _ in range(20):
        rig.step()
    assert rig.opened.stats().lookups == 0
    for i in range(100):
        rig.abort(f"r{i}")
    rig.run(3000)
    stats = rig.opened.stats()
    assert stats.lookups == 100
    assert stats.staged_blocks <= 12 + 100
    rig.verify_quiet()


def test_without_kvtier_nothing_waits(tmp_path: Path) -> None:
    from kvtier_engine.testing.rig import EngineRig

    rig = EngineRig(kvtier=False)
    rig.add("a", prompt(17), options=KVOptions(max_wait_s=5.0))
    assert rig.step().verdict is Verdict.OK
    assert rig.engine.flush(1.0) == 0
    rig.close()


def test_outcomes_of_a_flush_reach_a_request_that_was_aborted_meanwhile(open_disk: OpenDisk) -> None:
    rig = open_disk()
    rig.add("a", prompt(17))
    rig.disk_jobs.run_all()
    rig.step()
    assert state(rig, "a") is RequestState.RESTORING
    assert rig.flush() == 0
    rig.abort("a")
    rig.add("a", prompt(5, 900))
    rig.run()
    assert rig.finished["a"].restored_tokens == 0
    rig.verify_quiet()


@pytest.mark.parametrize("fault", [Fault.READ_ERROR, Fault.FLIP_ON_READ])
def test_r72_what_a_disk_cannot_give_back_ends_the_request_where_that_is_asked_for(
    open_disk: OpenDisk, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk forgets a block that it could not read, so the next lookup finds less: that is no success."""
    rig = open_disk(restore__on_failure="fail")
    rig.files.inject(fault)
    rig.add("a", prompt(17))
    rig.run()
    assert rig.finished["a"].finish_reason is FinishReason.ERROR
    assert "could not be restored" in str(rig.finished["a"].error)
    (warning,) = [record.getMessage() for record in caplog.records if "not restored from" in record.getMessage()]
    assert "the request fails" in warning
    rig.files.heal()
    rig.verify_quiet()
