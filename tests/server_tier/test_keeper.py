"""Slots that a server grants, published and adopted, over one that says what it is told to."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import MonotonicClock
from kvtier.errors import ClosedError
from kvtier.granted import GrantedPool
from kvtier.leases import Lease
from kvtier.protocol.messages import (
    Abort,
    Bye,
    Failed,
    Grant,
    Granted,
    Hello,
    Publish,
    PublishOutcome,
    Release,
    Remove,
    Stage,
    StageOutcome,
)
from kvtier.testing import FakeClock
from kvtier.tiers.base import Adoption, ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.host import HostTier
from kvtier.tiers.server import ServerTier, inplace
from kvtier.tiers.server.copies import checksum
from kvtier.tiers.server.failures import GarbledError
from kvtier.tiers.server.keeper import FULL_PAUSE_S, REFUSED_PAUSE_S, SERVER_SHARE
from tests.server_tier.rig import (
    BLOCK_BYTES,
    POOL_BYTES,
    SLOT_BYTES,
    TIMEOUT_S,
    FakeServer,
    Fd,
    Lie,
    Raw,
    Said,
    block_of,
    key_of,
    sealed_memfd,
    settings_of,
    until,
)
from tests.server_tier.test_server_hostile import ANY_ANSWER, raw

HOST_BYTES = 1 << 19
PAGE = 1 << 12
OURS = 3 * PAGE
"""A slot of ours; those of the server lie further apart."""
STOCK = POOL_BYTES // SERVER_SHARE // OURS
OK, STORED, ERROR = ReadOutcome.OK, WriteOutcome.STORED, WriteOutcome.ERROR


class Served:
    """A tier over granted slots, with its host tier; blocks by name."""

    def __init__(self, server: FakeServer, clock: FakeClock | None = None, **settings: Any) -> None:
        self.tier = ServerTier(settings_of(server.url, **settings), clock or MonotonicClock(), HOST_BYTES)
        pool = self.tier.host_pool
        assert isinstance(pool, GrantedPool)
        self.pool = pool
        self.host = HostTier(pool)
        self.owner = pool.owner("test")
        self.tier.serve(self.host)
        pool.expect(BLOCK_BYTES)

    @property
    def num_free(self) -> int:
        return self.pool.classes()[OURS].num_free

    def stocked(self) -> None:
        until("slots are granted", lambda: self.num_free > 0)

    def fill(self, name: object) -> Lease:
        lease = self.pool.allocate(BLOCK_BYTES, self.owner)
        assert lease is not None
        lease.view[:BLOCK_BYTES] = block_of(name)
        return lease

    def write(self, *names: object) -> tuple[list[WriteOutcome], list[Lease]]:
        leases = [self.fill(name) for name in names]
        requests = [
            WriteRequest(key_of(name), None, lease.view[:BLOCK_BYTES], slot=lease.slot)
            for name, lease in zip(names, leases, strict=True)
        ]
        return self.tier.write(requests), leases

    def read(self, *names: object) -> tuple[list[ReadOutcome], list[Lease]]:
        """Of those that are OK the leases, in their order."""
        adoptions = [Adoption(BLOCK_BYTES, self.owner) for _ in names]
        requests = [ReadRequest(key_of(n), memoryview(b""), a) for n, a in zip(names, adoptions, strict=True)]
        outcomes = self.tier.read(requests)
        leases: list[Lease] = []
        for name, outcome, adoption in zip(names, outcomes, adoptions, strict=True):
            assert (adoption.lease is not None) == (outcome is OK)
            if adoption.lease is not None:
                assert adoption.lease.view[:BLOCK_BYTES] == block_of(name)
                leases.append(adoption.lease)
        return outcomes, leases

    def works(self) -> None:
        """All is well from end to end."""
        self.stocked()
        name = f"works {time.monotonic()}"
        outcomes, leases = self.write(name)
        assert outcomes == [STORED]
        self.pool.release_all(leases)
        found, leases = self.read(name)
        assert found == [OK]
        self.pool.release_all(leases)
        self.pool.check_integrity()

    def close(self) -> None:
        self.tier.close()
        self.host.close()
        self.pool.close()


@contextmanager
def served(server: FakeServer, clock: FakeClock | None = None, **settings: Any) -> Iterator[Served]:
    rig = Served(server, clock, **settings)
    try:
        yield rig
        rig.tier.check_integrity()
    finally:
        rig.owner.close()
        rig.close()
    assert rig.tier.snapshot().mapped_bytes == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "fake.sock") as server:
        yield server


@pytest.fixture
def rig(server: FakeServer) -> Iterator[Served]:
    with served(server) as rig:
        rig.works()
        yield rig


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_a_stock_is_asked_for_at_once_and_refilled_before_it_is_empty(server: FakeServer) -> None:
    with served(server) as rig:
        until("the stock is there", lambda: rig.num_free == STOCK)
        (grant,) = server.heard_of(Grant)
        assert (grant.block_bytes, grant.number) == (OURS, STOCK)
        leases = [rig.fill(number) for number in range(2)]
        until("it is refilled", lambda: rig.num_free == STOCK)
        assert sum(grant.number for grant in server.heard_of(Grant)) == STOCK + 2
        rig.pool.release_all(leases)  # of no use: they are free again, and too many
        until("what is too much is given back", lambda: rig.num_free == STOCK)
        until("by Abort", lambda: sum(len(each.reservations) for each in server.heard_of(Abort)) == 2)
        seen, looks = len(server.heard), count_looks(rig)
        until("it has looked again", lambda: len(looks) >= 3)
        assert len(server.heard) == seen, "there is nothing more to say"


def count_looks(rig: Served) -> list[None]:
    """One more for each time that the keeper looks what there is to do."""
    looks: list[None] = []
    take_idle = rig.pool.take_idle

    def take() -> list[int]:
        looks.append(None)
        return take_idle()

    rig.pool.take_idle = take  # type: ignore[method-assign]
    return looks


def test_what_is_published_is_released_by_its_handle_once(server: FakeServer, rig: Served) -> None:
    outcomes, leases = rig.write("a", "b")
    assert outcomes == [STORED] * 2
    handles = set(server.heard_of(Publish)[-1].reservations)
    before = released(server)
    assert handles.isdisjoint(before)
    rig.pool.release_all(leases)
    until("they are released", lambda: handles <= set(released(server)))
    assert len(released(server)) == len(set(released(server)))
    assert not handles & {each for abort in server.heard_of(Abort) for each in abort.reservations}


def released(server: FakeServer) -> list[int]:
    return [each for release in server.heard_of(Release) for each in release.leases]


def test_a_copy_of_what_is_stored_already_is_used_again(server: FakeServer, rig: Served) -> None:
    _, leases = rig.write("a")
    rig.pool.release_all(leases)
    outcomes, leases = rig.write("a")
    assert outcomes == [WriteOutcome.ALREADY_STORED]
    (slot,) = {lease.slot for lease in leases}
    rig.pool.release_all(leases)
    until("it is free", lambda: rig.pool.usage().num_slots_used == 0)
    assert rig.pool.is_private(slot)


def test_what_the_host_tier_names_is_forgotten_once_it_is_the_servers(server: FakeServer, rig: Served) -> None:
    namespace, digest = key_of("a")[:16], key_of("a")[16:]
    reserved = rig.host.reserve(namespace, digest, None, BLOCK_BYTES, rig.owner)  # type: ignore[arg-type]
    reserved.lease.view[:BLOCK_BYTES] = block_of("a")  # type: ignore[union-attr]
    slot, view = reserved.lease.slot, reserved.lease.view[:BLOCK_BYTES]  # type: ignore[union-attr]
    (held,) = rig.host.share([reserved], rig.owner)  # type: ignore[list-item]
    rig.host.commit([reserved])  # type: ignore[list-item]
    assert held is not None
    assert rig.tier.write([WriteRequest(key_of("a"), None, view, slot=slot)]) == [STORED]
    assert rig.host.num_blocks == 1, "it is leased"
    held.release()
    until("it is forgotten", lambda: rig.host.num_blocks == 0)
    until("and given back", lambda: server.heard_of(Publish)[-1].reservations[0] in released(server))


def test_a_server_that_has_no_more_slots_is_not_asked_all_the_time(server: FakeServer) -> None:
    server.lies[Grant] = lambda m: [Granted(m.id, [], [])]
    with served(server) as rig:
        began, looks = time.monotonic(), count_looks(rig)

        def looks_often() -> bool:
            assert rig.pool.allocate(BLOCK_BYTES, rig.owner) is None
            return len(looks) > 30

        until("it was woken again and again", looks_often)
        assert len(server.heard_of(Grant)) <= 2 + (time.monotonic() - began) / FULL_PAUSE_S
        del server.lies[Grant]
        rig.works()
        assert rig.tier.snapshot().errors == {}


@pytest.mark.parametrize("code", ["failed", "invalid", "busy"])
def test_a_server_that_refuses_to_grant_is_asked_again_now_and_then_and_named_once(
    server: FakeServer, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.lies[Grant] = lambda m: [Failed(m.id, code, "no")]
    with served(server) as rig:
        began = time.monotonic()
        until("it is asked twice", lambda: len(server.heard_of(Grant)) >= 2)
        assert len(server.heard_of(Grant)) <= 2 + (time.monotonic() - began) / REFUSED_PAUSE_S
        assert sum("see host.slab of the server" in line for line in caplog.messages) == 1
        assert rig.num_free == 0
        assert server.num_accepted <= 2, "the connection is of use"
        del server.lies[Grant]
        rig.works()


def test_blocks_that_the_server_can_never_hold_keep_no_slot_from_others(server: FakeServer, rig: Served) -> None:
    def refuse(message: Grant) -> list[Said] | None:
        too_large = message.block_bytes > OURS
        return (
            [Failed(message.id, "invalid", "fits no slab")] if too_large else [server._grant(peer_of(server), message)]
        )

    server.lies[Grant] = refuse
    rig.pool.expect(2 * OURS)
    asked = len(server.heard_of(Grant))
    until("they are refused", lambda: any(each.block_bytes > OURS for each in server.heard_of(Grant)[asked:]))
    for _ in range(3):
        while rig.num_free:
            rig.fill("a").release()
            rig.fill("a")
        until("there are slots again", lambda: rig.num_free > 0, REFUSED_PAUSE_S / 4)


def peer_of(server: FakeServer) -> Any:
    """On whose connection slots were granted last."""
    return server._peers[-1]


@pytest.mark.parametrize(("host_bytes", "num_lines"), [(POOL_BYTES, 0), (2 * POOL_BYTES, 1)])
def test_an_engine_that_would_hold_more_than_there_is_is_told_once(
    server: FakeServer,
    host_bytes: int,
    num_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOST_BYTES", host_bytes)
    with served(server) as rig:
        rig.works()
    assert sum("is more than all of the server's memory" in line for line in caplog.messages) == num_lines


def test_a_server_that_does_not_share_its_memory_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(tmp_path / "fake.sock", maps=False) as server, served(server) as rig:
        until("it is tried", lambda: server.num_accepted >= 3)
        assert rig.read("a")[0] == [ReadOutcome.ERROR]
        with pytest.raises(Exception, match="does not share its memory"):
            rig.tier.probe()
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "does not share its memory: set host.pool = 'own'" in lines[0]


# ---- lies ------------------------------------------------------------------------------------------------------------


def granted(handles: Sequence[object], offsets: Sequence[object]) -> Lie:
    return lambda m: raw(76, m.id, list(handles), list(offsets))


GRANTED: dict[str, Lie] = {
    "outside": granted([901], [POOL_BYTES]),
    "the last page outside": granted([901], [POOL_BYTES - 2 * PAGE]),
    "far outside": granted([901], [1 << 39]),
    "beyond all addresses": granted([901], [(1 << 63) - PAGE]),
    "below": granted([901], [-PAGE]),
    "not of whole pages": granted([901], [SLOT_BYTES + 1]),
    "two that overlap": granted([901, 902], [POOL_BYTES // 2, POOL_BYTES // 2 + PAGE]),
    "the same twice": granted([901, 902], [POOL_BYTES // 2] * 2),
    "one handle for two": granted([901, 901], [POOL_BYTES // 2, POOL_BYTES // 2 + SLOT_BYTES]),
    "no offset": granted([901], []),
    "more than were asked for": lambda m: [
        Granted(m.id, [900 + i for i in range(m.number + 1)], [i * OURS for i in range(m.number + 1)])
    ],
    "words": granted(["x"], [0]),
}


@pytest.mark.parametrize("lie", [*GRANTED, *ANY_ANSWER])
def test_no_slot_comes_of_a_lie(server: FakeServer, lie: str) -> None:
    server.lies[Grant] = (GRANTED | ANY_ANSWER)[lie]
    with served(server, timeout_s=0.1) as rig:
        until("it lied", lambda: len(server.heard_of(Grant)) >= 2)
        assert rig.num_free == 0
        rig.pool.check_integrity()
        del server.lies[Grant]
        rig.works()


@pytest.mark.parametrize(
    ("offset", "is_slot"),
    [
        (0, True),
        (POOL_BYTES - SLOT_BYTES, True),
        (POOL_BYTES - SLOT_BYTES + PAGE, False),
        (POOL_BYTES, False),
        (1 << 39, False),
        (-PAGE, False),
        (SLOT_BYTES + 1, False),
    ],
)
def test_a_slot_is_whole_and_of_whole_pages_of_the_memory(rig: Served, offset: int, is_slot: bool) -> None:
    with rig.tier._keeper.connection(time.monotonic() + 1.0) as (connection, _):  # type: ignore[union-attr]
        with contextlib.nullcontext() if is_slot else pytest.raises(GarbledError, match="slots of"):
            rig.tier._keeper.check_slots(connection, [0, offset], SLOT_BYTES)  # type: ignore[union-attr]
        assert connection.is_broken != is_slot


def test_a_slot_that_is_in_use_is_not_granted_again(server: FakeServer, rig: Served) -> None:
    lease = rig.fill("mine")
    for handle in (901, server.next_handle - 1):
        server.lies[Grant] = granted([handle], [lease.offset])
        leases = [rig.fill(number) for number in range(rig.num_free)]
        until("it lied", lambda: rig.tier.snapshot().errors.get("protocol", 0) > 0)
        until("all is lost", lambda: bool(rig.pool.lost_eras()))
        rig.pool.release_all(leases)
        assert lease.view[:BLOCK_BYTES] == block_of("mine")
        del server.lies[Grant]
        rig.stocked()
        rig.pool.check_integrity()


PUBLISHED: dict[str, Lie] = {
    "too few outcomes": lambda m: raw(77, m.id, b"\0"),
    "too many outcomes": lambda m: raw(77, m.id, bytes(3)),
    "an unknown outcome": lambda m: raw(77, m.id, b"\0\x09"),
    "none of them was granted": lambda m: raw(77, m.id, bytes([PublishOutcome.VOID] * 2)),
    "one of them was not granted": lambda m: raw(77, m.id, bytes([PublishOutcome.STORED, PublishOutcome.VOID])),
}
CONNECTION_STAYS = {"no", "no, by an unknown word"}


@pytest.mark.parametrize("lie", [*PUBLISHED, *ANY_ANSWER])
def test_nothing_is_published_by_a_lie(server: FakeServer, lie: str) -> None:
    server.lies[Publish] = (PUBLISHED | ANY_ANSWER)[lie]
    with served(server, timeout_s=0.2) as rig:
        until("there is a stock", lambda: rig.num_free >= 2)
        began = time.monotonic()
        outcomes, leases = rig.write("a", "b")
        assert outcomes == [ERROR] * 2
        assert time.monotonic() - began < 1.0
        assert bool(rig.pool.lost_eras()) == (lie not in CONNECTION_STAYS)
        for name, lease in zip("ab", leases, strict=True):
            assert lease.view[:BLOCK_BYTES] == block_of(name)
        rig.pool.release_all(leases)
        del server.lies[Publish]
        rig.works()


@pytest.mark.parametrize("outcome", [PublishOutcome.FULL, PublishOutcome.BEING_STORED])
def test_what_the_server_does_not_take_stays_ours(server: FakeServer, rig: Served, outcome: int) -> None:
    server.lies[Publish] = lambda m: raw(77, m.id, bytes([outcome]))
    outcomes, leases = rig.write("a")
    assert outcomes == [WriteOutcome.FULL]
    del server.lies[Publish]
    request = WriteRequest(key_of("a"), None, leases[0].view[:BLOCK_BYTES], slot=leases[0].slot)
    assert rig.tier.write([request]) == [STORED]


def staged(*fields: object) -> Lie:
    return lambda m: raw(70, m.id, *fields)


TWO_OK = bytes(2)
STAGED: dict[str, Lie] = {
    "too few outcomes": staged(b"\0", [901], [0], [1]),
    "too many outcomes": staged(bytes(3), [901, 902, 903], [0, SLOT_BYTES, 2 * SLOT_BYTES], [1, 2, 3]),
    "an unknown outcome": staged(b"\x09\0", [901], [0], [1]),
    "no lease": staged(TWO_OK, [], [], [1, 2]),
    "one lease for two": staged(TWO_OK, [901], [0], [1]),
    "one handle for two": staged(TWO_OK, [901, 901], [0, SLOT_BYTES], [1, 2]),
    "no offset": staged(TWO_OK, [901, 902], [0], [1, 2]),
    "no checksum": staged(TWO_OK, [901, 902], [0, SLOT_BYTES], []),
    "outside": staged(TWO_OK, [901, 902], [0, POOL_BYTES], [1, 2]),
    "below": staged(TWO_OK, [901, 902], [0, -PAGE], [1, 2]),
    "not of whole pages": staged(TWO_OK, [901, 902], [0, SLOT_BYTES + 1], [1, 2]),
}


@pytest.mark.parametrize("lie", [*STAGED, *ANY_ANSWER])
def test_nothing_is_adopted_by_a_lie(server: FakeServer, lie: str) -> None:
    with served(server, timeout_s=0.2) as rig:
        rig.works()
        server.lies[Stage] = (STAGED | ANY_ANSWER)[lie]
        outcomes, leases = rig.read("a", "b")
        assert set(outcomes) == {ReadOutcome.ERROR}
        assert leases == []
        assert rig.pool.usage().num_leases == 0
        del server.lies[Stage]
        rig.works()


def test_blocks_that_overlap_are_adopted_once(server: FakeServer, rig: Served) -> None:
    """What a server says that leased a block while its slot is used here: it is had once that has ended."""
    _, leases = rig.write("a")
    outcomes, none = rig.read("a")
    assert (outcomes, none) == ([ReadOutcome.REFUSED], [])
    server.lies[Stage] = staged(TWO_OK, [901, 902], [leases[0].offset + PAGE, leases[0].offset - PAGE], [1, 2])
    assert rig.read("b", "c")[0] == [ReadOutcome.REFUSED] * 2
    del server.lies[Stage]
    until("they are given back", lambda: {901, 902} <= set(released(server)))
    assert leases[0].view[:BLOCK_BYTES] == block_of("a")
    rig.pool.release_all(leases)
    assert rig.read("a")[0] == [OK]


def test_what_is_not_what_was_stored_is_damaged_and_forgotten(server: FakeServer, rig: Served) -> None:
    _, leases = rig.write("a", "b")
    rig.pool.release_all(leases)
    server.pool[leases[1].offset + BLOCK_BYTES - 1] ^= 1
    outcomes, good = rig.read("a", "b")
    assert outcomes == [OK, ReadOutcome.DAMAGED]
    assert len(server.heard_of(Remove)) == 1
    assert rig.tier.snapshot().damaged == 1
    assert rig.pool.usage().num_leases == len(good) == 1
    assert rig.read("b")[0] == [ReadOutcome.MISS]


def test_what_was_adopted_is_looked_at_though_the_server_goes_meanwhile(server: FakeServer, rig: Served) -> None:
    """Before what comes from its lower tiers."""
    _, leases = rig.write("a", "b")
    at, _, known = server.blocks[key_of("a")]
    server.pool[at] ^= 1

    def answer(message: Stage) -> list[Said]:
        if message.max_wait_ms:
            return [Raw(b"", end=True)]
        return raw(70, message.id, bytes([StageOutcome.OK, StageOutcome.TIMEOUT]), [900], [at], [known])

    rig.pool.release_all(leases)
    server.lies[Stage] = answer
    outcomes, leases = rig.read("a", "b")
    assert outcomes == [ReadOutcome.DAMAGED, ERROR]
    assert (leases, rig.pool.usage().num_leases) == ([], 0)
    assert rig.tier.snapshot().damaged == 1


def test_a_failure_of_our_own_keeps_no_slot(server: FakeServer, rig: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    del server
    _, leases = rig.write("a", "b")
    rig.pool.release_all(leases)
    sums = iter([checksum(memoryview(block_of("a")))])
    with monkeypatch.context() as context:
        context.setattr(inplace, "checksum", lambda _: next(sums))
        with pytest.raises(StopIteration):
            rig.read("a", "b")
    assert rig.pool.usage().num_leases == 0
    assert rig.read("a", "b")[0] == [OK, OK]


def test_a_block_that_only_a_lower_tier_has_is_waited_for_elsewhere(server: FakeServer, rig: Served) -> None:
    """The connection that slots are granted on is asked only what is answered at once."""
    _, leases = rig.write("a")
    rig.pool.release_all(leases)
    waits: list[int] = []

    def answer(message: Stage) -> list[Said] | None:
        waits.append(message.max_wait_ms)
        if len(waits) == 1:
            return raw(70, message.id, bytes([StageOutcome.TIMEOUT]), [], [], [])
        at, _, known = server.blocks[key_of("a")]
        return raw(70, message.id, b"\0", [900 + len(waits)], [at], [known])

    server.lies[Stage] = answer
    outcomes, leases = rig.read("a")
    assert outcomes == [OK]
    assert [bool(each) for each in waits] == [False, True, False]
    until("what kept it meanwhile is given back", lambda: 902 in released(server))
    assert 903 not in released(server)
    rig.pool.release_all(leases)
    until("and this once it is not used", lambda: 903 in released(server))


@pytest.mark.parametrize("outcome", [StageOutcome.TIMEOUT, StageOutcome.MISS, StageOutcome.FULL])
def test_reads_are_larger_while_all_is_found_in_the_servers_memory(
    server: FakeServer, rig: Served, outcome: int
) -> None:
    _, leases = rig.write("a", "b")
    rig.pool.release_all(leases)
    assert rig.read("nowhere")[0] == [ReadOutcome.MISS]
    for scale in (1, 2, 4, 4):
        assert rig.tier.read_bytes(1000, 10**9) == scale * 1000
        assert rig.tier.read_bytes(1000, 900) == 1000
        assert rig.tier.read_bytes(1000, 1500) == (1000 if scale == 1 else 1500)
        outcomes, leases = rig.read("a", "b")
        assert outcomes == [OK, OK]
        rig.pool.release_all(leases)
        until("they are given back", lambda: rig.pool.usage().num_slots_used == 0)
    assert rig.tier.read_bytes(rig.pool.nbytes // 32, 10**9) == rig.pool.nbytes // 16
    assert rig.tier.read_bytes(rig.pool.nbytes, 10**9) == rig.pool.nbytes
    at, _, known = server.blocks[key_of("a")]
    server.lies[Stage] = lambda m: raw(70, m.id, bytes([StageOutcome.OK, outcome]), [950], [at], [known])
    rig.pool.release_all(rig.read("a", "b")[1])
    assert rig.tier.read_bytes(1000, 10**9) == 1000
    del server.lies[Stage]
    rig.pool.release_all(rig.read("b")[1])
    assert rig.tier.read_bytes(1000, 10**9) == 2000


@pytest.mark.parametrize("outcome", [StageOutcome.FULL, StageOutcome.REFUSED])
def test_what_cannot_be_had_now_is_no_failure(server: FakeServer, rig: Served, outcome: int) -> None:
    server.lies[Stage] = lambda m: raw(70, m.id, bytes([outcome]), [], [], [])
    assert rig.read("a")[0] == [ReadOutcome.REFUSED]
    assert rig.tier.snapshot().errors == {}


# ---- connections that end --------------------------------------------------------------------------------------------


def test_no_goodbye_is_said_while_a_slot_is_used(server: FakeServer, rig: Served) -> None:
    """The server hangs: what it granted is used here, and the next connection's is other slots."""
    used = rig.fill("used")
    server.lies[Publish] = lambda _: None
    byes = len(server.heard_of(Bye))
    outcomes, leases = rig.write("a")
    assert outcomes == [ERROR]
    del server.lies[Publish]
    rig.pool.release_all(leases)
    rig.stocked()
    rig.works()
    assert len(server.heard_of(Bye)) == byes
    assert used.view[:BLOCK_BYTES] == block_of("used")
    assert rig.tier.write([WriteRequest(key_of("used"), None, used.view[:BLOCK_BYTES], slot=used.slot)]) == [
        WriteOutcome.WITHDRAWN
    ], "its slot is of the connection before"
    used.release()
    until("then it is said", lambda: len(server.heard_of(Bye)) == byes + 1)
    assert not rig.pool.lost_eras()


