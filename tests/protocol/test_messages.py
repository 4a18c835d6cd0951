"""Every message's bytes are pinned, and what is not exactly a message is refused, field by field."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import msgspec.inspect as kinds
import pytest
from hypothesis import given

from kvtier.protocol import messages as m
from kvtier.protocol.fields import check_outcomes
from kvtier.protocol.wire import HEADER_BYTES, MAGIC, ProtocolError, Receiver
from tests.protocol import plain_msgpack
from tests.protocol.conversing import Listener, frame, receiver_of_client, receiver_of_server
from tests.protocol.examples import (
    BOTH,
    CLIENT,
    FIRST,
    NAMESPACE,
    SERVER,
    client_messages,
    golden_frames,
    server_messages,
)

CLIENT_TYPES = get_args(m.ClientMessage)
SERVER_TYPES = get_args(m.ServerMessage)
EXAMPLES = [(message, receiver_of_client) for message, _ in CLIENT] + [
    (message, receiver_of_server) for message, _ in SERVER
]
SINGLE = [pytest.param(message, receiver, id=type(message).__name__) for message, receiver in EXAMPLES]

# A value of every type that msgpack has, and of some that only look like one.
VALUES = [None, True, False, 0, 1, -1, 1.0, "", "1", b"", b"1", [], [1], [None], ["x"], [[1]], {}, {"a": 1}, {1: 1}]
KIND_OF_VALUE = {
    type(None): "nil",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    bytes: "bytes",
    list: "array",
    dict: "map",
}
KIND_OF_TYPE = {
    kinds.IntType: "int",
    kinds.BoolType: "bool",
    kinds.StrType: "str",
    kinds.BytesType: "bytes",
    kinds.ListType: "array",
    kinds.DictType: "map",
}


def frame_of_array(array: Any) -> bytes:
    body = msgspec.msgpack.encode(array)
    return struct.pack("<4sII", MAGIC, len(body), 0) + body


def array_of(message: Any) -> list[Any]:
    array: list[Any] = plain_msgpack.read(frame(message)[HEADER_BYTES:])
    return array


def is_refused(receiver: Receiver[Any], data: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        Listener(receiver).hear(data)
    return str(caught.value)


def fields_of(message: Any) -> Iterator[tuple[int, kinds.Field]]:
    """Place in the array and type of each field."""
    info = kinds.type_info(type(message))
    assert isinstance(info, kinds.StructType)
    yield from enumerate(info.fields, 1)


def test_frames_are_those_that_clients_in_other_languages_send_and_expect() -> None:
    packed = [(type(message).__name__, frame(message, payload)) for message, payload in CLIENT + SERVER]
    assert packed == golden_frames()


def test_every_type_of_message_is_pinned() -> None:
    assert {name for name, _ in golden_frames()} == {kind.__name__ for kind in CLIENT_TYPES + SERVER_TYPES}
    assert len({kind.__struct_config__.tag for kind in CLIENT_TYPES + SERVER_TYPES}) == len(CLIENT_TYPES + SERVER_TYPES)


@pytest.mark.parametrize(("side", "receiver"), [(CLIENT, receiver_of_client), (SERVER, receiver_of_server)])
def test_pinned_frames_are_read_as_what_they_were(side: list[tuple[Any, bytes]], receiver: Any) -> None:
    names = {type(message).__name__ for message, _ in side}
    listener = Listener(receiver())
    for name, data in golden_frames():
        if name in names:
            listener.hear(data)
    assert listener.told == [told for message, payload in side for told in (message, *([payload] if payload else []))]


def test_a_reader_made_from_msgpack_s_specification_finds_type_and_fields_in_their_order() -> None:
    for message, payload in CLIENT + SERVER:
        data = frame(message, payload)
        magic, message_bytes, payload_bytes = struct.unpack_from("<4sII", data)
        assert (magic, payload_bytes, HEADER_BYTES + message_bytes + len(payload)) == (MAGIC, len(payload), len(data))
        array = plain_msgpack.read(data[HEADER_BYTES : HEADER_BYTES + message_bytes])
        assert array == [
            type(message).__struct_config__.tag,
            *(getattr(message, name) for name in message.__struct_fields__),
        ]


@given(client_messages)
def test_whatever_a_client_says_is_read_as_it_was(message: Any) -> None:
    listener = Listener(receiver_of_client())
    listener.hear(frame(message))
    assert listener.told == [message]


@given(server_messages)
def test_whatever_the_server_says_is_read_as_it_was(message: Any) -> None:
    listener = Listener(receiver_of_server())
    listener.hear(frame(message))
    assert listener.told == [message]


@pytest.mark.parametrize(("message", "receiver"), SINGLE)
def test_a_field_too_few_is_no_message(message: Any, receiver: Any) -> None:
    array = array_of(message)
    required = 1 + sum(field.required for _, field in fields_of(message))
    for length in range(len(array)):
        if length < required:
            is_refused(receiver(), frame_of_array(array[:length]))
        else:  # fields with a default are the last, and may be left out
            Listener(receiver()).hear(frame_of_array(array[:length]))


@pytest.mark.parametrize(("message", "receiver"), SINGLE)
def test_a_field_too_many_is_no_message(message: Any, receiver: Any) -> None:
    for more in VALUES:
        is_refused(receiver(), frame_of_array([*array_of(message), more]))


@pytest.mark.parametrize(("message", "receiver"), SINGLE)
def test_a_field_of_another_type_is_no_message(message: Any, receiver: Any) -> None:
    for at, field in fields_of(message):
        for value in VALUES:
            array = array_of(message)
            array[at] = value
            if KIND_OF_VALUE[type(value)] != KIND_OF_TYPE[type(field.type)]:
                assert "no message" in is_refused(receiver(), frame_of_array(array))


def beyond(kind: kinds.Type) -> Iterator[Any]:
    """Values right outside of a type's bounds."""
    if isinstance(kind, kinds.IntType):
        yield from [] if kind.le is None else [kind.le + 1]
        yield from [] if kind.lt is None else [kind.lt]
        assert kind.ge is not None
        yield kind.ge - 1
    elif isinstance(kind, kinds.StrType):
        assert kind.max_length is not None
        yield "x" * (kind.max_length + 1)
    elif isinstance(kind, kinds.BytesType):
        assert kind.max_length is not None
        yield bytes(kind.max_length + 1)
        yield from [bytes(kind.min_length - 1)] if kind.min_length else []
    elif isinstance(kind, kinds.ListType):
        assert kind.max_length is not None
        yield [1] * (kind.max_length + 1)
        yield from [[]] if kind.min_length else []
        yield from ([value] for value in beyond(kind.item_type))
    elif isinstance(kind, kinds.DictType):
        assert kind.max_length is not None
        yield {str(number): number for number in range(kind.max_length + 1)}
        yield {"x": {str(number): number for number in range(kind.max_length + 1)}}
        yield {"x": "x" * 1025}
        yield {"x" * 1025: 1}
        yield {"x": {"y": {"z": 1}}}
        yield {"x": [1]}
        yield {"x": None}
    else:
        assert isinstance(kind, kinds.BoolType)


