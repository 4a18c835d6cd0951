"""The engine's block pool as byte planes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_kernels.arrays import BytePlane, Bytes, byte_plane
from kvtier_kernels.errors import KernelError
from kvtier_kernels.runs import EvenRun, PlaneRun, plane_runs


class BlockPlanes:
    """A block pool in CPU memory, seen as `num_planes` planes of [num_blocks, segment_bytes] bytes.

    A plane is what one block holds in one place: a layer's K, a layer's V, a fused K/V or an MLA latent. A slot is
    block-first: the segments of one block in plane order, `block_bytes` long.

    The planes are views, and the object keeps the memory alive. It is immutable; what the pool holds is not, and
    whoever calls a back end makes sure that nobody else writes the blocks meanwhile.
    """

    def __init__(self, planes: Sequence[BytePlane]) -> None:
        """Use `from_arrays`."""
        if not planes:
            raise KernelError("a pool needs at least one plane")
        self.planes: tuple[Bytes, ...] = tuple(plane.data for plane in planes)
        self.num_planes = len(planes)
        self.num_blocks: int = self.planes[0].shape[0]
        self.segment_bytes: tuple[int, ...] = tuple(plane.shape[1] for plane in self.planes)
        self.block_bytes = sum(self.segment_bytes)
        self._check_planes()
        self.runs: tuple[PlaneRun, ...] = tuple(plane_runs(planes))

    @classmethod
    def from_arrays(cls, arrays: Sequence[Any], block_dim: int = 0) -> "BlockPlanes":
        """One plane an array, in order: numpy arrays or torch CPU tensors of any dtype and any trailing shape.

        An engine's pool [layers, 2, num_blocks, tokens, heads, head_dim] is
        `from_arrays([pool[layer, kv] for layer in range(layers) for kv in range(2)])`. `block_dim` is the dimension
        that counts blocks; the others, in their order, are the segment. Segments are contiguous, blocks may be any
        stride apart, and planes may differ in segment size.

        Raises KernelError, naming the plane, for anything else: wrong device, segments not contiguous, overlapping
        blocks, unequal numbers of blocks, the same plane twice, read-only or empty arrays. Planes that overlap in part
        are not detected.
        """
        if not isinstance(arrays, Iterable):
            raise KernelError(f"arrays is a {type(arrays).__name__}, not a sequence of arrays")
        return cls([byte_plane(array, block_dim, f"plane {index}") for index, array in enumerate(arrays)])

    def as_3d(self) -> NDArray[np.int64] | Bytes | None:
        """The whole pool as one strided view, if its planes are equally spaced in one storage with equal segments.

        The view is [num_planes, num_blocks, segment] of int64 where address, strides and segment are multiples of 8
        bytes, else of uint8; None for any other pool.
        """
        run = self.runs[0]
        if len(self.runs) > 1 or not isinstance(run, EvenRun):
            return None
        numbers = (run.grid.ctypes.data, *run.grid.strides[:2], run.segment_bytes)
        return run.grid.view(np.int64) if all(number % 8 == 0 for number in numbers) else run.grid

    def _check_planes(self) -> None:
        address_to_index: dict[int, int] = {}
        for index, plane in enumerate(self.planes):
            if plane.shape[0] != self.num_blocks:
                raise KernelError(f"plane {index} has {plane.shape[0]} blocks, plane 0 has {self.num_blocks}")
            other = address_to_index.setdefault(plane.ctypes.data, index)
            if other != index:
                raise KernelError(f"plane {index} is the same memory as plane {other}")
