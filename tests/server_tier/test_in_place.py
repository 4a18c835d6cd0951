"""Stores whose host pool is a daemon's memory: blocks are written and read where they lie."""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, ForkedError, LeaseError
from kvtier.granted import SlotKind
from kvtier.protocol.admin import AskFlush, AskStatus, Flushed, StatusPart
from kvtier.reasons import DropReason
from kvtier.server.admin_client import AdminClient
from kvtier.server.daemon import Daemon
from kvtier.space import Space
from kvtier.store import Store
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from tests.server.daemon_rig import ServerProcess, short_directory
from tests.server_tier.in_place_rig import (
    BLOCK_BYTES,
    DIGESTS,
    NAMESPACE,
    TIMEOUT_S,
    content,
    device_of,
    given_back,
    held_at,
    hung,
    in_place,
    is_quiet,
    keys_of,
    lower_of,
    num_free,
    open_store,
    pool_of,
    reserve,
    restore,
    settled,
    stocked,
    store_blocks,
)
from tests.server_tier.rig import DaemonAt, daemon_at, until

DEADLINE_S = 20.0
ROOT = Path(__file__).parents[2]
SIZES: dict[str, object] = {"host.size": "16MiB", "host.slab": "1MiB", "daemon.dma_grace_s": 0}


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def at(directory: Path) -> Iterator[DaemonAt]:
    with daemon_at(directory, SIZES) as at:
        yield at
        at.daemon.check_integrity()
        until("all is given back", lambda: held_at(at.daemon) == 0)
        at.daemon.tenants[0].store.check_integrity()


def disk_in(directory: Path) -> dict[str, object]:
    return {"disk.path": str(directory / "disk"), "disk.size": "64MiB", "disk.min_free": 0}


def url_of(server: ServerProcess) -> str:
    return f"kvtier+unix://{server.socket}"


def held_digests(daemon: Daemon, numbers: range, space_digest: bytes) -> list[int]:
    """Blocks of host memory at the daemon, as it knows them itself."""
    found = set(daemon.tenants[0].store.host.digests(space_digest))
    return [number for number in numbers if DIGESTS[number] in found]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# ---- one copy --------------------------------------------------------------------------------------------------------


def test_what_one_store_wrote_another_reads_from_the_same_page(at: DaemonAt) -> None:
    with in_place(at.unix_url) as (one, its), in_place(at.unix_url) as (two, others):
        written = store_blocks(its, range(40))
        assert len(written) == 40
        assert one.flush(DEADLINE_S) == 0
        with others.owner("reader") as reader:
            read = restore(others, range(40), reader)
            assert read == written, "not one was copied"
            memory = device_of(two)._keeper.memory  # type: ignore[union-attr]
            assert memory is not None
            with mmap.mmap(memory.fd, memory.nbytes, prot=mmap.PROT_READ) as seen:
                for number, offset in read.items():
                    assert seen[offset : offset + BLOCK_BYTES] == content(number)
        stats = one.stats().server, two.stats().server
        assert stats[0] is not None
        assert stats[1] is not None
        assert (stats[0].writes, stats[1].reads) == ({"stored": 40}, {"ok": 40})
        assert stats[0].refusals == stats[1].refusals == {}


def test_what_is_published_or_adopted_is_forgotten_once_nobody_leases_it(at: DaemonAt) -> None:
    """And the daemon has it back, whichever side let go of it last."""
    with in_place(at.unix_url) as (one, its), in_place(at.unix_url) as (two, others):
        with its.owner("engine") as owner:
            held = reserve(its, 0, owner)
            held.lease.view[:BLOCK_BYTES] = content(0)
            its.commit([held])
            (lease,) = its.lease(DIGESTS[:1], owner)
            store_blocks(its, range(1, 20))
            until("the others are forgotten", lambda: not one.is_writing and one.host.num_blocks == 1)
            assert its.holds(DIGESTS[5]), "it is the server's"
            assert lease.view[:BLOCK_BYTES] == content(0)
        settled(one)
        assert pool_of(one).usage().used_bytes == 0
        with others.owner("reader") as reader:
            restore(others, range(20), reader)
            assert two.host.num_blocks == 20
            assert at.daemon.snapshot().tenants[0].clients.leases == 20
        settled(two)
        given_back(at.daemon, one, two)
        assert held_digests(at.daemon, range(20), its.digest) == [*range(20)]
        assert len(restore(its, range(20))) == 20
        settled(one)
        given_back(at.daemon, one, two)


