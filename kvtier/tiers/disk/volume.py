"""One directory of the disk tier: segments that are appended to one after the other, and evicted oldest first."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from kvtier.frame import STRIDE_BYTES
from kvtier.keys import Key
from kvtier.tiers.base import WriteOutcome
from kvtier.tiers.disk.allotment import Allotment
from kvtier.tiers.disk.catalog import Catalog, Removed
from kvtier.tiers.disk.directory import Directory
from kvtier.tiers.disk.files import NO_SPACE, Files
from kvtier.tiers.disk.handles import Handles
from kvtier.tiers.disk.layout import (
    ENTRY,
    GONE_PAGE,
    UUID_BYTES,
    SegmentHeader,
    is_segment_name,
    max_frame_bytes,
    pack_footer,
)
from kvtier.tiers.disk.scratch import ScratchPool
from kvtier.tiers.disk.segment import Segment, SegmentFile, SegmentRow, SegmentState
from kvtier.tiers.disk.transfer import Incoming, Outgoing, copy_of, groups, load_run, runs, write_run

__all__ = ["READMIT_SHARE", "Volume"]

LAST_PART = 4  # the next file is made ready when less than one part in this many of the open segment is left
READMIT_SHARE = 0.08  # of a segment: what eviction may copy, so that one byte written costs at most 1.08

logger = logging.getLogger("kvtier.disk")


class Volume:
    """Places frames, writes and reads them, and keeps a file ready for when the open segment is full.

    `_append` serialises placing; nothing blocks under it. `_rotation` serialises what makes the next file ready:
    creating one or, at the cap, evicting the oldest segment and copying what was used of it. Writers wait for that only
    when they fill a segment's last quarter faster. Order of locks: `_rotation`, `_append`, the allotment's, the
    catalog's. Reads take the catalog's only. Mutable state: `_open`, `_spare`, guarded by `_append`. Any thread.
    """

    def __init__(
        self,
        number: int,
        directory: Directory,
        allotment: Allotment,
        catalog: Catalog,
        files: Files,
        scratch: ScratchPool,
    ) -> None:
        self.number = number
        self.directory = directory
        self.allotment = allotment
        self._catalog = catalog
        self._files = files
        self._scratch = scratch
        self._handles = Handles(files, directory.fd, directory.open_flags)
        self._direct = directory.mode == "direct"
        self._rotation = threading.Lock()
        self._append = threading.Lock()
        self._open: Segment | None = None
        self._spare: tuple[SegmentFile, SegmentHeader] | None = None

    @property
    def max_frame_bytes(self) -> int:
        return max_frame_bytes(self.allotment.segment_bytes)

    # ---- writing -------------------------------------------------------------------------------------------------

    def store(self, frames: Sequence[Outgoing], outcomes: list[WriteOutcome]) -> Sequence[Outgoing]:
        """Write frames, contiguous where no other thread comes between. Those that were not, with why in `outcomes`."""
        at = 0
        while at < len(frames):
            if not self.allotment.is_writable():
                return _answer(frames[at:], WriteOutcome.FULL, outcomes)
            group = next(groups(frames[at:]))
            placed = self._place(group)
            if placed is None:
                why = WriteOutcome.ERROR if self.allotment.is_cooling else WriteOutcome.FULL
                stale = group[0].epoch != self._catalog.epoch
                return _answer(frames[at:], WriteOutcome.WITHDRAWN if stale else why, outcomes)
            segment, count = placed
            failed = self._write(segment, group[:count], outcomes)
            if failed is not None:
                return _answer(frames[at:], failed, outcomes)
            at += count
            self._look_ahead()
        return ()

    def _write(self, segment: Segment, frames: Sequence[Outgoing], outcomes: list[WriteOutcome]) -> WriteOutcome | None:
        """Write a placed run and publish it; None, or the outcome of all its blocks when that failed."""
        try:
            with self._handles.use(segment.file.name) as fd:
                write_run(self._files, fd, frames, segment.header.uuid, self._scratch, direct=self._direct)
            written = sum(frame.frame_bytes for frame in frames)
            if void := self._catalog.publish(segment, frames, written, outcomes):
                self._overwrite(segment, void)
        except (OSError, MemoryError) as error:
            self._catalog.count_write_error()
            return WriteOutcome.FULL if self.allotment.note(error) else WriteOutcome.ERROR
        finally:
            self.allotment.refresh(segment.file)
            self._end_write(segment)
        return None

    def _end_write(self, segment: Segment) -> None:
        if self._catalog.end_write(segment):
            self.seal(segment)

    def _place(self, frames: Sequence[Outgoing]) -> tuple[Segment, int] | None:
        """Pages for as many leading frames as the open segment takes, or the next one where it takes none."""
        while True:
            with self._append:
                if self._open is not None:
                    count = self._catalog.place(self._open, frames)
                    if count:
                        return self._open, count
                if frames[0].epoch != self._catalog.epoch:
                    return None
                full, switched = self._open, self._switch()
            if switched and full is not None and self._catalog.retire(full):
                self.seal(full)
            if not switched:
                with self._rotation:
                    if not self._prepare_spare():
                        return None

    def _switch(self) -> bool:
        """Go on in the spare file, if there is one of this epoch. Under the append lock."""
        if self._spare is None or self._spare[1].epoch != self._catalog.epoch:
            return False
        (file, header), self._spare = self._spare, None
        self._open = self._catalog.add_segment(self.number, file, header)
        return True

    def seal(self, segment: Segment) -> None:
        """Write a full segment's footer, if it is of this epoch, and let it be evicted from then on."""
        try:
            if self._catalog.is_current(segment):
                self._write_footer(segment)
        except (OSError, MemoryError) as error:
            self.allotment.note(error)
            self._catalog.count_write_error()
        finally:
            self.allotment.refresh(segment.file)
            self._catalog.mark_sealed(segment)

    def erase(self, removed: Sequence[Removed]) -> None:
        """Overwrite the headers of removed blocks, and footers that name them, so that no later open finds them."""
        for segment in {each.segment.number: each.segment for each in removed}.values():
            pages = [each.page for each in removed if each.segment is segment]
            self._overwrite(segment, pages)
            for _ in pages:
                self._end_write(segment)

    def _overwrite(self, segment: Segment, pages: Sequence[int]) -> None:
        """Of frames of no use. May fail in silence: then a later open may find a block, with its own bytes."""
        try:
            for page in pages:
                self._write_pages(segment.file.name, memoryview(GONE_PAGE), page * STRIDE_BYTES)
            if segment.state is SegmentState.SEALED:
                self._write_footer(segment)
        except (OSError, MemoryError) as error:
            logger.info("disk.path %s: a removed block could not be erased: %s", self.directory.path, str(error))

    def _write_footer(self, segment: Segment) -> None:
        with self._catalog.lock:
            offset, footer = pack_footer(segment.header, segment.live(), segment.tail_page)
        self._write_pages(segment.file.name, memoryview(footer), offset)

    # ---- reading -------------------------------------------------------------------------------------------------

    def load(self, frames: list[Incoming]) -> None:
        """Read pinned blocks into their buffers; sets each one's outcome."""
        frames.sort(key=lambda frame: (frame.segment.number, frame.row.page))
        for _, of_segment in groupby(frames, key=lambda frame: frame.segment.number):
            for run in runs(list(of_segment)):
                load_run(self._files, self._handles, run, self._scratch, direct=self._direct)

    # ---- rotation, under its lock --------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """See to a spare before writers need it, unless another thread does."""
        segment = self._open
        if self._spare is not None or segment is None or segment.room() >= segment.header.size // LAST_PART:
            return
        if self._rotation.acquire(blocking=False):
            try:
                self._prepare_spare()
            finally:
                self._rotation.release()

    def _prepare_spare(self) -> bool:
        """Have a spare file of this epoch: a new one, or that of an evicted segment. False when none can be had now."""
        with self._append:
            spare = self._spare
            if spare is not None and spare[1].epoch == self._catalog.epoch:
                return True
            self._spare = None
        self._sweep()
        file = spare[0] if spare is not None else self.allotment.create()
        if file is None and self.allotment.reason is None:
            file = self._evict()
            if file is None:
                self.allotment.note_shortage(is_empty=not self._catalog.segments_of(self.number))
        return file is not None and self._begin_life(file)

    def _begin_life(self, file: SegmentFile) -> bool:
        """Make a file the spare, in which no frame of before is valid; or delete it, when that fails."""
        header = SegmentHeader(os.urandom(UUID_BYTES), self._catalog.next_sequence(), self._catalog.epoch, file.size)
        try:
            self._write_pages(file.name, memoryview(header.encode()), 0)
        except (OSError, MemoryError) as error:
            self.allotment.note(error)
            self.discard(file)
            return False
        if self.directory.epoch != header.epoch:  # the file system was full, when it was to be written down
            with contextlib.suppress(OSError):
                self.directory.write_epoch(header.epoch)
        with self._append:
            self._spare = (file, header)
        return True

    def _evict(self) -> SegmentFile | None:
        """The file of the oldest segment that is not in use, its used blocks copied to the open one; None when every
        segment is in use. One of another length is deleted to make room, unless no file can be made now, and
        no second one where the room was not what was missing."""
        may_create = self.allotment.may_create and not self.allotment.is_cooling
        for victim in self._catalog.segments_of(self.number):
            if victim.state is not SegmentState.SEALED or victim.readers or victim.writers:
                continue
            if victim.file.size != self.allotment.segment_bytes and not may_create:
                continue
            moved = self._readmit(victim, self._open)
            if self._catalog.drop(victim):
                if victim.file.size == self.allotment.segment_bytes:
                    return victim.file
                self.discard(victim.file)
                file = self.allotment.create()
                if file is not None or self.allotment.can_create():
                    return file
            elif moved:  # a reader was faster: what was copied is not to be found there again
                self._overwrite(victim, [])
        return None

    def _readmit(self, victim: Segment, target: Segment | None) -> bool:
        """Copy used blocks; whether any was."""
        moved = False
        if target is None or victim.header.epoch != target.header.epoch:
            return moved
        for entry, row in self._catalog.hottest(victim, int(READMIT_SHARE * self.allotment.segment_bytes)):
            try:
                moved |= self._copy(victim, entry, row, target)
            except (OSError, MemoryError) as error:
                logger.info("disk.path %s: a block was not kept at eviction: %s", self.directory.path, str(error))
        return moved

    def _copy(self, victim: Segment, entry: int, row: SegmentRow, target: Segment) -> bool:
        source = Incoming(0, Key(row.key), memoryview(b""), victim, entry, row)
        with self._scratch.take(source.frame_bytes) as memory:
            frame = memory[: source.frame_bytes]
            with self._handles.use(victim.file.name) as fd:
                self._files.read(fd, [frame], row.page * STRIDE_BYTES)
            copy = copy_of(frame, source, target.header.epoch)
            if copy is None:
                self._catalog.forget_damaged(victim, entry, source.key)
            if copy is None or not self._catalog.place(target, [copy]):
                return False
            try:
                with self._handles.use(target.file.name) as fd:
                    write_run(self._files, fd, [copy], target.header.uuid, self._scratch, direct=self._direct)
                self._catalog.count_written(copy.frame_bytes)
                moved = self._catalog.move(victim, entry, target, copy)
                if not moved:
                    self._overwrite(target, [copy.page])
            finally:
                self._end_write(target)
        return moved

    def _write_pages(self, name: str, pages: memoryview, offset: int) -> None:
        with self._scratch.take(len(pages)) as memory, self._handles.use(name) as fd:
            memory[: len(pages)] = pages
            self._files.write(fd, [memory[: len(pages)]], offset)
        self._catalog.count_written(len(pages))

    # ---- opening and closing -------------------------------------------------------------------------------------

    def discard(self, file: SegmentFile) -> None:
        """Delete a file that is no segment's any more."""
        self._handles.drop(file.name)
        self.allotment.delete(file)

    def keep_spare(self, file: SegmentFile) -> None:
        """Use a file without blocks that was found at open."""
        with self._rotation:
            self._begin_life(file)

    def resume(self, segment: Segment) -> bool:
        """Append to a segment found at open. False, and it stays as it is, when its footer cannot be undone."""
        try:
            self._write_pages(segment.file.name, memoryview(bytes(STRIDE_BYTES)), segment.header.size - STRIDE_BYTES)
        except (OSError, MemoryError) as error:
            self.allotment.note(error)
            return False
        with self._append, self._catalog.lock:
            segment.state = SegmentState.OPEN
            self._open = segment
        return True

    def begin_epoch(self, epoch: int) -> str | None:
        """Make every file of an older epoch void, which gives room too, and write the epoch through to the device. What
        kept us from that, if anything: where no block of before is left, a full file system is no reason."""
        with self._rotation:
            left = self._void()
            try:
                self.directory.write_epoch(epoch)
            except OSError as error:
                if left or error.errno not in NO_SPACE:
                    return f"{self.directory.path}: {error.strerror or error}"
                logger.info("disk.path %s: epoch %d is not written down, %s", self.directory.path, epoch, str(error))
        return None

    def _void(self) -> bool:
        """Delete what is of an older epoch, or overwrite its header where it is in use. Whether any is left. Under the
        rotation lock."""
        epoch = self._catalog.epoch
        with self._append:
            segment, spare = self._open, self._spare
            if segment is not None and segment.header.epoch != epoch:
                self._open = None
            if spare is not None and spare[1].epoch != epoch:
                self._spare = None
        if segment is not self._open and segment is not None and self._catalog.retire(segment):
            self._catalog.mark_sealed(segment)
        if spare is not None and spare[1].epoch != epoch:
            self.discard(spare[0])
        self._sweep()
        pages = {}
        for old in self._catalog.segments_of(self.number):
            if old.header.epoch != epoch:
                # Of a new life in this epoch, since to an open a damaged one is a damaged file.
                sequence = self._catalog.next_sequence()
                pages[old.file.name] = SegmentHeader(os.urandom(UUID_BYTES), sequence, epoch, old.file.size).encode()
        self.allotment.retry_stuck(only_temporary=False)
        pages |= {name: GONE_PAGE for name in self.allotment.stuck if is_segment_name(name)}
        left = False
        for name, page in pages.items():
            try:
                self._write_pages(name, memoryview(page), 0)
            except (OSError, MemoryError) as error:
                left = True
                logger.info("disk.path %s: %s could not be made void: %s", self.directory.path, name, str(error))
        return left

    def _sweep(self) -> None:
        """Delete the segments of older epochs that nobody uses any more. Under the rotation lock."""
        for segment in self._catalog.segments_of(self.number):
            if not self._catalog.is_current(segment) and self._catalog.abandon(segment):
                self.discard(segment.file)

    def close(self, *, seal: bool) -> None:
        """Seal the open segment, if asked, and let go of everything. No other call may be under way or follow."""
        segment, self._open = self._open, None
        if seal and segment is not None and self._catalog.retire(segment):
            self.seal(segment)
        if seal and self._spare is not None:
            with contextlib.suppress(OSError, MemoryError):  # without a footer the next open scans it
                file, header = self._spare
                offset, footer = pack_footer(header, np.zeros(0, ENTRY), tail_page=1)
                self._write_pages(file.name, memoryview(footer), offset)
        self._handles.close()
        self.directory.close()

    def check_integrity(self) -> None:
        """Never waits for the device: while another thread makes a file ready nothing is checked."""
        if not self._rotation.acquire(blocking=False):
            return
        try:
            with self._append:
                spare = set() if self._spare is None else {self._spare[0].name}
                own = {segment.file.name for segment in self._catalog.segments_of(self.number)}
            self.allotment.check_integrity(own | spare)
        finally:
            self._rotation.release()


def _answer(frames: Sequence[Outgoing], outcome: WriteOutcome, outcomes: list[WriteOutcome]) -> Sequence[Outgoing]:
    for frame in frames:
        outcomes[frame.position] = outcome
    return frames
