"""Tiers of another machine: asked off the engine's thread, believed for a while, left alone while they are sick."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier.below import LowerTiers
from kvtier.durability import Durability
from kvtier.errors import ConfigError, TierError
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.lower import LowerTier
from kvtier.membership import FIRST_ASKED, Question
from kvtier.memory import PAGE_BYTES, PoolMemory
from kvtier.opened import OpenedTier, TierLimits
from kvtier.pool import HostPool
from kvtier.reasons import DropReason, MissReason
from kvtier.staging import Stager
from kvtier.testing import DictTier, FakeClock, ManualExecutor, RemoteDictTier
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.known import LIFETIME_S, MAX_KNOWN, KnownBlocks
from kvtier.tiers.reservation import Reservation

SPACE = b"s" * 16
TIMEOUT_S = 0.5
MAX_COOLDOWN_S = 5.0
MAX_AGE_S = 60.0


def name(number: int) -> BlockDigest:
    return BlockDigest(b"%032d" % number)


def names(*numbers: int) -> list[BlockDigest]:
    return [name(number) for number in numbers]


def key(number: int) -> Key:
    return make_key(SPACE, name(number))


def content(number: int) -> bytes:
    return b"%016d" % number * (PAGE_BYTES // 16)


class Harness:
    """A host tier of some pages over a near tier and a remote one, each with jobs that run when told."""

    def __init__(self, num_pages: int = 16, *, with_near: bool = False, **limits: Any) -> None:
        self.clock = FakeClock()
        self.pool = HostPool(PoolMemory(num_pages * PAGE_BYTES, touch=False), PAGE_BYTES)
        self.host = HostTier(self.pool)
        self.owner = self.pool.owner("test")
        self.stager = Stager(self.host, self.pool, (), 64 * PAGE_BYTES, self.clock)
        self.below = LowerTiers(self.host, self.pool, self.stager, self.clock, MAX_AGE_S)
        self.near, self.remote = DictTier(), RemoteDictTier()
        self.near_jobs, self.jobs = ManualExecutor(), ManualExecutor()
        self.limits = TierLimits(**{"writers": 2, "timeout_s": TIMEOUT_S, "max_cooldown_s": MAX_COOLDOWN_S} | limits)
        if with_near:
            self.below.add(OpenedTier(self.near, self.limits), self.near_jobs)
        self.below.add(OpenedTier(self.remote, self.limits), self.jobs)
        self.told = 0
        self.stager.subscribe(self._note)

    def _note(self) -> None:
        self.told += 1

    @property
    def lower(self) -> LowerTier:
        return self.below.find("remote")

    def store(self, *numbers: int) -> None:
        """By an engine, each as the child of the one before."""
        for number in numbers:
            parent = name(number - 1) if number else None
            reserved = self.host.reserve(SPACE, name(number), parent, PAGE_BYTES, self.owner)
            assert isinstance(reserved, Reservation)
            reserved.lease.view[:] = content(number)
            assert self.host.commit([reserved]) == [True]

    def put(self, tier: Tier, *numbers: int) -> None:
        """There already, by whomever."""
        tier.write([WriteRequest(key(n), None, memoryview(content(n))) for n in numbers])

    def forget_host(self) -> None:
        self.host.reset(SPACE)

    def read(self, number: int) -> ReadOutcome:
        buffer = bytearray(PAGE_BYTES)
        (outcome,) = self.lower.tier.read([ReadRequest(key(number), memoryview(buffer))])
        assert outcome is not ReadOutcome.OK or buffer == content(number)
        return outcome

    def ask(self, *numbers: int) -> list[Question]:
        found = self.stager.locate(SPACE, names(*numbers), PAGE_BYTES)
        return self.stager.ask(SPACE, names(*numbers), PAGE_BYTES, found)

    def located(self, *numbers: int) -> list[str]:
        """Where the leading blocks are, by what is known."""
        found = self.stager.locate(SPACE, names(*numbers), PAGE_BYTES)
        return ["host" if source is None else source.name for source in found.sources]

    def break_it(self) -> None:
        """Let as many calls fail as open the breaker."""
        self.remote.is_sick = True
        for _ in range(3):
            assert self.read(0) is ReadOutcome.ERROR
        assert not self.lower.is_available

    def close(self) -> None:
        self.jobs.run_all()
        self.near_jobs.run_all()
        for lower in self.below.tiers:
            lower.check_integrity()
        self.below.close(5.0)
        self.stager.check_integrity()
        self.stager.close()
        self.host.check_integrity()
        self.owner.close()
        assert self.pool.usage().num_leases == 0
        self.host.close()
        self.pool.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    with ExitStack() as stack:

        def open_one(**kwargs: Any) -> Harness:
            harness = Harness(**kwargs)
            stack.callback(harness.close)
            return harness

        yield open_one


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_a_remote_tier_is_asked_by_a_thread_of_its_own_and_then_known(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.put(harness.remote, 0, 1, 2)
    assert harness.located(0, 1, 2) == []
    (question,) = harness.ask(0, 1, 2, 3)
    assert harness.remote.num_asked == 0, "the engine's thread asks nobody"
    assert not question.done
    assert harness.told == 0
    harness.jobs.run_all()
    assert (question.done, question.failure) == (True, None)
    assert harness.told == 1, "whoever waits is woken"
    assert harness.located(0, 1, 2, 3) == ["remote"] * 3
    assert harness.remote.num_asked == 4
    assert harness.ask(0, 1, 2) == [], "what is known is not asked for again"


def test_only_what_no_other_tier_has_is_asked_for_and_holes_are_right(make: Callable[..., Harness]) -> None:
    harness = make(with_near=True)
    harness.put(harness.near, 1, 2, 5)
    harness.put(harness.remote, 2, 3, 4, 6, 8)
    harness.store(0)
    harness.near_jobs.run_all()
    harness.jobs.run_all()
    harness.lower._known.discard([key(0)])  # type: ignore[union-attr]
    (question,) = harness.ask(*range(10))
    harness.jobs.run_all()
    assert question.failure is None
    assert harness.remote.num_asked == 6, "3, 4, 6, 7, 8, 9: of the first round trip what is nowhere else"
    assert harness.located(*range(10)) == ["host", "dict", "dict", "remote", "remote", "dict", "remote"]


@pytest.mark.bug("PF04")
def test_a_prompt_costs_few_round_trips_and_one_that_is_nowhere_costs_one(make: Callable[..., Harness]) -> None:
    harness = make(num_pages=16384)
    round_trips: list[int] = []
    look = harness.remote.contains

    def contains(keys: Sequence[Key]) -> list[bool]:
        round_trips.append(len(keys))
        return look(keys)

    harness.remote.contains = contains  # type: ignore[method-assign]
    harness.put(harness.remote, *range(64))
    harness.ask(*range(64))
    harness.jobs.run_all()
    assert round_trips == [64]
    round_trips.clear()
    harness.ask(*range(10_000, 18_192))
    harness.jobs.run_all()
    assert round_trips == [FIRST_ASKED], "nothing of it is there"
    round_trips.clear()
    harness.put(harness.remote, *range(10_000, 18_192))
    harness.ask(*range(10_000, 18_192))
    harness.jobs.run_all()
    assert round_trips == [64, 512, 4096, 3520]


def test_a_question_that_the_executor_refuses_is_done(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.jobs._max_queued = 0
    (question,) = harness.ask(0)
    assert (question.done, question.failure) == (True, MissReason.BACKLOG)


def test_a_question_that_fails_says_so_and_nothing_is_believed(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.put(harness.remote, 0)
    harness.remote.is_sick = True
    (question,) = harness.ask(0)
    harness.jobs.run_all()
    assert (question.done, question.failure) == (True, MissReason.TIER_ERROR)
    assert harness.located(0) == []
    assert harness.lower.stats().errors == {"ConnectionError": 1}


# ---- what is believed ------------------------------------------------------------------------------------------------


def test_what_is_known_is_known_for_a_while_and_a_wrong_yes_is_found_out(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.store(0, 1)
    harness.jobs.run_all()
    harness.forget_host()
    assert harness.located(0, 1) == ["remote", "remote"], "this process stored them"
    harness.remote.remove([key(1)])  # by the other machine, which tells nobody
    assert harness.read(1) is ReadOutcome.MISS
    assert harness.located(0, 1) == ["remote"]
    harness.clock.advance(LIFETIME_S)
    assert harness.located(0, 1) == []


def test_known_blocks_are_bounded_and_the_oldest_go_first() -> None:
    clock = FakeClock()
    known = KnownBlocks(clock)
    known.add(key(number) for number in range(MAX_KNOWN))
    known.add([key(0), key(MAX_KNOWN)])
    assert len(known) == MAX_KNOWN
    assert known.held([key(0), key(1), key(2), key(MAX_KNOWN)]) == [True, False, True, True]
    clock.advance(-1.0)
    assert known.held([key(0)]) == [False], "a clock that went back makes nothing known for ever"
    known.clear()
    assert len(known) == 0


def test_a_reset_leaves_nothing_known(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.store(0)
    harness.jobs.run_all()
    harness.lower.close(0.1)
    with pytest.raises(TierError):
        harness.lower.start_epoch(1)
    assert harness.lower.held([key(0)]) == [False]


# ---- sick ------------------------------------------------------------------------------------------------------------


@pytest.mark.bug("HS16")
def test_a_sick_tier_is_asked_by_nobody_but_its_probe(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.break_it()
    harness.clock.advance(10 * MAX_COOLDOWN_S)
    harness.remote.is_sick = False
    assert harness.read(0) is ReadOutcome.REFUSED, "no request is the probe, however long ago it was"
    assert harness.ask(0) == []
    harness.lower.tier.touch([key(0)])
    assert harness.remote.num_asked == 0
    assert not harness.lower.is_available
    assert harness.lower.stats().available == 0
    assert harness.remote.num_probes == 0, "nor does who asks wait for the probe"
    harness.jobs.run_all()
    assert harness.remote.num_probes == 1
    assert harness.lower.is_available
    assert harness.read(0) is ReadOutcome.MISS


def test_probes_come_at_growing_intervals_up_to_a_bound_one_at_a_time(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.break_it()
    probed_at: list[float] = []
    began = harness.clock.now()
    for _ in range(400):
        harness.clock.advance(0.1)
        assert not harness.lower.is_available
        assert not harness.lower.is_available
        before = harness.remote.num_probes
        harness.jobs.run_all()
        if harness.remote.num_probes > before:
            assert harness.remote.num_probes == before + 1
            probed_at.append(harness.clock.now() - began)
    gaps = [b - a for a, b in zip([0.0, *probed_at], probed_at, strict=False)]
    assert gaps[:3] == pytest.approx([1.0, 2.0, 4.0], abs=0.11)
    assert max(gaps) == pytest.approx(MAX_COOLDOWN_S, abs=0.11)
    harness.remote.is_sick = False
    harness.clock.advance(MAX_COOLDOWN_S)
    assert not harness.lower.is_available
    harness.jobs.run_all()
    assert harness.lower.is_available


def test_one_call_that_takes_too_long_and_fails_is_enough(make: Callable[..., Harness]) -> None:
    harness = make()

    def late(requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        harness.clock.advance(TIMEOUT_S + 0.01)
        return [ReadOutcome.ERROR] * len(requests)

    harness.remote.read = late  # type: ignore[method-assign]
    assert harness.read(0) is ReadOutcome.ERROR
    assert not harness.lower.is_available
    assert harness.lower.stats().breaker_opened == 1


def test_whoever_waits_for_an_answer_learns_that_the_tier_is_sick(make: Callable[..., Harness]) -> None:
    harness = make()
    (question,) = harness.ask(0)
    assert not question.done
    harness.break_it()
    assert (question.done, question.failure) == (True, MissReason.TIER_DOWN)


def test_stores_for_a_sick_tier_are_counted_and_come_again(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.break_it()
    harness.store(0, 1)
    harness.jobs.run_all()
    ledger = harness.lower.write_behind.ledger.snapshot()
    assert (ledger.due, ledger.stored, dict(ledger.dropped)) == (2, 0, {DropReason.TIER_DOWN: 2})
    harness.remote.is_sick = False
    harness.clock.advance(MAX_COOLDOWN_S)
    assert not harness.lower.is_available
    harness.jobs.run_all()
    harness.lower.note_use(SPACE, names(0, 1), None)
    harness.jobs.run_all()
    assert harness.lower.write_behind.ledger.snapshot().stored == 2


# ---- several tiers ---------------------------------------------------------------------------------------------------


def test_what_comes_to_host_memory_goes_to_every_tier_but_where_it_came_from(make: Callable[..., Harness]) -> None:
    harness = make(with_near=True)
    harness.store(0)
    harness.near_jobs.run_all()
    harness.jobs.run_all()
    assert harness.near.contains([key(0)]) == harness.remote.contains([key(0)]) == [True]
    harness.put(harness.remote, 1)
    harness.ask(1)
    harness.jobs.run_all()
    stage = harness.stager.begin("r", SPACE, names(1), name(0), PAGE_BYTES, 1.0)
    assert stage is not None
    harness.jobs.run_all()
    assert stage.poll()
    assert dict(stage.arrived) == {"remote": 1}
    stage.close()
    harness.near_jobs.run_all()
    assert harness.near.contains([key(1)]) == [True]
    assert harness.lower.write_behind.ledger.snapshot().due == 1


def test_a_tier_that_gives_nothing_back_leaves_the_others_budget_alone(make: Callable[..., Harness]) -> None:
    harness = make(num_pages=256, with_near=True)
    harness.put(harness.remote, *range(100))
    harness.put(harness.near, *range(200, 210))
    harness.ask(*range(100))
    harness.jobs.run_all()
    far = harness.stager.begin("far", SPACE, names(*range(100)), None, PAGE_BYTES, 1.0)
    near = harness.stager.begin("near", SPACE, names(*range(200, 210)), None, PAGE_BYTES, 1.0)
    assert far is not None
    assert near is not None
    assert harness.stager.inflight_bytes_of(harness.lower) == 64 * PAGE_BYTES
    harness.near_jobs.run_all()
    assert near.poll()
    assert near.num_end == 10
    harness.stager.check_integrity()
    harness.clock.advance(2.0)
    assert far.poll()
    assert far.miss is MissReason.TIMEOUT
    far.close()
    near.close()


def test_attach_and_detach_at_run_time(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.store(0)
    harness.jobs.run_all()
    with pytest.raises(ConfigError, match="detach that first"):
        harness.below.attach(OpenedTier(RemoteDictTier(), harness.limits), 0)
    near = DictTier()
    harness.below.attach(OpenedTier(near, harness.limits), 3, place=0)
    assert near.epoch == 3, "what it held before the store's epoch is forgotten"
    assert [lower.name for lower in harness.below.tiers] == ["dict", "remote"]
    harness.store(1)
    assert harness.below.find("dict").flush(5.0) == 0
    assert near.contains([key(0), key(1)]) == [False, True]
    harness.forget_host()
    harness.jobs.run_all()
    assert harness.located(0, 1) == ["remote", "dict"]
    harness.below.detach("dict", 5.0)
    assert harness.located(0, 1) == ["remote", "remote"]
    with pytest.raises(ConfigError, match="its lower tiers are: remote"):
        harness.below.detach("dict", 5.0)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stage_of_a_tier_that_is_detached_ends(
    make: Callable[..., Harness], is_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make(with_near=True)
    harness.put(harness.near, 0, 1)
    harness.put(harness.remote, 0, 1)
    harness.ask(0, 1)
    if is_begun:  # the read of the first job is under way when the tier goes
        read = harness.near.read

        def detach(requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
            harness.below.detach("dict", 0.0)
            return read(requests)

        harness.near.read = detach  # type: ignore[method-assign]
    stage = harness.stager.begin("r", SPACE, names(0, 1), None, PAGE_BYTES, 1.0)
    assert stage is not None
    if is_begun:
        harness.near_jobs.run_all()
    else:
        harness.below.detach("dict", 0.0)
    assert stage.poll()
    assert stage.miss is not None
    stage.close()
    harness.stager.check_integrity()
    assert harness.stager.inflight_bytes == 0
    again = harness.stager.begin("again", SPACE, names(0, 1), None, PAGE_BYTES, 1.0)
    assert again is None or again.tiers == ["remote"]
    if again is not None:
        harness.jobs.run_all()
        assert again.poll()
        again.close()
    caplog.clear()  # a traceback keeps the slots that its frames were about


# ---- age, durability -------------------------------------------------------------------------------------------------


def test_a_store_that_waited_too_long_is_dropped_with_what_continues_it(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.store(0)
    harness.clock.advance(MAX_AGE_S + 1)
    harness.store(1, 10)
    harness.jobs.run_all()
    ledger = harness.lower.write_behind.ledger.snapshot()
    assert dict(ledger.dropped) == {DropReason.AGED: 1, DropReason.ORPHAN: 1}
    assert ledger.stored == 1
    assert harness.remote.contains([key(0), key(1), key(10)]) == [False, False, True]
    harness.lower.note_use(SPACE, names(0, 1), None)
    harness.jobs.run_all()
    assert harness.remote.contains([key(0), key(1)]) == [True, True], "due again once used"


def watch(harness: Harness, *numbers: int) -> Any:
    return harness.lower.write_behind.watch([key(n) for n in numbers], harness.lower.held)


def test_durability_is_told_once_nothing_is_on_its_way(make: Callable[..., Harness]) -> None:
    harness = make()
    assert watch(harness).poll() == Durability(0, {})
    harness.store(0, 1)
    ticket = watch(harness, 0, 1, 5)
    assert ticket.poll() is None
    assert ticket.wait(0.0) is None
    harness.jobs.run_all()
    answer = ticket.poll()
    assert (answer.num_blocks, dict(answer.lost), answer.is_durable) == (3, {key(5): None}, False)
    assert ticket.wait(5.0) is answer
    assert watch(harness, 0, 1).poll().is_durable


def test_durability_names_why_a_block_was_lost(make: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    harness = make()
    harness.remote.is_sick = True
    harness.store(0)
    ticket = watch(harness, 0)
    harness.jobs.run_all()
    assert dict(ticket.poll().lost) == {key(0): DropReason.TIER_ERROR}
    assert dict(watch(harness, 0).poll().lost) == {key(0): DropReason.TIER_ERROR}, "as remembered"
    harness.store(10)
    ticket = watch(harness, 10)
    harness.below.close(1.0)
    assert dict(ticket.poll().lost) == {key(10): DropReason.CLOSED}
    caplog.clear()  # a traceback keeps the slots that its frames were about


def test_a_block_that_arrives_between_two_looks_is_seen_by_one(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.store(0)

    def held(keys: Sequence[Key]) -> list[bool]:
        harness.jobs.run_all()
        return harness.lower.held(keys)

    answer = harness.lower.write_behind.watch([key(0), key(7)], held).poll()
    assert answer is not None
    assert answer.lost == {key(7): None}


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_changes_are_told_as_they_are_learnt(make: Callable[..., Harness]) -> None:
    harness = make()
    stored: list[tuple[Key, Key | None]] = []
    gone: list[Key] = []
    end = harness.lower.subscribe(stored.extend, gone.extend)
    harness.store(0, 1)
    harness.jobs.run_all()
    assert stored == [(key(0), None), (key(1), key(0))]
    harness.remote.remove([key(1)])
    harness.read(1)
    harness.lower.tier.remove([key(0)])
    assert gone == [key(1), key(0)]
    end()
    harness.lower.tier.write([WriteRequest(key(3), None, memoryview(content(3)))])
    assert len(stored) == 2
    assert harness.lower.tier.write([WriteRequest(key(3), None, memoryview(content(3)))]) == [
        WriteOutcome.ALREADY_STORED
    ]


def test_a_lifetime_and_a_tenant_go_with_the_block(make: Callable[..., Harness]) -> None:
    harness = make(with_near=True)
    asked: list[float | None] = []
    write = harness.remote.write

    def note(requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        asked.extend(request.ttl_s for request in requests)
        return write(requests)

    harness.remote.write = note  # type: ignore[method-assign]
    for number, ttl_s in ((0, None), (1, 60.0)):
        reserved = harness.host.reserve(SPACE, name(number), None, PAGE_BYTES, harness.owner, ttl_s=ttl_s)
        assert isinstance(reserved, Reservation)
        harness.host.commit([reserved])
    harness.jobs.run_all()
    assert asked == [None, 60.0]


def test_what_a_remote_tier_is_known_to_hold_is_not_sent_again(make: Callable[..., Harness]) -> None:
    harness = make(with_near=True)
    harness.store(0, 1)
    harness.near_jobs.run_all()
    harness.jobs.run_all()
    harness.forget_host()
    stage = harness.stager.begin("r", SPACE, names(0, 1), None, PAGE_BYTES, 1.0)
    assert stage is not None
    assert stage.tiers == ["dict"]
    harness.near_jobs.run_all()
    assert stage.poll()
    stage.close()
    assert len(harness.jobs) == 0
    ledger = harness.lower.write_behind.ledger.snapshot()
    assert (ledger.due, ledger.stored) == (2, 2)
    harness.remote.remove([key(0)])  # by the other machine
    assert harness.read(0) is ReadOutcome.MISS
    harness.forget_host()
    stage = harness.stager.begin("r", SPACE, names(0, 1), None, PAGE_BYTES, 1.0)
    assert stage is not None
    harness.near_jobs.run_all()
    harness.jobs.run_all()
    stage.close()
    assert harness.remote.contains([key(0), key(1)]) == [True, True], "once it is known to be gone it is stored again"


def test_nothing_is_believed_of_a_tier_that_was_sick(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.store(0)
    harness.jobs.run_all()
    harness.forget_host()
    assert harness.located(0) == ["remote"]
    harness.break_it()
    harness.remote.remove([key(0)])  # as a server that was restarted
    harness.remote.is_sick = False
    harness.clock.advance(MAX_COOLDOWN_S)
    assert not harness.lower.is_available
    harness.jobs.run_all()
    assert harness.lower.is_available
    assert harness.located(0) == []
