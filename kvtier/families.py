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
        "mapped_bytes",
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
    # a store
    "lookups": "admissions that asked the store, each once however long the request waited",
    "asked_blocks": "blocks that admitted requests asked for, in full blocks that the GPU pool did not have",
    "hit_blocks": "blocks of those that were served",
    "hits": "blocks served, by the tier that had them when the request came",
    "misses": "blocks asked for and not served, by reason",
    "stored_blocks": "blocks that came to host memory from an engine",
    "stored_bytes": "bytes of the blocks that came to host memory from an engine",
    "evicted_blocks": "blocks that gave way to others",
    "resets": "times that everything stored was made unreachable",
    "errors": "exceptions that became misses or drops, by type",
    "host_blocks": "blocks that host memory has now",
    "host_used_bytes": "bytes of host memory's slots in use now, whole slots, leased ones included",
    "host_reserved_bytes": "size of the host memory pool",
    "host_touched_bytes": "bytes of the pool that have pages of memory by now",
    "host_pinned_bytes": "bytes of the pool that are locked in memory",
    "leases": "leases on host memory: copies, stages, and what is to be written to a lower tier",
    "fallbacks": "requests that waited in vain and compute, by reason",
    "staged_blocks": "blocks asked of lower tiers for requests, well read or not, each once for all that wait for it",
    "staging_bytes": "bytes of host memory that reads of lower tiers may write now",
    # a tier below host memory
    "blocks": "blocks that can be read there now; of a remote tier those that this process stored",
    "used_bytes": "bytes that these take, headers and spare files included",
    "capacity_bytes": "the most bytes that it may take",
    "reads": "blocks asked of it, by how that ended",
    "read_bytes": "bytes of blocks that were read well",
    "read_seconds": "seconds inside its reads, all threads together",
    "writes": "blocks given to it, by how that ended",
    "written_bytes": "bytes of blocks that it stored",
    "write_seconds": "seconds inside its writes, all threads together",
    "queued_bytes": "bytes of host memory that wait to be written there, or are being written, and cannot be evicted",
    "available": "1 while it may be asked, 0 while it is left alone because it failed or hung",
    "breaker_opened": "times that it was found sick, and left alone from then on",
    "breaker_refused": "calls that it was spared because it was sick",
    "device_written_bytes": "all bytes written to the devices: blocks, headers, indices, and blocks written again",
    "readmitted_blocks": "blocks written again because they were in use when their segment was to go",
    "recovered_blocks": "blocks that were found there at start",
    "damaged_blocks": "blocks that were not what had been stored, each forgotten at once",
    "reclaimed_files": "leftovers of crashes that were removed at start",
    "modes": "1 for each directory, with how it is read and written: direct, or buffered where direct I/O is refused",
    "read_only": "1 for each directory that takes no writes now, with the reason",
    "questions": "questions about a prompt's blocks, by whether they were answered",
    "known_blocks": "blocks that it is believed to hold without being asked",
    "connections": "connections open now",
    "connects": "connections made so far",
    "disconnects": "connections closed because something was wrong with them",
    "redirects": "blocks found on another server than was thought, because a slot moved",
    "refusals": "calls that the other side refused, by what it said",
    "nodes": "1 for each server, with its role",
    "server_used_bytes": "bytes of memory that the servers say they use, for whomever, as last asked",
    "mapped_bytes": "bytes of the server's memory that are mapped here",
    # a ledger: due = stored + dropped + pending
    "due": "blocks that were to be copied down; one tried again counts again",
    "stored": "blocks due that were copied and can be found",
    "dropped": "blocks due that were not stored, by reason",
    "pending": "blocks due that are on their way now",
    # restores
    "active_waits": "restores that wait for a tier or for a copy now",
    "capacity_waiters": "restores that were refused GPU blocks and wait for them now",
    "longest_capacity_wait_seconds": "seconds that the longest of the waits for GPU blocks has taken by now",
    "capacity_waits": "waits for GPU blocks begun",
    "capacity_expired": "waits for GPU blocks that lasted until restore.capacity_bound_s",
    "fallback_blocks": "blocks computed by requests that had hoped to restore them",
    "fallback_tokens": "tokens computed by requests that had hoped to restore them",
    "held_back_warnings": "warnings of such requests that had no line of their own in the log",
    "decisions": "lookups that found something, by what was decided: restore, partial or recompute",
    "predictions": "restores that ended and of which it had been predicted how long they take",
    "predicted_seconds": "seconds that had been predicted for those restores",
    "actual_seconds": "seconds that those restores took",
    "error_seconds": "seconds by which those predictions were wrong, each by its amount",
    "avoided_seconds": "seconds that computing the restored blocks would have taken, by estimate",
    "restoring_seconds": "seconds that restores waited for lookups, tiers and copies",
    "tier_rates": "bytes a second, as last measured; host is the copy to the GPU",
    # a connector
    "landed_blocks": "blocks that were restored into the GPU pool and handed to the engine",
    "failed_landings": "blocks that were being copied to the GPU pool and did not come",
    "readmissions": "admissions of a request that had been admitted before; they count in no hit rate",
    "stale_results": "results of copies that nobody waited for any more",
    "live_requests": "requests that have begun and not ended",
    "in_flight_blocks": "blocks being copied now between GPU pool and host memory, in either direction",
    # an engine's scheduler
    "running": "requests with a place in the batch that compute",
    "restoring": "requests with a place in the batch whose blocks are being copied to the GPU pool",
    "waiting": "requests without a place in the batch",
    "waiting_for_place": "of the waiting, those that lack a place or GPU blocks",
    "waiting_for_stage": "of the waiting, those whose blocks are on their way to host memory",
    "restore_capacity_waits": "restores that wait for GPU blocks now, within their bound",
    "blocks_free": "GPU blocks that may be handed out, matchable ones included",
    "blocks_used": "GPU blocks that requests refer to",
    "blocks_held": "GPU blocks kept from reuse by copies alone",
    "preemptions": "times that a request lost its GPU blocks to another",
    "stalls": "times that no progress was possible",
}
"""What each field says, in words that its name does not have."""
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
        words = HELP.get(field.name) or field.name.replace("_", " ")
        yield Family(name, f"{within.strip()}: {words}" if within else words, field.name in GAUGES, labels)


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
