"""One connection's bytes, both ways, until a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.tiers.server.address import Address
from kvtier.tiers.server.failures import DeadlineError, LostError

__all__ = ["Channel", "SharedChannel", "TlsChannel", "Wake", "limit"]

TIMEOUT_SLACK_S = 0.01
MIN_TIMEOUT_S = 0.001  # the kernel takes 0 for no timeout at all
ANCILLARY_BYTES = socket.CMSG_SPACE(16)  # of four descriptors: more than are ever sent
MAX_TLS_SEND = 1 << 16

_TIMEVAL = struct.Struct("ll")
_INT_BYTES = 4


class Wake:
    """Ends every wait of the tier's calls, once. Any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        os.close(self.fd)


class Channel:
    """A connected TCP socket, used by one call at a time; `shut` by any thread.

    Every send and receive ends by `deadline`, a time of the clock, however slowly the bytes come. The kernel counts
    the time: one system call moves a whole block, and no thread wakes for each packet of it.
    """

    def __init__(self, sock: socket.socket, address: Address, clock: Clock) -> None:
        self._sock = sock
        self._clock = clock
        self.address = address
        self.deadline = 0.0
        self.is_within_message = False
        """Part of what is being said was sent, and part was not: nothing else can be said any more."""
        self._told_s: dict[int, float] = {}  # by the socket's option
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._prepare()

    def _prepare(self) -> None:
        self._sock.settimeout(None)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_readable(self) -> bool:
        """Whether bytes, or the end of them, can be read without waiting."""
        return bool(self._poll.poll(0))

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """All of the parts, in order."""
        self.is_within_message = True
        sent = self._send(parts)
        if sent != sum(map(len, parts)):
            left = [memoryview(part) for part in parts]
            advance(left, sent)
            while left:
                advance(left, self._send(left))
        self.is_within_message = False

    def receive_into(self, buffer: memoryview, *, whole: bool) -> int:
        """What is there, waiting for the first byte; whole: until the buffer is full, where one call can do that."""
        self._limit(socket.SO_RCVTIMEO)
        try:
            number = self._sock.recv_into(buffer, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError:
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from error
        return self._received(number)

    def receive_first(self, buffer: memoryview) -> tuple[int, list[int]]:
        """As `receive_into`, with the descriptors that came along, which are the caller's."""
        return self.receive_into(buffer, whole=False), []

    def farewell(self, parts: bytes) -> None:
        """Say this if it can be said at once."""
        if not self.is_within_message:
            with contextlib.suppress(OSError):
                self._sock.send(parts, socket.MSG_DONTWAIT)

    def shut(self) -> None:
        """End what is under way on it, from another thread; it still has to be closed by the one that uses it."""
        self._end()

    def close(self) -> None:
        """The connection is over, also where a fork's child has the socket too."""
        self._end()
        self._sock.close()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not an SSLSocket's own, which changes its state

    def _send(self, parts: Sequence[bytes | memoryview]) -> int:
        self._limit(socket.SO_SNDTIMEO)
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from error

    def _received(self, number: int) -> int:
        if not number:
            raise LostError(f"{self.address} closed the connection")
        return number

    def _left(self) -> float:
        left = self.deadline - self._clock.now()
        if left <= 0:
            raise self._late()
        return max(left, MIN_TIMEOUT_S)

    def _limit(self, option: int) -> None:
        """Have the kernel end what comes next by the deadline, or TIMEOUT_SLACK_S after it: the time that it has been
        told already is good for so long.
        """
        left = self._left()
        if 0.0 <= self._told_s.get(option, -1.0) - left <= TIMEOUT_SLACK_S:
            return
        try:
            limit(self._sock, option, left)
        except OSError as error:
            raise self._lost(error) from error
        self._told_s[option] = left

    def _late(self) -> DeadlineError:
        return DeadlineError(f"{self.address} did not answer in time")

    def _lost(self, error: OSError) -> LostError:
        return LostError(f"{self.address}: {error.strerror or type(error).__name__}")


class SharedChannel(Channel):
    """A Unix socket. Its messages are short, but the kernel's timeout would begin anew with each piece of one. `wake`
    ends its waits, and leaves the socket as it is: the server can still be told that no slot is in use."""

    def __init__(self, sock: socket.socket, address: Address, clock: Clock, wake: Wake) -> None:
        self._waiting = {kind: select.poll() for kind in (select.POLLIN, select.POLLOUT)}
        for kind, poll in self._waiting.items():
            poll.register(sock, kind)
            poll.register(wake.fd, select.POLLIN)
        self._wake_fd = wake.fd
        super().__init__(sock, address, clock)

    def _prepare(self) -> None:
        self._sock.settimeout(0.0)

    def shut(self) -> None:
        pass  # the wake does it

    def receive_into(self, buffer: memoryview, *, whole: bool) -> int:
        del whole
        while True:
            self._wait(select.POLLIN)
            try:
                return self._received(self._sock.recv_into(buffer))
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(error) from error

    def receive_first(self, buffer: memoryview) -> tuple[int, list[int]]:
        self._wait(select.POLLIN)
        try:
            number, ancillary, _, _ = self._sock.recvmsg_into([buffer], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return 0, []
        except OSError as error:
            raise self._lost(error) from error
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % _INT_BYTES
                fds.extend(struct.unpack(f"{whole // _INT_BYTES}i", data[:whole]))
        if not number:
            for fd in fds:
                os.close(fd)
        return self._received(number), fds

    def _send(self, parts: Sequence[bytes | memoryview]) -> int:
        while True:
            self._left()
            try:
                return self._sock.sendmsg(parts)
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise self._lost(error) from error

    def _wait(self, kind: int) -> None:
        ready = self._waiting[kind].poll(self._left() * 1000)
        if not ready:
            raise self._late()
        if any(fd == self._wake_fd for fd, _ in ready):
            raise LostError("the tier was closed")


class TlsChannel(Channel):
    """TLS over TCP: Python counts the time."""

    _sock: ssl.SSLSocket

    def _prepare(self) -> None:
        pass

    @property
    def is_readable(self) -> bool:
        return super().is_readable or bool(self._sock.pending())

    def farewell(self, parts: bytes) -> None:
        del parts  # its end says as much: there is no mapping over TCP

    def receive_into(self, buffer: memoryview, *, whole: bool) -> int:
        del whole
        try:
            self._sock.settimeout(self._left())
            return self._received(self._sock.recv_into(buffer))
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from error

    def _send(self, parts: Sequence[bytes | memoryview]) -> int:
        first = parts[0]
        if len(parts) > 1 and len(first) + len(parts[1]) <= MAX_TLS_SEND:
            first = memoryview(b"".join(parts[:2]))  # a copy costs less than one more record of TLS
        try:
            self._sock.settimeout(self._left())
            return self._sock.send(first)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from error


def limit(sock: socket.socket, option: int, seconds: float) -> None:
    """Have the kernel end a call that waits for so long. Raises OSError."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6) or 1))


def advance(views: list[memoryview], nbytes: int) -> None:
    """Drop what is done: whole views, and the front of the first that is left. Views that are empty go too."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    if nbytes:
        views[0] = views[0][nbytes:]
