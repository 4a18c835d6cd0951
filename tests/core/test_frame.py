"""The frame: every field comes back, every damage is found, and the bytes stay what they are."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import FrameError
from kvtier.frame import (
    FRAME_MAGIC,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    STRIDE_BYTES,
    FrameHeader,
    frame_bytes,
    padded,
    payload_checksum,
)
from kvtier.keys import KEY_BYTES, Key

GOLDEN = FrameHeader(
    key=Key(bytes(range(48))),
    parent=Key(bytes(range(100, 148))),
    raw_bytes=2_621_440,
    stored_bytes=1_234_567,
    checksum=0x0123456789ABCDEF,
    codec=2,
    depth=77,
    tenant="team-ü",
    container=bytes(range(16, 32)),
)
GOLDEN_SHA256 = "e449965b2e28945125bda4ad8945eb91dc003564e39788301bc9dfeb58641eaf"
CHECKSUM_OF_KVTIER = 0xA1669530AA735BCE
NAMES = [field.name for field in dataclasses.fields(FrameHeader)]

lengths = st.one_of(st.integers(1, MAX_PAYLOAD_BYTES), st.sampled_from([1, STRIDE_BYTES, MAX_PAYLOAD_BYTES]))
keys = st.binary(min_size=48, max_size=48).map(Key)
tenants = st.text(st.characters(codec="utf-8"), max_size=64).filter(lambda text: len(text.encode()) <= 64)
headers = st.builds(
    FrameHeader,
    key=keys,
    parent=st.none() | keys | st.just(Key(bytes(48))),
    raw_bytes=lengths,
    stored_bytes=lengths,
    checksum=st.integers(0, 2**64 - 1),
    codec=st.integers(0, 2**16 - 1),
    depth=st.integers(0, 2**32 - 1),
    tenant=tenants,
    container=st.binary(min_size=16, max_size=16),
)


def resealed(page: bytes, offset: int, patch: bytes) -> bytes:
    """The page with other bytes at an offset, and a checksum that says they are right."""
    body = (page[:offset] + patch + page[offset + len(patch) :])[:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@given(headers)
def test_every_field_comes_back(header: FrameHeader) -> None:
    page = header.encode()
    assert len(page) == HEADER_BYTES
    assert FrameHeader.decode(page) == header
    assert FrameHeader.decode(memoryview(b"x" + page + b"payload")[1:]) == header


@given(headers, headers, st.sampled_from(NAMES))
def test_every_field_is_in_the_bytes(header: FrameHeader, other: FrameHeader, name: str) -> None:
    changed = dataclasses.replace(header, **{name: getattr(other, name)})
    assert (changed.encode() == header.encode()) is (changed == header)


def test_the_format_does_not_change_unnoticed() -> None:
    page = GOLDEN.encode()
    assert hashlib.sha256(page).hexdigest() == GOLDEN_SHA256
    assert page[:16] == FRAME_MAGIC + struct.pack("<HHI", 1, 2, 77)
    assert page[16:64] == GOLDEN.key
    assert page[64:112] == GOLDEN.parent
    assert page[112:144] == struct.pack("<IIQQQ", 1, 7, 2_621_440, 1_234_567, 0x0123456789ABCDEF)
    assert page[144:160] == GOLDEN.container
    assert page[160:224] == "team-ü".encode().ljust(64, b"\0")
    assert page[224:4088] == bytes(4088 - 224)
    assert payload_checksum(b"kvtier") == payload_checksum(memoryview(b"kvtier")) == CHECKSUM_OF_KVTIER


def test_any_flipped_bit_of_the_page_is_found() -> None:
    page = bytearray(GOLDEN.encode())
    for bit in range(8 * HEADER_BYTES):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            FrameHeader.decode(memoryview(page))
        page[bit // 8] ^= 1 << bit % 8
    assert FrameHeader.decode(memoryview(page)) == GOLDEN


@given(headers, st.sets(st.integers(0, 7), min_size=1), st.booleans())
def test_torn_pages_are_found(header: FrameHeader, sectors: set[int], over_another: bool) -> None:
    """As after a power cut: some sectors are the new page's, the others an old one's, or nothing's."""
    new, old = header.encode(), GOLDEN.encode() if over_another else bytes(HEADER_BYTES)
    page = b"".join((old if i in sectors else new)[512 * i : 512 * (i + 1)] for i in range(8))
    whole = {new: header, GOLDEN.encode(): GOLDEN}  # most sectors are zeros, so a torn page may be a whole one
    try:
        found = FrameHeader.decode(page)
    except FrameError:
        found = None
    assert found == whole.get(page)