def test_one_slot_that_stays_in_use_keeps_one_connection_of_many(server: FakeServer, rig: Served) -> None:
    used = rig.fill("used")
    for number in range(1, 4):
        before, byes = server.num_accepted, len(server.heard_of(Bye))
        server.lies[Publish] = lambda _: None
        outcomes, leases = rig.write("a")
        assert outcomes == [ERROR]
        del server.lies[Publish]
        rig.pool.release_all(leases)
        rig.stocked()
        assert server.num_accepted == before + 1
        if number > 1:
            until("that is over", lambda byes=byes: len(server.heard_of(Bye)) == byes + 1)  # type: ignore[misc]
        assert len(rig.pool.lost_eras()) == 1
    assert used.view[:BLOCK_BYTES] == block_of("used")
    used.release()
    until("it is over", lambda: not rig.pool.lost_eras())


def test_a_block_of_a_connection_before_is_not_published_on_the_next(server: FakeServer, rig: Served) -> None:
    """Though a handle of the one before may be one of its own."""
    lease = rig.fill("a")
    handle = rig.pool.handle_of(lease.slot)
    assert handle is not None
    rig.pool.handle_of = lambda slot: handle  # type: ignore[method-assign]  # as if it was lost just after
    server.cut()
    until("it is connected again", lambda: rig.num_free > 0 and bool(rig.pool.lost_eras()))
    publishes = len(server.heard_of(Publish))
    request = WriteRequest(key_of("a"), None, lease.view[:BLOCK_BYTES], slot=lease.slot)
    assert rig.tier.write([request]) == [WriteOutcome.WITHDRAWN]
    assert len(server.heard_of(Publish)) == publishes


