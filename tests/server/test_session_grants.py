"""Slots that are granted without a name, filled, and published: whose they are, and what they are found as."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import IntegrityError
from kvtier.frame import payload_checksum
from kvtier.keys import BlockDigest
from kvtier.memory import PAGE_BYTES
from kvtier.protocol import messages as m
from kvtier.server.status import QuarantineCounts
from tests.server.session_rig import OTHER_SPACE, SPACE, Client, FakeProcess, Rig, content, digest
from tests.server.test_quarantine import GRACE_S, RESERVATION_S, kept, verify_never_handed_out

STORED, ALREADY, BEING, FULL, VOID = (
    m.PublishOutcome.STORED,
    m.PublishOutcome.ALREADY_STORED,
    m.PublishOutcome.BEING_STORED,
    m.PublishOutcome.FULL,
    m.PublishOutcome.VOID,
)
OK, MISS = m.StageOutcome.OK, m.StageOutcome.MISS


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(token_file=tmp_path / "token")
    yield rig
    rig.check_integrity()
    rig.close()
    rig.verify_baseline()


def released(client: Client, granted: m.Granted) -> None:
    client.say(m.Release(0, granted.reservations))


def singly(granted: m.Granted) -> list[m.Granted]:
    """Each slot as if it were alone."""
    pairs = zip(granted.reservations, granted.offsets, strict=True)
    return [m.Granted(1, [handle], [offset]) for handle, offset in pairs]


def invalid(client: Client, message: m.ClientMessage) -> str:
    failed = client.ask(message, m.Failed)
    assert failed.code == m.FailureCode.INVALID
    return failed.text


# ---- one block's way -------------------------------------------------------------------------------------------------


def test_what_is_published_is_found_and_staged_by_others_from_the_slot_that_was_filled(rig: Rig) -> None:
    client, other = rig.unix(), rig.tcp(reads=False)
    granted = client.grant(2)
    assert len(granted.reservations) == 2
    client.fill(granted.offsets[0], content(0))
    assert other.lookup([0, 1]) == [0, 0]
    assert client.publish(granted, [0, 1]) == [STORED] * 2
    assert other.lookup([0, 1]) == [1, 1]
    other.say(other.stage_message([0, 1]))
    heard = other.heard.popleft()
    assert heard.payload == [content(0), content(1)]
    assert isinstance(heard.message, m.Staged)
    assert heard.message.checksums == [payload_checksum(content(number)) for number in (0, 1)]
    other.take_payloads()
    staged = rig.unix().stage([0, 1])
    assert staged.offsets == granted.offsets  # not one copy more
    stats = rig.store.stats()
    assert (stats.stored_blocks, stats.stored_bytes) == (2, 2 * PAGE_BYTES)


def test_the_publisher_holds_a_lease_under_the_number_of_the_grant_until_release(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    granted = client.grant(1)
    client.publish(granted, [0])
    assert (client.session.num_leases, client.session.num_reservations) == (1, 0)
    for number in range(2, 40, 2):  # more than the pool has
        other.store([number])
    assert other.lookup([0]) == [1]
    assert client.at(granted.offsets[0]) == content(0)
    client.ask(m.Release(90, granted.reservations), m.Done)
    assert client.session.num_leases == client.session.held_bytes == 0
    for number in range(40, 80, 2):
        other.store([number])
    assert other.lookup([0]) == [0]


def test_a_slot_without_a_name_is_given_back_by_abort(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(3)
    assert client.session.num_reservations == 3
    assert client.session.held_bytes == 3 * PAGE_BYTES
    client.ask(m.Abort(90, granted.reservations[:2]), m.Done)
    client.say(m.Abort(0, granted.reservations[:2]))  # of before: ignored
    assert client.session.held_bytes == PAGE_BYTES
    assert client.ask(client.publish_message(granted.reservations, [0, 1, 2]), m.Published).outcomes == bytes(
        [VOID, VOID, STORED]
    )


def test_abort_leaves_what_is_published_and_release_what_is_granted(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(2)
    client.ask(m.Release(90, granted.reservations), m.Done)
    assert client.session.held_bytes == 2 * PAGE_BYTES
    mine = singly(granted)[0]
    assert client.publish(mine, [0]) == [STORED]
    client.ask(m.Abort(91, granted.reservations), m.Done)
    assert (client.session.num_leases, client.session.num_reservations) == (1, 0)
    assert client.lookup([0]) == [1]
    client.say(m.Abort(0, granted.reservations))  # who does not know what came of it says both
    client.say(m.Release(0, granted.reservations))
    assert client.session.held_bytes == 0
    assert client.lookup([0]) == [1]


def test_a_grant_is_no_reservation_and_a_reservation_no_grant(rig: Rig) -> None:
    client = rig.unix()
    granted, reserved = client.grant(1), client.reserve([0])
    sums = [payload_checksum(content(0))]
    committed = client.ask(m.Commit(90, granted.reservations, sums), m.Committed)
    assert committed.outcomes == bytes([m.CommitOutcome.VOID])
    published = client.ask(client.publish_message(reserved.reservations, [1]), m.Published)
    assert published.outcomes == bytes([VOID])
    assert client.publish(granted, [1]) == [STORED]
    assert client.commit(reserved, [content(0)]) == [m.CommitOutcome.STORED]
    assert client.ask(client.publish_message(granted.reservations, [2]), m.Published).outcomes == bytes([VOID])
    assert client.lookup([0, 1, 2]) == [1, 1, 0]


def test_a_block_may_be_shorter_than_its_slot(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(1, 40)
    assert client.publish(granted, [0], 24) == [STORED]  # of the same size class
    staged = client.stage([0], block_bytes=24)
    assert list(staged.outcomes) == [OK]
    assert client.at(staged.offsets[0], 24) == content(0, 24)
    assert list(client.stage([0], block_bytes=40).outcomes) == [MISS]


def test_handles_are_never_used_again(rig: Rig) -> None:
    client = rig.unix()
    seen: list[int] = []
    for number in range(4):
        granted = client.grant(2)
        client.publish(singly(granted)[0], [number])
        staged = client.stage([number])
        seen += [*granted.reservations, *staged.leases]
        client.say(m.Abort(0, granted.reservations))
        released(client, granted)
        client.release(staged)
    assert len(set(seen)) == len(seen) == 12


def test_how_long_a_block_is_worth_keeping_is_said_as_it_is_published(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(2)
    first, second = singly(granted)
    client.publish(first, [0], ttl_ms=2500)
    client.publish(second, [1])
    with rig.store.pool.owner("test") as owner:
        blocks = rig.store.host.lease_blocks([(SPACE, BlockDigest(digest(number))) for number in (0, 1)], owner)
        assert [block.ttl_s for block in blocks if block is not None] == [2.5, None]


# ---- what else may have the block ------------------------------------------------------------------------------------


@pytest.mark.bug("CR20")
def test_a_block_that_is_there_already_leaves_the_slot_to_the_next(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    other.store([0])
    filling = other.reserve([1])
    granted = client.grant(3)
    assert client.publish(granted, [0, 1, 2]) == [ALREADY, BEING, STORED]
    assert (client.session.num_leases, client.session.num_reservations) == (1, 2)
    assert other.commit(filling, [content(1)]) == [m.CommitOutcome.STORED]
    left = m.Granted(1, granted.reservations[:2], granted.offsets[:2])
    assert client.publish(left, [10, 11]) == [STORED] * 2
    assert client.lookup([0, 1, 2, 10, 11]) == [1] * 5
    staged = client.stage([0, 1, 2, 10, 11])
    assert [client.at(offset) for offset in staged.offsets] == [content(number) for number in (0, 1, 2, 10, 11)]


def test_a_block_that_is_named_twice_is_there_already_the_second_time(rig: Rig) -> None:
    client = rig.unix()
    assert client.publish(client.grant(2), [3, 3]) == [STORED, ALREADY]


def test_a_published_block_is_there_for_those_who_would_reserve_it(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    client.publish(client.grant(1), [0])
    assert list(other.reserve([0, 1]).outcomes) == [m.ReserveOutcome.ALREADY_STORED, m.ReserveOutcome.RESERVED]


def test_a_slot_of_another_size_class_is_void_and_stays_granted() -> None:
    rig = Rig(overrides={"host.slab": 4 * PAGE_BYTES})
    client = rig.unix()
    granted = client.grant(1, 2 * PAGE_BYTES)
    assert client.publish(granted, [0]) == [VOID]
    assert client.lookup([0]) == [0]
    assert client.publish(granted, [0], 2 * PAGE_BYTES) == [STORED]
    rig.check_integrity()
    rig.close()


def test_a_quota_that_is_used_up_leaves_the_slot_granted() -> None:
    rig = Rig(overrides={"host.quotas": {"*": f"{2 * PAGE_BYTES}B"}})
    client = rig.unix()
    granted = client.grant(4)
    assert client.publish(granted, [0, 2, 4, 6]) == [STORED, STORED, FULL, FULL]  # its own two are leased
    released(client, granted)
    left = m.Granted(1, granted.reservations[2:], granted.offsets[2:])
    assert client.publish(left, [4, 6]) == [STORED] * 2
    assert client.lookup([0, 2, 4, 6]) == [0, 0, 1, 1]
    rig.check_integrity()
    rig.close()


# ---- what is no request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message", [m.Abort(90, [7]), m.Publish(90, SPACE, PAGE_BYTES, [7], digest(0), bytes(32), [0])]
)
def test_a_handle_that_was_never_given_is_invalid(rig: Rig, message: m.ClientMessage) -> None:
    client = rig.unix()
    client.grant(1)
    assert "never given" in invalid(client, message)
    assert client.session.num_reservations == 1


def test_a_slot_that_is_named_twice_is_invalid_and_nothing_is_stored(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(1)
    handles = granted.reservations * 2
    assert "twice" in invalid(client, client.publish_message(handles, [0, 1]))
    assert client.lookup([0, 1]) == [0, 0]
    assert client.publish(granted, [0]) == [STORED]


@pytest.mark.parametrize(
    "message", [m.Grant(90, PAGE_BYTES, 1), m.Publish(90, SPACE, PAGE_BYTES, [1], digest(0), bytes(32), [0])]
)
def test_without_a_mapping_nothing_is_granted_or_published(rig: Rig, message: m.ClientMessage) -> None:
    for client in (rig.tcp(), rig.unix(wants_mapping=False)):
        client.reserve([5])
        assert "without a mapping" in invalid(client, message)
        assert client.session.held_bytes == PAGE_BYTES
        client.ask(m.Ping(91), m.Pong)
        client.say(m.Bye())


@pytest.mark.parametrize("kind", ["grant", "publish"])
def test_a_block_that_fits_no_slab_is_invalid(rig: Rig, kind: str) -> None:
    client = rig.unix()
    granted = client.grant(1)
    publish = client.publish_message(granted.reservations, [0], block_bytes=1 << 31)
    message: Any = m.Grant(90, 1 << 31, 1) if kind == "grant" else publish
    assert "does not fit a slab" in invalid(client, message)
    assert client.publish(granted, [0]) == [STORED]


# ---- room ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_what_a_client_may_hold_is_not_granted(rig: Rig) -> None:
    client, twin, other = rig.unix(pid=7), rig.unix(pid=7), rig.unix(pid=8)
    assert len(client.grant(5).offsets) == 5
    assert len(client.reserve([0, 2]).offsets) == 2
    granted = client.grant(16)
    assert len(granted.offsets) == 1  # half of the pool's 16
    assert client.grant(1).offsets == twin.grant(1).offsets == []
    assert len(other.grant(16).offsets) == 8
    client.publish(granted, [50])
    assert client.grant(1).offsets == []  # as a lease it goes on counting
    released(client, granted)
    assert len(client.grant(9).offsets) == 1


def test_others_blocks_are_evicted_for_a_grant_coldest_first_and_told(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    for number in range(0, 32, 2):
        other.store([number])
    staged = other.stage([0])
    assert len(client.grant(4).offsets) == 4
    assert other.lookup(list(range(0, 12, 2))) == [1, 0, 0, 0, 0, 1]
    stats = rig.store.stats()
    assert stats.evicted_blocks == 4
    assert stats.stored_blocks - stats.evicted_blocks == stats.host_blocks
    other.release(staged)


def test_where_nothing_can_go_as_many_are_granted_as_are_free(rig: Rig) -> None:
    clients = [rig.unix(pid=pid) for pid in (1, 2)]
    assert [len(client.grant(7).offsets) for client in clients] == [7, 7]
    client = rig.unix(pid=3)
    granted = client.grant(5)
    assert len(granted.offsets) == 2
    assert client.grant(5).offsets == []
    client.say(m.Abort(0, granted.reservations))
    assert sorted(client.grant(5).offsets) == sorted(granted.offsets)


def test_a_chain_that_is_published_prefix_first_goes_tail_first(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    granted = client.grant(4)
    client.publish(granted, [1, 2, 3, 4])
    released(client, granted)
    for number in range(100, 124, 2):
        other.store([number])
    assert client.lookup([1, 2, 3, 4]) == [1, 1, 1, 1]
    other.store([200])
    other.store([202])
    assert client.lookup([1, 2, 3, 4]) == [1, 1, 0, 0]


def test_a_grant_has_no_time_limit(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(1)
    rig.advance(100 * RESERVATION_S)
    assert not client.session.must_poll
    assert rig.hub.num_void == 0
    assert client.publish(granted, [0]) == [STORED]


# ---- checksums -------------------------------------------------------------------------------------------------------


def test_a_checksum_is_kept_only_where_they_are_on(tmp_path: Path) -> None:
    for checksums in (True, False):
        rig = Rig(daemon={"checksums": checksums})
        client = rig.unix()
        assert client.publish(client.grant(1), [0], checksums=[77]) == [STORED]
        assert client.stage([0]).checksums == [77 if checksums else 0]
        rig.check_integrity()
        rig.close()


def test_each_block_has_its_own_checksum_though_others_of_the_message_are_void(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(3)
    client.say(m.Abort(0, granted.reservations[:1]))
    assert client.publish(granted, [4, 5, 6]) == [VOID, STORED, STORED]
    assert client.stage([5, 6]).checksums == [payload_checksum(content(number)) for number in (5, 6)]


# ---- resets ----------------------------------------------------------------------------------------------------------


def test_a_grant_outlives_a_reset_and_its_block_is_of_the_namespace_that_is_named(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    granted = client.grant(2)
    other.say(m.StartEpoch(90, 1))
    rig.run_jobs()
    other.hear(m.Epoch)
    first, second = singly(granted)
    assert client.publish(first, [0]) == [STORED]
    assert client.publish(second, [0], namespace=OTHER_SPACE) == [STORED]
    assert other.lookup([0]) == other.lookup([0], OTHER_SPACE) == [1]


def test_what_was_published_before_a_reset_is_not_found_and_keeps_its_bytes_until_release(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    granted = client.grant(1)
    client.publish(granted, [0])
    other.say(m.StartEpoch(90, 1))
    rig.run_jobs()
    assert client.lookup([0]) == [0]
    verify_never_handed_out(rig, granted.offsets)
    assert client.at(granted.offsets[0]) == content(0)
    released(client, granted)
    assert client.session.held_bytes == 0


# ---- a client that goes ----------------------------------------------------------------------------------------------


def test_after_bye_all_is_free_and_what_was_published_is_there(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(3)
    client.publish(singly(granted)[0], [0])
    client.say(m.Bye())
    assert not rig.tenants[0].held_bytes
    assert kept(rig) == QuarantineCounts()
    assert rig.store.pool.usage().num_leases == 0
    assert rig.unix().lookup([0]) == [1]


@pytest.mark.bug("HS17", "LK10")
def test_who_goes_without_a_word_leaves_its_granted_slots_to_nobody_before_it_is_dead(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    granted = client.grant(3)
    client.publish(singly(granted)[0], [0])
    client.session.end(clean=False)  # its process still runs
    assert kept(rig) == QuarantineCounts(1, 3, 3 * PAGE_BYTES)
    assert other.lookup([0]) == [1]  # for everyone
    staged = other.stage([0])
    assert other.at(staged.offsets[0]) == content(0)
    other.release(staged)
    rig.advance(3600)
    verify_never_handed_out(rig, granted.offsets)
    for offset in granted.offsets[1:]:  # it goes on filling
        client.fill(offset, b"\xff" * PAGE_BYTES)
    assert isinstance(client.peer.process, FakeProcess)
    client.peer.process.dead = True
    rig.hub.poll()
    rig.advance(GRACE_S - 0.01)
    verify_never_handed_out(rig, granted.offsets)
    assert kept(rig).slots == 3
    rig.advance(0.02)
    assert kept(rig) == QuarantineCounts()
    other.say(m.Bye())
    rig.verify_baseline()


def test_who_holds_granted_slots_alone_is_quarantined_too(rig: Rig) -> None:
    client = rig.unix()
    granted = client.grant(2)
    client.session.end(clean=False)
    assert kept(rig).slots == 2
    verify_never_handed_out(rig, granted.offsets)


def test_what_was_granted_counts_as_held_after_its_client_went(rig: Rig) -> None:
    client = rig.unix(pid=7)
    client.grant(8)
    client.session.end(clean=False)
    assert rig.unix(pid=7).grant(1).offsets == []


def test_integrity_sees_a_granted_slot_that_is_not_held(rig: Rig) -> None:
    client = rig.unix()
    client.grant(1)
    assert client.session._dialogue is not None
    slots = client.session._dialogue.slots
    ((handle, lease),) = slots._granted.items()
    slots._leases[handle] = lease
    with pytest.raises(IntegrityError):
        rig.check_integrity()
    slots._leases.clear()
    slots._granted.clear()
    with pytest.raises(IntegrityError, match="bytes counted"):
        rig.check_integrity()
    slots._granted[handle] = lease


def test_blocks_that_are_published_go_on_to_the_disk(tmp_path: Path) -> None:
    rig = Rig(disk=tmp_path)
    client = rig.unix()
    granted = client.grant(2)
    client.publish(granted, [0, 1])
    released(client, granted)
    rig.advance(10.0)
    rig.run_jobs()
    rig.evict_host()
    assert client.lookup([0, 1]) == [2, 2]
    client.say(client.stage_message([0, 1]))
    rig.run_jobs()
    staged = client.hear(m.Staged)
    assert [client.at(offset) for offset in staged.offsets] == [content(0), content(1)]
    rig.close()
