"""What a live daemon says, as tables for people; and rates of what it counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table

__all__ = [
    "duration",
    "print_blocks",
    "print_flushed",
    "print_namespaces",
    "print_status",
    "print_verified",
    "rates",
    "rates_table",
]

Document = Mapping[str, Any]
"""What /status.json has."""


def duration(seconds: float) -> str:
    """For people, in its two largest units."""
    left = int(seconds)
    words: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or (unit == "s" and not words):
            words.append(f"{number} {unit}")
    return " ".join(words[:2])


# ---- rates -----------------------------------------------------------------------------------------------------------


def rates(before: Document, after: Document) -> dict[str, Any]:
    """What happened between two looks at one daemon, a second. A tenant that is new, or a daemon that was started
    again, counts from 0."""
    seconds = after["uptime_s"] - before["uptime_s"]
    if seconds <= 0:
        before, seconds = {"tenants": []}, max(after["uptime_s"], 1e-9)
    old = {tenant["name"]: tenant for tenant in before["tenants"]}
    return {
        "seconds": seconds,
        "state": after["state"],
        "clients": after["clients"],
        "problems": [problem for problem in after["problems"] if problem["is_now"]],
        "tenants": [_tenant_rates(old.get(tenant["name"], {}), tenant, seconds) for tenant in after["tenants"]],
    }


def _tenant_rates(before: Document, after: Document, seconds: float) -> dict[str, Any]:
    def more(name: str) -> float:
        return _more(before, after, name)

    asked = more("asked_blocks")
    old = {tier["name"]: tier for tier in before.get("tiers", ())}
    waits = {"waits": before.get("waits", {}).get("count", 0)}, {"waits": after["waits"]["count"]}
    return {
        "tenant": after["name"],
        "lookups_per_s": more("lookups") / seconds,
        "hit_percent": 100 * more("hit_blocks") / asked if asked else None,
        "stored_bytes_per_s": more("stored_bytes") / seconds,
        "restored_bytes_per_s": more("served_bytes") / seconds,
        "waits_per_s": _more(*waits, "waits") / seconds,
        "waiting": after["waits"]["now"],
        "longest_wait_s": after["waits"]["longest_s"],
        "fallbacks_per_s": sum(_more_in(before, after, "fallbacks").values()) / seconds,
        "tiers": [_tier_rates(old.get(tier["name"], {}), tier, seconds) for tier in after["tiers"]],
    }


def _tier_rates(before: Document, after: Document, seconds: float) -> dict[str, Any]:
    is_lower = "read_bytes" in after
    return {
        "tier": after["name"],
        "used_bytes": after.get("used_bytes", 0),
        "capacity_bytes": after.get("capacity_bytes", 0),
        "written_bytes_per_s": _more(before, after, "written_bytes") / seconds if is_lower else None,
        "read_bytes_per_s": _more(before, after, "read_bytes") / seconds if is_lower else None,
        "queued_bytes": after.get("queued_bytes", 0),
        "breaker": after["breaker"]["state"] if "breaker" in after else None,
    }


def _more(before: Document, after: Document, name: str) -> float:
    """By how much a counter went up."""
    value = after.get(name, 0) - before.get(name, 0)
    return float(value if value >= 0 else after[name])


def _more_in(before: Document, after: Document, name: str) -> dict[str, float]:
    """As `_more`, of counters by reason."""
    return {reason: _more(before.get(name, {}), after[name], reason) for reason in after[name]}


def rates_table(before: Document, after: Document) -> Group:
    """`rates`, as tables."""
    now = rates(before, after)
    tenants = _table(
        "tenant", "lookups", "hit %", "GB stored", "GB restored", "waits", "fallbacks", "waiting now", "longest wait"
    )
    tiers = _table("tenant", "tier", "GB written", "GB read", "used", "of", "to be written", "breaker")
    for tenant in now["tenants"]:
        tenants.add_row(
            tenant["tenant"],
            f"{tenant['lookups_per_s']:.1f}",
            "-" if tenant["hit_percent"] is None else f"{tenant['hit_percent']:.1f}",
            _gb(tenant["stored_bytes_per_s"]),
            _gb(tenant["restored_bytes_per_s"]),
            f"{tenant['waits_per_s']:.1f}",
            f"{tenant['fallbacks_per_s']:.1f}",
            str(tenant["waiting"]),
            f"{tenant['longest_wait_s']:.2f} s",
        )
        for tier in tenant["tiers"]:
            tiers.add_row(
                tenant["tenant"],
                tier["tier"],
                _gb(tier["written_bytes_per_s"]),
                _gb(tier["read_bytes_per_s"]),
                _size(tier["used_bytes"]),
                _size(tier["capacity_bytes"]),
                _size(tier["queued_bytes"]),
                tier["breaker"] or "-",
            )
    head = (
        f"kvtier-server {after['version']}: {now['state']}, {now['clients']} clients; a second, of the last "
        f"{now['seconds']:.1f} s:"
    )
    return Group(head, "", tenants, "", tiers, *_problem_lines(now["problems"]))


# ---- what is there ---------------------------------------------------------------------------------------------------


def print_status(document: Document) -> None:
    """All counts, a few tables for each tenant."""
    console = _console()
    reason = f": {document['reason']}" if document["reason"] else ""
    console.print(
        f"kvtier-server {document['version']}: {document['state']}{reason}; up for {duration(document['uptime_s'])}, "
        f"{document['clients']} of at most {document['max_clients']} clients, refused: {_counts(document['refused'])}"
    )
    for line in _problem_lines(document["problems"]):
        console.print(line)
    for tenant in document["tenants"]:
        console.print(f"\ntenant {tenant['name']}\n")
        console.print(_tiers_table(tenant))
        console.print()
        console.print(_counts_table(tenant))


def _tiers_table(tenant: Document) -> Table:
    table = _table("tier", "blocks", "used", "of", "due so far", "of them pending", "breaker")
    for tier in tenant["tiers"]:
        table.add_row(
            tier["name"],
            str(tier.get("blocks", "-")),
            _size(tier.get("used_bytes", 0)),
            _size(tier.get("capacity_bytes", 0)),
            str(tier.get("due", "-")),
            str(tier.get("pending", "-")),
            tier["breaker"]["state"] if "breaker" in tier else "-",
        )
    return table


def _counts_table(tenant: Document) -> Table:
    clients, waits, quarantine = tenant["clients"], tenant["waits"], tenant["quarantine"]
    host = tenant["tiers"][0]
    rows = {
        "lookups": f"{tenant['lookups']}, {tenant['hit_blocks']} of {tenant['asked_blocks']} blocks hit",
        "hits by tier": _counts(tenant["hits"]),
        "misses": _counts(tenant["misses"]),
        "staged": f"{_counts(tenant['outcomes'])}; {_size(tenant['served_bytes'])}",
        "stored": f"{tenant['stored_blocks']} blocks, {_size(tenant['stored_bytes'])}",
        "evicted": f"{tenant['evicted_blocks']} blocks",
        "waits": f"{waits['now']} now, {waits['count']} in all, {waits['seconds']:.1f} s together",
        "fallbacks": _counts(tenant["fallbacks"]),
        "clients": f"{clients['unix']} Unix, {clients['tcp']} TCP, {clients['requests']} requests under way",
        "held": f"{clients['leases']} leases and {clients['reservations']} reservations; in all {host['leases']} slots",
        "quarantine": f"{quarantine['slots']} slots of {quarantine['clients']} clients, {_size(quarantine['bytes'])}",
        "resets": str(tenant["resets"]),
        "errors": _counts(tenant["errors"]),
    }
    for tier in tenant["tiers"][1:]:
        name = tier["name"]
        rows[f"{name} reads"] = f"{_counts(tier.get('reads', {}))}; {_size(tier.get('read_bytes', 0))}"
        rows[f"{name} writes"] = f"{_counts(tier.get('writes', {}))}; {_size(tier.get('written_bytes', 0))}"
        rows[f"{name} dropped"] = _counts(tier.get("dropped", {}))
        rows[f"{name} found sick"] = f"{tier['breaker']['times_opened']} times"
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def print_namespaces(rows: Iterable[Mapping[str, Any]]) -> None:
    table = _table("tenant", "tier", "namespace", "blocks", "bytes")
    blocks = nbytes = 0
    for row in rows:
        blocks += row["blocks"]
        nbytes += row["bytes"]
        name = row["namespace"] or "(all)"
        table.add_row(row["tenant"], row["tier"], name, str(row["blocks"]), _size(row["bytes"]))
    console = _console()
    console.print(table)
    console.print(f"{blocks} blocks, {_size(nbytes)}; a block that several tiers hold counts in each")


def print_blocks(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line each, as they come."""
    console = _console()
    for row in rows:
        console.print(f"{row['tenant']} {row['tier']} {row['key']} {row['bytes']}")