def test_a_cut_is_noticed_though_nothing_is_asked(server: FakeServer, rig: Served) -> None:
    accepted = server.num_accepted
    server.cut()
    until("it is connected again", lambda: server.num_accepted > accepted)
    rig.works()


def test_memory_of_the_next_run_is_taken_once_that_of_the_one_before_is_not_used(
    server: FakeServer, rig: Served
) -> None:
    memory = memory_of(rig)
    assert memory is not None
    assert os.fstat(memory[0]).st_ino == os.fstat(server.fd).st_ino
    lease = rig.fill("before")
    anew = sealed_memfd(POOL_BYTES)
    try:
        server.lies[Hello] = lambda m: [Fd(server.welcome(m.id), [os.dup(anew)])]
        server.cut()
        until("it was tried", lambda: rig.tier.snapshot().errors.get("connection", 0) >= 2)
        assert rig.num_free == 0
        assert rig.read("a")[0] == [ReadOutcome.ERROR]
        again = memory_of(rig)
        assert again == memory, "other processes still use it"
        assert lease.view[:BLOCK_BYTES] == block_of("before")
        lease.release()
        rig.stocked()
        again = memory_of(rig)
        assert again is not None
        assert again.run == memory.run + 1
        assert os.fstat(again.fd).st_ino == os.fstat(anew).st_ino
        new = rig.fill("after")
        assert os.pread(anew, BLOCK_BYTES, new.offset) == block_of("after")
    finally:
        os.close(anew)