@pytest.mark.parametrize("page", [b"", b"KVTframe", bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES])
def test_what_is_no_frame(page: bytes) -> None:
    with pytest.raises(FrameError):
        FrameHeader.decode(page)


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_truncated_page(nbytes: int) -> None:
    with pytest.raises(FrameError, match=f"not {nbytes}$"):
        FrameHeader.decode(GOLDEN.encode()[:nbytes])


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_any_bytes_are_an_answer(page: bytes) -> None:
    with pytest.raises(FrameError):
        FrameHeader.decode(page)


@given(st.binary(min_size=160, max_size=400))
def test_any_fields_under_a_right_checksum_are_an_answer(fields: bytes) -> None:
    try:
        header = FrameHeader.decode(resealed(GOLDEN.encode(), 12, fields[: HEADER_BYTES - 20]))
    except FrameError:
        return
    assert 0 < header.raw_bytes <= MAX_PAYLOAD_BYTES
    assert 0 < header.stored_bytes <= MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    ("offset", "patch", "says"),
    [
        (0, b"KVTFRAME", "another magic"),
        (8, struct.pack("<H", 0), "format 0"),
        (8, struct.pack("<H", 2), "format 2"),
        (116, struct.pack("<I", 65), "tenant 65"),
        (120, struct.pack("<Q", 0), "0 raw"),
        (120, struct.pack("<Q", MAX_PAYLOAD_BYTES + 1), f"{MAX_PAYLOAD_BYTES + 1} raw"),
        (120, struct.pack("<Q", 2**64 - 1), f"{2**64 - 1} raw"),
        (128, struct.pack("<Q", 0), "0 stored"),
        (128, struct.pack("<Q", MAX_PAYLOAD_BYTES + 1), f"{MAX_PAYLOAD_BYTES + 1} stored"),
    ],
)
def test_a_page_that_another_program_wrote(offset: int, patch: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        FrameHeader.decode(resealed(GOLDEN.encode(), offset, patch))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "x" * 65},
        {"tenant": "ü" * 33},
        {"raw_bytes": 0},
        {"raw_bytes": -1},
        {"raw_bytes": MAX_PAYLOAD_BYTES + 1},
        {"stored_bytes": 0},
        {"stored_bytes": MAX_PAYLOAD_BYTES + 1},
        {"key": b"x" * 47},
        {"parent": b"x" * 49},
        {"container": b"x" * 15},
    ],
)
def test_what_does_not_fit_is_not_written(wrong: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        dataclasses.replace(GOLDEN, **wrong).encode()  # type: ignore[arg-type]


def test_frames_lie_on_strides() -> None:
    assert [padded(nbytes) for nbytes in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert [frame_bytes(nbytes) for nbytes in (1, 4096, 4097)] == [8192, 8192, 12288]
    assert GOLDEN.frame_bytes == frame_bytes(GOLDEN.stored_bytes)
    assert HEADER_BYTES == STRIDE_BYTES == 4096


@pytest.mark.parametrize(
    "change",
    [
        {"codec": 1 << 16},
        {"codec": -1},
        {"depth": 1 << 32},
        {"checksum": 1 << 64},
        {"checksum": -1},
        {"parent": b""},
        {"key": b"short"},
        {"container": b""},
    ],
)
def test_a_field_that_does_not_fit_is_refused_in_our_words(change: dict[str, object]) -> None:
    header = FrameHeader(key=Key(bytes(KEY_BYTES)), parent=None, raw_bytes=1, stored_bytes=1, checksum=0)
    with pytest.raises(FrameError):
        dataclasses.replace(header, **change).encode()  # type: ignore[arg-type]


def test_a_tenant_of_any_text_comes_back() -> None:
    header = FrameHeader(
        key=Key(bytes(KEY_BYTES)), parent=None, raw_bytes=1, stored_bytes=1, checksum=0, tenant="a\ud800b"
    )
    assert FrameHeader.decode(header.encode()) == header


@pytest.mark.parametrize(("offset", "value"), [(112, 2), (160, 0xFF)])
def test_a_header_that_means_nothing_is_refused_though_its_checksum_is_right(offset: int, value: int) -> None:
    header = FrameHeader(key=Key(bytes(KEY_BYTES)), parent=None, raw_bytes=1, stored_bytes=1, checksum=0, tenant="t")
    page = bytearray(header.encode())
    page[offset] = value
    page[-8:] = xxhash.xxh3_64_intdigest(page[:-8]).to_bytes(8, "little")
    with pytest.raises(FrameError):
        FrameHeader.decode(bytes(page))
