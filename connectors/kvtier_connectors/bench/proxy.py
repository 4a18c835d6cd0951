"""A TCP proxy that does to a server's replies what networks do: cuts them where it likes, or lets them trickle."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["SickProxy"]

CHUNK_BYTES = 1 << 18
ACCEPT_POLL_S = 0.05
TRICKLE_PAUSE_S = 0.01


class SickProxy:
    """Listens on a free port of 127.0.0.1 and passes on what comes, to and from another port of it.

    cut_bytes: while set, each connection is cut after a random number of bytes of replies, of that mean, amid whatever
    reply that is. trickle_bytes: while set, replies come by so many bytes every 10 ms. Both may be set at any time, by
    any thread, and hold for what comes from then on.

    round_trips: how often a client spoke after it had been answered, or for the first time, on all connections.

    Mutable state: these; `_sockets`, guarded by `_lock`.
    """

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.cut_bytes: int | None = None
        self.trickle_bytes: int | None = None
        self.round_trips = 0
        self._target_port = target_port
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(ACCEPT_POLL_S)
        self._acceptor = threading.Thread(target=self._accept, name="kvtier-proxy", daemon=True)
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._acceptor.join()
        self._listener.close()
        self.heal()
        self.cut_all()
        for thread in self._threads:
            thread.join()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def heal(self) -> None:
        """Pass on everything as it comes."""
        self.cut_bytes = self.trickle_bytes = None

    def cut_all(self) -> None:
        """End every connection now."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name="kvtier-proxied", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        """One thread a connection, both ways: what is not passed on waits in the kernel."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(client)
            try:
                server = stack.enter_context(socket.create_connection(("127.0.0.1", self._target_port)))
            except OSError:  # as if it had been refused, but for the moment
                return
            pair = {client, server}
            with self._lock:
                self._sockets |= pair
            try:
                self._pass_on(client, server)
            except OSError:
                pass
            finally:
                with self._lock:
                    self._sockets -= pair

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(0.0)
        replies = _Replies()
        request, was_answered = b"", True
        while not replies.is_cut:
            # Read from a side only what the other has taken the last of: one chunk each way.
            readers = [each for each, held in ((client, request), (server, replies.held)) if not held]
            writers = [each for each, held in ((server, request), (client, replies.held)) if held]
            readable, writable, _ = select.select(readers, writers, [])
            if client in readable:
                if not (request := client.recv(CHUNK_BYTES)):
                    return
                self._note_request(is_first=was_answered)
                was_answered = False
            if server in readable:
                replies.held = server.recv(CHUNK_BYTES)
                if not replies.held:
                    return
                was_answered = True
            if server in writable:
                request = request[server.send(request) :]
            if client in writable:
                replies.send(client, self)

    def _note_request(self, *, is_first: bool) -> None:
        with self._lock:
            self.round_trips += is_first

    def draw_cut(self) -> int | None:
        """After how many bytes more a connection is to be cut; None: never."""
        return None if self.cut_bytes is None else int(self._random.expovariate(1 / self.cut_bytes))


class _Replies:
    """What one connection has of its server for its client. One thread."""

    def __init__(self) -> None:
        self.held = b""
        self.is_cut = False
        self._left: int | None = None

    def send(self, client: socket.socket, proxy: SickProxy) -> None:
        if proxy.cut_bytes is None or self._left is None:
            self._left = proxy.draw_cut()
        trickle = proxy.trickle_bytes
        piece = self.held if trickle is None else self.held[:trickle]
        sent = client.send(piece if self._left is None else piece[: self._left])
        self.held = self.held[sent:]
        if self._left is not None:
            self._left -= sent
            self.is_cut = self._left <= 0
        if trickle is not None:
            time.sleep(TRICKLE_PAUSE_S)
