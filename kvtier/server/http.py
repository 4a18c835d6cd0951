"""The HTTP server of a daemon: `/metrics`, `/healthz`, the status page at `/` and the document behind it.

Reading only, and little of it: GET of four fixed paths, no query, no body, one answer a connection. One thread has all
connections, so that none can hold a thread: whoever says nothing, or reads nothing, holds one of a few places until a
short time is over, and loses it at once when a newcomer needs it. A second thread asks the daemon, once for all who
want to know the same, so that health is told while that takes a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvtier.clock import Clock
from kvtier.errors import ConfigError
from kvtier.server.answers import Answer, Answers, Asking
from kvtier.server.status import Watched

__all__ = ["HttpServer", "serve"]

logger = logging.getLogger("kvtier.server")

MAX_REQUEST_BYTES = 8192
"""Of the request line and all headers."""
MAX_CONNECTIONS = 64
MAX_IGNORED_BYTES = 1 << 16
"""That a client may send after its request before the connection is cut."""
REQUEST_TIMEOUT_S = 5.0
"""From the connect to the end of the headers, however they trickle."""
ANSWER_TIMEOUT_S = 10.0
"""From there to the end of the connection."""
START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
BACKLOG = 128


class _Connection(asyncio.Protocol):
    """One client: its request, then our response, then the end. ask: has another thread find an answer."""

    def __init__(
        self,
        answers: Answers,
        ask: Callable[[Asking], asyncio.Future[Answer]],
        connections: dict[_Connection, None],
    ) -> None:
        self._answers = answers
        self._ask = ask
        self._connections = connections  # in the order in which they came
        self._head = bytearray()
        self._num_ignored = 0
        self._is_asked = False
        self._asked: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= MAX_CONNECTIONS:
            # Whoever has not asked yet comes first: a crowd that says nothing costs those nothing who do.
            silent = (each for each in self._connections if not each._is_asked)
            next(silent, next(iter(self._connections))).cut()
        self._connections[self] = None
        self._cut_after(REQUEST_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        if self._is_asked:  # closing with bytes unread would take the response from a client that is slow to read it
            self._num_ignored += len(data)
            if self._num_ignored > MAX_IGNORED_BYTES:
                self.cut()
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n", 0, MAX_REQUEST_BYTES)
        if end < 0 and len(self._head) < MAX_REQUEST_BYTES:
            return
        self._is_asked = True
        self._cut_after(ANSWER_TIMEOUT_S)
        if end < 0:
            self._respond(Answer("431 Request Header Fields Too Large", b"8 KiB at most\n"))
            return
        found = self._answers.find(bytes(self._head[:end]))
        if isinstance(found, Answer):
            self._respond(found)
        else:
            self._asked = self._ask(found)
            self._asked.add_done_callback(self._told)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._asked is not None:
            self._asked.remove_done_callback(self._told)

    def cut(self) -> None:
        """End it at once. Its place is free from now on."""
        self._connections.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _told(self, told: asyncio.Future[Answer]) -> None:
        self._respond(told.result())

    def _respond(self, answer: Answer) -> None:
        if self in self._connections and self._transport is not None:
            self._transport.write(answer.encode())
            self._transport.write_eof()

    def _cut_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cut)


class HttpServer:
    """Serves on a thread of its own from the constructor's return to `close`.

    The constructor raises ConfigError where the address cannot be had. Any thread may call.
    """

    def __init__(self, daemon: Watched, host: str, port: int, clock: Clock | None = None) -> None:
        self._socket = _listen(host, port)
        address: tuple[str, int] = self._socket.getsockname()[:2]
        self.address = address
        """Host and port that it listens on; the port is found where 0 was asked for."""
        is_local = ipaddress.ip_address(address[0]).is_loopback
        if not is_local:
            logger.warning(
                "daemon.http: %s:%d can be reached from elsewhere: whoever does sees tenants' names and counts (no "
                "tokens, no keys, no KV), without a password; 127.0.0.1:%d is for this machine alone",
                *address,
                address[1],
            )
        try:
            self._answers = Answers(daemon, is_local=is_local, clock=clock)
            self._loop = asyncio.new_event_loop()
        except BaseException:
            self._socket.close()
            raise
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-http", daemon=True)
        self._thread.start()
        self._started.wait(START_TIMEOUT_S)
        logger.info("http: /, /status.json, /metrics and /healthz on %s:%d", *address)

    def close(self) -> None:
        """Stop listening and cut all connections. Idempotent; waits for the thread, within seconds."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._socket.close()
            self._started.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        connections: dict[_Connection, None] = {}
        asked: dict[Asking, asyncio.Future[Answer]] = {}
        with ThreadPoolExecutor(1, "kvtier-http-asks") as threads:

            def ask(make: Asking) -> asyncio.Future[Answer]:
                if make not in asked:
                    asked[make] = loop.run_in_executor(threads, make)
                    asked[make].add_done_callback(lambda _: asked.pop(make))
                return asked[make]

            server = await loop.create_server(
                lambda: _Connection(self._answers, ask, connections), sock=self._socket, backlog=BACKLOG
            )
            self._started.set()
            await self._stop.wait()
            server.close()
            for connection in [*connections]:
                connection.cut()
            await asyncio.gather(*asked.values())
        await asyncio.sleep(0)  # transports that were aborted close their sockets in the loop's next turn


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; raises ConfigError with the reason where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "127.0.0.1", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"daemon.http = '{host}:{port}' is no address of this machine ({error}); write such as "
            f"127.0.0.1:9407, or 'off'"
        ) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.settimeout(0.0)
        listening.bind(address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"daemon.http = '{host}:{port}' cannot be listened on ({error}): name a free port and an address of this "
            f"machine, or 'off'"
        ) from error
    return listening


def serve(daemon: Watched, host: str, port: int, clock: Clock | None = None) -> HttpServer:
    """Answer at this address until the result is closed. Blocks until it listens; raises ConfigError where it cannot.

    daemon: asked on threads of the server's, when someone wants to know. port 0: any that is free.
    """
    return HttpServer(daemon, host, port, clock)
