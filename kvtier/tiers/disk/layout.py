"""What a cache directory's files hold: the meta file, a segment's header page, its footer and trailer.

    kvtier.lock           flock(2) of the process that has the directory, and its pid
    kvtier.meta           two equal meta pages
    segment-00000042.kvt  header page | frames at 4 KiB strides | footer | trailer page

A segment's header names its life by a random UUID, which every frame, the footer's trailer and nothing else carries:
whatever an earlier life of the file left behind is told from what belongs to this one. Pages are little-endian, begin
with a magic and a format version, and end with the XXH3-64 of the bytes before; those places never change, so that an
older kvtier can say that a page is of a newer format.

Segment header, fields from byte 12: zero u32, UUID 16 bytes, sequence u64, epoch u64, size of the file u64.
Trailer, fields from byte 12: entries u32, UUID, footer's offset u64, tail page u64, XXH3-64 of the footer u64.
Meta page, fields from byte 12: zero u32, UUID, epoch u64.
The footer is an array of `ENTRY`, padded to a page.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.frame import HEADER_BYTES, STRIDE_BYTES, padded
from kvtier.keys import KEY_BYTES

__all__ = [
    "ENTRY",
    "GONE_PAGE",
    "HAS_PARENT",
    "IS_GONE",
    "LOCK_NAME",
    "MAX_SEGMENT_NUMBER",
    "META_NAME",
    "MIN_SEGMENT_BYTES",
    "TEMPORARY",
    "UUID_BYTES",
    "Entries",
    "Meta",
    "NewerFormatError",
    "SegmentHeader",
    "Trailer",
    "is_segment_name",
    "max_frame_bytes",
    "pack_footer",
    "segment_name",
    "segment_number",
    "unpack_footer",
]

DISK_FORMAT_VERSION = 1
LOCK_NAME = "kvtier.lock"
META_NAME = "kvtier.meta"
TEMPORARY = ".tmp"
UUID_BYTES = 16
MIN_SEGMENT_BYTES = 64 << 10
HAS_PARENT = 1
IS_GONE = 2
GONE_PAGE = b"KVTgone\0".ljust(STRIDE_BYTES, b"\0")
"""What stands in place of the header of a frame that was removed."""

ENTRY = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("page", "<u4"),
        ("flags", "<u4"),
        ("raw_bytes", "<u8"),
        ("stored_bytes", "<u8"),
        ("depth", "<u4"),
        ("codec", "<u2"),
        ("zero", "<u2"),
    ]
)
Entries = npt.NDArray[np.void]

_SEGMENT_MAGIC, _TRAILER_MAGIC, _META_MAGIC = b"KVTsegmt", b"KVTindex", b"KVTmeta\0"
_PREFIX = struct.Struct("<8sI")
_SEGMENT = struct.Struct("<8sII16sQQQ")
_TRAILER = struct.Struct("<8sII16sQQQ")
_META = struct.Struct("<8sII16sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = STRIDE_BYTES - _CHECKSUM.size
MAX_SEGMENT_NUMBER = 10**16 - 1
_SEGMENT_NAME = re.compile(r"segment-\d{8,16}\.kvt", re.ASCII)


class NewerFormatError(Exception):
    """An intact page of a format that this kvtier does not know; the argument is its number."""


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.kvt"


def is_segment_name(name: str) -> bool:
    return _SEGMENT_NAME.fullmatch(name) is not None


def segment_number(name: str) -> int:
    """The number in a segment's name."""
    return int(name.removeprefix("segment-").removesuffix(".kvt"))


def max_frame_bytes(segment_bytes: int) -> int:
    """The longest frame that an empty segment takes, beside header page, a page of footer and the trailer."""
    return segment_bytes - 3 * STRIDE_BYTES


def _seal(fields: bytes) -> bytes:
    page = fields.ljust(_CHECKSUM_AT, b"\0")
    return page + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(page))


