"""The scripted connector keeps the contract: alone over a block pool, by hand, and beside an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.config import RestoreSettings
from kvtier.keys import Extras, digest_tokens
from kvtier.reasons import MissReason
from kvtier.testing import FakeClock
from kvtier_connectors.contract import (
    NO_OPTIONS,
    WRITTEN,
    KVOptions,
    RequestInfo,
    RestoreOutcome,
    StepDemand,
    TransferPlan,
)
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.testing import (
    FakeRunner,
    Recorder,
    ScriptedConnector,
    Task,
    TaskKind,
    block_contents,
    unchanged,
)
from kvtier_engine.testing.fake_model import EMPTY
from kvtier_kernels import BlockPlanes

NO_EXTRAS = Extras(adapter=None, salt=None, media=())
PROMPT = list(range(9))  # two full blocks of four and a token to compute


class ByHand:
    """The test plays the engine over a block pool of its own."""

    def __init__(self, num_blocks: int = 8, *, settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.clock = FakeClock()
        self.runner = FakeRunner(num_blocks, 4)
        self.pool = BlockPool(num_blocks)
        self.kv = ScriptedConnector(self.clock, settings=RestoreSettings(**(settings or {})), **kwargs)
        self.kv(self.pool, BlockPlanes.from_arrays(self.runner.planes()))
        self.half = self.kv.scheduler

    def start(self, request_id: str, tokens: Sequence[int] = PROMPT, options: KVOptions = NO_OPTIONS) -> bool:
        digests = digest_tokens(tokens, 4, NO_EXTRAS)
        self.half.start_request(RequestInfo(request_id, digests, options, 0, len(tokens)))
        return self.half.match(request_id, 0, len(digests)).is_staging

    def admit(self, request_id: str, num_blocks: int = 2) -> list[int]:
        """Blocks that a landing of the request writes, planned and submitted."""
        blocks = self.pool.allocate(num_blocks) or []
        num_landing = self.half.admit(request_id, 0, num_blocks, blocks)
        self.pool.release(blocks[num_landing:])
        self.plan()
        return blocks[:num_landing]

    def plan(self) -> TransferPlan:
        plan = self.half.plan_step(self.pool.take_reused(), StepDemand(0, 0, 0))
        self.kv.worker.submit(plan, WRITTEN)
        self.kv.check_integrity()
        return plan

    def collect(self) -> list[RestoreOutcome]:
        outcomes = self.half.complete(self.kv.worker.poll())
        self.kv.check_integrity()
        return outcomes

    def poll(self) -> tuple[str, ...]:
        ready = self.half.poll_restores().ready
        self.kv.check_integrity()
        return ready

    def task(self, kind: TaskKind) -> Task:
        [task] = self.kv.tasks(kind)
        return task

    def is_right(self, block_id: int, index: int, tokens: Sequence[int] = PROMPT) -> bool:
        return bool((self.runner.pool[:, block_id] == block_contents(tokens, 4)[index]).all())

    def compute(self, request_id: str, tokens: Sequence[int] = PROMPT) -> list[int]:
        """The request computes and publishes its full blocks."""
        blocks = self.pool.allocate(len(tokens) // 4) or []
        for index, block_id in enumerate(blocks):
            self.runner.pool[:, block_id] = block_contents(tokens, 4)[index]
        self.half.publish(request_id, 0, blocks)
        return blocks

    def pins(self) -> int:
        return sum(self.pool.pins(block) for block in range(self.pool.num_blocks))


# ---- looking up and staging ------------------------------------------------------------------------------------------


def test_what_host_memory_holds_is_ready_at_once() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    assert not hand.start("a")
    assert (hand.half.match("a", 0, 2).num_blocks, hand.kv.tasks(), hand.poll()) == (2, [], ())


def test_lookup_and_stage_are_tasks_and_ready_is_said_once() -> None:
    hand = ByHand()
    digests = hand.kv.hold(PROMPT, tier="disk")
    assert hand.start("a")
    hand.kv.deliver(hand.task(TaskKind.LOOKUP))
    assert hand.poll() == ()
    stage = hand.task(TaskKind.STAGE)
    assert (stage.digests, stage.tier) == (tuple(digests), "disk")
    assert hand.half.match("a", 0, 2).is_staging
    hand.kv.deliver(stage)
    assert not any(hand.kv.holds(digests)), "nobody has heard of it yet"
    assert hand.poll() == ("a",)
    assert all(hand.kv.holds(digests))
    assert (hand.half.match("a", 0, 2).num_blocks, hand.poll()) == (2, ())


def test_a_lookup_may_find_less_or_fail() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT, tier="disk")
    hand.start("less")
    hand.start("fails")
    less, fails = hand.kv.tasks("lookup")
    hand.kv.deliver(less, num_blocks=1)
    hand.kv.deliver(fails, ok=False)
    assert hand.poll() == ("fails",)
    assert hand.half.match("fails", 0, 2).miss is MissReason.TIER_ERROR
    assert hand.task(TaskKind.STAGE).num_blocks == 1


def test_waits_end_by_the_product_s_deadlines_with_one_warning() -> None:
    hand = ByHand()
    digests = hand.kv.hold(PROMPT, tier="disk")
    hand.start("a")
    late = hand.task(TaskKind.LOOKUP)
    with Recorder() as recorder:
        poll = hand.half.poll_restores()
        assert poll.next_deadline is not None
        assert poll.num_active == 1
        hand.clock.advance(poll.next_deadline - hand.clock.now())
        assert hand.poll() == ("a",)
        assert hand.half.match("a", 0, 2).num_blocks == 0
        hand.half.admit("a", 0, 2, [])
        hand.kv.deliver(late)
        hand.poll()
    assert len(recorder.warnings("request a")) == len(hand.kv.fallbacks) == 1
    assert hand.kv.ignored == {"late": 1}
    assert not any(hand.kv.holds(digests))


def test_a_stage_that_comes_late_still_fills_host_memory() -> None:
    hand = ByHand()
    digests = hand.kv.hold(PROMPT, tier="disk")
    hand.start("a")
    hand.kv.deliver(hand.task(TaskKind.LOOKUP))
    hand.poll()
    stage = hand.task(TaskKind.STAGE)
    hand.clock.advance(5.0)
    assert hand.poll() == ("a",)
    hand.kv.deliver(stage)
    hand.poll()
    assert all(hand.kv.holds(digests))
    assert hand.kv.ignored == {"late": 1}
    assert not hand.start("b"), "others find it"


def test_a_question_changes_nothing() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    hand.start("a")
    with unchanged(hand.kv, hand.pool):
        for _ in range(3):
            hand.half.match("a", 0, 2)


def test_a_poll_costs_what_is_active_however_many_wait() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    for index in range(50):
        hand.start(f"{index}")
        assert hand.half.refuse_restore(f"{index}")
    hand.start("lands")
    hand.admit("lands")
    polls, polled = hand.kv.num_polls, hand.kv.num_polled
    for _ in range(10):
        hand.poll()
    assert (hand.kv.num_polls - polls, hand.kv.num_polled - polled) == (10, 10)


def test_a_refusal_lasts_until_the_bound() -> None:
    hand = ByHand(settings={"capacity_bound_s": 30.0})
    hand.kv.hold(PROMPT)
    hand.start("a")
    assert hand.half.refuse_restore("a")
    end = hand.half.poll_restores().next_deadline
    assert end == hand.clock.now() + 30.0
    hand.clock.advance(29.0)
    assert hand.half.refuse_restore("a")
    with Recorder() as recorder:
        hand.clock.advance(1.5)
        assert not hand.half.refuse_restore("a")
    assert len(recorder.warnings()) == 1
    assert 30.5 in recorder.warnings()[0].args
    assert hand.half.match("a", 0, 2).num_blocks == 2, "what is there may land"
    assert hand.half.poll_restores().next_deadline is None
    hand.kv.check_integrity()


def test_a_waiting_request_asks_again_whether_its_blocks_are_held() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT, num_blocks=1)
    digests = hand.kv.hold(PROMPT, tier="disk")
    hand.start("a")
    hand.kv.deliver_all()
    hand.poll()
    hand.kv.deliver_all()
    assert hand.poll() == ("a",)
    assert hand.half.refuse_restore("a")
    hand.clock.advance(15.0)
    assert hand.half.refuse_restore("a")
    assert hand.half.refuse_restore("a")
    refresh = hand.task(TaskKind.LOOKUP)
    hand.kv.drop(digests)
    hand.kv.deliver(refresh)
    hand.poll()
    assert hand.half.match("a", 0, 2).num_blocks == 0


# ---- landing ---------------------------------------------------------------------------------------------------------


def test_a_landing_writes_the_right_bytes_and_pins_until_it_is_told() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    hand.start("a")
    blocks = hand.admit("a")
    task = hand.task(TaskKind.LAND)
    assert (task.block_ids, hand.pins()) == (tuple(blocks), 2)
    assert hand.pool.holders() == {"restore of a": 2}
    hand.kv.deliver(task)
    assert hand.pins() == 2
    assert hand.collect() == [RestoreOutcome("a", 0, 2)]
    assert (hand.pins(), hand.poll()) == (0, ()), "nobody waits for it: the outcome said it"
    assert [hand.is_right(block, index) for index, block in enumerate(blocks)] == [True, True]


def test_a_landing_that_one_rank_of_two_failed_publishes_nothing() -> None:
    hand = ByHand(num_ranks=2, settings={"max_attempts": 1})
    hand.kv.hold(PROMPT)
    hand.start("a")
    blocks = hand.admit("a")
    task = hand.task(TaskKind.LAND)
    hand.kv.deliver(task, rank=0)
    assert hand.collect() == []
    assert not hand.is_right(blocks[0], 0), "half a block is no block"
    hand.kv.deliver(task, rank=1, ok=False)
    [outcome] = hand.collect()
    assert (outcome.num_landed, outcome.will_retry, outcome.must_fail) == (0, False, False)
    assert not any(hand.is_right(block, index) for index, block in enumerate(blocks))
    assert hand.pins() == 0
    assert [fallback.reason for fallback in hand.kv.fallbacks] == [MissReason.LAND_FAILED]


def test_blocks_land_up_to_the_first_that_any_rank_lacks_and_the_rest_is_tried_again() -> None:
    hand = ByHand(num_blocks=16, num_ranks=2)
    prompt = list(range(17))
    hand.kv.hold(prompt)
    hand.start("a", prompt)
    blocks = hand.admit("a", 4)
    task = hand.task(TaskKind.LAND)
    hand.kv.deliver(task, rank=0, num_blocks=3)
    hand.kv.deliver(task, rank=1, verdicts=[True, False, True, True])
    assert hand.collect() == [RestoreOutcome("a", 0, 1, will_retry=True)]
    assert [hand.is_right(block, index, prompt) for index, block in enumerate(blocks)] == [True, False, True, False]
    assert hand.poll() == ("a",)
    assert hand.half.match("a", 1, 3).num_blocks == 3


def test_the_last_failure_fails_the_request_where_that_is_set() -> None:
    hand = ByHand(settings={"max_attempts": 1, "on_failure": "fail"})
    hand.kv.hold(PROMPT)
    hand.start("a")
    hand.admit("a")
    hand.kv.deliver(hand.task(TaskKind.LAND), ok=False)
    assert [outcome.must_fail for outcome in hand.collect()] == [True]


def test_a_landing_beyond_the_budget_is_abandoned_and_stays_pinned() -> None:
    hand = ByHand(settings={"episode_budget_s": 3.0})
    hand.kv.hold(PROMPT)
    hand.start("a")
    hand.admit("a")
    hand.clock.advance(3.0)
    poll = hand.half.poll_restores()
    [outcome] = poll.outcomes
    assert (outcome.is_abandoned, outcome.num_landed, poll.num_active, hand.pins()) == (True, 0, 0, 2)
    hand.kv.deliver(hand.task(TaskKind.LAND))
    assert hand.collect() == []
    assert hand.pins() == 0


def test_double_late_and_unknown_deliveries_are_ignored_and_counted() -> None:
    hand = ByHand(num_ranks=2)
    hand.kv.hold(PROMPT)
    hand.start("a")
    blocks = hand.admit("a")
    task = hand.task(TaskKind.LAND)
    with Recorder() as recorder:
        hand.kv.deliver(task, rank=0)
        hand.kv.deliver(task, rank=0, ok=False)
        assert hand.collect() == []
        hand.kv.deliver(task, rank=1)
        assert hand.collect() == [RestoreOutcome("a", 0, 2)]
        assert hand.is_right(blocks[0], 0), "the second word of rank 0 wrote nothing"
        hand.kv.deliver(task, rank=1, ok=False)
        hand.kv.deliver(999)
        hand.kv.deliver(task.task_id, rank=7)
        assert hand.collect() == []
    assert hand.kv.ignored == {"double": 1, "late": 2, "unknown": 1}
    assert len(recorder.log("ignored")) == 1
    assert hand.pins() == 0
    assert hand.is_right(blocks[0], 0)


def test_an_old_receipt_does_nothing_to_a_request_that_has_the_id_now() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    hand.start("a")
    old = hand.admit("a")
    hand.half.finish_request("a")
    hand.pool.release(old)
    hand.start("a")
    new = hand.admit("a")
    assert not set(old) & set(new), "its pins keep the old blocks from reuse"
    first, second = hand.kv.tasks("land")
    hand.kv.deliver(first)
    assert hand.collect() == []
    assert hand.pins() == 2
    hand.kv.deliver(second)
    assert hand.collect() == [RestoreOutcome("a", 0, 2)]
    hand.half.finish_request("a")
    hand.half.finish_request("a")
    assert hand.half.decision.status().active_waits == 0


def test_a_copy_cannot_be_delivered_before_it_was_submitted() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    hand.start("a")
    hand.half.admit("a", 0, 2, hand.pool.allocate(2) or [])
    with pytest.raises(ValueError, match="no plan yet"):
        hand.kv.deliver(hand.task(TaskKind.LAND))
    hand.kv.worker.submit(hand.half.plan_step([], StepDemand(0, 0, 0)), None)
    assert hand.collect()[0].num_landed == 0, "nothing is copied without a fence"
    assert (hand.runner.pool == EMPTY).all()


def test_a_reset_and_a_close_leave_nothing() -> None:
    hand = ByHand()
    hand.kv.hold(PROMPT)
    hand.start("a")
    hand.admit("a")
    assert hand.half.reset()
    hand.kv.deliver(hand.task(TaskKind.LAND))
    assert hand.collect() == [RestoreOutcome("a", 0, 0)]
    assert hand.half.match("a", 0, 2).miss is MissReason.RESET
    hand.kv.hold(PROMPT)
    hand.start("b")
    assert hand.half.admit("b", 0, 2, hand.pool.allocate(2) or []) == 2
    hand.half.close()
    assert (hand.pins(), hand.half.decision.status().active_waits) == (0, 0)


# ---- storing --------------------------------------------------------------------------------------------------------


def test_only_what_is_published_not_reused_and_may_be_stored_is_stored() -> None:
    hand = ByHand()
    hand.kv.store_all()
    names = ("a", "private", "gone")
    digests = {name: digest_tokens([start] * 8, 4, NO_EXTRAS) for start, name in enumerate(names)}
    blocks = {}
    for start, name in enumerate(names):
        hand.start(name, [start] * 8, KVOptions(store=name != "private"))
        blocks[name] = hand.compute(name, [start] * 8)
    plan = hand.half.plan_step(blocks["gone"][:1], StepDemand(0, 0, 0))
    hand.kv.worker.submit(plan, WRITTEN)
    assert (plan.in_flight, hand.pins()) == (3, 3)
    assert hand.plan().jobs == (), "what is on its way is not stored again"
    hand.kv.deliver_all()
    hand.collect()
    held = {name: hand.kv.holds(its) for name, its in digests.items()}
    assert held == {"a": [True, True], "private": [False, False], "gone": [False, True]}
