"""The store: one pool for several spaces, epochs, and what becomes of it in forks, at exit and after close."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import HostSettings, MemorySnapshot, Settings, load_settings
from kvtier.errors import ClosedError, ConfigError, LayoutError
from kvtier.keys import BlockDigest, Extras, Key, MediaItem, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.memory import PAGE_BYTES
from kvtier.reasons import DropReason, MissReason
from kvtier.store import Lookup, Space, Store
from kvtier.tiers.reservation import Eviction, Reservation

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)  # 4 KiB a block
NAMESPACE = Namespace(model="weights", revision="r1", layout=LAYOUT, group="main", shard=Shard(0, 1))
BASE = Extras(adapter=None, salt=None, media=())
EXIT_S = 5.0


def make_store(blocks: int = 8, slab_blocks: int = 4) -> Store:
    return Store(
        Settings(host=HostSettings(size=blocks * PAGE_BYTES, slab=slab_blocks * PAGE_BYTES)),
        memory=MemorySnapshot(1 << 34, 1 << 34),
        touch=False,
    )


@pytest.fixture
def store() -> Iterator[Store]:
    """Eight blocks of 4 KiB."""
    store = make_store()
    yield store
    store.check_integrity()
    store.close()


@pytest.fixture
def space(store: Store) -> Space:
    return store.open_space(NAMESPACE)


def prompt(first: int, blocks: int = 1, extras: Extras = BASE) -> list[BlockDigest]:
    return digest_tokens(range(first, first + 4 * blocks), 4, extras)


def content(digest: bytes, nbytes: int) -> bytes:
    return random.Random(digest).randbytes(nbytes)


def put(space: Space, digests: Sequence[BlockDigest]) -> None:
    with space.owner("put") as owner:
        for digest, parent in zip(digests, [None, *digests], strict=False):
            reservation = space.reserve(digest, parent, owner)
            assert isinstance(reservation, Reservation)
            reservation.lease.view[: space.block_bytes] = content(digest, space.block_bytes)
            assert space.commit([reservation]) == [True]


def verify_bytes(space: Space, digests: Sequence[BlockDigest]) -> None:
    with space.owner("get") as owner:
        leases = space.lease(digests, owner)
        assert len(leases) == len(digests)
        for lease, digest in zip(leases, digests, strict=True):
            assert lease.view[: space.block_bytes] == content(digest, space.block_bytes)
            assert space.buffer[lease.offset : lease.offset + space.block_bytes].tobytes() == content(
                digest, space.block_bytes
            )


def found(space: Space, digests: Sequence[BlockDigest]) -> Lookup:
    answer = space.lookup(digests).poll()
    assert answer is not None
    return answer


# ---- lookups ---------------------------------------------------------------------------------------------------------


def test_a_lookup_says_how_far_and_why_no_further(space: Space) -> None:
    digests = prompt(0, 4)
    assert found(space, digests) == Lookup(0, MissReason.ABSENT)
    put(space, digests[:2])
    assert found(space, digests) == Lookup(2, MissReason.ABSENT)
    owner = space.owner("test")
    reservation = space.reserve(digests[2], digests[1], owner)
    assert found(space, digests) == Lookup(2, MissReason.BEING_STORED)
    assert isinstance(reservation, Reservation)
    space.abort(reservation)
    put(space, digests[2:])
    assert found(space, digests) == Lookup(4, None)
    assert found(space, []) == Lookup(0, None)
    for first in range(1000, 1008):
        put(space, prompt(first))
    assert found(space, digests) == Lookup(0, MissReason.EVICTED)
    verify_bytes(space, prompt(1007))


def test_a_lookup_is_pure(store: Store, space: Space) -> None:
    old = prompt(0)
    put(space, old)
    for first in range(1000, 1007):
        put(space, prompt(first))
    before = store.stats()
    for _ in range(10):
        assert found(space, old) == Lookup(1, None)
        assert space.holds(old[0])
    assert store.stats() == before
    put(space, prompt(2000))
    assert found(space, old) == Lookup(0, MissReason.EVICTED)


def test_a_lease_counts_as_a_use(space: Space) -> None:
    old = prompt(0)
    put(space, old)
    for first in range(1000, 1007):
        put(space, prompt(first))
    verify_bytes(space, old)
    put(space, prompt(2000))
    assert found(space, old) == Lookup(1, None)
    assert found(space, prompt(1000)) == Lookup(0, MissReason.EVICTED)


def test_holds_is_true_from_the_reservation_on(space: Space) -> None:
    (digest,) = prompt(0)
    owner = space.owner("test")
    assert not space.holds(digest)
    reservation = space.reserve(digest, None, owner)
    assert space.holds(digest)
    assert isinstance(reservation, Reservation)
    space.abort(reservation)
    assert not space.holds(digest)


@pytest.mark.bug("CR20")
def test_of_two_owners_of_one_key_one_stores(space: Space) -> None:
    (digest,) = prompt(0)
    one, two = space.owner("one"), space.owner("two")
    first = space.reserve(digest, None, one)
    assert space.reserve(digest, None, two) is DropReason.ALREADY_STORED
    assert isinstance(first, Reservation)
    first.lease.view[:] = content(digest, space.block_bytes)
    assert space.commit([first]) == [True]
    assert space.reserve(digest, None, two) is DropReason.ALREADY_STORED
    verify_bytes(space, [digest])


# ---- what must never share -------------------------------------------------------------------------------------------


@pytest.mark.bug("WR03", "WR05", "WR07")
@pytest.mark.parametrize(
    "other",
    [
        Extras("adapter A", None, ()),
        Extras("adapter B", None, ()),
        Extras("", None, ()),
        Extras(None, "salt", ()),
        Extras(None, "", ()),
        Extras(None, None, (MediaItem(b"image", 0, 4),)),
    ],
)
def test_other_extras_find_nothing_and_their_own_everything(space: Space, other: Extras) -> None:
    put(space, prompt(0, 2))
    assert found(space, prompt(0, 2, other)) == Lookup(0, MissReason.ABSENT)
    put(space, prompt(0, 2, other))
    assert found(space, prompt(0, 2, other)) == found(space, prompt(0, 2)) == Lookup(2, None)
    verify_bytes(space, prompt(0, 2, other))
    verify_bytes(space, prompt(0, 2))


@pytest.mark.bug("WR09", "WR11")
@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "r2"},
        {"group": "other"},
        {"shard": Shard(0, 2)},
        {"shard": Shard(1, 2)},
        {"layout": dataclasses.replace(LAYOUT, dtype="bfloat16")},
        {"layout": dataclasses.replace(LAYOUT, dtype="int8")},
        {"layout": dataclasses.replace(LAYOUT, num_kv_heads=2, head_dim=128)},
    ],
)
def test_other_namespaces_find_nothing(store: Store, space: Space, change: dict[str, Any]) -> None:
    put(space, prompt(0))
    other = store.open_space(dataclasses.replace(NAMESPACE, **change))
    assert found(other, prompt(0)) == Lookup(0, MissReason.ABSENT)
    put(other, prompt(0))
    verify_bytes(space, prompt(0))
    verify_bytes(other, prompt(0))


@pytest.mark.bug("WR25")
def test_groups_of_other_block_sizes_share_a_store_and_come_back_whole() -> None:
    wide = dataclasses.replace(LAYOUT, num_layers=3, block_tokens=4, head_dim=200)  # 9600 bytes: no whole page
    with make_store(blocks=16) as store:
        spaces = [
            store.open_space(NAMESPACE),
            store.open_space(dataclasses.replace(NAMESPACE, group="wide", layout=wide)),
        ]
        for space in spaces:
            put(space, prompt(0, 2))
        for space in spaces:
            verify_bytes(space, prompt(0, 2))
        store.check_integrity()
        assert [space.capacity_blocks for space in spaces] == [16, 4]


def test_a_block_that_fits_no_slab_is_refused_at_opening_by_name(store: Store) -> None:
    with pytest.raises(LayoutError, match=r"host\.slab"):
        store.open_space(dataclasses.replace(NAMESPACE, layout=dataclasses.replace(LAYOUT, num_layers=5)))


# ---- reset -----------------------------------------------------------------------------------------------------------


@pytest.mark.bug("WR23")
def test_after_a_reset_nothing_stored_before_is_found(store: Store, space: Space) -> None:
    other = store.open_space(dataclasses.replace(NAMESPACE, group="other"))
    put(space, prompt(0, 3))
    put(other, prompt(0, 2))
    digest, owner = space.digest, space.owner("copy")
    filling = space.reserve(prompt(100)[0], None, owner)
    assert isinstance(filling, Reservation)
    assert store.reset() == 6
    assert (store.epoch, store.stats().resets) == (1, 1)
    assert space.digest != digest
    for each in (space, other):
        assert found(each, prompt(0, 3)) == Lookup(0, MissReason.ABSENT)
        assert each.lease(prompt(0, 3), owner) == []
    assert space.commit([filling]) == [False]
    assert found(space, prompt(100)) == Lookup(0, MissReason.ABSENT)
    assert store.stats().stored_blocks == 5
    put(space, prompt(0, 3))
    verify_bytes(space, prompt(0, 3))


@pytest.mark.bug("WR22", "WR23")
def test_a_lease_outlives_a_reset_with_its_bytes(store: Store, space: Space) -> None:
    (digest,) = prompt(0)
    put(space, [digest])
    owner = space.owner("reader")
    (lease,) = space.lease([digest], owner)
    store.reset()
    for first in range(1000, 1010):
        put(space, prompt(first))
    assert lease.view == content(digest, space.block_bytes)
    owner.close()


def test_a_space_opened_after_a_reset_is_of_the_new_epoch(store: Store, space: Space) -> None:
    store.reset()
    put(space, prompt(0))
    verify_bytes(store.open_space(NAMESPACE), prompt(0))


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_a_space_hears_of_its_own_evictions_until_it_ends_that(store: Store, space: Space) -> None:
    other = store.open_space(dataclasses.replace(NAMESPACE, group="other"))
    gone: list[Eviction] = []
    end = space.on_evict(gone.extend)
    put(space, prompt(0))
    put(other, prompt(0))
    for first in range(1000, 1008):
        put(other, prompt(first))
    assert gone == [Eviction(space.digest, prompt(0)[0])]
    put(space, prompt(0))
    end()
    for first in range(2000, 2008):
        put(other, prompt(first))
    assert not space.holds(prompt(0)[0])
    assert len(gone) == 1


@pytest.mark.bug("LK05")
@pytest.mark.parametrize("write_fails", [False, True])
def test_a_write_behind_consumer_keeps_a_slot_until_written_or_dropped(
    store: Store, space: Space, write_fails: bool
) -> None:
    queue: list[Key] = []
    consumer = space.owner("write-behind")
    end = store.host.subscribe(
        on_commit=lambda pairs, came_from: queue.extend(
            key for key, _ in pairs if store.host.lease_run(key[:16], [BlockDigest(key[16:])], consumer)
        )
    )
    digests = prompt(0, 8)
    put(space, digests)
    assert len(queue) == store.stats().leases == 8
    with space.owner("late") as owner:
        assert space.reserve(prompt(500)[0], None, owner) is DropReason.HOST_FULL
    verify_bytes(space, digests)
    end()
    consumer.close()  # written or dropped: the end is the same
    assert store.stats().leases == 0
    for first in range(1000, 1008):
        put(space, prompt(first))
    assert store.stats().evicted_blocks == 8
    assert found(space, digests) == Lookup(0, MissReason.EVICTED)


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_closed_store_refuses_and_may_be_closed_again() -> None:
    store = make_store()
    space = store.open_space(NAMESPACE)
    put(space, prompt(0))
    owner = space.owner("test")
    reservation = space.reserve(prompt(4)[0], None, owner)
    assert isinstance(reservation, Reservation)
    store.close()
    store.close()
    for call in (
        lambda: space.lookup(prompt(0)),
        lambda: space.lease(prompt(0), owner),
        lambda: space.reserve(prompt(8)[0], None, owner),
        lambda: space.commit([reservation]),
        lambda: store.open_space(NAMESPACE),
        store.reset,
        lambda: space.buffer,
        lambda: reservation.lease.view,
    ):
        with pytest.raises(ClosedError):
            call()
    space.abort(reservation)
    owner.close()
    assert store.stats().stored_blocks == 1
    assert store.stats().leases == 0


def test_settings_that_cannot_work_leave_nothing_open() -> None:
    with pytest.raises(ConfigError, match=r"host\.size"):
        Store(Settings(host=HostSettings(size=1 << 30, slab=1 << 20)), memory=MemorySnapshot(1 << 20, 1 << 20))


def test_a_store_that_cannot_be_built_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pool: object, **options: object) -> None:
        raise RuntimeError("no tier")

    monkeypatch.setattr("kvtier.store.HostTier", fail)
    with pytest.raises(RuntimeError, match="no tier") as caught:
        make_store()
    assert caught.traceback  # holds the pool's objects, which must be closed all the same
    assert "memfd:kvtier-pool" not in Path("/proc/self/maps").read_text()


STORE_IN_A_PROCESS = """
import os, signal, sys, threading
from kvtier.config import HostSettings, Settings
from kvtier.errors import ForkedError
from kvtier.executor import ThreadExecutor
from kvtier.keys import Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.memory import PoolMemory
from kvtier.store import Store
executor = ThreadExecutor("copies", 4)
layout = KVLayout(1, 1, 256, "float16", 4)
store = Store(Settings(host=HostSettings(size=256 << 20, slab=1 << 20)))
space = store.open_space(Namespace("m", "r", layout, "g", Shard(0, 1)))
digests = digest_tokens(range(8), 4, Extras(None, None, ()))
owner = space.owner("test")
reservation = space.reserve(digests[0], None, owner)
reservation.lease.view[:] = b"x" * 4096
space.commit([reservation])
filling = space.reserve(digests[1], digests[0], owner)
def copy_for_ever():
    begun = threading.Event()
    executor.try_submit(lambda: begun.set() or threading.Event().wait(), urgent=False)
    begun.wait(30)