def test_two_stores_that_store_the_same_keys_keep_one_of_each(at: DaemonAt) -> None:
    with in_place(at.unix_url) as (one, its), in_place(at.unix_url) as (two, others):
        with its.owner("one") as a, others.owner("two") as b:
            pairs = [(reserve(its, number, a), reserve(others, number, b)) for number in range(10)]
            for number, pair in enumerate(pairs):
                for reserved in pair:
                    reserved.lease.view[:BLOCK_BYTES] = content(number)
            for ours, theirs in pairs:
                its.commit([ours])
                others.commit([theirs])
        settled(one)
        settled(two)
        given_back(at.daemon, one, two)
        assert at.daemon.snapshot().tenants[0].stats.host_blocks == 10
        assert len(restore(its, range(10))) == len(restore(others, range(10))) == 10
        stored = [store.stats().server.writes for store in (one, two)]  # type: ignore[union-attr]
        assert sum(each.get("stored", 0) for each in stored) == 10
        assert sum(each.get("already_stored", 0) for each in stored) == 10


def test_a_block_is_published_once_however_often_it_is_written(at: DaemonAt) -> None:
    """Also the copy of one that the server holds in another slot."""
    with in_place(at.unix_url) as (one, its), in_place(at.unix_url) as (two, others):
        store_blocks(its, range(1))
        settled(one)
        tier = device_of(two)
        with others.owner("engine") as owner:
            for number, first in ((0, WriteOutcome.ALREADY_STORED), (1, WriteOutcome.STORED)):
                lease = pool_of(two).allocate(BLOCK_BYTES, owner)
                assert lease is not None
                lease.view[:BLOCK_BYTES] = content(number)
                (key,) = keys_of(others, [number])
                request = WriteRequest(key, None, lease.view[:BLOCK_BYTES], slot=lease.slot)
                assert tier.write([request, request]) == [first, WriteOutcome.ALREADY_STORED]
                assert tier.write([request]) == [WriteOutcome.ALREADY_STORED]
        assert lower_of(two).is_available
        given_back(at.daemon, one, two)


def test_with_two_uses_a_block_is_the_servers_at_the_second(at: DaemonAt) -> None:
    with in_place(at.unix_url, server__min_uses=2) as (store, space):
        store_blocks(space, range(8))
        store.flush(DEADLINE_S)
        assert (store.host.num_blocks, at.daemon.snapshot().tenants[0].stats.host_blocks) == (8, 0)
        assert len(restore(space, range(8))) == 8, "they are here"
        space.note_use(DIGESTS[:4], None)
        until("those used twice are the server's", lambda: store.host.num_blocks == 4)
        assert held_digests(at.daemon, range(8), space.digest) == [0, 1, 2, 3]
        assert len(restore(space, range(8))) == 8