def memory_of(rig: Served) -> Any:
    assert rig.tier._keeper is not None
    return rig.tier._keeper.memory


def test_whoever_asks_while_another_waits_is_late_and_no_later(server: FakeServer, rig: Served) -> None:
    server.lies[Publish] = lambda _: None
    outcomes: list[object] = []
    threads = [threading.Thread(target=lambda name=name: outcomes.extend(rig.write(name)[0])) for name in range(3)]
    until("there is a stock", lambda: rig.num_free >= 3)
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 2 * TIMEOUT_S + 0.5
    assert set(outcomes) <= {ERROR, WriteOutcome.WITHDRAWN}
    del server.lies[Publish]
    rig.owner.close()
    rig.owner = rig.pool.owner("anew")
    rig.works()


def test_a_request_waits_for_the_memory_and_no_longer_than_for_an_answer(server: FakeServer) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(message: Hello) -> list[Said]:
        if server.num_accepted >= 2:  # the first is not the keeper's
            entered.set()
            leave.wait(5.0)
        return [Fd(server.welcome(message.id), [os.dup(server.fd)])]

    server.lies[Hello] = slow
    with served(server, timeout_s=0.3) as rig:
        entered.wait(5.0)
        began = time.monotonic()
        assert rig.read("a")[0] == [ReadOutcome.ERROR]
        assert time.monotonic() - began < 0.8
        leave.set()
        until("it answers", lambda: rig.read("a")[0] == [ReadOutcome.MISS])


