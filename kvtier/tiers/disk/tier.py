"""The disk tier: blocks in preallocated segments on local file systems, by direct I/O where that works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.clock import Clock, MonotonicClock
from kvtier.codecs import codec_by_name
from kvtier.errors import ClosedError, ConfigError, LayoutError, TierError
from kvtier.frame import MAX_PAYLOAD_BYTES, frame_bytes
from kvtier.keys import Key, split_key
from kvtier.tiers.base import ReadOutcome, ReadRequest, Tier, TierUsage, WriteOutcome, WriteRequest
from kvtier.tiers.disk.catalog import Catalog
from kvtier.tiers.disk.files import Files
from kvtier.tiers.disk.listing import Row, list_rows, list_segment
from kvtier.tiers.disk.opening import Opening, open_volumes
from kvtier.tiers.disk.scratch import ScratchPool
from kvtier.tiers.disk.snapshot import DiskSnapshot
from kvtier.tiers.disk.transfer import Outgoing, groups
from kvtier.tiers.disk.volume import Volume
from kvtier.tiers.forked import OwnProcess

__all__ = ["DiskTier"]


class DiskTier(OwnProcess, Tier):
    """Blocks below host memory, in one or more directories, across restarts.

    Blocks are appended to segments, and whole segments are evicted, oldest first; of a segment's blocks those that
    were used since they were written are kept, within a bound. There is no fsync of blocks: after a power failure a
    block that had been stored may be a miss, which checksums tell. After a crash of the process nothing that was
    stored is lost, and what was removed may be found again if the removal could not be written.

    Every call may block on the device, and any thread may make one. No call waits for another's device I/O, but that
    writes to one directory queue behind its change of segments. Locks are ordered: a volume's, then the catalog's.
    `close` does not wait for calls under way; the last of them gives back what the tier holds.
    Mutable state: `_closed`, `_operations`, `_in_flight`, `_next_volume`, guarded by the catalog's lock;
    `_epoch_is_safe`, by `_resetting`; `_on_gone`, replaced as a whole.
    """

    name = "disk"
    _owned = "disk tier"
    _instead = "open a store in the child, with a directory of its own"

    def __init__(
        self,
        paths: Sequence[Path],
        capacity_bytes: int,
        *,
        min_free_bytes: int = 0,
        codec: str = "raw",
        segment_bytes: int | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Open the directories, which are made where missing, and index what they hold.

        paths: each on a device of its own, ideally. capacity_bytes: real bytes of all of them together. min_free_bytes:
        what stays free on each file system. segment_bytes: of one file; by default it follows from the capacity.
        Raises ConfigError for a directory that cannot be used or is in use, or a capacity that is too small.
        """
        super().__init__()
        if not paths:
            raise ConfigError("disk.path names no directory")
        self._codec = codec_by_name(codec)
        self._capacity_bytes = capacity_bytes
        self._catalog = Catalog()
        self._scratch = ScratchPool()
        opening = Opening(
            paths=[Path(path).absolute() for path in paths],
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
            segment_bytes=segment_bytes,
            clock=clock or MonotonicClock(),
            files=files or Files(),
            scratch=self._scratch,
        )
        self._volumes = open_volumes(opening, self._catalog)
        self._closed = False
        self._operations = 0
        self._in_flight = [0] * len(self._volumes)
        self._next_volume = 0
        self._resetting = threading.Lock()
        self._epoch_is_safe = True
        self._on_gone: tuple[Callable[[Sequence[Key]], None], ...] = ()

    @property
    def epoch(self) -> int:
        return self._catalog.epoch

    def start_epoch(self, epoch: int) -> None:
        """Forget every block at once, and write `epoch` through to the device in every directory.

        Writes under way do not become findable. What was stored is deleted, or made void where it is in use, so that
        the reset holds whatever becomes of the meta file. Nothing to do for the present epoch, unless the call before
        failed. Raises TierError for an earlier epoch, and when a directory could not be told: then the blocks are
        forgotten for as long as the tier is open, and the call may be repeated.
        """
        with self._operation(), self._resetting:
            current = self._catalog.epoch
            if epoch == current and self._epoch_is_safe:
                return
            if epoch < current:
                raise TierError(f"the disk tier is in epoch {current}; a reset begins a later one, not {epoch}")
            self._epoch_is_safe = False
            self._catalog.reset(epoch)
            failed = [message for volume in self._volumes if (message := volume.begin_epoch(epoch)) is not None]
            if failed:
                raise TierError(f"the disk tier could not write down epoch {epoch}: {'; '.join(failed)}")
            self._epoch_is_safe = True

    def check_block(self, nbytes: int) -> None:
        """Raises ConfigError for a block that no segment can hold."""
        longest = max(volume.max_frame_bytes for volume in self._volumes)
        if frame_bytes(nbytes) > longest:
            raise ConfigError(
                f"disk.size = {self._capacity_bytes} makes segments whose blocks are at most {longest} bytes long, and "
                f"a block of this model takes {frame_bytes(nbytes)}; raise disk.size"
            )

    # ---- what it holds -------------------------------------------------------------------------------------------

    def keys(self, namespace: bytes) -> list[tuple[Key, Key | None]]:
        """Every block of one namespace digest, with its parent, oldest segment first; those found at open too. A
        snapshot only where nothing is written or evicted meanwhile. Takes time in proportion; never blocks on I/O."""
        self.check_process()
        segments = [segment for volume in self._volumes for segment in self._catalog.segments_of(volume.number)]
        return [block for segment in segments for block in list_segment(self._catalog, segment, namespace)]

    def rows(self) -> Iterator[list[Row]]:
        """Every block, oldest segment first, some hundred at a time. As `keys` otherwise."""
        self.check_process()
        for volume in self._volumes:
            for segment in self._catalog.segments_of(volume.number):
                yield from list_rows(self._catalog, segment)

    def subscribe_gone(self, callback: Callable[[Sequence[Key]], None]) -> Callable[[], None]:
        """Call back with blocks that were evicted, or forgotten because they were damaged, though nobody removed them;
        without a lock, on the thread whose call found them so, before that call returns. Be quick, and do not raise. A
        reset is not told. Returns a call that ends it."""
        self._on_gone = (*self._on_gone, callback)

        def unsubscribe() -> None:
            self._on_gone = tuple(each for each in self._on_gone if each is not callback)

        return unsubscribe

    # ---- Tier ----------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Never blocks. All False after `close`."""
        self.check_process()
        return self._catalog.contains(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Never blocks."""
        self.check_process()
        self._catalog.touch(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        """Read blocks straight into the buffers where those begin on a page, else through a copy.

        A block that could not be read, or was not what had been written, is forgotten: DAMAGED or ERROR now, and MISS
        without a look at the device from then on. For want of descriptors or memory it is ERROR, and kept.
        """
        return self._read(requests, is_use=True)

    def inspect(self, requests: Sequence[ReadRequest]) -> list[ReadOutcome]:
        """As `read`, damage forgotten as there, but no use of the blocks: what goes first stays as it was."""
        return self._read(requests, is_use=False)

    def _read(self, requests: Sequence[ReadRequest], *, is_use: bool) -> list[ReadOutcome]:
        for request in requests:
            split_key(request.key)
            if request.buffer.readonly:
                raise LayoutError("a block is read into a writable buffer")
        outcomes = [ReadOutcome.MISS] * len(requests)
        with self._operation():
            frames = self._catalog.pin(requests, outcomes, is_use=is_use)
            try:
                for volume in self._volumes:
                    own = [frame for frame in frames if frame.segment.volume == volume.number]
                    if own:
                        volume.load(own)
            finally:
                self._catalog.settle(frames, outcomes)
        return outcomes

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteOutcome]:
        """Append blocks to a segment with room, contiguous as far as one transfer carries them.

        ALREADY_STORED also while another thread is writing the key. FULL when no segment can be evicted now, the file
        system is full, or the block is longer than a segment.
        """
        for request in requests:
            _check_block(request)
        outcomes = [WriteOutcome.ERROR] * len(requests)
        with self._operation():
            claimed = self._catalog.claim(requests, outcomes)
            try:
                for group in groups(claimed):
                    for frame in group:
                        frame.encode(self._codec)
                    self._store(group, outcomes)
            finally:
                self._catalog.release(claimed)
        return outcomes

    def remove(self, keys: Sequence[Key]) -> int:
        """Forget blocks, here and, by a write to each one's header and to footers, for later opens."""
        with self._operation():
            number, removed = self._catalog.remove(keys)
            for volume in self._volumes:
                volume.erase([frame for frame in removed if frame.segment.volume == volume.number])
        return number

    def usage(self) -> TierUsage:
        """Real bytes of all our files. As the threads that write last saw them: no system call."""
        self.check_process()
        return TierUsage(self._catalog.num_blocks, self._used_bytes(), self._capacity_bytes)

    def snapshot(self) -> DiskSnapshot:
        """As `usage`, and everything else that is counted."""
        self.check_process()
        counts = self._catalog.counts
        return DiskSnapshot(
            num_blocks=self._catalog.num_blocks,
            used_bytes=self._used_bytes(),
            capacity_bytes=self._capacity_bytes,
            written_bytes=counts.written_bytes,
            accepted_bytes=counts.accepted_bytes,
            evicted_blocks=counts.evicted_blocks,
            readmitted_blocks=counts.readmitted_blocks,
            damaged=counts.damaged,
            read_errors=counts.read_errors,
            write_errors=counts.write_errors,
            recovered_blocks=counts.recovered_blocks,
            reclaimed_files=counts.reclaimed_files,
            mode={str(volume.directory.path): volume.directory.mode for volume in self._volumes},
            read_only={str(volume.directory.path): volume.allotment.reason for volume in self._volumes},
            num_segments=self._catalog.num_segments,
            epoch=self._catalog.epoch,
        )

    def check_integrity(self) -> None:
        """O(blocks). Nothing after `close`."""
        self.check_process()
        if not self._begin():
            return
        try:
            self._catalog.check_integrity()
            for volume in self._volumes:
                volume.check_integrity()
        finally:
            self._end()

    def close(self) -> None:
        """Seal the open segments, and give back locks and descriptors; both at the end of the last call under way, if
        there are any. Idempotent. In a fork's child nothing happens: all of it is the parent's.

        A few pages for each directory, written without a lock: a device that hangs keeps only the thread that closes,
        and what it did not write is found again by a scan.
        """
        if self.is_forked:
            return
        with self._catalog.lock:
            finish = not self._closed and not self._operations
            self._closed = True
        if finish:
            self._finish()

    # ---- calls under way -----------------------------------------------------------------------------------------

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self.check_process()
        if not self._begin():
            raise ClosedError("the disk tier is closed")
        try:
            yield
        finally:
            self._end()
            self._tell_gone()

    def _begin(self) -> bool:
        with self._catalog.lock:
            self._operations += not self._closed
            return not self._closed

    def _end(self) -> None:
        with self._catalog.lock:
            self._operations -= 1
            finish = self._closed and not self._operations
        if finish:
            self._finish()

    def _tell_gone(self) -> None:
        if not self._catalog.gone:
            return
        with self._catalog.lock:
            gone, self._catalog.gone = self._catalog.gone, []
        if gone:
            for callback in self._on_gone:
                callback(gone)

    def _finish(self) -> None:
        for volume in self._volumes:
            volume.close(seal=True)
        self._scratch.close()
        self._catalog.reset(None)

    # ---- writing -------------------------------------------------------------------------------------------------

    def _store(self, frames: Sequence[Outgoing], outcomes: list[WriteOutcome]) -> None:
        """Offer frames to one volume after the other, the least busy first, until all are stored."""
        left = frames
        failed: set[int] = set()
        for volume in self._volumes_for_writing():
            fitting = [frame for frame in left if frame.frame_bytes <= volume.max_frame_bytes]
            too_long = [frame for frame in left if frame.frame_bytes > volume.max_frame_bytes]
            for frame in too_long:
                outcomes[frame.position] = WriteOutcome.FULL
            self._count_in_flight(volume, 1)
            try:
                refused = volume.store(fitting, outcomes)
            finally:
                self._count_in_flight(volume, -1)
            left = [*refused, *too_long]
            failed.update(frame.position for frame in left if outcomes[frame.position] is WriteOutcome.ERROR)
            if not left:
                return
        for position in failed.intersection(frame.position for frame in left):
            outcomes[position] = WriteOutcome.ERROR  # though another directory was merely full

    def _volumes_for_writing(self) -> list[Volume]:
        if len(self._volumes) == 1:
            return self._volumes
        cooling = [volume.allotment.is_cooling for volume in self._volumes]
        with self._catalog.lock:
            first = self._next_volume
            self._next_volume = (first + 1) % len(self._volumes)
            order = sorted(
                range(len(self._volumes)),
                key=lambda number: (cooling[number], self._in_flight[number], (number - first) % len(cooling)),
            )
        return [self._volumes[number] for number in order]

    def _count_in_flight(self, volume: Volume, change: int) -> None:
        with self._catalog.lock:
            self._in_flight[volume.number] += change

    def _used_bytes(self) -> int:
        if not self._begin():
            return 0
        try:
            return sum(volume.allotment.used_bytes for volume in self._volumes)
        finally:
            self._end()


def _check_block(request: WriteRequest) -> None:
    split_key(request.key)
    if request.parent is not None:
        split_key(request.parent)
    if not 0 < len(request.buffer) <= MAX_PAYLOAD_BYTES:
        raise LayoutError(f"a block has 1 to {MAX_PAYLOAD_BYTES} bytes, not {len(request.buffer)}")
