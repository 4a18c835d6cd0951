"""Runs of planes: what a back end can copy with one call a block.

A run is a stretch of consecutive planes with one segment size, so its part of a slot is a dense [num_planes,
segment_bytes]. Equally spaced planes of one storage make an `EvenRun`, all others an `UnevenRun`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier_kernels.arrays import BytePlane, Bytes

# numpy and torch count the elements of a view in 63 bits.
_MAX_VIEW_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class _Run:
    slot_offset: int  # bytes from the start of a slot to the run's first segment
    num_planes: int
    segment_bytes: int

    def slot(self, host: Bytes, offset: int) -> Bytes:
        """The run's part [num_planes, segment_bytes] of the slot that starts at byte `offset` of `host`."""
        start = offset + self.slot_offset
        return host[start : start + self.num_planes * self.segment_bytes].reshape(self.num_planes, self.segment_bytes)


@dataclass(frozen=True, slots=True)
class EvenRun(_Run):
    """Segment (p, b) is `grid[p, b]`."""

    grid: Bytes  # [num_planes, num_blocks, segment_bytes], strided


@dataclass(frozen=True, slots=True)
class UnevenRun(_Run):
    """Segment (p, b) is `windows[starts[p] + b * steps[p]]`.

    `windows` is [address range, segment_bytes] with strides (1, 1): row i is the segment that would start i bytes after
    the lowest plane. It spans memory between the planes that is not ours, so index it with `rows()` and nothing else.
    """

    windows: Bytes
    starts: NDArray[np.int64]
    steps: NDArray[np.int64]

    def rows(self, block_id: int) -> NDArray[np.int64]:
        """The row of each plane's segment of one block."""
        rows: NDArray[np.int64] = self.starts + block_id * self.steps
        return rows


PlaneRun = EvenRun | UnevenRun


def plane_runs(planes: Sequence[BytePlane]) -> Iterator[PlaneRun]:
    """Cut the planes into runs, in plane order. The runs do not keep the planes' memory alive."""
    slot_offset = 0
    for segment_bytes, group in groupby(planes, key=lambda plane: plane.data.shape[1]):
        members = list(group)
        yield from _runs_of_equal_segments(members, slot_offset)
        slot_offset += segment_bytes * len(members)


def _runs_of_equal_segments(planes: list[BytePlane], slot_offset: int) -> Iterator[PlaneRun]:
    num_blocks, segment_bytes = planes[0].data.shape
    addresses = np.array([plane.data.ctypes.data for plane in planes], np.int64)
    steps = np.array([plane.data.strides[0] for plane in planes], np.int64)
    spacing = np.diff(addresses)
    one_storage = len({plane.storage for plane in planes}) == 1
    if one_storage and np.all(steps == steps[0]) and (len(planes) == 1 or (spacing[0] > 0 and np.ptp(spacing) == 0)):
        plane_stride = int(spacing[0]) if len(planes) > 1 else num_blocks * segment_bytes
        shape = (len(planes), num_blocks, segment_bytes)
        grid = as_strided(planes[0].data, shape, (plane_stride, int(steps[0]), 1))
        yield EvenRun(slot_offset, len(planes), segment_bytes, grid)
        return
    lowest = int(np.argmin(addresses))
    starts = addresses - addresses[lowest]
    num_rows = int(np.max(starts + (num_blocks - 1) * steps)) + 1
    if num_rows * segment_bytes > _MAX_VIEW_BYTES:
        for index, plane in enumerate(planes):
            yield from _runs_of_equal_segments([plane], slot_offset + index * segment_bytes)
        return
    windows = as_strided(planes[lowest].data, (num_rows, segment_bytes), (1, 1))
    yield UnevenRun(slot_offset, len(planes), segment_bytes, windows, starts, steps)
