"""What may be known of a daemon from outside: one moment of it, and the document behind the status page.

The document is made field by field, so that nothing gets into it by being added elsewhere: no setting, no variable of
the environment, no credential. Of paths it has those of the directories of the disk tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvtier.breaker import BreakerSnapshot, BreakerState
from kvtier.metrics import DiskStats, LowerStats, StatsSnapshot
from kvtier.store import Store

__all__ = [
    "ClientCounts",
    "DaemonSnapshot",
    "Problem",
    "QuarantineCounts",
    "TenantSnapshot",
    "Watched",
    "lower_stats",
    "problems",
    "status_document",
    "tenant_snapshot",
]

State = Literal["starting", "serving", "draining", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCounts:
    """One moment of a tenant's connections, all together. Counters run from the daemon's start."""

    unix: int = 0
    """Connections on the Unix socket now."""
    tcp: int = 0
    """Connections over TCP now."""
    leases: int = 0
    """Blocks that these hold to read now."""
    reservations: int = 0
    """Slots that these fill now."""
    requests: int = 0
    """Requests without their answer now."""
    waiting: int = 0
    """Of those, stages that wait for a lower tier."""
    longest_wait_s: float = 0.0
    """How long the longest of these has waited by now."""
    waits: int = 0
    """Stages that had to wait for a lower tier."""
    wait_seconds: float = 0.0
    """What the ended ones of those waited, together."""
    served_bytes: int = 0
    """Bytes of blocks that stages leased or sent."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Blocks that were to be staged, by what became of them: `ok`, or why not."""


@dataclass(frozen=True, slots=True)
class QuarantineCounts:
    """What clients left behind that may still write or read: never handed out until they are known to be dead."""

    clients: int = 0
    slots: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """One moment of a tenant. breakers: of its lower tiers by name, in the order in which these are asked."""

    name: str
    stats: StatsSnapshot
    breakers: Mapping[str, BreakerSnapshot]
    clients: ClientCounts = ClientCounts()
    quarantine: QuarantineCounts = QuarantineCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSnapshot:
    """One moment of a daemon. reason: for people, why it is not ready; shown to whoever asks, so without secrets.
    refused: connections that were turned away, by code."""

    state: State
    reason: str
    version: str
    uptime_s: float
    max_clients: int
    tenants: Sequence[TenantSnapshot]
    refused: Mapping[str, int] = field(default_factory=dict)


class Watched(Protocol):
    """A daemon as whoever watches it needs it. Called from threads of the watcher's."""

    @property
    def is_ready(self) -> bool:
        """Whether clients are served: the first part of every pool and all tiers are open, and it is not draining.
        Never waits."""

    def snapshot(self) -> DaemonSnapshot:
        """One moment. May wait for the daemon's own thread, a second or so at most, and not for I/O."""


def tenant_snapshot(
    name: str,
    store: Store,
    clients: ClientCounts | None = None,
    quarantine: QuarantineCounts | None = None,
) -> TenantSnapshot:
    """One moment of a tenant whose store this is. Any thread; never blocks on I/O."""
    breakers = {lower.name: lower.breaker for lower in store.lower}
    return TenantSnapshot(name, store.stats(), breakers, clients or ClientCounts(), quarantine or QuarantineCounts())


def lower_stats(stats: StatsSnapshot, name: str) -> LowerStats | None:
    """The counts of a lower tier by its name; None where it has none of its own."""
    found = getattr(stats, name, None)
    return found if isinstance(found, LowerStats) else None


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """What someone who is woken needs first. is_now: it goes on; else it is a count since the start."""

    tenant: str
    text: str
    is_now: bool = True


def problems(snapshot: DaemonSnapshot) -> list[Problem]:
    """All that is wrong, what goes on before what was."""
    found = [] if snapshot.state == "serving" else [Problem("", f"not serving: {snapshot.reason or snapshot.state}")]
    if snapshot.tenants and (connected := sum(_connected(each) for each in snapshot.tenants)) >= snapshot.max_clients:
        found.append(Problem("", f"all {connected} clients that daemon.max_clients allows are connected"))
    for tenant in snapshot.tenants:
        found += _tenant_problems(tenant)
    return sorted(found, key=lambda problem: not problem.is_now)


def _connected(tenant: TenantSnapshot) -> int:
    return tenant.clients.unix + tenant.clients.tcp


