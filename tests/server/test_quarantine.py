"""Slots of clients that stop answering, go without a word, or take too much: never another's before they are safe."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import IntegrityError
from kvtier.memory import PAGE_BYTES
from kvtier.protocol import messages as m
from kvtier.server.peers import Peer, Process
from kvtier.server.quarantine import Quarantine
from kvtier.server.status import QuarantineCounts
from kvtier.testing import FakeClock
from tests.server.session_rig import SPACE, Client, FakeProcess, Rig, content, digest, joined

STORED, VOID = m.CommitOutcome.STORED, m.CommitOutcome.VOID
RESERVED, BEING, FULL = m.ReserveOutcome.RESERVED, m.ReserveOutcome.BEING_STORED, m.ReserveOutcome.FULL
RESERVATION_S, GRACE_S = 30.0, 1.0
DEADLINE_S = 10.0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(token_file=tmp_path / "token")
    yield rig
    rig.check_integrity()
    rig.close()
    rig.verify_baseline()


def kept(rig: Rig) -> QuarantineCounts:
    return rig.hub.quarantine.counts("a")


def verify_never_handed_out(rig: Rig, offsets: list[int]) -> None:
    """Other clients that store as much as they can get none of these slots."""
    got: list[int] = []
    takers = [rig.unix() for _ in range(3)]
    for place, taker in enumerate(takers):
        reserved = taker.reserve([1000 * (place + 1) + 2 * number for number in range(rig.blocks)])
        got += reserved.offsets
    assert got
    assert not set(got) & set(offsets)
    for taker in takers:
        taker.say(m.Bye())


# ---- a client that stops answering -----------------------------------------------------------------------------------


@pytest.mark.bug("HS17")
def test_a_client_that_stops_within_a_fill_cannot_write_into_anothers_block(rig: Rig) -> None:
    stopped, other = rig.unix(), rig.unix()
    reserved = stopped.reserve([0, 1])
    stopped.fill(reserved.offsets[0], content(0))
    rig.advance(RESERVATION_S)
    assert list(other.reserve([0]).outcomes) == [BEING]  # not older than that
    assert other.lookup([0]) == [0]
    rig.advance(0.01)
    again = other.reserve([0])
    assert list(again.outcomes) == [RESERVED]
    assert again.offsets[0] not in reserved.offsets
    assert rig.hub.num_void == 2
    assert other.commit(again, [content(0)]) == [STORED]
    staged = other.stage([0])
    verify_never_handed_out(rig, reserved.offsets)
    rig.advance(3600)
    rig.advance(3600)
    verify_never_handed_out(rig, reserved.offsets)
    for offset in reserved.offsets:  # a minute later it goes on
        stopped.fill(offset, b"\xff" * PAGE_BYTES)
    assert stopped.commit(reserved, [b"\xff" * PAGE_BYTES] * 2) == [VOID, VOID]
    assert other.at(staged.offsets[0]) == content(0)
    assert other.lookup([0, 1]) == [1, 0]
    assert stopped.session.held_bytes == 0  # it said that it is done


def test_void_slots_are_given_back_by_abort_and_by_bye(rig: Rig) -> None:
    for message in (m.Abort(0, [1, 2]), m.Bye()):
        client = rig.unix()
        client.reserve([0, 1])
        rig.advance(RESERVATION_S + 1)
        assert client.session.held_bytes == 2 * PAGE_BYTES
        assert client.session.num_reservations == 0
        client.say(message)
        assert client.session.held_bytes == 0
        assert not rig.tenants[0].held_bytes


def test_only_what_is_overdue_is_void(rig: Rig) -> None:
    client = rig.unix()
    early = client.reserve([0])
    rig.advance(20)
    late = client.reserve([1])
    rig.advance(20)
    assert client.commit(late, [content(1)]) == [STORED]
    assert client.commit(early, [content(0)]) == [VOID]
    mixed = client.reserve([2])
    rig.advance(20)
    more = client.reserve([3])
    rig.advance(20)
    both = m.Reserved(1, bytes(2), [*mixed.reservations, *more.reservations], [*mixed.offsets, *more.offsets])
    assert client.commit(both, [content(2), content(3)]) == [VOID, STORED]


def test_over_tcp_only_the_server_writes_so_void_slots_are_free_at_once(rig: Rig) -> None:
    client = rig.tcp()
    reserved = client.reserve([0, 1])
    rig.advance(RESERVATION_S + 1)
    assert client.session.held_bytes == 0
    assert client.commit(reserved, [content(0), content(1)]) == [VOID, VOID]  # its payload is skipped
    assert client.lookup([0, 1]) == [0, 0]
    old, new = client.reserve([2]), None
    rig.advance(RESERVATION_S + 1)
    new = client.reserve([3])
    both = m.Reserved(1, bytes(2), [*old.reservations, *new.reservations], [*old.offsets, *new.offsets])
    assert client.commit(both, [content(2), content(3)]) == [VOID, VOID]
    assert client.session.held_bytes == 0


def test_a_payload_on_its_way_keeps_its_slots_until_it_is_whole(rig: Rig) -> None:
    client = rig.tcp()
    reserved = client.reserve([0])
    targets = client.session.handle(m.Commit(9, reserved.reservations, [0]), PAGE_BYTES)
    assert targets is not None
    rig.advance(RESERVATION_S + 1)
    assert list(rig.tcp().reserve([0]).outcomes) == [BEING]
    targets[0][:] = content(0)
    client.session.payload_end()
    assert client.hear(m.Committed) == m.Committed(9, bytes([STORED]))


# ---- a client that goes without a word -------------------------------------------------------------------------------


@pytest.mark.bug("HS17")
def test_after_its_clients_death_a_key_is_free_at_once_and_its_slot_after_the_grace(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    client.store([5])
    leased = client.stage([5]).offsets
    filled = client.reserve([0, 1]).offsets
    client.session.end(clean=False)  # its process still runs
    assert kept(rig) == QuarantineCounts(1, 3, 3 * PAGE_BYTES)
    assert list(other.reserve([0]).outcomes) == [RESERVED]
    other.say(m.Abort(0, [1]))
    rig.advance(3600)
    rig.advance(3600)
    verify_never_handed_out(rig, [*leased, *filled])
    assert isinstance(client.peer.process, FakeProcess)
    client.peer.process.dead = True
    rig.hub.poll()
    rig.advance(GRACE_S - 0.01)
    verify_never_handed_out(rig, [*leased, *filled])
    assert kept(rig).slots == 3
    rig.advance(0.02)
    assert kept(rig) == QuarantineCounts()
    assert client.peer.process.closed
    other.say(m.Bye())
    rig.verify_baseline()


@pytest.mark.bug("LK10")
def test_twenty_killed_clients_leave_nothing_and_others_do_not_notice(rig: Rig) -> None:
    other = rig.unix()
    other.store([500])
    held = other.stage([500])
    for number in range(20):
        client = rig.unix()
        client.store([number])
        client.stage([number, 500])
        client.reserve([100 + number])
        client.die()
        rig.hub.poll()
        rig.advance(GRACE_S)
        assert other.at(held.offsets[0]) == content(500)
        assert kept(rig) == QuarantineCounts()
        assert rig.store.stats().leases == 1
    other.release(held)
    assert other.session.held_bytes == 0
    assert rig.hub.num_sessions == 1


def test_who_held_nothing_needs_no_quarantine(rig: Rig) -> None:
    client = rig.unix()
    client.store([0])
    client.session.end(clean=False)
    assert kept(rig) == QuarantineCounts()
    assert isinstance(client.peer.process, FakeProcess)
    assert client.peer.process.closed
    unmapped = rig.unix(wants_mapping=False)
    unmapped.reserve([1])
    unmapped.session.end(clean=False)  # it cannot have written
    assert kept(rig) == QuarantineCounts()


def test_a_reset_does_not_free_what_is_kept(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    client.store([5])
    offsets = [*client.stage([5]).offsets, *client.reserve([0]).offsets]
    other.say(m.StartEpoch(9, 0))
    rig.run_jobs()
    client.session.end(clean=False)
    verify_never_handed_out(rig, offsets)
    other.say(m.StartEpoch(10, 0))
    rig.run_jobs()
    verify_never_handed_out(rig, offsets)
    assert kept(rig).slots == 2


def test_the_quarantine_notices_when_something_else_ended_its_leases(rig: Rig) -> None:
    client = rig.unix()
    client.reserve([0])
    client.session.end(clean=False)
    entry = rig.hub.quarantine._entries[0]
    rig.hub.check_integrity()
    entry.num_slots = 2
    with pytest.raises(IntegrityError, match="2 slots"):
        rig.hub.check_integrity()
    entry.num_slots = 1
    rig.hub.quarantine._entries.append(entry)
    with pytest.raises(IntegrityError, match="twice"):
        rig.hub.check_integrity()
    rig.hub.quarantine._entries.pop()


def test_a_clock_that_goes_back_ends_no_grace_early() -> None:
    clock, ended = FakeClock(), list[str]()
    rig = Rig()
    quarantine, process = Quarantine(clock, 5.0), FakeProcess(1)
    owner = rig.store.pool.owner("gone")
    assert rig.store.pool.allocate(PAGE_BYTES, owner) is not None
    quarantine.keep("a", owner, 1, PAGE_BYTES, process, lambda: ended.append("once"))
    process.dead = True
    assert quarantine.poll() == 1
    clock.advance(-100)
    assert quarantine.poll() == 1
    clock.advance(104.9)
    assert quarantine.poll() == 1
    clock.advance(0.2)
    assert quarantine.poll() == 0
    quarantine.close()
    assert ended == ["once"]
    assert owner.num_leases == 0
    rig.close()


# ---- a client that takes too much ------------------------------------------------------------------------------------


def test_nobody_holds_more_than_half_the_pool_however_he_tries(rig: Rig) -> None:
    greedy = rig.unix(pid=7)
    assert list(greedy.reserve(list(range(0, 32, 2))).outcomes) == [RESERVED] * 8 + [FULL] * 8
    twin = rig.unix(pid=7)  # another connection of the same process
    assert list(twin.reserve([200]).outcomes) == [FULL]
    greedy.session.end(clean=False)  # what it left is still its own
    assert list(rig.unix(pid=7).reserve([200]).outcomes) == [FULL]
    other = rig.unix(pid=8)
    assert list(other.reserve([0, 200]).outcomes) == [RESERVED] * 2
    rig.advance(RESERVATION_S + 1)
    assert list(rig.unix(pid=7).reserve([200]).outcomes) == [FULL]  # void slots count


def test_leases_count_too_and_those_beyond_the_bound_are_refused(rig: Rig) -> None:
    client, other = rig.unix(), rig.unix()
    for number in range(10):
        other.store([2 * number])
    staged = client.stage([2 * number for number in range(10)])
    assert list(staged.outcomes) == [m.StageOutcome.OK] * 8 + [m.StageOutcome.REFUSED] * 2
    assert list(client.reserve([99]).outcomes) == [FULL]
    client.release(staged)
    assert list(client.stage([2 * number for number in range(2, 10)]).outcomes) == [m.StageOutcome.OK] * 8


def test_over_tcp_a_machine_is_one_client(rig: Rig) -> None:
    first, second, third = rig.tcp(host="10.0.0.1"), rig.tcp(host="10.0.0.1"), rig.tcp(host="10.0.0.2")
    assert list(first.reserve(list(range(0, 16, 2))).outcomes) == [RESERVED] * 8
    assert list(second.reserve([100]).outcomes) == [FULL]
    assert list(third.reserve([100]).outcomes) == [RESERVED]


def test_payloads_that_nobody_reads_count(rig: Rig) -> None:
    client = rig.tcp(reads=False)
    for number in range(8):
        rig.unix().store([2 * number])
    for number in range(8):
        client.say(client.stage_message([2 * number]))
    client.say(client.stage_message([0]))
    heard = [each.message for each in client.heard]
    assert all(isinstance(each, m.Staged) for each in heard)
    assert [list(each.outcomes) for each in heard if isinstance(each, m.Staged)] == [[0]] * 8 + [
        [m.StageOutcome.REFUSED]
    ]
    client.take_payloads()
    assert client.session.held_bytes == 0


def test_one_block_may_be_held_however_large() -> None:
    rig = Rig(blocks=3, overrides={"host.size": 3 * PAGE_BYTES, "host.slab": 2 * PAGE_BYTES})
    client, other = rig.unix(), rig.unix()
    assert client.store([0], 2 * PAGE_BYTES) == [STORED]
    staged = client.stage([0], block_bytes=2 * PAGE_BYTES)
    assert list(staged.outcomes) == [m.StageOutcome.OK]
    assert list(client.reserve([1]).outcomes) == [FULL]
    assert list(other.reserve([1, 2]).outcomes) == [RESERVED, FULL]
    rig.close()


# ---- real processes --------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], words: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.005)


def test_a_process_is_dead_when_it_is_and_not_when_it_is_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.open(child.pid)
    assert process is not None
    assert not process.is_dead()
    os.kill(child.pid, signal.SIGSTOP)
    assert not process.is_dead()
    child.kill()
    wait_for(process.is_dead, "a killed process is not dead")
    child.communicate()
    assert process.is_dead()
    process.close()
    process.close()
    assert process.is_dead()
    assert Process.open(0) is None
    assert Process.open(2**22 + 1) is None  # beyond any pid


def test_what_may_be_mapped_and_who_is_charged() -> None:
    process = FakeProcess(3)
    assert Peer("unix", "unix", 1000, 3, process).can_map
    assert not Peer("unix", "unix", 1000, 3).can_map
    assert not Peer("tcp", "[::1]:5", process=process).can_map
    assert Peer("unix", "unix", 1000, 3).holder == "pid 3"
    assert Peer("unix", "unix", 1000, 0).holder == "uid 1000"
    assert Peer("tcp", "[::1]:5").holder == "host [::1]"


def test_what_is_void_is_told_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    client: Client = rig.unix()
    client.session.handle(m.Reserve(9, SPACE, PAGE_BYTES, joined([1, 2]), digest(0) * 2), 0)
    with caplog.at_level(logging.WARNING):
        rig.advance(RESERVATION_S + 1)
        rig.advance(RESERVATION_S + 1)
    assert caplog.text.count("did not fill 2 slots within daemon.reservation_s = 30 s") == 1
