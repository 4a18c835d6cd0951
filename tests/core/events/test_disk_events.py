"""What a real disk tier holds, evicts and finds again after a restart, as listeners learn it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.events import TierEvents
from kvtier.events.sources import follow_lower, held_by_lower, listing_of
from kvtier.keys import BlockDigest, Key
from kvtier.tiers.base import ReadRequest, WriteRequest
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.watched import WatchedTier
from tests.core.events.conftest import FakeSpace

BLOCK = 4096


class WatchedDisk(WatchedTier):
    """A disk tier as the store follows it."""

    def __init__(self, path: Path) -> None:
        self.disk = DiskTier([path], 320 << 10, segment_bytes=64 << 10)
        super().__init__(self.disk)
        self.name = "disk"
        self.disk.subscribe_gone(self.note_gone)

    def held(self, keys: Sequence[Key]) -> list[bool]:
        return self.disk.contains(keys)

    def keys(self, namespace: bytes) -> Sequence[tuple[Key, Key | None]]:
        return self.disk.keys(namespace)


class Listener:
    """Follows a disk from its opening on."""

    def __init__(self, space: FakeSpace, disk: WatchedDisk, max_waiting: int = 1 << 17) -> None:
        self.disk = disk
        self.space = space
        self.tracker = TierEvents(space, held_by_lower(disk), listing_of(disk), max_waiting=max_waiting)
        follow_lower(disk, self.tracker)
        self.known: set[BlockDigest] = set()

    def verify(self) -> None:
        while self.tracker.has_changes:
            gone, stored = self.tracker.drain(limit=16)
            assert self.known.issuperset(gone)
            self.known -= set(gone)
            self.known.update(digest for digest, _ in stored)
        assert self.known == {key[16:] for key, _ in self.disk.keys(self.space.digest)}


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[WatchedDisk]]:
    disks = [WatchedDisk(tmp_path / "cache")]
    yield disks
    for disk in disks:
        disk.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_waiting", [8, 1 << 17])
def test_who_follows_a_disk_knows_what_it_holds(
    seed: int, max_waiting: int, disks: list[WatchedDisk], tmp_path: Path
) -> None:
    chance = random.Random(seed)
    space = FakeSpace()
    listener = Listener(space, disks[0], max_waiting)

    def key(number: int) -> Key:
        return Key(space.digest + b"%032d" % number)

    for turn in range(60):
        first = chance.randrange(200)
        disks[-1].write(
            [
                WriteRequest(key(n), key(n - 1) if n > first else None, memoryview(bytes(BLOCK)))
                for n in range(first, first + chance.randrange(1, 14))
            ]
        )
        buffer = memoryview(bytearray(BLOCK))
        disks[-1].read([ReadRequest(key(chance.randrange(200)), buffer) for _ in range(3)])
        if chance.random() < 0.2:
            disks[-1].remove([key(chance.randrange(200))])
        if chance.random() < 0.1:
            space.reset()
            disks[-1].start_epoch(space.epoch)
        if chance.random() < 0.1:
            disks[-1].close()
            disks.append(WatchedDisk(tmp_path / "cache"))
            listener = Listener(space, disks[-1], max_waiting)
        if turn % 3 == 0:
            listener.verify()
    listener.verify()
    assert listener.known
