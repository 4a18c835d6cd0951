"""Whether a machine can hold what a daemon's settings say: memory, disk, locks, pages, nodes, open files."""

from __future__ import annotations

import ipaddress
import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import MemorySnapshot, Settings
from kvtier.config.serving import split_address
from kvtier.server.opening import TenantPlan, credentials_of

__all__ = ["Sizing", "open_files_needed", "raise_open_files", "read_sizing"]

FILES_A_CLIENT = 3
"""Its socket, its process, and a second handle on the socket while it reads too slowly."""
OTHER_FILES = 512
_SYS = "sys"


@dataclass(frozen=True, slots=True)
class Sizing:
    """What was found. facts: for people and machines, as JSON has them. warnings: what an operator may want to mend."""

    facts: dict[str, Any]
    warnings: Sequence[str]


def read_sizing(
    settings: Settings, plans: Sequence[TenantPlan], memory: MemorySnapshot, root: Path = Path("/")
) -> Sizing:
    """Compare settings and machine. Reads `proc` and `sys` below `root`; changes nothing."""
    pools = sum(plan.pool_bytes for plan in plans)
    facts = {
        "memory": {
            "pools_bytes": pools,
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
            "cgroup_limit_bytes": memory.cgroup_limit_bytes,
        },
        "tenants": {plan.name: _tenant(plan) for plan in plans},
        "disks": _disks(plans),
        "memlock": {"host_pin": settings.host.pin, "limit_bytes": _limit(resource.RLIMIT_MEMLOCK)},
        "huge_pages": _huge_pages(root),
        "numa_nodes": _numa_nodes(root),
        "open_files": {
            "needed": open_files_needed(settings),
            "limit": _limit(resource.RLIMIT_NOFILE),
            "hard_limit": _limit(resource.RLIMIT_NOFILE, hard=True),
        },
    }
    return Sizing(facts, [*_memory_warnings(settings, facts), *_other_warnings(settings, facts)])


def open_files_needed(settings: Settings) -> int:
    return FILES_A_CLIENT * settings.daemon.max_clients + OTHER_FILES


def raise_open_files(settings: Settings) -> None:
    """Take as many open files as are needed, where the process may have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(settings)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _limit(kind: int, *, hard: bool = False) -> int | None:
    """None: there is none."""
    value = resource.getrlimit(kind)[int(hard)]
    return None if value == resource.RLIM_INFINITY else value


def _tenant(plan: TenantPlan) -> dict[str, Any]:
    disk, redis = plan.settings.disk, plan.settings.redis
    return {
        "memory_bytes": plan.pool_bytes,
        "disk_bytes": disk.size if disk.path else 0,
        "disk_paths": list(disk.path),
        "redis_tenant": redis.tenant if redis.url else None,
    }


def _disks(plans: Sequence[TenantPlan]) -> dict[str, dict[str, int]]:
    """By file system: what the disk tiers may take of it, and what is free."""
    found: dict[int, dict[str, Any]] = {}
    for plan in plans:
        for path in plan.settings.disk.path:
            place = Path(path).expanduser().absolute()
            while not place.exists() and place != place.parent:
                place = place.parent
            try:
                device, free = place.stat().st_dev, shutil.disk_usage(place).free
            except OSError:
                continue
            entry = found.setdefault(device, {"path": str(place), "asked_bytes": 0, "free_bytes": free})
            entry["asked_bytes"] += plan.settings.disk.size // len(plan.settings.disk.path)
    return {entry.pop("path"): entry for entry in found.values()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _huge_pages(root: Path) -> dict[str, Any]:
    """What the kernel does for a memfd: as for shared memory. The word in brackets is what holds."""
    mode = _read(root / _SYS / "kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = mode.partition("[")[2].partition("]")[0]
    return {"shmem": chosen or "unknown"}


def _numa_nodes(root: Path) -> dict[str, dict[str, Any]]:
    nodes = {}
    for directory in sorted((root / _SYS / "devices/system/node").glob("node[0-9]*")):
        fields: dict[str, int] = {}
        for line in _read(directory / "meminfo").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                fields[name.split()[-1]] = int(words[0]) * 1024
        nodes[directory.name] = {
            "total_bytes": fields.get("MemTotal", 0),
            "free_bytes": fields.get("MemFree", 0),
            "cpus": _read(directory / "cpulist"),
        }
    return nodes


def _memory_warnings(settings: Settings, facts: dict[str, Any]) -> Iterator[str]:
    memory, pools = facts["memory"], facts["memory"]["pools_bytes"]
    if pools > memory["available_bytes"]:
        yield (
            f"the pools' {pools} bytes are more than is available now ({memory['available_bytes']}); lower host.size "
            "or daemon.tenants before they fill"
        )
    limit = facts["memlock"]["limit_bytes"]
    if settings.host.pin != "off" and limit is not None and limit < pools:
        yield (
            f"host.pin = {settings.host.pin!r} locks {pools} bytes, and the limit (ulimit -l) is {limit}: raise it "
            "(LimitMEMLOCK= of the service), unless the daemon has CAP_IPC_LOCK"
        )
    if facts["huge_pages"]["shmem"] in ("never", "deny"):
        yield (
            "huge pages are off for shared memory, and a large pool's pages cost more to look up: write 'within_size' "
            "or 'always' to /sys/kernel/mm/transparent_hugepage/shmem_enabled, if this machine is the daemon's"
        )
    largest = max((node["total_bytes"] for node in facts["numa_nodes"].values()), default=0)
    if len(facts["numa_nodes"]) > 1 and pools > largest:
        yield (
            f"the pools' {pools} bytes are more than the largest of {len(facts['numa_nodes'])} NUMA nodes has "
            f"({largest}): start the daemon under `numactl --interleave=all`, or one daemon a node"
        )


def _other_warnings(settings: Settings, facts: dict[str, Any]) -> Iterator[str]:
    daemon, files = settings.daemon, facts["open_files"]
    if files["hard_limit"] is not None and files["hard_limit"] < files["needed"]:
        yield (
            f"daemon.max_clients = {daemon.max_clients} may need {files['needed']} open files, and the limit is "
            f"{files['hard_limit']}: raise it (ulimit -Hn, or LimitNOFILE= of the service), or lower daemon.max_clients"
        )
    for path, disk in facts["disks"].items():
        if disk["asked_bytes"] > disk["free_bytes"]:
            yield (
                f"disk.size asks for {disk['asked_bytes']} bytes of the file system of {path}, which has "
                f"{disk['free_bytes']} free: what is there already counts, the rest may never be had; lower disk.size"
            )
    kinds = {each.kind for each in credentials_of(settings)}
    if daemon.socket != "off" and "uid" not in kinds:
        yield (
            f"daemon.socket = {daemon.socket!r} is open to nobody: add a user to daemon.credentials "
            "('default=uid:1000'), or set it to 'off'"
        )
    if daemon.http != "off" and not _is_loopback(daemon.http):
        yield (
            f"daemon.http = {daemon.http!r} is read by whoever reaches it: it has no password, and shows counts and "
            "tenants' names; use an address of a network that is yours"
        )
    if daemon.listen != "off" and not daemon.tls_cert_file and not _is_loopback(daemon.listen):
        yield (
            f"daemon.listen = {daemon.listen!r} has no TLS: tokens and blocks can be read on the way; set "
            "daemon.tls_cert_file and daemon.tls_key_file, unless the network is trusted"
        )


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
