"""Whatever comes, in whatever order, the engine goes on: no stall, outputs of a cold run, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.testing import FakeClock
from kvtier_connectors.contract import KVOptions
from kvtier_engine.request import FinishReason
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing import FakeRunner, PageWriteLog, ScriptedConnector, linear_cost
from kvtier_engine.testing.rig import EngineRig
from kvtier_engine.testing.tasks import TaskKind
from kvtier_engine.verdict import Verdict

BLOCK_TOKENS = 2
PROMPT_TOKENS = 16


class NeverStalls(RuleBasedStateMachine):
    """Prompts share prefixes, since their tokens are few; ids are used again; forwards fail. The oracle is a sequential
    recompute, and a log of writes sees every block that is written while others may read it."""

    has_tiers: ClassVar[bool] = False

    @initialize(
        num_blocks=st.integers(4, 10) | st.integers(2, 20),
        max_num_seqs=st.integers(2, 6) | st.just(1),
        max_batch_tokens=st.sampled_from([1, 2, 3, 5, 8, 64]),
        share=st.sampled_from([None, 0.3, 0.7]),
        policy=st.sampled_from(["fcfs", "priority"]),
        head_patience=st.sampled_from([0, 1, 8]),
        max_capacity_waiters=st.sampled_from([1, 2, 8]),
        num_ranks=st.integers(1, 2),
    )
    def open(self, num_blocks: int, max_num_seqs: int, max_batch_tokens: int, num_ranks: int, **engine: Any) -> None:
        self.clock = FakeClock()
        cost = linear_cost(per_step=0.01, per_token=0.001)
        runner = FakeRunner(num_blocks, BLOCK_TOKENS, clock=self.clock, seconds=cost)
        self.kv: ScriptedConnector | None = None
        if self.has_tiers:
            self.kv = ScriptedConnector(self.clock, block_tokens=BLOCK_TOKENS, num_ranks=num_ranks)
        self.rig = EngineRig(
            runner=runner,
            clock=self.clock,
            kvtier=False,
            open_connector=self.kv,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            engine={"prefill_share": engine.pop("share"), **engine},
        )
        self.log = runner.writes = PageWriteLog(self.rig.engine.pool)
        runner.fail = self._maybe_fail
        self.is_failing = False
        self.expected_failures: set[str] = set()
        self.num_empty = 0

    def _maybe_fail(self, batch: Sequence[BatchItem]) -> None:
        if self.is_failing:
            self.is_failing = False
            self.expected_failures.update(item.request_id for item in batch)
            raise RuntimeError("the device failed")

    # ---- what comes ----------------------------------------------------------------------------------------------

    @rule(
        names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True),
        head=st.integers(0, 2),
        length=st.integers(1, 6) | st.integers(1, 39),
        tail=st.lists(st.integers(0, 2), max_size=3),
        max_tokens=st.sampled_from([None, None, None, 1, 2, 9]),
        priority=st.integers(-1, 1),
        max_wait_s=st.sampled_from([None, None, 0.0, 1.0]),
    )
    def add(
        self,
        names: list[str],
        head: int,
        length: int,
        tail: list[int],
        max_tokens: int | None,
        priority: int,
        max_wait_s: float | None,
    ) -> None:
        """One, or several that are equal. Few are long and many may grow, so that there are preemptions."""
        prompt = ([head] * length + tail)[-(self.rig.engine.max_model_len - 1) :]
        for name in names:
            if name in self.rig.engine.scheduler:
                continue
            self.expected_failures.discard(name)
            self.rig.add(name, prompt, max_tokens, options=KVOptions(priority=priority, max_wait_s=max_wait_s))

    @precondition(lambda self: self.rig.engine.num_unfinished)
    @rule(data=st.data(), again=st.booleans())
    def abort(self, data: st.DataObject, again: bool) -> None:
        live = sorted(request.request_id for request in self.rig.engine.scheduler.requests())
        name = data.draw(st.sampled_from(live))
        self.rig.abort(name)
        if again:  # its id is used again at once
            self.rig.add(name, [3] * min(5, self.rig.engine.max_model_len - 1), None)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(seconds=st.sampled_from([-5.0, 0.001, 0.5, 3.0, 61.0]))
    def jump(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def fail_next_forward(self) -> None:
        self.is_failing = True

    # ---- what must hold ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        result = self.rig.step()
        self.log.verify()
        for output in result.outputs:
            if output.finish_reason is FinishReason.ERROR:
                assert output.request_id in self.expected_failures, output.error
        assert result.verdict is not Verdict.STALL, result.stall
        if result.verdict is Verdict.WAIT:
            assert self.has_tiers, "nothing is under way that could be waited for"
            assert result.in_flight or result.next_deadline is not None

    @invariant()
    def everything_agrees(self) -> None:
        engine = self.rig.engine
        engine.check_integrity()
        pool = engine.pool
        stats = engine.scheduler.stats()
        assert stats.blocks_free + stats.blocks_used + stats.blocks_held == pool.num_blocks
        for request in engine.scheduler.requests():
            assert request.num_computed < len(request.tokens), "a token is left to compute"
            assert request.num_published * BLOCK_TOKENS <= request.num_computed

    def _let_all_end(self) -> None:
        """What is under way ends."""
        if self.kv is not None:
            self.kv.deliver_all()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.is_failing = False
            for _ in range(2500):
                if not self.rig.engine.has_work:
                    break
                self._step()
                self._let_all_end()
            self.rig.verify_quiet()
            assert self.rig.engine.scheduler.stats().waiting == 0
            assert self.rig.engine.pool.holders() == {}
        finally:
            self.rig.close()


class NeverStallsWithTiers(NeverStalls):
    """Beside tiers that answer late, in any order, by half, or not at all."""

    has_tiers: ClassVar[bool] = True

    @rule(head=st.integers(0, 1), num_blocks=st.integers(1, PROMPT_TOKENS), tier=st.sampled_from(["host", "disk"]))
    def hold(self, head: int, num_blocks: int, tier: str) -> None:
        assert self.kv is not None
        self.kv.hold([head] * (num_blocks * BLOCK_TOKENS), tier=tier)

    @rule(on=st.booleans())
    def store(self, on: bool) -> None:
        assert self.kv is not None
        self.kv.store_all(on=on)

    @precondition(lambda self: self.kv.tasks())
    @rule(data=st.data(), rank=st.integers(0, 1), how=st.sampled_from(["ok", "ok", "ok", "failed", "half"]))
    def deliver(self, data: st.DataObject, rank: int, how: str) -> None:
        assert self.kv is not None
        task = data.draw(st.sampled_from(self.kv.tasks()))
        self.kv.deliver(task, rank, how != "failed", task.num_blocks // 2 if how == "half" else None)

    @rule(kind=st.sampled_from([None, *TaskKind]))
    def drop(self, kind: TaskKind | None) -> None:
        """Tiers lose what they hold."""
        assert self.kv is not None
        for task in self.kv.tasks(kind):
            if task.kind is not TaskKind.STORE:
                self.kv.drop(task.digests[-1:])


TestNeverStalls = NeverStalls.TestCase
TestNeverStalls.settings = settings(max_examples=50, stateful_step_count=40)
TestNeverStalls.pytestmark = [pytest.mark.bug("CR03")]  # type: ignore[attr-defined]

TestNeverStallsWithTiers = NeverStallsWithTiers.TestCase
TestNeverStallsWithTiers.settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.parametrize("machine_class", [NeverStalls, NeverStallsWithTiers])
@pytest.mark.parametrize("seed", range(4))
def test_r2_r10_r28_dense_traffic_never_stalls(seed: int, machine_class: type[NeverStalls]) -> None:
    """Pools that are always full: growing requests, many of them twins, and turns for fewer than run."""
    for number in range(15):
        rng = random.Random(1000 * seed + number)
        machine = machine_class()
        machine.open(
            num_blocks=rng.randint(4, 12),
            max_num_seqs=rng.randint(2, 6),
            max_batch_tokens=rng.choice([1, 2, 3, 64]),
            num_ranks=rng.randint(1, 2),
            share=rng.choice([None, 0.3, 0.7]),
            policy=rng.choice(["fcfs", "priority"]),
            head_patience=rng.choice([0, 1, 8]),
            max_capacity_waiters=rng.choice([1, 2, 8]),
        )
        try:
            crowd(machine, rng)
        finally:
            machine.teardown()


def crowd(machine: NeverStalls, rng: random.Random) -> None:
    kv = machine.kv
    if kv is not None:
        for head in range(4):
            kv.hold([head] * rng.randint(1, 16), tier=rng.choice(["host", "disk"]))
        kv.store_all(on=rng.random() < 0.5)
    for turn in range(12):
        head, length, priority = rng.randrange(4), rng.randint(1, 6), rng.randint(-1, 1)
        for twin in range(rng.randint(1, 2)):
            prompt, options = [head] * length, KVOptions(priority=priority)
            machine.rig.add(f"{turn} {twin}", prompt, rng.choice([None, None, 4]), options=options)
        for _ in range(rng.randint(0, 6)):
            machine._step()
            for task in [] if kv is None else kv.tasks():
                if rng.random() < 0.3:
                    assert kv is not None
                    kv.deliver(task, rng.randrange(2), ok=rng.random() < 0.8)
