"""What the service manager that started this process wants to be told, as systemd says it in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Supervisor"]


@dataclass(frozen=True, slots=True)
class Supervisor:
    """notify_socket: where it listens; None: nobody does. watchdog_s: it ends this process unless it hears from it so
    often; None: it does not."""

    notify_socket: str | None = None
    watchdog_s: float | None = None

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Supervisor:
        """From the process's environment, unless another is given. What is malformed counts as not there."""
        env = os.environ if env is None else env
        path = env.get("NOTIFY_SOCKET", "")
        usec, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
        is_meant = not pid or pid == str(os.getpid())
        watchdog_s = int(usec) / 1e6 if usec.isascii() and usec.isdigit() and int(usec) and is_meant else None
        return cls(path if path[:1] in ("/", "@") else None, watchdog_s)
