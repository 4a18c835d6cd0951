"""A connection on the loop: bytes to a session and back, and every bound on how long and how much."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.clock import Clock
from kvtier.errors import ProtocolError
from kvtier.protocol.messages import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    ClientMessage,
    Failed,
    FailureCode,
    ServerMessage,
    Welcome,
)
from kvtier.protocol.wire import Message, PayloadEnd, Receiver, pack
from kvtier.server.output import Output, PlainOutput, TlsOutput
from kvtier.server.peers import Peer, note_connect
from kvtier.server.session import Session

if TYPE_CHECKING:
    from kvtier.server.hub import Hub

__all__ = ["Connection"]

logger = logging.getLogger("kvtier.server")

MESSAGES_A_TURN = 64
"""That one connection is answered before others have their turn."""
TURN_S = 0.002
"""That one connection is answered before others have their turn, however few messages those were."""
TURN_BYTES = 4 << 20
"""Of a payload that is read at once before others have their turn."""
LOW_WATER_BYTES = 1 << 20
"""Of a payload that must have come, or all that is left of it, before the loop hears of it: one turn of the loop takes
as long as a hundred KiB."""
MAX_WAITING_BYTES = 1 << 20
"""Of answers that a peer has not read: until it does, nothing more is read from it. What comes of requests that were
read before is bounded by the credits."""
LINGER_S = 1.0
"""For which what still comes from a peer that is being turned away is thrown away, so that it can read why."""
SILENT_S = 1.0
"""After which a connection that has said nothing yet gives its place to another that needs it."""
MIN_PAYLOAD_RATE = 1 << 20
"""Bytes a second; a payload that comes slower ends the connection, `client_timeout_s` later than it would else."""


class Connection(asyncio.BufferedProtocol):
    """One peer's bytes, both ways. Loop's thread; a message is handled as it comes, without a task of its own.

    Bounds: a first message within `client_timeout_s` of the connect, and what is begun finished within it; what is sent
    must go on being read. The daemon asks `sweep` about once a second.
    """

    def __init__(
        self,
        hub: Hub,
        sock: socket.socket,
        peer: Peer,
        clock: Clock,
        on_end: Callable[[Connection], None],
    ) -> None:
        """sock: the transport's, which owns it. peer: without what TLS will say. on_end: called once."""
        self.peer = peer
        self._hub = hub
        self._sock = sock
        self._clock = clock
        self._on_end = on_end
        self._timeout_s: float = hub.settings.client_timeout_s
        self._receiver: Receiver[ClientMessage] = Receiver(
            ClientMessage, max_message_bytes=MAX_HELLO_BYTES, max_payload_bytes=0
        )
        self._began_at = clock.now()
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._output: Output | None = None
        self._was_welcome = False
        self._is_plain = False
        self._in_payload = False
        """And not of TLS."""
        self._low_water = 1
        self._corked: list[bytes] | None = None
        """Answers of this turn, sent together at its end."""
        self._is_held = False
        """Nothing is read, for answers wait to be read."""
        self._deaf_since: float | None = None
        self._closing: str | None = None
        """Why it ends, once it does."""
        self._scratch: bytearray | None = None
        self._deadline: float | None = clock.now() + self._timeout_s
        """For what the peer has begun: its first message, a frame, or its end."""

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        loop = asyncio.get_running_loop()
        if transport.get_extra_info("ssl_object") is None:
            self._is_plain = True
            self._output = PlainOutput(self._sock, loop, self._clock, self._drained, self._broken)
        else:
            self._output = TlsOutput(transport, self._clock, self._drained, self._broken)
            self.peer = replace(self.peer, certificate_name=_common_name(transport.get_extra_info("peercert")))
        self._session = Session(self._hub, self.peer, self._send, self._close)
        if self._closing is not None:  # given up while TLS was being agreed on
            transport.abort()

    def get_buffer(self, _sizehint: int) -> memoryview | bytearray:
        return self._receiver.buffer() if self._scratch is None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._scratch is None:
            self._receiver.received(nbytes)
            self._work()

    def eof_received(self) -> bool:
        """False: the transport closes. Who has said Bye has nothing more to hear either."""
        return False

    def pause_writing(self) -> None:
        if isinstance(self._output, TlsOutput):
            self._output.pause()

    def resume_writing(self) -> None:
        if isinstance(self._output, TlsOutput):
            self._output.resume()

    def connection_lost(self, error: Exception | None) -> None:
        self._scratch = self._scratch or bytearray(1)
        self._receiver.close()  # it may have a slot's memory
        if self._output is not None:
            self._output.close()
        if self._session is not None:
            self._session.end(clean=False)
        why = self._closing or ("the peer closed it" if error is None else str(error))
        logger.debug("%s: connection over: %s", self.peer.holder, why)
        self._on_end(self)

    # ---- what the daemon calls

    @property
    def session(self) -> Session | None:
        return self._session

    @property
    def is_silent(self) -> bool:
        """Whether it has been here for a while and not said whose it is."""
        return not self._was_welcome and self._closing is None and self._clock.now() - self._began_at >= SILENT_S

    @property
    def has_backlog(self) -> bool:
        """Whether something was said that the peer has not taken yet."""
        return self._output is not None and self._output.backlog_bytes > 0

    def sweep(self) -> None:
        """End it where it has taken too long over something."""
        now = self._clock.now()
        if self._transport is None or self._output is None or self._session is None:
            return
        if self._closing is not None:
            if self._deadline is not None and now >= self._deadline:
                self._transport.abort()
            return
        process = self.peer.process
        if process is not None and self._session.is_mapped and process.is_dead():
            self._abort("its process has ended, and another, which nobody watches, has the connection")
        elif self._deaf_since is not None and now - self._deaf_since >= LINGER_S:
            self._abort("the peer hears nothing")
        elif self._output.standstill_s >= self._timeout_s:
            self._abort(f"the peer read nothing for daemon.client_timeout_s = {self._timeout_s:g} s")
        elif self._deadline is not None and now >= self._deadline and not self._is_held:
            late = "no message came" if not self._session.has_hello else "the rest of a message did not come"
            self._session.fail(
                FailureCode.PROTOCOL, f"{late} within daemon.client_timeout_s = {self._timeout_s:g} s; connect again"
            )

    def abort(self, why: str) -> None:
        """End it at once, saying nothing."""
        self._abort(why)

    # ---- what the session calls

    def _send(self, message: ServerMessage, payload: Sequence[memoryview], fd: int | None) -> None:
        output, session = self._output, self._session
        if output is None:
            return
        kind = type(message)
        if kind is Welcome or kind is Failed:
            self._note_outcome(message)
        if fd is None and not payload:
            if self._corked is None:
                output.send(pack(message))
            else:
                self._corked.append(pack(message))
            return
        if self._corked:
            output.put(b"".join(self._corked))
            self._corked.clear()
        output.put(pack(message, sum(view.nbytes for view in payload)), fd)
        for view in payload[:-1]:
            output.put(view)
        if payload:
            assert session is not None
            output.put(payload[-1], None, session.payload_sent)
        if self._corked is None:
            output.flush()

    def _close(self, why: str) -> None:
        """Once what was sent is out."""
        self._closing = why
        self._deadline = self._clock.now() + LINGER_S
        self._set_low_water()
        self._receiver.close()
        self._scratch = bytearray(1 << 12)
        if self._output is not None and not self._output.backlog_bytes and self._corked is None:
            self._finish()

    # ---- inside

    def _work(self) -> None:
        """Handle what has come, a bounded part of it at a time."""
        session, output, transport = self._session, self._output, self._transport
        assert session is not None
        assert output is not None
        assert transport is not None
        corked = self._corked = []
        payload_bytes, more = -1, False
        try:
            payload_bytes, more = self._handle_turn(session)
        except ProtocolError as error:
            session.fail(FailureCode.PROTOCOL, str(error))
        except Exception:  # one connection's end, and no other's
            logger.exception("%s: a message could not be handled; its connection ends", self.peer.holder)
            session.fail(FailureCode.FAILED, "the server could not handle a message; its log says more")
        finally:
            self._corked = None
        self._set_low_water()
        if corked:
            output.send(b"".join(corked) if len(corked) > 1 else corked[0])
        else:
            output.flush()
        if self._closing is not None:
            if not output.backlog_bytes:
                self._finish()
            return
        if self._was_welcome and (self._deadline is not None or self._receiver.within_frame):
            self._note_progress(payload_bytes)
        if output.backlog_bytes > MAX_WAITING_BYTES:
            self._hold(transport)
        elif more:
            self._hold(transport)
            asyncio.get_running_loop().call_soon(self._resume)

    def _handle_turn(self, session: Session) -> tuple[int, bool]:
        """Bytes that follow what was handled last, -1 where nothing new has come whole; whether there may be more."""
        payload_bytes = -1
        receiver = self._receiver
        begun_at = 0.0
        for number in range(MESSAGES_A_TURN):
            if number == 1:  # one alone costs no look at the clock
                begun_at = self._clock.now()
            elif number and self._clock.now() - begun_at >= TURN_S:
                return payload_bytes, True
            event = receiver.next_event()
            if event is None and self._in_payload:
                event = self._read_on(receiver)
            if event is None:
                return payload_bytes, False
            if isinstance(event, PayloadEnd):
                payload_bytes = 0
                self._in_payload = False
                if not event.skipped:
                    session.payload_end()
            else:
                message, payload_bytes = event
                targets = session.handle(message, payload_bytes)
                if payload_bytes and self._closing is None:
                    self._in_payload = self._is_plain
                    if targets is None:
                        receiver.skip_payload()
                    else:
                        receiver.take_payload(targets)
            if self._closing is not None:
                return payload_bytes, False
        return payload_bytes, True

    def _read_on(self, receiver: Receiver[ClientMessage]) -> Message[ClientMessage] | PayloadEnd | None:
        """Read more of a payload than the loop's one call did, as long as it comes: a turn of the loop takes as long as
        a hundred KiB. What is wrong with the socket, or its end, the loop finds itself."""
        left = TURN_BYTES
        while left > 0:
            try:
                nbytes = self._sock.recv_into(receiver.buffer())
            except OSError:
                return None
            if not nbytes:
                return None
            receiver.received(nbytes)
            left -= nbytes
            event = receiver.next_event()
            if event is not None:
                return event
        return None

    def _set_low_water(self) -> None:
        """What must have come before the system wakes the loop. An end does in any case; so does a Unix socket."""
        in_payload = self._in_payload and self._closing is None and self.peer.kind == "tcp"
        wanted = max(1, min(self._receiver.payload_bytes_left, LOW_WATER_BYTES)) if in_payload else 1
        if wanted != self._low_water:
            self._low_water = wanted
            with suppress(OSError):  # the loop finds what is wrong with it
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _note_progress(self, payload_bytes: int) -> None:
        """payload_bytes: that follow what was handled last; -1: nothing new has come whole."""
        if not self._receiver.within_frame:
            self._deadline = None
        elif payload_bytes >= 0 or self._deadline is None:
            self._deadline = self._clock.now() + self._timeout_s + max(0, payload_bytes) / MIN_PAYLOAD_RATE

    def _hold(self, transport: asyncio.Transport) -> None:
        if not self._is_held:
            self._is_held = True
            transport.pause_reading()

    def _resume(self) -> None:
        if not self._is_held or self._closing is not None or self._transport is None or self._transport.is_closing():
            return
        self._is_held = False
        if self._deadline is not None:  # the time in which nothing was read is not the peer's
            self._deadline = max(self._deadline, self._clock.now() + self._timeout_s)
        self._transport.resume_reading()
        self._work()

    def _drained(self) -> None:
        if self._closing is not None:
            self._finish()
        else:
            self._resume()

    def _broken(self, error: OSError) -> None:
        """The peer hears nothing any more. Where its slots depend on it, what it said before it went is listened to:
        the last may be Bye."""
        if self._closing is None and self._session is not None and self._session.is_mapped:
            self._deaf_since = self._clock.now()
            self._resume()
        else:
            self._abort(str(error))

    def _abort(self, why: str) -> None:
        self._closing = self._closing or why
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        """All is out: say so, and give the peer a moment to read it."""
        assert self._transport is not None
        if self._transport.get_extra_info("ssl_object") is not None:
            self._transport.close()
            return
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._transport.abort()
            return
        if self._is_held:
            self._transport.resume_reading()

    def _note_outcome(self, message: ServerMessage) -> None:
        if isinstance(message, Welcome):
            self._receiver.max_message_bytes = MAX_MESSAGE_BYTES
            self._receiver.max_payload_bytes = 0 if message.mapping_bytes else message.max_payload_bytes
            self._was_welcome = True
            note_connect(self.peer, message.tenant, "welcome")
        elif isinstance(message, Failed) and message.id == 0 and not self._was_welcome:
            note_connect(self.peer, "", message.code)


def _common_name(certificate: object) -> str | None:
    """The subject's common name, of a certificate that was verified; None where there is none, or several."""
    if not isinstance(certificate, dict):
        return None
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else None
