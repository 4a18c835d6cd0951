"""Disk tiers on real files below a temporary directory, closed at the end of the test."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.keys import Key, make_key
from kvtier.testing import FakeClock
from kvtier.testing.files import FaultyFiles
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier

PAGE = 4096
SEGMENT = 64 << 10
CAPACITY = 320 << 10  # four segments of that size


def key_of(name: object, namespace: str = "one") -> Key:
    return make_key(hashlib.sha256(namespace.encode()).digest()[:16], hashlib.sha256(str(name).encode()).digest())


def block_of(name: object, nbytes: int = PAGE) -> bytes:
    return random.Random(str(name)).randbytes(nbytes)


def aligned(nbytes: int) -> memoryview:
    """As a slot of the host pool."""
    pages = -(-nbytes // PAGE) * PAGE
    return memoryview(mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]


class DiskRig:
    """Opens tiers over `path`, with faults and a clock that a test controls. Blocks are made from names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.files = FaultyFiles()
        self._tiers: list[DiskTier] = []

    def open(self, *paths: Path, capacity: int = CAPACITY, **kwargs: Any) -> DiskTier:
        kwargs = {"segment_bytes": SEGMENT, "clock": self.clock, "files": self.files, **kwargs}
        tier = DiskTier(paths or [self.path], capacity, **kwargs)
        self._tiers.append(tier)
        return tier

    key = staticmethod(key_of)
    block = staticmethod(block_of)
    aligned = staticmethod(aligned)

    def crash(self, tier: DiskTier) -> None:
        """Let go of everything as a dying process does: nothing is sealed."""
        for volume in tier._volumes:
            volume.close(seal=False)
        tier.close()

    def put(self, tier: DiskTier, *names: object, nbytes: int = PAGE) -> list[WriteOutcome]:
        """Blocks by name, each the parent of the next."""
        parents = [None, *map(key_of, names)]
        return tier.write(
            [
                WriteRequest(key_of(name), parent, memoryview(block_of(name, nbytes)))
                for name, parent in zip(names, parents, strict=False)
            ]
        )

    def get(self, tier: DiskTier, *names: object, nbytes: int = PAGE) -> list[ReadOutcome]:
        """How the reads ended; what was served is checked."""
        buffers = [bytearray(nbytes) for _ in names]
        outcomes = tier.read(
            [ReadRequest(key_of(name), memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
        )
        for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
            assert outcome is not ReadOutcome.OK or buffer == block_of(name, nbytes), f"other bytes under {name}"
        return outcomes

    def held(self, tier: DiskTier, names: Any) -> list[Any]:
        """Those of the names that the tier says it has."""
        return [name for name, there in zip(names, tier.contains([key_of(n) for n in names]), strict=True) if there]

    def segments(self, path: Path | None = None) -> list[Path]:
        return sorted((path or self.path).glob("segment-*.kvt"))

    def real_bytes(self, *paths: Path) -> int:
        return sum(file.lstat().st_blocks * 512 for path in paths or [self.path] for file in path.iterdir())

    def flip(self, file: Path, offset: int, bit: int = 1) -> None:
        with file.open("r+b", buffering=0) as stream:
            stream.seek(offset)
            byte = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([byte ^ bit]))

    def find(self, name: object, path: Path | None = None) -> tuple[Path, int]:
        """File and offset of the header of a block's only frame."""
        found = []
        for file in self.segments(path):
            content = file.read_bytes()
            for offset in range(PAGE, len(content), PAGE):
                page = content[offset : offset + PAGE]
                if page[:8] == b"KVTframe" and page[16:64] == key_of(name):
                    found.append((file, offset))
        assert len(found) == 1, f"{len(found)} frames of {name}"
        return found[0]

    def close(self) -> None:
        self.files.heal()
        for tier in self._tiers:
            tier.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path / "cache")
    yield rig
    rig.close()
