"""A store with a disk tier: across processes, restarts, resets and forks, over devices that hang."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier import lower as lower_module
from kvtier.config import MemorySnapshot, Settings, load_settings
from kvtier.errors import ClosedError, ConfigError, KVTierError, TierError
from kvtier.keys import BlockDigest, Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.memory import PAGE_BYTES
from kvtier.metrics import DiskStats
from kvtier.reasons import MissReason
from kvtier.stage import Stage
from kvtier.store import Lookup, Space, Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.testing.files import Fault, FaultyFiles
from kvtier.tiers.reservation import Reservation

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)  # 4 KiB a block
NAMESPACE = Namespace(model="weights", revision="r1", layout=LAYOUT, group="main", shard=Shard(0, 1))
BASE = Extras(adapter=None, salt=None, media=())
EXIT_S = 5.0
LATE_S = 3.0

OpenStore = Callable[..., Store]


def disk_settings(path: Path, blocks: int = 16, **overrides: Any) -> Settings:
    sizes = {"host.size": blocks * PAGE_BYTES, "host.slab": PAGE_BYTES, "disk.path": [str(path)]}
    sizes |= {"disk.size": "4MiB", "disk.min_free": 1}
    return load_settings(env={}, overrides=sizes | {k.replace("__", "."): v for k, v in overrides.items()})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def open_store(directory: Path) -> Iterator[OpenStore]:
    """Stores over one directory, whose jobs run when told, unless with threads."""
    with contextlib.ExitStack() as stack:

        def make(*, threads: bool = False, files: FaultyFiles | None = None, **overrides: Any) -> Store:
            store = Store(
                disk_settings(directory, **overrides),
                memory=MemorySnapshot(1 << 34, 1 << 34),
                touch=False,
                clock=None if threads else FakeClock(),
                disk_executor=None if threads else ManualExecutor(),
                disk_files=files,
            )
            stack.callback(store.close)
            return store

        yield make


def jobs(store: Store) -> ManualExecutor:
    executor = store.lower[0].executor
    assert isinstance(executor, ManualExecutor)
    return executor


def disk(store: Store) -> DiskStats:
    stats = store.stats().disk
    assert stats is not None
    return stats


def prompt(first: int, blocks: int = 1) -> list[BlockDigest]:
    return digest_tokens(range(first, first + 4 * blocks), 4, BASE)


def content(digest: bytes, nbytes: int) -> bytes:
    return random.Random(digest).randbytes(nbytes)


def put(space: Space, digests: Sequence[BlockDigest], salt: bytes = b"") -> None:
    with space.owner("put") as owner:
        for digest, parent in zip(digests, [None, *digests], strict=False):
            reservation = space.reserve(digest, parent, owner)
            if isinstance(reservation, Reservation):
                reservation.lease.view[: space.block_bytes] = content(digest + salt, space.block_bytes)
                assert space.commit([reservation]) == [True]


def write_all(store: Store) -> None:
    """What is due below, in as many rounds as little may wait at once."""
    for _ in range(100):
        jobs(store).run_all()
        if not store.flush(0.0):
            return
    raise AssertionError("some blocks are never written")


def begin(space: Space, digests: Sequence[BlockDigest], wait_s: float = 5.0) -> Stage | None:
    return space.stage("request", digests, None, wait_s)


def fetch(store: Store, space: Space, digests: Sequence[BlockDigest], salt: bytes = b"") -> int:
    """Bring what there is to host memory; how many leading blocks, each with its own bytes."""
    stage = begin(space, digests)
    if stage is not None:
        jobs(store).run_all()
        assert stage.poll()
    with space.owner("fetch") as owner:
        leases = space.lease(digests, owner)
        if stage is not None:
            stage.close()
        for lease, digest in zip(leases, digests, strict=False):
            assert lease.view[: space.block_bytes] == content(digest + salt, space.block_bytes)
    store.check_integrity()
    return len(leases)


def found(space: Space, digests: Sequence[BlockDigest]) -> Lookup:
    answer = space.lookup(digests).poll()
    assert answer is not None
    return answer


# ---- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.bug("AC10")
def test_what_was_stored_is_found_after_a_restart(open_store: OpenStore) -> None:
    store = open_store()
    space = store.open_space(NAMESPACE)
    put(space, prompt(0, 6))
    write_all(store)
    store.close()
    again = open_store()
    space = again.open_space(NAMESPACE)
    assert disk(again).recovered_blocks == 6
    assert found(space, prompt(0, 6)) == Lookup(0, MissReason.NOT_STAGED)
    assert not space.holds(prompt(0)[0])
    assert space.reaches(prompt(0)[0])
    assert fetch(again, space, prompt(0, 6)) == 6
    assert disk(again).reads == {"ok": 6}
    assert disk(again).writes == {}, "what came from there is not written there"
    assert again.stats().leases == 0


WR01_STORE = """
import sys
from kvtier.config import MemorySnapshot, load_settings
from kvtier.keys import Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.store import Store
space_of = Namespace("weights", "r1", KVLayout(1, 1, 256, "float16", 4), "main", Shard(0, 1))
settings = load_settings(env={}, overrides={
    "host.size": 65536, "host.slab": 4096, "disk.path": [sys.argv[1]], "disk.size": "4MiB", "disk.min_free": 1})
