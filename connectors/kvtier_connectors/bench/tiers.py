"""Figures of the host tier: bytes between an engine's pool and slots, and what opening a pool takes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.config import HostSettings, MemorySnapshot, Settings
from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.pool import Owner
from kvtier.reasons import DropReason
from kvtier.store import Space, Store
from kvtier_connectors.bench.figures import Figure, measure_pairs, seconds_of, steady
from kvtier_connectors.bench.idle import idle_figure
from kvtier_connectors.bench.memory import peak_memory_figure
from kvtier_connectors.contract import WRITTEN, CopyDirection, CopyJob, TransferPlan
from kvtier_connectors.copies import blocks_per_job
from kvtier_connectors.worker import KVTierWorker
from kvtier_kernels import BlockPlanes

__all__ = ["TierSizes", "host_figures"]

Bytes = npt.NDArray[np.uint8]
COPY_TIMEOUT_S = 60.0
START_LIMIT_S = 1.0
MAX_SLOW_RUNS = 5  # of figures whose every run takes a good part of a second


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What the figures are measured on. Smaller than this they say little: caches hold too much of it."""

    moved_bytes: int = 512 << 20
    """Copied in one run, and the size of the engine's pool."""
    started_bytes: int = 8 << 30
    """The pool whose start is timed; almost none of it is touched."""
    cached_blocks: int = 100_000
    """In the pool of the idle engine."""


def host_figures(shape: str, layout: KVLayout, runs: int, sizes: TierSizes) -> Iterator[Figure]:
    """Every figure of the host tier, each as soon as it is measured."""
    slow_runs = min(runs, MAX_SLOW_RUNS)
    yield from _copy_figures(shape, layout, runs, slow_runs, sizes)
    yield _start_figure(shape, layout, slow_runs, sizes)
    yield idle_figure(shape, runs, sizes.cached_blocks)
    yield peak_memory_figure(shape, layout, slow_runs, sizes.moved_bytes)


