"""Restores in any order of events: what lands is right, nothing is lost or kept, and every wait ends."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.config import Settings
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier_connectors import arriving
from kvtier_connectors.contract import CopyJob, CopyResult, KVOptions, RestoreOutcome, RestorePoll, StepDemand, StepWork
from kvtier_engine.testing.rig import ENOUGH_MEMORY, ConnectorRig

NAMES = st.sampled_from("abcdef")
PROMPTS = 4
SIZE = 3  # blocks of a prompt


@dataclass
class Live:
    number: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    first: int = 0
    is_landing: bool = False
    is_waiting: bool = True


class RestoringMachine(RuleBasedStateMachine):
    """Plays an engine that does what the contract says, over a disk that is read when told, and copies that end when
    told, well or not, or never."""

    @initialize(host=st.sampled_from([4, 8, 32]), active=st.sampled_from([1, 2, 64]), ranks=st.integers(1, 2))
    def build(self, host: int, active: int, ranks: int) -> None:
        logging.getLogger("kvtier").setLevel(logging.CRITICAL)
        self.max_active, arriving.MAX_ACTIVE = arriving.MAX_ACTIVE, active
        self.directory = tempfile.TemporaryDirectory()
        self.disk_jobs, clock = ManualExecutor(), FakeClock()

        def make_store(settings: Settings) -> Store:
            return Store(settings, memory=ENOUGH_MEMORY, touch=False, clock=clock, disk_executor=self.disk_jobs)

        disk: dict[str, Any] = {"disk__path": [str(Path(self.directory.name) / "disk")], "disk__size": "4MiB"}
        more: dict[str, Any] = {"disk__min_free": 1, "restore__capacity_bound_s": 3.0, "restore__episode_budget_s": 4.0}
        self.rig = ConnectorRig(12, host, make_store=make_store, clock=clock, num_ranks=ranks, **disk, **more)
        self.num_ranks = ranks
        self.live: dict[str, Live] = {}
        self.jobs: list[tuple[CopyJob, set[int]]] = []
        self.named: set[str] = set()
        for number in range(PROMPTS):
            blocks = self.rig.compute("filler", self.prompt(number))
            self.rig.finish("filler", blocks)
            self.plan()
            self.end_all()
            self.disk_jobs.run_all()
            self.forget_host()
            self.rig.pool.reset_cache()
            self.plan()

    def prompt(self, number: int) -> list[int]:
        return list(range(100 * number, 100 * number + 4 * SIZE))

    def plan(self) -> None:
        work = StepWork(100, 0.0, 50.0, 0)
        demand = StepDemand(self.rig.pool.take_num_allocated(), 12, 0, work)
        plan = self.rig.scheduler.plan_step(self.rig.pool.take_reused(), demand)
        self.jobs += [(job, set(range(self.num_ranks))) for job in plan.jobs]

    def end_job(self, position: int, copied: bool) -> None:
        job, ranks = self.jobs[position]
        rank = ranks.pop()
        if copied and rank == 0:
            self.copy(job)
        if not ranks:
            del self.jobs[position]
        verdicts = (copied,) * len(job.block_ids)
        self.take(self.rig.collect([CopyResult(job.job_id, verdicts, seconds=0.01, rank=rank)]))

    def copy(self, job: CopyJob) -> None:
        worker = self.rig.worker
        worker._run(job, self.rig.space.buffer)
        worker.poll()

    def end_all(self) -> None:
        while self.jobs:
            self.end_job(0, copied=True)

    def take(self, outcomes: list[RestoreOutcome]) -> None:
        for outcome in outcomes:
            live = self.live[outcome.request_id]
            assert live.is_landing, "an outcome for a request that does not wait for one"
            live.is_landing = False
            self.rig.verify_landed(
                live.blocks[: outcome.num_landed],
                self.rig.digests[outcome.request_id][live.first : live.first + outcome.num_landed],
            )
            self.rig.pool.release(live.blocks)
            live.blocks = []
            live.is_waiting = outcome.will_retry

    def take_poll(self) -> RestorePoll:
        poll = self.rig.poll()
        self.take(list(poll.outcomes))
        assert len(set(poll.ready)) == len(poll.ready)
        for name in poll.ready:
            assert self.live[name].is_waiting
        self.named |= set(poll.ready)
        return poll

    def forget_host(self) -> None:
        for namespace in self.rig.store.host.namespaces():
            self.rig.store.host.reset(namespace)

    @rule(
        name=NAMES, number=st.integers(0, PROMPTS), wait=st.sampled_from([0.0, 0.5, 5.0, None]), local=st.integers(0, 2)
    )
    def start(self, name: str, number: int, wait: float | None, local: int) -> None:
        if name in self.live:
            self.end(name)
        self.named.discard(name)
        self.live[name] = Live(number, 4 * SIZE + 1)
        options = KVOptions(max_wait_s=wait)
        self.rig.start(name, self.prompt(number), options=options, num_local_blocks=local, num_tokens=4 * SIZE + 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), local=st.integers(0, SIZE), wants=st.booleans())
    def admit(self, data: st.DataObject, local: int, wants: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[name]
        if not live.is_waiting:
            return
        match = self.rig.scheduler.match(name, local, SIZE - local)
        assert match == self.rig.scheduler.match(name, local, SIZE - local)
        if match.is_staging:
            self.named.discard(name)
            if not wants:
                return
        count = SIZE - local if match.is_staging else match.num_blocks
        blocks = self.rig.pool.allocate(count)
        if blocks is None:
            if not match.is_staging and not self.rig.scheduler.refuse_restore(name):
                assert self.rig.scheduler.match(name, local, SIZE - local).num_blocks == 0
            return
        landing = self.rig.scheduler.admit(name, local, SIZE - local, blocks)
        assert landing <= len(blocks)
        self.rig.pool.release(blocks[landing:])
        live.blocks, live.first, live.is_landing, live.is_waiting = blocks[:landing], local, landing > 0, False

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 1))
    def preempt(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[name]
        if live.is_waiting:
            return
        self.rig.pool.release(live.blocks)
        live.blocks, live.is_landing, live.is_waiting = [], False, True
        live.num_tokens += tokens
        self.named.discard(name)
        self.rig.scheduler.requeue_request(name, 0, live.num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.live))))

    def end(self, name: str) -> None:
        live = self.live.pop(name)
        self.rig.finish(name, live.blocks)
        self.named.discard(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_permanent=st.booleans())
    def refuse(self, data: st.DataObject, is_permanent: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if self.live[name].is_waiting and not self.rig.scheduler.refuse_restore(name, is_permanent=is_permanent):
            assert self.rig.scheduler.match(name, 0, SIZE).num_blocks == 0
            self.named.add(name)

    @rule(position=st.integers(0, 8))
    def read(self, position: int) -> None:
        self.disk_jobs.run_next(position)

    @rule()
    def step(self) -> None:
        self.take_poll()
        self.plan()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), copied=st.booleans())
    def copies_end(self, data: st.DataObject, copied: bool) -> None:
        self.end_job(data.draw(st.integers(0, len(self.jobs) - 1)), copied)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 11.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule()
    def host_forgets(self) -> None:
        self.forget_host()

    @rule()
    def tier_falls_sick(self) -> None:
        self.rig.store.lower[0]._guard.breaker.trip()

    @rule(name=NAMES)
    def reset(self, name: str) -> None:
        for lower in self.rig.store.lower:
            lower.start_epoch = lambda _: None  # type: ignore[method-assign,assignment]
        assert self.rig.scheduler.reset()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check_integrity()
        arrivals = self.rig.scheduler._restores.arrivals
        assert len(arrivals._running) <= arriving.MAX_ACTIVE
        assert len(arrivals._keeper) <= max(1, self.rig.space.capacity_blocks // 2)
        assert self.rig.store.stats().errors == {}

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            poll = self.take_poll()
            for _ in range(200):  # every wait ends, though neither disk nor copies do
                poll = self.take_poll()
                if not poll.num_active:
                    break
                assert poll.next_deadline is not None, "a wait without an end"
                self.rig.clock.advance(max(0.001, poll.next_deadline - self.rig.clock.now()))
            assert not poll.num_active
            for name in sorted(self.live):
                if self.live[name].is_waiting:
                    assert not self.rig.scheduler.match(name, SIZE, 0).is_staging
                self.end(name)
            self.end_all()
            self.disk_jobs.run_all()
            self.plan()
            self.end_all()
            self.disk_jobs.run_all()
            assert self.rig.pins() == []
            assert self.rig.pool.num_free == 12
            assert self.rig.store.stats().leases == 0
            assert self.rig.stats.live_requests == 0
        finally:
            arriving.MAX_ACTIVE = self.max_active
            self.rig.close()
            self.directory.cleanup()
            logging.getLogger("kvtier").setLevel(logging.NOTSET)


TestRestoringMachine = RestoringMachine.TestCase
TestRestoringMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