digests = digest_tokens(range(32), 4, Extras(None, None, ()))
store = Store(settings)
space = store.open_space(space_of)
"""
PUT_IN_A_PROCESS = """
owner = space.owner("put")
for digest, parent in zip(digests, [None, *digests]):
    reservation = space.reserve(digest, parent, owner)
    reservation.lease.view[:] = digest * 128
    space.commit([reservation])
print(store.flush(30.0))
store.close()
"""
GET_IN_A_PROCESS = """
import threading
import time
stage = space.stage("get", digests, None, 30.0)
while not stage.poll():
    time.sleep(0.001)
leases = space.lease(digests, space.owner("get"))
print(sum(bytes(lease.view) == digest * 128 for lease, digest in zip(leases, digests)))
del leases
stage.close()
store.close()
"""


def run(code: str, directory: Path, seed: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", WR01_STORE + code, str(directory)],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout.strip()


@pytest.mark.bug("WR01", "AC10")
def test_what_one_process_stored_another_finds_whatever_its_hash_seed(directory: Path) -> None:
    assert run(PUT_IN_A_PROCESS, directory, "1") == "0"
    assert run(GET_IN_A_PROCESS, directory, "2") == "8"
    assert run(GET_IN_A_PROCESS, directory, "random") == "8"


@pytest.mark.bug("WR09", "WR11", "WR12")
@pytest.mark.parametrize(
    "change",
    [
        {"layout": dataclasses.replace(LAYOUT, dtype="bfloat16")},
        {"layout": dataclasses.replace(LAYOUT, dtype="int8")},
        {"layout": dataclasses.replace(LAYOUT, num_kv_heads=2, head_dim=128)},
        {"shard": Shard(0, 2)},
        {"shard": Shard(1, 2)},
        {"shard": Shard(0, 4)},
        {"model": "other"},
        {"revision": "r2"},
    ],
)
def test_other_layouts_and_shards_miss_on_one_directory_and_keep_their_own(
    open_store: OpenStore, change: dict[str, Any]
) -> None:
    other = dataclasses.replace(NAMESPACE, **change)
    for namespace, salt in ((NAMESPACE, b"one"), (other, b"two")):
        store = open_store()
        space = store.open_space(namespace)
        assert begin(space, prompt(0, 3)) is None
        assert found(space, prompt(0, 3)) == Lookup(0, MissReason.ABSENT)
        space.count_lookup(3, 0, MissReason.ABSENT)
        assert (store.stats().misses, store.stats().errors) == ({"absent": 3}, {})
        put(space, prompt(0, 3), salt)
        jobs(store).run_all()
        store.close()
    for namespace, salt in ((NAMESPACE, b"one"), (other, b"two")):
        store = open_store()
        assert fetch(store, store.open_space(namespace), prompt(0, 3), salt) == 3
        store.close()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def real_bytes(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.iterdir())


@pytest.mark.bug("AC06")
def test_the_disk_never_takes_more_than_it_was_given_restarts_included(open_store: OpenStore, directory: Path) -> None:
    size = 1 << 20
    store = open_store(disk__size=size)
    space = store.open_space(NAMESPACE)
    for first in range(0, 3000, 4):
        put(space, prompt(100_000 + first))
        jobs(store).run_all()
        if first % 100 == 0:
            assert real_bytes(directory) <= size
            assert disk(store).used_bytes <= disk(store).capacity_bytes == size
    stats = disk(store)
    assert stats.evicted_blocks > 300
    assert stats.blocks == stats.ledger.stored - stats.evicted_blocks
    store.close()
    smaller = open_store(disk__size=size * 7 // 8)
    assert real_bytes(directory) <= size * 7 // 8
    assert 0 < disk(smaller).recovered_blocks <= stats.blocks
    assert fetch(smaller, smaller.open_space(NAMESPACE), prompt(102_996)) == 1, "the newest are kept"


@pytest.mark.bug("PF05")
def test_what_is_on_disk_or_on_its_way_is_not_written_again(open_store: OpenStore) -> None:
    store = open_store(blocks=4)
    space = store.open_space(NAMESPACE)
    for _ in range(10):
        put(space, prompt(0, 3))
        write_all(store)
        for first in range(1000, 1016, 4):
            put(space, prompt(first))
            write_all(store)
    stats = disk(store)
    assert stats.writes["stored"] == stats.blocks == 7
    assert stats.written_bytes == 7 * PAGE_BYTES
    assert set(stats.writes) == {"stored", "already_stored"}


# ---- reset -----------------------------------------------------------------------------------------------------------


def with_jobs_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = jobs(store).try_submit

    def at_once(job: Callable[[], None], *, urgent: bool) -> bool:
        accepted = submit(job, urgent=urgent)
        jobs(store).run_all()
        return accepted

    monkeypatch.setattr(jobs(store), "try_submit", at_once)


@pytest.mark.bug("WR23")
def test_a_reset_reaches_the_disk_and_outlives_restarts(
    open_store: OpenStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    space = store.open_space(NAMESPACE)
    put(space, prompt(0, 8))
    write_all(store)
    with_jobs_at_once(store, monkeypatch)
    digest = space.digest
    store.reset()
    assert (store.epoch, disk(store).blocks) == (1, 0)
    assert space.digest != digest
    assert begin(space, prompt(0, 8)) is None
    store.close()
    again = open_store()
    assert again.epoch == 1
    assert (disk(again).recovered_blocks, disk(again).blocks) == (0, 0)
    space = again.open_space(NAMESPACE)
    assert found(space, prompt(0, 8)) == Lookup(0, MissReason.ABSENT)
    put(space, prompt(0, 2))
    jobs(again).run_all()
    again.close()
    last = open_store()
    assert fetch(last, last.open_space(NAMESPACE), prompt(0, 8)) == 2


@pytest.mark.bug("WR23")
def test_a_reset_that_the_disk_cannot_remember_says_so_in_time_and_serves_nothing_old(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_module, "RESET_TIMEOUT_S", 0.1)
    files = FaultyFiles()
    store = open_store(threads=True, files=files)
    space = store.open_space(NAMESPACE)
    put(space, prompt(0, 4))
    assert store.flush(20.0) == 0
    files.hold("write")
    begun = time.monotonic()
    try:
        with pytest.raises(TierError, match="did not remember the reset within"):
            store.reset()
        assert time.monotonic() - begun < LATE_S
        assert store.epoch == 1
        assert begin(space, prompt(0, 4)) is None
        assert found(space, prompt(0, 4)) == Lookup(0, MissReason.ABSENT)
    finally:
        files.heal()
    monkeypatch.undo()
    store.reset()
    assert store.lower[0].epoch == store.epoch == 2
    store.close()
    assert open_store().epoch == 2


@pytest.mark.bug("WR23")
def test_resets_of_a_shared_store_at_once_all_succeed(open_store: OpenStore) -> None:
    store = open_store(threads=True)
    failures: list[KVTierError] = []

    def reset() -> None:
        try:
            store.reset()
        except KVTierError as error:
            failures.append(error)

    threads = [threading.Thread(target=reset) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.epoch == 8
    assert store.lower[0].epoch == 8


def test_a_reset_that_the_device_refuses_is_an_error_with_its_cause(open_store: OpenStore) -> None:
    files = FaultyFiles()
    store = open_store(threads=True, files=files)
    files.inject(Fault.WRITE_ERROR)
    with pytest.raises(TierError, match="could not remember the reset"):
        store.reset()
    files.heal()
    store.reset()
    assert store.epoch == store.lower[0].epoch == 2


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_store_closes_in_time_over_a_device_that_hangs(open_store: OpenStore, what: str) -> None:
    open_store().close()
    files = FaultyFiles()
    store = open_store(threads=True, files=files)
    space = store.open_space(NAMESPACE)
    put(space, prompt(0, 4))
    assert store.flush(20.0) == 0
    store.host.reset(space.digest)
    files.hold(what)
    try:
        if what == "read":
            assert begin(space, prompt(0, 4)) is not None
        else:
            put(space, prompt(100, 4))
        files.wait_stalled()
        begun = time.monotonic()
        assert store.flush(0.2) == (0 if what == "read" else 4)
        store.close(0.3)
        assert time.monotonic() - begun < LATE_S
        with pytest.raises(ClosedError):
            begin(space, prompt(0))
    finally:
        files.heal()


def test_a_directory_in_use_is_refused_and_nothing_stays_open(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(ConfigError, match=r"disk\.path"):
        open_store()
    store.close()
    open_store()


def test_a_store_that_cannot_be_built_gives_its_directory_back(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("store.HostTier", "below.LowerTier", "store.PoolMemory"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvtier.{name}", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no")))
            with pytest.raises(RuntimeError, match="no"):
                open_store()
    open_store()


HANG = """
import signal, threading
from kvtier.tiers.disk import Files
class Hanging(Files):
    def pwritev(self, fd, vectors, offset):
        if hangs:
            begun.set()
            threading.Event().wait()
        return super().pwritev(fd, vectors, offset)
    def preadv(self, fd, vectors, offset):
        if hangs:
            begun.set()
            threading.Event().wait()
        return super().preadv(fd, vectors, offset)
