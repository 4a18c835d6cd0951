"""Opening kvtier beside an engine: one store, one space, both halves, and the checks that speak at start."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from kvtier.config import Settings
from kvtier.errors import LayoutError
from kvtier.executor import Executor
from kvtier.keys import Namespace
from kvtier.layout import KVLayout
from kvtier.store import Space, Store
from kvtier_connectors.contract import BlockPoolView
from kvtier_connectors.scheduler import KVTierScheduler
from kvtier_connectors.worker import KVTierWorker
from kvtier_kernels import BlockPlanes

__all__ = ["Connector", "sizing_warning"]

logger = logging.getLogger("kvtier.connector")


def sizing_warning(host_blocks: int, gpu_blocks: int) -> str | None:
    """What to tell the operator when the host pool is too small to help; None when it is not."""
    if host_blocks >= gpu_blocks:
        return None
    return (
        f"host.size holds {host_blocks} blocks, fewer than the GPU pool's {gpu_blocks}: whatever is evicted from the "
        f"GPU pool has mostly left the host pool before it is asked for again, so storing costs and brings little; "
        f"raise host.size to several times the GPU pool"
    )


def _check_planes(planes: BlockPlanes, layout: KVLayout, num_blocks: int) -> None:
    """That the planes are in `layout`'s order cannot be seen from here; that they are others can."""
    expected = (layout.segment_bytes,) * layout.num_planes
    if planes.segment_bytes != expected:
        raise LayoutError(
            f"the GPU pool has {planes.num_planes} planes of {sorted(set(planes.segment_bytes))} bytes a block; the "
            f"namespace's layout says {layout.num_planes} of {layout.segment_bytes}, layer 0 keys, layer 0 values, "
            f"layer 1 keys and so on"
        )
    if planes.num_blocks != num_blocks:
        raise LayoutError(f"the block pool has {num_blocks} blocks, its planes {planes.num_blocks}")


class Connector:
    """kvtier in one process with its engine: owns the store, unless one is given, and both halves."""

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        pool: BlockPoolView,
        planes: BlockPlanes,
        *,
        store: Store | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Raises ConfigError or LayoutError for settings, or a pool, that cannot work; then nothing stays open.

        store: shared with others; `settings.host` is then its own, the rest of `settings` this connector's.
        """
        _check_planes(planes, namespace.layout, pool.num_blocks)
        self._owns_store = store is None
        self.store = Store(settings) if store is None else store
        try:
            self.space: Space = self.store.open_space(namespace)
            warning = sizing_warning(self.space.capacity_blocks, planes.num_blocks)
            if warning is not None:
                logger.warning("%s", warning)
            self.worker = KVTierWorker(planes, self.space.buffer, executor=executor)
            try:
                self.scheduler = KVTierScheduler(self.store, self.space, pool, settings)
            except BaseException:
                self.worker.close(0.0)
                raise
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise

    def close(self, timeout: float = 5.0) -> None:
        """Stop copies within `timeout` seconds, account for what is left, unmap. Idempotent."""
        self.scheduler.complete(self.worker.close(timeout))
        self.scheduler.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