@pytest.mark.parametrize(("message", "receiver"), SINGLE)
def test_a_field_out_of_its_bounds_is_no_message(message: Any, receiver: Any) -> None:
    for at, field in fields_of(message):
        for value in beyond(field.type):
            array = array_of(message)
            array[at] = value
            is_refused(receiver(), frame_of_array(array))


@pytest.mark.parametrize(
    "array",
    [
        pytest.param([3, 1, NAMESPACE, BOTH[:-1], ""], id="lookup of part of a digest"),
        pytest.param([4, 1, NAMESPACE, 1, BOTH, FIRST, 0], id="reserve with a parent too few"),
        pytest.param([4, 1, NAMESPACE, 1, BOTH[:-1], BOTH[:-1], 0], id="reserve of part of a digest"),
        pytest.param([5, 1, [1, 2], [1]], id="commit with a checksum too few"),
        pytest.param([7, 1, NAMESPACE, 1, BOTH, FIRST[:-1], 0, False, ""], id="stage after part of a digest"),
        pytest.param([7, 1, NAMESPACE, 1, BOTH[1:], b"", 0, False, ""], id="stage of part of a digest"),
        pytest.param([10, 1, NAMESPACE, BOTH[1:]], id="remove of part of a digest"),
        pytest.param([11, NAMESPACE, BOTH[1:], b""], id="touch of part of a digest"),
        pytest.param([11, NAMESPACE, BOTH, b"x"], id="touch after part of a digest"),
        pytest.param([12, 1, NAMESPACE, BOTH[1:], "disk", 0], id="wait for part of a digest"),
        pytest.param([18, 1, NAMESPACE, 1, [1], BOTH, BOTH, [1], 0], id="publish with a name too many"),
        pytest.param([18, 1, NAMESPACE, 1, [1], BOTH, BOTH, [1, 1], 0], id="publish with a slot too few"),
        pytest.param([18, 1, NAMESPACE, 1, [1, 2], FIRST, BOTH, [1, 1], 0], id="publish with a digest too few"),
        pytest.param([18, 1, NAMESPACE, 1, [1, 2], BOTH, FIRST, [1, 1], 0], id="publish with a parent too few"),
        pytest.param([18, 1, NAMESPACE, 1, [1, 2], BOTH, BOTH, [1], 0], id="publish with a checksum too few"),
        pytest.param([18, 1, NAMESPACE, 1, [1], BOTH[:-1], BOTH[:-1], [1], 0], id="publish of part of a digest"),
    ],
)
def test_what_does_not_agree_with_itself_is_no_message_of_a_client(array: list[Any]) -> None:
    assert "no message" in is_refused(receiver_of_client(), frame_of_array(array))


