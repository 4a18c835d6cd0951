"""The test itself: rounds of chains that are computed, stored, overwritten, restored elsewhere and compared."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.config import DiskSettings, EventSettings, RedisSettings, ServerSettings, Settings
from kvtier.errors import ConfigError, IntegrityError
from kvtier.keys import BlockDigest, Extras, Namespace, Shard, digest_tokens
from kvtier.layout import KVLayout
from kvtier.reasons import MissReason
from kvtier.store import Store
from kvtier_connectors.selftest.toy_engine import SETTLE_TIMEOUT_S, StuckError, ToyEngine

__all__ = ["SelftestReport", "run_selftest"]

BUDGET_BYTES = 192 << 20  # computed on the configured store; this and the next keep the test to seconds
BUDGET_BLOCKS = 2048
DISK_BYTES = 1 << 30
NEVER_RIGHT = frozenset(
    {
        MissReason.LAND_FAILED,
        MissReason.DAMAGED,
        MissReason.TIER_ERROR,
        MissReason.TIER_DOWN,
        MissReason.TIMEOUT,
    }
)
"""Misses that a pool too small for all that is stored does not explain."""
CHAIN_BLOCKS = 8
NUM_ROUNDS = 3
NOISE = 0xA5


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """What a selftest found. `ok` is true when `problems` is empty."""

    seed: int
    layout: KVLayout
    host_bytes: int
    """Size of the configured host pool."""
    blocks_stored: int
    blocks_restored: int
    """Blocks that the connector said it had restored; each was compared."""
    blocks_wrong: int
    """Blocks of those whose bytes were not the stored ones."""
    blocks_evicted: int
    """Blocks that gave their slot to another."""
    blocks_from_disk: int
    """Blocks of those restored that came from disk; 0 without `disk.path`."""
    disk_modes: dict[str, str]
    """By directory of `disk.path`: `direct` or `buffered`."""
    misses: dict[str, int]
    """Blocks asked for and not restored, by reason. Where more was stored than the pool holds, misses are right."""
    drops: dict[str, int]
    """Blocks that were not stored, by reason."""
    problems: tuple[str, ...]
    seconds: float

    @property
    def bit_equal(self) -> bool:
        return self.blocks_restored > 0 and not self.blocks_wrong

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {"ok": self.ok, "bit_equal": self.bit_equal, **dataclasses.asdict(self)}


@dataclass(slots=True)
class _Chain:
    digests: list[BlockDigest]
    homes: list[int]
    """Where its blocks lay when they were filled."""
    checksums: list[bytes]
    """SHA-256 of each block's bytes, taken then."""


@dataclass(slots=True)
class _Findings:
    stored: int = 0
    restored: int = 0
    wrong: int = 0
    evicted: int = 0
    from_disk: int = 0
    modes: dict[str, str] = field(default_factory=dict)
    misses: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def run_selftest(settings: Settings, layout: KVLayout, *, seed: int, corrupt: bool = False) -> SelftestReport:
    """Store, evict and restore random blocks on a store with these settings, and compare every byte.

    Whatever the settings say of policies, blocks are stored on eviction and restored. A host pool too large to fill in
    seconds is tested as it is, and after it a small one is filled twice over. With a disk, that small one is tested
    once more above a cache of its own, in a directory beside each of `disk.path` that is removed again: what is cached
    is left alone. Takes seconds and a few hundred MiB beside the pool. corrupt: flip one byte of a stored block, to
    show that the test would notice.

    Raises ConfigError or LayoutError when settings and layout cannot work on this machine, and ConfigError where host
    memory is a kvtier-server's, which others live off.
    """
    if settings.host.pool == "server":
        raise ConfigError(
            "host.pool = 'server': the selftest leaves a kvtier-server alone, for others live off it; to test this "
            "machine with host memory of the selftest's own, set host.pool = 'own' (KVTIER_HOST__POOL=own)"
        )
    start = time.perf_counter()
    settings = settings.model_copy(
        update={
            "store": settings.store.model_copy(update={"policy": "on_evict"}),
            "restore": settings.restore.model_copy(update={"enabled": True}),
        }
    )
    findings = _Findings()
    rng = np.random.default_rng(seed)
    disk = settings.disk
    # Others live off a server and the Redis, and routers off the events: none of them is for test data.
    none = {"disk": DiskSettings(), "server": ServerSettings(), "redis": RedisSettings(), "events": EventSettings()}
    settings = settings.model_copy(update=none)
    first = _Exercise(settings, layout, rng, findings)
    host_bytes = first.host_bytes
    first.run(corrupt=corrupt)
    if not first.overfills:
        _Exercise(_small_pool(settings, layout), layout, rng, findings).run()
    if disk.path:
        with _beside(disk) as own:
            _Exercise(_small_pool(settings, layout).model_copy(update={"disk": own}), layout, rng, findings).run()
        if not findings.from_disk:
            findings.problems.append("no block was restored from disk")
    if corrupt and not findings.wrong:
        findings.problems.append("a byte was flipped and no comparison saw it")
    if not findings.restored:
        findings.problems.append("no block was restored, so nothing was compared")
    return SelftestReport(
        seed=seed,
        layout=layout,
        host_bytes=host_bytes,
        blocks_stored=findings.stored,
        blocks_restored=findings.restored,
        blocks_wrong=findings.wrong,
        blocks_evicted=findings.evicted,
        blocks_from_disk=findings.from_disk,
        disk_modes=findings.modes,
        misses=dict(findings.misses),
        drops=dict(findings.drops),
        problems=tuple(findings.problems),
        seconds=time.perf_counter() - start,
    )


