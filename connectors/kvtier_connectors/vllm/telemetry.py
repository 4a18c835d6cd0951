"""kvtier's counts in vLLM's log line and on its /metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # older versions do not ask where hits came from
    CacheHitSource = None

from kvtier.clock import Clock
from kvtier.families import Family, Snapshot, families, samples
from kvtier.metrics import StatsSnapshot
from kvtier_connectors.counts import ConnectorStats

__all__ = ["CacheHitSource", "KVTierMetrics", "KVTierStats", "Telemetry", "hit_sources"]

PREFIX = "vllm:kvtier"
"""vLLM takes down what begins with `vllm:` when another engine begins in its process."""
KINDS: tuple[type[Snapshot], ...] = (StatsSnapshot, ConnectorStats)
PERIOD_S = 1.0

LOGGED = {
    "asked blocks": "asked_blocks",
    "hit blocks": "hit_blocks",
    "stored blocks": "stored_blocks",
    "blocks in host memory": "host_blocks",
    "restores that wait": "restore_active_waits",
}


@dataclass
class KVTierStats(KVConnectorStats):
    """One moment of kvtier's counts on their way to vLLM's frontend, plain enough to be sent there.

    data: `samples`, a list of [metric, label values, value]; counters run from the start of the engine, so that the
    last moment has all of those before it.
    """

    @classmethod
    def of(cls, *snapshots: Snapshot) -> KVTierStats:
        found = [sample for snapshot in snapshots for sample in samples(snapshot, PREFIX)]
        return cls({"samples": [[each.name, list(each.labels), each.value] for each in found]})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The later of the two."""
        return self if other.is_empty() else other

    def reduce(self) -> dict[str, int | float]:
        found = {name: value for name, labels, value in self.data.get("samples", ()) if not labels}
        return {words: found[f"{PREFIX}_{name}"] for words, name in LOGGED.items() if f"{PREFIX}_{name}" in found}

    def is_empty(self) -> bool:
        return not self.data.get("samples")


class Telemetry:
    """Decides when a moment is sent: once a second while steps go on, and when all has ended, for no step may come
    after it. Engine's thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent_at = clock.now() - PERIOD_S
        self._was_busy = False

    @property
    def owes_last(self) -> bool:
        """Whether the moment after the last request and copy is yet to be sent."""
        return self._was_busy

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether a moment is to be sent now. is_idle: no request and no copy is left."""
        now = self._clock.now()
        is_last, self._was_busy = is_idle and self._was_busy, not is_idle
        if not is_last and now - self._sent_at < PERIOD_S:
            return False
        self._sent_at = now
        return True


class KVTierMetrics(KVConnectorPromMetrics):
    """Every metric that a moment may have, defined when vLLM's frontend begins."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        known = [family for kind in KINDS for family in families(kind, PREFIX)]
        self._metrics = {family.name: self._make(family, labelnames) for family in known}
        self._last: dict[tuple[int, str, tuple[str, ...]], float] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        told = {
            (engine_idx, name, tuple(labels)): value
            for name, labels, value in transfer_stats_data.get("samples", ())
            if name in self._metrics and isfinite(value) and value >= 0  # a frontend does not end for a wrong number
        }
        gone = [key for key in self._last if key[0] == engine_idx and key not in told]
        for key, value in (told | dict.fromkeys(gone, 0.0)).items():
            self._set(key, value)

    def _set(self, key: tuple[int, str, tuple[str, ...]], value: float) -> None:
        engine_idx, name, labels = key
        is_gauge, metric = self._metrics[name]
        child = metric.labels(*self.per_engine_labelvalues[engine_idx], *labels)
        last, self._last[key] = self._last.get(key, 0.0), value
        if is_gauge:
            child.set(value)
        else:  # less than before: the engine began anew
            child.inc(value - last if value >= last else value)

    def _make(self, family: Family, labelnames: list[str]) -> tuple[bool, Any]:
        arguments: Mapping[str, Any] = {
            "name": family.name,
            "documentation": f"kvtier: {family.help}",
            "labelnames": [*labelnames, *family.labels],
        }
        if family.is_gauge:
            return True, self._gauge_cls(multiprocess_mode="mostrecent", **arguments)
        return False, self._counter_cls(**arguments)


def hit_sources(hit_tokens: Mapping[str, int], num_tokens: int) -> dict[Any, int]:
    """vLLM's names of the tiers that had these tokens; empty where that is not all of `num_tokens`."""
    if sum(hit_tokens.values()) != num_tokens:
        return {}
    sources: dict[Any, int] = {}
    for tier, count in hit_tokens.items():
        source = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}.get(
            tier, CacheHitSource.EXTERNAL_UNSPECIFIED
        )
        sources[source] = sources.get(source, 0) + count
    return sources
