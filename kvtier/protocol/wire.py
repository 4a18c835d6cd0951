"""Messages and blocks as bytes on a connection, both ways. Sans-I/O: bytes in, events out, for any socket or loop.

A frame, integers little-endian:

    offset  bytes  field
         0      4  magic "KVT1"
         4      4  bytes of the message, 1 at least
         8      4  bytes of the payload, 0 for most
        12      .  the message, msgpack (`messages`)
         .      .  the payload: blocks one behind the other, without padding

Lengths are checked against caps as soon as a header is whole, before anything is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from kvtier.errors import KVTierError, ProtocolError
from kvtier.protocol.messages import MAX_MESSAGE_BYTES, ClientMessage, Commit, ServerMessage, Staged

__all__ = [
    "BUFFER_BYTES",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_PAYLOAD_BYTES",
    "CallOrderError",
    "Message",
    "PayloadEnd",
    "ProtocolError",
    "Receiver",
    "pack",
]

MAGIC = b"KVT1"
HEADER_BYTES = 12
MAX_PAYLOAD_BYTES = (1 << 32) - 1
"""Of one frame: what its header can say."""
BUFFER_BYTES = 1 << 16
"""What a receiver reads into while no payload is under way: the most of a payload that is ever copied once more."""

M = TypeVar("M")

_HEADER = struct.Struct("<4sII")
_ENCODER = msgspec.msgpack.Encoder()
_CARRIERS = (Commit, Staged)
_SIDES = {ClientMessage: "a client", ServerMessage: "a server"}

assert _HEADER.size == HEADER_BYTES


def pack(message: msgspec.Struct, payload_bytes: int = 0) -> bytes:
    """Header and message; `payload_bytes` bytes must follow it on the connection.

    Raises ProtocolError for what no receiver would take: a message over the format's cap, a payload of one that
    carries none.
    """
    body = _ENCODER.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes, and a message has at most {MAX_MESSAGE_BYTES}: say it "
            "in several"
        )
    if payload_bytes and not (isinstance(message, _CARRIERS) and 0 < payload_bytes <= MAX_PAYLOAD_BYTES):
        raise ProtocolError(
            f"{type(message).__name__} with a payload of {payload_bytes} bytes: only Commit and Staged carry one, of "
            f"at most {MAX_PAYLOAD_BYTES}"
        )
    return _HEADER.pack(MAGIC, len(body), payload_bytes) + body


class CallOrderError(KVTierError, RuntimeError):
    """A Receiver was used in another order than its own: a mistake on this side, whatever came from the other."""


class Message(NamedTuple, Generic[M]):
    """A message has come, and `payload_bytes` bytes follow it: take_payload or skip_payload comes next unless 0."""

    message: M
    payload_bytes: int


class PayloadEnd(NamedTuple):
    """The payload of the last message is where it was to go, or was thrown away if `skipped`."""

    skipped: bool


class Receiver(Generic[M]):
    """What the other side says, from bytes in any pieces: `Receiver[ClientMessage](ClientMessage, ...)`.

    Read into `buffer()`, say how much came with `received()`, then call `next_event()` until it returns None. None of
    it blocks; one thread at a time. Caps may be changed as a connection is trusted with more, from the next header on.
    Anything that is no frame raises ProtocolError, and so does every later call: the connection is of no use any more.

    Memory: BUFFER_BYTES, or as much as the message under way, which is within `max_message_bytes`. Payload goes
    straight to the targets, but for what was read together with its message.
    """

    def __init__(
        self, message_type: Any, *, max_message_bytes: int = MAX_MESSAGE_BYTES, max_payload_bytes: int
    ) -> None:
        self.max_message_bytes: int = max_message_bytes
        self.max_payload_bytes: int = max_payload_bytes
        """Of one frame; 0: none may carry any."""
        self._decoder: Any = msgspec.msgpack.Decoder(message_type)
        self._expected = _SIDES.get(message_type, "an operator")
        self._memory: memoryview = memoryview(bytearray(BUFFER_BYTES))
        # What was read and not yet used is memory[start:end].
        self._start = 0
        self._end = 0
        self._message_bytes = 0
        """Of the frame whose header was taken; 0 between frames."""
        self._payload_bytes = 0
        """Of that frame, and then of its payload what has not come yet."""
        self._undecided = False
        """A message with payload was told; where its payload goes was not."""
        self._in_payload = False
        self._skipping = False
        self._targets: list[memoryview] = []
        """What is still to be filled, the last first."""
        self._offered = 0
        """Bytes that received() may claim."""
        self._dead: ProtocolError | None = None

    @property
    def within_frame(self) -> bool:
        """Whether a frame was begun that has not come whole: an end of the connection here cuts it short."""
        return self._end > self._start or self._message_bytes > 0 or self._undecided or self._in_payload

    @property
    def payload_bytes_left(self) -> int:
        """Of the payload under way, those that have not come."""
        return self._payload_bytes

    def buffer(self) -> memoryview:
        """Where the next bytes go, never empty: room of the receiver's own, or within a payload the target itself.

        Only after next_event() returned None. Valid until the next call of any other method.
        """
        if self._dead is not None:
            self._check_alive()
        # A view of its own, which whoever gets it may release.
        room = self._targets[-1][:] if self._targets else self._memory[self._end : self._read_to()]
        if self._undecided or not room:
            raise CallOrderError("nothing to read: next_event() has more to tell, or take_payload() was not called")
        self._offered = len(room)
        return room

    def received(self, nbytes: int) -> None:
        """The first `nbytes` bytes of buffer() were filled."""
        if self._dead is not None:
            self._check_alive()
        if not 0 <= nbytes <= self._offered:
            raise CallOrderError(f"{nbytes} bytes received into a buffer of {self._offered}")
        self._offered = 0
        if not self._in_payload:
            self._end += nbytes
        elif self._skipping:
            self._payload_bytes -= nbytes
        else:
            self._payload_bytes -= nbytes
            self._fill(nbytes)

    def next_event(self) -> Message[M] | PayloadEnd | None:
        """What came next; None: more bytes are needed. Raises ProtocolError for what is no frame."""
        if self._dead is not None:
            self._check_alive()
        self._offered = 0
        if self._undecided:
            raise CallOrderError("take_payload() or skip_payload() comes before the next event")
        if self._in_payload:
            return self._end_of_payload()
        if self._message_bytes == 0:
            if self._start == self._end:
                self._start = self._end = 0
                return None
            if not self._take_header():
                return None
        if self._end - self._start < self._message_bytes:
            return None
        return self._take_message()

    def take_payload(self, targets: Sequence[memoryview]) -> None:
        """Fill these, in their order, with the payload of the message that was just told; PayloadEnd is the event once
        they are full. Their bytes must add up to it. They are kept until then, or until close()."""
        self._check_alive()
        if not self._undecided:
            raise CallOrderError("take_payload() without a message whose payload follows")
        views = [target.cast("B") for target in targets if target.nbytes]
        nbytes = sum(view.nbytes for view in views)
        if nbytes != self._payload_bytes:
            raise CallOrderError(f"targets of {nbytes} bytes for a payload of {self._payload_bytes}")
        self._undecided = False
        self._in_payload = True
        self._offered = 0
        self._targets = views[::-1]
        while self._targets and self._start < self._end:
            target = self._targets[-1]
            nbytes = min(len(target), self._end - self._start)
            target[:nbytes] = self._memory[self._start : self._start + nbytes]
            self._use_of_payload(nbytes)
            self._fill(nbytes)

    def skip_payload(self) -> None:
        """Throw away the payload of the message that was just told, or what is still to come of one under way."""
        self._check_alive()
        if not self._undecided and not self._in_payload:
            raise CallOrderError("skip_payload() without a payload")
        self._undecided = False
        self._in_payload = True
        self._skipping = True
        self._targets = []
        self._offered = 0
        self._use_of_payload(min(self._payload_bytes, self._end - self._start))

    def close(self) -> None:
        """Forget targets and what was read; every later call but this one raises ProtocolError."""
        self._die(ProtocolError("the connection was closed"))

    def _check_alive(self) -> None:
        if self._dead is not None:
            # A new one each time: a traceback would grow on one that is raised again and again.
            raise ProtocolError(str(self._dead))

    def _die(self, error: ProtocolError) -> ProtocolError:
        if self._dead is None:
            self._dead = error
        self._targets = []
        self._memory = memoryview(b"")
        self._start = self._end = self._offered = 0
        return error

    def _fill(self, nbytes: int) -> None:
        target = self._targets.pop()
        if nbytes < len(target):
            self._targets.append(target[nbytes:])

    def _use_of_payload(self, nbytes: int) -> None:
        """So much of the payload was read together with its message."""
        self._start += nbytes
        self._payload_bytes -= nbytes
        if self._start == self._end:
            self._start = self._end = 0

    def _read_to(self) -> int:
        """How far of the own memory may be filled: what lies behind a long message, or one with a payload, is not read
        together with it, so that it need not be copied."""
        if self._in_payload:
            # What is skipped is read over and over into the same memory.
            return min(self._payload_bytes, len(self._memory))
        whole = self._start + self._message_bytes
        if self._message_bytes and (self._payload_bytes or whole > BUFFER_BYTES):
            return whole
        return len(self._memory)

    def _end_of_payload(self) -> PayloadEnd | None:
        if self._payload_bytes:
            return None
        event = PayloadEnd(self._skipping)
        self._in_payload = self._skipping = False
        return event

    def _take_header(self) -> bool:
        nbytes = self._end - self._start
        if nbytes < HEADER_BYTES:
            if nbytes >= len(MAGIC):  # nobody who does not begin with it is waited for
                self._check_magic(bytes(self._memory[self._start : self._start + len(MAGIC)]))
            self._make_room(len(self._memory))
            return False
        magic, message_bytes, payload_bytes = _HEADER.unpack_from(self._memory, self._start)
        self._check_magic(magic)
        if not 1 <= message_bytes <= self.max_message_bytes:
            raise self._die(
                ProtocolError(f"a header of a message of {message_bytes} bytes; 1 to {self.max_message_bytes} may come")
            )
        if payload_bytes > self.max_payload_bytes:
            may = f"at most {self.max_payload_bytes} may come" if self.max_payload_bytes else "none may come here"
            raise self._die(ProtocolError(f"a header of a payload of {payload_bytes} bytes; {may}"))
        self._start += HEADER_BYTES
        self._message_bytes = message_bytes
        self._payload_bytes = payload_bytes
        if self._start + message_bytes > len(self._memory):
            self._make_room(message_bytes)
        return True

    def _check_magic(self, magic: bytes) -> None:
        if magic != MAGIC:
            raise self._die(ProtocolError(_told(magic)))

    def _make_room(self, nbytes: int) -> None:
        """Room in the own memory for `nbytes` from `start` on: what was read moves to its beginning if need be."""
        if self._start + nbytes <= len(self._memory):
            return
        unused = self._memory[self._start : self._end]
        memory = memoryview(bytearray(nbytes)) if nbytes > len(self._memory) else self._memory
        memory[: len(unused)] = unused
        self._memory = memory
        self._end -= self._start
        self._start = 0

    def _take_message(self) -> Message[M]:
        after = self._start + self._message_bytes
        try:
            message: M = self._decoder.decode(self._memory[self._start : after])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._die(ProtocolError(f"no message of {self._expected}'s: {error}")) from None
        self._start = after
        self._message_bytes = 0
        if self._payload_bytes == 0 and len(self._memory) == BUFFER_BYTES:
            return Message(message, 0)
        if self._payload_bytes and not isinstance(message, _CARRIERS):
            name = type(message).__name__
            raise self._die(ProtocolError(f"{name} with a payload of {self._payload_bytes} bytes; it carries none"))
        self._undecided = self._payload_bytes > 0
        if after == self._end and len(self._memory) > BUFFER_BYTES:
            # A long message's memory is not kept: a thousand idle connections would have a GiB.
            self._memory = memoryview(bytearray(BUFFER_BYTES))
            self._start = self._end = 0
        return Message(message, self._payload_bytes)


_OTHERS: Final = (
    (b"HTTP", "an HTTP answer"),
    (b"GET ", "an HTTP request"),
    (b"HEAD", "an HTTP request"),
    (b"POST", "an HTTP request"),
    (b"PUT ", "an HTTP request"),
    (b"DELE", "an HTTP request"),
    (b"OPTI", "an HTTP request"),
    (b"PATC", "an HTTP request"),
    (b"CONN", "an HTTP request"),
    (b"TRAC", "an HTTP request"),
    (b"PRI ", "an HTTP/2 request"),
    (b"\x16\x03", "TLS, where this side expects none"),
    (b"\x15\x03", "a TLS alert, where this side expects no TLS"),
    (b"SSH-", "SSH"),
    (b"*", "a Redis command"),
    (b"-ERR", "a Redis error"),
    (b"KVT", "another version of this framing"),
    *((bytes((0x80, version)), "a Python pickle, which nothing here reads") for version in range(2, 6)),
)


def _told(head: bytes) -> str:
    """What probably came, by its first bytes."""
    guess = next((f"probably {name}" for begin, name in _OTHERS if head.startswith(begin)), "no frame of kvtier's")
    return f"the bytes {head!r} came where a frame begins with {MAGIC!r}: {guess}"
