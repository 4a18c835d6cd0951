"""A cache directory: made private, locked, asked what it can do; its meta file and which of its files are ours."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.frame import STRIDE_BYTES
from kvtier.tiers.disk.files import NO_SPACE, Files, is_shortage
from kvtier.tiers.disk.layout import (
    LOCK_NAME,
    META_NAME,
    TEMPORARY,
    UUID_BYTES,
    Meta,
    NewerFormatError,
    is_segment_name,
)
from kvtier.tiers.disk.lock import DirectoryLock
from kvtier.tiers.disk.scratch import ScratchPool

__all__ = ["Contents", "Directory", "newer_format", "real_bytes", "refusal", "unreadable"]

PROBE_NAME = "kvtier.probe" + TEMPORARY
META_TEMPORARY = META_NAME + TEMPORARY
FOREIGN_NAMED = 3  # of the names of foreign files, in the warning

logger = logging.getLogger("kvtier.disk")


def refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"disk.path {str(path)!r} cannot be used: {reason}")


def newer_format(path: Path, name: str, version: int) -> ConfigError:
    return ConfigError(
        f"disk.path {str(path)!r}: {name} is of disk format {version}, which this kvtier does not know. Nothing was "
        "changed: use the newer kvtier, give this one another directory, or delete the directory"
    )


def unreadable(path: Path, name: str, error: OSError | MemoryError) -> ConfigError:
    """A failure that may pass, or else means that the device is broken."""
    said = str(error) or "out of memory"
    return ConfigError(
        f"disk.path {str(path)!r}: {name} cannot be read now: {said}. Nothing was changed: try again, and if that does "
        "not help, replace the device or delete the directory"
    )


def real_bytes(found: os.stat_result) -> int:
    """What a file takes of the device."""
    return found.st_blocks * 512


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in a directory."""

    segments: list[str]
    leftovers: list[str]
    """Temporary files of ours, of a process that did not end well."""
    foreign: list[str]
    """Anything else: left alone."""


