"""Checksums that are kept with slots which others may write to: from commit to disk, and none where nobody else can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import MemorySnapshot, load_settings
from kvtier.durability import DurabilityWatches
from kvtier.errors import IntegrityError
from kvtier.frame import payload_checksum
from kvtier.keys import BlockDigest, Key, make_key
from kvtier.memory import PAGE_BYTES
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier.testing import FakeClock, ManualExecutor
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.reservation import HeldBlock, Reservation

SPACE = b"s" * 16
BLOCK = bytes(range(256)) * 64  # four pages, which compress
OTHER = BLOCK[::-1]


def name(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(32, "big"))


def key(number: int) -> Key:
    return make_key(SPACE, name(number))


def open_store(path: Path | None = None, *, keeps: bool = True) -> Store:
    overrides: dict[str, Any] = {"host.size": 16 * PAGE_BYTES, "host.slab": 4 * PAGE_BYTES}
    if path is not None:
        overrides |= {"disk.path": [str(path)], "disk.size": "4MiB", "disk.min_free": 1}
    return Store(
        load_settings(env={}, overrides=overrides),
        memory=MemorySnapshot(1 << 34, 1 << 34),
        touch=False,
        keeps_checksums=keeps,
        clock=FakeClock(),
        disk_executor=ManualExecutor() if path is not None else None,
    )


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store() as store:
        yield store
        store.check_integrity()


def fill(store: Store, number: int, block: bytes = BLOCK) -> Reservation:
    reserved = store.host.reserve(SPACE, name(number), None, len(block), store.pool.owner("test"))
    assert isinstance(reserved, Reservation)
    reserved.lease.view[: len(block)] = block
    return reserved


def held(store: Store, number: int) -> HeldBlock:
    (block,) = store.host.lease_blocks([(SPACE, name(number))], store.pool.owner("reader"))
    assert block is not None
    return block


def test_a_checksum_that_is_given_is_kept_whatever_lies_there(store: Store) -> None:
    store.host.commit([fill(store, 0)], checksums=[77])
    with held(store, 0).lease:
        assert held(store, 0).checksum == 77


def test_what_is_not_given_is_summed_up_at_the_commit_and_of_the_block_alone(store: Store) -> None:
    reserved = fill(store, 0, BLOCK[:100])
    reserved.lease.view[100:] = b"x" * (len(reserved.lease.view) - 100)
    store.host.commit([reserved])
    buffer = bytearray(len(BLOCK))
    store.host.write([WriteRequest(key(1), None, memoryview(BLOCK))])
    assert held(store, 0).checksum == payload_checksum(BLOCK[:100])
    assert held(store, 1).checksum == payload_checksum(BLOCK)
    assert store.host.read([ReadRequest(key(1), memoryview(buffer))]) == [ReadOutcome.OK]


def test_a_void_reservation_in_a_batch_has_none(store: Store) -> None:
    void, kept = fill(store, 0), fill(store, 1)
    store.host.abort(void)
    assert store.host.commit([void, kept]) == [False, True]
    assert held(store, 1).checksum == payload_checksum(BLOCK)


def test_a_slot_that_passes_to_another_block_passes_without_its_checksum(store: Store) -> None:
    for number in range(12):  # three times the pool
        store.host.commit([fill(store, number)], checksums=[number])
        store.check_integrity()
    assert [held(store, number).checksum for number in range(8, 12)] == [8, 9, 10, 11]


def test_a_lost_checksum_is_noticed(store: Store) -> None:
    store.host.commit([fill(store, 0)])
    store.host._checksums, kept = {}, store.host._checksums
    with pytest.raises(IntegrityError, match="checksums disagree"):
        store.check_integrity()
    store.host._checksums = kept


def test_a_store_of_its_own_sums_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Reservation) -> int:
        raise AssertionError("summed up")

    monkeypatch.setattr(Reservation, "sum_up", forbidden)
    with open_store(tmp_path, keeps=False) as store:
        store.host.commit([fill(store, 0)])
        assert held(store, 0).checksum is None
        asked: list[WriteRequest] = []

        def write(requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
            asked.extend(requests)
            return [WriteOutcome.STORED] * len(requests)

        monkeypatch.setattr(store.lower[0].write_behind._tier, "write", write)
        store.lower[0].executor.run_all()  # type: ignore[attr-defined]
        assert [request.checksum for request in asked] == [None]
        store.host.commit([fill(store, 1)], checksums=[7])
        assert held(store, 1).checksum is None


def test_write_behind_hands_on_what_was_committed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        reserved = fill(store, 0)
        view = store.pool.buffer[reserved.lease.offset :][: len(BLOCK)]
        store.host.commit([reserved])
        view[:4] = 0  # by who maps it
        del view
        store.lower[0].executor.run_all()  # type: ignore[attr-defined]
        buffer = memoryview(bytearray(len(BLOCK)))
        assert store.lower[0].tier.read([ReadRequest(key(0), buffer)]) == [ReadOutcome.DAMAGED]
        assert store.lower[0].held([key(0)]) == [False]


@pytest.mark.parametrize("codec", ["raw", "lz4", "shuffle_lz4"])
def test_the_disk_does_not_launder_what_is_not_what_it_should_be(tmp_path: Path, codec: str) -> None:
    tier = DiskTier([tmp_path], 4 << 20, min_free_bytes=1, codec=codec)
    requests = [
        WriteRequest(key(0), None, memoryview(BLOCK), checksum=payload_checksum(BLOCK)),
        WriteRequest(key(1), None, memoryview(OTHER), checksum=payload_checksum(BLOCK)),
        WriteRequest(key(2), None, memoryview(OTHER)),
    ]
    assert tier.write(requests) == [WriteOutcome.STORED] * 3
    buffers = [memoryview(bytearray(len(BLOCK))) for _ in range(3)]
    reads = [ReadRequest(key(number), buffer) for number, buffer in enumerate(buffers)]
    assert tier.read(reads) == [ReadOutcome.OK, ReadOutcome.DAMAGED, ReadOutcome.OK]
    assert (bytes(buffers[0]), bytes(buffers[2])) == (BLOCK, OTHER)
    tier.check_integrity()
    tier.close()


def test_which_blocks_are_committed_as_bytes(store: Store) -> None:
    host = store.host
    names = [name(number) for number in range(4)]
    assert host.committed(SPACE, names) == bytes(4)
    store.host.commit([fill(store, 1), fill(store, 3)])
    assert host.committed(SPACE, names) == bytes([0, 1, 0, 1])
    reserved = fill(store, 0)
    assert host.committed(SPACE, names) == bytes([0, 1, 0, 1])
    host.abort(reserved)
    assert host.committed(b"t" * 16, names) == bytes(4)
    assert host.committed(SPACE, []) == b""


def test_leasing_counts_as_a_use_only_where_it_is_one(store: Store) -> None:
    for number in range(4):
        store.host.commit([fill(store, number)])
    owner = store.pool.owner("reader")
    store.host.lease_blocks([(SPACE, name(0))], owner)
    store.host.lease_blocks([(SPACE, name(9)), (SPACE, name(1))], owner, is_use=True)
    owner.close()
    store.host.commit([fill(store, 4)])
    store.host.commit([fill(store, 5)])
    assert store.host.committed(SPACE, [name(n) for n in range(6)]) == bytes([0, 1, 0, 1, 1, 1])


def test_a_new_epoch_is_at_least_the_one_asked_for(store: Store) -> None:
    store.host.commit([fill(store, 0)])
    assert store.start_epoch(5) == store.epoch == 5
    assert store.host.num_blocks == 0
    assert store.start_epoch(3) == 6
    assert store.start_epoch(7) == 7
    store.reset()
    assert store.epoch == 8


def test_a_wait_that_is_given_up_is_answered_and_forgotten() -> None:
    watches = DurabilityWatches()
    watches.begin([key(0), key(1)])

    def nothing_lost(_: Sequence[Key]) -> dict[Key, DropReason | None]:
        return {}

    def both_lost(keys: Sequence[Key]) -> dict[Key, DropReason | None]:
        return dict.fromkeys(keys)

    first, second = watches.watch([key(0), key(1)], nothing_lost), watches.watch([key(0), key(2)], both_lost)
    assert watches.give_up(first) == {key(0), key(1)}
    answer = first.poll()
    assert answer is not None
    assert not answer.lost
    assert watches.give_up(first) == set()
    watches.end(key(1), DropReason.AGED)
    assert second.poll() is None
    watches.end(key(0), DropReason.AGED)
    answer = second.poll()
    assert answer is not None
    assert dict(answer.lost) == {key(0): DropReason.AGED, key(2): None}
    assert not watches._watches
    assert watches.give_up(second) == set()
