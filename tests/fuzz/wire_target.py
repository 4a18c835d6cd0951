"""What holds for any bytes that come on a connection: `make fuzz` draws them by coverage, the tests at random.

Whatever came is messages or one ProtocolError, the same ones in whatever pieces it came; every byte read is accounted
for; nothing is allocated beyond the caps.
"""

from __future__ import annotations

from typing import Any

from kvtier.protocol.messages import ClientMessage, ServerMessage
from kvtier.protocol.wire import BUFFER_BYTES, Message, PayloadEnd, ProtocolError, Receiver, pack

MAX_MESSAGE = 1 << 17
MAX_PAYLOAD = 1 << 17


def hear(receiver: Receiver[Any], data: bytes, piece_bytes: int, *, skip: bool) -> list[tuple[str, bytes]]:
    """What a receiver tells of the data in pieces of this length, messages as they would be said again."""
    told: list[tuple[str, bytes]] = []
    target = bytearray()
    left = memoryview(data)
    try:
        while left:
            room = receiver.buffer()
            assert 0 < len(room) <= max(BUFFER_BYTES, MAX_MESSAGE, MAX_PAYLOAD)
            nbytes = min(len(room), len(left), piece_bytes)
            room[:nbytes] = left[:nbytes]
            left = left[nbytes:]
            receiver.received(nbytes)
            while (event := receiver.next_event()) is not None:
                if isinstance(event, PayloadEnd):
                    told.append(("payload", bytes(target)))
                    continue
                assert isinstance(event, Message)
                told.append(("message", pack(event.message)))
                if event.payload_bytes:
                    assert event.payload_bytes <= MAX_PAYLOAD
                    target = bytearray(0 if skip else event.payload_bytes)
                    if skip:
                        receiver.skip_payload()
                    else:
                        receiver.take_payload([memoryview(target)[:1], memoryview(target)[1:]])
            assert len(told) <= 2 * len(data)
    except ProtocolError as error:
        told.append(("error", str(error).encode()))
    return told


def check(data: bytes) -> None:
    """The first byte says which side hears it and in which pieces; the others are what it hears."""
    if not data:
        return
    how, stream = data[0], data[1:]
    side = ServerMessage if how & 1 else ClientMessage
    skip = bool(how & 2)

    def receiver() -> Receiver[Any]:
        return Receiver(side, max_message_bytes=MAX_MESSAGE, max_payload_bytes=MAX_PAYLOAD if how & 4 else 0)

    told = hear(receiver(), stream, len(stream), skip=skip)
    assert told == hear(receiver(), stream, 1 + (how >> 3), skip=skip)
    for kind, said in told:
        if kind == "message":
            # What was understood can be said, and is then understood as the same.
            assert hear(receiver(), said, len(said), skip=False) == [(kind, said)]
