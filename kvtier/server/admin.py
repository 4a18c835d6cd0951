"""The admin socket: operators' commands to a live daemon, on threads of their own, never on the loop's."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time

from kvtier.errors import ProtocolError
from kvtier.protocol.admin import MAX_ADMIN_BYTES, AdminAnswer, AdminRequest, AskDrop, AskFlush, AskVerify, Failed
from kvtier.protocol.messages import FailureCode
from kvtier.protocol.wire import Message, Receiver, pack
from kvtier.server.listening import UnixSocket, unix_peer
from kvtier.server.operations import Administered, Operations
from kvtier.server.peers import Peer

__all__ = ["AdminServer"]

logger = logging.getLogger("kvtier.server")
audit = logging.getLogger("kvtier.audit")

MAX_CONNECTIONS = 4
"""Operators at once; the next is told to come again."""
FIRST_TIMEOUT_S = 10.0
"""For a connection's first message, and for the rest of any."""
IDLE_TIMEOUT_S = 300.0
"""For its next request."""
SEND_TIMEOUT_S = 10.0
"""For which one answer may stay unread."""
CLOSE_TIMEOUT_S = 5.0
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_NOTED = (AskDrop, AskFlush, AskVerify)


class AdminServer:
    """Listens on the admin socket, and answers each of a few connections on a thread of its own.

    Who may ask: the daemon's own user and root, by the kernel's word; the socket's mode is 0600 besides. One request at
    a time for each connection: what an operator waits for holds up only that operator. Whoever closes the connection
    ends what it asked for, at its next slice.

    Mutable state: `_connections`, guarded by `_lock`.
    """

    def __init__(self, daemon: Administered, path: str) -> None:
        """Listens when it returns; `daemon` is asked from then on. Raises ConfigError naming `daemon.admin_socket`."""
        self._operations = Operations(daemon)
        self._socket = UnixSocket(path, "daemon.admin_socket")
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._closing = threading.Event()
        self._wakes, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="kvtier-admin", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        return str(self._socket.path)

    def close(self) -> None:
        """Take no more, end what is under way, and wait for it, CLOSE_TIMEOUT_S at most. Idempotent. To be called
        before the stores are closed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wakes.send(b".")
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            connections = dict(self._connections)
        for sock in connections.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in connections:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("an operator's command did not end within %g s: a device hangs", CLOSE_TIMEOUT_S)
        self._socket.close()
        self._wakes.close()
        self._woken.close()

    # ---- the thread that takes connections

    def _accept(self) -> None:
        waits = select.poll()
        waits.register(self._socket.sock, select.POLLIN)
        waits.register(self._woken, select.POLLIN)
        while not self._closing.is_set():
            waits.poll()
            if self._closing.is_set():
                return
            try:
                sock, _ = self._socket.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as error:
                logger.warning("an operator's connection could not be taken: %s", error.strerror or error)
                self._closing.wait(1.0)  # it stays in the queue, and would wake this thread at once again
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        sock.settimeout(SEND_TIMEOUT_S)
        try:
            peer = unix_peer(sock)
        except OSError:  # it has gone again
            sock.close()
            return
        if peer.process is not None:
            peer.process.close()
        if peer.uid not in (0, os.geteuid()):
            text = f"this daemon is of user {os.geteuid()}, and you are {peer.uid}: ask as that user, or as root"
            _turn_away(sock, peer, FailureCode.DENIED, text)
            return
        thread = threading.Thread(target=self._serve, args=(sock, peer), name="kvtier-admin-command", daemon=True)
        with self._lock:
            is_full = len(self._connections) >= MAX_CONNECTIONS
            if not is_full:
                self._connections[thread] = sock
        if is_full:
            text = f"{MAX_CONNECTIONS} commands are connected, and there may be no more; end one, or come again"
            _turn_away(sock, peer, FailureCode.BUSY, text)
            return
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads: the next operator may find one
            logger.warning("an operator's command could not begin: %s", error)
            with self._lock:
                del self._connections[thread]
            sock.close()

    # ---- a connection's own thread

    def _serve(self, sock: socket.socket, peer: Peer) -> None:
        try:
            self._converse(sock, peer)
        except ProtocolError as error:
            with contextlib.suppress(OSError):
                sock.sendall(pack(Failed(0, FailureCode.PROTOCOL, f"on the admin socket: {error}"[:1024])))
        except OSError as error:  # it has gone, or does not read
            logger.debug("an operator's connection ended: %s", error)
        except Exception:  # a thread's top: the command must not wait, and the daemon goes on
            logger.exception("an operator's command failed")
            with contextlib.suppress(OSError):
                sock.sendall(pack(Failed(0, FailureCode.FAILED, "the daemon could not do it; its log says more")))
        finally:
            sock.close()
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def _converse(self, sock: socket.socket, peer: Peer) -> None:
        receiver: Receiver[AdminRequest] = Receiver(
            AdminRequest, max_message_bytes=MAX_ADMIN_BYTES, max_payload_bytes=0
        )
        first = _receive(sock, receiver, FIRST_TIMEOUT_S)
        if first is None:
            return
        greeted = self._operations.greet(first)
        _note(peer, "connect", greeted.code if isinstance(greeted, Failed) else "welcome")
        _send(sock, greeted)
        if isinstance(greeted, Failed):
            return
        while (request := _receive(sock, receiver, IDLE_TIMEOUT_S)) is not None:
            if isinstance(request, _NOTED):
                _note(peer, type(request).__name__, "begun", request.tenant)
            if not self._answer(sock, request):
                return

    def _answer(self, sock: socket.socket, request: AdminRequest) -> bool:
        """False where the connection is to end."""
        watch = select.poll()
        watch.register(sock, select.POLLRDHUP)
        with contextlib.closing(self._operations.answers(request)) as answers:
            for answer in answers:
                if answer is not None:
                    _send(sock, answer)
                    if isinstance(answer, Failed) and answer.id == 0:
                        return False
                if self._closing.is_set() or any(event & _GONE for _, event in watch.poll(0)):
                    return False
        return True


def _receive(sock: socket.socket, receiver: Receiver[AdminRequest], idle_s: float) -> AdminRequest | None:
    """The next message; None at the connection's end. A message that has begun comes within FIRST_TIMEOUT_S."""
    deadline = time.monotonic() + idle_s
    has_begun = False
    while (event := receiver.next_event()) is None:
        if receiver.within_frame and not has_begun:
            has_begun = True
            deadline = min(deadline, time.monotonic() + FIRST_TIMEOUT_S)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        nbytes = sock.recv_into(receiver.buffer())
        if not nbytes:
            return None
        receiver.received(nbytes)
    assert isinstance(event, Message), "no message has a payload here"
    message: AdminRequest = event.message
    return message


def _send(sock: socket.socket, answer: AdminAnswer) -> None:
    sock.settimeout(SEND_TIMEOUT_S)
    sock.sendall(pack(answer))


def _turn_away(sock: socket.socket, peer: Peer, code: str, text: str) -> None:
    _note(peer, "connect", code)
    with contextlib.suppress(OSError), sock:
        sock.send(pack(Failed(0, code, text)))


def _note(peer: Peer, what: str, outcome: str, tenant: str = "") -> None:
    """One line of the audit log."""
    audit.info(
        "admin %s: %s",
        what,
        outcome,
        extra={"peer": peer.kind, "uid": peer.uid, "pid": peer.pid, "tenant": tenant, "outcome": outcome},
    )
