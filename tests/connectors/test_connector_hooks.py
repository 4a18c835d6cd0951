"""What the connector promises an engine whatever happens beside it: no exception, no waiting, nothing left, right
counts."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import os
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import Settings
from kvtier.keys import BlockDigest, Namespace
from kvtier.located import Located
from kvtier.pool import Lease, Owner
from kvtier.reasons import DropReason
from kvtier.stage import Stage
from kvtier.store import Lookup, Space, Store
from kvtier.tickets import Ticket
from kvtier.tiers.reservation import Reservation
from kvtier_connectors.contract import CopyFailure, CopyResult, KVOptions, RequestInfo, StepDemand
from kvtier_engine.request import FinishReason
from kvtier_engine.testing.disk import disk_rigs
from kvtier_engine.testing.rig import ENOUGH_MEMORY, ConnectorRig, EngineRig

OpenEngine = Callable[..., EngineRig]

ERRORS = [OSError, ValueError, KeyError, MemoryError, TimeoutError, asyncio.CancelledError]
CALLS = [
    "lookup",
    "holds",
    "lease",
    "reserve",
    "commit",
    "abort",
    "owner",
    "count_lookup",
    "locate",
    "note_use",
    "reaches",
]


DISK_CALLS = ["stage", "count_fallback"]


class Faults:
    """Says which call of the store fails."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = dict.fromkeys([*CALLS, *DISK_CALLS], 0)
        self.raised = 0
        self._name = ""
        self._error: type[BaseException] = OSError
        self._only: int | None = None

    def set(self, name: str, error: type[BaseException], only: int | None = None) -> None:
        """Let every call of `name`, or only the one counted `only`, raise."""
        self._name, self._error, self._only = name, error, only
        self.calls = dict.fromkeys([*CALLS, *DISK_CALLS], 0)

    def clear(self) -> None:
        self._name = ""

    def meet(self, name: str) -> None:
        number = self.calls[name]
        self.calls[name] += 1
        if name == self._name and self._only in (None, number):
            self.raised += 1
            raise self._error("injected")


class FaultySpace(Space):
    faults: Faults

    def lookup(self, digests: Sequence[BlockDigest]) -> Ticket[Lookup]:
        self.faults.meet("lookup")
        return super().lookup(digests)

    def holds(self, digest: BlockDigest) -> bool:
        self.faults.meet("holds")
        return super().holds(digest)

    def lease(self, digests: Sequence[BlockDigest], owner: Owner) -> list[Lease]:
        self.faults.meet("lease")
        return super().lease(digests, owner)

    def reserve(
        self,
        digest: BlockDigest,
        parent: BlockDigest | None,
        owner: Owner,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> Reservation | DropReason:
        self.faults.meet("reserve")
        return super().reserve(digest, parent, owner, tenant, ttl_s)

    def commit(self, reservations: Sequence[Reservation]) -> list[bool]:
        self.faults.meet("commit")
        return super().commit(reservations)

    def abort(self, reservation: Reservation) -> None:
        self.faults.meet("abort")
        super().abort(reservation)

    def owner(self, name: str) -> Owner:
        self.faults.meet("owner")
        return super().owner(name)

    def count_lookup(self, asked: int, hit: int, miss: Any, staged: Any = None) -> dict[str, int]:
        self.faults.meet("count_lookup")
        return super().count_lookup(asked, hit, miss, staged)

    def locate(self, digests: Sequence[BlockDigest], last: Collection[str] = ()) -> Located:
        self.faults.meet("locate")
        return super().locate(digests, last)

    def stage(self, *args: Any) -> Stage | None:
        self.faults.meet("stage")
        return super().stage(*args)

    def note_use(self, *args: Any) -> None:
        self.faults.meet("note_use")
        super().note_use(*args)

    def reaches(self, digest: BlockDigest) -> bool:
        self.faults.meet("reaches")
        return super().reaches(digest)

    def count_fallback(self, reason: Any) -> None:
        self.faults.meet("count_fallback")
        super().count_fallback(reason)


class FaultyStore(Store):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, memory=ENOUGH_MEMORY, touch=False)
        self.faults = Faults()

    def open_space(self, namespace: Namespace) -> Space:
        space = super().open_space(namespace)
        space.__class__ = FaultySpace
        assert isinstance(space, FaultySpace)
        space.faults = self.faults
        return space


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def story(rig: EngineRig, offset: int = 0) -> None:
    """Conversations that grow, leave the GPU and come back; one preempted, one aborted; a tight host pool."""
    rig.add("a", prompt(9, offset), max_tokens=4)
    rig.add("b", prompt(9, offset + 100), max_tokens=4)
    rig.run()
    rig.flush_gpu()
    rig.add("a2", prompt(17, offset), max_tokens=2)
    rig.add("gone", prompt(9, offset + 100), max_tokens=9)
    for _ in range(3):
        rig.step()
    rig.abort("gone")
    rig.run()
    rig.flush_gpu()
    rig.generate(prompt(17, offset), 2)


