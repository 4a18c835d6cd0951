"""Noticing that the server is gone though nobody asks it anything."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
from collections.abc import Callable

from kvtier.tiers.server.channel import Wake

__all__ = ["Watch"]

logger = logging.getLogger("kvtier.tiers.server")


class Watch:
    """A thread that waits for the end of any connection. Else the memory of a server that ended would stay mapped, and
    so in use, until the next call: beside that of the server which was started in its place.

    `add` and `close` may be called by any thread. What it tells, it tells on its own.
    """

    def __init__(self, wake: Wake, on_end: Callable[[], None]) -> None:
        """wake: ends it. on_end: told that a connection has ended; may block, must not raise."""
        self._wake_fd = wake.fd
        self._on_end = on_end
        self._epoll = select.epoll()
        self._epoll.register(wake.fd, select.EPOLLIN)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="kvtier-server-watch", daemon=True
        )
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            self._thread = None
            logger.warning("the server tier: its memory stays mapped until it is next asked, after it ended: %s", error)

    def add(self, fd: int) -> None:
        """Of a connection; one that is closed is forgotten by itself."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile: there is nothing to watch
            self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def close(self) -> None:
        """After the wake. Waits for what it tells just now."""
        if self._thread is not None:
            self._thread.join()
        self._epoll.close()

    def _run(self) -> None:
        while True:
            if any(fd == self._wake_fd for fd, _ in self._epoll.poll()):
                return
            self._on_end()
