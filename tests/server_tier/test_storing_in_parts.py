"""How a batch is stored: over TCP in parts, each sent while the one before is answered; hashed meanwhile."""

from __future__ import annotations

import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvtier.frame import payload_checksum
from kvtier.protocol.messages import ClientMessage, Commit, Failed, Reserve, Reserved, ReserveOutcome
from kvtier.tiers.base import ReadOutcome, WriteOutcome, WriteRequest
from kvtier.tiers.server import copies, storing
from kvtier.tiers.server.connection import Connection
from tests.server_tier.rig import BLOCK_BYTES, FakeServer, Said, block_of, get, key_of, keys_in, opened, put

OK, STORED, FULL, ERROR = ReadOutcome.OK, WriteOutcome.STORED, WriteOutcome.FULL, WriteOutcome.ERROR
ALREADY_STORED = WriteOutcome.ALREADY_STORED
AT_ONCE = 3
"""Blocks of a part."""
LONG_S = 20.0
SILENCE_MS = 20.0
"""After which a client is taken to wait for an answer."""


class Commits(FakeServer):
    """Notes what comes with each Commit, and answers it, and Reserves of some keys, as it is told."""

    def __init__(self, path: Path | None = None, **options: Any) -> None:
        self.came: list[tuple[Commit, bytes]] = []
        self.failed: set[int] = set()
        """Commits, the first is 1, that are answered Failed."""
        self.breaks_at = 0
        """The Commit with whose last byte the connection ends, before it is answered; 0: none."""
        self.num_held = 0
        """Of so many Commits each is answered once the whole of the next has come."""
        self.forced: dict[bytes, list[int]] = {}
        """By key, outcomes of Reserve, the last for ever; RESERVED: as it would be."""
        self.thinks: Callable[[], object] = lambda: None
        """Called before a Reserve is answered."""
        self.has_reserved = threading.Event()
        self._kept: list[Said] = []
        super().__init__(path, **options)

    def _take(self, peer: Any, message: ClientMessage, payload: bytes) -> None:
        if isinstance(message, Reserve):
            self.thinks()
        super()._take(peer, message, payload)
        if isinstance(message, Reserve):
            self.has_reserved.set()

    def _answer(self, peer: Any, message: ClientMessage, payload: bytes) -> list[Said]:
        if not isinstance(message, Commit):
            return super()._answer(peer, message, payload)
        self.came.append((message, payload))
        number = len(self.came)
        if number == self.breaks_at:
            raise ConnectionAbortedError  # which ends the thread that serves it
        said: list[Said] = (
            [Failed(message.id, "failed", "no")] if number in self.failed else super()._answer(peer, message, payload)
        )
        self._kept += said
        due = len(self._kept) - (number < self.num_held)
        said, self._kept = self._kept[:due], self._kept[due:]
        return said

    def _reserve(self, peer: Any, message: Reserve) -> Reserved:
        keys = keys_in(message.namespace, message.digests)
        outcomes = [self._forced(key) for key in keys]
        asked = b"".join(key[16:] for key, outcome in zip(keys, outcomes, strict=True) if not outcome)
        given = super()._reserve(peer, structs.replace(message, digests=asked, parents=bytes(len(asked))))
        rest = iter(given.outcomes)
        merged = bytes(outcome or next(rest) for outcome in outcomes)
        return Reserved(message.id, merged, given.reservations, given.offsets)

    def _forced(self, key: bytes) -> int:
        left = self.forced.get(key, [ReserveOutcome.RESERVED])
        return left.pop(0) if len(left) > 1 else left[0]

    @property
    def sizes(self) -> list[int]:
        """Blocks of each Commit."""
        return [len(message.reservations) for message, _ in self.came]

    def verify(self, *names: object, nbytes: int = BLOCK_BYTES) -> None:
        """That these came, in this order and with their checksums, and no more."""
        blocks = [block_of(name, nbytes) for name in names]
        assert b"".join(payload for _, payload in self.came) == b"".join(blocks)
        assert all(len(payload) == nbytes * len(message.reservations) for message, payload in self.came)
        sums = [checksum for message, _ in self.came for checksum in message.checksums]
        assert sums == [payload_checksum(block) if self.checksums else 0 for block in blocks]


class Patient(Commits):
    """Answers once nothing more comes: so much is outstanding, and `most` at once."""

    most = 0

    def __init__(self, **options: Any) -> None:
        self._due: list[Said] = []
        super().__init__(**options)

    def _answer(self, peer: Any, message: ClientMessage, payload: bytes) -> list[Said]:
        said = super()._answer(peer, message, payload)
        if not isinstance(message, (Reserve, Commit)):
            return said
        self._due += said
        self.most = max(self.most, len(self._due))
        waiting = select.poll()
        waiting.register(peer.sock, select.POLLIN)
        if waiting.poll(SILENCE_MS):
            return []
        due, self._due = self._due, []
        return due


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "SENT_BYTES", AT_ONCE * BLOCK_BYTES + 1)


