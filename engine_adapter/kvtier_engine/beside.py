"""kvtier as an engine uses it: the one in this process, or what stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.metrics import StatsSnapshot
from kvtier_connectors.connector import FlushResult
from kvtier_connectors.contract import ConnectorScheduler, ConnectorWorker
from kvtier_engine.block_pool import BlockPool
from kvtier_kernels import BlockPlanes

__all__ = ["ConnectorOpener", "EngineConnector"]


class EngineConnector(Protocol):
    """Both halves of a connector and what goes beyond a step. `kvtier_connectors.Connector` is one."""

    @property
    def scheduler(self) -> ConnectorScheduler:
        """The half beside the engine's scheduler."""

    @property
    def worker(self) -> ConnectorWorker:
        """The half beside its block pool."""

    def flush(self, timeout: float, reused: Sequence[int] = ()) -> FlushResult:
        """See `Connector.flush`."""

    def close(self, timeout: float = 5.0, reused: Sequence[int] = ()) -> None:
        """See `Connector.close`."""

    def stats(self) -> StatsSnapshot | None:
        """What the store counts, if there is one."""

    def num_in_flight(self) -> int:
        """Blocks being copied."""

    def check_integrity(self) -> None:
        """Raises IntegrityError when something disagrees. For tests."""


class ConnectorOpener(Protocol):
    """Opens a connector beside an engine's pool. planes: where the pool's bytes are."""

    def __call__(self, pool: BlockPool, planes: BlockPlanes) -> EngineConnector: ...
