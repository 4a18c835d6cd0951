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

    def test_a_key_twice_in_a_batch(self, tier: Tier) -> None:
        first, second = memoryview(self.block(1)), memoryview(self.block(2))
        key = key_of("a")
        outcomes = tier.write([WriteRequest(key, None, first), WriteRequest(key, None, second)])
        assert outcomes == [WriteOutcome.STORED, WriteOutcome.ALREADY_STORED]
        assert tier.usage().num_blocks == 1
        buffers = [bytearray(self.block_bytes), bytearray(self.block_bytes)]
        assert tier.read([ReadRequest(key, memoryview(buffer)) for buffer in buffers]) == [ReadOutcome.OK] * 2
        assert buffers == [first, first]
        assert tier.contains([key, key]) == [True, True]
        assert tier.remove([key, key]) == 1

    def test_empty_batches(self, tier: Tier) -> None:
        for _ in range(2):
            assert (tier.read([]), tier.write([]), tier.contains([]), tier.remove([])) == ([], [], [], 0)
            tier.touch([])
            self.put(tier, key_of("a"), self.block(1))
        assert self.get(tier, key_of("a")) == self.block(1)

    @pytest.mark.parametrize("offset", [1, 2, 7, 512])
    def test_buffers_may_lie_anywhere_in_larger_ones(self, tier: Tier, offset: int) -> None:
        block, around = self.block(offset), b"\xa5" * offset
        nbytes = len(block)
        source = bytearray(around + block + around)
        view = memoryview(source)[offset : offset + nbytes]
        assert tier.write([WriteRequest(key_of("a"), None, view)]) == [WriteOutcome.STORED]
        target = bytearray(b"\xa5" * len(source))
        requests = [ReadRequest(key_of(n), memoryview(target)[offset : offset + nbytes]) for n in ("a", "missing")]
        assert tier.read(requests[:1]) == [ReadOutcome.OK]
        assert target == source
        assert tier.read(requests[1:]) == [ReadOutcome.MISS]
        assert target[:offset] == target[offset + nbytes :] == around

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

    def test_touch_changes_nothing_that_is_found(self, tier: Tier) -> None:
        for i in range(3):
            self.put(tier, key_of(str(i)), self.block(i))
        before = tier.usage()
        tier.touch([key_of("1"), key_of("never"), key_of("1"), key_of("0")])
        assert tier.contains([key_of(n) for n in ("0", "1", "2", "never")]) == [True, True, True, False]
        assert tier.usage() == before
        assert self.get(tier, key_of("never")) is ReadOutcome.MISS
        for i in range(3):
            assert self.get(tier, key_of(str(i))) == self.block(i)

    def test_an_epoch_begins_empty_and_is_remembered(self, tier: Tier) -> None:
        assert tier.epoch == 0
        keys = [key_of(str(i)) for i in range(3)]
        for epoch in (1, 2, 7):
            for i, key in enumerate(keys):
                assert self.put(tier, key, self.block(epoch + i)) is WriteOutcome.STORED
            try:
                tier.start_epoch(epoch)
            except NotImplementedError as reason:
                assert tier.epoch == 0
                pytest.skip(f"no epochs: {reason}")
            assert tier.epoch == epoch
            assert tier.contains(keys) == [False] * 3
            assert [self.get(tier, key) for key in keys] == [ReadOutcome.MISS] * 3
            assert tier.usage().num_blocks == 0

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

    def test_many_small_batches_from_several_threads(self, tier: Tier) -> None:
        """Each thread owns two keys, which fit together: nobody else's batches show in its answers."""

        def work(seed: int) -> None:
            keys = [key_of(f"{seed} {i}") for i in range(2)]
            for turn in range(25):
                blocks = [self.block(1000 * seed + 2 * turn + i) for i in range(2)]
                requests = [WriteRequest(k, None, memoryview(b)) for k, b in zip(keys, blocks, strict=True)]
                for request in requests:
                    outcomes = tier.write([request])
                    assert outcomes[0] in (WriteOutcome.STORED, WriteOutcome.FULL), f"seed {seed}, turn {turn}"
                for key, block in zip(keys, blocks, strict=True):
                    got = self.get(tier, key)
                    assert got in (block, ReadOutcome.MISS), f"seed {seed}, turn {turn}: another block's bytes"
                assert tier.remove(keys) <= 2
                assert tier.contains(keys) == [False, False], f"seed {seed}, turn {turn}"

        with ThreadPoolExecutor(4) as threads:
            for running in [threads.submit(work, seed) for seed in range(4)]:
                running.result()
        assert tier.usage().num_blocks == 0

    def test_closed_means_closed(self, tier: Tier) -> None:
        self.put(tier, key_of("a"), self.block(1))
        tier.close()
        with pytest.raises(ClosedError):
            self.get(tier, key_of("a"))
        with pytest.raises(ClosedError):
            self.put(tier, key_of("b"), self.block(2))
