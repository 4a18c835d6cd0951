"""The witnesses and the scripted connector: each of them sees what it is there to see."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvtier.testing import FakeClock
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing import (
    FakeRunner,
    FakeSampler,
    PageWrite,
    PageWriteLog,
    Recorder,
    difference,
    expected_tokens,
    fingerprint,
    linear_cost,
    unchanged,
)
from kvtier_engine.testing.rig import EngineRig
from kvtier_engine.verdict import Verdict

OpenRig = Callable[..., EngineRig]


# ---- fingerprint -----------------------------------------------------------------------------------------------------


def changed(pool: BlockPool, act: Callable[[], object]) -> list[str]:
    before = fingerprint(pool)
    act()
    return difference(before, fingerprint(pool))


def filled_pool() -> BlockPool:
    pool = BlockPool(4)
    blocks = pool.allocate(2) or []
    pool.publish(blocks[0], b"a", b"root", None, (1,))
    pool.release(blocks)
    return pool


def test_two_fingerprints_of_the_same_state_are_equal_and_hashable() -> None:
    one, two = fingerprint(filled_pool()), fingerprint(filled_pool())
    assert one == two
    assert len({one, two}) == 1
    assert difference(one, two) == []


def test_a_fingerprint_sees_one_reference() -> None:
    pool = filled_pool()
    assert any("_refs[3]: 0 -> 1" in line for line in changed(pool, lambda: pool.acquire([3])))


def test_a_fingerprint_sees_the_order_of_the_free_queue_alone() -> None:
    pool = filled_pool()
    order = list(pool.free_queue())
    [line] = changed(pool, lambda: pool._queue.move_to_end(order[0]))
    assert "_queue.keys(): in the order" in line


def test_a_fingerprint_sees_pins_content_and_counters() -> None:
    pool = filled_pool()
    assert any("_pins" in line for line in changed(pool, lambda: pool.pin(0, "somebody")))
    assert any("_cached" in line for line in changed(pool, pool.reset_cache))
    assert any("_num_allocated" in line for line in changed(pool, lambda: pool.allocate(1)))


class Parent:
    __slots__ = ("__hidden",)

    def __init__(self) -> None:
        self.__hidden = [1]

    def change(self) -> None:
        self.__hidden.append(2)


@dataclass(slots=True, eq=False)
class Thing(Parent):
    name: str
    parts: deque[object] = field(default_factory=deque)

    def __post_init__(self) -> None:
        Parent.__init__(self)


def test_a_fingerprint_walks_slots_of_parents_queues_and_cycles() -> None:
    thing = Thing("a")
    thing.parts.append(thing)
    thing.parts.append(OrderedDict({"x": [Thing("b")]}))
    before = fingerprint(thing)
    thing.change()
    thing.parts[1]["x"][0].name = "c"  # type: ignore[index]
    lines = difference(before, fingerprint(thing))
    assert any("_Parent__hidden" in line for line in lines)
    assert any("parts[1][x][0].name: 'b' -> 'c'" in line for line in lines)


def test_a_fingerprint_passes_over_code_locks_loggers_and_arrays() -> None:
    holder: dict[str, Any] = {
        "lock": threading.Lock(),
        "log": logging.getLogger("a"),
        "call": len,
        "pool": np.zeros(4),
        "count": 1,
    }
    before, with_arrays = fingerprint(holder), fingerprint(holder, arrays=True)
    holder |= {"lock": threading.Lock(), "log": logging.getLogger("b"), "call": max}
    holder["pool"][2] = 1
    assert difference(before, fingerprint(holder)) == []
    assert len(difference(with_arrays, fingerprint(holder, arrays=True))) == 1
    holder["count"] = 2
    assert len(difference(before, fingerprint(holder))) == 1


def test_a_fingerprint_does_not_depend_on_the_order_of_a_set() -> None:
    things = [Thing(str(number)) for number in range(20)]
    assert fingerprint({*things, 1, 2}) == fingerprint({2, 1, *reversed(things)})
    assert fingerprint({*things}) != fingerprint({*things[1:], Thing("other")})


def test_a_fingerprint_sees_that_two_places_no_longer_share_an_object() -> None:
    part = [Thing("a")]
    assert fingerprint([part, part]) != fingerprint([part, [Thing("a")]])


def test_unchanged_names_the_path_and_passes_over_what_it_is_told() -> None:
    pool = filled_pool()
    with pytest.raises(AssertionError, match=r"queue_version"), unchanged(pool):
        pool.queue_version += 1
    with unchanged(pool, ignore=["*.queue_version"]):
        pool.queue_version += 1


# ---- page writes -----------------------------------------------------------------------------------------------------


def run(runner: FakeRunner, request_id: str, table: Sequence[int], tokens: Sequence[int], start: int = 0) -> None:
    runner.execute([BatchItem(request_id, tokens, start, table, None)])


def watched(num_blocks: int = 4) -> tuple[FakeRunner, BlockPool, PageWriteLog]:
    runner, pool = FakeRunner(num_blocks, 4), BlockPool(num_blocks)
    runner.writes = PageWriteLog(pool)
    return runner, pool, runner.writes


def test_writes_are_logged_by_step_request_block_and_positions() -> None:
    runner, pool, log = watched()
    table = pool.allocate(3) or []
    run(runner, "a", table, range(6))
    run(runner, "a", table, range(5), start=6)
    log.verify()
    assert log.of_block(table[1]) == [PageWrite(1, "a", table[1], 4, 6), PageWrite(2, "a", table[1], 6, 8)]
    assert len(log.of_request("a")) == 4
    assert log.of_request("b") == []


def test_a_write_to_a_freed_block_is_a_fault() -> None:
    runner, pool, log = watched()
    table = pool.allocate(1) or []
    pool.release(table)
    run(runner, "a", table, range(4))
    with pytest.raises(AssertionError, match=rf"step 1: request a .* block {table[0]}, which is free"):
        log.verify()


def test_a_write_to_a_shared_published_or_pinned_block_is_a_fault() -> None:
    runner, pool, log = watched()
    table = pool.allocate(3) or []
    pool.acquire(table[:1])
    pool.publish(table[1], b"x", b"root", None, (1,))
    pool.pin(table[2], "somebody")
    run(runner, "a", table, range(12))
    faults = " ".join(log.faults)
    assert len(log.faults) == 3
    assert all(word in faults for word in ("2 requests share", "is published", "a copy pins"))


def test_two_requests_in_one_block_and_the_hook_are_faults() -> None:
    runner, pool = FakeRunner(4, 4), BlockPool(4)
    table = pool.allocate(1) or []
    log = runner.writes = PageWriteLog(check=lambda write: "which is odd" if write.block_id == 3 else None)
    runner.execute([BatchItem("a", [1, 2], 0, table, None), BatchItem("b", [1, 2], 2, table, None)])
    assert len(log.faults) == 1
    assert "request a writes in the same step" in log.faults[0]
    run(runner, "a", [3], [1])
    assert "which is odd" in log.faults[1]
    run(runner, "b", table, [1])
    assert len(log.faults) == 2, "another step may write it for another request"


def test_an_engine_that_is_right_makes_no_faulty_write(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=5, kvtier=False)
    log = rig.runner.writes = PageWriteLog(rig.engine.pool)
    for index in range(4):
        rig.add(f"{index}", list(range(index, index + 3)), max_tokens=9)
    rig.run()
    log.verify()
    assert rig.engine.scheduler.num_preemptions
    assert {write.request_id for write in log.writes} == {"0", "1", "2", "3"}


# ---- the fake model's costs ------------------------------------------------------------------------------------------


def test_time_passes_by_what_is_computed() -> None:
    clock = FakeClock(0.0)
    runner = FakeRunner(4, 4, clock=clock, seconds=linear_cost(per_step=1.0, per_token=0.25, per_pair=0.125))
    run(runner, "a", [0, 1], range(4))
    assert clock.now() == 1.0 + 4 * 0.25 + 4 * 2 * 0.125
    run(runner, "a", [0, 1], range(2), start=4)
    assert clock.now() == 3.0 + 1.0 + 2 * 0.25 + 2 * 5 * 0.125


def test_a_forward_that_fails_takes_time_too() -> None:
    clock = FakeClock(0.0)
    runner = FakeRunner(4, 4, clock=clock, seconds=lambda batch: 2.0)

    def fail(batch: Sequence[BatchItem]) -> None:
        raise RuntimeError("device lost")

    runner.fail = fail
    with pytest.raises(RuntimeError):
        run(runner, "a", [0], range(2))
    assert clock.now() == 2.0


def test_a_clock_without_costs_is_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        FakeRunner(4, 4, clock=FakeClock())


def test_a_cold_runner_still_puts_out_the_oracle() -> None:
    runner = FakeRunner(4, 4)
    sampler: Any = FakeSampler
    [token] = runner.execute([BatchItem("a", list(range(6)), 0, [2, 0], sampler)])
    assert [token] == expected_tokens(range(6), 1)


# ---- recorder --------------------------------------------------------------------------------------------------------


def test_a_recorder_collects_lines_with_their_arguments_while_it_listens() -> None:
    logger = logging.getLogger("kvtier.anything")
    level = logging.getLogger("kvtier").level
    with Recorder() as recorder:
        logger.debug("quiet %d", 1)
        logger.warning("request %s waited %.1f s", "a", 30.5)
    logger.warning("nobody listens")
    assert logging.getLogger("kvtier").level == level
    assert [line.message for line in recorder.log()] == ["quiet 1", "request a waited 30.5 s"]
    [warning] = recorder.warnings("request a")
    assert (warning.args, warning.level, warning.logger) == (("a", 30.5), logging.WARNING, "kvtier.anything")
    assert recorder.warnings("quiet") == []


def test_a_recorder_collects_what_steps_came_to(open_rig: OpenRig) -> None:
    clock = FakeClock(5.0)
    rig = open_rig(kvtier=False, clock=clock)
    with Recorder(clock) as recorder:
        rig.add("a", [1, 2, 3], max_tokens=2)
        for _ in range(3):
            recorder.step(rig.engine)
            clock.advance(1.0)
    assert recorder.verdicts == [Verdict.OK, Verdict.OK, Verdict.IDLE]
    assert (recorder.in_flight, recorder.deadlines) == ([0, 0, 0], [None, None, None])
    assert [step.at for step in recorder.steps] == [5.0, 6.0, 7.0]
    assert recorder.tokens("a") == expected_tokens([1, 2, 3], 2)
    assert list(recorder.finished()) == ["a"]
    assert [step.stats.running for step in recorder.steps if step.stats] == [1, 0, 0]
    assert recorder.num_empty_in_a_row() == 0
