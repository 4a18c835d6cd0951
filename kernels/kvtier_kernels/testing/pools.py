"""Pools of random bytes in every layout, whose blocks can be read and written without `BlockPlanes`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.checks import Planes
from kvtier_kernels.planes import BlockPlanes

Allocate = Callable[..., Bytes]  # sizes of the dimensions -> array
View = Callable[[Sequence[Any]], Planes]
"""What a back end sees a pool as, of one array a plane."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """`layout` is a key of `LAYOUTS`; `dtype` is uint8, float32 (both numpy) or bfloat16 (torch)."""

    layout: str
    segment_bytes: int
    dtype: str = "uint8"
    num_layers: int = 3
    num_blocks: int = 9

    def __str__(self) -> str:
        return f"{self.layout}-{self.dtype}-{self.num_layers}x{self.num_blocks}x{self.segment_bytes}"


def _kv_split(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    pool = allocate(shape.num_layers, 2, shape.num_blocks, shape.segment_bytes)
    return [pool[layer, kv] for layer in range(shape.num_layers) for kv in range(2)]


def _fused(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    return list(allocate(shape.num_layers, shape.num_blocks, shape.segment_bytes))


def _padded(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    return [plane[:, : shape.segment_bytes] for plane in allocate(2, shape.num_blocks, shape.segment_bytes + 8)]


def _block_major(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    pool = allocate(shape.num_blocks, shape.num_layers, 2, shape.segment_bytes)
    return [pool[:, layer, kv] for layer in range(shape.num_layers) for kv in range(2)]


def _reversed_layers(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    return _fused(shape, allocate)[::-1]


def _separate(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    return [allocate(shape.num_blocks, shape.segment_bytes) for _ in range(2 * shape.num_layers)]


def _separate_layers(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    layers = [allocate(2, shape.num_blocks, shape.segment_bytes) for _ in range(shape.num_layers)]
    return [layer[kv] for layer in layers for kv in range(2)]


def _separate_strides(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    """Each layer has blocks of another stride."""
    return [
        allocate(shape.num_blocks, shape.segment_bytes + 4 * layer)[:, : shape.segment_bytes]
        for layer in range(shape.num_layers)
    ]


def _unequal(shape: PoolShape, allocate: Allocate) -> list[Bytes]:
    """Segments of three sizes: two equal ones in one storage, two in separate ones, a small one last."""
    small, separate = allocate(2, shape.num_blocks, shape.segment_bytes), 2 * shape.segment_bytes
    large = [allocate(shape.num_blocks, separate) for _ in range(2)]
    return [*small, *large, allocate(shape.num_blocks, 4)]


LAYOUTS: dict[str, Callable[[PoolShape, Allocate], list[Bytes]]] = {
    "kv_split": _kv_split,
    "fused": _fused,
    "padded": _padded,
    "block_major": _block_major,
    "reversed_layers": _reversed_layers,
    "separate": _separate,
    "separate_layers": _separate_layers,
    "separate_strides": _separate_strides,
    "unequal": _unequal,
}


def pool_shapes(dtypes: Sequence[str] = ("float32", "bfloat16")) -> Iterator[PoolShape]:
    """Every layout with small, odd and large segments, as bytes and, where the size allows, as another dtype."""
    for layout, segment_bytes in product(LAYOUTS, (16, 17, 1032, 4095, 8208)):
        yield PoolShape(layout, segment_bytes)
    for layout, dtype in product(LAYOUTS, dtypes):
        yield PoolShape(layout, 4096, dtype)
    yield PoolShape("separate", 8208, num_layers=40, num_blocks=2)  # a block too large for one temporary
    yield PoolShape("separate", 600_000, num_layers=1, num_blocks=2)  # so is a segment
    yield PoolShape("fused", 64, num_layers=1, num_blocks=1)


class Pool:
    """A pool of random bytes. Owns its storages; `arrays` view them as bytes, `planes` is what is under test."""

    def __init__(
        self, shape: PoolShape, storages: Sequence[Bytes] | None = None, *, view: View = BlockPlanes.from_arrays
    ) -> None:
        self.shape = shape
        self._view = view
        self.storages: list[Bytes] = []
        rng = np.random.default_rng(7)

        def allocate(*sizes: int) -> Bytes:
            if storages is None:
                storage = rng.integers(0, 256, sizes, dtype=np.uint8)
            else:
                storage = storages[len(self.storages)].copy()
            self.storages.append(storage)
            return storage

        self.arrays = LAYOUTS[shape.layout](shape, allocate)
        self.planes: Any = view([_cast(array, shape.dtype) for array in self.arrays])
        self.block_bytes = sum(array.shape[1] for array in self.arrays)

    def clone(self) -> "Pool":
        """Same bytes in other memory."""
        return Pool(self.shape, self.storages, view=self._view)

    def block(self, block_id: int) -> Bytes:
        """What a slot of this block holds."""
        return np.concatenate([array[block_id] for array in self.arrays])

    def set_block(self, block_id: int, data: Bytes) -> None:
        """Write the block from a slot's bytes."""
        start = 0
        for array in self.arrays:
            array[block_id] = data[start : start + array.shape[1]]
            start += array.shape[1]

    def verify_equal(self, expected: "Pool") -> None:
        """All bytes of all storages, those outside of any segment too."""
        for storage, other in zip(self.storages, expected.storages, strict=True):
            verify_bytes(storage, other)


def verify_bytes(actual: Bytes, expected: Bytes) -> None:
    """Raise AssertionError that shows where they differ."""
    if not np.array_equal(actual, expected):  # several times faster than the assertion
        np.testing.assert_array_equal(actual, expected)


def _cast(array: Bytes, dtype: str) -> Any:
    if dtype != "bfloat16":
        return array.view(dtype)
    import torch

    return torch.from_numpy(array).view(torch.bfloat16)
