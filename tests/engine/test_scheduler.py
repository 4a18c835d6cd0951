"""Who computes what in a step, over pools that are too small, with and without something to restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtier.errors import IntegrityError
from kvtier_engine.request import FinishReason, Request, RequestState
from kvtier_engine.runner import BatchItem
from kvtier_engine.scheduler import Verdict
from kvtier_engine.testing.fake_model import expected_tokens
from kvtier_engine.testing.rig import EngineRig

OpenRig = Callable[..., EngineRig]


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def shares(batch: Sequence[BatchItem]) -> dict[str, int]:
    return {item.request_id: len(item.token_ids) for item in batch}


# ---- the invariants of one step --------------------------------------------------------------------------------------


def test_invariant_1_an_empty_batch_is_a_value_and_never_runs_the_model(open_rig: OpenRig) -> None:
    rig = open_rig()
    for _ in range(3):
        result = rig.step()
        assert (result.verdict, result.outputs, result.num_tokens) == (Verdict.IDLE, (), 0)
    assert rig.runner.batches == []


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


@pytest.mark.bug("WR16")
def test_invariant_5_a_block_is_matchable_only_after_the_forward_that_filled_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    seen: list[bool] = []
    rig.runner.fail = lambda _batch: seen.append(any(map(rig.engine.pool.is_published, range(8))))
    rig.add("a", prompt(9))
    rig.add("b", prompt(9))
    rig.step()
    assert seen == [False], "while the forward ran nothing of it could be found"
    assert rig.finished["a"].gpu_hit_tokens == rig.finished["b"].gpu_hit_tokens == 0
    assert any(map(rig.engine.pool.is_published, range(8)))


def test_invariant_5_a_landing_is_matchable_only_after_its_verdict(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6)
    rig.generate(prompt(8), max_tokens=2)
    rig.flush_gpu()
    rig.add("a", prompt(9))
    rig.step()
    published = [block for block in range(6) if rig.engine.pool.is_published(block)]
    (request,) = rig.engine.scheduler.requests()
    assert request.state is RequestState.RESTORING
    assert not set(request.block_table) & set(published)
    rig.executor.run_all()
    assert not any(map(rig.engine.pool.is_published, request.block_table)), "copied, but no verdict was taken yet"
    rig.run()
    assert rig.finished["a"].restored_tokens == 8


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


@pytest.mark.bug("CR07")
@pytest.mark.parametrize("where", ["local", "restored", "mixed"])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_invariant_7_r21_a_prompt_that_is_cached_whole_still_computes_its_last_token(
    open_rig: OpenRig, where: str, num_blocks: int, extra: int
) -> None:
    rig = open_rig(num_blocks=8)
    size = 4 * num_blocks + extra
    first = prompt(size)
    rig.generate(first, max_tokens=3)
    if where != "local":
        rig.flush_gpu()
    if where == "mixed":
        rig.generate(first[:5], max_tokens=3) if size >= 5 else rig.generate(first, max_tokens=3)
    before = rig.computed_tokens
    output = rig.generate(first, max_tokens=1)
    reusable = (size - 1) // 4 * 4
    assert rig.computed_tokens - before == size - reusable >= 1
    assert output.gpu_hit_tokens + output.restored_tokens == reusable
    if where == "local":
        assert output.restored_tokens == 0
    if where == "restored":
        assert output.gpu_hit_tokens == 0
    if where == "mixed" and num_blocks == 3:
        assert output.gpu_hit_tokens == 4
        assert output.restored_tokens == reusable - 4
    rig.verify_quiet()


def test_invariant_8_r27_a_request_that_is_not_admitted_holds_no_block(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, max_num_seqs=2)
    rig.add("a", prompt(12), max_tokens=4)
    rig.step()
    rig.add("b", prompt(8, 100))
    rig.add("c", prompt(1, 200))
    for _ in range(2):
        rig.step()
        assert [request.request_id for request in rig.engine.scheduler.waiting] == ["b", "c"]
        for request in rig.engine.scheduler.waiting:
            assert (request.block_table, request.num_computed) == ([], 0)
        assert rig.engine.pool.num_free == 0
    rig.run()
    assert len(rig.finished) == 3


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


def test_r26_chunks_that_end_within_a_block_make_the_same_chain(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=16, max_num_seqs=2, max_batch_tokens=7)
    rig.generate(prompt(20))
    output = rig.generate(prompt(20))
    assert output.gpu_hit_tokens == 16


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


def test_r19_a_block_is_allocated_when_a_token_needs_it(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    rig.add("a", prompt(3), max_tokens=4)
    used = []
    for _ in range(4):
        rig.step()
        used.append(4 - rig.engine.pool.num_free)
    assert used == [1, 1, 2, 0]


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


@pytest.mark.parametrize("size", range(5, 10))
def test_r20_a_preempted_request_puts_out_what_it_would_have(open_rig: OpenRig, size: int) -> None:
    rig = open_rig(num_blocks=5, max_num_seqs=2)
    rig.add("old", prompt(size), max_tokens=8)
    rig.add("young", prompt(size, 100), max_tokens=8)
    rig.run()
    assert list(rig.finished["young"].token_ids) == expected_tokens(prompt(size, 100), 8)


def test_r13_a_victim_whose_blocks_are_pinned_is_left_alone(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, max_num_seqs=2)
    rig.add("old", prompt(7), max_tokens=6)
    rig.add("young", prompt(7, 100), max_tokens=6)
    rig.step()
    young = next(r for r in rig.engine.scheduler.requests() if r.request_id == "young")
    pinned = list(young.block_table)
    for block in pinned:
        rig.engine.pool.pin(block)
    for _ in range(3):
        rig.step()
    assert rig.engine.scheduler.num_preemptions == 1, "old gave way: its blocks could be used at once"
    assert young.num_preemptions == 0
    for block in pinned:
        rig.engine.pool.unpin(block)
    rig.run()
    assert len(rig.finished) == 2


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


def test_invariant_2_r36_blocks_pinned_for_ever_are_a_stall_that_names_the_request(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4)
    for block in range(3):
        rig.engine.pool.pin(block)
    rig.add("a", prompt(8))
    rig.add("b", prompt(3, 100))
    verdicts = [rig.step().verdict for _ in range(2)]
    assert verdicts == [Verdict.STALL, Verdict.STALL]
    output = rig.finished["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "1 of 4 blocks free; request 'a' needs 3 more" in output.error
    rig.run()
    assert rig.finished["b"].finish_reason is FinishReason.LENGTH, "the one that fits goes on"
    for block in range(3):
        rig.engine.pool.unpin(block)


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


@pytest.mark.bug("AC02", "PF02")
def test_r18_a_request_that_waits_is_counted_once_at_admission_and_an_aborted_one_never(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, max_num_seqs=1)
    rig.add("busy", prompt(4), max_tokens=12)
    rig.step()
    assert rig.store is not None
    assert rig.store.stats().lookups == 1
    rig.add("waits", prompt(9, 100))
    rig.add("leaves", prompt(9, 200))
    for _ in range(8):
        rig.step()
    assert rig.store.stats().lookups == 1
    rig.abort("leaves")
    rig.run()
    stats = rig.store.stats()
    assert (stats.lookups, stats.asked_blocks) == (2, 0 + 2)


def test_r17_scheduling_what_does_not_fit_changes_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, max_num_seqs=2)
    for block in range(2):
        rig.engine.pool.pin(block)
    rig.add("a", prompt(12))
    pool = rig.engine.pool
    before = (list(pool.free_queue()), pool.num_free, pool.queue_version, dict(pool._cached))
    rig.engine.scheduler.schedule([], copies_in_flight=1)
    assert (list(pool.free_queue()), pool.num_free, pool.queue_version, dict(pool._cached)) == before
    for block in range(2):
        pool.unpin(block)
    rig.run()


# ---- beside restores -------------------------------------------------------------------------------------------------


def pin_free(rig: EngineRig) -> list[int]:
    """Take every free block out of use, as copies would."""
    pool = rig.engine.pool
    pinned = [block for block in pool.free_queue() if not pool.pins(block)]
    for block in pinned:
        pool.pin(block)
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
    assert rig.step().verdict is Verdict.OK
    assert rig.finished["restores"].restored_tokens == 8
    assert live(rig, "young").state is RequestState.WAITING
    unpin(rig, pinned)
    rig.run()
    assert rig.finished["young"].error is None


@pytest.mark.parametrize(("size", "admitted"), [(8, True), (9, False)])
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
    """Its cached prefix, which may be long, is not walked again in every step that it waits."""
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
    assert len(walks) <= 5
    rig.run()
    assert rig.finished["head"].token_ids
