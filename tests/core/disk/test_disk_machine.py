"""Random lives of a disk tier against a dictionary: whatever happens, a read gives the written bytes or none."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.errors import TierError
from kvtier.keys import Key, make_key
from kvtier.testing.files import Fault, FaultyFiles
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier, verify_directory

SEGMENT = 64 << 10
NAMES = st.integers(0, 11)
SIZES = st.sampled_from([1, 4095, 4096, 9000, 16384])


def key_of(name: int) -> Key:
    return make_key(bytes(16), bytes([name]) * 32)


class DiskLife(RuleBasedStateMachine):
    """`known` is what was last stored under each name since the last reset, and not removed since."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvtier-disk-life-"))
        self.known: dict[int, bytes] = {}
        self.version = 0
        self.epoch = 0
        self.tiers: list[DiskTier] = []

    @initialize(directories=st.integers(1, 2), codec=st.sampled_from(["raw", "lz4"]), direct=st.booleans())
    def begin(self, directories: int, codec: str, direct: bool) -> None:
        self.paths = [self.root / str(number) for number in range(directories)]
        self.codec = codec
        self.files = FaultyFiles()
        self.direct = direct
        if not direct:
            self.files.inject(Fault.NO_DIRECT)
        self.open(4)

    def open(self, segments: int) -> None:
        self.capacity = len(self.paths) * (segments * (SEGMENT + 4096) + (32 << 10))
        self.tier = DiskTier(self.paths, self.capacity, segment_bytes=SEGMENT, codec=self.codec, files=self.files)
        self.tiers.append(self.tier)

    @rule(names=st.lists(NAMES, min_size=1, max_size=6), nbytes=SIZES, tight=st.booleans())
    def write(self, names: list[int], nbytes: int, tight: bool) -> None:
        self.version += 1
        random_bytes = random.Random(self.version).randbytes(nbytes)
        blocks = [bytes([name]) * 16 + (bytes(nbytes) if tight else random_bytes) for name in names]
        parents = [None, *names[:-1]]
        outcomes = self.tier.write(
            [
                WriteRequest(key_of(name), None if parent is None else key_of(parent), memoryview(block))
                for name, parent, block in zip(names, parents, blocks, strict=True)
            ]
        )
        for name, block, outcome in zip(names, blocks, outcomes, strict=True):
            assert outcome in (WriteOutcome.STORED, WriteOutcome.ALREADY_STORED, WriteOutcome.FULL), outcome
            if outcome is WriteOutcome.STORED:
                self.known[name] = block

    @rule(names=st.lists(NAMES, min_size=1, max_size=8))
    def read(self, names: list[int]) -> None:
        lengths = [len(self.known.get(name, b"absent")) for name in names]
        buffers = [bytearray(length) for length in lengths]
        outcomes = self.tier.read(
            [ReadRequest(key_of(name), memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
        )
        for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
            assert outcome in (ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.DAMAGED), outcome
            if outcome is ReadOutcome.OK:
                assert bytes(buffer) == self.known.get(name), f"other bytes under {name}"

    @rule(names=st.lists(NAMES, max_size=4))
    def touch(self, names: list[int]) -> None:
        self.tier.touch([key_of(name) for name in names])

    @rule(names=st.lists(NAMES, max_size=4))
    def remove(self, names: list[int]) -> None:
        self.tier.remove([key_of(name) for name in names])
        for name in names:
            self.known.pop(name, None)

    @rule(segments=st.integers(3, 6))
    def reopen(self, segments: int) -> None:
        self.tier.close()
        self.open(segments)

    @rule(segments=st.integers(3, 6))
    def crash(self, segments: int) -> None:
        for volume in self.tier._volumes:
            volume.close(seal=False)
        self.tier.close()
        self.open(segments)

    @rule(position=st.integers(0, 1 << 30), bit=st.integers(0, 7))
    def flip(self, position: int, bit: int) -> None:
        files = [file for path in self.paths for file in sorted(path.glob("segment-*.kvt"))]
        if files:
            file = files[position % len(files)]
            with file.open("r+b", buffering=0) as stream:
                stream.seek(position % SEGMENT)
                byte = stream.read(1)[0]
                stream.seek(position % SEGMENT)
                stream.write(bytes([byte ^ 1 << bit]))

    @rule()
    def lose_a_write(self) -> None:
        self.files.inject(Fault.LOST_WRITE, times=1, where="segment-")

    @rule(ahead=st.integers(-1, 2))
    def reset(self, ahead: int) -> None:
        if ahead > 0:
            self.epoch += ahead
            self.tier.start_epoch(self.epoch)
            self.known.clear()
        elif ahead == 0:
            self.tier.start_epoch(self.epoch)
        else:
            with pytest.raises(TierError):
                self.tier.start_epoch(self.epoch + ahead)

    @invariant()
    def holds_together(self) -> None:
        if not self.tiers:
            return
        self.tier.check_integrity()
        usage = self.tier.usage()
        real = sum(file.stat().st_blocks * 512 for path in self.paths for file in path.iterdir())
        assert usage.used_bytes == real <= self.capacity
        assert self.tier.epoch == self.epoch
        found = self.tier.contains([key_of(name) for name in range(12)])
        assert {name for name in range(12) if found[name]} <= self.known.keys()

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        for path in getattr(self, "paths", []):
            verify_directory(path)
        shutil.rmtree(self.root)


TestDiskLife = DiskLife.TestCase
TestDiskLife.settings = settings(stateful_step_count=30)
