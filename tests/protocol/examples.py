"""One message of every type, whose bytes frames.txt pins, and strategies that draw any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvtier.protocol import messages as m
from kvtier.protocol.outcomes import CommitOutcome, DurableOutcome, PublishOutcome, ReserveOutcome, StageOutcome

NAMESPACE = bytes(range(16))
FIRST = bytes(range(32, 64))
SECOND = bytes(range(64, 96))
BOTH = FIRST + SECOND

CLIENT: list[tuple[Any, bytes]] = [
    (m.Hello(1, [1, 2], "kvtier 0.9", "s3cret", wants_mapping=True), b""),
    (m.Ping(2), b""),
    (m.Lookup(3, NAMESPACE, BOTH, "chat-7"), b""),
    (m.Reserve(4, NAMESPACE, 2_621_440, BOTH, bytes(32) + FIRST, 3_600_000), b""),
    (m.Commit(5, [7, 8], [0x0123456789ABCDEF, 2**64 - 1]), b"firstSECOND"),
    (m.Abort(0, [7, 8]), b""),
    (m.Stage(6, NAMESPACE, 2_621_440, BOTH, b"", 250, inline=False, request="chat-7"), b""),
    (m.Release(0, [9, 2**63 - 1]), b""),
    (m.Cancel(6), b""),
    (m.Remove(2**53 - 1, NAMESPACE, FIRST), b""),
    (m.Touch(NAMESPACE, SECOND, FIRST), b""),
    (m.WaitDurable(300, NAMESPACE, BOTH, "disk", 600_000), b""),
    (m.StartEpoch(70_000, 12), b""),
    (m.Stats(13), b""),
    (m.Bye(), b""),
    (m.Tell("chat-7", "admitted", 30, ["host", "disk"], [8, 4], "absent", "", 250, 2000), b""),
    (m.Grant(14, 2_621_440, 256), b""),
    (
        m.Publish(15, NAMESPACE, 2_621_440, [10, 11], BOTH, bytes(32) + FIRST, [0x0123456789ABCDEF, 2**64 - 1], 5000),
        b"",
    ),
]
SERVER: list[tuple[Any, bytes]] = [
    (
        m.Welcome(
            id=1,
            version=1,
            software="kvtier 0.9",
            tenant="team-ü",
            mapping_bytes=1 << 32,
            checksums=True,
            epoch=11,
            credits=64,
            max_payload_bytes=(1 << 32) - 1,
            capacity_bytes=1 << 32,
            tiers=["disk", "redis"],
        ),
        b"",
    ),
    (m.Failed(0, "closing", "the server is going down"), b""),
    (m.Pong(2), b""),
    (m.Held(3, b"\1\2"), b""),
    (m.Reserved(4, bytes((ReserveOutcome.RESERVED, ReserveOutcome.BEING_STORED)), [7], [2_621_440]), b""),
    (m.Committed(5, bytes((CommitOutcome.STORED, CommitOutcome.VOID))), b""),
    (m.Staged(6, bytes((StageOutcome.OK, StageOutcome.TIMEOUT)), [9], [0], [0x0123456789ABCDEF]), b""),
    (m.Staged(6, bytes((StageOutcome.OK, StageOutcome.OK)), [], [], [1, 2**64 - 1]), b"firstSECOND"),
    (m.Done(8), b""),
    (m.Count(9, 2), b""),
    (m.Durable(300, bytes((DurableOutcome.DURABLE, DurableOutcome.LATE))), b""),
    (m.Epoch(70_000, 12), b""),
    (m.StatsAnswer(13, {"uptime_s": 1.5, "software": "kvtier 0.9", "host": {"blocks": 3}}), b""),
    (m.Granted(14, [10, 11], [0, 2_621_440]), b""),
    (m.Published(15, bytes((PublishOutcome.STORED, PublishOutcome.VOID))), b""),
]

FRAMES = Path(__file__).with_name("frames.txt")


def golden_frames() -> list[tuple[str, bytes]]:
    """Type and bytes of every line of frames.txt, client's first."""
    lines = [line for line in FRAMES.read_text().splitlines() if line and not line.startswith("#")]
    return [(name, bytes.fromhex(digits)) for name, digits in (line.split(maxsplit=1) for line in lines)]


ids = st.integers(1, 2**53 - 1)
some_ids = st.integers(0, 2**53 - 1)
sizes = st.integers(0, 2**63 - 1)
short_texts = st.text(max_size=64)
namespaces = st.binary(min_size=16, max_size=16)
checksums = st.integers(0, 2**64 - 1)
handles = st.integers(1, 2**63 - 1)
parents = st.just(b"") | st.binary(min_size=32, max_size=32)
counts = st.integers().filter(lambda number: -(2**63) <= number < 2**64) | st.floats(allow_nan=False) | short_texts


def digests(at_most: int = 8) -> st.SearchStrategy[bytes]:
    return st.integers(1, at_most).flatmap(lambda blocks: st.binary(min_size=32 * blocks, max_size=32 * blocks))


