"""What lies in Redis, how long, and what becomes of a block that is not what was written."""

from __future__ import annotations

import logging

import pytest

from kvtier.errors import ConfigError, LayoutError
from kvtier.frame import HEADER_BYTES, FrameHeader, frame_bytes
from kvtier.testing import FakeClock
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.redis import RedisTier
from tests.redis.rig import BLOCK_BYTES, block_of, frame_of, get, get_all, key_of, name_of, opened, put

STORED, ALREADY = WriteOutcome.STORED, WriteOutcome.ALREADY_STORED
OK, MISS, DAMAGED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.DAMAGED
FRAME_BYTES = frame_bytes(BLOCK_BYTES)


def test_a_value_is_the_frame_and_its_key_has_all_of_ours(server: RedisServer) -> None:
    parent = key_of("parent")
    with opened(server.url, prefix="some:thing", tenant="them") as tier:
        assert tier.write([WriteRequest(key_of("a"), parent, memoryview(block_of("a")))]) == [STORED]
    name = name_of(key_of("a"), prefix="some:thing", tenant="them")
    assert server.command("KEYS", "*") == [name.encode()]
    assert server.command("GET", name) == frame_of(key_of("a"), block_of("a"), parent, "them")


def test_tenants_prefixes_and_epochs_are_apart(server: RedisServer) -> None:
    with opened(server.url) as tier, opened(server.url, tenant="b") as other, opened(server.url, prefix="p") as third:
        put(tier, "a")
        assert [get(t, "a") for t in (tier, other, third)] == [OK, MISS, MISS]


def test_two_processes_share_blocks(server: RedisServer) -> None:
    with opened(server.url) as writer, opened(server.url) as reader:
        assert put(writer, *range(40)) == [STORED] * 40
        assert put(reader, *range(40)) == [ALREADY] * 40
        assert get_all(reader, *range(41)) == [OK] * 40 + [MISS]
        assert reader.contains([key_of(i) for i in range(41)]) == [True] * 40 + [False]
        assert (writer.usage().num_blocks, reader.usage().num_blocks) == (40, 0)
        assert writer.usage().used_bytes == 40 * FRAME_BYTES


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 100_000, (1 << 20) + 5, 3 << 20])
def test_lengths(server: RedisServer, nbytes: int) -> None:
    with opened(server.url, timeout_s=5.0) as tier:
        assert put(tier, *range(12), nbytes=nbytes) == [STORED] * 12
        assert get_all(tier, *range(12), "never", nbytes=nbytes) == [OK] * 12 + [MISS]


def test_more_than_may_be_on_its_way_at_once(server: RedisServer) -> None:
    with opened(server.url, timeout_s=10.0, ttl_s=60.0) as tier:
        names = range(24)
        assert put(tier, *names, nbytes=2 << 20) == [STORED] * 24
        assert get_all(tier, *names, nbytes=2 << 20) == [OK] * 24


def test_thousands_of_keys_are_looked_up_at_once(server: RedisServer) -> None:
    with opened(server.url, timeout_s=5.0) as tier:
        put(tier, *range(0, 50, 2))
        keys = [key_of(i) for i in range(10_000)]
        assert tier.contains(keys) == [i < 50 and i % 2 == 0 for i in range(10_000)]
        tier.touch(keys)
        assert tier.remove(keys) == 25


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole() -> bytes:
    return frame_of(key_of("a"), block_of("a"))


def verify_damaged(
    server: RedisServer, value: bytes, outcome: ReadOutcome = DAMAGED, nbytes: int = BLOCK_BYTES
) -> None:
    """It is told from the block, whatever comes before and after it is served, and it is gone afterwards."""
    name = name_of(key_of("a"))
    with opened(server.url) as tier:
        put(tier, "before", "after", nbytes=nbytes)
        server.command("SET", name, value)
        assert get_all(tier, "before", "a", "after", nbytes=nbytes) == [OK, outcome, OK]
        assert server.command("EXISTS", name) == (0 if outcome is DAMAGED else 1)
        assert tier.snapshot().damaged == (outcome is DAMAGED)
        assert get(tier, "a", nbytes=nbytes) is (MISS if outcome is DAMAGED else outcome)


@pytest.mark.parametrize("place", [0, 9, 11, 15, 16, 70, 112, 119, 127, 135, 136, 150, 161, 1000, HEADER_BYTES - 1])
def test_a_flipped_byte_of_the_header(server: RedisServer, whole: bytes, place: int) -> None:
    value = bytearray(whole)
    value[place] ^= 0x20
    verify_damaged(server, bytes(value))


