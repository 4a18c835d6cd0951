"""What every back end checks before the first byte moves."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.errors import KernelError

HOLE = -1
Copies = list[tuple[int, int]]  # (block id, byte offset of its slot), holes left out


class Planes(Protocol):
    """A pool of `num_blocks` blocks of `block_bytes` bytes each, wherever it is."""

    num_blocks: int
    block_bytes: int


def check_gather(planes: Planes, block_ids: ArrayLike, host: Bytes, offsets: ArrayLike) -> Copies:
    """The copies of a gather, whose slots are writable and do not overlap; raises KernelError."""
    ids, starts = _check_copies(planes, block_ids, host, offsets)
    if not host.flags.writeable:
        raise KernelError("host is read-only, and gather writes it")
    in_order = np.sort(starts)
    overlapping = np.flatnonzero(np.diff(in_order) < planes.block_bytes)
    if overlapping.size:
        first, second = in_order[overlapping[0] : overlapping[0] + 2].tolist()
        raise KernelError(f"slots at offsets {first} and {second} overlap: a slot is {planes.block_bytes} bytes")
    return list(zip(ids.tolist(), starts.tolist(), strict=True))


def check_scatter(planes: Planes, block_ids: ArrayLike, host: Bytes, offsets: ArrayLike) -> Copies:
    """The copies of a scatter, which names no block twice; raises KernelError."""
    ids, starts = _check_copies(planes, block_ids, host, offsets)
    unique, counts = np.unique(ids, return_counts=True)
    if unique.size != ids.size:
        raise KernelError(f"block_ids holds {unique[np.argmax(counts)]} more than once, and scatter writes it")
    return list(zip(ids.tolist(), starts.tolist(), strict=True))


def _check_copies(
    planes: Planes, block_ids: ArrayLike, host: Bytes, offsets: ArrayLike
) -> tuple[NDArray[Any], NDArray[Any]]:
    _check_host(host)
    ids, starts = _integers(block_ids, "block_ids"), _integers(offsets, "offsets")
    if ids.size != starts.size:
        raise KernelError(f"{ids.size} block_ids but {starts.size} offsets")
    _check_range(ids, HOLE, planes.num_blocks - 1, "block_ids")
    wanted = ids != HOLE
    # The offset of a hole is never looked at: 0 stands in for it here.
    _check_range(np.where(wanted, starts, 0), 0, max(host.size - planes.block_bytes, 0), "offsets")
    if np.any(wanted) and host.size < planes.block_bytes:
        raise KernelError(f"host has {host.size} bytes, less than a slot of {planes.block_bytes}")
    return ids[wanted], starts[wanted]


def _check_host(host: Bytes) -> None:
    if not isinstance(host, np.ndarray):
        raise KernelError(f"host is a {type(host).__name__}, not a numpy array")
    if host.dtype != np.uint8 or host.ndim != 1 or not host.flags.c_contiguous:
        raise KernelError(f"host is {host.dtype} {host.shape}, strides {host.strides}, not 1-D contiguous uint8")


def _integers(values: ArrayLike, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: a tensor that numpy cannot view
        raise KernelError(f"{name} is not a list of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise KernelError(f"{name} is {array.dtype} {array.shape}, not a list of integers")
    return array


def _check_range(values: NDArray[Any], low: int, high: int, name: str) -> None:
    outside = np.flatnonzero((values < low) | (values > high))
    if outside.size:
        index = int(outside[0])
        raise KernelError(f"{name}[{index}] is {values[index]}, outside {low}..{high}")
