"""What a connection has still to say: messages and slots, sent from where they lie and never joined."""

from __future__ import annotations

import array
import asyncio
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvtier.clock import Clock

__all__ = ["Output", "PlainOutput", "TlsOutput"]

SEND_BYTES = 4 << 20
"""In one call to the system: between two of them Python finds the caches full of blocks, and nothing of its own."""
TURN_BYTES = 4 << 20
"""Of one connection before others have their turn."""
MAX_PARTS = 256
"""In one call to the system, which takes 1024 at most."""
RETRY_S = 0.01
"""After which it is tried again to send what must wait for room, where nothing can tell of that."""
TLS_PIECE_BYTES = 256 << 10
"""That TLS encrypts, and its transport may have to keep, at once."""


class _Part(NamedTuple):
    view: memoryview
    fd: int | None
    on_sent: Callable[[], None] | None


class Output(ABC):
    """Bytes in the order in which they were put, out as fast as the peer takes them. Loop's thread; never blocks.

    Mutable state: `_parts`, their bytes, and when some went out last.
    """

    def __init__(self, clock: Clock, on_drained: Callable[[], None], on_broken: Callable[[OSError], None]) -> None:
        """on_drained: called when all is out that had to wait. on_broken: once, with the reason that nothing will go
        out any more. Neither is called from within `put`."""
        self._clock = clock
        self._on_drained = on_drained
        self._on_broken = on_broken
        self._parts: deque[_Part] = deque()
        self._is_closed = False
        self.backlog_bytes = 0
        self._moved_at = clock.now()

    def put(self, data: bytes | memoryview, fd: int | None = None, on_sent: Callable[[], None] | None = None) -> None:
        """Add to the end; `flush` sends. on_sent: called once the system has these bytes, and only then."""
        if self._is_closed:
            return
        if not self._parts:
            self._moved_at = self._clock.now()
        view = memoryview(data)
        self._parts.append(_Part(view, fd, on_sent))
        self.backlog_bytes += view.nbytes

    def send(self, data: bytes) -> None:
        """`put` and `flush`, at once where nothing waits."""
        self.put(data)
        self.flush()

    @property
    def standstill_s(self) -> float:
        """For how long nothing has gone out of what waits; 0.0 where nothing waits."""
        return self._clock.now() - self._moved_at if self._parts else 0.0

    @abstractmethod
    def flush(self) -> None:
        """Send what goes now; the rest follows by itself."""

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        self._is_closed = True
        self._parts.clear()
        self.backlog_bytes = 0

    def _sent(self, nbytes: int) -> None:
        """So many bytes are out."""
        self._moved_at = self._clock.now()
        self.backlog_bytes -= nbytes
        while nbytes:
            view, _, on_sent = self._parts[0]
            if nbytes < view.nbytes:
                self._parts[0] = _Part(view[nbytes:], None, on_sent)
                return
            nbytes -= view.nbytes
            self._parts.popleft()
            if on_sent is not None:
                on_sent()


class PlainOutput(Output):
    """Straight to the socket: asyncio's own transport copies what does not fit the kernel's buffer.

    The transport has the socket registered for reading; what must wait for room is told by a duplicate of it.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_drained: Callable[[], None],
        on_broken: Callable[[OSError], None],
    ) -> None:
        super().__init__(clock, on_drained, on_broken)
        self._sock = sock
        self._loop = loop
        self._waiting: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None

    def send(self, data: bytes) -> None:
        if self._parts or self._is_closed:
            super().send(data)
            return
        try:
            sent = self._sock.send(data)
        except OSError:  # no room, or an end: found again where it is handled
            sent = 0
        if sent < len(data):
            super().send(data[sent:])

    def flush(self) -> None:
        is_waiting = self._waiting is not None or self._retry is not None
        if self._parts and not is_waiting and not self._send():
            self._wait()

    def close(self) -> None:
        super().close()
        self._stop_waiting()

    def _send(self) -> bool:
        """Whether all is out; else it goes on when there is room."""
        turn = TURN_BYTES
        try:
            while self._parts and turn > 0:
                sent = self._send_once()
                self._sent(sent)
                turn -= sent
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close()
            self._loop.call_soon(self._on_broken, error)
            return True
        return not self._parts

    def _send_once(self) -> int:
        first = self._parts[0]
        if first.fd is not None:  # goes with the first byte of its message, and with no other message's
            rights = array.array("i", [first.fd])
            return self._sock.sendmsg([first.view], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        if len(self._parts) == 1 and first.view.nbytes <= SEND_BYTES:
            return self._sock.send(first.view)
        views: list[memoryview] = []
        nbytes = 0
        for part in self._parts:
            if part.fd is not None or len(views) == MAX_PARTS or nbytes >= SEND_BYTES:
                break
            view = part.view[: SEND_BYTES - nbytes]
            views.append(view)
            nbytes += view.nbytes
        return self._sock.sendmsg(views)

    def _wait(self) -> None:
        try:
            self._waiting = self._sock.dup()
        except OSError:  # as many open files as there may be: that is not this peer's fault
            self._retry = self._loop.call_later(RETRY_S, self._on_writable)
            return
        self._loop.add_writer(self._waiting, self._on_writable)

    def _on_writable(self) -> None:
        self._retry = None
        if self._send():
            self._stop_waiting()
            if not self._is_closed:
                self._on_drained()
        elif self._waiting is None:
            self._wait()

    def _stop_waiting(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._loop.remove_writer(waiting)
            waiting.close()


class TlsOutput(Output):
    """Through asyncio's TLS transport, a piece at a time: it encrypts each at once, so the slot is free again then."""

    def __init__(
        self,
        transport: asyncio.Transport,
        clock: Clock,
        on_drained: Callable[[], None],
        on_broken: Callable[[OSError], None],
    ) -> None:
        super().__init__(clock, on_drained, on_broken)
        self._transport = transport
        self._is_paused = False
        transport.set_write_buffer_limits(high=TLS_PIECE_BYTES, low=0)

    def flush(self) -> None:
        while self._parts and not (self._is_paused or self._transport.is_closing()):
            piece = self._parts[0].view[:TLS_PIECE_BYTES]
            self._transport.write(piece)
            self._sent(piece.nbytes)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        waited = bool(self._parts)
        self.flush()
        if waited and not self._parts:
            self._on_drained()
