"""What a disk tier holds, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvtier.frame import frame_bytes
from kvtier.keys import NAMESPACE_BYTES, Key
from kvtier.tiers.disk.catalog import STRETCH, Catalog
from kvtier.tiers.disk.layout import HAS_PARENT
from kvtier.tiers.disk.segment import Segment

__all__ = ["Row", "list_rows", "list_segment"]


class Row(NamedTuple):
    """One block. raw_bytes: its own. frame_bytes: what it takes on disk."""

    key: Key
    raw_bytes: int
    frame_bytes: int


def list_rows(catalog: Catalog, segment: Segment) -> Iterator[list[Row]]:
    """A segment's blocks in their order, a stretch at a time. What comes or goes meanwhile may be missing or not."""
    for start in range(0, segment.num_entries, STRETCH):
        with catalog.lock:
            entries = segment.live(start, start + STRETCH)
        rows = zip(entries["key"], entries["raw_bytes"].tolist(), entries["stored_bytes"].tolist(), strict=True)
        yield [Row(Key(key.tobytes()), raw_bytes, frame_bytes(stored)) for key, raw_bytes, stored in rows]


def list_segment(catalog: Catalog, segment: Segment, namespace: bytes) -> list[tuple[Key, Key | None]]:
    """A segment's blocks of one namespace digest, with their parents, in their order. What comes or goes meanwhile may
    be missing or not; the lock is held for a stretch of them at a time."""
    found: list[tuple[Key, Key | None]] = []
    for start in range(0, segment.num_entries, STRETCH):
        with catalog.lock:
            entries = segment.live(start, start + STRETCH)
        rows = zip(entries["key"].tolist(), entries["parent"].tolist(), entries["flags"].tolist(), strict=True)
        found += [
            (Key(key), Key(parent) if flags & HAS_PARENT else None)
            for key, parent, flags in rows
            if key[:NAMESPACE_BYTES] == namespace
        ]
    return found
