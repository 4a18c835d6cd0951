"""docs/tiers.md explains every reason and every number, and its table of the frame is the code's."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvtier import frame
from kvtier.codecs import Codec
from kvtier.keys import Key
from kvtier.metrics import DiskStats, StatsSnapshot
from kvtier.reasons import DropReason, MissReason
from kvtier.tiers.base import ReadOutcome, WriteOutcome

TEXT = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


def section(heading: str) -> str:
    return TEXT.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]


def first_cells(text: str) -> list[str]:
    return [word for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for word in re.findall("`(.+?)`", row)]


@pytest.mark.parametrize(
    ("heading", "reasons"),
    [("### Why a block was not restored", MissReason), ("### Why a due block was not stored", DropReason)],
)
def test_every_reason_has_its_row(heading: str, reasons: type[MissReason | DropReason]) -> None:
    assert sorted(first_cells(section(heading))) == sorted(reason.value for reason in reasons)


def test_every_number_has_its_row() -> None:
    fields = [field.name for kind in (StatsSnapshot, DiskStats) for field in dataclasses.fields(kind)]
    for shared in ("errors", "staging_bytes"):
        fields.remove(shared)  # in both, with one meaning
    assert sorted(first_cells(section("## Statistics"))) == sorted(fields)


@pytest.mark.parametrize(("word", "outcomes"), [("reads", ReadOutcome), ("writes", WriteOutcome)])
def test_outcomes_are_named(word: str, outcomes: type[ReadOutcome | WriteOutcome]) -> None:
    found = re.search(rf"(?:Outcomes of |Of ){word}: (.+?)\.", TEXT)
    assert found is not None
    assert re.findall("`(.+?)`", found[1]) == [outcome.value for outcome in outcomes]


def test_the_frame_is_as_the_table_says() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (.+?) \|$", TEXT, re.MULTILINE)
    places = {text: slice(int(offset), int(offset) + int(size)) for offset, size, text in rows}
    page = frame.FrameHeader(
        key=Key(b"k" * 48),
        parent=Key(b"p" * 48),
        raw_bytes=0x0102030405 & 0xFFFFFFFF,
        stored_bytes=77,
        checksum=0x1122334455667788,
        codec=Codec.SHUFFLE_LZ4,
        depth=9,
        tenant="tenant",
        container=b"c" * 16,
    ).encode()

    def cell(start: str) -> bytes:
        (place,) = [place for text, place in places.items() if text.startswith(start)]
        return page[place]

    def number(start: str) -> int:
        return int.from_bytes(cell(start), "little")

    assert cell("magic") == frame.FRAME_MAGIC
    assert (number("format version"), number("codec"), number("depth")) == (1, 2, 9)
    assert (cell("key"), cell("the key of")) == (b"k" * 48, b"p" * 48)
    assert (number("1 when"), number("length of the tenant")) == (1, 6)
    assert (number("raw length"), number("stored length")) == (0x02030405, 77)
    assert number("XXH3-64 of the payload") == 0x1122334455667788
    assert (cell("container"), cell("tenant").rstrip(b"\0")) == (b"c" * 16, b"tenant")
    assert number("XXH3-64 of bytes 0") == frame.payload_checksum(page[:4088])
