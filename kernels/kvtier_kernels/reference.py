"""The definition of gather and scatter: plain slices, one a plane and block."""

from collections.abc import Iterator

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.base import KernelBackend
from kvtier_kernels.checks import Copies
from kvtier_kernels.planes import BlockPlanes


class ReferenceBackend(KernelBackend[BlockPlanes]):
    """What the others must equal. Slow beside busy Python threads: it takes the GIL once a segment."""

    def _gather(self, planes: BlockPlanes, copies: Copies, host: Bytes) -> None:
        for segment, part in _segments(planes, copies, host):
            part[:] = segment

    def _scatter(self, planes: BlockPlanes, copies: Copies, host: Bytes) -> None:
        for segment, part in _segments(planes, copies, host):
            segment[:] = part


def _segments(planes: BlockPlanes, copies: Copies, host: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Each pool segment with its part of a slot."""
    for block_id, offset in copies:
        start = offset
        for plane in planes.planes:
            segment = plane[block_id]
            yield segment, host[start : start + segment.size]
            start += segment.size
