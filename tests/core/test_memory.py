"""The mapping: exactly what was asked for, touched without changing a byte, locked or said why not."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier import memory as memory_module
from kvtier.config import HostSettings, Settings
from kvtier.errors import ClosedError, ConfigError
from kvtier.memory import CHUNK_BYTES, PAGE_BYTES, MlockPinner, PoolMemory
from kvtier.store import Store

MIB = 1 << 20
SOON_S = 30.0


class Refuser:
    """A pinner that grants `granted` bytes and refuses the rest, as a memlock limit does."""

    def __init__(self, granted: int = 0) -> None:
        self.left = granted
        self.asked: list[int] = []

    def pin(self, address: int, nbytes: int) -> None:
        self.asked.append(nbytes)
        if nbytes > self.left:
            raise OSError(12, "Cannot allocate memory")
        self.left -= nbytes


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-pool")


@pytest.mark.bug("AC08")
@pytest.mark.parametrize("asked", [5 * MIB + PAGE_BYTES, int(4.1 * MIB), PAGE_BYTES, 33 * MIB + 1])
def test_reserves_what_was_asked_cut_to_pages(asked: int) -> None:
    memory = PoolMemory(asked, touch=False)
    try:
        assert memory.nbytes == asked // PAGE_BYTES * PAGE_BYTES
        assert memory.buffer.nbytes == memory.nbytes
        assert Path(f"/proc/self/fd/{memory.fd}").stat().st_size == memory.nbytes
    finally:
        memory.close()


@pytest.mark.bug("AC08")
def test_the_process_grows_by_what_was_asked() -> None:
    code = (
        "import re\n"
        "from kvtier.memory import PoolMemory\n"
        "def shared(): return int(re.search(r'RssShmem:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "before = shared()\n"
        "memory = PoolMemory(5 * 2**20 + 4096)\n"
        "assert memory.wait_touched(30)\n"
        "print(shared() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(run.stdout) == 5 * MIB + PAGE_BYTES


def test_too_little_or_too_much_is_refused_by_name_and_leaves_nothing() -> None:
    for asked in (0, PAGE_BYTES - 1, 1 << 62, 1 << 70):
        with pytest.raises(ConfigError, match=r"host\.size"):
            PoolMemory(asked)
    assert mappings() == 0


def test_touching_grows_to_everything() -> None:
    memory = PoolMemory(CHUNK_BYTES + 3 * PAGE_BYTES)
    try:
        assert memory.wait_touched(SOON_S)
        assert memory.touched_bytes == memory.nbytes
        assert memory.pinned_bytes == 0
    finally:
        memory.close()


def test_untouched_memory_says_so() -> None:
    memory = PoolMemory(MIB, touch=False)
    try:
        assert not memory.wait_touched(0)
        assert memory.touched_bytes == 0
    finally:
        memory.close()


@pytest.mark.parametrize("fallback", [False, True])
def test_touching_changes_no_byte(fallback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fallback:
        monkeypatch.setattr(memory_module, "MADV_POPULATE_WRITE", 9999)  # the kernel answers EINVAL
    monkeypatch.setattr(memory_module, "CHUNK_BYTES", 64 * PAGE_BYTES)
    memory = PoolMemory(16 * MIB)
    try:
        pages = memory.buffer.view(np.uint64).reshape(-1, PAGE_BYTES // 8)
        order = np.random.default_rng(5).permutation(len(pages))
        for page in order:
            pages[page] = page + 1
        assert memory.wait_touched(SOON_S)
        assert np.array_equal(pages, np.broadcast_to(np.arange(1, len(pages) + 1)[:, None], pages.shape))
        del pages
    finally:
        memory.close()


def test_touching_that_fails_is_said_once_and_the_pool_stays_usable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_module, "MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(memory_module, "CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr("os.posix_fallocate", full)
    memory = PoolMemory(4 * PAGE_BYTES)
    try:
        assert not memory.wait_touched(SOON_S)
        memory.buffer[:] = 1
    finally:
        memory.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "stopped at 0 of 16384 bytes" in caplog.text


@pytest.mark.parametrize("pin", ["off", "prefer", "require"])
def test_without_a_thread_to_touch_it_the_pool_stays_usable_and_says_so_once(
    pin: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = PoolMemory(MIB, pin=pin, pinner=Refuser(granted=MIB))
    descriptor = Path(f"/proc/self/fd/{memory.fd}")
    try:
        assert not memory.wait_touched(SOON_S)
        memory.buffer[:] = 1
        assert memory.pinned_bytes == (MIB if pin == "require" else 0)
    finally:
        memory.close()
    assert (mappings(), descriptor.exists()) == (0, False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "can't start new thread" in record.getMessage()
    assert ("none of it is locked" in record.getMessage()) == (pin == "prefer")


@pytest.mark.bug("CR09", "US07")
def test_required_pinning_refused_names_the_four_facts_and_leaves_nothing() -> None:
    pinner = Refuser(granted=MIB)
    settings = Settings(host=HostSettings(size=8 * MIB, slab=MIB, pin="require"))
    with pytest.raises(ConfigError) as caught:
        Store(settings, pinner=pinner)
    message = str(caught.value)
    assert "host memory" in message
    assert f"{8 * MIB} bytes" in message
    assert re.search(r"memlock limit \(RLIMIT_MEMLOCK\) is (\d+ bytes|unlimited)", message)
    assert "host.pin" in message
    assert "host.size" in message
    assert pinner.asked == [8 * MIB]
    assert mappings() == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-touch"]


@pytest.mark.bug("CR09", "US07")
@pytest.mark.parametrize("granted_chunks", [0, 2])
def test_preferred_pinning_refused_goes_on_pageable_with_one_warning(
    granted_chunks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "CHUNK_BYTES", MIB)
    pinner = Refuser(granted=granted_chunks * MIB)
    settings = Settings(host=HostSettings(size=8 * MIB, slab=MIB, pin="prefer"))
    with Store(settings, pinner=pinner) as store:
        assert store.memory.wait_touched(SOON_S)
        stats = store.stats()
        assert (stats.host_touched_bytes, stats.host_pinned_bytes) == (8 * MIB, granted_chunks * MIB)
        assert store.pool.usage().pinned_bytes == granted_chunks * MIB
        owner = store.pool.owner("test")
        lease = store.pool.allocate(PAGE_BYTES, owner)
        assert lease is not None
        lease.view[:4] = b"kept"
        owner.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for fact in ("host memory", f"{MIB} bytes", "RLIMIT_MEMLOCK", "host.pin"):
        assert fact in record.getMessage()
    assert f"{(8 - granted_chunks) * MIB} bytes stay pageable" in record.getMessage()
    assert pinner.asked == [MIB] * (granted_chunks + 1)


@pytest.mark.parametrize("pin", ["prefer", "require"])
def test_granted_pinning_covers_everything(pin: str) -> None:
    pinner = Refuser(granted=2 * MIB)
    memory = PoolMemory(2 * MIB, pin=pin, pinner=pinner)
    try:
        assert memory.wait_touched(SOON_S)
        assert memory.pinned_bytes == 2 * MIB
        assert pinner.asked == [2 * MIB]
    finally:
        memory.close()


def test_mlock_locks_a_page_or_raises_an_oserror() -> None:
    memory = PoolMemory(PAGE_BYTES, touch=False)
    try:
        address = int(memory.buffer.ctypes.data)
        with contextlib.suppress(OSError):  # the machine may grant none
            MlockPinner().pin(address, PAGE_BYTES)
        with pytest.raises(OSError, match=r"."):
            MlockPinner().pin(address, 1 << 60)
    finally:
        memory.close()


def test_close_gives_back_mapping_and_descriptor_and_may_be_repeated() -> None:
    memory = PoolMemory(64 * MIB)
    assert mappings() == 1
    memory.close()
    memory.close()
    assert mappings() == 0
    with pytest.raises(ClosedError):
        _ = memory.buffer


def test_close_waits_for_the_touch_in_progress_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def populate(self: PoolMemory, start: int, size: int) -> bool:
        touched.append(start)
        begun.set()
        return go.wait(SOON_S)

    monkeypatch.setattr(memory_module, "CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(PoolMemory, "_populate", populate)
    memory = PoolMemory(4 * PAGE_BYTES)
    assert begun.wait(SOON_S)
    closing = threading.Thread(target=memory.close)
    closing.start()
    assert memory._stop.wait(SOON_S)
    closing.join(0.1)
    assert closing.is_alive()
    assert mappings() == 1
    go.set()
    closing.join(SOON_S)
    assert (touched, mappings()) == ([0], 0)


def test_a_view_that_outlives_close_keeps_its_bytes_and_takes_the_memory_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = PoolMemory(MIB)
    view = memory.buffer[:4]
    view[:] = 7
    memory.close()
    assert "still in use" in caplog.text
    assert view.tolist() == [7] * 4
    del view
    assert mappings() == 0
