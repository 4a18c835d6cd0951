"""A cache directory looked at from outside, while no store has it: what it holds, and whether that is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, FrameError
from kvtier.frame import HEADER_BYTES, STRIDE_BYTES, FrameHeader, NewerFrameError
from kvtier.tiers.disk.directory import Directory, newer_format
from kvtier.tiers.disk.files import Files
from kvtier.tiers.disk.layout import GONE_PAGE, META_NAME, Entries, NewerFormatError, SegmentHeader
from kvtier.tiers.disk.recovery import FoundSegment, read_footer, survey
from kvtier.tiers.disk.scan import check_payload, scan_frames
from kvtier.tiers.disk.scratch import ScratchPool

__all__ = ["DamagedFrame", "FrameInfo", "UnreadableFile", "VerifyReport", "list_directory", "verify_directory"]


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One frame and where it lies."""

    file: str
    """The segment's name in the directory."""
    sequence: int
    """Of the segment; the newest frame of a key is the one that counts."""
    page: int
    """Offset of the frame's header in the file, in pages of 4096 bytes."""
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """A frame that a read would refuse, or that a footer names and is not there."""

    file: str
    page: int
    problem: str


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file with a segment's name that no frame can be read from."""

    file: str
    problem: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_directory` found."""

    frames: int
    """Frames whose header and payload were read and checked, the damaged ones included."""
    checked_bytes: int
    """Of those frames, headers and padding included."""
    damaged: tuple[DamagedFrame, ...]
    unreadable: tuple[UnreadableFile, ...]
    foreign: tuple[str, ...]
    """Names that are not ours."""

    @property
    def is_whole(self) -> bool:
        return not self.damaged and not self.unreadable


def list_directory(path: Path) -> Iterator[FrameInfo]:
    """Every frame with an intact header, oldest segment first; payloads are read only of a segment without footer.

    Holds the directory's lock until it is exhausted or closed. Raises ConfigError, at once, for a directory that is
    in use, is none, or is of a newer format. Changes nothing.
    """
    frames = _list(path)
    next(frames)
    return (info for info in frames if info is not None)


def verify_directory(path: Path) -> VerifyReport:
    """Read every frame of a directory and check both its checksums. Raises as `list_directory`; changes nothing."""
    files, scratch = Files(), ScratchPool()
    frames, checked_bytes = 0, 0
    damaged: list[DamagedFrame] = []
    with _locked(path, files) as directory:
        looked = survey(directory, files)
        unreadable = [UnreadableFile(name, problem) for name, problem in looked.unusable + looked.unread]
        for segment in looked.segments:
            try:
                for page, nbytes, problem in _check_segment(directory, segment, files, scratch):
                    frames += 1
                    checked_bytes += nbytes
                    if problem is not None:
                        damaged.append(DamagedFrame(segment.file.name, page, problem))
            except OSError as error:
                unreadable.append(UnreadableFile(segment.file.name, error.strerror or str(error)))
        foreign = tuple(looked.contents.foreign)
    return VerifyReport(frames, checked_bytes, tuple(damaged), tuple(unreadable), foreign)


@contextmanager
def _locked(path: Path, files: Files) -> Iterator[Directory]:
    directory = Directory(Path(path), files, create=False)
    try:
        if not directory.is_cache:
            raise ConfigError(f"{str(path)!r} holds no cache of kvtier's: it has neither {META_NAME} nor segments")
        yield directory
    finally:
        directory.close()


@contextmanager
def _opened(directory: Directory, name: str, files: Files) -> Iterator[int]:
    fd = files.open(name, os.O_RDONLY, directory.fd)
    try:
        yield fd
    except NewerFormatError as error:
        raise newer_format(directory.path, name, error.args[0]) from None
    finally:
        files.close(fd)


def _list(path: Path) -> Iterator[FrameInfo | None]:
    """None once the lock is held, then the frames."""
    files, scratch = Files(), ScratchPool()
    with _locked(path, files) as directory:
        looked = survey(directory, files)
        yield None
        for segment in looked.segments:
            try:
                with _opened(directory, segment.file.name, files) as fd:
                    for page, header in _headers(fd, segment.header, files, scratch):
                        yield FrameInfo(segment.file.name, segment.header.sequence, page, header)
            except OSError:
                continue  # `verify_directory` names it


def _headers(fd: int, segment: SegmentHeader, files: Files, scratch: ScratchPool) -> Iterator[tuple[int, FrameHeader]]:
    footer = read_footer(fd, segment, files)
    if footer is None:
        yield from ((frame.page, frame.header) for frame in scan_frames(files, fd, segment, scratch))
        return
    for page in footer[0]["page"].tolist():
        header = _header(fd, page, files)
        if isinstance(header, FrameHeader) and header.container == segment.uuid:
            yield page, header


def _header(fd: int, page: int, files: Files) -> FrameHeader | str | None:
    """The header at a page, what is wrong with it, or None for that of a removed block."""
    content = bytearray(HEADER_BYTES)
    try:
        files.read(fd, [memoryview(content)], page * STRIDE_BYTES)
        return None if content == GONE_PAGE else FrameHeader.decode(memoryview(content))
    except OSError as error:
        return f"the header cannot be read: {error.strerror or error}"
    except NewerFrameError as error:
        raise NewerFormatError(error.version) from None
    except FrameError as error:
        return str(error)


def _check_segment(
    directory: Directory, segment: FoundSegment, files: Files, scratch: ScratchPool
) -> Iterator[tuple[int, int, str | None]]:
    """Page, bytes and problem of every frame that an open of the directory would find, or miss for a damage."""
    with _opened(directory, segment.file.name, files) as fd:
        footer = read_footer(fd, segment.header, files)
        if footer is None:
            for frame in scan_frames(files, fd, segment.header, scratch):
                yield frame.page, frame.header.frame_bytes, frame.problem
        else:
            yield from _check_entries(fd, segment.header, footer[0], files, scratch)


def _check_entries(
    fd: int, segment: SegmentHeader, entries: Entries, files: Files, scratch: ScratchPool
) -> Iterator[tuple[int, int, str | None]]:
    for entry in entries:
        page, stored_bytes = int(entry["page"]), int(entry["stored_bytes"])
        header = _header(fd, page, files)
        if header is None:
            continue
        if isinstance(header, str):
            yield page, HEADER_BYTES, header
        elif header.container != segment.uuid or header.key != entry["key"].tobytes():
            yield page, HEADER_BYTES, "the frame is another than the footer names"
        elif header.stored_bytes != stored_bytes:
            yield page, HEADER_BYTES, "the frame has another length than the footer names"
        else:
            yield page, header.frame_bytes, check_payload(files, fd, page, header, scratch)