def test_a_server_that_is_down_is_not_waited_for(server: FakeServer, rig: Served) -> None:
    server.lies[Hello] = lambda m: [Failed(0, "closing", "going down")]
    server.cut()
    until("the connection is lost", lambda: memory_of(rig) is None)
    for _ in range(3):
        began = time.monotonic()
        assert rig.read("a")[0] == [ReadOutcome.ERROR]
        assert time.monotonic() - began < TIMEOUT_S
    with pytest.raises(Exception, match="closing"):
        rig.tier.probe()
    del server.lies[Hello]
    began = time.monotonic()
    rig.tier.probe()
    assert rig.read("a")[0] == [ReadOutcome.MISS], "whoever is well has its memory at hand"
    rig.works()


@pytest.mark.parametrize("closes_at", ["publish", "stage", "grant", "hello"])
def test_closing_ends_what_is_under_way(server: FakeServer, closes_at: str) -> None:
    asked = threading.Event()
    kind = {"publish": Publish, "stage": Stage, "grant": Grant, "hello": Hello}[closes_at]

    def hang(message: object) -> Sequence[Said] | None:
        if kind is Hello and server.num_accepted < 2:
            return [Fd(server.welcome(message.id), [os.dup(server.fd)])]  # type: ignore[attr-defined]
        asked.set()
        return None

    raised: list[BaseException] = []
    if closes_at in ("grant", "hello"):
        server.lies[kind] = hang
    with served(server, timeout_s=30.0) as rig:
        calls: dict[str, Callable[[], object]] = {"publish": lambda: rig.write("a"), "stage": lambda: rig.read("a")}

        def call() -> None:
            try:
                calls[closes_at]()
            except ClosedError as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        if closes_at in calls:
            rig.stocked()
            server.lies[kind] = hang
            thread.start()
        asked.wait(5.0)
        began = time.monotonic()
        rig.tier.close()
        assert time.monotonic() - began < 1.0
        if closes_at in calls:
            thread.join(5.0)
            assert len(raised) == 1
            with pytest.raises(ClosedError):
                rig.tier.read([ReadRequest(key_of("a"), memoryview(b""), Adoption(BLOCK_BYTES, rig.owner))])


def test_closing_says_goodbye_unless_a_slot_is_used(server: FakeServer) -> None:
    for is_used in (False, True):
        rig = Served(server)
        rig.works()
        byes = len(server.heard_of(Bye))
        lease = rig.fill("a")
        view = lease.view
        if not is_used:
            lease.release()
        rig.close()
        until("all have gone", lambda: not any(thread.is_alive() for thread in server._threads))
        # A connection of the other kind says so in either case.
        assert len(server.heard_of(Bye)) - byes == (1 if is_used else 2)
        if is_used:
            assert view[:BLOCK_BYTES] == block_of("a")
        del view
        rig.owner.close()
