"""Telling the service manager how the daemon is, by datagrams to its socket (systemd's sd_notify)."""

from __future__ import annotations

import logging
import socket
import time

from kvtier.config.supervisor import Supervisor

__all__ = ["Notifier"]

logger = logging.getLogger("kvtier.server")


class Notifier:
    """Says what it is told to where the environment names a socket, else nothing. Never blocks and never raises."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._watchdog_s = supervisor.watchdog_s
        path = supervisor.notify_socket
        self._address = None if path is None else f"\0{path[1:]}" if path.startswith("@") else path
        self._has_failed = False

    @property
    def watchdog_period_s(self) -> float | None:
        """How often `alive` is to be called; None: never."""
        return None if self._watchdog_s is None or self._address is None else self._watchdog_s / 3

    def ready(self, status: str) -> None:
        self._say("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._say("STOPPING=1", "STATUS=draining")

    def alive(self) -> None:
        self._say("WATCHDOG=1")

    def _say(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("the service manager could not be told %s (%s); said once", lines[0], error)