@pytest.fixture
def server() -> Iterator[Commits]:
    with Commits() as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES  # and so a batch is of ten blocks
        yield server


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("credits_", [1, 2, 3, 8])
def test_a_batch_is_sent_in_parts(credits_: int, checksums: bool) -> None:
    with Commits(credits_=credits_, checksums=checksums) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        with opened(server.url) as tier:
            assert put(tier, *range(24)) == [STORED] * 24
            assert [len(m.digests) // 32 for m in server.heard_of(Reserve)] == [10, 10, 4]
            assert server.sizes == [3, 3, 3, 1, 3, 3, 3, 1, 3, 1]
            server.verify(*range(24))
            assert get(tier, *range(24)) == [OK] * 24
            assert server.num_accepted == 1


def test_a_block_that_is_longer_than_a_part_goes_alone(server: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "SENT_BYTES", BLOCK_BYTES - 1)
    with opened(server.url) as tier:
        assert put(tier, *range(4)) == [STORED] * 4
        assert server.sizes == [1] * 4
        server.verify(*range(4))


@pytest.mark.parametrize("maps", [True, False])
def test_only_what_is_sent_goes_in_parts(tmp_path: Path, maps: bool) -> None:
    with Commits(tmp_path / "s", maps=maps) as server, opened(server.url) as tier:
        assert put(tier, *range(7)) == [STORED] * 7
        assert server.sizes == ([7] if maps else [3, 3, 1])
        assert get(tier, *range(7)) == [OK] * 7


@pytest.mark.parametrize("credits_", [1, 3])
def test_parts_are_of_the_blocks_that_were_reserved(credits_: int) -> None:
    already, being, full = ReserveOutcome.ALREADY_STORED, ReserveOutcome.BEING_STORED, ReserveOutcome.FULL
    with Commits(credits_=credits_) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        server.forced = {
            key_of(1): [already],
            key_of(4): [full],
            key_of(5): [being, being, ReserveOutcome.RESERVED],
            key_of(9): [being],  # to the end
            key_of(11): [already],
        }
        server.forced |= {key_of(number): [full] for number in range(20, 30)}  # all of a batch
        with opened(server.url) as tier:
            outcomes = dict(enumerate(put(tier, *range(35))))
            others = {1: ALREADY_STORED, 4: FULL, 9: FULL, 11: ALREADY_STORED} | dict.fromkeys(range(20, 30), FULL)
            assert outcomes == dict.fromkeys(range(35), STORED) | others
            stored = [number for number in range(35) if number not in others and number != 5]
            server.verify(*stored, 5)
            assert max(server.sizes) == AT_ONCE
            assert tier.snapshot().errors == {}
            assert server.num_accepted == 1


@pytest.mark.parametrize("credits_", [1, 3, 8])
@pytest.mark.parametrize("failed", [{1}, {2}, {4}, {5}, {8}, {1, 2, 3}])
def test_a_part_that_fails_is_no_other_ones_failure(credits_: int, failed: set[int]) -> None:
    with Commits(credits_=credits_) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        server.failed = failed
        with opened(server.url) as tier:
            outcomes = put(tier, *range(20))
            parts = [(0, 3), (3, 6), (6, 9), (9, 10), (10, 13), (13, 16), (16, 19), (19, 20)]
            for number, (begin, end) in enumerate(parts, 1):
                assert outcomes[begin:end] == [ERROR if number in failed else STORED] * (end - begin)
            server.verify(*range(20))
            server.failed = set()
            assert put(tier, "after") == [STORED]
            assert server.num_accepted == 1


@pytest.mark.parametrize("credits_", [3, 4, 64])
def test_a_part_is_answered_only_once_the_next_has_come(credits_: int) -> None:
    with Commits(credits_=credits_) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        server.num_held = 10
        with opened(server.url, timeout_s=5.0) as tier:
            assert put(tier, *range(24)) == [STORED] * 24
            assert server.sizes == [3, 3, 3, 1, 3, 3, 3, 1, 3, 1]
            server.verify(*range(24))


@pytest.mark.parametrize("credits_", [1, 2, 3, 8])
def test_no_more_is_outstanding_than_the_server_allows(credits_: int) -> None:
    with Patient(credits_=credits_) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        with opened(server.url, timeout_s=5.0) as tier:
            assert put(tier, *range(24)) == [STORED] * 24
            assert server.most in ({1} if credits_ < 3 else {2, 3})
            server.verify(*range(24))


@pytest.mark.parametrize("credits_", [1, 3])
@pytest.mark.parametrize("breaks_at", [1, 2, 3, 6])
def test_what_was_answered_before_a_connection_broke_is_kept(credits_: int, breaks_at: int) -> None:
    with Commits(credits_=credits_) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        server.breaks_at = breaks_at
        with opened(server.url) as tier:
            outcomes = put(tier, *range(20))
            num_kept = sum([3, 3, 3, 1, 3, 3, 3, 1][: breaks_at - 1])
            assert outcomes == [STORED] * num_kept + [ERROR] * (20 - num_kept)
            assert len(server.came) == breaks_at
            server.breaks_at = 0
            rest = put(tier, *range(20))
            assert rest == [ALREADY_STORED] * num_kept + [STORED] * (20 - num_kept)


# ---- while the server thinks -----------------------------------------------------------------------------------------


class Hashing:
    """Counts what is hashed, by position, wherever; how much was, as the first answer was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: Mapping[bytes, object]) -> None:
        self._names = names
        self.hashed: list[object] = []
        self.before: int | None = None
        self.enough = threading.Event()
        self.stop_at = 1 << 30
        self.server: Commits | None = None
        checksum, copy_in, answer = copies.checksum, copies.copy_in, Connection.answer

        def summed(block: memoryview) -> int:
            self._note(bytes(block))
            return checksum(block)

        def copied(target: Any, source: Any, *, hashed: bool) -> int:
            if hashed:
                self._note(source.tobytes())
            return copy_in(target, source, hashed=hashed)

        def answered(connection: Connection, number: int, kind: type) -> Any:
            if kind is Reserved and self.before is None:
                self.before = len(self.hashed)
                self.enough.set()
            return answer(connection, number, kind)

        monkeypatch.setattr(storing, "checksum", summed)
        monkeypatch.setattr(storing, "copy_in", copied)
        monkeypatch.setattr(Connection, "answer", answered)

    def _note(self, block: bytes) -> None:
        self.hashed.append(self._names[block])
        if len(self.hashed) == self.stop_at and self.server is not None:
            self.enough.set()
            assert self.server.has_reserved.wait(LONG_S)  # its answer is there by now


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    return Hashing(monkeypatch, {block_of(number): number for number in range(24)})


def serve(tmp_path: Path, kind: str, hashing: Hashing, **options: Any) -> Commits:
    """One that answers no Reserve until `enough`."""
    server = Commits(tmp_path / "s" if kind == "unix" else None, **options)
    server.thinks = lambda: hashing.enough.wait(LONG_S)
    hashing.server = server
    return server


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_blocks_are_hashed_while_the_server_thinks_and_no_block_twice(
    tmp_path: Path, kind: str, hashing: Hashing
) -> None:
    with serve(tmp_path, kind, hashing) as server:
        server.max_payload_bytes = 10 * BLOCK_BYTES
        server.forced = {
            key_of(2): [ReserveOutcome.BEING_STORED, ReserveOutcome.BEING_STORED, ReserveOutcome.RESERVED],
            key_of(15): [ReserveOutcome.BEING_STORED, ReserveOutcome.RESERVED],
        }
        with opened(server.url, timeout_s=LONG_S) as tier:
            assert put(tier, *range(24)) == [STORED] * 24
            assert hashing.before == (24 if kind == "unix" else 10), "those of the first batch"
            assert Counter(hashing.hashed) == Counter(range(24))
            assert all(server.blocks[key_of(i)][2] == payload_checksum(block_of(i)) for i in range(24))
            assert get(tier, *range(24)) == [OK] * 24


@pytest.mark.parametrize("stop_at", [1, 4])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_hashing_stops_once_the_answer_is_there(tmp_path: Path, kind: str, stop_at: int, hashing: Hashing) -> None:
    hashing.stop_at = stop_at
    with serve(tmp_path, kind, hashing) as server, opened(server.url, timeout_s=LONG_S) as tier:
        assert put(tier, *range(8)) == [STORED] * 8
        assert hashing.before == stop_at
        assert Counter(hashing.hashed) == Counter(range(8))
        assert all(server.blocks[key_of(i)][2] == payload_checksum(block_of(i)) for i in range(8))
        assert get(tier, *range(8)) == [OK] * 8


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_server_without_checksums_has_nothing_hashed(tmp_path: Path, kind: str, hashing: Hashing) -> None:
    with serve(tmp_path, kind, hashing, checksums=False) as server, opened(server.url, timeout_s=LONG_S) as tier:
        assert put(tier, *range(8)) == [STORED] * 8
        assert (hashing.before, hashing.hashed) == (0, [])
        assert {checksum for _, _, checksum in server.blocks.values()} == {0}


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_blocks_that_bring_their_checksums_are_not_hashed(tmp_path: Path, kind: str, hashing: Hashing) -> None:
    def request(number: int, checksum: int | None) -> WriteRequest:
        return WriteRequest(key_of(number), None, memoryview(block_of(number)), checksum=checksum)

    with serve(tmp_path, kind, hashing) as server, opened(server.url, timeout_s=LONG_S) as tier:
        assert tier.write([request(i, 1000 + i if i % 2 else None) for i in range(8)]) == [STORED] * 8
        assert hashing.before == 4
        assert hashing.hashed == [0, 2, 4, 6]
        sums = [server.blocks[key_of(i)][2] for i in range(8)]
        assert sums == [1000 + i if i % 2 else payload_checksum(block_of(i)) for i in range(8)]
