"""An engine that does what it can in every step, says so when that is nothing, and never gets stuck."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.metrics import StatsSnapshot
from kvtier.testing import FakeClock
from kvtier_connectors.connector import FlushResult
from kvtier_connectors.contract import (
    NO_COPIES,
    ConnectorScheduler,
    ConnectorWorker,
    CopyResult,
    Match,
    RequestInfo,
    RestoreOutcome,
    RestorePoll,
    StepDemand,
    TransferPlan,
    WriteFence,
)
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.compute_share import ComputeShare, WorkClass
from kvtier_engine.llm import LLM
from kvtier_engine.request import FinishReason, Request, RequestState
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing.fake_model import FakeRunner, expected_tokens, linear_cost
from kvtier_engine.testing.rig import EngineRig
from kvtier_engine.verdict import Verdict
from kvtier_kernels import BlockPlanes

OpenRig = Callable[..., EngineRig]

LEAK = "leaked transfer 7"


@pytest.fixture
def small(open_rig: OpenRig) -> OpenRig:
    """An engine over a few blocks of four tokens, without kvtier."""

    def make(num_blocks: int, *, share: float | None = None, **kwargs: Any) -> EngineRig:
        clock = FakeClock()
        runner = FakeRunner(num_blocks, 4, clock=clock, seconds=linear_cost(per_step=1.0))
        engine: dict[str, Any] = {"prefill_share": share}
        engine |= {name: kwargs.pop(name) for name in ("policy", "head_patience") if name in kwargs}
        return open_rig(runner=runner, clock=clock, kvtier=False, engine=engine, **kwargs)

    return make


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def shares(batch: Sequence[BatchItem]) -> dict[str, int]:
    return {item.request_id: len(item.token_ids) for item in batch}


def live(rig: EngineRig, request_id: str) -> Request:
    return next(r for r in rig.engine.scheduler.requests() if r.request_id == request_id)


def waiting(rig: EngineRig) -> list[str]:
    return [request.request_id for request in rig.engine.scheduler.waiting]


def leak(rig: EngineRig, count: int) -> list[int]:
    """Pin free blocks, as a transfer does that never ends."""
    blocks = list(rig.engine.pool.free_queue())[:count]
    for block in blocks:
        rig.engine.pool.pin(block, LEAK)
    return blocks


def unpin(rig: EngineRig, blocks: Sequence[int]) -> None:
    for block in blocks:
        rig.engine.pool.unpin(block)


def drain(rig: EngineRig, max_steps: int = 200) -> None:
    """To the end, with something computed in every step but the last."""
    for _ in range(max_steps):
        if not rig.engine.num_unfinished:
            rig.verify_quiet()
            return
        assert rig.step().verdict is Verdict.OK
        if not rig.engine.num_unfinished:
            rig.run()
    raise AssertionError(f"{rig.engine.num_unfinished} requests are left after {max_steps} steps")


# ---- a connector that only listens -----------------------------------------------------------------------------------


class Told(ConnectorScheduler):
    """Has nothing to restore unless a test says so, and remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.answer: Callable[[str], Match] = lambda _request_id: Match(0, None)
        self.poll: Callable[[], RestorePoll] = RestorePoll
        self.landings: dict[str, int] = {}

    def start_request(self, request: RequestInfo) -> None:
        self.calls.append(("start", request.request_id))

    def requeue_request(self, request_id: str, num_local_blocks: int, num_tokens: int) -> None:
        self.calls.append(("requeue", request_id))

    def finish_request(self, request_id: str) -> None:
        self.calls.append(("finish", request_id))

    def poll_restores(self) -> RestorePoll:
        return self.poll()

    def match(self, request_id: str, num_local_blocks: int, max_blocks: int) -> Match:
        return self.answer(request_id)

    def refuse_restore(self, request_id: str, *, is_permanent: bool = False) -> bool:
        return True

    def admit(self, request_id: str, num_local_blocks: int, max_blocks: int, block_ids: Sequence[int]) -> int:
        self.landings[request_id] = len(block_ids)
        return len(block_ids)

    def publish(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None: ...

    def plan_step(self, reused: Sequence[int], demand: StepDemand, *, is_fenced: bool = False) -> TransferPlan:
        return NO_COPIES

    def complete(self, results: Sequence[CopyResult]) -> list[RestoreOutcome]:
        return []

    def reset(self) -> bool:
        return True

    def close(self) -> None: ...

    def count(self, call: str) -> Counter[str]:
        return Counter(request_id for name, request_id in self.calls if name == call)


class NoCopies(ConnectorWorker):
    """Copies nothing; a wait for it is `wait`."""

    def __init__(self) -> None:
        self.wait: Callable[[float], None] = lambda _timeout: pytest.fail("waited for nothing")

    def submit(self, plan: TransferPlan, written: WriteFence | None) -> None: ...

    def poll(self, timeout: float = 0.0) -> list[CopyResult]:
        if timeout > 0:
            self.wait(timeout)
        return []

    def close(self, timeout: float) -> list[CopyResult]:
        return []


class Listener:
    """What `open_connector` opens."""

    def __init__(self) -> None:
        self.scheduler = Told()
        self.worker = NoCopies()

    def __call__(self, pool: BlockPool, planes: BlockPlanes) -> Listener:
        return self

    def flush(self, timeout: float, reused: Sequence[int] = ()) -> FlushResult:
        return FlushResult(0, ())

    def close(self, timeout: float = 5.0, reused: Sequence[int] = ()) -> None: ...

    def stats(self) -> StatsSnapshot | None:
        return None

    def num_in_flight(self) -> int:
        return 0

    def check_integrity(self) -> None: ...


# ---- no step is wasted -----------------------------------------------------------------------------------------------


def tell_of_a_decode_without_a_block(rig: EngineRig) -> Iterator[str]:
    """Four blocks: one leaks, one is the victim's, and the other grows until only the leaked one is left for it."""
    rig.add("grows", prompt(7), max_tokens=9)
    rig.add("victim", prompt(3, 100), max_tokens=5)
    rig.step()
    leaked = leak(rig, 1)
    while rig.step().verdict is Verdict.OK:
        pass
    assert rig.last is not None
    num_batches = len(rig.runner.batches)
    for name in ("grows", "victim"):
        request = live(rig, name)
        yield f"{name} {request.state.value} {len(request.block_table)} {request.num_computed} {len(request.tokens)}"
    yield f"{rig.last.verdict} {rig.last.num_tokens} {rig.last.outputs}"
    unpin(rig, leaked)
    rig.run()
    yield f"{num_batches} {len(rig.runner.batches)} {rig.engine.scheduler.num_preemptions}"
    for output in rig.finished.values():
        yield f"{output.request_id} {output.finish_reason} {output.token_ids}"


def test_r1_a_decode_that_gets_no_block_even_from_all_others_waits_for_one(small: OpenRig) -> None:
    said = list(tell_of_a_decode_without_a_block(small(4)))
    assert said[:3] == ["grows running 3 12 13", "victim waiting 0 0 5", "Verdict.STALL 0 ()"]
    assert said[4:] == [
        f"grows length {tuple(expected_tokens(prompt(7), 9))}",
        f"victim length {tuple(expected_tokens(prompt(3, 100), 5))}",
    ]


def test_r6_the_same_happens_without_asserts(small: OpenRig) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    told = subprocess.run(
        [sys.executable, "-O", __file__], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert told.stdout.splitlines() == list(tell_of_a_decode_without_a_block(small(4)))


def test_r2_decodes_that_share_all_they_have_are_preempted_together(small: OpenRig) -> None:
    """Neither's blocks would become usable alone; and nobody else has any."""
    rig = small(6, max_num_seqs=3)
    rig.add("oldest", prompt(3, 500), max_tokens=None)
    rig.add("twin", prompt(7), max_tokens=None)
    rig.add("other twin", prompt(7), max_tokens=None)
    drain(rig)
    assert rig.engine.scheduler.num_preemptions == 2


def test_r2_r13_who_shares_nothing_with_those_who_must_go_stays(small: OpenRig) -> None:
    rig = small(8, max_num_seqs=4)
    rig.add("oldest", prompt(3, 500), max_tokens=None)
    rig.add("twin", prompt(7), max_tokens=None)
    rig.add("other twin", prompt(7), max_tokens=None)
    rig.add("stays", prompt(3, 700), max_tokens=6)
    rig.step()
    pinned = live(rig, "stays").block_table + leak(rig, 1)
    for block in pinned[:1]:
        rig.engine.pool.pin(block, "a copy")
    while live(rig, "stays").num_preemptions == rig.engine.scheduler.num_preemptions:
        assert rig.step().verdict is Verdict.OK
    assert live(rig, "stays").num_preemptions == 0
    assert [live(rig, name).num_preemptions for name in ("twin", "other twin")] == [1, 1]
    unpin(rig, pinned)
    rig.run()


def test_r2_a_decode_runs_in_the_place_of_one_whose_turn_it_is_and_that_finds_no_block(small: OpenRig) -> None:
    rig = small(4, share=0.5, max_num_seqs=2, max_batch_tokens=1)
    rig.add("old", prompt(3), max_tokens=10)
    rig.add("young", prompt(3, 100), max_tokens=10)
    drain(rig)


@pytest.mark.parametrize("share", [None, 0.3, 0.7])
@pytest.mark.parametrize("seed", range(8))
def test_r2_r9_something_is_computed_in_every_step(small: OpenRig, seed: int, share: float | None) -> None:
    rng = random.Random(seed)
    num_seqs = rng.randint(1, 5)
    rig = small(rng.randint(2, 8), share=share, max_num_seqs=num_seqs, max_batch_tokens=rng.randint(1, 6))
    longest = rig.engine.max_model_len - 1
    for turn in range(40):
        if rng.random() < 0.5:
            rig.add(f"{turn}", [rng.randrange(2)] * rng.randint(1, longest), rng.choice([1, 3, None]))
        assert rig.step().verdict in (Verdict.OK, Verdict.IDLE)
        assert len(rig.engine.scheduler.running) <= num_seqs
    drain(rig, 3000)


def test_r5_for_an_empty_batch_the_model_is_not_run(small: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = small(4)
    monkeypatch.setattr(rig.runner, "execute", lambda batch: pytest.fail(f"the model was run for {batch}"))
    assert (rig.step().verdict, rig.step().outputs) == (Verdict.IDLE, ())
    blocks = leak(rig, 4)
    rig.add("stuck", prompt(3))
    assert rig.step().verdict is Verdict.STALL
    monkeypatch.undo()
    unpin(rig, blocks)
    drain(rig)


# ---- waiting and stalling --------------------------------------------------------------------------------------------


def test_r3_the_loop_makes_one_step_for_each_event_and_each_deadline(open_rig: OpenRig) -> None:
    clock, listener = FakeClock(), Listener()
    rig = open_rig(4, kvtier=False, clock=clock, open_connector=listener)
    told = listener.scheduler

    deadline = clock.now() + 0.5

    def poll() -> RestorePoll:
        if clock.now() >= deadline:
            return RestorePoll(ready=("a",))
        return RestorePoll(num_active=1, next_deadline=deadline)

    def wait(timeout: float) -> None:
        waits.append(timeout)
        clock.advance(min(timeout, 0.2) if len(waits) == 1 else timeout)  # the first is woken by an event

    waits: list[float] = []
    told.poll, listener.worker.wait = poll, wait
    told.answer = lambda _request_id: Match(0, None, is_staging=clock.now() < deadline)
    rig.add("a", prompt(5))
    llm = LLM.__new__(LLM)
    llm.engine, llm._unread, llm._has_reader = rig.engine, {}, set()
    verdicts: list[tuple[Verdict, int, float | None]] = []
    step = rig.engine.step

    def counted() -> object:
        result = step()
        verdicts.append((result.verdict, result.in_flight, result.next_deadline))
        return result

    rig.engine.step = counted  # type: ignore[method-assign, assignment]
    for _ in range(10):
        if rig.engine.num_unfinished:
            llm._advance()
    assert waits == pytest.approx([0.5, 0.3])
    assert verdicts == [(Verdict.WAIT, 1, deadline)] * 2 + [(Verdict.OK, 0, None)]


def test_r4_a_stall_is_reported_once_and_fails_the_request_that_can_never_fit(small: OpenRig) -> None:
    rig = small(5, max_num_seqs=2)
    blocks = leak(rig, 3)
    rig.add("never", prompt(10), max_tokens=3)
    rig.add("neither", prompt(11, 100), max_tokens=3)
    first = rig.step()
    assert first.verdict is Verdict.STALL
    assert first.stall is not None
    stall = first.stall
    assert (stall.num_running, stall.num_waiting, stall.num_free, stall.num_used, stall.num_held) == (0, 2, 2, 0, 3)
    assert (stall.request_id, stall.num_needed) == ("never", 3)
    assert first.outputs == ()
    second = rig.step()
    assert second.verdict is Verdict.STALL
    assert [(output.request_id, output.error) for output in second.outputs] == [("never", stall.describe())]
    assert rig.engine.scheduler.stats().stalls == 1
    assert waiting(rig) == ["neither"], "it may fit by the time"
    unpin(rig, blocks)
    drain(rig)
    assert rig.engine.scheduler.stats().stalls == 1


def test_r4_a_step_between_two_empty_ones_makes_them_no_stall_in_a_row(small: OpenRig) -> None:
    rig = small(4)
    for turn in range(2):
        blocks = leak(rig, 4)
        rig.add(f"{turn}", prompt(3))
        assert rig.step().verdict is Verdict.STALL
        unpin(rig, blocks)
        assert rig.step().verdict is Verdict.OK
    assert [output.error for output in rig.finished.values()] == [None, None]
    assert rig.engine.scheduler.stats().stalls == 2


def test_r36_blocks_pinned_for_ever_are_a_stall_that_names_who_holds_them(small: OpenRig) -> None:
    rig = small(4)
    blocks = leak(rig, 3)
    rig.engine.pool.pin(blocks[0], "landing of x")
    rig.add("large", prompt(8))
    rig.add("fits", prompt(3, 100))
    assert rig.step().verdict is Verdict.OK, "what fits goes on"
    assert rig.step().verdict is Verdict.STALL
    result = rig.step()
    assert result.verdict is Verdict.STALL
    assert rig.finished["large"].finish_reason is FinishReason.ERROR
    assert rig.finished["large"].error == (
        "no progress is possible: 0 running, 1 waiting, 1 of 4 blocks free, 0 used, 3 held; request 'large' needs 3 "
        "more; pinned: 1 by landing of x, 3 by leaked transfer 7"
    )
    rig.add("later", prompt(3, 200))
    assert rig.step().verdict is Verdict.OK
    rig.engine.pool.unpin(blocks[0])
    unpin(rig, blocks)
    rig.verify_quiet()


def test_r36_a_decode_that_never_gets_its_block_is_failed_and_others_go_on(small: OpenRig) -> None:
    rig = small(4)
    rig.add("grows", prompt(7), max_tokens=9)
    rig.add("victim", prompt(3, 100), max_tokens=5)
    rig.step()
    blocks = leak(rig, 1)
    rig.run()
    assert LEAK in str(rig.finished["grows"].error)
    assert rig.finished["victim"].finish_reason is FinishReason.LENGTH
    unpin(rig, blocks)
    rig.verify_quiet()


def test_r37_a_blocked_request_is_not_failed_while_others_can_free_blocks(small: OpenRig) -> None:
    rig = small(6, max_num_seqs=4)
    rig.add("runs", prompt(3, 100), max_tokens=20)
    rig.step()
    rig.add("blocked", prompt(22))
    while "runs" not in rig.finished:
        assert rig.step().verdict is Verdict.OK
        assert waiting(rig) == ["blocked"] * bool(rig.engine.num_unfinished)
    drain(rig)
    assert rig.finished["blocked"].finish_reason is FinishReason.LENGTH


def test_r37_a_request_that_waits_for_copies_is_not_failed(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, policy="write_through")
    rig.add("a", prompt(15))
    rig.step()
    rig.step()
    rig.add("b", prompt(15, 100))
    for _ in range(20):
        assert rig.step().verdict is Verdict.WAIT
    rig.run()
    assert rig.finished["b"].finish_reason is FinishReason.LENGTH


# ---- who goes first --------------------------------------------------------------------------------------------------


def add_small(rig: EngineRig, turn: int) -> None:
    rig.add(f"small {turn}", prompt(3, 10 * turn + 1000), max_tokens=1)


@pytest.mark.parametrize("patience", [0, 1, 3, 8])
def test_r7_smaller_requests_pass_a_blocked_head_until_its_patience_is_over(small: OpenRig, patience: int) -> None:
    rig = small(6, max_num_seqs=3, head_patience=patience)
    rig.add("runs", prompt(7, 100), max_tokens=14)
    rig.step()
    rig.add("head", prompt(16), max_tokens=1)
    for turn in range(12):
        add_small(rig, turn)
        rig.step()
    passed = [name for name in rig.finished if name.startswith("small")]
    assert passed == [f"small {turn}" for turn in range(max(0, patience - 1))]
    drain(rig)
    names = list(rig.finished)
    assert names.index("head") < names.index("small 11")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_r8_a_blocked_head_starts_however_many_small_ones_keep_coming(small: OpenRig, policy: str) -> None:
    rig = small(6, max_num_seqs=3, head_patience=2, policy=policy)
    for turn in range(3):
        rig.add(f"early {turn}", prompt(3, 10 * turn + 500), max_tokens=5)
    rig.step()
    rig.add("head", prompt(20), max_tokens=1)
    for turn in range(60):
        rig.add(f"small {turn}", prompt(3, 10 * turn + 1000), max_tokens=5)
        rig.step()
        if "head" in rig.finished:
            break
    assert "head" in rig.finished
    assert len(rig.finished) <= 3 + 2 * 3
    drain(rig)


def test_r8_at_the_end_of_its_patience_what_is_free_is_kept_for_the_head(small: OpenRig) -> None:
    rig = small(8, max_num_seqs=3, head_patience=0)
    rig.add("runs", prompt(14, 100), max_tokens=4)
    rig.step()
    rig.add("head", prompt(19), max_tokens=1)
    add_small(rig, 0)
    rig.step()
    assert rig.engine.pool.num_free == 4
    drain(rig)
    assert list(rig.finished) == ["runs", "head", "small 0"]


def test_r9_no_more_run_or_restore_than_max_num_seqs(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=20, max_num_seqs=2)
    rig.generate(prompt(8), max_tokens=1)
    rig.flush_gpu()
    for i in range(5):
        rig.add(f"r{i}", [*prompt(8), i], max_tokens=2)
    for _ in range(4):
        rig.step()
        assert len(rig.engine.scheduler.running) == 2
    rig.run()
    assert len(rig.finished) == 7


def test_r2_a_head_that_fits_once_its_cached_blocks_are_pinned_is_admitted(small: OpenRig) -> None:
    """Pinned, its cached blocks count no longer as taken: it fits with no more blocks free than when it did not."""
    rig = small(8)
    rig.generate(prompt(9))
    cached = [block for _, block in rig.engine.cached_blocks(prompt(9))]
    others = [block for block in rig.engine.pool.free_queue() if block not in cached]
    for block in others:
        rig.engine.pool.pin(block, LEAK)
    rig.add("a", prompt(9), 2)
    assert rig.step().num_tokens == 0
    for block in cached:
        rig.engine.pool.pin(block, "store")
    unpin(rig, others[:2])
    assert rig.step().num_tokens == 1
    unpin(rig, [*cached, *others[2:]])
    drain(rig)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_r10_when_a_batch_takes_fewer_than_run_each_has_its_turn(small: OpenRig, limit: int) -> None:
    rig = small(20, share=0.5, max_num_seqs=5, max_batch_tokens=limit)
    for name in "abcde":
        rig.add(name, prompt(2, ord(name)), max_tokens=12)
    while sum(request.is_decoding for request in rig.engine.scheduler.running) < 5:
        rig.step()
    start = len(rig.runner.batches)
    for _ in range(9):
        assert rig.step().num_tokens == limit
    turns = [set(shares(batch)) for batch in rig.runner.batches[start:]]
    window = -(-5 // limit)
    for first in range(len(turns) - window + 1):
        assert set[str]().union(*turns[first : first + window]) == set("abcde")
    drain(rig)


@pytest.mark.parametrize(("share", "most"), [(None, 1), (0.5, 2), (0.7, 4)])
def test_r11_a_decode_goes_on_beside_a_new_prompt_in_every_step(small: OpenRig, share: float | None, most: int) -> None:
    rig = small(12, share=share, max_num_seqs=4)
    rig.add("decode", prompt(3), max_tokens=30)
    rig.step()
    gap = longest = 0
    while "decode" not in rig.finished:
        rig.add(f"{len(rig.prompts)}", prompt(5, 10 * len(rig.prompts)), max_tokens=1)
        rig.step()
        gap = 0 if "decode" in shares(rig.runner.batches[-1]) else gap + 1
        longest = max(longest, gap + 1)
    assert longest == most
    drain(rig)


def test_r11_a_decode_that_finds_no_block_gives_way_and_does_not_stand_still(small: OpenRig) -> None:
    """The one that came first goes on; the other would hold its slot and blocks until that one ends."""
    rig = small(4, max_num_seqs=2)
    rig.add("first", prompt(6), 6)
    rig.add("second", prompt(7, 100), 6)
    for _ in range(3):
        rig.step()
    assert shares(rig.runner.batches[-1]) == {"first": 1}
    assert live(rig, "second").state is RequestState.WAITING
    assert rig.engine.scheduler.num_preemptions == 1
    drain(rig)


def test_r11_a_decode_waits_for_a_copy_and_gives_nothing_up_for_it(small: OpenRig) -> None:
    rig = small(6, max_num_seqs=2)
    pinned = leak(rig, 2)
    rig.add("first", prompt(6), 6)
    rig.add("second", prompt(7, 100), 6)
    for _ in range(3):
        rig.step()
    assert shares(rig.runner.batches[-1]) == {"first": 1}
    unpin(rig, pinned)
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"first": 1, "second": 1}
    assert rig.engine.scheduler.num_preemptions == 0
    drain(rig)


def test_r12_the_victims_of_one_step_return_in_the_order_in_which_they_came(small: OpenRig) -> None:
    rig = small(6, max_num_seqs=4)
    for name in ("a", "b"):
        rig.add(name, prompt(7, ord(name)), max_tokens=8)
    for name in ("c", "d"):
        rig.add(name, prompt(2, ord(name)), max_tokens=8)
    rig.step()
    rig.add("e", prompt(3, 300))
    rig.step()
    assert waiting(rig) == ["e"]
    rig.step()
    assert waiting(rig) == ["c", "d", "e"]
    assert [live(rig, name).num_preemptions for name in "abcd"] == [0, 0, 1, 1]
    drain(rig)


def test_r13_a_request_whose_blocks_are_pinned_is_not_preempted_for_them(small: OpenRig) -> None:
    rig = small(4, max_num_seqs=2)
    rig.add("old", prompt(7), max_tokens=6)
    rig.add("young", prompt(7, 100), max_tokens=6)
    rig.step()
    young = live(rig, "young")
    pinned = list(young.block_table)
    for block in pinned:
        rig.engine.pool.pin(block, "a copy")
    rig.step()
    assert rig.step().verdict is Verdict.STALL, "as nobody says when these pins end"
    assert rig.engine.scheduler.num_preemptions == 0
    unpin(rig, pinned)
    assert rig.step().verdict is Verdict.OK
    assert (rig.engine.scheduler.num_preemptions, young.state) == (1, RequestState.WAITING)
    drain(rig)


def test_r13_what_this_step_computes_is_not_preempted(small: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three decodes have their turn. The last finds no block, nor does the first in its place."""
    rig = small(5, share=0.5, max_num_seqs=3, max_batch_tokens=2)
    always(WorkClass.PREFILL, monkeypatch)
    for name, size in (("first", 4), ("turn", 2), ("last", 4)):
        rig.add(name, prompt(size, 100 * len(rig.prompts)), max_tokens=3)
    while not all(request.is_decoding for request in rig.engine.scheduler.requests()):
        rig.step()
    live(rig, "first").last_decode_step = 1
    pinned = leak(rig, 2) + live(rig, "last").block_table
    rig.engine.pool.pin(pinned[-1], "a copy")
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"turn": 1}
    assert rig.engine.scheduler.num_preemptions == 0
    unpin(rig, pinned)
    drain(rig)


def test_r14_the_connector_hears_of_every_end_and_every_preemption_once(open_rig: OpenRig) -> None:
    listener = Listener()
    rig = open_rig(4, kvtier=False, max_num_seqs=2, open_connector=listener)
    told = listener.scheduler
    rig.add("old", prompt(7), max_tokens=6)
    rig.add("young", prompt(7, 100), max_tokens=6)
    rig.add("waits", prompt(3, 200))
    for _ in range(3):
        rig.step()
    assert told.count("requeue") == {"young": 1}
    rig.abort("waits")
    rig.abort("waits")
    drain(rig)
    assert told.count("requeue") == {"young": rig.engine.scheduler.num_preemptions}
    assert told.count("finish") == {"old": 1, "young": 1, "waits": 1}
    blocks = leak(rig, 4)
    rig.add("stuck", prompt(3))
    rig.add("gone", prompt(3))
    rig.step()
    rig.abort("gone")  # between empty steps
    rig.step()
    assert rig.finished["stuck"].finish_reason is FinishReason.ERROR
    assert told.count("finish") == {"old": 1, "young": 1, "waits": 1, "stuck": 1, "gone": 1}
    assert told.count("start") == told.count("finish")
    unpin(rig, blocks)


def test_r14_also_in_a_step_that_fell_back_to_the_other_class(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    rig = open_rig(4, kvtier=False, max_num_seqs=2, open_connector=listener, engine={"prefill_share": 0.5})
    always(WorkClass.PREFILL, monkeypatch)
    rig.add("old", prompt(7), max_tokens=3)
    rig.add("young", prompt(7, 100), max_tokens=6)
    for _ in range(3):
        rig.step()
    assert listener.scheduler.count("requeue") == {"young": 1}
    assert listener.scheduler.count("finish") == {"old": 1}
    drain(rig)
    assert listener.scheduler.count("finish") == {"old": 1, "young": 1}


# ---- whose turn a step is --------------------------------------------------------------------------------------------


def always(work: WorkClass, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Every turn is this one's; what could run is noted, decodes first."""
    asked: list[tuple[bool, bool]] = []

    def select(_self: ComputeShare, decode_runnable: bool, prefill_runnable: bool) -> WorkClass:
        asked.append((decode_runnable, prefill_runnable))
        return work

    monkeypatch.setattr(ComputeShare, "select", select)
    return asked


def test_r41_a_prefill_turn_without_a_prompt_runs_the_decodes_and_preempts(
    small: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = small(4, share=0.5, max_num_seqs=2)
    always(WorkClass.PREFILL, monkeypatch)
    rig.add("old", prompt(7), max_tokens=6)
    rig.add("young", prompt(7, 100), max_tokens=6)
    rig.step()
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"old": 1, "young": 1}
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"old": 1}
    assert waiting(rig) == ["young"]
    drain(rig)


def test_r42_a_prefill_turn_with_a_prompt_preempts_nobody(small: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = small(4, share=0.5, max_num_seqs=3)
    always(WorkClass.PREFILL, monkeypatch)
    rig.add("old", prompt(4), max_tokens=6)
    rig.add("young", prompt(2, 100), max_tokens=6)
    rig.step()
    assert rig.engine.pool.num_free == 2
    rig.add("new", prompt(7, 200), max_tokens=1)
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"new": 7}
    assert rig.engine.scheduler.num_preemptions == 0, "old lacks a block, and waits for the next step"
    drain(rig)


def test_r43_who_cannot_be_admitted_is_no_prompt_that_could_run(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    rig = open_rig(6, kvtier=False, max_num_seqs=2, open_connector=listener, engine={"prefill_share": 0.5})
    asked = always(WorkClass.DECODE, monkeypatch)
    staging = {"comes"}
    listener.scheduler.answer = lambda request_id: Match(0, None, is_staging=request_id in staging)
    rig.add("decode", prompt(3), max_tokens=10)
    rig.step()
    assert asked.pop() == (False, True)
    rig.add("comes", prompt(3, 50))
    rig.step()
    assert asked.pop() == (True, False), "its blocks are on their way"
    rig.add("large", prompt(20, 100))
    rig.step()
    assert asked.pop() == (True, False), "too few blocks"
    rig.add("small", prompt(2, 200), max_tokens=9)
    rig.step()
    assert asked.pop() == (True, True), "that one could"
    rig.abort("large")
    always(WorkClass.PREFILL, monkeypatch)
    rig.step()
    assert {request.request_id for request in rig.engine.scheduler.running} == {"decode", "small"}
    asked = always(WorkClass.DECODE, monkeypatch)
    rig.add("late", prompt(2, 300))
    rig.step()
    assert asked.pop() == (True, False), "no slot"
    rig.abort("comes")
    monkeypatch.undo()
    drain(rig)


def test_r45_a_decode_turn_in_which_no_decode_gets_a_block_runs_the_prompts(
    small: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = small(3, share=0.5, max_num_seqs=2, max_batch_tokens=8)
    rig.add("decode", prompt(7), max_tokens=3)
    rig.add("prompt", prompt(3, 100), max_tokens=1)
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"decode": 7, "prompt": 1}
    always(WorkClass.DECODE, monkeypatch)
    rig.step()
    (block,) = live(rig, "prompt").block_table
    rig.engine.pool.pin(block, "a copy")
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"prompt": 2}
    rig.engine.pool.unpin(block)
    drain(rig)


if __name__ == "__main__":
    print("\n".join(tell_of_a_decode_without_a_block(EngineRig(4, kvtier=False))))
