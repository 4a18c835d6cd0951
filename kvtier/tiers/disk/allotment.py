"""What one directory may take of its device: the cap in real bytes, the floor of free space, and when it is full."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading

from kvtier.clock import Clock
from kvtier.errors import ConfigError, IntegrityError
from kvtier.frame import STRIDE_BYTES, padded
from kvtier.tiers.disk.directory import Directory, real_bytes
from kvtier.tiers.disk.files import NO_SPACE, Files
from kvtier.tiers.disk.layout import MAX_SEGMENT_NUMBER, MIN_SEGMENT_BYTES, TEMPORARY, segment_name
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

    Mutable state: the files, by the volume's rotation lock; the reason and its times, by `_lock`, under which nothing
    blocks. `used_bytes` and `reason` may be read, and a file refreshed, by any thread at any time.
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
        self._told_at: dict[str, float] = {}
        self._looked_at = 0.0
        self._try_again = False  # after a second, whatever the file system says of its room
        self._cooling_since: float | None = None
        self._refused: tuple[float, str] | None = None  # when room for a segment was, and why

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

    def check_integrity(self, names: set[str]) -> None:
        """Raises IntegrityError unless the files that are, or can become, segments are these, within the cap."""
        held = {file.name for file in self._held}
        if held != names:
            raise IntegrityError(f"disk tier: files {sorted(held ^ names)} are counted, or in use, but not both")
        if self.used_bytes > self.capacity_bytes:
            raise IntegrityError(f"disk tier: {self.used_bytes} bytes used of {self.capacity_bytes}")

    def hold(self, file: SegmentFile) -> None:
        """Count a file that was found here."""
        self._held.append(file)

    def set_aside(self, name: str) -> None:
        """Count a file that was found here and cannot be read."""
        file = SegmentFile(name, 0, 0)
        self.refresh(file)
        self._stuck.append(file)

    @property
    def stuck(self) -> list[str]:
        """Names of files that count and cannot be used."""
        return [file.name for file in self._stuck]

    def retry_stuck(self, *, only_temporary: bool) -> None:
        """Try again to delete what could not be deleted."""
        for file in list(self._stuck):
            if file.name.endswith(TEMPORARY) or not only_temporary:
                with contextlib.suppress(OSError):
                    with contextlib.suppress(FileNotFoundError):
                        self._files.unlink(file.name, self._directory.fd)
                    self._stuck.remove(file)

    def start_names_behind(self, number: int) -> None:
        """New files get names with a greater number, or the lowest free ones at the end of the numbers."""
        self._next_number = max(self._next_number, number + 1)

    def _next_name(self) -> str:
        """One that nothing here has, not even with the end of a temporary file."""
        while True:
            if self._next_number > MAX_SEGMENT_NUMBER:
                self._next_number = 1
            name = segment_name(self._next_number)
            self._next_number += 1
            if not (self._exists(name) or self._exists(name + TEMPORARY)):
                return name

    def _exists(self, name: str) -> bool:
        try:
            self._files.stat(name, self._directory.fd)
        except FileNotFoundError:
            return False
        return True

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

    def note_shortage(self, *, is_empty: bool) -> None:
        """Nothing can be written, since there is no room for a segment and none that could be evicted."""
        with self._lock:
            if self._is_refused():
                assert self._refused is not None
                self._reason = f"the file system is full: {self._refused[1]}"
                self._looked_at = self._clock.now()
                self._try_again = True
                return
        free = self._free_bytes()
        if not is_empty or free is None or free - self.segment_bytes >= self._min_free_bytes:
            return
        with self._lock:
            self._try_again = False
            self._reason = (
                f"no room for a segment of {self.segment_bytes} bytes: {free} bytes are free, of which disk.min_free "
                f"keeps {self._min_free_bytes}"
            )
            self._looked_at = self._clock.now()

    def _free_bytes(self) -> int | None:
        try:
            return self._files.free_bytes(self._directory.fd)
        except OSError:
            return None

    def create(self) -> SegmentFile | None:
        """A new file with all its room; None when there is no room for it, or the device failed, which is noted."""
        if self._has_temporary:  # of a create that failed
            self.retry_stuck(only_temporary=True)
        if not self.may_create or not self.can_create():
            return None
        name = ""
        try:
            name = self._next_name()
            self._make(name + TEMPORARY)
            self._files.replace(name + TEMPORARY, name, self._directory.fd)
            file = SegmentFile(name, self.segment_bytes, 0)
        except OSError as error:
            if error.errno in NO_SPACE:
                self._note_refusal(error)
            else:
                self.note(error)
            if name and not self._unlink(name + TEMPORARY):
                self.set_aside(name + TEMPORARY)
            return None
        self.refresh(file)
        self._held.append(file)
        if self.charged_bytes > self.capacity_bytes:  # the file system takes more for a file than we foresaw
            self.delete(file)
            return None
        return file

    @property
    def may_create(self) -> bool:
        """False for a second after a file was refused its room, while one that failed cannot be removed, and where the
        file system does not answer.
        """
        with self._lock:
            if self._is_refused():
                return False
        return self._free_bytes() is not None and not self._has_temporary

    @property
    def _has_temporary(self) -> bool:
        return any(name.endswith(TEMPORARY) for name in self.stuck)

    def _is_refused(self) -> bool:
        """Under the lock."""
        return self._refused is not None and self._is_recent(self._refused[0], RECHECK_S)

    def _is_recent(self, then: float, seconds: float) -> bool:
        """Nothing is, once the clock was turned back."""
        return 0 <= self._clock.now() - then < seconds

    def _note_refusal(self, error: OSError) -> None:
        with self._lock:
            self._refused = (self._clock.now(), str(error))
            tell = self._is_news("refusal")
        if tell:
            logger.warning(
                "disk.path %s: no room for another segment, what is there is used again: %s",
                self._directory.path,
                str(error),
            )

    def _is_news(self, what: str) -> bool:
        """Under the lock."""
        if self._is_recent(self._told_at.get(what, -math.inf), TELL_EVERY_S):
            return False
        self._told_at[what] = self._clock.now()
        return True

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
            return self._cooling_since is not None and self._is_recent(self._cooling_since, COOL_DOWN_S)

    def is_writable(self) -> bool:
        """False while the file system is full, which is looked at again at most once a second."""
        with self._lock:
            if self._reason is None:
                return True
            if self._is_recent(self._looked_at, RECHECK_S):
                return False
            self._looked_at = self._clock.now()
            if self._try_again:
                self._reason = None
                return True
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
            if full:
                self._reason = f"the file system is full: {error}"
                self._looked_at = self._clock.now()
                self._try_again = False
            else:
                self._cooling_since = self._clock.now()
            tell = self._is_news("full" if full else "failure")
        if tell:
            consequence = "nothing is written there until there is room" if full else "other directories come first"
            # As text: a kept record must not keep the caller's buffers by way of the traceback.
            logger.warning("disk.path %s: a write failed, %s: %s", self._directory.path, consequence, str(error))
        return full