def _is_intact(page: bytes, magic: bytes) -> bool:
    """Whether the page is a whole one of this kind. Raises NewerFormatError when it is one of a later kvtier."""
    if len(page) != STRIDE_BYTES or not page.startswith(magic):
        return False
    if _CHECKSUM.unpack_from(page, _CHECKSUM_AT)[0] != xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT]):
        return False
    version: int = _PREFIX.unpack_from(page)[1]
    if version > DISK_FORMAT_VERSION:
        raise NewerFormatError(version)
    return version == DISK_FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first page of a segment."""

    uuid: bytes
    """New for each life of the file."""
    sequence: int
    """Greater than that of every life before, in every directory of the tier."""
    epoch: int
    size: int
    """Bytes of the file."""

    def encode(self) -> bytes:
        return _seal(
            _SEGMENT.pack(_SEGMENT_MAGIC, DISK_FORMAT_VERSION, 0, self.uuid, self.sequence, self.epoch, self.size)
        )

    @classmethod
    def decode(cls, page: bytes) -> SegmentHeader | None:
        """None for anything but an intact page. Raises NewerFormatError."""
        if not _is_intact(page, _SEGMENT_MAGIC):
            return None
        _, _, _, uuid, sequence, epoch, size = _SEGMENT.unpack_from(page)
        if size < MIN_SEGMENT_BYTES or size % STRIDE_BYTES:
            return None
        return cls(uuid, sequence, epoch, size)


@dataclass(frozen=True, slots=True)
class Meta:
    """The meta file: which cache this directory belongs to, and its epoch."""

    uuid: bytes
    epoch: int

    def encode(self) -> bytes:
        """Two equal pages: a single flipped bit must not cost the epoch."""
        return 2 * _seal(_META.pack(_META_MAGIC, DISK_FORMAT_VERSION, 0, self.uuid, self.epoch))

    @classmethod
    def decode(cls, content: bytes) -> Meta | None:
        """That of the intact page, or of the later epoch; None when there is none. Raises NewerFormatError."""
        found = None
        for page in (content[:STRIDE_BYTES], content[STRIDE_BYTES : 2 * STRIDE_BYTES]):
            if _is_intact(page, _META_MAGIC):
                _, _, _, uuid, epoch = _META.unpack_from(page)
                if found is None or epoch > found.epoch:
                    found = cls(uuid, epoch)
        return found


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a sealed segment."""

    uuid: bytes
    num_entries: int
    footer_offset: int
    tail_page: int
    """Where the next frame would go: behind every frame, holes included."""
    checksum: int
    """Of the padded footer."""

    def encode(self) -> bytes:
        return _seal(
            _TRAILER.pack(
                _TRAILER_MAGIC,
                DISK_FORMAT_VERSION,
                self.num_entries,
                self.uuid,
                self.footer_offset,
                self.tail_page,
                self.checksum,
            )
        )

    @classmethod
    def decode(cls, page: bytes) -> Trailer | None:
        """None for anything but an intact page. Raises NewerFormatError."""
        if not _is_intact(page, _TRAILER_MAGIC):
            return None
        _, _, num_entries, uuid, footer_offset, tail_page, checksum = _TRAILER.unpack_from(page)
        return cls(uuid, num_entries, footer_offset, tail_page, checksum)


def pack_footer(header: SegmentHeader, entries: Entries, tail_page: int) -> tuple[int, bytes]:
    """Offset and bytes of footer and trailer for these entries."""
    footer = entries.tobytes()
    footer = footer.ljust(padded(len(footer)), b"\0")
    offset = header.size - STRIDE_BYTES - len(footer)
    trailer = Trailer(header.uuid, len(entries), offset, tail_page, xxhash.xxh3_64_intdigest(footer))
    return offset, footer + trailer.encode()


def unpack_footer(header: SegmentHeader, trailer: Trailer, footer: bytes) -> Entries | None:
    """The entries, in the order of their pages; None unless all of it is intact, of this life and within bounds."""
    if trailer.uuid != header.uuid or xxhash.xxh3_64_intdigest(footer) != trailer.checksum:
        return None
    if padded(trailer.num_entries * ENTRY.itemsize) != len(footer):
        return None
    entries: Entries = np.frombuffer(footer, ENTRY, trailer.num_entries)
    entries = entries[np.argsort(entries["page"], kind="stable")]
    first = entries["page"].astype(np.uint64)
    stored = entries["stored_bytes"]
    if np.any((stored == 0) | (stored > header.size) | (entries["raw_bytes"] == 0) | (first == 0)):
        return None
    ends = first + (np.uint64(HEADER_BYTES) + stored + np.uint64(STRIDE_BYTES - 1)) // np.uint64(STRIDE_BYTES)
    bounds = np.append(first[1:], np.uint64(trailer.tail_page))
    if np.any(ends > bounds) or trailer.tail_page * STRIDE_BYTES > trailer.footer_offset:
        return None
    return entries
