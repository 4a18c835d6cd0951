"""Servers for tests, in life and death. The cluster is one for all its tests: Redis takes two seconds for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.clock import MonotonicClock
from kvtier.errors import KVTierError
from kvtier.testing import FakeClock
from kvtier.testing.redis_servers import (
    FailOver,
    RedisCluster,
    RedisConnection,
    RedisReplyError,
    RedisSentinel,
    RedisServer,
    installed,
    make_tls_files,
    process,
    require_redis_server,
)
from kvtier.testing.redis_servers.waiting import wait_until
from tests.redis_servers.needed import needs_redis_server

pytestmark = needs_redis_server

# Run by a process that dies in the midst: its server is named on standard output, in this order.
DYING = """
import sys, threading, time
from kvtier.testing.redis_servers import RedisServer
with RedisServer() as server:
    {before}
    print(server.pid, server.directory, flush=True)
    {after}
"""


def gone(pid: int) -> bool:
    """Not even a zombie is left."""
    return not Path(f"/proc/{pid}").exists()


def dead(pid: int) -> bool:
    """Perhaps not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(what: str, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    wait_until(what, condition, timeout_s, MonotonicClock())


# ---- one server ------------------------------------------------------------------------------------------------------


def test_it_answers_and_leaves_nothing() -> None:
    with RedisServer() as server:
        assert server.command("SET", "a", b"\x00\r\n\xff") == b"OK"
        assert server.command("GET", "a") == b"\x00\r\n\xff"
        assert server.command("MGET", "a", "b") == [b"\x00\r\n\xff", None]
        assert server.command("INCRBY", "n", 3) == 3
        assert server.url == f"redis://127.0.0.1:{server.port}"
        assert server.socket_path.is_socket()
        assert server.command("CONFIG", "GET", "save") == [b"save", b""]
        assert server.command("CONFIG", "GET", "appendonly") == [b"appendonly", b"no"]
        with pytest.raises(RedisReplyError, match="unknown command 'NONSENSE'"):
            server.command("NONSENSE")
        pid, directory = server.pid, server.directory
    assert gone(pid)
    assert not directory.exists()
    with pytest.raises(OSError, match="refused"):
        server.command("PING")
    with pytest.raises(KVTierError, match="within a `with` block"):
        server.restart()


def test_memory_and_policy_are_as_told() -> None:
    with RedisServer(maxmemory=8 << 20, policy="allkeys-lru", options=["maxclients 50"]) as server:
        assert server.info("memory")["maxmemory"] == str(8 << 20)
        assert server.info("memory")["maxmemory_policy"] == "allkeys-lru"
        assert server.command("CONFIG", "GET", "maxclients") == [b"maxclients", b"50"]


def test_users_and_passwords() -> None:
    with RedisServer(password='of "default" \\', users={"ann": ">of-ann ~a:* +get +set"}) as server:
        port = server.port
        with RedisConnection(server.host, port) as nobody, pytest.raises(RedisReplyError, match="NOAUTH"):
            nobody.command("GET", "a:1")
        with RedisConnection(server.host, port, credentials=("default", 'of "default" \\')) as default:
            assert default.command("SET", "a:1", "x") == b"OK"
        with RedisConnection(server.host, port, credentials=("ann", "of-ann")) as ann:
            assert ann.command("GET", "a:1") == b"x"
            with pytest.raises(RedisReplyError, match="NOPERM"):
                ann.command("DEL", "a:1")
        with pytest.raises(RedisReplyError, match="WRONGPASS"):
            RedisConnection(server.host, port, credentials=("ann", "guessed"))
        assert server.command("GET", "a:1") == b"x"


def test_stopped_it_is_silent_and_killed_it_refuses() -> None:
    with RedisServer() as server:
        server.command("SET", "a", "b")
        server.stop()
        with pytest.raises(TimeoutError):
            server.command("PING", timeout_s=0.05)
        server.cont()
        assert server.command("GET", "a") == b"b"
        server.kill()
        server.kill()
        assert not server.is_running
        with pytest.raises(KVTierError, match="does not run"):
            server.stop()
        with pytest.raises(ConnectionRefusedError):
            server.command("PING")
        port = server.port
        server.restart()
        assert server.port == port
        assert server.command("GET", "a") is None


def test_a_stopped_server_goes_too() -> None:
    with RedisServer() as server:
        pid = server.pid
        server.stop()
    assert gone(pid)


def test_a_server_started_by_a_thread_outlives_it() -> None:
    """The kernel kills a child with the thread that began it, not with its process."""
    with RedisServer() as server:
        thread = threading.Thread(target=server.restart)
        thread.start()
        thread.join()
        for _ in range(20):
            assert server.command("PING") == b"PONG"
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pass", "time.sleep(60)"),
        ("server.stop()", "time.sleep(60)"),
        ("t = threading.Thread(target=server.restart); t.start(); t.join()", "time.sleep(60)"),
    ],
)
def test_nothing_outlives_a_killed_owner(before: str, after: str) -> None:
    code = DYING.format(before=before, after=after)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        assert not gone(int(pid))
        owner.send_signal(signal.SIGKILL)
    eventually("the server dies", lambda: dead(int(pid)))
    eventually("its directory goes", lambda: not Path(directory).exists())


