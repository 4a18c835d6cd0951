"""Blocks that come up from lower tiers for several clients: shared, fair, told one by one, never scribbled over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.frame import payload_checksum
from kvtier.memory import PAGE_BYTES
from kvtier.opened import OpenedTier, TierLimits
from kvtier.protocol import messages as m
from kvtier.reasons import MissReason
from kvtier.testing import ManualExecutor
from kvtier.testing.tier import RemoteDictTier
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteRequest
from tests.server.session_rig import SPACE, Client, Rig, content, digest, joined

OK, MISS, DAMAGED, REFUSED, TIMEOUT, FULL = (
    m.StageOutcome.OK,
    m.StageOutcome.MISS,
    m.StageOutcome.DAMAGED,
    m.StageOutcome.REFUSED,
    m.StageOutcome.TIMEOUT,
    m.StageOutcome.FULL,
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(blocks=32, disk=tmp_path, token_file=tmp_path / "token")
    yield rig
    rig.check_integrity()
    rig.run_jobs()
    rig.close()
    rig.verify_baseline()


def store_below(rig: Rig, numbers: list[int], nbytes: int = PAGE_BYTES) -> None:
    """On disk, and not in host memory."""
    client = rig.unix()
    for number in numbers:
        client.store([number], nbytes)
        rig.run_jobs()
    client.say(m.Bye())
    rig.evict_host()
    assert rig.store.stats().host_blocks == 0


def verify_staged(client: Client, staged: m.Staged, numbers: list[int]) -> None:
    assert [client.at(offset) for offset in staged.offsets] == [content(number) for number in numbers]
    assert staged.checksums == [payload_checksum(content(number)) for number in numbers]


# ---- one client ------------------------------------------------------------------------------------------------------


def test_blocks_come_from_disk_with_their_checksums_and_the_answer_when_they_are_here(rig: Rig) -> None:
    store_below(rig, [0, 1, 2])
    client = rig.unix()
    assert client.lookup([0, 1, 2, 3]) == [2, 2, 2, 0]
    client.say(client.stage_message([0, 1, 2, 3]))
    assert not client.heard
    assert rig.hub.has_requests
    counts = rig.hub.client_counts("a")
    assert (counts.waiting, counts.requests) == (1, 1)
    client.ask(m.Ping(99), m.Pong)  # answers come in any order
    wakes = rig.wakes
    rig.jobs.run_all()
    assert rig.wakes > wakes
    rig.hub.poll()
    staged = client.hear(m.Staged)
    assert list(staged.outcomes) == [OK, OK, OK, MISS]
    verify_staged(client, staged, [0, 1, 2])
    assert not rig.hub.has_requests
    stats = rig.store.stats()
    assert (stats.asked_blocks, stats.hit_blocks, dict(stats.hits)) == (5, 3, {"disk": 3}), "one was asked for twice"
    client.release(staged)


def test_blocks_need_not_be_a_run(rig: Rig) -> None:
    store_below(rig, [0, 2, 3, 6, 7])
    client = rig.unix()
    client.store([4])
    client.say(client.stage_message([7, 0, 1, 2, 3, 4, 5, 6]))
    assert client.session.held_bytes == 6 * PAGE_BYTES
    rig.check_integrity()
    rig.run_jobs()
    staged = client.hear(m.Staged)
    assert list(staged.outcomes) == [OK, OK, MISS, OK, OK, OK, MISS, OK]
    verify_staged(client, staged, [7, 0, 2, 3, 4, 6])


def test_over_tcp_staged_blocks_are_sent(rig: Rig) -> None:
    store_below(rig, [0, 1])
    client = rig.tcp(reads=False)
    client.say(client.stage_message([0, 1]))
    rig.run_jobs()
    assert client.heard.popleft().payload == [content(0), content(1)]
    client.take_payloads()


def test_who_does_not_wait_gets_what_is_here_and_is_told_what_was_not_there_in_time(rig: Rig) -> None:
    store_below(rig, [0, 2])
    client = rig.unix()
    client.store([1])
    assert list(client.stage([0, 1, 2, 3], max_wait_ms=0).outcomes) == [TIMEOUT, OK, TIMEOUT, MISS]


def test_at_the_deadline_what_came_is_given_and_the_rest_is_late(rig: Rig) -> None:
    rig.store.stager._queue._max_bytes = PAGE_BYTES
    rig.store.stager._queue._budgets[rig.store.lower[0]]._max_bytes = PAGE_BYTES  # block by block
    store_below(rig, [0, 1, 2])
    client = rig.unix()
    client.say(client.stage_message([0, 1, 2], max_wait_ms=500))
    rig.jobs.run_next()
    rig.advance(0.499)
    assert not client.heard
    rig.advance(0.002)
    staged = client.hear(m.Staged)
    assert list(staged.outcomes) == [OK, TIMEOUT, TIMEOUT]
    verify_staged(client, staged, [0])
    rig.run_jobs()
    assert not client.heard


def test_a_clock_that_goes_back_ends_a_wait(rig: Rig) -> None:
    store_below(rig, [0])
    client = rig.unix()
    client.say(client.stage_message([0], max_wait_ms=500))
    rig.advance(-10)
    assert list(client.hear(m.Staged).outcomes) == [TIMEOUT]
    rig.run_jobs()


def test_a_cancelled_stage_is_answered_once_and_holds_nothing(rig: Rig) -> None:
    store_below(rig, [0, 1])
    client = rig.unix()
    client.store([5])
    client.say(client.stage_message([0, 1, 5], id=50))
    client.say(m.Cancel(50))
    assert client.hear(m.Failed) == m.Failed(50, m.FailureCode.CANCELLED, "as the client asked")
    assert client.session.held_bytes == 0
    rig.run_jobs()
    client.say(m.Cancel(50))
    client.say(m.Cancel(77))
    assert not client.heard
    assert list(client.stage([0, 1, 5], id=50).outcomes) == [OK] * 3  # the id is free again


@pytest.mark.parametrize("clean", [True, False])
def test_a_client_that_goes_while_its_blocks_come_leaves_nothing(rig: Rig, clean: bool) -> None:
    store_below(rig, [0, 1])
    client = rig.unix()
    client.say(client.stage_message([0, 1]))
    if clean:
        client.say(m.Bye())
    else:
        client.session.end(clean=False)
    assert len(rig.hub.quarantine) == 0  # it was not told of any slot
    rig.run_jobs()
    rig.verify_baseline()


def test_blocks_that_are_each_others_parents_come_all_the_same(rig: Rig) -> None:
    store_below(rig, [4, 5, 6])
    client, other = rig.unix(), rig.unix()
    client.say(client.stage_message([6, 5, 4], parent=digest(4)))
    other.say(other.stage_message([4, 6, 5], parent=digest(5)))
    rig.run_jobs()
    assert list(client.hear(m.Staged).outcomes) == [OK] * 3
    assert list(other.hear(m.Staged).outcomes) == [OK] * 3


def test_a_damaged_block_keeps_none_behind_it_from_coming(rig: Rig) -> None:
    store_below(rig, [0, 1, 2])
    client = rig.unix()
    tier = rig.store.lower[0].device
    read = tier.read

    def spoil(requests: list[ReadRequest]) -> list[ReadOutcome]:
        outcomes = read(requests)
        return [
            ReadOutcome.DAMAGED if request.key.endswith(digest(1)) else outcome
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    tier.read = spoil  # type: ignore[method-assign, assignment]
    client.say(client.stage_message([0, 1, 2]))
    rig.run_jobs()
    staged = client.hear(m.Staged)
    assert list(staged.outcomes) == [OK, DAMAGED, OK]
    verify_staged(client, staged, [0, 2])


def test_what_finds_no_slot_is_full(rig: Rig) -> None:
    store_below(rig, [0, 2])
    one, two = rig.unix(), rig.unix()
    one.reserve([100 + 2 * n for n in range(16)])
    two.reserve([200 + 2 * n for n in range(16)])
    two.say(m.Abort(0, [1]))
    rig.unix().reserve([300])
    client = rig.unix()
    client.say(client.stage_message([0]))
    rig.run_jobs()
    assert list(client.hear(m.Staged).outcomes) == [FULL]


# ---- several clients -------------------------------------------------------------------------------------------------


def test_clients_that_want_one_block_share_its_read(rig: Rig) -> None:
    store_below(rig, [0, 1])
    clients = [rig.unix() for _ in range(5)]
    before = rig.store.stats().staged_blocks
    for client in clients:
        client.say(client.stage_message([0, 1]))
    rig.run_jobs()
    staged = [client.hear(m.Staged) for client in clients]
    assert all(list(each.outcomes) == [OK, OK] for each in staged)
    assert len({tuple(each.offsets) for each in staged}) == 1
    assert rig.store.stats().staged_blocks - before == 2


def test_a_client_with_fifty_stages_queued_holds_up_no_other(tmp_path: Path) -> None:
    rig = Rig(blocks=128, disk=tmp_path)
    numbers = list(range(1000, 1100, 2))
    store_below(rig, [*numbers, 0])
    queue = rig.store.stager._queue
    queue._budgets[rig.store.lower[0]]._max_bytes = PAGE_BYTES  # one block is under way at once
    greedy, modest = rig.unix(), rig.unix()
    for number in numbers:
        greedy.say(greedy.stage_message([number]))
    assert greedy.session.num_requests == 50
    modest.say(modest.stage_message([0]))
    num_read = 0
    while not modest.heard:
        assert rig.jobs.run_next()
        rig.hub.poll()
        num_read += 1
    assert num_read <= 2  # one was under way, and its own
    assert len(greedy.heard) == 1
    rig.check_integrity()
    while rig.hub.has_requests:
        rig.run_jobs()
        for heard in greedy.heard:
            assert isinstance(heard.message, m.Staged)
            greedy.release(heard.message)
        greedy.heard.clear()
    rig.close()


def test_two_clients_that_ask_in_turns_are_served_in_turns(rig: Rig) -> None:
    store_below(rig, list(range(1000, 1012, 2)))
    rig.store.stager._queue._budgets[rig.store.lower[0]]._max_bytes = PAGE_BYTES
    first, second = rig.unix(), rig.unix()
    for place, number in enumerate(range(1000, 1012, 2)):
        client = first if place < 4 else second
        client.say(client.stage_message([number]))
    order = []
    for _ in range(6):
        before = len(first.heard), len(second.heard)
        rig.jobs.run_next()
        rig.hub.poll()
        order.append("first" if len(first.heard) > before[0] else "second")
    assert order == ["first", "second", "first", "second", "first", "first"]


def test_blocks_that_are_waited_for_count_as_held(rig: Rig) -> None:
    numbers = list(range(20))
    store_below(rig, numbers)
    client, other = rig.unix(), rig.unix()
    client.say(client.stage_message(numbers, max_wait_ms=60_000))
    assert client.session.held_bytes == 16 * PAGE_BYTES
    assert list(client.reserve([99]).outcomes) == [m.ReserveOutcome.FULL]
    rig.check_integrity()
    rig.run_jobs()
    assert list(client.hear(m.Staged).outcomes) == [OK] * 16 + [REFUSED] * 4
    assert list(other.reserve([99]).outcomes) == [m.ReserveOutcome.RESERVED]
    client.say(client.stage_message([18]))
    assert list(client.hear(m.Staged).outcomes) == [REFUSED]


# ---- scribbling ------------------------------------------------------------------------------------------------------


def test_a_committed_slot_that_is_scribbled_over_is_told_by_its_checksum(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    reserved = client.reserve([0])
    client.commit(reserved, [content(0)])
    client.fill(reserved.offsets[0], b"scribble")
    staged = other.stage([0])
    assert staged.checksums == [payload_checksum(content(0))]
    assert payload_checksum(other.at(staged.offsets[0])) != staged.checksums[0]


@pytest.mark.parametrize("codec", ["raw", "lz4", "shuffle_lz4"])
def test_a_scribbled_block_is_damaged_on_disk_and_not_laundered(tmp_path: Path, codec: str) -> None:
    rig = Rig(disk=tmp_path, overrides={"disk.codec": codec, "host.slab": 4 * PAGE_BYTES})
    client = rig.unix()
    reserved = client.reserve([0, 1], 4 * PAGE_BYTES)
    client.commit(reserved, [content(0, 4 * PAGE_BYTES), content(1, 4 * PAGE_BYTES)])
    client.fill(reserved.offsets[0], b"scribble")  # before it is written
    rig.run_jobs()
    rig.evict_host()
    client.say(client.stage_message([0, 1], block_bytes=4 * PAGE_BYTES))
    rig.run_jobs()
    staged = client.hear(m.Staged)
    assert list(staged.outcomes) == [DAMAGED, OK]
    assert client.at(staged.offsets[0], 4 * PAGE_BYTES) == content(1, 4 * PAGE_BYTES)
    assert client.lookup([0, 1]) == [0, 1]  # forgotten
    client.say(m.Bye())
    rig.close()


def test_a_block_that_came_from_disk_is_told_too_and_never_written_anew(rig: Rig) -> None:
    store_below(rig, [0])
    client = rig.unix()
    client.say(client.stage_message([0]))
    rig.run_jobs()
    staged = client.hear(m.Staged)
    client.fill(staged.offsets[0], b"scribble")
    client.release(staged)
    again = client.stage([0])
    assert payload_checksum(client.at(again.offsets[0])) != again.checksums[0]
    client.release(again)
    rig.evict_host()
    client.say(client.stage_message([0]))
    rig.run_jobs()
    verify_staged(client, client.hear(m.Staged), [0])


# ---- lower tiers: durability, removal, resets, uses ------------------------------------------------------------------


def test_durable_once_written_and_late_when_its_time_is_over(rig: Rig) -> None:
    client = rig.unix()
    client.store([0, 1])
    client.say(m.WaitDurable(50, SPACE, joined([0, 1, 2]), "disk", 1000))
    assert not client.heard
    rig.run_jobs()
    assert client.hear(m.Durable) == m.Durable(50, bytes([0, 0, 1]))
    client.store([3])
    client.say(m.WaitDurable(51, SPACE, joined([0, 2, 3]), "disk", 1000))
    rig.advance(1.0)
    assert client.hear(m.Durable) == m.Durable(51, bytes([0, 1, 2]))
    assert not rig.store.lower[0].write_behind.watches._watches
    assert client.ask(m.WaitDurable(52, SPACE, joined([3]), "disk", 0), m.Durable).lost == b"\2"
    client.say(m.WaitDurable(53, SPACE, joined([3]), "disk", 1000))
    other = rig.unix()
    other.say(m.WaitDurable(1, SPACE, joined([3]), "disk", 1000))
    client.say(m.Cancel(53))
    assert client.hear(m.Failed).code == m.FailureCode.CANCELLED
    rig.run_jobs()
    assert other.hear(m.Durable).lost == b"\0"  # the other's wait was not given up


def test_removed_blocks_are_gone_from_disk_too(rig: Rig) -> None:
    store_below(rig, [0, 1])
    client = rig.unix()
    client.store([2])
    rig.run_jobs()
    client.say(m.Remove(50, SPACE, joined([0, 1, 2, 3])))
    rig.run_jobs()
    assert client.hear(m.Count).number == 3
    assert client.lookup([0, 1, 2]) == [0, 0, 0]


def test_a_tier_that_does_not_forget_in_time_is_told(rig: Rig) -> None:
    store_below(rig, [0])
    client = rig.unix()
    client.say(m.Remove(50, SPACE, digest(0)))
    executor = rig.tenants[0].executor
    assert isinstance(executor, ManualExecutor)
    executor.run_all()
    rig.advance(9.9)
    assert not client.heard
    rig.advance(0.2)
    assert client.hear(m.Failed).code == m.FailureCode.FAILED
    rig.run_jobs()
    assert client.lookup([0]) == [0]


def test_a_new_epoch_reaches_the_disk(rig: Rig) -> None:
    store_below(rig, [0])
    client = rig.unix()
    tenant = rig.tenants[0]
    tenant.executor.close(0)
    client.say(m.StartEpoch(50, 4))
    assert client.hear(m.Failed).code == m.FailureCode.FAILED  # nobody to do it


def test_what_a_prompt_used_is_told_to_lower_tiers(tmp_path: Path) -> None:
    rig = Rig(disk=tmp_path, overrides={"disk.min_uses": 2})
    client = rig.unix()
    client.store([0, 1])
    rig.run_jobs()
    assert rig.store.lower[0].stats().blocks == 0
    client.say(m.Touch(SPACE, joined([0, 1]), b""))
    assert not client.heard
    rig.run_jobs()
    assert rig.store.lower[0].stats().blocks == 2
    client.say(m.Bye())
    rig.close()


def test_what_a_lookup_finds_nowhere_is_missed_and_each_prompt_counted_once() -> None:
    rig = Rig()
    client = rig.unix()
    client.store([0, 1])
    counters = rig.store.counters
    assert client.lookup([0, 1]) == [1, 1]
    assert (counters.lookups, counters.asked_blocks) == (0, 0), "whoever was told of blocks comes for them"
    assert client.lookup([0, 1, 2, 3, 4]) == [1, 1, 0, 0, 0]
    client.stage([0, 1])
    assert (counters.lookups, counters.asked_blocks, counters.hit_blocks) == (1, 5, 2)
    assert client.lookup([7, 8]) == [0, 0]
    assert (counters.lookups, counters.asked_blocks, counters.hit_blocks) == (2, 7, 2)
    assert dict(counters.misses) == {MissReason.ABSENT: 5}
    rig.close()


# ---- a remote tier below ---------------------------------------------------------------------------------------------


class RemoteRig(Rig):
    """With a tier on another machine that holds blocks 0 and 1, of which this process knows nothing."""

    def attach(self) -> ManualExecutor:
        remote, jobs = RemoteDictTier(), ManualExecutor()
        keys = [SPACE + digest(number) for number in (0, 1)]
        remote.write(
            [
                WriteRequest(key, None, memoryview(content(number)))  # type: ignore[arg-type]
                for number, key in enumerate(keys)
            ]
        )
        self.store._below.add(OpenedTier(remote, TierLimits(writers=2, timeout_s=1.0)), jobs)
        return jobs


def test_a_remote_tier_is_asked_and_not_waited_for_too_long() -> None:
    rig = RemoteRig()
    jobs = rig.attach()
    client = rig.unix()
    client.say(m.Lookup(50, SPACE, joined([0, 1, 2])))
    assert not client.heard
    rig.advance(0.25)
    assert list(client.hear(m.Held).tiers) == [0, 0, 0]  # with what is known
    client.say(m.Lookup(51, SPACE, joined([0, 1, 2])))
    jobs.run_all()
    rig.hub.poll()
    assert list(client.hear(m.Held).tiers) == [2, 2, 0]
    rig.close()


def test_what_only_a_remote_tier_holds_is_asked_for_and_staged() -> None:
    rig = RemoteRig()
    jobs = rig.attach()
    client = rig.unix()
    client.say(client.stage_message([0, 1, 2]))
    assert not client.heard
    jobs.run_all()
    rig.hub.poll()
    jobs.run_all()
    rig.hub.poll()
    staged = client.hear(m.Staged)
    assert list(staged.outcomes) == [OK, OK, MISS]
    verify_staged(client, staged, [0, 1])
    client.say(client.stage_message([3], id=70))
    client.say(m.Cancel(70))
    client.hear(m.Failed)
    client.say(client.stage_message([4], max_wait_ms=100))
    rig.advance(0.1)
    assert list(client.hear(m.Staged).outcomes) == [MISS]
    client.say(m.Bye())
    rig.close()