class _EnginePool:
    """A touched pool [num_planes, num_blocks, segment_bytes] and the order, at random, in which its blocks move."""

    def __init__(self, layout: KVLayout, num_bytes: int) -> None:
        self.block_bytes = layout.block_bytes
        self.num_blocks = max(1, -(-num_bytes // layout.block_bytes))
        self.memory: Bytes = np.ones((layout.num_planes, self.num_blocks, layout.segment_bytes), np.uint8)
        self.planes = BlockPlanes.from_arrays(list(self.memory))
        self.block_ids: list[int] = np.random.default_rng(0).permutation(self.num_blocks).tolist()
        flat = self.memory.reshape(-1)
        self.pieces = [flat[i * self.block_bytes : (i + 1) * self.block_bytes] for i in self.block_ids]

    @property
    def gigabytes(self) -> float:
        return self.num_blocks * self.block_bytes / 1e9


def _copy_figures(shape: str, layout: KVLayout, runs: int, slow_runs: int, sizes: TierSizes) -> Iterator[Figure]:
    pool = _EnginePool(layout, sizes.moved_bytes)
    settings = _settings_for(layout, pool.num_blocks)
    with Store(settings) as store:
        store.memory.wait_touched(COPY_TIMEOUT_S)
        space = _open(store, layout)
        offsets = _slots(space, pool.num_blocks, space.owner("bench"))
        slots = [space.buffer[offset : offset + pool.block_bytes] for offset in offsets]
        worker = KVTierWorker(pool.planes, space.buffer)
        store_work = _moving(worker, CopyDirection.STORE, pool, offsets)
        restore_work = _moving(worker, CopyDirection.RESTORE, pool, offsets)
        down, up = _copying(slots, pool.pieces), _copying(pool.pieces, slots)
        yield measure_pairs("host.store", shape, "GB/s", _rate(pool, store_work), _rate(pool, down), runs)
        yield measure_pairs("host.restore", shape, "GB/s", _rate(pool, restore_work), _rate(pool, up), runs)
        worker.close(COPY_TIMEOUT_S)
        del slots, down, up  # views of the host pool
    yield measure_pairs(
        "host.store_first_touch",
        shape,
        "GB/s",
        lambda: _first_touch_store(pool, layout, settings),
        lambda: _first_touch_memcpy(pool),
        slow_runs,
    )


def _rate(pool: _EnginePool, work: Callable[[], object]) -> Callable[[], float]:
    return lambda: pool.gigabytes / seconds_of(work)


def _moving(
    worker: KVTierWorker, direction: CopyDirection, pool: _EnginePool, offsets: list[int]
) -> Callable[[], None]:
    """Submit all blocks, in jobs of the connector's size, and wait for the last result."""
    size = blocks_per_job(pool.block_bytes)
    starts = range(0, pool.num_blocks, size)
    jobs = tuple(
        CopyJob(start, direction, tuple(pool.block_ids[start : start + size]), tuple(offsets[start : start + size]))
        for start in starts
    )

    def work() -> None:
        worker.submit(TransferPlan(jobs, pool.num_blocks), WRITTEN)
        num_copied = 0
        while num_copied < pool.num_blocks:
            results = worker.poll(COPY_TIMEOUT_S)
            assert results, "the copying thread is stuck"
            assert all(result.failure is None for result in results)
            num_copied += sum(len(result.copied) for result in results)

    return work


def _copying(to: list[Bytes], source: list[Bytes]) -> Callable[[], None]:
    """The limit: the same bytes between the same memories, each block in one piece."""

    def work() -> None:
        for piece, other in zip(to, source, strict=True):
            np.copyto(piece, other)

    return work


def _first_touch_store(pool: _EnginePool, layout: KVLayout, settings: Settings) -> float:
    with Store(settings, touch=False) as store:
        space = _open(store, layout)
        offsets = _slots(space, pool.num_blocks, space.owner("bench"))
        worker = KVTierWorker(pool.planes, space.buffer)
        rate = _rate(pool, _moving(worker, CopyDirection.STORE, pool, offsets))()
        worker.close(COPY_TIMEOUT_S)
    return rate


def _first_touch_memcpy(pool: _EnginePool) -> float:
    fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, pool.num_blocks * pool.block_bytes)
        with mmap.mmap(fd, 0) as mapping:
            fresh = np.frombuffer(mapping, np.uint8)
            pieces = [fresh[i * pool.block_bytes : (i + 1) * pool.block_bytes] for i in range(pool.num_blocks)]
            rate = _rate(pool, _copying(pieces, pool.pieces))()
            del pieces, fresh
    finally:
        os.close(fd)
    return rate


def _start_figure(shape: str, layout: KVLayout, runs: int, sizes: TierSizes) -> Figure:
    """Seconds from nothing to the first block that can be restored. Its limit is a bar, not a measurement."""
    settings = Settings(host=HostSettings(size=sizes.started_bytes))
    memory = MemorySnapshot(sizes.started_bytes, sizes.started_bytes)  # hardly any of it is touched
    block = np.ones(layout.block_bytes, np.uint8)

    def start() -> float:
        began = time.perf_counter()
        store = Store(settings, memory=memory)
        try:
            space = _open(store, layout)
            owner = space.owner("bench")
            reservation = space.reserve(_digest(0), None, owner)
            assert not isinstance(reservation, DropReason)
            offset = reservation.lease.offset
            np.copyto(space.buffer[offset : offset + layout.block_bytes], block)
            space.commit([reservation])
            assert len(space.lease([_digest(0)], owner)) == 1
            return time.perf_counter() - began
        finally:
            store.close()

    with steady():
        seconds = sorted(start() for _ in range(runs))
    return Figure("pool.start", shape, float(np.median(seconds)), "s", START_LIMIT_S, runs)


def _settings_for(layout: KVLayout, num_blocks: int) -> Settings:
    """A host pool of just enough whole slabs."""
    slab = HostSettings().slab
    a_slab = slab // (-(-layout.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return Settings(host=HostSettings(size=-(-num_blocks // a_slab) * slab))


def _open(store: Store, layout: KVLayout) -> Space:
    return store.open_space(Namespace("kvtier bench", "", layout, "all", Shard(0, 1)))


def _slots(space: Space, count: int, owner: Owner) -> list[int]:
    """Offsets of slots as the pool hands them out; they are held until the store is closed."""
    offsets = []
    for number in range(count):
        reservation = space.reserve(_digest(number), None, owner)
        assert not isinstance(reservation, DropReason)
        offsets.append(reservation.lease.offset)
    return offsets


def _digest(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(32, "little"))
