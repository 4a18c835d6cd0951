"""The server's memory in this process: one mapping a run of the server, only of what is safe to map."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.errors import IntegrityError
from kvtier.frame import payload_checksum
from kvtier.tiers.server.copies import as_bytes, copy_checked, copy_in
from kvtier.tiers.server.mapping import GRANULE_BYTES, MappingError, Mappings
from tests.server_tier.rig import sealed_memfd

NBYTES = 4 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = sealed_memfd(NBYTES)
    yield fd
    os.close(fd)


def test_the_same_memory_is_mapped_once_and_unmapped_by_its_last_user(fd: int) -> None:
    mappings = Mappings()
    first = mappings.take(fd, NBYTES)
    other = os.dup(fd)
    second = mappings.take(other, NBYTES)
    os.close(other)
    assert first is second
    assert mappings.mapped_bytes == NBYTES
    mappings.release(first)
    second.slot(5, 10)[:] = 7
    assert os.pread(fd, 12, 4) == b"\0" + b"\7" * 10 + b"\0"
    mappings.check_integrity()
    mappings.release(second)
    assert mappings.mapped_bytes == 0


def test_other_memory_is_another_mapping(fd: int) -> None:
    mappings = Mappings()
    other = sealed_memfd(2 * NBYTES)
    first, second = mappings.take(fd, NBYTES), mappings.take(other, 2 * NBYTES)
    assert mappings.mapped_bytes == 3 * NBYTES
    mappings.release(first)
    assert mappings.mapped_bytes == 2 * NBYTES
    mappings.release(second)
    os.close(other)


def test_memory_of_a_server_that_was_started_anew_is_not_taken_for_that_of_before(fd: int) -> None:
    mappings = Mappings()
    before = mappings.take(fd, NBYTES)
    anew = sealed_memfd(NBYTES)  # while a connection to the one before is about
    after = mappings.take(anew, NBYTES)
    after.slot(0, 1)[:] = 7
    assert (os.pread(anew, 1, 0), os.pread(fd, 1, 0)) == (b"\7", b"\0")
    mappings.release(before)
    mappings.release(after)
    os.close(anew)


def test_a_server_does_not_change_its_mind_about_a_length(fd: int) -> None:
    mappings = Mappings()
    first = mappings.take(fd, NBYTES)
    with pytest.raises(MappingError, match="had 4194304 before"):
        mappings.take(fd, NBYTES // 2)
    mappings.release(first)
    assert mappings.mapped_bytes == 0


def test_a_mapping_that_nobody_uses_is_found(fd: int) -> None:
    mappings = Mappings()
    mapping = mappings.take(fd, NBYTES)
    mapping.num_users = 0
    with pytest.raises(IntegrityError, match="0 users"):
        mappings.check_integrity()
    mapping.num_users = 1
    mappings.release(mapping)


def test_memory_that_is_still_looked_at_goes_with_the_last_look(fd: int) -> None:
    mappings = Mappings()
    mapping = mappings.take(fd, NBYTES)
    view = mapping.slot(0, 100)
    mappings.release(mapping)
    assert mappings.mapped_bytes == 0
    assert not view.any()


def test_a_slots_pages_come_at_once_and_no_others(fd: int) -> None:
    os.pwrite(fd, b"x" * (NBYTES // 2), 0)
    allocated = os.fstat(fd).st_blocks
    mappings = Mappings()
    mapping = mappings.take(fd, NBYTES)
    nbytes = 10 * GRANULE_BYTES
    slot = mapping.slot(GRANULE_BYTES, nbytes)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    slot[:] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < nbytes // 4096 // 2
    assert os.fstat(fd).st_blocks == allocated, "nothing was made that the server has not made"
    del slot
    mappings.release(mapping)


def test_a_kernel_that_cannot_bring_pages_at_once_is_no_matter(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.server.mapping.MADV_POPULATE_WRITE", 9999)  # EINVAL
    mappings = Mappings()
    mapping = mappings.take(fd, NBYTES)
    mapping.slot(100, 100_000)[:] = 3
    assert os.pread(fd, 1, 100) == b"\3"
    mappings.release(mapping)


@pytest.mark.parametrize("nbytes", [1, 4096, 512 << 10, (512 << 10) + 1, (1 << 20) + 77])
def test_blocks_are_hashed_as_they_are_copied(nbytes: int) -> None:
    block = os.urandom(nbytes)
    target = np.zeros(nbytes, np.uint8)
    assert copy_in(target, as_bytes(memoryview(block)), hashed=True) == payload_checksum(block)
    assert target.tobytes() == block
    back = bytearray(nbytes)
    assert copy_checked(as_bytes(memoryview(back)), target, payload_checksum(block))
    assert back == block
    target[-1] ^= 1
    assert not copy_checked(as_bytes(memoryview(back)), target, payload_checksum(block))
    assert copy_checked(as_bytes(memoryview(back)), target, None)
    assert copy_in(target, as_bytes(memoryview(block)), hashed=False) == 0