def test_what_came_before_a_failure_is_not_taken_for_well(at: DaemonAt, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_place(at.unix_url) as (store, space):
        store_blocks(space, range(4))
        settled(store)
        tier = device_of(store)
        read = tier.read

        def fail(requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
            read(requests)
            raise RuntimeError("a failure of our own")

        monkeypatch.setattr(tier, "read", fail)
        assert restore(space, range(4)) == {}
        assert (store.host.num_blocks, pool_of(store).usage().num_leases) == (0, 0)
        given_back(at.daemon, store)


# ---- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["64MiB", "4MiB"])
def test_blocks_that_stay_here_make_room_for_those_that_are_restored(directory: Path, size: str) -> None:
    """Be the bound of what is held here host.size, or what the server lets one client hold."""
    with daemon_at(directory, SIZES | {"host.size": size}) as at:
        with in_place(at.unix_url) as (store, space):
            store_blocks(space, range(20))
            assert store.flush(DEADLINE_S) == 0
        with in_place(at.unix_url, server__min_uses=2) as (store, space):
            fill_up(store, space)
            assert len(restore(space, range(20))) == 20
            assert store.host.num_blocks > 100, "of the others no more than need be"
            assert lower_of(store).stats().reads == {"ok": 20}
        until("all is given back", lambda: held_at(at.daemon) == 0)


def test_blocks_that_stay_here_make_room_for_those_of_another_size(at: DaemonAt) -> None:
    with in_place(at.unix_url, server__min_uses=2) as (store, space):
        fill_up(store, space)
        other = store.open_space(replace(NAMESPACE, layout=replace(NAMESPACE.layout, block_tokens=80)))
        assert other.block_bytes == 10 * BLOCK_BYTES
        until("slots are granted", lambda: pool_of(store).classes()[25 << 12].num_free > 0)
        with other.owner("engine") as owner:
            other.commit([reserve(other, 0, owner)])
        assert other.holds(DIGESTS[0])
        assert store.host.num_blocks > 100


def fill_up(store: Store, space: Space) -> None:
    """With blocks that are used once, until each takes the place of another."""
    numbers = iter(range(100, len(DIGESTS)))

    def is_full() -> bool:
        store_blocks(space, [next(numbers)])
        return store.host.num_evicted > 0

    until("the pool is full", is_full)


def test_the_tier_whose_memory_it_is_stays(at: DaemonAt) -> None:
    with in_place(at.unix_url, server__min_uses=2) as (store, space):
        store_blocks(space, range(8))
        with pytest.raises(ConfigError, match="goes with the store"):
            store.detach("server")
        with space.owner("reader") as reader:
            for number, lease in enumerate(space.lease(DIGESTS[:8], reader)):
                assert lease.view[:BLOCK_BYTES] == content(number)


def test_blocks_that_the_daemon_evicts_while_we_lease_others(directory: Path) -> None:
    with (
        daemon_at(directory, SIZES | {"host.size": "4MiB"}) as at,
        in_place(at.unix_url) as (store, space),
        space.owner("reader") as reader,
    ):
        store_blocks(space, range(10))
        settled(store)
        mine = restore(space, range(10), reader)
        assert len(store_many(store, space, range(10, 800), 10)) == 790, "twice what the daemon's memory takes"
        assert at.daemon.snapshot().tenants[0].stats.evicted_blocks > 300
        for number, lease in zip(mine, space.lease(DIGESTS[:10], reader), strict=True):
            assert lease.view[:BLOCK_BYTES] == content(number)
        store.check_integrity()


def test_a_daemon_that_grants_no_more_costs_drops_until_it_does(directory: Path) -> None:
    with (
        daemon_at(directory, SIZES | {"host.size": "2MiB"}) as at,
        in_place(at.unix_url) as (hog, its),
        in_place(at.unix_url) as (store, space),
    ):
        with its.owner("hog") as owner, space.owner("engine") as engine:
            taken = [0, 0]

            def are_both_full() -> bool:
                """Of the daemon's memory one process may hold half: these two together."""
                dropped = 0
                for place, (where, who) in enumerate(((its, owner), (space, engine))):
                    reserved = where.reserve(DIGESTS[taken[place]], None, who)
                    if isinstance(reserved, DropReason):
                        reasons.add(reserved)
                        dropped += 1
                    else:
                        taken[place] += 1
                is_full = num_free(hog) == num_free(store) == 0 and held_at(at.daemon) > (1 << 20) - (1 << 16)
                return is_full and dropped == 2

            reasons: set[DropReason] = set()
            until("both are full", are_both_full)
            assert reasons == {DropReason.HOST_FULL}
            assert lower_of(store).is_available
        until("there is room again", lambda: num_free(store) > 0)
        until("a block is stored", lambda: bool(store_blocks(space, [999])))
        until("it is the server's", lambda: is_quiet(store))
        assert warned_of_nothing(store)


def warned_of_nothing(store: Store) -> bool:
    stats = store.stats().server
    return stats is not None and stats.errors == {} and stats.refusals == {}


def test_blocks_that_only_the_daemons_disk_has_come_when_staged(directory: Path) -> None:
    with daemon_at(directory, SIZES | disk_in(directory)) as at, in_place(at.unix_url) as (store, space):
        store_blocks(space, range(20))
        settled(store)
        served = at.daemon.tenants[0].store
        assert served.flush(DEADLINE_S) == 0
        given_back(at.daemon, store)
        served.host.reset(space.digest)
        assert held_digests(at.daemon, range(20), space.digest) == []
        assert len(restore(space, range(20))) == 20
        settled(store)
        given_back(at.daemon, store)
        assert warned_of_nothing(store)


def test_what_a_client_scribbled_over_is_a_miss_and_forgotten(at: DaemonAt) -> None:
    with in_place(at.unix_url) as (one, its), in_place(at.unix_url) as (two, others):
        offsets = store_blocks(its, range(6))
        settled(one)
        pool_of(two).buffer[offsets[3] + 17] ^= 1  # whoever is of the tenant can write there
        assert [*restore(others, range(6))] == [0, 1, 2]
        assert device_of(two).snapshot().damaged == 1
        until("the server has forgotten it", lambda: 3 not in held_digests(at.daemon, range(6), its.digest))
        settled(two)
        given_back(at.daemon, one, two)
        store_blocks(others, [3])
        settled(two)
        assert len(restore(its, range(6))) == 6


def test_without_checksums_nothing_is_looked_at(directory: Path) -> None:
    with (
        daemon_at(directory, SIZES | {"daemon.checksums": False}) as at,
        in_place(at.unix_url) as (one, its),
        in_place(at.unix_url) as (_, others),
    ):
        store_blocks(its, range(6))
        settled(one)
        assert len(restore(others, range(6))) == 6


# ---- resets ----------------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_found_whatever_was_under_way(directory: Path) -> None:
    with daemon_at(directory, SIZES | disk_in(directory)) as at, in_place(at.unix_url) as (store, space):
        store_blocks(space, range(30))
        settled(store)
        at.daemon.tenants[0].store.flush(DEADLINE_S)
        for turn in range(5):
            with space.owner("reader") as reader:
                restore(space, range(10), reader)  # leased
                half = reserve(space, 700 + turn, reader)  # being filled
                store_blocks(space, range(100 + 20 * turn, 120 + 20 * turn))  # being published
                digests = DIGESTS[:30]
                stage = space.stage("r", digests, None, DEADLINE_S, space.locate(digests))
                store.reset()
                assert space.commit([half]) == [False]
                if stage is not None:
                    until("the stage ends", stage.poll)
                    stage.close()
            for numbers in (range(30), range(100 + 20 * turn, 120 + 20 * turn), range(700 + turn, 701 + turn)):
                assert restore(space, numbers) == {}
            settled(store)
            given_back(at.daemon, store)
            assert store.epoch == turn + 1
            store_blocks(space, range(30))
            settled(store)
            assert len(restore(space, range(30))) == 30
        settled(store)
        given_back(at.daemon, store)


def test_a_block_that_is_adopted_while_a_reset_begins_and_ends_does_not_come_back(
    at: DaemonAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place(at.unix_url) as (store, space):
        store_blocks(space, range(4))
        settled(store)
        fence, read = store.stager.fence, device_of(store).read

        def read_and_reset(requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
            outcomes = read(requests)
            with fence.shut():
                store.host.reset(space.digest)
            return outcomes

        monkeypatch.setattr(device_of(store), "read", read_and_reset)
        assert restore(space, range(4)) == {}
        assert store.host.num_blocks == 0
        monkeypatch.undo()
        assert len(restore(space, range(4))) == 4
        settled(store)
        given_back(at.daemon, store)


def test_a_reset_by_one_store_leaves_another_nothing_of_before(at: DaemonAt) -> None:
    with in_place(at.unix_url) as (one, its), in_place(at.unix_url) as (two, others):
        store_blocks(its, range(10))
        settled(one)
        with others.owner("reader") as reader:
            restore(others, range(10), reader)
            one.reset()
            for number, lease in enumerate(others.lease(DIGESTS[:10], reader)):
                assert lease.view[:BLOCK_BYTES] == content(number), "its bytes stay while they are leased"
        settled(two)
        assert restore(others, range(10)) == {}
        assert restore(its, range(10)) == {}
        given_back(at.daemon, one, two)


# ---- the daemon goes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_daemon_that_is_killed_costs_misses_and_no_byte_that_is_leased(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its next run is taken once nobody uses a slot of the one before."""
    caplog.set_level(logging.INFO, "kvtier")
    settings = SIZES | disk_in(directory)
    with ServerProcess(directory, settings) as server, in_place(url_of(server)) as (store, space):
        store_blocks(space, range(40))
        settled(store)
        with AdminClient(f"{server.socket}.admin", "test") as admin:
            admin_flush(admin)
        reader, writer = space.owner("reader"), space.owner("writer")
        restore(space, range(10), reader)
        leases = space.lease(DIGESTS[:10], reader)
        half = reserve(space, 50, writer)
        half.lease.view[:100] = content(50)[:100]
        caplog.clear()
        server.kill()
        while lower_of(store)._guard.breaker.is_closed:
            began = time.monotonic()
            assert restore(space, range(10, 40)) == {}
            assert time.monotonic() - began < TIMEOUT_S
        until("free slots are gone", lambda: num_free(store) == 0)
        assert space.reserve(DIGESTS[60], None, writer) is DropReason.HOST_FULL
        half.lease.view[100:BLOCK_BYTES] = content(50)[100:]
        assert space.commit([half]) == [True]
        assert pool_of(store)._kinds.count(SlotKind.LOST) >= 10
        with ServerProcess(directory, settings | {"host.size": "8MiB"}) as second:
            until("it is tried", lambda: device_of(store).snapshot().errors.get("connection", 0) > 3)
            assert device_of(store).snapshot().mapped_bytes == 16 << 20, "the memory of before is in use"
            assert num_free(store) == 0
            for number, lease in enumerate(leases):
                assert lease.view[:BLOCK_BYTES] == content(number)
            writer.close()
            reader.close()
            stocked(store)
            assert device_of(store).snapshot().mapped_bytes == 8 << 20
            until("it is used again", lambda: lower_of(store)._guard.breaker.is_closed)
            assert len(restore(space, range(40))) == 40, "warm from its disk"
            settled(store)
            store.check_integrity()
            (line,) = warnings_in(caplog)
            assert "it is left alone until it answers again" in line
            store.close()
            second.kill()


def admin_flush(admin: AdminClient) -> None:
    (flushed,) = [each for each in admin.ask(AskFlush(admin.next_id(), 20_000)) if isinstance(each, Flushed)]
    assert flushed.blocks_left == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_while_blocks_are_stored_and_staged_give_no_wrong_byte(directory: Path, seed: int) -> None:
    """Another memory each time: 16, 8 and 4 MiB."""
    settings = SIZES | disk_in(directory)
    server = ServerProcess(directory, settings).start()
    stop, came = threading.Event(), [0]
    failures: list[BaseException] = []

    def work(first: int) -> None:
        number = first
        try:
            while not stop.is_set():
                number = first + (number - first + 7) % 200
                store_blocks(space, range(number, number + 7))
                came[0] += len(restore(space, range(number, number + 7)))  # which looks at every byte
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    with in_place(url_of(server)) as (store, space):
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 400)]
        for thread in threads:
            thread.start()
        try:
            for size in ("8MiB", "4MiB")[seed:]:
                seen = came[0]
                until("blocks come", lambda seen=seen: came[0] > seen + 20 or bool(failures))  # type: ignore[misc]
                server.kill()
                server = ServerProcess(directory, settings | {"host.size": size}).start()
            seen = came[0]
            until("blocks come", lambda: came[0] > seen + 20 or bool(failures))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failures == []
        until("it is at rest", lambda: is_quiet(store) or not store.is_writing)
        assert device_of(store).snapshot().damaged == 0
    server.kill()


@pytest.mark.slow
def test_a_daemon_that_was_stopped_gets_back_what_it_granted_before(directory: Path) -> None:
    """In the middle of a store, with leases: nothing is written into another's slot, and no slot is kept for good."""
    settings = SIZES | {"host.size": "4MiB", "daemon.checksums": False}
    with (
        ServerProcess(directory, settings) as server,
        in_place(url_of(server), server__timeout_s=0.3) as (store, space),
    ):
        store_blocks(space, range(10))
        settled(store)
        owner = space.owner("engine")
        restore(space, range(10), owner)
        half = reserve(space, 50, owner)
        half.lease.view[:100] = b"\xff" * 100
        server.signal(signal.SIGSTOP)
        store_blocks(space, range(20, 30))
        until("the connection is lost", lambda: bool(pool_of(store).lost_eras()))
        server.signal(signal.SIGCONT)
        until("it is used again", lambda: lower_of(store)._guard.breaker.is_closed)
        stocked(store)
        with in_place(url_of(server)) as (other, others):
            stored = store_many(other, others, range(100, 1000))
            assert len(stored) == 900, "more than the daemon's memory takes"
            assert half.lease.offset not in stored.values(), "what was granted before is nobody else's"
            half.lease.view[:BLOCK_BYTES] = b"\xff" * BLOCK_BYTES
            for number in range(980, 1000):
                assert [*restore(others, [number])] == [number]
            for number, lease in enumerate(space.lease(DIGESTS[:10], owner)):
                assert lease.view[:BLOCK_BYTES] == content(number)
            owner.close()
            settled(store)
            until("the daemon has it back", lambda: quarantined(server) == (0, 0))
            assert not pool_of(store).lost_eras()
            restore(others, range(980, 1000))
            settled(other)


def store_many(store: Store, space: Space, numbers: range, already_kept: int = 0) -> dict[int, int]:
    """No more at a time than there are slots at hand; where each lay. already_kept: blocks that are leased here."""
    offsets: dict[int, int] = {}
    for first in numbers[::5]:
        until("there are slots at hand", lambda: num_free(store) >= 5)
        offsets |= store_blocks(space, range(first, min(first + 5, numbers.stop)))
        until("they are published", lambda: not store.is_writing and store.host.num_blocks == already_kept)
    return offsets


def quarantined(server: ServerProcess) -> tuple[int, int]:
    """Slots in the quarantine, and leases, at a daemon that is another process."""
    with AdminClient(f"{server.socket}.admin", "test") as admin:
        parts = [each for each in admin.ask(AskStatus(admin.next_id())) if isinstance(each, StatusPart)]
    (tenant,) = [json.loads(part.document) for part in parts if part.tenant]
    return tenant["quarantine"]["slots"], tenant["clients"]["leases"]


def test_a_daemon_that_hangs_costs_one_timeout_and_no_byte(at: DaemonAt) -> None:
    """Then all that it granted before comes back to it, since this process lives on and says so."""
    with in_place(at.unix_url, server__timeout_s=0.3) as (store, space):
        store_blocks(space, range(10))
        settled(store)
        with space.owner("engine") as owner:
            restore(space, range(10), owner)
            with hung(at.daemon):
                store_blocks(space, range(20, 30))
                began = time.monotonic()
                assert restore(space, range(100, 110)) == {}
                until("the connection is lost", lambda: bool(pool_of(store).lost_eras()))
                assert time.monotonic() - began < 3.0
            until("it is used again", lambda: lower_of(store)._guard.breaker.is_closed)
            stocked(store)
            for number, lease in enumerate(space.lease(DIGESTS[:10], owner)):
                assert lease.view[:BLOCK_BYTES] == content(number)
            store_blocks(space, range(40, 50))
            until("new blocks are published", lambda: held_digests(at.daemon, range(40, 50), space.digest) != [])
            at.daemon.check_integrity()
        settled(store)
        given_back(at.daemon, store)


def test_a_store_that_is_opened_before_the_daemon_joins_it(directory: Path) -> None:
    with in_place(f"kvtier+unix://{directory}/kvtier.sock", waits=False) as (store, space):
        with space.owner("engine") as owner:
            assert space.reserve(DIGESTS[0], None, owner) is DropReason.HOST_FULL
        assert restore(space, range(5)) == {}
        with daemon_at(directory, SIZES):
            stocked(store)
            until("it is used", lambda: lower_of(store)._guard.breaker.is_closed and lower_of(store).is_available)
            store_blocks(space, range(5))
            settled(store)
            assert len(restore(space, range(5))) == 5
            settled(store)
            store.close()


def test_the_first_request_of_a_store_finds_what_others_stored(at: DaemonAt) -> None:
    """However soon it comes: it waits for the server's memory, no longer than for the server."""
    with in_place(at.unix_url) as (one, its):
        store_blocks(its, range(20))
        settled(one)
        for _ in range(5):
            with in_place(at.unix_url, waits=False) as (two, others):
                assert len(restore(others, range(20))) == 20
                assert warned_of_nothing(two)


# ---- the engine goes -------------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from tests.server_tier.in_place_rig import *
store = open_store(sys.argv[1])
space = store.open_space(NAMESPACE)
stocked(store)
store_blocks(space, range(5))
settled(store)
owner = space.owner("engine")
restore(space, range(5), owner)
half = reserve(space, 50, owner)
half.lease.view[:100] = b"x" * 100
print(half.lease.offset, *(lease.offset for lease in space.lease(DIGESTS[:5], owner)), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_slots_of_an_engine_that_is_killed_are_nobodys_before_its_death_and_the_grace(directory: Path) -> None:
    grace_s = 0.5
    with daemon_at(directory, SIZES | {"host.size": "2MiB", "daemon.dma_grace_s": grace_s}) as at:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(
            [sys.executable, "-c", DIES, at.unix_url], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        assert child.stdout is not None
        held = {int(word) for word in child.stdout.readline().split()}
        with in_place(at.unix_url) as (store, space):
            assert held.isdisjoint(store_many(store, space, range(100, 300)).values()), "it is only stopped"
            child.kill()
            child.communicate()
            began = time.monotonic()
            quarantine = at.daemon._hub.quarantine  # type: ignore[union-attr]
            until("its slots are kept", lambda: len(quarantine) == 1, 5.0)
            while len(quarantine):
                offsets = store_many(store, space, range(900, 905))
                store.reset()
                assert held.isdisjoint(offsets.values()) or not len(quarantine)
                assert time.monotonic() - began < DEADLINE_S
            assert time.monotonic() - began >= grace_s
            assert held <= {*store_many(store, space, range(100, 300)).values()}, "now they are free"


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_store_that_is_closed_with_leases_out_takes_no_memory_away(directory: Path) -> None:
    """And does not tell the daemon that it is done with it."""
    with daemon_at(directory, SIZES) as at:
        close_with_leases_out(at)


def close_with_leases_out(at: DaemonAt) -> None:
    store = open_store(at.unix_url)
    space = store.open_space(NAMESPACE)
    stocked(store)
    store_blocks(space, range(10))
    settled(store)
    owner = space.owner("engine")
    restore(space, range(10), owner)
    leases = space.lease(DIGESTS[:10], owner)
    views = [lease.view for lease in leases]
    store.close()
    store.close()
    for number, view in enumerate(views):
        assert view[:BLOCK_BYTES] == content(number)
    until("they are kept for us", lambda: at.daemon.snapshot().tenants[0].quarantine.slots >= 10)
    owner.close()
    with pytest.raises(LeaseError):
        _ = leases[0].view
    assert num_mapped() == 2
    del views, view
    assert num_mapped() == 1


def num_mapped() -> int:
    """Mappings of the daemon's memory, of which the daemon, in this process too, has one."""
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-pool")


def test_a_store_is_closed_within_a_bound_while_the_daemon_hangs(at: DaemonAt) -> None:
    store = open_store(at.unix_url)
    space = store.open_space(NAMESPACE)
    stocked(store)
    store_blocks(space, range(10))
    settled(store)
    with hung(at.daemon):
        store_blocks(space, range(20, 30))
        began = time.monotonic()
        store.close(timeout=0.5)
        assert time.monotonic() - began < 3.0
    until("all is given back", lambda: held_at(at.daemon) == 0)


def test_a_fork_refuses_and_leaves_the_parents_slots_alone(at: DaemonAt) -> None:
    with in_place(at.unix_url) as (store, space):
        store_blocks(space, range(5))
        settled(store)
        child = os.fork()
        if not child:
            code = 1
            try:
                space.lookup(DIGESTS[:1])
            except ForkedError:
                store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(restore(space, range(5))) == 5
        store_blocks(space, range(5, 10))
        settled(store)


def test_opening_and_closing_leaves_nothing_at_either_end(at: DaemonAt) -> None:
    """Threads and descriptors are looked at after each test; here, what is mapped and what is held."""
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for turn in range(10):
        with in_place(at.unix_url) as (store, space):
            store_blocks(space, range(20 * turn, 20 * turn + 20))
            settled(store)
        until("all is given back", lambda: held_at(at.daemon) == 0)
    assert len(Path("/proc/self/maps").read_text().splitlines()) - before < 40
    snapshot = at.daemon.snapshot().tenants[0]
    assert (snapshot.clients.leases, snapshot.clients.reservations, snapshot.quarantine.slots) == (0, 0, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"server__url": "kvtier+tcp://127.0.0.1:9"}, "set server.url to its socket"),
        ({"server__url": "none"}, "set server.url to its socket"),
        ({"host__pin": "require"}, "host.pin is for memory of this process's own"),
        ({"host__quotas": "a=1MiB"}, "see daemon.tenants"),
    ],
)
def test_settings_that_do_not_go_with_the_servers_memory(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_store("kvtier+unix:///run/none", **settings)
    assert words in str(raised.value)


def test_a_lease_that_ends_while_its_slot_is_found_idle_goes_once(at: DaemonAt) -> None:
    """Threads lease and let go of the same blocks while they are forgotten."""
    with in_place(at.unix_url) as (store, space):
        store_blocks(space, range(20))
        settled(store)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for turn in range(30):
                    first = (7 * seed + turn) % 15
                    assert len(restore(space, range(first, first + 3))) in (0, 1, 2, 3)
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        settled(store)
        given_back(at.daemon, store)
        assert pool_of(store).usage().used_bytes == 0


def test_a_daemon_ends_though_a_store_connects_just_then(directory: Path) -> None:
    """Whoever comes as it stops is let go of before anything is begun with it."""
    with daemon_at(directory, SIZES | {"daemon.drain_s": 0.1}) as at, socket.socket(socket.AF_UNIX) as client:
        with hung(at.daemon):
            client.connect(str(directory / "kvtier.sock"))
            at.daemon.stop()
        assert at.daemon._thread is not None
        at.daemon._thread.join(DEADLINE_S)
        assert not at.daemon._thread.is_alive()
        client.settimeout(DEADLINE_S)
        assert client.recv(1) == b""