@pytest.mark.parametrize(
    "array",
    [
        pytest.param([68, 1, b"\0\0", [1], [0]], id="reserved with a reservation too few"),
        pytest.param([68, 1, b"\0", [1], []], id="reserved with an offset too few"),
        pytest.param([68, 1, b"\4", [], []], id="reserved with an unknown outcome"),
        pytest.param([69, 1, b"\2"], id="committed with an unknown outcome"),
        pytest.param([70, 1, b"\0", [1], [0], []], id="staged with a checksum too few"),
        pytest.param([70, 1, b"\0", [1], [], [1]], id="staged with an offset too few"),
        pytest.param([70, 1, b"\0\0", [1], [0], [1, 1]], id="staged with a lease too few"),
        pytest.param([70, 1, b"\7", [], [], []], id="staged with an unknown outcome"),
        pytest.param([73, 1, b"\3"], id="durable with an unknown outcome"),
        pytest.param([76, 1, [1, 2], [0]], id="granted with an offset too few"),
        pytest.param([77, 1, b"\5"], id="published with an unknown outcome"),
    ],
)
def test_what_does_not_agree_with_itself_is_no_message_of_the_server(array: list[Any]) -> None:
    assert "no message" in is_refused(receiver_of_server(), frame_of_array(array))


def test_who_makes_a_message_that_does_not_agree_with_itself_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"reservations.*1.*checksums.*2"):
        m.Commit(1, [1], [1, 2])
    with pytest.raises(ValueError, match="outcome 9: 6 is the last"):
        check_outcomes(b"\1\11", m.StageOutcome.FULL)


@pytest.mark.parametrize("number", [0, 19, 63, 78, 127, 128, 2**31])
def test_an_unknown_type_is_no_message(number: int) -> None:
    for receiver in (receiver_of_client(), receiver_of_server()):
        assert str(number) in is_refused(receiver, frame_of_array([number, 1]))


def test_what_the_other_side_says_is_no_message_from_this_one() -> None:
    assert "no message of a client's" in is_refused(receiver_of_client(), frame(m.Pong(1)))
    assert "no message of a server's" in is_refused(receiver_of_server(), frame(m.Ping(1)))


