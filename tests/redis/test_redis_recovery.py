"""Servers that hang, die and come back, connections that are cut anywhere, threads, forks and the end."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ClosedError, TierError
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome
from kvtier.tiers.redis import RedisTier
from tests.redis.conftest import REASON
from tests.redis.rig import (
    CutWire,
    FakeServer,
    block_of,
    frame_of,
    get,
    get_all,
    joining,
    key_of,
    name_of,
    opened,
    put,
    until,
)

STORED, ALREADY = WriteOutcome.STORED, WriteOutcome.ALREADY_STORED
OK, MISS = ReadOutcome.OK, ReadOutcome.MISS


@pytest.fixture
def mortal() -> Iterator[RedisServer]:
    """A server of the test's own."""
    if REASON:
        pytest.skip(REASON)
    with RedisServer() as server:
        yield server


def test_a_server_that_was_restarted_is_used_at_once(mortal: RedisServer) -> None:
    with opened(mortal.url) as tier:
        assert put(tier, *range(5)) == [STORED] * 5
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(lambda i: get(tier, i), range(5))] == [OK] * 5
        for _ in range(3):
            mortal.restart()
            assert get_all(tier, *range(5)) == [MISS] * 5
            assert put(tier, *range(5)) == [STORED] * 5
            assert get_all(tier, *range(5)) == [OK] * 5
            assert tier.contains([key_of(1)]) == [True]
        assert tier.snapshot().errors == {}


def test_a_server_that_was_killed_comes_back_by_itself(mortal: RedisServer) -> None:
    with opened(mortal.url) as tier:
        put(tier, 1)
        mortal.kill()
        assert get(tier, 1) is ReadOutcome.ERROR
        assert put(tier, 2) == [WriteOutcome.ERROR]
        with pytest.raises(TierError, match="refused"):
            tier.contains([key_of(1)])
        with pytest.raises(TierError):
            tier.probe()
        mortal.restart()
        tier.probe()
        assert put(tier, 1) == [STORED]
        assert get(tier, 1) is OK


def test_a_server_that_hangs_costs_one_timeout_a_call(mortal: RedisServer) -> None:
    with opened(mortal.url) as tier:
        put(tier, *range(3))
        mortal.stop()
        for call in (lambda: get_all(tier, 0, 1, 2), lambda: put(tier, 0, 1, 2)):
            start = time.monotonic()
            assert {outcome.value for outcome in call()} == {"error"}
            assert time.monotonic() - start < 0.6
        with pytest.raises(TierError, match="in time"):
            tier.probe()
        mortal.cont()
        tier.probe()
        assert get_all(tier, 0, 1, 2) == [OK] * 3
        assert tier.snapshot().errors["timeout"] >= 3


def test_a_server_that_is_down_at_first_is_joined_later(mortal: RedisServer) -> None:
    mortal.command("SET", "kvtier:default:epoch", "5")
    mortal.stop()
    with opened(mortal.url) as tier:
        assert tier.epoch == 0
        assert get(tier, 1) is ReadOutcome.ERROR
        mortal.cont()
        tier.probe()
        assert tier.epoch == 5
        assert put(tier, 1) == [STORED]
        assert mortal.command("KEYS", "kvtier:default:5:*") != []


def test_a_call_joins_too(mortal: RedisServer) -> None:
    mortal.kill()
    with opened(mortal.url) as tier:
        mortal.restart()
        assert put(tier, 1) == [STORED]
        assert tier.usage().capacity_bytes > 0


def test_idle_connections_that_were_cut_are_no_failure(mortal: RedisServer) -> None:
    with opened(mortal.url) as tier:
        put(tier, 1)
        mortal.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert get(tier, 1) is OK
        assert tier.snapshot().errors == {}


def test_the_connection_is_cut_just_as_it_is_used() -> None:
    """Dead by the time that the request comes: not seen before, and asked again on a new one."""
    frame = frame_of(key_of(1), block_of(1))
    seen: list[int] = []

    def reply(sock, words):  # type: ignore[no-untyped-def]
        if words[0] == b"GET" and not words[1].endswith(b":epoch"):
            seen.append(id(sock))
            if len(seen) == 2:
                sock.close()
                raise OSError
            return b"$%d\r\n" % len(frame) + frame + b"\r\n"
        return joining(words)

    with FakeServer(reply) as fake, opened(fake.url) as tier:
        assert get(tier, 1) is OK
        assert get(tier, 1) is OK
        assert (len(seen), fake.num_connections) == (3, 2)
        assert tier.snapshot().errors == {}


# ---- cut anywhere ----------------------------------------------------------------------------------------------------


POSITIONS = st.integers(-120_000, 120_000).filter(bool) | st.integers(-2000, 2000).filter(bool)
VERBS = st.sampled_from(["read", "write", "contains", "touch", "remove"])


