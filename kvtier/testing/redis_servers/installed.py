"""Programs that must be there, and the command that installs each."""

from __future__ import annotations

import re
import shutil
import subprocess

from kvtier.errors import KVTierError

__all__ = ["require_program", "require_redis_server"]

MIN_VERSION = (6, 2)


def require_program(name: str, package: str, purpose: str) -> str:
    """Its path; KVTierError with the command that installs it when it is missing."""
    path = shutil.which(name)
    if path is None:
        raise KVTierError(f"{purpose} needs {name}: install it, as by `apt-get install {package}`")
    return path


def require_redis_server() -> str:
    """The path of a redis-server that is new enough; KVTierError with the way to one when there is none."""
    path = require_program("redis-server", "redis-server", "a Redis server of its own")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\bv=(\d+)\.(\d+)", told)
    if version is None:
        raise KVTierError(f"{path} --version does not say which version it is: {told.strip()[:100]!r}")
    if (int(version[1]), int(version[2])) < MIN_VERSION:
        raise KVTierError(
            f"{path} is Redis {version[1]}.{version[2]}, older than {MIN_VERSION[0]}.{MIN_VERSION[1]}: "
            "install a newer one, as by `apt-get install redis-server` on Debian 12 or Ubuntu 24.04"
        )
    return path
