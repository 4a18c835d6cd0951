"""Stores over a daemon in a process of its own: what one stored another finds, and kill -9 at either end."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import load_settings
from kvtier.keys import BlockDigest, Namespace, Shard, make_key
from kvtier.layout import KVLayout
from kvtier.store import Space, Store
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.reservation import Reservation
from kvtier.tiers.server.copies import Bytes, copy_in
from tests.server.daemon_rig import ServerProcess, short_directory
from tests.server_tier.rig import get, opened, put, until

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=16)
NAMESPACE = Namespace("m", "r", LAYOUT, "g", Shard(0, 1))
DIGESTS = [BlockDigest(bytes([number]) * 32) for number in range(100)]
DEADLINE_S = 30.0
TIMEOUT_S = 1.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def url_of(server: ServerProcess) -> str:
    return f"kvtier+unix://{server.socket}"


def open_store(server: ServerProcess, **settings: object) -> Store:
    overrides = {
        "host.size": "4MiB",
        "host.slab": "1MiB",
        "server.url": url_of(server),
        "server.timeout_s": TIMEOUT_S,
    }
    return Store(load_settings(env={}, overrides=overrides | settings))


def content(number: int, nbytes: int) -> bytes:
    return bytes([number, 255 - number]) * (nbytes // 2)


def store_blocks(space: Space, numbers: range) -> None:
    with space.owner("test") as owner:
        for number in numbers:
            parent = DIGESTS[number - 1] if number else None
            reserved = space.reserve(DIGESTS[number], parent, owner)
            if isinstance(reserved, Reservation):
                reserved.lease.view[:] = content(number, len(reserved.lease.view))
                space.commit([reserved])


def restore(space: Space, digests: list[BlockDigest]) -> int:
    """Bring them to host memory; how many came, each with its own bytes."""
    questions = space.ask(digests, space.locate(digests))
    until("questions are answered", lambda: all(question.done for question in questions))
    stage = space.stage("r", digests, None, DEADLINE_S, space.locate(digests))
    if stage is None:
        return 0
    until("the stage ends", stage.poll)
    with space.owner("reader") as owner:
        leases = space.lease(digests[: stage.num_end], owner)
        for lease, digest in zip(leases, digests, strict=False):
            assert lease.view == content(DIGESTS.index(digest), len(lease.view))
    stage.close()
    return stage.num_end


def in_child(code: str, *args: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)


STORES = """
import sys
from tests.server_tier.test_server_store import *
with Store(load_settings(env={}, overrides={"host.size": "4MiB", "host.slab": "1MiB", "server.url": sys.argv[1]})) as s:
    space = s.open_space(NAMESPACE)
    store_blocks(space, range(100))
    durable = space.wait_durable(DIGESTS, "server").wait(DEADLINE_S)
    print(durable is not None and durable.is_durable, s.stats().server.writes)