class Directory:
    """Owns the directory's descriptor and lock until `close`. One thread at a time, but for `fd`, which is read only.

    mode: 'direct' or 'buffered', once `probe` was asked. uuid: of this cache, for as long as its meta file lives.
    epoch: that both pages of the meta file hold, as far as known.
    """

    def __init__(self, path: Path, files: Files, *, create: bool = True) -> None:
        """Makes the directory and its parents, mode 0700, and takes the lock; without `create` it only takes the lock
        of a directory that is there, and changes nothing. Raises ConfigError with what is wrong.
        """
        self.path = path
        self.mode = "buffered"
        self.uuid = os.urandom(UUID_BYTES)
        self.fd = -1
        self.epoch: int | None = None
        self._own_bytes = 0
        self._files = files
        self._lock: DirectoryLock | None = None
        try:
            if create:
                _make(path)
            self._take(create=create)
        except OSError as error:
            self.close()
            raise _cannot_be_used(path, error) from error
        except BaseException:
            self.close()
            raise

    def _take(self, *, create: bool) -> None:
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if create:
            self._make_private()
        try:
            self._lock = DirectoryLock(self.path, self.fd, create=create)
        except FileNotFoundError:
            if create:
                raise
            # No store was ever here: there is nobody to keep out.
        self.refresh()

    @property
    def open_flags(self) -> int:
        """What segments are opened with beside O_RDWR."""
        return os.O_DIRECT if self.mode == "direct" else 0

    def contents(self) -> Contents:
        """The names in the directory by kind. A segment's name on anything but a plain file is foreign."""
        contents = Contents([], [], [])
        for name in self._files.names(self.fd):
            if name in (LOCK_NAME, META_NAME):
                continue
            temporary = name in (PROBE_NAME, META_TEMPORARY)
            temporary |= name.endswith(TEMPORARY) and is_segment_name(name.removesuffix(TEMPORARY))
            if not (temporary or is_segment_name(name)) or not self._is_plain(name):
                contents.foreign.append(name)
            else:
                (contents.leftovers if temporary else contents.segments).append(name)
        return contents

    def warn_of_foreign(self, foreign: list[str]) -> None:
        if foreign:
            more = f" and {len(foreign) - FOREIGN_NAMED} more" if len(foreign) > FOREIGN_NAMED else ""
            named = ", ".join(map(repr, foreign[:FOREIGN_NAMED]))
            logger.warning("disk.path %s holds files that are not kvtier's, left alone: %s%s", self.path, named, more)

    def own_bytes(self) -> int:
        """Real bytes of lock and meta file, when they were last looked at."""
        return self._own_bytes

    def refresh(self) -> None:
        """Look again at what the device gave lock and meta file."""
        total = 0
        for name in (LOCK_NAME, META_NAME):
            try:
                total += real_bytes(self._files.stat(name, self.fd))
            except OSError:
                continue
        self._own_bytes = total

    def read_meta(self) -> tuple[Meta | None, bool]:
        """The meta, and whether there is a file. Raises ConfigError when it is of a newer format, or cannot be read
        now: taken for damaged, it would cost the cache.
        """
        try:
            fd = self._files.open(META_NAME, os.O_RDONLY, self.fd)
        except FileNotFoundError:
            return None, False
        except (OSError, MemoryError) as error:
            if is_shortage(error) or (isinstance(error, OSError) and error.errno == errno.EIO):
                raise unreadable(self.path, META_NAME, error) from error
            return None, True
        failure: OSError | MemoryError | None = None
        content = b""
        try:
            for offset in (0, STRIDE_BYTES):
                try:
                    page = self._read_page(fd, offset)
                except (OSError, MemoryError) as error:
                    failure, page = error, b""
                content += page.ljust(STRIDE_BYTES, b"\0")
            meta = Meta.decode(content)
        except NewerFormatError as error:
            raise newer_format(self.path, META_NAME, error.args[0]) from None
        finally:
            self._files.close(fd)
        if meta is None and failure is not None:
            raise unreadable(self.path, META_NAME, failure) from failure
        self.epoch = None if meta is None or meta.encode() != content else meta.epoch
        return meta, True

    def _read_page(self, fd: int, offset: int) -> bytes:
        """As much of a page as the file has."""
        page = memoryview(bytearray(STRIDE_BYTES))
        at = 0
        while at < STRIDE_BYTES and (done := self._files.preadv(fd, [page[at:]], offset + at)) > 0:
            at += done
        return bytes(page[:at])

    def write_epoch(self, epoch: int) -> None:
        """Replace the meta file at once, and see it through to the device. OSError when that fails."""
        fd = self._files.open(META_TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self.fd)
        try:
            try:
                self._files.write(fd, [memoryview(Meta(self.uuid, epoch).encode())], 0)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
            self._files.replace(META_TEMPORARY, META_NAME, self.fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(META_TEMPORARY, self.fd)
            raise
        self._files.sync(self.fd)
        self.epoch = epoch
        self.refresh()

    def probe(self, scratch: ScratchPool) -> None:
        """Find out whether direct I/O works here, by doing it, and say so once where it does not."""
        try:
            fd = self._files.open(PROBE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, self.fd)
            try:
                with scratch.take(2 * STRIDE_BYTES) as pages:
                    wrote, read = pages[:STRIDE_BYTES], pages[STRIDE_BYTES : 2 * STRIDE_BYTES]
                    wrote[:] = os.urandom(STRIDE_BYTES)
                    self._files.write(fd, [wrote], 0)
                    self._files.read(fd, [read], 0)
                    self.mode = "direct" if wrote == read else "buffered"
            finally:
                self._files.close(fd)
        except OSError as error:
            # On a full disk the open succeeded, which is the part that file systems refuse.
            self.mode = "direct" if error.errno in NO_SPACE else "buffered"
        with contextlib.suppress(OSError):  # it was never made, or is a leftover for the next open
            self._files.unlink(PROBE_NAME, self.fd)
        if self.mode == "buffered":
            logger.warning(
                "disk.path %s: its file system refuses direct I/O; blocks go through the page cache", self.path
            )

    def close(self) -> None:
        """Let go of lock and descriptor. Idempotent."""
        if self._lock is not None:
            self._lock.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def is_cache(self) -> bool:
        """Whether a disk tier ever was here."""
        return self._exists(META_NAME) or bool(self.contents().segments)

    def _exists(self, name: str) -> bool:
        try:
            self._files.stat(name, self.fd)
        except OSError:
            return False
        return True

    def _is_plain(self, name: str) -> bool:
        try:
            return stat.S_ISREG(self._files.stat(name, self.fd).st_mode)
        except OSError:
            return False

    def _make_private(self) -> None:
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid():
            raise refusal(
                self.path,
                f"it belongs to user {found.st_uid}, and this process runs as {os.geteuid()}; give it a directory of "
                "its own",
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            foreign = self.contents().foreign
            if foreign and not self._exists(META_NAME):  # others may live here, and would be locked out
                raise refusal(
                    self.path,
                    f"it is open to others (mode {mode:o}) and holds what is not kvtier's ({foreign[0]!r}); name a "
                    f"directory of kvtier's own, such as {str(self.path / 'kvtier')!r}",
                )
            os.fchmod(self.fd, 0o700)
            logger.info("disk.path %s was open to others; its mode is 0700 now", self.path)


def _cannot_be_used(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return refusal(path, "it is, or leads through, something that is not a directory")
    if error.filename is not None and not path.is_dir():
        return refusal(path, f"{str(error.filename)!r} cannot be made: {error.strerror}, as user {os.geteuid()}")
    return refusal(path, f"{error.strerror or error}, as user {os.geteuid()}")


def _make(path: Path) -> None:
    """Every missing directory on the way, mode 0700."""
    missing = []
    for directory in (path, *path.parents):
        if directory.exists():
            break
        missing.append(directory)
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
