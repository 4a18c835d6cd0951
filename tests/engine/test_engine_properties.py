"""The real engine with copies that end late and in any order: every output is a cold run's, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier_connectors.contract import WRITTEN, CopyFailure, CopyResult, KVOptions
from kvtier_engine.request import FinishReason
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing.rig import EngineRig
from kvtier_engine.verdict import Verdict

BLOCK_TOKENS = 2


class EngineMachine(RuleBasedStateMachine):
    """Prompts share prefixes (their tokens come from few values), ids are used again, everything may fail."""

    @initialize(
        num_blocks=st.integers(3, 20),
        host_blocks=st.integers(1, 24),
        policy=st.sampled_from(["on_evict", "on_evict", "write_through", "off"]),
        max_num_seqs=st.integers(1, 4),
        extra_tokens=st.sampled_from([0, 1, 3, 30]),
        stores=st.sampled_from([1, 3, 64]),
        restores=st.sampled_from([1, 3, 64]),
    )
    def open(
        self,
        num_blocks: int,
        host_blocks: int,
        policy: str,
        max_num_seqs: int,
        extra_tokens: int,
        stores: int,
        restores: int,
    ) -> None:
        self.rig = EngineRig(
            num_blocks,
            host_blocks,
            policy,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_num_seqs + extra_tokens,
            store__max_inflight_blocks=stores,
            restore__max_inflight_blocks=restores,
        )
        self.failing = False
        self.expected_failures: set[str] = set()
        self.steps_without_progress = 0
        self.rig.runner.fail = self._maybe_fail

    def _maybe_fail(self, batch: Sequence[BatchItem]) -> None:
        if self.failing:
            self.failing = False
            self.expected_failures.update(item.request_id for item in batch)
            raise RuntimeError("the device failed")

    @rule(
        name=st.sampled_from("abcdef"),
        head=st.integers(0, 2),
        length=st.integers(1, 39),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 8),
        restore=st.sampled_from([True, True, True, False]),
    )
    def add(self, name: str, head: int, length: int, tail: list[int], max_tokens: int, restore: bool) -> None:
        room = self.rig.engine.max_model_len - 1 - len(tail)
        prompt = [head] * max(0, min(length, room)) + tail
        if not prompt or len(prompt) > room + len(tail):
            return
        if name in self.rig.engine.scheduler:
            self.rig.abort(name)  # and its id is used again at once
        self.expected_failures.discard(name)
        self.rig.add(name, prompt, max_tokens, options=KVOptions(restore=restore))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        result = self.rig.step()
        for output in result.outputs:
            if output.finish_reason is FinishReason.ERROR:
                assert output.request_id in self.expected_failures, output.error
        assert result.verdict is not Verdict.STALL or self.rig.ledger.pending or len(self.rig.executor)

    @rule(seed=st.integers(0, 1 << 16), count=st.integers(1, 4))
    def copy(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            if len(self.rig.executor):
                self.rig.executor.run_next(rng.randrange(len(self.rig.executor)))

    @rule()
    def fail_next_forward(self) -> None:
        self.failing = True

    @precondition(lambda self: len(self.rig.executor) > 0)
    @rule(verdicts=st.lists(st.booleans(), min_size=1, max_size=6))
    def fail_copy(self, verdicts: list[bool]) -> None:
        """A job runs and then tells that some of its blocks were not copied."""
        connector = self.rig.engine.connector
        assert connector is not None
        before = len(connector.worker._results)
        self.rig.executor.run_next()
        results = connector.worker._results
        for place in range(before, len(results)):
            result = results[place]
            copied = tuple(verdicts[i % len(verdicts)] for i in range(len(result.copied)))
            failure = None if all(copied) else CopyFailure.RAISED
            results[place] = CopyResult(result.job_id, copied, failure)

    @precondition(lambda self: self.rig.engine.num_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(request.request_id for request in self.rig.engine.scheduler.requests())
        self.rig.abort(data.draw(st.sampled_from(live)))

    @precondition(lambda self: not self.rig.engine.num_unfinished)
    @rule()
    def reset(self) -> None:
        self.rig.engine.reset_cache()

    @invariant()
    def everything_agrees(self) -> None:
        self.rig.engine.check_integrity()
        engine = self.rig.engine
        assert len(engine.scheduler.running) <= engine.scheduler._config.max_num_seqs
        for request in engine.scheduler.requests():
            assert request.num_computed < len(request.tokens), "a token is left to compute"
            assert request.num_published * BLOCK_TOKENS <= request.num_computed

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.failing = False
            for _ in range(1500):
                if not self.rig.engine.has_work:
                    break
                self._step()
                self.rig.executor.run_all()
            self.rig.verify_quiet()
        finally:
            self.rig.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40)
TestEngineMachine.pytestmark = [pytest.mark.bug("WR13", "LK07", "CR03", "CR06")]  # type: ignore[attr-defined]


@pytest.mark.bug("WR13")
@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_reused_while_copies_of_them_are_paused(seed: int) -> None:
    """Many interleavings of a copy that pauses, a preemption, and another request that takes the blocks."""
    rng = random.Random(seed)
    rig = EngineRig(
        rng.randint(6, 9), rng.choice([4, 64]), rng.choice(["on_evict", "write_through"]), max_batch_tokens=8
    )
    try:
        for turn in range(25):
            if rig.engine.num_unfinished < 4:
                prompt = [rng.randrange(3)] * rng.randint(1, 14)
                rig.add(f"r{turn}", prompt, rng.randint(1, 8))
            for _ in range(rng.randint(1, 3)):
                rig.step()
            if rng.random() < 0.4 and len(rig.executor):
                rig.executor.run_next(rng.randrange(len(rig.executor)))
            if rng.random() < 0.1 and rig.engine.num_unfinished:
                rig.abort(next(iter(rig.engine.scheduler.requests())).request_id)
        rig.run()
        rig.verify_quiet()
        assert not any(output.error for output in rig.finished.values())
    finally:
        rig.close()


def test_the_fence_of_our_own_engine_is_always_open() -> None:
    assert WRITTEN.wait(0.0)