# ---- no exception leaves a hook --------------------------------------------------------------------------------------


def verify_survived(rig: EngineRig, store: FaultyStore, error: type[BaseException]) -> None:
    assert not any(output.error for output in rig.finished.values())
    errors = store.stats().errors
    assert errors.get(error.__name__, 0) == store.faults.raised, "each is counted, by type"
    assert set(errors) <= {error.__name__}
    store.faults.clear()
    rig.run()
    pool = rig.engine.pool
    assert not any(pool.pins(block) or pool.refs(block) for block in range(pool.num_blocks))
    assert (rig.stats.in_flight_blocks, rig.ledger.pending) == (0, 0)
    before = rig.stats.landed_blocks
    story(rig, offset=5000)
    assert rig.stats.landed_blocks > before, "and once the store works again it is used again"
    rig.engine.close()
    assert store.stats().leases == 0
    store.check_integrity()


def open_faulty(open_engine: OpenEngine) -> tuple[EngineRig, FaultyStore]:
    rig = open_engine(num_blocks=6, host_blocks=10, make_store=FaultyStore)
    assert isinstance(rig.store, FaultyStore)
    return rig, rig.store


@pytest.mark.bug("CR12")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_store_that_always_raises_costs_hits_and_nothing_else(
    open_engine: OpenEngine, name: str, error: type[BaseException]
) -> None:
    rig, store = open_faulty(open_engine)
    store.faults.set(name, error)
    story(rig)
    if name == "abort":
        assert rig.engine.connector is not None
        assert store.faults.raised == 0, "nothing is given back unless something went wrong"
    else:
        assert store.faults.raised > 0
    verify_survived(rig, store, error)


@pytest.mark.bug("CR12")
@pytest.mark.parametrize("name", CALLS)
def test_a_store_that_raises_once_at_each_call_in_turn(open_engine: OpenEngine, name: str) -> None:
    for number in itertools.count():
        rig, store = open_faulty(open_engine)
        store.faults.set(name, KeyError, only=number)
        story(rig)
        raised = store.faults.raised
        verify_survived(rig, store, KeyError)
        if not raised:
            break
        assert number < 200
    assert number >= 2 or name == "abort"


@pytest.mark.bug("CR12")
@pytest.mark.parametrize("name", [*CALLS, *DISK_CALLS])
def test_a_store_with_a_disk_that_raises_costs_hits_and_nothing_else(tmp_path: Path, name: str) -> None:
    with disk_rigs(tmp_path / "disk") as open_disk:
        first = open_disk()
        first.generate(prompt(17))
        first.close()
        rig = open_disk(restore__max_staging=128)
        assert rig.engine.connector is not None
        space = rig.engine.connector.space
        space.__class__ = FaultySpace
        assert isinstance(space, FaultySpace)
        space.faults = Faults()
        space.faults.set(name, OSError)
        rig.add("first", prompt(17), 2)
        rig.disk_jobs.run_next()
        rig.clock.advance(5.0)
        story(rig)
        assert space.faults.raised > 0 or name == "abort"
        assert rig.opened.stats().errors.get("OSError", 0) == space.faults.raised
        assert not any(output.error for output in rig.finished.values())
        space.faults.clear()
        rig.run()
        rig.verify_quiet()
        before = rig.stats.landed_blocks
        story(rig, offset=5000)
        assert rig.stats.landed_blocks > before
        rig.verify_quiet()


