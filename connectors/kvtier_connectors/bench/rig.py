"""A store with a small host pool over lower tiers of whatever settings, a connector, and traffic through both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvtier.config import (
    DiskSettings,
    HostSettings,
    RedisSettings,
    RestoreSettings,
    ServerSettings,
    Settings,
    StoreSettings,
)
from kvtier.errors import IntegrityError
from kvtier.keys import BlockDigest, Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.lower import LowerTier
from kvtier.store import Store
from kvtier.tiers.disk import Files
from kvtier_connectors.bench.traffic import CHAIN_BLOCKS, DRAIN_TIMEOUT_S, Traffic
from kvtier_connectors.selftest.toy_engine import ToyEngine

__all__ = ["FaultRig", "disk_at"]

GPU_BLOCKS = 512
HOST_BYTES = 32 << 20
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16)  # blocks of 32 KiB


def disk_at(directory: Path, *, timeout_s: float = 0.5) -> DiskSettings:
    """A disk tier of 96 MiB."""
    return DiskSettings(path=(str(directory),), size=96 << 20, min_free=1 << 20, timeout_s=timeout_s)


class FaultRig:
    """One engine over the lower tiers that the settings name. Owns the store, and closes it."""

    def __init__(
        self,
        disk: DiskSettings | None = None,
        redis: RedisSettings | None = None,
        server: ServerSettings | None = None,
        files: Files | None = None,
        *,
        host_bytes: int = HOST_BYTES,
        max_wait_s: float = 0.5,
    ) -> None:
        settings = Settings(
            host=HostSettings(size=host_bytes, slab=1 << 20),
            disk=disk or DiskSettings(),
            redis=redis or RedisSettings(),
            server=server or ServerSettings(),
            store=StoreSettings(policy="write_through"),
            restore=RestoreSettings(max_wait_s=max_wait_s),
        )
        self.store = Store(settings, disk_files=files)
        self._namespace = Namespace("kvtier bench", "", LAYOUT, "all", Shard(0, 1))
        self.engine = ToyEngine(self.store, self._namespace, GPU_BLOCKS, CHAIN_BLOCKS)
        self.traffic = Traffic(self.engine)

    def chain(self, number: int) -> list[BlockDigest]:
        """The digests of a conversation, the same each time."""
        noise = np.random.default_rng(number)
        return [BlockDigest(noise.bytes(32)) for _ in range(CHAIN_BLOCKS)]

    @property
    def namespace(self) -> bytes:
        """Of its blocks, in the store's epoch of now."""
        return self._namespace.digest(self.store.epoch)

    def tier(self, name: str) -> LowerTier:
        return self.store.tier(name)

    def forget_host(self) -> None:
        """Leave the lower tiers as the only ones that hold anything."""
        self.store.host.reset(self.namespace)

    def run(self, chains: Sequence[Sequence[BlockDigest]], after_step: Callable[[], None] = lambda: None) -> None:
        """Requests for these, a new one every other step, to their end."""
        for digests in chains:
            self.traffic.start(digests)
            for _ in range(2):
                self.traffic.step()
                after_step()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self.traffic.num_live:
            assert time.monotonic() < deadline, f"{self.traffic.num_live} requests hang"
            self.traffic.step()
            after_step()
        self.traffic.drain()

    def verify(self) -> None:
        """Between steps: everything agrees, every due block is stored, dropped for a reason or pending, and every block
        asked for was a hit or a miss for a reason. Raises IntegrityError."""
        self.engine.connector.check_integrity()
        self.store.check_integrity()
        for lower in self.store.lower:
            ledger = lower.write_behind.ledger.snapshot()
            if ledger.due != ledger.stored + sum(ledger.dropped.values()) + ledger.pending:
                raise IntegrityError(f"{lower.name}: due = stored + dropped + pending does not hold: {ledger}")
        stats = self.store.stats()
        if stats.asked_blocks != stats.hit_blocks + sum(stats.misses.values()):
            raise IntegrityError(f"asked = hit + missed does not hold: {stats}")

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
