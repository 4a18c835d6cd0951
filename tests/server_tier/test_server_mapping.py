"""The server's memory in this process: one mapping a run of the server, only of what is safe to map."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ClosedError, ConfigError, IntegrityError
from kvtier.frame import payload_checksum
from kvtier.tiers.server.addresses import MAX_PLACED_BYTES, Addresses
from kvtier.tiers.server.copies import Bytes, as_bytes, copy_checked, copy_in
from kvtier.tiers.server.mapping import GRANULE_BYTES, MappingBusyError, MappingError, Mappings
from tests.server_tier.rig import sealed_memfd, until

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


@pytest.mark.parametrize("nbytes", [1, 4096, 512 << 10, (512 << 10) + 1, (1 << 20) + 77, 2 << 20, (4 << 20) + 5])
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


# ---- what is fetched ahead -------------------------------------------------------------------------------------------


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Memory is fetched in pieces of so many bytes, and looked at often."""
    monkeypatch.setattr("kvtier.tiers.server.mapping.CHUNK_BYTES", 4 * GRANULE_BYTES)
    monkeypatch.setattr("kvtier.tiers.server.mapping.POLL_S", 0.001)
    return 4 * GRANULE_BYTES


def faults_of(mapping_slot: Bytes) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    mapping_slot[::4096] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("addresses", [False, True])
def test_pages_come_as_far_as_the_server_has_made_them_and_none_is_made_here(
    fd: int, chunks: int, *, addresses: bool
) -> None:
    made = 5 * chunks
    os.pwrite(fd, b"x" * made, 0)
    set_aside = Addresses(NBYTES) if addresses else None
    mappings = Mappings(set_aside)
    mapping = mappings.take(fd, NBYTES)
    present = made // GRANULE_BYTES
    until("what was made is here", lambda: mapping._is_present.find(0) == present)
    assert os.fstat(fd).st_blocks * 512 == made
    assert not mapping.wait_present(0.01)
    assert faults_of(mapping.buffer[:made]) < made // 4096 // 8
    assert mapping._is_present.find(0) == present
    assert os.fstat(fd).st_blocks * 512 == made
    os.pwrite(fd, b"x" * chunks, NBYTES - chunks)  # a hole is before that
    assert not mapping.wait_present(0.01)
    assert mapping._is_present.find(0) == present
    os.pwrite(fd, b"x" * (NBYTES - made - chunks), made)
    assert mapping.wait_present(5.0)
    assert mappings.wait_present(0.0)
    assert faults_of(mapping.buffer) < NBYTES // 4096 // 8
    mappings.release(mapping)
    if set_aside is not None:
        set_aside.close()


