"""Frames between callers' buffers and a segment's file: whole runs by one system call, no byte copied that need not be.

A run is frames that lie one behind the other. The header page, and a payload's last page where it is not whole, go
through aligned scratch; the pages between go straight from or to the caller's buffer, if that is aligned or the file
is not open for direct I/O. Everything here blocks, holds no lock, and may run on several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.codecs import Codec, decode, encode
from kvtier.errors import FrameError
from kvtier.frame import HEADER_BYTES, STRIDE_BYTES, FrameHeader, frame_bytes, padded, payload_checksum
from kvtier.keys import Key
from kvtier.tiers.base import ReadOutcome
from kvtier.tiers.disk.files import MAX_VECTORS, Files, is_shortage
from kvtier.tiers.disk.handles import Handles
from kvtier.tiers.disk.layout import GONE_PAGE
from kvtier.tiers.disk.scratch import ScratchPool, is_aligned
from kvtier.tiers.disk.segment import Segment, SegmentRow

__all__ = ["Incoming", "Outgoing", "copy_of", "groups", "load_run", "runs", "write_run"]

TRANSFER_BYTES = 9 << 20  # of frames, by one system call: a job of 8 MiB of blocks; a longer frame goes alone
MAX_FRAMES = MAX_VECTORS // 3  # a header page, a body, a tail page
RAW = int(Codec.RAW)


class Outgoing:
    """One block on its way to a segment.

    The thread that writes owns it; its identity is the claim on the key.
    """

    __slots__ = (
        "checksum",
        "codec",
        "depth",
        "entry",
        "epoch",
        "frame_bytes",
        "given",
        "key",
        "page",
        "parent",
        "payload",
        "position",
        "raw_bytes",
    )

    def __init__(
        self,
        position: int,
        key: Key,
        parent: Key | None,
        block: memoryview,
        depth: int,
        epoch: int,
        given: int | None = None,
    ) -> None:
        """given: what the block must sum up to, where that is known; it is not believed to be what lies there now."""
        self.position = position
        self.given = given
        self.key = key
        self.parent = parent
        self.raw_bytes = len(block)
        self.payload = block
        self.frame_bytes = frame_bytes(len(block))
        self.codec = RAW
        self.checksum = 0
        self.depth = depth
        self.epoch = epoch
        self.page = 0
        self.entry = 0

    def encode(self, codec: Codec) -> None:
        """Compress the block and sum it up. Slow; lets go of the GIL.

        One that is not what it must sum up to stays as it is, so that it is found out when it is read.
        """
        if codec is not Codec.RAW and self.given in (None, payload_checksum(self.payload)):
            done, payload = encode(codec, self.payload)
            self.codec = int(done)
            self.payload = memoryview(payload)
            self.frame_bytes = frame_bytes(len(payload))
        is_given = self.given is not None and self.codec == RAW
        self.checksum = self.given if is_given else payload_checksum(self.payload)  # type: ignore[assignment]

    def header_page(self, container: bytes) -> bytes:
        return FrameHeader(
            key=self.key,
            parent=self.parent,
            raw_bytes=self.raw_bytes,
            stored_bytes=len(self.payload),
            checksum=self.checksum,
            codec=self.codec,
            depth=self.depth,
            container=container,
        ).encode()


class Incoming:
    """One block on its way from a segment. The thread that reads owns it.

    may_be_good: it was not read for a reason that says nothing of it.
    """

    __slots__ = ("buffer", "entry", "frame_bytes", "key", "may_be_good", "outcome", "position", "row", "segment")

    def __init__(
        self, position: int, key: Key, buffer: memoryview, segment: Segment, entry: int, row: SegmentRow
    ) -> None:
        self.position = position
        self.key = key
        self.buffer = buffer
        self.segment = segment
        self.entry = entry
        self.row = row
        self.outcome = ReadOutcome.ERROR
        self.may_be_good = False
        self.frame_bytes = frame_bytes(row.stored_bytes)


def groups(frames: Sequence[Outgoing]) -> Iterator[Sequence[Outgoing]]:
    """Leading frames that one system call may carry, again and again."""
    start, total = 0, 0
    for position, frame in enumerate(frames):
        size = frame.frame_bytes
        if position > start and (total + size > TRANSFER_BYTES or position - start == MAX_FRAMES):
            yield frames[start:position]
            start, total = position, 0
        total += size
    if start < len(frames):
        yield frames[start:]


def runs(frames: Sequence[Incoming]) -> Iterator[Sequence[Incoming]]:
    """Frames of one segment, in the order of their pages, cut where they are not contiguous and where one system call
    ends.
    """
    start, total, end = 0, 0, -1
    for position, frame in enumerate(frames):
        size = frame.frame_bytes
        if position > start and (
            frame.row.page != end or total + size > TRANSFER_BYTES or position - start == MAX_FRAMES
        ):
            yield frames[start:position]
            start, total = position, 0
        total += size
        end = frame.row.page + size // STRIDE_BYTES
    if start < len(frames):
        yield frames[start:]


def write_run(
    files: Files, fd: int, frames: Sequence[Outgoing], container: bytes, scratch: ScratchPool, *, direct: bool
) -> None:
    """Write frames that were given contiguous pages. OSError when any byte of them may be missing."""
    copied = [direct and not is_aligned(frame.payload) for frame in frames]
    room = sum(frame.frame_bytes if copy else 2 * STRIDE_BYTES for frame, copy in zip(frames, copied, strict=True))
    with scratch.take(room) as pages:
        vectors: list[memoryview] = []
        at = 0
        for frame, copy in zip(frames, copied, strict=True):
            pages[at : at + HEADER_BYTES] = frame.header_page(container)
            payload = frame.payload
            body = 0 if copy else len(payload) - len(payload) % STRIDE_BYTES
            tail = len(payload) - body
            end = at + HEADER_BYTES + tail
            pages[at + HEADER_BYTES : end] = payload[body:]
            stop = at + HEADER_BYTES + padded(tail)
            pages[end:stop] = bytes(stop - end)
            vectors.append(pages[at : at + HEADER_BYTES])
            if body:
                vectors.append(payload[:body])
            if tail:
                vectors.append(pages[at + HEADER_BYTES : stop])
            at = stop
        files.write(fd, vectors, frames[0].page * STRIDE_BYTES)


def load_run(files: Files, handles: Handles, run: Sequence[Incoming], scratch: ScratchPool, *, direct: bool) -> None:
    """Read contiguous frames of one segment; sets each one's outcome, ERROR where the device does not give it."""
    try:
        with handles.use(run[0].segment.file.name) as fd:
            _read_run(files, fd, run, scratch, direct=direct)
    except (OSError, MemoryError) as error:
        if len(run) == 1:
            run[0].may_be_good = is_shortage(error)
            return
        for frame in run:  # one bad block must not spoil the others
            load_run(files, handles, [frame], scratch, direct=direct)