@given(
    plan=st.lists(st.none() | POSITIONS, max_size=30),
    piece=st.sampled_from([97, 1000, 4096, 1 << 16]),
    calls=st.lists(st.tuples(VERBS, st.lists(st.integers(0, 7), min_size=1, max_size=6)), min_size=1, max_size=12),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_is_cut_reads_are_right_or_fail(
    server: RedisServer, plan: list[int | None], piece: int, calls: list[tuple[str, list[int]]]
) -> None:
    server.command("FLUSHALL")
    left = iter(plan)
    with CutWire(server.port, lambda: next(left, None), piece) as wire, opened(wire.url, timeout_s=2.0) as tier:
        for verb, names in calls:
            with contextlib.suppress(TierError):
                perform(server, tier, verb, names)
            tier.check_integrity()
        wire.is_healed = True
        tier.probe()
        names = [*range(8)]
        assert not {*put(tier, *names)} - {STORED, ALREADY}
        for name in names:
            raw = server.command("GET", name_of(key_of(name)))
            assert raw == frame_of(key_of(name), block_of(name)), "what is stored is whole"
        assert get_all(tier, *names) == [OK] * 8
        assert tier.snapshot().damaged == 0


def perform(server: RedisServer, tier: RedisTier, verb: str, names: list[int]) -> None:
    """One call, whose answer is held against the server's."""
    keys = [key_of(name) for name in names]
    if verb == "read":
        get_all(tier, *names)  # compares what is OK
    elif verb == "write":
        put(tier, *names)
    elif verb == "contains":
        assert tier.contains(keys) == [server.command("EXISTS", name_of(key)) == 1 for key in keys]
    elif verb == "touch":
        tier.touch(keys)
    else:
        tier.remove(keys)


# ---- threads, forks, the end -----------------------------------------------------------------------------------------


def test_many_threads_share_few_connections(server: RedisServer) -> None:
    with opened(server.url, connections=2, timeout_s=10.0) as tier:
        most = 0

        def work(seed: int) -> None:
            nonlocal most
            rng = random.Random(seed)
            for _ in range(40):
                names = [rng.randrange(30) for _ in range(5)]
                assert not set(put(tier, *names)) - {STORED, ALREADY}
                assert get_all(tier, *names) == [OK] * 5
                most = max(most, tier.snapshot().connections)

        with ThreadPoolExecutor(8) as threads:
            for running in [threads.submit(work, seed) for seed in range(8)]:
                running.result()
        assert 1 <= most <= 3, "two, and one for questions"
        assert tier.snapshot().errors == {}


def test_who_finds_no_connection_waits_within_his_time(mortal: RedisServer) -> None:
    with opened(mortal.url, connections=1) as tier:
        put(tier, 1)
        mortal.stop()
        start = time.monotonic()
        with ThreadPoolExecutor(3) as threads:
            assert [*threads.map(lambda _: get(tier, 1), range(3))] == [ReadOutcome.ERROR] * 3
        assert time.monotonic() - start < 0.8
        mortal.cont()
        until("the server answers", lambda: get(tier, 1) is OK)


def test_close_ends_the_calls_under_way(mortal: RedisServer) -> None:
    with opened(mortal.url, timeout_s=30.0) as tier:
        put(tier, 1)
        mortal.stop()
        ended: list[object] = []

        def read() -> None:
            try:
                ended.append(get(tier, 1))
            except ClosedError as error:
                ended.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        until("all are asking", lambda: tier._pool.num_leased == 3)
        start = time.monotonic()
        tier.close()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 5.0
        assert len(ended) == 3
        assert tier.snapshot().connections == 0
        mortal.cont()


def test_after_close(server: RedisServer) -> None:
    with opened(server.url) as tier:
        put(tier, 1)
        tier.close()
        for call in (
            lambda: get(tier, 1),
            lambda: put(tier, 1),
            lambda: tier.contains([key_of(1)]),
            lambda: tier.remove([key_of(1)]),
            lambda: tier.touch([key_of(1)]),
            lambda: tier.start_epoch(1),
            tier.probe,
        ):
            with pytest.raises(ClosedError):
                call()
        assert tier.usage().num_blocks == 1


def test_a_forks_child_is_refused_and_closes_nothing(server: RedisServer) -> None:
    with opened(server.url) as tier:
        put(tier, 1)
        child = os.fork()
        if not child:
            code = 1
            try:
                get(tier, 1)
            except BaseException as error:  # noqa: BLE001 - the child must not come back to pytest
                code = 0 if type(error).__name__ == "ForkedError" else 2
            tier.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert get(tier, 1) is OK
        assert tier.snapshot().disconnects == 0
