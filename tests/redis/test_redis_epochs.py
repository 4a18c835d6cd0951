"""Resets: no number is used twice, nothing older is found, and one that failed leaves nothing to be found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import TierError
from kvtier.testing.redis_servers import RedisCluster, RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from tests.redis.conftest import REASON
from tests.redis.rig import FakeServer, get, get_all, joining, key_of, name_of, opened, put

STORED = WriteOutcome.STORED
OK, MISS = ReadOutcome.OK, ReadOutcome.MISS


@pytest.fixture
def mortal() -> Iterator[RedisServer]:
    if REASON:
        pytest.skip(REASON)
    with RedisServer() as server:
        yield server


@pytest.mark.bug("WR23")
def test_a_reset_is_remembered_and_sweeps(server: RedisServer) -> None:
    with opened(server.url, timeout_s=5.0) as tier, opened(server.url, prefix="kvtier:default", tenant="0") as odd:
        put(tier, *range(50), nbytes=100)
        put(odd, 1)
        odd.start_epoch(1)
        put(odd, 1)
        server.command("SET", "kvtier:default:0:something", "else")
        tier.start_epoch(1)
        assert tier.epoch == 1
        assert get(tier, 1) is MISS
        kept = server.command("KEYS", "*")
        assert isinstance(kept, list)
        assert set(kept) == {
            b"kvtier:default:epoch",
            b"kvtier:default:0:epoch",
            b"kvtier:default:0:something",
            name_of(key_of(1), 1, "kvtier:default", "0").encode(),
        }
        assert get(odd, 1) is OK
    with opened(server.url) as tier:
        assert tier.epoch == 1


def test_a_sweep_reaches_every_master(cluster: RedisCluster) -> None:
    with opened(tuple(cluster.urls), mode="cluster", timeout_s=5.0) as tier:
        put(tier, *range(60), nbytes=100)
        tier.start_epoch(4)
        assert tier.epoch == 4
        assert sum(int(str(node.command("DBSIZE"))) for node in cluster.masters) == 1


def test_two_resets_never_share_a_number(server: RedisServer) -> None:
    with opened(server.url, timeout_s=5.0) as one, opened(server.url, timeout_s=5.0) as two:
        one.start_epoch(1)
        two.start_epoch(1)
        assert (one.epoch, two.epoch) == (1, 2)
        put(one, "a")
        assert get(two, "a") is MISS
        seen: list[int] = []

        def work(number: int) -> None:
            with opened(server.url, timeout_s=5.0) as tier:
                for _ in range(10):
                    tier.start_epoch(tier.epoch + number)
                    seen.append(tier.epoch)

        with ThreadPoolExecutor(4) as threads:
            for running in [threads.submit(work, number) for number in range(4)]:
                running.result()
        assert len({*seen}) == 40
        one.start_epoch(5)
        assert one.epoch > max(seen)


def test_a_counter_that_was_lost_does_not_bring_back_an_epoch(server: RedisServer) -> None:
    with opened(server.url) as tier:
        tier.start_epoch(9)
        server.command("DEL", "kvtier:default:epoch")
        tier.start_epoch(10)
        assert tier.epoch >= 10
        assert server.command("GET", "kvtier:default:epoch") == str(tier.epoch).encode()


def test_a_counter_that_was_lost_is_put_back_by_writes(server: RedisServer) -> None:
    from kvtier.testing import FakeClock

    clock = FakeClock()
    with opened(server.url, clock) as tier:
        tier.start_epoch(9)
        server.command("DEL", "kvtier:default:epoch")
        clock.advance(2.0)
        put(tier, 1)
        assert server.command("GET", "kvtier:default:epoch") == b"9"


def test_a_reset_that_fails_leaves_the_tier_mute(mortal: RedisServer) -> None:
    with opened(mortal.url) as tier:
        put(tier, 1)
        mortal.stop()
        with pytest.raises(TierError, match="epoch 1"):
            tier.start_epoch(1)
        mortal.cont()
        for _ in range(2):
            assert get_all(tier, 1, 2) == [MISS, MISS]
            assert put(tier, 1) == [WriteOutcome.WITHDRAWN]
            assert tier.contains([key_of(1)]) == [False]
            assert tier.remove([key_of(1)]) == 0
            tier.touch([key_of(1)])
            tier.probe()
        assert tier.usage().num_blocks == 0
        tier.start_epoch(1)
        assert tier.epoch >= 1
        assert get(tier, 1) is MISS
        assert put(tier, 1) == [STORED]


def test_a_server_that_is_down_at_a_reset_keeps_the_tier_mute_after_it_joined(mortal: RedisServer) -> None:
    mortal.kill()
    with opened(mortal.url) as tier:
        with pytest.raises(TierError):
            tier.start_epoch(1)
        mortal.restart()
        assert get(tier, 1) is MISS
        assert put(tier, 1) == [WriteOutcome.WITHDRAWN]
        tier.start_epoch(3)
        assert tier.epoch == 3
        assert put(tier, 1) == [STORED]


def test_a_write_that_a_reset_overtakes_is_withdrawn() -> None:
    asked, answer = threading.Event(), threading.Event()

    def reply(sock, words):  # type: ignore[no-untyped-def]
        if words[0] == b"SET":
            asked.set()
            answer.wait(10)
            return b"+OK\r\n"
        if words[0] == b"INCRBY":
            return b":%d\r\n" % int(words[2])
        return b"*2\r\n$1\r\n0\r\n*0\r\n" if words[0] == b"SCAN" else joining(words)

    with FakeServer(reply) as fake, opened(fake.url, timeout_s=10.0) as tier, ThreadPoolExecutor(1) as thread:
        writing = thread.submit(put, tier, 1, 2)
        assert asked.wait(10)
        tier.start_epoch(1)
        answer.set()
        assert writing.result() == [WriteOutcome.WITHDRAWN] * 2
        assert tier.usage().num_blocks == 0


@pytest.mark.parametrize("value", [b"text", b"-4", b"1.5", b"", b"9" * 30])
def test_an_epoch_that_is_none(server: RedisServer, value: bytes) -> None:
    server.command("SET", "kvtier:default:epoch", value)
    with opened(server.url) as tier:
        assert get(tier, 1) is ReadOutcome.ERROR
        with pytest.raises(TierError, match="kvtier:default:epoch"):
            tier.contains([key_of(1)])
        with pytest.raises(TierError):
            tier.probe()
        server.command("SET", "kvtier:default:epoch", "3")
        tier.probe()
        assert tier.epoch == 3
