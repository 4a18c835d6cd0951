"""Who computes what in a step, over pools that are too small, with and without something to restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtier.errors import IntegrityError
from kvtier_engine.request import FinishReason, Request, RequestState
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing.rig import EngineRig
from kvtier_engine.verdict import Verdict

OpenRig = Callable[..., EngineRig]


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def shares(batch: Sequence[BatchItem]) -> dict[str, int]:
    return {item.request_id: len(item.token_ids) for item in batch}


# ---- the invariants of one step --------------------------------------------------------------------------------------


def test_invariant_1_r5_a_step_that_only_waits_does_not_run_the_model(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    rig.generate(prompt(8))
    rig.flush_gpu()
    rig.add("again", prompt(8))
    before = len(rig.runner.batches)
    for _ in range(5):
        assert rig.step().verdict is Verdict.WAIT
    assert len(rig.runner.batches) == before
    rig.run()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
def test_invariant_3_r34_any_admitted_request_runs_to_the_model_length_alone(
    open_rig: OpenRig, num_blocks: int
) -> None:
    rig = open_rig(num_blocks=num_blocks)
    length = rig.engine.max_model_len
    assert length == num_blocks * 4
    for size in {1, length // 2, length - 1}:
        rig.add(f"{size}", prompt(size, 100 * size), max_tokens=None)
        rig.run()
        output = rig.finished[f"{size}"]
        assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, length - size)
    assert rig.engine.scheduler.num_preemptions == 0
    rig.verify_quiet()


@pytest.mark.bug("CR06", "CR11")
def test_invariant_6_cached_and_scheduled_add_up_and_tables_cover_exactly_the_tokens(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=7, max_num_seqs=6, max_batch_tokens=13)
    covered: dict[str, int] = {}

    def look(batch: Sequence[BatchItem]) -> None:
        for item in batch:
            end = item.start + len(item.token_ids)
            assert len(item.token_ids) >= 1
            assert len(item.block_table) == -(-end // 4), "as many blocks as the tokens of this step need"
            assert len(set(item.block_table)) == len(item.block_table)
            assert item.start <= covered.get(item.request_id, 0) or item.start % 4 == 0
            covered[item.request_id] = end
            assert (item.sampler is not None) == (end == len(rig.prompts[item.request_id]) + drawn[item.request_id])
        for item in batch:
            drawn[item.request_id] += item.sampler is not None

    drawn = {f"r{i}": 0 for i in range(64)}
    rig.runner.fail = look
    for i in range(64):
        rig.add(f"r{i}", [i % 3] * (4 + i % 5) + prompt(i % 11, i), max_tokens=1 + i % 6)
    rig.run(max_steps=3000)
    assert len(rig.finished) == 64
    assert rig.engine.scheduler.num_preemptions > 0, "the pool is tight enough to mean something"
    rig.verify_quiet()


def test_a_waiting_request_is_aborted_without_a_look_at_the_others(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(max_num_seqs=1)
    for i in range(50):
        rig.add(f"{i}", prompt(5, 100 * i))
    rig.step()
    num_compared = [0]

    def compare(self: Request, other: object) -> bool:
        num_compared[0] += 1
        return self is other

    monkeypatch.setattr(Request, "__eq__", compare)
    for i in range(49, 25, -1):
        assert rig.abort(f"{i}") is not None
    assert num_compared == [0]
    assert [request.request_id for request in rig.engine.scheduler.waiting] == [f"{i}" for i in range(1, 26)]
    rig.run()
    rig.verify_quiet()


def test_invariant_4_the_ledger_of_blocks_is_checked(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.add("a", prompt(9), max_tokens=2)
    rig.step()
    (request,) = rig.engine.scheduler.requests()
    request.block_table.append(7)
    with pytest.raises(IntegrityError):
        rig.engine.check_integrity()
    request.block_table.pop()


# ---- batches and chunks ----------------------------------------------------------------------------------------------


def test_prompts_are_computed_in_chunks_of_the_budget(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=16, max_num_seqs=2, max_batch_tokens=7)
    rig.add("a", prompt(20), max_tokens=2)
    rig.run()
    assert [shares(batch) for batch in rig.runner.batches] == [{"a": 7}, {"a": 7}, {"a": 6}, {"a": 1}]


def test_decodes_and_prefills_share_a_step_decodes_first(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=16, max_num_seqs=4, max_batch_tokens=8)
    rig.add("a", prompt(4), max_tokens=5)
    rig.step()
    rig.add("b", prompt(20, 100), max_tokens=1)
    rig.add("c", prompt(2, 200), max_tokens=1)
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"a": 1, "b": 7}
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"a": 1, "b": 7}
    rig.step()
    assert shares(rig.runner.batches[-1]) == {"a": 1, "b": 6, "c": 1}
    rig.run()


def test_requests_start_in_the_order_in_which_they_came(open_rig: OpenRig) -> None:
    rig = open_rig(max_num_seqs=1, num_blocks=8)
    for name in "abc":
        rig.add(name, prompt(4, ord(name)))
    order: list[str] = []
    while rig.engine.num_unfinished:
        order += [output.request_id for output in rig.step().outputs]
    assert order == ["a", "b", "c"]


# ---- preemption ------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_its_blocks_to_a_decode_and_comes_back(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, max_num_seqs=2)
    rig.add("old", prompt(7), max_tokens=6)
    rig.add("young", prompt(7, 100), max_tokens=6)
    rig.run()
    assert rig.engine.scheduler.num_preemptions > 0
    for name in ("old", "young"):
        assert rig.finished[name].finish_reason is FinishReason.LENGTH
    rig.verify_quiet()


@pytest.mark.bug("CR03", "LK07")
def test_a_preempted_request_comes_back_while_its_old_copies_run(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=5, max_num_seqs=2, policy="write_through")
    rig.add("old", prompt(9), max_tokens=8)
    rig.add("young", prompt(5, 100), max_tokens=8)
    for _ in range(12):
        rig.step()
    assert len(rig.executor) > 0
    rig.run()
    rig.verify_quiet()
    assert rig.stats.stale_results == 0


# ---- stalls ----------------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS08")
def test_finished_copies_are_collected_when_room_is_asked_for_and_when_idle(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, policy="write_through")
    rig.add("a", prompt(15))
    rig.step()
    rig.step()
    assert rig.engine.num_unfinished == 0
    assert rig.engine.has_work, "copies still touch the pool"
    rig.executor.run_all()
    rig.add("b", prompt(15, 100))
    assert rig.step().verdict is Verdict.OK, "admitted in the next step"
    rig.executor.run_all()
    while rig.engine.has_work:
        rig.step()
        rig.executor.run_all()
    rig.verify_quiet()


def test_waiting_returns_at_once_when_nothing_is_under_way(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig()
    assert rig.engine.connector is not None
    monkeypatch.setattr(rig.engine.connector.worker, "poll", lambda _timeout: pytest.fail("waited for nothing"))
    rig.engine.wait(60.0)


# ---- beside restores -------------------------------------------------------------------------------------------------


def pin_free(rig: EngineRig) -> list[int]:
    """Take every free block out of use, as copies would."""
    pool = rig.engine.pool
    pinned = [block for block in pool.free_queue() if not pool.pins(block)]
    for block in pinned:
        pool.pin(block, "a copy")
    return pinned


def unpin(rig: EngineRig, blocks: Sequence[int]) -> None:
    for block in blocks:
        rig.engine.pool.unpin(block)


def live(rig: EngineRig, request_id: str) -> Request:
    return next(r for r in rig.engine.scheduler.requests() if r.request_id == request_id)


def test_r13_a_restoring_request_is_not_preempted(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    rig.generate(prompt(9))
    rig.flush_gpu()
    rig.generate(prompt(5))
    rig.add("decodes", prompt(4, 500), max_tokens=6)
    rig.step()
    rig.add("restores", prompt(9))
    rig.step()
    restoring = live(rig, "restores")
    assert (restoring.state, len(restoring.block_table)) == (RequestState.RESTORING, 2)
    assert rig.engine.pool.num_freed_by_release(restoring.block_table) == 1, "its local block could be had"
    pinned = pin_free(rig)
    for _ in range(6):
        rig.step()
    assert restoring.state is RequestState.RESTORING
    assert rig.engine.scheduler.num_preemptions == 0
    unpin(rig, pinned)
    rig.run()
    assert rig.finished["restores"].restored_tokens == 4


def test_a_restore_that_landed_gets_its_blocks_from_a_younger_prompt(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=14, max_batch_tokens=5)
    rig.generate(prompt(9))
    rig.flush_gpu()
    rig.add("restores", prompt(9), max_tokens=1)
    rig.add("young", prompt(30, 500), max_tokens=1)
    rig.step()
    assert live(rig, "young").num_computed == 5
    pinned = pin_free(rig)
    rig.executor.run_all()
    assert rig.step().verdict is Verdict.OK, "young fills its last block"
    assert rig.step().verdict is Verdict.OK
    assert rig.finished["restores"].restored_tokens == 8
    assert live(rig, "young").state is RequestState.WAITING
    unpin(rig, pinned)
    rig.run()
    assert rig.finished["young"].error is None


@pytest.mark.parametrize(("size", "admitted"), [(7, True), (8, False)])
def test_r57_what_a_restoring_prompt_still_needs_is_not_given_to_a_newer_one(
    open_rig: OpenRig, size: int, admitted: bool
) -> None:
    rig = open_rig(num_blocks=8)
    rig.generate(prompt(9))
    rig.flush_gpu()
    rig.add("restores", prompt(21))  # two blocks land, four more are to be computed with the first token
    rig.add("newer", prompt(size, 500))
    rig.step()
    assert live(rig, "restores").state is RequestState.RESTORING
    assert ("newer" in rig.finished) == admitted
    rig.run()
    assert len(rig.finished) == 4


def test_a_blocked_head_costs_nothing_until_there_is_more_room(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cached prefix, which may be long, is not walked again in every step that it waits, but every few."""
    rig = open_rig(num_blocks=12, max_num_seqs=2)
    rig.generate(prompt(16, 100))
    rig.add("running", prompt(20, 200), max_tokens=24)
    rig.step()
    walks: list[int] = []
    match = rig.engine.pool.match

    def counted(*args: Any) -> list[int]:
        walks.append(1)
        return match(*args)

    monkeypatch.setattr(rig.engine.pool, "match", counted)
    rig.add("head", [*prompt(16, 100), *prompt(20, 300)], max_tokens=1)
    steps = 0
    while "running" not in rig.finished:
        rig.step()
        rig.executor.run_all()
        steps += 1
    assert steps > 15
    assert len(walks) <= 4 + steps // 8
    rig.run()
    assert rig.finished["head"].token_ids
