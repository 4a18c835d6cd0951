"""The admin socket's messages: bytes of each, what is refused, and that docs/protocol.md says what the code does."""

from __future__ import annotations

import inspect
import re
import struct
from collections import Counter
from typing import Any, get_args

import msgspec
import msgspec.inspect as kinds
import pytest

from kvtier.protocol import admin as a
from kvtier.protocol.messages import ClientMessage, ServerMessage
from kvtier.protocol.wire import HEADER_BYTES, MAGIC, ProtocolError, Receiver, pack
from tests.docs.test_protocol import TEXT, bounds, rows_under, tables
from tests.protocol import plain_msgpack
from tests.protocol.conversing import Listener, frame, receiver_of_client, receiver_of_server
from tests.protocol.test_messages import KIND_OF_TYPE, KIND_OF_VALUE, VALUES, bounded

SPACE = bytes(range(16))
DIGESTS = bytes(range(64))
REQUESTS: list[Any] = [
    a.Greet([1], "kvtier 0.9"),
    a.AskHealth(1),
    a.AskStatus(2, "team-ü"),
    a.AskNamespaces(3, "a"),
    a.AskBlocks(4, 1000, "a", "disk", SPACE),
    a.AskFlush(5, 600_000, "a", "disk"),
    a.AskDrop(6, "a"),
    a.AskVerify(7, True, "a", "host"),  # noqa: FBT003
    a.AskDecisions(8, "chat-7", "a"),
]
ANSWERS: list[Any] = [
    a.Greeted(1, "kvtier 0.9", 4711),
    a.Health(1, False, "draining", "it was told to stop", 12.5),  # noqa: FBT003
    a.StatusPart(2, "a", b'{"name": "a"}'),
    a.NamespaceRow(3, "a", "host", SPACE, 7, 7 << 20),
    a.BlockRows(4, "a", "disk", SPACE, DIGESTS, [1 << 20, 1 << 20]),
    a.Flushed(5, "a", "disk", 3, 12),
    a.Dropped(6, "a", 12, 2),
    a.Damage(7, "a", "host", SPACE + DIGESTS[:32], "its bytes are others"),
    a.Verified(7, "a", "host", 12, 12 << 20, 1, ""),
    a.Integrity(7, "", "two blocks name one slot"),
    a.Progress(7, 12),
    a.Ended(7, True),  # noqa: FBT003
    a.DecisionRow(8, "a", "unix client 3", 12.5, "admitted", 30, ["host"], [12], "absent", "", 0.0, 0.0),
    a.Failed(0, "version", "this kvtier-server speaks version 2"),
]
NAMED = [pytest.param(message, id=type(message).__name__) for message in REQUESTS + ANSWERS]


def receiver_of(message: Any) -> Receiver[Any]:
    side = a.AdminRequest if type(message) in get_args(a.AdminRequest) else a.AdminAnswer
    return Receiver[Any](side, max_payload_bytes=1 << 20)


def array_of(message: Any) -> list[Any]:
    array: list[Any] = plain_msgpack.read(frame(message)[HEADER_BYTES:])
    return array


def frame_of_array(array: Any) -> bytes:
    body = msgspec.msgpack.encode(array)
    return struct.pack("<4sII", MAGIC, len(body), 0) + body


def test_there_is_one_of_every_type_and_no_number_is_used_twice() -> None:
    assert [type(message) for message in REQUESTS] == list(get_args(a.AdminRequest))
    assert [type(message) for message in ANSWERS] == list(get_args(a.AdminAnswer))
    numbers = Counter(
        kind.__struct_config__.tag
        for side in (a.AdminRequest, a.AdminAnswer, ClientMessage, ServerMessage)
        for kind in set(get_args(side)) - ({a.Failed} if side is a.AdminAnswer else set())
    )
    assert set(numbers.values()) == {1}


@pytest.mark.parametrize("message", NAMED)
def test_each_is_read_as_it_was(message: Any) -> None:
    listener = Listener(receiver_of(message))
    listener.hear(frame(message))
    assert listener.told == [message]
    assert array_of(message)[0] == type(message).__struct_config__.tag


