"""An engine that embeds the connector wrongly, or shares its store: misses and drops, never other bytes or a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvtier.executor import ThreadExecutor
from kvtier.keys import BlockDigest
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier_connectors.contract import CopyResult, KVOptions, RequestInfo, StepDemand
from kvtier_engine.testing.rig import ConnectorRig, EngineRig, tiny_settings, tiny_store

LIMIT_S = 10.0


class Fence:
    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.fired = threading.Event()

    def wait(self, timeout: float) -> bool:
        self.waiting.set()
        return self.fired.wait(timeout)


@pytest.fixture
def shared_store(stack: ExitStack) -> Store:
    return stack.enter_context(tiny_store(tiny_settings(64)))


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


# ---- copies that outlive the connector -------------------------------------------------------------------------------


@pytest.mark.bug("WR13", "WR22")
def test_a_store_held_up_by_its_device_at_close_never_writes_a_slot_that_is_anothers(
    open_rig: Callable[..., ConnectorRig],
) -> None:
    with tiny_store(tiny_settings(1)) as store:
        executor = ThreadExecutor("copies under test", 8)
        gone = ConnectorRig(4, make_store=lambda _: store, executor=executor)
        other = ConnectorRig(4, make_store=lambda _: store)
        gone.finish("a", gone.compute("a", prompt(4)))
        fence = Fence()
        gone.plan(4, written=fence)
        assert fence.waiting.wait(LIMIT_S)
        gone.scheduler.complete(gone.worker.close(0.01))
        gone.scheduler.close()
        other.finish("z", other.compute("z", prompt(4, 900)))
        other.store_all()
        fence.fired.set()
        executor.close(LIMIT_S)
        other.verify_stored(other.digests["z"])
        other.scheduler.complete(other.worker.close(LIMIT_S))
        other.scheduler.close()


def test_a_restore_held_up_by_its_device_at_close_never_writes_a_block_that_is_anothers(
    open_rig: Callable[..., ConnectorRig],
) -> None:
    executor = ThreadExecutor("copies under test", 8)
    rig = open_rig(4, 8, executor=executor)
    rig.finish("a", rig.compute("a", prompt(4)))
    rig.plan(4)
    rig.collect(rig.worker.poll(LIMIT_S))
    rig.start("b", prompt(4))
    (block,) = rig.pool.allocate(1) or []
    assert rig.scheduler.admit("b", 0, 1, [block]) == 1
    fence = Fence()
    rig.plan(0, written=fence)
    assert fence.waiting.wait(LIMIT_S)
    rig.scheduler.complete(rig.worker.close(0.01))
    rig.scheduler.close()
    rig.runner.pool[:, block] = 777
    fence.fired.set()
    executor.close(LIMIT_S)
    assert (rig.runner.pool[:, block] == 777).all()


# ---- ids that are none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [lambda ids: None, lambda ids: [[0], *ids], lambda ids: ["x", *ids], lambda ids: [1.5, *ids]],
    ids=["none", "nested", "text", "float"],
)
def test_reused_blocks_that_cannot_be_read_are_all_forgotten(
    open_rig: Callable[..., ConnectorRig], spoil: Callable[[Sequence[int]], Any]
) -> None:
    rig = open_rig(2, 8)
    rig.finish("a", rig.compute("a", prompt(4)))
    blocks = rig.pool.allocate(2)
    assert blocks is not None
    rig.scheduler.plan_step(spoil(rig.pool.take_reused()), StepDemand(2, 0, 0))
    rig.runner.pool[:, blocks] = 999
    rig.pool.release(blocks)
    rig.store_all()
    assert rig.held(rig.digests["a"]) == [False]


def test_reused_blocks_may_come_in_any_array(open_rig: Callable[..., ConnectorRig]) -> None:
    torch = pytest.importorskip("torch")
    for convert in (np.asarray, torch.tensor):
        rig = open_rig(2, 8)
        rig.finish("a", rig.compute("a", prompt(4)))
        assert rig.pool.allocate(2) is not None
        reused: Any = convert(rig.pool.take_reused())
        rig.scheduler.plan_step(reused, StepDemand(2, 0, 0))
        assert rig.dropped == {DropReason.OVERTAKEN: 1}


@pytest.mark.parametrize("ids", [[-1], [4], [0.5], [None]])
def test_blocks_outside_the_pool_are_neither_stored_nor_landed_in(
    open_rig: Callable[..., ConnectorRig], ids: list[Any]
) -> None:
    rig = open_rig(4, 8, "write_through")
    digests = rig.start("a", prompt(4))
    rig.scheduler.publish("a", 0, ids)
    rig.plan(0)
    rig.copy_all()
    assert rig.held(digests) == [False]
    rig.finish("b", rig.compute("b", prompt(4)))
    rig.store_all()
    rig.start("c", prompt(4))
    assert rig.scheduler.admit("c", 0, 1, ids) == 0
    assert rig.pins() == []


def test_a_block_named_twice_is_not_landed_in(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(4, 8)
    rig.finish("a", rig.compute("a", prompt(8)))
    rig.store_all()
    rig.start("b", prompt(8))
    assert rig.scheduler.admit("b", 0, 2, [3, 3]) == 0


def test_negative_places_are_refused(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(8, 16)
    rig.finish("a", rig.compute("a", prompt(12)))
    rig.store_all()
    rig.start("b", prompt(12))
    assert rig.scheduler.match("b", -1, 5).num_blocks == 0
    blocks = rig.pool.allocate(1)
    assert blocks is not None
    assert rig.scheduler.admit("b", -2, 1, blocks) == 0
    rig.scheduler.publish("b", -1, blocks)
    assert rig.store.stats().errors["ValueError"] >= 3
    assert rig.ledger.pending == 0


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_digests_that_are_no_chain_end_the_walk(open_rig: Callable[..., ConnectorRig], policy: str) -> None:
    rig = open_rig(8, 16, policy)
    one, two = BlockDigest(b"d" * 32), BlockDigest(b"e" * 32)
    for name, digests in (("self", [one, one]), ("circle", [one, two, one, two])):
        rig.scheduler.start_request(RequestInfo(name, digests))
        rig.scheduler.publish(name, 0, list(range(len(digests))))
        rig.scheduler.plan_step([], StepDemand(0, 8, 0))
    rig.scheduler.check_integrity()


# ---- results that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [None, (True,) * 9, (), "yes", (1, 1)], ids=repr)
def test_results_that_say_nothing_plain_end_their_job(open_rig: Callable[..., ConnectorRig], copied: Any) -> None:
    rig = open_rig(6, 8)
    rig.finish("a", rig.compute("a", prompt(8)))
    jobs = [job.job_id for job in rig.plan(6, submit=False).jobs]
    rig.collect([CopyResult(job_id, copied) for job_id in jobs])
    assert rig.ledger.pending == 0
    assert rig.pins() == []
    rig.pool.release(rig.pool.allocate(1) or [])  # the queue moves: what was dropped is looked at again
    rig.store_all()
    rig.start("b", prompt(8))
    blocks = rig.pool.allocate(2)
    assert blocks is not None
    assert rig.scheduler.admit("b", 0, 2, blocks) == 2
    jobs = [job.job_id for job in rig.plan(0, submit=False).jobs]
    (outcome,) = rig.collect([CopyResult(job_id, copied) for job_id in jobs])
    assert outcome.num_landed <= 2
    assert rig.pins() == []


@pytest.mark.parametrize("results", [None, [None], [object()], 5])
def test_what_is_no_list_of_results_completes_nothing(open_rig: Callable[..., ConnectorRig], results: Any) -> None:
    assert open_rig().scheduler.complete(results) == []


def test_a_demand_that_is_no_number_spoils_one_step_only(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(4, 8)
    rig.finish("a", rig.compute("a", prompt(8)))
    rig.scheduler.plan_step([], StepDemand(float("nan"), 4, 0))  # type: ignore[arg-type]
    rig.store_all()
    assert all(rig.held(rig.digests["a"]))


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_blocks_that_wait_for_a_copier_that_hangs_are_bounded_by_the_pool(
    open_engine: Callable[..., EngineRig], policy: str
) -> None:
    rig = open_engine(16, 64, policy)
    for i in range(200):
        rig.add(f"r{i}", [i, *prompt(12, 1)], 1, options=KVOptions(restore=False))
        while f"r{i}" in rig.engine.scheduler:
            rig.step()
    assert rig.ledger.pending <= 16


def test_an_idle_engine_remembers_a_bounded_number_of_evictions(
    open_engine: Callable[..., EngineRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connectors.scheduler.MAX_NOTED_EVICTIONS", 32)
    with tiny_store(tiny_settings(4)) as store:
        idle, busy = EngineRig(8, 4, store=store), EngineRig(8, 4, store=store)
        idle.generate(prompt(5))
        for i in range(60):
            busy.generate([i, *prompt(11, 1)])
        assert store.stats().evicted_blocks > 64
        assert len(idle.engine.connector.scheduler._evicted) <= 32  # type: ignore[union-attr]
        idle.close()
        busy.close()


# ---- a shared store --------------------------------------------------------------------------------------------------


def test_blocks_that_a_sharer_took_out_of_the_store_are_stored_again(shared_store: Store) -> None:
    one = EngineRig(24, 64, "write_through", store=shared_store)
    other = EngineRig(24, 64, "write_through", store=shared_store)
    other.add("x", prompt(17), 3)
    other.engine.step()
    other.engine.step()
    one.generate(prompt(17))
    other.close()  # with its copies under way: their blocks, which the first saw as stored, go
    for i in range(10):
        one.generate([*prompt(17), *prompt(10, 200 + 10 * i)])
    assert one.ledger.dropped.get(DropReason.ORPHAN, 0) < 10
    assert shared_store.stats().host_blocks >= 10
    one.close()


@pytest.mark.bug("WR23")
def test_a_reset_by_a_sharer_or_of_the_store_itself_reaches_blocks_published_before(shared_store: Store) -> None:
    options: dict[str, Any] = {"store": shared_store, "max_num_seqs": 1, "max_batch_tokens": 4}
    one, other = EngineRig(12, 64, **options), EngineRig(12, 64, **options)
    for reset in (one.engine.reset_cache, shared_store.reset):
        other.generate(prompt(17))
        reset()
        other.flush_gpu()
        assert one.generate(prompt(17)).restored_tokens == 0
        one.engine.reset_cache()
        other.engine.reset_cache()
    one.close()
    other.close()


@pytest.mark.bug("WR23")
def test_a_request_of_before_a_reset_neither_stores_nor_restores(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(8, 16, "write_through")
    blocks = rig.pool.allocate(2)
    assert blocks is not None
    digests = rig.start("old", prompt(8))
    rig.store.reset()
    rig.write(blocks, digests)
    rig.publish("old", 0, blocks)
    rig.store_all()
    assert rig.held(digests) == [False, False]
    rig.finish("new", rig.compute("new", prompt(8)))
    rig.store_all()
    assert rig.scheduler.match("old", 0, 2).num_blocks == 0


def test_a_reset_between_lease_and_landing_voids_it(
    open_rig: Callable[..., ConnectorRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(4, 8)
    rig.finish("a", rig.compute("a", prompt(8)))
    rig.store_all()
    lease = rig.space.lease

    def late(*arguments: Any) -> Any:
        leases = lease(*arguments)
        rig.store.reset()
        return leases

    monkeypatch.setattr(rig.space, "lease", late)
    rig.start("b", prompt(8))
    blocks = rig.pool.allocate(2)
    assert blocks is not None
    rig.scheduler.admit("b", 0, 2, blocks)
    rig.plan(0)
    assert [outcome.num_landed for outcome in rig.copy_all()] in ([], [0])


def test_a_connector_goes_by_its_own_settings_over_a_shared_store(shared_store: Store) -> None:
    rig = EngineRig(8, 64, "off", store=shared_store, restore__enabled=False)
    rig.generate(prompt(17))
    rig.flush_gpu()
    assert rig.ledger.due == 0
    assert shared_store.stats().host_blocks == 0
    rig.close()


def test_hits_are_never_more_than_what_was_asked(open_rig: Callable[..., ConnectorRig]) -> None:
    rig = open_rig(8, 16)
    rig.finish("a", rig.compute("a", prompt(12)))
    rig.store_all()
    rig.start("b", prompt(12))
    blocks = rig.pool.allocate(3)
    assert blocks is not None
    rig.scheduler.admit("b", 0, 0, blocks)
    stats = rig.store.stats()
    assert stats.hit_blocks <= stats.asked_blocks


def test_blocks_whose_ancestors_are_nowhere_are_dropped_once_each(shared_store: Store) -> None:
    """The other engine reset the store; this one kept its pool, and goes on with prefixes that are of before."""
    one, other = EngineRig(24, 64, store=shared_store), EngineRig(24, 64, store=shared_store)
    one.generate(prompt(17))
    other.engine.reset_cache()
    for i in range(40):
        one.generate([*prompt(17), *prompt(10, 2000 + 10 * i)])
    assert one.ledger.stored == 0
    assert one.ledger.due <= 40 * 3
    one.close()
    other.close()


@pytest.mark.parametrize("policy", ["on_evict", "write_through"])
def test_blocks_are_stored_when_their_missing_ancestor_comes_back(
    open_rig: Callable[..., ConnectorRig], policy: str
) -> None:
    rig = open_rig(8, 16, policy)
    blocks = rig.pool.allocate(3)
    assert blocks is not None
    digests = rig.start("a", prompt(12))
    rig.write(blocks, digests)
    for _ in range(5):
        rig.scheduler.publish("a", 1, blocks[1:2])
        rig.pool.release(rig.pool.allocate(1) or [])
        rig.pool.release(blocks[1:2])
        rig.store_all()
        rig.pool.acquire(blocks[1:2])
    assert rig.dropped == {DropReason.ORPHAN: 1}
    rig.scheduler.publish("a", 0, blocks[:1])
    rig.scheduler.publish("a", 2, blocks[2:])
    rig.pool.release(blocks)
    rig.store_all()
    assert rig.held(digests) == [True, True, True]
    rig.verify_stored(digests)
