"""What attacks on the Redis tier found, over real servers: each story once went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.breaker import Breaker
from kvtier.clock import MonotonicClock
from kvtier.config import MemorySnapshot, load_settings
from kvtier.keys import Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.store import Store
from kvtier.testing import FakeClock
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.guarded import GuardedTier
from kvtier.tiers.reservation import Reservation
from tests.redis.conftest import REASON
from tests.redis.rig import get, key_of, opened, put

STORED = WriteOutcome.STORED
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, dtype="float16", block_tokens=4)
NAMESPACE = Namespace("weights", "r1", LAYOUT, "main", Shard(0, 1))
DIGESTS = digest_tokens(range(8), 4, Extras(None, None, ()))
COUNTER = "kvtier:default:epoch"
DEADLINE_S = 10.0


@pytest.fixture
def mortal() -> Iterator[RedisServer]:
    if REASON:
        pytest.skip(REASON)
    with RedisServer() as server:
        yield server


def open_store(url: str, directory: Path | None = None) -> Store:
    settings: dict[str, object] = {"host.size": 65536, "host.slab": 4096, "redis.url": url, "redis.timeout_s": 0.5}
    if directory is not None:
        settings |= {"disk.path": [str(directory)], "disk.size": "4MiB", "disk.min_free": 1}
    return Store(load_settings(env={}, overrides=settings), memory=MemorySnapshot(1 << 34, 1 << 34), touch=False)


def store_prompt(store: Store) -> None:
    space = store.open_space(NAMESPACE)
    with space.owner("test") as owner:
        for digest, parent in zip(DIGESTS, [None, *DIGESTS], strict=False):
            reserved = space.reserve(digest, parent, owner)
            assert isinstance(reserved, Reservation)
            space.commit([reserved])
    assert store.flush(DEADLINE_S) == 0


def num_found(store: Store) -> int:
    """Blocks of the prompt that any tier has."""
    space = store.open_space(NAMESPACE)
    questions = space.ask(DIGESTS, space.locate(DIGESTS))
    deadline = time.monotonic() + DEADLINE_S
    while not all(question.done for question in questions):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return len(space.locate(DIGESTS).digests)


@pytest.mark.parametrize("what", ["is down", "has lost its counter"])
def test_a_disk_finds_nothing_of_before_a_reset_that_redis_forgot(
    mortal: RedisServer, tmp_path: Path, what: str
) -> None:
    """New weights: one engine resets, the others are restarted. The second start finds Redis empty, or not at all."""
    with open_store(mortal.url, tmp_path) as store:
        store_prompt(store)
    with open_store(mortal.url) as other:
        other.reset()
    with open_store(mortal.url, tmp_path) as store:
        assert num_found(store) == 0
    if what == "is down":
        mortal.kill()
    else:
        mortal.command("FLUSHALL")
    with open_store(mortal.url, tmp_path) as store:
        assert num_found(store) == 0
        assert store.epoch == 1


def test_a_counter_that_went_back_is_moved_on_by_writes(server: RedisServer) -> None:
    """A server that restarts from a snapshot of before a reset, or a replica that had not heard of it."""
    clock = FakeClock()
    server.command("SET", COUNTER, "5")
    with opened(server.url, clock) as tier:
        tier.start_epoch(6)
        server.command("SET", COUNTER, "5")
        clock.advance(2.0)
        assert put(tier, 1) == [STORED]
        assert server.command("GET", COUNTER) == b"6"
        server.command("SET", COUNTER, "8")
        clock.advance(2.0)
        assert put(tier, 2) == [STORED]
        assert server.command("GET", COUNTER) == b"8", "what another has begun stays"


@pytest.mark.parametrize("ttl_s", [1e17, 10**5000], ids=["float", "integer"])
def test_a_request_that_asks_for_an_endless_lifetime_makes_nothing_fail(server: RedisServer, ttl_s: float) -> None:
    with opened(server.url) as tier:
        assert put(tier, 1, ttl_s=ttl_s) == [STORED]
        assert put(tier, 1, ttl_s=ttl_s) == [WriteOutcome.ALREADY_STORED]
        assert tier.snapshot().errors == {}


def test_a_dead_server_is_left_alone_though_prompts_are_touched(mortal: RedisServer) -> None:
    clock = MonotonicClock()
    with opened(mortal.url) as tier:
        guard = GuardedTier(tier, Breaker(clock), clock, 5.0)
        assert guard.write([]) == []
        put(tier, 1)
        mortal.kill()
        for _ in range(3):
            assert get(tier, 1) is ReadOutcome.ERROR
            assert guard.look([key_of(1)]) is None
            guard.touch([key_of(1)])
        assert not guard.breaker.is_closed
