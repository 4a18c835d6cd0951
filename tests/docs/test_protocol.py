"""docs/protocol.md says of every message, field, bound, outcome and code what the code does, and its example is one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec.inspect as kinds
import pytest

from kvtier.frame import payload_checksum
from kvtier.protocol import fields, messages, outcomes
from kvtier.protocol.messages import ClientMessage, ServerMessage
from kvtier.protocol.wire import HEADER_BYTES, MAGIC, Message, PayloadEnd, Receiver, pack
from tests.protocol import plain_msgpack

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def rows_under(title: str) -> list[list[str]]:
    """Cells of the table rows in the section of this title, without heads and rules."""
    (section,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    rows = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [row for row in rows if not row[0].startswith("--")]


def field_text(kind: Any, name: str) -> str:
    """A field as the doc has it: its type by its name in `fields`, and its default."""
    default = inspect.signature(kind).parameters[name].default
    written = kind.__annotations__[name]
    return f"`{name}`: {written}" + ("" if default is inspect.Parameter.empty else f" = {default!r}".replace("'", '"'))


def tables(*sides: Any) -> list[tuple[str, str, str]]:
    return [
        (
            str(kind.__struct_config__.tag),
            f"`{kind.__name__}`",
            ", ".join(field_text(kind, name) for name in kind.__struct_fields__),
        )
        for side in sides
        for kind in get_args(side)
    ]


@pytest.mark.parametrize(
    ("title", "side"), [("What a client says", ClientMessage), ("What the server says", ServerMessage)]
)
def test_every_message_has_its_row_with_number_fields_and_types(title: str, side: Any) -> None:
    documented = [(row[0], row[1], row[2]) for row in rows_under(title) if row[0] != "number"]
    assert documented == tables(side)


def test_every_message_of_a_client_names_its_answer_or_none() -> None:
    known = {kind.__name__ for kind in get_args(ServerMessage)}
    for row in rows_under("What a client says"):
        if row[0] == "number":
            continue
        answer = row[3]
        docstring = inspect.getdoc(getattr(messages, row[1].strip("`"))) or ""
        named = set(re.findall(r"`(\w+)`", answer)) & known
        if not named:
            assert answer == "none"
            assert row[1] == "`Bye`" or "nswer" in docstring
        elif row[1] != "`Hello`":
            assert re.findall(r"Answered by (\w+)", docstring) == list(named)


def power(number: int) -> str:
    """A bound as people write it."""
    for bits in range(16, 65):
        if number == 1 << bits:
            return f"2^{bits}"
        if number == (1 << bits) - 1:
            return f"2^{bits} - 1"
    return str(number)


def numbers(kind: kinds.IntType) -> str:
    most = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else (1 << 64) - 1
    assert kind.ge is not None
    return f"{kind.ge} to {power(most)}"


def count(least: int | None, most: int | None) -> str:
    assert most is not None
    return f"{least} to {most}" if least else f"at most {most}"


def bounds(name: str, kind: kinds.Type) -> tuple[str, str]:
    """msgpack's type, and what the row must say of bounds."""
    if isinstance(kind, kinds.IntType):
        return "int", numbers(kind)
    if isinstance(kind, kinds.StrType):
        return "str", f"at most {kind.max_length} characters"
    if isinstance(kind, kinds.BytesType):
        if name == "Parent":
            return "bin", f"{kind.max_length} bytes, or none"
        if kind.min_length == kind.max_length:
            return "bin", f"{kind.max_length} bytes"
        text = f"{count(kind.min_length, kind.max_length)} bytes"
        assert kind.max_length is not None
        return "bin", text + (f": 1 to {kind.max_length // 32} digests" if kind.min_length else "")
    if isinstance(kind, kinds.ListType):
        inner, each = bounds("", kind.item_type)
        each = each if inner == "int" else f"of {each}"
        return f"array of {inner}", f"{count(kind.min_length, kind.max_length)}, each {each}"
    assert isinstance(kind, kinds.DictType)
    return "map", f"at most {kind.max_length} names"


def test_every_type_has_its_row_with_its_bounds() -> None:
    used = {
        kind.__annotations__[name]
        for side in (ClientMessage, ServerMessage)
        for kind in get_args(side)
        for name in kind.__struct_fields__
    }
    documented = {row[0].strip("`"): row[1:] for row in rows_under("Messages") if row[0] != "type"}
    assert used | {"Handle", "Checksum"} == set(documented)
    for name, (msgpack, text) in documented.items():
        if name == "bool":
            continue
        assert (msgpack, text[: len(bounds(name, kind_of(name))[1])]) == bounds(name, kind_of(name)), name
        assert name == "NamedCounts" or text == bounds(name, kind_of(name))[1]


