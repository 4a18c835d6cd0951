"""The conformance suite on the disk tier: each codec, buffered I/O, several directories, odd lengths."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kvtier.testing.conformance import TierConformance
from kvtier.testing.files import Fault, FaultyFiles
from kvtier.tiers.base import Tier
from kvtier.tiers.disk import DiskTier


class DiskConformance(TierConformance):
    codec = "raw"
    directories = 1

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_tier(self, capacity_blocks: int) -> Tier:
        paths = [self.path / f"cache {number}" for number in range(self.directories)]
        return DiskTier(paths, self.directories * (320 << 10), segment_bytes=64 << 10, codec=self.codec)


class TestRaw(DiskConformance):
    pass


class TestOddLength(DiskConformance):
    block_bytes = 2 * 4096 - 1000


class Compressible(DiskConformance):
    """Blocks of which about half can be saved."""

    block_bytes = 2 * 4096

    def block(self, seed: int) -> bytes:
        return random.Random(seed).randbytes(self.block_bytes // 2).ljust(self.block_bytes, b"\1")


class TestLZ4(Compressible):
    codec = "lz4"


class TestShuffleLZ4(Compressible):
    codec = "shuffle_lz4"


class TestIncompressible(DiskConformance):
    codec = "lz4"


class TestTwoDirectories(DiskConformance):
    directories = 2


class TestBuffered(DiskConformance):
    def make_tier(self, capacity_blocks: int) -> Tier:
        files = FaultyFiles()
        files.inject(Fault.NO_DIRECT)
        tier = DiskTier([self.path / "cache"], 320 << 10, segment_bytes=64 << 10, files=files)
        assert set(tier.snapshot().mode.values()) == {"buffered"}
        return tier


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs O_DIRECT")
class TestShortTransfers(DiskConformance):
    """The kernel may stop in the middle of any read or write."""

    def make_tier(self, capacity_blocks: int) -> Tier:
        files = FaultyFiles(seed=1)
        files.inject(Fault.NO_DIRECT)
        files.inject(Fault.SHORT_READ, probability=0.5)
        files.inject(Fault.SHORT_WRITE, probability=0.5)
        return DiskTier([self.path / "cache"], 320 << 10, segment_bytes=64 << 10, files=files)