def lists(of: st.SearchStrategy[int], length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(of, min_size=length, max_size=length)


@st.composite
def reserves(draw: st.DrawFn) -> m.Reserve:
    named = draw(digests())
    before = draw(st.binary(min_size=len(named), max_size=len(named)))
    return m.Reserve(draw(ids), draw(namespaces), draw(st.integers(1, 1 << 32)), named, before, draw(sizes))


@st.composite
def commits(draw: st.DrawFn) -> m.Commit:
    length = draw(st.integers(0, m.MAX_BLOCKS))
    return m.Commit(draw(ids), draw(lists(handles, length)), draw(lists(checksums, length)))


@st.composite
def publishes(draw: st.DrawFn) -> m.Publish:
    named = draw(digests())
    before = draw(st.binary(min_size=len(named), max_size=len(named)))
    length = len(named) // 32
    sums = draw(lists(checksums, length))
    nbytes = draw(st.integers(1, 1 << 32))
    return m.Publish(
        draw(ids), draw(namespaces), nbytes, draw(lists(handles, length)), named, before, sums, draw(sizes)
    )


@st.composite
def granted(draw: st.DrawFn) -> m.Granted:
    length = draw(st.integers(0, m.MAX_BLOCKS))
    return m.Granted(draw(ids), draw(lists(handles, length)), draw(lists(sizes, length)))


@st.composite
def reserved(draw: st.DrawFn) -> m.Reserved:
    outcomes = bytes(draw(st.lists(st.integers(0, ReserveOutcome.FULL), max_size=16)))
    there = outcomes.count(ReserveOutcome.RESERVED)
    return m.Reserved(draw(ids), outcomes, draw(lists(handles, there)), draw(lists(sizes, there)))


@st.composite
def staged(draw: st.DrawFn) -> m.Staged:
    outcomes = bytes(draw(st.lists(st.integers(0, StageOutcome.FULL), max_size=16)))
    there = outcomes.count(StageOutcome.OK)
    leased = there if draw(st.booleans()) else 0
    sums = draw(lists(checksums, there))
    return m.Staged(draw(ids), outcomes, draw(lists(handles, leased)), draw(lists(sizes, leased)), sums)


client_messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        m.Hello,
        ids,
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=16),
        short_texts,
        st.text(max_size=512),
        st.booleans(),
    ),
    st.builds(m.Ping, ids),
    st.builds(m.Lookup, ids, namespaces, digests(40), short_texts),
    reserves(),
    commits(),
    st.builds(m.Abort, some_ids, st.lists(handles, max_size=m.MAX_BLOCKS)),
    st.builds(
        m.Stage,
        ids,
        namespaces,
        st.integers(1, 1 << 32),
        digests(),
        parents,
        st.integers(0, m.MAX_WAIT_MS),
        st.booleans(),
        short_texts,
    ),
    st.builds(m.Release, some_ids, st.lists(handles, max_size=m.MAX_BLOCKS)),
    st.builds(m.Cancel, ids),
    st.builds(m.Remove, ids, namespaces, digests()),
    st.builds(m.Touch, namespaces, digests(), parents),
    st.builds(m.WaitDurable, ids, namespaces, digests(), short_texts, st.integers(0, m.MAX_WAIT_MS)),
    st.builds(m.StartEpoch, ids, sizes),
    st.builds(m.Stats, ids),
    st.just(m.Bye()),
    st.builds(
        lambda name, fate, asked, served, reason, tier, waited: m.Tell(
            name, fate, asked, list(served), list(served.values()), reason, tier, waited, waited
        ),
        st.text(max_size=128),
        short_texts,
        sizes,
        st.dictionaries(short_texts, sizes, max_size=16),
        short_texts,
        short_texts,
        sizes,
    ),
    st.builds(m.Grant, ids, st.integers(1, 1 << 32), st.integers(1, m.MAX_BLOCKS)),
    publishes(),
)
server_messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        m.Welcome,
        ids,
        sizes,
        short_texts,
        short_texts,
        sizes,
        st.booleans(),
        sizes,
        st.integers(1, 1 << 16),
        sizes,
        sizes,
        st.lists(short_texts, max_size=16),
    ),
    st.builds(m.Failed, some_ids, short_texts, st.text(max_size=1024)),
    st.builds(m.Pong, ids),
    st.builds(m.Held, ids, st.binary(max_size=64)),
    reserved(),
    st.builds(m.Committed, ids, st.lists(st.integers(0, CommitOutcome.VOID), max_size=16).map(bytes)),
    staged(),
    st.builds(m.Done, ids),
    st.builds(m.Count, ids, sizes),
    st.builds(m.Durable, ids, st.lists(st.integers(0, DurableOutcome.LATE), max_size=16).map(bytes)),
    st.builds(m.Epoch, ids, sizes),
    st.builds(
        m.StatsAnswer,
        ids,
        st.dictionaries(short_texts, counts | st.dictionaries(short_texts, counts, max_size=3), max_size=5),
    ),
    granted(),
    st.builds(m.Published, ids, st.lists(st.integers(0, PublishOutcome.VOID), max_size=16).map(bytes)),
)