def _tenant_problems(tenant: TenantSnapshot) -> Iterator[Problem]:
    name, quarantine = tenant.name, tenant.quarantine
    for tier, breaker in tenant.breakers.items():
        if breaker.state is not BreakerState.CLOSED:
            yield Problem(name, f"the {tier} tier is sick: it is left alone for now, and what it holds is a miss")
        lower = lower_stats(tenant.stats, tier)
        if isinstance(lower, DiskStats):
            for directory, reason in lower.read_only.items():
                yield Problem(name, f"{directory} takes no writes: {reason}")
        damaged = getattr(lower, "damaged_blocks", 0)
        if damaged:
            yield Problem(name, f"damaged blocks found in the {tier} tier: {damaged}", is_now=False)
    if quarantine.slots:
        yield Problem(
            name,
            f"slots in quarantine: {quarantine.slots}, of clients that went without a word and are not known to be "
            f"dead: {quarantine.clients}",
        )
    if damaged := tenant.clients.outcomes.get("damaged", 0):
        yield Problem(name, f"blocks that were not what their checksum says: {damaged}", is_now=False)
    if full := tenant.clients.outcomes.get("full", 0):
        yield Problem(name, f"blocks without room in host memory, where every slot was in use: {full}", is_now=False)
    if errors := sum(tenant.stats.errors.values()):
        yield Problem(name, f"errors, of which the log says more: {errors}", is_now=False)


# ---- the document ----------------------------------------------------------------------------------------------------


def status_document(snapshot: DaemonSnapshot) -> dict[str, Any]:
    """All that the status page shows, as what JSON has. Counters are raw, and run from the start."""
    return {
        "state": snapshot.state,
        "reason": snapshot.reason,
        "version": snapshot.version,
        "uptime_s": snapshot.uptime_s,
        "clients": sum(_connected(tenant) for tenant in snapshot.tenants),
        "max_clients": snapshot.max_clients,
        "refused": dict(snapshot.refused),
        "problems": [{"tenant": p.tenant, "text": p.text, "is_now": p.is_now} for p in problems(snapshot)],
        "tenants": [_tenant(tenant) for tenant in snapshot.tenants],
    }


def _tenant(tenant: TenantSnapshot) -> dict[str, Any]:
    stats, clients, quarantine = tenant.stats, tenant.clients, tenant.quarantine
    lower = [(name, breaker, lower_stats(stats, name)) for name, breaker in tenant.breakers.items()]
    return {
        "name": tenant.name,
        "lookups": stats.lookups,
        "asked_blocks": stats.asked_blocks,
        "hit_blocks": stats.hit_blocks,
        "hits": dict(stats.hits),
        "misses": dict(stats.misses),
        "fallbacks": dict(stats.fallbacks),
        "stored_blocks": stats.stored_blocks,
        "stored_bytes": stats.stored_bytes,
        "evicted_blocks": stats.evicted_blocks,
        "resets": stats.resets,
        "errors": dict(stats.errors),
        "served_bytes": clients.served_bytes,
        "outcomes": dict(clients.outcomes),
        "clients": {
            "unix": clients.unix,
            "tcp": clients.tcp,
            "leases": clients.leases,
            "reservations": clients.reservations,
            "requests": clients.requests,
        },
        "waits": {
            "now": clients.waiting,
            "longest_s": clients.longest_wait_s,
            "count": clients.waits,
            "seconds": clients.wait_seconds,
        },
        "quarantine": {"clients": quarantine.clients, "slots": quarantine.slots, "bytes": quarantine.nbytes},
        "tiers": [_host(stats), *(_lower(*each) for each in lower)],
    }


def _host(stats: StatsSnapshot) -> dict[str, Any]:
    return {
        "name": "host",
        "blocks": stats.host_blocks,
        "used_bytes": stats.host_used_bytes,
        "capacity_bytes": stats.host_reserved_bytes,
        "touched_bytes": stats.host_touched_bytes,
        "pinned_bytes": stats.host_pinned_bytes,
        "leases": stats.leases,
        "staging_bytes": stats.staging_bytes,
    }


def _lower(name: str, breaker: BreakerSnapshot, lower: LowerStats | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": name,
        "breaker": {
            "state": breaker.state.value,
            "open_for_s": breaker.open_for_s,
            "next_probe_in_s": breaker.next_probe_in_s,
            "times_opened": breaker.times_opened,
        },
    }
    if lower is not None:
        document |= {
            "blocks": lower.blocks,
            "used_bytes": lower.used_bytes,
            "capacity_bytes": lower.capacity_bytes,
            "reads": dict(lower.reads),
            "read_bytes": lower.read_bytes,
            "writes": dict(lower.writes),
            "written_bytes": lower.written_bytes,
            "due": lower.ledger.due,
            "pending": lower.ledger.pending,
            "dropped": {reason.value: count for reason, count in lower.ledger.dropped.items()},
            "queued_bytes": lower.queued_bytes,
            "errors": dict(lower.errors),
        }
    if isinstance(lower, DiskStats):
        document["read_only"] = dict(lower.read_only)
    return document
