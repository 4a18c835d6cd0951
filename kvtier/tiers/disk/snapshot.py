"""What a disk tier tells of itself, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DiskSnapshot"]


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """Counts are since the tier was opened, bytes are real ones. Directories are named by their paths as given."""

    num_blocks: int
    """Blocks that a read would find."""
    used_bytes: int
    """Bytes on disk of every file of ours, preallocated room included."""
    capacity_bytes: int
    """What `used_bytes` never exceeds."""
    written_bytes: int
    """Bytes written to devices: frames, segment headers, footers, and what eviction copied."""
    accepted_bytes: int
    """Lengths, uncompressed, of the blocks that were stored, each at its first write."""
    evicted_blocks: int
    """Blocks that were given up with their segment."""
    readmitted_blocks: int
    """Blocks that had been used and were copied before their segment was given up."""
    damaged: int
    """Blocks that were not what had been written, each counted once and forgotten."""
    read_errors: int
    """Blocks that the device failed to read."""
    write_errors: int
    """Transfers that the device failed to write."""
    recovered_blocks: int
    """Blocks that were found when the tier was opened."""
    reclaimed_files: int
    """Files deleted at opening: damaged, cut short, left over, of an older epoch, or beyond the capacity."""
    mode: Mapping[str, str]
    """By directory: 'direct', or 'buffered' where the file system refuses direct I/O."""
    read_only: Mapping[str, str | None]
    """By directory: why nothing is written there now, or None."""
    num_segments: int
    """Segments with blocks or room for them, spare files not counted."""
    epoch: int
    """The number of the last reset that the tier was told of."""
