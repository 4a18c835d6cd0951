"""Frames in any pieces are the same events; what is no frame is a ProtocolError, and costs nothing."""

from __future__ import annotations

import base64
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.protocol import messages as m
from kvtier.protocol.wire import (
    BUFFER_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    CallOrderError,
    PayloadEnd,
    ProtocolError,
    pack,
)
from tests.protocol.conversing import MAX_PAYLOAD, Listener, cut, frame, receiver_of_client, receiver_of_server
from tests.protocol.examples import NAMESPACE, client_messages, golden_frames, server_messages

LONG = m.Lookup(1, NAMESPACE, bytes(range(256)) * 2048)
"""Half a MiB: eight times the receiver's own memory."""


def header(message_bytes: int, payload_bytes: int = 0) -> bytes:
    return struct.pack("<4sII", MAGIC, message_bytes, payload_bytes)


def commit(payload: bytes) -> bytes:
    return frame(m.Commit(1, [1], [1]), payload)


@contextmanager
def allocating_at_most(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= nbytes


# ---- any pieces ------------------------------------------------------------------------------------------------------

said_by_client = st.one_of(
    client_messages.map(lambda message: (message, b"")),
    st.just((LONG, b"")),
    st.tuples(
        st.just(m.Commit(1, [1], [1])),
        st.one_of(
            st.binary(max_size=200),
            st.integers(1, 3 * BUFFER_BYTES).map(lambda length: (bytes(range(251)) * (length // 251 + 1))[:length]),
        ),
    ),
)


@given(st.lists(said_by_client, max_size=6), st.data(), st.booleans())
def test_any_pieces_are_the_same_events(said: list[tuple[Any, bytes]], data: st.DataObject, skip: bool) -> None:
    stream = b"".join(frame(message, payload) for message, payload in said)
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    listener = Listener(receiver_of_client(), skip=skip)
    for piece in cut(stream, places):
        listener.hear(piece)
    expected: list[Any] = []
    for message, payload in said:
        expected += [message, *([None if skip else payload] if payload else [])]
    assert listener.told == expected
    assert not listener.receiver.within_frame


@given(server_messages, st.binary(max_size=40))
def test_a_byte_at_a_time_is_the_same_events(message: Any, payload: bytes) -> None:
    staged = m.Staged(1, b"\0", [], [], [1])
    stream = frame(message) + frame(staged, payload) + frame(message)
    whole, by_bytes = Listener(receiver_of_server()), Listener(receiver_of_server())
    whole.hear(stream)
    for at in range(len(stream)):
        by_bytes.hear(stream[at : at + 1])
    assert whole.told == by_bytes.told == [message, staged, *([payload] if payload else []), message]


def test_within_a_frame_until_its_last_byte() -> None:
    listener = Listener(receiver_of_client())
    stream = commit(b"payload")
    assert not listener.receiver.within_frame
    for at in range(len(stream)):
        listener.hear(stream[at : at + 1])
        assert listener.receiver.within_frame == (at < len(stream) - 1)


# ---- payload ---------------------------------------------------------------------------------------------------------


def test_payload_is_read_straight_into_its_targets() -> None:
    receiver = receiver_of_client()
    own = receiver.buffer().nbytes
    assert own == BUFFER_BYTES
    payload = bytes(range(256)) * 1024
    stream = memoryview(commit(payload))
    receiver.buffer()[:] = stream[:own]
    receiver.received(own)
    event = receiver.next_event()
    assert event is not None
    assert not isinstance(event, PayloadEnd)
    assert event.payload_bytes == len(payload)
    targets = [bytearray(100_000), bytearray(0), bytearray(len(payload) - 100_000)]
    receiver.take_payload([memoryview(target) for target in targets])
    # What came with the message was copied once; from here on the socket writes where the blocks belong.
    came = own - (len(stream) - len(payload))
    at = own
    for target, done in ((targets[0], came), (targets[2], 0)):
        assert receiver.next_event() is None
        with receiver.buffer() as room:
            assert room.obj is target
            assert room.nbytes == len(target) - done
            room[:] = stream[at : at + len(room)]
            at += len(room)
            left = len(room)
        receiver.received(left)
    assert at == len(stream)
    assert receiver.next_event() == PayloadEnd(skipped=False)
    assert b"".join(targets) == payload


def test_a_header_and_a_message_that_came_alone_leave_nothing_to_be_copied() -> None:
    receiver = receiver_of_client()
    stream = commit(bytes(1000))
    for piece in (stream[:HEADER_BYTES], stream[HEADER_BYTES:-1000]):
        room = receiver.buffer()
        room[: len(piece)] = piece
        receiver.received(len(piece))
        event = receiver.next_event()
        if event is None:
            # Its payload is known to follow: no more than the message is read.
            assert receiver.buffer().nbytes == len(stream) - 1000 - HEADER_BYTES
    target = bytearray(1000)
    receiver.take_payload([memoryview(target)])
    assert receiver.next_event() is None
    with receiver.buffer() as room:
        assert room.obj is target


def test_targets_may_be_of_any_type_and_shape() -> None:
    receiver = receiver_of_client()
    room = receiver.buffer()
    stream = commit(bytes(range(64)))
    room[: len(stream)] = stream
    receiver.received(len(stream))
    receiver.next_event()
    target = bytearray(64)
    receiver.take_payload([memoryview(target).cast("Q")])
    assert receiver.next_event() == PayloadEnd(skipped=False)
    assert target == bytes(range(64))


def test_a_payload_under_way_may_be_skipped_and_writes_no_more() -> None:
    receiver = receiver_of_client()
    payload = b"x" * 300_000
    stream = memoryview(commit(payload) + frame(m.Ping(2)))
    room = receiver.buffer()
    room[:] = stream[: len(room)]
    receiver.received(len(room))
    receiver.next_event()
    target = bytearray(len(payload))
    receiver.take_payload([memoryview(target)])
    filled = target.count(b"x")
    assert 0 < filled < len(payload)
    receiver.skip_payload()
    at, told = BUFFER_BYTES, []
    while at < len(stream):
        assert receiver.buffer().nbytes <= BUFFER_BYTES
        room = receiver.buffer()
        nbytes = min(len(room), len(stream) - at)
        room[:nbytes] = stream[at : at + nbytes]
        receiver.received(nbytes)
        at += nbytes
        told += list(iter(receiver.next_event, None))
    assert told == [PayloadEnd(skipped=True), (m.Ping(2), 0)]
    assert target.count(b"x") == filled


def test_a_closed_receiver_lets_go_of_its_targets() -> None:
    receiver = receiver_of_client()
    stream = commit(bytes(100))[:-50]
    receiver.buffer()[: len(stream)] = stream
    receiver.received(len(stream))
    receiver.next_event()
    target = bytearray(100)
    receiver.take_payload([memoryview(target)])
    receiver.close()
    target.append(0)  # a BufferError if any view of it were left
    with pytest.raises(ProtocolError, match="closed"):
        receiver.buffer()
    receiver.close()


def test_calls_out_of_order_are_refused() -> None:
    receiver = receiver_of_client()
    with pytest.raises(CallOrderError):
        receiver.received(1)
    with pytest.raises(CallOrderError):
        receiver.take_payload([])
    with pytest.raises(CallOrderError):
        receiver.skip_payload()
    room = receiver.buffer()
    with pytest.raises(CallOrderError):
        receiver.received(len(room) + 1)
    with pytest.raises(CallOrderError):
        receiver.received(-1)
    stream = commit(b"12345")
    room[: len(stream)] = stream
    receiver.received(len(stream))
    receiver.next_event()
    with pytest.raises(CallOrderError, match="before the next event"):
        receiver.next_event()
    with pytest.raises(CallOrderError):
        receiver.buffer()
    with pytest.raises(CallOrderError, match="4 bytes for a payload of 5"):
        receiver.take_payload([memoryview(bytearray(4))])
    receiver.take_payload([memoryview(bytearray(5))])
    with pytest.raises(CallOrderError):
        receiver.buffer()
    assert receiver.next_event() == PayloadEnd(skipped=False)
    assert receiver.next_event() is None
    full = receiver.buffer()
    full[:] = frame(m.Ping(1)) * (len(full) // len(frame(m.Ping(1)))) + bytes(len(full) % len(frame(m.Ping(1))))
    receiver.received(len(full))
    with pytest.raises(CallOrderError, match="next_event"):
        receiver.buffer()


# ---- caps ------------------------------------------------------------------------------------------------------------


@pytest.mark.bug("SE11")
@pytest.mark.parametrize("message_bytes", [0, (1 << 20) + 1, 1 << 30, (1 << 31) + 5, (1 << 32) - 1])
def test_a_message_over_the_cap_is_refused_by_its_header_alone(message_bytes: int) -> None:
    listener = Listener(receiver_of_client())
    with allocating_at_most(20_000), pytest.raises(ProtocolError, match=f"message of {message_bytes} bytes"):
        listener.hear(header(message_bytes))


@pytest.mark.bug("SE11")
def test_a_payload_over_the_cap_is_refused_by_its_header_alone() -> None:
    for receiver, text in ((receiver_of_server(), "at most"), (receiver_of_server(0), "none may come")):
        with allocating_at_most(20_000), pytest.raises(ProtocolError, match=f"payload of 1048577 bytes; {text}"):
            Listener(receiver).hear(header(10, MAX_PAYLOAD + 1))


@pytest.mark.bug("SE11")
@pytest.mark.parametrize(
    "body",
    [
        b"\x94\x05\x01\xdd\xff\xff\xff\xff",  # Commit of 2^32 - 1 reservations
        b"\x93\x06\x01\xdc\xff\xff",
        b"\x96\x01\x01\xdd\xff\xff\xff\xff",  # Hello of as many versions
        b"\x95\x03\x01\xc6\xff\xff\xff\xff",  # Lookup in a namespace of 4 GiB
        b"\x95\x03\x01\xc4\x10" + bytes(16) + b"\xc6\x7f\xff\xff\xff",
        b"\x96\x01\x01\x91\x01\xdb\xff\xff\xff\xff",  # Hello of software with a name of 4 GiB
        b"\xdd\xff\xff\xff\xff\x02\x01",
    ],
)
def test_a_length_within_a_message_allocates_nothing(body: bytes) -> None:
    listener = Listener(receiver_of_client())
    with allocating_at_most(20_000), pytest.raises(ProtocolError):
        listener.hear(header(len(body)) + body)


@pytest.mark.bug("SE11")
@pytest.mark.parametrize(
    "body",
    [
        b"\x9c\x40\x00\x01\xa0\xa0\x00\xc2\x00\x01\x00\x00\xdd\xff\xff\xff\xff",  # Welcome of as many tiers
        b"\x93\x4b\x01\xdf\xff\xff\xff\xff",
        b"\x93\x4b\x01\x81\xa1x\xdf\xff\xff\xff\xff",
        b"\x96\x46\x01\xc4\x00\x90\x90\xdd\xff\xff\xff\xff",
    ],
)
def test_a_length_within_an_answer_allocates_nothing(body: bytes) -> None:
    listener = Listener(receiver_of_server())
    with allocating_at_most(20_000), pytest.raises(ProtocolError):
        listener.hear(header(len(body)) + body)


def test_a_long_message_s_memory_comes_and_goes() -> None:
    listener = Listener(receiver_of_client())
    stream = frame(LONG)
    for _ in range(3):
        listener.hear(stream[:-1])
        assert listener.receiver.buffer().nbytes == 1  # nothing behind a long message is read with it
        listener.hear(stream[-1:])
        assert listener.receiver.buffer().nbytes == BUFFER_BYTES
    with allocating_at_most(2 * len(stream) + 200_000):
        for _ in range(20):
            listener.told.clear()
            listener.hear(stream)


def test_skipping_a_gibibyte_takes_no_memory() -> None:
    receiver = receiver_of_client(MAX_PAYLOAD_BYTES)
    stream = pack(m.Commit(1, [1], [1]), 1 << 30)
    receiver.buffer()[: len(stream)] = stream
    receiver.received(len(stream))
    receiver.next_event()
    with allocating_at_most(20_000):
        receiver.skip_payload()
        left = 1 << 30
        while left:
            assert receiver.next_event() is None
            room = receiver.buffer().nbytes
            receiver.received(room)
            left -= room
        assert receiver.next_event() == PayloadEnd(skipped=True)


def test_caps_may_be_raised_when_a_connection_is_trusted() -> None:
    receiver = receiver_of_client(0, max_message_bytes=m.MAX_HELLO_BYTES)
    listener = Listener(receiver)
    listener.hear(frame(m.Hello(1, [1], "a client", "", wants_mapping=False)))
    receiver.max_message_bytes = m.MAX_MESSAGE_BYTES
    receiver.max_payload_bytes = 100
    listener.hear(frame(LONG) + commit(bytes(100)))
    with pytest.raises(ProtocolError, match="payload of 101 bytes; at most 100"):
        listener.hear(commit(bytes(101)))
    early = Listener(receiver_of_client(0, max_message_bytes=m.MAX_HELLO_BYTES))
    with pytest.raises(ProtocolError, match=r"message of \d+ bytes; 1 to 4096"):
        early.hear(frame(LONG))


@pytest.mark.parametrize("message", [m.Ping(1), m.Stats(1), m.Abort(1, [1])])
def test_a_payload_of_a_message_that_has_none_is_refused(message: Any) -> None:
    data = frame(message)
    body = data[HEADER_BYTES:]
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} with a payload of 1 bytes"):
        Listener(receiver_of_client()).hear(header(len(body), 1) + body + b"x")
    with pytest.raises(ProtocolError, match="only Commit and Staged"):
        pack(message, 1)


def test_what_no_receiver_would_take_is_not_packed() -> None:
    with pytest.raises(ProtocolError, match="at most 1048576"):
        pack(m.Lookup(1, NAMESPACE, bytes(1 << 20)))
    for payload_bytes in (-1, 1 << 32):
        with pytest.raises(ProtocolError, match="payload"):
            pack(m.Commit(1, [1], [1]), payload_bytes)


# ---- what is no frame ------------------------------------------------------------------------------------------------

OTHERS = [
    (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "an HTTP request"),
    (b"POST / HTTP/1.1\r\n\r\n", "an HTTP request"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "an HTTP/2 request"),
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP answer"),
    (bytes.fromhex("16030100c8010000c40303"), "TLS"),
    (bytes.fromhex("15030300020228"), "a TLS alert"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
    (b"*1\r\n$4\r\nPING\r\n", "a Redis command"),
    (b"KVT2" + bytes(8), "another version of this framing"),
    (bytes.fromhex("800495050000000000000043010a942e"), "a Python pickle"),
    (b"\x00\x00\x00\x00", "no frame of kvtier's"),
]


@pytest.mark.bug("US05", "SE01")
@pytest.mark.parametrize(("data", "text"), OTHERS)
def test_another_protocol_is_named(data: bytes, text: str) -> None:
    for receiver in (receiver_of_client(), receiver_of_server()):
        listener = Listener(receiver)
        listener.hear(data[:1])
        listener.hear(data[1:3])
        with pytest.raises(ProtocolError, match=text):
            listener.hear(data[3:4])  # it may be that no more will come
        with pytest.raises(ProtocolError, match=text):
            listener.hear(data[4:] or b"x")


@pytest.mark.bug("SE01")
def test_a_pickle_in_a_field_is_bytes_or_no_message() -> None:
    # What pickle.dumps gives for an object whose reduction opens a file; never loaded, here as little as there.
    attack = base64.b64decode("gASVKQAAAAAAAACMAmlvlIwEb3BlbpSTlIwJL3RtcC9mb3VuZJSMAXeUhpRSlC4=")
    assert attack.startswith(b"\x80\x04")
    with pytest.raises(ProtocolError, match="no message"):
        Listener(receiver_of_client()).hear(header(len(attack)) + attack)
    listener = Listener(receiver_of_client())
    listener.hear(commit(attack) + frame(m.Lookup(1, attack[:16], attack[:32])))
    assert listener.told[1:] == [attack, m.Lookup(1, attack[:16], attack[:32])]


def test_a_receiver_that_met_an_error_stays_dead() -> None:
    receiver = receiver_of_client()
    with pytest.raises(ProtocolError, match="HTTP"):
        Listener(receiver).hear(b"GET / HTTP/1.1\r\n\r\n")
    for call in (receiver.buffer, receiver.next_event, receiver.skip_payload, lambda: receiver.received(0)):
        with pytest.raises(ProtocolError, match="HTTP"):
            call()


@pytest.mark.bug("US05")
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_bytes_at_random_are_a_protocol_error_or_not_enough(data: bytes, places: list[int]) -> None:
    for receiver in (receiver_of_client(), receiver_of_server()):
        listener = Listener(receiver)
        with suppress(ProtocolError):
            for piece in cut(data, [place for place in places if place <= len(data)]):
                listener.hear(piece)


@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_as_a_message_are_one_or_a_protocol_error(body: bytes) -> None:
    for receiver in (receiver_of_client(), receiver_of_server()):
        listener = Listener(receiver)
        with suppress(ProtocolError):
            listener.hear(header(len(body)) + body)
            assert len(listener.told) == 1


@given(st.sampled_from(golden_frames()), st.data())
def test_frames_with_bytes_changed_are_messages_or_a_protocol_error(
    golden: tuple[str, bytes], data: st.DataObject
) -> None:
    changed = bytearray(golden[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        if data.draw(st.booleans()):
            changed[at] = data.draw(st.integers(0, 255))
        else:
            changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
            changed = changed or bytearray(1)
    for receiver in (receiver_of_client(1 << 16), receiver_of_server(1 << 16)):
        with suppress(ProtocolError):
            Listener(receiver).hear(bytes(changed))


@given(st.sampled_from(golden_frames()), st.data())
def test_a_frame_cut_short_tells_nothing_too_early(golden: tuple[str, bytes], data: st.DataObject) -> None:
    name, whole = golden
    listener = Listener(receiver_of_client() if name in CLIENT_NAMES else receiver_of_server())
    listener.hear(whole[: data.draw(st.integers(1, len(whole) - 1))])
    assert listener.receiver.within_frame
    assert len(listener.told) <= 1  # a message whose payload is not whole


CLIENT_NAMES = {kind.__name__ for kind in m.ClientMessage.__args__}