def kind_of(name: str) -> kinds.Type:
    return kinds.type_info(getattr(fields, name))


@pytest.mark.parametrize(
    ("title", "head", "of"),
    [
        ("Storing", "`Reserved.outcomes`", outcomes.ReserveOutcome),
        ("Storing", "`Committed.outcomes`", outcomes.CommitOutcome),
        ("Storing from granted slots", "`Published.outcomes`", outcomes.PublishOutcome),
        ("Fetching", "`Staged.outcomes`", outcomes.StageOutcome),
        ("The other requests", "`Durable.lost`", outcomes.DurableOutcome),
    ],
)
def test_every_outcome_has_its_row(title: str, head: str, of: type) -> None:
    rows = rows_under(title)
    begin = [row[0] for row in rows].index(head) + 1
    table = []
    for row in rows[begin:]:
        if not row[0].isdigit():
            break
        table.append((row[1], int(row[0])))
    assert table == [(name, value) for name, value in vars(of).items() if name.isupper()]


def test_every_failure_code_has_its_row_and_says_whether_it_ends_the_connection() -> None:
    source = inspect.getsource(outcomes.FailureCode)
    ends = {
        code: "The connection ends" in docstring
        for code, docstring in re.findall(r'^    [A-Z]+ = "(\w+)"\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    }
    assert set(ends) == {value for name, value in vars(outcomes.FailureCode).items() if name.isupper()}
    rows = {row[0].strip("`"): row[1] == "yes" for row in rows_under("Requests") if row[0] != "code"}
    assert rows == ends


def test_the_caps_of_a_frame_are_named() -> None:
    (row,) = [row for row in rows_under("Frames") if row[0] == "4"]
    assert re.findall(r"\d[\d,]*", row[2]) == ["1", f"{messages.MAX_MESSAGE_BYTES:,}", f"{messages.MAX_HELLO_BYTES:,}"]
    assert f"magic `{MAGIC.decode()}`" in TEXT
    assert f"a header of {HEADER_BYTES} bytes" in TEXT
    assert f"**version {messages.VERSIONS[-1]}**" in TEXT


def test_annotations_are_names_of_fields() -> None:
    for side in (ClientMessage, ServerMessage):
        for kind in get_args(side):
            assert set(get_type_hints(kind)) == set(
                kind.__struct_fields__
            )  # raises NameError for one that means nothing


def shown(message: Any, payload: bytes) -> str:
    """A message and its payload as the example has them."""

    def value(given: Any) -> str:
        if isinstance(given, bytes):
            return f"h'{given.hex()}'"
        if isinstance(given, bool):
            return str(given).lower()
        if isinstance(given, str):
            return f'"{given}"'
        return f"[{', '.join(map(value, given))}]" if isinstance(given, list) else str(given)

    array = plain_msgpack.read(pack(message)[HEADER_BYTES:])
    return f"{type(message).__name__} {value(array)}" + (f" + h'{payload.hex()}'" if payload else "")


def test_the_example_is_a_conversation() -> None:
    (block,) = re.findall(r"^## An example\n.*?^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    receivers = {
        "C": Receiver[Any](ClientMessage, max_payload_bytes=100),
        "S": Receiver[Any](ServerMessage, max_payload_bytes=100),
    }
    said = []
    for part in block.strip().split("\n\n"):
        *digits, text = part.splitlines()
        side = digits[0][0]
        data = bytes.fromhex("".join(line[3:] for line in digits))
        receiver = receivers[side]
        receiver.buffer()[: len(data)] = data
        receiver.received(len(data))
        event = receiver.next_event()
        assert isinstance(event, Message)
        payload = bytearray(event.payload_bytes)
        if payload:
            receiver.take_payload([memoryview(payload)])
            assert receiver.next_event() == PayloadEnd(skipped=False)
        assert text.strip() == shown(event.message, bytes(payload))
        assert receiver.next_event() is None
        assert not receiver.within_frame
        if payload:
            assert event.message.checksums == [payload_checksum(bytes(payload))]
        said.append(type(event.message).__name__)
    assert said == ["Hello", "Welcome", "Reserve", "Reserved", "Commit", "Committed", "Stage", "Staged", "Bye"]
    first = block.split()[1]
    for piece in ("4b565431", "11000000", "00000000", "96", "01", "9101", "a174", "c2"):
        assert piece in first
        assert f"`{piece}`" in TEXT
