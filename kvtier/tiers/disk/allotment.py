"""What one directory may take of its device: the cap in real bytes, the floor of free space, and when it is full."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading

from kvtier.clock import Clock
from kvtier.errors import ConfigError
from kvtier.frame import STRIDE_BYTES, padded
from kvtier.tiers.disk.directory import Directory, real_bytes
from kvtier.tiers.disk.files import NO_SPACE, Files
from kvtier.tiers.disk.layout import MIN_SEGMENT_BYTES, TEMPORARY, segment_name
from kvtier.tiers.disk.segment import SegmentFile

__all__ = ["Allotment", "choose_segment_bytes"]

SEGMENT_BYTES = 256 << 20
SEGMENTS = 16  # that a capacity is divided into when it is too small for segments of that size
FEW_BLOCKS_BYTES = 8 << 20  # a smaller segment might not hold even one block of a large model
MIN_SEGMENTS = 3  # one open, one spare, one that can be evicted
OWN_BLOCKS = 8  # of the file system: lock, two pages of meta, their replacement, the probe
GROWTH_SHIFT = 8  # a file's extents may come to take this fraction of it, and count as its bytes
RECHECK_S = 1.0
COOL_DOWN_S = 5.0
TELL_EVERY_S = 60.0

logger = logging.getLogger("kvtier.disk")


def with_growth(size: int) -> int:
    """The real bytes that a preallocated file of that length may come to have."""
    return size + max(STRIDE_BYTES, padded(size >> GROWTH_SHIFT))


def choose_segment_bytes(capacity_bytes: int, own_bytes: int, asked: int | None) -> int:
    """The length of a segment in a directory that may hold `capacity_bytes`. ConfigError when that is too little."""
    usable = capacity_bytes - own_bytes
    if asked is not None:
        size = asked // STRIDE_BYTES * STRIDE_BYTES
        if size < MIN_SEGMENT_BYTES:
            raise ConfigError(f"segment_bytes must be at least {MIN_SEGMENT_BYTES}, not {asked}")
    elif usable >= SEGMENTS * with_growth(SEGMENT_BYTES):
        size = SEGMENT_BYTES
    else:
        share = max(usable // SEGMENTS, min(FEW_BLOCKS_BYTES, usable // (MIN_SEGMENTS + 1)), MIN_SEGMENT_BYTES)
        size = max(MIN_SEGMENT_BYTES, (share - (with_growth(share) - share)) // STRIDE_BYTES * STRIDE_BYTES)
    least = own_bytes + MIN_SEGMENTS * with_growth(size)
    if capacity_bytes < least:
        raise ConfigError(
            f"disk.size is too small: {capacity_bytes} bytes for each directory, of which {MIN_SEGMENTS} segments of "
            f"{size} bytes need {least}; raise disk.size or name fewer directories"
        )
    return size


class Allotment:
    """Makes and deletes a directory's segment files within the cap, and remembers why nothing may be written.

    Mutable state: the files, by the volume's append lock; the reason and its times, by `_lock`, under which nothing
    blocks. `used_bytes` and `reason` may be read by any thread at any time.
    """

    def __init__(
        self, directory: Directory, files: Files, clock: Clock, capacity_bytes: int, min_free_bytes: int
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = 0
        self._directory = directory
        self._files = files
        self._clock = clock
        self._min_free_bytes = min_free_bytes
        self.own_bytes = OWN_BLOCKS * max(STRIDE_BYTES, files.block_bytes(directory.fd))
        self._held: list[SegmentFile] = []
        self._stuck: list[SegmentFile] = []  # those that could not be deleted
        self._next_number = 1
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._told_at: dict[bool, float] = {}
        self._check_at = 0.0
        self._cool_until: float | None = None

    # ---- bytes ---------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Real bytes of every file of ours here."""
        return self._directory.own_bytes() + sum(file.real_bytes for file in [*self._held, *self._stuck])

    @property
    def charged_bytes(self) -> int:
        """What the files may grow to, and what lock and meta take at most."""
        files = [*self._held, *self._stuck]
        return self.own_bytes + sum(max(with_growth(file.size), file.real_bytes) for file in files)

    @property
    def held(self) -> list[SegmentFile]:
        """The files that are, or can become, segments."""
        return list(self._held)

    def hold(self, file: SegmentFile) -> None:
        """Count a file that was found here."""
        self._held.append(file)

    def start_names_behind(self, number: int) -> None:
        """New files get names with a greater number."""
        self._next_number = max(self._next_number, number + 1)

    def refresh(self, file: SegmentFile) -> None:
        """Look again at what the device gave the file."""
        with contextlib.suppress(OSError):  # deleted under us: what it had is counted on
            file.real_bytes = real_bytes(self._files.stat(file.name, self._directory.fd))

    def can_create(self) -> bool:
        """Whether one more segment keeps the cap and the floor."""
        if self.charged_bytes + with_growth(self.segment_bytes) > self.capacity_bytes:
            return False
        free = self._free_bytes()
        return free is not None and free - self.segment_bytes >= self._min_free_bytes

    def warn_of_shortage(self) -> None:
        """Say at start what the file system cannot give of the capacity."""
        free = self._free_bytes()
        if free is None:
            return
        attainable = self.used_bytes + max(0, free - self._min_free_bytes)
        if attainable < self.capacity_bytes:
            logger.warning(
                "disk.path %s: its part of disk.size is %d bytes, and the file system gives %d at most (%d are free, "
                "of which disk.min_free keeps %d)%s; lower disk.size or disk.min_free, or free space",
                self._directory.path,
                self.capacity_bytes,
                attainable,
                free,
                self._min_free_bytes,
                ": nothing can be stored there" if attainable < self.own_bytes + self.segment_bytes else "",
            )

    def note_shortage(self) -> None:
        """Nothing can be written since there is no segment and no room for one above the floor."""
        free = self._free_bytes()
        if free is None or free - self.segment_bytes >= self._min_free_bytes:
            return
        with self._lock:
            self._reason = (
                f"no room for a segment of {self.segment_bytes} bytes: {free} bytes are free, of which disk.min_free "
                f"keeps {self._min_free_bytes}"
            )
            self._check_at = self._clock.now() + RECHECK_S

    def _free_bytes(self) -> int | None:
        try:
            return self._files.free_bytes(self._directory.fd)
        except OSError:
            return None

    def create(self) -> SegmentFile | None:
        """A new file with all its room; None when there is no room for it, or the device failed, which is noted."""
        if not self.can_create():
            return None
        name = segment_name(self._next_number)
        self._next_number += 1
        try:
            self._make(name + TEMPORARY)
            self._files.replace(name + TEMPORARY, name, self._directory.fd)
            file = SegmentFile(name, self.segment_bytes, 0)
        except OSError as error:
            self.note(error)
            self._unlink(name + TEMPORARY)
            return None
        self.refresh(file)
        self._held.append(file)
        if self.charged_bytes > self.capacity_bytes:  # the file system takes more for a file than we foresaw
            self.delete(file)
            return None
        return file

    def delete(self, file: SegmentFile) -> None:
        """Delete a file; one that cannot be deleted counts on, but is none to write to."""
        self._held.remove(file)
        if not self._unlink(file.name):
            self._stuck.append(file)

    def reclaim(self, name: str) -> None:
        """Delete a file that was found here and is of no use."""
        file = SegmentFile(name, 0, 0)
        self.refresh(file)
        self.hold(file)
        self.delete(file)

    def _make(self, name: str) -> None:
        fd = self._files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._directory.fd)
        try:
            self._files.allocate(fd, self.segment_bytes)
        finally:
            self._files.close(fd)

    def _unlink(self, name: str) -> bool:
        try:
            self._files.unlink(name, self._directory.fd)
        except FileNotFoundError:
            return True
        except OSError as error:
            logger.warning("disk.path %s: %s could not be deleted: %s", self._directory.path, name, str(error))
            return False
        return True

    # ---- state ---------------------------------------------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why nothing is written here now; None when it is."""
        return self._reason

    @property
    def is_cooling(self) -> bool:
        """A write failed a moment ago: other directories come first."""
        with self._lock:
            return self._cool_until is not None and self._clock.now() < self._cool_until

    def is_writable(self) -> bool:
        """False while the file system is full, which is looked at again at most once a second."""
        with self._lock:
            if self._reason is None:
                return True
            now = self._clock.now()
            if now < self._check_at:
                return False
            self._check_at = now + RECHECK_S
        free = self._free_bytes()
        if free is None or free < self.segment_bytes + self._min_free_bytes:
            return False
        with self._lock:
            self._reason = None
        return True

    def note(self, error: BaseException) -> bool:
        """Remember that a write failed. True when the file system is full, and not sick."""
        full = isinstance(error, OSError) and error.errno in NO_SPACE
        with self._lock:
            now = self._clock.now()
            if full:
                self._reason = f"the file system is full: {error}"
                self._check_at = now + RECHECK_S
            else:
                self._cool_until = now + COOL_DOWN_S
            tell = not 0 <= now - self._told_at.get(full, -math.inf) < TELL_EVERY_S
            if tell:
                self._told_at[full] = now
        if tell:
            consequence = "nothing is written there until there is room" if full else "other directories come first"
            # As text: a kept record must not keep the caller's buffers by way of the traceback.
            logger.warning("disk.path %s: a write failed, %s: %s", self._directory.path, consequence, str(error))
        return full
