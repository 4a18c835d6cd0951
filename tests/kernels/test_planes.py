"""What BlockPlanes makes of foreign arrays, and what it refuses."""

import mmap
import re
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_kernels import BlockPlanes, KernelError, get_backend
from kvtier_kernels.runs import EvenRun, UnevenRun


def engine_pool(dtype: torch.dtype) -> torch.Tensor:
    """[layers, K/V, blocks, tokens, heads, head dim]"""
    size = (2, 2, 5, 4, 3, 8)
    return torch.arange(2 * 2 * 5 * 4 * 3 * 8, dtype=torch.float32).reshape(size).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_engine_pool_of_torch(dtype: torch.dtype) -> None:
    pool = engine_pool(dtype)
    planes = BlockPlanes.from_arrays([pool[layer, kv] for layer in range(2) for kv in range(2)])
    item = dtype.itemsize
    assert (planes.num_planes, planes.num_blocks, planes.block_bytes) == (4, 5, 4 * 96 * item)
    assert planes.segment_bytes == (96 * item,) * 4
    host = np.zeros(planes.block_bytes, np.uint8)
    get_backend("numpy").gather(planes, [3], host, [0])
    assert host.tobytes() == pool[:, :, 3].contiguous().view(torch.uint8).numpy().tobytes()


def test_planes_are_views_that_keep_the_pool_alive() -> None:
    pool = torch.zeros(3, 4, 8, requires_grad=True)
    planes = BlockPlanes.from_arrays([pool.detach()[layer] for layer in range(3)])
    with torch.no_grad():
        pool[2, 1] = 1
    del pool
    assert planes.planes[2][1].view(np.float32).tolist() == [1.0] * 8
    assert not planes.planes[2][0].any()


def test_block_dim() -> None:
    pool = np.arange(2 * 7 * 4, dtype=np.int32).reshape(2, 7, 4)
    planes = BlockPlanes.from_arrays([pool[:1], pool[1:]], block_dim=1)
    assert (planes.num_blocks, planes.segment_bytes) == (7, (16, 16))
    assert planes.planes[1][6].view(np.int32).tolist() == pool[1, 6].tolist()
    assert BlockPlanes.from_arrays([pool[:1]], block_dim=-2).num_blocks == 7


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 1), (1, 3), (5, 1, 2, 1)])
@pytest.mark.parametrize("library", [np, torch])
def test_small_and_single_dimensions(shape: tuple[int, ...], library: Any) -> None:
    array = library.ones((*shape, 2))[..., 0].reshape(shape) if len(shape) == 1 else library.ones(shape)
    planes = BlockPlanes.from_arrays([array])
    assert planes.planes[0].shape == (shape[0], array[0].size * 8 if library is np else array[0].numel() * 4)


class Test3d:
    def test_view_of_words(self) -> None:
        pool = np.arange(3 * 4 * 16, dtype=np.uint8).reshape(3, 4, 16)
        view = BlockPlanes.from_arrays(list(pool)).as_3d()
        assert view is not None
        assert view.dtype == np.int64
        assert view.shape == (3, 4, 2)
        assert view.tobytes() == pool.tobytes()
        view[2, 3] = -1
        assert pool[2, 3].tolist() == [255] * 16

    def test_view_of_bytes(self) -> None:
        pool = np.zeros((3, 4, 12), np.uint8)
        view = BlockPlanes.from_arrays(list(pool)).as_3d()
        assert view is not None
        assert view.dtype == np.uint8
        assert view.shape == (3, 4, 12)
        shifted = np.zeros(3 * 4 * 16 + 4, np.uint8)[4:].reshape(3, 4, 16)
        view = BlockPlanes.from_arrays(list(shifted)).as_3d()
        assert view is not None
        assert view.dtype == np.uint8

    def test_tensors_and_mappings_that_share_a_storage(self) -> None:
        pool = torch.zeros(2, 3, 8)
        assert BlockPlanes.from_arrays([pool[0], pool[1]]).as_3d() is not None
        mapping = mmap.mmap(-1, 4096)
        halves = [np.frombuffer(mapping, np.uint8, 2048, offset).reshape(4, 512) for offset in (0, 2048)]
        assert BlockPlanes.from_arrays(halves).as_3d() is not None

    @pytest.mark.parametrize("order", [(0, 1, 3), (2, 1, 0)])
    def test_unevenly_spaced_planes_have_none(self, order: tuple[int, ...]) -> None:
        pool = np.zeros((4, 5, 16), np.uint8)
        planes = BlockPlanes.from_arrays([pool[index] for index in order])
        assert planes.as_3d() is None
        assert isinstance(planes.runs[0], UnevenRun)

    def test_planes_of_unequal_block_strides_have_none(self) -> None:
        storage = np.arange(96, dtype=np.uint8)
        planes = BlockPlanes.from_arrays([storage[:64].reshape(4, 16)[:, :8], storage[64:].reshape(4, 8)])
        assert planes.as_3d() is None
        host = np.zeros(16, np.uint8)
        get_backend("numpy").gather(planes, [3], host, [0])
        assert host.tolist() == [*range(48, 56), *range(88, 96)]

    def test_the_stride_of_a_single_block_means_nothing(self) -> None:
        pool = np.zeros((2, 1, 8), np.uint8)
        assert BlockPlanes.from_arrays([pool[0], pool[1, ::-1]]).as_3d() is not None

    def test_separate_or_unequal_planes_have_none(self) -> None:
        assert BlockPlanes.from_arrays([np.zeros((4, 16)), np.zeros((4, 16))]).as_3d() is None
        pool = np.zeros((4, 3), np.int32)
        assert BlockPlanes.from_arrays([pool[:, :1], pool[:, 1:]]).as_3d() is None