def print_flushed(rows: Sequence[Mapping[str, Any]]) -> None:
    console = _console()
    for row in rows:
        left = f"{row['left']} blocks are not written" if row["left"] else "nothing is left to write"
        console.print(f"{row['tenant']}: {row['tier']}: {row['written']} blocks written, {left}")
    if not rows:
        console.print("there is no tier below host memory")


def print_verified(report: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    console = _console()
    for bad in report["damaged"]:
        console.print(f"damaged, and forgotten: {bad['tenant']}: {bad['tier']}: {bad['key']}: {bad['problem']}")
    for tier in report["tiers"]:
        found = (
            f"not verified: {tier['skipped']}"
            if tier["skipped"]
            else f"{tier['blocks']} blocks compared, {_size(tier['bytes'])}: {tier['damaged']} damaged"
        )
        console.print(f"{tier['tenant']}: {tier['tier']}: {found}")
    for each in report["integrity"]:
        whose = f"{each['tenant']}: counts" if each["tenant"] else "connections and quarantine"
        console.print(f"{whose}: {each['problem'] or 'as they should be'}")


# ---- words -----------------------------------------------------------------------------------------------------------


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)


def _table(*columns: str) -> Table:
    """Within 80 characters, as long as names are short."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        is_name = column in ("tenant", "tier", "namespace", "breaker")
        table.add_column(
            column,
            justify="left" if is_name else "right",
            overflow="fold",
            min_width=max(map(len, column.split())),
        )
    return table


def _problem_lines(problems: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"! {problem['tenant'] + ': ' if problem['tenant'] else ''}{problem['text']}" for problem in problems]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"


def _gb(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3f}"


def _size(nbytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
