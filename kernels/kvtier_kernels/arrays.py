"""Foreign arrays seen as byte planes: the one place that knows numpy from torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier_kernels.errors import KernelError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BytePlane:
    """`data` is [num_blocks, segment_bytes] uint8, a view. Planes of one allocation have equal `storage`."""

    data: Bytes
    storage: tuple[str, int]


def byte_plane(array: Any, block_dim: int, name: str) -> BytePlane:
    """View `array` (numpy, or a torch CPU tensor) as bytes, with `block_dim` first; raises KernelError with `name`."""
    torch = sys.modules.get("torch")  # who has no torch loaded has no tensor either
    if isinstance(array, np.ndarray):
        return _numpy_plane(array, block_dim, name)
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_plane(torch, array, block_dim, name)
    raise KernelError(f"{name} is a {type(array).__name__}, not a numpy array or a torch tensor")


def _numpy_plane(array: NDArray[Any], block_dim: int, name: str) -> BytePlane:
    _check_block_dim(array.ndim, block_dim, name)
    if array.dtype.hasobject:
        raise KernelError(f"{name} is an array of {array.dtype}, which holds references and not the bytes themselves")
    if not array.flags.writeable:
        raise KernelError(f"{name} is read-only")
    blocks = np.moveaxis(array, block_dim, 0)
    _check_layout(blocks.shape, blocks.strides, array.itemsize, name)
    first = blocks[:1].reshape(-1).view(np.uint8)
    return BytePlane(_plane_of(first, blocks.shape, blocks.strides), ("numpy", id(_owner(array))))


def _owner(array: Any) -> Any:
    """The object at the end of a chain of views, some of which may be memoryviews."""
    while True:
        below = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
        if below is None:
            return array
        array = below


def _torch_plane(torch: Any, tensor: Any, block_dim: int, name: str) -> BytePlane:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise KernelError(f"{name} is a {tensor.layout} tensor on {tensor.device}, not a strided one on cpu")
    if tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        raise KernelError(f"{name} is a nested, conjugated or negated view: its memory does not hold its values")
    _check_block_dim(tensor.ndim, block_dim, name)
    blocks = tensor.detach().movedim(block_dim, 0)
    shape, strides = tuple(blocks.shape), tuple(s * tensor.element_size() for s in blocks.stride())
    _check_layout(shape, strides, tensor.element_size(), name)
    # as_strided, since view() wants the stride 1 even of a single element
    first = blocks.as_strided((blocks[0].numel(),), (1,)).view(torch.uint8).numpy()
    return BytePlane(_plane_of(first, shape, strides), ("torch", tensor.untyped_storage().data_ptr()))


def _plane_of(first: Bytes, shape: Sequence[int], strides: Sequence[int]) -> Bytes:
    # The stride of a dimension of size 1 means nothing: give it a value that later arithmetic can use.
    block_stride = strides[0] if shape[0] > 1 else first.size
    return as_strided(first, (shape[0], first.size), (block_stride, 1))


def _check_block_dim(num_dims: int, block_dim: int, name: str) -> None:
    if not isinstance(block_dim, (int, np.integer)) or isinstance(block_dim, bool):
        raise KernelError(f"{name} needs an integer for block_dim, not {block_dim!r}")
    if not -num_dims <= block_dim < num_dims:
        raise KernelError(f"{name} has {num_dims} dimensions, so no block_dim {block_dim}")


def _check_layout(shape: Sequence[int], strides: Sequence[int], itemsize: int, name: str) -> None:
    """Dimension 0 counts blocks; the others must be contiguous, last one innermost. Strides in bytes."""
    if 0 in shape or not itemsize:
        raise KernelError(f"{name} is empty: shape {tuple(shape)}, blocks first")
    segment_bytes = itemsize
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != segment_bytes:
            raise KernelError(f"{name} has segments that are not contiguous: shape {tuple(shape)}, strides {strides}")
        segment_bytes *= size
    if shape[0] > 1 and strides[0] < segment_bytes:
        raise KernelError(f"{name} has a block stride of {strides[0]} bytes, less than a segment of {segment_bytes}")