def test_planes_too_far_apart_for_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_kernels.runs._MAX_VIEW_BYTES", 0)
    arrays = [np.arange(index, index + 12, dtype=np.uint8).reshape(3, 4) for index in range(3)]
    planes = BlockPlanes.from_arrays(arrays)
    assert [type(run) for run in planes.runs] == [EvenRun] * 3
    host = np.zeros(12, np.uint8)
    get_backend("numpy").gather(planes, [1], host, [0])
    assert host.tolist() == [4, 5, 6, 7, 5, 6, 7, 8, 6, 7, 8, 9]


GOOD = np.zeros((4, 6), np.float32)


def read_only() -> Any:
    array = GOOD.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GOOD[:, ::2], "plane 1 has segments that are not contiguous: .*8"),
        (np.zeros((4, 6, 2))[:, :, :1], "plane 1 has segments that are not contiguous"),
        (torch.zeros(6, 4).T, "plane 1 has segments that are not contiguous: .*16"),
        (np.zeros((5, 6)), "plane 1 has 5 blocks, plane 0 has 4"),
        (torch.zeros(4, 6, device="meta"), "plane 1 is a .* tensor on meta"),
        (torch.zeros(4, 6).to_sparse(), "plane 1 is a torch.sparse_coo tensor"),
        (GOOD.tolist(), "plane 1 is a list"),
        (read_only(), "plane 1 is read-only"),
        (np.zeros((4, 0)), "plane 1 is empty"),
        (np.zeros(()), "plane 1 has 0 dimensions, so no block_dim 0"),
        (torch.zeros(()), "plane 1 has 0 dimensions, so no block_dim 0"),
        (torch.zeros(1, 6).expand(4, 6), "plane 1 has a block stride of 0 bytes, less than a segment of 24"),
        (np.zeros((4, 6))[::-1], "plane 1 has a block stride of -48 bytes"),
        (GOOD, "plane 1 is the same memory as plane 0"),
        (np.zeros((4, 6), object), "plane 1 is an array of object, which holds references"),
        (np.zeros((4, 6), [("a", "i4"), ("b", "O")]), "plane 1 is an array of .*holds references"),
        (np.zeros((4, 6), "V0"), "plane 1 is empty"),
        (torch.zeros(4, 6, dtype=torch.complex64).conj(), "plane 1 is a nested, conjugated or negated view"),
        (torch._neg_view(torch.zeros(4, 6)), "plane 1 is a nested, conjugated or negated view"),
        (torch._neg_view(torch.zeros(4, 6, dtype=torch.uint8)), "plane 1 is a nested, conjugated or negated view"),
    ],
)
def test_refused_planes(bad: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        BlockPlanes.from_arrays([GOOD, bad])


@pytest.mark.parametrize("good", [GOOD, torch.zeros(4, 6)])
@pytest.mark.parametrize("block_dim", ["x", None, 0.0, True, 2, -3, 10**30, float("nan")])
def test_refused_block_dim(good: Any, block_dim: Any) -> None:
    with pytest.raises(KernelError, match=rf"plane 0 .*block_dim.* {re.escape(repr(block_dim))}$"):
        BlockPlanes.from_arrays([good], block_dim)


@pytest.mark.parametrize("arrays", [None, 5])
def test_refused_arrays(arrays: Any) -> None:
    with pytest.raises(KernelError, match=r"arrays is a (NoneType|int), not a sequence"):
        BlockPlanes.from_arrays(arrays)


def test_no_planes() -> None:
    with pytest.raises(KernelError, match="at least one plane"):
        BlockPlanes.from_arrays([])
