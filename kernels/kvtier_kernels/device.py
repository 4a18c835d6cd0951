"""A block pool in an accelerator's memory, and copies between it and host memory. Imports torch: import it by name."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvtier_kernels.arrays import Bytes
from kvtier_kernels.base import KernelBackend
from kvtier_kernels.checks import Copies
from kvtier_kernels.errors import KernelError

__all__ = ["DeviceBackend", "DevicePlanes", "pin", "unpin"]

STAGE_BYTES = 64 << 20
"""Of the device's memory that one copy takes at most: blocks go through it in one piece, as they lie in their slots."""
REGISTER_BYTES = 64 << 30  # drivers refuse to lock 512 GiB at once
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class DevicePlanes:
    """As BlockPlanes, of tensors on one device: `planes[i]` is [num_blocks, words], a view.

    Words are as wide as sizes and addresses allow: a device moves eight bytes as fast as one. Immutable; keeps the
    memory alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: one plane each, [num_blocks, ...] with dense blocks. Raises KernelError, naming the plane."""
        if not tensors:
            raise KernelError("a pool needs at least one plane")
        as_bytes = [_byte_view(tensor, f"plane {index}") for index, tensor in enumerate(tensors)]
        self.device = tensors[0].device
        self.num_blocks = int(as_bytes[0].shape[0])
        self.segment_bytes = tuple(int(plane.shape[1]) for plane in as_bytes)
        self.block_bytes = sum(self.segment_bytes)
        for index, plane in enumerate(as_bytes):
            if (plane.device, plane.shape[0]) != (self.device, self.num_blocks):
                raise KernelError(
                    f"plane {index} has {plane.shape[0]} blocks on {plane.device}, plane 0 {self.num_blocks} on "
                    f"{self.device}"
                )
        numbers = [*self.segment_bytes, *(n for plane in as_bytes for n in (plane.data_ptr(), plane.stride(0)))]
        self.word = next(word for word in WORDS if all(number % word.itemsize == 0 for number in numbers))
        self.planes = tuple(plane.view(self.word) for plane in as_bytes)


class DeviceBackend(KernelBackend[DevicePlanes]):
    """Copies on a stream of its own, through a buffer on the device, and returns when all bytes are there.

    For one thread at a time. What the pool's own stream does to the blocks is ordered by the caller: an event of it has
    fired before a call. Where `host` is pinned (see `pin`) bytes move at the speed of the bus.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None

    def _gather(self, planes: DevicePlanes, copies: Copies, host: Bytes) -> None:
        to = torch.from_numpy(host)
        for part in _parts(copies, planes.block_bytes):
            with self._on_stream():
                ids, stage = self._stage(planes, part)
                start = 0
                for plane in planes.planes:
                    stage[:, start : start + plane.shape[1]] = plane.index_select(0, ids)
                    start += plane.shape[1]
                for row, (_, offset) in zip(stage.view(torch.uint8), part, strict=True):
                    to[offset : offset + planes.block_bytes].copy_(row, non_blocking=True)

    def _scatter(self, planes: DevicePlanes, copies: Copies, host: Bytes) -> None:
        source = _readable(host)
        for part in _parts(copies, planes.block_bytes):
            with self._on_stream():
                ids, stage = self._stage(planes, part)
                for row, (_, offset) in zip(stage.view(torch.uint8), part, strict=True):
                    row.copy_(source[offset : offset + planes.block_bytes], non_blocking=True)
                start = 0
                for plane in planes.planes:
                    plane.index_copy_(0, ids, stage[:, start : start + plane.shape[1]])
                    start += plane.shape[1]

    def _stage(self, planes: DevicePlanes, part: Copies) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([block_id for block_id, _ in part], device=self._device)
        num_words = planes.block_bytes // planes.word.itemsize
        return ids, torch.empty((len(part), num_words), dtype=planes.word, device=self._device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What is done within has ended afterwards, so that buffers may go and slots be given on."""
        if self._stream is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self._stream))
            try:
                yield
            finally:
                self._stream.synchronize()


def pin(host: Bytes, device: torch.device) -> bool:
    """Lock a mapping for the device's copies, seconds for tens of gigabytes; False where the driver refuses, so that
    copies are slower. Until `unpin`, which must come before the mapping ends."""
    cuda: Any = torch.cuda
    with cuda.device(device):  # a thread begins with the first device, and would take memory there
        for start, num_bytes in _pieces(host):
            if int(cuda.cudart().cudaHostRegister(host.ctypes.data + start, num_bytes, 0)) != 0:
                for before, _ in _pieces(host[:start]):
                    cuda.cudart().cudaHostUnregister(host.ctypes.data + before)
                _clear_error(device)
                return False
    return True


def unpin(host: Bytes, device: torch.device) -> None:
    """What `pin` locked. No copy is under way."""
    cuda: Any = torch.cuda
    with cuda.device(device):
        for start, _ in _pieces(host):
            cuda.cudart().cudaHostUnregister(host.ctypes.data + start)


def _pieces(host: Bytes) -> Iterator[tuple[int, int]]:
    return ((start, min(REGISTER_BYTES, host.size - start)) for start in range(0, host.size, REGISTER_BYTES))


def _clear_error(device: torch.device) -> None:
    """A refusal is kept as the thread's last error, which the next launch would be blamed for."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return


def _parts(copies: Copies, block_bytes: int) -> Iterator[Copies]:
    step = max(1, STAGE_BYTES // block_bytes)
    return (copies[start : start + step] for start in range(0, len(copies), step))


def _readable(host: Bytes) -> torch.Tensor:
    """To be read only: torch warns of arrays that must not be written, and has no such tensors."""
    if host.flags.writeable:
        return torch.from_numpy(host)
    interface = dict(host.__array_interface__, data=(host.ctypes.data, False))
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface)))


def _byte_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """[num_blocks, bytes of a block]."""
    if tensor.layout != torch.strided or tensor.ndim == 0 or not tensor.numel():
        raise KernelError(f"{name} is a {tensor.layout} tensor of shape {tuple(tensor.shape)}, not [num_blocks, ...]")
    blocks = tensor.detach()
    if not blocks[0].is_contiguous():
        raise KernelError(f"{name} has segments that are not contiguous: strides {tensor.stride()}")
    num_elements = blocks[0].numel()
    stride = blocks.stride(0) if blocks.shape[0] > 1 else num_elements
    if stride < num_elements:
        raise KernelError(f"{name} has a block stride of {stride} elements, less than a segment of {num_elements}")
    return blocks.as_strided((blocks.shape[0], num_elements), (stride, 1)).view(torch.uint8)