def test_an_owner_that_raises_leaves_nothing() -> None:
    found: list[tuple[int, Path]] = []

    def use() -> None:
        with RedisServer() as server:
            found.append((server.pid, server.directory))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    ((pid, directory),) = found
    assert gone(pid)
    assert not directory.exists()


def test_a_bad_option_is_told_in_the_servers_words() -> None:
    with (
        pytest.raises(KVTierError, match=r"redis-server ended: (?s:.*)nonsense 3"),
        RedisServer(options=["nonsense 3"]),
    ):
        pass


def test_another_port_is_taken_when_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may listen at a port since it was found free."""
    with RedisServer() as first:
        taken = iter([first.port])

        @contextmanager
        def held(*, with_bus: bool) -> Iterator[int]:
            if port := next(taken, 0):
                yield port
                return
            with process.held_port(with_bus=with_bus) as port:
                yield port

        monkeypatch.setattr("kvtier.testing.redis_servers.server.held_port", held)
        with RedisServer() as second:
            assert second.port != first.port
            assert second.command("PING") == b"PONG"


def test_a_held_port_is_given_to_nobody_else() -> None:
    with process.held_port(with_bus=True) as port:
        held = {port, port + 10_000}
        seen = set()
        for _ in range(50):
            with process.held_port() as other:
                seen.add(other)
        assert not seen & held


def test_waiting_ends_by_the_clock() -> None:
    clock = FakeClock()

    def ask() -> bool:
        clock.advance(1.0)
        return False

    with pytest.raises(KVTierError, match="the moon is full: not within 5 s"):
        wait_until("the moon is full", ask, 5.0, clock)
    assert clock.now() == 1005.0


def test_what_is_missing_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KVTierError, match="apt-get install redis-server"):
        require_redis_server()
    with pytest.raises(KVTierError, match="apt-get install openssl"):
        make_tls_files(tmp_path)
    old = tmp_path / "redis-server"
    old.write_text(f"#!{os.path.realpath('/bin/sh')}\necho Redis server v=6.0.16 sha=0\n")
    old.chmod(0o755)
    with pytest.raises(KVTierError, match=r"is Redis 6\.0, older than 6\.2: install a newer one"):
        require_redis_server()
    old.write_text(f"#!{os.path.realpath('/bin/sh')}\necho nothing\n")
    with pytest.raises(KVTierError, match="does not say which version it is: 'nothing'"):
        require_redis_server()
    assert installed.MIN_VERSION == (6, 2)


# ---- TLS -------------------------------------------------------------------------------------------------------------


def test_tls_with_and_without_a_certificate_of_the_client(tmp_path: Path) -> None:
    files = make_tls_files(tmp_path)
    with RedisServer(tls=files) as server:
        assert server.url == f"rediss://127.0.0.1:{server.port}"
        assert server.command("PING") == b"PONG"
        with pytest.raises((OSError, RedisReplyError)), RedisConnection(server.host, server.port) as plain:
            plain.command("PING")
    with RedisServer(tls=files, options=["tls-auth-clients yes"]) as server:
        assert server.command("PING") == b"PONG"


# ---- cluster ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


def test_a_cluster_serves_all_slots(cluster: RedisCluster) -> None:
    assert len(cluster.urls) == len(cluster.nodes) == 3
    for key in ("a", "b", "c", "d"):
        owner = cluster.owner_of(cluster.slot_of(key))
        assert owner.command("SET", key, key) == b"OK"
        others = [node for node in cluster.nodes if node is not owner]
        with pytest.raises(RedisReplyError, match=rf"MOVED {cluster.slot_of(key)} 127.0.0.1:{owner.port}"):
            others[0].command("GET", key)


def asks(node: RedisServer, key: str, redirect: str) -> bool:
    """Whether it sends the asker away, and then by these words."""
    try:
        assert node.command("GET", key) == (key * 100).encode()
    except RedisReplyError as error:
        return str(error) == redirect
    return False


def test_slots_move_with_their_keys_and_half_way_ask(cluster: RedisCluster) -> None:
    slot = cluster.slot_of("{moving}")
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.nodes if node is not source)
    keys = [f"{{moving}}{number}" for number in range(40)]
    for key in keys:
        source.command("SET", key, key * 100)
    migration = cluster.start_migration(slot, source, target)
    assert migration.move(25) == 25
    asked = [key for key in keys if asks(source, key, f"ASK {slot} 127.0.0.1:{target.port}")]
    assert len(asked) == 25
    with target.connect() as connection:
        for key in asked:
            connection.command("ASKING")
            assert connection.command("GET", key) == (key * 100).encode()
    assert migration.move() == 15
    migration.finish()
    assert cluster.owner_of(slot) is target
    assert [target.command("GET", key) for key in keys] == [(key * 100).encode() for key in keys]
    with pytest.raises(RedisReplyError, match="MOVED"):
        source.command("GET", keys[0])


def test_a_range_of_slots_moves(cluster: RedisCluster) -> None:
    first, second, _ = cluster.nodes
    slots = range(100, 120)
    key = next(key for key in map(str, range(100_000)) if cluster.slot_of(key) in slots)
    first.command("SET", key, "x")
    cluster.migrate(slots, first, second)
    assert second.command("GET", key) == b"x"
    cluster.migrate(slots, second, first)
    assert first.command("GET", key) == b"x"


def test_a_cluster_of_two_is_none() -> None:
    with pytest.raises(KVTierError, match="at least 3 masters"):
        RedisCluster(2)


@pytest.mark.slow
def test_a_replica_takes_over_and_a_node_comes_back() -> None:
    with RedisCluster(3, replicas=1) as cluster:
        first, replica = cluster.nodes[0], cluster.nodes[3]
        key = next(key for key in map(str, range(1000)) if cluster.owner_of(cluster.slot_of(key)) is first)
        first.command("SET", key, "x")
        first.kill()
        eventually("the replica takes over", lambda: cluster.owner_of(0) is replica)
        cluster.wait_ok()
        assert replica.command("GET", key) == b"x"
        first.restart()
        eventually("the old master follows", lambda: first.info("replication")["role"] == "slave")


# ---- Sentinel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", list(FailOver))
def test_sentinel_names_a_new_master(how: FailOver) -> None:
    with RedisSentinel(num_replicas=1, num_sentinels=3 if how is FailOver.KILL else 1) as sentinel:
        old = sentinel.master
        assert old is sentinel.servers[0]
        assert sentinel.urls == [each.url for each in sentinel.sentinels]
        old.command("SET", "a", "b")
        new = sentinel.fail_over(how)
        assert new is sentinel.servers[1]
        assert sentinel.master is new
        assert new.command("GET", "a") == b"b"
        assert new.command("SET", "a", "c") == b"OK"
        assert old.is_running == (how is not FailOver.KILL)
