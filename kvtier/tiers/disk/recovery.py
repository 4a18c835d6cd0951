"""What a directory holds when it is opened: which files to take over, which to reclaim, and the blocks in each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from kvtier.errors import FrameError
from kvtier.frame import STRIDE_BYTES, FrameHeader, NewerFrameError
from kvtier.tiers.disk.directory import Contents, Directory, newer_format, real_bytes, unreadable
from kvtier.tiers.disk.files import Files, is_shortage
from kvtier.tiers.disk.layout import (
    ENTRY,
    HAS_PARENT,
    Entries,
    Meta,
    NewerFormatError,
    SegmentHeader,
    Trailer,
    unpack_footer,
)
from kvtier.tiers.disk.scan import scan_frames
from kvtier.tiers.disk.scratch import ScratchPool
from kvtier.tiers.disk.segment import SegmentFile

__all__ = ["FoundBlocks", "FoundSegment", "Survey", "read_blocks", "read_footer", "survey"]


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A file with a segment's intact header and the length that the header tells."""

    file: SegmentFile
    header: SegmentHeader


@dataclass(slots=True)
class Survey:
    """A directory as it was found; nothing in it was changed yet."""

    meta: Meta | None
    has_meta_file: bool
    contents: Contents
    segments: list[FoundSegment] = field(default_factory=list)
    """Oldest first."""
    unusable: list[tuple[str, str]] = field(default_factory=list)
    """Names of segments that are none, and what is wrong with each."""
    unread: list[tuple[str, str]] = field(default_factory=list)
    """Names of segments that the device does not give, which may be good, and why."""

    @property
    def is_lost(self) -> bool:
        """Whether there are segments, and nothing that says whether a reset made them void."""
        return self.meta is None and bool(self.contents.segments)

    @property
    def epoch(self) -> int:
        """The latest that anything here knows of: it must never go back, whatever was damaged. Later than all of them
        where a reset may have been forgotten.
        """
        of_segments = max((found.header.epoch for found in self.segments), default=0) + self.is_lost
        return max(of_segments, self.meta.epoch if self.meta else 0)


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """A segment's blocks: by its footer, or by a scan when it has none."""

    entries: Entries
    tail_page: int
    has_footer: bool


def survey(directory: Directory, files: Files) -> Survey:
    """Read meta and segment headers. Raises ConfigError when any is of a newer format or cannot be opened now, which is
    no fault of the file; changes nothing.
    """
    meta, has_meta_file = directory.read_meta()
    found = Survey(meta, has_meta_file, directory.contents())
    for name in found.contents.segments:
        try:
            looked = _look(directory, files, name)
        except FileNotFoundError as error:
            looked = str(error)
        except (OSError, MemoryError) as error:
            if is_shortage(error):
                raise unreadable(directory.path, name, error) from error
            found.unread.append((name, str(error)))
            continue
        except NewerFormatError as error:
            raise newer_format(directory.path, name, error.args[0]) from None
        if isinstance(looked, str):
            found.unusable.append((name, looked))
        else:
            found.segments.append(looked)
    found.segments.sort(key=lambda segment: segment.header.sequence)
    return found


def _look(directory: Directory, files: Files, name: str) -> FoundSegment | str:
    stat = files.stat(name, directory.fd)
    if stat.st_size < STRIDE_BYTES:
        return f"a segment of {stat.st_size} bytes"
    fd = files.open(name, os.O_RDONLY, directory.fd)
    try:
        header = SegmentHeader.decode(_read(files, fd, 0, STRIDE_BYTES))
    finally:
        files.close(fd)
    if header is None:
        return "its header page is damaged"
    if header.size != stat.st_size:
        return f"it has {stat.st_size} bytes, and {header.size} by its header"
    return FoundSegment(SegmentFile(name, header.size, real_bytes(stat)), header)


def read_blocks(fd: int, header: SegmentHeader, files: Files, scratch: ScratchPool) -> FoundBlocks:
    """The blocks of a segment. Takes a read of the footer, or of the whole file. `fd` is not open for direct I/O.

    Raises NewerFormatError for a footer or a frame of a later kvtier.
    """
    by_footer = read_footer(fd, header, files)
    if by_footer is not None:
        if len(by_footer[0]):
            _check_format(files, fd, int(by_footer[0]["page"][0]))
        return FoundBlocks(*by_footer, has_footer=True)
    rows = []
    tail_page = 1
    for frame in scan_frames(files, fd, header, scratch):
        if frame.problem is None:
            said = frame.header
            tail_page = frame.page + said.frame_bytes // STRIDE_BYTES
            flags = HAS_PARENT if said.parent is not None else 0
            parent = said.parent or b""
            rows.append(
                (said.key, parent, frame.page, flags, said.raw_bytes, said.stored_bytes, said.depth, said.codec, 0)
            )
    return FoundBlocks(np.array(rows, ENTRY), tail_page, has_footer=False)


def read_footer(fd: int, header: SegmentHeader, files: Files) -> tuple[Entries, int] | None:
    """Entries and tail page of a sealed segment; None when its footer is missing, damaged or of another life.
    Raises NewerFormatError.
    """
    try:
        trailer = Trailer.decode(_read(files, fd, header.size - STRIDE_BYTES, STRIDE_BYTES))
        if trailer is None:
            return None
        length = header.size - STRIDE_BYTES - trailer.footer_offset
        if not 0 <= length < header.size - STRIDE_BYTES or trailer.footer_offset % STRIDE_BYTES:
            return None
        entries = unpack_footer(header, trailer, _read(files, fd, trailer.footer_offset, length))
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    return None if entries is None else (entries.copy(), trailer.tail_page)


def _check_format(files: Files, fd: int, page: int) -> None:
    """Of one frame: all of a segment are of one format."""
    try:
        FrameHeader.decode(_read(files, fd, page * STRIDE_BYTES, STRIDE_BYTES))
    except NewerFrameError as error:
        raise NewerFormatError(error.version) from None
    except FrameError:
        return  # a miss, when it is asked for
    except OSError as error:
        if is_shortage(error):
            raise


def _read(files: Files, fd: int, offset: int, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    files.read(fd, [memoryview(content)] if nbytes else [], offset)
    return bytes(content)
