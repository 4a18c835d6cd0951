"""The disk tier's index and everything else that its one short lock guards: claims, segments' contents, counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.errors import IntegrityError
from kvtier.frame import frame_bytes
from kvtier.index import BlockIndex
from kvtier.keys import Key, split_key
from kvtier.tiers.base import ReadOutcome, ReadRequest, WriteOutcome, WriteRequest
from kvtier.tiers.disk.layout import SegmentHeader
from kvtier.tiers.disk.segment import Segment, SegmentFile, SegmentRow, SegmentState
from kvtier.tiers.disk.transfer import Incoming, Outgoing

__all__ = ["Catalog", "Counts", "Removed"]

ENTRY_BITS = 32
ENTRY_MASK = (1 << ENTRY_BITS) - 1
STRETCH = 512  # keys for which the lock is held: others wait for it

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """What happened since the tier was opened; the fields are those of the snapshot."""

    written_bytes: int = 0
    accepted_bytes: int = 0
    evicted_blocks: int = 0
    readmitted_blocks: int = 0
    damaged: int = 0
    read_errors: int = 0
    write_errors: int = 0
    recovered_blocks: int = 0
    reclaimed_files: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """A frame of a block that was removed, and that nobody is reading."""

    segment: Segment
    page: int


class Catalog:
    """Says where each block is. A slot of the index is a segment's number and an entry of it.

    Nothing in it blocks: `lock` is never held during I/O, and is the last in every order of locks. Mutable state: all,
    guarded by `lock`, the segments' and the claims' included. Any thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.epoch = 0
        self.counts = Counts()
        self.gone: list[Key] = []
        """Evicted, or forgotten for their damage, and not yet told."""
        self._index = BlockIndex()
        self._segments: dict[int, Segment] = {}
        self._claims: dict[Key, Outgoing] = {}
        self._tick = 0
        self._next_sequence = 1
        self._next_number = 1

    @property
    def num_blocks(self) -> int:
        return self._index.num_committed

    # ---- segments ------------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        with self.lock:
            self._next_sequence += 1
            return self._next_sequence - 1

    def start_behind(self, sequence: int) -> None:
        """Sequences from here on are greater than `sequence`."""
        with self.lock:
            self._next_sequence = max(self._next_sequence, sequence + 1)

    def add_segment(self, volume: int, file: SegmentFile, header: SegmentHeader) -> Segment:
        """A new segment, open and empty."""
        with self.lock:
            segment = Segment(self._next_number, volume, file, header)
            self._segments[segment.number] = segment
            self._next_number += 1
            return segment

    def segments_of(self, volume: int) -> list[Segment]:
        """Oldest first."""
        with self.lock:
            found = [segment for segment in self._segments.values() if segment.volume == volume]
        return sorted(found, key=lambda segment: segment.header.sequence)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def adopt(self, segment: Segment) -> None:
        """Make the entries of a segment found on disk findable. Call oldest first: the newest of a key wins."""
        with self.lock:
            segment.num_live = segment.num_entries
            for entry, key in enumerate(segment.live_keys()):
                space, digest = split_key(key)
                found = self._index.find(space, digest)
                if found is not None:
                    self._forget(space, digest, found[0])
                self._insert(space, digest, segment.number << ENTRY_BITS | entry)
            self.counts.recovered_blocks = self._index.num_committed

    def retire(self, segment: Segment) -> bool:
        """Append no more. True when the caller must see to the footer, False when a writer under way will."""
        with self.lock:
            segment.state = SegmentState.FULL
            return not segment.writers

    def mark_sealed(self, segment: Segment) -> None:
        with self.lock:
            if segment.state is SegmentState.FULL:
                segment.state = SegmentState.SEALED

    def count_written(self, nbytes: int) -> None:
        with self.lock:
            self.counts.written_bytes += nbytes

    def count_write_error(self) -> None:
        with self.lock:
            self.counts.write_errors += 1

    def is_current(self, segment: Segment) -> bool:
        """Whether the segment is of this epoch."""
        return segment.header.epoch == self.epoch

    # ---- writing -------------------------------------------------------------------------------------------------

    def claim(self, requests: Sequence[WriteRequest], outcomes: list[WriteOutcome]) -> list[Outgoing]:
        """Those blocks that nobody holds or is writing, now claimed by the caller; the others' outcomes are set."""
        claimed = []
        with self.lock:
            for position, request in enumerate(requests):
                key = request.key
                if key in self._claims or self._index.find(*split_key(key)) is not None:
                    outcomes[position] = WriteOutcome.ALREADY_STORED
                    continue
                depth = 0 if request.parent is None else self._depth_below(request.parent)
                frame = Outgoing(position, key, request.parent, request.buffer, depth, self.epoch, request.checksum)
                self._claims[key] = frame
                claimed.append(frame)
        return claimed

    def place(self, segment: Segment, frames: Sequence[Outgoing]) -> int:
        """Give leading frames their pages in an open segment, which has a writer more if there are any. How many.

        Frames that were claimed before a reset get none in a segment of after it: a scan would find them there.
        """
        with self.lock:
            if segment.state is not SegmentState.OPEN or frames[0].epoch != segment.header.epoch:
                return 0
            places = segment.take([frame.frame_bytes for frame in frames])
            for frame, (page, entry) in zip(frames, places, strict=False):
                frame.page = page
                frame.entry = entry
            segment.writers += bool(places)
            return len(places)

    def publish(
        self, segment: Segment, frames: Sequence[Outgoing], written_bytes: int, outcomes: list[WriteOutcome]
    ) -> list[int]:
        """Make written frames findable and end their claims. The pages of those that were removed meanwhile."""
        void = []
        with self.lock:
            self.counts.written_bytes += written_bytes
            for frame in frames:
                outcome = WriteOutcome.WITHDRAWN
                if self._claims.get(frame.key) is frame:
                    del self._claims[frame.key]
                    row = (frame.page, frame.raw_bytes, len(frame.payload), frame.depth, frame.codec)
                    segment.set(frame.entry, frame.key, frame.parent, row)
                    self._insert(*split_key(frame.key), segment.number << ENTRY_BITS | frame.entry)
                    self.counts.accepted_bytes += frame.raw_bytes
                    outcome = WriteOutcome.STORED
                else:
                    void.append(frame.page)
                outcomes[frame.position] = outcome
        return void

    def release(self, frames: Sequence[Outgoing]) -> None:
        """End claims that came to nothing. Harmless for claims that ended."""
        with self.lock:
            for frame in frames:
                if self._claims.get(frame.key) is frame:
                    del self._claims[frame.key]

    # ---- reading -------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        found: list[bool] = []
        for part in _stretches(keys):
            with self.lock:
                found += [self._index.find(*split_key(key)) is not None for key in part]
        return found

    def pin(
        self, requests: Sequence[ReadRequest], outcomes: list[ReadOutcome], *, is_use: bool = True
    ) -> list[Incoming]:
        """What is here, in the length asked; its segments have a reader more for each. is_use: it counts as one."""
        found = []
        for part in _stretches(list(enumerate(requests))):
            with self.lock:
                for position, request in part:
                    slot = self._slot(request.key)
                    if slot is None:
                        continue
                    segment, entry = self._segments[slot >> ENTRY_BITS], slot & ENTRY_MASK
                    row = segment.row(entry)
                    if row.raw_bytes != len(request.buffer):
                        continue
                    segment.readers += 1
                    if is_use:
                        self._use(segment, entry)
                    outcomes[position] = ReadOutcome.ERROR
                    found.append(Incoming(position, request.key, request.buffer, segment, entry, row))
        return found

    def settle(self, frames: Sequence[Incoming], outcomes: list[ReadOutcome]) -> None:
        """End the reads, and forget what was not served, unless by a shortage that will pass: it would not be the next
        time either.
        """
        with self.lock:
            for frame in frames:
                frame.segment.readers -= 1
                outcomes[frame.position] = frame.outcome
                self.counts.read_errors += frame.outcome is ReadOutcome.ERROR
                if frame.outcome is not ReadOutcome.OK and not frame.may_be_good:
                    slot = frame.segment.number << ENTRY_BITS | frame.entry
                    if self._slot(frame.key) == slot:
                        self._forget(*split_key(frame.key), slot)
                        self.gone.append(frame.key)
                        self.counts.damaged += frame.outcome is ReadOutcome.DAMAGED

    def touch(self, keys: Sequence[Key]) -> None:
        for part in _stretches(keys):
            with self.lock:
                for key in part:
                    slot = self._slot(key)
                    if slot is not None:
                        self._use(self._segments[slot >> ENTRY_BITS], slot & ENTRY_MASK)

    # ---- forgetting ----------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[Key]) -> tuple[int, list[Removed]]:
        """Forget blocks, those being written too. How many were there, and the frames that may be overwritten, each
        with a writer more on its segment.
        """
        removed = []
        number = 0
        with self.lock:
            for key in keys:
                self._claims.pop(key, None)
                slot = self._slot(key)
                if slot is None:
                    continue
                number += 1
                segment = self._segments[slot >> ENTRY_BITS]
                page = segment.row(slot & ENTRY_MASK).page
                self._forget(*split_key(key), slot)
                if not segment.readers:
                    segment.writers += 1
                    removed.append(Removed(segment, page))
        return number, removed

    def end_write(self, segment: Segment) -> bool:
        """One writer less. True when the caller must see to the footer."""
        with self.lock:
            segment.writers -= 1
            return not segment.writers and segment.state is SegmentState.FULL

    def reset(self, epoch: int | None) -> None:
        """Forget every block and claim at once; with a number, begin that epoch."""
        with self.lock:
            if epoch is not None:
                self.epoch = epoch
            self._index = BlockIndex()
            self._claims.clear()
            for segment in self._segments.values():
                segment.forget_all()

    # ---- evicting ------------------------------------------------------------------------------------------------

    def hottest(self, victim: Segment, budget_bytes: int) -> list[tuple[int, SegmentRow]]:
        """Blocks used since they were written, last used first, as many as whole frames fit the budget."""
        chosen = []
        with self.lock:
            for entry in sorted(victim.used, key=victim.used.__getitem__, reverse=True):
                row = victim.row(entry)
                size = frame_bytes(row.stored_bytes)
                if size <= budget_bytes:
                    budget_bytes -= size
                    chosen.append((entry, row))
        return chosen

    def move(self, victim: Segment, entry: int, target: Segment, frame: Outgoing) -> bool:
        """A block has been copied: from now on it is found in `target`. False if it was forgotten meanwhile.

        It must be used again to be copied again.
        """
        with self.lock:
            old = victim.number << ENTRY_BITS | entry
            if self._slot(frame.key) != old:
                return False
            space, digest = split_key(frame.key)
            self._forget(space, digest, old)
            row = (frame.page, frame.raw_bytes, len(frame.payload), frame.depth, frame.codec)
            target.set(frame.entry, frame.key, frame.parent, row)
            self._insert(space, digest, target.number << ENTRY_BITS | frame.entry)
            self.counts.readmitted_blocks += 1
            return True

    def forget_damaged(self, victim: Segment, entry: int, key: Key) -> None:
        """A block turned out to be damaged when it was to be copied."""
        with self.lock:
            slot = victim.number << ENTRY_BITS | entry
            if self._slot(key) == slot:
                self._forget(*split_key(key), slot)
                self.gone.append(key)
                self.counts.damaged += 1

    def drop(self, victim: Segment) -> bool:
        """Forget a segment and its blocks, unless it is in use: False then, and nothing changed."""
        with self.lock:
            if victim.readers or victim.writers or victim.state is not SegmentState.SEALED:
                return False
            self.counts.evicted_blocks += victim.num_live
            for key in (keys := victim.live_keys()):
                self._index.remove(*split_key(key))
            self.gone += keys
            victim.forget_all()
            victim.state = SegmentState.DEAD
            del self._segments[victim.number]
            return True

    def abandon(self, segment: Segment) -> bool:
        """Let go of a segment of an older epoch, unless it is in use: False then, and nothing changed."""
        with self.lock:
            if segment.readers or segment.writers or segment.state is not SegmentState.SEALED:
                return False
            segment.state = SegmentState.DEAD
            del self._segments[segment.number]
            return True

    # ---- checking ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        with self.lock:
            self._index.check_integrity()
            for segment in self._segments.values():
                segment.check_integrity()
            live = sum(segment.num_live for segment in self._segments.values())
            if live != self._index.num_committed or self._index.num_reserved:
                raise IntegrityError(f"disk tier: segments hold {live} blocks, the index {self._index.num_committed}")
            for space, digest, slot, _ in self._index.items():
                segment_of = self._segments.get(slot >> ENTRY_BITS)
                if segment_of is None or segment_of.row(slot & ENTRY_MASK).key != space + digest:
                    raise IntegrityError(f"disk tier: {(space + digest).hex()} is not where the index says")

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _slot(self, key: Key) -> int | None:
        found = self._index.find(*split_key(key))
        return None if found is None else found[0]

    def _insert(self, space: bytes, digest: bytes, slot: int) -> None:
        self._index.reserve(space, digest, slot)
        self._index.commit(space, digest)

    def _forget(self, space: bytes, digest: bytes, slot: int) -> None:
        self._index.remove(space, digest)
        self._segments[slot >> ENTRY_BITS].forget(slot & ENTRY_MASK)

    def _use(self, segment: Segment, entry: int) -> None:
        self._tick += 1
        segment.used[entry] = self._tick

    def _depth_below(self, parent: Key) -> int:
        claimed = self._claims.get(parent)
        if claimed is not None:
            return claimed.depth + 1
        slot = self._slot(parent)
        return 0 if slot is None else self._segments[slot >> ENTRY_BITS].row(slot & ENTRY_MASK).depth + 1


def _stretches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), STRETCH):
        yield items[start : start + STRETCH]