@pytest.mark.bug("CR12")
@pytest.mark.parametrize("error", ERRORS)
def test_a_slot_that_cannot_be_given_back(error: type[BaseException]) -> None:
    rig = ConnectorRig(make_store=FaultyStore)
    assert isinstance(rig.store, FaultyStore)
    rig.finish("a", rig.compute("a", prompt(12)))
    (job,) = rig.plan(step_budget=8, submit=False).jobs
    rig.store.faults.set("abort", error)
    rig.scheduler.complete([CopyResult(job.job_id, (), CopyFailure.RAISED)])
    assert rig.dropped == {DropReason.COPY_FAILED: 3}
    assert rig.pins() == []
    assert rig.store.stats().errors == {error.__name__: 3}
    rig.close()


@pytest.mark.parametrize("name", ["pin", "unpin", "free_queue"])
@pytest.mark.parametrize("number", range(6))
def test_an_engines_pool_that_raises_does_not_hang_its_requests(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    rig = open_engine(num_blocks=6, host_blocks=10)
    call, counter = getattr(rig.engine.pool, name), itertools.count()

    def failing(*args: Any) -> Any:
        done = call(*args) if name == "unpin" else None
        if next(counter) == number:
            raise RuntimeError("injected")
        return done if name == "unpin" else call(*args)

    monkeypatch.setattr(rig.engine.pool, name, failing)
    story(rig)
    assert next(counter) > number
    assert rig.store is not None
    assert rig.store.stats().errors == {"RuntimeError": 1}
    assert not any(output.error for output in rig.finished.values())
    pool = rig.engine.pool
    assert name == "unpin" or not any(pool.pins(block) for block in range(6))
    assert rig.ledger.pending == 0
    assert rig.store.stats().leases == 0


def test_the_first_failure_of_a_kind_is_logged_and_the_others_counted(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    rig, store = open_faulty(open_engine)
    store.faults.set("lookup", OSError)
    story(rig)
    said = [message for message in caplog.messages if "failed" in message]
    assert said == ["connector.match failed; the engine recomputes (later ones of this kind are only counted)"]
    assert store.stats().errors["OSError"] > 1
    assert store.stats().misses.get("tier_error", 0) > 0, "what it cost is among the misses"


def test_what_ends_the_process_is_not_caught(open_engine: OpenEngine) -> None:
    rig, store = open_faulty(open_engine)
    store.faults.set("lookup", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        story(rig)
    store.faults.clear()


# ---- every call in every order ---------------------------------------------------------------------------------------

ids = st.sampled_from(["a", "b", "never started"])
numbers = st.integers(-1, 5)
blocks = st.lists(st.integers(-1, 9), max_size=4)
calls = st.one_of(
    st.tuples(st.just("start_request"), ids, st.integers(0, 4), st.booleans()),
    st.tuples(st.just("match"), ids, numbers, numbers),
    st.tuples(st.just("admit"), ids, numbers, numbers, blocks),
    st.tuples(st.just("publish"), ids, numbers, blocks),
    st.tuples(st.just("plan_step"), blocks, numbers),
    st.tuples(st.just("complete"), st.lists(st.tuples(st.integers(-1, 6), st.lists(st.booleans(), max_size=3)))),
    st.tuples(st.just("finish_request"), ids),
    st.tuples(st.just("requeue_request"), ids, numbers, numbers),
    st.tuples(st.just("poll_restores")),
    st.tuples(st.just("refuse_restore"), ids),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 61.0, -5.0])),
    st.tuples(st.just("reset")),
    st.tuples(st.just("stats")),
    st.tuples(st.just("close")),
)