@pytest.mark.parametrize("place", [0, 1, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_a_flipped_byte_of_the_block(server: RedisServer, whole: bytes, place: int) -> None:
    value = bytearray(whole)
    value[HEADER_BYTES + place] ^= 1
    verify_damaged(server, bytes(value))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x",
        b"a foreign string",
        b"x" * HEADER_BYTES,
        b"x" * FRAME_BYTES,
        b"x" * (FRAME_BYTES + 1000),
        b"x" * (FRAME_BYTES + (1 << 16) - 2),
        b"x" * (FRAME_BYTES + (1 << 16)),
        b"x" * (1 << 20),
        b"\r\n" * 5000,
        b"$-1\r\n" * 4000,
    ],
    ids=lambda value: f"{value[:2]!r}*{len(value)}",
)
def test_foreign_strings(server: RedisServer, value: bytes) -> None:
    verify_damaged(server, value)


def test_part_of_a_frame_and_more_than_one(server: RedisServer, whole: bytes) -> None:
    for value in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:HEADER_BYTES],
        whole[:100],
        whole + b"\0",
        whole + whole,
    ):
        verify_damaged(server, value)


def test_frames_that_belong_elsewhere(server: RedisServer) -> None:
    verify_damaged(server, frame_of(key_of("b"), block_of("a")))
    verify_damaged(server, frame_of(key_of("a", "two"), block_of("a")))
    verify_damaged(server, frame_of(key_of("a"), block_of("a"), tenant="other"))
    verify_damaged(server, frame_of(key_of("a"), block_of("a"), codec=1))


def test_a_whole_block_of_another_length_is_a_miss_and_stays(server: RedisServer) -> None:
    for nbytes in (1, 4096, BLOCK_BYTES + 1, BLOCK_BYTES * 2, 1 << 20):
        verify_damaged(server, frame_of(key_of("a"), block_of("a", nbytes)), MISS)


def test_a_frame_of_a_later_kvtier_is_a_miss_and_stays(server: RedisServer, whole: bytes) -> None:
    import struct

    import xxhash

    page = bytearray(whole[: HEADER_BYTES - 8])
    page[8:10] = struct.pack("<H", 9)
    value = bytes(page) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page))) + whole[HEADER_BYTES:]
    verify_damaged(server, value, MISS)


def test_a_long_block_with_a_flipped_byte(server: RedisServer) -> None:
    nbytes = (1 << 20) + 77
    value = bytearray(frame_of(key_of("a"), block_of("a", nbytes)))
    value[HEADER_BYTES + nbytes - 1] ^= 1
    verify_damaged(server, bytes(value), nbytes=nbytes)


def test_a_key_of_another_type(server: RedisServer) -> None:
    name = name_of(key_of("a"))
    with opened(server.url) as tier:
        server.command("RPUSH", name, "one", "two")
        assert put(tier, "a") == [ALREADY]
        put(tier, "b")
        assert get_all(tier, "b", "a", "b") == [OK, DAMAGED, OK]
        assert server.command("EXISTS", name) == 0
        assert put(tier, "a") == [STORED]


def test_many_oversized_values_in_a_batch_spoil_nothing(server: RedisServer) -> None:
    with opened(server.url, timeout_s=5.0) as tier:
        put(tier, *range(0, 20, 2))
        for i in range(1, 20, 2):
            server.command("SET", name_of(key_of(i)), b"x" * (1 << 19))
        assert get_all(tier, *range(20)) == [OK, DAMAGED] * 10
        assert tier.snapshot().connections <= 4


# ---- lifetimes -------------------------------------------------------------------------------------------------------


def ttl_of(server: RedisServer, name: object) -> int:
    ttl = server.command("PTTL", name_of(key_of(name)))
    assert isinstance(ttl, int)
    return ttl


def test_without_lifetimes_blocks_have_no_end(server: RedisServer) -> None:
    with opened(server.url) as tier:
        put(tier, "a")
        get(tier, "a")
        tier.touch([key_of("a")])
        put(tier, "a")
        assert ttl_of(server, "a") == -1


def test_a_lifetime_begins_again_at_each_use(server: RedisServer) -> None:
    with opened(server.url, ttl_s=100.0) as tier:
        put(tier, "a")
        for use in (
            lambda: get(tier, "a"),
            lambda: tier.touch([key_of("a")]),
            lambda: put(tier, "a"),
        ):
            assert 90_000 < ttl_of(server, "a") <= 100_000
            server.command("PEXPIRE", name_of(key_of("a")), 5000)
            tier.contains([key_of("a")])
            assert ttl_of(server, "a") <= 5000
            use()
        assert 90_000 < ttl_of(server, "a") <= 100_000