@pytest.mark.parametrize("message", NAMED)
def test_another_number_of_fields_or_another_type_is_no_message(message: Any) -> None:
    array = array_of(message)
    info = kinds.type_info(type(message))
    assert isinstance(info, kinds.StructType)
    required = 1 + sum(field.required for field in info.fields)
    wrong = [[*array, 1], array[: required - 1], [255, *array[1:]], {1: 1}, 7, None]
    for place, field in enumerate(info.fields, 1):
        wanted = KIND_OF_TYPE.get(type(field.type))
        for value in VALUES:
            kind = KIND_OF_VALUE[type(value)]
            if kind not in (wanted, "float", "int") or (kind == "float" and wanted == "int"):
                wrong.append([*array[:place], value, *array[place + 1 :]])
    for each in wrong:
        with pytest.raises(ProtocolError):
            Listener(receiver_of(message)).hear(frame_of_array(each))


@pytest.mark.bug("SE11")
@pytest.mark.parametrize("message", NAMED)
def test_every_field_is_of_a_type_with_a_bound(message: Any) -> None:
    info = kinds.type_info(type(message))
    assert isinstance(info, kinds.StructType)
    assert all(bounded(field.type) for field in info.fields)


@pytest.mark.parametrize("message", NAMED)
def test_none_carries_a_payload_nor_is_one_of_the_engines(message: Any) -> None:
    with pytest.raises(ProtocolError):
        pack(message, 1)
    receivers: list[Receiver[Any]] = [receiver_of_client()]
    if not isinstance(message, a.Failed):
        receivers.append(receiver_of_server())
    for receiver in receivers:
        with pytest.raises(ProtocolError):
            Listener(receiver).hear(frame(message))


def test_lists_that_do_not_agree_are_no_message() -> None:
    for wrong in (
        [164, 1, "a", "disk", SPACE, DIGESTS, [1]],
        [164, 1, "a", "disk", SPACE, DIGESTS[:-1], [1, 2]],
        [163, 1, "a", "disk", SPACE[:3], 1, 1],
    ):
        with pytest.raises(ProtocolError):
            Listener(receiver_of(ANSWERS[0])).hear(frame_of_array(wrong))
    with pytest.raises(ProtocolError, match="an operator"):
        Listener(receiver_of(REQUESTS[0])).hear(frame_of_array([132, 1, 10, "", "", SPACE[:3]]))


def test_the_longest_request_is_within_its_cap() -> None:
    wide = "\U0001f600" * 64
    for message in (a.Greet([2**31 - 1] * 16, wide), a.AskBlocks(2**53 - 1, 2**53 - 1, wide, wide, SPACE)):
        assert len(frame(message)) - HEADER_BYTES <= a.MAX_ADMIN_BYTES


# ---- docs/protocol.md ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "side"), [("What an operator says", a.AdminRequest), ("What the daemon answers", a.AdminAnswer)]
)
def test_every_message_has_its_row_with_number_fields_and_types(title: str, side: Any) -> None:
    documented = [(row[0], row[1], row[2]) for row in rows_under(title) if row[0] != "number"]
    assert documented == [row for row in tables(side) if row[1] != "`Failed`"]


def test_every_request_names_its_answers() -> None:
    known = {kind.__name__ for kind in get_args(a.AdminAnswer)}
    for row in rows_under("What an operator says"):
        if row[0] != "number":
            docstring = inspect.getdoc(getattr(a, row[1].strip("`"))) or ""
            told = re.findall(r"\b[A-Z]\w+", docstring.partition("nswered by")[2])
            assert re.findall(r"`(\w+)`", row[3]) == [word for word in told if word in known], row


def test_types_that_only_these_have_are_there_with_their_bounds() -> None:
    common = {row[0].strip("`") for row in rows_under("Messages")}
    used = {
        kind.__annotations__[name]
        for side in (a.AdminRequest, a.AdminAnswer)
        for kind in get_args(side)
        for name in kind.__struct_fields__
    }
    documented = {row[0].strip("`"): (row[1], row[2]) for row in rows_under("The admin socket") if row[0] != "type"}
    assert set(documented) == used - common
    for name, cells in documented.items():
        kind = kinds.type_info(getattr(a, name))
        if name == "Seconds":
            assert cells == ("float", "0 or more")
        elif name == "RowDigests":
            assert cells == ("bin", f"at most {kind.max_length} bytes: {kind.max_length // 32} digests")  # type: ignore[attr-defined]
        elif name in ("SomeNamespace", "SomeKey"):
            assert cells == ("bin", f"{kind.max_length} bytes, or none")  # type: ignore[attr-defined]
        else:
            assert cells == bounds("", kind), name


def test_the_version_is_named() -> None:
    assert f"admin messages' **version {a.ADMIN_VERSIONS[-1]}**" in TEXT
