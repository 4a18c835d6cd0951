"""The back end for pools on a device, beside the cases of all: its buffer, its words, what its planes refuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_kernels import KernelError, device
from kvtier_kernels.device import DeviceBackend, DevicePlanes
from kvtier_kernels.testing import (
    SLOT_ORDERS,
    Pool,
    PoolShape,
    host_for,
    id_lists,
    pool_shapes,
    slot_offsets,
    verify_round_trip,
)

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


def planes_of(arrays: Sequence[Any]) -> DevicePlanes:
    return DevicePlanes([torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in arrays])


@pytest.mark.parametrize("stage_blocks", [1, 2])
@pytest.mark.parametrize("shape", list(pool_shapes()), ids=str)
def test_blocks_go_through_a_buffer_of_any_size(
    shape: PoolShape, stage_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, backend = Pool(shape, view=planes_of), DeviceBackend(CPU)
    monkeypatch.setattr(device, "STAGE_BYTES", stage_blocks * pool.block_bytes)
    block_ids = id_lists(shape.num_blocks)["holes" if shape.num_blocks > 1 else "all"]
    for order in SLOT_ORDERS:
        verify_round_trip(backend, pool, block_ids, slot_offsets(order, len(block_ids), pool.block_bytes))


@pytest.mark.parametrize(
    ("segment_bytes", "word"), [(48, torch.int64), (12, torch.int32), (6, torch.int16), (7, torch.uint8)]
)
def test_words_are_as_wide_as_sizes_allow(segment_bytes: int, word: torch.dtype) -> None:
    planes = DevicePlanes([torch.zeros(4, segment_bytes, dtype=torch.uint8) for _ in range(2)])
    assert (planes.word, planes.block_bytes, planes.num_blocks) == (word, 2 * segment_bytes, 4)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "at least one plane"),
        ([torch.zeros(4, 8), torch.zeros(5, 8)], "plane 1 has 5 blocks"),
        ([torch.zeros(4, 8, 2)[:, :, 0]], "plane 0 has segments that are not contiguous"),
        ([torch.zeros(1, 8).expand(4, 8)], "plane 0 has a block stride of 0"),
        ([torch.zeros(0, 8)], "plane 0"),
        ([torch.zeros(4, 8).to_sparse()], "plane 0 is a torch.sparse_coo"),
        ([torch.zeros(())], "plane 0"),
    ],
)
def test_what_is_no_pool_is_refused(tensors: list[torch.Tensor], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        DevicePlanes(tensors)


class Driver:
    """What `pin` asks of CUDA; refuses the call with this number."""

    def __init__(self, refuses: int | None) -> None:
        self.refuses = refuses
        self.calls: list[tuple[int, int, int]] = []
        self.ended: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, num_bytes, flags))
        return 1 if len(self.calls) - 1 == self.refuses else 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.ended.append(address)


@pytest.mark.parametrize(("refuses", "is_pinned", "num_calls"), [(None, True, 3), (1, False, 2)])
def test_memory_is_pinned_piece_by_piece(
    refuses: int | None, is_pinned: bool, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, host = Driver(refuses), np.zeros(2500, np.uint8)
    monkeypatch.setattr(device, "REGISTER_BYTES", 1000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert device.pin(host, torch.device("cuda:1")) is is_pinned
    start = host.ctypes.data
    assert driver.calls == [(start, 1000, 0), (start + 1000, 1000, 0), (start + 2000, 500, 0)][:num_calls]
    if is_pinned:
        device.unpin(host, torch.device("cuda:1"))
    assert driver.ended == ([start, start + 1000, start + 2000] if is_pinned else [start])


@needs_cuda
def test_a_pool_on_a_gpu_keeps_every_byte() -> None:
    cuda = torch.device("cuda")
    pool = [torch.randint(0, 255, (9, 4096), dtype=torch.uint8, device=cuda) for _ in range(6)]
    before = [plane.clone() for plane in pool]
    planes, backend = DevicePlanes(pool), DeviceBackend(cuda)
    host = host_for(4, planes.block_bytes)
    assert device.pin(host, cuda)
    offsets = slot_offsets("scattered", 4, planes.block_bytes)
    backend.gather(planes, [1, 3, 5, 7], host, offsets)
    for plane in pool:
        plane.zero_()
    torch.cuda.synchronize()
    backend.scatter(planes, [1, 3, 5, 7], host, offsets)
    for plane, was in zip(pool, before, strict=True):
        assert torch.equal(plane[[1, 3, 5, 7]], was[[1, 3, 5, 7]])
        assert not plane[[0, 2, 4, 6, 8]].any()
