"""How much memory this process may use: the machine's, and the limit of the control group it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvtier.errors import ConfigError

__all__ = ["MemorySnapshot"]

# Version 1 has no word for "no limit": it shows the largest multiple of a page that fits 63 bits.
_V1_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory in bytes at one moment. Take one and size everything from it, so that all parts agree."""

    total_bytes: int
    """What the machine has."""
    available_bytes: int
    """What the kernel would give without swapping; informs messages, limits nothing, since it changes by the second."""
    cgroup_limit_bytes: int | None = None
    """The tightest limit of the process's control group and those above it; None when there is none."""

    @property
    def limit_bytes(self) -> int:
        """What may be used at most: the smaller of machine and control group."""
        return self.total_bytes if self.cgroup_limit_bytes is None else min(self.total_bytes, self.cgroup_limit_bytes)

    def describe(self) -> str:
        cgroup = "no control group limit" if self.cgroup_limit_bytes is None else f"cgroup {self.cgroup_limit_bytes}"
        return f"machine {self.total_bytes} bytes ({self.available_bytes} available), {cgroup}"

    @classmethod
    def read(cls, root: Path = Path("/")) -> MemorySnapshot:
        """Read `proc` and `sys` below `root`, with control groups of either version. Linux only."""
        fields = _read_meminfo(root / "proc/meminfo")
        return cls(fields["MemTotal"], fields.get("MemAvailable", fields["MemTotal"]), _cgroup_limit(root))


def _read_meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): set host.size to a number of bytes") from error
    if "MemTotal" not in fields:
        raise ConfigError(f"{path} names no MemTotal: set host.size to a number of bytes")
    return fields


def _cgroup_limit(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            limits += _limits_upwards(root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_upwards(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_upwards(mount: Path, group: str, file_name: str) -> list[int]:
    """Limits of a group and its parents. In a container the group's own path may not be mounted, only its root."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    limits = []
    for depth in range(len(parts), -1, -1):
        try:
            text = mount.joinpath(*parts[:depth], file_name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _V1_NO_LIMIT:
            limits.append(int(text))
    return limits