"""


@pytest.mark.slow
def test_one_process_finds_what_another_stored(directory: Path) -> None:
    with ServerProcess(directory) as server:
        child = in_child(STORES, url_of(server))
        assert child.communicate(timeout=DEADLINE_S)[0] == "True {'stored': 100}\n"
        with open_store(server) as store:
            space = store.open_space(NAMESPACE)
            assert restore(space, DIGESTS) == 100
            stats = store.stats().server
            assert stats is not None
            assert stats.reads == {"ok": 100}
            assert (stats.refusals, stats.damaged_blocks) == ({}, 0)
            assert stats.mapped_bytes == 32 << 20
            store.reset()
            assert restore(space, DIGESTS) == 0
            store.check_integrity()
        with open_store(server) as store:
            assert store.epoch == 1, "a later process knows of the reset"
            assert restore(store.open_space(NAMESPACE), DIGESTS) == 0


@pytest.mark.slow
@pytest.mark.bug("HS16")
def test_a_daemon_that_is_killed_costs_misses_and_comes_back_warm(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with another size of its pool. What it had written to disk is there again."""
    caplog.set_level(logging.INFO, "kvtier")
    disk = {"disk.path": str(directory / "disk"), "disk.size": "64MiB", "disk.min_free": 0}
    with ServerProcess(directory, disk) as server, open_store(server) as store:
        space = store.open_space(NAMESPACE)
        store_blocks(space, range(50))
        assert store.flush(DEADLINE_S) == 0
        (lower,) = store.lower
        until("the blocks are on the daemon's disk", lambda: bool([*(directory / "disk").rglob("*")]))
        server.stop()  # its index is whole; then the same by force
        with ServerProcess(directory, disk | {"host.size": "16MiB"}) as second:
            until("it is used again", lambda: lower._guard.breaker.is_closed and len(_look(store, range(50))) == 50)
            second.kill()
            caplog.clear()
            for number in range(50, 60):
                began = time.monotonic()
                store_blocks(space, range(number, number + 1))
                store.flush(0.1)
                questions = space.ask(DIGESTS, space.locate(DIGESTS))
                until("questions are answered", lambda asked=questions: all(each.done for each in asked))  # type: ignore[misc]
                assert time.monotonic() - began < 2 * TIMEOUT_S
            until("its memory is let go", lambda: store.stats().server.mapped_bytes == 0)  # type: ignore[union-attr]
            until("the breaker opens", lambda: not lower._guard.breaker.is_closed)
            warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
            (line,) = warnings
            assert "it is left alone until it answers again" in line
        with ServerProcess(directory, disk | {"host.size": "8MiB"}):
            until("the breaker closes", lambda: lower._guard.breaker.is_closed)
            until("it is warm", lambda: len(_look(store, range(50))) == 50)
            assert store.flush(DEADLINE_S) == 0
            stats = store.stats().server
            assert stats is not None
            assert stats.mapped_bytes == 8 << 20
            store.check_integrity()
            with open_store(server) as other:
                assert restore(other.open_space(NAMESPACE), DIGESTS[:50]) == 50


def _look(store: Store, numbers: range) -> list[int]:
    """Which of these the daemon holds now."""
    space = store.open_space(NAMESPACE)
    held = store.lower[0].look([make_key(space.digest, DIGESTS[number]) for number in numbers])
    return [number for number, is_held in zip(numbers, held or [], strict=False) if is_held]


@pytest.mark.slow
def test_kills_under_load_give_no_wrong_byte(directory: Path) -> None:
    """Two threads store and read while the daemon is killed again and again, with pools of several sizes."""
    stop = threading.Event()
    outcomes: list[ReadOutcome] = []
    sizes = ["4MiB", "8MiB", "2MiB", "16MiB"]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            names = [rng.randrange(200) for _ in range(8)]
            put(tier, *names)
            outcomes.extend(get(tier, *names))  # which looks at every byte

    server = ServerProcess(directory, {"host.size": sizes[-1]}).start()
    with opened(url_of(server), timeout_s=2.0) as tier:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        try:
            for size in sizes:
                seen = outcomes.count(ReadOutcome.OK)
                until("blocks are read", lambda seen=seen: outcomes.count(ReadOutcome.OK) > seen + 50)  # type: ignore[misc]
                server.kill()
                server = ServerProcess(directory, {"host.size": size}).start()
            seen = outcomes.count(ReadOutcome.OK)
            until("blocks are read", lambda: outcomes.count(ReadOutcome.OK) > seen + 50)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert ReadOutcome.DAMAGED not in outcomes
        assert tier.snapshot().mapped_bytes == 16 << 20
        server.kill()


