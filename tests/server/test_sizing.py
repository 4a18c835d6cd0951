"""What `--check` finds of a machine, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.config import MemorySnapshot, load_settings
from kvtier.errors import ConfigError
from kvtier.server.opening import plan_tenants
from kvtier.server.sizing import Sizing, read_sizing

GIB = 1 << 30


def machine(root: Path, shmem: str = "always within_size [advise] never deny force", nodes: int = 2) -> Path:
    files = {"sys/kernel/mm/transparent_hugepage/shmem_enabled": shmem}
    for node in range(nodes):
        place = f"sys/devices/system/node/node{node}"
        files[f"{place}/meminfo"] = f"Node {node} MemTotal:  {8 << 20} kB\nNode {node} MemFree:  {4 << 20} kB\n"
        files[f"{place}/cpulist"] = f"{4 * node}-{4 * node + 3}"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def sizing(root: Path, available: int = 15 * GIB, **overrides: Any) -> Sizing:
    settings = load_settings(env={}, overrides={"host.size": 4 * GIB, **overrides})
    memory = MemorySnapshot(16 * GIB, available)
    return read_sizing(settings, plan_tenants(settings, memory), memory, root)


def test_a_machine_is_read(tmp_path: Path) -> None:
    facts = sizing(machine(tmp_path)).facts
    assert facts["huge_pages"] == {"shmem": "advise"}
    assert facts["numa_nodes"]["node1"] == {"total_bytes": 8 * GIB, "free_bytes": 4 * GIB, "cpus": "4-7"}
    assert facts["memory"]["pools_bytes"] == 4 * GIB


def test_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    facts = sizing(tmp_path).facts
    assert (facts["huge_pages"], facts["numa_nodes"]) == ({"shmem": "unknown"}, {})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"available": GIB}, "more than is available now"),
        ({"host.size": 12 * GIB}, "numactl --interleave=all"),
        ({"daemon.max_clients": 65_000}, "daemon.max_clients = 65000 may need"),
        ({"host.pin": "prefer", "host.size": 8 * GIB}, "LimitMEMLOCK="),
        ({"daemon.listen": "10.0.0.1:9408", "daemon.credentials": "default=token:/t,default=uid:0"}, "has no TLS"),
        ({"daemon.credentials": "default=token:/t"}, "is open to nobody"),
        ({"daemon.http": "10.0.0.1:9407"}, "daemon.http = '10.0.0.1:9407' is read by whoever reaches it"),
        ({"disk.size": 1 << 60, "disk.path": "/"}, "lower disk.size"),
    ],
)
def test_what_an_operator_may_want_to_mend_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("kvtier.server.sizing._limit", lambda kind, *, hard=False: 20_000)
    root = machine(tmp_path)
    assert not sizing(root).warnings
    (warning,) = sizing(root, **overrides).warnings
    assert words in warning


def test_a_daemons_memory_is_its_own() -> None:
    settings = load_settings(env={}, overrides={"host.pool": "server", "server.url": "kvtier+unix:///run/s"})
    with pytest.raises(ConfigError, match=r"host\.pool = 'server' is for engines, .*: set host\.pool to 'own'"):
        plan_tenants(settings, MemorySnapshot(16 * GIB, 15 * GIB))


def test_huge_pages_that_are_off_are_told(tmp_path: Path) -> None:
    (warning,) = sizing(machine(tmp_path, "always within_size advise [never] deny force")).warnings
    assert "shmem_enabled" in warning
