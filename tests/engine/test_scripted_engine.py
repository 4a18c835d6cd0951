"""An engine beside the scripted connector: stores, restores and failures by hand, every output held against the
oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.config import RestoreSettings
from kvtier.errors import IntegrityError
from kvtier.testing import FakeClock
from kvtier_connectors.contract import KVOptions, StepDemand, StepWork
from kvtier_engine.testing import (
    FakeRunner,
    PageWriteLog,
    Recorder,
    ScriptedConnector,
    Task,
    TaskKind,
    expected_tokens,
    linear_cost,
    unchanged,
)
from kvtier_engine.testing.rig import EngineRig
from kvtier_engine.verdict import Verdict

PROMPT = list(range(9))  # two full blocks of four and a token to compute


class Beside:
    """An engine, its scripted connector, and every witness."""

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        settings: dict[str, Any] | None = None,
        cost: Callable[..., float] | None = None,
        **kwargs: Any,
    ) -> None:
        self.clock = FakeClock()
        self.kv = ScriptedConnector(self.clock, settings=RestoreSettings(**(settings or {})), **kwargs)
        runner = FakeRunner(num_blocks, 4, clock=self.clock, seconds=cost or (lambda batch: 0.0))
        self.rig = EngineRig(num_blocks, kvtier=False, open_connector=self.kv, clock=self.clock, runner=runner)
        self.pool = self.rig.engine.pool
        self.writes = runner.writes = PageWriteLog(self.pool)
        self.recorder = Recorder(self.clock)

    def step(self) -> Verdict:
        self.recorder.note(self.rig.step(), self.rig.engine.scheduler.stats())
        self.writes.verify()
        return self.recorder.verdicts[-1]

    def run(self, max_steps: int = 200) -> None:
        """Step and deliver everything until nothing is left."""
        for _ in range(max_steps):
            if not self.rig.engine.has_work:
                return
            self.step()
            self.kv.deliver_all()
        raise AssertionError("a hang")

    def verify_quiet(self) -> None:
        assert self.pool.num_free == self.pool.num_blocks
        assert not any(self.pool.pins(block) for block in range(self.pool.num_blocks))
        assert self.kv.scheduler.num_live == self.kv.num_in_flight() == 0
        self.rig.engine.check_integrity()


def test_from_disk_to_gpu_with_two_ranks() -> None:
    beside = Beside(num_ranks=2)
    beside.kv.hold(PROMPT, tier="disk")
    beside.rig.add("a", PROMPT, 3)
    beside.run()
    assert beside.rig.finished["a"].restored_tokens == 8
    counts = beside.kv.scheduler.counts
    assert (counts["lookups"], counts["asked"], counts["hit"]) == (1, 2, 2)
    beside.verify_quiet()


def test_a_landing_that_fails_on_rank_1_of_2_publishes_nothing_and_changes_no_output() -> None:
    beside = Beside(num_ranks=2, settings={"max_attempts": 1})
    beside.kv.hold(PROMPT)
    beside.rig.add("a", PROMPT, 3)
    assert beside.step() is Verdict.WAIT
    [landing] = beside.kv.tasks(TaskKind.LAND)
    beside.kv.deliver(landing, rank=0)
    assert beside.step() is Verdict.WAIT
    assert not any(map(beside.pool.is_published, range(8)))
    beside.kv.deliver(landing, rank=1, ok=False)
    beside.run()
    assert beside.rig.finished["a"].restored_tokens == 0
    beside.verify_quiet()


def test_wrong_bytes_change_the_output() -> None:
    beside = Beside()
    digests = beside.kv.hold(PROMPT)
    other = beside.kv.hold([7] * 9)
    data = beside.kv.tiers.data(other[0])
    assert data is not None
    beside.kv.tiers.put("host", digests[0], data)
    beside.rig.add("a", PROMPT, 1)
    with pytest.raises(AssertionError, match="other tokens than a cold run"):
        beside.run()


def test_what_is_stored_comes_back() -> None:
    beside = Beside(num_ranks=2)
    beside.kv.store_all()
    beside.rig.add("a", PROMPT, 1)
    beside.step()
    beside.step()
    [store] = beside.kv.tasks(TaskKind.STORE)
    assert [beside.pool.pins(block) for block in store.block_ids] == [1, 1]
    assert beside.pool.holders() == {"store": 2}
    beside.kv.deliver(store, rank=0)
    beside.step()
    assert not any(beside.kv.holds(store.digests)), "one rank's part is no block"
    beside.kv.deliver(store, rank=1)
    beside.step()
    assert all(beside.kv.holds(store.digests))
    beside.kv.store_all(on=False)
    beside.rig.flush_gpu()
    beside.rig.add("again", PROMPT, 3)
    beside.run()
    assert beside.rig.finished["again"].restored_tokens == 8
    beside.verify_quiet()


def test_a_store_that_fails_stores_nothing_and_a_reused_block_is_not_stored() -> None:
    beside = Beside()
    beside.kv.store_all()
    beside.rig.add("a", PROMPT, 1)
    beside.step()
    beside.step()
    [store] = beside.kv.tasks(TaskKind.STORE)
    beside.kv.store_all(on=False)
    beside.kv.deliver(store, verdicts=[False, True])
    beside.step()
    assert beside.kv.holds(store.digests) == [False, True]
    beside.rig.flush_gpu()
    beside.kv.store_all()
    beside.run()
    beside.step()
    assert beside.kv.holds(store.digests) == [False, True]


def test_a_flush_stores_everything_at_once() -> None:
    beside = Beside()
    beside.rig.add("a", PROMPT, 1)
    beside.run()
    assert beside.kv.holds(beside.rig.engine.digests(PROMPT)) == [False, False]
    assert beside.rig.engine.flush(1.0) == 0
    assert beside.kv.holds(beside.rig.engine.digests(PROMPT)) == [True, True]
    beside.verify_quiet()


def test_an_abort_while_landing_frees_the_blocks_when_the_last_rank_told() -> None:
    beside = Beside(num_ranks=2)
    beside.kv.hold(PROMPT)
    beside.rig.add("a", PROMPT, 1)
    beside.step()
    [landing] = beside.kv.tasks()
    beside.rig.abort("a")
    beside.kv.deliver(landing, rank=1)
    beside.step()
    assert beside.pool.num_free == 6
    assert beside.rig.engine.has_work
    beside.kv.deliver(landing, rank=0)
    beside.run()
    beside.verify_quiet()


def test_a_reset_voids_what_is_under_way() -> None:
    beside = Beside()
    beside.kv.store_all()
    beside.rig.add("a", PROMPT, 1)
    beside.step()
    beside.step()
    [store] = beside.kv.tasks(TaskKind.STORE)
    beside.rig.engine.reset_cache()
    beside.kv.deliver(store)
    beside.run()
    assert beside.kv.holds(store.digests) == [False, False]
    beside.verify_quiet()


def test_auto_delivers_at_the_next_poll() -> None:
    beside = Beside(auto=True)
    beside.kv.hold(PROMPT, tier="disk")
    beside.rig.add("a", PROMPT, 3)
    for _ in range(10):
        beside.step()
    assert beside.rig.finished["a"].restored_tokens == 8
    assert beside.kv.tasks() == []
    beside.verify_quiet()


def test_auto_of_some_kinds_leaves_the_others() -> None:
    beside = Beside(auto=["lookup"])
    beside.kv.hold(PROMPT, tier="disk")
    beside.rig.add("a", PROMPT, 1)
    beside.step()
    assert [task.kind for task in beside.kv.tasks()] == [TaskKind.STAGE]
    beside.run()


def test_a_simulation_goes_from_event_to_event() -> None:
    seconds = {TaskKind.LOOKUP: 0.1, TaskKind.STAGE: 0.25, TaskKind.LAND: 0.05, TaskKind.STORE: 0.5}

    def latency(task: Task) -> float:
        return task.began_at + seconds[task.kind]

    beside = Beside(latency=latency, cost=linear_cost(per_step=0.01, per_token=0.001))
    beside.kv.store_all()
    beside.kv.hold(PROMPT, tier="disk")
    beside.rig.add("a", PROMPT, 2)
    began, num_steps = beside.clock.now(), 0
    while beside.rig.engine.has_work:
        num_steps += 1
        assert num_steps < 50
        verdict = beside.step()
        event = beside.kv.next_event()
        if verdict is not Verdict.OK and event is not None:
            beside.clock.advance(max(0.0, event - beside.clock.now()))
    first = beside.rig.finished["a"].ttft_s
    assert first == pytest.approx(0.1 + 0.25 + 0.05 + 0.011)
    assert beside.clock.now() - began == pytest.approx(
        0.4 + 0.022 + (0.5 if beside.kv.scheduler.stores.num_stored else 0)
    )
    assert beside.rig.finished["a"].restored_tokens == 8
    assert beside.kv.next_event() is None
    assert beside.recorder.tokens("a") == expected_tokens(PROMPT, 2)


def test_waits_are_bounded_by_what_computing_was_seen_to_cost() -> None:
    beside = Beside(cost=linear_cost(per_token=0.01))
    beside.kv.hold(PROMPT, tier="disk")
    beside.rig.add("first", PROMPT, 1)
    beside.step()
    assert beside.recorder.deadlines == [beside.clock.now() + 1.0], "nothing is known yet"
    beside.rig.abort("first")
    beside.rig.add("cold", [100 + index for index in range(20)], 1)
    beside.run()
    beside.rig.add("again", PROMPT, 1)
    beside.step()
    assert beside.recorder.deadlines[-1] == pytest.approx(beside.clock.now() + 0.08), "two blocks to compute"
    beside.rig.abort("again")
    beside.kv.scheduler.plan_step([], StepDemand(0, 0, 0, StepWork(0, 0.0, 0.0, 50)))
    beside.rig.add("behind", PROMPT, 1)
    beside.step()
    assert beside.recorder.deadlines[-1] == pytest.approx(beside.clock.now() + 0.58), "50 tokens before them"
    beside.run()


def test_a_question_about_admission_changes_nothing() -> None:
    beside = Beside(num_blocks=4)
    beside.kv.hold(PROMPT)
    beside.rig.add("a", [50, 51, 52, 53, 54], max_tokens=6)
    beside.step()
    beside.rig.add("b", PROMPT, 1)
    scheduler = beside.rig.engine.scheduler
    waiting = next(iter(scheduler.waiting))
    with unchanged(beside.rig.engine):
        for _ in range(3):
            scheduler.admission.could_admit(waiting, scheduler.running)
    beside.run()


def test_integrity_sees_a_pin_that_is_nobody_s() -> None:
    beside = Beside()
    beside.kv.check_integrity()
    beside.pool.pin(3, "somebody")
    with pytest.raises(IntegrityError, match=r"pin blocks \[\], the pool says \[3\]"):
        beside.kv.check_integrity()


def test_close_ends_every_copy_and_is_idempotent() -> None:
    beside = Beside()
    beside.kv.hold(PROMPT)
    beside.rig.add("a", PROMPT, 1)
    beside.step()
    [landing] = beside.kv.tasks()
    beside.rig.engine.close()
    beside.rig.engine.close()
    beside.kv.close()
    beside.verify_quiet()
    beside.kv.deliver(landing)
    assert beside.kv.tasks() == []


def test_a_connector_serves_one_engine_and_holds_what_it_can_know() -> None:
    beside = Beside()
    digests = beside.kv.hold(PROMPT, tier="disk")
    assert beside.kv.hold(digests, first_block=1) == digests[1:]
    assert beside.kv.holds(digests) == [False, True]
    beside.kv.drop(digests, tier="host")
    assert beside.kv.holds(digests) == [False, False]
    assert beside.kv.holds(digests, "disk") == [True, True]
    with pytest.raises(ValueError, match="hold it by its tokens"):
        beside.kv.hold(beside.rig.engine.digests([1] * 8))
    with pytest.raises(ValueError, match="serves one engine"):
        EngineRig(kvtier=False, open_connector=beside.kv)


def tell(dice: random.Random) -> None:
    """A story of arrivals, aborts, evictions and deliveries, good, bad, double and late, until all is over."""
    num_blocks, num_ranks = dice.choice([4, 6, 10]), dice.choice([1, 2, 3])
    settings = {
        "max_attempts": dice.choice([1, 2, 4]),
        "episode_budget_s": dice.choice([1.0, 10.0]),
        "capacity_bound_s": dice.choice([0.0, 3.0, 60.0]),
        "on_failure": dice.choice(["recompute", "recompute", "fail"]),
    }
    beside = Beside(num_blocks, settings=settings, cost=linear_cost(0.001, 0.001), num_ranks=num_ranks)
    beside.kv.store_all(on=dice.random() < 0.7)
    prompts = [[b] * k + [b + 1] * j for b in range(3) for k in (4, 8) for j in (1, 4, 5)]
    for prompt in dice.sample(prompts, 8):
        beside.kv.hold(prompt, tier=dice.choice(["host", "disk"]))
    seen: list[Task] = []
    for _ in range(100):
        request_id = f"{dice.randrange(8)}"
        if request_id not in beside.rig.engine.scheduler and dice.random() < 0.4:
            options = KVOptions(
                restore=dice.random() < 0.9,
                store=dice.random() < 0.9,
                max_wait_s=dice.choice([None, 0.0, 0.5]),
                max_restore_tokens=dice.choice([None, None, 4]),
            )
            beside.rig.add(request_id, dice.choice(prompts), dice.randint(1, 5), options=options)
        elif dice.random() < 0.1:
            beside.rig.abort(request_id)
        if dice.random() < 0.1:
            beside.clock.advance(dice.choice([0.1, 1.0, 5.0, -1.0]))
        if dice.random() < 0.03:
            beside.kv.drop(list(beside.kv.tiers.held("host"))[:2], "host")
        seen += beside.kv.tasks()
        for task in dice.sample(seen, min(len(seen), 3)):
            good = dice.choice([None, None, 0, 1])
            beside.kv.deliver(task, dice.randrange(num_ranks), num_blocks=good)
        seen = seen[-20:]
        beside.step()
    beside.kv.store_all(on=False)
    beside.run()
    beside.verify_quiet()


@pytest.mark.soak
def test_any_story_ends_with_every_block_free_and_every_output_right(seeds: Iterator[int]) -> None:
    for seed in seeds:
        for part in range(20):
            tell(random.Random(f"{seed} {part}"))
