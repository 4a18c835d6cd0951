"""The tests that every tier must pass, third-party ones too: subclass `TierConformance` and give `make_tier`.

    class TestMyTier(TierConformance):
        def make_tier(self, capacity_blocks: int) -> Tier: ...

Needs pytest. Names say what is promised; the contract's words are in `kvtier.tiers.base`.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ClosedError
from kvtier.keys import Key, make_key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, WriteOutcome, WriteRequest

__all__ = ["TierConformance"]


def key_of(name: str, namespace: str = "one") -> Key:
    return make_key(hashlib.sha256(namespace.encode()).digest()[:16], hashlib.sha256(name.encode()).digest())


class TierConformance(ABC):
    """One instance a test; `tier` is closed and checked at the end of each."""

    block_bytes = 4096
    capacity_blocks = 8

    @abstractmethod
    def make_tier(self, capacity_blocks: int) -> Tier:
        """An empty tier with room for about that many blocks of `block_bytes`."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = self.make_tier(self.capacity_blocks)
        yield tier
        tier.check_integrity()
        tier.close()
        tier.close()

    def block(self, seed: int) -> bytes:
        return random.Random(seed).randbytes(self.block_bytes)

    def put(self, tier: Tier, key: Key, data: bytes, parent: Key | None = None) -> WriteOutcome:
        buffer = bytearray(data)
        outcome = tier.write([WriteRequest(key, parent, memoryview(buffer))])[0]
        buffer[:] = bytes(len(buffer))  # the tier must have its own copy by now
        return outcome

    def get(self, tier: Tier, key: Key, nbytes: int | None = None) -> bytes | ReadOutcome:
        buffer = bytearray(self.block_bytes if nbytes is None else nbytes)
        outcome = tier.read([ReadRequest(key, memoryview(buffer))])[0]
        return bytes(buffer) if outcome is ReadOutcome.OK else outcome

    def test_reads_back_what_was_written(self, tier: Tier) -> None:
        for i in range(4):
            assert self.put(tier, key_of(str(i)), self.block(i)) is WriteOutcome.STORED
        for i in range(4):
            assert self.get(tier, key_of(str(i))) == self.block(i)

    def test_an_unknown_key_is_a_miss(self, tier: Tier) -> None:
        assert self.get(tier, key_of("never")) is ReadOutcome.MISS
        assert tier.contains([key_of("never")]) == [False]

    def test_keys_differ_by_namespace(self, tier: Tier) -> None:
        self.put(tier, key_of("a", "one"), self.block(1))
        assert self.get(tier, key_of("a", "two")) is ReadOutcome.MISS

    def test_the_first_bytes_under_a_key_stay(self, tier: Tier) -> None:
        self.put(tier, key_of("a"), self.block(1))
        assert self.put(tier, key_of("a"), self.block(2)) is WriteOutcome.ALREADY_STORED
        assert self.get(tier, key_of("a")) == self.block(1)

    def test_another_length_is_a_miss(self, tier: Tier) -> None:
        self.put(tier, key_of("full"), self.block(1))
        self.put(tier, key_of("short"), self.block(2)[:-100])
        for nbytes in (1, self.block_bytes - 1, self.block_bytes + 1, self.block_bytes * 2, self.block_bytes * 1000):
            assert self.get(tier, key_of("full"), nbytes) is ReadOutcome.MISS
        assert self.get(tier, key_of("short")) is ReadOutcome.MISS
        assert self.get(tier, key_of("short"), self.block_bytes - 100) == self.block(2)[:-100]

    def test_a_batch_answers_in_order(self, tier: Tier) -> None:
        for i in range(3):
            self.put(tier, key_of(str(i)), self.block(i))
        names = ["0", "missing", "2", "1"]
        buffers = [bytearray(self.block_bytes) for _ in names]
        outcomes = tier.read([ReadRequest(key_of(n), memoryview(b)) for n, b in zip(names, buffers, strict=True)])
        assert outcomes == [ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.OK, ReadOutcome.OK]
        assert [bytes(buffers[i]) for i in (0, 2, 3)] == [self.block(0), self.block(2), self.block(1)]
        assert tier.contains([key_of(n) for n in names]) == [True, False, True, True]

    def test_one_duplicate_does_not_spoil_a_batch(self, tier: Tier) -> None:
        self.put(tier, key_of("1"), self.block(1))
        requests = [WriteRequest(key_of(str(i)), None, memoryview(self.block(i))) for i in range(3)]
        stored, again = WriteOutcome.STORED, WriteOutcome.ALREADY_STORED
        assert tier.write(requests) == [stored, again, stored]

    def test_empty_batches(self, tier: Tier) -> None:
        assert (tier.read([]), tier.write([]), tier.contains([]), tier.remove([])) == ([], [], [], 0)

    def test_remove_forgets(self, tier: Tier) -> None:
        self.put(tier, key_of("a"), self.block(1))
        assert tier.remove([key_of("a"), key_of("b")]) == 1
        assert self.get(tier, key_of("a")) is ReadOutcome.MISS
        assert self.put(tier, key_of("a"), self.block(2)) is WriteOutcome.STORED
        assert self.get(tier, key_of("a")) == self.block(2)

    def test_capacity_holds_and_what_is_read_is_right(self, tier: Tier) -> None:
        written = {}
        for i in range(self.capacity_blocks * 5):
            outcome = self.put(tier, key_of(str(i)), self.block(i))
            assert outcome in (WriteOutcome.STORED, WriteOutcome.FULL)
            written[str(i)] = self.block(i)
            usage = tier.usage()
            assert usage.used_bytes <= usage.capacity_bytes
            tier.check_integrity()
        found = {name: got for name in written if isinstance(got := self.get(tier, key_of(name)), bytes)}
        assert found
        assert len(found) * self.block_bytes <= tier.usage().capacity_bytes
        assert all(written[name] == got for name, got in found.items())

    def test_usage_counts_blocks_and_bytes(self, tier: Tier) -> None:
        assert tier.usage().num_blocks == 0
        for i in range(3):
            self.put(tier, key_of(str(i)), self.block(i))
        assert tier.usage().num_blocks == 3
        assert tier.usage().used_bytes >= 3 * self.block_bytes

    def test_contains_changes_nothing(self, tier: Tier) -> None:
        self.put(tier, key_of("a"), self.block(1))
        before = tier.usage()
        for _ in range(5):
            assert tier.contains([key_of("a"), key_of("b")]) == [True, False]
        assert tier.usage() == before

    def test_threads_read_whole_blocks_while_others_write(self, tier: Tier) -> None:
        wrong: list[str] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                i = rng.randrange(self.capacity_blocks * 2)
                if rng.random() < 0.5:
                    self.put(tier, key_of(str(i)), self.block(i))
                elif isinstance(got := self.get(tier, key_of(str(i))), bytes) and got != self.block(i):
                    wrong.append(f"seed {seed}: block {i}")

        with ThreadPoolExecutor(4) as threads:
            for running in [threads.submit(work, seed) for seed in range(4)]:
                running.result()
        assert wrong == []

    def test_closed_means_closed(self, tier: Tier) -> None:
        self.put(tier, key_of("a"), self.block(1))
        tier.close()
        with pytest.raises(ClosedError):
            self.get(tier, key_of("a"))
        with pytest.raises(ClosedError):
            self.put(tier, key_of("b"), self.block(2))
