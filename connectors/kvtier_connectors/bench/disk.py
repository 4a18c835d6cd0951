"""Figures of the disk tier's throughput: blocks from host memory to files and back, against plain files."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.config import DiskSettings, HostSettings, RestoreSettings, Settings
from kvtier.keys import BlockDigest, Namespace, Shard, make_key
from kvtier.layout import KVLayout
from kvtier.metrics import DiskStats
from kvtier.reasons import DropReason
from kvtier.store import Store
from kvtier.tiers.base import ReadOutcome, ReadRequest
from kvtier.tiers.disk import Files
from kvtier_connectors.bench.figures import Figure, measure_pairs, steady
from kvtier_connectors.bench.opening import BufferedFiles
from kvtier_connectors.bench.plain import JOB_BYTES, PlainFile, drop_cached

__all__ = ["DiskSizes", "DiskBench", "disk_copy_figures"]

TIMEOUT_S = 120.0
STAGE_BYTES = 128 << 20
MAX_SLOW_RUNS = 5
READS_A_RUN = 100
CONCURRENCY = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class DiskSizes:
    """What the figures of the disk tier are measured on."""

    moved_bytes: int = 1 << 30
    """Written, or read, in one run."""
    held_bytes: int = 4 << 30
    """What a tier holds that is opened again."""
    aged_bytes: int = 2 << 30
    """The capacity of the tier whose written bytes are counted; 32 segments."""
    segment_bytes: int = 64 << 20
    """Of that tier."""
    min_free_bytes: int = 1 << 30
    """That stays free on the file system."""

    @property
    def tier_bytes(self) -> int:
        """The capacity of the tier that is written and read: twice what is moved, and segments that are being filled
        or emptied."""
        return 2 * self.moved_bytes + self.moved_bytes // 4 + (32 << 20)

    @property
    def needed_bytes(self) -> int:
        """Free space that the benchmark asks for."""
        largest = max(self.tier_bytes + 2 * self.moved_bytes, self.held_bytes * 9 // 8, self.aged_bytes)
        return largest + self.min_free_bytes


class DiskBench:
    """A store with a disk tier, a host pool as large as what is moved in a run, and a plain file beside it.

    Every run stores blocks of new names out of the same slots, so that the tier is full after a few and from then on
    evicts as much as it takes.
    """

    def __init__(
        self, directory: Path, layout: KVLayout, sizes: DiskSizes, threads: int, files: Files | None = None
    ) -> None:
        self.threads = threads
        self.block_bytes = layout.block_bytes
        self.num_blocks = max(2, sizes.moved_bytes // layout.block_bytes)
        self._directory = directory / "tier"
        slab = HostSettings().slab
        slots = slab // (-(-layout.block_bytes // 4096) * 4096)
        settings = Settings(
            host=HostSettings(size=-(-self.num_blocks // slots) * slab),
            disk=DiskSettings(
                path=(str(self._directory),), size=sizes.tier_bytes, min_free=sizes.min_free_bytes, threads=threads
            ),
            restore=RestoreSettings(max_wait_s=TIMEOUT_S),
        )
        self.store = Store(settings, disk_files=files)
        self.store.memory.wait_touched(TIMEOUT_S)
        self.space = self.store.open_space(Namespace("kvtier bench", "", layout, "all", Shard(0, 1)))
        self._queued_bytes = self.store.pool.buffer.nbytes // 8  # half of what write-behind takes before it drops
        self._run = 0
        self.digests: list[BlockDigest] = []
        self.blocks = self._fill()

    @property
    def disk(self) -> DiskStats:
        """The tier's counts now."""
        disk = self.store.stats().disk
        assert disk is not None
        return disk

    @property
    def gigabytes(self) -> float:
        return self.num_blocks * self.block_bytes / 1e9

    def store_blocks(self) -> float:
        """GB/s of all blocks from their commit to host memory until the last is written."""
        lower = self.store.lower[0]
        before = lower.stats().ledger.stored
        at_once = max(1, JOB_BYTES // self.block_bytes)
        with self.space.owner("bench") as owner:
            self.digests = self._new_digests()
            reserved = [self.space.reserve(digest, parent, owner) for digest, parent in self._chain()]
            whole = [one for one in reserved if not isinstance(one, DropReason)]
            assert len(whole) == self.num_blocks, "the host pool is too small"
            began = time.perf_counter()
            for start in range(0, self.num_blocks, at_once):
                while lower.write_behind.queued_bytes > self._queued_bytes:
                    time.sleep(0.0005)
                self.space.commit(whole[start : start + at_once])
            left = self.store.flush(TIMEOUT_S)
            seconds = time.perf_counter() - began
        written = lower.stats().ledger.stored - before
        assert (left, written) == (0, self.num_blocks), (
            f"{written} of {self.num_blocks} blocks written: {lower.stats()}"
        )
        self.forget_host()
        return self.gigabytes / seconds

    def restore_blocks(self) -> float:
        """GB/s of the blocks of the last run from the disk to slots of host memory, verified and findable there."""
        ended = threading.Event()
        unsubscribe = self.store.stager.subscribe(ended.set)
        size = max(1, STAGE_BYTES // self.block_bytes)
        began = time.perf_counter()
        stages = []
        for start in range(0, self.num_blocks, size):
            parent = self.digests[start - 1] if start else None
            stage = self.space.stage(f"run {start}", self.digests[start : start + size], parent, TIMEOUT_S)
            assert stage is not None, "the tier holds none of the blocks"
            stages.append(stage)
        for stage in stages:
            while not stage.poll():
                ended.wait(0.05)
                ended.clear()
        seconds = time.perf_counter() - began
        unsubscribe()
        misses = [stage.miss for stage in stages if stage.miss is not None]
        arrived = sum(sum(stage.arrived.values()) for stage in stages)
        for stage in stages:
            stage.close()
        assert not misses, f"blocks did not come: {misses}"
        assert arrived == self.num_blocks, f"{arrived} of {self.num_blocks} blocks came"
        self.forget_host()
        return self.gigabytes / seconds

    def read_one(self, index: int) -> float:
        """Milliseconds of one block's read by the tier with its wrappers, on this thread."""
        request = ReadRequest(make_key(self.space.digest, self.digests[index]), self.blocks[index])
        began = time.perf_counter()
        outcomes = self.store.lower[0].tier.read([request])
        milliseconds = 1e3 * (time.perf_counter() - began)
        assert outcomes == [ReadOutcome.OK], f"a block was not read: {outcomes}"
        return milliseconds

    def forget_host(self) -> None:
        """Empty host memory; the tier keeps what it has."""
        self.store.host.reset(self.space.digest)

    def drop_cached(self) -> None:
        drop_cached(self._directory.glob("segment-*"))

    def close(self) -> None:
        self.blocks.clear()  # views of the pool
        self.store.close(TIMEOUT_S)

    def _fill(self) -> list[memoryview]:
        """Noise in every slot; the slots' memory, in the order in which the pool hands them out."""
        noise = np.random.default_rng(0).integers(0, 256, self.block_bytes, np.uint8)
        blocks = []
        self.digests = self._new_digests()
        with self.space.owner("bench") as owner:
            for digest, parent in self._chain():
                reserved = self.space.reserve(digest, parent, owner)
                assert not isinstance(reserved, DropReason), "the host pool is too small"
                start = reserved.lease.offset
                slot = self.space.buffer[start : start + self.block_bytes]
                np.copyto(slot, noise)
                slot[:8] = np.frombuffer(start.to_bytes(8, "little"), np.uint8)
                blocks.append(slot.data)
        return blocks

    def _new_digests(self) -> list[BlockDigest]:
        self._run += 1
        prefix = self._run.to_bytes(8, "little") + random.randbytes(8)
        return [BlockDigest(prefix + number.to_bytes(16, "little")) for number in range(self.num_blocks)]

    def _chain(self) -> list[tuple[BlockDigest, BlockDigest | None]]:
        return list(zip(self.digests, [None, *self.digests[:-1]], strict=True))


@contextmanager
def _benched(
    directory: Path, layout: KVLayout, sizes: DiskSizes, threads: int, files: Files | None = None
) -> Iterator[tuple[DiskBench, PlainFile]]:
    """A tier and a plain file of the same length, both written from end to end once."""
    directory.mkdir(exist_ok=True)
    bench = DiskBench(directory, layout, sizes, threads, files)
    try:
        length = 2 * bench.num_blocks * bench.block_bytes
        with PlainFile(directory / "plain", length, direct=files is None) as plain:
            for _ in range(2):
                plain.write(bench.blocks, threads)
            while not bench.disk.evicted_blocks:
                bench.store_blocks()
            yield bench, plain
    finally:
        bench.close()


def disk_copy_figures(
    directory: Path, shape: str, layout: KVLayout, runs: int, sizes: DiskSizes, concurrency: Sequence[int] = CONCURRENCY
) -> Iterator[Figure]:
    """Store, restore and latency by direct I/O, at the default number of threads and at others; then buffered."""
    slow_runs = min(runs, MAX_SLOW_RUNS)
    default = DiskSettings().threads
    with _benched(directory, layout, sizes, default) as (bench, plain):
        yield from _store_and_restore(bench, plain, "", shape, runs)
        yield from _latency(bench, plain, shape, runs)
    for threads in concurrency:
        with _benched(directory, layout, sizes, threads) as (bench, plain):
            yield from _store_and_restore(bench, plain, f".c{threads}", shape, slow_runs)
    with _benched(directory / "buffered", layout, sizes, default, BufferedFiles()) as (bench, plain):
        yield _buffered(bench, plain, shape, slow_runs)


def _store_and_restore(bench: DiskBench, plain: PlainFile, suffix: str, shape: str, runs: int) -> Iterator[Figure]:
    def plain_store() -> float:
        began = time.perf_counter()
        plain.write(bench.blocks, bench.threads)
        return bench.gigabytes / (time.perf_counter() - began)

    def plain_restore() -> float:
        began = time.perf_counter()
        plain.read(bench.blocks, bench.threads + 1)  # as many as the tier has: one of its threads only reads
        return bench.gigabytes / (time.perf_counter() - began)

    yield measure_pairs(f"disk.store{suffix}", shape, "GB/s", bench.store_blocks, plain_store, runs)
    yield measure_pairs(f"disk.restore{suffix}", shape, "GB/s", bench.restore_blocks, plain_restore, runs)


def _latency(bench: DiskBench, plain: PlainFile, shape: str, runs: int) -> Iterator[Figure]:
    """Percentiles of single reads, tier and plain file in turn, of blocks at random."""
    count = READS_A_RUN * runs
    order = random.Random(0).choices(range(bench.num_blocks), k=count)
    tier_ms, plain_ms = [], []
    with steady():
        for index in order:
            tier_ms.append(bench.read_one(index))
            began = time.perf_counter()
            plain.read_one(index, bench.blocks[index])
            plain_ms.append(1e3 * (time.perf_counter() - began))
    for percent in (50, 99):
        value, limit = (float(np.percentile(times, percent)) for times in (tier_ms, plain_ms))
        yield Figure(f"disk.restore.p{percent}_ms", shape, value, "ms", limit, count)


def _buffered(bench: DiskBench, plain: PlainFile, shape: str, runs: int) -> Figure:
    modes = set(bench.disk.modes.values())
    assert modes == {"buffered"}, f"the tier is {modes}"

    def value() -> float:
        bench.drop_cached()
        return bench.restore_blocks()

    def limit() -> float:
        drop_cached([plain.path])
        began = time.perf_counter()
        plain.read(bench.blocks, bench.threads + 1)  # as many as the tier has: one of its threads only reads
        return bench.gigabytes / (time.perf_counter() - began)

    return measure_pairs("disk.restore_buffered", shape, "GB/s", value, limit, runs)
