"""Snapshots as metrics: what each field is called, whether it only grows, and how it is labelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, get_args, get_type_hints

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Family", "Sample", "Snapshot", "StatsCollector", "families", "samples"]

GAUGES = frozenset(
    {
        "host_blocks",
        "host_used_bytes",
        "host_reserved_bytes",
        "host_touched_bytes",
        "host_pinned_bytes",
        "leases",
        "pending",
        "live_requests",
        "in_flight_blocks",
        "staging_bytes",
        "running",
        "restoring",
        "waiting",
        "waiting_for_place",
        "waiting_for_stage",
        "restore_capacity_waits",
        "blocks_free",
        "blocks_used",
        "blocks_held",
        "blocks",
        "used_bytes",
        "capacity_bytes",
        "queued_bytes",
        "available",
        "connections",
        "known_blocks",
        "nodes",
        "server_used_bytes",
        "modes",
        "read_only",
        "active_waits",
        "capacity_waiters",
        "longest_capacity_wait_seconds",
        "tier_rates",
    }
)
LABELS = {
    "misses": "reason",
    "errors": "type",
    "dropped": "reason",
    "hits": "tier",
    "fallbacks": "reason",
    "reads": "outcome",
    "writes": "outcome",
    "questions": "outcome",
    "refusals": "reply",
    "nodes": "address",
    "modes": "directory",
    "read_only": "directory",
    "decisions": "outcome",
    "tier_rates": "tier",
}
HELP = {
    "asked_blocks": "blocks that admitted requests asked for, in full blocks that the GPU pool did not have",
    "hit_blocks": "blocks of those that were served",
    "hits": "blocks served, by the tier that had them when the request came",
    "misses": "blocks asked for and not served, by reason",
    "leases": "leases on host memory: copies, stages, and what is to be written to a lower tier",
    "fallbacks": "requests that waited in vain and compute, by reason",
    "tier_rates": "bytes a second, as last measured; host is the copy to the GPU",
    "avoided_seconds": "seconds that computing the restored blocks would have taken, by estimate",
    "restoring_seconds": "seconds that restores waited for lookups, tiers and copies",
}
"""What the name of a field does not say."""
WORDS = {"modes": "mode", "read_only": "reason", "nodes": "role"}


class Snapshot(Protocol):
    """Any dataclass of this project that holds one moment's counts."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. labels: names of those that its samples have."""

    name: str
    help: str
    is_gauge: bool
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric. labels: values of the family's labels, in order."""

    name: str
    labels: tuple[str, ...]
    value: float


def families(of: Snapshot | type[Snapshot], prefix: str, within: str = "") -> Iterator[Family]:
    """The metrics of a snapshot: `<prefix>_<field>`, and of one in it `<prefix>_<field>_<its field>`. Of a class those
    that any of its snapshots has; of a snapshot none of a tier that is not there. within: the fields around it."""
    hints = get_type_hints(of if isinstance(of, type) else type(of))
    for field in fields(of):
        name, hint = f"{prefix}_{field.name}", hints[field.name]
        inner = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)]
        if inner:
            part = inner[0] if isinstance(of, type) else getattr(of, field.name)
            if part is not None:
                yield from families(part, name, f"{within}{field.name} ")
            continue
        # Prometheus has numbers only: a word is a label, and the value 1.
        labels = tuple(table[field.name] for table in (LABELS, WORDS) if field.name in table)
        words = HELP.get(field.name) or f"{within}{field.name}".replace("_", " ")
        yield Family(name, words, field.name in GAUGES, labels)


def samples(snapshot: Snapshot, prefix: str) -> Iterator[Sample]:
    """The values of a snapshot, in the order of its families; none of a tier that is not there."""
    for field in fields(snapshot):
        name, value = f"{prefix}_{field.name}", getattr(snapshot, field.name)
        if value is None:
            continue
        if is_dataclass(value) and not isinstance(value, type):
            yield from samples(value, name)
        elif field.name in WORDS:
            yield from (Sample(name, (str(label), str(word)), 1) for label, word in value.items())
        elif field.name in LABELS:
            yield from (Sample(name, (str(label),), count) for label, count in value.items())
        else:
            yield Sample(name, (), value)


class StatsCollector:
    """A prometheus-client collector over snapshots: `REGISTRY.register(StatsCollector(store.stats))`.

    labels: put on every sample; two collectors in one registry need different ones, such as {"engine": "0"}.

    Takes any of kvtier's snapshots, a connector's too, and names each field `kvtier_<field>`; those of a snapshot in
    it `kvtier_<field>_<its field>`. Reads one snapshot a scrape, so that a scrape is consistent and nothing is counted
    twice.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], labels: Mapping[str, str] | None = None) -> None:
        self._snapshot = snapshot
        self._labels = dict(labels or {})

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._snapshot()
        found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for family in families(snapshot, "kvtier"):
            make = GaugeMetricFamily if family.is_gauge else CounterMetricFamily
            found[family.name] = make(family.name, family.help, labels=[*self._labels, *family.labels])
        for sample in samples(snapshot, "kvtier"):
            found[sample.name].add_metric([*self._labels.values(), *sample.labels], sample.value)
        return found.values()