@pytest.mark.bug("CR04")
@settings(max_examples=150)
@given(st.lists(calls, max_size=30))
def test_every_call_in_every_order_without_a_worker(sequence: list[tuple[Any, ...]]) -> None:
    rig = ConnectorRig(num_blocks=6, host_blocks=4)
    try:
        for name, *arguments in sequence:
            match name:
                case "start_request":
                    request_id, size, restore = arguments
                    rig.scheduler.start_request(RequestInfo(request_id, rig.start("made", prompt(4 * size)), restore))
                case "plan_step":
                    reused, number = arguments
                    rig.scheduler.plan_step(reused, StepDemand(number, number, number))
                case "pass":
                    rig.clock.advance(arguments[0])
                case "complete":
                    rig.scheduler.complete([CopyResult(job, tuple(copied)) for job, copied in arguments[0]])
                case _:
                    getattr(rig.scheduler, name)(*arguments)
            assert rig.ledger.due == rig.ledger.stored + sum(rig.dropped.values()) + rig.ledger.pending
        rig.scheduler.close()
        assert rig.ledger.pending == 0
        assert rig.pins() == []
        assert rig.store.stats().leases == 0
    finally:
        rig.close()


def test_every_call_after_the_store_was_closed() -> None:
    rig = ConnectorRig()
    rig.finish("a", rig.compute("a", prompt(8)))
    rig.store.close()
    rig.start("b", prompt(8))
    assert rig.scheduler.match("b", 0, 2).num_blocks == 0
    assert rig.scheduler.admit("b", 0, 2, [0, 1]) == 0
    rig.scheduler.publish("b", 0, [4, 5])
    rig.scheduler.plan_step([], StepDemand(8, 8, 8))
    rig.scheduler.reset()
    rig.scheduler.finish_request("b")
    rig.worker.close(1.0)
    rig.scheduler.close()
    assert rig.pins() == []


