"""Finding frames in a segment without its footer: every page may be a header, whatever lies between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from kvtier.errors import FrameError
from kvtier.frame import FRAME_MAGIC, HEADER_BYTES, STRIDE_BYTES, FrameHeader, NewerFrameError, payload_checksum
from kvtier.tiers.disk.files import Files, is_shortage
from kvtier.tiers.disk.layout import NewerFormatError, SegmentHeader
from kvtier.tiers.disk.scratch import ScratchPool

__all__ = ["ScannedFrame", "check_payload", "scan_frames"]

WINDOW_BYTES = 8 << 20
PIECE_BYTES = 64 << 10  # what is given up where the device cannot read
MAGIC = int.from_bytes(FRAME_MAGIC, "little")


class ScannedFrame(NamedTuple):
    """A page with this segment's header of a frame."""

    page: int
    header: FrameHeader
    problem: str | None
    """What is wrong with the payload."""


def scan_frames(files: Files, fd: int, segment: SegmentHeader, scratch: ScratchPool) -> Iterator[ScannedFrame]:
    """Every frame of the segment's present life, in the order of their pages, each with its payload checked.

    Frames of an earlier life, damaged headers, holes and pages that cannot be read are passed over. Memory: a window
    and a piece, however long a header says its payload is. Raises NewerFormatError for a frame of a later kvtier.
    """
    next_page = 1
    end_of_frames = segment.size - STRIDE_BYTES
    with scratch.take(WINDOW_BYTES) as memory:
        for start in range(0, end_of_frames, WINDOW_BYTES):
            window = memory[: min(WINDOW_BYTES, end_of_frames - start)]
            _read_what_is_there(files, fd, window, start)
            words = np.frombuffer(window, "<u8").reshape(-1, STRIDE_BYTES // 8)
            for index in np.flatnonzero(words[:, 0] == MAGIC).tolist():
                page = start // STRIDE_BYTES + index
                if page < next_page:
                    continue  # inside a good frame's payload
                header = _header(window[index * STRIDE_BYTES : (index + 1) * STRIDE_BYTES], segment)
                if header is None or page * STRIDE_BYTES + header.frame_bytes > end_of_frames:
                    continue
                at = index * STRIDE_BYTES + HEADER_BYTES
                if at + header.stored_bytes <= len(window):
                    good = payload_checksum(window[at : at + header.stored_bytes]) == header.checksum
                    problem = None if good else "the payload's checksum does not match"
                else:
                    problem = check_payload(files, fd, page, header, scratch)
                if problem is None:
                    next_page = page + header.frame_bytes // STRIDE_BYTES
                yield ScannedFrame(page, header, problem)


def check_payload(files: Files, fd: int, page: int, header: FrameHeader, scratch: ScratchPool) -> str | None:
    """What is wrong with the payload of the frame at `page`, read piece by piece; None when nothing is."""
    digest = xxhash.xxh3_64()
    offset = page * STRIDE_BYTES + HEADER_BYTES
    end = offset + header.stored_bytes
    try:
        with scratch.take(WINDOW_BYTES) as memory:
            while offset < end:
                piece = memory[: min(WINDOW_BYTES, end - offset)]
                files.read(fd, [piece], offset)
                digest.update(piece)
                offset += len(piece)
    except OSError as error:
        if is_shortage(error):
            raise
        return f"the payload cannot be read: {error.strerror or error}"
    return None if digest.intdigest() == header.checksum else "the payload's checksum does not match"


def _header(page: memoryview, segment: SegmentHeader) -> FrameHeader | None:
    try:
        header = FrameHeader.decode(page)
    except NewerFrameError as error:
        raise NewerFormatError(error.version) from None
    except FrameError:
        return None
    return header if header.container == segment.uuid else None


def _read_what_is_there(files: Files, fd: int, window: memoryview, start: int) -> None:
    try:
        files.read(fd, [window], start)
        return
    except OSError as error:
        if is_shortage(error):
            raise
        # one bad sector must not cost the window
    for at in range(0, len(window), PIECE_BYTES):
        piece = window[at : at + PIECE_BYTES]
        try:
            files.read(fd, [piece], start + at)
        except OSError as error:
            if is_shortage(error):
                raise
            piece[:] = bytes(len(piece))
