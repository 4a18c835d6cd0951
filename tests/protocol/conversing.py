"""A receiver fed with bytes, as a connection does it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from kvtier.protocol.messages import ClientMessage, ServerMessage
from kvtier.protocol.wire import Message, PayloadEnd, Receiver, pack

MAX_PAYLOAD = 1 << 20


def receiver_of_client(max_payload_bytes: int = MAX_PAYLOAD, **caps: int) -> Receiver[ClientMessage]:
    return Receiver[ClientMessage](ClientMessage, max_payload_bytes=max_payload_bytes, **caps)


def receiver_of_server(max_payload_bytes: int = MAX_PAYLOAD, **caps: int) -> Receiver[ServerMessage]:
    return Receiver[ServerMessage](ServerMessage, max_payload_bytes=max_payload_bytes, **caps)


def frame(message: Any, payload: bytes = b"") -> bytes:
    return pack(message, len(payload)) + payload


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    """The stream in pieces that begin at these places."""
    edges = [0, *sorted(places), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


class Listener:
    """Reads what a receiver is given, and notes what it tells. A payload goes into two targets, or is skipped."""

    def __init__(self, receiver: Receiver[Any], *, skip: bool = False) -> None:
        self.receiver = receiver
        self.told: list[Any] = []
        """Messages, and for each payload its bytes, or None if skipped."""
        self._skip = skip
        self._targets: list[bytearray] = []

    def hear(self, piece: bytes) -> None:
        left = memoryview(piece)
        while left:
            buffer = self.receiver.buffer()
            nbytes = min(len(buffer), len(left))
            buffer[:nbytes] = left[:nbytes]
            left = left[nbytes:]
            self.receiver.received(nbytes)
            self.drain()

    def drain(self) -> None:
        while (event := self.receiver.next_event()) is not None:
            if isinstance(event, PayloadEnd):
                assert event.skipped is self._skip
                self.told.append(None if self._skip else b"".join(self._targets))
                continue
            assert isinstance(event, Message)
            self.told.append(event.message)
            if event.payload_bytes and self._skip:
                self.receiver.skip_payload()
            elif event.payload_bytes:
                half = event.payload_bytes // 2
                self._targets = [bytearray(half), bytearray(event.payload_bytes - half)]
                self.receiver.take_payload([memoryview(target) for target in self._targets])
