"""A segment in memory: what was appended to its file, which of that can be found, and who is at it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.frame import STRIDE_BYTES, frame_bytes, padded
from kvtier.keys import KEY_BYTES, Key
from kvtier.tiers.disk.layout import ENTRY, HAS_PARENT, IS_GONE, Entries, SegmentHeader

__all__ = ["Segment", "SegmentFile", "SegmentRow", "SegmentState"]

FIRST_ENTRIES = 64


class SegmentState(Enum):
    """Where a segment is in its life; it only moves down this list."""

    OPEN = "open"
    """Frames are appended."""
    FULL = "full"
    """Nothing is appended any more; the last writer under way will write the footer."""
    SEALED = "sealed"
    """Complete, with a footer unless that could not be written. May be evicted."""
    DEAD = "dead"
    """Its file is another segment's, or deleted."""


class SegmentFile:
    """A file of the directory that is, or can become, a segment. Its size is refreshed by any thread."""

    __slots__ = ("name", "real_bytes", "size")

    def __init__(self, name: str, size: int, real_bytes: int) -> None:
        self.name = name
        self.size = size
        self.real_bytes = real_bytes
        """What the device gave it when it was last looked at."""


class SegmentRow(NamedTuple):
    """One row of `ENTRY`, as Python's own values."""

    key: bytes
    parent: bytes
    page: int
    flags: int
    raw_bytes: int
    stored_bytes: int
    depth: int
    codec: int
    zero: int


class Segment:
    """One life of a segment's file.

    number: of this life, unique in the process. volume: the place of its volume among the tier's.
    Mutable state: everything else, guarded by the catalog's lock. An entry is gone, which the flag says, until its
    bytes were written and after its block was forgotten.
    """

    __slots__ = (
        "entries",
        "file",
        "header",
        "num_entries",
        "num_live",
        "number",
        "readers",
        "state",
        "tail_page",
        "used",
        "volume",
        "writers",
    )

    def __init__(self, number: int, volume: int, file: SegmentFile, header: SegmentHeader) -> None:
        self.number = number
        self.volume = volume
        self.file = file
        self.header = header
        self.state = SegmentState.OPEN
        self.tail_page = 1
        self.entries: Entries = np.zeros(FIRST_ENTRIES, ENTRY)
        self.num_entries = 0
        self.num_live = 0
        self.used: dict[int, int] = {}
        """Entry to the tick of its last use, of those used since they were written."""
        self.readers = 0
        self.writers = 0

    def room(self) -> int:
        """The longest frame that still fits, beside footer and trailer."""
        footer = padded((self.num_entries + 1) * ENTRY.itemsize)
        return self.header.size - STRIDE_BYTES - footer - self.tail_page * STRIDE_BYTES

    def take(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Set room aside for as many leading frames of these lengths as fit: page and entry of each."""
        places = []
        for size in sizes:
            if size > self.room():
                break
            if self.num_entries == len(self.entries):
                more = np.zeros(max(FIRST_ENTRIES, len(self.entries)), ENTRY)
                self.entries = np.concatenate([self.entries, more])
            self.entries["flags"][self.num_entries] = IS_GONE
            self.entries["page"][self.num_entries] = self.tail_page
            self.entries["stored_bytes"][self.num_entries] = size - STRIDE_BYTES
            places.append((self.tail_page, self.num_entries))
            self.num_entries += 1
            self.tail_page += size // STRIDE_BYTES
        return places

    def row(self, entry: int) -> SegmentRow:
        return SegmentRow(*self.entries[entry].item())

    def set(self, entry: int, key: Key, parent: Key | None, row: tuple[int, int, int, int, int]) -> None:
        """Make an entry live: page, raw bytes, stored bytes, depth and codec of its frame."""
        page, raw_bytes, stored_bytes, depth, codec = row
        flags = 0 if parent is None else HAS_PARENT
        self.entries[entry] = (key, parent or b"", page, flags, raw_bytes, stored_bytes, depth, codec, 0)
        self.num_live += 1

    def forget(self, entry: int) -> None:
        self.entries["flags"][entry] |= IS_GONE
        self.used.pop(entry, None)
        self.num_live -= 1

    def forget_all(self) -> None:
        self.entries["flags"][: self.num_entries] |= IS_GONE
        self.used.clear()
        self.num_live = 0

    def live(self, start: int = 0, end: int | None = None) -> Entries:
        """A copy of the entries that can be found, of all or of a part, in the order of their pages."""
        entries = self.entries[: self.num_entries][start:end]
        found: Entries = entries[(entries["flags"] & IS_GONE) == 0]
        return found

    def live_keys(self) -> list[Key]:
        """Of the entries that can be found, in their order."""
        keys = self.live()["key"].tobytes()
        return [Key(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]

    def live_numbers(self) -> list[int]:
        flags = self.entries["flags"][: self.num_entries]
        numbers: list[int] = np.flatnonzero((flags & IS_GONE) == 0).tolist()
        return numbers

    def check_integrity(self) -> None:
        name = f"disk tier: {self.file.name}"
        if self.readers < 0 or self.writers < 0:
            raise IntegrityError(f"{name}: {self.readers} readers, {self.writers} writers")
        if len(self.live_numbers()) != self.num_live:
            raise IntegrityError(f"{name}: counts {self.num_live} blocks, holds {len(self.live_numbers())}")
        if any(self.entries["flags"][entry] & IS_GONE for entry in self.used):
            raise IntegrityError(f"{name}: a block that is gone counts as used")
        end = 1
        for row in map(self.row, range(self.num_entries)):
            if row.page < end:
                raise IntegrityError(f"{name}: frames overlap at page {row.page}")
            end = row.page + frame_bytes(row.stored_bytes) // STRIDE_BYTES
        if end > self.tail_page:
            raise IntegrityError(f"{name}: a frame ends at page {end}, behind the tail {self.tail_page}")
        if self.state is SegmentState.OPEN and self.room() < -STRIDE_BYTES:
            raise IntegrityError(f"{name}: no room is left for its footer")
