"""A daemon's counts as metrics: those of each tenant's store under its name, and those of the daemon itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier.families import StatsCollector
from kvtier.server.status import DaemonSnapshot, TenantSnapshot, Watched

__all__ = ["DaemonCollector"]


class _Count(NamedTuple):
    """One metric of a tenant. make: a gauge, or a counter. read: its value, or its values by that of its label."""

    make: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    help: str
    read: Callable[[TenantSnapshot], float | Mapping[str, float]]
    label: str = ""


COUNTS = (
    _Count(
        GaugeMetricFamily,
        "clients",
        "connections now, by what they came over",
        lambda tenant: {"unix": tenant.clients.unix, "tcp": tenant.clients.tcp},
        "kind",
    ),
    _Count(GaugeMetricFamily, "leases", "blocks that clients hold to read now", lambda tenant: tenant.clients.leases),
    _Count(
        GaugeMetricFamily,
        "reservations",
        "slots that clients fill now",
        lambda tenant: tenant.clients.reservations,
    ),
    _Count(
        GaugeMetricFamily,
        "requests",
        "requests without their answer now",
        lambda tenant: tenant.clients.requests,
    ),
    _Count(
        GaugeMetricFamily,
        "waiting",
        "stages that wait for a lower tier now",
        lambda tenant: tenant.clients.waiting,
    ),
    _Count(
        GaugeMetricFamily,
        "longest_wait_seconds",
        "how long the longest of the stages that wait has waited by now",
        lambda tenant: tenant.clients.longest_wait_s,
    ),
    _Count(
        CounterMetricFamily,
        "waits",
        "stages that had to wait for a lower tier",
        lambda tenant: tenant.clients.waits,
    ),
    _Count(
        CounterMetricFamily,
        "wait_seconds",
        "what the ended ones of those waited, together",
        lambda tenant: tenant.clients.wait_seconds,
    ),
    _Count(
        CounterMetricFamily,
        "served_bytes",
        "bytes of blocks that stages leased or sent",
        lambda tenant: tenant.clients.served_bytes,
    ),
    _Count(
        CounterMetricFamily,
        "staged_blocks",
        "blocks that were to be staged, by what became of them",
        lambda tenant: tenant.clients.outcomes,
        "outcome",
    ),
    _Count(
        GaugeMetricFamily,
        "quarantined_clients",
        "clients that went without a word and are not known to be dead",
        lambda tenant: tenant.quarantine.clients,
    ),
    _Count(
        GaugeMetricFamily,
        "quarantined_slots",
        "slots that these may still touch",
        lambda tenant: tenant.quarantine.slots,
    ),
    _Count(
        GaugeMetricFamily,
        "quarantined_bytes",
        "bytes of those slots",
        lambda tenant: tenant.quarantine.nbytes,
    ),
)


class DaemonCollector:
    """A prometheus-client collector over a daemon. One snapshot a scrape, so that a scrape is consistent.

    What a store counts is called as everywhere, `kvtier_<field>`, and has the label `tenant`; what the daemon counts is
    called `kvtier_daemon_<name>`.
    """

    def __init__(self, daemon: Watched) -> None:
        self._daemon = daemon

    def collect(self) -> Iterable[Metric]:
        snapshot = self._daemon.snapshot()
        yield from self._own(snapshot)
        yield from _clients(snapshot)
        yield from _stores(snapshot)

    def _own(self, snapshot: DaemonSnapshot) -> Iterable[Metric]:
        info = GaugeMetricFamily("kvtier_daemon_info", "always 1; the version is its label", labels=["version"])
        info.add_metric([snapshot.version], 1)
        yield info
        yield GaugeMetricFamily(
            "kvtier_daemon_ready", "1 while clients are served, as /healthz says", value=int(self._daemon.is_ready)
        )
        yield GaugeMetricFamily("kvtier_daemon_uptime_seconds", "since the start", value=snapshot.uptime_s)
        yield GaugeMetricFamily(
            "kvtier_daemon_max_clients", "the most connections at once, as set", value=snapshot.max_clients
        )
        refused = CounterMetricFamily("kvtier_daemon_refused", "connections that were turned away", labels=["code"])
        for code, count in snapshot.refused.items():
            refused.add_metric([code], count)
        yield refused


def _clients(snapshot: DaemonSnapshot) -> Iterable[Metric]:
    for count in COUNTS:
        labels = ["tenant", count.label] if count.label else ["tenant"]
        family = count.make(f"kvtier_daemon_{count.name}", count.help, labels=labels)
        for tenant in snapshot.tenants:
            found = count.read(tenant)
            for label, value in found.items() if isinstance(found, Mapping) else [("", found)]:
                family.add_metric([tenant.name, label] if count.label else [tenant.name], value)
        yield family


def _stores(snapshot: DaemonSnapshot) -> Iterable[Metric]:
    # One metric with every tenant's samples: the text format wants them in one place.
    merged: dict[str, Metric] = {}
    for tenant in snapshot.tenants:
        for metric in StatsCollector(partial(getattr, tenant, "stats"), {"tenant": tenant.name}).collect():
            if metric.name in merged:
                merged[metric.name].samples.extend(metric.samples)
            else:
                merged[metric.name] = metric
    return merged.values()
