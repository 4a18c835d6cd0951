"""The contract of a back end."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from numpy.typing import ArrayLike

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.checks import Copies, Planes, check_gather, check_scatter

P = TypeVar("P", bound=Planes)


class KernelBackend(ABC, Generic[P]):
    """Copies blocks between a pool, seen as planes of kind P, and slots of a host buffer. All back ends move the same
    bytes.

    `host` is 1-D contiguous uint8; slot i is the `planes.block_bytes` bytes from `offsets[i]` on, of any alignment. A
    block id of -1 is a hole: it and its offset are skipped. `block_ids` and `offsets` are lists or 1-D integer arrays.

    A bad argument raises KernelError before any byte moves. The calls block until all bytes are there. They keep no
    state and release the GIL while bytes move, so several threads may call at once on blocks and slots that are
    disjoint; overlapping ones are a race, which is not detected. `host` must not be memory of the pool.

    An implementation overrides `_gather` and `_scatter`, which get checked copies without holes.
    """

    def gather(self, planes: P, block_ids: ArrayLike, host: Bytes, offsets: ArrayLike) -> None:
        """Copy block `block_ids[i]` into slot i (store). Slots must not overlap; a block may be named twice."""
        self._gather(planes, check_gather(planes, block_ids, host, offsets), host)

    def scatter(self, planes: P, block_ids: ArrayLike, host: Bytes, offsets: ArrayLike) -> None:
        """Copy slot i into block `block_ids[i]` (restore). No block may be named twice; a slot may."""
        self._scatter(planes, check_scatter(planes, block_ids, host, offsets), host)

    @abstractmethod
    def _gather(self, planes: P, copies: Copies, host: Bytes) -> None: ...

    @abstractmethod
    def _scatter(self, planes: P, copies: Copies, host: Bytes) -> None: ...