def _read_run(files: Files, fd: int, frames: Sequence[Incoming], scratch: ScratchPool, *, direct: bool) -> None:
    """Read contiguous frames into their buffers and check them; sets each one's outcome. OSError when the device gave
    less than asked.
    """
    bodies = [_body_bytes(frame, direct=direct) for frame in frames]
    room = sum(frame.frame_bytes - body for frame, body in zip(frames, bodies, strict=True))
    with scratch.take(room) as pages:
        vectors: list[memoryview] = []
        places: list[int] = []
        at = 0
        for frame, body in zip(frames, bodies, strict=True):
            stop = at + frame.frame_bytes - body
            places.append(at)
            if body:
                vectors += (pages[at : at + HEADER_BYTES], frame.buffer[:body])
                at += HEADER_BYTES
            if at < stop:
                vectors.append(pages[at:stop])
            at = stop
        files.read(fd, vectors, frames[0].row.page * STRIDE_BYTES)
        for frame, body, place in zip(frames, bodies, places, strict=True):
            page = pages[place : place + HEADER_BYTES]
            rest = pages[place + HEADER_BYTES : place + HEADER_BYTES + frame.row.stored_bytes - body]
            frame.outcome = _finish(frame, page, rest, body)


def _body_bytes(frame: Incoming, *, direct: bool) -> int:
    """How much of the payload goes straight into the buffer: its whole pages, if any may."""
    if frame.row.codec != RAW or frame.row.stored_bytes != len(frame.buffer):
        return 0
    if direct and not is_aligned(frame.buffer):
        return 0
    return len(frame.buffer) - len(frame.buffer) % STRIDE_BYTES


def _finish(frame: Incoming, page: memoryview, rest: memoryview, body: int) -> ReadOutcome:
    """Whether what was read is the block that was asked for; its payload behind `body` is still in `rest`."""
    row = frame.row
    try:
        header = FrameHeader.decode(page)
    except FrameError:
        return ReadOutcome.MISS if page == GONE_PAGE else ReadOutcome.DAMAGED
    if header.key != frame.key or header.container != frame.segment.header.uuid:
        return ReadOutcome.DAMAGED
    if (header.raw_bytes, header.stored_bytes, header.codec) != (row.raw_bytes, row.stored_bytes, row.codec):
        return ReadOutcome.DAMAGED
    if row.codec == RAW:
        if row.raw_bytes != row.stored_bytes:
            return ReadOutcome.DAMAGED
        frame.buffer[body:] = rest
        return ReadOutcome.OK if payload_checksum(frame.buffer) == header.checksum else ReadOutcome.DAMAGED
    if payload_checksum(rest) != header.checksum:
        return ReadOutcome.DAMAGED
    try:
        decode(row.codec, rest, frame.buffer)
    except FrameError:
        return ReadOutcome.DAMAGED
    return ReadOutcome.OK


def copy_of(frame: memoryview, source: Incoming, epoch: int) -> Outgoing | None:
    """The same block on its way to another segment; None when what was read is not it."""
    try:
        header = FrameHeader.decode(frame[:HEADER_BYTES])
    except FrameError:
        return None
    payload = frame[HEADER_BYTES : HEADER_BYTES + source.row.stored_bytes]
    if header.key != source.key or header.container != source.segment.header.uuid:
        return None
    if header.stored_bytes != len(payload) or payload_checksum(payload) != header.checksum:
        return None
    copy = Outgoing(0, source.key, header.parent, payload, header.depth, epoch)
    copy.raw_bytes, copy.codec, copy.checksum = header.raw_bytes, header.codec, header.checksum
    return copy
