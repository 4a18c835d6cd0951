"""Opening the directories of a disk tier: looked at first, all of them, and only then put in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.clock import Clock
from kvtier.tiers.disk.allotment import Allotment, choose_segment_bytes
from kvtier.tiers.disk.catalog import Catalog
from kvtier.tiers.disk.directory import Directory, newer_format, refusal, unreadable
from kvtier.tiers.disk.files import NO_SPACE, Files, is_shortage
from kvtier.tiers.disk.layout import NewerFormatError, segment_number
from kvtier.tiers.disk.recovery import FoundBlocks, FoundSegment, Survey, read_blocks, survey
from kvtier.tiers.disk.scratch import ScratchPool
from kvtier.tiers.disk.segment import Segment, SegmentFile, SegmentState
from kvtier.tiers.disk.volume import Volume

__all__ = ["Opening", "open_volumes"]

RESUME_SHARE = 8  # a segment with less than one part in this many free is not appended to any more

logger = logging.getLogger("kvtier.disk")


@dataclass(frozen=True, slots=True)
class Opening:
    """What the directories of a tier are opened for. Sizes are of all directories together, but for the floor."""

    paths: Sequence[Path]
    capacity_bytes: int
    min_free_bytes: int
    segment_bytes: int | None
    clock: Clock
    files: Files
    scratch: ScratchPool


@dataclass(slots=True)
class _Opened:
    """A directory on its way to a volume."""

    directory: Directory
    allotment: Allotment
    survey: Survey
    kept: list[tuple[FoundSegment, FoundBlocks]]
    """Oldest first."""
    spare: SegmentFile | None = None
    reclaimed: int = 0


def open_volumes(opening: Opening, catalog: Catalog) -> list[Volume]:
    """Lock, look, reclaim, index. Raises ConfigError, and leaves nothing open, when any directory cannot be used.

    Nothing is deleted before every directory is known to be of a format that this kvtier reads, and was read as far as
    its device gives it; nothing is written before each is within its part of the capacity.
    """
    directories: list[Directory] = []
    volumes: list[Volume] = []
    opened: list[_Opened] = []
    try:
        for path in opening.paths:
            directory = Directory(path, opening.files)
            directories.append(directory)
        for directory in directories:
            with _named(directory.path):
                opened.append(_look(directory, opening))
        catalog.epoch = max(found.survey.epoch for found in opened)
        newest = max((of.header.sequence for found in opened for of in found.survey.segments), default=0)
        catalog.start_behind(newest)
        for found in opened:
            with _named(found.directory.path):
                _read(found, opening, catalog.epoch)
        for found in opened:
            with _named(found.directory.path):
                _put_in_order(found, catalog.epoch)
        for found in opened:
            with _named(found.directory.path):
                found.directory.probe(opening.scratch)
                _settle_meta(found, catalog.epoch)
            catalog.counts.reclaimed_files += found.reclaimed
            found.allotment.warn_of_shortage()
            volumes.append(_make_volume(len(volumes), found, opening, catalog))
        _index(opened, volumes, catalog)
    except BaseException:
        _close(directories, volumes)
        raise
    return volumes


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the system refuses is a directory that cannot be used."""
    try:
        yield
    except OSError as error:
        raise refusal(path, error.strerror or str(error)) from error


def _close(directories: Sequence[Directory], volumes: Sequence[Volume]) -> None:
    for volume in volumes:
        volume.close(seal=False)
    for directory in directories:
        directory.close()


def _look(directory: Directory, opening: Opening) -> _Opened:
    share = opening.capacity_bytes // len(opening.paths)
    allotment = Allotment(directory, opening.files, opening.clock, share, opening.min_free_bytes)
    allotment.segment_bytes = choose_segment_bytes(share, allotment.own_bytes, opening.segment_bytes)
    return _Opened(directory, allotment, survey(directory, opening.files), [])


def _read(found: _Opened, opening: Opening, epoch: int) -> None:
    """Find the blocks of every segment of the epoch. Changes nothing."""
    for segment in found.survey.segments:
        if segment.header.epoch != epoch:
            continue
        name = segment.file.name
        try:
            fd = opening.files.open(name, os.O_RDONLY, found.directory.fd)
            try:
                found.kept.append((segment, read_blocks(fd, segment.header, opening.files, opening.scratch)))
            finally:
                opening.files.close(fd)
        except NewerFormatError as error:
            raise newer_format(found.directory.path, name, error.args[0]) from None
        except (OSError, MemoryError) as error:
            if is_shortage(error):
                raise unreadable(found.directory.path, name, error) from error
            found.survey.unread.append((name, str(error)))


