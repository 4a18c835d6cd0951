"""What the tier asks and when: batches, turns, waits, connections, resets; over a server that is told what to say."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.clock import MonotonicClock
from kvtier.errors import ClosedError, ConfigError, ForkedError, LayoutError, TierError
from kvtier.frame import payload_checksum
from kvtier.protocol.messages import (
    MAX_BLOCKS,
    MAX_LOOKUP_BLOCKS,
    Bye,
    Commit,
    CommitOutcome,
    Committed,
    Failed,
    Hello,
    Lookup,
    Ping,
    Release,
    Remove,
    Reserve,
    Reserved,
    ReserveOutcome,
    Stage,
    Staged,
    StageOutcome,
    StartEpoch,
    Touch,
)
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.server import ServerTier
from kvtier.tiers.server.batches import BATCH_BYTES, batches
from kvtier.tiers.server.blocks import FIRST_PAUSE_S, LONGEST_PAUSE_S
from tests.server_tier.rig import (
    BLOCK_BYTES,
    POOL_BYTES,
    TIMEOUT_S,
    FakeServer,
    block_of,
    get,
    key_of,
    opened,
    put,
    settings_of,
    until,
)

STORED, MISS, OK = WriteOutcome.STORED, ReadOutcome.MISS, ReadOutcome.OK


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "fake.sock") as server:
        yield server


@pytest.fixture
def tcp_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def raises(kind: type[Exception], call: Callable[[], object]) -> None:
    """On a thread, where what is not raised as it should be is a warning, and so fails the test."""
    with pytest.raises(kind):
        call()


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_of_one_kind_and_no_longer_than_a_message() -> None:
    keys = [key_of(i) for i in range(600)]
    blocks = [(i, key, 4096 if i % 2 else 8192, 0) for i, key in enumerate(keys)]
    found = [*batches(blocks, 1 << 62)]
    assert sorted(i for batch in found for i in batch.positions) == [*range(600)]
    assert all(len({blocks[i][2] for i in batch.positions}) == 1 for batch in found)
    assert max(len(batch.positions) for batch in found) == MAX_BLOCKS
    assert all(batch.positions == sorted(batch.positions) for batch in found)
    (one, *others) = batches([(i, keys[i], BATCH_BYTES + 1, 0) for i in range(3)], 1 << 62)
    assert (len(one.positions), len(others)) == (1, 2)
    assert [len(batch.positions) for batch in batches([(i, keys[i], 100, 0) for i in range(10)], 300)] == [3, 3, 3, 1]


def test_blocks_of_many_kinds_in_one_call(server: FakeServer) -> None:
    with opened(server.url) as tier:
        kinds = [("one", 4096, None), ("two", 4096, None), ("one", 8192, None), ("one", 4096, 1.5), ("one", 4096, 0.0)]
        requests = [
            WriteRequest(key_of(i, space), None, memoryview(block_of(i, nbytes)), ttl_s)
            for i, (space, nbytes, ttl_s) in enumerate(kinds * 2)
        ]
        for i in range(5, 10):  # the second five have parents
            requests[i] = WriteRequest(key_of(i, kinds[i - 5][0]), key_of(i - 5), *_rest(requests[i]))
        assert tier.write(requests) == [STORED] * 10
        asked = server.heard_of(Reserve)
        assert sorted((m.block_bytes, m.ttl_ms) for m in asked) == [
            (4096, 0), (4096, 0), (4096, 1), (4096, 1500), (8192, 0),
        ]  # fmt: skip
        parents = b"".join(m.parents for m in asked)
        assert parents.count(bytes(32)) == 5
        assert key_of(0)[16:] in parents


def _rest(request: WriteRequest) -> tuple[memoryview, float | None]:
    return request.buffer, request.ttl_s


@pytest.mark.parametrize("credits_", [1, 2, 3])
def test_no_more_is_asked_at_once_than_the_server_allows(credits_: int) -> None:
    with FakeServer(credits_=credits_) as server:
        server.max_payload_bytes = 3 * BLOCK_BYTES
        with opened(server.url) as tier:
            assert put(tier, *range(10)) == [STORED] * 10
            assert get(tier, *range(10)) == [OK] * 10
            order = [type(m).__name__ for m in server.heard if isinstance(m, (Reserve, Commit))]
            alone = ["Reserve", "Commit"] * 4
            ahead = ["Reserve", "Reserve", "Commit", "Reserve", "Commit", "Reserve", "Commit", "Commit"]
            assert order == (alone if credits_ < 3 else ahead)
            assert len(server.heard_of(Stage)) == 4


def test_a_long_prompt_is_looked_up_in_several_messages(server: FakeServer) -> None:
    keys = [key_of(i) for i in range(100)]
    many = (keys * 400)[: 2 * MAX_LOOKUP_BLOCKS + 5]
    with opened(server.url) as tier:
        put(tier, 7)
        found = tier.contains(many)
        assert found == [key == key_of(7) for key in many]
        assert [len(m.digests) // 32 for m in server.heard_of(Lookup)] == [MAX_LOOKUP_BLOCKS, MAX_LOOKUP_BLOCKS, 5]
        mixed = [key_of(1, "two"), key_of(7), key_of(7, "two"), key_of(1)]
        assert tier.contains(mixed) == [False, True, False, False]
        tier.touch(mixed)
        tier.probe()
        assert sorted(len(m.digests) // 32 for m in server.heard_of(Touch)) == [2, 2]


def test_blocks_longer_than_a_payload_are_no_failure(tcp_server: FakeServer) -> None:
    tcp_server.max_payload_bytes = BLOCK_BYTES
    with opened(tcp_server.url) as tier:
        requests = [WriteRequest(key_of(i), None, memoryview(bytes(BLOCK_BYTES + i))) for i in range(2)]
        assert tier.write(requests) == [STORED, WriteOutcome.FULL]
        assert tier.read([ReadRequest(key_of(0), memoryview(bytearray(BLOCK_BYTES + 1)))]) == [MISS]
        assert tier.snapshot().errors == {}


# ---- outcomes --------------------------------------------------------------------------------------------------------


def test_a_block_that_another_stores_is_waited_for(server: FakeServer) -> None:
    turns = []

    def busy(m: Reserve) -> list[Reserved]:
        turns.append(time.monotonic())
        if len(turns) == 4:
            del server.lies[Reserve]
        return [Reserved(m.id, bytes([ReserveOutcome.BEING_STORED] * (len(m.digests) // 32)), [], [])]

    with opened(server.url) as tier:
        server.lies[Reserve] = busy
        assert put(tier, "a", "b") == [STORED] * 2
        waits = [after - before for before, after in pairwise(turns)]
        pauses = [min(FIRST_PAUSE_S * 2**turn, LONGEST_PAUSE_S) for turn in range(3)]
        assert all(wait >= pause for wait, pause in zip(waits, pauses, strict=True)), "each is longer than the last"
        server.lies[Reserve] = lambda m: [Reserved(m.id, b"\x02", [], [])]
        began = time.monotonic()
        assert put(tier, "c") == [WriteOutcome.FULL]
        assert 0.3 * TIMEOUT_S < time.monotonic() - began < 0.9 * TIMEOUT_S, "well before it would count as a failure"
        assert tier.snapshot().errors == {}


def test_only_what_is_being_stored_is_asked_for_again(server: FakeServer) -> None:
    asked: list[bytes] = []

    def reserve(m: Reserve) -> list[Reserved]:
        asked.append(m.digests)
        first = Reserved(m.id, b"\x00\x02\x03\x01", [9], [0])
        return [first if len(asked) == 1 else Reserved(m.id, b"\x00", [10], [1 << 14])]

    server.lies[Reserve] = reserve
    server.lies[Commit] = lambda m: [Committed(m.id, bytes(len(m.reservations)))]
    with opened(server.url) as tier:
        assert put(tier, *"abcd") == [STORED, STORED, WriteOutcome.FULL, WriteOutcome.ALREADY_STORED]
        assert asked == [b"".join(key_of(name)[16:] for name in "abcd"), key_of("b")[16:]]
        assert server.pool[1 << 14 : (1 << 14) + BLOCK_BYTES] == block_of("b")


@pytest.mark.parametrize(
    ("outcome", "becomes"),
    [
        (StageOutcome.MISS, ReadOutcome.MISS),
        (StageOutcome.DAMAGED, ReadOutcome.DAMAGED),
        (StageOutcome.ERROR, ReadOutcome.ERROR),
        (StageOutcome.REFUSED, ReadOutcome.REFUSED),
        (StageOutcome.TIMEOUT, ReadOutcome.REFUSED),
        (StageOutcome.FULL, ReadOutcome.REFUSED),
    ],
)
def test_outcomes_of_stages(server: FakeServer, outcome: int, becomes: ReadOutcome) -> None:
    server.lies[Stage] = lambda m: [Staged(m.id, bytes([outcome]), [], [], [])]
    with opened(server.url) as tier:
        assert get(tier, "a") == [becomes]
        asked = server.heard_of(Stage)
        assert 0 < asked[0].max_wait_ms < TIMEOUT_S * 1000
        assert (len(asked) > 1) is (outcome == StageOutcome.FULL)
        assert not server.heard_of(Release)
        assert server.num_accepted == 1


def test_blocks_without_a_slot_are_asked_for_again(server: FakeServer) -> None:
    asked: list[bytes] = []

    def stage(m: Stage) -> list[Staged]:
        asked.append(m.digests)
        full, miss = StageOutcome.FULL, StageOutcome.MISS
        return [
            Staged(m.id, bytes([miss, full] if len(asked) == 1 else [full if len(asked) == 2 else miss]), [], [], [])
        ]

    server.lies[Stage] = stage
    with opened(server.url) as tier:
        assert get(tier, "a", "b") == [MISS, MISS]
        assert asked == [key_of("a")[16:] + key_of("b")[16:], key_of("b")[16:], key_of("b")[16:]]


def test_a_void_commit_is_withdrawn(server: FakeServer) -> None:
    server.lies[Commit] = lambda m: [Committed(m.id, bytes([CommitOutcome.VOID, CommitOutcome.STORED]))]
    with opened(server.url) as tier:
        assert put(tier, "a", "b") == [WriteOutcome.WITHDRAWN, STORED]
        assert tier.usage().num_blocks == 1


@pytest.mark.parametrize(
    ("kind", "code", "written", "read"),
    [
        (Reserve, "invalid", WriteOutcome.FULL, MISS),
        (Reserve, "failed", WriteOutcome.ERROR, MISS),
        (Commit, "failed", WriteOutcome.ERROR, MISS),
        (Stage, "invalid", STORED, MISS),
        (Stage, "cancelled", STORED, ReadOutcome.ERROR),
    ],
)
def test_one_request_that_is_refused_spoils_no_connection(
    server: FakeServer, kind: type, code: str, written: WriteOutcome, read: ReadOutcome
) -> None:
    server.lies[kind] = lambda m: [Failed(m.id, code, "no")]
    with opened(server.url) as tier:
        assert put(tier, "a") == [written]
        assert get(tier, "a") == [read]
        server.lies.clear()
        assert put(tier, "b") == [STORED]
        assert server.num_accepted == 1
        assert tier.snapshot().errors == {}


def test_leases_are_given_back_and_the_end_is_said(server: FakeServer) -> None:
    with opened(server.url) as tier:
        put(tier, *range(5))
        get(tier, *range(5), "never")
        tier.probe()
        (released,) = server.heard_of(Release)
        assert (released.id, len(released.leases)) == (0, 5)
    until("goodbye is heard", lambda: bool(server.heard_of(Bye)))


def test_a_call_that_is_given_up_leaves_no_slot_behind(server: FakeServer) -> None:
    """What was reserved goes back with the connection, and not only when this process ends."""
    server.lies[Commit] = lambda _: None
    with opened(server.url) as tier:
        assert put(tier, "a") == [WriteOutcome.ERROR]
        until("goodbye is heard", lambda: bool(server.heard_of(Bye)))


# ---- checksums -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("nbytes", [1, 4096, 600_000])
def test_checksums_are_those_of_the_block(tmp_path: Path, kind: str, nbytes: int) -> None:
    with FakeServer(tmp_path / "s" if kind == "unix" else None) as server, opened(server.url) as tier:
        assert put(tier, "a", nbytes=nbytes) == [STORED]
        assert server.blocks[key_of("a")][2] == payload_checksum(block_of("a", nbytes))
        assert get(tier, "a", nbytes=nbytes) == [OK]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_server_without_checksums_is_believed(tmp_path: Path, kind: str) -> None:
    with FakeServer(tmp_path / "s" if kind == "unix" else None, checksums=False) as server, opened(server.url) as tier:
        put(tier, "a")
        assert server.blocks[key_of("a")][2] == 0
        assert get(tier, "a") == [OK]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_what_was_scribbled_over_before_it_came_here_is_not_made_good(tmp_path: Path, kind: str) -> None:
    with FakeServer(tmp_path / "s" if kind == "unix" else None) as server, opened(server.url) as tier:
        checksum = payload_checksum(block_of("a"))
        scribbled = memoryview(bytes(BLOCK_BYTES))
        assert tier.write([WriteRequest(key_of("a"), None, scribbled, checksum=checksum)]) == [STORED]
        assert get(tier, "a") == [ReadOutcome.DAMAGED]
        assert get(tier, "a") == [MISS]


@pytest.mark.parametrize("nbytes", [BLOCK_BYTES, 300_000])
def test_a_client_of_this_machine_that_gets_no_memory_sends_its_blocks(tmp_path: Path, nbytes: int) -> None:
    with FakeServer(tmp_path / "s", maps=False) as server, opened(server.url) as tier:
        assert put(tier, *"abc", nbytes=nbytes) == [STORED] * 3
        assert get(tier, *"abcd", nbytes=nbytes) == [OK, OK, OK, MISS]
        assert tier.snapshot().mapped_bytes == 0
        assert all(asked.inline for asked in server.heard_of(Stage))


# ---- connections -----------------------------------------------------------------------------------------------------


def test_a_server_that_is_down_at_start_is_joined_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "fake.sock"
    with opened(f"kvtier+unix://{path}") as tier:
        assert not tier.is_joined
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "it joins by itself" in caplog.text
        assert get(tier, "a") == [ReadOutcome.ERROR]
        assert len(caplog.records) == 1
        with FakeServer(path) as server:
            server.epoch = 5
            tier.probe()
            assert put(tier, "a") == [STORED]
            assert (tier.epoch, tier.is_joined) == (5, True)
            assert tier.usage().capacity_bytes == POOL_BYTES


def test_idle_connections_that_were_cut_cost_no_call(server: FakeServer) -> None:
    with opened(server.url) as tier:
        for _ in range(3):
            assert put(tier, "a") in ([STORED], [WriteOutcome.ALREADY_STORED])
            server.cut()
            until("its memory is let go, though nobody asks", lambda: tier.snapshot().mapped_bytes == 0)
            assert tier.snapshot().connections == 0
        assert tier.snapshot().errors == {}


def test_threads_share_a_few_connections_and_one_mapping(server: FakeServer) -> None:
    gate = threading.Barrier(3)

    def slow(m: Stage) -> list[Staged]:
        return [Staged(m.id, bytes([StageOutcome.MISS]), [], [], [])]

    server.lies[Stage] = slow
    outcomes: list[ReadOutcome] = []
    with opened(server.url, connections=2) as tier:

        def work(name: int) -> None:
            gate.wait()
            for i in range(20):
                outcomes.extend(get(tier, f"{name} {i}"))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == [MISS] * 60
        assert server.num_accepted <= 3
        assert tier.snapshot().mapped_bytes == POOL_BYTES


def test_who_finds_no_free_connection_waits_for_one_until_his_time_is_over(server: FakeServer) -> None:
    server.lies[Ping] = lambda _: None
    with opened(server.url, connections=1) as tier:
        threads = [threading.Thread(target=raises, args=(TierError, tier.probe)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until("both are asking", lambda: len(server.heard_of(Ping)) == 2)
        began = time.monotonic()
        outcomes = get(tier, "a")
        assert time.monotonic() - began < TIMEOUT_S + 0.3
        assert outcomes in ([ReadOutcome.ERROR], [MISS])
        for thread in threads:
            thread.join()


def test_closing_ends_calls_under_way_and_says_goodbye(server: FakeServer) -> None:
    server.lies[Stage] = lambda _: None
    tier = ServerTier(settings_of(server.url, timeout_s=20.0), MonotonicClock())
    ended: list[BaseException] = []

    def call() -> None:
        try:
            get(tier, "a")
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until("it is asked", lambda: bool(server.heard_of(Stage)))
    began = time.monotonic()
    tier.close()
    thread.join()
    assert time.monotonic() - began < 5.0
    assert len(ended) == 1
    until("goodbye is heard", lambda: bool(server.heard_of(Bye)))


def test_closing_ends_calls_under_way_over_tcp(tcp_server: FakeServer) -> None:
    tcp_server.lies[Ping] = lambda _: None
    tier = ServerTier(settings_of(tcp_server.url, timeout_s=20.0), MonotonicClock())
    thread = threading.Thread(target=raises, args=(ClosedError, tier.probe))
    thread.start()
    until("it is asked", lambda: bool(tcp_server.heard_of(Ping)))
    tier.close()
    thread.join(5.0)
    assert not thread.is_alive()


def test_another_run_of_the_server_has_other_memory(tmp_path: Path) -> None:
    path = tmp_path / "fake.sock"
    with FakeServer(path) as server:
        tier = ServerTier(settings_of(server.url), MonotonicClock())
        put(tier, "a")
    with FakeServer(path) as server:
        assert get(tier, "a") == [MISS]
        assert put(tier, "a") == [STORED]
        assert get(tier, "a") == [OK]
        assert tier.snapshot().mapped_bytes == POOL_BYTES
        tier.close()


# ---- the token -------------------------------------------------------------------------------------------------------


def test_the_token_is_read_at_every_connect_and_shown_nowhere(
    tcp_server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first-secret\n")
    with caplog.at_level(logging.DEBUG), opened(tcp_server.url, token_file=str(token_file)) as tier:
        token_file.write_text("second-secret")
        tcp_server.cut()
        until("the cut arrives", lambda: tier._pool._idle[0].is_readable)
        tier.probe()
        assert [hello.token for hello in tcp_server.heard_of(Hello)] == ["first-secret", "second-secret"]
        token_file.unlink()
        tcp_server.cut()
        until("the cut arrives", lambda: tier._pool._idle[0].is_readable)
        with pytest.raises(TierError, match=r"server\.token_file: .* cannot be read: No such file"):
            tier.probe()
    assert "secret" not in caplog.text
    assert "secret" not in repr(vars(tier))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token_file": "/nowhere/token"}, r"server\.token_file: /nowhere/token cannot be read"),
        ({"tls_ca_file": "/nowhere/ca"}, r"server\.tls_ca_file = /nowhere/ca cannot be used"),
        ({"tls_cert_file": "/nowhere/c", "tls_key_file": "/nowhere/k"}, r"server\.tls_cert_file = /nowhere/c with"),
    ],
)
def test_files_that_cannot_be_used_are_said_at_start(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerTier(settings_of("kvtier+tcp://127.0.0.1:9", **settings), MonotonicClock())


def test_an_empty_token_is_none(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="has 0 letters"):
        ServerTier(settings_of("kvtier+tcp://127.0.0.1:9", token_file=str(tmp_path / "token")), MonotonicClock())


# ---- resets ----------------------------------------------------------------------------------------------------------


def test_after_a_reset_that_failed_nothing_is_found_or_stored(server: FakeServer) -> None:
    with opened(server.url) as tier:
        put(tier, "a")
        server.lies[StartEpoch] = lambda m: [Failed(m.id, "failed", "no")]
        with pytest.raises(TierError, match="no"):
            tier.start_epoch(1)
        assert get(tier, "a") == [MISS]
        assert tier.contains([key_of("a")]) == [False]
        assert put(tier, "b") == [WriteOutcome.WITHDRAWN]
        assert tier.remove([key_of("a")]) == 0
        assert tier.usage().num_blocks == 0
        assert not server.heard_of(Remove)
        server.lies.clear()
        tier.start_epoch(2)
        assert (tier.epoch, put(tier, "b"), get(tier, "b")) == (2, [STORED], [OK])


def test_a_write_during_a_reset_is_withdrawn(server: FakeServer) -> None:
    tiers: list[ServerTier] = []

    def commit(m: Commit) -> list[Committed]:
        thread = threading.Thread(target=tiers[0].start_epoch, args=(1,))
        del server.lies[Commit]
        thread.start()
        until("the reset has begun", lambda: tiers[0]._is_mute)
        threads.append(thread)
        return [Committed(m.id, bytes(1))]

    threads: list[threading.Thread] = []
    with opened(server.url) as tier:
        tiers.append(tier)
        server.lies[Commit] = commit
        assert put(tier, "a") == [WriteOutcome.WITHDRAWN]
        threads[0].join()
        assert tier.epoch == 1
        assert tier.usage().num_blocks == 0


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_mistakes_of_the_caller_raise(server: FakeServer) -> None:
    with opened(server.url) as tier:
        with pytest.raises(LayoutError, match="writable"):
            tier.read([ReadRequest(key_of("a"), memoryview(bytes(10)))])
        with pytest.raises(LayoutError, match="1 to"):
            tier.write([WriteRequest(key_of("a"), None, memoryview(b""))])
        with pytest.raises(ConfigError, match="48 bytes"):
            tier.contains([key_of("a")[:-1]])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="use fewer tokens"):
            tier.check_block(POOL_BYTES + 1)
        tier.check_block(POOL_BYTES)
        assert server.num_accepted == 1


def _in_child(tier: ServerTier, answer: multiprocessing.connection.Connection) -> None:
    try:
        get(tier, "a")
    except ForkedError as error:
        tier.close()
        answer.send((str(error), Path("/proc/self/maps").read_text().count("fake-pool")))
    os._exit(0)


def test_a_forks_child_is_refused_and_has_no_mapping(server: FakeServer) -> None:
    with opened(server.url) as tier:
        put(tier, "a")
        here, there = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(tier, there))
        child.start()
        assert here.poll(20.0)
        words, num_mappings = here.recv()
        child.join()
        assert "not to its fork" in words
        assert num_mappings == 1, "the server's own, which is in this process too"
        assert Path("/proc/self/maps").read_text().count("fake-pool") == 2
        assert get(tier, "a") == [OK]
        here.close()
        there.close()


def test_reads_into_memory_of_our_own_are_as_large_as_of_any_tier(server: FakeServer) -> None:
    with opened(server.url) as tier:
        assert put(tier, "a") == [WriteOutcome.STORED]
        for _ in range(3):
            assert get(tier, "a") == [OK]
            assert tier.read_bytes(1000, 10**9) == 1000
