"""The gate: who may come in, and who is in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from kvtier.clock import Clock
from kvtier.protocol.messages import Failed, FailureCode
from kvtier.protocol.wire import pack
from kvtier.server.hub import Hub
from kvtier.server.listening import Listener, tcp_peer, unix_peer
from kvtier.server.peers import Peer, note_connect
from kvtier.server.serving import Connection

__all__ = ["Gate"]

logger = logging.getLogger("kvtier.server")


class Gate:
    """Owns the listeners and the connections of one daemon. Loop's thread.

    tls: what connections over TCP begin with, from now on; None: nothing. Mutable state: it, `_listeners`,
    `_connections`, `_beginning`.
    """

    def __init__(self, hub: Hub, clock: Clock, tls: ssl.SSLContext | None) -> None:
        self.tls = tls
        self._hub = hub
        self._clock = clock
        self._max_clients: int = hub.settings.max_clients
        self._timeout_s: float = hub.settings.client_timeout_s
        self._listeners: list[Listener] = []
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._beginning: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def has_backlog(self) -> bool:
        """Whether something was said that a peer has not taken yet."""
        return any(connection.has_backlog for connection in self._connections)

    def listen_unix(self, sock: socket.socket) -> None:
        self._listeners.append(Listener(sock, partial(self._take, unix_peer, is_tcp=False), self._clock))

    def listen_tcp(self, sock: socket.socket) -> None:
        self._listeners.append(Listener(sock, partial(self._take, tcp_peer, is_tcp=True), self._clock))

    def close_listeners(self) -> None:
        """Take nobody in any more. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def sweep(self) -> None:
        """End connections that have taken too long. To be called about once a second, more often with short times."""
        for connection in [*self._connections]:
            connection.sweep()

    def fail_all(self, code: str, text: str) -> None:
        """Tell everybody, and let go of each once it has read it, or a moment later."""
        for connection in [*self._connections]:
            if connection.session is not None:
                connection.session.fail(code, text)

    async def close(self, within_s: float) -> None:
        """Wait for connections that are ending, at most `within_s` seconds; then end all."""
        self.close_listeners()
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), within_s)
        for connection in [*self._connections]:
            connection.abort("the server closes")
        await self._empty.wait()  # in the loop's next turns

    def _take(self, know: Callable[[socket.socket], Peer], sock: socket.socket, *, is_tcp: bool) -> None:
        try:
            peer = know(sock)
        except OSError:  # it has gone again
            sock.close()
            return
        if len(self._connections) >= self._max_clients:
            silent = next((each for each in self._connections if each.is_silent), None)
            if silent is None:
                self._turn_away(peer, sock)
                return
            # Whoever only connects cannot keep those out who have something to say.
            self._forget(silent)
            silent.abort("another client needed its place, and it had said nothing yet")
        connection = Connection(self._hub, sock, peer, self._clock, self._forget)
        self._connections[connection] = None
        self._empty.clear()
        task = asyncio.get_running_loop().create_task(self._begin(connection, sock, self.tls if is_tcp else None))
        self._beginning.add(task)
        task.add_done_callback(partial(self._has_begun, connection, sock))

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._empty.set()

    def _has_begun(self, connection: Connection, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        if task.cancelled():  # before its first step: nobody else lets go of them
            self._forget(connection)
            _let_go(connection.peer)
            sock.close()

    async def _begin(self, connection: Connection, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=tls, ssl_handshake_timeout=self._timeout_s if tls else None
            )
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            self._forget(connection)
            if connection.session is None:
                _let_go(connection.peer)
            sock.close()
            if tls is not None:
                note_connect(connection.peer, "", f"no TLS: {str(error) or type(error).__name__}")

    def _turn_away(self, peer: Peer, sock: socket.socket) -> None:
        text = f"{self._max_clients} clients are connected, all that daemon.max_clients allows; come again, or raise it"
        with contextlib.suppress(OSError):
            if self.tls is None or peer.kind == "unix":
                sock.send(pack(Failed(0, FailureCode.BUSY, text)))
        sock.close()
        self._hub.refuse(FailureCode.BUSY)
        note_connect(peer, "", FailureCode.BUSY)
        _let_go(peer)


def _let_go(peer: Peer) -> None:
    """Nobody else will close what watches its process."""
    if peer.process is not None:
        peer.process.close()