# ---- no waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.bug("PF01")
def test_hooks_neither_sleep_nor_wait_nor_do_io(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> Callable[..., NoReturn]:
        def call(*_: object, **__: object) -> NoReturn:
            pytest.fail(f"{name} was called on the engine's thread")

        return call

    rig = open_engine(num_blocks=6, host_blocks=10, max_num_seqs=2)
    with monkeypatch.context() as patch:
        for owner, name in [
            (time, "sleep"),
            (socket, "socket"),
            (builtins, "open"),
            (os, "open"),
            (os, "read"),
            (os, "write"),
            (threading.Condition, "wait"),
            (threading.Event, "wait"),
            (threading.Thread, "start"),
        ]:
            patch.setattr(owner, name, forbidden(name))
        story(rig)
        for i in range(100):
            rig.add(f"pending {i}", prompt(17, 1000 + i))
        for _ in range(5):
            rig.step()
    for i in range(100):
        rig.abort(f"pending {i}")


@pytest.mark.bug("PF01")
def test_the_cost_of_a_step_does_not_grow_with_the_queue(open_engine: OpenEngine) -> None:
    def asked(num_waiting: int) -> int:
        rig, store = open_faulty(open_engine)
        rig.add("busy", prompt(15), max_tokens=8)
        rig.step()
        for i in range(num_waiting):
            rig.add(f"r{i}", prompt(20, 100 * i))
        store.faults.set("", OSError)
        for _ in range(4):
            rig.step()
        return sum(store.faults.calls.values())

    assert asked(200) == asked(50)


# ---- nothing left ----------------------------------------------------------------------------------------------------

LEAVES = (str, bytes, bytearray, memoryview, int, float, bool, type(None), array)


def containers(root: object) -> dict[str, int]:
    """Every container reachable through attributes of objects of ours, by class and attribute; the largest of each."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        name, found = todo.pop()
        if id(found) in seen or isinstance(found, (*LEAVES, type)):
            continue
        seen.add(id(found))
        if isinstance(found, (dict, list, set, frozenset, deque, tuple)):
            sizes[name] = max(len(found), sizes.get(name, 0))
            values = found.values() if isinstance(found, Mapping) else found
            todo += [(f"{name}[]", value) for value in values]
        elif type(found).__module__.startswith("kvtier") and "testing" not in type(found).__module__:
            names = [slot for kind in type(found).__mro__ for slot in getattr(kind, "__slots__", ())]
            names += list(getattr(found, "__dict__", ()))
            kind_name = type(found).__name__
            todo += [(f"{kind_name}.{attr}", getattr(found, attr)) for attr in names if hasattr(found, attr)]
    return sizes


PER_REQUEST = [
    "ArrivalFlow._new",
    "ArrivalFlow._resting",
    "ArrivalFlow._running",
    "CapacityLedger._waiters",
    "Engine._results",
    "HostKeeper._leased",
    "KVTierScheduler._evicted",
    "KVTierWorker._queued",
    "KVTierWorker._results",
    "LandingFlow._by_job",
    "LandingFlow._queued",
    "Queue._arrivals",
    "RankResults._told",
    "RestoreFlow._freed",
    "RestoreFlow._landing",
    "RestoreFlow._lost",
    "RestoreFlow._refused",
    "RestoreFlow._requests",
    "Roster.running",
    "Scheduler._requests",
    "Scheduler._scheduled",
    "StoreFlow._abandoned",
    "StoreFlow._due",
    "StageTurns._timers",
    "StoreFlow._jobs",
    "Streams._streams",
    "WaitingQueue._ready",
    "WaitingQueue._staging",
]


def test_the_search_finds_containers(open_engine: OpenEngine) -> None:
    rig = open_engine()
    rig.add("a", prompt(9), max_tokens=3)
    rig.step()
    sizes = containers(rig.engine)
    assert set(PER_REQUEST) <= set(sizes)
    assert sizes["Scheduler._requests"] == sizes["Roster.running"] == 1
    assert sizes["Request.tokens"] == 10
    assert {"HostTier._ghosts", "HostPool._slabs", "BlockPool._contents", "PublishedBlocks._by_id"} <= set(sizes)


@pytest.mark.bug("LK13")
def test_after_ten_thousand_requests_ending_in_every_way_every_container_is_bounded(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.naming.MAX_GHOSTS", 100)
    monkeypatch.setattr("kvtier_connectors.known.MAX_NOTED", 100)
    monkeypatch.setattr("kvtier.decisions.MAX_DECISIONS", 100)
    rig = open_engine(num_blocks=24, host_blocks=40, max_num_seqs=16, max_batch_tokens=256)
    step, engine = rig.engine.step, rig.engine
    ended: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)

    def count(outputs: Sequence[Any]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                ended[output.finish_reason] += 1

    def fail(_batch: object) -> None:
        raise RuntimeError("device lost")

    works = rig.runner.fail
    for turn in range(10_000 // 20):
        for i in range(20):
            rig.add(f"r{i}" if turn % 2 else f"r{turn}-{i}", [turn % 7, i, *range(1 + (turn + i) % 9)], 1 + i % 5)
        rig.runner.fail = fail if turn % 10 == 0 else works
        count(step().outputs)
        rig.runner.fail = works
        for request in list(engine.scheduler.requests())[::4]:
            aborted = engine.abort(request.request_id)
            count([aborted] if aborted else [])
        while engine.has_work:
            count(step().outputs)
            rig.executor.run_all()
        rig.runner.batches.clear()
        rig.prompts.clear()
    assert sum(ended.values()) == 10_000
    assert min(ended[FinishReason.LENGTH], ended[FinishReason.ABORT], ended[FinishReason.ERROR]) > 300
    assert engine.scheduler.num_preemptions > 100
    rig.verify_quiet()
    sizes = containers(engine)
    bound = 2 * 40 + 100
    assert {path: size for path, size in sizes.items() if size > bound} == {}
    left = {path: sizes[path] for path in PER_REQUEST if sizes[path]}
    assert left.keys() <= {"Scheduler._scheduled", "KVTierScheduler._evicted"}


# ---- right counts ----------------------------------------------------------------------------------------------------


@pytest.mark.bug("AC01")
def test_the_hit_rate_is_hits_over_blocks_asked_and_restores_are_counted_apart() -> None:
    rig = ConnectorRig(num_blocks=24, host_blocks=400)
    try:
        for i in range(100):
            tokens = prompt(40, 1000 * i)
            rig.finish("before", rig.compute("before", tokens[:12]))
            rig.store_all()
            rig.pool.reset_cache()
            rig.start("r", tokens)
            found = rig.scheduler.match("r", 0, 10)
            blocks_ = rig.pool.allocate(found.num_blocks)
            assert blocks_ is not None
            assert rig.scheduler.admit("r", 0, 10, blocks_) == 3
            rig.plan()
            rig.copy_all()
            rig.finish("r", blocks_)
        stats = rig.store.stats()
        assert (stats.lookups, stats.asked_blocks, stats.hit_blocks) == (100, 1000, 300)
        assert stats.hit_rate == 0.30
        assert stats.misses == {"absent": 700}
        assert (rig.stats.landed_blocks, rig.stats.failed_landings) == (300, 0)
    finally:
        rig.close()


@pytest.mark.bug("AC04")
def test_preempted_requests_that_find_their_own_blocks_are_counted_apart(open_engine: OpenEngine) -> None:
    rig = open_engine(num_blocks=7, max_num_seqs=3, host_blocks=200)
    for i in range(12):
        rig.add(f"r{i}", prompt(6 + i % 4, 1000 * i), max_tokens=9)
    rig.run()
    assert rig.store is not None
    stats = rig.store.stats()
    assert rig.engine.scheduler.num_preemptions > 0
    assert rig.stats.readmissions == rig.engine.scheduler.num_preemptions
    assert rig.stats.landed_blocks > 0, "they did find their own blocks"
    assert (stats.lookups, stats.hit_rate) == (12, 0.0)
    assert all(output.restored_tokens == output.gpu_hit_tokens == 0 for output in rig.finished.values())


@pytest.mark.bug("AC13")
def test_a_request_that_opts_out_touches_no_counter(open_engine: OpenEngine) -> None:
    def counted(opting_out: bool) -> Any:
        rig = open_engine(num_blocks=6, host_blocks=64)
        for i in range(9):
            rig.generate(prompt(9, 100 * (i % 3)))
        if opting_out:
            rig.generate(prompt(9, 900), options=KVOptions(restore=False))
        assert rig.store is not None
        stats = rig.store.stats()
        return stats.lookups, stats.asked_blocks, stats.hit_blocks, stats.misses

    assert counted(opting_out=True) == counted(opting_out=False)


def test_with_restoring_switched_off_what_was_asked_is_missed_for_that_reason(open_engine: OpenEngine) -> None:
    rig = open_engine(num_blocks=6, restore__enabled=False)
    rig.generate(prompt(9))
    rig.flush_gpu()
    assert rig.generate(prompt(9)).restored_tokens == 0
    assert rig.store is not None
    assert set(rig.store.stats().misses) == {"restore_off"}


@pytest.mark.bug("US08")
def test_no_count_is_negative_and_what_is_logged_is_what_is_counted(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig = open_engine(num_blocks=7, host_blocks=12, max_num_seqs=3)
    calls_ = itertools.count()

    def sometimes(_batch: object) -> None:
        if next(calls_) % 9 == 8:
            raise RuntimeError("device lost")

    rig.runner.fail = sometimes
    for i in range(20):
        rig.add(f"r{i}", prompt(5 + i % 8, 100 * (i % 6)), max_tokens=1 + i % 9)
    for i in range(0, 20, 7):
        rig.step()
        rig.abort(f"r{i}")
    rig.run()
    assert rig.store is not None
    stats, connector = rig.store.stats(), rig.stats
    for snapshot in (stats, connector, connector.ledger):
        numbers = [getattr(snapshot, field.name) for field in fields(snapshot)]
        numbers += [count for value in numbers if isinstance(value, Mapping) for count in value.values()]
        assert all(value >= 0 for value in numbers if isinstance(value, int))
    assert stats.asked_blocks == stats.hit_blocks + sum(stats.misses.values())
    assert connector.landed_blocks + connector.failed_landings >= stats.hit_blocks
    assert stats.stored_blocks == connector.ledger.stored
    assert stats.stored_bytes == 64 * stats.stored_blocks
    assert stats.stored_blocks - stats.evicted_blocks == stats.host_blocks
    preempted = [message for message in caplog.messages if message.startswith("preempted request")]
    assert len(preempted) == rig.engine.scheduler.num_preemptions > 0
    failed = [int(m.split()[3]) for m in caplog.messages if m.startswith("the forward of")]
    assert sum(failed) == sum(output.error is not None for output in rig.finished.values()) > 0
