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
from kvtier.tiers.disk.directory import Directory, refusal
from kvtier.tiers.disk.files import NO_SPACE, Files
from kvtier.tiers.disk.layout import segment_number
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
    spare: SegmentFile | None = None
    reclaimed: int = 0


def open_volumes(opening: Opening, catalog: Catalog) -> list[Volume]:
    """Lock, look, reclaim, index. Raises ConfigError, and leaves nothing open, when any directory cannot be used.

    Nothing is deleted before every directory is known to be of a format that this kvtier reads, and nothing is written
    before each is within its part of the capacity.
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
                _put_in_order(found, opening, catalog.epoch)
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


def _put_in_order(found: _Opened, opening: Opening, epoch: int) -> None:
    """Reclaim what is of no use, evict what is too much, and read what the rest holds."""
    looked, allotment, path = found.survey, found.allotment, found.directory.path
    found.directory.warn_of_foreign(looked.contents.foreign)
    for name in looked.contents.segments + looked.contents.foreign:
        if name in looked.contents.segments or name.startswith("segment-"):
            allotment.start_names_behind(_number(name))
    if looked.unusable:
        name, problem = looked.unusable[0]
        number = len(looked.unusable)
        logger.warning("disk.path %s: %d files are of no use and are deleted, %s: %s", path, number, name, problem)
    useless = [name for name, _ in looked.unusable] + looked.contents.leftovers
    useless += [segment.file.name for segment in looked.segments if segment.header.epoch != epoch]
    for name in useless:
        allotment.reclaim(name)
    kept = [segment for segment in looked.segments if segment.header.epoch == epoch]
    for segment in kept:
        allotment.hold(segment.file)
    evicted = 0
    while kept and allotment.charged_bytes > allotment.capacity_bytes:
        allotment.delete(kept.pop(0).file)
        evicted += 1
    if evicted:
        logger.info("disk.path %s: %d segments deleted to hold disk.size", path, evicted)
    found.reclaimed = len(useless) + evicted
    for segment in kept:
        _read(found, segment, opening)


def _number(name: str) -> int:
    try:
        return segment_number(name)
    except ValueError:
        return 0


def _read(found: _Opened, segment: FoundSegment, opening: Opening) -> None:
    try:
        fd = opening.files.open(segment.file.name, os.O_RDONLY, found.directory.fd)
        try:
            blocks = read_blocks(fd, segment.header, opening.files, opening.scratch)
        finally:
            opening.files.close(fd)
    except OSError as error:
        logger.warning("disk.path %s: %s is deleted: %s", found.directory.path, segment.file.name, str(error))
        found.allotment.delete(segment.file)
        found.reclaimed += 1
        return
    if len(blocks.entries):
        found.kept.append((segment, blocks))
    elif found.spare is None and segment.file.size == found.allotment.segment_bytes:
        found.spare = segment.file
    else:
        found.allotment.delete(segment.file)
        found.reclaimed += 1


def _settle_meta(found: _Opened, epoch: int) -> None:
    """Have a meta file with this epoch. A full file system keeps us from that only where it would lose the epoch."""
    meta = found.survey.meta
    if meta is not None:
        found.directory.uuid = meta.uuid
        if meta.epoch == epoch:
            return
    if found.survey.has_meta_file and meta is None:
        logger.warning(
            "disk.path %s: the meta file is damaged; epoch %d, of the segments, holds", found.directory.path, epoch
        )
    try:
        found.directory.write_epoch(epoch)
    except OSError as error:
        if error.errno not in NO_SPACE or found.survey.epoch != epoch:
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
