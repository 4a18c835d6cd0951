"""The parts that need no server: commands, replies, slots, addresses, books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvtier.clock import MonotonicClock
from kvtier.keys import KEY_BYTES, Key
from kvtier.testing import FakeClock
from kvtier.tiers.ledger import MAX_BLOCKS, Ledger
from kvtier.tiers.redis.address import Address, parse_address
from kvtier.tiers.redis.backoff import FullBackoff
from kvtier.tiers.redis.replies import Meaning, Redirect, hint, meaning, redirect
from kvtier.tiers.redis.resp import ErrorReply, ProtocolError, encode, parse_number, repeated
from kvtier.tiers.redis.servers import ServerInfo
from kvtier.tiers.redis.slots import slot_of, slots_of
from tests.redis.rig import key_of, name_of

keys = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(Key), min_size=1, max_size=50)
prefixes = st.from_regex(r"[A-Za-z0-9_.:-]{1,64}", fullmatch=True)


@given(prefixes, keys)
def test_slots_are_those_of_redis_py(prefix: str, some: list[Key]) -> None:
    names = [f"{prefix}{key[:16].hex()}:{key[16:].hex()}" for key in some]
    assert slots_of(prefix, some) == [key_slot(name.encode()) for name in names] == [slot_of(name) for name in names]


@given(prefixes, keys, st.sampled_from([(), ("GT",), (12345, "GT")]), st.sampled_from([b"", encode("ASKING")]))
def test_repeated_commands_are_those_one_by_one(
    prefix: str, some: list[Key], options: tuple[str | int, ...], before: bytes
) -> None:
    one_by_one = [before + encode("PEXPIRE", f"{prefix}{key[:16].hex()}:{key[16:].hex()}", *options) for key in some]
    assert repeated("PEXPIRE", prefix, some, *options, before=before) == b"".join(one_by_one)
    assert repeated("PEXPIRE", prefix, []) == b""


def test_a_command() -> None:
    assert encode("SET", b"\r\n", 12) == b"*3\r\n$3\r\nSET\r\n$2\r\n\r\n\r\n$2\r\n12\r\n"
    assert name_of(key_of("a")).count(":") == 4


@pytest.mark.parametrize("digits", [b"", b"-", b"--1", b"+1", b" 1", b"1 ", b"1_0", b"0x1", b"1" * 21, b"\xd9\xa3"])
def test_what_is_no_number(digits: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_number(digits)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MOVED 3999 127.0.0.1:6381", Redirect(3999, Address("127.0.0.1", 6381), asking=False)),
        ("ASK 0 host.example:1", Redirect(0, Address("host.example", 1), asking=True)),
        ("MOVED 1 :7", Redirect(1, Address("asked", 7), asking=False)),
        ("MOVED 1 ::1:6379", Redirect(1, Address("::1", 6379), asking=False)),
        ("MOVED 16384 a:1", None),
        ("MOVED 1 a:0", None),
        ("MOVED 1 a:65536", None),
        ("MOVED 1", None),
        ("MOVED -1 a:1", None),
        ("ERR 1 a:1", None),
        ("", None),
    ],
)
def test_redirects(text: str, expected: Redirect | None) -> None:
    assert redirect(ErrorReply(text), Address("asked", 1)) == expected


def test_meanings_and_hints() -> None:
    assert meaning(ErrorReply("OOM command not allowed")) is Meaning.FULL
    assert meaning(ErrorReply("SOMETHING else")) is Meaning.FAILED
    assert hint(ErrorReply("LOADING wait")) is None
    assert "redis.password" in str(hint(ErrorReply("ERR AUTH <password> called without any password configured")))
    assert "+asking" in str(hint(ErrorReply("NOPERM no")))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://host", "host:6379"),
        ("rediss://host:1", "host:1"),
        ("redis://[::1]:2", "[::1]:2"),
        ("unix:///run/redis.sock", "/run/redis.sock"),
    ],
)
def test_addresses(url: str, text: str) -> None:
    assert str(parse_address(url)) == text


def test_what_info_says() -> None:
    told = b"# Server\r\nredis_mode:cluster\r\nmaxmemory:0\r\ntotal_system_memory:77\r\nused_memory:5\r\nrole:slave\r\n"
    assert ServerInfo.parse(told) == ServerInfo("cluster", "slave", 77, 5)
    assert ServerInfo.parse(b"maxmemory:-3\r\nused_memory:1e9\r\nx\r\n\xff:\xff") == ServerInfo("", "", 0, 0)


def test_the_books_have_a_bound() -> None:
    ledger = Ledger("redis")
    some = [Key(i.to_bytes(KEY_BYTES, "big")) for i in range(MAX_BLOCKS + 3)]
    ledger.add([(key, 10) for key in some])
    ledger.check_integrity()
    assert ledger.holdings == (MAX_BLOCKS, 10 * MAX_BLOCKS)
    ledger.discard(some[:4])
    assert ledger.holdings.num_blocks == MAX_BLOCKS - 1
    ledger.add([(some[-1], 30)])
    assert ledger.holdings.nbytes == 10 * (MAX_BLOCKS - 1) + 20
    ledger.clear()
    ledger.check_integrity()
    assert ledger.holdings == (0, 0)


def test_a_backoff_ends_also_where_the_clock_goes_back() -> None:
    clock = FakeClock()
    backoff, address = FullBackoff(clock), Address("a", 1)
    assert not backoff.is_on(address)
    backoff.begin(address)
    assert backoff.is_on(address)
    assert not backoff.is_on(Address("b", 1))
    clock.advance(0.999)
    assert backoff.is_on(address)
    clock.advance(0.002)
    assert not backoff.is_on(address)
    backoff.begin(address)
    clock.advance(-100.0)
    assert not backoff.is_on(address)
    assert backoff.num_begun == 2
    assert MonotonicClock().now() > 0