STOPS = """
import os, signal, sys
from kvtier.tiers.server import storing
from tests.server_tier.rig import opened, put
fill = storing.copy_in
def stop_and_fill(target, source, *, hashed):
    target[:100] = source[:100]
    os.kill(os.getpid(), signal.SIGSTOP)
    return fill(target, source, hashed=hashed)
storing.copy_in = stop_and_fill
with opened(sys.argv[1], timeout_s=60.0) as tier:
    print(*put(tier, "stopped"))
"""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
@pytest.mark.bug("HS17", "LK10")
def test_a_client_that_was_stopped_in_a_fill_writes_into_no_slot_of_another(directory: Path) -> None:
    """Without checksums, which would hide that it did."""
    settings = {"host.size": "2MiB", "daemon.reservation_s": 0.2, "daemon.checksums": False}
    with ServerProcess(directory, settings) as server:
        child = in_child(STOPS, url_of(server))
        try:
            until("it has stopped itself", lambda: state_of(child.pid) == "T")
            with opened(url_of(server), timeout_s=1.0) as tier:
                until("its key is free again", lambda: put(tier, "stopped") == [WriteOutcome.STORED])
                stored = {i for i in range(600) if put(tier, i) == [WriteOutcome.STORED]}
                assert len(stored) > 300, "the pool was filled several times over"
                before = [i for i in stored if get(tier, i) == [ReadOutcome.OK]]
                assert len(before) > 50
                os.kill(child.pid, signal.SIGCONT)
                assert child.communicate(timeout=DEADLINE_S)[0] == "withdrawn\n"
                assert [i for i in before if get(tier, i) != [ReadOutcome.OK]] == []
                put(tier, "later")
                assert get(tier, "later") == [ReadOutcome.OK]
        finally:
            child.kill()
            child.communicate()


@pytest.mark.slow
@pytest.mark.bug("HS17", "CR20")
def test_a_client_that_is_killed_in_a_fill_leaves_its_key_to_others(directory: Path) -> None:
    with ServerProcess(directory, {"host.size": "2MiB"}) as server:
        child = in_child(STOPS, url_of(server))
        until("it has stopped itself", lambda: state_of(child.pid) == "T")
        with opened(url_of(server), timeout_s=0.4) as tier:
            assert put(tier, "stopped", "free") == [WriteOutcome.FULL, WriteOutcome.STORED], "it is being stored"
            assert get(tier, "stopped") == [ReadOutcome.MISS]
            child.kill()
            child.communicate()
            until("its key is free again", lambda: put(tier, "stopped") == [WriteOutcome.STORED])
            assert get(tier, "stopped") == [ReadOutcome.OK]


@pytest.mark.slow
def test_a_daemon_that_was_stopped_keeps_no_slot_of_calls_that_were_given_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process lives on, and so would their quarantine: it says goodbye on each connection that it gives up."""
    num_blocks = 60  # more than a third of the pool
    stop_at_next_fill = threading.Event()

    def fill(target: Bytes, source: Bytes, *, hashed: bool) -> int:
        if stop_at_next_fill.is_set():
            stop_at_next_fill.clear()
            server.signal(signal.SIGSTOP)
        return copy_in(target, source, hashed=hashed)

    monkeypatch.setattr("kvtier.tiers.server.storing.copy_in", fill)
    with ServerProcess(directory, {"host.size": "2MiB"}) as server, opened(url_of(server), timeout_s=0.3) as tier:
        for turn in range(5):
            stop_at_next_fill.set()
            assert put(tier, *(f"{turn} {i}" for i in range(num_blocks))) == [WriteOutcome.ERROR] * num_blocks
            server.signal(signal.SIGCONT)
            until("it answers", lambda turn=turn: put(tier, turn) == [WriteOutcome.STORED])  # type: ignore[misc]
            server.signal(signal.SIGSTOP)
            assert get(tier, *range(5)) == [ReadOutcome.ERROR] * 5
            server.signal(signal.SIGCONT)
        names = [f"last {i}" for i in range(num_blocks)]
        until("there is room for all of them", lambda: WriteOutcome.FULL not in put(tier, *names))
        assert get(tier, *names) == [ReadOutcome.OK] * num_blocks


LEAVES = """
import sys
from tests.server_tier.test_server_store import *
store = Store(load_settings(env={}, overrides={"host.size": "4MiB", "host.slab": "1MiB", "server.url": sys.argv[1]}))
store_blocks(store.open_space(NAMESPACE), range(100))
if sys.argv[2] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.bug("HS10")
@pytest.mark.parametrize(("how", "code"), [("raises", 3), ("returns", 0)])
def test_a_program_that_does_not_close_its_store_ends_all_the_same(directory: Path, how: str, code: int) -> None:
    with ServerProcess(directory) as server:
        child = in_child(LEAVES, url_of(server), how)
        child.communicate(timeout=DEADLINE_S)
        assert child.returncode == code
        with opened(url_of(server), timeout_s=2.0) as tier:
            assert put(tier, "others") == [WriteOutcome.STORED]
