"""Blocks: when they are allocated, what of them can be matched, and by whom they are written: R15..R29."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtier.keys import BlockDigest, DigestChain
from kvtier_engine import request as request_module
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.request import FinishReason, Request, RequestState
from kvtier_engine.runner import BatchItem
from kvtier_engine.testing import PageWriteLog, expected_tokens, unchanged
from kvtier_engine.testing.rig import EngineRig

OpenRig = Callable[..., EngineRig]


def prompt(size: int, start: int = 0) -> list[int]:
    return list(range(start, start + size))


def published(pool: BlockPool) -> list[int]:
    return [block for block in range(pool.num_blocks) if pool.is_published(block)]


def live(rig: EngineRig, request_id: str) -> Request:
    return next(r for r in rig.engine.scheduler.requests() if r.request_id == request_id)


# ---- what can be matched ---------------------------------------------------------------------------------------------


def test_r15_scheduling_probing_and_allocating_make_nothing_matchable(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, kvtier=False)
    rig.generate(prompt(5))
    rig.add("a", prompt(9), max_tokens=3)
    scheduler, pool = rig.engine.scheduler, rig.engine.pool
    before = published(pool)
    scheduler.admission.could_admit(live(rig, "a"), scheduler.running)
    plan = scheduler.schedule([], copies_in_flight=0)
    assert [share.num_tokens for share in plan.scheduled] == [5]
    assert len(live(rig, "a").block_table) == 3
    assert published(pool) == before
    assert len(rig.engine.cached_blocks(prompt(9))) == 1
    rig.run()
    assert len(rig.engine.cached_blocks(prompt(9))) == 2, "the positive control"


def test_r15_while_a_forward_runs_its_blocks_match_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8, kvtier=False, max_batch_tokens=8)
    found: list[int] = []
    rig.runner.fail = lambda _batch: found.append(len(rig.engine.cached_blocks(prompt(20))))
    rig.add("a", prompt(20))
    rig.run()
    assert found == [0, 2, 4]


@pytest.mark.bug("WR16")
def test_r15_a_block_is_matchable_only_after_the_forward_that_filled_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    seen: list[bool] = []
    rig.runner.fail = lambda _batch: seen.append(any(map(rig.engine.pool.is_published, range(8))))
    rig.add("a", prompt(9))
    rig.add("b", prompt(9))
    rig.step()
    assert seen == [False], "while the forward ran nothing of it could be found"
    assert rig.finished["a"].gpu_hit_tokens == rig.finished["b"].gpu_hit_tokens == 0
    assert any(map(rig.engine.pool.is_published, range(8)))


def test_r15_a_landing_is_matchable_only_after_its_verdict(open_rig: OpenRig) -> None:
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


@pytest.mark.bug("CR07")
@pytest.mark.parametrize("where", ["local", "restored", "mixed"])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_r21_a_prompt_that_is_cached_whole_still_computes_its_last_token(
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


def test_r27_a_request_that_is_not_admitted_holds_no_block(open_rig: OpenRig) -> None:
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


def test_r16_a_failing_forward_leaves_only_earlier_blocks_to_match(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=8, kvtier=False, max_batch_tokens=8)

    def fail(batch: Sequence[BatchItem]) -> None:
        if batch[0].start:
            raise RuntimeError("device lost")

    rig.runner.fail = fail
    rig.add("a", prompt(20))
    rig.run()
    assert rig.finished["a"].finish_reason is FinishReason.ERROR
    assert len(rig.engine.cached_blocks(prompt(20))) == 2
    rig.runner.fail = lambda _batch: None
    assert rig.generate(prompt(20), max_tokens=3).gpu_hit_tokens == 8
    rig.verify_quiet()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_r17_asking_who_could_be_admitted_changes_nothing(open_rig: OpenRig, policy: str) -> None:
    rig = open_rig(num_blocks=8, max_num_seqs=3, engine={"head_patience": 1, "policy": policy})
    rig.generate(prompt(9))
    rig.flush_gpu()
    rig.generate(prompt(9, 100))
    rig.add("runs", prompt(14, 200), max_tokens=8)
    rig.add("restores", prompt(30))
    rig.add("shares", [*prompt(8, 100), *prompt(9, 300)])
    for _ in range(3):
        rig.step()
    engine, scheduler = rig.engine, rig.engine.scheduler
    blocked = [live(rig, "restores"), live(rig, "shares")]
    assert all(request.state is RequestState.WAITING for request in blocked)
    assert len(engine.cached_blocks(prompt(9, 100))) == 2
    answers: list[list[bool]] = []
    with unchanged(engine):
        for _ in range(5):
            answers.append([scheduler.admission.could_admit(request, scheduler.running) for request in blocked])
            engine.cached_blocks(prompt(5, 100))  # fewer than were matched last
            scheduler.stats()
            scheduler.check_integrity()
    assert answers == [answers[0]] * 5
    rig.run()
    assert len(rig.finished) == 6


def test_r17_what_could_be_admitted_is_what_is(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=6, kvtier=False)
    rig.add("runs", prompt(11), max_tokens=5)
    rig.step()
    scheduler = rig.engine.scheduler
    for size in range(1, 20):
        rig.add("asks", prompt(size, 100))
        could = scheduler.admission.could_admit(live(rig, "asks"), scheduler.running)
        scheduler.schedule([], copies_in_flight=0)
        assert (live(rig, "asks").state is RequestState.RUNNING) == could == (size < 12)
        rig.abort("asks")
    rig.run()


def test_r22_a_prompt_whose_blocks_were_reused_is_computed_anew(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=4, kvtier=False)
    rig.generate(prompt(12))
    rig.flush_gpu()
    assert rig.engine.cached_blocks(prompt(12)) == []
    assert rig.generate(prompt(12), max_tokens=3).gpu_hit_tokens == 0
    rig.verify_quiet()


@pytest.mark.parametrize("first_to_end", ["a", "b"])
def test_r23_a_later_prompt_hits_as_long_as_either_of_two_equal_ones_lives(
    open_rig: OpenRig, first_to_end: str
) -> None:
    rig = open_rig(num_blocks=10, kvtier=False)
    rig.add("a", prompt(9), max_tokens=6)
    rig.add("b", prompt(9), max_tokens=6)
    rig.step()
    assert live(rig, "a").block_table[:2] == live(rig, "b").block_table[:2]
    assert [rig.engine.pool.refs(block) for block in live(rig, "b").block_table] == [2, 2, 1]
    rig.abort(first_to_end)
    rig.add("later", prompt(9), max_tokens=2)
    rig.run()
    assert rig.finished["later"].gpu_hit_tokens == 8
    rig.verify_quiet()


class ConstantChain(DigestChain):
    """As if the hash function returned the same for everything."""

    __slots__ = ()

    @property
    def digests(self) -> Sequence[BlockDigest]:
        return [BlockDigest(b"the same for all")] * len(super().digests)


@pytest.mark.bug("SE08")
def test_r24_with_a_constant_hash_every_output_is_right(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "DigestChain", ConstantChain)
    rig = open_rig(num_blocks=8, kvtier=False)
    for first in (prompt(9), prompt(9, 100), [*prompt(4, 100), *prompt(5)], prompt(9)):
        rig.generate(first, max_tokens=3)
    assert rig.generate(prompt(5), max_tokens=3).gpu_hit_tokens == 4, "the positive control"
    rng = random.Random(0)
    for turn in range(40):
        rig.add(f"{turn}", [rng.randrange(2)] * rng.randint(1, 20), rng.randint(1, 5))
        rig.step()
    rig.run()
    assert rig.engine.pool.num_collisions > 0
    rig.verify_quiet()


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_sizes(rig: EngineRig, request_id: str) -> Iterator[tuple[int, int]]:
    """After each step: tokens with KV, and blocks."""
    while request_id not in rig.finished:
        rig.step()
        if request_id not in rig.finished and (request := live(rig, request_id)).block_table:
            yield request.num_computed, len(request.block_table)


@pytest.mark.parametrize("size", range(1, 9))
def test_r19_a_block_is_allocated_exactly_when_a_token_needs_it(open_rig: OpenRig, size: int) -> None:
    rig = open_rig(num_blocks=4, kvtier=False)
    rig.add("a", prompt(size), max_tokens=8)
    sizes = list(table_sizes(rig, "a"))
    assert sizes == [(tokens, -(-tokens // 4)) for tokens in range(size, size + 7)]


def test_r19_the_last_place_of_a_block_preempts_nobody_and_the_first_of_the_next_does(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=3, kvtier=False, max_num_seqs=2)
    rig.add("old", prompt(6), max_tokens=6)
    rig.add("young", prompt(2, 100), max_tokens=2)
    rig.step()
    rig.add("young too", prompt(1, 200), max_tokens=2)
    assert rig.engine.pool.num_free == 0
    for num_computed, num_preemptions in ((7, 0), (8, 0), (9, 1)):
        rig.step()
        assert live(rig, "old").num_computed == num_computed
        assert rig.engine.scheduler.num_preemptions == num_preemptions
    rig.run()


@pytest.mark.parametrize(("size", "num_blocks"), [(5, 5), (6, 5), (7, 5), (8, 6), (9, 6), (12, 8)])
def test_r20_a_request_that_was_preempted_ends_as_one_that_was_not(
    open_rig: OpenRig, size: int, num_blocks: int
) -> None:
    alone = open_rig(num_blocks=num_blocks, kvtier=False)
    alone.add("young", prompt(size, 100), max_tokens=8)
    expected = dict(table_sizes(alone, "young"))
    rig = open_rig(num_blocks=num_blocks, kvtier=False, max_num_seqs=2)
    rig.add("old", prompt(size), max_tokens=12)
    rig.add("young", prompt(size, 100), max_tokens=8)
    sizes = list(table_sizes(rig, "young"))
    assert rig.engine.scheduler.num_preemptions > 0
    assert all(expected[tokens] == blocks for tokens, blocks in sizes)
    assert list(rig.finished["young"].token_ids) == expected_tokens(prompt(size, 100), 8)
    rig.verify_quiet()


def test_r20_one_token_behind_a_block_boundary(open_rig: OpenRig) -> None:
    rig = open_rig(num_blocks=5, kvtier=False, max_num_seqs=2)
    rig.add("old", prompt(8), max_tokens=8)
    rig.add("young", prompt(5, 100), max_tokens=6)
    lengths: list[int] = []
    while rig.engine.num_unfinished:
        before = rig.engine.scheduler.num_preemptions
        rig.step()
        if rig.engine.scheduler.num_preemptions > before:
            lengths.append(len(live(rig, "young").tokens) % 4)
    assert lengths == [1]
    assert list(rig.finished["young"].token_ids) == expected_tokens(prompt(5, 100), 6)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_r21_no_shared_block_is_written(open_rig: OpenRig, num_blocks: int) -> None:
    rig = open_rig(num_blocks=12, kvtier=False)
    log = rig.runner.writes = PageWriteLog(rig.engine.pool)
    size = 4 * num_blocks
    rig.add("holds", prompt(size), max_tokens=9)
    rig.step()
    rig.add("shares", prompt(size), max_tokens=5)
    before = rig.computed_tokens
    rig.step()
    assert rig.computed_tokens - before == 1 + 4
    assert live(rig, "shares").gpu_hit_tokens == size - 4
    rig.run()
    log.verify()
    rig.verify_quiet()


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 20])
def test_r26_the_chain_of_a_prompt_in_chunks_is_that_of_one_computed_at_once(open_rig: OpenRig, chunk: int) -> None:
    rig = open_rig(num_blocks=6, kvtier=False, max_batch_tokens=chunk)
    seen: list[int] = []
    rig.runner.fail = lambda _batch: seen.append(len(rig.engine.cached_blocks(prompt(20))))
    rig.add("a", prompt(20))
    rig.run()
    assert seen == [start // 4 for start in range(0, 20, chunk)], "full blocks only"
    digests = [digest for digest, _ in rig.engine.cached_blocks(prompt(20))]
    assert digests == list(rig.engine.digests(prompt(20)))
    assert rig.generate(prompt(20)).gpu_hit_tokens == 16


@pytest.mark.parametrize(("max_num_seqs", "max_batch_tokens"), [(1, 64), (2, 9)])
def test_r27_without_a_slot_or_tokens_left_nothing_is_attached(
    open_rig: OpenRig, max_num_seqs: int, max_batch_tokens: int
) -> None:
    rig = open_rig(num_blocks=12, kvtier=False, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens)
    rig.generate(prompt(8, 100))
    rig.add("a", prompt(9), max_tokens=2)
    rig.add("b", prompt(9, 100), max_tokens=2)
    rig.step()
    waits = live(rig, "b")
    assert (waits.state, waits.block_table, waits.num_computed) == (RequestState.WAITING, [], 0)
    assert rig.engine.pool.num_free == 9
    rig.run()
    assert rig.finished["b"].gpu_hit_tokens == 8


# ---- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_r28_r29_the_ledger_holds_through_ten_thousand_operations(seed: int) -> None:
    """Against a plain model of who has what; and no block that somebody references or pins is handed out."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(2, 20))
    tables: list[list[int]] = []
    pins: list[int] = []

    def run() -> None:
        tokens = tuple(rng.randrange(2) for _ in range(rng.randint(1, 5)))
        digests = [repr(tokens[: index + 1]).encode() for index in range(len(tokens))]
        table = pool.match(b"root", digests, lambda index: (tokens[index],))
        pool.acquire(table)
        kept = {block for other in [*tables, table] for block in other} | set(pins)
        own = pool.allocate(len(tokens) - len(table))
        if own is None:
            pool.release(table)
            return
        assert kept.isdisjoint(own), "handed out while somebody needs it"
        table += own
        for index in range(len(tokens) if rng.random() < 0.8 else 0):
            previous = table[index - 1] if index else None
            twin = pool.publish(table[index], digests[index], b"root", previous, (tokens[index],))
            if twin != table[index]:
                pool.acquire([twin])
                pool.release([table[index]])
                table[index] = twin
        tables.append(table)

    def end() -> None:
        if tables:
            pool.release(tables.pop(rng.randrange(len(tables))))

    def pin() -> None:
        pins.append(rng.randrange(pool.num_blocks))
        pool.pin(pins[-1], "a copy")

    def unpin() -> None:
        if pins:
            pool.unpin(pins.pop(rng.randrange(len(pins))))

    for _ in range(10_000):
        rng.choices([run, end, pin, unpin, pool.reset_cache], [10, 9, 4, 5, 0.1])[0]()
        pool.check_integrity(tables)
        used = {block for table in tables for block in table}
        assert pool.num_held == len(set(pins) - used)
        assert pool.num_free == pool.num_blocks - len(used | set(pins))
    while tables or pins:
        end()
        unpin()
    pool.check_integrity([])
    assert pool.num_free == pool.num_blocks
    assert pool.holders() == {}
