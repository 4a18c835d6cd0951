"""Sentinel and Cluster: masters that change, slots that move, and settings that name the wrong kind of server."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier.testing.redis_servers import FailOver, RedisCluster, RedisReplyError, RedisSentinel, RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.redis import RedisTier
from tests.redis.conftest import REASON
from tests.redis.rig import FakeServer, get, get_all, joining, key_of, name_of, opened, put, until

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

STORED, ALREADY = WriteOutcome.STORED, WriteOutcome.ALREADY_STORED
OK, MISS = ReadOutcome.OK, ReadOutcome.MISS


def is_well(tier: RedisTier) -> bool:
    try:
        tier.probe()
    except TierError:
        return False
    return True


def holder_of(cluster: RedisCluster, name: object) -> RedisServer:
    """The node that serves a block, by its own word: the others may not have heard yet."""
    for node in cluster.masters:
        with contextlib.suppress(RedisReplyError):
            if node.command("EXISTS", name_of(key_of(name))):
                return node
    raise AssertionError(f"no node holds {name}")


# ---- Sentinel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", FailOver)
def test_a_failover_is_followed(how: FailOver) -> None:
    with RedisSentinel() as servers, opened(tuple(servers.urls), mode="sentinel") as tier:
        old = servers.master
        assert put(tier, *range(5)) == [STORED] * 5
        assert [*tier.snapshot().nodes] == [f"127.0.0.1:{old.port}"]
        new = servers.fail_over(how)
        until("the new master takes a block", lambda: is_well(tier) and put(tier, "new") in ([STORED], [ALREADY]))
        assert [*tier.snapshot().nodes] == [f"127.0.0.1:{new.port}"]
        assert new.command("EXISTS", name_of(key_of("new"))) == 1
        assert get(tier, "new") is OK


def test_a_master_that_became_a_replica_is_left(server: RedisServer) -> None:
    """It still answers: only a write tells."""

    def replica(sock: socket.socket, words: list[bytes]) -> bytes | None:
        return b"-READONLY You can't write against a read only replica.\r\n" if words[0] == b"SET" else joining(words)

    with FakeServer(replica) as old:
        named = [old.port]

        def sentinel(sock: socket.socket, words: list[bytes]) -> bytes:
            return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(named[0])), named[0])

        with FakeServer(sentinel) as fake, opened(fake.url, mode="sentinel") as tier:
            assert put(tier, 1) == [WriteOutcome.ERROR]
            named[0] = server.port
            assert put(tier, 1) == [STORED]
            assert server.command("EXISTS", name_of(key_of(1))) == 1
            assert [*tier.snapshot().nodes] == [f"127.0.0.1:{server.port}"]


def test_dead_sentinels_are_passed_over() -> None:
    with RedisSentinel(num_sentinels=3) as servers:
        first, second, _ = servers.sentinels
        first.kill()
        second.stop()
        start = time.monotonic()
        with opened(tuple(servers.urls), mode="sentinel", timeout_s=1.0) as tier:
            assert time.monotonic() - start < 1.0
            assert put(tier, 1) == [STORED]
        second.cont()


def test_a_sentinel_that_does_not_know_the_name(caplog: pytest.LogCaptureFixture) -> None:
    with RedisSentinel() as servers, opened(tuple(servers.urls), mode="sentinel", service="other") as tier:
        assert "redis.service" in caplog.text
        assert get(tier, 1) is ReadOutcome.ERROR


def test_sentinels_with_a_password() -> None:
    with (
        RedisSentinel(password="secret") as servers,
        opened(tuple(servers.urls), mode="sentinel", password="secret") as tier,
    ):
        assert put(tier, 1) == [STORED]


# ---- Cluster ---------------------------------------------------------------------------------------------------------


def test_every_master_has_its_share(cluster: RedisCluster) -> None:
    with opened(tuple(cluster.urls[:1]), mode="cluster", timeout_s=5.0) as tier:
        assert put(tier, *range(60), nbytes=100) == [STORED] * 60
        assert get_all(tier, *range(61), nbytes=100) == [OK] * 60 + [MISS]
        assert all(node.command("DBSIZE") for node in cluster.masters)
        assert tier.snapshot().redirects == 0
        assert len(tier.snapshot().nodes) == 3
        assert tier.remove([key_of(i) for i in range(61)]) == 60


# A slot is moved once only: where it comes back before the nodes have heard of it, they disagree about it for good.


@pytest.mark.bug("CR18")
def test_slots_that_have_moved_are_followed(cluster: RedisCluster) -> None:
    names = [f"moved {i}" for i in range(30)]
    with opened(tuple(cluster.urls), mode="cluster", timeout_s=5.0) as tier:
        put(tier, *names, nbytes=100)
        source = holder_of(cluster, names[0])
        target = next(node for node in cluster.masters if node is not source)
        cluster.migrate(cluster.slot_of(name_of(key_of(names[0]))), source, target)
        assert get_all(tier, *names, nbytes=100) == [OK] * 30
        assert tier.snapshot().redirects == 1
        assert get_all(tier, *names, nbytes=100) == [OK] * 30
        assert tier.snapshot().redirects == 1
        assert put(tier, *names, nbytes=100) == [ALREADY] * 30
        assert tier.snapshot().errors == {}


def test_a_slot_on_its_way_is_asked_for_at_both_ends(cluster: RedisCluster) -> None:
    with opened(tuple(cluster.urls), mode="cluster", timeout_s=5.0, ttl_s=60.0) as tier:
        put(tier, "moving")
        source = holder_of(cluster, "moving")
        target = next(node for node in cluster.masters if node is not source)
        migration = cluster.start_migration(cluster.slot_of(name_of(key_of("moving"))), source, target)
        assert get(tier, "moving") is OK
        migration.move()
        assert get(tier, "moving") is OK
        assert put(tier, "moving") == [ALREADY]
        assert tier.contains([key_of("moving")]) == [True]
        tier.touch([key_of("moving")])
        assert tier.remove([key_of("moving")]) == 1
        assert put(tier, "moving") == [STORED]
        assert tier.snapshot().redirects > 0
        migration.finish()
        assert get(tier, "moving") is OK
        assert holder_of(cluster, "moving") is target
        assert tier.snapshot().errors == {}


@pytest.mark.bug("CR18")
def test_slots_move_amid_traffic(cluster: RedisCluster) -> None:
    ended = threading.Event()
    with opened(tuple(cluster.urls), mode="cluster", timeout_s=5.0) as tier:
        names = [f"traffic {i}" for i in range(40)]
        put(tier, *names, nbytes=5000)

        def read() -> int:
            rounds = 0
            while not ended.is_set():
                assert get_all(tier, *names, nbytes=5000) == [OK] * 40
                assert put(tier, *names, nbytes=5000) == [ALREADY] * 40
                rounds += 1
            return rounds

        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(read) for _ in range(2)]
            try:
                for name in names[::4]:
                    source = holder_of(cluster, name)
                    target = next(node for node in cluster.masters if node is not source)
                    cluster.migrate(cluster.slot_of(name_of(key_of(name))), source, target)
            finally:
                ended.set()
            assert all(thread.result() > 0 for thread in running)
        assert tier.snapshot().redirects > 0


def test_a_master_that_dies_is_replaced() -> None:
    with (
        RedisCluster(replicas=1, node_timeout_ms=500) as cluster,
        opened(tuple(cluster.urls), mode="cluster") as tier,
    ):
        put(tier, *range(30), nbytes=100)
        dead = cluster.owner_of(cluster.slot_of(name_of(key_of(1))))
        dead.kill()
        others = [i for i in range(30) if cluster.owner_of(cluster.slot_of(name_of(key_of(i)))) is not dead]
        assert get(tier, 1, nbytes=100) is ReadOutcome.ERROR
        until("a replica takes over", lambda: is_well(tier) and get(tier, 1, nbytes=100) in (OK, MISS))
        assert put(tier, 1, nbytes=100) in ([STORED], [ALREADY])
        assert f"127.0.0.1:{dead.port}" not in tier.snapshot().nodes
        # Each node goes on by itself: it answers CLUSTERDOWN until it has heard of the new master.
        until("every node goes on", lambda: get_all(tier, *others, nbytes=100) == [OK] * len(others))


# ---- the wrong kind --------------------------------------------------------------------------------------------------


def verify_wrong(url: object, caplog: pytest.LogCaptureFixture, **settings: Any) -> None:
    with opened(url, **settings) as tier:
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "redis.mode" in errors[0].message
        assert put(tier, 1) == [WriteOutcome.ERROR]
        assert get(tier, 1) is ReadOutcome.ERROR
        for call in (lambda: tier.contains([key_of(1)]), tier.probe):
            with pytest.raises(TierError, match=r"redis\.mode"):
                call()
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_cluster_named_as_one_server(cluster: RedisCluster, caplog: pytest.LogCaptureFixture) -> None:
    verify_wrong(cluster.urls[0], caplog)


def test_a_server_named_as_a_cluster(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    verify_wrong(server.url, caplog, mode="cluster")


def test_a_server_named_as_a_sentinel(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    verify_wrong(server.url, caplog, mode="sentinel")


def test_a_sentinel_named_as_a_server(caplog: pytest.LogCaptureFixture) -> None:
    with RedisSentinel() as servers:
        verify_wrong(servers.urls[0], caplog)


def test_a_dead_seed_is_passed_over(cluster: RedisCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    with opened((dead, cluster.urls[1]), mode="cluster") as tier:
        assert put(tier, 1) == [STORED]