@pytest.mark.parametrize("value", [*VALUES, [None], ["1", 1], [2.0, 1], [True, 1], [[2], 1]])
def test_what_is_no_array_that_begins_with_a_number_is_no_message(value: Any) -> None:
    if value != [1]:  # Hello without its fields
        is_refused(receiver_of_client(), frame_of_array(value))
    is_refused(receiver_of_server(), frame_of_array(value))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",  # the one byte that msgpack does not use
        b"\x92\x02\x01\x01",  # a Ping, and one byte more
        b"\x92\x02",  # half of one
        b"\x95\x01\x00\x91\x01\xa2\xff\xfe\xa0\xc2",  # text that is not UTF-8
        b"\x92\x02\xd6\xff\0\0\0\0",  # a timestamp
        b"\x92\x02\xc7\x00\x01",  # an extension
        b"\x91" * 60_000,  # an array in an array, and so on
        b"\x81\x01" * 30_000,
    ],
)
def test_bytes_that_are_no_msgpack_of_ours_are_no_message(body: bytes) -> None:
    is_refused(receiver_of_client(), struct.pack("<4sII", MAGIC, len(body), 0) + body)


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\x02\x07",
        b"\xdc\x00\x02\xcc\x02\xcd\x00\x07",
        b"\xdd\x00\x00\x00\x02\xce\x00\x00\x00\x02\xcf" + bytes(7) + b"\x07",
        b"\x92\xd0\x02\xd3" + bytes(7) + b"\x07",
    ],
)
def test_any_of_msgpack_s_encodings_of_a_value_will_do(body: bytes) -> None:
    listener = Listener(receiver_of_client())
    listener.hear(struct.pack("<4sII", MAGIC, len(body), 0) + body)
    assert listener.told == [m.Ping(7)]


def bounded(kind: kinds.Type) -> bool:
    if isinstance(kind, kinds.ListType):
        return kind.max_length is not None and bounded(kind.item_type)
    if isinstance(kind, kinds.DictType):
        return kind.max_length is not None and bounded(kind.key_type) and bounded(kind.value_type)
    if isinstance(kind, kinds.UnionType):
        return all(bounded(member) for member in kind.types)
    if isinstance(kind, kinds.StrType | kinds.BytesType):
        return kind.max_length is not None
    return isinstance(kind, kinds.IntType | kinds.FloatType | kinds.BoolType)


@pytest.mark.bug("SE11")
@pytest.mark.parametrize(("message", "receiver"), SINGLE)
def test_every_field_is_of_a_type_with_a_bound(message: Any, receiver: Any) -> None:
    assert all(bounded(field.type) for _, field in fields_of(message))


def test_the_longest_messages_are_within_the_cap() -> None:
    most = bytes(32 * m.MAX_LOOKUP_BLOCKS)
    few = bytes(32 * m.MAX_BLOCKS)
    numbers = [2**63 - 1] * m.MAX_BLOCKS
    listener = Listener(receiver_of_client())
    said = [
        m.Lookup(1, NAMESPACE, most, "\U0001f600" * 64),
        m.Touch(NAMESPACE, most, FIRST),
        m.Reserve(1, NAMESPACE, 1, few, few),
        m.Commit(1, numbers, numbers),
        m.Publish(1, NAMESPACE, 1, numbers, few, few, numbers),
    ]
    for message in said:
        listener.hear(frame(message))
    assert listener.told == said


def test_the_longest_hello_is_within_its_cap() -> None:
    hello = m.Hello(1, [2**31 - 1] * 16, "\U0001f600" * 64, "\U0001f600" * 512, wants_mapping=True)
    listener = Listener(receiver_of_client(max_message_bytes=m.MAX_HELLO_BYTES))
    listener.hear(frame(hello))
    assert listener.told == [hello]


@pytest.mark.bug("SE05")
def test_a_token_does_not_show() -> None:
    hello = m.Hello(1, [1], "kvtier", "s3cret", wants_mapping=False)
    assert "s3cret" not in repr(hello)
    assert "s3cret" not in f"{hello} {[hello]}"
    array = array_of(hello)
    for wrong in ([*array, 1], array[:-1], [*array[:-1], "s3cret"], [*array[:4], ["s3cret"], False], [2, "s3cret"]):
        assert "s3cret" not in is_refused(receiver_of_client(), frame_of_array(wrong))
