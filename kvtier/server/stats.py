"""What a client may know of its tenant: counts by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kvtier.server.status import ClientCounts, QuarantineCounts
from kvtier.store import Store

__all__ = ["tenant_stats"]

Stats = dict[str, int | float | str | dict[str, int | float | str]]


def tenant_stats(store: Store, clients: ClientCounts, quarantine: QuarantineCounts) -> Stats:
    """As `StatsAnswer.stats`: the store's counts, its lower tiers' and its clients' by the tier's name, "clients" and
    "quarantine". Never blocks on I/O."""
    stats: Stats = {}
    for name, value in _items(store.stats()):
        if is_dataclass(value):
            stats[name] = _flat(value)
        elif isinstance(value, Mapping):
            stats[name] = {str(key): count for key, count in value.items() if isinstance(count, (int, float, str))}
        elif isinstance(value, (int, float, str)):
            stats[name] = value
    stats["epoch"] = store.epoch
    stats["clients"] = _flat(clients)
    stats["quarantine"] = _flat(quarantine)
    return stats


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in fields(value)]


def _flat(value: Any) -> dict[str, int | float | str]:
    """Numbers and words by name; those of a mapping by its name and theirs."""
    flat: dict[str, int | float | str] = {}
    for name, each in _items(value):
        if is_dataclass(each):
            flat |= {f"{name}.{key}": count for key, count in _flat(each).items()}
        elif isinstance(each, Mapping):
            flat |= {f"{name}.{key}": count for key, count in each.items() if isinstance(count, (int, float, str))}
        elif isinstance(each, (int, float, str)):
            flat[name] = each
    return flat