def test_a_server_that_makes_no_more_is_waited_for_a_while(
    fd: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.server.mapping.PATIENCE_S", 0.02)
    os.pwrite(fd, b"x" * chunks, 0)
    mappings = Mappings()
    mapping = mappings.take(fd, NBYTES)
    assert not mapping.wait_present(5.0)
    assert mapping._thread is not None
    assert not mapping._thread.is_alive()
    assert os.fstat(fd).st_blocks * 512 == chunks
    mapping.slot(2 * chunks, 100)[:] = 7
    assert os.pread(fd, 1, 2 * chunks) == b"\7"
    mappings.release(mapping)


def test_an_end_is_not_kept_waiting(fd: int) -> None:
    """By a server that has not made its memory, nor by one that has."""
    for made in (0, NBYTES):
        os.pwrite(fd, b"x" * made, 0)
        mappings = Mappings()
        mapping = mappings.take(fd, NBYTES)
        began = time.monotonic()
        mappings.release(mapping)
        assert time.monotonic() - began < 0.5
        assert mapping._thread is not None
        assert not mapping._thread.is_alive()


def test_without_a_thread_for_it_nothing_is_fetched_ahead(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    mappings = Mappings()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        mapping = mappings.take(fd, NBYTES)
    assert not mapping.wait_present(0.0)
    mapping.slot(0, 100)[:] = 1
    mappings.release(mapping)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


# ---- the same addresses for each run of the server -------------------------------------------------------------------


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    addresses = Addresses(2 * NBYTES)
    yield addresses
    addresses.close()


def mapped_lines() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fake-pool")


def test_memory_of_one_run_after_the_other_appears_at_the_same_addresses(fd: int, addresses: Addresses) -> None:
    mappings = Mappings(addresses)
    first = mappings.take(fd, NBYTES)
    address, inode = int(first.buffer.ctypes.data), os.fstat(fd).st_ino
    assert address == int(addresses.buffer.ctypes.data)
    assert first.fd is not None
    assert os.fstat(first.fd).st_ino == inode
    addresses.buffer[5] = 7
    assert os.pread(fd, 1, 5) == b"\7"
    larger = sealed_memfd(2 * NBYTES)
    with pytest.raises(MappingBusyError):
        mappings.take(larger, 2 * NBYTES)
    assert mappings.take(fd, NBYTES) is first, "of the same run it is no other memory"
    mappings.release(first)
    with pytest.raises(MappingBusyError):
        mappings.take(larger, 2 * NBYTES)
    addresses.buffer[6] = 8
    assert os.pread(fd, 1, 6) == b"\x08"
    mappings.release(first)
    assert mapped_lines() == 0
    second = mappings.take(larger, 2 * NBYTES)
    assert int(second.buffer.ctypes.data) == address
    addresses.buffer[2 * NBYTES - 1] = 9
    assert os.pread(larger, 1, 2 * NBYTES - 1) == b"\x09"
    assert os.pread(fd, 1, 5) == b"\7"
    mappings.release(second)
    assert (mappings.mapped_bytes, mapped_lines()) == (0, 0)
    os.close(larger)


def test_memory_that_does_not_fit_the_addresses_is_no_mapping(addresses: Addresses) -> None:
    larger = sealed_memfd(2 * NBYTES + 4096)
    mappings = Mappings(addresses)
    with pytest.raises(MappingError, match="addresses set aside"):
        mappings.take(larger, 2 * NBYTES + 4096)
    assert mappings.mapped_bytes == 0
    mapping = mappings.take(larger, NBYTES)  # and the next may be one
    mappings.release(mapping)
    os.close(larger)


def test_a_view_keeps_memory_that_was_left_and_the_last_one_takes_it_along(fd: int) -> None:
    addresses = Addresses(NBYTES)
    mappings = Mappings(addresses)
    mapping = mappings.take(fd, NBYTES)
    view = addresses.buffer[4096:8192].data
    view[0] = 7
    mapping.leave()
    mappings.release(mapping)
    addresses.close()
    addresses.close()
    assert mapped_lines() == 1
    assert (view[0], mapping.fd, mappings.mapped_bytes) == (7, None, 0)
    with pytest.raises(ClosedError):
        _ = addresses.buffer
    with pytest.raises(ClosedError):
        mappings.take(fd, NBYTES)
    del view
    gc.collect()
    assert mapped_lines() == 0


def dies_of(touch: str, fd: int | None) -> int:
    """How a child ends that touches an address: minus the signal, or its code."""
    addresses = Addresses(NBYTES)
    mappings = Mappings(addresses)
    mapping = None if fd is None else mappings.take(fd, NBYTES)
    child = os.fork()
    if not child:
        faulthandler.disable()  # how it ends is no news
        if touch == "read":
            os._exit(int(addresses.buffer[0]))
        addresses.buffer[0] = 1
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if mapping is not None:
        mappings.release(mapping)
    addresses.close()
    return code


@pytest.mark.parametrize("touch", ["read", "write"])
@pytest.mark.parametrize("is_placed", [False, True])
def test_a_child_has_none_of_it(fd: int, touch: str, *, is_placed: bool) -> None:
    assert dies_of(touch, fd if is_placed else None) == -signal.SIGSEGV
    assert os.pread(fd, 1, 0) == b"\0"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from kvtier.config import load_settings
from kvtier.errors import ConfigError
from kvtier.store import Store
given = {"host.pool": "server", "host.size": "64MiB", "server.url": "kvtier+unix:///nowhere"}
try:
    Store(load_settings(env={}, overrides=given))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_limit_on_addresses_is_told_clearly() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, env=env, check=False)
    assert f"needs {MAX_PLACED_BYTES} bytes of addresses" in ended.stdout, ended.stderr
    assert "`ulimit -v`" in ended.stdout


def test_addresses_that_cannot_be_had() -> None:
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(ConfigError, match="bytes of addresses"):
            Addresses(nbytes)
