"""A store over a real server: what one process stored another finds, and a server that comes back is used again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvtier.config import load_settings
from kvtier.keys import BlockDigest, Namespace, Shard, make_key
from kvtier.layout import KVLayout
from kvtier.reasons import DropReason
from kvtier.store import Space, Store
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.reservation import Reservation

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=16)
NAMESPACE = Namespace("m", "r", LAYOUT, "g", Shard(0, 1))
DIGESTS = [BlockDigest(bytes([number]) * 32) for number in range(100)]
DEADLINE_S = 20.0
TIMEOUT_S = 0.3


def open_store(server: RedisServer, **settings: object) -> Store:
    overrides = {"host.size": "4MiB", "host.slab": "1MiB", "redis.url": server.url, "redis.timeout_s": TIMEOUT_S}
    return Store(load_settings(env={}, overrides=overrides | settings))


def content(number: int, nbytes: int) -> bytes:
    return bytes([number, 255 - number]) * (nbytes // 2)


def put(space: Space, numbers: range) -> None:
    with space.owner("test") as owner:
        for number in numbers:
            parent = DIGESTS[number - 1] if number else None
            reserved = space.reserve(DIGESTS[number], parent, owner)
            assert isinstance(reserved, Reservation)
            reserved.lease.view[:] = content(number, len(reserved.lease.view))
            space.commit([reserved])


def until(what: str, holds: Callable[[], bool]) -> float:
    """Poll, at most DEADLINE_S; how long it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < DEADLINE_S, what
        time.sleep(0.005)
    return time.monotonic() - began


def restore(space: Space, digests: list[BlockDigest]) -> int:
    """Bring them to host memory; how many came, each with its own bytes."""
    questions = space.ask(digests, space.locate(digests))
    until("questions are answered", lambda: all(question.done for question in questions))
    stage = space.stage("r", digests, None, DEADLINE_S, space.locate(digests))
    if stage is None:
        return 0
    until("the stage ends", stage.poll)
    with space.owner("reader") as owner:
        leases = space.lease(digests, owner)
        for number, lease in enumerate(leases):
            assert lease.view == content(number, len(lease.view))
    stage.close()
    return stage.num_end


def test_one_process_finds_what_another_stored(server: RedisServer) -> None:
    with open_store(server) as store:
        space = store.open_space(NAMESPACE)
        put(space, range(100))
        durable = space.wait_durable(DIGESTS, "redis").wait(DEADLINE_S)
        assert durable is not None
        assert durable.is_durable
        store.check_integrity()
    with open_store(server) as store:
        space = store.open_space(NAMESPACE)
        assert restore(space, DIGESTS) == 100
        assert store.stats().redis.reads == {"ok": 100}  # type: ignore[union-attr]
        store.reset()
        assert restore(space, DIGESTS) == 0
        store.check_integrity()
    with open_store(server) as store:
        assert store.epoch == 1, "a later process knows of the reset"
        assert restore(store.open_space(NAMESPACE), DIGESTS) == 0


@pytest.mark.bug("HS16")
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_that_comes_back_is_found_well_though_nobody_asks(how: str) -> None:
    with RedisServer() as server, open_store(server) as store:
        space = store.open_space(NAMESPACE)
        put(space, range(10))
        assert store.flush(DEADLINE_S) == 0
        (lower,) = store.lower
        (server.stop if how == "stopped" else server.kill)()
        for number in range(10, 20):  # one that hangs is sick at the first call, one that refuses at the third
            put(space, range(number, number + 1))
            store.flush(0.05)
        until("the breaker opens", lambda: not lower._guard.breaker.is_closed)
        (server.cont if how == "stopped" else server.restart)()
        until("the breaker closes", lambda: lower._guard.breaker.is_closed)
        ledger = lower.write_behind.ledger.snapshot()
        assert ledger.due == ledger.stored + sum(ledger.dropped.values()) + ledger.pending
        assert ledger.dropped.keys() <= {DropReason.TIER_ERROR, DropReason.TIER_DOWN, DropReason.ORPHAN}
        assert store.flush(DEADLINE_S) == 0, "what was lost is written again"
        assert lower.held([make_key(space.digest, digest) for digest in DIGESTS[10:20]]) == [True] * 10


def test_a_store_over_a_server_that_hangs_closes_in_time() -> None:
    with RedisServer() as server:
        store = open_store(server)
        space = store.open_space(NAMESPACE)
        put(space, range(10))
        store.flush(DEADLINE_S)
        server.stop()
        put(space, range(10, 60))
        space.ask(DIGESTS, space.locate(DIGESTS))
        began = time.monotonic()
        store.close(2.0)
        assert time.monotonic() - began < 2.0 + 2 * TIMEOUT_S + 1.0
        server.cont()