def test_a_block_may_have_a_lifetime_of_its_own(server: RedisServer) -> None:
    with opened(server.url, ttl_s=100.0) as tier, opened(server.url) as other:
        put(tier, "a", ttl_s=500.0)
        assert 400_000 < ttl_of(server, "a") <= 500_000
        get(tier, "a")
        tier.touch([key_of("a")])
        assert ttl_of(server, "a") > 400_000
        put(other, "b", ttl_s=0.0004)
        assert ttl_of(server, "b") in (-2, 0, 1)
        put(other, "c", ttl_s=50.0)
        get(other, "c")
        assert 0 < ttl_of(server, "c") <= 50_000


def test_a_block_whose_time_is_over_is_a_miss(server: RedisServer) -> None:
    with opened(server.url) as tier:
        put(tier, "a", ttl_s=0.001)
        put(tier, "b")
        while server.command("EXISTS", name_of(key_of("a"))):
            pass
        assert get_all(tier, "a", "b") == [MISS, OK]
        assert tier.usage().num_blocks == 1


# ---- room ------------------------------------------------------------------------------------------------------------


def test_an_evicted_block_is_a_miss_and_not_on_the_books(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.command("CONFIG", "SET", "maxmemory", str(int(server.info("memory")["used_memory"]) + (4 << 20)))
    try:
        with opened(server.url, timeout_s=5.0) as tier:
            for i in range(60):
                assert put(tier, i, nbytes=200_000) == [STORED]
            outcomes = get_all(tier, *range(60), nbytes=200_000)
            assert {OK, MISS} == set(outcomes)
            assert tier.usage().num_blocks <= outcomes.count(OK) + 1
            assert tier.usage().capacity_bytes == int(str(server.info("memory")["maxmemory"]))
    finally:
        server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


def num_sets(server: RedisServer) -> int:
    line = server.info("commandstats").get("cmdstat_set", "calls=0,rejected_calls=0")
    fields = dict(part.split("=") for part in line.split(","))
    return int(fields["calls"]) + int(fields.get("rejected_calls", 0))


@pytest.mark.bug("CR17")
def test_a_full_server_is_sent_no_block_for_a_while(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with opened(server.url, clock, timeout_s=5.0) as tier:
        assert put(tier, "held") == [STORED]
        server.command("CONFIG", "SET", "maxmemory", "1000000")
        before = num_sets(server)
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                outcomes = put(tier, "held", *range(10), nbytes=100_000)
                assert outcomes == [ALREADY] + [WriteOutcome.FULL] * 10
        assert 1 <= num_sets(server) - before <= 10
        assert (tier.snapshot().full_backoffs, tier.snapshot().errors["OOM"]) == (1, 1)
        assert [record.message.count("maxmemory") for record in caplog.records] == [2]
        assert get(tier, "held") is OK
        server.command("CONFIG", "SET", "maxmemory", "0")
        assert put(tier, 1) == [WriteOutcome.FULL]
        clock.advance(1.001)
        assert put(tier, *range(10)) == [STORED] * 10
        assert tier.snapshot().disconnects == 0


def test_a_block_that_no_value_holds(server: RedisServer) -> None:
    with opened(server.url) as tier:
        tier.check_block((512 << 20) - HEADER_BYTES)
        with pytest.raises(ConfigError, match=r"redis\.url"):
            tier.check_block((512 << 20) - HEADER_BYTES + 1)


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_mistakes_of_the_caller(server: RedisServer) -> None:
    with opened(server.url) as tier:
        with pytest.raises(LayoutError, match="writable"):
            tier.read([ReadRequest(key_of("a"), memoryview(b"x"))])
        with pytest.raises(LayoutError, match="1 to"):
            tier.write([WriteRequest(key_of("a"), None, memoryview(b""))])
        with pytest.raises(ConfigError, match="48 bytes"):
            tier.contains([key_of("a")[:-1]])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="48 bytes"):
            tier.write([WriteRequest(key_of("a"), key_of("b")[:-1], memoryview(b"x"))])  # type: ignore[arg-type]


def test_the_header_says_whose_block_it_is(server: RedisServer) -> None:
    with opened(server.url, tenant="them") as tier:
        put(tier, "a")
    value = server.command("GET", name_of(key_of("a"), tenant="them"))
    assert isinstance(value, bytes)
    header = FrameHeader.decode(value)
    assert (header.tenant, header.key, header.parent, header.codec) == ("them", key_of("a"), None, 0)


def test_usage_is_asked_for_again_while_blocks_are_written(server: RedisServer) -> None:
    clock = FakeClock()
    with opened(server.url, clock) as tier:
        put(tier, 1)
        server.command("CONFIG", "SET", "maxmemory", "123456789")
        put(tier, 2)
        assert tier.usage().capacity_bytes != 123456789
        clock.advance(1.5)
        put(tier, 3)
        assert tier.usage().capacity_bytes == 123456789
        assert tier.snapshot().server_used_bytes > 0


def test_the_name_and_kind(server: RedisServer) -> None:
    assert (RedisTier.name, RedisTier.is_remote) == ("redis", True)
