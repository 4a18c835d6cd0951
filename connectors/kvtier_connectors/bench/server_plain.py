"""Plain sockets: what the kernel takes and gives between two processes when nothing stands between it and the bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["PlainStream", "serve_echo", "serve_sink"]

STORE, RESTORE = b"S", b"R"
ECHO_BYTES = 4096


class PlainStream:
    """A connection to `serve_sink`: one letter, and then the bytes, one system call a block."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, blocks: Sequence[memoryview]) -> None:
        """Until the other end says that it has all of them."""
        self._socket.sendall(STORE)
        for block in blocks:
            self._socket.sendall(block)
        assert self._socket.recv(1) == STORE, "the plain server closed the connection"

    def receive(self, blocks: Sequence[memoryview]) -> None:
        self._socket.sendall(RESTORE)
        for block in blocks:
            got = self._socket.recv_into(block, 0, socket.MSG_WAITALL)
            assert got == len(block), "the plain server closed the connection"


def serve_sink(num_bytes: int, opened: Callable[[int], None]) -> None:
    """Take and give back `num_bytes` at a time; each connection has touched memory of its own. Never returns."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened(listener.getsockname()[1])
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_take_and_give, args=(sock, num_bytes), daemon=True).start()


def _take_and_give(sock: socket.socket, num_bytes: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(np.ones(num_bytes, np.uint8).data)
    with sock:
        while letter := sock.recv(1):
            if letter == RESTORE:
                sock.sendall(memory)
                continue
            got = sock.recv_into(memory, 0, socket.MSG_WAITALL)
            if got != num_bytes:
                return
            sock.sendall(STORE)


def serve_echo(path: str, opened: Callable[[], None]) -> None:
    """Send back what comes on a Unix socket, to one client after the other. Never returns."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    opened()
    while True:
        sock, _ = listener.accept()
        with sock:
            while data := sock.recv(ECHO_BYTES):
                sock.sendall(data)
