"""Figures of a disk tier over time: opening one that was killed, and what a full one writes for each block it takes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from kvtier.errors import KVTierError
from kvtier.layout import KVLayout
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk import DiskTier
from kvtier_connectors.bench.disk import DiskSizes
from kvtier_connectors.bench.dying import command_of, key_of
from kvtier_connectors.bench.figures import Figure
from kvtier_connectors.bench.plain import drop_cached

__all__ = ["aged_figures", "restart_figure"]

RESTART_LIMIT_S = 2.0
AMPLIFICATION_LIMIT = 1.1
CHILD_TIMEOUT_S = 300.0
ZIPF = 0.9
POPULATION = 4  # times the blocks that fit the capacity
FILLED = 0.9
SEGMENTS_BYTES = 32 << 20  # room for segments that are being filled or emptied, in a tier as small as tests'
TURNOVERS = 1.0  # of the capacity, written while it is measured


def restart_figure(directory: Path, shape: str, layout: KVLayout, runs: int, sizes: DiskSizes) -> Figure:
    """Median seconds in which a tier opens whose process was killed, nothing of it in the page cache.

    Each run's process goes on to write an eighth of a segment or more before it is killed, so that the open segment,
    which has to be scanned, is another part full each time. The limit is a bar.
    """
    directory.mkdir(exist_ok=True)
    capacity = sizes.held_bytes // 8 * 9 + SEGMENTS_BYTES
    count = sizes.held_bytes // layout.block_bytes
    more = max(1, sizes.held_bytes // 40 // layout.block_bytes)
    _child(directory, capacity, layout, 0, count)
    seconds = []
    for run in range(runs):
        drop_cached(directory.glob("segment-*"))
        told = _child(directory, capacity, layout, count + run * more, more)
        held = told["blocks"] * layout.block_bytes
        assert held >= sizes.held_bytes * 0.9, f"only {held} of {sizes.held_bytes} bytes were found"
        seconds.append(told["seconds"])
    return Figure("disk.warm_restart", shape, float(np.median(seconds)), "s", RESTART_LIMIT_S, runs)


def _child(directory: Path, capacity: int, layout: KVLayout, first: int, count: int) -> dict[str, float]:
    command = command_of(
        task="fill",
        directory=str(directory),
        capacity=capacity,
        block_bytes=layout.block_bytes,
        first=first,
        count=count,
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    if done.returncode != -signal.SIGKILL:
        raise KVTierError(f"the process that fills a tier failed: {done.stderr.strip()[-500:]}")
    told: dict[str, float] = json.loads(done.stdout)
    return told


def aged_figures(directory: Path, shape: str, layout: KVLayout, sizes: DiskSizes) -> Iterator[Figure]:
    """Bytes written for each byte accepted, and the hit rate, of a tier that is 90 % full when it begins.

    Keys come by Zipf's law; each is read if the tier holds it and written if not, until as much was written as the
    tier holds. The limit of the first is a bar; that of the second what exact LRU over as many blocks as fit the
    capacity hits of the same keys.
    """
    directory.mkdir(exist_ok=True)
    tier = DiskTier([directory], sizes.aged_bytes, segment_bytes=sizes.segment_bytes)
    try:
        fitting = sizes.aged_bytes // layout.block_bytes
        stream = _Stream(POPULATION * fitting)
        ideal = _Lru(fitting)
        block = np.random.default_rng(0).integers(0, 256, layout.block_bytes, np.uint8)
        out = _aligned(layout.block_bytes)
        source = _aligned(layout.block_bytes)
        source[:] = block.data
        while not _is_filled(tier, layout):
            number = stream.next()
            _access(tier, number, source, out)
            ideal.access(number)
        before = tier.snapshot()
        hits = ideal_hits = asked = 0
        while tier.snapshot().accepted_bytes - before.accepted_bytes < TURNOVERS * sizes.aged_bytes:
            for _ in range(16):
                number = stream.next()
                asked += 1
                hits += _access(tier, number, source, out)
                ideal_hits += ideal.access(number)
        after = tier.snapshot()
        written = after.written_bytes - before.written_bytes
        accepted = after.accepted_bytes - before.accepted_bytes
    finally:
        tier.close()
    yield Figure("disk.write_amplification", shape, written / accepted, "", AMPLIFICATION_LIMIT, 1)
    yield Figure("disk.hit_rate", shape, hits / asked, "", max(1, ideal_hits) / asked, 1)


def _is_filled(tier: DiskTier, layout: KVLayout) -> bool:
    snapshot = tier.snapshot()
    frames = snapshot.num_blocks * (layout.block_bytes + 4096)
    return frames >= FILLED * snapshot.capacity_bytes or snapshot.evicted_blocks > 0


def _aligned(nbytes: int) -> memoryview:
    import mmap

    return memoryview(mmap.mmap(-1, nbytes))


def _access(tier: DiskTier, number: int, source: memoryview, out: memoryview) -> bool:
    """True for a hit."""
    key = key_of(number)
    if tier.read([ReadRequest(key, out)]) == [ReadOutcome.OK]:
        assert out[:8] == source[:8], "a block came back with other bytes"
        return True
    outcomes = tier.write([WriteRequest(key, None, source)])
    assert outcomes == [WriteOutcome.STORED], f"a block was not written: {outcomes}"
    return False


class _Stream:
    """Numbers below `population`, by Zipf's law, the same each time."""

    def __init__(self, population: int) -> None:
        self._random = random.Random(0)
        self._numbers = self._random.sample(range(population), population)
        self._weights = list(accumulate((rank + 1) ** -ZIPF for rank in range(population)))

    def next(self) -> int:
        return self._random.choices(self._numbers, cum_weights=self._weights)[0]


class _Lru:
    def __init__(self, capacity: int) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def access(self, number: int) -> bool:
        hit = number in self._held
        self._held[number] = None
        self._held.move_to_end(number)
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return hit