"""


@contextlib.contextmanager
def start(code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", STORE_IN_A_PROCESS + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # no harm to one that ended


def test_a_forked_child_is_refused_and_the_parent_unharmed() -> None:
    code = """
store.memory.wait_touched(60)
locks = [store.host._lock, store._counters.lock, store.pool._lock]
for lock in locks:
    lock.acquire()  # as another thread may have, when the process forks
child = os.fork()
if not child:
    signal.alarm(30)
    calls = [
        lambda: space.lookup(digests), lambda: space.lease(digests, owner), lambda: space.holds(digests[0]),
        lambda: space.reserve(digests[1], None, owner), lambda: space.commit([]), store.reset, store.stats,
        lambda: store.open_space(space.namespace),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except ForkedError:
            refused += 1
    store.close()
    os._exit(0 if refused == len(calls) else 1)
for lock in locks:
    lock.release()
print(os.waitpid(child, 0)[1], space.lookup(digests).poll().num_blocks)
space.commit([filling])
print(space.lookup(digests).poll().num_blocks)
store.close()
"""
    with start(code) as process:
        out, error = process.communicate(timeout=60)
    assert (out.split(), error, process.returncode) == (["0", "1", "2"], "", 0)


@pytest.mark.bug("HS10")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('up', flush=True)", 0),
        ("print('up', flush=True); raise RuntimeError('the script failed')", 1),
        ("print('up', flush=True); sys.exit(3)", 3),
        ("threading.Thread(target=print, args=('up',), kwargs={'flush': True}).start()", 0),
        ("print('up', flush=True); copy_for_ever()", 0),
    ],
)
def test_a_process_that_never_closes_its_store_ends(code: str, status: int) -> None:
    with start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.communicate(timeout=EXIT_S)
    assert process.returncode == status


@pytest.mark.bug("HS10")
def test_a_process_whose_pool_is_still_being_touched_ends() -> None:
    code = """
store.memory.wait_touched(60)
begun = threading.Event()
PoolMemory._populate = lambda *_: begun.set() or threading.Event().wait()
Store(Settings(host=HostSettings(size=1 << 20, slab=1 << 20)))
begun.wait(30)
print("up", flush=True)
"""
    with start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.communicate(timeout=EXIT_S)
    assert process.returncode == 0


@pytest.mark.bug("HS10")
@pytest.mark.parametrize("handled", [False, True])
def test_a_process_told_to_end_during_a_store_ends(handled: bool) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" if handled else ""
    with start(handler + "print('up', flush=True)\nsignal.pause()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=EXIT_S)
    assert process.returncode == (7 if handled else -signal.SIGTERM)


def test_a_pool_larger_than_what_is_available_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemorySnapshot(total_bytes=1 << 30, available_bytes=1 << 20)
    settings = load_settings(env={}, overrides={"host.size": "2MiB", "host.slab": "64KiB"})
    with Store(settings, memory=memory, touch=False):
        pass
    (record,) = [record for record in caplog.records if record.name == "kvtier.store"]
    assert "host.size" in record.getMessage()
    assert "available" in record.getMessage()


def test_settings_of_another_kind_are_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="load_settings"):
        Store({"host.size": "1GiB"})  # type: ignore[arg-type]
