"""Whatever comes, in whatever order, the engine goes on: no stall, outputs of a cold run, and nothing left behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.testing import FakeClock
from kvtier_connectors.contract import KVOptions
from kvtier_engine.engine import StepResult
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
        self.num_stalled = 0

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
        errors = {o.request_id: o.error for o in result.outputs if o.finish_reason is FinishReason.ERROR}
        if result.verdict is Verdict.STALL:
            self._check_stall(result, errors)
        else:
            self.num_stalled = 0
            assert errors.keys() <= self.expected_failures, errors
        if result.verdict is Verdict.WAIT:
            assert self.has_tiers, "nothing is under way that could be waited for"
            assert result.in_flight or result.next_deadline is not None

    def _check_stall(self, result: StepResult, errors: dict[str, str | None]) -> None:
        """Allowed only while copies that were given up keep blocks: the second in a row fails who needs them (R36)."""
        stall = result.stall
        assert stall is not None
        lost = self._lost_blocks()
        assert lost.total(), stall.describe()
        assert result.in_flight == 0, "something else is under way"
        assert stall.holders == lost
        assert stall.num_free < stall.num_needed <= stall.num_free + stall.num_used + stall.num_held
        running = {request.request_id for request in self.rig.engine.scheduler.running} | errors.keys()
        assert not stall.num_running or stall.request_id in running, "those that wait may do with what it has"
        self.num_stalled += 1
        assert errors == ({stall.request_id: stall.describe()} if self.num_stalled == 2 else {})
        self.num_stalled %= 2

    def _lost_blocks(self) -> Counter[str]:
        """Blocks of landings that were given up and whose copies have not ended, by who holds them."""
        return Counter()

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
                is_copying = self.kv is not None and self.kv.num_in_flight()  # an engine waits for none given up
                if not (self.rig.engine.has_work or is_copying):
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

    def _lost_blocks(self) -> Counter[str]:
        assert self.kv is not None
        lost: Counter[str] = Counter()
        for task in self.kv.scheduler.landings.given_up():
            lost[f"restore of {task.request_id}"] += task.num_blocks
        return lost

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


# ---- landings that are given up --------------------------------------------------------------------------------------


def open_given_up(num_blocks: int, max_tokens: int | None) -> NeverStallsWithTiers:
    """The copy of "a" did not end in a minute: it is given up, keeps its block, and "a" is computed in others."""
    machine = NeverStallsWithTiers()
    machine.open(
        num_blocks=num_blocks,
        max_num_seqs=2,
        max_batch_tokens=1,
        num_ranks=1,
        share=None,
        policy="fcfs",
        head_patience=0,
        max_capacity_waiters=1,
    )
    machine.hold(head=0, num_blocks=1, tier="host")
    machine.add(names=["a"], head=0, length=1, tail=[0, 0], max_tokens=max_tokens, priority=0, max_wait_s=None)
    machine.steps(count=1)
    machine.jump(seconds=61.0)
    return machine


@pytest.mark.parametrize(
    ("num_steps", "num_stalls", "reason"),
    [(5, 0, FinishReason.LENGTH), (6, 1, FinishReason.LENGTH), (7, 1, FinishReason.ERROR), (9, 1, FinishReason.ERROR)],
)
def test_r4_r36_the_machine_bears_a_stall_by_a_copy_that_was_given_up(
    num_steps: int, num_stalls: int, reason: FinishReason
) -> None:
    """ "a" grows into the whole pool. What is under way ends behind the first step of the teardown."""
    machine = open_given_up(num_blocks=4, max_tokens=None)
    machine.steps(count=num_steps)
    machine.everything_agrees()
    machine.teardown()
    assert machine.rig.finished["a"].finish_reason is reason
    assert machine.rig.engine.scheduler.stats().stalls == num_stalls


def test_r77_the_machine_ends_with_a_copy_that_was_given_up_and_outlived_its_request() -> None:
    machine = open_given_up(num_blocks=8, max_tokens=2)
    machine.steps(count=6)
    assert not machine.rig.engine.has_work
    assert machine.rig.engine.pool.holders() == {"restore of a": 1}
    machine.teardown()
    assert machine.rig.engine.scheduler.stats().stalls == 0


@pytest.mark.parametrize("spoil", ["nobody", "other", "fits"])
def test_the_machine_bears_no_other_stall(spoil: str) -> None:
    """Blocks that nobody's landing holds, one that is still waited for, and a stall without need are faults."""
    machine = open_given_up(num_blocks=4, max_tokens=None)
    machine.steps(count=6)
    result = machine.rig.step()
    stall = result.stall
    assert stall is not None
    machine._check_stall(result, {})
    machine.num_stalled = 0
    if spoil == "nobody":
        assert machine.kv is not None
        machine._let_all_end()
        machine.kv.scheduler.complete(machine.kv.worker.poll())
    elif spoil == "other":
        stall = replace(stall, holders={"restore of b": 1})
    else:
        stall = replace(stall, num_needed=0)
    with pytest.raises(AssertionError):
        machine._check_stall(replace(result, stall=stall), {})
    machine.num_stalled = 1
    machine.teardown()


# ---- dense traffic ---------------------------------------------------------------------------------------------------


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
