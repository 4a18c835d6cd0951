"""From a daemon's settings to its tenants' stores, open."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvtier.clock import Clock
from kvtier.config import MemorySnapshot, ServerSettings, Settings
from kvtier.config.serving import Credential
from kvtier.errors import ConfigError
from kvtier.executor import ThreadExecutor
from kvtier.server.tenants import Tenant
from kvtier.store import Store

__all__ = ["TenantPlan", "close_tenants", "credentials_of", "flush_tenants", "open_tenants", "plan_tenants"]

MAX_OPENING_AT_ONCE = 8
MAX_CALLS = 256
"""Resets and removals of one tenant that wait for their thread."""
MIN_CLOSE_S = 1.0
"""For the tiers to let go, however late it is: a disk's index is made whole then."""


class TenantPlan(NamedTuple):
    """What a tenant will have. settings: of its store."""

    name: str
    pool_bytes: int
    settings: Settings


def plan_tenants(settings: Settings, memory: MemorySnapshot) -> list[TenantPlan]:
    """Each tenant's part of memory, disk and Redis. Opens nothing; raises ConfigError where there is not so much.

    Without `daemon.tenants` the one tenant has all that the settings say, in the very directories that an engine of its
    own would use; named tenants have directories and names in Redis of their own. What an engine's own settings may
    also say, that its lower tier is this daemon, is not the daemon's; that its host memory is, is refused, for
    `host.size` means another thing there.
    """
    if settings.host.pool != "own":
        raise ConfigError(
            "host.pool = 'server' is for engines, a kvtier-server's memory is its own: set host.pool to 'own', and "
            "host.size to the memory of all engines together (is this an engine's file or environment?)"
        )
    shares = dict(settings.daemon.tenants)
    if not shares:
        (name,) = settings.daemon.tenant_names
        pool_bytes = settings.host.model_copy(update={"workers": 1}).pool_bytes(memory)
        return [TenantPlan(name, pool_bytes, _for_tenant(settings, pool_bytes))]
    total = sum(shares.values())
    if total > memory.limit_bytes:
        raise ConfigError(
            f"daemon.tenants: {total} bytes for all together, more than there are ({memory.describe()}); lower some"
        )
    for name, pool_bytes in shares.items():
        if pool_bytes < settings.host.slab:
            raise ConfigError(
                f"daemon.tenants: {name!r} has {pool_bytes} bytes, less than one slab (host.slab = "
                f"{settings.host.slab}); raise it, or lower host.slab"
            )
    return [
        TenantPlan(name, pool_bytes, _for_tenant(settings, pool_bytes, name, total))
        for name, pool_bytes in shares.items()
    ]


def _for_tenant(settings: Settings, pool_bytes: int, name: str = "", total: int = 0) -> Settings:
    """name: of a named tenant, of several whose pools have `total` bytes."""
    host = settings.host.model_copy(update={"size": pool_bytes, "workers": 1})
    update: dict[str, object] = {"host": host, "server": ServerSettings()}
    if name:
        disk, redis = settings.disk, settings.redis
        paths = tuple(str(Path(path).expanduser() / name) for path in disk.path)
        update["host"] = host.model_copy(update={"quotas": {}})
        update["disk"] = disk.model_copy(update={"path": paths, "size": max(1, disk.size * pool_bytes // total)})
        update["redis"] = redis.model_copy(update={"tenant": name})
    return settings.model_copy(update=update)


def credentials_of(settings: Settings) -> tuple[Credential, ...]:
    """As `daemon.credentials` says; where it says nothing, the daemon's own user is its one tenant."""
    named = settings.daemon.bound_credentials
    return named or (Credential(settings.daemon.tenant_names[0], "uid", str(os.geteuid())),)


def open_tenants(
    plans: Sequence[TenantPlan], *, checksums: bool, memory: MemorySnapshot, clock: Clock | None
) -> list[Tenant]:
    """Open all stores at once, their pools' pages not made ahead yet.

    Blocks for as long as the slowest takes; raises what that raises, none open then.
    """

    def open_one(plan: TenantPlan) -> Tenant:
        for path in plan.settings.disk.path:
            Path(path).expanduser().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = Store(plan.settings, memory=memory, touch=False, clock=clock, keeps_checksums=checksums)
        try:
            executor = ThreadExecutor(f"kvtier-{plan.name}-calls", MAX_CALLS)
        except BaseException:
            store.close()
            raise
        return Tenant(plan.name, store, store.memory.fd, executor)

    if len(plans) == 1:
        return [open_one(plans[0])]
    with ThreadPoolExecutor(min(MAX_OPENING_AT_ONCE, len(plans)), "kvtier-opens") as threads:
        futures = [threads.submit(open_one, plan) for plan in plans]
    opened = [future.result() for future in futures if future.exception() is None]
    for future in futures:
        if (error := future.exception()) is not None:
            close_tenants(opened, MIN_CLOSE_S)
            raise error
    return opened


def flush_tenants(tenants: Sequence[Tenant], timeout: float) -> int:
    """Wait until all that is due below is written, at most `timeout` seconds; how many blocks are not. Blocks."""
    if not tenants:
        return 0
    with ThreadPoolExecutor(min(MAX_OPENING_AT_ONCE, len(tenants)), "kvtier-flushes") as threads:
        deadline = time.monotonic() + timeout
        return sum(threads.map(lambda tenant: tenant.store.flush(max(0.0, deadline - time.monotonic())), tenants))


def close_tenants(tenants: Sequence[Tenant], timeout: float) -> None:
    """Close all, within `timeout` seconds. Blocks."""
    deadline = time.monotonic() + timeout
    for tenant in tenants:
        tenant.executor.close(max(0.0, deadline - time.monotonic()))
        tenant.store.close(max(MIN_CLOSE_S, deadline - time.monotonic()))