def _put_in_order(found: _Opened, epoch: int) -> None:
    """Reclaim what is of no use, and evict what is too much."""
    looked, allotment, path = found.survey, found.allotment, found.directory.path
    found.directory.warn_of_foreign(looked.contents.foreign)
    allotment.start_names_behind(max(map(segment_number, looked.contents.segments), default=0))
    if looked.unusable:
        name, problem = looked.unusable[0]
        number = len(looked.unusable)
        logger.warning("disk.path %s: %d files are of no use and are deleted, %s: %s", path, number, name, problem)
    useless = [name for name, _ in looked.unusable] + looked.contents.leftovers
    useless += [segment.file.name for segment in looked.segments if segment.header.epoch != epoch]
    if looked.is_lost:  # of the files that give no header, nothing says of which epoch they are either
        useless += [name for name, _ in looked.unread]
        looked.unread.clear()
    for name in useless:
        allotment.reclaim(name)
    if looked.unread:
        name, problem = looked.unread[0]
        number = len(looked.unread)
        logger.warning(
            "disk.path %s: %d segments cannot be read and are left alone until the next open, %s: %s",
            path,
            number,
            name,
            problem,
        )
        for name, _ in looked.unread:
            allotment.set_aside(name)
    for segment, _ in found.kept:
        allotment.hold(segment.file)
    found.reclaimed = len(useless)
    for segment, blocks in list(found.kept):
        if len(blocks.entries):
            continue
        found.kept.remove((segment, blocks))
        if found.spare is None and segment.file.size == allotment.segment_bytes:
            found.spare = segment.file
        else:
            allotment.delete(segment.file)
            found.reclaimed += 1
    _evict(found)


def _evict(found: _Opened) -> None:
    """Hold the capacity."""
    allotment = found.allotment
    evicted = 0
    while allotment.charged_bytes > allotment.capacity_bytes:
        if found.kept:
            file = found.kept.pop(0)[0].file
        elif found.spare is not None:  # kept longest: the next segment would cost another eviction
            file, found.spare = found.spare, None
        else:
            break
        allotment.delete(file)
        evicted += 1
    if evicted:
        logger.info("disk.path %s: %d segments deleted to hold disk.size", found.directory.path, evicted)
    found.reclaimed += evicted


def _settle_meta(found: _Opened, epoch: int) -> None:
    """Have a meta file with this epoch. A full file system keeps us from that only where blocks of before it stay."""
    meta = found.survey.meta
    if meta is not None:
        found.directory.uuid = meta.uuid
        if found.directory.epoch == epoch:
            return
    if meta is None and (found.survey.is_lost or found.survey.has_meta_file):
        logger.warning(
            "disk.path %s: kvtier.meta is %s, which says whether a reset made blocks void: all were deleted; epoch %d",
            found.directory.path,
            "damaged" if found.survey.has_meta_file else "missing",
            epoch,
        )
    try:
        found.directory.write_epoch(epoch)
    except OSError as error:
        holds = (meta is not None and meta.epoch == epoch) or not found.allotment.stuck
        if error.errno not in NO_SPACE or not holds:
            raise


def _make_volume(number: int, found: _Opened, opening: Opening, catalog: Catalog) -> Volume:
    volume = Volume(number, found.directory, found.allotment, catalog, opening.files, opening.scratch)
    if found.spare is not None:
        volume.keep_spare(found.spare)
    return volume


def _index(opened: Sequence[_Opened], volumes: Sequence[Volume], catalog: Catalog) -> None:
    """Enter the blocks, oldest segment first, then go on with each volume's newest segment."""
    unsealed: list[Segment] = []
    newest: dict[int, Segment] = {}
    of_tier = [(*kept, volume) for found, volume in zip(opened, volumes, strict=True) for kept in found.kept]
    for found_segment, blocks, volume in sorted(of_tier, key=lambda each: each[0].header.sequence):
        segment = catalog.add_segment(volume.number, found_segment.file, found_segment.header)
        segment.entries = blocks.entries
        segment.num_entries = len(blocks.entries)
        segment.tail_page = blocks.tail_page
        segment.state = SegmentState.SEALED if blocks.has_footer else SegmentState.FULL
        catalog.adopt(segment)
        newest[volume.number] = segment
        if not blocks.has_footer:
            unsealed.append(segment)
    for volume in volumes:
        last = newest.get(volume.number)
        size = volume.allotment.segment_bytes
        if last is not None and last.file.size == size and last.room() > size // RESUME_SHARE:
            volume.resume(last)
    for segment in unsealed:
        if segment.state is SegmentState.FULL:
            volumes[segment.volume].seal(segment)