hangs = False
begun = threading.Event()
store.close()
store = Store(settings, disk_files=Hanging())
space = store.open_space(space_of)
owner = space.owner("put")
def put():
    reservation = space.reserve(digests[0], None, owner)
    reservation.lease.view[:] = digests[0] * 128
    space.commit([reservation])
"""


@pytest.mark.bug("HS10")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("put()\nprint('up', flush=True)", 0),
        ("put()\nprint('up', flush=True)\nraise RuntimeError('the script failed')", 1),
        ("hangs = True\nput()\nbegun.wait(30)\nprint('up', flush=True)", 0),
        ("hangs = True\nput()\nbegun.wait(30)\nprint('up', flush=True)\nstore.close(0.5)", 0),
        (
            """
put()
store.flush(30)
store.host.reset(space.digest)
hangs = True
stage = space.stage('get', digests[:1], None, 30.0)
begun.wait(30)
print('up', flush=True)
""",
            0,
        ),
    ],
)
def test_a_process_that_leaves_without_close_ends(directory: Path, code: str, status: int) -> None:
    command = [sys.executable, "-c", WR01_STORE + HANG + code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.communicate(timeout=EXIT_S)
        finally:
            process.kill()
    assert process.returncode == status
    with Store(disk_settings(directory), memory=MemorySnapshot(1 << 34, 1 << 34), touch=False) as store:
        store.check_integrity()


FORK = """
import os, signal
from kvtier.errors import ForkedError
owner = space.owner("put")
reservation = space.reserve(digests[0], None, owner)
reservation.lease.view[:] = digests[0] * 128
space.commit([reservation])
assert store.flush(30) == 0
lower = store.lower[0]
locks = [store.host._lock, store._counters.lock, store.pool._lock, lower.device._catalog.lock, lower.executor._wake]
for lock in locks:
    lock.acquire()  # as another thread may have, when the process forks
child = os.fork()
if not child:
    signal.alarm(30)
    calls = [
        lambda: space.lookup(digests), lambda: space.stage("x", digests, None, 1.0), lambda: space.holds(digests[0]),
        lambda: space.reaches(digests[0]), lambda: space.note_use(digests, None), store.reset, store.stats,
        lambda: store.flush(1.0), lambda: store.open_space(space.namespace), lambda: space.lease(digests, owner),
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
print(os.waitpid(child, 0)[1])
store.host.reset(space.digest)
stage = space.stage("x", digests, None, 30.0)
import threading
import time
while not stage.poll():
    time.sleep(0.001)
print(bytes(space.lease(digests[:1], owner)[0].view) == digests[0] * 128)
stage.close()
store.close()
"""


def test_a_forked_child_is_refused_and_the_parent_unharmed(directory: Path) -> None:
    code = WR01_STORE + FORK
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout.split(), result.stderr, result.returncode) == (["0", "True"], "", 0)
