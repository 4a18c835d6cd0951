"""One connection's bytes, both ways, until a deadline; and a count of the replies that are still to come."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.tiers.redis.address import Address
from kvtier.tiers.redis.resp import CRLF, ErrorReply, ProtocolError, Reply, parse_number

__all__ = ["Channel", "ChannelError", "DeadlineError", "LostError", "PolledChannel", "advance"]

BUFFER_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 14
MAX_REPLY_BYTES = 16 << 20
"""Of a reply that is read whole: a cluster's slots are the longest, three nodes and three lines for each range."""
MAX_DEPTH = 6
TIMEOUT_SLACK_S = 0.01
MIN_TIMEOUT_S = 0.001  # the kernel takes 0 for no timeout at all
SLOW_RUN = 64


class ChannelError(Exception):
    """The connection is of no more use; `kind` is what failures are counted by."""

    kind = "connection"


class LostError(ChannelError):
    """It was cut, or could not be made."""


class DeadlineError(ChannelError):
    """The call's time is over."""

    kind = "timeout"


class GarbledError(ChannelError):
    """What came is not what a Redis server sends."""

    kind = "protocol"


class Channel:
    """A connected TCP socket with a small buffer for replies. Used by one call at a time; `shut` by any thread.

    Every send and receive ends by `deadline`, a time of the clock, however slowly the bytes come. The kernel counts
    the time: so one system call moves a whole block, and a thread that waits for bytes does not wake, and want the
    interpreter, for each packet of them.

    `num_owed` counts replies that were asked for and not yet read to their end. A channel that owes any, or has bytes
    left over, is not to be used by another call: `is_idle` says so.
    """

    def __init__(self, sock: socket.socket, address: Address, clock: Clock) -> None:
        self._sock = sock
        self._clock = clock
        self._own_buffer = bytearray(BUFFER_BYTES)
        self._buffer = self._own_buffer  # or a longer one, while it holds bytes that were pushed back
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.address = address
        self.deadline = 0.0
        self.num_owed = 0
        self.num_received = 0
        """Bytes since the call began that has it now."""
        self.is_fresh = True
        """Whether no call has used it before."""
        self.is_broken = False
        self._told_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # what the kernel was told last
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._prepare()

    def _prepare(self) -> None:
        self._sock.settimeout(None)

    @property
    def is_idle(self) -> bool:
        return not (self.is_broken or self.num_owed or self._start != self._end)

    @property
    def is_readable(self) -> bool:
        """Whether bytes, or the end of them, can be read without waiting."""
        return self._start != self._end or bool(self._poll.poll(0))

    def shut(self) -> None:
        """End what is under way on it, from another thread; it still has to be closed by the one that uses it."""
        self.is_broken = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not an SSLSocket's own, which changes its state

    def close(self) -> None:
        self.is_broken = True
        self._sock.close()

    # ---- sending -------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[bytes | memoryview], num_replies: int) -> None:
        """All of the parts, in order. num_replies: what they ask for."""
        self.num_owed += num_replies
        sent = self._send(parts)
        if sent == sum(map(len, parts)):
            return
        left = [memoryview(part) for part in parts]
        advance(left, sent)
        while left:
            advance(left, self._send(left))

    def _send(self, parts: Sequence[bytes | memoryview]) -> int:
        while True:
            left = self._limit(socket.SO_SNDTIMEO)
            try:
                return self._sock.sendmsg(parts)
            except BlockingIOError:
                self._retell(socket.SO_SNDTIMEO, left)
            except OSError as error:
                raise self._lost(error) from error

    # ---- receiving -----------------------------------------------------------------------------------------------

    def read_line(self) -> bytes:
        """Up to a line's end, which is left out."""
        searched = self._start
        while (end := self._buffer.find(CRLF, searched, self._end)) < 0:
            if self._end - self._start > MAX_LINE_BYTES:
                raise self.garbled("a line without an end")
            searched = max(self._start, self._end - 1)
            searched -= self._fill(BUFFER_BYTES)
        line = bytes(self._view[self._start : end])
        self._start = end + len(CRLF)
        return line

    def prefetch(self, nbytes: int) -> None:
        """Have at least one byte in the buffer, and at most `nbytes`: what follows goes to its place directly."""
        if self._start == self._end:
            self._fill(nbytes)

    def read_into(self, targets: list[memoryview]) -> None:
        """Fill the targets with the next bytes, and empty the list."""
        while targets:
            buffered = min(self._end - self._start, len(targets[0]))
            if buffered:
                targets[0][:buffered] = self._view[self._start : self._start + buffered]
                self._start += buffered
            advance(targets, buffered or self._receive(targets))

    def read_ahead(self, targets: Sequence[memoryview]) -> int:
        """Put into the targets what there is, and wait for the first byte of it only; how much. Nothing is put where
        bytes are left in the buffer: they are to be looked at first.

        All of it may belong to the next reply, or some to those after it: then it is to be pushed back.
        """
        return 0 if self._start != self._end else self._receive_some(targets)

    def push_back(self, targets: Sequence[memoryview], nbytes: int) -> None:
        """The first bytes of the targets, as `read_ahead` has just put them there, are still to be read."""
        if nbytes > BUFFER_BYTES:
            self._use(bytearray(nbytes))  # as long as the caller's own memory at most, and gone once it is read
        self._start, self._end = 0, nbytes
        start = 0
        for target in targets:
            part = target[: nbytes - start]
            self._view[start : start + len(part)] = part
            start += len(part)

    def skip(self, nbytes: int, scratch: memoryview) -> None:
        """Read and forget."""
        while nbytes:
            step = min(nbytes, len(scratch))
            self.read_into([scratch[:step]])
            nbytes -= step

    def settle(self) -> None:
        """A reply has been read to its end."""
        self.num_owed -= 1
        if self.num_owed < 0:
            raise self.garbled("more replies than were asked for")

    def garbled(self, what: str) -> GarbledError:
        """What to raise for bytes that are out of place."""
        return GarbledError(f"{self.address} sent what is no reply of Redis: {what}")

    def number(self, line: bytes) -> int:
        """That of a line which begins with a colon, dollar or star; 0 or more."""
        try:
            number = parse_number(line[1:])
        except ProtocolError as error:
            raise self.garbled(str(error)) from error
        if number < 0:
            raise self.garbled(f"a negative length, {number}")
        return number

    def read_reply(self) -> Reply:
        """One reply, whole; for those that are small."""
        try:
            reply, _ = self._parse(MAX_REPLY_BYTES, 0)
        except ProtocolError as error:
            raise self.garbled(str(error)) from error
        self.settle()
        return reply

    def read_replies(self, number: int) -> list[Reply]:
        """Several, and fast where they are one-digit numbers, as those of EXISTS, UNLINK and TOUCH are."""
        replies: list[Reply] = []
        while len(replies) < number:
            self.prefetch(BUFFER_BYTES)
            run = min((self._end - self._start) // 4, number - len(replies))
            chunk = bytes(self._view[self._start : self._start + 4 * run])
            digits = chunk[1::4]
            if (
                run
                and digits.isdigit()
                and chunk[0::4] == b":" * run
                and chunk[2::4] + chunk[3::4] == (b"\r" * run + b"\n" * run)
            ):
                replies.extend([digit - 48 for digit in digits])
                self._start += 4 * run
                self.num_owed -= run
            else:  # some at once, lest the run be looked at again for each of them
                replies.extend([self.read_reply() for _ in range(min(SLOW_RUN, number - len(replies)))])
        return replies

    def _parse(self, budget: int, depth: int) -> tuple[Reply, int]:
        """A reply, and what is left of the bytes that it may have."""
        line = self.read_line()
        budget -= len(line)
        kind, rest = line[:1], line[1:]
        if budget < 0 or depth > MAX_DEPTH:
            raise ProtocolError("a reply that is too long or too deep")
        if kind == b"+":
            return rest, budget
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace")), budget
        number = parse_number(rest)
        if kind == b":":
            return number, budget
        if kind not in (b"$", b"*") or number < -1:
            raise ProtocolError(f"no reply begins with {line[:40]!r}")
        if number == -1:
            return None, budget
        if number > budget:
            raise ProtocolError(f"a reply of {number} bytes or parts, where at most {budget} were expected")
        if kind == b"$":
            data = bytearray(number + len(CRLF))
            self.read_into([memoryview(data)])
            if not data.endswith(CRLF):
                raise ProtocolError("a string without an end")
            return bytes(data[:-2]), budget - number
        parts: list[Reply] = []
        for _ in range(number):
            part, budget = self._parse(budget, depth + 1)
            parts.append(part)
        return parts, budget

    def _fill(self, nbytes: int) -> int:
        """Receive something into the buffer; by how much what was there has moved to the front."""
        moved = 0
        if self._start == self._end or self._end == len(self._buffer):
            moved = self._start
            rest = self._buffer[moved : self._end]
            if self._buffer is not self._own_buffer and len(rest) < BUFFER_BYTES:
                self._use(self._own_buffer)
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive_some([self._view[self._end : self._end + nbytes]])
        return moved

    def _use(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)

    def _receive(self, targets: Sequence[memoryview]) -> int:
        """As much as fits, or what came before the deadline. All of it is part of a reply that was begun."""
        return self._receive_some(targets, socket.MSG_WAITALL)

    def _receive_some(self, targets: Sequence[memoryview], flags: int = 0) -> int:
        """What is there; waits for the first byte only."""
        while True:
            left = self._limit(socket.SO_RCVTIMEO)
            try:
                return self._received(self._sock.recvmsg_into(targets, 0, flags)[0])
            except BlockingIOError:
                self._retell(socket.SO_RCVTIMEO, left)
            except OSError as error:
                raise self._lost(error) from error

    def _received(self, number: int) -> int:
        if not number:
            raise LostError(f"{self.address} closed the connection")
        self.num_received += number
        return number

    def _left(self) -> float:
        left = self.deadline - self._clock.now()
        if left <= 0:
            raise self._late()
        return max(left, MIN_TIMEOUT_S)

    def _limit(self, option: int) -> float:
        """Have the kernel end what comes next by the deadline, or TIMEOUT_SLACK_S after it; how long that is.

        A shorter time that it has been told already will do, as it does for most calls: if it ends, `_retell` has the
        kernel wait for the rest.
        """
        left = self._left()
        if not left / 2 <= self._told_s[option] <= left + TIMEOUT_SLACK_S:
            seconds = int(left)
            timeval = _TIMEVAL.pack(seconds, int((left - seconds) * 1e6) or 1)
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
            except OSError as error:
                raise self._lost(error) from error
            self._told_s[option] = left
        return left

    def _retell(self, option: int, left: float) -> None:
        """The kernel has ended what had so long: wait on, where it was told less. Raises DeadlineError otherwise."""
        if self._told_s[option] >= left:
            what = "answer" if option == socket.SO_RCVTIMEO else "take a request"
            raise DeadlineError(f"{self.address} did not {what} in time") from None
        self._told_s[option] = 0.0

    def _late(self) -> DeadlineError:
        return DeadlineError(f"{self.address} did not answer in time")

    def _lost(self, error: OSError) -> LostError:
        return LostError(f"{self.address}: {error.strerror or type(error).__name__}")


_TIMEVAL = struct.Struct("ll")


def advance(views: list[memoryview], nbytes: int) -> None:
    """Drop what is done: whole views, and the front of the first that is left. Views that are empty go too."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    if nbytes:
        views[0] = views[0][nbytes:]


class PolledChannel(Channel):
    """For TLS, and for Unix sockets, whose kernel timeout begins anew with each packet: Python counts the time."""

    def _prepare(self) -> None:
        pass

    @property
    def is_readable(self) -> bool:
        return super().is_readable or (isinstance(self._sock, ssl.SSLSocket) and bool(self._sock.pending()))

    def _send(self, parts: Sequence[bytes | memoryview]) -> int:
        first = parts[0]
        if len(parts) > 1 and len(first) + len(parts[1]) <= BUFFER_BYTES:
            first = memoryview(b"".join(parts[:2]))  # a copy costs less than one more record of TLS
        try:
            self._sock.settimeout(self._left())
            return self._sock.send(first)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise DeadlineError(f"{self.address} did not take a request in time") from None
        except OSError as error:
            raise self._lost(error) from error

    def _receive_some(self, targets: Sequence[memoryview], flags: int = 0) -> int:
        del flags
        try:
            self._sock.settimeout(self._left())
            return self._received(self._sock.recv_into(targets[0]))
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from error