def _small_pool(settings: Settings, layout: KVLayout) -> Settings:
    """The same settings with a host pool of one slab that a few chains fill."""
    wanted = 4 * CHAIN_BLOCKS * layout.block_bytes
    slab = min(settings.host.slab, max(4096, 1 << (wanted - 1).bit_length()))
    size = max(slab, -(-wanted // slab) * slab)
    return settings.model_copy(update={"host": settings.host.model_copy(update={"size": size, "slab": slab})})


@contextmanager
def _beside(disk: DiskSettings) -> Iterator[DiskSettings]:
    """The same settings with a small cache in directories of its own on the same devices."""
    paths = tuple(f"{path.rstrip('/')}-selftest-{os.getpid()}" for path in disk.path)
    size = min(disk.size, len(paths) * DISK_BYTES)
    try:
        yield disk.model_copy(update={"path": paths, "size": size, "min_uses": 1, "max_write_rate": "off"})
    finally:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


class _Exercise:
    """Owns an engine, its chains and the random numbers, and notes what it finds."""

    def __init__(self, settings: Settings, layout: KVLayout, rng: np.random.Generator, findings: _Findings) -> None:
        store = Store(settings)
        try:
            capacity = store.pool.capacity_slots(layout.block_bytes)
            # Four chains' blocks of GPU, and no more than the host pool holds: else it forgets what it is asked for.
            self._chain_blocks = max(1, min(CHAIN_BLOCKS, settings.restore.max_inflight_blocks, capacity // 4))
            namespace = Namespace("kvtier selftest", "", layout, "all", Shard(0, 1))
            self._engine = ToyEngine(store, namespace, 4 * self._chain_blocks, 2 * self._chain_blocks)
        except BaseException:
            store.close()
            raise
        self._layout = layout
        self._rng = rng
        self._findings = findings
        self._chains: list[_Chain] = []
        self.host_bytes = store.pool.usage().reserved_bytes
        affordable = min(BUDGET_BYTES // layout.block_bytes, BUDGET_BLOCKS)
        affordable = max(affordable, NUM_ROUNDS * self._chain_blocks)
        self.overfills = 2 * capacity <= affordable
        num_blocks = 2 * capacity if self.overfills else min(capacity, affordable)
        num_chains = num_blocks // self._chain_blocks
        self._chains_a_round = max(1, -(-num_chains // NUM_ROUNDS) if self.overfills else num_chains // NUM_ROUNDS)

    def run(self, *, corrupt: bool = False) -> None:
        with self._engine:
            try:
                for number in range(1, NUM_ROUNDS + 1):
                    self._round(number, corrupt=corrupt and number == NUM_ROUNDS)
                    self._engine.connector.scheduler.check_integrity()
            except (IntegrityError, StuckError) as error:
                self._findings.problems.append(str(error))
            ledger = self._engine.connector.scheduler.stats().ledger
            stats = self._engine.store.stats()
        findings = self._findings
        findings.stored += ledger.stored
        findings.evicted += stats.evicted_blocks
        findings.from_disk += stats.hits.get("disk", 0)
        findings.modes.update(stats.disk.modes if stats.disk else {})
        findings.drops.update({reason.value: count for reason, count in ledger.dropped.items()})
        if ledger.pending:
            findings.problems.append(f"{ledger.pending} blocks were neither stored nor dropped")
        if stats.errors:
            findings.problems.append(f"exceptions were caught: {dict(stats.errors)}")

    def _round(self, number: int, *, corrupt: bool) -> None:
        for _ in range(self._chains_a_round):
            self._chains.append(self._compute())
        # Whoever waits for the whole pool makes every block due: the chains that are restored now are stored.
        self._engine.settle(waiting=self._engine.blocks.num_blocks)
        num_unwritten = self._engine.store.flush(SETTLE_TIMEOUT_S)
        if num_unwritten:
            self._findings.problems.append(f"round {number}: {num_unwritten} blocks were not written to disk")
        order = self._rng.permutation(len(self._chains)).tolist()
        if corrupt:
            index = self._corrupt(order)
            self._restore(index, 0, self._chain_blocks, number)
        for index in order:
            first, count = 0, self._chain_blocks
            if self._rng.random() < 0.5:  # the head is taken to be in the engine's own cache, the tail to be computed
                first = int(self._rng.integers(0, self._chain_blocks))
                count = int(self._rng.integers(1, self._chain_blocks - first + 1))
            self._restore(index, first, count, number)

    def _compute(self) -> _Chain:
        layout = self._layout
        tokens = self._rng.integers(0, 1 << 32, self._chain_blocks * layout.block_tokens, np.uint32)
        digests = digest_tokens(tokens, layout.block_tokens, Extras(None, None, ()))
        request_id, ids = self._engine.begin_chain(digests, len(digests))
        for block_id in ids:
            content = np.frombuffer(self._rng.bytes(layout.block_bytes), np.uint8)
            self._engine.memory[:, block_id] = content.reshape(layout.num_planes, -1)
        chain = _Chain(digests, ids, [self._checksum(block_id) for block_id in ids])
        self._engine.end_chain(request_id, 0, ids, len(ids))
        return chain

    def _restore(self, index: int, first: int, count: int, round_number: int) -> None:
        chain, scheduler, findings = self._chains[index], self._engine.connector.scheduler, self._findings
        request_id, ids = self._engine.begin_chain(chain.digests, count, chain.homes, first)
        self._engine.memory[:, ids] = NOISE
        found = self._engine.match(request_id, first, count)
        num_begun = scheduler.admit(request_id, first, count, ids)
        landed = sum(outcome.num_landed for outcome in self._engine.settle()) if num_begun else 0
        findings.restored += landed
        for place, block_id in enumerate(ids[:landed], first):
            if self._checksum(block_id) != chain.checksums[place]:
                findings.wrong += 1
                findings.problems.append(f"round {round_number}: block {place} of chain {index} came back wrong")
        if landed < count:
            reason = (found.miss if landed >= found.num_blocks else None) or MissReason.LAND_FAILED
            findings.misses[reason.value] += count - landed
            if not self.overfills or reason in NEVER_RIGHT:
                findings.problems.append(f"round {round_number}: {count - landed} held blocks missed: {reason.value}")
        self._engine.end_chain(request_id, first, ids, landed)

    def _corrupt(self, order: list[int]) -> int:
        """Flip one byte of a stored block; the chain whose it is."""
        space = self._engine.connector.space
        for index in order:
            with space.owner("selftest") as owner:
                leases = space.lease(self._chains[index].digests, owner)
                if leases:
                    offset = leases[int(self._rng.integers(len(leases)))].offset
                    space.buffer[offset + int(self._rng.integers(space.block_bytes))] ^= 0xFF
                    return index
        self._findings.problems.append("no block was held, so none could be corrupted")
        return order[0]

    def _checksum(self, block_id: int) -> bytes:
        return hashlib.sha256(self._engine.memory[:, block_id].tobytes()).digest()
